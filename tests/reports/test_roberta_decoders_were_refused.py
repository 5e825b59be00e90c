"""Reported: sound decoders of RoBERTa's kind failed the self-check, whose reference counted positions from two."""

from __future__ import annotations

import pytest
import torch
import transformers
from tiny import COMMON, drafter_of, ours, plain, prompts, texts_of
from transformers import AutoConfig, PreTrainedModel

KINDS = {
    "roberta": "RobertaForCausalLM",
    "xlm-roberta": "XLMRobertaForCausalLM",
    "xlm-roberta-xl": "XLMRobertaXLForCausalLM",
    "camembert": "CamembertForCausalLM",
    "data2vec-text": "Data2VecTextForCausalLM",
    "roberta-prelayernorm": "RobertaPreLayerNormForCausalLM",
    "xmod": "XmodForCausalLM",
}
FAST = ("roberta", "xmod")
OTHERS = [pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind not in FAST]


def target(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    own = {"languages": ["en_XX"], "default_language": "en_XX"} if kind == "xmod" else {}
    settings = {**COMMON, "num_key_value_heads": 4, "is_decoder": True, "pad_token_id": 1, **own}
    model = getattr(transformers, KINDS[kind])._from_config(AutoConfig.for_model(kind, **settings)).eval()
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = model.generation_config.bos_token_id = None
    return model


@pytest.mark.parametrize("kind", [*FAST, *OTHERS])
@pytest.mark.parametrize("lengths", [[12], [5, 17, 11, 24]])
def test_text_is_plain(kind: str, lengths: list[int]) -> None:
    model = target(kind)
    ids, mask = prompts(lengths)
    expected = plain(model, ids, mask)
    for drafts in ("branches", "small"):
        watch = drafter_of(drafts, model, texts_of(expected, mask))
        assert torch.equal(ours(model, watch, ids, mask), expected)
        assert watch.longest >= 2
