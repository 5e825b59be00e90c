"""Counter-based random bits: one block of Philox4x32-10 per (seed, row, position, use, sibling, block)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Every use of randomness has its own stream: a coin that decides twice would bend the law.
ACCEPT = 1
SAMPLE = 2
DRAFT = 3
GUMBEL = 4

_ROUNDS = 10
_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_SIBLING_BITS = 24
_FEW = 16  # so many coins are tossed faster on Python's ints


def philox(counter: Tensor, key: Tensor) -> Tensor:
    """Encrypt counters with Philox4x32-10.

    Shapes: ``counter (4, ...)``, ``key (2, ...)`` that broadcast beside each other, int64 holding 32-bit words.
    Returns: ``(4, ...)`` int64 words.
    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3 (Random123).
    """
    return torch.stack(_encrypt(*counter, *key))


def words(seed: Tensor, row: Tensor, position: Tensor, stream: int | Tensor, block: int | Tensor) -> list[Tensor]:
    """Draw four 32-bit words for each counter ``(position, row, stream, block)`` under the 64-bit ``seed``.

    Shapes: ints, or one-dimensional tensors that broadcast to ``(K)``. Returns: four times ``(K)`` int64.
    """
    places = (position, row, stream, block, seed, seed >> 32)
    if seed.device.type != "cpu":
        return list(_encrypt(*(place & _WORD for place in places)))
    # a hundred small operations: on arrays they cost half of what they cost on tensors
    arrays: list[Any] = [
        place & _WORD if isinstance(place, int) else place.numpy().view("uint64") & _WORD for place in places
    ]
    if (seed == seed[0]).all():  # the usual case
        arrays[4:] = int(arrays[4][0]), int(arrays[5][0])
    return [torch.from_numpy(lane.view("int64")) for lane in _encrypt(*arrays, word=None)]


def _encrypt(
    x0: Any, x1: Any, x2: Any, x3: Any, k0: Any, k1: Any, *, word: int | None = _WORD
) -> tuple[Any, Any, Any, Any]:
    """Run the rounds on ints, arrays or tensors.

    A product may wrap modulo 2**64: both halves survive, but signed types need ``word`` to clear the upper one's sign.
    """
    for _ in range(_ROUNDS):
        low = x0 * _MULTIPLIERS[0]
        high = x2 * _MULTIPLIERS[1]
        upper, lower = (high >> 32, low >> 32) if word is None else (high >> 32 & word, low >> 32 & word)
        x0 = upper ^ x1 ^ k0
        x1 = high & _WORD
        x2 = lower ^ x3 ^ k1
        x3 = low & _WORD
        k0 = k0 + _WEYL[0] & _WORD
        k1 = k1 + _WEYL[1] & _WORD
    return x0, x1, x2, x3


def uniform(seed: Tensor, row: Tensor, position: Tensor, use: int, sibling: int | Tensor = 0) -> Tensor:
    """Draw one coin of 53 bits for each ``(seed, row, position)``.

    Shapes: ``seed (R)``, ``row (R)``, ``position (R)``, int64; ``sibling``: one int below 2**24 for all, or int64
    ``(R)``. Returns: float64 ``(R)``, ``k / 2**53``.
    """
    stream = sibling | use << _SIBLING_BITS
    if seed.device.type == "cpu" and len(seed) <= _FEW:
        streams = stream.tolist() if isinstance(stream, Tensor) else [stream] * len(seed)
        places = zip(seed.tolist(), row.tolist(), position.tolist(), streams, strict=True)
        return torch.tensor([_coin(*place) for place in places], dtype=torch.float64)
    high, low, _, _ = words(seed, row, position, stream, 0)
    return ((high >> 5 << 26) | (low >> 6)).double() * 2.0**-53


def _coin(seed: int, row: int, position: int, stream: int) -> float:
    """Draw one coin on Python's ints: the fastest way to a few."""
    high, low, _, _ = _encrypt(position & _WORD, row & _WORD, stream, 0, seed & _WORD, seed >> 32 & _WORD)
    return float((high >> 5 << 26) | (low >> 6)) * 2.0**-53


def gumbel_noise(seed: Tensor, row: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """Draw the Gumbel vector that each ``(seed, row, position)`` owns.

    Token ``v`` takes word ``v % 4`` of block ``v // 4``, so a longer vocabulary only appends.
    Shapes: ``seed (R)``, ``row (R)``, ``position (R)``, int64. Returns: float64 ``(R, vocab_size)``, finite.
    """
    block = torch.arange(-(-vocab_size // 4), device=seed.device)
    noise = torch.empty(len(seed), vocab_size, dtype=torch.float64, device=seed.device)
    sources = zip(noise, seed.split(1), row.split(1), position.split(1), strict=True)
    for out, one_seed, one_row, one_position in sources:  # row by row: the working set stays in cache
        for lane, bits in enumerate(words(one_seed, one_row, one_position, GUMBEL << _SIBLING_BITS, block)):
            part = out[lane::4]
            part.copy_(bits[: len(part)])
        # the half keeps both logarithms finite
        out.add_(0.5).mul_(2.0**-32).log_().neg_().log_().neg_()
    return noise
