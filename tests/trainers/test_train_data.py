"""Data for training: every shape of text becomes the same rows, packed texts stay apart, batches count exactly."""

from __future__ import annotations

import json
import logging
from itertools import chain
from pathlib import Path

import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDataset
from hypothesis import given
from hypothesis import strategies as st
from support_text import CHAT, CHATML, MARKED, MARKED_WRONG, TOOLS, characters
from tiny import build

from hf_specgen.chats import chat_of
from hf_specgen.errors import SpecGenError
from hf_specgen.trainers import data as data_module
from hf_specgen.trainers.data import (
    PADDING,
    DataOptions,
    DraftCollator,
    load_data,
    pack,
    prepare_dataset,
    row_seed,
)
from hf_specgen.trainers.masks import ChatOptions

TOKENIZER = characters(CHATML)
QUESTION, ANSWER = CHAT[0]["content"], CHAT[1]["content"]


def text_of(row: dict, supervised: bool = True) -> str:
    pairs = zip(row["input_ids"], row["loss_mask"], strict=True)
    return TOKENIZER.decode([token for token, bit in pairs if bool(bit) == supervised])


def ids_of(text: str) -> list[int]:
    return TOKENIZER(text)["input_ids"]


SHAPES = {
    "messages": {"messages": CHAT[:2]},
    "conversations": {"conversations": [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": ANSWER}]},
    "prompt of messages": {"prompt": CHAT[:1], "completion": CHAT[1:2]},
    "prompt of messages, text": {"prompt": CHAT[:1], "completion": ANSWER},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_a_chat_becomes_the_same_row(shape: str) -> None:
    rows = prepare_dataset(Dataset.from_list([SHAPES[shape]]), TOKENIZER)
    assert rows.column_names == ["input_ids", "loss_mask"]
    assert rows[0]["input_ids"] == ids_of(TOKENIZER.apply_chat_template(CHAT[:2], tokenize=False))
    assert text_of(rows[0]) == "hello<|im_end|>"


def test_prompt_and_completion_as_text_and_as_ids() -> None:
    rows = [
        prepare_dataset(Dataset.from_list([row]), TOKENIZER)[0]
        for row in (
            {"prompt": "one ", "completion": "two"},
            {"prompt": ids_of("one "), "completion": [*ids_of("two"), TOKENIZER.eos_token_id], "category": "x"},
            {"prompt": ids_of("one "), "answer": [*ids_of("two"), TOKENIZER.eos_token_id]},
        )
    ]
    assert rows[0] == rows[1] == rows[2]
    assert text_of(rows[0]) == "two</s>" and text_of(rows[0], supervised=False) == "one "
    open_end = DataOptions(chat=ChatOptions(include_stop_token=False))
    assert (
        text_of(prepare_dataset(Dataset.from_list([{"prompt": "a", "completion": "b"}]), TOKENIZER, open_end)[0]) == "b"
    )


def test_token_ids_need_no_tokenizer() -> None:
    data = Dataset.from_list(
        [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, {"input_ids": [4, 5], "labels": [4, -100]}]
    )
    assert prepare_dataset(data)["loss_mask"][:] == [[False, True, True], [True, False]]
    masked = Dataset.from_list([{"input_ids": [1, 2], "loss_mask": [0, 1], "text": "ignored"}])
    assert prepare_dataset(masked)["loss_mask"][:] == [[False, True]]
    assert prepare_dataset(Dataset.from_list([{"input_ids": [1, 2]}]))["loss_mask"][:] == [[True, True]]


def test_a_chat_is_read_whole_where_its_first_question_stands_beside_it() -> None:
    """Many published sets hold the prompt once more as a column."""
    row = prepare_dataset(Dataset.from_list([{"prompt": QUESTION, "prompt_id": "x", "messages": CHAT[:2]}]), TOKENIZER)
    assert row[0] == prepare_dataset(Dataset.from_list([{"messages": CHAT[:2]}]), TOKENIZER)[0]


def test_masks_under_other_names_count() -> None:
    data = Dataset.from_list([{"input_ids": [1, 2, 3], "assistant_masks": [0, 1, 1], "completion_mask": [1, 1, 0]}])
    assert prepare_dataset(data)["loss_mask"][:] == [[False, True, False]]
    assert prepare_dataset(data.remove_columns("completion_mask"))["loss_mask"][:] == [[False, True, True]]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, "they are shifted"),
        ({"input_ids": [1, 2, 3], "loss_mask": [-100, 0, 1]}, r"mask holds \[-100, 0, 1\]"),
        ({"input_ids": [[1, 2, 3]]}, "one list of whole numbers"),
        ({"input_ids": [1, 2, 3], "lengths": [1, 1]}, "a row of 3 tokens has texts of 2"),
        ({"text": None, "name": "x"}, "cannot be read .*without a value: text"),
        ({"prompt": "a", "completion": None}, "without a value: completion"),
    ],
)
def test_rows_that_contradict_themselves_are_refused(row: dict, message: str) -> None:
    with pytest.raises(SpecGenError, match=message):
        prepare_dataset(Dataset.from_list([row]), TOKENIZER)


def test_other_code_does_not_get_what_datasets_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions are told apart by name there: masks of an older version would be read from the disk."""
    (tmp_path / "rows.jsonl").write_text(json.dumps({"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}) + "\n")
    made = prepare_dataset(load_data(tmp_path / "rows.jsonl"))[0]["loss_mask"]
    assert made == [False, True, True]
    monkeypatch.setattr(data_module, "_mask_of", lambda row: [True] * 3)
    assert prepare_dataset(load_data(tmp_path / "rows.jsonl"))[0]["loss_mask"] == made, "this is what is feared"
    monkeypatch.setattr(data_module, "_code", lambda: "another version's")
    assert all(prepare_dataset(load_data(tmp_path / "rows.jsonl"))[0]["loss_mask"])


def test_other_code_takes_packed_rows_apart_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"input_ids": [1, 2, 3], "lengths": [3]}) + "\n")
    assert len(prepare_dataset(load_data(tmp_path / "rows.jsonl"))) == 1
    monkeypatch.setattr(data_module, "_lengths", lambda row: [1, 2])
    assert len(prepare_dataset(load_data(tmp_path / "rows.jsonl"))) == 1, "this is what is feared"
    monkeypatch.setattr(data_module, "_code", lambda: "another version's")
    assert prepare_dataset(load_data(tmp_path / "rows.jsonl"))["input_ids"][:] == [[1], [2, 3]]


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_rows_that_come_as_tensors(kind: str) -> None:
    """A data set may have been set to hand out tensors, also when it was saved."""
    data = Dataset.from_list([{"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "lengths": [2, 1]}]).with_format(kind)
    for made in (lambda rows: rows, Dataset.to_iterable_dataset):
        found = list(prepare_dataset(made(data.remove_columns("lengths"))))
        assert found == [{"input_ids": [1, 2, 3], "loss_mask": [False, True, True]}]
        assert [row["input_ids"] for row in prepare_dataset(made(data))] == [[1, 2], [3]]
    for name in ("lengths", "seq_lengths"):
        batch = DraftCollator()([{"input_ids": data[0]["input_ids"], name: data[0]["lengths"]}])
        assert batch["document_ids"].tolist() == [[0, 0, 1]]


def test_packed_rows_that_were_kept_stay_apart(tmp_path: Path) -> None:
    data = Dataset.from_list([{"input_ids": [i, i + 1, i + 2], "loss_mask": [False, True, True]} for i in (1, 4, 7)])
    prepare_dataset(data, options=DataOptions(packing=True, max_length=9)).save_to_disk(tmp_path)
    again = load_data(tmp_path)
    assert again["lengths"][:] == [[3, 3, 3]]
    assert prepare_dataset(again)[:] == data[:]
    assert prepare_dataset(again, options=DataOptions(packing=True, max_length=6))["lengths"][:] == [[3, 3], [3]]
    other = again.rename_column("lengths", "seq_lengths").to_iterable_dataset()
    assert [row["input_ids"] for row in prepare_dataset(other)] == data["input_ids"][:]


def test_tools_and_calls_are_shown_as_they_were_written(tmp_path: Path) -> None:
    """A table gives every row the keys of all others, as None: a template would show them."""
    tokenizer = characters(TOOLS)
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"x": 1}}]}
    chats = [[CHAT[0], call, {"role": "tool", "content": "3"}, CHAT[1]], CHAT[:2], CHAT[2:]]
    tools = [[{"name": "f", "parameters": {"x": "int"}}], [{"name": "g", "parameters": {"y": "str"}}], None]
    wanted = [
        tokenizer.apply_chat_template(chat, tools=tool, tokenize=False) for chat, tool in zip(chats, tools, strict=True)
    ]
    rows = [{"messages": chat, "tools": tool} for chat, tool in zip(chats, tools, strict=True)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = [{**row, "tools": row["tools"] and json.dumps(row["tools"])} for row in rows]
    for data in (Dataset.from_list(rows), load_data(tmp_path / "rows.jsonl"), Dataset.from_list(texts)):
        assert [tokenizer.decode(row["input_ids"]) for row in prepare_dataset(data, tokenizer)] == wanted
    parts = Dataset.from_list([{"prompt": CHAT[:1], "completion": CHAT[1:2], "tools": tools[1]}])
    (row,) = prepare_dataset(parts, tokenizer)
    assert tokenizer.decode(row["input_ids"]) == wanted[1]
    assert sum(row["loss_mask"]) == len("hello") + 1


def test_what_is_none_on_purpose_stays() -> None:
    """Answers that only call have no content, and templates ask for that; tools written as JSON are as they are."""
    tokenizer = characters("{{ tools | tojson }}{% for m in messages %}{{ m.content is none }} {% endfor %}")
    tools = [{"name": "f", "default": None}]
    chat = [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]
    row = Dataset.from_list([{"messages": chat, "tools": json.dumps(tools)}])[0]
    found = chat_of(row)
    assert found.tools == tools and found.messages[1] == chat[1]
    whole = tokenizer.apply_chat_template(found.messages, tools=found.tools, tokenize=False)
    assert whole == tokenizer.apply_chat_template(chat, tools=tools, tokenize=False)


def test_a_chat_that_is_one_string_is_refused() -> None:
    with pytest.raises(SpecGenError, match="messages, conversations or prompt"):
        chat_of({"messages": json.dumps(CHAT), "prompt": "p"})


def test_plain_text_is_supervised_throughout() -> None:
    row = prepare_dataset(Dataset.from_list([{"text": "some text"}]), TOKENIZER)[0]
    assert text_of(row) == "some text" and all(row["loss_mask"])


def test_long_texts_are_cut_and_rows_without_supervision_left_out(caplog: pytest.LogCaptureFixture) -> None:
    data = Dataset.from_list([{"prompt": "a" * 9, "completion": "bcd"}, {"prompt": "a" * 30, "completion": "bcd"}])
    with caplog.at_level(logging.INFO):
        rows = prepare_dataset(data, TOKENIZER, DataOptions(max_length=10))
    assert len(rows) == 1 and text_of(rows[0]) == "b"
    assert "1 of 2 rows supervise nothing" in caplog.text and "aaa⟦b⟧" in caplog.text
    with pytest.raises(SpecGenError, match="0 supervised tokens"):
        prepare_dataset(data, TOKENIZER, DataOptions(max_length=9))


def test_masks_that_cannot_be_right_are_refused() -> None:
    chats = Dataset.from_list([{"messages": CHAT}])
    with pytest.raises(SpecGenError, match="marks nothing in a chat"):
        prepare_dataset(chats, characters(MARKED_WRONG))
    everything = "{% generation %}{{ messages | map(attribute='content') | join }}{% endgeneration %}"
    with pytest.raises(SpecGenError, match=r"\(100.00 %\): at least 1 % and not all"):
        prepare_dataset(chats, characters(everything))
    long = Dataset.from_list([{"messages": [{"role": "user", "content": "x" * 3000}, CHAT[1]]}])
    with pytest.raises(SpecGenError, match="prompts dwarf the answers"):
        prepare_dataset(long, TOKENIZER, DataOptions(max_length=4000))
    with pytest.raises(SpecGenError, match="0 supervised tokens"):
        prepare_dataset(Dataset.from_list([{"messages": CHAT[:1]}]), TOKENIZER)


def test_what_is_no_data_is_refused() -> None:
    with pytest.raises(SpecGenError, match=r"columns question.*messages, prompt with completion, text"):
        prepare_dataset(Dataset.from_list([{"question": "?"}]), TOKENIZER)
    with pytest.raises(SpecGenError, match="give the target's tokenizer"):
        prepare_dataset(Dataset.from_list([{"text": "a"}]))
    with pytest.raises(SpecGenError, match="2 input_ids and a mask of 1"):
        prepare_dataset(Dataset.from_list([{"input_ids": [1, 2], "loss_mask": [1]}]))


def test_every_kind_of_file_opens(tmp_path: Path) -> None:
    data = Dataset.from_list([{"input_ids": [1, 2, 3], "loss_mask": [False, True, True]}] * 3)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    data.to_parquet(tmp_path / "rows.parquet")
    data.save_to_disk(tmp_path / "saved")
    data.save_to_disk(tmp_path / "named.json")  # a folder
    DatasetDict({"train": data, "test": data.select([0])}).save_to_disk(tmp_path / "splits")
    for name in ("rows.jsonl", "rows.parquet", "saved", "named.json", "splits"):
        assert prepare_dataset(load_data(tmp_path / name))["loss_mask"][:] == data["loss_mask"][:], name
        stream = prepare_dataset(load_data(tmp_path / name, streaming=True))
        assert isinstance(stream, IterableDataset)
        assert [row["loss_mask"] for row in stream] == data["loss_mask"][:], name
    assert len(load_data(tmp_path / "splits", split="test")) == 1
    (tmp_path / "rows.xml").touch()
    with pytest.raises(SpecGenError, match=r"ends with '\.xml'"):
        load_data(tmp_path / "rows.xml")
    with pytest.raises(SpecGenError, match=r"cannot be opened.*id of a data set"):
        load_data(tmp_path / "nothing")


def test_a_stream_is_prepared_and_checked() -> None:
    stream = Dataset.from_list(
        [{"messages": CHAT}, {"messages": CHAT[:1]}, {"messages": CHAT[:2]}]
    ).to_iterable_dataset()
    rows = list(prepare_dataset(stream, TOKENIZER))
    assert [text_of(row).count("<|im_end|>") for row in rows] == [2, 1]
    packed = list(prepare_dataset(stream, TOKENIZER, DataOptions(packing=True)))
    assert [row["lengths"] for row in packed] == [[len(row["input_ids"]) for row in rows]]
    with pytest.raises(SpecGenError, match="0 supervised tokens"):
        prepare_dataset(Dataset.from_list([{"messages": CHAT[:1]}]).to_iterable_dataset(), TOKENIZER)
    with pytest.raises(SpecGenError, match="holds no row"):
        prepare_dataset(IterableDataset.from_generator(lambda: iter(())), TOKENIZER)


def test_marked_and_rendered_masks_agree() -> None:
    data = Dataset.from_list([{"messages": [{"role": "system", "content": "s"}, *CHAT]}])
    marked, rendered = (prepare_dataset(data, characters(template))[0] for template in (MARKED, CHATML))
    assert marked == rendered


@given(st.lists(st.integers(1, 20), max_size=40), st.integers(20, 50))
def test_packing_places_every_text_once_and_within_the_row(lengths: list[int], size: int) -> None:
    bins = pack(lengths, size)
    assert sorted(i for chosen in bins for i in chosen) == list(range(len(lengths)))
    filled = [sum(lengths[i] for i in chosen) for chosen in bins]
    assert all(total <= size for total in filled)
    assert sum(total <= size / 2 for total in filled) <= 1  # two such rows would have been one


def test_a_text_longer_than_a_row_is_refused() -> None:
    with pytest.raises(SpecGenError, match="21 tokens does not fit a row of 20"):
        pack([3, 21], 20)


def packed_and_single() -> tuple[dict, list[dict]]:
    torch.manual_seed(4)
    texts = [torch.randint(1, 64, (length,)).tolist() for length in (5, 9, 3)]
    data = Dataset.from_list([{"input_ids": text, "loss_mask": [i > 1 for i in range(len(text))]} for text in texts])
    rows = prepare_dataset(data, options=DataOptions(packing=True, max_length=20))
    assert rows[0]["lengths"] == [5, 9, 3] and rows[0]["input_ids"] == list(chain(*texts))
    longer = {"input_ids": list(range(1, 21)), "loss_mask": [True] * 20, "lengths": [20]}
    return DraftCollator()([rows[0], longer]), list(prepare_dataset(data))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_packed_texts_are_read_as_single_ones(family: str) -> None:
    """Positions that start anew keep texts apart in the target; without them they would see each other."""
    batch, singles = packed_and_single()
    documents = batch["document_ids"][0]
    assert documents.tolist() == [0] * 5 + [1] * 9 + [2] * 3 + [PADDING] * 3
    model = build(family)
    positions = torch.cat([torch.arange(length) for length in (5, 9, 3, 3)])[None]
    with torch.no_grad():
        together = model(input_ids=batch["input_ids"][:1], position_ids=positions, use_cache=False).logits[0]
        mixed = model(input_ids=batch["input_ids"][:1], use_cache=False).logits[0]
        for at, row in enumerate(singles):
            alone = model(input_ids=torch.tensor([row["input_ids"]])).logits[0]
            torch.testing.assert_close(together[documents == at], alone, rtol=1e-4, atol=1e-4)
            assert at == 0 or not torch.allclose(mixed[documents == at], alone, atol=1e-2)


def test_packing_supervises_the_same_tokens() -> None:
    batch, singles = packed_and_single()
    assert batch["loss_mask"][0, :17].tolist() == [bit for row in singles for bit in row["loss_mask"]]
    assert batch["num_items"] == sum(sum(row["loss_mask"]) for row in singles) + 20


def test_a_batch_is_padded_on_the_right_and_counted() -> None:
    rows = [{"input_ids": [5, 6, 7], "loss_mask": [False, True, True]}, {"input_ids": [8], "loss_mask": [False]}]
    batch = DraftCollator(pad_token_id=9, multiple_of=4)(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 9], [8, 9, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert batch["loss_mask"].tolist() == [[False, True, True, False], [False] * 4]
    assert list(batch)[-1] == "num_items" and batch["num_items"] == 2
    assert next(iter(batch)) == "input_ids", "the Trainer reads the size of a batch off its first tensor"
    assert "document_ids" not in batch and "seeds" not in batch
    with pytest.raises(SpecGenError, match="2 input_ids and a loss_mask of 1"):
        DraftCollator()([{"input_ids": [1, 2], "loss_mask": [True]}])
    with pytest.raises(SpecGenError, match="a row of 2 tokens has texts of 1"):
        DraftCollator()([{"input_ids": [1, 2], "loss_mask": [True, True], "lengths": [1]}])


def test_counts_do_not_depend_on_how_rows_are_batched() -> None:
    rows = [{"input_ids": list(range(n)), "loss_mask": [i % 3 > 0 for i in range(n)]} for n in range(1, 9)]
    collate = DraftCollator(seeds=True)
    whole, halves = collate(rows), [collate(rows[:4]), collate(rows[4:])]
    assert whole["num_items"] == sum(half["num_items"] for half in halves)
    assert torch.equal(whole["seeds"], torch.cat([half["seeds"] for half in halves]))
    assert len(set(whole["seeds"].tolist())) == len(rows)
    assert int(whole["seeds"][2]) == row_seed(torch.arange(3)) >= 0
