"""Report: no option reaches the chat template (enable_thinking), and nobody notices what texts were made with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_calls import TEMPLATE, WORDS, fine, refused, save
from cli_drafters import EAGLE3
from datasets import Dataset
from support_text import CHAT, THINKING, characters
from train_runs import eagle3_trainer
from transformers import PreTrainedTokenizerFast

from hf_specgen.chats import Chat, render
from hf_specgen.checkpoints.config import DrafterConfig
from hf_specgen.drafters.eagle3 import Eagle3Drafter
from hf_specgen.errors import SpecGenError
from hf_specgen.trainers.data import DataOptions, prepare_dataset
from hf_specgen.trainers.masks import ChatOptions
from hf_specgen.trainers.metrics import AcceptanceCallback
from hf_specgen.trainers.train import main

GIVEN = {"size": "big"}
BIG = ["--chat-template-kwargs", json.dumps(GIVEN)]
SHORT = ["--max-new-tokens", "4"]
OFF = {"enable_thinking": False}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A target whose template reads ``size``."""
    template = "{% if size is defined %}{{ size }} {% endif %}" + TEMPLATE.replace("}} {% endfor", "}} </s> {% endfor")
    return save(tmp_path_factory.mktemp("target"), seed=0, layers=2, template=template)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a prompt file and chats."""
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("the cat", "a dog sat")))
    chat = {"messages": [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on mat"}]}
    (tmp_path / "chats.jsonl").write_text((json.dumps(chat) + "\n") * 12)
    return tmp_path


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What every rendering is told as ``size``."""
    found: list[Any] = []
    apply = PreTrainedTokenizerFast.apply_chat_template

    def spy(self: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(kwargs.get("size"))
        return apply(self, *args, **kwargs)

    monkeypatch.setattr(PreTrainedTokenizerFast, "apply_chat_template", spy)
    return found


def check(told: list[Any]) -> None:
    assert told and set(told) == {"big"}
    told.clear()


def test_every_command_passes_it_on(target: str, place: Path, told: list[Any]) -> None:
    prompts, shared = place / "p.jsonl", ["--target", target, *SHORT]
    fine("generate", "the cat", *shared, *BIG)
    check(told)
    fine("generate", *shared, "--file", str(prompts), *BIG, "--compare")
    check(told)
    fine("generate", *shared, "--chat", *BIG, given="the cat\n/exit\n")
    check(told)
    fine(
        "verify",
        *shared,
        "--prompts",
        str(prompts),
        "--law-samples",
        "64",
        "--law-tokens",
        "2",
        "--num-tokens",
        "2",
        *BIG,
    )
    check(told)
    once = ["--repeats", "1", "--warmup", "0", "--no-stock", "--out", str(place / "bench"), "--check-float32"]
    fine("bench", *shared, "--prompts", str(prompts), *once, *BIG)
    check(told)
    assert json.loads((place / "bench" / "report.json").read_text())["settings"]["chat_template_kwargs"] == GIVEN
    data = ["--data", str(place / "chats.jsonl")]
    tokens = ["--method", "medusa", "--tflops", "1"]
    fine("estimate", "--target", target, *tokens, *data, *BIG)
    check(told)


def test_a_shortened_vocabulary_is_counted_with_it(target: str, place: Path, told: list[Any]) -> None:
    fits = {**EAGLE3, "vocab_size": len(WORDS), "draft_vocab_size": len(WORDS), "aux_layer_boundaries": [0, 1, 2]}
    Eagle3Drafter(DrafterConfig("eagle3", **fits)).save_pretrained(place / "drafter")
    counted = ["--draft-vocab-size", "5", "--data", str(place / "chats.jsonl"), *BIG]
    fine("convert", str(place / "drafter"), str(place / "short"), "--target", target, *counted)
    check(told)
    unused = refused("convert", str(place / "drafter"), str(place / "same"), *BIG)
    assert "--draft-vocab-size N" in unused


def test_answers_note_it_and_a_mismatch_is_refused(target: str, place: Path, told: list[Any]) -> None:
    out, chats = place / "answers.jsonl", str(place / "chats.jsonl")
    command = ["regenerate", "--target", target, *SHORT, "--out", str(out), "--prompts", str(place / "p.jsonl")]
    fine(*command, *BIG)
    check(told)
    assert json.loads((place / "answers.meta.json").read_text())["chat_template_kwargs"] == GIVEN
    other = refused(*command)
    assert "made otherwise" in other and "chat_template_kwargs {'size': 'big'} there, {} here" in other
    train = ["medusa", "--target", target, "--data", str(out), "--output", str(place / "heads"), "--use_cpu"]
    with pytest.raises(SpecGenError, match=r'made with the chat_template_kwargs {"size": "big"}.*"small".*cannot'):
        main([*train, "--chat_template_kwargs", '{"size": "small"}'])
    features = ["features", "--target", target, "--method", "medusa", "--out", str(place / "cache")]
    assert "cannot change them" in refused(*features, "--data", str(out), "--chat-template-kwargs", '{"size": "small"}')
    told.clear()
    once = ["--max_steps", "1", "--decode_prompts", "0", "--report_to", "none", "--save_strategy", "no"]
    found = main([*train, *once, "--eval_data", chats, "--eval_rows", "2", *map(str, BIG)])
    assert found is not None and found["chat_template_kwargs"] == GIVEN
    check(told)
    assert '`{"size": "big"}`' in (place / "heads" / "README.md").read_text()


def test_a_feature_cache_notes_it_and_a_mismatch_is_refused(target: str, place: Path, told: list[Any]) -> None:
    cache, out = place / "cache", place / "heads"
    data = ["--data", str(place / "chats.jsonl")]
    fine("features", "--target", target, "--method", "medusa", "--out", str(cache), *data, *BIG)
    check(told)
    assert json.loads((cache / "cache.json").read_text())["chat_template_kwargs"] == GIVEN
    train = [
        "medusa",
        "--target",
        target,
        "--features",
        str(cache),
        "--output",
        str(out),
        "--use_cpu",
        "--eval_rows",
        "0",
    ]
    with pytest.raises(SpecGenError, match="cannot change them"):
        main([*train, "--chat_template_kwargs", '{"size": "small"}'])
    once = ["--max_steps", "1", "--report_to", "none", "--save_strategy", "no"]
    found = main([*train, *once])
    assert found is not None and found["chat_template_kwargs"] == GIVEN and not told


def test_texts_of_two_kinds_are_warned_about(target: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = place / "answers.jsonl"
    prompts = ["--prompts", str(place / "p.jsonl")]
    fine("regenerate", "--target", target, *SHORT, "--out", str(out), *prompts, *BIG)
    train = ["medusa", "--target", target, "--data", str(out), "--output", str(place / "heads"), "--use_cpu"]
    once = ["--max_steps", "1", "--decode_prompts", "0", "--report_to", "none", "--save_strategy", "no"]
    main([*train, *once, "--eval_data", str(place / "chats.jsonl"), "--eval_rows", "2"])
    assert "figures on texts of another form" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{", "is no JSON"),
        ("[1]", "no object of names and values"),
        ('{"tokenize": true}', "tokenize is no setting of the template"),
        ('{"sise": "big"}', "the chat template reads no sise"),
    ],
)
def test_what_would_do_nothing_is_refused(given: str, message: str, target: str, place: Path) -> None:
    asked = ["--target", target, "--chat-template-kwargs", given]
    assert message in refused("generate", "the cat", *asked)
    data = ["--data", str(place / "chats.jsonl"), "--output", str(place / "heads"), "--use_cpu"]
    with pytest.raises(SpecGenError, match=message):
        main(["medusa", "--target", target, *data, "--chat_template_kwargs", given])


def test_without_a_template_there_is_nothing_to_tell(target: str, tmp_path: Path) -> None:
    assert "no effect with --no-chat" in refused("generate", "the cat", "--target", target, *BIG, "--no-chat")
    bare = save(tmp_path / "bare", seed=0, layers=1, template=None)
    assert "the tokenizer has none" in refused("generate", "the cat", "--target", bare, *BIG)


@pytest.mark.parametrize("row", [{"text": "hi"}, {"prompt": "hi", "completion": "you"}])
def test_nothing_is_told_to_plain_text(row: dict[str, Any], target: str) -> None:
    """It was trained on as it is, and the drafter's card said that it was made with the settings."""
    tokenizer = characters(THINKING)
    with pytest.raises(SpecGenError, match="no chat template is applied to"):
        prepare_dataset(Dataset.from_list([row]), tokenizer, DataOptions(chat=ChatOptions(chat_template_kwargs=OFF)))
    with pytest.raises(SpecGenError, match="no chat template is applied to"):
        prepare_dataset(Dataset.from_list([{**row, "chat_template_kwargs": OFF}]), tokenizer)
    assert len(prepare_dataset(Dataset.from_list([{**row, "chat_template_kwargs": None}]), tokenizer)) == 1
    told = refused("estimate", "--target", target, "--method", "medusa", "--tokens", "1e6", "--tflops", "1", *BIG)
    assert "no effect without --data" in told


def test_from_python() -> None:
    tokenizer = characters(THINKING)
    data = Dataset.from_list([{"messages": CHAT[:2]}])
    (asked,) = prepare_dataset(data, tokenizer, DataOptions(chat=ChatOptions(chat_template_kwargs=OFF)))
    (own,) = prepare_dataset(data.add_column("chat_template_kwargs", [OFF]), tokenizer)
    assert asked == own and asked["loss_mask"] == [False] * (len(own["loss_mask"]) - 7) + [True] * 6 + [False]
    pair = Dataset.from_list([{"prompt": CHAT[:1], "completion": CHAT[1:2], "chat_template_kwargs": json.dumps(OFF)}])
    assert prepare_dataset(pair, tokenizer)[0] == own
    shown = render(tokenizer, Chat(CHAT[:1], settings=OFF), asks=True)
    assert shown.endswith("</think>\n\n")
    with pytest.raises(SpecGenError, match="add_generation_prompt is no setting"):
        ChatOptions(chat_template_kwargs={"add_generation_prompt": True})


def test_the_callback_that_decodes_while_it_trains(tmp_path: Path) -> None:
    trainer = eagle3_trainer(tmp_path)
    trainer.processing_class = characters(THINKING)
    callback = AcceptanceCallback(trainer, [CHAT[:1]], chat_template_kwargs=OFF)
    wanted = trainer.processing_class.apply_chat_template(CHAT[:1], add_generation_prompt=True, **OFF)["input_ids"]
    assert callback._ids(CHAT[:1]) == wanted
    assert torch.tensor(wanted).numel() > len(AcceptanceCallback(trainer, [CHAT[:1]])._ids(CHAT[:1]))
