"""Checkpoints of drafters for the program hf-specgen."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner, Result

from hf_specgen.cli import main

EAGLE3 = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "draft_vocab_size": 40,
    "aux_layer_boundaries": [2, 3, 4],
    "target": {"name": "org/target"},
}


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main.app, list(map(str, arguments)))


def fine(*arguments: str | Path) -> str:
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split())


def refused(*arguments: str | Path) -> str:
    result = call(*arguments)
    assert result.exit_code == 2 and result.stdout == "" and "Traceback" not in result.output, result.output
    return " ".join(result.stderr.split())
