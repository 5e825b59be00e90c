"""Reported: with top-p and 16-bit logits, which tie often, other tokens could be drawn than in plain ``generate()``."""

from __future__ import annotations

import pytest
import torch
from tiny import plain, prompts, tiny

from hf_specgen import PromptLookup, SpeculativeDecoding, ops


@pytest.mark.parametrize("lengths", [[6], [9, 4, 12, 7]])
@pytest.mark.parametrize("law", [{"top_k": 0, "top_p": 0.5}, {"top_k": 300, "top_p": 0.7, "temperature": 0.8}])
def test_scores_leave_the_tokens_that_plain_generate_leaves(law: dict[str, float], lengths: list[int]) -> None:
    """Every token has eight twins, so that each edge falls between equal logits."""
    model = tiny(vocab=1024)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight[:128].repeat(8, 1))
    ids, mask = prompts(lengths)
    asked = {"do_sample": True, "max_new_tokens": 1, "return_dict_in_generate": True, "output_scores": True, **law}
    expected = plain(model, ids, mask, **asked).scores[0]
    with ops.record() as calls:
        found = plain(model, ids, mask, custom_generate=SpeculativeDecoding(PromptLookup(4)), **asked).scores[0]
    assert calls["truncate", "reference"] > 0
    assert torch.equal(found, expected)
    twins = (expected > -torch.inf).view(len(ids), 8, 128).sum(1)
    assert (twins.remainder(8) > 0).any(), "the edge must divide equal logits"
