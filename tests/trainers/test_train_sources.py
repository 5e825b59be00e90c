"""hf-specgen train: whose texts they are, whose tokens, interruptions, the Hub, streams."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from tiny import few, letters, tiny
from train_runs import line
from transformers import TrainerCallback
from typer.testing import CliRunner

from hf_specgen import SpecGenError
from hf_specgen.cli import main as cli
from hf_specgen.errors import IncompatibleDrafter, reason_of
from hf_specgen.models.facts import TargetFacts
from hf_specgen.trainers import train as program
from hf_specgen.trainers.base import Filled, public_name
from hf_specgen.trainers.data import load_data
from hf_specgen.trainers.report import _told_arguments
from hf_specgen.trainers.settings import newest_checkpoint, parse, resumed
from hf_specgen.trainers.sources import authored, open_target
from hf_specgen.trainers.train import main
from hf_specgen.trainers.worth import is_sharded

NO_DECODING = ("--decode_prompts", "0")


def answers(folder: Path, model: Any, **more: Any) -> Path:
    """Write what ``hf-specgen regenerate`` leaves: answers, and whose they are."""
    rows = [{"prompt": [3, 4, 5], "completion": [6, 7, 8, 9]}] * 12
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sampling = {"max_new_tokens": 4, "temperature": 0.0, **more}
    meta = {"target": TargetFacts.of(model).to_dict(), "sampling": sampling}
    (folder / "answers.meta.json").write_text(json.dumps(meta))
    return folder / "answers.jsonl"


def told(file: Path, model: Any, *more: str) -> Any:
    job = parse("eagle3", ["--target", "t", "--output", "o", "--data", str(file), "--use_cpu", *more])
    return authored(job.options, TargetFacts.of(model), job.args.eval_temperature)


def test_answers_of_another_target(tmp_path: Path) -> None:
    """The target's own are described; another model's are warned about, and refused when its tokens are others."""
    mine = told(answers(tmp_path, tiny(layers=3)), tiny(layers=3))
    assert mine.warnings == () and mine.words == "the target's own answers, greedy, up to 4 tokens each"
    other = told(answers(tmp_path, tiny(seed=1)), tiny(layers=3))
    assert "not of this target" in other.warnings[0] and other.words.startswith("another model's")
    with pytest.raises(SpecGenError, match="token ids mean other texts"):
        told(answers(tmp_path, tiny(vocab=60)), tiny(layers=3))
    assert told(tmp_path / "answers.meta.json", tiny(layers=3)).warnings == ()  # nothing is known of that file


def test_answers_drawn_at_another_temperature(tmp_path: Path) -> None:
    """Evaluation that judges at another temperature is warned about, where those texts are evaluated."""
    file, model = answers(tmp_path, tiny(), temperature=0.7), tiny()
    assert "--eval_temperature 0.7" in told(file, model).warnings[0]
    assert told(file, model, "--eval_temperature", "0.7").warnings == ()
    assert told(file, model, "--eval_rows", "0").warnings == ()
    assert "drawn at temperature 0.7" in told(file, model).words
    (tmp_path / "plain.jsonl").write_text("{}\n")
    assert told(file, model, "--eval_data", str(tmp_path / "plain.jsonl")).warnings == ()


def test_the_warning_is_printed(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = line(place, tmp_path / "out", "--max_steps", "1", *NO_DECODING)
    given[given.index("--data") + 1] = str(answers(tmp_path, tiny(seed=1)))
    found = main(given)
    out = capsys.readouterr().out
    assert "warning: " in out and "holds answers of another target" in out and "training on 11 texts; 1 are" in out
    assert found is not None and found["authors"].startswith("another model's answers")


def test_a_small_model_with_other_tokens_is_refused(
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own tokenizer is compared before any text is read, and saved beside it when it agrees."""
    mine, theirs = letters(), letters(64)
    theirs.get_vocab = lambda: {token: 63 - place for token, place in mine.get_vocab().items()}
    monkeypatch.setattr("hf_specgen.trainers.sources.open_tokenizer", lambda name: theirs)
    monkeypatch.setattr(program, "read_rows", lambda *unused: 1 // 0)
    given = line(place, tmp_path / "out", "--init_from", place / "target", method="distill")

    def load(name: str, dtype: Any) -> tuple[Any, Any]:
        return tiny(layers=3), mine

    with pytest.raises(IncompatibleDrafter, match=r"cannot draft for .*their tokens differ: .*Take a small model"):
        main(given, load)
    monkeypatch.setattr("hf_specgen.trainers.sources.open_tokenizer", lambda name: letters())
    with pytest.raises(ZeroDivisionError):  # the twin: they agree, and the texts are read
        main(given, load)


def test_a_cache_of_another_targets_answers(place: Path, tmp_path: Path) -> None:
    """`features` warns as `train` does, and training from the cache knows who wrote the texts."""
    file, cache = answers(tmp_path, tiny(seed=1)), tmp_path / "cache"
    letters(64).save_pretrained(place / "target")
    try:
        given = ["features", "--target", place / "target", "--data", file, "--out", cache, "--store", "float32"]
        result = CliRunner().invoke(cli.app, [str(part) for part in given])
        assert result.exit_code == 0 and "warning: " in result.output and "not of this target" in result.output
        start = line(place, tmp_path / "out", "--max_steps", "1", *NO_DECODING, "--features", cache)
        found = main(start[:3] + start[5:])  # without --data
        assert found is not None and found["data"] == "answers.jsonl" and found["authors"].startswith("another model's")
    finally:
        for path in (place / "target").glob("tokenizer*"):
            path.unlink()


def test_the_best_weights_are_the_ones_that_are_told(place: Path, tmp_path: Path) -> None:
    """With ``load_best_model_at_end`` the figures are of the weights that are saved; the curve stays the training's."""
    more = ["--max_steps", "4", "--eval_strategy", "steps", "--eval_steps", "2", "--save_strategy", "steps"]
    more += ["--save_steps", "2", "--load_best_model_at_end", "true", "--metric_for_best_model", "eval_loss"]
    more += ["--greater_is_better", "true", "--learning_rate", "0.01"]  # the best is then step 2: losses fall
    found = main(line(place, tmp_path / "out", *more, *NO_DECODING))
    assert found is not None and found["best_step"] == 2 and found["steps"] == 4
    losses = [row["eval_loss"] for row in found["curve"] if "eval_loss" in row]
    assert len(losses) == 3 and losses[0] > losses[1] > losses[2] and found["evaluation"]["loss"] == losses[1]
    assert "the weights are those of step 2, the best" in (tmp_path / "out" / "README.md").read_text()


class Interrupt(TrainerCallback):
    """Press Ctrl-C behind step 3."""

    def on_step_end(self, args: Any, state: Any, control: Any, **unused: Any) -> None:
        if state.global_step == 3:
            raise KeyboardInterrupt


def hooks(model: torch.nn.Module) -> int:
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())


@pytest.mark.parametrize("method", few(("eagle3", "distill"), "eagle3"))
def test_an_interruption_leaves_all_in_order(
    method: str,
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The target is as it was, the program says where to go on, and what comes out then is bit for bit the same."""
    saved = ["--save_strategy", "steps", "--save_steps", "2", "--max_steps", "5", *NO_DECODING]
    saved += ["--init_from", str(place / "target")] if method == "distill" else []
    main(line(place, tmp_path / "whole", *saved, method=method))
    target = tiny(layers=3)
    before, config = copy.deepcopy(target.state_dict()), target.config.to_dict()
    build = program.build
    with monkeypatch.context() as patch:
        patch.setattr(program, "build", lambda *given: (made := build(*given), made.add_callback(Interrupt()))[0])
        with pytest.raises(KeyboardInterrupt):
            main(line(place, tmp_path / "out", *saved, method=method), lambda name, dtype: (target, None))
    told = "with --resume_from_checkpoint true goes on from checkpoint-2"
    assert told in capsys.readouterr().out
    assert hooks(target) == 0 and target.config.to_dict() == config
    assert all(torch.equal(before[name], part) for name, part in target.state_dict().items())
    with pytest.raises(SpecGenError, match="holds checkpoint-2 already"):
        main(line(place, tmp_path / "out", *saved, method=method))
    (tmp_path / "out" / "checkpoint-4").mkdir()  # one that was not finished
    (tmp_path / "out" / "checkpoint-4" / "model.safetensors").touch()
    main(line(place, tmp_path / "out", *saved, "--resume_from_checkpoint", "true", method=method))
    assert "going on from" in capsys.readouterr().out
    if method != "distill":
        assert "evaluations included, from step 2 on" in (tmp_path / "out" / "README.md").read_text()
    whole, again = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "out"))
    assert all(torch.equal(part, whole[name]) for name, part in again.items())


def test_nothing_to_resume_from(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A first start with ``true`` says so; a folder that is no checkpoint is refused; ``false`` protects a model."""
    few = ("--max_steps", "1", *NO_DECODING)
    main(line(place, tmp_path / "out", *few, "--resume_from_checkpoint", "true"))
    assert "no finished checkpoint is in" in capsys.readouterr().out
    with pytest.raises(SpecGenError, match="the folder of a finished checkpoint is required"):
        main(line(place, tmp_path / "new", *few, "--resume_from_checkpoint", tmp_path / "nowhere"))
    with pytest.raises(SpecGenError, match="holds a model already"):
        main(line(place, tmp_path / "out", *few, "--resume_from_checkpoint", "false"))
    torn = tmp_path / "out" / "checkpoint-2" / "trainer_state.json"  # the disk was full
    torn.parent.mkdir()
    torn.write_text('{"best_')
    assert newest_checkpoint(tmp_path / "out").name == "checkpoint-1"
    with pytest.raises(SpecGenError, match="the folder of a finished checkpoint is required"):
        main(line(place, tmp_path / "new", *few, "--resume_from_checkpoint", torn.parent))
    shutil.rmtree(tmp_path / "out" / "checkpoint-1")
    with pytest.raises(SpecGenError, match="a model and no checkpoint to go on from"):
        main(line(place, tmp_path / "out", *few, "--resume_from_checkpoint", "true"))
    assert newest_checkpoint(tmp_path / "nowhere") is None
    job = parse("eagle3", [*line(place, tmp_path / "no", *few)[1:], "--resume_from_checkpoint", "no"])
    assert resumed(job.args) is None


class Hub:
    """Stand in for the calls that transformers makes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[dict[str, Any]] = []
        api = SimpleNamespace(**{name: self.call(name) for name in ("create_repo", "upload_folder")})
        monkeypatch.setattr("transformers.trainer.hf_api", lambda *unused, **more: api)

    def call(self, name: str) -> Any:
        def take(*unused: Any, **given: Any) -> Any:
            files = sorted(path.name for path in Path(given["folder_path"]).iterdir()) if "folder_path" in given else []
            self.calls.append({"name": name, "files": files, **given})
            return SimpleNamespace(repo_id="me/my-drafter")

        return take


def test_the_hub_gets_the_drafter_and_its_card(
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One upload, at the end, of the files that are public; the card names the repository, the target, the license."""
    hub = Hub(monkeypatch)
    more = ["--push_to_hub", "--hub_model_id", "me/my-drafter", "--license", "mit", "--base_model", "org/target"]
    main(line(place, tmp_path / "out", "--max_steps", "2", "--save_steps", "1", *NO_DECODING, *more))
    uploads = [call for call in hub.calls if call["name"] == "upload_folder"]
    assert len(uploads) == 1 and uploads[0]["repo_id"] == "me/my-drafter"
    assert {"model.safetensors", "config.json", "README.md", "training.json", "training.png"} <= set(
        uploads[0]["files"]
    )
    assert "training_args.bin" not in uploads[0]["files"]
    card = (tmp_path / "out" / "README.md").read_text()
    for words in ("base_model: org/target", "license: mit", "# my-drafter", 'load_drafter("me/my-drafter"'):
        assert words in card
    assert json.loads((tmp_path / "out" / "config.json").read_text())["specgen"]["target"]["name"] == "org/target"


def test_a_stream_is_trained_on(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Texts come as they are read; the draft vocabulary is counted on the first ones."""
    more = ["--streaming", "--max_steps", "3", "--draft_vocab_size", "40", "--eval_data", place / "texts.jsonl"]
    found = main(line(place, tmp_path / "out", *more, "--eval_rows", "4", *NO_DECODING))
    assert found is not None and found["steps"] == 3 and found["texts"] is None and found["held_out"] == 4
    assert "training on a stream of texts; 4 are held out" in capsys.readouterr().out


def test_what_fills_a_stream_supervises_nothing() -> None:
    rows = [{"input_ids": [1, 2], "loss_mask": [0, 1]}] * 5
    filled = list(Filled(Dataset.from_list(rows).to_iterable_dataset(), 4))
    assert len(filled) == 8 and [sum(row["loss_mask"]) for row in filled] == [1] * 5 + [0] * 3
    assert len(list(Filled(rows[:4], 4))) == 4 and list(Filled([], 4)) == []


def test_reasons_end_in_one_dot(tmp_path: Path) -> None:
    """A reason of others may end in a dot of its own; behind ours there is one."""
    assert reason_of(OSError("no such thing.\nmore")) == "no such thing" and reason_of(KeyError()) == "KeyError"
    for name in ("none.jsonl", "none"):
        with pytest.raises(SpecGenError) as caught:
            load_data(tmp_path / name)
        assert ".." not in str(caught.value).replace("...", ""), caught.value
    with pytest.raises(SpecGenError, match="there is no such file") as caught:
        load_data(tmp_path / "none.jsonl")


def test_zeros_are_told() -> None:
    """A training without warm-up, noise, or with seed 0 is another than one with the defaults."""
    zeros = ("seed", "warmup_steps", "noise", "max_grad_norm")
    given = [part for name in zeros for part in (f"--{name}", "0")]
    job = parse("eagle", ["--target", "t", "--data", "d", "--output", "o", "--use_cpu", *given])
    shown = _told_arguments(job.args.to_dict())
    assert [shown[name] for name in zeros] == [0] * 4 and shown["share"] == 0.1 and "bf16" not in shown


@pytest.mark.parametrize(
    "more",
    [
        ("--num_train_epochs", "0"),
        ("--max_steps", "2", "--dataloader_drop_last", "1", "--per_device_train_batch_size", "64"),
    ],
)
def test_nothing_to_train_on(more: tuple[str, ...], place: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecGenError, match=r"no step was made.*smaller batches"):
        main(line(place, tmp_path / "out", *more))
    assert not (tmp_path / "out" / "config.json").exists()


def test_the_demo_is_named_where_it_cannot_be_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate launch knows no target by that name: what to give instead is said."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SpecGenError, match=r"its folder is required.*HuggingFaceTB/SmolLM2-135M-Instruct"):
        open_target("demo", torch.float32)


def test_names_that_may_be_told(tmp_path: Path) -> None:
    assert public_name("org/model") == "org/model" and public_name("") == ""
    assert public_name(str(tmp_path / "models" / "mine")) == "mine" and public_name("gpt2") == "gpt2"
    assert not is_sharded(tiny())
