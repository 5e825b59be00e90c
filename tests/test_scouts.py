"""Scouts and guesses: nodes that a pass computes and nobody may accept, and what the target thinks behind them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny import Handmade, Watch, plain, prompts, texts_of, tiny

from hf_specgen import Draft, PromptLookup, Reads, SpeculativeDecoding, Tree, WithLookup, ops
from hf_specgen.models.passes import Pass
from hf_specgen.models.visibility import TreeVisibility
from hf_specgen.stock import stock_candidates

LENGTHS = [5, 11, 8]
TOKENS = 14
WINDOW = 5


def scouting(offered: list[list[int]], scouts: list[list[int]]) -> Draft:
    """Build a draft of two chains from the root: what is offered, and behind it the scouts."""
    offer = Draft.from_lists(offered)
    window = torch.tensor(scouts)
    count = window.shape[1]
    first = Tree.chain(offer.width).parents
    second = torch.where(Tree.chain(count).parents < 0, -1, Tree.chain(count).parents + offer.width)
    tree = Tree(torch.cat([first, second], 1))
    return Draft(torch.cat([offer.tokens, window], 1), tree, offer.n_valid, scouts=count)


class Jacobi(Handmade):
    """Scout a window of tokens; what the target thinks behind them is what the next round offers and scouts."""

    def __init__(self, texts: list[list[int]]) -> None:
        self.texts = texts

    def reads(self, model) -> Reads:
        return Reads(guesses=True)

    def on_begin(self, sequences) -> None:
        self.offers: list[list[int]] = [[] for _ in sequences.tokens]
        self.guessed: list[bool] = []

    def on_propose(self, sequences) -> Draft:
        windows = []
        for text, tokens, offer in zip(self.texts, sequences.tokens, self.offers, strict=True):
            known = offer or text[len(tokens) : len(tokens) + WINDOW]
            windows.append([*known, *[1] * WINDOW][:WINDOW])
        offered = [offer[:space] for offer, space in zip(self.offers, self.room, strict=True)]
        return scouting(offered, windows)

    def on_observe(self, round) -> None:
        self.guessed.append(round.guesses is not None)
        if round.guesses is None:
            return
        assert round.guesses.shape[1] == round.draft.width + 1
        guesses = round.guesses.tolist()
        for row, (path, best) in enumerate(zip(round.paths, guesses, strict=True)):
            behind = [best[0], *best[len(best) - round.draft.scouts :]]
            self.offers[row] = behind[len(path) + 1 :][: WINDOW - 1]


@pytest.fixture(scope="module")
def case():
    model = tiny()
    ids, mask = prompts(LENGTHS)
    output = plain(model, ids, mask, max_new_tokens=TOKENS, do_sample=False)
    return model, ids, mask, output


def run(case, drafter, **settings):
    model, ids, mask, _ = case
    watch = Watch(drafter)
    settings = {"max_new_tokens": TOKENS, "do_sample": False, **settings}
    return plain(model, ids, mask, custom_generate=SpeculativeDecoding(watch), **settings), watch


def test_guesses_become_drafts_and_the_text_is_greedy(case) -> None:
    _, _, mask, expected = case
    output, watch = run(case, Jacobi(texts_of(expected, mask)))
    assert torch.equal(output, expected)
    assert watch.longest >= 2  # only guesses are offered
    assert all(watch.inner.guessed)
    for round in watch.rounds:
        best = round.guesses.tolist()
        for row, path in enumerate(round.paths):
            if round.proposed[row]:
                assert round.emitted[row] == [best[row][0], *(best[row][node + 1] for node in path)]


def test_a_row_that_has_finished_leaves_scouts_and_guesses_to_the_others(case) -> None:
    model, ids, mask, expected = case
    end = int(expected[1, ids.shape[1] + 2])
    settings = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": end}
    stopped = plain(model, ids, mask, **settings)
    output, watch = run(case, Jacobi(texts_of(expected, mask)), eos_token_id=end)
    assert torch.equal(output, stopped)
    assert watch.longest >= 1


def test_sampled_texts_are_those_of_the_seed(case) -> None:
    model, ids, mask, _ = case
    law = {"do_sample": True, "temperature": 0.7, "seed": 3}
    alone = plain(model, ids, mask, custom_generate=SpeculativeDecoding(), max_new_tokens=TOKENS, **law)
    output, _ = run(case, Jacobi(texts_of(alone, mask)), **law)
    assert torch.equal(output, alone)


class Known(Handmade):
    """Draft the true continuation, all of it as scouts or all of it offered."""

    def __init__(self, texts: list[list[int]], scouts: bool) -> None:
        self.texts = texts
        self.scouts = scouts

    def on_propose(self, sequences) -> Draft:
        rows = []
        for text, tokens in zip(self.texts, sequences.tokens, strict=True):
            rows.append([*text[len(tokens) : len(tokens) + 3], 1, 1, 1][:3])
        if self.scouts:
            return replace(scouting([[]] * len(rows), rows), n_valid=torch.full((len(rows),), 3))  # asks for too much
        offered = [row[:space] for row, space in zip(rows, self.room, strict=True)]
        return Draft.from_lists(offered)


@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_scouts_are_never_accepted(case, kernels: str) -> None:
    if kernels == "triton":
        pytest.importorskip("triton")
    _, _, mask, expected = case
    texts = texts_of(expected, mask)
    with ops.use_kernels(kernels):
        output, watch = run(case, Known(texts, scouts=True), max_new_tokens=6)
        _, control = run(case, Known(texts, scouts=False), max_new_tokens=6)
    assert torch.equal(output, expected[:, : output.shape[1]])
    assert watch.longest == 0
    assert control.longest == 3
    assert all(round.guesses is None for round in watch.rounds)  # nobody asked


def test_scouts_are_no_drafted_tokens(case) -> None:
    _, _, mask, expected = case
    output, watch = run(case, Jacobi(texts_of(expected, mask)))
    stats = output.speculation
    offered = sum(sum(round.proposed) for round in watch.rounds)
    widths = sum(round.draft.width - round.draft.scouts for round in watch.rounds) * len(LENGTHS)
    assert stats.num_draft_tokens <= offered <= widths


def test_copies_and_scouts_share_a_pass(case) -> None:
    _, _, mask, expected = case
    texts = texts_of(expected, mask)
    output, watch = run(case, WithLookup(Jacobi(texts), PromptLookup(3, corpus=texts[:1])))
    assert torch.equal(output, expected)
    assert any(round.draft.scouts for round in watch.rounds)


def test_merged_scouts_keep_their_chain() -> None:
    from hf_specgen.drafters.with_lookup import with_scouts

    offer = Draft.from_lists([[1, 2, 3], [4, 5]])
    both = with_scouts(offer, scouting([[6], []], [[7, 8], [9, 10]]))
    assert both.scouts == 2
    assert both.tokens.tolist() == [[1, 2, 3, 7, 8], [4, 5, 0, 9, 10]]
    assert both.tree.parents.tolist() == [[-1, 0, 1, -1, 3]]
    assert both.offered.tokens.tolist() == offer.tokens.tolist()


def test_stock_gets_no_scouts(case) -> None:
    model, ids, _, expected = case
    alone = ids[1:2]
    text = expected[1].tolist()
    jacobi = Jacobi([text])
    watch = Watch(jacobi)
    with stock_candidates(model, watch):
        output = model.generate(alone, max_new_tokens=TOKENS, do_sample=False)
    assert output[0].tolist() == text
    assert not any(round.draft.scouts for round in watch.rounds)


def test_scouts_stand_at_their_own_depth_within_the_room() -> None:
    draft = scouting([[1, 2], [3]], [[4, 5, 6], [7, 8, 9]])
    tokens = torch.cat([torch.zeros(2, 1, dtype=torch.long), draft.tokens], 1)
    batch = Pass(tokens, TreeVisibility(draft.tree), draft.n_valid, scouts=3, deepest=torch.tensor([9, 2]))
    assert batch.depth.tolist() == [[0, 1, 2, 1, 2, 3], [0, 1, 0, 1, 2, 2]]
    wide = batch.widened(torch.tensor([2, 0]), 3)
    assert wide.depth.tolist() == [batch.depth[1].tolist(), [0] * 6, batch.depth[0].tolist()]
