"""The definition of every verification kernel, in plain torch.

``logits`` are processed target logits of any float dtype; weights and the sums of short strips of them are float32, or
float64 when the logits are float64; every longer sum, prefix and comparison is float64. ``q`` is a list
(``q_ids (R, C)`` with probabilities ``q (R, C)``; a place with probability zero is unused) or, with ``q_ids`` None,
logits ``(R, V_draft)`` over the first ids. Randomness is an argument: coins are float64 in ``[0, 1)``.

Rounding noise is no mass. What ``max(keep p - take q, 0)`` leaves of a token counts only above 8 ulps of its own p, and
a token whose chance to be accepted is 1 up to 8 ulps is accepted. Otherwise a coin of 0, or the last one below 1, would
decide by the last bit of this machine's exp and log. The law moves only where p and q tie that closely, and by less
than 16 ulps (docs/theory.md).

On CPU these are also what runs, so rows of V entries are read and written as rarely as can be.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .common import gumbel_noise, uniform

__all__ = [
    "accept_or_draw",
    "accept_siblings",
    "argmax",
    "block_step",
    "draw",
    "gumbel_draw",
    "gumbel_noise",
    "residual_draw",
    "uniform",
]

_SLICE = 32  # rows that are cast together
_NOISE_ULPS = 8  # five were seen where a law's logits and its softmax are each off by one ulp
_STRIP = 128  # a flat float32 running sum over 150k entries is wrong by 1e-3; two levels of 128-wide sums are not


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Pick the first token with the largest logit.

    Shapes: ``logits (R, V)``. Returns: ``token (R)``, ``invalid (R)`` bool.
    """
    if logits.device.type == "cpu" and logits.dtype in (torch.bfloat16, torch.float16) and len(logits):
        # a cast vectorises where 16-bit maxima do not; slices, so that no copy of everything is made
        parts = [argmax(part.float()) for part in logits.split(_SLICE)]
        return torch.cat([token for token, _ in parts]), torch.cat([broken for _, broken in parts])
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
    weights = _softmax(logits)
    token, mass = _invert(weights, _strip_sum(weights), coin)
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
    pair = _pair(logits, q_ids, q)
    return *_offer(pair, tokens, present, coins, without_replacement), _is_broken(pair)


def accept_or_draw(
    logits: Tensor,
    q_ids: Tensor | None,
    q: Tensor,
    tokens: Tensor,
    present: Tensor,
    coins: Tensor,
    without_replacement: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Offer the children of one node as ``accept_siblings`` does, and draw from what they leave where none is accepted.

    Shapes: as for ``accept_siblings``, but ``coins (R, K + 1)``: one for each child and the one of the draw.
    Returns: ``accepted (R)`` bool, ``choice (R)`` in ``[0, K)``, ``token (R)``: junk where a child was accepted,
    ``invalid (R)`` bool.
    """
    pair = _pair(logits, q_ids, q)
    accepted, choice, scale = _offer(pair, tokens, present, coins[:, :-1], without_replacement)
    one = torch.ones_like(scale)
    coin = coins[:, -1]
    invalid = _is_broken(pair)
    if accepted.device.type != "cpu":  # a list of the rows that stop would wait for the device
        return accepted, choice, _draw_rest(pair, one, scale, coin)[0], invalid
    token = torch.zeros_like(choice)
    (stop,) = (~accepted).nonzero(as_tuple=True)
    if len(stop):
        token[stop], _ = _draw_rest(pair.rows(stop), one[stop], scale[stop], coin[stop])
    return accepted, choice, token, invalid


def residual_draw(
    logits: Tensor, q_ids: Tensor | None, q: Tensor, keep: Tensor, take: Tensor, coin: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw from ``max(keep p - take q, 0)``; where that is empty (p = q up to rounding) draw from p.

    Shapes: ``logits (R, V)``, ``q`` as in the module, ``keep (R)``, ``take (R)``, ``coin (R)``.
    Returns: ``token (R)``, ``invalid (R)`` bool.
    Source: Leviathan et al. 2023, algorithm 1; Sun et al. 2024 (block verification), equation for the residual.
    """
    token, mass = _draw_rest(_pair(logits, q_ids, q), keep, take, coin)
    return token, ~(mass > 0)


def block_step(
    logits: Tensor, q_ids: Tensor | None, q: Tensor, token: Tensor, reach: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Extend block verification by one drafted token.

    Shapes: ``logits (R, V)``, ``q`` as in the module, ``token (R)``, ``reach (R)``: h before the token.
    Returns: ``surplus (R)``: the mass of ``max(h p - q, 0)``; h after the token ``(R)``; ``invalid (R)`` bool.
    Source: Sun et al. 2024, "Block verification accelerates speculative decoding", algorithm 2.
    """
    pair = _pair(logits, q_ids, q)
    p_token, q_token = (chance.squeeze(-1) for chance in _chances(pair, token.unsqueeze(-1)))
    p_token = reach * p_token
    # The comparison decides, not the division; a token that q could not draw ends the block.
    certain = p_token >= q_token * (1 - _noise(pair))
    after = torch.where(certain, (q_token > 0).double(), p_token / q_token)
    invalid = _is_broken(pair)
    return _mass_left(pair, reach, torch.ones_like(reach)), after, invalid


class _Pair(NamedTuple):
    """Weights of both laws and their float64 sums ``(R, 1)``; with ``q_ids`` None ``q`` covers the first ids."""

    p: Tensor
    q_ids: Tensor | None
    q: Tensor
    p_total: Tensor
    q_total: Tensor

    def rows(self, index: Tensor) -> _Pair:
        if len(index) == len(self.p):
            return self
        ids = None if self.q_ids is None else self.q_ids[index]
        return _Pair(self.p[index], ids, self.q[index], self.p_total[index], self.q_total[index])


def _pair(logits: Tensor, q_ids: Tensor | None, q: Tensor) -> _Pair:
    p = _softmax(logits)
    if q_ids is None:
        q = _softmax(q).to(p.dtype)
        return _Pair(p, q_ids, q, _total(p), _total(q))
    return _Pair(p, q_ids, q.to(p.dtype), _total(p), q.sum(-1, keepdim=True, dtype=torch.float64))


def _is_broken(pair: _Pair) -> Tensor:
    return pair.p_total.squeeze(-1).isnan()


def _offer(
    pair: _Pair, tokens: Tensor, present: Tensor, coins: Tensor, without_replacement: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Decide ``accept_siblings``: which rows accept, which child, and the scale of q."""
    p_child, q_child = _chances(pair, tokens)
    possible = present & (q_child > 0)
    if without_replacement and tokens.shape[1] > 1:
        possible &= ~_repeats(tokens, possible)

    noise = _noise(pair)
    scale = torch.zeros_like(p_child[:, 0])
    mass = scale + 1
    left = scale + 1
    accepted = torch.zeros_like(present[:, 0])
    choice = torch.zeros_like(tokens[:, 0])
    for k in range(tokens.shape[1]):
        q_k = q_child[:, k]
        p_k = _without_noise(p_child[:, k] - scale * q_k, p_child[:, k], noise)
        room = torch.maximum(left, q_k)  # equal to left but for rounding, and never zero for a possible child
        offered = possible[:, k] & ~accepted
        certain = q_k * mass - p_k * room <= p_child[:, k] * noise
        drawn = coins[:, k] * q_k * mass < p_k * room  # no division
        hit = offered & (p_k > 0) & (certain | drawn)
        miss = offered & ~hit
        accepted = accepted | hit
        choice = choice.masked_fill(hit, k)
        scale = torch.where(miss, scale + mass / room, scale)
        if without_replacement:
            left = torch.where(miss, room - q_k, left)
        if k + 1 < tokens.shape[1] and (miss.device.type != "cpu" or miss.any()):
            mass = _mass_left(pair, torch.ones_like(scale), scale)
    return accepted, choice, scale


def _chances(pair: _Pair, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Read p and q at ``tokens (R, K)``, in float64."""
    if pair.q_ids is None:
        width = pair.q.shape[-1]
        q = pair.q.gather(-1, tokens.clamp(max=width - 1)).masked_fill(tokens >= width, 0.0)
    else:
        q = (pair.q.unsqueeze(1) * (pair.q_ids.unsqueeze(1) == tokens.unsqueeze(-1))).sum(-1)
    return pair.p.gather(-1, tokens) / pair.p_total, q / pair.q_total


def _draw_rest(pair: _Pair, keep: Tensor, take: Tensor, coin: Tensor) -> tuple[Tensor, Tensor]:
    """Draw from ``max(keep p - take q, 0)``, or from p where that is empty; also return the mass, in weights of p."""
    rest = _rest(pair, keep, take)
    sums = _strip_sum(rest)
    usable = (sums.sum(-1, keepdim=True) > 0) & (keep.unsqueeze(-1) > 0)
    if usable.device.type != "cpu" or not usable.all():
        rest = torch.where(usable, rest, pair.p)
        sums = _strip_sum(rest)
    return _invert(rest, sums, coin)


def _mass_left(pair: _Pair, keep: Tensor, take: Tensor) -> Tensor:
    """Return the mass ``(R)`` of ``max(keep p - take q, 0)``."""
    return keep * (_total(_rest(pair, keep, take)) / pair.p_total).squeeze(-1)


def _rest(pair: _Pair, keep: Tensor, take: Tensor) -> Tensor:
    """Compute the weights of ``max(keep p - take q, 0)``: exactly zero where nothing is left but rounding noise."""
    p, q_ids, q, _, _ = pair
    ratio = _ratio(pair, keep, take).to(p.dtype)
    if q_ids is not None:
        listed = p.gather(-1, q_ids)
        left = _without_noise(listed - q * ratio, listed, _noise(pair))
        return p.scatter_add(-1, q_ids, left - listed)
    shared = p[:, : q.shape[-1]]
    left = _without_noise(torch.addcmul(shared, q, ratio, value=-1), shared, _noise(pair))
    return left if left.shape == p.shape else torch.cat((left, p[:, q.shape[-1] :]), -1)


def _noise(pair: _Pair) -> float:
    """Return the share of a weight that is rounding noise."""
    return _NOISE_ULPS * torch.finfo(pair.p.dtype).eps


def _without_noise(left: Tensor, whole: Tensor, noise: float) -> Tensor:
    """Set to zero, in place, what is left of ``whole`` where it is negative or no more than noise."""
    return left.masked_fill_(left <= whole * noise, 0)


def _ratio(pair: _Pair, keep: Tensor, take: Tensor) -> Tensor:
    """Return how much of q's weights to take from p's, ``(R, 1)``: finite, for infinity times zero is no number."""
    ratio = (take / keep).unsqueeze(-1) * (pair.p_total / pair.q_total)
    return ratio.clamp_(max=torch.finfo(pair.p.dtype).max)


def _softmax(logits: Tensor) -> Tensor:
    return (logits if logits.dtype == torch.float64 else logits.float()).softmax(-1)


def _total(weights: Tensor) -> Tensor:
    return _strip_sum(weights).sum(-1, keepdim=True, dtype=torch.float64)


def _repeats(tokens: Tensor, possible: Tensor) -> Tensor:
    """Mark tokens that an earlier possible sibling already carries."""
    same = (tokens.unsqueeze(-1) == tokens.unsqueeze(-2)) & possible.unsqueeze(-2)
    return same.tril(-1).any(-1)


def _invert(weights: Tensor, sums: Tensor, coin: Tensor) -> tuple[Tensor, Tensor]:
    """Find the token whose piece of the running sum holds ``coin`` times the total; also return the total."""
    prefix = _running_sum(sums)
    target = coin.unsqueeze(-1) * prefix[:, -1:]
    strip = _first_above(prefix, target)
    target = target - (prefix.gather(-1, strip) - sums.gather(-1, strip))
    inside = _strip_ids(strip, weights.shape[-1])
    place = _first_above(_running_sum(weights.gather(-1, inside)), target)
    return inside.gather(-1, place).squeeze(-1), prefix[:, -1]


def _running_sum(weights: Tensor) -> Tensor:
    """Sum up so that the value rises only where the weight is positive."""
    total = weights.cumsum(-1, dtype=torch.float64)
    if weights.device.type == "cpu":
        return total
    return total.masked_fill_(weights <= 0, 0.0).cummax(-1).values  # other devices' scans are not monotone


def _first_above(prefix: Tensor, target: Tensor) -> Tensor:
    """Find the first place above ``target``, or the place that reaches the total if rounding pushed it past."""
    return torch.minimum(torch.searchsorted(prefix, target, right=True), prefix.argmax(-1, keepdim=True))


def _strip_max(rows: Tensor) -> Tensor:
    whole, tail = _strips(rows)
    parts = whole.amax(-1)
    return parts if tail is None else torch.cat((parts, tail.amax(-1, keepdim=True)), -1)


def _strip_sum(rows: Tensor) -> Tensor:
    whole, tail = _strips(rows)
    parts = whole.sum(-1)
    return parts if tail is None else torch.cat((parts, tail.sum(-1, keepdim=True)), -1)


def _strips(rows: Tensor) -> tuple[Tensor, Tensor | None]:
    """View rows as full strips ``(R, n, 128)``, and what is too short for one."""
    count, vocab = rows.shape
    full = vocab // _STRIP
    if full * _STRIP == vocab:
        return rows.view(count, full, _STRIP), None
    return rows[:, : full * _STRIP].view(count, full, _STRIP), rows[:, full * _STRIP :]


def _strip_ids(strip: Tensor, vocab_size: int) -> Tensor:
    """List the ids of one strip a row; places past the vocabulary repeat its last id, which never beats the first."""
    ids = torch.add(torch.arange(_STRIP, device=strip.device), strip, alpha=_STRIP)
    return ids.clamp_(max=vocab_size - 1) if vocab_size % _STRIP else ids
