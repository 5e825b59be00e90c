"""No outcome of positive measure hangs on the last bit of this machine's exp and log.

Processors differ in the last bit of both: an AVX-512 host drew a token of residual 3e-17 at a coin of 0, an AVX2 host
did not. Here every log and every softmax is moved by up to an ulp at random, which is more than any host does.
"""

from __future__ import annotations

import coin_boxes
import pytest
import torch
from coin_boxes import Case, Table, solve
from torch import Tensor

from hf_specgen.kernels import reference

ULP = 2.0**-52
VISIBLE = 1e-3
TIED = [  # tables in which a weight of p equals one of q, or what is left of p is exactly nothing
    Case(Table(3, seed), parents, Table(3, seed + 50), rule=rule, sparse=sparse)
    for seed in (37, 39, 55)
    for parents, rule in (((-1,), "rejection"), ((-1, -1), "rejection"), ((-1,), "block"), ((-1, 0), "block"))
    for sparse in (True, False)
]


def worst_error(seed: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """Move last bits; return how far the law or the accepted length of any tied case is from what fractions say."""
    source = torch.Generator().manual_seed(seed)
    softmax, logs = reference._softmax, coin_boxes.logs

    def moved(exact: Tensor) -> Tensor:
        return exact * (1 + torch.randint(-1, 2, exact.shape, generator=source).double() * ULP)

    monkeypatch.setattr(reference, "_softmax", lambda logits: moved(softmax(logits)))
    monkeypatch.setattr(coin_boxes, "logs", lambda rows: moved(logs(rows)))
    # the ends of a box move with the bits: the code is asked a little further inside
    monkeypatch.setattr(coin_boxes, "MARGIN", 1e-13)
    results = [solve(case) for case in TIED]
    return max(max(result.error, abs(result.accepted - result.accepted_in_theory)) for result in results)


@pytest.mark.parametrize("seed", range(3))
def test_the_law_does_not_hang_on_the_last_bit(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert worst_error(seed, monkeypatch) < 1e-11


def test_noise_taken_for_mass_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_NOISE_ULPS", 0)
    assert worst_error(1, monkeypatch) > VISIBLE


def emitted_law(p: Tensor, q: Tensor) -> Tensor:
    """Measure what one drafted token emits, exact to the grid of coins: every threshold is found by bisection."""
    vocab = len(p)
    token = torch.arange(vocab)
    logits, law = p.log().expand(vocab, -1), q.expand(vocab, -1)
    ids, present = token.expand(vocab, -1), torch.ones(vocab, 1, dtype=torch.bool)

    def judge(accept: Tensor, sample: Tensor) -> tuple[Tensor, Tensor]:
        coins = torch.stack((accept, sample), 1)
        accepted, _, drawn, _ = reference.accept_or_draw(logits, ids, law, token[:, None], present, coins, False)
        return accepted, drawn

    top = torch.full((vocab,), 1 - 2.0**-53, dtype=torch.float64)
    accepted_share = first_coin(lambda coin: ~judge(coin, coin)[0])
    result = torch.diag(q * accepted_share)
    below = torch.zeros(vocab, dtype=torch.float64)
    for v in range(vocab):
        above = first_coin(lambda coin, v=v: judge(top, coin)[1] > v)
        result[:, v] += q * (1 - accepted_share) * (above - below)
        below = above
    return result.sum(0)


def first_coin(reached: object) -> Tensor:
    """Return each row's first coin on the grid of 2**-53 at which ``reached`` holds, 1 where it never does."""
    low = torch.zeros(4, dtype=torch.long)
    high = torch.full((4,), 2**53)
    while (low < high).any():
        middle = (low + high) // 2
        hit = reached(middle.double() * 2.0**-53)  # type: ignore[operator]
        low, high = torch.where(hit, low, middle + 1), torch.where(hit, middle, high)
        low = torch.minimum(low, high)
    return low.double() * 2.0**-53


@pytest.mark.parametrize("ulps", [0, 1, 4, 7, 12, 1000])
def test_what_is_left_out_as_noise_moves_the_law_by_less_than_sixteen_ulps(ulps: int) -> None:
    """Let p and q differ by some ulps at every token, the worst there is: 8 and less are left out."""
    p = torch.tensor([1, 2, 5, 8], dtype=torch.float64) / 16
    q = p * (1 + torch.tensor([-1, -1, 1, -1]) * ulps * ULP)
    moved = (emitted_law(p, q / q.sum()) - p).abs().sum() / 2
    assert moved < (reference._NOISE_ULPS * 2 + 4) * ULP  # four: the arithmetic of the law itself


def test_leaving_out_more_than_noise_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_NOISE_ULPS", 2**30)
    p = torch.tensor([1, 2, 5, 8], dtype=torch.float64) / 16
    q = torch.tensor([1.0, 2.0, 5.0000005, 7.9999995], dtype=torch.float64) / 16
    assert (emitted_law(p, q) - p).abs().sum() / 2 > 20 * ULP
