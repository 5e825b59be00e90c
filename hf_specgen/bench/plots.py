"""Plots of a report: speed-up by category, acceptance by position."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_specgen.bench.report import Report, compared_with, ratios_over, write_atomic
from hf_specgen.errors import SpecGenError
from hf_specgen.measure.methods import PLAIN, PLAIN_PREPACKED

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")


def write_plots(report: Report, folder: Path) -> list[Path]:
    """Write ``speedup.png`` and, where measured, ``speedup_prepacked.png`` and ``acceptance.png``; return their paths.

    Raises: SpecGenError when matplotlib is not installed.
    """
    paths = []
    packed = speedup_figure(report, PLAIN_PREPACKED) if PLAIN_PREPACKED in report["methods"] else None
    figures = {
        "speedup.png": speedup_figure(report),
        "speedup_prepacked.png": packed,
        "acceptance.png": acceptance_figure(report),
    }
    for name, figure in figures.items():
        if figure is not None:
            buffer = io.BytesIO()
            figure.savefig(buffer, format="png", dpi=150)
            write_atomic(folder / name, buffer.getvalue())
            paths.append(folder / name)
    return paths


def require_matplotlib() -> None:
    """Say now, not after minutes of measuring, that plots cannot be drawn.

    Raises: SpecGenError.
    """
    _figure(1.0)


def _figure(width: float) -> tuple[Figure, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SpecGenError("plots need matplotlib, which is not installed. Run: pip install matplotlib") from None
    figure = Figure(figsize=(width, 4.5), layout="constrained")
    return figure, figure.subplots()


def caption(report: Report) -> str:
    """Name target, dtype, batch, machine: the conditions without which a number means nothing."""
    target = report["target"]
    machine = report["machine"]
    settings = report["settings"]
    decoding = settings["decoding"]
    law = "greedy" if settings["greedy"] else f"temperature {decoding['temperature']}"
    hardware = (
        machine["gpu"]
        if target["device"] == "cuda" and machine["gpu"]
        else f"{machine['cpu']}, {machine['threads']} threads"
    )
    return (
        f"{target['name']}, {target['dtype']}, batch {' and '.join(report['batch_sizes'])}, {law}, "
        f"{decoding['max_new_tokens']} new tokens, {len(report['prompts'])} prompts\n{hardware}"
    )


def speedup_figure(report: Report, base: str = PLAIN) -> Figure:
    """Draw grouped bars of the time ratio to plain (or prepacked plain) decoding, with 95 % intervals, a line at 1."""
    kind = "plain" if base == PLAIN else "prepacked plain"
    others = compared_with(report, base)
    labels = [*report["methods"][PLAIN]["categories"], "ALL"]
    figure, axes = _figure(max(6.0, 1.0 + 0.45 * len(labels) * (len(others) + 1)))
    width = 0.8 / max(1, len(others))
    for i, name in enumerate(others):
        method = report["methods"][name]
        parts = [ratios_over(part, base) for part in (*method["categories"].values(), method)]
        heights = [part["speedup"] for part in parts]
        intervals = [part["speedup_ci95"] or [height, height] for part, height in zip(parts, heights, strict=True)]
        errors = [
            [max(0.0, height - low) for height, (low, _) in zip(heights, intervals, strict=True)],
            [max(0.0, high - height) for height, (_, high) in zip(heights, intervals, strict=True)],
        ]
        places = [place + (i - (len(others) - 1) / 2) * width for place in range(len(labels))]
        color = COLORS[i % len(COLORS)]
        axes.bar(places, heights, width, yerr=errors, capsize=2, color=color, label=method["label"])
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_xticks(range(len(labels)), labels, rotation=20, ha="right")
    axes.set_ylabel(f"{kind} time / time (below 1: slower)")
    axes.set_title(f"Speed against {kind} generate()\n{caption(report)}", fontsize=9)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def acceptance_figure(report: Report) -> Figure | None:
    """Draw, for each position of a draft, the share of drafts reaching it whose token there was accepted."""
    measured = [m for m in report["methods"].values() if m.get("acceptance") and m["acceptance"]["num_drafts"]]
    if not measured:
        return None
    figure, axes = _figure(6.5)
    for i, method in enumerate(measured):
        rates = method["acceptance"]["acceptance_rates"]
        label = f"{method['label']} (length {method['acceptance']['mean_acceptance_length']:.2f})"
        axes.plot(range(1, len(rates) + 1), rates, marker="o", color=COLORS[i % len(COLORS)], label=label)
    axes.set_ylim(0.0, 1.0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("accepted / drafts that are that long")
    axes.set_title(f"Acceptance by position\n{caption(report)}", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure
