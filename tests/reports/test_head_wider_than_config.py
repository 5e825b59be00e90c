"""Reported: where the head's width differs from ``config.vocab_size``, biased calls with drawn drafts crash."""

from __future__ import annotations

import pytest
import torch
from fitted import fitted
from tiny import Watch, disturbed, plain, prompts, some, texts_of, tiny
from torch import nn

from hf_specgen import PromptLookup, SmallModel, SpeculativeDecoding, WithLookup, stock_candidates
from hf_specgen.models.facts import logits_width
from hf_specgen.trainers.warm_start import new_drafter

IDS = 64
BIAS = {"sequence_bias": {(7,): 2.0, (3, 9): -4.0}}
BANNED = {"bad_words_ids": [[5], [11, 2]]}
GREEDY = {"do_sample": False, **BIAS}
DRAWN = {"do_sample": True, "top_k": 0, "temperature": 1.2, "seed": 5, **BIAS, **BANNED}
CHAIN = {"tree": "chain", "num_tokens": 3}


def with_head(width: int, seed: int = 0, scale: float = 0.0):
    """Build a model whose head has ``width`` rows where its config says 64 ids; ids beyond them are never written."""
    model = tiny(seed) if not scale else disturbed(tiny(seed), scale)
    head = nn.Linear(32, width)
    with torch.no_grad():
        head.weight.zero_()
        head.bias.fill_(-60.0)
        kept = min(width, IDS)
        head.weight[:kept] = model.lm_head.weight[:kept]
        head.bias[:kept] = 0.0
    model.lm_head = head
    return model


def learned(method: str, model, texts: list[list[int]], **settings: object):
    """Fit a drafter to the model with 64 ids, and let it draft for the other."""
    more = {"num_heads": 3, "num_head_layers": 1} if method == "medusa" else {}
    return fitted(method, tiny(), texts, 5, **more, **settings)


def made(kind: str, model, texts: list[list[int]]):
    if kind == "small":
        return Watch(SmallModel(disturbed(tiny(), 0.3), 4, sample=True))
    if kind == "small of the same width":
        return Watch(SmallModel(with_head(logits_width(model), scale=0.3), 4, sample=True))
    if kind == "small with lookup":
        return Watch(WithLookup(SmallModel(disturbed(tiny(), 0.3), 4, sample=True)))
    return Watch(learned(kind, model, texts, sample=True, **CHAIN))


KINDS = ["small", "small of the same width", "small with lookup", "medusa", "eagle", "eagle3"]


@pytest.mark.parametrize(("kind", "width"), some(KINDS, (72, 60)))
def test_every_drafter_drafts_for_the_width_of_the_logits(kind: str, width: int) -> None:
    model = with_head(width)
    ids, mask = prompts([9, 4], vocab=min(width, IDS))
    expected = plain(model, ids, mask, max_new_tokens=16, **GREEDY)
    texts = texts_of(expected, mask)
    watch = made(kind, model, texts)
    found = plain(model, ids, mask, max_new_tokens=16, custom_generate=SpeculativeDecoding(watch), **GREEDY)
    assert torch.equal(found, expected)
    for rule in ("rejection", "gumbel"):
        call = {**DRAWN, "custom_generate": SpeculativeDecoding(watch, rule), "max_new_tokens": 10}
        once = plain(model, ids, mask, **call)
        assert watch.width > 0 and max(watch.drafted) < min(width, IDS)
        if rule == "gumbel":  # the text is the seed's, whatever is drafted
            call["custom_generate"] = SpeculativeDecoding(None, rule)
            assert torch.equal(once, plain(model, ids, mask, **call))


@pytest.mark.parametrize("width", [72, 60])
def test_stock_decoding_takes_laws_of_that_width(width: int) -> None:
    model, small = with_head(width), disturbed(tiny(), 0.3)
    ids, mask = prompts([9], vocab=min(width, IDS))
    with stock_candidates(model, SmallModel(small, 4, sample=True)) as calls:
        torch.manual_seed(0)
        plain(model, ids, mask, max_new_tokens=8, do_sample=True, top_k=0, **BIAS)
    assert calls[0].stats.num_draft_tokens > 0


def test_ids_beyond_the_embedding_do_not_crash_the_pass() -> None:
    """The head has 72 rows and the embedding 64: a drafted 70 may be embedded as anything, it is not accepted."""
    model = with_head(72)
    ids, mask = prompts([9])
    expected = plain(model, ids, mask, max_new_tokens=8)
    watch = Watch(PromptLookup(4, corpus=[[*text[:-4], 70, 71] for text in texts_of(expected, mask)]))
    found = plain(model, ids, mask, max_new_tokens=8, custom_generate=SpeculativeDecoding(watch))
    assert torch.equal(found, expected)
    assert 70 in watch.drafted


def test_the_width_is_the_heads() -> None:
    assert logits_width(with_head(72)) == 72 and logits_width(with_head(60)) == 60
    assert logits_width(tiny()) == tiny().config.vocab_size


@pytest.mark.parametrize("width", [72, 60])
@pytest.mark.parametrize("method", ["medusa", "eagle3"])
def test_new_drafters_start_from_the_rows_that_are_ids(method: str, width: int) -> None:
    model = with_head(width)
    ids, mask = prompts([9], vocab=min(width, IDS))
    drafter, notes = new_drafter(method, model)
    assert any("head" in note for note in notes)
    assert drafter.config.vocab_size == IDS and drafter.config.draft_vocab_size == min(width, IDS)
    watch = Watch(drafter.eval())
    call = {"custom_generate": SpeculativeDecoding(watch), "num_assistant_tokens": 3}
    found = plain(model, ids, mask, max_new_tokens=8, **call)
    assert torch.equal(found, plain(model, ids, mask, max_new_tokens=8)) and watch.width == 3
