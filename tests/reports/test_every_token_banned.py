"""Reported: where processors ban every token at one place, plain greedy decoding writes on and ours raised."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from tiny import LEARNED, Watch, drafter_of, few, plain, prompts, texts_of, tiny
from transformers import LogitsProcessor

from hf_specgen import PromptLookup, SpecGenError, SpeculativeDecoding, ops

VOCAB = 20


class BansAll(LogitsProcessor):
    """Leave nothing at every fifth place."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, -torch.inf) if input_ids.shape[1] % 5 == 0 else scores


LAWS = {
    "no repeat": {"no_repeat_ngram_size": 1},  # soon every id stands in the text
    "own": {"logits_processor": [BansAll()]},
    "at the beginning": {"begin_suppress_tokens": list(range(VOCAB))},
}


@pytest.mark.parametrize(
    ("kind", "law", "lengths"),
    few(
        product(("lookup", "small", "tree", *LEARNED), LAWS, ([9, 4, 12, 7], [7])),
        *product(("lookup", "eagle dynamic"), LAWS, ([9, 4, 12, 7],)),
        *product(("small", "tree"), LAWS, ([7],)),
    ),
)
def test_greedy_text_goes_on_as_plain_text_does(kind: str, law: str, lengths: list[int]) -> None:
    model = tiny(vocab=VOCAB)
    ids, mask = prompts(lengths, vocab=VOCAB)
    expected = plain(model, ids, mask, **LAWS[law])
    watch = drafter_of(kind, model, texts_of(expected, mask))
    found = plain(model, ids, mask, custom_generate=SpeculativeDecoding(watch), **LAWS[law])
    assert torch.equal(found, expected)
    assert watch.width > 0
    free = plain(model, ids, mask)
    assert not torch.equal(free, expected), "the ban must have been met"


def test_the_kernels_write_on_too() -> None:
    pytest.importorskip("triton")
    model = tiny(vocab=9)
    ids, mask = prompts([6], vocab=9)
    asked = {"no_repeat_ngram_size": 1, "max_new_tokens": 8}
    expected = plain(model, ids, mask, **asked)
    watch = Watch(PromptLookup(4, corpus=texts_of(expected, mask)))
    with ops.use_kernels("triton"), ops.record() as calls:
        found = plain(model, ids, mask, custom_generate=SpeculativeDecoding(watch), **asked)
    assert torch.equal(found, expected)
    assert calls["row_draw", "triton"] and not calls["argmax", "reference"]


def test_sampling_is_refused_there_as_plain_sampling_is() -> None:
    model = tiny(vocab=VOCAB)
    ids, mask = prompts([6], vocab=VOCAB)
    asked = {"do_sample": True, **LAWS["no repeat"]}
    with pytest.raises(RuntimeError):
        plain(model, ids, mask, **asked)
    with pytest.raises(SpecGenError, match="no finite value"):
        plain(model, ids, mask, custom_generate=SpeculativeDecoding(None), **asked)


def test_logits_that_are_no_numbers_are_still_refused() -> None:
    model = tiny(vocab=VOCAB)
    ids, mask = prompts([6], vocab=VOCAB)
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    with pytest.raises(SpecGenError, match="NaN"):
        plain(model, ids, mask, custom_generate=SpeculativeDecoding(None), logits_processor=[BansAll()])
