"""Measure whole training steps with the chunked loss and with a plain one: ``python -m hf_specgen.bench.dev.steps``.

A step is the target's pass, the drafter's, loss, backward pass and AdamW. Every measurement is a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from hf_specgen.bench.dev.drafting import Geometry, make_target
from hf_specgen.bench.dev.losses import CLOSE, OURS, PLAIN, memory_of, peak_of
from hf_specgen.errors import SpecGenError
from hf_specgen.trainers.frozen import FrozenTarget, prepared
from hf_specgen.trainers.losses import HeadLoss, Objective
from hf_specgen.trainers.warm_start import new_drafter

TINY = Geometry(hidden=32, inner=64, layers=6, heads=2, kv_heads=1, vocab=64)


@dataclass(frozen=True)
class StepCase:
    """Hold a step to measure: ``rows`` texts of ``length`` tokens, ``unroll`` drafted tokens behind every place.

    ``chunk``: rows of our loss at a time, at most.
    """

    method: str
    geometry: Geometry = field(default_factory=Geometry)
    unroll: int = 1
    rows: int = 8
    length: int = 512
    repeats: int = 2
    chunk: int = 1024


@dataclass(frozen=True)
class StepCost:
    """Hold what steps took: bytes beyond the weights, the best time of several, and what the first one came to."""

    case: StepCase
    peak: int
    seconds: float
    cpu_seconds: float
    loss: float
    gradient: float


def plain_objective(  # noqa: PLR0913 - called as ``Objective`` is
    states: Tensor,
    weight: Tensor,
    teacher_states: Tensor,
    teacher_weight: Tensor,
    weights: Tensor,
    labels: Tensor | None = None,
    rows: Tensor | None = None,
    index: Tensor | None = None,
) -> HeadLoss:
    """Compare two heads as one would write it down: all logits in float32, kept by autograd."""
    seen = teacher_states if index is None else teacher_states[index]
    with torch.no_grad():
        log_p = (seen @ teacher_weight.T).float().log_softmax(-1)
    log_q = (states @ weight.T).float().log_softmax(-1)
    value = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    hits = log_q.detach().argmax(-1) == log_p.argmax(-1)
    nothing = torch.zeros_like(value.detach())
    return HeadLoss((value * weights).sum(), hits, nothing, hits, nothing)


def make_step(case: StepCase) -> tuple[Callable[[], Tensor], Callable[[], float]]:
    """Build target and drafter. Returns: a training step that returns its loss, and the head's gradient norm."""
    target = prepared(make_target(case.geometry, torch.bfloat16), torch.device("cpu"))
    drafter, _ = new_drafter("eagle3", target)
    drafter.attach(target)
    drafter.train()
    frozen = FrozenTarget(target, drafter.hidden_layers, torch.device("cpu"))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, case.geometry.vocab, (case.rows, case.length), generator=torch.Generator().manual_seed(0))
    objective: Any = Objective(chunk=case.chunk) if case.method == OURS else plain_objective
    head = drafter.get_submodule("lm_head").get_parameter("weight")
    norms: list[float] = []

    def step() -> Tensor:
        optimizer.zero_grad()
        features, last = frozen.read({"input_ids": ids})
        with torch.autocast("cpu", torch.bfloat16):
            mask = torch.ones_like(ids, dtype=torch.bool)
            found = drafter(ids, features, last, mask, objective, frozen.head, steps=case.unroll)
        loss: Tensor = found.loss_sum / ids.numel()
        loss.backward()
        if not norms:
            assert head.grad is not None
            norms.append(float(head.grad.norm()))
        optimizer.step()
        return loss.detach()

    return step, lambda: norms[0]


def measure_here(case: StepCase) -> StepCost:
    """Measure in this process, which must be a fresh one for its peak to mean something."""
    make_step(replace(case, geometry=TINY, rows=1, length=8))[0]()  # libraries take memory at their first call
    step, norm = make_step(case)
    before = memory_of("cpu")
    times = []
    losses = []
    for _ in range(case.repeats):
        wall = time.perf_counter()
        cpu = time.process_time()
        losses.append(float(step()))
        times.append((time.perf_counter() - wall, time.process_time() - cpu))
    walls, cpus = zip(*times, strict=True)
    return StepCost(case, peak_of("cpu") - before, min(walls), min(cpus), losses[0], norm())


def measure(case: StepCase) -> StepCost:
    """Measure in a new process. Raises: ``SpecGenError`` when it fails."""
    command = [sys.executable, "-m", "hf_specgen.bench.dev.steps", "--one", json.dumps(asdict(case))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SpecGenError(f"{case} failed with code {done.returncode}: {done.stderr[-2000:]}")
    return StepCost(case, **json.loads(done.stdout.splitlines()[-1]))


def check_equal(one: StepCost, other: StepCost) -> None:
    """Raise ``SpecGenError`` unless both mean the same loss and gradient."""
    for name in ("loss", "gradient"):
        ours = asdict(one)[name]
        theirs = asdict(other)[name]
        if abs(ours - theirs) > CLOSE["bfloat16"] * max(abs(ours), abs(theirs)):
            raise SpecGenError(f"{one.case} and {other.case} differ in {name}: {ours} and {theirs}.")


def table(found: Sequence[StepCost]) -> Table:
    """Lay out the figures, each beside the plain way's, which comes first."""
    made = Table(title="whole training steps, beyond the weights")
    for name in ("unrolled", "loss", "peak MiB", "plain / peak", "s", "CPU s", "plain CPU / CPU"):
        made.add_column(name, justify="right", no_wrap=True)
    for line in found:
        base = next(other for other in found if other.case == replace(line.case, method=PLAIN))
        made.add_row(
            str(line.case.unroll),
            line.case.method,
            f"{line.peak / 2**20:.0f}",
            f"{base.peak / line.peak:.2f}",
            f"{line.seconds:.2f}",
            f"{line.cpu_seconds:.2f}",
            f"{base.cpu_seconds / line.cpu_seconds:.2f}",
        )
    return made


def command(
    quick: Annotated[bool, typer.Option(help="Small sizes: does everything work?")] = False,
    unroll: Annotated[list[int] | None, typer.Option(help="Drafted tokens behind every place.")] = None,
    rows: Annotated[int, typer.Option(min=1)] = 8,
    length: Annotated[int, typer.Option(min=3)] = 512,
    repeats: Annotated[int, typer.Option(min=1)] = 2,
    one: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure peak memory and time of EAGLE-3 training steps: SmolLM2-135M's sizes, bfloat16 target, autocast."""
    if one:
        given = json.loads(one)
        found = measure_here(StepCase(**{**given, "geometry": Geometry(**given["geometry"])}))
        print(json.dumps({name: value for name, value in asdict(found).items() if name != "case"}))
        return
    lines: list[StepCost] = []
    try:
        for steps in unroll or [1]:
            base = StepCase(PLAIN, TINY if quick else Geometry(), steps, rows, 16 if quick else length, repeats)
            lines += [measure(base), measure(replace(base, method=OURS))]
            check_equal(*lines[-2:])
    except SpecGenError as error:
        Console().print(f"[red]{error}")
        raise typer.Exit(1) from error
    Console(width=120).print(table(lines))


if __name__ == "__main__":
    typer.run(command)
