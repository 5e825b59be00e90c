"""Thresholds: which settings are lengths at which a model may compute otherwise, and which only sound alike."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny import COMMON, FAMILIES, prompts, tiny
from transformers import AutoConfig

from hf_specgen.models.selfcheck import _obeys
from hf_specgen.models.thresholds import LOW, copy_of, lower, thresholds_of

SCALED = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 16384}
FOUND: dict[str, tuple[dict[str, object], list[tuple[str, int]]]] = {
    "llama": ({}, []),
    "qwen2": ({"use_sliding_window": False, "max_window_layers": 28}, []),
    "gpt_neo": ({"num_layers": 2, "attention_types": [[["global", "local"], 1]]}, [("window_size", 256)]),
    "starcoder2": ({"sliding_window": 4096}, [("sliding_window", 4096)]),
    "llama4_text": ({}, [("attention_chunk_size", 8192), ("floor_scale", 8192)]),
    "doge": ({}, [("keep_window_size", 2048)]),
    "deepseek_v32": ({}, [("index_topk", 2048)]),
    "ministral3": ({"rope_parameters": SCALED}, []),
}


@pytest.mark.parametrize("kind", FOUND)
def test_what_is_found(kind: str) -> None:
    settings, expected = FOUND[kind]
    config = AutoConfig.for_model(kind, **settings)
    assert [(one.name, one.value) for one in thresholds_of(config, 18)] == expected


@pytest.mark.parametrize("nested", [False, True])
def test_a_scale_by_position_is_found_in_rotary_settings(nested: bool) -> None:
    config = AutoConfig.for_model("llama", **COMMON)
    scaled = {**SCALED, "llama_4_scaling_beta": 0.1}
    config.rope_parameters = {"full_attention": scaled, "sliding_attention": SCALED} if nested else scaled
    (found,) = thresholds_of(config, 18)
    assert found.value == 16384
    assert found.path[0] == "rope_parameters" and ("full_attention" in found.path) == nested


@pytest.mark.parametrize("family", FAMILIES)
def test_tested_families_have_none_but_windows(family: str) -> None:
    config = AutoConfig.for_model(family)
    assert {one.name for one in thresholds_of(config, 18)} <= {"sliding_window"}


def test_a_number_that_nothing_reads_proves_nothing() -> None:
    """Lowering it changes nothing, so a round on the copy would pass whatever happens beyond it."""
    model = tiny()
    model.config.sliding_window = 4096  # Llama has no window
    (threshold,) = thresholds_of(model.config, 18)
    copied = copy_of(model, in_float32=False)
    assert copied is not None and not _obeys(copied, threshold, None)
    assert copied.config.sliding_window == LOW


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_copy_computes_in_float32_and_gives_weights_back(dtype: torch.dtype) -> None:
    model = tiny().to(dtype)
    ids, _ = prompts([12])
    copied = copy_of(model, in_float32=True)
    assert copied is not None
    wide = copied(ids).logits
    narrow = model(ids).logits
    reference = copy.deepcopy(model).float()(ids).logits
    assert torch.allclose(wide, reference, atol=1e-5)
    assert not torch.allclose(narrow.float(), reference, atol=1e-3)
    assert {parameter.dtype for parameter in copied.parameters()} == {dtype}
    with pytest.raises(IndexError):
        copied(ids + 1000)
    assert {parameter.dtype for parameter in copied.parameters()} == {dtype}, "also after a failure"


def test_lowering_reaches_modules_that_keep_the_number() -> None:
    model = tiny()
    model.config.keep_window_size = 2048
    model.model.layers[0].self_attn.keep_window_size = 2048
    model.model.layers[1].self_attn.keep_window_size = 77
    copied = copy_of(model, in_float32=False)
    assert copied is not None
    lower(copied, thresholds_of(model.config, 18)[0])
    assert [layer.self_attn.keep_window_size for layer in copied.model.layers] == [LOW, 77]
    assert model.model.layers[0].self_attn.keep_window_size == 2048
