"""Published EAGLE heads whose configs say more, less or otherwise than their tensors: loaded, reported, drafting."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny import Watch, few, ours, plain, prompts, tiny
from torch import Tensor
from transformers import PreTrainedModel
from typer.testing import CliRunner

from hf_specgen import IncompatibleDrafter
from hf_specgen.checkpoints.config import DrafterConfig
from hf_specgen.checkpoints.formats.eagle3_common import numbered
from hf_specgen.cli.main import app
from hf_specgen.drafters.eagle3 import Eagle3Drafter
from hf_specgen.drafting.learned import LearnedDrafter
from hf_specgen.loading import describe, load_drafter

IDS = "eagle_aux_hidden_state_layer_ids"
SIZES = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64, "num_attention_heads": 4}
FLAT = {
    **SIZES,
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-6,
    "eagle_config": {IDS: [1, 3, 4], "use_aux_hidden_state": True},
}


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny(layers=8)


def made(**settings: Any) -> dict[str, Tensor]:
    """Return the tensors of a head that was trained as ``settings`` say."""
    torch.manual_seed(0)
    boundaries = {"aux_layer_boundaries": [2, 4, 5], "num_key_value_heads": 2}
    drafter = Eagle3Drafter(DrafterConfig("eagle3", **{**SIZES, **boundaries, **settings}))
    return {name: torch.randn_like(tensor) * 0.3 for name, tensor in drafter.state_dict().items()}


def put(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def library(inner: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Return a config as the speculators library writes it."""
    layers = {name: value for name, value in FLAT.items() if name not in ("architectures", "eagle_config")}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 64,
        "norm_before_residual": False,
        "transformer_layer_config": {**layers, "head_dim": 8, **inner},
        "speculators_config": {"proposal_methods": [{"speculative_tokens": 3}], "verifier": {"name_or_path": "t/t"}},
        **settings,
    }


def check(drafter: LearnedDrafter, target: PreTrainedModel, **settings: Any) -> None:
    """Demand the drafts of a head that was built with ``settings`` and the same weights, and plain texts."""
    right = Eagle3Drafter(DrafterConfig(**{**drafter.config.to_dict(), **settings})).eval()
    right.load_state_dict(drafter.state_dict())
    right.attach(target)
    ids, mask = prompts([3, 12, 7, 9])
    wanted = plain(target, ids, mask, max_new_tokens=12)
    watch, other = Watch(drafter), Watch(right)
    assert torch.equal(ours(target, watch, ids, mask, max_new_tokens=12), wanted)
    assert torch.equal(ours(target, other, ids, mask, max_new_tokens=12), wanted)
    found, due = ([round.draft.tokens.tolist() for round in run.rounds] for run in (watch, other))
    assert found == due and len(found) > 2


def loaded(folder: Path, target: PreTrainedModel, **settings: Any) -> tuple[LearnedDrafter, list[str]]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        drafter = load_drafter(folder, target, tree="chain", num_tokens=4, **settings)
    return drafter, [str(line.message) for line in said]


def test_a_qwen35_head_rotates_a_part_of_every_head(tmp_path: Path, target: PreTrainedModel) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e7, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}
    put(tmp_path, library({"rope_parameters": rope}), numbered(made()))
    drafter, said = loaded(tmp_path, target)
    assert said == [] and drafter.config.rotary_size == 4
    assert "over the first 4 of 8 values of a head" in str(drafter.report)
    rotated = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5}
    check(drafter, target, rope_parameters=rotated)
    with pytest.raises(AssertionError):
        check(drafter, target, rope_parameters={"rope_type": "default", "rope_theta": 1e7})
    drafter.save_pretrained(tmp_path / "again")
    assert load_drafter(tmp_path / "again", target).config.rope_parameters == rotated


def test_a_config_copied_from_the_target(tmp_path: Path, target: PreTrainedModel) -> None:
    """EAGLE3-Vicuna1.3-13B says 40 layers."""
    put(tmp_path, {**FLAT, "num_hidden_layers": 40, "head_dim": 16}, made())
    drafter, said = loaded(tmp_path, target)
    assert said == [] and (drafter.config.num_hidden_layers, drafter.config.head_dim) == (1, 8)
    assert "config says num_hidden_layers=40, the tensors say 1" in str(describe(tmp_path))
    check(drafter, target)


def test_norm_output_that_the_caller_settles(tmp_path: Path, target: PreTrainedModel) -> None:
    put(tmp_path, {**FLAT, "norm_output": True}, made())
    drafter, said = loaded(tmp_path, target)
    assert drafter.config.norm_output and len(said) == 1 and "Pass norm_output=False" in said[0]
    check(drafter, target, norm_output=True)
    with pytest.raises(AssertionError):
        check(drafter, target, norm_output=False)
    for chosen in (False, True):
        drafter, said = loaded(tmp_path, target, norm_output=chosen)
        assert said == [] and drafter.config.norm_output == chosen
        assert describe(tmp_path, norm_output=chosen).warnings == ()


def test_layer_ids_that_were_copied(tmp_path: Path, target: PreTrainedModel) -> None:
    put(tmp_path, library({}, **{IDS: [1, 3, 4]}), numbered(made()))
    drafter, said = loaded(tmp_path, target)
    assert drafter.config.aux_layer_boundaries == [2, 4, 5] and len(said) == 1 and "copied" in said[0]
    for settings in ({"aux_layer_convention": "boundary"}, {"aux_layer_boundaries": [1, 3, 4]}):
        drafter, said = loaded(tmp_path, target, **settings)
        assert drafter.config.aux_layer_boundaries == [1, 3, 4] and said == []


@pytest.mark.parametrize(
    "kinds",
    few(
        (["sliding_attention", "full_attention"], ["full_attention", "sliding_attention"]),
        ["full_attention", "sliding_attention"],
    ),
)
def test_two_layers_of_which_one_has_a_window(tmp_path: Path, kinds: list[str], target: PreTrainedModel) -> None:
    inner = {"num_hidden_layers": 2, "layer_types": kinds, "sliding_window": 4}
    put(tmp_path, library(inner), numbered(made(num_hidden_layers=2)))
    drafter, said = loaded(tmp_path, target)
    assert said == [] and drafter.config.windows == {"sliding_attention": 4, "full_attention": None}
    check(drafter, target, layer_types=kinds)
    with pytest.raises(AssertionError):
        check(drafter, target, layer_types=kinds[::-1])
    drafter.save_pretrained(tmp_path / "again")
    assert load_drafter(tmp_path / "again", target).config.layer_types == kinds


@pytest.mark.parametrize(("kind", "reason"), [("peagle", "P-EAGLE: it drafts all"), ("mtp", "MTP: it is the target")])
def test_other_methods_are_refused_with_the_reason(
    tmp_path: Path, kind: str, reason: str, target: PreTrainedModel
) -> None:
    tensors = numbered(made()) | {"embed_tokens.weight": torch.randn(64, 32)}
    if kind == "mtp":  # neither fc nor feature norm: a whole model by its names
        tensors = {name: value for name, value in tensors.items() if "fc" not in name and "hidden_norm" not in name}
    put(tmp_path, library({}, speculators_model_type=kind), tensors)
    with pytest.raises(IncompatibleDrafter, match=reason):
        load_drafter(tmp_path, target)
    run = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert run.exit_code == 1 and reason in " ".join(run.output.split())
