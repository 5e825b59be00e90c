"""Reported: models that count in several planes (Qwen2-VL and its kin) crashed on text alone."""

from __future__ import annotations

import pytest
import torch
from tiny import build, ours, plain, prompts, texts_of
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from hf_specgen import PromptLookup, SmallModel, SpecGenError
from hf_specgen.calls.requests import real_tokens

TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [1, 1, 2],
        "partial_rotary_factor": 1.0,
    },
}
SIGHT = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 4,
    "embed_dim": 32,
    "intermediate_size": 32,
    "out_hidden_size": 32,
    "patch_size": 4,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 8,
}
EXPERTS = {"num_experts": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
MOE = {**EXPERTS, "n_shared_experts": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 16}
KINDS: dict[str, dict[str, object]] = {
    "qwen2_vl": {},
    "glm4v": {},
    "hunyuan_vl": {},
    "qwen2_5_vl": {},
    "qwen3_vl": {},
    "qwen3_vl_moe": MOE,
    "glm4v_moe": MOE,
    "glm46v": {},
    "glm_ocr": {},
    "ernie4_5_vl_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": [16, 16]},
    "paddleocr_vl": {},
    "cosmos3_edge": {},
    "cosmos3_omni": {},
}
FAST = ("qwen2_vl", "glm4v", "hunyuan_vl")  # four planes, four planes with interleaved pairs, three planes


def seeing(kind: str) -> PreTrainedModel:
    """Build a tiny model that reads pictures too."""
    torch.manual_seed(0)
    marks = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}
    config = AutoConfig.for_model(kind, text_config={**TEXT, **KINDS[kind]}, vision_config=SIGHT, **marks)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model


CASES = [kind if kind in FAST else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]


@pytest.mark.parametrize("kind", CASES)
def test_text_alone_is_plain_text(kind: str) -> None:
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    model = seeing(kind)
    for lengths in ([9], [5, 17, 11, 24]):
        ids, mask = prompts(lengths, vocab=60)
        expected = plain(model, ids, mask, max_new_tokens=16)
        assert len(set(expected[0].tolist())) > 4, "the text is no single token"
        lookup = PromptLookup(4, corpus=texts_of(expected, mask))
        nothing_seen = {"mm_token_type_ids": torch.zeros_like(ids)}
        for extra in ({}, nothing_seen):
            found = ours(model, lookup, ids, mask, max_new_tokens=16, **extra)
            assert torch.equal(found, expected) and found.speculation.num_accepted_tokens > 0
    found = ours(model, SmallModel(seeing(kind), 3), ids, mask, max_new_tokens=16)
    assert torch.equal(found, expected) and found.speculation.num_accepted_tokens > 0


def test_pictures_are_refused() -> None:
    model, (ids, mask) = seeing("qwen2_vl"), prompts([9], vocab=60)
    marked = torch.zeros_like(ids)
    marked[0, 3] = 1
    with pytest.raises(SpecGenError, match=r"model input mm_token_type_ids= was given: only token ids"):
        ours(model, PromptLookup(4), ids, mask, mm_token_type_ids=marked)


def test_types_of_a_model_of_text_are_refused() -> None:
    """GPT-2 embeds type 0 like any other token: zeros change its text."""
    model, (ids, mask) = build("gpt2"), prompts([9])
    with pytest.raises(SpecGenError, match="token_type_ids"):
        ours(model, PromptLookup(4), ids, mask, token_type_ids=torch.zeros_like(ids))


def test_planes_that_count_otherwise_are_refused() -> None:
    ids, mask = prompts([5, 9])
    counted = (mask.cumsum(-1) - 1).clamp(min=0)
    for shape in ((2, 9), (1, 2, 9), (4, 2, 9)):
        assert real_tokens(ids, mask, counted.expand(shape))[1] == ids[1].tolist()
    assert real_tokens(ids[1:], mask[1:], counted[1])[0] == ids[1].tolist()
    planes = counted.expand(4, 2, 9).clone()
    planes[0, 0, 0] = 7  # padding may hold anything
    assert len(real_tokens(ids, mask, planes)[0]) == 5
    planes[2, 1, 4] += 1
    with pytest.raises(SpecGenError, match=r"shape \(4, 2, 9\).*every plane alike"):
        real_tokens(ids, mask, planes)
