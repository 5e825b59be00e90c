"""``python -m hf_specgen.bench.dev.kernels``: what it times, what it counts, what it refuses to say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from hf_specgen import SpecGenError, ops
from hf_specgen.bench.dev import kernel_bytes, kernel_report, kernels
from hf_specgen.bench.dev.kernel_bytes import SCHEMES, Shape
from hf_specgen.bench.dev.kernel_cases import CASES, Inputs, KernelCase
from hf_specgen.bench.dev.kernel_report import Line

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--device", "cpu", "--batch", "2", "--gamma", "3", "--vocab", "300", "--repeats", "1"]
LARGE = Shape(8, 7, 151_936)
BAR = Shape(64, 3, 128_256)
SCHEME = {scheme.name: scheme for scheme in SCHEMES}
MASK = torch.tensor([3, 4]), torch.tensor([[-1, 0]]), 16, 16, 0, False
LINE = Line("tree_mask", "cpu", 2, 3, None, ms=2.0, moved=1000, share=0.25, plain_ms=1.0)


def bench(*arguments: str):
    return CliRunner().invoke(kernels.app, [*TINY, *arguments])


@pytest.mark.slow
def test_the_cpu_path_is_timed_and_written(tmp_path: Path) -> None:
    result = bench("--json", str(tmp_path / "k.json"), "--plot", str(tmp_path / "k.png"))
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "k.json").read_text())
    assert report["complete"] and report["device"] == "cpu" and report["copy_bytes_per_second"] > 1e8
    names = {line["op"] for line in report["lines"]}
    assert {"verify, greedy", "verify, block", "tree_attention", "tree_mask", "move_slots"} <= names
    assert not names & {"row_stats", "verify a chain"}, "references are definitions: they are not what a CPU runs"
    for line in report["lines"]:
        assert line["ms"] > 0 and line["plain_ms"] > 0 and line["path"] == "cpu" and not line["failed"]
        assert line["share"] == pytest.approx(line["moved"] / line["ms"] * 1e3 / report["copy_bytes_per_second"])
        assert line["ratio"] == pytest.approx(line["plain_ms"] / line["ms"])
        assert (line["vocab"] == 300) == line["op"].startswith("verify")
    assert "the CPU path in plain torch; no GPU is measured" in result.output
    assert (tmp_path / "k.png").read_bytes().startswith(b"\x89PNG")


def test_a_ratio_below_one_is_no_speed_up() -> None:
    console = Console(record=True, width=160)
    console.print(kernel_report.table([LINE, replace(LINE, failed="out of memory")], ""))
    text = console.export_text()
    assert "slower: 0.50x" in text and "speed-up" not in text and "out of memory" in text
    launched = replace(LINE, ms=0.1, launched_ms=4.0)
    assert launched.ratio == 0.25, "the device's own time is not compared with a time that holds launches"
    assert "slower: 0.25x" in kernel_report.headline(launched)


def test_what_was_measured_survives_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = kernels.measure

    def interrupted(*arguments: object) -> Iterator[tuple[str, Line | None]]:
        steps = real(*arguments)  # type: ignore[arg-type]
        yield from (next(steps), next(steps))
        raise KeyboardInterrupt

    monkeypatch.setattr(kernels, "measure", interrupted)
    result = bench("--ops", "tree_mask,move_slots", "--json", str(tmp_path / "k.json"))
    assert result.exit_code == kernels.INTERRUPTED and "Interrupted" in result.output
    report = json.loads((tmp_path / "k.json").read_text())
    assert not report["complete"] and [line["op"] for line in report["lines"]] == ["tree_mask"]


def test_the_time_limit_begins_nothing_new(tmp_path: Path) -> None:
    result = bench("--ops", "tree_mask", "--limit", "0", "--json", str(tmp_path / "k.json"))
    report = json.loads((tmp_path / "k.json").read_text())
    assert (result.exit_code, report["lines"], report["complete"]) == (0, [], False)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--ops", "nothing of this name"], "Leave --ops out to see them all"),
        (["--batch", "8,x"], "positive numbers"),
        (["--vocab", "0"], "positive numbers"),
        (["--dtype", "float8"], "one of bfloat16"),
        (["--dtype", "float32"], "bfloat16, as models give them"),
        (["--device", "tpu:0"], "cuda or cpu"),
    ],
)
def test_what_cannot_be_timed_is_refused(arguments: list[str], text: str) -> None:
    result = bench(*arguments)
    assert isinstance(result.exception, SpecGenError) and text in str(result.exception)


def test_interpreted_kernels_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        with pytest.raises(SpecGenError, match="no GPU is here"):
            kernels._choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SpecGenError, match="TRITON_INTERPRET is set"):
        kernels._choose_device(None)
    monkeypatch.delenv("TRITON_INTERPRET")
    with ops.use_kernels("reference"), pytest.raises(SpecGenError, match="no kernel to time"):
        kernels._choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with ops.use_kernels("triton"):
        assert kernels._choose_device("cuda:1") == torch.device("cuda:1")
        with pytest.raises(SpecGenError, match="cuda:0 to cuda:1"):
            kernels._choose_device("cuda:2")


def test_the_full_grid_is_the_default_on_a_card() -> None:
    shapes = kernels._shapes("1,8,64", "3,7,15", "32000,128256,151936", torch.bfloat16)
    plan = kernels.KernelPlan(torch.device("cuda"), torch.bfloat16, shapes, (), 30, None)
    found = kernels.steps(plan)
    by_vocab = sum(case.by_vocab for case in CASES)
    assert len(found) == len(set(found)) == 27 * by_vocab + 9 * (len(CASES) - by_vocab)
    quick = kernels.KernelPlan(torch.device("cuda"), torch.bfloat16, shapes[:1], ("verify",), 30, None)
    assert [(case.name, shape.batch) for case, shape in kernels.steps(quick)][:2] == [
        ("verify a chain", 64),
        ("verify a chain, dense q", 64),
    ], "the end-to-end lines are measured whatever the grid"


def test_events_surround_the_call_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's clock, on a made-up device: flush, start, call, end, in this order; caches hold nothing to write."""
    seen: list[str] = []
    event = SimpleNamespace(record=lambda: seen.append("event"), elapsed_time=lambda end: 2.0)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: seen.append("wait"))
    flush = SimpleNamespace(sum=lambda: seen.append("flush"))
    monkeypatch.setattr(torch, "zeros", lambda *size, **settings: flush)
    assert kernels.Clock(torch.device("cpu"), 2).events(lambda: seen.append("call")) == 2.0
    assert seen == ["call"] * 3 + ["flush", "event", "call", "event"] * 2 + ["wait"]


@pytest.mark.parametrize("replayed", [None, lambda: None])
def test_a_time_with_launches_is_not_called_the_devices_own(replayed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no graph can be recorded the line says so."""
    work = SimpleNamespace(ours=lambda: ops.tree_mask(*MASK), plain=lambda: None, moved=1000)
    clock = SimpleNamespace(captured=lambda call: replayed, events=lambda call: 1.0 if call is replayed else 4.0)
    given = SimpleNamespace(shape=Shape(2, 3, 300), device=torch.device("cuda"))
    pytest.importorskip("triton")
    with ops.use_kernels("triton"):
        line = kernels._timed(KernelCase("tree_mask", lambda given: work, False), given, 1e6, clock)  # type: ignore[arg-type]
    assert (line.ms, line.launched_ms) == ((4.0, None) if replayed is None else (1.0, 4.0))
    assert line.share == pytest.approx(1000 / line.ms * 1e3 / 1e6) and line.ratio == 1.0


def test_rows_that_accept_everything_draw_nothing_again() -> None:
    none, one = (kernel_bytes.reject_tree(LARGE, True, rejected) for rejected in (0, 1))
    assert kernel_bytes.reject_tree(LARGE, True) - none == LARGE.batch * (one - none)
    assert one - none == pytest.approx(LARGE.vocab * 4, rel=0.1)


FAST = {"row_stats", "match_tree", "tree_mask", "gumbel_pick"}


@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c.name in FAST else pytest.mark.slow) for c in CASES])
def test_every_case_runs_as_triton(case: KernelCase) -> None:
    """What a GPU would time, in the interpreter: all of it is Triton, and the plain version is of the same step."""
    pytest.importorskip("triton")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    given = Inputs(Shape(2, 3, 600, listed=8), device, torch.bfloat16)
    with ops.use_kernels("triton"):
        work = case.prepare(given)
        with ops.record() as calls:
            found = work.ours()
        plain = work.plain()
    assert calls and {path for _, path in calls} == {"triton"}
    assert work.moved > 0
    if case.name in ("tree_mask", "match_tree"):
        first, second = {"match_tree": (found[1:3], plain)}.get(case.name, ((found,), (plain,)))
        pairs = zip(first, second, strict=True)
        assert all(torch.equal(one.flatten(), other.flatten()) for one, other in pairs)
    if case.name == "tree_attention":
        torch.testing.assert_close(found, plain, rtol=2e-2, atol=2e-2)


def passes(name: str, shape: Shape) -> float:
    return SCHEME[name].ours(shape) / shape.floor


def test_the_bytes_are_those_of_the_bars() -> None:
    """At temperature 1 every target row is read once, and of a chain with q one row again a request."""
    assert passes("greedy", BAR) < 1.01 and passes("greedy", LARGE) < 1.01
    assert 1.0 < passes("T = 1, drafts without chance", BAR) < 1.1
    again = BAR.batch * BAR.vocab * 2
    listed = SCHEME["T = 1, q as probabilities (ours: listed)"].ours(BAR)
    assert listed - SCHEME["T = 1, drafts without chance"].ours(BAR) == pytest.approx(again, rel=0.1)
    for scheme in SCHEMES:
        others = [count(LARGE) for count in (scheme.vllm_v2, scheme.vllm_v1, scheme.sglang) if count]
        assert scheme.name == "greedy" or all(scheme.ours(LARGE) < other for other in others)
        assert scheme.ours(LARGE) >= LARGE.floor


def test_row_statistics_write_what_is_counted() -> None:
    """The formula is of the tensors themselves."""
    shape = Shape(2, 3, 20_000)
    logits, temperature = torch.zeros(shape.rows, shape.vocab, dtype=torch.bfloat16), torch.ones(shape.rows)
    for strips in (False, True):
        written = ops.row_stats(logits, temperature, strips)
        tensors = [logits, temperature, *written]
        assert kernel_bytes.row_stats(shape, strips) == sum(each.numel() * each.element_size() for each in tensors)


@pytest.mark.parametrize("shape", [LARGE, BAR])
def test_the_page_shows_the_formulas(shape: Shape) -> None:
    printed = CliRunner().invoke(
        kernels.app,
        ["--bytes", "--batch", str(shape.batch), "--gamma", str(shape.gamma), "--vocab", str(shape.vocab)],
    )
    rows = [line for line in printed.output.splitlines() if line.startswith("| ")]
    page = (ROOT / "docs" / "kernels.md").read_text()
    assert len(rows) > 8 and all(row in page for row in rows), printed.output
    assert re.search(r"No GPU was at hand", page)
