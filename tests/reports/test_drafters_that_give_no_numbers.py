"""Reported: a drafter whose logits are NaN or overflow keeps the text and drafts for nothing, without a word."""

from __future__ import annotations

import warnings

import pytest
import torch
from fitted import fitted
from tiny import disturbed, plain, prompts, some, texts_of, tiny

from hf_specgen import Drafter, PromptLookup, SmallModel, SpeculativeDecoding, WithLookup, ops, stock_candidates

NAN, INF = float("nan"), float("inf")
MEDUSA = {"num_heads": 3, "num_head_layers": 1}
DYNAMIC = {"tree": {"top_k": 2, "depth": 3, "nodes": 6}}
PAYING = {"tree": {"top_k": 2, "depth": 3, "nodes": None}}
# kind: method of a trained drafter, settings
LEARNED = {
    "medusa": ("medusa", MEDUSA),
    "medusa dynamic": ("medusa", {**MEDUSA, **DYNAMIC}),
    "eagle": ("eagle", {"tree": "chain", "num_tokens": 3}),
    "eagle tree": ("eagle", {"tree": [[0], [1], [0, 0]]}),
    "eagle paying": ("eagle", PAYING),
    "eagle3 dynamic": ("eagle3", {"reduced": True, **DYNAMIC}),
}
SMALL = ("small", "small drawn", "small with lookup")
RAGGED = [9, 4, 12, 7]


@pytest.fixture(scope="module")
def case():
    model = tiny()
    ids, mask = prompts(RAGGED)
    return model, ids, mask, plain(model, ids, mask, max_new_tokens=12)


def spoiled(kind: str, case, value: float) -> Drafter:
    """Build a drafter of which one weight is no number; 1 leaves it sound."""
    model, _, mask, expected = case
    if kind in SMALL:
        small = disturbed(model)
        with torch.no_grad():
            small.model.layers[0].mlp.up_proj.weight[0, 0] *= value
        drafter = SmallModel(small, 3, sample=kind == "small drawn")
        return WithLookup(drafter, PromptLookup(2)) if kind == "small with lookup" else drafter
    method, settings = LEARNED[kind]
    learned = fitted(method, model, texts_of(expected, mask), **settings)
    with torch.no_grad():
        weight = next(part for name, part in learned.named_parameters() if part.dim() == 2 and "embed" not in name)
        weight[0].fill_(value) if value != 1 else None
    return learned


def told(run) -> tuple[torch.Tensor, list[str]]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        out = run()
    return out, [str(warning.message) for warning in seen if "NaN or infinite" in str(warning.message)]


@pytest.mark.parametrize(("kind", "value"), some((*LEARNED, *SMALL), (NAN, INF)))
def test_one_warning_names_the_drafter(kind: str, value: float, case) -> None:
    model, ids, mask, expected = case
    drafter = spoiled(kind, case, value)
    loop = SpeculativeDecoding(drafter)
    drawn = {"do_sample": True, "seed": 4, "top_k": 0} if kind == "small drawn" else {}
    run = {"custom_generate": loop, "max_new_tokens": 12, **drawn}
    out, messages = told(lambda: plain(model, ids, mask, **run))
    assert len(messages) == 1 and messages[0].startswith(drafter.title), messages
    if not drawn:
        assert torch.equal(out, expected)


@pytest.mark.parametrize("kind", [*LEARNED, *SMALL])
def test_a_sound_drafter_is_not_accused(kind: str, case) -> None:
    """Processors that ban nearly everything make infinities of their own."""
    model, ids, mask, _ = case
    drafter = spoiled(kind, case, 1.0)
    call = {"max_new_tokens": 12, "suppress_tokens": list(range(40)), "no_repeat_ngram_size": 2}
    out, messages = told(lambda: plain(model, ids, mask, custom_generate=SpeculativeDecoding(drafter), **call))
    assert not messages and out.speculation.num_draft_tokens > 0


def test_one_row_and_the_kernels_and_stock_decoding_say_so_too(case) -> None:
    pytest.importorskip("triton")
    model, ids, mask, expected = case
    ids, expected = ids[2:3, mask[2] > 0], expected[2:3]
    drafter = spoiled("small", case, NAN)
    with ops.use_kernels("triton"):
        loop = SpeculativeDecoding(drafter)
        out, messages = told(lambda: plain(model, ids, custom_generate=loop, max_new_tokens=4))
    assert len(messages) == 1 and torch.equal(out, expected[:, : out.shape[1]])
    with stock_candidates(model, drafter):
        out, messages = told(lambda: plain(model, ids, max_new_tokens=12))
    assert len(messages) == 1 and torch.equal(out, expected)


def test_half_precision_that_overflows_is_told(case) -> None:
    """Weights that are fine in float32 and too large for the range of float16."""
    model, ids, mask, expected = case
    small = disturbed(model)
    with torch.no_grad():
        small.lm_head.weight.mul_(3e4)
    _, messages = told(
        lambda: plain(model, ids, mask, custom_generate=SpeculativeDecoding(SmallModel(small.half(), 3)))
    )
    assert len(messages) == 1
    out, messages = told(
        lambda: plain(model, ids, mask, max_new_tokens=12, custom_generate=SpeculativeDecoding(SmallModel(model, 3)))
    )
    assert not messages and torch.equal(out, expected)
