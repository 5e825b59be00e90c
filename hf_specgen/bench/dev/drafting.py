"""Time what learned drafters cost beside the target: ``python -m hf_specgen.bench.dev.drafting``.

Weights are random and the sizes SmolLM2-135M's, so nothing is accepted and every round drafts anew. What is timed is
``propose`` and ``observe``, with the layers and the heads inside them, beside a step of plain ``generate()``. On one
thread (OMP_NUM_THREADS=1) that thread's own time is taken, so other programs may run.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hf_specgen.bench.report import write_atomic
from hf_specgen.checkpoints.config import DrafterConfig
from hf_specgen.drafting.drafter import Call, Drafter, Reads, Session
from hf_specgen.drafting.learned import LearnedDrafter
from hf_specgen.errors import SpecGenError
from hf_specgen.generate import SpeculativeDecoding
from hf_specgen.loading import drafter_class
from hf_specgen.measure.machine import describe_machine
from hf_specgen.round.records import Draft, Round

SCHEMA = "hf_specgen.bench.dev.drafting/1"
LAYERS = "layers"
HEADS = "heads"
# which methods of a drafter are clocked, and as what
CLOCKED = {"medusa": {"head": HEADS}, "eagle": {"step": LAYERS, "logits": HEADS}}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Geometry:
    """Hold the sizes of a target; the defaults are SmolLM2-135M's."""

    hidden: int = 576
    inner: int = 1536
    layers: int = 30
    heads: int = 9
    kv_heads: int = 3
    vocab: int = 49_152
    base: float = 100_000.0


@dataclass(frozen=True)
class DraftingCase:
    """Hold a drafter to time: ``kept`` ids (0: all) of its own head, or of the target's where it has none."""

    name: str
    method: str
    kept: int = 0
    own_head: bool = True
    tree: Any = "chain"


CASES = (
    DraftingCase("medusa, own heads", "medusa"),
    DraftingCase("medusa, the target's head", "medusa", own_head=False),
    DraftingCase("medusa, own heads, V / 4", "medusa", kept=12_288),
    DraftingCase("medusa, the target's head, V / 4", "medusa", kept=12_288, own_head=False),
    DraftingCase("eagle", "eagle", own_head=False),
    DraftingCase("eagle, V / 4", "eagle", kept=12_288, own_head=False),
    DraftingCase("eagle3", "eagle3"),
    DraftingCase("eagle3, V / 4", "eagle3", kept=12_288),
    DraftingCase(
        "eagle3, V / 4, dynamic 8 x 4, 24 nodes", "eagle3", 12_288, tree={"top_k": 8, "depth": 4, "nodes": 24}
    ),
)


@dataclass(frozen=True)
class DraftingPlan:
    """Hold how to measure: a chain of ``tokens``, behind prompts of ``context``, over ``rounds`` rounds."""

    geometry: Geometry = Geometry()
    tokens: int = 4
    batch: int = 1
    context: int = 128
    rounds: int = 24
    repeats: int = 5
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class DraftingCost:
    """Hold what a round of one drafter costs. Units: milliseconds; ``share`` is of a plain step.

    ``layers_ms`` and ``heads_ms`` are parts of ``draft_ms``; the rest is masks, tokens, the cache and Python.
    ``pass_ms`` is our own pass over one token, ``assumed`` the part of it that adaptive lengths take for a drafted one.
    """

    case: str
    step_ms: float
    pass_ms: float
    assumed: float
    draft_ms: float
    layers_ms: float
    heads_ms: float

    @property
    def share(self) -> float:
        """Return drafting's time over a plain step's."""
        return self.draft_ms / self.step_ms

    @property
    def rest_ms(self) -> float:
        """Return what is neither layers nor heads."""
        return self.draft_ms - self.layers_ms - self.heads_ms


class Clocked(Drafter):
    """Pass a drafter through and time every round; the first one, which reads the prompt, apart."""

    def __init__(self, inner: LearnedDrafter) -> None:
        self.inner = inner
        self.rounds: list[dict[str, float]] = []
        self.assumed = 0.0

    def reads(self, model: PreTrainedModel) -> Reads:
        """Return what the drafter reads."""
        return self.inner.reads(model)

    def begin(self, call: Call) -> ClockedSession:
        """Begin with no rounds."""
        self.rounds = []
        session = self.inner.begin(call)
        self.assumed = session.draft_cost
        return ClockedSession(self, session)

    @contextmanager
    def clocks(self, parts: dict[str, float]) -> Iterator[None]:
        """Time the drafter's layers and heads inside the block."""
        names = CLOCKED["medusa" if self.inner.method == "medusa" else "eagle"]
        methods = vars(type(self.inner))
        own = self.inner.__dict__
        try:
            for name, part in names.items():
                own[name] = _timed(methods[name].__get__(self.inner), parts, part)
            yield
        finally:
            for name in names:
                own.pop(name, None)


class ClockedSession(Session):
    """Time every round of a session."""

    def __init__(self, drafter: Clocked, session: Session) -> None:
        self.drafter = drafter
        self.session = session

    def propose(self, room: list[int]) -> Draft:
        """Time a proposal and its parts."""
        parts: dict[str, float] = {LAYERS: 0.0, HEADS: 0.0}
        with self.drafter.clocks(parts):
            begun = now()
            draft = self.session.propose(room)
            parts["all"] = now() - begun
        self.drafter.rounds.append(parts)
        return draft

    def observe(self, round: Round) -> None:
        """Time what is learned from a round."""
        _ = round.emitted  # the loop reads it from the device, drafter or not
        begun = now()
        self.session.observe(round)
        if self.drafter.rounds:
            self.drafter.rounds[-1]["all"] += now() - begun


def now() -> float:
    """Return seconds: of the wall, or of this thread where it does all the work."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def _timed(call: Callable[..., Any], parts: dict[str, float], part: str) -> Callable[..., Any]:
    def timed(*args: Any) -> Any:
        begun = now()
        found = call(*args)
        parts[part] += now() - begun
        return found

    return timed


def make_target(geometry: Geometry, dtype: torch.dtype) -> LlamaForCausalLM:
    """Build a random target with tied embeddings."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=geometry.hidden,
        intermediate_size=geometry.inner,
        num_hidden_layers=geometry.layers,
        num_attention_heads=geometry.heads,
        num_key_value_heads=geometry.kv_heads,
        vocab_size=geometry.vocab,
        rope_parameters={"rope_type": "default", "rope_theta": geometry.base},
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    )
    model: LlamaForCausalLM = LlamaForCausalLM._from_config(config, dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def make_drafter(case: DraftingCase, plan: DraftingPlan) -> LearnedDrafter:
    """Build a random drafter of one layer, or of one block a head."""
    sizes = plan.geometry
    layers = sizes.layers
    own = {"medusa": {"num_heads": plan.tokens}, "eagle3": {"aux_layer_boundaries": [2, layers // 2, layers - 3]}}
    config = DrafterConfig(
        case.method,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.inner,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        vocab_size=sizes.vocab,
        draft_vocab_size=case.kept or None,
        own_head=case.own_head,
        **own.get(case.method, {}),
        tree=case.tree,
        num_tokens=plan.tokens,
    )
    torch.manual_seed(1)
    return drafter_class(case.method)(config).to(DTYPES[plan.dtype]).eval()


@torch.no_grad()
def measure(plan: DraftingPlan, cases: Sequence[DraftingCase] = CASES) -> list[DraftingCost]:
    """Time plain steps and every drafter in turns; the median round of each run, the best run of each."""
    target = make_target(plan.geometry, DTYPES[plan.dtype])
    source = torch.Generator().manual_seed(0)
    ids = torch.randint(1, plan.geometry.vocab, (plan.batch, plan.context), generator=source)
    drafters = [Clocked(make_drafter(case, plan)) for case in cases]
    steps: list[float] = []
    passes: list[float] = []
    found: list[list[dict[str, float]]] = [[] for _ in cases]
    for _ in range(plan.repeats + 1):
        steps.append(_step(target, ids, plan.rounds))
        passes.append(_step(target, ids, plan.rounds, custom_generate=SpeculativeDecoding(None)))
        for drafter, runs in zip(drafters, found, strict=True):
            _generate(target, ids, plan.rounds + 6, custom_generate=SpeculativeDecoding(drafter))
            settled = [round for round in drafter.rounds[1:] if round["all"] > 0][: plan.rounds]
            runs.append({part: statistics.median(round[part] for round in settled) for part in settled[0]})
    step = min(steps[1:])
    own = min(passes[1:])
    best = [min(runs[1:], key=lambda run: run["all"]) for runs in found]
    return [
        DraftingCost(
            case.name, 1e3 * step, 1e3 * own, drafter.assumed, *(1e3 * run[part] for part in ("all", LAYERS, HEADS))
        )
        for case, drafter, run in zip(cases, drafters, best, strict=True)
    ]


def _step(target: PreTrainedModel, ids: torch.Tensor, tokens: int, **settings: Any) -> float:
    """Return the seconds of one step of plain decoding."""
    times = [_generate(target, ids, count, **settings) for count in (1, tokens + 1)]
    return (times[1] - times[0]) / tokens


def _generate(target: PreTrainedModel, ids: torch.Tensor, tokens: int, **settings: Any) -> float:
    begun = now()
    target.generate(ids, max_new_tokens=tokens, do_sample=False, **settings)
    return now() - begun


def table(rows: Sequence[DraftingCost], plan: DraftingPlan) -> Table:
    """Lay the measurements out."""
    title = (
        f"Drafting {plan.tokens} tokens, batch {plan.batch}, {plan.dtype}; a plain step {rows[0].step_ms:.1f} ms, "
        f"a pass of ours {rows[0].pass_ms:.1f}"
    )
    found = Table(title=title)
    for head in ("drafter", "ms a round", "of a step", "layers", "heads", "rest", "a token", "assumed"):
        named = head == "drafter"
        found.add_column(head, justify="left" if named else "right", no_wrap=named)
    for row in rows:
        parts = (row.layers_ms, row.heads_ms, row.rest_ms)
        token = row.draft_ms / plan.tokens / row.pass_ms
        shares = (f"{token:.3f}", f"{row.assumed:.3f}")
        found.add_row(row.case, f"{row.draft_ms:.2f}", f"{row.share:.0%}", *(f"{part:.2f}" for part in parts), *shares)
    return found


def bench(
    batch: Annotated[int, typer.Option(min=1, help="Rows.")] = 1,
    tokens: Annotated[int, typer.Option(min=1, help="Length of the chains.")] = 4,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds of a run.")] = 24,
    repeats: Annotated[int, typer.Option(min=1, help="Runs, taking turns.")] = 5,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    only: Annotated[str, typer.Option(help="Only drafters with this in their name.")] = "",
    out: Annotated[Path | None, typer.Option(help="Write the figures into this file as JSON.")] = None,
) -> None:
    """Time the drafting of learned drafters on SmolLM2's sizes."""
    if dtype not in DTYPES:
        raise SpecGenError(f"--dtype {dtype}: one of {', '.join(DTYPES)} is required.")
    cases = [case for case in CASES if only in case.name]
    if not cases:
        raise SpecGenError(f"--only {only}: no drafter has that in its name. Known: {[c.name for c in CASES]}.")
    plan = replace(DraftingPlan(), batch=batch, tokens=tokens, rounds=rounds, repeats=repeats, dtype=dtype)
    rows = measure(plan, cases)
    Console().print(table(rows, plan))
    if out is not None:
        lines = [{**asdict(row), "share": row.share} for row in rows]
        record = {"schema": SCHEMA, "machine": describe_machine(), "plan": asdict(plan), "lines": lines}
        write_atomic(out, (json.dumps(record, indent=1) + "\n").encode())


def main() -> None:
    """Run the program, with one clean message for what the user can mend."""
    try:
        typer.run(bench)
    except (SpecGenError, OSError) as error:
        typer.secho(f"Error: {error}", fg="red", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
