"""The definition of every verification kernel, in plain torch.

``logits`` are processed target logits of any float dtype; they are normalised in float32, or in float64 when they are
float64, and every sum, prefix and comparison after that is float64. ``q`` is a list (``q_ids (R, C)`` with
probabilities ``q (R, C)``; a place with probability zero is unused) or, with ``q_ids`` None, logits ``(R, V_draft)``
over the first ids. Randomness is an argument: coins are float64 in ``[0, 1)``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .common import gumbel_noise, uniform

__all__ = [
    "accept_siblings",
    "argmax",
    "block_step",
    "draw",
    "gumbel_draw",
    "gumbel_noise",
    "residual_draw",
    "uniform",
]

_STRIP = 128  # a flat float32 running sum over 150k entries is wrong by 1e-3; two levels of 128-wide sums are not


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Pick the first token with the largest logit.

    Shapes: ``logits (R, V)``. Returns: ``token (R)``, ``invalid (R)`` bool.
    """
    # Strip maxima vectorise; a flat argmax is eight times slower on CPU.
    strip = _strip_max(logits).argmax(-1, keepdim=True)
    inside = _strip_ids(strip, logits.shape[-1])
    best, place = logits.gather(-1, inside).max(-1, keepdim=True)
    best = best.squeeze(-1)
    return inside.gather(-1, place).squeeze(-1), best - best != 0  # true for NaN and both infinities


def gumbel_draw(logits: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Draw from softmax(logits) with the Gumbel vector ``noise``.

    Shapes: ``logits (R, V)``, ``noise (R, V)``. Returns: ``token (R)``, ``invalid (R)`` bool.
    """
    return argmax(logits + noise)


def draw(logits: Tensor, coin: Tensor) -> tuple[Tensor, Tensor]:
    """Draw from softmax(logits) by inverting its running sum at ``coin``; a token of probability zero never comes.

    Shapes: ``logits (R, V)``, ``coin (R)``. Returns: ``token (R)``, ``invalid (R)`` bool.
    """
    token, mass = _invert(_softmax(logits), coin)
    return token, ~(mass > 0)


def accept_siblings(
    logits: Tensor,
    q_ids: Tensor | None,
    q: Tensor,
    tokens: Tensor,
    present: Tensor,
    coins: Tensor,
    without_replacement: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Offer the children of one node in the order they were drawn; the first accepted one wins.

    After some rejections what is left of p is ``max(p - scale q, 0)``, of mass ``mass``: no other state is needed,
    because a rejected token already has ``p <= scale q``. A child that the law could not have drawn (absent,
    repeated without replacement, probability zero) is passed over and costs nothing.

    Shapes: ``logits (R, V)``, ``q`` as in the module, ``tokens``, ``present`` (bool) and ``coins`` ``(R, K)``.
    Returns: ``accepted (R)`` bool, ``choice (R)`` in ``[0, K)``, ``scale (R)``, ``invalid (R)`` bool.
    Source: Leviathan et al. 2023 and Chen et al. 2023 (K = 1), Miao et al. 2024 (SpecInfer) algorithm 2.
    """
    p, q = _softmax(logits), _weights(q_ids, q)
    p_total, q_total = _total(p), _total(q)
    p_child, q_child = p.gather(-1, tokens) / p_total, _chance(q_ids, q, tokens) / q_total
    possible = present & (q_child > 0)
    if without_replacement:
        possible &= ~_repeats(tokens, possible)

    scale = torch.zeros_like(p_child[:, 0])
    mass, left = scale + 1, scale + 1
    accepted, choice = torch.zeros_like(present[:, 0]), torch.zeros_like(tokens[:, 0])
    for k in range(tokens.shape[1]):
        q_k, p_k = q_child[:, k], p_child[:, k] - scale * q_child[:, k]
        room = torch.maximum(left, q_k)  # equal to left but for rounding, and never zero for a possible child
        offered = possible[:, k] & ~accepted
        hit = offered & (coins[:, k] * q_k * mass < p_k * room)  # strict, and no division: p = 0 never passes
        miss = offered & ~hit
        accepted, choice = accepted | hit, choice.masked_fill(hit, k)
        scale = torch.where(miss, scale + mass / room, scale)
        if without_replacement:
            left = torch.where(miss, room - q_k, left)
        if k + 1 < tokens.shape[1]:
            mass = _rest(p / p_total, q_ids, q / q_total, torch.ones_like(scale), scale).sum(-1)
    return accepted, choice, scale, p_total.squeeze(-1).isnan()


def residual_draw(
    logits: Tensor, q_ids: Tensor | None, q: Tensor, keep: Tensor, take: Tensor, coin: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw from ``max(keep p - take q, 0)``; where that is empty (p = q up to rounding) draw from p.

    Shapes: ``logits (R, V)``, ``q`` as in the module, ``keep (R)``, ``take (R)``, ``coin (R)``.
    Returns: ``token (R)``, ``invalid (R)`` bool.
    Source: Leviathan et al. 2023, algorithm 1; Sun et al. 2024 (block verification), equation for the residual.
    """
    p, q = _normal(_softmax(logits)), _normal(_weights(q_ids, q))
    rest = _rest(p, q_ids, q, keep, take)
    usable = rest.sum(-1, keepdim=True) > 0
    token, mass = _invert(torch.where(usable, rest, p), coin)
    return token, ~(mass > 0)


def block_step(
    logits: Tensor, q_ids: Tensor | None, q: Tensor, token: Tensor, reach: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Extend block verification by one drafted token.

    Shapes: ``logits (R, V)``, ``q`` as in the module, ``token (R)``, ``reach (R)``: h before the token.
    Returns: ``surplus (R)``: the mass of ``max(h p - q, 0)``; h after the token ``(R)``; ``invalid (R)`` bool.
    Source: Sun et al. 2024, "Block verification accelerates speculative decoding", algorithm 2.
    """
    p, q = _normal(_softmax(logits)), _normal(_weights(q_ids, q))
    surplus = _rest(p, q_ids, q, reach, torch.ones_like(reach)).sum(-1)
    token = token.unsqueeze(-1)
    p_token, q_token = reach * p.gather(-1, token).squeeze(-1), _chance(q_ids, q, token).squeeze(-1)
    # The comparison decides, not the division; a token that q could not draw ends the block.
    after = torch.where(p_token < q_token, p_token / q_token, (q_token > 0).double())
    return surplus, after, p[:, 0].isnan()


def _softmax(logits: Tensor) -> Tensor:
    return (logits if logits.dtype == torch.float64 else logits.float()).softmax(-1)


def _weights(q_ids: Tensor | None, q: Tensor) -> Tensor:
    return _softmax(q) if q_ids is None else q


def _total(weights: Tensor) -> Tensor:
    return weights.sum(-1, keepdim=True, dtype=torch.float64)


def _normal(weights: Tensor) -> Tensor:
    return weights / _total(weights)


def _rest(p: Tensor, q_ids: Tensor | None, q: Tensor, keep: Tensor, take: Tensor) -> Tensor:
    """Compute ``max(keep p - take q, 0)``: exactly zero where nothing is left."""
    rest, taken = p * keep.unsqueeze(-1), q * take.unsqueeze(-1)
    if q_ids is None:
        head = rest[:, : q.shape[-1]]
        head -= torch.minimum(head, taken)
    else:
        rest.scatter_add_(-1, q_ids, -torch.minimum(rest.gather(-1, q_ids), taken))
    return rest


def _chance(q_ids: Tensor | None, q: Tensor, tokens: Tensor) -> Tensor:
    """Read q at ``tokens (R, K)``."""
    if q_ids is None:
        width = q.shape[-1]
        return q.gather(-1, tokens.clamp(max=width - 1)).masked_fill(tokens >= width, 0.0)
    return (q.unsqueeze(1) * (q_ids.unsqueeze(1) == tokens.unsqueeze(-1))).sum(-1)


def _repeats(tokens: Tensor, possible: Tensor) -> Tensor:
    """Mark tokens that an earlier possible sibling already carries."""
    same = (tokens.unsqueeze(-1) == tokens.unsqueeze(-2)) & possible.unsqueeze(-2)
    return same.tril(-1).any(-1)


def _invert(weights: Tensor, coin: Tensor) -> tuple[Tensor, Tensor]:
    """Find the token whose piece of the running sum holds ``coin`` times the total; also return the total."""
    prefix = _running_sum(_strip_sum(weights))
    target = coin.unsqueeze(-1) * prefix[:, -1:]
    strip = _first_above(prefix, target)
    before = F.pad(prefix, (1, 0)).gather(-1, strip)
    inside = _strip_ids(strip, weights.shape[-1])
    place = _first_above(_running_sum(weights.gather(-1, inside)), target - before)
    return inside.gather(-1, place).squeeze(-1), prefix[:, -1]


def _running_sum(weights: Tensor) -> Tensor:
    """Sum up so that the value rises only where the weight is positive, also on devices whose scan is not monotone."""
    total = weights.cumsum(-1, dtype=torch.float64)
    return total.masked_fill_(weights <= 0, 0.0).cummax(-1).values


def _first_above(prefix: Tensor, target: Tensor) -> Tensor:
    """Find the first place above ``target``, or the place that reaches the total if rounding pushed it past."""
    return torch.minimum(torch.searchsorted(prefix, target, right=True), prefix.argmax(-1, keepdim=True))


def _strip_max(rows: Tensor) -> Tensor:
    whole, tail = _strips(rows)
    parts = whole.amax(-1)
    return parts if tail is None else torch.cat((parts, tail.amax(-1, keepdim=True)), -1)


def _strip_sum(rows: Tensor) -> Tensor:
    whole, tail = _strips(rows)
    parts = whole.sum(-1, dtype=torch.float64)
    return parts if tail is None else torch.cat((parts, _total(tail)), -1)


def _strips(rows: Tensor) -> tuple[Tensor, Tensor | None]:
    """View rows as full strips ``(R, n, 128)``, and what is too short for one."""
    count, vocab = rows.shape
    full = vocab // _STRIP
    if full * _STRIP == vocab:
        return rows.view(count, full, _STRIP), None
    return rows[:, : full * _STRIP].view(count, full, _STRIP), rows[:, full * _STRIP :]


def _strip_ids(strip: Tensor, vocab_size: int) -> Tensor:
    """List the ids of one strip a row; places past the vocabulary repeat its last id, which never beats the first."""
    return (strip * _STRIP + torch.arange(_STRIP, device=strip.device)).clamp_(max=vocab_size - 1)
