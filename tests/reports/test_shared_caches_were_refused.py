"""Reported: models whose last layers read what earlier ones cached (Gemma 3n, Gemma 4) were refused."""

from __future__ import annotations

import pytest
import torch
import transformers
from tiny import COMMON, assert_ran, drafter_of, ours, plain, prompts, some, texts_of
from transformers import AutoConfig, PreTrainedModel

from hf_specgen.errors import UnsupportedTarget
from hf_specgen.models.layer_kinds import layer_kinds
from hf_specgen.models.slot_cache import SlotCache

SHARED = {
    "head_dim": 16,
    "sliding_window": 8,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64,
}
KINDS: dict[str, tuple[str, dict[str, object]]] = {
    "gemma3n_text": (
        "Gemma3nForCausalLM",
        {
            "intermediate_size": [64] * 4,
            "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
            "laurel_rank": 8,
            "altup_num_inputs": 2,
        },
    ),
    "gemma4_text": ("Gemma4ForCausalLM", {"global_head_dim": 24, "num_global_key_value_heads": 1}),
}


def target(kind: str, implementation: str = "sdpa", **settings: object) -> PreTrainedModel:
    name, own = KINDS[kind]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**COMMON, **SHARED, **own, **settings})
    config._attn_implementation = implementation
    model = getattr(transformers, name)._from_config(config, dtype=torch.float32).eval()
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = model.generation_config.bos_token_id = None
    return model


CASES = some(KINDS, ("sdpa", "eager"), ([20], [5, 17, 11, 24]), ("lookup", "branches", "small", "tree"))


@pytest.mark.parametrize(("kind", "implementation", "lengths", "drafts"), CASES)
def test_text_is_plain(kind: str, implementation: str, lengths: list[int], drafts: str) -> None:
    model = target(kind, implementation)
    ids, mask = prompts(lengths)
    expected = plain(model, ids, mask)
    watch = drafter_of(drafts, model, texts_of(expected, mask))
    assert torch.equal(ours(model, watch, ids, mask), expected)
    if drafts == "tree" or len(lengths) > 1:
        assert_ran(watch, drafts)


@pytest.mark.parametrize("kind", KINDS)
def test_shared_layers_are_never_written(kind: str) -> None:
    model = target(kind)
    assert set(layer_kinds(model.config)) == {("sliding_attention", 8), ("full_attention", None)}
    cache = SlotCache(model.config, 1)
    cache.begin_prefill(5, [5], left_padded=False)
    with torch.no_grad():
        name = "cache" if transformers.__version__ >= "5.24" else "past_key_values"
        model(torch.arange(1, 6)[None], **{name: cache}, use_cache=True)
    assert [layer.is_initialized for layer in cache.layers][:4] == [True, True, False, False][: len(cache.layers)]


def test_the_lengths_of_finished_rows_differ() -> None:
    """Rows leave and paths are gathered: layers that hold nothing must not be asked for anything."""
    model = target("gemma3n_text")
    ids, mask = prompts([5, 17, 11, 24])
    end = int(plain(model, ids, mask)[0, 24 + 6])
    expected = plain(model, ids, mask, eos_token_id=end)
    watch = drafter_of("branches", model, texts_of(expected, mask))
    assert torch.equal(ours(model, watch, ids, mask, eos_token_id=end), expected)


def test_a_model_that_keeps_nothing_at_all_is_refused() -> None:
    config = target("gemma4_text").config
    config.num_kv_shared_layers = 4
    with pytest.raises(UnsupportedTarget, match="Gemma4TextConfig"):
        layer_kinds(config)
