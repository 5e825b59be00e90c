"""Was it worth it? Decode prompts with a drafter and without one, and say what a round costs and must bring."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hf_specgen.drafters.prompt_lookup import PromptLookup
from hf_specgen.drafters.small_model import SmallModel
from hf_specgen.drafters.with_lookup import WithLookup
from hf_specgen.drafting.drafter import Drafter
from hf_specgen.drafting.learned import LearnedDrafter
from hf_specgen.generate import SpeculativeDecoding
from hf_specgen.measure.decode import Output, greedy_config, one_row
from hf_specgen.measure.decode import decode as decode_once
from hf_specgen.measure.machine import Stopwatch, Timing
from hf_specgen.models.wrappers import input_device
from hf_specgen.round.stats import RowStats

PLAIN = "plain"
LOOKUP = "prompt lookup"
FIXED = "drafter, fixed length"
OURS = "drafter"
COMBINED = "drafter with prompt lookup"
_WARM_UP = 8  # tokens that are written before the clock counts

Drafters = Mapping[str, Drafter | None]
Progress = Callable[[int, int, str], None]


@dataclass
class DecodingTotals:
    """Hold what one way to decode came to: greedy, one prompt at a time, seconds of the whole calls."""

    tokens: int = 0
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    same: int = 0
    total: RowStats = field(default_factory=RowStats)

    def add(self, output: Output, timing: Timing, same: bool) -> None:
        """Count one call; ``same``: its text is plain decoding's."""
        self.tokens += len(output.rows[0])
        self.seconds += timing.wall
        self.same += same
        if output.stats is not None:
            self.total.merge(output.stats.total)
            self.prefill_seconds += output.stats.prefill_seconds

    @property
    def step_seconds(self) -> float:
        """Return what a round costs once the prompt is read; of plain decoding, a token."""
        rounds = self.total.num_rounds or self.tokens
        return (self.seconds - self.prefill_seconds) / max(1, rounds)


@dataclass(frozen=True)
class Worth:
    """Hold figures of one machine, these prompts, one run.

    ``round_cost``: a round of ``num_tokens`` drafted tokens in plain steps, and so the tokens per round that break
    even; ``tokens_per_round``: what was reached there; ``before``: by the untrained drafter. ``speedup``: plain time
    over the drafter's as users run it (its lengths follow what pays: ``used_tokens_per_round``), ``combined_speedup``
    with prompt lookup beside it, ``lookup_speedup`` by prompt lookup alone, which needs no training. ``same``: texts
    that are plain greedy decoding's own.
    """

    prompts: int
    max_new_tokens: int
    num_tokens: int
    dtype: str
    before: float | None
    tokens_per_round: float
    rates: list[float]
    round_cost: float
    speedup: float
    lookup_speedup: float
    lookup_tokens_per_round: float
    plain_tokens_per_second: float
    same: int
    used_tokens_per_round: float
    combined_speedup: float
    combined_tokens_per_round: float

    @property
    def pays(self) -> bool:
        """Tell whether the drafter, alone or with prompt lookup, beats plain decoding and prompt lookup alone."""
        return max(self.speedup, self.combined_speedup) > max(1.0, self.lookup_speedup)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {**asdict(self), "pays": self.pays}

    def lines(self) -> list[str]:
        """Return the figures in words."""
        before = "" if self.before is None else f" ({self.before:.2f} before training)"
        gain = self.tokens_per_round / self.round_cost
        rows = {
            "the drafter": (self.speedup, self.used_tokens_per_round),
            "the drafter with prompt lookup": (self.combined_speedup, self.combined_tokens_per_round),
            "prompt lookup alone": (self.lookup_speedup, self.lookup_tokens_per_round),
        }
        exact = "" if self.dtype == "float32" else f" ({self.dtype} rounding may part the others; in float32 none does)"
        return [
            f"decoded {self.prompts} held-out prompts, {self.max_new_tokens} new tokens each, greedy, one at a time, "
            f"{self.dtype}; plain generate() writes {self.plain_tokens_per_second:.1f} tokens/s:",
            *(
                f"  {name:<31} {speed:.2f}x its speed, {tokens:.2f} tokens a round"
                for name, (speed, tokens) in rows.items()
            ),
            f"{self.same} of {self.prompts} texts are token by token those of plain decoding{exact}",
            f"with always {self.num_tokens} drafted: {self.tokens_per_round:.2f} tokens a round{before}; such a round "
            f"costs {self.round_cost:.2f} plain steps, so {self.round_cost:.2f} tokens a round break even and "
            f"{self.tokens_per_round:.2f} make {gain:.2f}x",
            self.verdict(),
        ]

    def verdict(self) -> str:
        """Say whether training was worth it, and what to use."""
        best = max(self.speedup, self.combined_speedup)
        if self.pays:
            how = " with prompt lookup: WithLookup(drafter)" if self.combined_speedup > self.speedup else ""
            return f"worth it: {best:.2f}x over plain decoding{how}"
        if self.lookup_speedup > 1:
            return (
                f"not worth it here: {best:.2f}x, and prompt lookup gives {self.lookup_speedup:.2f}x without training"
            )
        return f"not worth it here: {best:.2f}x over plain decoding"


def is_sharded(*models: torch.nn.Module) -> bool:
    """Tell whether a model is in parts, so that one process alone cannot decode with it."""
    return any(isinstance(parameter, DTensor) for model in models for parameter in model.parameters())


def live(drafter: Any, target: PreTrainedModel, num_tokens: int | None = None) -> Drafter:
    """Copy a drafter as it is now, in the target's place and dtype; ``num_tokens`` makes it a chain of that length."""
    place = input_device(target)
    made = copy.deepcopy(drafter).eval().requires_grad_(False).to(place, target.dtype)
    unwrap(made)
    if not isinstance(made, LearnedDrafter):
        return SmallModel(made, num_tokens)
    if num_tokens is not None:
        made.config.tree = "chain"
        made.config.num_tokens = num_tokens
    return made


def unwrap(model: torch.nn.Module) -> None:
    """Take off what accelerate puts around a model's forward: autocast, and outputs in float32."""
    notes = model.__dict__
    notes.pop("_is_accelerate_prepared", None)
    if notes.pop("_original_forward", None) is not None:
        notes.pop("forward", None)


@torch.no_grad()
def decode(
    target: PreTrainedModel,
    drafters: Drafters,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    progress: Progress | None = None,
) -> dict[str, DecodingTotals]:
    """Decode every prompt with every drafter, taking turns; None is plain ``generate()``, and comes first."""
    totals = {name: DecodingTotals() for name in drafters}
    loops = {name: SpeculativeDecoding(drafter) if drafter else None for name, drafter in drafters.items()}
    short = greedy_config(target, min(_WARM_UP, max_new_tokens))
    for loop in loops.values():
        decode_once(target, one_row(target, prompts[0]), loop, generation_config=short)
    config = greedy_config(target, max_new_tokens)
    for done, prompt in enumerate(prompts, 1):
        inputs = one_row(target, prompt)
        plain: list[int] | None = None
        for name, loop in loops.items():
            watch = Stopwatch(input_device(target))
            with watch:
                output = decode_once(target, inputs, loop, generation_config=config)
            text = output.rows[0]
            if output.stats is None:
                plain = text
            totals[name].add(output, watch.timing, same=text == plain)
        if progress is not None:
            progress(done, len(prompts), "")
    return totals


def acceptance(
    drafter: Any,
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    num_tokens: int,
    progress: Progress | None = None,
) -> float:
    """Return tokens per round with a fixed draft length."""
    fixed = {FIXED: live(drafter, target, num_tokens)}
    return decode(target, fixed, prompts, max_new_tokens, progress)[FIXED].total.tokens_per_round


def weigh(
    drafter: Any,
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    num_tokens: int,
    progress: Progress | None = None,
    before: float | None = None,
) -> Worth:
    """Measure a drafter against plain decoding and prompt lookup, and with it; ``before``: tokens a round untrained."""
    drafters: Drafters = {
        PLAIN: None,
        LOOKUP: PromptLookup(),
        FIXED: live(drafter, target, num_tokens),
        OURS: live(drafter, target),
        COMBINED: WithLookup(live(drafter, target)),
    }
    totals = decode(target, drafters, prompts, max_new_tokens, progress)
    plain, fixed, ours, lookup, both = (totals[name] for name in (PLAIN, FIXED, OURS, LOOKUP, COMBINED))
    plain.prefill_seconds = fixed.prefill_seconds  # the same prompts are read, and plain generate() does not say
    return Worth(
        prompts=len(prompts),
        max_new_tokens=max_new_tokens,
        num_tokens=num_tokens,
        dtype=str(target.dtype).removeprefix("torch."),
        before=before,
        tokens_per_round=fixed.total.tokens_per_round,
        rates=fixed.total.acceptance_rates,
        round_cost=fixed.step_seconds / max(1e-9, plain.step_seconds),
        speedup=plain.seconds / max(1e-9, ours.seconds),
        lookup_speedup=plain.seconds / max(1e-9, lookup.seconds),
        lookup_tokens_per_round=lookup.total.tokens_per_round,
        plain_tokens_per_second=plain.tokens / max(1e-9, plain.seconds),
        same=ours.same,
        used_tokens_per_round=ours.total.tokens_per_round,
        combined_speedup=plain.seconds / max(1e-9, both.seconds),
        combined_tokens_per_round=both.total.tokens_per_round,
    )
