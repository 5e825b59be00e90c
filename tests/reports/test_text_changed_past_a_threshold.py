"""Reported: past a length that a model's config names, far beyond the self-check's texts, drafts changed the text."""

from __future__ import annotations

import pytest
import torch
import transformers
from tiny import COMMON, MIXED, build, drafter_of, few, ours, plain, prompts, texts_of
from transformers import AutoConfig, PreTrainedModel

import hf_specgen.models.selfcheck
from hf_specgen import PromptLookup, SpecGenError, UnsupportedTarget
from hf_specgen.models.selfcheck import check_target
from hf_specgen.models.thresholds import LOW, copy_of, lower, thresholds_of

NEO = {
    "num_layers": 2,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 1]],
    "embed_dropout": 0,
    "attention_dropout": 0,
    "resid_dropout": 0,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0}
SCALED = {**YARN, "original_max_position_embeddings": 16384, "llama_4_scaling_beta": 0.1}
KINDS: dict[str, tuple[str, str, dict[str, object]]] = {
    "neo": ("gpt_neo", "GPTNeoForCausalLM", NEO),
    "llama4": (
        "llama4_text",
        "Llama4ForCausalLM",
        {"head_dim": 16, "intermediate_size_mlp": 64, "num_local_experts": 2, "no_rope_layers": [1, 0]},
    ),
    "doge": ("doge", "DogeForCausalLM", {}),
    "starcoder2": ("starcoder2", "Starcoder2ForCausalLM", {"sliding_window": 4096}),
    "ministral3": ("ministral3", "Ministral3ForCausalLM", {"head_dim": 16, "rope_parameters": SCALED}),
}


def target(kind: str, **settings: object) -> PreTrainedModel:
    model_type, name, own = KINDS[kind]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**COMMON, **own, **settings})
    model = getattr(transformers, name)._from_config(config, dtype=torch.float32).eval()
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = model.generation_config.bos_token_id = None
    return model


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_specgen.models.selfcheck, "_check_beyond", lambda model, makeup, threshold, rows: None)


DOGE = pytest.mark.skipif(transformers.__version__ < "5.24", reason="older Doge misreads bool masks: refused at once")
REFUSED = [
    ("neo", 200, "window_size = 256"),
    ("llama4", 8192, "floor_scale = 8192"),
    pytest.param("doge", 2048, "keep_window_size = 2048", marks=DOGE),
]
LOWER = [
    ("neo", {"window_size": 40}),
    ("llama4", {"floor_scale": 28, "attn_scale": 2.0}),
    pytest.param("doge", {"keep_window_size": 24}, marks=DOGE),
]


@pytest.mark.parametrize("dtype", few((torch.float32, torch.bfloat16), torch.float32))
@pytest.mark.parametrize(("kind", "tokens", "named"), REFUSED)
def test_texts_that_may_pass_it_are_refused_by_name(kind: str, tokens: int, named: str, dtype: torch.dtype) -> None:
    model = target(kind).to(dtype)
    ids, mask = prompts([5, 17])
    heard: list[list[int]] = []
    for _ in range(2):  # a failure is not remembered as a pass
        with pytest.raises(UnsupportedTarget, match=rf"changes with the length of a text \({named}"):
            ours(model, PromptLookup(3), ids, mask, max_new_tokens=tokens, on_tokens=lambda row, new: heard.append(new))
    assert not heard


@pytest.mark.parametrize("kind", ["neo", "llama4", pytest.param("doge", marks=DOGE)])
@pytest.mark.parametrize("lengths", few(([12], [5, 17, 11, 24]), [5, 17, 11, 24]))
def test_shorter_texts_are_served(kind: str, lengths: list[int]) -> None:
    model = target(kind)
    ids, mask = prompts(lengths)
    expected = plain(model, ids, mask)
    for drafts in ("small", "branches"):
        watch = drafter_of(drafts, model, texts_of(expected, mask))
        assert torch.equal(ours(model, watch, ids, mask), expected)
        assert watch.longest >= 2


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("kind", "settings"), LOWER)
def test_unchecked_it_would_write_another_text(kind: str, settings: dict[str, object]) -> None:
    """Negative control: with the thresholds within reach, ragged rows go wrong."""
    model = target(kind, **settings)
    ids, mask = prompts([5, 17, 11, 24])
    expected = plain(model, ids, mask, max_new_tokens=40)
    watch = drafter_of("branches", model, texts_of(expected, mask))
    assert not torch.equal(ours(model, watch, ids, mask, max_new_tokens=40), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "place"), [("starcoder2", 4096), ("ministral3", 16384)])
def test_sound_models_pass_on_a_copy(kind: str, place: int, dtype: torch.dtype) -> None:
    """What a window or a scale by position does is tried with a low one, not by reading thousands of tokens."""
    model = target(kind).to(dtype)
    widths: list[int] = []

    def note(module, args, kwargs) -> None:
        widths.append(kwargs["input_ids"].shape[1])

    model.register_forward_pre_hook(note, with_kwargs=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    settings = model.config.to_dict()
    check_target(model, place - 100)
    short = len(widths)
    check_target(model, place + 100)
    assert len(widths) > short and max(widths) < 32
    longer = len(widths)
    check_target(model, place + 200)
    assert len(widths) == longer, "once per threshold"
    assert settings == model.config.to_dict()
    for name, value in model.state_dict().items():
        assert value.dtype == before[name].dtype and torch.equal(value, before[name])


@pytest.mark.parametrize("kind", ["starcoder2", "ministral3"])
def test_what_passed_writes_plain_text_beyond(kind: str) -> None:
    rope = {**SCALED, "original_max_position_embeddings": 32}
    model = target(kind, **({"sliding_window": 32} if kind == "starcoder2" else {"rope_parameters": rope}))
    ids, mask = prompts([5, 17, 11, 24])
    expected = plain(model, ids, mask, max_new_tokens=40)
    for drafts in ("small", "branches"):
        watch = drafter_of(drafts, model, texts_of(expected, mask))
        assert torch.equal(ours(model, watch, ids, mask, max_new_tokens=40), expected)
        assert watch.longest >= 2


def test_a_copy_shares_weights_and_changes_nothing() -> None:
    model = target("doge").to(torch.bfloat16)
    ids, _ = prompts([20])
    with torch.no_grad():
        before = model(ids).logits
        copied = copy_of(model, in_float32=True)
        assert copied is not None
        near = copied(ids).logits
        lower(copied, thresholds_of(model.config, 18)[0])
        low = copied(ids).logits
        assert torch.equal(model(ids).logits, before)
    assert near.dtype == low.dtype == torch.float32 and before.dtype == torch.bfloat16
    assert (near - before).abs().max() < 0.1 * before.std() < (low - near).abs().max()
    assert copied.config.keep_window_size == LOW and model.config.keep_window_size == 2048
    mine, theirs = dict(model.named_parameters()), dict(copied.named_parameters())
    assert all(theirs[name].data_ptr() == value.data_ptr() for name, value in mine.items())


ROPE = {"rope_type": "default", "rope_theta": 1e4}
GROWING = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 4.0,
    "short_factor": [1.0] * 8,
    "long_factor": [3.0] * 8,
    "original_max_position_embeddings": 40,
}


@pytest.mark.parametrize(("switching", "size"), [(GROWING, 40), (LONG, 512)])
@pytest.mark.parametrize("lengths", [[12], [5, 17]])
def test_rotary_factors_of_one_layer_kind_that_switch_are_refused(switching: dict, size: int, lengths: list) -> None:
    rope = {"full_attention": switching, "sliding_attention": ROPE}
    model = build("gemma3_text", rope_parameters=rope, max_position_embeddings=size, layer_types=MIXED)
    ids, mask = prompts(lengths)
    short = plain(model, ids, mask, max_new_tokens=20)
    assert torch.equal(ours(model, PromptLookup(3), ids, mask, max_new_tokens=20), short)
    with pytest.raises(SpecGenError, match=rf"rope_type='{switching['rope_type']}' changes its factors at 40 tokens"):
        ours(model, PromptLookup(3), ids, mask, max_new_tokens=40)
