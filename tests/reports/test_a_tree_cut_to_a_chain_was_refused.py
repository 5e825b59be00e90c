"""A tree that ``num_tokens`` cuts to a chain is a chain: thresholds and ``rule="block"`` serve it."""

from __future__ import annotations

import pytest
import torch
from conformance import LENGTHS, drafter_of, target
from tiny import Watch, few, ours, plain, prompts

from hf_specgen import SpecGenError, SpeculativeDecoding

METHODS = ["eagle", "eagle3", "medusa"]
BRANCHES_LATE = [[0], [0, 0], [0, 0, 0], [0, 0, 1]]
CUT = {"tree": BRANCHES_LATE, "num_tokens": 2}
NARROW = {"tree": {"top_k": 1, "depth": 3, "nodes": 3}}
KEPT = {"tree": BRANCHES_LATE, "num_tokens": 3}


@pytest.fixture(scope="module")
def model():
    return target()


@pytest.mark.parametrize("name", few(METHODS, "medusa"))
@pytest.mark.parametrize("shape", [CUT, NARROW], ids=["cut", "narrow"])
def test_a_threshold_ends_it(name: str, shape: dict, model) -> None:
    ids, mask = prompts(LENGTHS)
    wanted = plain(model, ids, mask)
    widths = {}
    for threshold in (1e-6, 1.1):
        watch = Watch(drafter_of(name, model, **shape))
        assert torch.equal(ours(model, watch, ids, mask, assistant_confidence_threshold=threshold), wanted)
        assert all(round.draft.tree.is_chain for round in watch.rounds)
        widths[threshold] = watch.width
    assert widths[1e-6] >= 2 and widths[1.1] < widths[1e-6]


@pytest.mark.parametrize("name", few(METHODS, "medusa"))
@pytest.mark.parametrize("shape", [CUT, NARROW], ids=["cut", "narrow"])
def test_it_is_drawn_and_judged_as_a_block(name: str, shape: dict, model) -> None:
    ids, mask = prompts(LENGTHS)
    watch = Watch(drafter_of(name, model, **shape, sample=True))
    loop = SpeculativeDecoding(watch, "block")
    plain(model, ids, mask, do_sample=True, seed=4, custom_generate=loop, max_new_tokens=12)
    drafts = [round.draft for round in watch.rounds if round.draft.width]
    assert drafts and all(draft.tree.is_chain and draft.q is not None for draft in drafts)


@pytest.mark.parametrize("name", METHODS)
def test_a_tree_that_keeps_its_branches_is_refused(name: str, model) -> None:
    ids, mask = prompts([7])
    with pytest.raises(SpecGenError, match="confidence threshold"):
        ours(model, drafter_of(name, model, **KEPT), ids, mask, assistant_confidence_threshold=0.5)
    loop = SpeculativeDecoding(drafter_of(name, model, **KEPT, sample=True), "block")
    with pytest.raises(SpecGenError, match="rule='block'"):
        plain(model, ids, mask, do_sample=True, custom_generate=loop)
