"""Report: a `.json` array is read as one text; half a character in a prompt ends in a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_calls import call, refused
from cli_calls import target as target  # a fixture
from support_text import CHATML, THINKING, characters

from hf_specgen.errors import SpecGenError
from hf_specgen.measure.prompts import ChatPrompt, encode, read_prompts

HALF = "a \ud83d b"


def test_an_array_is_read_as_rows(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "category": "x"}, {"messages": [{"role": "user", "content": "b"}], "question_id": 7}]
    for name, text in {"p.json": json.dumps(rows, indent=1), "l.json": "\n".join(map(json.dumps, rows))}.items():
        (tmp_path / name).write_text("\ufeff" + text, encoding="utf-8")
        found = read_prompts(tmp_path / name)
        assert [(p.text, p.category, p.question_id) for p in found] == [("a", "x", "1"), ("b", "all", "7")]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.json", '[{"prompt": "a"}, "b"]', "p.json: record 2: a record must be an object"),
        ("p.json", '[\n{"prompt": "a"},\n', "p.json:3: not JSON"),
        ("p.json", "[]", "holds no prompt"),
        ("p.csv", "prompt\na\n", "ends with '.csv'"),
        ("p.parquet", "PAR1", "ends with '.parquet'"),
    ],
)
def test_what_is_no_prompt_file_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SpecGenError, match=message):
        read_prompts(tmp_path / name)


@pytest.mark.parametrize(
    "record", [{"prompt": HALF}, {"prompt": "a", "question_id": HALF}, {"prompt": "a", "category": HALF}]
)
def test_half_a_character_is_one_clear_error(record: dict, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "fine"}) + "\n" + json.dumps(record))
    with pytest.raises(SpecGenError, match=r"p.jsonl:2 holds half a character \('\\ud83d'"):
        read_prompts(tmp_path / "p.jsonl")


@pytest.mark.parametrize("template", [CHATML, None])
def test_of_the_command_line_too(template: str | None, target: str) -> None:
    with pytest.raises(SpecGenError, match="holds half a character"):
        encode(ChatPrompt.user(HALF), characters(template))
    assert "holds half a character" in refused("generate", "the cat \udcff", "--target", target)


def test_lines_of_a_talk_that_are_no_text(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(prompt: str) -> str:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

    monkeypatch.setattr("builtins.input", broken)
    result = call("generate", "--chat", "--target", target)
    assert result.exit_code == 2 and "a line is no text" in result.stderr


def test_a_record_may_set_the_template(tmp_path: Path) -> None:
    tokenizer = characters(THINKING)
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "a", "chat_template_kwargs": {"enable_thinking": False}}))
    (prompt,) = read_prompts(tmp_path / "p.jsonl")
    assert tokenizer.decode(encode(prompt, tokenizer)).endswith("</think>\n\n")
    assert tokenizer.decode(encode(prompt, tokenizer, settings={"enable_thinking": True})).endswith("</think>\n\n")
