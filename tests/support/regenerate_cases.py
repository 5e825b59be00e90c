"""Targets, questions, and the files of their answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny import prompts as tiny_prompts
from tiny import tiny

from hf_specgen.models.facts import TargetFacts
from hf_specgen.trainers import regenerate as work

LENGTHS = [5, 9, 7, 12, 6, 9, 8]


EOS = 7


def model_and_questions() -> tuple[Any, list[work.Question]]:
    model = tiny()
    model.generation_config.eos_token_id = [EOS, 63]
    ids, mask = tiny_prompts(LENGTHS)
    rows = [row[bits.bool()].tolist() for row, bits in zip(ids, mask, strict=True)]
    return model, [work.Question(tuple(row), "kind", str(i)) for i, row in enumerate(rows)]


def source_of(model: Any, sampling: work.Sampling) -> work.AnswerSource:
    return work.AnswerSource(TargetFacts.of(model), sampling, work.end_tokens(model))


def read(path: Path) -> list[dict]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted(rows, key=lambda row: row["index"])
