"""The definition of the row kernels, in plain torch: clear rather than fast, decided in float64.

A row is one position's logits of any float dtype; ``temperature (R)`` and the truncation settings are per row, so
greedy and sampled rows mix. Temperature 0 means greedy.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .common import gumbel_noise
from .reference import argmax, gumbel_draw

__all__ = ["gumbel_pick", "row_draw", "row_stats"]

CHUNK = 8192
STRIP = 128
_FLOOR = -100.0  # a weight below 2**-100 of the largest is zero, as in the kernels


def row_stats(logits: Tensor, temperature: Tensor, strips: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Read every row once: what each chunk of 8192 and each strip of 128 logits holds.

    Shapes: ``logits (R, V)``, ``temperature (R)`` float32; NC and NS are V / 8192 and V / 128 rounded up.
    Returns: ``maxima (R, NC)``; ``sums (R, NC)`` of exp((x - maximum) / T), 1 in greedy rows, NaN where the chunk
    holds a NaN or +inf (the other three then say nothing); ``best (R, NC)`` int32, the first place of the maximum in
    greedy rows, -1 in sampled ones; ``strip_maxima (R, NS)``, or ``(R, 0)`` without ``strips``.
    """
    x = logits.double()
    chunks = _cut(x, CHUNK)
    greedy = (temperature <= 0).unsqueeze(1)
    maxima, place = chunks.max(-1)
    anchor = torch.where(maxima == -math.inf, 0.0, maxima).unsqueeze(-1)
    sums = torch.exp2((chunks - anchor) * _scale(temperature).view(-1, 1, 1)).sum(-1)
    broken = (chunks.isnan() | (chunks == math.inf)).any(-1)
    sums = torch.where(greedy, 1.0, sums).masked_fill(broken, math.nan)
    best = place + CHUNK * torch.arange(chunks.shape[1], device=x.device)
    best = torch.where(greedy, best, -1).int()
    parts = _cut(x, STRIP).amax(-1) if strips else x[:, :0]
    return maxima.float(), sums.float(), best, parts.float()


def row_draw(  # noqa: PLR0913 - every setting is a tensor of its own, so that rows of one batch may differ
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    coin: Tensor,
    maxima: Tensor,
    sums: Tensor,
    best: Tensor,
    strip_maxima: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token from every row, and say what law it was drawn from.

    The order is temperature, top-k (ties of the k-th stay), top-p (of ties at the edge the highest ids stay, as a
    stable sort leaves them; one token always stays), min-p. Where ``strip_maxima`` is empty nothing is truncated and
    the settings are not read. Only tokens of positive probability are drawn; one below 2**-100 of the best counts as
    impossible.

    Shapes: ``logits (R, V)``, ``temperature (R)``, ``top_k (R)`` int32 (0: off), ``top_p (R)`` (1: off), ``min_p (R)``
    (0: off), ``coin (R)`` float64 in [0, 1), and what ``row_stats`` returned.
    Returns: ``token (R)`` int64; ``law (R, 4)`` float64: maximum, total, threshold, tie: p(v) = exp((x_v - maximum) /
    T) / total where x_v > threshold, or x_v = threshold and v >= tie, and 0 elsewhere (in greedy rows use ``token``);
    ``invalid (R)`` bool: the row holds a NaN or +inf or nothing finite; its token is 0 and its law (0, 1, -inf, 0).
    Source: the order and edges of transformers' logits warpers.
    """
    x = logits.double()
    top = x.amax(-1, keepdim=True)
    invalid = ~top.isfinite()
    x = x.masked_fill(invalid, 0.0)
    top = top.masked_fill(invalid, 0.0)
    weight = _weight(x, top, temperature)
    kept = torch.ones_like(x, dtype=torch.bool)
    if strip_maxima.shape[1]:
        kept = _kept(x, weight, top_k.unsqueeze(1), top_p.double().unsqueeze(1), min_p.double().unsqueeze(1))
    threshold = torch.where(kept, x, math.inf).amin(-1, keepdim=True)
    tie = (kept & (x == threshold)).long().argmax(-1, keepdim=True)
    whole = kept.all(-1, keepdim=True)
    threshold = threshold.masked_fill(whole, -math.inf)
    tie = tie.masked_fill(whole, 0)

    weight = weight * kept
    token = _invert(weight, coin)
    law = torch.cat((top, weight.sum(-1, keepdim=True), threshold, tie), 1)
    greedy = (temperature <= 0).unsqueeze(1)
    first = x.argmax(-1, keepdim=True)  # on CPU, where references run, the first of equals
    law = torch.where(greedy, torch.cat((top, torch.ones_like(top), top, first), 1), law)
    law = torch.where(invalid, torch.tensor([0.0, 1.0, -math.inf, 0.0], device=x.device, dtype=x.dtype), law)
    token = torch.where(greedy, first, token).masked_fill(invalid, 0)
    return token.squeeze(1), law, invalid.squeeze(1)


def gumbel_pick(
    logits: Tensor, temperature: Tensor, seed: Tensor, row: Tensor, position: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw argmax(logits / T + G) with the Gumbel vector that each ``(seed, row, position)`` owns.

    Shapes: ``logits (R, V)``, ``temperature (R)`` float32 (0: the first best), ``seed``, ``row``, ``position`` ``(R)``
    int64. Returns: ``token (R)`` int64, ``invalid (R)`` bool; the token of an invalid row is 0.
    Source: Daliri et al. 2025, "Coupling without communication and drafter-invariant speculative decoding".
    """
    x = logits.double()
    greedy = temperature <= 0
    noise = gumbel_noise(seed, row, position, logits.shape[-1])
    drawn, _ = gumbel_draw(x / torch.where(greedy, 1.0, temperature.double()).unsqueeze(1), noise)
    first, invalid = argmax(x)
    return torch.where(greedy, first, drawn).masked_fill(invalid, 0), invalid


def _cut(rows: Tensor, size: int) -> Tensor:
    """View rows as pieces ``(R, n, size)``, the last one filled up with -inf."""
    return F.pad(rows, (0, -rows.shape[1] % size), value=-math.inf).unflatten(1, (-1, size))


def _scale(temperature: Tensor) -> Tensor:
    """Return log2(e) / T within bounds: 0 * inf and -inf * 0 are NaN."""
    return (math.log2(math.e) / temperature.double()).clamp(1e-30, 1e37)


def _weight(x: Tensor, top: Tensor, temperature: Tensor) -> Tensor:
    exponent = (x - top) * _scale(temperature).unsqueeze(1)
    return torch.exp2(exponent).masked_fill(exponent < _FLOOR, 0.0)


def _kept(x: Tensor, weight: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Mark what the three truncations leave, in their order; settings ``(R, 1)``."""
    order = x.sort(dim=-1, stable=True).indices.flip(-1)  # of equals the highest id first
    kth = x.gather(1, order).gather(1, (top_k.long() - 1).clamp(0, x.shape[1] - 1))
    kept = (top_k <= 0) | (x >= kth)
    ranked = (weight * kept).gather(1, order)
    above = ranked.cumsum(-1) - ranked
    nucleus = above < top_p * ranked.sum(-1, keepdim=True)
    nucleus[:, 0] = True
    kept = kept & ((top_p >= 1) | torch.zeros_like(kept).scatter(1, order, nucleus))
    return kept & ((min_p <= 0) | (weight >= min_p))


def _invert(weight: Tensor, coin: Tensor) -> Tensor:
    """Find the first token whose running sum exceeds ``coin`` times the total: ``(R, 1)``."""
    prefix = weight.cumsum(-1)
    past = (prefix > coin.unsqueeze(1) * prefix[:, -1:]) & (weight > 0)
    last = weight.shape[1] - 1 - (weight > 0).flip(-1).long().argmax(-1, keepdim=True)
    return torch.where(past.any(-1, keepdim=True), past.long().argmax(-1, keepdim=True), last)
