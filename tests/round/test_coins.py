"""Coins are Philox4x32-10 of (seed, row, position, use, sibling) and of nothing else."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from hf_specgen.kernels import common
from hf_specgen.round.coins import ACCEPT, DRAFT, SAMPLE, Coins


def words(text: str) -> Tensor:
    return torch.tensor([int(word, 16) for word in text.split()])


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff " * 4, "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_known_answers(counter: str, key: str, expected: str) -> None:
    assert torch.equal(common.philox(words(counter), words(key)), words(expected))


def test_philox_works_on_many_counters_at_once() -> None:
    counter, key = torch.randint(0, 2**32, (4, 3, 5)), torch.randint(0, 2**32, (2, 3, 5))
    together = common.philox(counter, key)
    for i, j in itertools.product(range(3), range(5)):
        assert torch.equal(common.philox(counter[:, i, j], key[:, i, j]), together[:, i, j])


def one(seed: int, row: int, position: int, use: int, sibling: int = 0) -> float:
    coins = Coins(torch.tensor([seed]), torch.tensor([row]), torch.tensor([position]))
    return float(coins.uniform(torch.tensor([0]), 0, use, sibling))


def test_every_input_changes_the_coin() -> None:
    """Both halves of the seed, rows and positions up to 2**32, the use and the sibling are inputs of their own."""
    seeds = [0, 1, -1, 1 << 31, 1 << 32, (1 << 32) + 1, 1 << 62, -(1 << 63)]
    big = [0, 1, 2, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]
    places = [(seed, 3, 5, ACCEPT, 0) for seed in seeds]
    places += [(7, row, position, ACCEPT, 0) for row, position in itertools.product(big, big)]
    places += [
        (7, 100, 100, use, sibling) for use in (ACCEPT, SAMPLE, DRAFT) for sibling in (0, 1, 2, 255, (1 << 24) - 1)
    ]
    coins = [one(*place) for place in places]
    assert len(set(coins)) == len(coins)


def test_a_coin_is_a_multiple_of_two_to_the_minus_53_below_one() -> None:
    rows = torch.arange(4096)
    coins = Coins(torch.full_like(rows, 9), rows, rows).uniform(rows, 0, SAMPLE)
    assert coins.dtype == torch.float64
    assert coins.min() >= 0
    assert coins.max() < 1
    assert torch.equal((coins * 2**53).long().double(), coins * 2**53)
    assert ((coins * 2**53).long() % 2).double().mean().sub(0.5).abs() < 0.05  # the last bit is used
    assert coins.mean().sub(0.5).abs() < 5 / math.sqrt(12 * len(rows))


def test_few_coins_many_coins_and_their_definition_agree() -> None:
    """Counters are encrypted as ints, arrays or tensors; negative seeds and each sibling are among them."""
    seeds, rows = torch.randint(-(2**62), 2**62, (40,)), torch.arange(40)
    positions, siblings = torch.randint(0, 2**20, (40,)), torch.randint(0, 1 << 24, (40,))
    many = common.uniform(seeds, rows, positions, ACCEPT, siblings)
    few = [
        common.uniform(*(part[i : i + 5] for part in (seeds, rows, positions)), ACCEPT, siblings[i : i + 5])
        for i in range(0, 40, 5)
    ]
    assert torch.equal(torch.cat(few), many)
    counter = torch.stack((positions, rows, siblings | ACCEPT << 24, torch.zeros_like(rows)))
    high, low, *_ = common.philox(counter, torch.stack((seeds, seeds >> 32)) & 0xFFFFFFFF)
    assert torch.equal(many, ((high >> 5 << 26) | (low >> 6)).double() / 2**53)
    alone = [
        float(common.uniform(*(part[i : i + 1] for part in (seeds, rows, positions)), ACCEPT, int(siblings[i])))
        for i in range(40)
    ]
    assert alone == many.tolist()


def test_extreme_bits_stay_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    place = torch.zeros(2, dtype=torch.long)
    for word, coin in ((0, 0.0), (0xFFFFFFFF, 1 - 2.0**-53)):
        monkeypatch.setattr(common, "_encrypt", lambda *places, value=word, **_: (places[3] * 0 + value,) * 4)
        assert common.uniform(place, place, place, SAMPLE).tolist() == [coin, coin]
        assert common.gumbel_noise(place, place, place, 5).isfinite().all()


def test_a_coin_does_not_see_the_batch() -> None:
    seeds, row_ids, positions = torch.randint(0, 2**62, (6,)), torch.arange(6), torch.randint(0, 99, (6,))
    coins, rows, depth = Coins(seeds, row_ids, positions), torch.arange(6), torch.tensor([0, 1, 2, 3, 4, 5])
    together, noise = coins.uniform(rows, depth, ACCEPT, 1), coins.gumbel(rows, depth, 7)
    for row in range(6):
        alone = Coins(seeds[row : row + 1], row_ids[row : row + 1], positions[row : row + 1])
        assert torch.equal(alone.uniform(torch.tensor([0]), row, ACCEPT, 1), together[row : row + 1])
        assert torch.equal(alone.gumbel(torch.tensor([0]), row, 7), noise[row : row + 1])


def test_depth_counts_from_the_position() -> None:
    """The coin of a token is the same however the rounds before it were cut."""
    early = Coins(torch.tensor([5]), torch.tensor([2]), torch.tensor([10]))
    late = Coins(torch.tensor([5]), torch.tensor([2]), torch.tensor([13]))
    row = torch.tensor([0])
    assert torch.equal(early.uniform(row, 3, SAMPLE), late.uniform(row, 0, SAMPLE))
    assert torch.equal(early.gumbel(row, 3, 9), late.gumbel(row, torch.tensor([0]), 9))


def test_a_longer_vocabulary_only_appends_to_the_gumbel_vector() -> None:
    coins = Coins(torch.tensor([5, 6]), torch.tensor([0, 1]), torch.tensor([8, 9]))
    longest = coins.gumbel(torch.tensor([0, 1]), 0, 131)
    for vocab_size in (1, 2, 3, 4, 5, 64, 130):
        assert torch.equal(coins.gumbel(torch.tensor([0, 1]), 0, vocab_size), longest[:, :vocab_size])


def test_gumbel_vectors_are_gumbel() -> None:
    """exp(-exp(-G)) is uniform: compare its empirical distribution with the diagonal (Kolmogorov-Smirnov)."""
    count = 40_000
    noise = Coins(torch.tensor([1]), torch.tensor([0]), torch.tensor([0])).gumbel(torch.tensor([0]), 0, count)
    uniform = torch.exp(-torch.exp(-noise[0])).sort().values
    distance = (uniform - (torch.arange(count) + 0.5) / count).abs().max()
    assert distance < 1.95 / math.sqrt(count)


def test_streams_do_not_move_together() -> None:
    rows = torch.arange(4000)
    coins = Coins(torch.full_like(rows, 3), rows, torch.zeros_like(rows))
    streams = [coins.uniform(rows, 0, use, sibling) for use in (ACCEPT, SAMPLE, DRAFT) for sibling in (0, 1)]
    streams.append(torch.exp(-torch.exp(-coins.gumbel(rows[:4000], 0, 1)))[:, 0])
    correlation = torch.corrcoef(torch.stack(streams)) - torch.eye(len(streams))
    assert correlation.abs().max() < 5 / math.sqrt(len(rows))
