"""Counter-based random bits: one block of Philox4x32-10 per (seed, row, position, use, sibling, block)."""

from __future__ import annotations

import torch
from torch import Tensor

# Every use of randomness has its own stream: a coin that decides twice would bend the law.
ACCEPT, SAMPLE, DRAFT, GUMBEL = 1, 2, 3, 4

_ROUNDS = 10
_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_SIBLING_BITS = 24


def philox(counter: Tensor, key: Tensor) -> Tensor:
    """Encrypt counters with Philox4x32-10.

    Shapes: ``counter (4, ...)``, ``key (2, ...)`` that broadcast beside each other, int64 holding 32-bit words.
    Returns: ``(4, ...)`` int64 words.
    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3 (Random123).
    """
    pair = (2,) + (1,) * (counter.dim() - 1)
    constants = torch.tensor((*_MULTIPLIERS, *_WEYL, _WORD, 32), device=counter.device)
    multipliers, weyl, word, half = constants[:2].view(pair), constants[2:4].view(pair), constants[4], constants[5]
    even, odd = counter[0::2], counter[1::2]
    for _ in range(_ROUNDS):
        # The product wraps modulo 2**64, so both 32-bit halves survive the sign. Each half feeds the other lane.
        product = (even * multipliers).flip(0)
        even = (product >> half).bitwise_xor_(odd).bitwise_xor_(key).bitwise_and_(word)
        odd = product.bitwise_and_(word)
        key = (key + weyl).bitwise_and_(word)
    return torch.stack((even[0], odd[0], even[1], odd[1]))


def words(seed: Tensor, row: Tensor, position: Tensor, stream: int, block: Tensor) -> Tensor:
    """Draw four 32-bit words for each counter ``(position, row, stream, block)`` under the 64-bit ``seed``.

    Shapes: one-dimensional tensors that broadcast to ``(K)``. Returns: ``(4, K)`` int64.
    """
    row, position, block = torch.broadcast_tensors(row, position, block)
    counter = torch.stack((position, row, torch.full_like(row, stream), block)) & _WORD
    key = torch.stack((seed, seed >> 32)) & _WORD
    return philox(counter, key)


def uniform(seed: Tensor, row: Tensor, position: Tensor, use: int, sibling: int = 0) -> Tensor:
    """Draw one coin of 53 bits for each ``(seed, row, position)``.

    Shapes: ``seed (R)``, ``row (R)``, ``position (R)``, int64. Returns: float64 ``(R)``, ``k / 2**53``.
    """
    stream = use << _SIBLING_BITS | sibling
    high, low, _, _ = words(seed, row, position, stream, torch.zeros_like(row))
    return ((high >> 5 << 26) | (low >> 6)).double() * 2.0**-53


def gumbel_noise(seed: Tensor, row: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """Draw the Gumbel vector that each ``(seed, row, position)`` owns.

    Token ``v`` takes word ``v % 4`` of block ``v // 4``, so a longer vocabulary only appends.
    Shapes: ``seed (R)``, ``row (R)``, ``position (R)``, int64. Returns: float64 ``(R, vocab_size)``, finite.
    """
    block = torch.arange(-(-vocab_size // 4), device=seed.device)
    noise = torch.empty(len(seed), vocab_size, dtype=torch.float64, device=seed.device)
    sources = zip(noise, seed.split(1), row.split(1), position.split(1), strict=True)
    for out, one_seed, one_row, one_position in sources:  # row by row: the working set stays in cache
        bits = words(one_seed, one_row, one_position, GUMBEL << _SIBLING_BITS, block).t().reshape(-1)[:vocab_size]
        inside = (bits.double() + 0.5) * 2.0**-32  # the half keeps both logarithms finite
        torch.neg(inside.log_().neg_().log_(), out=out)
    return noise
