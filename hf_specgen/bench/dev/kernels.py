"""Time every kernel: ``python -m hf_specgen.bench.dev.kernels``.

On a GPU the Triton kernels are timed by events, each on data that caches do not hold; on a CPU what a CPU runs:
``verify`` on its lazy path, and the cache and attention operations in plain torch. Every operation is compared with a
straightforward torch version of it, and with the bandwidth of a copy measured in the same run.
"""

from __future__ import annotations

import io
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hf_specgen import ops
from hf_specgen.bench.dev import kernel_cases, verify_cpu
from hf_specgen.bench.dev.kernel_bytes import Shape, byte_table
from hf_specgen.bench.dev.kernel_cases import CHAIN, CHAIN_Q, Inputs, KernelCase
from hf_specgen.bench.dev.kernel_report import Line, as_json, figure, headline, table
from hf_specgen.bench.plots import require_matplotlib
from hf_specgen.bench.report import write_atomic
from hf_specgen.errors import SpecGenError
from hf_specgen.measure.machine import describe_machine

BATCHES = (1, 8, 64)
GAMMAS = (3, 7, 15)
VOCABS = (32_000, 128_256, 151_936)
QUICK = ((1, 8), (3,), (32_000,))
END_TO_END = Shape(64, 3, 128_256)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
COPIED = {"cuda": 1 << 29, "cpu": 1 << 27}  # bytes
FLUSHED = 1 << 29  # bytes, more than any cache holds
BAD_INPUT = 2
INTERRUPTED = 130

Call = Callable[[], object]


@dataclass(frozen=True)
class KernelPlan:
    """Hold what is to be measured."""

    device: torch.device
    dtype: torch.dtype
    shapes: tuple[Shape, ...]
    ops: tuple[str, ...]
    repeats: int
    limit: float | None

    def wants(self, name: str) -> bool:
        """Tell whether an operation was asked for: by a part of its name."""
        return not self.ops or any(part in name for part in self.ops)


class Clock:
    """Time calls on one device. Units: milliseconds."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device = device
        self.repeats = repeats

    def best(self, call: Call) -> float:
        """Return the least wall time of several calls: others may share a CPU's cores."""
        call()
        times = []
        for _ in range(self.repeats):
            start = time.perf_counter_ns()
            call()
            times.append(time.perf_counter_ns() - start)
        return min(times) / 1e6

    def copy_bandwidth(self) -> float:
        """Return how many bytes a second a copy reads and writes."""
        size = COPIED[self.device.type]
        source = torch.zeros(size // 4, dtype=torch.int32, device=self.device)
        target = torch.empty_like(source)
        copy = lambda: target.copy_(source)  # noqa: E731
        ms = self.events(copy) if self.device.type == "cuda" else self.best(copy)
        return 2 * size / ms * 1e3

    def events(self, call: Call) -> float:
        """Return a GPU's median time between events around a call, caches flushed before each."""
        flush = torch.zeros(FLUSHED // 4, dtype=torch.float32, device=self.device)
        for _ in range(3):
            call()
        pairs = []
        for _ in range(self.repeats):
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            # Read, not written: what is written would go to memory while the call is timed. It also keeps the device
            # busy while the call is being launched.
            flush.sum()
            start.record()
            call()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize(self.device)
        return statistics.median(start.elapsed_time(end) for start, end in pairs)

    def captured(self, call: Call) -> Call | None:
        """Record a call's launches, to replay them without Python in between; None where that fails."""
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(side):
                for _ in range(2):
                    call()
            torch.cuda.current_stream(self.device).wait_stream(side)
            with torch.cuda.graph(graph):
                call()
        except RuntimeError:
            torch.cuda.synchronize(self.device)
            return None
        return graph.replay


@torch.no_grad()
def measure(plan: KernelPlan, bandwidth: float, clock: Clock) -> Iterator[tuple[str, Line | None]]:
    """Yield, for everything there is to measure, what it is about to be and then its line."""
    for case, shape in steps(plan):
        label = f"{case.name}, B {shape.batch}, gamma {shape.gamma}, V {shape.vocab}"
        yield label, None
        if isinstance(case, verify_cpu.VerifyCase):
            yield label, _verified(case, shape, bandwidth, plan.repeats)
        else:
            yield label, _timed(case, Inputs(shape, plan.device, plan.dtype), bandwidth, clock)


def steps(plan: KernelPlan) -> list[tuple[KernelCase | verify_cpu.VerifyCase, Shape]]:
    """List what is measured, small shapes first; on a CPU ``verify`` stands for the operations that read logits."""
    cuda = plan.device.type == "cuda"
    cases: list[KernelCase | verify_cpu.VerifyCase] = [case for case in kernel_cases.CASES if cuda or case.on_cpu]
    if not cuda:
        cases = [*(replace(case, name=f"verify, {case.name}") for case in verify_cpu.CASES), *cases]
    found = [
        (case, shape)
        for shape in plan.shapes
        for case in cases
        if plan.wants(case.name)
        and (isinstance(case, verify_cpu.VerifyCase) or case.by_vocab or shape.vocab == plan.shapes[0].vocab)
    ]
    item = plan.dtype.itemsize
    whole = [(case, replace(END_TO_END, item=item, q_item=item)) for case in cases if case.name in (CHAIN, CHAIN_Q)]
    return [step for step in whole if plan.wants(step[0].name) and step not in found] + found


def _timed(case: KernelCase, given: Inputs, bandwidth: float, clock: Clock) -> Line:
    shape = given.shape
    cuda = given.device.type == "cuda"
    sizes = (shape.batch, shape.gamma, shape.vocab if case.by_vocab else None)
    line = Line(case.name, "triton" if cuda else "cpu", *sizes, 0.0, 0, 0.0)
    try:
        work = case.prepare(given)
        with ops.record() as calls:
            work.ours()
        ran = {path for _, path in calls}
        if ran != {"triton" if cuda else "reference"}:
            raise SpecGenError(f"{case.name} ran as {', '.join(sorted(ran))}: HF_SPECGEN_KERNELS must not be set here.")
        if not cuda:
            ms = clock.best(work.ours)
            plain = clock.best(work.plain)
            return replace(line, ms=ms, moved=work.moved, share=work.moved / ms * 1e3 / bandwidth, plain_ms=plain)
        replayed = clock.captured(work.ours)
        launched = clock.events(work.ours)
        plain = clock.events(work.plain)
        alone = None if replayed is None else clock.events(replayed)
    except torch.OutOfMemoryError:
        return replace(line, failed="out of memory")
    ms = launched if alone is None else alone
    share = work.moved / ms * 1e3 / bandwidth
    launches = None if alone is None else launched
    return replace(line, ms=ms, moved=work.moved, share=share, plain_ms=plain, launched_ms=launches)


def _verified(case: verify_cpu.VerifyCase, shape: Shape, bandwidth: float, repeats: int) -> Line:
    """Time ``verify``; it reads the accepted rows and one more, so that is what counts as moved."""
    (found,) = verify_cpu.measure_verify([case], [shape.batch], [shape.gamma], [shape.vocab], repeats=repeats)
    count = int(shape.batch * (1 + found.accepted) * shape.vocab * 2)
    share = count / found.ms * 1e3 / bandwidth
    return Line(case.name, "cpu", shape.batch, shape.gamma, shape.vocab, found.ms, count, share, found.plain_ms)


def run(plan: KernelPlan, console: Console) -> tuple[list[Line], float, bool]:
    """Measure with a bar; what is there when the user interrupts, or the time is over, is kept.

    Returns: lines, the copy bandwidth in bytes a second, whether everything was measured.
    """
    clock = Clock(plan.device, plan.repeats)
    begin = time.monotonic()
    lines: list[Line] = []
    bandwidth = clock.copy_bandwidth()
    total = len(steps(plan))
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        try:
            for label, line in measure(plan, bandwidth, clock):
                if line is None:
                    if plan.limit is not None and time.monotonic() - begin > plan.limit:
                        break
                    bar.update(task, description=label)
                else:
                    lines.append(line)
                    bar.advance(task)
        except KeyboardInterrupt:
            console.print("Interrupted: what was measured follows.")
    return lines, bandwidth, len(lines) == total


def _choose_device(name: str | None) -> torch.device:
    """Pick the GPU where there is one.

    Raises: SpecGenError where kernels would be interpreted, or for a device that is not there.
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in COPIED:
        raise SpecGenError(f"--device {name}: the kernels are timed on cuda or cpu.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SpecGenError(f"--device {name}: no GPU is here. Leave --device out to time the CPU path.")
    if device.type == "cuda" and os.environ.get("TRITON_INTERPRET"):
        raise SpecGenError("TRITON_INTERPRET is set: kernels would be interpreted, not timed. Unset it and run again.")
    if device.type == "cuda" and not ops.fuses(device):
        raise SpecGenError("Triton is not installed, or HF_SPECGEN_KERNELS forbids it: there is no kernel to time.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise SpecGenError(f"--device {name}: the GPUs here are cuda:0 to cuda:{torch.cuda.device_count() - 1}.")
    return device


def _numbers(text: str, option: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = (0,)
    if min(found) < 1:
        raise SpecGenError(f"--{option} {text!r}: positive numbers with commas are required, such as 1,8,64.")
    return found


def _shapes(batches: str, gammas: str, vocabs: str, dtype: torch.dtype) -> tuple[Shape, ...]:
    sizes = (_numbers(batches, "batch"), _numbers(gammas, "gamma"), _numbers(vocabs, "vocab"))
    found = (Shape(*size, item=dtype.itemsize, q_item=dtype.itemsize) for size in product(*sizes))
    return tuple(sorted(found, key=lambda shape: shape.rows * shape.vocab))


def _joined(sizes: tuple[int, ...]) -> str:
    return ",".join(map(str, sizes))


def bench(  # noqa: PLR0913 - one parameter a flag
    names: Annotated[str, typer.Option("--ops", help="Parts of names, with commas, such as row_,verify.")] = "",
    batch: Annotated[str | None, typer.Option(help="Rows decoded together.  [default: 1,8,64]")] = None,
    gamma: Annotated[str | None, typer.Option(help="Drafted tokens.  [default: 3,7,15]")] = None,
    vocab: Annotated[str | None, typer.Option(help="Vocabularies.  [default: 32000,128256,151936]")] = None,
    dtype: Annotated[str, typer.Option(help="Of the logits: bfloat16, float16 or float32.")] = "bfloat16",
    device: Annotated[str | None, typer.Option(help="cuda or cpu.  [default: the GPU, where there is one]")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every number.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw shares and ratios into a PNG.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="B 1 and 8, gamma 3, V 32000 where nothing else is said.")
    ] = False,
    repeats: Annotated[int | None, typer.Option(min=1, help="Timed calls.  [default: 30 on a GPU, 5 on a CPU]")] = None,
    limit: Annotated[float | None, typer.Option(min=0, help="Seconds after which nothing new is begun.")] = None,
    count: Annotated[
        bool, typer.Option("--bytes", help="Only print what each way to verify moves, by formula.")
    ] = False,
) -> None:
    """Time the verification kernels on a GPU, or the CPU path on a CPU, beside straightforward torch."""
    if dtype not in DTYPES:
        raise SpecGenError(f"--dtype {dtype!r}: one of {', '.join(DTYPES)} is required.")
    usual = QUICK if quick else (BATCHES, GAMMAS, VOCABS)
    sizes = [chosen or _joined(known) for chosen, known in zip((batch, gamma, vocab), usual, strict=True)]
    shapes = _shapes(sizes[0], sizes[1], sizes[2], DTYPES[dtype])
    if count:
        for shape in shapes:
            typer.echo(f"B {shape.batch}, gamma {shape.gamma}, V {shape.vocab}\n\n{byte_table(shape)}")
        return
    if plot is not None:
        require_matplotlib()
    where = _choose_device(device)
    cuda = where.type == "cuda"
    chosen = tuple(part.strip() for part in names.split(",") if part.strip())
    plan = KernelPlan(where, DTYPES[dtype], shapes, chosen, repeats or (30 if cuda else 5), limit)
    if not steps(plan):
        raise SpecGenError(
            f"--ops {names!r}: no operation of a {where.type} has such a name. Leave --ops out to see them all."
        )
    if not cuda and plan.dtype != torch.bfloat16:
        raise SpecGenError("--dtype: on a CPU the rounds are made in bfloat16, as models give them.")
    _report(plan, json_file, plot)


def _report(plan: KernelPlan, json_file: Path | None, plot: Path | None) -> None:
    """Measure and show.

    Raises: typer.Exit with code 130 when the user interrupted.
    """
    notes = Console(stderr=True, highlight=False)
    cuda = plan.device.type == "cuda"
    if cuda and plan.device.index is not None:
        torch.cuda.set_device(plan.device)  # events and graphs are recorded on the current one
    machine = describe_machine()
    place = machine["gpu"] if cuda else f"{machine['cpu']}, {machine['threads']} thread{'s' * (machine['threads'] > 1)}"
    path = "Triton kernels" if cuda else "the CPU path in plain torch; no GPU is measured"
    notes.print(f"{place}; torch {machine['torch']}, {plan.dtype}: {path}")
    lines, bandwidth, complete = run(plan, notes)
    title = f"{place}: {path}; a copy moves {bandwidth / 1e9:.0f} GB/s"
    console = Console(width=None if sys.stdout.isatty() else 130, highlight=False)
    ordered = sorted(lines, key=lambda line: (line.op, line.vocab or 0, line.batch, line.gamma))
    console.print(table(ordered, title))
    for line in lines:
        if line.op in (CHAIN, CHAIN_Q) and (line.batch, line.gamma, line.vocab) == _size(END_TO_END):
            console.print(headline(line))
    context: dict[str, Any] = {"machine": machine, "device": str(plan.device), "dtype": str(plan.dtype)}
    context |= {"copy_bytes_per_second": bandwidth, "repeats": plan.repeats, "complete": complete}
    if json_file is not None:
        write_atomic(json_file, json.dumps(as_json(ordered, context), indent=1).encode())
    if plot is not None:
        buffer = io.BytesIO()
        figure(ordered, title).savefig(buffer, format="png", dpi=150)
        write_atomic(plot, buffer.getvalue())
    if not complete and plan.limit is None:
        raise typer.Exit(INTERRUPTED)


def _size(shape: Shape) -> tuple[int, int, int]:
    return shape.batch, shape.gamma, shape.vocab


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command()(bench)


def main() -> None:
    """Run the program, with one clean message for what the user can mend."""
    try:
        app()
    except (SpecGenError, OSError) as error:
        typer.secho(f"Error: {error}", fg="red", err=True)
        sys.exit(BAD_INPUT)


if __name__ == "__main__":
    main()
