"""Report: one answer that begins with line breaks, or holds half a character, stops a whole data set."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from datasets import Dataset, IterableDataset
from support_text import CHAT, CHATML, characters

from hf_specgen.errors import SpecGenError
from hf_specgen.trainers.base import DrafterTrainingArguments
from hf_specgen.trainers.data import DataOptions, load_data, prepare_dataset
from hf_specgen.trainers.regenerate import chat_prompts
from hf_specgen.trainers.settings import TrainOptions
from hf_specgen.trainers.sources import read_rows

TOKENIZER = characters(CHATML, merges=(("\n", "\n"),))  # as most tokenizers: two line breaks are one token
GOOD = {"messages": CHAT[:2]}
BAD = {"messages": [CHAT[0], {"role": "assistant", "content": "\n\nhello"}]}
HALF = '{"messages": [{"role": "user", "content": "\\ud83d"}, {"role": "assistant", "content": "b"}]}'


def test_the_row_is_left_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    rows = prepare_dataset(Dataset.from_list([GOOD, BAD, GOOD]), TOKENIZER)
    assert rows[:] == prepare_dataset(Dataset.from_list([GOOD, GOOD]), TOKENIZER)[:]
    assert rows.column_names == ["input_ids", "loss_mask"]
    assert "1 of 3 rows cannot be read exactly and are left out" in caplog.text
    assert "joins the text before and behind a border of answer 1" in caplog.text


def test_nothing_is_said_of_good_rows(caplog: pytest.LogCaptureFixture) -> None:
    prepare_dataset(Dataset.from_list([GOOD]), TOKENIZER)
    assert "left out" not in caplog.text


@pytest.mark.parametrize("streams", [False, True])
def test_strict_stops_there(streams: bool) -> None:
    data = Dataset.from_list([GOOD, BAD, GOOD])
    data = data.to_iterable_dataset() if streams else data
    with pytest.raises(SpecGenError, match="joins the text before and behind"):
        list(prepare_dataset(data, TOKENIZER, DataOptions(strict=True)))


@pytest.mark.parametrize("streams", [False, True])
def test_more_than_half_is_no_matter_of_single_rows(streams: bool) -> None:
    data = Dataset.from_list([GOOD, BAD, BAD])
    with pytest.raises(SpecGenError, match=r"2 of 3 rows cannot be read.*joins the text"):
        prepare_dataset(data.to_iterable_dataset() if streams else data, TOKENIZER)


def test_of_a_stream_too(caplog: pytest.LogCaptureFixture) -> None:
    """They are told as they pass: the first, the tenth, ..."""
    rows = prepare_dataset(Dataset.from_list([GOOD] * 70 + [BAD] * 12 + [GOOD]).to_iterable_dataset(), TOKENIZER)
    assert "left out" not in caplog.text
    found = list(rows)
    assert len(found) == 71 and set(found[0]) == {"input_ids", "loss_mask"}
    told = [record.message for record in caplog.records if "rows of the stream" in record.message]
    assert [line.split(", ")[1].split(" so far")[0] for line in told] == ["1", "10"]


def test_packed_rows_hold_the_others() -> None:
    options = DataOptions(packing=True, max_length=200)
    (row,) = prepare_dataset(Dataset.from_list([GOOD, BAD, GOOD]), TOKENIZER, options)
    assert len(row["lengths"]) == 2


def test_other_faults_of_single_rows(caplog: pytest.LogCaptureFixture) -> None:
    faulty = [
        {"messages": None},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "tools": "[{"},
    ]
    rows = prepare_dataset(Dataset.from_list([{**GOOD, "tools": None}, GOOD, *faulty]), TOKENIZER)
    assert len(rows) == 2 and "2 of 4 rows" in caplog.text


def test_regenerate_leaves_it_out_too(caplog: pytest.LogCaptureFixture) -> None:
    rows = [GOOD, {"messages": [CHAT[1]]}, {"messages": "broken"}, GOOD]
    assert [chat.messages for chat in chat_prompts(rows)] == [CHAT[:1]] * 2
    assert "2 of 4 rows cannot be read" in caplog.text and "nobody asks" in caplog.text
    with pytest.raises(SpecGenError, match="nobody asks"):
        chat_prompts(rows, strict=True)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_half_a_character_in_a_file_is_one_clear_error(name: str, streams: bool, tmp_path: Path) -> None:
    (tmp_path / name).write_text(f"{json.dumps(GOOD)}\n{HALF}\n")
    with pytest.raises(SpecGenError, match=r"cannot be read: .*surrogate") as caught:
        prepare_dataset(load_data(tmp_path / name, streaming=streams), TOKENIZER)
    assert streams or "line 2 holds half a character" in str(caught.value)


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(f'{json.dumps(GOOD)}\n{{"messages": [\n')
    with pytest.raises(SpecGenError, match=r"rows.jsonl' cannot be read: line 2 is no JSON"):
        load_data(tmp_path / "rows.jsonl")


def test_half_a_character_in_a_stream_of_objects_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    stream = IterableDataset.from_generator(lambda: iter([GOOD, json.loads(HALF), GOOD]))
    assert len(list(prepare_dataset(stream, TOKENIZER))) == 2
    assert "1 of 3 rows cannot be read exactly" in caplog.text


@pytest.mark.parametrize("packing", [False, True])
def test_rows_to_evaluate_on_are_taken_from_those_that_can_be_read(packing: bool, tmp_path: Path) -> None:
    """With 15 rows one is held out; where it was the faulty one, all of the rows held out could not be read."""
    silent = {"messages": CHAT[:1]}
    for number in range(15):
        rows = [GOOD] * 15
        rows[number] = (BAD, silent)[number % 2]
        (tmp_path / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        options = TrainOptions(target="t", data=str(tmp_path / f"{number}.jsonl"))
        args = DrafterTrainingArguments(str(tmp_path), use_cpu=True, report_to=[], packing=packing, max_length=200)
        train, held_out = read_rows(options, args, TOKENIZER)
        assert len(held_out) == 1 and "lengths" not in held_out.column_names
        assert sum(len(row.get("lengths", [0])) for row in train) == 13
