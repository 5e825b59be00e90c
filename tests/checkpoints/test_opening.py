"""Folders and Hub repositories as sources: what is read, what is fetched, what is refused, and in which words."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hub_stand_in import SHA, Hub, medusa_heads, put_config, put_heads, stand_in
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, RevisionNotFoundError
from safetensors.torch import save_file
from tiny import build, tiny

from hf_specgen.checkpoints import files
from hf_specgen.checkpoints.files import HTTPError, HubOptions
from hf_specgen.checkpoints.formats.base import ReadOptions
from hf_specgen.checkpoints.opening import identify, open_checkpoint, open_source
from hf_specgen.errors import IncompatibleDrafter, SpecGenError


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    return stand_in(monkeypatch, tmp_path / "hub")


def heads_of(opened_tensors: dict[str, torch.Tensor], **settings: object) -> None:
    expected = medusa_heads(**settings)
    assert opened_tensors.keys() == expected.keys()
    assert all(torch.equal(opened_tensors[name], expected[name]) for name in expected)


# --- what is read


@pytest.mark.parametrize("pickled", [False, True])
def test_a_folder_of_one_file(tmp_path: Path, pickled: bool) -> None:
    source = open_source(put_heads(tmp_path, pickled))
    assert source.config["base_model_name_or_path"] == "org/target"
    assert source.shapes == {name: tuple(tensor.shape) for name, tensor in medusa_heads().items()}
    heads_of(source.load(source.shapes))
    assert list(source.load(["1.1.weight"])) == ["1.1.weight"]


@pytest.mark.parametrize(("suffix", "index"), [("safetensors", "model.safetensors"), ("bin", "pytorch_model.bin")])
def test_shards(tmp_path: Path, suffix: str, index: str) -> None:
    put_config(tmp_path)
    tensors = medusa_heads()
    halves = [{name: tensors[name] for name in part} for part in (list(tensors)[:4], list(tensors)[4:])]
    where = {}
    for number, half in enumerate(halves):
        file = f"part-{number}.{suffix}"
        save_file(half, tmp_path / file) if suffix == "safetensors" else torch.save(half, tmp_path / file)
        where |= dict.fromkeys(half, file)
    (tmp_path / f"{index}.index.json").write_text(json.dumps({"weight_map": where}))
    heads_of(open_source(tmp_path).load(tensors))
    (tmp_path / f"part-1.{suffix}").unlink()
    with pytest.raises(IncompatibleDrafter, match=rf"not there: part-1.{suffix}"):
        open_source(tmp_path)


@pytest.mark.parametrize("place", ["../secret.safetensors", "/etc/secret.safetensors", "a\\b.safetensors"])
def test_an_index_cannot_name_files_elsewhere(tmp_path: Path, place: str) -> None:
    save_file(medusa_heads(), tmp_path / "secret.safetensors")
    folder = put_config(tmp_path / "drafter")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"0.1.weight": place}}))
    with pytest.raises(IncompatibleDrafter, match="files elsewhere"):
        open_source(folder)


def test_safetensors_go_before_pickles_and_leftovers_of_training_do_not_count(tmp_path: Path) -> None:
    put_config(tmp_path)
    save_file(medusa_heads(), tmp_path / "model.safetensors")
    for name in ("pytorch_model.bin", "training_state.pt", "optimizer.pt", "rng_state.pth"):
        (tmp_path / name).write_bytes(b"no tensors")
    heads_of(open_source(tmp_path).load(medusa_heads()))


def test_a_file_of_another_name(tmp_path: Path) -> None:
    put_config(tmp_path)
    save_file(medusa_heads(), tmp_path / "drafter.safetensors")
    (tmp_path / "training_state.pt").write_bytes(b"no tensors")
    heads_of(open_source(tmp_path).load(medusa_heads()))
    save_file(medusa_heads(), tmp_path / "other.safetensors")
    with pytest.raises(IncompatibleDrafter, match=r"several files of weights \(drafter.safetensors, other"):
        open_source(tmp_path)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_what_was_read_outlives_the_file(tmp_path: Path, file: str) -> None:
    put_config(tmp_path)
    tensors = medusa_heads()
    save_file(tensors, tmp_path / file) if file.endswith("safetensors") else torch.save(tensors, tmp_path / file)
    read = open_source(tmp_path).load(tensors)
    (tmp_path / file).write_bytes(b"")  # a mapped file cut short would kill the process at the next look
    heads_of(read)


def test_an_old_pickle_is_read(tmp_path: Path) -> None:
    put_config(tmp_path)
    torch.save(medusa_heads(), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    source = open_source(tmp_path)
    heads_of(source.load(source.shapes))


# --- what is never executed


class Bomb:
    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.place),)


@pytest.mark.parametrize("plain", [False, True])
def test_a_pickle_that_runs_code_is_refused(tmp_path: Path, plain: bool) -> None:
    folder, trap = put_config(tmp_path / "drafter"), tmp_path / "exploded"
    if plain:
        (folder / "medusa_lm_head.pt").write_bytes(pickle.dumps({"0.1.weight": Bomb(trap)}))
    else:
        torch.save({"0.1.weight": torch.ones(2, 2), "x": Bomb(trap)}, folder / "medusa_lm_head.pt")
    with pytest.raises(IncompatibleDrafter, match="could run code, so it is not read"):
        open_source(folder)
    assert not trap.exists()
    torch.load(folder / "medusa_lm_head.pt", weights_only=False) if not plain else pickle.loads(
        (folder / "medusa_lm_head.pt").read_bytes()
    )
    assert trap.exists(), "the trap works"


def test_a_pickle_of_other_things_is_refused(tmp_path: Path) -> None:
    put_config(tmp_path)
    torch.save([torch.ones(2)], tmp_path / "pytorch_model.bin")
    with pytest.raises(IncompatibleDrafter, match="holds list, a dictionary of tensors is required"):
        open_source(tmp_path)
    torch.save({"state_dict": {"x": torch.ones(2)}}, tmp_path / "pytorch_model.bin")
    with pytest.raises(IncompatibleDrafter, match="a dictionary of tensors is required"):
        open_source(tmp_path)


def test_code_is_neither_fetched_nor_allowed(hub: Hub) -> None:
    folder = put_heads(hub.root / "me" / "drafter")
    (folder / "modeling.py").write_text("raise RuntimeError")
    opened = open_checkpoint("me/drafter", ReadOptions())
    opened.read()
    assert set(hub.fetched) == {"config.json", "medusa_lm_head.safetensors"}
    with pytest.raises(SpecGenError, match="nothing of a drafter's repository is ever executed"):
        open_checkpoint("me/drafter", ReadOptions(), {"trust_remote_code": True})


# --- the Hub


def test_a_repository_is_described_without_its_weights(hub: Hub) -> None:
    put_heads(hub.root / "me" / "drafter")
    opened = open_checkpoint("me/drafter", ReadOptions(), {"revision": "v2", "token": "secret"})
    assert hub.fetched == ["config.json"]
    assert hub.asked == [("me/drafter", "v2")] and hub.token == "secret"
    assert opened.report.parameters == sum(tensor.numel() for tensor in medusa_heads().values())
    heads_of(opened.read().tensors)


def test_a_pickle_on_the_hub_is_described_without_its_weights(hub: Hub) -> None:
    folder = put_heads(hub.root / "me" / "drafter", pickled=True, width=256, vocab=512)
    opened = open_checkpoint("me/drafter", ReadOptions())
    assert hub.fetched == ["config.json"]
    assert 0 < hub.bytes_read < (folder / "medusa_lm_head.pt").stat().st_size / 50
    heads_of(opened.read().tensors, width=256, vocab=512)


def test_only_the_shards_that_hold_the_drafter_are_fetched(hub: Hub) -> None:
    folder = put_config(hub.root / "me" / "medusa-2", architectures=["LlamaForCausalLM"], vocab_size=64, hidden_size=32)
    backbone = tiny().state_dict()
    heads = {f"medusa_head.{name}": tensor for name, tensor in medusa_heads().items()}
    where = {}
    for number, part in enumerate((backbone, heads), 1):
        save_file(part, folder / f"model-{number}.safetensors")
        where |= dict.fromkeys(part, f"model-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    source = open_source("me/medusa-2")
    source.load(heads)
    assert [file for file in hub.fetched if file.endswith(".safetensors")] == ["model-2.safetensors"]


def test_the_commit_is_kept_while_files_are_fetched(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    put_heads(hub.root / "me" / "drafter")
    revisions = {}
    monkeypatch.setattr(
        files,
        "hf_hub_download",
        lambda repo, file, revision, **_: (revisions.update({file: revision}), hub.download(repo, file))[1],
    )
    open_checkpoint("me/drafter", ReadOptions()).read()
    assert revisions == {"config.json": None, "medusa_lm_head.safetensors": SHA}


RESPONSE = SimpleNamespace(headers={}, request=None, status_code=404)


def test_errors_of_the_hub_say_what_to_do(hub: Hub) -> None:
    put_heads(hub.root / "me" / "drafter")
    hub.gated.add("me/secret")
    for name, words in {
        "me/secret": r"me/secret is gated: accept its terms at https://huggingface.co/me/secret",
        "me/drafer": "neither a folder here nor a repository on the Hub that you may read: check the spelling",
        "me drafter": "neither a folder here nor the name of a Hub repository",
        "me/drafter/sub": "does not exist: a folder, or a Hub repository as owner/name",
        "/nowhere/drafter": "does not exist",
    }.items():
        hub.down = HFValidationError("spaces") if " " in name else None
        with pytest.raises(SpecGenError, match=words):
            open_source(name)
    hub.down = RevisionNotFoundError("no", response=RESPONSE)
    with pytest.raises(SpecGenError, match="no such revision"):
        open_source("me/drafter", HubOptions(revision="v9"))


def test_a_hub_that_is_not_reached(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    put_heads(hub.root / "me" / "drafter")
    for error in (HTTPError("no route"), ConnectionError("no route")):
        hub.down = error
        with pytest.raises(SpecGenError, match="nor in the local cache, and the Hub was not asked or not reached"):
            open_source("me/drafter")
    cached = put_heads(tmp_path / "snapshot")
    monkeypatch.setattr(files, "try_to_load_from_cache", lambda *_, **__: str(cached / "config.json"))
    heads_of(open_source("me/drafter").load(medusa_heads()))


@pytest.mark.parametrize("offline", [True, False])
def test_offline_the_cache_alone_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, offline: bool) -> None:
    """The Hub client's own cache on disk, as it lays it out."""
    monkeypatch.setattr(files, "HfApi", None)
    monkeypatch.setattr(files, "HF_HUB_OFFLINE", offline)
    cache = tmp_path / "cache" / "models--me--drafter"
    put_heads(cache / "snapshots" / SHA)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(SHA)
    assert isinstance(try_to_load_from_cache("me/drafter", "config.json", cache_dir=tmp_path / "cache"), str)
    options = HubOptions(cache_dir=tmp_path / "cache", local_files_only=not offline)
    heads_of(open_source("me/drafter", options).load(medusa_heads()))
    shutil.rmtree(cache / "refs")
    with pytest.raises(SpecGenError, match="unset HF_HUB_OFFLINE, leave local_files_only out"):
        open_source("me/drafter", options)


# --- what is no drafter


def test_folders_that_are_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(IncompatibleDrafter, match=r"has no config.json \(it holds nothing\)"):
        open_source(tmp_path)
    put_config(tmp_path)
    with pytest.raises(IncompatibleDrafter, match=r"has no weights: one of medusa_lm_head.safetensors"):
        open_source(tmp_path)
    with pytest.raises(SpecGenError, match="is a file"):
        open_source(tmp_path / "config.json")
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(IncompatibleDrafter, match=r"no readable safetensors file.*git lfs pull"):
        open_source(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(IncompatibleDrafter, match="holds list, an object is required"):
        open_source(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(IncompatibleDrafter, match=r"config.json is no JSON"):
        open_source(tmp_path)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_whole_model_is_told_apart(tmp_path: Path, family: str) -> None:
    build(family).save_pretrained(tmp_path)
    with pytest.raises(IncompatibleDrafter, match=r"whole causal language model \(.*\). To draft with it: SmallModel"):
        identify(open_source(tmp_path))


def test_something_else_is_no_whole_model(tmp_path: Path) -> None:
    put_config(tmp_path, architectures=["LlamaForCausalLM"], model_type="llama")
    save_file({"fc.weight": torch.ones(2, 2), "embed_tokens.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(IncompatibleDrafter, match="no drafter checkpoint that is known here"):
        identify(open_source(tmp_path))


# --- overrides and reports


def test_overrides_are_fields_of_the_config(tmp_path: Path) -> None:
    put_heads(tmp_path)
    opened = open_checkpoint(tmp_path, ReadOptions(), {"tree": "chain", "num_tokens": 2})
    assert (opened.config.tree, opened.config.num_tokens) == ("chain", 2)
    assert (opened.read().config.tree, opened.plan.config.tree) == ("chain", None)
    assert "tree = 'chain', as the caller says" in opened.report.notes
    for bad in ("tres", "method", "target"):
        with pytest.raises(SpecGenError, match=f"{bad}: unknown to load_drafter. It takes .*tree"):
            open_checkpoint(tmp_path, ReadOptions(), {bad: 1})


def test_a_report_says_what_is_needed(tmp_path: Path) -> None:
    put_heads(tmp_path)
    report = open_checkpoint(tmp_path, ReadOptions()).report
    assert report.needs == (
        "a target of hidden size 32 and vocabulary 64",
        "its hidden states: the input of the language-model head",
    )
    plain = json.loads(json.dumps(report.to_dict()))
    assert (plain["layout"], plain["method"], plain["config"]["num_heads"]) == ("medusa", "medusa", 3)
    assert "medusa, layout medusa, 9,312 parameters" in str(report)
