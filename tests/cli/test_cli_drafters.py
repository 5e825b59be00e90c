"""hf-specgen inspect, convert and card, and the other commands with a learned drafter."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_drafters import EAGLE3, call, fine, refused
from hub_stand_in import medusa_heads, put_config, put_heads, stand_in
from safetensors.torch import load_file, save_file
from tiny import build, tiny

from hf_specgen import load_drafter
from hf_specgen.checkpoints import opening as hub
from hf_specgen.checkpoints.config import DrafterConfig
from hf_specgen.checkpoints.formats import base
from hf_specgen.drafters.eagle3 import Eagle3Drafter
from hf_specgen.drafters.medusa import MedusaDrafter


@pytest.fixture
def eagle3(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    drafter = Eagle3Drafter(DrafterConfig("eagle3", **EAGLE3))
    used = torch.randperm(64)[:40].sort().values
    drafter.get_buffer("d2t").copy_(used - torch.arange(40))
    drafter.get_buffer("t2d").fill_(False)[used] = True
    drafter.save_pretrained(tmp_path / "eagle3")
    return tmp_path / "eagle3"


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(hub, "read_tensors", fail)


# --- inspect


@pytest.mark.usefixtures("unread")
def test_inspect_says_what_it_is_and_needs(eagle3: Path) -> None:
    text = " ".join(fine("inspect", eagle3).replace("│", "").split())
    for words in (
        "layout specgen",
        "method eagle3",
        "a target of hidden size 32 and vocabulary 64 with at least 4 layers",
        "the residual streams after layers 2, 3, 4",
        "its token embedding",
        "boundaries [2, 3, 4]",
        "vocabulary 40 of 64",
        "loads yes",
    ):
        assert words in text


@pytest.mark.usefixtures("unread")
def test_inspect_as_json(eagle3: Path) -> None:
    found = json.loads(call("inspect", eagle3, "--json").stdout)
    assert (found["layout"], found["method"], found["refused"]) == ("specgen", "eagle3", None)
    assert found["config"]["aux_layer_boundaries"] == [2, 3, 4] and found["config"]["draft_vocab_size"] == 40
    assert found["parameters"] == sum(parameter.numel() for parameter in load_shapes(eagle3))
    assert found["says"] == {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}


def load_shapes(folder: Path) -> list[torch.Tensor]:
    return [tensor for name, tensor in load_file(folder / "model.safetensors").items() if name not in ("d2t", "t2d")]


@pytest.mark.usefixtures("unread")
def test_inspect_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = stand_in(monkeypatch, tmp_path)
    put_heads(tmp_path / "me" / "heads", pickled=True)
    found = json.loads(call("inspect", "me/heads", "--json", "--revision", "v1").stdout)
    assert (found["source"], found["layout"], found["config"]["num_heads"]) == ("me/heads", "medusa", 3)
    assert served.fetched == ["config.json"] and served.asked == [("me/heads", "v1")]
    assert "neither a folder here nor a repository on the Hub" in refused("inspect", "me/hads")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: tiny().save_pretrained(folder), "whole causal language model"),
        (lambda folder: put_config(folder, a=1), "has no weights"),
        (lambda folder: save_file(medusa_heads(), folder / "model.safetensors"), "has no config.json"),
        (
            lambda folder: save_file({**medusa_heads(), "x": torch.ones(1)}, put_config(folder) / "model.safetensors"),
            "tensors that are not understood: x",
        ),
    ],
)
def test_inspect_says_why_something_is_refused(tmp_path: Path, make: Any, words: str) -> None:
    make(tmp_path)
    result = call("inspect", tmp_path, "--json")
    assert result.exit_code == 1 and words in json.loads(result.stdout)["refused"]
    assert call("inspect", tmp_path).exit_code == 1


def test_inspect_against_a_target(eagle3: Path, tmp_path: Path) -> None:
    for layers, code in ((4, 0), (3, 1)):
        build("llama", num_hidden_layers=layers).config.save_pretrained(tmp_path / "target")
        result = call("inspect", eagle3, "--target", tmp_path / "target", "--json")
        assert result.exit_code == code, result.output
    assert "reads the stream after layer 4" in json.loads(result.stdout)["refused"]
    assert "its config cannot be read" in refused("inspect", eagle3, "--target", tmp_path / "nowhere")


def test_inspect_says_what_only_a_target_tells(eagle3: Path, tmp_path: Path) -> None:
    """EAGLE-3 as its authors publish it lists no layers; what the class of a drafter refuses is refused here too."""
    config = json.loads((eagle3 / "config.json").read_text())
    for key in ("specgen", "eagle_aux_hidden_state_layer_ids", "eagle_config"):
        del config[key]
    (eagle3 / "config.json").write_text(json.dumps(config))
    assert "the residual streams after layers chosen by the target's depth" in fine("inspect", eagle3, "--json")
    build("llama", num_hidden_layers=8).config.save_pretrained(tmp_path / "target")
    found = json.loads(call("inspect", eagle3, "--json", "--target", tmp_path / "target").stdout)
    assert found["config"]["aux_layer_boundaries"] == [2, 4, 5] and found["refused"] is None
    config["hidden_act"] = "no such function"
    (eagle3 / "config.json").write_text(json.dumps(config))
    found = call("inspect", eagle3, "--json")
    assert found.exit_code == 1 and "no such function" in json.loads(found.stdout)["refused"]


# --- convert


def read(folder: Path, **settings: Any) -> dict[str, torch.Tensor]:
    return load_drafter(folder, **settings).state_dict()


@pytest.mark.parametrize("layout", ["sglang-eagle3", "vllm-speculators", "specgen"])
def test_convert_there_and_back(eagle3: Path, tmp_path: Path, layout: str) -> None:
    out = tmp_path / "deep" / "er" / layout
    assert f"{layout}, from specgen, 15 tensors" in fine("convert", eagle3, out, "--to", layout)
    assert json.loads(call("inspect", out, "--json").stdout)["layout"] == layout
    fine("convert", out, tmp_path / "back", "--to", "specgen")
    first, last = read(eagle3), read(tmp_path / "back")
    assert first.keys() == last.keys() and all(torch.equal(first[name], last[name]) for name in first)
    assert load_drafter(tmp_path / "back").hidden_layers == (2, 3, 4)
    assert sorted(path.name for path in out.parent.iterdir()) == [layout], "nothing is left beside it"


def test_convert_heads(tmp_path: Path) -> None:
    put_heads(tmp_path / "heads", pickled=True)
    fine("convert", tmp_path / "heads", tmp_path / "ours", "--to", "specgen")
    fine("convert", tmp_path / "ours", tmp_path / "theirs", "--to", "medusa")
    back = load_file(tmp_path / "theirs" / "medusa_lm_head.safetensors")
    assert all(torch.equal(back[name], tensor) for name, tensor in medusa_heads().items())


def test_convert_refuses_and_leaves_nothing(eagle3: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert "medusa" in refused("convert", eagle3, tmp_path / "out", "--to", "medusa")
    assert "Invalid value for '--to'" in call("convert", eagle3, tmp_path / "out", "--to", "modelopt-eagle3").output
    build("llama", hidden_size=48).config.save_pretrained(tmp_path / "target")
    before = sorted(tmp_path.rglob("*"))
    assert "hidden_size 32" in refused(
        "convert", eagle3, tmp_path / "out", "--to", "specgen", "--target", tmp_path / "target"
    )
    assert sorted(tmp_path.rglob("*")) == before


def test_convert_replaces_only_when_told(eagle3: Path, tmp_path: Path) -> None:
    out = put_heads(tmp_path / "out")
    (out / "README.md").write_text("mine")
    (out / ".git").mkdir()
    (out / ".git" / "HEAD").write_text("main")
    arguments = ("convert", eagle3, out, "--to", "sglang-eagle3")
    assert "is not empty: give another folder, or --force" in refused(*arguments)
    assert json.loads((out / "config.json").read_text())["medusa_num_heads"] == 2
    fine(*arguments, "--force")
    assert read(out).keys() == read(eagle3).keys()
    assert (out / "README.md").read_text() == "mine" and (out / ".git" / "HEAD").read_text() == "main"
    assert not (out / "medusa_lm_head.safetensors").exists(), "old weights would be read instead"
    fine("convert", out, out, "--to", "specgen", "--force")
    assert all(torch.equal(read(out)[name], tensor) for name, tensor in read(eagle3).items())
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years")
    assert "holds no config.json, so it is no checkpoint to replace" in refused(
        "convert", eagle3, precious, "--to", "specgen", "--force"
    )
    assert (precious / "thesis.txt").exists()
    assert "is a file" in refused("convert", eagle3, out / "README.md", "--to", "specgen")


@pytest.mark.parametrize("moment", ["write", "rename", "stop"])
def test_an_interrupted_conversion_changes_nothing(
    eagle3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    out = put_heads(tmp_path / "out")
    before = {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()}
    layout, rename = base.layout_named("specgen"), os.replace

    def half(checkpoint: Any, folder: Path) -> None:
        (folder / "config.json").write_text("{")
        raise KeyboardInterrupt

    def once(source: Path, place: Path) -> None:
        if Path(source).name == "new":
            raise OSError("no space") if moment == "rename" else KeyboardInterrupt
        rename(source, place)

    if moment == "write":
        monkeypatch.setattr(layout, "write", half, raising=False)
    else:
        monkeypatch.setattr("hf_specgen.cli.convert.os.replace", once)
    result = call("convert", eagle3, out, "--to", "specgen", "--force")
    assert result.exit_code == (2 if moment == "rename" else 130), result.output
    after = {path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()}
    assert after == before


def test_convert_reads_layer_ids_as_told(eagle3: Path, tmp_path: Path) -> None:
    config = json.loads((eagle3 / "config.json").read_text())
    del config["specgen"], config["eagle_aux_hidden_state_layer_ids"]
    (eagle3 / "config.json").write_text(json.dumps(config))
    for told, expected in (("boundary", (1, 2, 3)), ("layer_output", (2, 3, 4))):
        fine("convert", eagle3, tmp_path / told, "--to", "specgen", "--aux-layer-convention", told)
        assert load_drafter(tmp_path / told).hidden_layers == expected


# --- card


def test_card(eagle3: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    assert "Wrote" in fine("card", eagle3, "--license", "mit", "--dataset", "a/b", "--dataset", "c/d", "--name", "me/x")
    text = (eagle3 / "README.md").read_text()
    assert "license: mit" in text and "- c/d" in text and 'load_drafter("me/x"' in text
    assert "exists and stays as it is" in refused("card", eagle3)
    fine("card", eagle3, "--force", "--base-model", "org/other")
    assert "base_model: org/other" in (eagle3 / "README.md").read_text()
    for content, words in (("{", "is no JSON"), ("[]", "holds no report"), ("{}", "is no result of this program")):
        report.write_text(content)
        assert words in refused("card", eagle3, "--force", "--bench", report)
    assert "is no folder" in refused("card", tmp_path / "nowhere")


# --- the commands that decode


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Save a target with a tokenizer of 64 letters, and heads whose first repeats the target's own guess."""
    from tiny import letters

    folder = tmp_path_factory.mktemp("pair")
    model = tiny()
    model.save_pretrained(folder / "target")
    letters().save_pretrained(folder / "target")
    heads = MedusaDrafter(DrafterConfig("medusa", hidden_size=32, vocab_size=64, num_heads=3, num_head_layers=1))
    heads.save_pretrained(folder / "heads")
    return str(folder / "target"), f"learned:{folder / 'heads'}"


def test_generate_and_verify_with_a_learned_drafter(pair: tuple[str, str], tmp_path: Path) -> None:
    target, drafter = pair
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abcabcabc\n\nhello\n")
    common = ("--target", target, "--max-new-tokens", "12", "--no-chat")
    plain = fine("generate", "abcabc", *common, "--drafter", "none")
    assert fine("generate", "abcabc", *common, "--drafter", drafter) == plain
    drawn = ("--temperature", "1.0", "--seed", "1", "--sample-drafts", "--drafter", drafter)
    assert fine("generate", "abcabc", *common, *drawn)
    checks = ("--prompts", prompts, "--law-samples", "64", "--num-tokens", "3")
    text = fine("verify", *common, "--drafter", drafter, *checks)
    assert "identical to plain greedy: 2/2" in text and "fits" in text and not re.search(r"\b0 tokens drafted", text)
    assert "neither a folder here" in refused("generate", "abc", *common, "--drafter", "learned:nowhere/at-all")


def test_copies_before_a_learned_drafter(pair: tuple[str, str], tmp_path: Path) -> None:
    target, drafter = pair
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abcabcabc\n\nhello\n")
    common = ("--target", target, "--max-new-tokens", "12", "--no-chat")
    both = ("--drafter", f"prompt-lookup+{drafter}")
    assert fine("generate", "abcabc", *common, *both) == fine("generate", "abcabc", *common, "--drafter", "none")
    assert fine("generate", "abcabc", *common, *both, "--temperature", "1.0", "--seed", "1", "--sample-drafts")
    checks = ("--prompts", prompts, "--law-samples", "64", "--num-tokens", "3")
    text = fine("verify", *common, *both, *checks)
    assert "identical to plain greedy: 2/2" in text and "fits" in text and not re.search(r"\b0 tokens drafted", text)
    out = ("--out", tmp_path / "out", "--prompts", prompts, "--repeats", "1")
    fine("bench", *common, *both, *out)
    assert json.loads((tmp_path / "out" / "report.json").read_text())["drafter"]["name"] == both[1]
    assert "cannot take part: it knows no drafter prompt-lookup+learned:" in refused(
        "bench", *common, *both, *out, "--stock"
    )
    assert "neither a folder here" in refused("generate", "a", *common, "--drafter", "prompt-lookup+learned:nowhere/x")


def test_bench_feeds_the_card(pair: tuple[str, str], tmp_path: Path) -> None:
    target, drafter = pair
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abcabcabc\n\nhello\n")
    common = ("--target", target, "--max-new-tokens", "8", "--no-chat", "--repeats", "1", "--prompts", prompts)
    fine("bench", *common, "--drafter", drafter, "--out", tmp_path / "out", "--num-tokens", "2", "--constant")
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["drafter"]["name"] == drafter and report["methods"]["ours"]["acceptance"]["num_draft_tokens"]
    folder = Path(drafter.removeprefix("learned:"))
    fine("card", folder, "--bench", tmp_path / "out" / "report.json")
    text = (folder / "README.md").read_text()
    speedup = report["methods"]["ours"]["speedup"]
    assert f"{speedup:.2f}x" in text and "float32" in text and target not in text
    assert "--stock: transformers' assisted decoding cannot take part: it knows no drafter learned:" in refused(
        "bench", *common, "--drafter", drafter, "--stock"
    )


def test_the_lossy_rule_is_taken_and_never_verified(pair: tuple[str, str]) -> None:
    target, _ = pair
    common = ("--target", target, "--max-new-tokens", "12", "--no-chat", "--rule", "typical")
    with pytest.warns(UserWarning, match="typical"):
        assert fine("generate", "abcabcabc", *common)
    assert "there is nothing to verify" in refused("verify", *common)
