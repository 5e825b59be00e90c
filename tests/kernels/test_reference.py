"""The kernels' definitions: ties, ends of coins, odd vocabularies, and the measured law of the draw."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_specgen import ops

INF = math.inf
LAST_COIN = 1.0 - 2.0**-53
SIZES = [1, 2, 127, 128, 129, 300, 1024]
FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def coin(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("vocab", SIZES)
def test_argmax_takes_the_first_of_ties(vocab: int, dtype: torch.dtype) -> None:
    logits = torch.randint(0, 4, (50, vocab)).to(dtype)
    token, invalid = ops.argmax(logits)
    first = [row.index(max(row)) for row in logits.tolist()]
    assert token.tolist() == first
    assert not invalid.any()


@pytest.mark.parametrize("vocab", SIZES)
def test_argmax_never_picks_a_masked_token(vocab: int) -> None:
    logits = torch.full((vocab, vocab), -INF).fill_diagonal_(-3.0)
    assert torch.equal(ops.argmax(logits)[0], torch.arange(vocab))


@pytest.mark.parametrize("value", [math.nan, INF])
@pytest.mark.parametrize("vocab", SIZES)
def test_broken_rows_are_named_by_every_draw(vocab: int, value: float) -> None:
    logits = torch.zeros(vocab + 2, vocab)
    logits[:vocab].fill_diagonal_(value)
    logits[vocab] = -INF
    expected = [True] * (vocab + 1) + [False]
    coins = torch.full((vocab + 2,), 0.7, dtype=torch.float64)
    ids, law = torch.zeros(vocab + 2, 1, dtype=torch.long), torch.ones(vocab + 2, 1)
    zeros = torch.zeros_like(coins)
    outcomes = [
        ops.argmax(logits),
        ops.draw(logits, coins),
        ops.gumbel_draw(logits, torch.zeros(vocab + 2, vocab, dtype=torch.float64)),
        ops.residual_draw(logits, ids, law, zeros + 1, zeros, coins),
    ]
    for token, invalid in outcomes:
        assert invalid.tolist() == expected
        assert 0 <= int(token.min())
        assert int(token.max()) < vocab


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("vocab", SIZES)
def test_the_ends_of_the_coin_give_the_first_and_the_last_possible_token(vocab: int, dtype: torch.dtype) -> None:
    logits = torch.full((3, vocab), -INF, dtype=dtype)
    low, high = vocab // 3, max(vocab // 3, vocab - 2)
    logits[:, low : high + 1] = 0.25
    assert ops.draw(logits, coin(0.0, LAST_COIN, 2.0**-53))[0].tolist() == [low, high, low]


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), vocab=st.sampled_from(SIZES), spread=st.sampled_from([0.1, 3.0, 40.0, 2000.0]))
def test_a_draw_has_positive_probability_and_lies_at_its_coin(seed: int, vocab: int, spread: float) -> None:
    source = torch.Generator().manual_seed(seed)
    logits = torch.randn(20, vocab, generator=source, dtype=torch.float64) * spread
    logits[torch.rand(20, vocab, generator=source) < 0.5] = -INF
    logits[:, seed % vocab] = 0.0
    coins = torch.rand(20, generator=source, dtype=torch.float64)
    coins[:4] = coin(0.0, LAST_COIN, 2.0**-53, 0.5)
    token, invalid = ops.draw(logits, coins)
    p = logits.softmax(-1)
    above = p.cumsum(-1).gather(1, token.unsqueeze(1)).squeeze(1)
    chance = p.gather(1, token.unsqueeze(1)).squeeze(1)
    assert not invalid.any()
    assert (chance > 0).all()
    assert (above >= coins - 1e-13).all()
    assert (above - chance <= coins + 1e-13).all()


def law_of_draw(logits: Tensor) -> Tensor:
    """Bisect, for every token, the coin from which the code draws it or a later one: no reference is involved."""
    vocab = len(logits)
    low, high = torch.zeros(vocab, dtype=torch.float64), torch.ones(vocab, dtype=torch.float64)
    rows, wanted = logits.expand(vocab, -1), torch.arange(vocab)
    for _ in range(50):
        middle = (low + high) / 2
        reached = ops.draw(rows, middle)[0] >= wanted
        low, high = torch.where(reached, low, middle), torch.where(reached, middle, high)
    edges = torch.cat((high, torch.ones(1, dtype=torch.float64)))
    edges[0] = 0.0
    return edges.diff()


@pytest.mark.parametrize(("dtype", "distance"), [(torch.float64, 1e-12), (torch.float32, 2e-7)])
def test_the_law_of_the_draw_measured_from_outside(dtype: torch.dtype, distance: float) -> None:
    logits = torch.randn(515, dtype=dtype) * 3
    logits[100:160] = -INF
    p = logits.double().softmax(-1)
    law = law_of_draw(logits)
    assert (law - p).abs().sum() / 2 < distance
    assert not law[p == 0].any()


def test_a_large_flat_vocabulary_keeps_its_law() -> None:
    """A flat float32 running sum over so many entries is wrong by 1e-3; each strip must be where it belongs."""
    vocab = 151_936
    logits = torch.randn(1, vocab) * 0.1
    edges = logits.double().softmax(-1).cumsum(-1)[0]
    wanted = torch.arange(5, vocab, 7919)
    for row in wanted.tolist():
        middle = (edges[row - 1] + edges[row]) / 2
        assert int(ops.draw(logits, middle.view(1))[0]) == row


def test_rows_of_a_batch_draw_as_they_draw_alone() -> None:
    logits, coins = torch.randn(6, 1000) * 2, torch.rand(6, dtype=torch.float64)
    for op in (lambda x, u: ops.draw(x, u), lambda x, _: ops.argmax(x)):
        together = op(logits, coins)[0]
        alone = torch.cat([op(logits[i : i + 1], coins[i : i + 1])[0] for i in range(6)])
        assert torch.equal(together, alone)


def test_the_gumbel_draw_adds_the_noise_and_takes_the_first_best() -> None:
    logits = torch.tensor([[0.0, 1.0, -INF], [0.0, 0.0, 0.0]])
    noise = torch.tensor([[1.5, 0.0, 99.0], [2.0, 3.0, 3.0]], dtype=torch.float64)
    assert ops.gumbel_draw(logits, noise)[0].tolist() == [0, 1]


def two_ways(q: Tensor) -> list[tuple[Tensor | None, Tensor]]:
    """The same law as a list (with an unused place) and as logits."""
    ids = torch.arange(q.shape[-1]).expand(q.shape)
    listed = (torch.cat((ids, ids[:, :1]), 1), torch.cat((q, torch.zeros_like(q[:, :1])), 1))
    return [listed, (None, q.log())]


def test_the_residual_of_a_narrow_draft_vocabulary_keeps_the_other_tokens() -> None:
    p = torch.tensor([[0.1, 0.2, 0.3, 0.4]], dtype=torch.float64)
    for ids, q in two_ways(torch.tensor([[0.5, 0.5]], dtype=torch.float64)):
        law = [0.0, 0.0, 3 / 7, 4 / 7]
        edge = law[2]
        draws = [
            ops.residual_draw(p.log(), ids, q, coin(1.0), coin(1.0), coin(u))[0]
            for u in (0.0, edge - 1e-9, edge + 1e-9)
        ]
        assert [int(token) for token in draws] == [2, 2, 3]


def test_siblings_reduce_p_by_scale_times_q() -> None:
    """Two rejections without replacement: scale = 1 + m / (1 - q(first)), worked by hand."""
    p = torch.tensor([[0.1, 0.2, 0.7]], dtype=torch.float64)
    for ids, q in two_ways(torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64)):
        accepted, _, scale, _ = ops.accept_siblings(
            p.log(),
            ids,
            q,
            torch.tensor([[0, 1]]),
            torch.ones(1, 2, dtype=torch.bool),
            torch.full((1, 2), 0.999).double(),
            True,
        )
        assert not accepted.any()
        assert scale.item() == pytest.approx(1 + 0.45 / 0.5, abs=1e-12)  # what was left after the first: (0, 0, .45)


def test_absent_repeated_and_impossible_children_cost_nothing() -> None:
    p, q = torch.tensor([[0.2, 0.3, 0.5]], dtype=torch.float64), torch.tensor([[0.6, 0.4, 0.0]], dtype=torch.float64)
    tokens = torch.tensor([[0, 0, 2, 1]])
    present = torch.tensor([[True, True, True, False]])
    for ids, law in two_ways(q):
        only = ops.accept_siblings(p.log(), ids, law, tokens[:, :1], present[:, :1], coin(0.99).view(1, 1), True)
        more = ops.accept_siblings(p.log(), ids, law, tokens, present, coin(0.99, 0.0, 0.0, 0.0).view(1, 4), True)
        assert not more[0].any()
        assert torch.equal(only[2], more[2])


def test_a_block_step_follows_its_definition() -> None:
    p, q = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64), torch.tensor([[0.2, 0.6, 0.2]], dtype=torch.float64)
    for ids, law in two_ways(q):
        for token, after in ((0, 1.0), (1, 0.4 * 0.3 / 0.6), (2, 0.4)):
            surplus, reach, invalid = ops.block_step(p.log(), ids, law, torch.tensor([token]), coin(0.4))
            assert surplus.item() == pytest.approx(max(0, 0.4 * 0.5 - 0.2), abs=1e-12)
            assert reach.item() == pytest.approx(after, abs=1e-12)
            assert not invalid.any()


@pytest.mark.parametrize("different", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_accepting_and_drawing_at_once_does_both(dtype: torch.dtype, different: bool) -> None:
    """One call decides as the two definitions decide, for lists and logits, also where all rows stop or none."""
    source = torch.Generator().manual_seed(1)
    rows, vocab, siblings = 12, 300, 3
    logits = (torch.randn(rows, vocab, generator=source) * 2).to(dtype)
    q = (logits.double() + torch.randn(rows, vocab, generator=source) * 2).softmax(-1)
    q[:2] = logits[:2].double().softmax(-1)  # nothing is left of p there, but for rounding
    tokens = q.multinomial(siblings, generator=source)
    present = torch.rand(rows, siblings, generator=source) < 0.8
    coins = torch.rand(rows, siblings + 1, generator=source, dtype=torch.float64)
    coins[2:5], coins[5:8, :3] = 0.0, LAST_COIN
    for ids, law in two_ways(q):
        for part in (slice(0, 12), slice(2, 5), slice(5, 8)):
            laws = (logits[part], None if ids is None else ids[part], law[part])
            accepted, choice, token, invalid = ops.accept_or_draw(
                *laws, tokens[part], present[part], coins[part], different
            )
            known = ops.accept_siblings(*laws, tokens[part], present[part], coins[part, :3], different)
            drawn, _ = ops.residual_draw(*laws, torch.ones_like(known[2]), known[2], coins[part, 3])
            assert torch.equal(accepted, known[0]) and torch.equal(invalid, known[3])
            assert torch.equal(choice[accepted], known[1][accepted])
            assert torch.equal(token[~accepted], drawn[~accepted])


def test_a_vanishing_reach_leaves_numbers() -> None:
    """Block verification may ask for the residual of h = 0 or nearly 0 times p: empty, and never NaN."""
    p = torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]]).log()
    for ids, law in two_ways(torch.tensor([[1.0, 0.0]] * 3)):
        surplus, after, _ = ops.block_step(p, ids, law, torch.tensor([0, 1, 1]), coin(0.0, 0.0, 1e-42))
        assert surplus[:2].tolist() == [0.0, 0.0]
        assert surplus[2].item() == pytest.approx(0.5e-42, rel=1e-3)
        assert after.tolist() == [0.0, 0.0, 0.0]
        token, invalid = ops.residual_draw(p, ids, law, coin(0.0, 0.0, 1e-42), coin(1.0, 0.0, 1.0), coin(0.0, 0.9, 0.0))
        assert token.tolist() == [0, 1, 1] and not invalid.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [0, 1, 33, 70])
def test_the_first_best_token_in_every_dtype(dtype: torch.dtype, rows: int) -> None:
    """Sixteen-bit rows are cast in slices; ties and broken rows come out as they do elsewhere."""
    source = torch.Generator().manual_seed(rows)
    logits = (torch.randn(rows, 300, generator=source) * 2).round().to(dtype)
    if rows > 2:
        logits[1], logits[2, 7] = float("-inf"), float("nan")
    token, invalid = ops.argmax(logits)
    assert token.shape == invalid.shape == (rows,)
    for row in range(rows):
        broken = rows > 2 and row in (1, 2)
        assert bool(invalid[row]) == broken
        if not broken:
            best = max(logits[row].tolist())
            assert int(token[row]) == logits[row].tolist().index(best)
