"""Report: rows with a `system` field beside their turns are trained, answered and measured without it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from datasets import Dataset
from support_text import CHAT, CHATML, characters

from hf_specgen.errors import SpecGenError
from hf_specgen.measure.prompts import encode, read_prompts
from hf_specgen.trainers.data import prepare_dataset
from hf_specgen.trainers.regenerate import chat_prompts

TOKENIZER = characters(CHATML)
SAYS = "Speak like a cat."
SYSTEM = {"role": "system", "content": SAYS}
SHARED = [{"from": "human", "value": "hi you"}, {"from": "gpt", "value": "hello"}]
ROWS = {
    "messages": {"messages": CHAT[:2], "system": SAYS},
    "conversations": {"conversations": SHARED, "system": SAYS},
    "system_prompt": {"conversations": SHARED, "system_prompt": SAYS},
    "prompt of messages": {"prompt": CHAT[:1], "completion": CHAT[1:2], "system": SAYS},
    "said twice": {"messages": [SYSTEM, *CHAT[:2]], "system": SAYS},
}
ASKED = TOKENIZER.apply_chat_template([SYSTEM, CHAT[0]], tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("shape", ROWS)
def test_training_reads_it(shape: str) -> None:
    (row,) = prepare_dataset(Dataset.from_list([ROWS[shape]]), TOKENIZER)
    wanted = TOKENIZER.apply_chat_template([SYSTEM, *CHAT[:2]], tokenize=False)
    assert TOKENIZER.decode(row["input_ids"]) == wanted and wanted.count(SAYS) == 1
    assert sum(row["loss_mask"]) == len("hello") + 1


@pytest.mark.parametrize("shape", ROWS)
def test_regenerate_asks_with_it(shape: str) -> None:
    (found,) = chat_prompts([ROWS[shape]])
    assert found.messages == [SYSTEM, CHAT[0]]
    (found,) = chat_prompts([{"prompt": "hi you", "system": SAYS}])
    assert found.messages == [SYSTEM, CHAT[0]]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "hi you", "system": SAYS},
        {"turns": ["hi you", "more"], "system_prompt": SAYS},
        {"messages": CHAT[:1], "system": SAYS},
        {"conversations": SHARED[:1], "system": SAYS},
        {"messages": [SYSTEM, CHAT[0]], "system": SAYS, "system_prompt": " "},
    ],
)
def test_prompt_files_keep_it(row: dict, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps(row))
    (prompt,) = read_prompts(tmp_path / "p.jsonl")
    assert TOKENIZER.decode(encode(prompt, TOKENIZER)) == ASKED


def test_tools_of_a_prompt_file_are_kept_too(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "a", "tools": [{"name": "f"}]}))
    assert read_prompts(tmp_path / "p.jsonl")[0].tools == [{"name": "f"}]


@pytest.mark.parametrize("nothing", [None, "", " \n"])
def test_a_field_that_says_nothing_changes_nothing(nothing: str | None) -> None:
    (row,) = prepare_dataset(Dataset.from_list([{"messages": CHAT[:2], "system": nothing}]), TOKENIZER)
    assert row == prepare_dataset(Dataset.from_list([{"messages": CHAT[:2]}]), TOKENIZER)[0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [SYSTEM, *CHAT[:2]], "system": "Bark."}, "system field says 'Bark.' and its first message"),
        ({"messages": CHAT[:2], "system": SAYS, "system_prompt": "Bark."}, "system and system_prompt are two texts"),
        ({"messages": CHAT[:2], "system": 3}, "system is 3: a text is required"),
        ({"prompt": "hi", "completion": "hello", "system": SAYS}, "beside a prompt that is plain text"),
    ],
)
def test_what_cannot_be_honoured_is_refused(row: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(SpecGenError, match=message):
        prepare_dataset(Dataset.from_list([row]), TOKENIZER)
    if "messages" in row:
        with pytest.raises(SpecGenError, match=message):
            chat_prompts([row])
        (tmp_path / "p.jsonl").write_text(json.dumps({**row, "messages": row["messages"][:-1]}))
        with pytest.raises(SpecGenError, match=f"p.jsonl:1: .*{message}"):
            read_prompts(tmp_path / "p.jsonl")


def test_a_template_that_takes_no_system_message_is_one_clear_error(tmp_path: Path) -> None:
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + CHATML
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "hi", "system": SAYS}))
    (prompt,) = read_prompts(tmp_path / "p.jsonl")
    with pytest.raises(SpecGenError, match=r"refuses the prompt '1' \(system, user\): no system here"):
        encode(prompt, characters(strict))
