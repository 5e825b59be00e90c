"""Temperature, top-k, top-p and min-p of logits rows, without sorting a vocabulary.

The work is done in numpy, row by row: its compares and gathers on one row are several times faster than torch's, and
a row stays in cache. Whatever a few candidates cannot decide is left to the plain formula.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["truncate"]

_STRIP = 128
_BINS = 256
# How far float32 sums over V logits stray from exact ones, and float32 exponentials, as a difference of logits.
_SUMS, _SUMS_PER_LOGIT, _EXPONENT = 5e-7, 2e-11, 4e-6

Row = NDArray[np.float32]
Ids = NDArray[np.int64]


def truncate(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Divide by the temperature, then keep the top-k, of these the top-p, of these the min-p; -inf elsewhere.

    What is kept is bit by bit what transformers' warpers keep, called in this order, with two reservations about
    ties and roundings of top-p. Of equal logits at its edge those with the highest ids stay, as a stable sort has it;
    transformers' sort is not stable on every CPU. And its float32 sums round: where an exact sum comes within a few
    millionths of the edge, relative to the mass removed, the same formula decides on the same float32 numbers. Tied
    logits at the edge of top-k all stay. Rows without a finite maximum go through the formula, too.

    Shapes: ``logits (R, V)`` of any float dtype; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off.
    Returns: new logits ``(R, V)``, float32, or float64 for float64.
    """
    scores = logits.detach().to(logits.dtype if logits.dtype == torch.float64 else torch.float32, copy=True)
    if temperature != 1:
        scores.div_(temperature)
    if not (top_k or top_p < 1 or min_p):
        return scores
    top_k = min(top_k, scores.shape[-1])
    if scores.dtype != torch.float32 or scores.device.type != "cpu":
        return _formula(scores, top_k, top_p, min_p)
    strips = _strip_maxima(scores)
    best = strips.amax(-1).tolist()
    bounds = strips.topk(top_k, -1).values[:, -1].tolist() if 0 < top_k <= strips.shape[1] else [-math.inf] * len(best)
    law = scores.softmax(-1).numpy() if top_p < 1 and not top_k else None
    rows = scores.numpy()
    for i, row in enumerate(rows):
        done = math.isfinite(best[i])
        if done and top_k:
            done = _cut_list(row, strips[i].numpy(), bounds[i], top_k, top_p)
        elif done and law is not None:
            done = _cut_mass(row, law[i], top_p)
        if done and min_p:
            done = _cut_ratio(row, best[i], min_p)
        if not done:
            again = logits[i : i + 1].detach().float() / temperature
            scores[i] = _formula(again, top_k, top_p, min_p)[0]
    return scores


def _formula(scores: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Truncate as transformers writes it down, with a stable sort."""
    if top_k:
        scores = scores.masked_fill(scores < scores.topk(top_k, -1).values[:, -1:], -math.inf)
    if top_p < 1:
        ascending, order = scores.sort(dim=-1, stable=True)
        removed = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
        removed[:, -1] = False
        scores = scores.masked_fill(removed.scatter(-1, order, removed), -math.inf)
    if min_p:
        p = scores.softmax(-1)
        scores = scores.masked_fill(p < min_p * p.amax(-1, keepdim=True), -math.inf)
    return scores


def _strip_maxima(scores: Tensor) -> Tensor:
    rows, vocab = scores.shape
    full = vocab // _STRIP * _STRIP
    parts = scores[:, :full].view(rows, -1, _STRIP).amax(-1) if full else scores[:, :0]
    return parts if full == vocab else torch.cat((parts, scores[:, full:].amax(-1, keepdim=True)), -1)


def _cut_list(row: Row, strips: Row, bound: float, top_k: int, top_p: float) -> bool:
    """Keep the top-k, and of these the top-p; tell whether that could be decided.

    The k-th largest strip maximum is a lower bound of the k-th largest logit: few strips can hold the top-k.
    """
    ids = _at_least(row, strips, bound)
    values = row[ids]
    kth = np.partition(values, len(values) - top_k)[len(values) - top_k]
    if kth == -math.inf:
        return top_p >= 1  # fewer than k logits are possible: nothing is cut
    ids = ids[values >= kth]
    if top_p < 1:
        values = row[ids]
        order = values.argsort(kind="stable")
        weights = np.exp(values[order].astype(np.float64) - float(values.max()))
        removed = _count_removed(weights, 0.0, (1 - top_p) * float(weights.sum()), len(row))
        if removed is None:
            return False
        ids = ids[order[removed:]]
    kept = row[ids]
    row.fill(-math.inf)
    row[ids] = kept
    return True


def _at_least(row: Row, strips: Row, bound: float) -> Ids:
    """List the ids of logits at or above ``bound``, in order, reading only the strips that hold one."""
    if bound == -math.inf:
        return np.arange(len(row))
    full = len(row) // _STRIP
    (chosen,) = (strips[:full] >= bound).nonzero()
    (found,) = (row[: full * _STRIP].reshape(full, _STRIP)[chosen] >= bound).ravel().nonzero()
    ids = chosen[found // _STRIP] * _STRIP + found % _STRIP
    (tail,) = (row[full * _STRIP :] >= bound).nonzero()
    return np.concatenate((ids, full * _STRIP + tail)) if len(tail) else ids


def _cut_mass(row: Row, law: Row, top_p: float) -> bool:
    """Keep the top-p; tell whether that could be decided. ``law`` is the row's softmax.

    Tokens below (1 - p) / V are out: all of them together do not reach 1 - p. The others are counted into bins by
    their logits until the bin that holds the edge is small enough to sort.
    """
    total = float(law.sum(dtype=np.float64))
    edge = (1 - top_p) * total
    (ids,) = (law > 0.999 * edge / len(law)).nonzero()
    values, weights = row[ids], law[ids]
    below = total - float(weights.sum(dtype=np.float64))
    while len(values) > _BINS:
        low, high = float(values.min()), float(values.max())
        if low == high:
            break
        bins = ((values - low) * ((_BINS - 0.5) / (high - low))).astype(np.int64)
        reached = below + np.bincount(bins, weights).cumsum()
        chosen = int(reached.searchsorted(edge, "right"))
        if chosen == len(reached):
            return False
        below = float(reached[chosen - 1]) if chosen else below
        ids, values, weights = (part[bins == chosen] for part in (ids, values, weights))
    order = values.argsort(kind="stable")
    removed = _count_removed(weights[order], below, edge, len(row))
    if removed is None:
        return False
    last = values[order[removed]]
    torch.threshold_(torch.from_numpy(row), float(np.nextafter(last, np.float32(-math.inf))), -math.inf)
    row[ids[order[:removed]]] = -math.inf
    return True


def _count_removed(weights: NDArray[np.floating], below: float, edge: float, vocab: int) -> int | None:
    """Count the first ``weights`` that with all before them stay within ``edge``; None where rounding may decide."""
    reached = np.concatenate(((below,), below + weights.cumsum(dtype=np.float64)))
    removed = int(reached.searchsorted(edge, "right")) - 1
    if removed < 0 or removed == len(weights):
        return None
    near = edge * (_SUMS + _SUMS_PER_LOGIT * vocab)
    return None if edge - reached[removed] <= near or reached[removed + 1] - edge <= near else removed


def _cut_ratio(row: Row, best: float, min_p: float) -> bool:
    """Keep what is at least ``min_p`` times as likely as the best; tell whether that could be decided."""
    edge = best + math.log(min_p)
    if np.abs(row - np.float32(edge)).min() <= _EXPONENT:
        return False
    torch.threshold_(torch.from_numpy(row), edge, -math.inf)
    return True
