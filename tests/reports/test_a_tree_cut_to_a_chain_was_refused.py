"""A tree that ``num_tokens`` cuts to a chain is a chain: thresholds and ``rule="block"`` serve it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from conformance import LENGTHS, drafter_of, target
from tiny import Watch, few, ours, plain, prompts

from hf_specgen import SpecGenError, SpeculativeDecoding, WithLookup
from hf_specgen.round.costs import Costs

METHODS = ["eagle", "eagle3", "medusa"]
BRANCHES_LATE = [[0], [0, 0], [0, 0, 0], [0, 0, 1]]
CUT = {"tree": BRANCHES_LATE, "num_tokens": 2}
NARROW = {"tree": {"top_k": 1, "depth": 3, "nodes": 3}}
SINGLE = {"tree": {"top_k": 2, "depth": 3, "nodes": 1}}
SECOND_BEST = {"tree": [[1], [1, 0], [1, 1]], "num_tokens": 1}
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


@pytest.mark.parametrize("name", few(METHODS, "medusa"))
@pytest.mark.parametrize(("shape", "length"), [(CUT, 2), (NARROW, 3), (SINGLE, 1)], ids=["cut", "narrow", "single"])
@pytest.mark.parametrize("rule", ["block", "gumbel"])
def test_it_writes_what_the_chain_writes(name: str, shape: dict, length: int, rule: str, model) -> None:
    """Drawn tokens, and those picked with the target's own noise, are those of a chain: so is the text of a seed."""
    ids, mask = prompts(LENGTHS)
    texts = []
    drafts = []
    for settings in (shape, {"tree": "chain", "num_tokens": length}):
        watch = Watch(drafter_of(name, model, **settings, sample=True))
        loop = SpeculativeDecoding(watch, rule)
        texts.append(plain(model, ids, mask, do_sample=True, seed=4, custom_generate=loop, max_new_tokens=12))
        drafts.append([round.draft.tokens.tolist() for round in watch.rounds])
        assert watch.width == length
    assert torch.equal(*texts)
    assert drafts[0] == drafts[1]


def test_a_second_best_chain_is_judged_as_a_block(model) -> None:
    ids, mask = prompts(LENGTHS)
    watch = Watch(drafter_of("medusa", model, **SECOND_BEST, sample=True))
    plain(model, ids, mask, do_sample=True, custom_generate=SpeculativeDecoding(watch, "block"), max_new_tokens=6)
    assert watch.width == 1


def test_beside_copies_it_is_judged_as_a_block(model) -> None:
    ids, mask = prompts(LENGTHS)
    watch = Watch(WithLookup(drafter_of("medusa", model, **CUT, sample=True)))
    plain(model, ids, mask, do_sample=True, custom_generate=SpeculativeDecoding(watch, "block"), max_new_tokens=12)
    assert watch.width >= 2
    assert all(round.draft.tree.is_chain for round in watch.rounds)
    refused = WithLookup(drafter_of("medusa", model, **KEPT, sample=True))
    with pytest.raises(SpecGenError, match="rule='block'"):
        plain(model, ids, mask, do_sample=True, custom_generate=SpeculativeDecoding(refused, "block"))


class Agrees(Watch):
    """Count every row's draft as accepted: heuristic lengths then grow as far as they may."""

    def on_observe(self, round) -> None:
        self.rounds.append(round)
        self.session.settings.observe(SimpleNamespace(proposed=round.proposed, paths=[[0] * n for n in round.proposed]))
        self.session.model.observe(round)


@pytest.mark.parametrize("name", few(METHODS, "medusa", "eagle"))
@pytest.mark.parametrize(
    ("tree", "number", "deepest"),
    [("chain", 1, None), (BRANCHES_LATE, 2, 2), (NARROW["tree"], 1, 3)],
    ids=["chain", "cut", "narrow"],
)
def test_a_heuristic_length_grows_within_it(name: str, tree, number: int, deepest: int | None, model) -> None:
    """A chain that began short once stayed short; one that a tree comes to ends where the tree branches or ends."""
    ids, mask = prompts([7])
    watch = Agrees(drafter_of(name, model, tree=tree))
    settings = {"num_assistant_tokens": number, "num_assistant_tokens_schedule": "heuristic"}
    assert torch.equal(ours(model, watch, ids, mask, **settings), plain(model, ids, mask))
    if deepest is None:
        assert watch.width > number
    else:
        assert watch.width == deepest


@pytest.mark.parametrize("name", few(METHODS, "medusa"))
def test_a_narrow_tree_of_as_many_nodes_as_pay_rests(name: str, model) -> None:
    ids, mask = prompts([7])
    wanted = plain(model, ids, mask)
    for price, drafts in ((0.0, True), (9.0, False)):
        watch = Watch(drafter_of(name, model, tree={"top_k": 1, "depth": 3, "nodes": None}))
        watch.inner.costs = Costs(slope=price)
        assert torch.equal(ours(model, watch, ids, mask), wanted)
        assert (watch.width > 1) is drafts


@pytest.mark.parametrize("name", METHODS)
def test_a_narrow_tree_is_no_deeper_than_it_says(name: str, model) -> None:
    ids, mask = prompts([7])
    watch = Watch(drafter_of(name, model, **NARROW))
    with pytest.warns(UserWarning, match="at most 3"):
        ours(model, watch, ids, mask, num_assistant_tokens=5)
    assert watch.width == 3


@pytest.mark.parametrize("name", METHODS)
def test_a_tree_that_keeps_its_branches_is_refused(name: str, model) -> None:
    ids, mask = prompts([7])
    with pytest.raises(SpecGenError, match="confidence threshold"):
        ours(model, drafter_of(name, model, **KEPT), ids, mask, assistant_confidence_threshold=0.5)
    loop = SpeculativeDecoding(drafter_of(name, model, **KEPT, sample=True), "block")
    with pytest.raises(SpecGenError, match="rule='block'"):
        plain(model, ids, mask, do_sample=True, custom_generate=loop)
