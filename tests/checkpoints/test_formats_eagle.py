"""EAGLE-1 in every layout: the same tensors under our names, or an error that names what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support_formats import (
    OPTIONS,
    A,
    H,
    V,
    eagle_shapes,
    library_config,
    llama_config,
    opened,
    random,
    read,
    renamed,
    same,
    source_of,
)
from torch import Tensor

from hf_specgen.checkpoints.config import DrafterConfig
from hf_specgen.checkpoints.formats.base import Checkpoint, detect, layout_named
from hf_specgen.errors import IncompatibleDrafter

Tensors = dict[str, Tensor]


def authors(bias: bool = True, **settings: Any) -> tuple[dict[str, Any], Tensors]:
    config = llama_config(**settings) | ({} if bias else {"bias": False})
    return config, random(eagle_shapes(bias))


def old_vllm(prefix: str = "", norms: float | None = 1.0) -> tuple[dict[str, Any], Tensors]:
    tensors = random(eagle_shapes())
    tensors["lm_head.weight"] = torch.randn(V, H)
    if norms is not None:
        tensors["layers.0.input_layernorm.weight"] = torch.full((H,), norms)
        tensors["norm.weight"] = torch.full((H,), norms)
    tensors = {name if name[:2] in ("fc", "lm") else prefix + name: tensor for name, tensor in tensors.items()}
    return {"model_type": "eagle", "model": llama_config(), "truncated_vocab_size": None}, tensors


def library(**settings: Any) -> tuple[dict[str, Any], Tensors]:
    tensors = random(eagle_shapes())
    del tensors["embed_tokens.weight"]
    tensors = renamed(renamed(tensors, "fc.", "fusion_fc."), "layers.0.", "transformer.")
    named = {"speculators_model_type": "eagle", "transformer_layer_architecture": "LlamaDecoderLayer"}
    return library_config(**{**named, "layernorms": False, "fusion_bias": True, **settings}), tensors


def expected(embedding: bool = True) -> Tensors:
    tensors = random(eagle_shapes())
    return tensors if embedding else {name: tensors[name] for name in tensors if name != "embed_tokens.weight"}


def test_the_authors_file_is_taken_as_it_is() -> None:
    config, tensors = authors()
    found = read(source_of(config, tensors))
    assert (found.layout, found.config.method) == ("eagle", "eagle")
    assert same(found.tensors, tensors)
    assert found.config.fc_bias and found.config.own_embedding and not found.config.own_head
    assert (found.config.layer_type, found.config.num_key_value_heads, found.config.head_dim) == ("llama", 2, H // A)
    assert "embedding: the drafter's own" in found.notes
    assert "head: the target's" in found.notes
    assert any("after the last norm" in note for note in found.notes)
    assert found.warnings == ()


def test_sglang_only_renames_the_architecture() -> None:
    config, tensors = authors(architectures=["LlamaForCausalLMEagle"])
    assert same(read(source_of(config, renamed(tensors, "", "model."))).tensors, tensors)


def test_the_files_bias_counts_not_the_configs() -> None:
    config, tensors = authors(bias=False)
    del config["num_key_value_heads"], config["bias"]  # an absent key means True to the authors' code
    tensors["layers.0.self_attn.k_proj.weight"] = torch.randn(H, H)
    tensors["layers.0.self_attn.v_proj.weight"] = torch.randn(H, H)
    found = read(source_of(config, tensors))
    assert not found.config.fc_bias
    assert found.config.num_key_value_heads == A
    config, tensors = authors(bias=True)
    assert read(source_of({**config, "bias": False}, tensors)).config.fc_bias


def test_without_embedding_the_targets_is_used() -> None:
    config, tensors = authors()
    del tensors["embed_tokens.weight"]
    found = read(source_of(config, tensors))
    assert not found.config.own_embedding
    assert "embedding: the target's" in found.notes


def test_biases_of_queries_keys_and_values_alone() -> None:
    config, tensors = authors(qkv_bias=True, model_type="qwen2")
    biases = random({f"layers.0.self_attn.{name}_proj.bias": (H if name == "q" else H // 2,) for name in "qkv"})
    found = read(source_of(config, tensors | biases))
    assert found.config.attention_bias
    assert not found.tensors["layers.0.self_attn.o_proj.bias"].any()  # adding zero changes nothing


@pytest.mark.parametrize("prefix", ["", "model.", "model.model."])
def test_old_vllm(prefix: str) -> None:
    found = read(source_of(*old_vllm(prefix)))
    assert found.layout == "old-vllm-eagle"
    assert same(found.tensors, expected())
    assert "left out" in found.warnings[0]
    assert any("copy in the file is not read" in note for note in found.notes)
    assert read(source_of(*old_vllm(prefix, norms=None))).warnings == ()


def test_norms_that_were_trained_are_refused() -> None:
    with pytest.raises(IncompatibleDrafter, match=r"input_layernorm.weight is not all ones"):
        read(source_of(*old_vllm(norms=1.5)))
    config, tensors = authors()
    tensors["norm.weight"] = torch.full((H,), 0.5)
    with pytest.raises(IncompatibleDrafter, match=r"norm.weight is not all ones"):
        read(source_of(config, tensors))


def test_old_vllm_with_fewer_ids_is_refused() -> None:
    config, tensors = old_vllm()
    with pytest.raises(IncompatibleDrafter, match=r"token_map.*whole vocabulary"):
        read(source_of({**config, "truncated_vocab_size": 20}, tensors))
    with pytest.raises(IncompatibleDrafter, match=r"token_map.*whole vocabulary"):
        read(source_of(config, {**tensors, "token_map": torch.arange(20)}))


def test_the_library_calls_them_fusion_and_transformer() -> None:
    found = read(source_of(*library()))
    assert found.layout == "vllm-speculators-eagle"
    assert same(found.tensors, expected(embedding=False))
    assert found.config.rope_parameters["rope_theta"] == 500.0


def test_the_library_leaves_defaults_out() -> None:
    config, tensors = library(inner={"rms_norm_eps": None})
    del config["transformer_layer_config"]["rms_norm_eps"]
    assert read(source_of(config, tensors)).config.rms_norm_eps == 1e-6


def test_the_library_with_norms_is_refused() -> None:
    with pytest.raises(IncompatibleDrafter, match="layernorms=True"):
        read(source_of(*library(layernorms=True)))
    config, tensors = library()
    with pytest.raises(IncompatibleDrafter, match=r"pre_lm_head_layernorm.weight"):
        read(source_of(config, {**tensors, "pre_lm_head_layernorm.weight": torch.ones(H)}))
    with pytest.raises(IncompatibleDrafter, match="MixtralDecoderLayer"):
        read(source_of(*library(transformer_layer_architecture="MixtralDecoderLayer")))


@pytest.mark.parametrize("make", [authors, old_vllm, library])
def test_missing_and_unknown_tensors_are_named(make: Any) -> None:
    config, tensors = make()
    for name in list(tensors):
        if name.split(".")[-2] in ("embed_tokens", "lm_head", "input_layernorm", "norm") or name.endswith("bias"):
            continue  # the target's, or counted by the tensors
        short = {other: tensors[other] for other in tensors if other != name}
        with pytest.raises(IncompatibleDrafter, match=f"lacks the tensors {name}"):
            read(source_of(config, short))
    with pytest.raises(IncompatibleDrafter, match=r"not understood: layers.0.surprise.weight"):
        read(source_of(config, {**tensors, "layers.0.surprise.weight": torch.ones(2)}))


def test_the_targets_sizes_in_the_config_are_required() -> None:
    config, tensors = authors()
    del config["vocab_size"]
    with pytest.raises(IncompatibleDrafter, match="no 'vocab_size'"):
        read(source_of(config, tensors))


def test_a_head_of_its_own_is_refused() -> None:
    config, tensors = authors()
    with pytest.raises(IncompatibleDrafter, match=r"lm_head.weight has the shape \[10, 16\]"):
        read(source_of(config, {**tensors, "lm_head.weight": torch.randn(10, H)}))


def test_both_names_of_one_tensor_are_refused() -> None:
    config, tensors = authors()
    twice = {**tensors, "model.fc.weight": tensors["fc.weight"]}
    with pytest.raises(IncompatibleDrafter, match=r"both 'fc.weight' and 'model.fc.weight'"):
        read(source_of(config, twice))


def config_of(found: Checkpoint) -> dict[str, Any]:
    return found.config.to_dict()


@pytest.mark.parametrize("make", [authors, old_vllm, library])
@pytest.mark.parametrize("layout", ["eagle", "specgen"])
def test_round_trip(make: Any, layout: str, tmp_path: Path) -> None:
    found = read(source_of(*make()))
    layout_named(layout).write(found, tmp_path)
    again = read(opened(tmp_path))
    assert again.layout == layout
    assert same(again.tensors, found.tensors)
    assert config_of(again) == config_of(found)


def test_what_is_written_for_others(tmp_path: Path) -> None:
    found = read(source_of(*authors(rope_theta=5e5)))
    layout_named("eagle").write(found, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["architectures"] == ["LlamaForCausalLMEagle"], "fc has a bias, which vLLM would drop"
    assert (written["bias"], written["rope_theta"], written["rope_parameters"]["rope_theta"]) == (True, 5e5, 5e5)
    assert (written["torch_dtype"], written["dtype"]) == ("float32", "float32")
    assert set(opened(tmp_path).shapes) == set(eagle_shapes())


def test_biases_survive_the_authors_layout(tmp_path: Path) -> None:
    config, tensors = authors(qkv_bias=True)
    biases = random({f"layers.0.self_attn.{name}_proj.bias": (H if name == "q" else H // 2,) for name in "qkv"})
    found = read(source_of(config, tensors | biases))
    layout_named("eagle").write(found, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["qkv_bias"]
    assert same(read(opened(tmp_path)).tensors, found.tensors)
    found.tensors["layers.0.self_attn.o_proj.bias"][0] = 1
    with pytest.raises(IncompatibleDrafter, match="biases of o_proj"):
        layout_named("eagle").write(found, tmp_path)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"method": "eagle3"}, "method 'eagle3'"),
        ({"sliding_window": 4}, "sliding window"),
        ({"layer_type": "qwen3"}, "Qwen3"),
        ({"head_dim": 8}, "head_dim 8"),
        ({"mlp_bias": True}, "biases of the MLP"),
    ],
)
def test_what_the_authors_layout_cannot_hold(settings: dict[str, Any], reason: str, tmp_path: Path) -> None:
    config = DrafterConfig(**{"method": "eagle", "hidden_size": H, "num_attention_heads": A, **settings})
    with pytest.raises(IncompatibleDrafter, match=reason):
        layout_named("eagle").write(Checkpoint(config, {}, "specgen"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_read_to_recognise_a_layout() -> None:
    for make, name in ((authors, "eagle"), (old_vllm, "old-vllm-eagle"), (library, "vllm-speculators-eagle")):
        source = source_of(*make())
        assert detect(source).name == name
        assert detect(source).plan(source, OPTIONS).config.method == "eagle"


def test_a_whole_model_without_input_norms_is_no_drafter() -> None:
    names = ("self_attn.q_proj", "post_attention_layernorm", "post_feedforward_layernorm")  # OLMo 2
    tensors = {f"model.layers.0.{name}.weight": torch.ones(H, H) for name in names}
    with pytest.raises(IncompatibleDrafter, match="is no drafter checkpoint"):
        read(source_of(llama_config(), {**tensors, "model.norm.weight": torch.ones(H)}))
