"""User cases C18 and C19: encoder-decoder and image targets are refused before any token."""

from __future__ import annotations

import pytest
import torch
import transformers
from tiny import KINDS, Keep, drafter_of, few, ours, plain, prompts, tiny, unnoticed
from transformers import AutoConfig, PreTrainedModel

from hf_specgen import SmallModel, SpecGenError, SpeculativeDecoding, UnsupportedTarget, enable


def t5() -> PreTrainedModel:
    torch.manual_seed(0)
    settings = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
    config = transformers.T5Config(
        vocab_size=64, **settings, eos_token_id=None, pad_token_id=0, decoder_start_token_id=0, initializer_factor=3.0
    )
    return transformers.T5ForConditionalGeneration(config).eval()


def llava() -> PreTrainedModel:
    torch.manual_seed(0)
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlavaConfig(
        vision_config=AutoConfig.for_model(
            "clip_vision_model", image_size=16, patch_size=8, projection_dim=32, **vision
        ),
        text_config=tiny().config,
        image_token_id=63,
        vision_feature_select_strategy="default",
    )
    model = transformers.LlavaForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def counted(model: PreTrainedModel) -> list[int]:
    """Count the passes of a model from now on."""
    passes: list[int] = []
    model.register_forward_pre_hook(unnoticed(lambda *_: passes.append(1)))
    return passes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("enabled", [False, True])
def test_c18_encoder_decoder(kind: str, enabled: bool) -> None:
    model = t5()
    ids, _ = prompts([12])
    mask = torch.ones_like(ids)
    mask[:, -4:] = 0
    expected = plain(model, ids, mask, max_new_tokens=8)
    passes, streamer = counted(model), Keep()
    drafter = drafter_of(kind, tiny(), [[1, 2, 3]])
    call = (
        {"assistant_model": drafter}
        if enabled
        else {"custom_generate": SpeculativeDecoding(drafter, streamer=streamer)}
    )
    if enabled:
        enable(model)
    with pytest.raises(UnsupportedTarget, match=r"T5ForConditionalGeneration.*encoder-decoder.*plain generate\(\)"):
        plain(model, ids, mask, max_new_tokens=8, **call)
    assert not passes, "refused before any pass"
    assert not streamer.tokens
    assert torch.equal(plain(model, ids, mask, max_new_tokens=8), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_c19_images_are_refused(kind: str) -> None:
    model = llava()
    ids = torch.cat([torch.full((1, 4), 63), prompts([8])[0]], 1)
    pixels = torch.randn(1, 3, 16, 16)
    settings = {"pixel_values": pixels, "max_new_tokens": 8}
    expected = plain(model, ids, **settings)
    passes, seen = counted(model.model.language_model), counted(model.model.vision_tower)
    with pytest.raises(SpecGenError, match=r"(pixel_values=|\(image\)).*token ids.*plain generate\(\)"):
        ours(model, drafter_of(kind, tiny(), [[1, 2, 3]]), ids, **settings)
    assert not passes
    assert len(seen) <= 1, "5.24 encodes images before any loop is called"
    assert torch.equal(plain(model, ids, **settings), expected)


@pytest.mark.parametrize("kind", few(KINDS, "lookup", "small", "eagle dynamic"))
def test_c19_an_image_model_given_text_alone_is_right_or_refused(kind: str) -> None:
    model = llava()
    ids, mask = prompts([5, 12])
    expected = plain(model, ids, mask, max_new_tokens=20)
    text = model.model.language_model
    watch = drafter_of("lookup" if kind in ("small", "sampled") else kind, tiny(), expected.tolist())
    if kind in ("small", "sampled"):
        watch.inner = SmallModel(tiny(), 4, sample=kind == "sampled")
    assert torch.equal(ours(model, watch, ids, mask, max_new_tokens=20), expected)
    assert text.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("model", [t5, llava])
def test_drafters_of_these_kinds_are_refused_or_draft(model) -> None:
    """A drafter is driven over the same cache as a target."""
    ids, mask = prompts([12])
    target = tiny()
    if model is t5:
        with pytest.raises(UnsupportedTarget, match="encoder-decoder"):
            ours(target, SmallModel(model(), 3), ids, mask)
    else:
        assert torch.equal(ours(target, SmallModel(model(), 3), ids, mask), plain(target, ids, mask))
