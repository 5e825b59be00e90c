"""load_drafter: every tensor is the checkpoint's, sizes are checked first, layer ids can be settled by measuring."""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_stand_in import medusa_heads, put_config, put_heads, stand_in
from oracle import drafter_from, eagle3_oracle, oracle_target
from safetensors.torch import load_file, save_file
from tiny import Watch, build, few, ours, plain, prompts, tiny
from transformers import PreTrainedModel

import hf_specgen
from hf_specgen import IncompatibleDrafter, SpecGenError
from hf_specgen.checkpoints.config import DrafterConfig
from hf_specgen.drafters.eagle import EagleDrafter
from hf_specgen.drafters.eagle3 import Eagle3Drafter
from hf_specgen.drafters.medusa import MedusaDrafter
from hf_specgen.drafting import learned
from hf_specgen.drafting.learned import LearnedDrafter
from hf_specgen.loading import calibrate_aux_layers, describe, drafter_class, first_agreement, load_drafter

CLASSES = {"medusa": MedusaDrafter, "eagle": EagleDrafter, "eagle3": Eagle3Drafter}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64, **HEADS}
ROPE = {"rope_type": "llama3", "rope_theta": 5e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "medusa": {"method": "medusa", "num_heads": 3},
    "eagle": {"method": "eagle", "own_head": False, "own_embedding": True, "fc_bias": True},
    "eagle3": {
        "method": "eagle3",
        "aux_layer_boundaries": [1, 2, 3],
        "draft_vocab_size": 40,
        "layer_type": "qwen3",
        "rope_parameters": {**ROPE, "original_max_position_embeddings": 64},
        "norm_before_fc": True,
        "own_embedding": True,
    },
}


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny(layers=4)


def new(kind: str, seed: int = 5, **settings: Any) -> LearnedDrafter:
    torch.manual_seed(seed)
    config = DrafterConfig(**{**SIZES, **VARIANTS[kind], **settings})
    drafter = CLASSES[config.method](config)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    if config.reduces_vocabulary:
        used = torch.randperm(64)[:40].sort().values
        drafter.get_buffer("d2t").copy_(used - torch.arange(40))
        drafter.get_buffer("t2d").fill_(False)[used] = True
    return drafter.eval()


@pytest.fixture(params=list(VARIANTS))
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[LearnedDrafter, Path]:
    drafter = new(request.param)
    drafter.save_pretrained(tmp_path / "drafter")
    return drafter, tmp_path / "drafter"


# --- every tensor is the checkpoint's


def test_every_tensor_is_the_checkpoints(saved: tuple[LearnedDrafter, Path], target: PreTrainedModel) -> None:
    drafter, folder = saved
    loaded = load_drafter(folder)
    assert type(loaded) is type(drafter) and not loaded.training
    written, state = load_file(folder / "model.safetensors"), loaded.state_dict()
    assert written.keys() == state.keys() == drafter.state_dict().keys()
    assert all(torch.equal(state[name], written[name]) for name in written)
    assert not [name for name, buffer in loaded.named_buffers() if name not in written]
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    assert loaded.config.to_dict() == {**drafter.config.to_dict(), "dtype": loaded.config.to_dict()["dtype"]}


def test_nothing_is_made_up(saved: tuple[LearnedDrafter, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """When tensors come in all places are empty, afterwards none is; no random number is drawn on the way."""
    _, folder = saved
    real, places = LearnedDrafter.load_state_dict, []

    def load(self: LearnedDrafter, *arguments: Any, **settings: Any) -> Any:
        places.extend(tensor.device.type for tensor in [*self.parameters(), *self.buffers()])
        return real(self, *arguments, **settings)

    monkeypatch.setattr(LearnedDrafter, "load_state_dict", load)
    before = torch.get_rng_state()
    loaded = load_drafter(folder)
    assert set(places) == {"meta"} and torch.equal(before, torch.get_rng_state())
    assert {tensor.device.type for tensor in [*loaded.parameters(), *loaded.buffers()]} == {"cpu"}


def test_a_loaded_drafter_drafts_what_was_saved(
    saved: tuple[LearnedDrafter, Path], target: PreTrainedModel, tmp_path: Path
) -> None:
    """Rope among the rest: a drafter whose frequencies were left empty would draft something else."""
    drafter, folder = saved
    ids, mask = prompts([5, 9])
    first, second = Watch(drafter), Watch(load_drafter(folder, target))
    text = plain(target, ids, mask)
    for watch in (first, second):
        assert torch.equal(ours(target, watch, ids, mask, num_assistant_tokens=4), text)
    pairs = list(zip(first.rounds, second.rounds, strict=True))
    assert first.width > 1
    assert all(torch.equal(one.draft.tokens, two.draft.tokens) for one, two in pairs)


def test_dtype_and_device_are_the_targets(saved: tuple[LearnedDrafter, Path]) -> None:
    _, folder = saved
    target = tiny(layers=4).to(torch.bfloat16)
    for asked, expected in ((None, torch.bfloat16), ("float16", torch.float16), (torch.float32, torch.float32)):
        state = load_drafter(folder, target, dtype=asked).state_dict()
        kinds = {name: tensor.dtype for name, tensor in state.items()}
        assert kinds.pop("d2t", torch.int64) == torch.int64 and kinds.pop("t2d", torch.bool) == torch.bool
        assert set(kinds.values()) == {expected}
    assert load_drafter(folder, dtype="auto").dtype == torch.float32
    assert load_drafter(folder, device="meta").device.type == "meta"
    for bad in ("int8", "half16"):
        with pytest.raises(SpecGenError, match=f"dtype='{bad}': a floating dtype"):
            load_drafter(folder, dtype=bad)


# --- the embedding


@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
def test_an_equal_embedding_is_not_held_twice(tmp_path: Path, target: PreTrainedModel, stored: torch.dtype) -> None:
    drafter = new("eagle3")
    weight = drafter.get_parameter("embed_tokens.weight")
    weight.data.copy_(target.get_input_embeddings().weight.to(stored))
    drafter.to(stored).save_pretrained(tmp_path)
    loaded = load_drafter(tmp_path, target)
    assert "embed_tokens.weight" not in loaded.state_dict() and not loaded.config.own_embedding
    assert "embedding: the target's, which the checkpoint's own one equals" in loaded.report.notes
    assert torch.equal(loaded.embed(torch.tensor([3])), target.get_input_embeddings().weight[[3]])
    assert "embed_tokens.weight" in load_drafter(tmp_path).state_dict()
    state = load_file(tmp_path / "model.safetensors")
    state["embed_tokens.weight"][63, 31] += 0.5
    save_file(state, tmp_path / "model.safetensors")
    assert "embed_tokens.weight" in load_drafter(tmp_path, target).state_dict(), "one number differs"


# --- what is refused, before anything is read or built


def refused_unread(monkeypatch: pytest.MonkeyPatch, words: str, *arguments: Any, **settings: Any) -> None:
    from hf_specgen.checkpoints import opening as hub

    def fail(*_: Any) -> None:
        raise AssertionError("weights were read, or a drafter was built")

    monkeypatch.setattr(hub, "read_tensors", fail)
    monkeypatch.setattr(learned, "assemble", fail)
    with pytest.raises(IncompatibleDrafter, match=words):
        load_drafter(*arguments, **settings)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"hidden_size": 48}, r"a target of hidden_size 32 and the target has 48"),
        ({"vocab_size": 80}, r"a target of vocab_size 64 and the target has 80"),
        ({"layers": 2}, r"the stream after layer 3 and the target has 2 layers"),
    ],
)
def test_a_target_that_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], words: str
) -> None:
    new("eagle3", target={"name": "org/its-own"}).save_pretrained(tmp_path)
    other = build("llama", **{"num_hidden_layers": sizes.pop("layers", 4), **sizes})
    refused_unread(monkeypatch, rf"{words}.*trained for \(org/its-own\)", tmp_path, other)


@pytest.mark.parametrize("kind", VARIANTS)
def test_missing_and_unknown_tensors_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    new(kind).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    name = sorted(whole)[-1]
    save_file({key: tensor for key, tensor in whole.items() if key != name}, file)
    refused_unread(monkeypatch, f"lacks the tensors .*{name}", tmp_path)
    save_file({**whole, "extra.weight": torch.ones(2)}, file)
    refused_unread(monkeypatch, r"tensors that are not understood: extra\.weight", tmp_path)


def test_other_things_are_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny().save_pretrained(tmp_path / "model")
    refused_unread(monkeypatch, r"whole causal language model \(LlamaForCausalLM\)", tmp_path / "model")
    refused_unread(monkeypatch, r"has no config\.json", tmp_path)
    with pytest.raises(SpecGenError, match="neither a folder here nor in the local cache"):
        load_drafter("nobody/nothing", local_files_only=True)
    with pytest.raises(SpecGenError, match="tre: unknown to load_drafter"):
        load_drafter(put_heads(tmp_path / "heads"), tre="chain")


def test_another_fingerprint_is_warned_about(tmp_path: Path, target: PreTrainedModel) -> None:
    from hf_specgen.models.facts import fingerprint

    new("medusa", target={"name": "org/its-own", "fingerprint": fingerprint(target)}).save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_drafter(tmp_path, target)
    with pytest.warns(UserWarning, match=r"trained for another target \(org/its-own\)"):
        load_drafter(tmp_path, tiny(seed=1, layers=4))


# --- classes, reports, the Hub


def test_classes_are_found_by_method() -> None:
    assert {method: drafter_class(method) for method in CLASSES} == CLASSES
    for unknown in ("dspark2", "base", "os.path", ""):
        with pytest.raises(IncompatibleDrafter, match="is not known here"):
            drafter_class(unknown)


def test_from_pretrained_is_load_drafter_of_one_class(tmp_path: Path, target: PreTrainedModel) -> None:
    drafter = new("medusa")
    drafter.save_pretrained(tmp_path)
    loaded = MedusaDrafter.from_pretrained(tmp_path, target=target, num_tokens=2)
    assert torch.equal(loaded.state_dict()["0.1.weight"], drafter.state_dict()["0.1.weight"])
    assert loaded.config.num_tokens == 2 and loaded.parts.embedding is target.get_input_embeddings().weight
    with pytest.raises(IncompatibleDrafter, match="holds a medusa drafter and Eagle3Drafter loads eagle3"):
        Eagle3Drafter.from_pretrained(tmp_path)


def test_what_was_decided_is_kept_and_logged(
    tmp_path: Path, target: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    new("eagle3").save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO, logger="hf_specgen.loading"):
        loaded = load_drafter(tmp_path, target, num_tokens=3)
    report = loaded.report
    assert str(report) in caplog.text and "boundaries [1, 2, 3]" in caplog.text
    assert (report.layout, report.config.method, report.config.num_tokens) == ("specgen", "eagle3", 3)
    assert "num_tokens = 3, as the caller says" in report.notes
    assert report.parameters == sum(parameter.numel() for parameter in loaded.parameters())
    assert describe(tmp_path).notes == tuple(note for note in report.notes if "caller" not in note)
    assert new("eagle3").report is None


def test_what_may_cost_acceptance_is_warned_about(tmp_path: Path, target: PreTrainedModel) -> None:
    heads = {name: tensor for name, tensor in medusa_heads().items() if "bias" not in name}
    save_file(heads, put_config(tmp_path) / "medusa_lm_head.safetensors")
    with pytest.warns(UserWarning, match="the residual blocks have no biases"):
        load_drafter(tmp_path, target)


def test_a_repository_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: PreTrainedModel) -> None:
    hub = stand_in(monkeypatch, tmp_path)
    put_heads(tmp_path / "me" / "drafter")
    watch = Watch(hf_specgen.load_drafter("me/drafter", target, num_tokens=2))
    ids, mask = prompts([4, 7])
    assert torch.equal(ours(target, watch, ids, mask), plain(target, ids, mask))
    assert watch.width == 2 and hub.fetched == ["config.json", "medusa_lm_head.safetensors"]


# --- which layers


def eagle3_of(tmp_path: Path, ids: list[int], nested: bool) -> tuple[Path, PreTrainedModel]:
    """Save an oracle that reads boundaries 1, 2, 3 with layer ids as some producer would list them."""
    target = oracle_target("stairs")
    drafter_from(eagle3_oracle(target, "feature")).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("specgen", "eagle_aux_hidden_state_layer_ids"):
        config.pop(key)
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = ids
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path, target.model


@pytest.mark.parametrize(("ids", "better"), [([0, 1, 2], "layer_output")])
def test_calibration_finds_the_layers(tmp_path: Path, ids: list[int], better: str) -> None:
    folder, model = eagle3_of(tmp_path, ids, nested=True)
    text = plain(model, torch.tensor([[3], [8]]), max_new_tokens=20)
    found = calibrate_aux_layers(folder, model, text)
    assert found.better == better and found.positions == 40
    assert found.layer_output == 1.0 and found.boundary is not None and found.boundary < 0.5
    assert load_drafter(folder, model, aux_layer_convention=found.better).hidden_layers == (1, 2, 3)


def test_calibration_when_one_reading_is_impossible(tmp_path: Path) -> None:
    folder, model = eagle3_of(tmp_path, [1, 2, 3], nested=True)
    text = plain(model, torch.tensor([[3]]), max_new_tokens=20)
    found = calibrate_aux_layers(folder, model, text)
    assert (found.layer_output, found.boundary, found.better) == (None, 1.0, "boundary")


def test_calibration_refuses_what_it_cannot_tell(tmp_path: Path, target: PreTrainedModel) -> None:
    new("eagle3").save_pretrained(tmp_path / "eagle3")
    ids = torch.ones(1, 8, dtype=torch.long)
    with pytest.raises(SpecGenError, match=r"boundaries \[1, 2, 3\] whichever way"):
        calibrate_aux_layers(tmp_path / "eagle3", target, ids)
    with pytest.raises(SpecGenError, match="holds a medusa drafter: it reads no layers by id"):
        calibrate_aux_layers(put_heads(tmp_path / "medusa"), target, ids)
    with pytest.raises(SpecGenError, match=r"ids of shape \(1, 2\)"):
        calibrate_aux_layers(tmp_path / "eagle3", target, ids[:, :2])


@pytest.mark.parametrize("settings", few(({}, {"sliding_window": 3}), {"sliding_window": 3}))
def test_agreement_is_what_the_loop_accepts_first(settings: dict[str, Any]) -> None:
    """One pass over a text the target wrote counts what the loop accepts at its first place, begun at each token."""
    target = tiny(layers=4, vocab=8)
    drafter = new("eagle3", seed=14, vocab_size=8, draft_vocab_size=8, **settings)
    drafter.attach(target)
    text = plain(target, torch.tensor([[5, 3]]), max_new_tokens=34)
    hits = 0
    for length in range(2, 34):
        watch = Watch(drafter)
        ours(target, watch, text[:, :length], max_new_tokens=3, num_assistant_tokens=1)
        assert watch.rounds[1].draft.width == 1
        hits += bool(watch.rounds[1].paths[0])
    share = first_agreement(drafter, target, text[:, :34])  # its first pair has no round: one more or the same
    assert 2 < hits < 30 and round(share * 33) in (hits, hits + 1)
