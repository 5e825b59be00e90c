"""Trees of drawn tokens: the law of the draft, and of what is emitted from it, computed exactly for every coin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import accumulate

import pytest
import torch
from coin_boxes import (
    LAST_COIN,
    BoxCoins,
    Case,
    Outcome,
    Prefix,
    Result,
    Table,
    TableScores,
    coins_for,
    fixed,
    inside,
    logs,
    normal,
    outcomes,
    tally,
    weighted_drafts,
)
from law import enumerate_law, p_value
from tiny import Handmade, Watch, prompts, tiny
from torch import Tensor

import hf_specgen
from hf_specgen.drafting.shapes import ABSENT, StaticShape
from hf_specgen.round.coins import DRAFT, Coins
from hf_specgen.round.records import DenseQ, Draft, Round
from hf_specgen.round.sequences import Sequences
from hf_specgen.round.verify import verify

SHAPES = {
    "chain": StaticShape.chain(3),
    "two siblings": StaticShape.product((2,)),
    "three siblings": StaticShape.product((3,)),
    "2-2": StaticShape.product((2, 2)),
    "3-1": StaticShape.product((3, 1)),
    "uneven": StaticShape.from_paths([[0], [1], [0, 0], [0, 1], [1, 0]]),
}


def box_of(case: Case, tokens: Prefix, node: int) -> tuple[Fraction, Fraction] | None:
    """Where the coin of a node lies when it draws its token; None where the law has no token left."""
    assert case.q is not None
    parent = case.parents[node]
    law = list(case.q(case.prefix(tokens, parent)))
    for sibling in range(node):
        if case.parents[sibling] == parent:
            law[tokens[sibling]] = Fraction(0)
    if not any(law):
        return None
    edges = list(accumulate(normal(law), initial=Fraction(0)))
    return edges[tokens[node]], edges[tokens[node] + 1]


def drafting_coins(case: Case, drafts: list[Prefix]) -> BoxCoins:
    """Rows alternate between the lower and the upper end of their draft's box, for every node at once."""
    values = torch.empty(len(drafts), len(case.parents), dtype=torch.float64)
    for row, tokens in enumerate(drafts):
        for node in range(len(case.parents)):
            box = box_of(case, tokens, node)
            values[row, node] = [0.0, LAST_COIN][row % 2] if box is None else inside(box, row % 2)
    return BoxCoins({(DRAFT, node): values[:, node : node + 1] for node in range(len(case.parents))})


Scoring = Callable[[Prefix], Tensor]


def drawn(shape: StaticShape, scoring: list[Scoring], coins: BoxCoins | Coins) -> tuple[Tensor, Tensor]:
    """Draft as a drafter does, level by level: tokens ``(B, N)`` and the processed logits of each, ``(B, N, V)``."""
    tokens = torch.zeros(len(scoring), 0, dtype=torch.long)
    laws = []
    for depth in range(1, shape.max_depth + 1):
        parents = shape.expanding(depth - 1)
        prefixes = [[prefix_of(shape, row, node) for node in parents] for row in tokens.clamp(min=0).tolist()]
        scores = [torch.stack([score(prefix) for prefix in row]) for score, row in zip(scoring, prefixes, strict=True)]
        level = torch.stack(scores)
        tokens = torch.cat([tokens, shape.draw(depth, level, coins)], 1)
        laws.append(shape.laws(depth, level))
    return tokens, torch.cat(laws, 1)


def prefix_of(shape: StaticShape, tokens: list[int], node: int) -> Prefix:
    line: list[int] = []
    while node >= 0:
        line.insert(0, tokens[node])
        node = shape.parents[node]
    return tuple(line)


def expected_tokens(case: Case, tokens: Prefix) -> list[int]:
    return [ABSENT if box_of(case, tokens, node) is None else tokens[node] for node in range(len(tokens))]


Mutate = Callable[[Draft], Draft]


def solve(shape: StaticShape, p: Callable, q: Callable, mutate: Mutate = lambda draft: draft) -> Result:
    """Draw every draft at both ends of its coins' boxes, judge it in every box of the verdict's coins, add up.

    ``mutate`` breaks what the drafter hands over.
    """
    case = Case(p, shape.parents, q, without_replacement=True, sparse=False)
    plan: list[tuple[Prefix, Fraction, Outcome]] = [
        (tokens, weight, end) for tokens, weight in weighted_drafts(case) for end in outcomes(case, tokens)
    ]
    assert sum(weight for _, weight in weighted_drafts(case)) == 1
    drafts = [tokens for tokens, _, _ in plan for _ in range(2)]
    tokens, laws = drawn(shape, [scored(q)] * len(drafts), drafting_coins(case, drafts))
    assert tokens.tolist() == [expected_tokens(case, draft) for draft in drafts]
    tree, n_valid = shape.tree(), torch.full((len(drafts),), len(shape))
    draft = mutate(Draft(tokens, tree, n_valid, DenseQ(laws), without_replacement=True))
    nodes = range(-1, len(shape))
    target = scored(p)
    logits = torch.stack([torch.stack([target(case.prefix(row, node)) for node in nodes]) for row in drafts])
    verdict = verify(TableScores(logits), draft, coins_for(case, [end.box for *_, end in plan]))
    return tally(case, plan, Round(draft, verdict).emitted)


def scored(q: Callable) -> Scoring:
    return cache(lambda prefix: logs([q(prefix)])[0])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "2-2" else name for name in SHAPES]
)
def test_the_law_is_the_targets(name: str) -> None:
    for seed in range(2 if len(SHAPES[name]) <= 3 else 1):
        result = solve(SHAPES[name], Table(3, seed), Table(3, seed + 70))
        assert result.error <= 1e-12, (name, seed)
        assert result.unseen <= 1e-11
        assert result.accepted == pytest.approx(result.accepted_in_theory, abs=1e-12)
        assert result.accepted > 0.3


def test_more_siblings_than_the_law_has_tokens() -> None:
    """Processed laws are often narrow: the siblings that cannot be drawn are absent and change nothing."""
    shape, narrow = StaticShape.product((3, 2)), fixed("1/3", "2/3", "0")
    certain = fixed("0", "1", "0")
    for q in (narrow, certain):
        result = solve(shape, Table(3, 5), q)
        assert result.error <= 1e-12
    tokens, _ = drawn(shape, [scored(certain)] * 2, Coins(*(torch.arange(2) for _ in range(3))))
    assert tokens.tolist() == [[1, ABSENT, ABSENT, 1, ABSENT, 1, ABSENT, 1, ABSENT]] * 2


def other_law(draft: Draft) -> Draft:
    """Hand over a law that the tokens were not drawn from: the drafter's raw one, before the temperature."""
    assert isinstance(draft.q, DenseQ)
    return replace(draft, q=DenseQ(draft.q.logits * 0.5))


def sorted_siblings(draft: Draft) -> Draft:
    """Offer the likelier sibling first, not the one drawn first."""
    assert isinstance(draft.q, DenseQ)
    chances = draft.q.logits.gather(2, draft.tokens.clamp(min=0).unsqueeze(2)).squeeze(2)
    return replace(draft, tokens=draft.tokens.gather(1, chances.argsort(1, descending=True)))


FAULTS: dict[str, Mutate] = {
    "raw law": other_law,
    "drawn without, judged with replacement": lambda draft: replace(draft, without_replacement=False),
    "siblings out of the order they were drawn in": sorted_siblings,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen_by_the_computation(fault: str) -> None:
    """Negative control of the tests above: the decisions are others than theory's in boxes of some measure."""
    p, q = fixed("1/10", "4/10", "5/10"), fixed("8/10", "15/100", "5/100")
    shape = StaticShape.product((2,))
    assert solve(shape, p, q).error <= 1e-12
    assert solve(shape, p, q, FAULTS[fault]).error > 1e-2


def test_drawing_with_replacement_wastes_siblings() -> None:
    """What distinct siblings are for: they are accepted more often than independent ones."""
    p, q = fixed("1/4", "1/2", "1/4"), fixed("6/10", "3/10", "1/10")
    distinct = solve(StaticShape.product((3,)), p, q).accepted
    independent = float(case_accepted(Case(p, (-1, -1, -1), q)))
    assert distinct == pytest.approx(1.0, abs=1e-12)
    assert independent < 0.95


def case_accepted(case: Case) -> Fraction:
    ends = ((weight, end) for tokens, weight in weighted_drafts(case) for end in outcomes(case, tokens))
    return sum((weight * end.measure * (len(end.emitted) - 1) for weight, end in ends), Fraction(0))


def test_coins_are_keyed_by_the_rounds_start_and_the_node() -> None:
    shape = SHAPES["uneven"]
    tossed: list[tuple[int, int, int]] = []

    class Noted(Coins):
        def uniform(self, rows: Tensor, depth: Tensor | int, use: int, sibling: Tensor | int = 0) -> Tensor:
            assert depth == 0
            assert use == DRAFT
            tossed.extend((row, use, place) for row, place in zip(rows.tolist(), sibling.tolist(), strict=True))
            return super().uniform(rows, depth, use, sibling)

    drawn(shape, [scored(Table(5, 1))] * 3, Noted(torch.arange(3), torch.arange(3), torch.arange(3)))
    assert sorted(tossed) == [(row, DRAFT, node) for row in range(3) for node in range(len(shape))]


def test_a_rows_draft_is_its_own() -> None:
    """Neither the batch nor the other nodes of a level decide what a node draws."""
    shape, rows = SHAPES["2-2"], 6
    tables: list[Scoring] = [scored(Table(7, seed, zeros=False)) for seed in range(rows)]
    coins = Coins(torch.full((rows,), 4), torch.arange(rows), torch.arange(10, 10 + rows))
    together, _ = drawn(shape, tables, coins)
    for row in range(rows):
        alone, _ = drawn(shape, [tables[row]], coins.take(torch.tensor([row])))
        assert torch.equal(alone[0], together[row])
    first, _ = drawn(StaticShape.product((2,)), tables, coins)
    assert torch.equal(first, together[:, :2])
    assert len({tuple(row) for row in together.tolist()}) > 3


def test_siblings_are_distinct_and_laws_are_theirs() -> None:
    torch.manual_seed(0)
    shape, scores = StaticShape.product((3, 2)), torch.randn(40, 1, 300)
    coins = Coins(torch.arange(40), torch.arange(40), torch.arange(40))
    kept = scores.clone()
    first, second = shape.draw(1, scores, coins), shape.draw(2, scores, coins)
    assert torch.equal(scores, kept), "the caller's logits are left alone"
    assert all(len(set(row)) == 3 for row in first.tolist())
    pairs = second.view(40, 3, 2)
    assert (pairs[..., 0] != pairs[..., 1]).all()
    assert any(len(set(map(tuple, row))) > 1 for row in pairs.tolist()), "each parent draws its own children"
    assert torch.equal(shape.laws(2, scores), scores.expand(40, 6, 300))


class Drawing(Handmade):
    """Draft a tree of drawn tokens with a model that reads the whole text again for every node."""

    def __init__(self, model: torch.nn.Module, shape: StaticShape, fault: Mutate = lambda draft: draft) -> None:
        self.model, self.shape, self.fault = model, shape, fault

    def on_begin(self, sequences: Sequences) -> None:
        self.tree = self.shape.tree(sequences.prompt.device)
        self.absent = 0

    @torch.no_grad()
    def on_propose(self, sequences: Sequences) -> Draft:
        shape, rows = self.shape.cut(max(1, *self.room)), torch.arange(len(sequences))
        tokens, laws = torch.zeros(len(rows), 0, dtype=torch.long), []
        for depth in range(1, shape.max_depth + 1):
            parents = shape.expanding(depth - 1)
            texts = [
                [*text, *prefix_of(shape, row, node)]
                for text, row in zip(sequences.tokens, tokens.clamp(min=0).tolist(), strict=True)
                for node in parents
            ]
            ends = torch.tensor([len(text) - 1 for text in texts])
            padded = torch.tensor([text + [0] * (int(ends.max()) + 1 - len(text)) for text in texts])
            logits = self.model(input_ids=padded).logits[torch.arange(len(texts)), ends]
            owners = rows.repeat_interleave(len(parents))
            scores = sequences.warp(logits, owners, lambda place: None).view(len(rows), len(parents), -1)
            tokens = torch.cat([tokens, shape.draw(depth, scores, sequences.coins())], 1)
            laws.append(shape.laws(depth, scores))
        n_valid = shape.n_valid(torch.tensor(self.room))
        return self.fault(Draft(tokens, shape.tree(), n_valid, DenseQ(torch.cat(laws, 1)), True))

    def on_observe(self, round: Round) -> None:
        self.absent += int((round.draft.tokens == ABSENT).sum())


ROWS, VOCAB, NEW = 2_000, 5, 4
WARPERS = {"temperature": {"temperature": 1.5, "top_k": 0}, "top-k": {"temperature": 1.0, "top_k": 2}}


def sample(shape: StaticShape, fault: Mutate = lambda draft: draft, **settings: object) -> tuple[Tensor, Watch, dict]:
    target, drafter = tiny(vocab=VOCAB), tiny(4, vocab=VOCAB, layers=1)
    prompt, _ = prompts([4], vocab=VOCAB)
    watch = Watch(Drawing(drafter, shape, fault))
    out = target.generate(
        prompt.repeat(ROWS, 1),
        attention_mask=torch.ones(ROWS, 4, dtype=torch.long),
        custom_generate=hf_specgen.SpeculativeDecoding(watch),
        do_sample=True,
        max_new_tokens=NEW,
        seed=11,
        **settings,
    )
    return out[:, 4:], watch, enumerate_law(target, prompt, NEW, do_sample=True, **settings)


@pytest.mark.parametrize("name", WARPERS)
def test_the_whole_loop_keeps_the_law(name: str) -> None:
    shape = StaticShape.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0]])
    draws, watch, law = sample(shape, **WARPERS[name])
    assert watch.longest == 2
    assert watch.off_spine > ROWS / 20
    assert (watch.inner.absent > ROWS) == (name == "top-k"), "three siblings of a law on two tokens"
    assert p_value(draws, law, VOCAB) > 1e-3


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_bends_the_law_of_the_whole_loop(fault: str) -> None:
    """Negative control of the test above: what a drafter must not get wrong."""
    draws, _, law = sample(StaticShape.product((3, 1)), FAULTS[fault], **WARPERS["top-k"])
    assert p_value(draws, law, VOCAB) < 1e-9


def test_drawn_tokens_without_their_law_are_exact_but_accepted_less_often() -> None:
    """The coins that drew them decide nothing else, so they may be judged as if they had been picked."""
    shape, accepted = StaticShape.product((2, 1)), []
    for strip in (lambda draft: draft, lambda draft: replace(draft, q=None)):
        draws, watch, law = sample(shape, strip, **WARPERS["temperature"])
        assert p_value(draws, law, VOCAB) > 1e-3
        accepted.append(sum(len(path) for round in watch.rounds for path in round.paths))
    assert accepted[0] > 1.2 * accepted[1] > 0


def test_an_absent_node_is_never_accepted() -> None:
    """Greedy, sampled, with a law or without one: -1 is no token, whatever the target thinks of the last id."""
    for greedy in (True, False):
        for law in (None, DenseQ(torch.zeros(1, 2, 4))):
            logits = torch.full((1, 3, 4), -9.0)
            logits[..., 3] = logits[..., 0] = 5.0
            tree, coins = StaticShape.product((2,)).tree(), Coins(*(torch.tensor([7]) for _ in range(3)))
            draft = Draft(torch.tensor([[ABSENT, ABSENT]]), tree, torch.tensor([2]), law, True)
            verdict = verify(TableScores(logits, greedy), draft, coins)
            assert verdict.n.tolist() == [0]
            assert 0 <= int(verdict.next) < 4
