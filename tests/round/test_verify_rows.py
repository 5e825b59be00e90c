"""Rows of a batch do not see each other; odd rows (empty, peaked, broken) are served or named."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from coin_boxes import LAST_COIN, BoxCoins, TableScores, same, take
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_specgen import ops
from hf_specgen.errors import SpecGenError
from hf_specgen.round.coins import ACCEPT, SAMPLE, Coins
from hf_specgen.round.records import DenseQ, Draft, SparseQ, Tree, Verdict
from hf_specgen.round.verify import RULES, _descend_tensors, verify

VOCAB = 300  # three strips, the last one short
INF = math.inf
Laws = dict[str, DenseQ | SparseQ]


@dataclass(frozen=True)
class Batch:
    """A ragged batch of random rows, each with its own coins."""

    logits: Tensor
    draft: Draft
    coins: Coins
    greedy: bool

    def rows(self, index: Tensor) -> Batch:
        coins = Coins(self.coins.seeds[index], self.coins.row_ids[index], self.coins.positions[index])
        return Batch(self.logits[index], take(self.draft, index), coins, self.greedy)

    def cut(self, width: int) -> Batch:
        """Drop padding nodes."""
        q = self.draft.q
        if isinstance(q, SparseQ):
            q = SparseQ(q.ids[:, :width], q.probs[:, :width])
        elif isinstance(q, DenseQ):
            q = DenseQ(q.logits[:, :width])
        draft = replace(self.draft, tokens=self.draft.tokens[:, :width], tree=self.draft.tree.trim(width), q=q)
        return replace(self, logits=self.logits[:, : width + 1], draft=draft)

    def verdict(self, rule: str) -> Verdict:
        return verify(TableScores(self.logits, self.greedy), self.draft, self.coins, rule)


def make_batch(seed: int, kind: str, chain: bool, dtype: torch.dtype = torch.float32) -> Batch:
    """Rows of different length and shape; drafts are likely enough that walks go deep."""
    source = torch.Generator().manual_seed(seed)
    rows, width = 5, 6
    logits = torch.randn(rows, width + 1, VOCAB, generator=source) * 2
    logits[..., 7:11] += 7.0
    logits[..., 200:] = torch.where(torch.rand(rows, width + 1, 100, generator=source) < 0.5, -INF, logits[..., 200:])
    tokens = torch.randint(7, 11, (rows, width), generator=source)
    parents = torch.stack(
        [torch.randint(-1, i, (rows,), generator=source) if i else torch.full((rows,), -1) for i in range(width)], 1
    )
    tree = Tree.chain(width) if chain else Tree(parents)
    n_valid = torch.randint(0, width + 1, (rows,), generator=source)
    law = torch.randn(rows, width, VOCAB - 20, generator=source)
    law[..., 7:11] += 6.0
    law = law[:, :1].expand_as(law).contiguous()  # siblings share q
    q: DenseQ | SparseQ | None = None
    if kind == "dense":
        q = DenseQ(law)
    elif kind == "sparse":
        probs, ids = law.softmax(-1).topk(20)
        q = SparseQ(ids, probs / probs.sum(-1, keepdim=True))
    draft = Draft(tokens, tree, n_valid, q, without_replacement=seed % 2 == 0)
    coins = Coins(torch.randint(0, 2**62, (rows,), generator=source), torch.arange(rows), 40 + torch.arange(rows))
    return Batch(logits.to(dtype), draft, coins, greedy=kind == "greedy")


KINDS = [
    ("greedy", "rejection", True),
    ("greedy", "block", False),
    ("none", "rejection", True),
    ("none", "block", False),
    ("none", "gumbel", False),
    ("dense", "gumbel", True),
    ("dense", "rejection", True),
    ("dense", "rejection", False),
    ("sparse", "rejection", False),
    ("dense", "block", True),
    ("sparse", "block", True),
]


@pytest.mark.parametrize(("kind", "rule", "chain"), KINDS)
@settings(max_examples=10)
@given(seed=st.integers(0, 10_000))
def test_a_row_is_the_same_alone_in_another_order_and_without_padding(
    kind: str, rule: str, chain: bool, seed: int
) -> None:
    batch = make_batch(seed, kind, chain)
    together = batch.verdict(rule)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(seed))
    assert same(pick(together, order), batch.rows(order).verdict(rule))
    for row in range(5):
        alone = batch.rows(torch.tensor([row]))
        here = pick(together, torch.tensor([row]))
        assert same(here, alone.verdict(rule))
        assert same(here, alone.cut(int(batch.draft.n_valid[row])).verdict(rule))


@pytest.mark.parametrize(("kind", "rule", "chain"), KINDS)
def test_the_path_that_waits_for_no_device_decides_the_same(
    kind: str, rule: str, chain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off the CPU stopped rows are not dropped: they repeat their last step, on all rows to the deepest level."""
    batches = [make_batch(seed, kind, chain) for seed in range(8)]
    batches[0].logits[1, 0] = math.nan  # a broken row stays broken however the walk goes on
    lazily = [batch.verdict(rule) for batch in batches]
    assert lazily[0].invalid.tolist() == [False, True, False, False, False]
    walks: list[int] = []

    def without_lists(draft: Draft, decide) -> Verdict:
        walks.append(draft.width)
        return _descend_tensors(draft, decide)

    monkeypatch.setattr("hf_specgen.round.verify._select", lambda mask: torch.arange(len(mask)))
    monkeypatch.setattr("hf_specgen.round.verify._descend_listed", without_lists)
    assert all(same(verdict, batch.verdict(rule)) for verdict, batch in zip(lazily, batches, strict=True))
    assert len(walks) == (0 if rule == "block" and kind in ("sparse", "dense") else len(batches))


def pick(verdict: Verdict, rows: Tensor) -> Verdict:
    return Verdict(verdict.path[rows], verdict.n[rows], verdict.next[rows], verdict.invalid[rows])


@pytest.mark.parametrize(("kind", "rule", "chain"), KINDS)
def test_a_path_is_a_path_of_valid_nodes(kind: str, rule: str, chain: bool) -> None:
    deep = 0
    for seed in range(20):
        batch = make_batch(seed, kind, chain)
        verdict, parents = batch.verdict(rule), batch.draft.tree.parents.expand(5, -1)
        assert verdict.path.shape == (5, batch.draft.tree.max_depth)
        for row in range(5):
            path = [-1, *verdict.path[row, : int(verdict.n[row])].tolist()]
            assert all(node < int(batch.draft.n_valid[row]) for node in path[1:])
            assert [int(parents[row, node]) for node in path[1:]] == path[:-1]
            deep = max(deep, len(path) - 1)
    assert deep >= 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(("kind", "rule", "chain"), KINDS)
def test_every_float_type_is_taken(kind: str, rule: str, chain: bool, dtype: torch.dtype) -> None:
    batch = make_batch(3, kind, chain, dtype)
    verdict = batch.verdict(rule)
    assert not verdict.invalid.any()
    wide = replace(batch, logits=batch.logits.float()).verdict(rule)
    if dtype != torch.float64:
        assert same(verdict, wide)  # widening loses nothing


@pytest.mark.parametrize("kind", ["none", "dense", "sparse"])
def test_a_row_without_drafts_takes_the_coin_of_a_plain_step(kind: str) -> None:
    batch = make_batch(1, kind, True)
    batch = replace(batch, draft=replace(batch.draft, n_valid=torch.zeros(5, dtype=torch.long)))
    plain = verify(TableScores(batch.logits[:, :1]), Draft.empty(5), batch.coins)
    for rule in ("rejection", "block"):
        verdict = batch.verdict(rule)
        assert torch.equal(verdict.next, plain.next)
        assert not verdict.n.any()


def test_greedy_takes_the_first_best_and_ignores_q() -> None:
    logits = torch.zeros(1, 4, VOCAB)
    logits[0, 0, 131], logits[0, 0, 205] = 5.0, 5.0
    logits[0, 1, 3] = 1.0
    tokens = torch.tensor([[205, 131, 3]])
    draft = Draft(tokens, Tree(torch.tensor([[-1, -1, 1]])), torch.tensor([3]), DenseQ(torch.zeros(1, 3, VOCAB)))
    logits[0, 2] = logits[0, 1]
    verdict = verify(TableScores(logits, greedy=True), draft, None)
    assert verdict.path[0, : int(verdict.n)].tolist() == [1, 2]
    assert int(verdict.next) == 0  # a row of equal logits: the first token


BROKEN = {
    "nan": torch.tensor([0.0, math.nan, 1.0]),
    "plus infinity": torch.tensor([0.0, INF, 1.0]),
    "nothing finite": torch.full((3,), -INF),
    "all nan": torch.full((3,), math.nan),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize("kind", ["greedy", "none", "dense", "sparse"])
def test_a_broken_row_that_was_read_is_named(kind: str, rule: str, name: str) -> None:
    """Row 0 is broken at its root, row 1 behind its accepted child, row 2 where the walk never comes."""
    logits = torch.tensor([0.0, 9.0, 0.0]).repeat(4, 3, 1)
    logits[0, 0] = logits[1, 1] = logits[2, 2] = BROKEN[name]
    logits[2, 0] = torch.tensor([-INF, -INF, 0.0])
    laws: Laws = {"dense": DenseQ(torch.tensor([-INF, 0.0, -INF]).expand(4, 2, 3)), "sparse": one_hot(4, 2)}
    q = laws.get(kind)
    draft = Draft(torch.ones(4, 2, dtype=torch.long), Tree.chain(2), torch.tensor([2, 2, 2, 1]), q)
    coins = Coins(torch.arange(4), torch.arange(4), torch.zeros(4, dtype=torch.long))
    verdict = verify(TableScores(logits, greedy=kind == "greedy"), draft, coins, rule)
    if (kind, name) == ("greedy", "nothing finite"):  # plain greedy decoding writes the first id there and goes on
        assert not verdict.invalid.any() and verdict.next.tolist()[:2] == [0, 0]
        return
    assert verdict.invalid.tolist() == [True, True, False, False]
    assert all(0 <= token < 3 for token in verdict.next.tolist())
    assert verdict.path.min() >= 0
    assert verdict.path.max() < 2


def one_hot(rows: int, width: int) -> SparseQ:
    return SparseQ(torch.ones(rows, width, 1, dtype=torch.long), torch.ones(rows, width, 1))


@pytest.mark.parametrize("coin", [0.0, 0.5, LAST_COIN])
@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("kind", ["none", "dense", "sparse"])
def test_a_token_of_probability_zero_is_never_written(kind: str, rule: str, coin: float) -> None:
    """The drafted token is impossible or the only one possible; both end coins are tried."""
    logits = torch.full((2, 3, VOCAB), -INF)
    logits[0, :, 250] = 3.0
    logits[1, :, 130:132] = 3.0
    tokens = torch.tensor([[0, 0], [131, 0]])
    law = torch.zeros(2, 2, VOCAB)
    laws: Laws = {"dense": DenseQ(law), "sparse": SparseQ(tokens.unsqueeze(-1), torch.ones(2, 2, 1))}
    q = laws.get(kind)
    draft = Draft(tokens, Tree.chain(2), torch.full((2,), 2), q)
    coins = BoxCoins(
        {use: torch.full((2, 3), coin, dtype=torch.float64) for use in [(ACCEPT, 0), (ACCEPT, 1), (SAMPLE, 0)]}
    )
    verdict = verify(TableScores(logits), draft, coins, rule)
    assert (int(verdict.n[0]), int(verdict.next[0])) == (0, 250)
    assert int(verdict.n[1]) in (0, 1)
    assert int(verdict.next[1]) in (130, 131)


def test_a_broken_q_leaves_p() -> None:
    """A law of NaN or of no mass accepts nothing and takes nothing away."""
    logits = torch.randn(2, 3, VOCAB)
    coins = Coins(torch.arange(2), torch.arange(2), torch.zeros(2, dtype=torch.long))
    plain = verify(TableScores(logits[:, :1]), Draft.empty(2), coins)
    for q in (
        DenseQ(torch.full((2, 2, VOCAB), math.nan)),
        SparseQ(torch.zeros(2, 2, 4, dtype=torch.long), torch.zeros(2, 2, 4)),
    ):
        for rule in ("rejection", "block"):
            draft = Draft(torch.ones(2, 2, dtype=torch.long), Tree.chain(2), torch.full((2,), 2), q)
            verdict = verify(TableScores(logits), draft, coins, rule)
            assert torch.equal(verdict.next, plain.next)
            assert not (verdict.n.any() or verdict.invalid.any())


@pytest.mark.parametrize("token", [-1, VOCAB])
@pytest.mark.parametrize(("kind", "rule", "chain"), KINDS)
def test_tokens_outside_the_vocabulary_are_passed_over(kind: str, rule: str, chain: bool, token: int) -> None:
    batch = make_batch(4, kind, chain)
    draft = replace(batch.draft, tokens=torch.full_like(batch.draft.tokens, token), n_valid=torch.full((5,), 6))
    plain = verify(TableScores(batch.logits[:, :1], batch.greedy), Draft.empty(5), batch.coins, rule)
    verdict = replace(batch, draft=draft).verdict(rule)
    assert not verdict.n.any()
    assert torch.equal(verdict.next, plain.next)


def test_what_cannot_be_served_is_refused_with_the_way_out() -> None:
    batch = make_batch(0, "dense", chain=False)
    with pytest.raises(SpecGenError, match=r"rule='typical'.*'rejection'"):
        batch.verdict("typical")
    with pytest.raises(SpecGenError, match="rule='rejection'"):
        batch.verdict("block")
    with pytest.raises(SpecGenError, match="coins=None"):
        verify(TableScores(batch.logits), batch.draft, None)


@pytest.mark.parametrize(
    ("kind", "rule", "expected"),
    [
        ("greedy", "rejection", {"argmax"}),
        ("none", "block", {"draw", "uniform"}),
        ("none", "gumbel", {"gumbel_draw", "gumbel_noise"}),
        ("dense", "rejection", {"accept_or_draw", "uniform"}),
        ("sparse", "block", {"block_step", "residual_draw", "uniform"}),
    ],
)
def test_each_rule_takes_its_path(kind: str, rule: str, expected: set[str]) -> None:
    with ops.record() as calls:
        make_batch(2, kind, chain=True).verdict(rule)
    assert {operation for operation, _ in calls} == expected
    assert {backend for _, backend in calls} == {"reference"}
