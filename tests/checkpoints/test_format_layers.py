"""How EAGLE-3's layers are read from configs of every style: rope, sliding windows, head sizes, biases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support_formats import (
    A,
    H,
    eagle3_file,
    eagle3_shapes,
    eagle_shapes,
    layer,
    library_config,
    random,
    read,
    same,
    source_of,
)
from torch import Tensor

from hf_specgen.checkpoints.formats.base import Checkpoint
from hf_specgen.errors import IncompatibleDrafter


def plain(changed: dict[str, Tensor] | None = None, **settings: Any) -> Checkpoint:
    config, tensors = eagle3_file(**settings)
    return read(source_of(config, {**tensors, **(changed or {})}))


def library(**settings: Any) -> Checkpoint:
    return read(source_of(library_config(**settings), eagle3_file("layers.0.")[1]))


@pytest.mark.parametrize(
    ("inner", "window"),
    [
        ({"layer_types": ["sliding_attention"], "sliding_window": 2048}, 2048),
        ({"layer_types": ["full_attention"], "sliding_window": 2048}, None),
        ({"sliding_window": 2048}, None),
        ({"layer_types": ["sliding_attention"] * 36, "sliding_window": 64}, 64),
    ],
)
def test_sliding_windows_are_honoured(inner: dict[str, Any], window: int | None) -> None:
    found = library(inner=inner)
    assert found.config.sliding_window == window
    assert any(str(inner["sliding_window"]) in note for note in found.notes)


@pytest.mark.parametrize("kinds", [["sliding_attention", "full_attention"], ["full_attention", "sliding_attention"]])
def test_layers_of_two_kinds(kinds: list[str]) -> None:
    """What the library's --full-attention-indices writes."""
    second = random({**layer("layers.1.", H), "layers.1.input_layernorm.weight": (H,)})
    config = library_config(layers=2, inner={"layer_types": kinds, "sliding_window": 8})
    found = read(source_of(config, eagle3_file("layers.0.")[1] | second))
    assert (found.config.sliding_window, found.config.layer_types) == (8, kinds)
    where = f"a sliding window of 8 tokens in layer {kinds.index('sliding_attention')}, else every"
    assert any(where in note for note in found.notes)
    assert found.warnings == ()


def test_layers_of_unknown_kinds_are_refused() -> None:
    with pytest.raises(IncompatibleDrafter, match="sliding_window None"):
        library(inner={"layer_types": ["sliding_attention"]})
    with pytest.raises(IncompatibleDrafter, match="chunked_attention"):
        library(inner={"layer_types": ["chunked_attention"]})


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("settings", "rope"),
    [
        ({}, {"rope_type": "default", "rope_theta": 10000.0}),
        ({"rope_theta": 5e5, "rope_scaling": None}, {"rope_type": "default", "rope_theta": 5e5}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "factor": 2.0},
        ),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, {"rope_theta": 5e5}),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}}, {"rope_type": "llama3", **LLAMA3}),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}, {"rope_theta": 5e5, **LLAMA3}),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 1]}}, {"rope_type": "default", "rope_theta": 10000.0}),
        ({"rope_parameters": {"full_attention": {"rope_theta": 7.0}, "sliding_attention": {}}}, {"rope_theta": 7.0}),
    ],
)
def test_rope_is_the_drafts_own_in_every_style(settings: dict[str, Any], rope: dict[str, Any]) -> None:
    found = plain(**settings).config.rope_parameters
    assert {name: found[name] for name in rope} == rope
    assert set(found) == {"rope_type", "rope_theta", *rope}


def test_odd_ropes() -> None:
    both = plain(rope_theta=5e5, rope_parameters={"rope_theta": 1e4, "rope_type": "default"})
    assert both.config.rope_parameters["rope_theta"] == 1e4
    assert "rope_theta 500000.0 and 10000.0 are given" in both.warnings[0]
    with pytest.raises(IncompatibleDrafter, match="'spiral'"):
        plain(rope_scaling={"type": "spiral"})


def authors_eagle(**settings: Any) -> Checkpoint:
    config, tensors = eagle3_file(**settings)[0], random(eagle_shapes())
    return read(source_of(config, tensors))


def nested_library(**settings: Any) -> Checkpoint:
    return library(inner={"rope_theta": None, **settings})


QWEN35 = {"mrope_interleaved": True, "mrope_section": [1], "rope_type": "default"}  # of 11, 11, 10 in 256 values
PARTIAL: list[dict[str, Any]] = [
    {"rope_theta": 1e7, "partial_rotary_factor": 0.5},
    {"rope_theta": 1e7, "rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
    {"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.5, **QWEN35}},
    {"partial_rotary_factor": 0.5, "rope_parameters": {"rope_theta": 1e7, **QWEN35}},
]
PARTLY = [plain, nested_library, authors_eagle]


@pytest.mark.parametrize("settings", PARTIAL)
@pytest.mark.parametrize("reader", PARTLY)
def test_heads_that_are_rotated_in_part(reader: Callable[..., Checkpoint], settings: dict[str, Any]) -> None:
    found = reader(**settings)
    assert found.config.rope_parameters["partial_rotary_factor"] == 0.5
    assert not any("mrope" in name for name in found.config.rope_parameters)
    assert found.config.rotary_size == 2
    assert any("the first 2 of 4 values of a head" in note for note in found.notes)
    assert found.warnings == ()


@pytest.mark.parametrize("reader", PARTLY)
def test_rotary_settings_of_other_models_are_refused_by_name(reader: Callable[..., Checkpoint]) -> None:
    for name, value in (("rotary_pct", 0.5), ("rotary_dim", 2), ("rotary_emb_fraction", 0.25), ("rotary_emb_base", 7)):
        with pytest.raises(IncompatibleDrafter, match=f"{name}={value}"):
            reader(**{name: value})
        with pytest.raises(IncompatibleDrafter, match=f"{name}={value}"):
            reader(rope_parameters={"rope_theta": 1e4, name: value})
    assert reader(rotary_pct=1.0, rotary_dim=4).config.rotary_size == 4  # these say nothing else
    for part in (0, 0.25, 1.5, "half"):
        with pytest.raises(IncompatibleDrafter, match="an even number of values"):
            reader(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": part, "rope_type": "default"})
    sections = {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [1]}
    with pytest.raises(IncompatibleDrafter, match=r"mrope_section \[1\], which rotates 2 values of a head"):
        reader(rope_parameters=sections)


def test_two_parts_are_told() -> None:
    found = plain(partial_rotary_factor=0.5, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 1.0})
    assert found.config.rotary_size == 4
    assert found.warnings == ("partial_rotary_factor 0.5 and 1.0 are given: the second (rope_parameters) is used.",)


def test_rope_of_layers_that_differ_is_refused() -> None:
    ropes = {"full_attention": {"rope_theta": 7.0}, "sliding_attention": {"rope_theta": 8.0}}
    assert plain(rope_parameters=ropes).config.rope_parameters["rope_theta"] == 7.0
    second = random({**layer("layers.1.", H), "layers.1.input_layernorm.weight": (H,)})
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "rope_parameters": ropes}
    config = library_config(layers=2, inner=kinds)
    with pytest.raises(IncompatibleDrafter, match="one set for all layers"):
        read(source_of(config, eagle3_file("layers.0.")[1] | second))


def test_heads_wider_than_the_drafter() -> None:
    wide = random(eagle3_shapes(dim=8))
    found = plain(wide, head_dim=8)
    assert (found.config.head_dim, found.config.hidden_size // A) == (8, 4)


Made = Callable[..., tuple[dict[str, Any], dict[str, Tensor]]]


def authors(**settings: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config, tensors = eagle3_file()
    return {**config, **settings}, tensors


def numbered(**settings: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config, tensors = eagle3_file("layers.0.", eagle_config={"use_aux_hidden_state": True})
    return {**config, **settings}, tensors


def specforge(**settings: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return authors(target_model_type="llama", **settings)


def deepspec(**settings: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config, tensors = authors(target_layer_ids=[1, 3, 4], ttt_length=7, **settings)
    norms = {f"midlayer.self_attn.{name}_norm.weight": (H // A,) for name in "qk"}
    return config, tensors | random(norms)


def first_eagle(**settings: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return authors(**settings)[0], random(eagle_shapes())


def old_vllm(**settings: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config, tensors = first_eagle(**settings)
    return {"model_type": "eagle", "model": config}, tensors


@pytest.mark.parametrize("make", [authors, numbered, specforge, deepspec, first_eagle, old_vllm])
def test_layers_and_heads_are_counted_by_their_tensors(make: Made) -> None:
    """EAGLE3-Vicuna1.3-13B says 40 layers, NeMo writes the target's depth and the target's heads."""
    found = read(source_of(*make(num_hidden_layers=40, head_dim=32)))
    assert (found.config.num_hidden_layers, found.config.head_dim) == (1, H // A)
    assert "config says num_hidden_layers=40, the tensors say 1" in found.notes
    assert "config says head_dim=32, the tensors say 4" in found.notes
    right = read(source_of(*make()))
    assert same(found.tensors, right.tensors) and not any("the tensors say" in note for note in right.notes)
    assert read(source_of(*make(head_dim=None))).config.head_dim == H // A


def test_further_layers_are_counted_too() -> None:
    second = random({**layer("layers.1.", H), "layers.1.input_layernorm.weight": (H,)})
    for make in (authors, numbered, specforge, first_eagle):
        config, tensors = make(num_hidden_layers=36)
        assert read(source_of(config, tensors | second)).config.num_hidden_layers == 2
        third = {name.replace("layers.1.", "layers.2."): tensor for name, tensor in second.items()}
        with pytest.raises(IncompatibleDrafter, match=r"lacks the tensors layers.1"):
            read(source_of(config, tensors | third))


def test_the_librarys_own_depth_counts() -> None:
    """Its config is the drafter's, so layers that are missing mean a damaged file."""
    with pytest.raises(IncompatibleDrafter, match=r"lacks the tensors layers.1"):
        read(source_of(library_config(layers=2), eagle3_file("layers.0.")[1]))


def test_heads_are_as_wide_as_their_tensors_or_refused() -> None:
    wide = random(eagle3_shapes(dim=8))
    for said in ({}, {"head_dim": 4}, {"head_dim": None}):
        assert plain(wide, **said).config.head_dim == 8
    assert library(inner={"head_dim": None}).config.head_dim == 4
    odd = {"midlayer.self_attn.k_proj.weight": torch.randn(3 * 8, 2 * H)}
    with pytest.raises(IncompatibleDrafter, match="q_proj"):
        plain(wide | odd)


def test_biases_are_told_by_their_tensors() -> None:
    taken = {f"midlayer.self_attn.{name}_proj.bias": torch.randn(H if name in "qo" else H // 2) for name in "qkvo"}
    inner = {
        f"midlayer.mlp.{name}_proj.bias": torch.randn(H if name == "down" else 24) for name in ("gate", "up", "down")
    }
    found = plain(taken | inner)
    assert found.config.attention_bias and found.config.mlp_bias
    assert same(found.tensors, eagle3_file()[1] | taken | inner)


@pytest.mark.parametrize("first", ["midlayer.", "layers.0."])
def test_windows_that_the_producer_ignores_are_ignored_with_a_warning(first: str) -> None:
    copied = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 128}  # the target's
    config, tensors = eagle3_file(first, **copied)
    found = read(source_of(config, tensors))
    assert found.config.sliding_window is None
    assert "Pass sliding_window=128" in found.warnings[0]
    config, _ = eagle3_file(**copied)
    assert "not followed" in read(source_of(config, random(eagle_shapes()))).warnings[0]
    assert plain(layer_types=["full_attention"], sliding_window=128).warnings == ()
