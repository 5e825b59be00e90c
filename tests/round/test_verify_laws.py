"""The law of what ``verify`` emits equals the target's, computed exactly for every draft and every coin."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from coin_boxes import BoxCoins, Case, Table, TableScores, Weights, check, fixed, logs, rest
from tiny import some
from torch import Tensor

from hf_specgen.round.coins import ACCEPT, SAMPLE, Coins
from hf_specgen.round.records import DenseQ, Draft, Round, SparseQ, Tree
from hf_specgen.round.verify import verify

ROWS = {  # p, q, accepted mass
    "one": (fixed("1/10", "3/10", "6/10"), fixed("4/10", "4/10", "2/10"), 0.6),
    "two": (fixed("5/10", "3/10", "2/10"), fixed("2/10", "6/10", "2/10"), 0.7),
    "certain drafter": (fixed("2/10", "5/10", "3/10"), fixed("1", "0", "0"), 0.2),
    "disjoint": (fixed("0", "1"), fixed("1", "0"), 0.0),
    "equal": (fixed("1/10", "3/10", "6/10"), fixed("1/10", "3/10", "6/10"), 1.0),
    "greedy target": (fixed("0", "1", "0"), fixed("1/4", "1/2", "1/4"), 0.5),
}
TREES = {
    "two siblings": (-1, -1),
    "three siblings": (-1, -1, -1),
    "1-2": (-1, 0, 0),
    "2-1": (-1, -1, 0, 1),
    "uneven": (-1, -1, 0, 0, 1),
    "lonely branch first": (-1, 0, -1, 2),
}
DEEP = (-1, 0, 0, 1, 1, 2, 2)


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("name", ROWS)
def test_one_position(name: str, rule: str, sparse: bool) -> None:
    p, q, accepted = ROWS[name]
    result = check(Case(p, (-1,), q, rule=rule, sparse=sparse))
    assert result.accepted == pytest.approx(accepted, abs=1e-12)


def test_one_position_with_a_deterministic_drafter_accepts_as_often_as_its_one_hot_law() -> None:
    p, _, accepted = ROWS["certain drafter"]
    assert check(Case(p, (-1,), drafts=((0,),))).accepted == pytest.approx(accepted, abs=1e-12)


QUARTERS = torch.tensor([c for c in itertools.product(range(5), repeat=3) if sum(c) == 4], dtype=torch.float64) / 4
CELLS = 12  # every threshold of the quarter grid is a multiple of 1/12, so cell midpoints integrate exactly


def on_the_grid(q: Tensor, sparse: bool, rule: str) -> tuple[Tensor, Tensor]:
    """Return per (p, q) pair the law ``(225, 3)`` and the accepted mass, with no reference but the grid itself."""
    midpoints = (torch.arange(CELLS) + 0.5).double() / CELLS
    axes = torch.cartesian_prod(torch.arange(15), torch.arange(15), torch.arange(3), *[torch.arange(CELLS)] * 2)
    p_row, q_row, token, accept, sample = axes.unbind(1)
    weight = q[q_row, token] / CELLS**2
    logits = QUARTERS[p_row].log().unsqueeze(1).expand(-1, 2, -1)
    law = q[q_row].unsqueeze(1)
    given = SparseQ(torch.arange(3).expand(law.shape), law) if sparse else DenseQ(law.log())
    draft = Draft(token.unsqueeze(1), Tree.chain(1), torch.ones_like(token), given)
    coins = BoxCoins({(ACCEPT, 0): midpoints[accept].unsqueeze(1).expand(-1, 2)})
    coins.values[SAMPLE, 0] = midpoints[sample].unsqueeze(1).expand(-1, 2)
    verdict = verify(TableScores(logits), draft, coins, rule)
    first = torch.where(verdict.n > 0, token, verdict.next)
    pair = p_row * 15 + q_row
    seen = torch.zeros(225 * 3, dtype=torch.float64).index_add_(0, pair * 3 + first, weight).view(225, 3)
    return seen, torch.zeros(225, dtype=torch.float64).index_add_(0, pair, weight * verdict.n)


@pytest.mark.parametrize(("rule", "sparse"), [("rejection", True), ("rejection", False), ("block", False)])
def test_every_pair_on_the_quarter_grid(rule: str, sparse: bool) -> None:
    law, accepted = on_the_grid(QUARTERS, sparse, rule)
    p, q = QUARTERS.repeat_interleave(15, 0), QUARTERS.repeat(15, 1)
    assert (law - p).abs().max() < 1e-12
    assert (accepted - torch.minimum(p, q).sum(1)).abs().max() < 1e-12


@pytest.mark.parametrize("gamma", [1, 2, 3])
@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_sampled_chains(rule: str, sparse: bool, gamma: int) -> None:
    for seed in range(4):
        check(Case(Table(3, seed), tuple(range(-1, gamma - 1)), Table(3, seed + 50), rule=rule, sparse=sparse))


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("n_valid", [0, 1, 2])
def test_a_chain_cut_short(rule: str, n_valid: int) -> None:
    check(Case(Table(3, 1), (-1, 0, 1), Table(3, 2), rule=rule, n_valid=n_valid))


@pytest.mark.parametrize(("name", "sparse", "without_replacement"), some(TREES, (True, False), (False, True)))
def test_sampled_trees(name: str, sparse: bool, without_replacement: bool) -> None:
    for seed in range(2):
        q = Table(3, seed + 70, zeros=False)
        check(Case(Table(3, seed), TREES[name], q, sparse=sparse, without_replacement=without_replacement))


@pytest.mark.parametrize("seed", [4, 5, 23])
def test_distinct_siblings_that_leave_much_of_p(seed: int) -> None:
    p, q = Table(4, seed, zeros=False), Table(4, seed + 100, zeros=False)
    check(Case(p, (-1, -1, -1), q, without_replacement=True))


@pytest.mark.parametrize("sparse", [True, False])
def test_the_deep_tree(sparse: bool) -> None:
    check(Case(Table(2, 3), DEEP, Table(2, 4, zeros=False), sparse=sparse))
    check(Case(Table(2, 3), DEEP, Table(2, 4, zeros=False), sparse=sparse, without_replacement=True))


@pytest.mark.parametrize("n_valid", [0, 1, 3])
def test_a_tree_cut_short(n_valid: int) -> None:
    check(Case(Table(3, 5), (-1, -1, 0, 0), Table(3, 6), n_valid=n_valid))


def test_siblings_beyond_the_support_of_q_cost_nothing() -> None:
    """A law on two tokens cannot give three distinct children: the drafter pads, the target passes the pad over."""
    q = fixed("1/3", "2/3", "0")
    check(Case(Table(3, 5), (-1, -1, -1), q, without_replacement=True))
    check(Case(fixed("1/10", "1/10", "8/10"), (-1, -1, -1), q, without_replacement=True, sparse=False))


def test_more_siblings_are_accepted_as_often_as_theory_says() -> None:
    p, q = Table(3, 1), Table(3, 2)
    left, law, missed = p(()), q(()), Fraction(1)
    for _ in range(3):
        missed *= 1 - sum(min(a, b) for a, b in zip(left, law, strict=True))
        left = [weight / sum(rest(left, law)) for weight in rest(left, law)]
    assert check(Case(p, (-1, -1, -1), q)).accepted == pytest.approx(float(1 - missed), abs=1e-12)


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize(
    ("parents", "drafts"),
    [
        ((-1,), ((0,), (2,))),
        ((-1, 0, 1), ((0, 1, 2), (1, 1, 1), (2, 0, 0))),
        ((-1, -1), ((0, 1), (0, 0), (2, 1))),
        ((-1, -1, -1), ((0, 1, 2), (1, 1, 2), (0, 0, 0))),
        ((-1, -1, 0, 0, 1, 2), ((0, 1, 0, 1, 2, 2), (0, 0, 1, 1, 0, 0), (2, 1, 0, 0, 1, 2))),
        (DEEP, ((0, 1, 2, 0, 1, 2, 0), (1, 1, 1, 2, 2, 0, 1))),
        ((), ((),)),
    ],
)
def test_deterministic_drafts(parents: tuple[int, ...], drafts: tuple[tuple[int, ...], ...], rule: str) -> None:
    for seed in range(3):
        check(Case(Table(3, seed), parents, drafts=drafts, rule=rule))


def test_deterministic_siblings_follow_the_vectors() -> None:
    p = fixed("1/2", "3/10", "2/10")
    assert check(Case(p, (-1, -1), drafts=((0, 1),))).accepted == pytest.approx(0.8, abs=1e-12)
    assert check(Case(p, (-1, -1), drafts=((0, 0),))).accepted == pytest.approx(0.5, abs=1e-12)


def test_block_verification_is_exact_and_never_accepts_less_than_the_token_wise_rule() -> None:
    gained = 0
    for seed in range(20):
        p, q = Table(3, seed), Table(3, seed + 100)
        block = check(Case(p, (-1, 0), q, rule="block")).accepted
        token_wise = check(Case(p, (-1, 0), q)).accepted
        assert block >= token_wise - 1e-12
        gained += block > token_wise + 1e-6
    assert gained > 5


def threshold(p: Weights) -> float:
    """Bisect on G_0 - G_1 for the point from which the code draws token 0 of a vocabulary of two."""
    low, high = -40.0, 40.0

    class Pushed(BoxCoins):
        def gumbel(self, rows: Tensor, depth: Tensor | int, vocab_size: int) -> Tensor:
            return torch.tensor([[(low + high) / 2, 0.0]], dtype=torch.float64)

    scores = TableScores(logs([p]).unsqueeze(0))
    for _ in range(80):
        middle = (low + high) / 2
        if int(verify(scores, Draft.empty(1), Pushed({}), "gumbel").next) == 0:
            high = middle
        else:
            low = middle
    return high


@pytest.mark.parametrize(("a", "b"), [*itertools.product(["1/10", "3/10", "1/2", "9/10"], repeat=2)])
def test_gumbel_coupling_keeps_the_law_and_its_acceptance_bound(a: str, b: str) -> None:
    """G_0 - G_1 is logistic, so the threshold is the law; target and drafter disagree between their thresholds."""
    p, q = Fraction(a), Fraction(b)
    edges = []
    for chance in (p, q):
        edge = threshold([chance, 1 - chance])
        assert 1 / (1 + math.exp(edge)) == pytest.approx(float(chance), abs=1e-12)
        edges.append(1 / (1 + math.exp(edge)))
    distance = float(abs(p - q))
    agree = 1 - abs(edges[0] - edges[1])
    assert agree >= (1 - distance) / (1 + distance) - 1e-12


def test_gumbel_coupling_on_real_coins() -> None:
    """P(both draw x) = 1 / sum_y max(p_y/p_x, q_y/q_x), and the emitted law is p."""
    rows = 3_000
    p, q = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64), torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    coins = Coins(torch.full((rows,), 11), torch.arange(rows), torch.zeros(rows, dtype=torch.long))
    drafted = (q.log() + coins.gumbel(torch.arange(rows), 0, 3)).argmax(1)
    law = q.log().expand(rows, 1, 3)
    scores = TableScores(p.log().expand(rows, 2, 3))
    verdict = verify(
        scores, Draft(drafted.unsqueeze(1), Tree.chain(1), torch.ones_like(drafted), DenseQ(law)), coins, "gumbel"
    )
    ratios = torch.maximum(p / p.unsqueeze(1), q / q.unsqueeze(1))
    expected = float((1 / ratios.sum(1)).sum())
    assert abs(verdict.n.double().mean() - expected) < 5 * math.sqrt(0.25 / rows)
    emitted = torch.where(verdict.n > 0, drafted, verdict.next)
    share = torch.bincount(emitted, minlength=3).double() / rows
    assert (share - p).abs().max() < 5 * math.sqrt(0.25 / rows)


class PrefixScores(TableScores):
    """Logits that depend on the path, so that a wrong path gives a wrong text."""

    def __init__(self, table: Table, prefix: tuple[int, ...], tokens: list[int], parents: list[int]) -> None:
        case = Case(table, tuple(parents))
        lines = [(*prefix, *case.prefix(tuple(tokens), node)) for node in range(-1, len(parents))]
        super().__init__(logs([table(line) for line in lines]).unsqueeze(0))


SHAPES = {
    "none": [],
    "chain of 1": [-1],
    "chain of 4": [-1, 0, 1, 2],
    "wide": [-1] * 5,
    "tree": [-1, -1, 0, 0, 1, 2, 2, 3],
}


@pytest.mark.parametrize(("shape", "rule"), some(SHAPES, ("rejection", "block", "gumbel")))
def test_the_text_is_a_function_of_the_seed_alone(rule: str, shape: str) -> None:
    """Whatever is drafted, and whether anything is: the same seed writes the same text."""
    table, parents = Table(5, 8), SHAPES[shape]
    for seed in range(6):
        texts = []
        for drafter in range(2 if parents else 1):
            text: list[int] = []
            while len(text) < 12:
                tokens = [(seed + 3 * drafter + len(text) + 2 * node) % 5 for node in range(len(parents))]
                draft = Draft.empty(1)
                if parents:
                    block = torch.tensor([tokens])
                    draft = Draft(block, Tree(torch.tensor([parents])), torch.tensor([len(parents)]))
                    if rule == "gumbel" and drafter:  # a law that came along is not looked at
                        draft = Draft(block, draft.tree, draft.n_valid, DenseQ(torch.zeros(1, len(parents), 5)))
                coins = Coins(torch.tensor([seed]), torch.tensor([0]), torch.tensor([len(text)]))
                scores = PrefixScores(table, tuple(text), tokens, parents)
                text += Round(draft, verify(scores, draft, coins, rule)).emitted[0]
            texts.append(text[:12])
        assert all(text == plain_text(table, seed, rule) for text in texts)


def plain_text(table: Table, seed: int, rule: str) -> list[int]:
    text: list[int] = []
    while len(text) < 12:
        coins = Coins(torch.tensor([seed]), torch.tensor([0]), torch.tensor([len(text)]))
        verdict = verify(PrefixScores(table, tuple(text), [], []), Draft.empty(1), coins, rule)
        text.append(int(verdict.next))
    return text


def test_only_the_path_is_read() -> None:
    """The cost follows accepted + 1: no row is scored before the walk reaches it."""
    logits = torch.full((2, 4, 3), -9.0)
    logits[0, :, 1] = logits[1, :, 2] = 9.0
    draft = Draft(torch.tensor([[1, 1, 1], [0, 1, 1]]), Tree.chain(3), torch.tensor([2, 3]))
    scores = TableScores(logits, greedy=True)
    assert verify(scores, draft, None).n.tolist() == [2, 0]
    assert sorted(scores.read) == [(0, 0), (0, 1), (0, 2), (1, 0)]


def test_an_empty_residual_falls_back_to_p() -> None:
    """p = q up to rounding can be rejected by the last coin; what is left is then rounding noise or nothing."""
    p = torch.tensor([[0.1, 0.2, 0.7]], dtype=torch.float64).log()
    law = SparseQ(torch.arange(3).view(1, 1, 3), p.exp().view(1, 1, 3) * (1 + 1e-9))
    for tokens in range(3):
        draft = Draft(torch.tensor([[tokens]]), Tree.chain(1), torch.tensor([1]), law)
        coins = BoxCoins(
            {use: torch.full((1, 2), 1 - 2.0**-53, dtype=torch.float64) for use in [(ACCEPT, 0), (SAMPLE, 0)]}
        )
        verdict = verify(TableScores(p.expand(1, 2, 3)), draft, coins)
        assert int(verdict.next) in range(3)
        assert not verdict.invalid.any()
