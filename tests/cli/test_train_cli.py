"""hf-specgen train: from a target and its texts to a folder with drafter, figures, curve and card."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from tiny import few, ours, plain, tiny
from train_runs import ROOT, eagle3_trainer, line, record, together
from typer.testing import CliRunner

from hf_specgen import load_drafter
from hf_specgen.checkpoints.card import write_card
from hf_specgen.cli import main as program
from hf_specgen.drafters.prompt_lookup import PromptLookup
from hf_specgen.errors import SpecGenError
from hf_specgen.trainers.feature_cache import write_cache
from hf_specgen.trainers.settings import from_yaml, parse
from hf_specgen.trainers.sources import prompts_of
from hf_specgen.trainers.train import main
from hf_specgen.trainers.worth import PLAIN, Worth, decode

Job = dict[str, Any]


def test_train_writes_a_drafter_its_figures_and_its_card(place: Path, tmp_path: Path) -> None:
    """The drafter learns the very texts that it is tried on, so it must have become better."""
    out = tmp_path / "drafter"
    eval_too = ["--eval_data", place / "texts.jsonl", "--eval_rows", "6", "--draft_vocab_size", "48"]
    arguments = line(place, out, *eval_too, "--max_steps", "60", "--learning_rate", "0.01")
    result = CliRunner().invoke(program.app, ["train", *arguments])
    assert result.exit_code == 0, result.output
    found = json.loads((out / "training.json").read_text())
    assert found["texts"] == 30 and found["tokens"] == 360 and found["steps"] == 60
    assert "a draft vocabulary of 48 ids" in found["start"]
    curve = found["curve"]
    assert curve[0]["step"] == 0 and curve[-1]["eval_loss"] < 0.5 * curve[0]["eval_loss"]
    worth = found["decoding"]
    assert worth["num_tokens"] == 2 and worth["same"] == worth["prompts"] == 2
    assert worth["tokens_per_round"] > worth["before"] + 0.3
    assert "with always 2 drafted:" in result.output and "plain steps" in result.output
    assert worth["combined_tokens_per_round"] >= 1 and "the drafter with prompt lookup" in result.output
    card = (out / "README.md").read_text()
    shown = ("| supervised tokens | 360 |", "![training curve](training.png)", "break even", "On 6 held-out texts")
    for words in ("## Training", "| this drafter with prompt lookup, `WithLookup(drafter)` | ", "### vLLM", *shown):
        assert words in card
    public = {path.name: path.read_text() for path in (out / "README.md", out / "config.json", out / "training.json")}
    assert not [name for name, text in public.items() if str(place) in text or str(tmp_path) in text]
    assert not (out / "training_args.bin").exists()  # a pickle that holds paths of this machine, and tokens
    assert (out / "training.png").read_bytes().startswith(b"\x89PNG")

    model = tiny(layers=3)
    drafter = load_drafter(out, target=model, num_tokens=2)
    assert drafter.config.draft_vocab_size == 48 and drafter.config.target["hidden_size"] == 32
    prompt = torch.tensor([json.loads((place / "texts.jsonl").read_text().splitlines()[0])["prompt"]])
    text = ours(model, drafter, prompt, max_new_tokens=12)
    assert torch.equal(text, plain(model, prompt, max_new_tokens=12)) and text.speculation.num_accepted_tokens > 0


@pytest.mark.parametrize("method", few(("medusa", "eagle", "distill"), "distill"))
def test_every_method_trains(method: str, place: Path, tmp_path: Path) -> None:
    start = ["--init_from", place / "target"] if method == "distill" else []
    found = main(line(place, tmp_path / "out", "--max_steps", "2", *start, method=method))
    assert found is not None and found["method"] == method and found["steps"] == 2
    assert (tmp_path / "out" / "model.safetensors").is_file() and (tmp_path / "out" / "README.md").is_file()
    if method == "distill":  # it is the target itself: all drafts are right
        assert found["decoding"]["rates"] == [1.0] * 4
        card = (tmp_path / "out" / "README.md").read_text()
        assert "## Speculative decoding" in card and "| supervised tokens | 324 |" in card
        assert "![training curve](training.png)" in card and str(place) not in card


def test_going_on_from_a_drafter_keeps_its_vocabulary(place: Path, tmp_path: Path) -> None:
    main(line(place, tmp_path / "one", "--max_steps", "2", "--draft_vocab_size", "20", "--decode_prompts", "0"))
    found = main(line(place, tmp_path / "two", "--max_steps", "2", "--init_from", tmp_path / "one", "--limit", "20"))
    assert found is not None and found["texts"] == 18  # a tenth is held out
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert torch.equal(one["d2t"], two["d2t"]) and torch.equal(one["t2d"], two["t2d"])
    assert not torch.equal(one["fc.weight"], two["fc.weight"])
    with pytest.raises(SpecGenError, match="init_from has its own"):
        main(line(place, tmp_path / "three", "--init_from", tmp_path / "one", "--draft_vocab_size", "20"))


def test_a_feature_cache_stands_in_for_the_target(place: Path, tmp_path: Path) -> None:
    """The same weights come out, to rounding: float32 features are the target's own."""
    texts = [json.loads(row) for row in (place / "texts.jsonl").read_text().splitlines()]
    rows = [{"input_ids": row["prompt"] + row["answer"], "loss_mask": [0] * 4 + [1] * 12} for row in texts]
    write_cache(tmp_path / "cache", Dataset.from_list(rows), tiny(layers=3), (1, 2, 3))
    few = ["--max_steps", "3", "--decode_prompts", "0"]
    main(line(place, tmp_path / "online", *few))
    again = line(place, tmp_path / "cached", *few, "--features", tmp_path / "cache")
    at = again.index("--data")
    main(again[:at] + again[at + 2 :])  # the cache holds the texts
    online, cached = (load_file(tmp_path / name / "model.safetensors") for name in ("online", "cached"))
    for name, tensor in online.items():
        torch.testing.assert_close(cached[name], tensor, rtol=1e-4, atol=1e-5)


def test_a_stopped_training_goes_on(place: Path, tmp_path: Path) -> None:
    saved = ["--save_strategy", "steps", "--save_steps", "2", "--decode_prompts", "0"]
    whole = main(line(place, tmp_path / "out", *saved, "--max_steps", "4"))
    with pytest.raises(SpecGenError, match="holds a model already"):
        main(line(place, tmp_path / "out", *saved, "--max_steps", "4"))
    weights = load_file(tmp_path / "out" / "model.safetensors")
    again = ["--resume_from_checkpoint", tmp_path / "out" / "checkpoint-2"]
    found = main(line(place, tmp_path / "out", *saved, "--max_steps", "4", *again))
    assert whole is not None and found is not None and found["steps"] == 4
    for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items():
        assert torch.equal(tensor, weights[name]), name


def test_a_yaml_file_holds_arguments_and_the_line_wins(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "target: org/t\ndata: org/d\noutput: here\nlearning_rate: 1e-3\nuse_cpu: true\npacking: true\n"
        "steps: 3\nsave_total_limit:\ndrafter_config: {num_hidden_layers: 2}\nreport_to: [none]\n"
    )
    job = parse("eagle3", ["--config", str(file), "--steps", "5", "--output=there"])
    assert (job.options.target, job.args.output_dir, job.args.learning_rate) == ("org/t", "there", 1e-3)
    assert job.args.steps == 5 and job.args.packing and job.args.use_cpu
    assert json.loads(job.options.drafter_config or "") == {"num_hidden_layers": 2}
    file.write_text("- a list\n")
    with pytest.raises(SpecGenError, match="holds no settings"):
        from_yaml(file)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["forest"], "one of eagle, eagle3, medusa, distill"),
        (["eagle3", "--target", "t", "--data", "d"], "--output FOLDER is required"),
        (["eagle3", "--target", "t", "--output", "o"], "--data is required: texts"),
        (["eagle3", "--target", "t", "--data", "d", "--output", "o", "--streaming"], "--streaming needs --max_steps"),
        (["eagle3", "--target", "t", "--data", "d", "--output", "o", "--drafter_config", "{"], "is no JSON"),
        (
            ["eagle3", "--target", "t", "--data", "d", "--output", "o", "--drafter_config", '{"layers": 2}'],
            "layers is no field of DrafterConfig",
        ),
        (["eagle3", "--target", "t", "--data", "d", "--output", "o", "--decode_tokens", "1"], "at least 2"),
        (
            ["eagle", "--target", "t", "--data", "d", "--output", "o", "--draft_vocab_size", "8"],
            "eagle has no such head",
        ),
        (["distill", "--target", "t", "--features", "f", "--output", "o", "--init_from", "s"], "--features is for"),
        (
            ["eagle3", "--target", "t", "--features", "f", "--eval_data", "e", "--output", "o"],
            "no hidden states are kept",
        ),
        (["eagle3", "--target", "t", "--data", "d", "--output", "o", "--eval_temperature", "-1"], "0 (greedy) or more"),
        (["eagle3", "--target", "t", "--data", "d", "--output", "o", "--stepz", "3"], "--stepz 3"),
        (["distill", "--target", "t", "--data", "d", "--output", "o"], "--init_from is required"),
        (["eagle3", "--target", "t", "--data", "d", "--output", "o", "--target_dtype", "int3"], "one of auto"),
        (["eagle3", "--target", "t", "--data", "d", "--output", "o", "--config"], "names no file"),
        (["eagle3", "--target", "/no/such", "--data", "d", "--output", "OUT"], "cannot be opened"),
    ],
)
def test_refusals_are_one_message(arguments: list[str], message: str, tmp_path: Path) -> None:
    given = [str(tmp_path / "o") if part == "OUT" else part for part in arguments]
    result = CliRunner().invoke(program.app, ["train", *given])
    assert result.exit_code == 2 and "Traceback" not in result.output
    assert message in " ".join(result.output.split()), result.output


def test_help_lists_what_matters_and_everything_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eagle3", "--help"]) is None
    short = capsys.readouterr().out
    assert main(["eagle3", "--help_all"]) is None
    everything = capsys.readouterr().out
    assert "--draft_vocab_size" in short and "--learning_rate" in short and "--torch_compile" not in short
    assert "--torch_compile" in everything
    assert CliRunner().invoke(program.app, ["train", "--help"]).exit_code == 0


def test_prompts_end_where_supervision_begins() -> None:
    rows = [{"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 0, 1]}, {"input_ids": [9, 8, 7], "loss_mask": [1, 1, 1]}]
    assert prompts_of(rows, 5) == [[5, 6, 7], [9, 8]]
    assert prompts_of(rows, 1) == [[5, 6, 7]] and prompts_of(rows, 0) == [] and prompts_of(None, 3) == []


def test_decoding_is_timed_in_turns_and_counted() -> None:
    """A lookup that knows the texts is right always; one that knows nothing of use drafts nothing right."""
    model = tiny()
    prompts = [[3, 4, 5], [9, 2, 6, 6]]
    texts = [plain(model, torch.tensor([prompt]), max_new_tokens=17)[0].tolist() for prompt in prompts]
    found = decode(model, {PLAIN: None, "knows": PromptLookup(4, corpus=texts)}, prompts, 17)
    assert found[PLAIN].tokens == found["knows"].tokens == 34 and found["knows"].same == 2
    assert found["knows"].total.tokens_per_round > 3 and found["knows"].seconds > 0
    assert found[PLAIN].total.num_rounds == 0 and found["knows"].step_seconds > 0


@pytest.mark.parametrize(
    ("ours_x", "lookup_x", "words"),
    [(1.4, 1.2, "worth it:"), (1.1, 1.2, "1.20x without training"), (0.9, 0.8, "not worth it here: 0.90x over")],
)
def test_the_verdict_counts_prompt_lookup(ours_x: float, lookup_x: float, words: str) -> None:
    worth = Worth(4, 64, 3, "bfloat16", 1.1, 2.0, [0.6, 0.3], 1.25, ours_x, lookup_x, 1.3, 40.0, 4, 2.1, 0.5, 2.5)
    text = " ".join(worth.lines())
    assert words in text and worth.pays == (words == "worth it:")
    assert "1.25 tokens a round break even and 2.00 make 1.60x" in text and "1.10 before training" in text
    both = replace(worth, combined_speedup=1.5)
    assert both.pays and "1.50x over plain decoding with prompt lookup: WithLookup(drafter)" in both.lines()[-1]


def test_a_card_without_a_training_has_no_such_section(place: Path, tmp_path: Path) -> None:
    main(line(place, tmp_path / "out", "--max_steps", "1", "--decode_prompts", "0", "--eval_rows", "0"))
    assert "## Training" in (tmp_path / "out" / "README.md").read_text()
    (tmp_path / "out" / "training.json").write_text(json.dumps({"schema": "another"}))
    text = write_card(tmp_path / "out", overwrite=True).read_text()
    assert "## Training" not in text and "{{" not in text


@pytest.mark.slow
def test_two_processes_train_the_same_drafter(place: Path, tmp_path: Path) -> None:
    few = ["--max_steps", "4", "--decode_prompts", "1", "--draft_vocab_size", "32"]
    alone = main(line(place, tmp_path / "one", *few, "--per_device_train_batch_size", "4"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = ["timeout", "--kill-after=5", "240", sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"]
    start += ["--num_processes=2", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
    start += [f"--main_process_port={port}", "-m", "hf_specgen.trainers.train"]
    start += line(place, tmp_path / "two", *few, "--per_device_train_batch_size", "2")
    known = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(start, env=known, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "two" / "training.json").read_text())
    assert alone is not None and found["processes"] == 2 and alone["processes"] == 1
    for one, two in zip(alone["curve"], found["curve"], strict=True):
        assert two == pytest.approx(one, abs=2e-6)
    weights = load_file(tmp_path / "two" / "model.safetensors")
    for name, tensor in load_file(tmp_path / "one" / "model.safetensors").items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=1e-5)


def evaluate_first(folder: str) -> Job:
    """Evaluate, then train."""
    trainer = eagle3_trainer(folder, max_steps=3)
    trainer.evaluate()
    trainer.train()
    return record(trainer)


@pytest.mark.slow
def test_an_evaluation_before_training_leaves_processes_together(tmp_path: Path) -> None:
    """accelerate takes a model that it prepared for evaluation as prepared: gradients would never meet."""
    jobs: dict[str, Job] = {"first": {"run": "test_train_cli.evaluate_first"}}
    found = together(jobs, tmp_path)["first"]
    assert found["world"] == 2 and found["spread"] == 0.0
