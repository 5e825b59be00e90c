"""What ``bench.kernels`` found: a line an operation and shape, a table, a figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

from hf_specgen.bench.plots import COLORS
from hf_specgen.measure.compare import ratio_words, short_ratio

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEMA = "hf_specgen.bench.dev.kernels/1"
MARKS = ("o", "s", "^", "v", "D", "P", "X", "*")


@dataclass(frozen=True)
class Line:
    """Hold one measurement. Units: milliseconds, bytes; ``share`` is of the copy bandwidth measured in the same run.

    ``path`` says what ran: ``triton``, or ``cpu`` for plain torch. On a GPU ``ms`` is the device's own time, from a
    replayed graph; ``launched_ms`` and ``plain_ms`` hold the launches from Python as well. Where no graph could be
    recorded ``launched_ms`` is None, and ``ms`` holds the launches too. ``vocab`` is None where no logits take part.
    """

    op: str
    path: str
    batch: int
    gamma: int
    vocab: int | None
    ms: float
    moved: int
    share: float
    plain_ms: float | None = None
    launched_ms: float | None = None
    failed: str = ""

    @property
    def ratio(self) -> float | None:
        """Return the straightforward version's time over ours, both with their launches."""
        ours = self.launched_ms or self.ms
        return self.plain_ms / ours if self.plain_ms and ours else None


def as_json(lines: Sequence[Line], context: dict[str, Any]) -> dict[str, Any]:
    """Return everything as plain numbers."""
    return {"schema": SCHEMA, **context, "lines": [{**asdict(line), "ratio": line.ratio} for line in lines]}


def table(lines: Sequence[Line], title: str) -> Table:
    """Lay the lines out, those that failed with their reason; a ratio below 1 is called slower."""
    launched = any(line.launched_ms is not None for line in lines)
    found = Table(title=title)
    heads = ["op", "B", "gamma", "V", "ms", "MB", "of copy", *["launched ms"] * launched, "torch ms", "torch / ours"]
    for place, head in enumerate(heads):
        found.add_column(head, justify="right" if place else "left", no_wrap=not place)
    for place, line in enumerate(lines):
        cells = [line.op, str(line.batch), str(line.gamma), str(line.vocab or "-")]
        if line.failed:
            cells += [line.failed]
        else:
            cells += [_ms(line.ms), f"{line.moved / 1e6:.2f}", f"{line.share:.1%}"]
            cells += [_ms(line.launched_ms)] * launched
            cells += [_ms(line.plain_ms), short_ratio(line.ratio) if line.ratio else "-"]
        last = place + 1 == len(lines) or lines[place + 1].op != line.op
        found.add_row(*cells, end_section=last)
    return found


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def headline(line: Line) -> str:
    """Say in one sentence what verifying a chain from end to end costs."""
    words = f"{line.op}, B {line.batch}, gamma {line.gamma}, V {line.vocab}: "
    if line.failed:
        return words + line.failed
    words += f"{line.ms:.4f} ms, {line.share:.0%} of the copy bandwidth"
    return words + (f", against plain torch: {ratio_words(line.ratio)}" if line.ratio else "")


def figure(lines: Sequence[Line], title: str) -> Figure:
    """Draw every operation's share of the copy bandwidth and its ratio to plain torch, over the bytes it moves."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(12.0, 5.0), layout="constrained")
    left, right = drawing.subplots(1, 2)
    good = [line for line in lines if not line.failed]
    for place, op in enumerate(dict.fromkeys(line.op for line in good)):
        style = {"color": COLORS[place % len(COLORS)], "marker": MARKS[place % len(MARKS)], "linestyle": ""}
        mine = sorted((line for line in good if line.op == op), key=lambda line: line.moved)
        left.plot([line.moved for line in mine], [line.share for line in mine], label=op, **style)
        compared = [(line.moved, line.ratio) for line in mine if line.ratio]
        if compared:
            right.plot(*zip(*compared, strict=True), **style)
    left.axhline(1.0, color="black", linewidth=1)
    right.axhline(1.0, color="black", linewidth=1)
    left.set_ylabel("share of the copy bandwidth")
    right.set_ylabel("plain torch's time / ours (below 1: slower)")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xlabel("bytes moved")
        axes.grid(alpha=0.3)
    right.set_yscale("log")
    drawing.suptitle(title, fontsize=9)
    if good:
        drawing.legend(loc="outside lower center", ncols=4, fontsize=7)
    return drawing
