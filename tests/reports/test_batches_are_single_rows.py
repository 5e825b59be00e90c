"""Report: `bench --batch-size 4` with two prompts a category runs single and double rows under a headline of four."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_calls import PROMPT, fine
from cli_calls import target as target  # a fixture
from letters import Letters
from tiny import tiny

from hf_specgen.bench import report
from hf_specgen.bench.plots import caption
from hf_specgen.measure import run
from hf_specgen.measure.methods import Decoding, our_method, plain_method
from hf_specgen.measure.prompts import MIXED, ChatPrompt, batches, category_of


def prompts(**counts: int) -> list[ChatPrompt]:
    return [ChatPrompt.user(f"{name}{i}", name, f"{name}{i}") for name, count in counts.items() for i in range(count)]


@pytest.mark.parametrize(
    ("counts", "sizes", "categories"),
    [
        ({"a": 2, "b": 2, "c": 2}, [4, 2], [MIXED, "c"]),
        ({"a": 1, "b": 1, "c": 1, "d": 1}, [4], [MIXED]),
        ({"a": 8, "b": 4}, [4, 4, 4], ["a", "a", "b"]),
        ({"a": 5, "b": 6}, [4, 4, 3], ["a", "b", MIXED]),
        ({"a": 3}, [3], ["a"]),
    ],
)
def test_batches_are_filled_across_categories(counts: dict[str, int], sizes: list[int], categories: list[str]) -> None:
    given = prompts(**counts)
    found = batches(given, 4)
    assert [len(batch) for batch in found] == sizes
    assert [category_of(batch) for batch in found] == categories
    assert sorted(prompt.question_id for batch in found for prompt in batch) == sorted(p.question_id for p in given)


def test_single_rows_keep_their_categories() -> None:
    assert [category_of(batch) for batch in batches(prompts(a=2, b=1), 1)] == ["a", "a", "b"]


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    def make(size: int, **counts: int) -> dict[str, Any]:
        settings = run.Settings(Decoding(max_new_tokens=3), size, repeats=1, warmup=0)
        methods = [plain_method(), our_method(None)]
        results = run.run_bench(tiny(), Letters(), prompts(**counts), methods, settings)
        context = {
            "machine": {"cpu": "test", "threads": 1, "gpu": None},
            "target": {"name": "tiny", "dtype": "float32", "device": "cpu"},
        }
        return report.build_report(results, methods, settings, context, Letters())

    return make


def test_the_report_says_what_ran_and_figures_stay_with_their_prompts(built: Callable[..., dict[str, Any]]) -> None:
    found = built(2, a=3, b=1, c=1)
    assert found["batch_sizes"] == {"2": 2, "1": 1}
    ours = found["methods"]["ours"]
    shown = {name: (part["prompts"], part["batch_sizes"]) for name, part in ours["categories"].items()}
    assert shown == {"a": (2, {"2": 1}), MIXED: (2, {"2": 1}), "c": (1, {"1": 1})}
    plain = found["methods"]["plain"]
    assert plain["seconds"] == pytest.approx(sum(part["seconds"] for part in plain["categories"].values()))
    assert ours["identical"] == {"compared": 5, "same": 5}
    assert report.summary_line(found).endswith("| batches: 2 of 2 rows, 1 of 1 row")
    assert "batch 2 and 1, greedy" in caption(found)
    assert any(MIXED in str(line) for line in report._notes(found))


def test_batch_one_says_nothing_of_batches(built: Callable[..., dict[str, Any]]) -> None:
    found = built(1, a=1, b=1)
    assert "batches" not in report.summary_line(found) and list(found["methods"]["ours"]["categories"]) == ["a", "b"]
    assert "batch 1, greedy" in caption(found)


def test_the_commands_print_the_sizes(target: str, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text("".join(json.dumps({"prompt": PROMPT, "category": name}) + "\n" for name in "abc"))
    shared = ["--target", target, "--prompts", str(file), "--batch-size", "3", "--max-new-tokens", "4"]
    result = fine("bench", *shared, "--repeats", "1", "--warmup", "0", "--out", str(tmp_path / "out"))
    assert "| batches: 1 of 3 rows" in result.stdout and f"{MIXED} (3)" in result.stdout
    assert json.loads((tmp_path / "out" / "report.json").read_text())["batch_sizes"] == {"3": 1}
    assert "3/3 (batches: 1 of 3 rows)" in fine("verify", *shared, "--law-samples", "0").stdout
