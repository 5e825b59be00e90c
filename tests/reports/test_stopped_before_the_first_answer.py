"""Report: `regenerate` that was stopped before its first answer refuses the next run with other settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from regenerate_cases import model_and_questions, read, source_of

from hf_specgen.errors import SpecGenError
from hf_specgen.trainers import regenerate as work


def stopped(prompts: list[list[int]], seeds: list[int]) -> list[list[int]]:
    raise KeyboardInterrupt


def run(out: Path, tokens: int, author: Any = None) -> work.RegenerationReport:
    model, questions = model_and_questions()
    sampling = work.Sampling(tokens)
    author = author or work.TargetAuthor(model, sampling)
    return work.regenerate(questions[:2], out, author, source_of(model, sampling), 1)


def test_it_leaves_nothing_that_refuses_the_next(tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run(out, 4, stopped)
    assert not work.meta_path(out).exists() and not out.exists()
    assert run(out, 5).written == 2
    assert json.loads(work.meta_path(out).read_text())["sampling"]["max_new_tokens"] == 5


@pytest.mark.parametrize("rest", [None, "", '{"index": 0, "comp'])
def test_what_older_versions_left_does_not_either(rest: str | None, tmp_path: Path) -> None:
    """They wrote whose answers these are before there was one; a torn line is none."""
    out, other = tmp_path / "answers.jsonl", tmp_path / "other.jsonl"
    run(other, 4)
    work.meta_path(out).write_bytes(work.meta_path(other).read_bytes())
    if rest is not None:
        out.write_text(rest)
    assert run(out, 5).written == 2 and len(read(out)) == 2
    assert json.loads(work.meta_path(out).read_text())["sampling"]["max_new_tokens"] == 5


def test_with_answers_it_is_still_refused(tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    calls: list[int] = []
    model, _ = model_and_questions()

    def once(prompts: list[list[int]], seeds: list[int]) -> list[list[int]]:
        calls.append(len(prompts))
        return stopped(prompts, seeds) if len(calls) > 1 else work.TargetAuthor(model, work.Sampling(4))(prompts, seeds)

    with pytest.raises(KeyboardInterrupt):
        run(out, 4, once)
    with pytest.raises(SpecGenError, match="made otherwise"):
        run(out, 5)
    assert run(out, 4).found == 1


def test_a_file_of_somebody_else_is_not_touched(tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    for text in ("notes without a line end", '{"index": 0}\n'):
        out.write_text(text)
        with pytest.raises(SpecGenError, match="whose answers it holds is not known"):
            run(out, 4)
        assert out.read_text() == text
