"""Measure the chunked losses beside the plain ones: ``python -m hf_specgen.bench.dev.losses``.

Every measurement is a process of its own, so that one's peak of memory is not another's, and all of them are held to
the same loss and the same gradients.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_specgen.bench.report import write_atomic
from hf_specgen.errors import SpecGenError
from hf_specgen.measure.machine import describe_machine
from hf_specgen.trainers.losses import FORMULAS, Objective

SCHEMA = "hf_specgen.bench.dev.losses/1"
PLAIN = "plain"
RECOMPUTED = "recomputed chunks"
OURS = "ours"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CLOSE = {"float32": 1e-3, "bfloat16": 5e-2}  # relative: sums of thousands of rows, in another order
QUICK = (256, 4_096, 32)


@dataclass(frozen=True)
class LossCase:
    """Hold one thing to measure: ``chunk`` rows at a time, 0 for all of them."""

    method: str
    kind: str = "kl"
    chunk: int = 0
    trained: bool = True
    dtype: str = "float32"
    tokens: int = 4096
    vocab: int = 49_152
    width: int = 576
    repeats: int = 3
    device: str = "cpu"

    @property
    def about(self) -> tuple[str, str, bool]:
        """Return what is the same for the methods that are compared."""
        return self.kind, self.dtype, self.trained


@dataclass(frozen=True)
class LossCost:
    """Hold what a loss and its backward pass took: beyond what is there before, and best of several.

    Units: bytes, seconds; ``cpu_seconds`` is the process's own time: others may share the cores.
    """

    case: LossCase
    peak: int
    seconds: float
    cpu_seconds: float
    loss: float
    by_states: float
    by_weight: float


def plain_loss(case: LossCase, states: Tensor, weight: Tensor, teacher: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    """Sum a loss as one would write it down."""
    with torch.no_grad():
        log_p = (teacher @ head.T).float().log_softmax(-1)
    log_q = (states @ weight.T).float().log_softmax(-1)
    return _VALUES[case.kind](log_p, log_q, labels).sum()


def _jsd(log_p: Tensor, log_q: Tensor, labels: Tensor) -> Tensor:
    p = log_p.exp()
    q = log_q.exp()
    log_m = ((p + q) / 2).log()
    return ((p * (log_p - log_m)).sum(-1) + (q * (log_q - log_m)).sum(-1)) / 2


_VALUES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "kl": lambda log_p, log_q, labels: torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(
        -1
    ),
    "rkl": lambda log_p, log_q, labels: (log_q.exp() * (log_q - log_p)).sum(-1),
    "tv": lambda log_p, log_q, labels: (log_p.exp() - log_q.exp()).abs().sum(-1) / 2,
    "lk": lambda log_p, log_q, labels: -torch.minimum(log_p.exp(), log_q.exp()).sum(-1).log(),
    "ce": lambda log_p, log_q, labels: -log_q.gather(1, labels[:, None])[:, 0],
    "jsd": _jsd,
}


def step(case: LossCase, inputs: Sequence[Tensor]) -> Tensor:
    """Run a loss and its backward pass. Returns: the loss."""
    states, weight, teacher, head, labels = inputs
    if case.method == OURS:
        weights = torch.ones(case.tokens, device=states.device)
        loss = Objective(case.kind, case.chunk)(states, weight, teacher, head, weights, labels=labels).loss_sum
    elif case.method == RECOMPUTED:
        parts = zip(states.split(case.chunk), teacher.split(case.chunk), labels.split(case.chunk), strict=True)
        losses = [
            checkpoint(plain_loss, case, state, weight, seen, head, label, use_reentrant=False)
            for state, seen, label in parts
        ]
        loss = torch.stack(losses).sum()
    else:
        loss = plain_loss(case, states, weight, teacher, head, labels)
    loss.backward()
    return loss.detach()


def make_inputs(case: LossCase) -> list[Tensor]:
    """Make a drafter's and a target's states and heads: alike, as after some training."""
    source = torch.Generator().manual_seed(0)
    scale = case.width**-0.5
    teacher = torch.randn(case.tokens, case.width, generator=source)
    head = torch.randn(case.vocab, case.width, generator=source) * 3 * scale
    states = teacher + 0.5 * torch.randn(case.tokens, case.width, generator=source)
    dtype = DTYPES[case.dtype]
    device = torch.device(case.device)
    labels = torch.randint(0, case.vocab, (case.tokens,), generator=source).to(device)
    made = [tensor.to(device, dtype) for tensor in (states, head, teacher, head.clone())]
    made[0].requires_grad_()
    made[1].requires_grad_(case.trained)
    return [*made, labels]


def measure_here(case: LossCase) -> LossCost:
    """Measure in this process, which must be a fresh one for its peak to mean something."""
    small = replace(case, tokens=8, vocab=64, width=16, chunk=4)
    step(small, make_inputs(small))  # libraries take their own memory at their first call
    inputs = make_inputs(case)
    states, weight, *_ = inputs
    times = []
    for number in range(case.repeats):
        states.grad = weight.grad = None
        before = memory_of(case.device)
        wall = time.perf_counter()
        cpu = time.process_time()
        loss = float(step(case, inputs))  # reads the device
        times.append((time.perf_counter() - wall, time.process_time() - cpu))
        if not number:
            peak = peak_of(case.device) - before
    norms = [float(tensor.grad.double().norm()) if tensor.grad is not None else 0.0 for tensor in (states, weight)]
    walls, cpus = zip(*times, strict=True)
    return LossCost(case, peak, min(walls), min(cpus), loss, *norms)


def memory_of(device: str) -> int:
    """Return the bytes in use, and start to look for a peak."""
    if device == "cpu":
        return _status("VmRSS")
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peak_of(device: str) -> int:
    """Return the most bytes that were in use."""
    return _status("VmHWM") if device == "cpu" else torch.cuda.max_memory_allocated()


def _status(name: str) -> int:
    """Read a size of this process, bytes; 0 where the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return int(next(line.split()[1] for line in lines if line.startswith(name))) * 1024


def measure(cases: Sequence[LossCase]) -> Iterator[LossCost]:
    """Measure each case in a process of its own.

    Raises: ``SpecGenError`` when one fails, or when methods disagree about a loss or its gradients.
    """
    first: dict[tuple[str, str, bool], LossCost] = {}
    for case in cases:
        command = [sys.executable, "-m", "hf_specgen.bench.dev.losses", "--one", json.dumps(asdict(case))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SpecGenError(f"{case} failed with code {done.returncode}: {done.stderr[-2000:]}")
        found = LossCost(case, **json.loads(done.stdout))
        check_equal(first.setdefault(case.about, found), found)
        yield found


def check_equal(one: LossCost, other: LossCost) -> None:
    """Raise ``SpecGenError`` unless both mean the same loss and gradients."""
    for name in ("loss", "by_states", "by_weight"):
        ours = asdict(one)[name]
        theirs = asdict(other)[name]
        if abs(ours - theirs) > CLOSE[one.case.dtype] * max(abs(ours), abs(theirs)):
            raise SpecGenError(f"{one.case} and {other.case} differ in {name}: {ours} and {theirs}.")


def table(found: Sequence[LossCost]) -> Table:
    """Lay out the figures, each beside the plain method's."""
    made = Table(title="loss and backward pass")
    for place, name in enumerate(
        ("loss", "head", "dtype", "method", "chunk", "peak MiB", "plain / peak", "s", "CPU s", "plain CPU / CPU")
    ):
        made.add_column(name, justify="right" if place > 3 else "left", no_wrap=True)
    plain = {line.case.about: line for line in found if line.case.method == PLAIN}
    for line in found:
        case = line.case
        base = plain.get(line.case.about)
        made.add_row(
            case.kind,
            "trained" if case.trained else "frozen",
            case.dtype,
            case.method,
            str(case.chunk or "all"),
            f"{line.peak / 2**20:.0f}",
            f"{base.peak / line.peak:.2f}" if base and line.peak else "",
            f"{line.seconds:.2f}",
            f"{line.cpu_seconds:.2f}",
            f"{base.cpu_seconds / line.cpu_seconds:.2f}" if base else "",
        )
    return made


def cases_of(kinds: Sequence[str], chunks: Sequence[int], dtypes: Sequence[str], base: LossCase) -> list[LossCase]:
    """List what is measured: per loss, dtype and kind of head the plain way, then chunks."""
    ways = [(PLAIN, 0), (RECOMPUTED, chunks[0]), *((OURS, chunk) for chunk in chunks)]
    return [
        replace(base, method=method, kind=kind, chunk=chunk, trained=trained, dtype=dtype)
        for kind, dtype, trained, (method, chunk) in product(kinds, dtypes, (True, False), ways)
    ]


def command(  # noqa: PLR0913 - one option each
    quick: Annotated[bool, typer.Option(help="Small sizes: does everything work?")] = False,
    kind: Annotated[list[str] | None, typer.Option(help=f"Losses, of {', '.join(FORMULAS)}.")] = None,
    chunk: Annotated[list[int] | None, typer.Option(help="Rows at a time.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(DTYPES)}.")] = None,
    tokens: Annotated[int, typer.Option(min=1)] = 4096,
    vocab: Annotated[int, typer.Option(min=2)] = 49_152,
    width: Annotated[int, typer.Option(min=1, help="Hidden size.")] = 576,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    output: Annotated[Path | None, typer.Option(help="Write the figures here, as JSON.")] = None,
    one: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure peak memory and time of the chunked losses beside plain ones."""
    if one:
        found = measure_here(LossCase(**json.loads(one)))
        print(json.dumps({name: value for name, value in asdict(found).items() if name != "case"}))
        return
    base = LossCase(PLAIN, tokens=tokens, vocab=vocab, width=width, repeats=repeats, device=device)
    chunks = chunk or [1024, 512, 256]
    if quick:
        base = replace(base, tokens=QUICK[0], vocab=QUICK[1], width=QUICK[2], repeats=1)
        chunks = chunk or [64]
    console = Console(width=140)
    lines = []
    cases = cases_of(kind or (list(FORMULAS) if quick else ["kl"]), chunks, dtype or ["float32"], base)
    try:
        for line in measure(cases):
            lines.append(line)
            console.print(f"{len(lines)}/{len(cases)} {line.case.method}, {line.case.kind}: {line.seconds:.2f} s")
    except SpecGenError as error:
        console.print(f"[red]{error}")
        raise typer.Exit(1) from error
    console.print(table(lines))
    if output:
        context: dict[str, Any] = {"schema": SCHEMA, "machine": describe_machine()}
        write_atomic(output, json.dumps({**context, "lines": [asdict(line) for line in lines]}, indent=1).encode())


if __name__ == "__main__":
    typer.run(command)
