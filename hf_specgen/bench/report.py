"""From timed runs to numbers, a table and a JSON file."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hf_specgen.measure.compare import ratio_words, short_ratio
from hf_specgen.measure.methods import CONSTANT, OURS, OURS_PREPACKED, PLAIN, PLAIN_PREPACKED, STOCK, DecodingMethod
from hf_specgen.measure.prompts import MIXED
from hf_specgen.measure.run import BatchResult, Cell, Settings
from hf_specgen.round.stats import RowStats

SCHEMA = "hf_specgen.bench/1"
RESAMPLES = 2000
Report = dict[str, Any]


def build_report(
    results: Sequence[BatchResult],
    methods: Sequence[DecodingMethod],
    settings: Settings,
    context: dict[str, Any],
    tokenizer: Any,
) -> Report:
    """Turn runs into plain numbers, ready for JSON. ``context`` holds machine, target and drafter as they are to stand.

    Times of a batch are medians over repeats; ratios are ratios of summed times. ``speedup_ci95`` resamples the
    batches; ``speedup_repeats`` are the 10th and 90th percentile of the ratio over repeats. Where prepacked plain
    decoding was measured, ``over_prepacked`` holds the same ratios against it.

    A batch has one time, so that the figures of a category are those of the batches that it fills alone; batches across
    categories are a group of their own. ``batch_sizes`` says how many batches of how many rows ran.

    Units: seconds.
    """
    categories = list(dict.fromkeys(batch.category for batch in results))
    groups = {name: [batch for batch in results if batch.category == name] for name in categories}
    reports = {}
    for method in methods:
        part = _group_report(results, method.name)
        part["label"] = method.label
        part["categories"] = {name: _group_report(group, method.name) for name, group in groups.items()}
        if method.name != PLAIN and settings.decoding.greedy:
            part["divergences"] = _divergences(results, method.name, tokenizer)
        reports[method.name] = part
    _against_stock(reports)
    return {
        "schema": SCHEMA,
        **context,
        "settings": {**asdict(settings), "greedy": settings.decoding.greedy},
        "batch_sizes": batch_sizes(results),
        "prompts": _prompts(results),
        "methods": reports,
    }


def _group_report(results: Sequence[BatchResult], name: str) -> Report:
    cells = [batch.cells[name] for batch in results]
    report: Report = {
        "prompts": sum(len(batch.prompts) for batch in results),
        "batch_sizes": batch_sizes(results),
        "seconds": float(_times(results, name).sum()),
        "tokens": _tokens(results, name),
        "tokens_per_second": _tokens(results, name) / float(_times(results, name).sum()),
        "stable": all(cell.stable for cell in cells),
        "busy": statistics.median(timing.busy for cell in cells for timing in cell.timings),
    }
    if name == PLAIN:
        return report
    report |= _ratios(results, name, PLAIN)
    if PLAIN_PREPACKED in results[0].cells and name != PLAIN_PREPACKED:
        report["over_prepacked"] = _ratios(results, name, PLAIN_PREPACKED)
    divergences = [divergence for batch in results for divergence in batch.divergences.get(name, [])]
    report["identical"] = {"compared": len(divergences), "same": divergences.count(None)} if divergences else None
    report["acceptance"] = _acceptance(cells)
    return report


def batch_sizes(results: Sequence[BatchResult]) -> dict[str, int]:
    """Return how many batches ran by how many rows they had, the largest first."""
    counts = Counter(len(batch.prompts) for batch in results)
    return {str(size): counts[size] for size in sorted(counts, reverse=True)}


def batch_words(sizes: dict[str, int]) -> str:
    """Say which batches ran."""
    return ", ".join(f"{number} of {size} row{'s' if size != '1' else ''}" for size, number in sizes.items())


def _times(results: Sequence[BatchResult], name: str) -> np.ndarray:
    """Return a method's time for each batch, the median over repeats."""
    return np.array([statistics.median(timing.wall for timing in batch.cells[name].timings) for batch in results])


def _tokens(results: Sequence[BatchResult], name: str) -> int:
    return sum(len(row) for batch in results for row in batch.cells[name].rows)


def _ratios(results: Sequence[BatchResult], name: str, base: str) -> Report:
    """Compare a method's times with those of a plain one."""
    plain = _times(results, base)
    seconds = _times(results, name)
    speedup = float(plain.sum() / seconds.sum())
    return {
        "speedup": speedup,
        "speedup_ci95": _bootstrap(plain, seconds),
        "speedup_repeats": _over_repeats(results, name, base),
        "speedup_per_token": speedup * _tokens(results, name) / _tokens(results, base),
    }


def _bootstrap(plain: np.ndarray, ours: np.ndarray) -> list[float] | None:
    if len(plain) < 2:
        return None
    drawn = np.random.default_rng(0).integers(0, len(plain), (RESAMPLES, len(plain)))
    ratios = plain[drawn].sum(1) / ours[drawn].sum(1)
    return [float(value) for value in np.quantile(ratios, [0.025, 0.975])]


def _over_repeats(results: Sequence[BatchResult], name: str, base: str) -> list[float] | None:
    repeats = len(results[0].cells[name].timings)
    if repeats < 2:
        return None
    times = np.array(
        [[[batch.cells[key].timings[i].wall for key in (base, name)] for batch in results] for i in range(repeats)]
    ).sum(1)
    return [float(value) for value in np.quantile(times[:, 0] / times[:, 1], [0.1, 0.9])]


def _acceptance(cells: Sequence[Cell]) -> Report | None:
    """Sum the counts of each cell's first repeat; seconds are means over repeats."""
    if not all(cell.stats for cell in cells):
        return None
    total = RowStats()
    for cell in cells:
        total.merge(cell.stats[0].total)
    seconds = {
        "prefill": _seconds([[s.prefill_seconds for s in cell.stats] for cell in cells]),
        "draft": _seconds([[s.draft_seconds for s in cell.stats] for cell in cells]),
        "verify": _seconds([[s.verify_seconds for s in cell.stats] for cell in cells]),
        "forward": _seconds([[s.forward_seconds for s in cell.stats] for cell in cells]),
        "other": _seconds([[s.other_seconds for s in cell.stats] for cell in cells]),
    }
    loop = seconds["draft"] + seconds["verify"] + seconds["other"]
    return {
        "num_forwards": sum(cell.stats[0].num_forwards for cell in cells),
        "num_rounds": total.num_rounds,
        "num_drafts": total.num_drafts,
        "num_draft_tokens": total.num_draft_tokens,
        "num_accepted_tokens": total.num_accepted_tokens,
        "mean_acceptance_length": total.mean_acceptance_length,
        "tokens_per_round": total.tokens_per_round,
        "draft_acceptance_rate": total.draft_acceptance_rate,
        "acceptance_rates": total.acceptance_rates,
        "drafted_at": total.drafted_at,
        "seconds": seconds,
        "outside_forward": 1.0 - seconds["forward"] / loop if loop else 0.0,
    }


def _seconds(repeats: Sequence[Sequence[float]]) -> float:
    return sum(map(statistics.fmean, repeats))


def _divergences(results: Sequence[BatchResult], name: str, tokenizer: Any) -> list[Report]:
    def word(token: int | None) -> str | None:
        return None if token is None else tokenizer.decode([token])

    return [
        {"prompt": prompt.question_id, **asdict(d), "plain_text": word(d.plain), "other_text": word(d.other)}
        for batch in results
        for prompt, d in zip(batch.prompts, batch.divergences[name], strict=True)
        if d is not None
    ]


def _prompts(results: Sequence[BatchResult]) -> list[Report]:
    return [
        {"id": prompt.question_id, "category": prompt.category, "prompt_tokens": len(ids), "plain_tokens": len(row)}
        for batch in results
        for prompt, ids, row in zip(batch.prompts, batch.ids, batch.cells[PLAIN].rows, strict=True)
    ]


def _against_stock(reports: Report) -> None:
    """Add each of our methods' ratio to stock assisted decoding, in all and per category."""
    if STOCK not in reports:
        return
    for name in (CONSTANT, OURS):
        if name in reports:
            ours = reports[name]
            stock = reports[STOCK]
            ours["speedup_over_stock"] = stock["seconds"] / ours["seconds"]
            for category, part in ours["categories"].items():
                part["speedup_over_stock"] = stock["categories"][category]["seconds"] / part["seconds"]


def ratios_over(part: Report, base: str) -> Report:
    """Return a method's ratios against ``base``: plain decoding, or prepacked plain decoding."""
    return part if base == PLAIN else part["over_prepacked"]


def summary_line(report: Report) -> str:
    """Say in one line what our default method gained, and how many texts are the plain ones."""
    ours = report["methods"][OURS]
    interval = ours["speedup_ci95"]
    spread = f" (95 % interval {interval[0]:.2f}-{interval[1]:.2f})" if interval else ""
    parts = [ratio_words(ours["speedup"]) + spread]
    if ours["acceptance"]:
        parts.append(f"acceptance length {ours['acceptance']['mean_acceptance_length']:.2f}")
        parts.append(f"{ours['acceptance']['tokens_per_round']:.2f} tokens per round")
    same = ours["identical"]
    parts.append(
        f"identical to plain greedy: {same['same']}/{same['compared']}{_closeness(ours['divergences'])}"
        if same
        else "sampled: texts are not compared"
    )
    if OURS_PREPACKED in report["methods"]:
        plain, packed = (report["methods"][name] for name in (PLAIN_PREPACKED, OURS_PREPACKED))
        over = ratio_words(packed["over_prepacked"]["speedup"])
        parts.append(
            f"prepacked: plain {short_ratio(plain['speedup'])}, ours {short_ratio(packed['speedup'])} ({over} over "
            "prepacked plain)"
        )
    if report["settings"]["batch_size"] > 1:
        parts.append(f"batches: {batch_words(report['batch_sizes'])}")
    return " | ".join(parts)


def _closeness(divergences: list[Report]) -> str:
    """Say how far from the best logit the two tokens are, at most, where the other texts part."""
    if not divergences:
        return ""
    if any(found["shortfall"] is None for found in divergences):
        return " (a text ended early: not a matter of rounding)"
    return f" (the others part at a logit gap of at most {max(found['shortfall'] for found in divergences):.3f})"


def render(report: Report) -> RenderableType:
    """Build the tables that the command line prints."""
    speeds = [_speed_table(report, base) for base in (PLAIN, PLAIN_PREPACKED) if base in report["methods"]]
    return Group(*speeds, *_acceptance_tables(report), *_notes(report))


def _speed_table(report: Report, base: str) -> Table:
    kind = "Plain" if base == PLAIN else "Prepacked plain"
    others = compared_with(report, base)
    table = Table(title=f"{kind} time / time, all prompts of a category together (95 % interval over batches)")
    table.add_column("category (prompts)")
    table.add_column(f"{kind.lower()} tok/s", justify="right")
    for name in others:
        table.add_column(report["methods"][name]["label"], justify="right")
    for category in report["methods"][PLAIN]["categories"]:
        parts = [report["methods"][name]["categories"][category] for name in (base, *others)]
        table.add_row(*_speed_row(category, parts, base))
    table.add_section()
    table.add_row(*_speed_row("ALL", [report["methods"][name] for name in (base, *others)], base))
    return table


def compared_with(report: Report, base: str) -> list[str]:
    """Return the methods that are compared with ``base``: all but the plain ones up to it."""
    return [name for name in report["methods"] if name not in (PLAIN, base)]


def _speed_row(name: str, parts: list[Report], base: str) -> list[str]:
    plain, *others = parts
    cells = [_speed_cell(ratios_over(part, base)) for part in others]
    return [f"{name} ({plain['prompts']})", f"{plain['tokens_per_second']:.1f}", *cells]


def _speed_cell(part: Report) -> str:
    interval = part["speedup_ci95"]
    text = short_ratio(part["speedup"])
    return f"{text} ({interval[0]:.2f}-{interval[1]:.2f})" if interval else text


def _acceptance_tables(report: Report) -> list[Table]:
    measured = [part for part in report["methods"].values() if part.get("acceptance")]
    if not measured:
        return []
    table = Table(title="Acceptance, and where the time after the prompt went")
    table.add_column("")
    for part in measured:
        table.add_column(part["label"], justify="right")
    for name, cell in _ACCEPTANCE_ROWS:
        table.add_row(name, *(cell(part["acceptance"]) for part in measured))
    return [table]


_ACCEPTANCE_ROWS: tuple[tuple[str, Callable[[Report], str]], ...] = (
    ("acceptance length (with bonus token)", lambda part: f"{part['mean_acceptance_length']:.2f}"),
    ("tokens per round", lambda part: f"{part['tokens_per_round']:.2f}"),
    ("accepted of drafted tokens", lambda part: f"{part['draft_acceptance_rate']:.1%}"),
    ("accepted at position 1, 2, ...", lambda part: " ".join(f"{x:.2f}" for x in part["acceptance_rates"][:6]) or "-"),
    ("drafting", lambda part: f"{part['seconds']['draft']:.2f} s"),
    ("target's forward", lambda part: f"{part['seconds']['forward']:.2f} s"),
    ("verdict", lambda part: f"{part['seconds']['verify'] - part['seconds']['forward']:.2f} s"),
    ("other", lambda part: f"{part['seconds']['other']:.2f} s"),
    ("outside the target's forward", lambda part: f"{part['outside_forward']:.1%}"),
)


def _notes(report: Report) -> list[Text]:
    lines = []
    if MIXED in report["methods"][PLAIN]["categories"]:
        lines.append(f"{MIXED}: batches across them; a category's own figures are those of the batches it fills alone")
    for name, part in report["methods"].items():
        if part.get("identical"):
            same = part["identical"]["same"]
            compared = part["identical"]["compared"]
            lines.append(f"{part['label']}: identical to plain greedy {same}/{compared}{_worst(part['divergences'])}")
        if part.get("speedup_over_stock"):
            lines.append(f"{part['label']} against stock: {ratio_words(part['speedup_over_stock'])}")
        if not part["stable"]:
            lines.append(f"{part['label']}: the repeats did not all give the same text")
        if part["busy"] > 0.05 and name == PLAIN:
            lines.append(
                f"Other programs ran: our threads waited {part['busy']:.0%} of the time. Trust the ratios less."
            )
    return [Text(line) for line in lines]


def _worst(divergences: list[Report]) -> str:
    if not divergences:
        return ""
    gaps = [f"{d['gap']:.3f}" for d in divergences]
    first = divergences[0]
    where = f"{first['prompt']} at token {first['position']}: {first['plain_text']!r} or {first['other_text']!r}"
    return f"; logit gaps where they part: {', '.join(gaps[:8])}{' ...' if len(gaps) > 8 else ''} (first: {where})"


def write_json(report: Report, path: Path) -> None:
    """Write the report, all or nothing."""
    write_atomic(path, json.dumps(report, indent=1, ensure_ascii=False).encode())


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file under a temporary name and move it into place, so that an interrupted run leaves no half file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        # mkstemp makes private files; a report is as readable as any other file of the user
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
