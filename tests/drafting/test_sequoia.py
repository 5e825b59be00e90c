"""The best tree against every tree there is, on budgets where they can be listed; rates measured from rounds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from coin_boxes import TableScores
from tiny import Handmade, ours, plain, prompts, tiny

from hf_specgen.drafting.sequoia import (
    Measured,
    Paths,
    RankRates,
    Rates,
    assumed_heads,
    best_paths,
    best_plan,
    expected_tokens,
    same_rates,
)
from hf_specgen.drafting.shapes import StaticShape
from hf_specgen.errors import SpecGenError
from hf_specgen.round.coins import Coins
from hf_specgen.round.costs import Costs
from hf_specgen.round.records import Draft, Round, Verdict
from hf_specgen.round.sequences import Sequences
from hf_specgen.round.verify import verify

RATES: dict[str, Rates] = {
    "falling": same_rates((0.6, 0.2, 0.1), 7),
    "sure": same_rates((0.95, 0.03), 7),
    "flat": same_rates((0.3, 0.3, 0.3), 7),
    "the second is better": same_rates((0.1, 0.7), 7),
    "never": same_rates((0.0, 0.0), 3),
    "by depth": ((0.7, 0.2), (0.3, 0.25, 0.2), (0.8,), (0.1, 0.1)),
    "a good head behind bad ones": ((0.2, 0.15), (0.2,), (0.99,)),
    "one level": ((0.3, 0.2, 0.1),),
}


@cache
def forests(nodes: int, depth: int) -> tuple[Paths, ...]:
    """Every list of up to ``nodes`` paths with parents and elder siblings, at most ``depth`` ranks long."""
    if not nodes or not depth:
        return ((),)
    found: list[Paths] = [()]
    for size in range(1, nodes + 1):  # the eldest child has a subtree of this size, its siblings share the rest
        for eldest in forests(size - 1, depth - 1):
            if len(eldest) != size - 1:
                continue
            for others in forests(nodes - size, depth):
                moved = tuple((path[0] + 1, *path[1:]) for path in others)
                found.append(((0,), *((0, *path) for path in eldest), *moved))
    return tuple(found)


def trees(nodes: int, rates: Rates) -> Iterator[Paths]:
    for paths in forests(nodes, len(rates)):
        if paths and all(path[-1] < len(rates[len(path) - 1]) for path in paths):
            yield paths


def test_the_list_of_all_trees() -> None:
    """Ordered forests of n nodes are counted by the Catalan numbers."""
    counts = [0] * 7
    for paths in forests(6, 6):
        assert not paths or len(StaticShape.from_paths(paths)) == len(paths)
        counts[len(paths)] += 1
    assert counts == [1, 1, 2, 5, 14, 42, 132]


@pytest.mark.parametrize("name", RATES)
def test_no_tree_is_better(name: str) -> None:
    rates = RATES[name]
    for nodes in range(1, 8):
        paths = best_paths(rates, nodes)
        best = max(expected_tokens(tree, rates) for tree in trees(nodes, rates))
        assert expected_tokens(paths, rates) == pytest.approx(best, abs=1e-12)
        assert len(paths) <= nodes
        if name == "never":
            continue
        shape = StaticShape.from_paths(paths)
        assert shape.paths == paths
        assert shape.max_depth <= len(rates)
        for parent in (-1, *shape.internal):  # siblings have ranks 0, 1, 2: they can be drawn as well as picked
            siblings = [rank for above, rank in zip(shape.parents, shape.ranks, strict=True) if above == parent]
            assert siblings == list(range(len(siblings)))


def test_the_best_trees_are_no_chains_and_no_stars() -> None:
    """The search decides something: other rates ask for other trees."""
    shapes = {name: StaticShape.from_paths(best_paths(rates, 7)) for name, rates in RATES.items() if name != "never"}
    assert shapes["sure"].is_chain
    assert [len(level) for level in shapes["flat"].levels] == [3, 4]
    assert [len(level) for level in shapes["falling"].levels] == [2, 3, 1, 1]
    assert len({shape.paths for shape in shapes.values()}) >= 6
    for rates in (RATES["falling"], RATES["flat"]):
        tree = expected_tokens(best_paths(rates, 7), rates)
        assert tree > expected_tokens(StaticShape.chain(7).paths, rates) + 0.02
        assert tree > expected_tokens(StaticShape.product((3,)).paths, rates) + 0.1


def greedy(rates: Rates, nodes: int) -> float:
    """Take the likeliest path of all that may be added, again and again: right where rates fall with the rank."""
    total, chances = 1.0, {(): 1.0}
    for _ in range(nodes):
        open_paths = {
            (*path, rank): chance * rate
            for path, chance in chances.items()
            if len(path) < len(rates)
            for rank, rate in enumerate(rates[len(path)])
            if (*path, rank) not in chances
        }
        best = max(open_paths, key=lambda path: open_paths[path])
        chances[best] = open_paths[best]
        total += chances[best]
    return total


@pytest.mark.parametrize("nodes", [10, 63, 200])
def test_large_trees_with_falling_rates_are_the_greedy_ones(nodes: int) -> None:
    for rates in (assumed_heads(4), same_rates([0.7 * (rank + 1) ** -1.5 for rank in range(8)], 12)):
        assert expected_tokens(best_paths(rates, nodes), rates) == pytest.approx(greedy(rates, nodes), abs=1e-9)


def test_a_chain_writes_what_the_formula_says() -> None:
    assert expected_tokens(StaticShape.chain(5).paths, same_rates((0.7,), 5)) == pytest.approx(2.94117, abs=1e-5)
    assert expected_tokens(StaticShape.chain(6).paths, same_rates((0.8,), 6)) == pytest.approx(3.951424, abs=1e-6)


@pytest.mark.parametrize(("draft", "slope"), [(0.0, 0.3), (0.1, 0.05), (0.4, 0.02), (2.0, 0.5)])
def test_the_best_size_of_all(draft: float, slope: float) -> None:
    costs, rates = Costs(draft=draft, slope=slope), RATES["falling"]

    def gain(paths: Paths) -> float:
        depth = max(map(len, paths))
        return expected_tokens(paths, rates) / (costs.forward(2, len(paths)) / costs.forward(2, 0) + draft * depth)

    plan = best_plan(rates, costs, most=7, rows=2)
    assert plan.gain == pytest.approx(max(map(gain, trees(7, rates))), abs=1e-12)
    assert plan.gain == pytest.approx(gain(plan.paths), abs=1e-12)
    assert plan.tokens == pytest.approx(expected_tokens(plan.paths, rates), abs=1e-12)
    assert (plan.gain < 1) == (draft == 2.0)
    assert len(plan.paths) < 7 or draft == 0.4


@pytest.mark.parametrize("rates", [(), ((),), ((0.5, 1.5),), ((0.5,), (-0.1,)), ((math.nan,),)])
def test_rates_that_are_none(rates: Rates) -> None:
    for search in (lambda: best_paths(rates, 3), lambda: best_plan(rates, Costs())):
        with pytest.raises(SpecGenError, match="numbers from 0 to 1"):
            search()


def test_a_tree_needs_a_node() -> None:
    with pytest.raises(SpecGenError, match="at least one node"):
        best_paths(RATES["flat"], 0)


def test_assumed_heads_are_laws() -> None:
    for ranks in assumed_heads(7, ranks=10):
        assert 0 < sum(ranks) < 1
        assert ranks == sorted(ranks, reverse=True)


SHAPE = StaticShape.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]])


def test_rates_are_counted_where_a_child_was_offered() -> None:
    measured = RankRates(SHAPE.paths)
    tokens = torch.zeros(3, len(SHAPE), dtype=torch.long)
    path = torch.tensor([[0, 3, 6], [1, 0, 0], [0, 0, 0]])  # zeros behind the accepted count mean nothing
    verdict = Verdict(path, torch.tensor([3, 1, 0]), torch.zeros(3).long(), torch.zeros(3).bool())
    measured.observe(Round(Draft(tokens, SHAPE.tree(), torch.tensor([7, 6, 3])), verdict))
    assert measured.tried == [[3, 3, 3], [2, 1, 0], [1, 0, 0]]
    assert measured.accepted == [[1, 1, 0], [1, 0, 0], [1, 0, 0]]
    assert measured.rates == [[1 / 3, 1 / 3, 0.0], [0.5, 0.0, 0.0], [1.0, 0.0, 0.0]]


def test_measured_rates_are_the_chances_of_the_tokens() -> None:
    """A tree of the best tokens of a fixed law is accepted as often as that law says, and so is the round's length."""
    rows = 20_000
    law = torch.tensor([0.5, 0.25, 0.15, 0.1])
    tokens = torch.tensor([SHAPE.ranks]).expand(rows, -1)
    scores = TableScores(law.log().expand(rows, len(SHAPE) + 1, -1))
    coins = Coins(torch.full((rows,), 3), torch.arange(rows), torch.zeros(rows, dtype=torch.long))
    draft = Draft(tokens, SHAPE.tree(), torch.full((rows,), len(SHAPE)))
    round, measured = Round(draft, verify(scores, draft, coins)), RankRates(SHAPE.paths)
    measured.observe(round)
    for tried, rates in zip(measured.tried, measured.rates, strict=True):
        for rank, (count, rate) in enumerate(zip(tried, rates, strict=True)):
            chance = float(law[rank])
            assert not count or abs(rate - chance) < 5 * math.sqrt(chance * (1 - chance) / count)
    assert measured.tried[0] == [rows] * 3
    mean = sum(map(len, round.emitted)) / rows
    assert mean == pytest.approx(expected_tokens(SHAPE.paths, same_rates(law.tolist(), 3)), abs=0.03)


class Second(Handmade):
    """Draft the right token as every node's second child, something else as its first."""

    def __init__(self, texts: list[list[int]], shape: StaticShape) -> None:
        self.texts, self.shape = texts, shape

    def on_begin(self, sequences: Sequences) -> None:
        """Need nothing."""

    def on_propose(self, sequences: Sequences) -> Draft:
        rows = [
            [(text + [0] * 9)[len(tokens) + len(path) - 1] + (path[-1] != 1) for path in self.shape.paths]
            for text, tokens in zip(self.texts, sequences.tokens, strict=True)
        ]
        n_valid = self.shape.n_valid(torch.tensor(self.room))
        return Draft(torch.tensor(rows).remainder(64), self.shape.tree(), n_valid)


def test_measuring_a_drafter_finds_the_tree_it_should_draft() -> None:
    model, (ids, mask) = tiny(), prompts([9, 4, 7])
    expected = plain(model, ids, mask)
    texts = [row[int((1 - pads).sum()) :] for row, pads in zip(expected.tolist(), mask, strict=True)]
    shape = StaticShape.product((2, 2, 2))
    measured = Measured(Second(texts, shape), shape.paths)
    assert torch.equal(ours(model, measured, ids, mask), expected)
    assert measured.rates == [[0.0, 1.0]] * 3
    assert measured.counts.tried[0][1] > 15
    assert best_plan(measured.rates, Costs(slope=0.01), most=6).paths == (
        (0,),
        (1,),
        (1, 0),
        (1, 1),
        (1, 1, 0),
        (1, 1, 1),
    )
    small = Measured(Second(texts, shape), shape.paths[:6])
    with pytest.raises(SpecGenError, match="14 nodes was measured with a tree of 6"):
        ours(model, small, ids, mask)
