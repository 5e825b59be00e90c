"""Temperature, top-k, top-p and min-p of logits rows, without sorting a vocabulary.

The work is done row by row on numpy's views of the tensors: there, compares and gathers are several times faster, and a
row stays in cache. Whatever a few candidates cannot decide is left to the plain formula.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Row = NDArray[np.float32]
    Ids = NDArray[np.int64]

__all__ = ["truncate"]

_STRIP = 128
_BINS = 256
_CLOSE = 1e-30  # logits nearer than this are sorted: their bins could not be counted in float32
# How far float32 sums over V logits stray from exact ones, and float32 exponentials, as a difference of logits.
_SUMS = 5e-7
_SUMS_PER_LOGIT = 2e-11
_EXPONENT = 4e-6


def truncate(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Divide by the temperature, then keep the top-k, of these the top-p, of these the min-p; -inf elsewhere.

    What is kept is bit by bit what transformers' warpers keep, called in this order. Two things about top-p only their
    own formula knows, so it decides there: which of equal logits at the edge stay (as torch's sort, which is not
    stable, happens to order them), and on which side its rounded sums fall where an exact one comes within a few
    millionths of the edge, relative to the mass removed. Tied logits at the edge of top-k all stay. Rows without a
    finite maximum go through the formula, too.

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
    """Truncate as transformers writes it down, with the same sort: its order of equal logits decides who stays."""
    if top_k:
        scores = scores.masked_fill(scores < scores.topk(top_k, -1).values[:, -1:], -math.inf)
    if top_p < 1:
        ascending, order = scores.sort(dim=-1)
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
    values.partition(len(values) - top_k)
    kth = values[len(values) - top_k]
    if kth == -math.inf:
        return top_p >= 1  # fewer than k logits are possible: nothing is cut
    ids = ids[row[ids] >= kth]
    if top_p < 1:
        values = row[ids]
        order = values.argsort()
        weights = torch.from_numpy(values[order]).double().sub_(float(values.max())).exp_().numpy()
        removed = _count_removed(values[order], weights, 0.0, (1 - top_p) * float(weights.sum()), len(row))
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
        return torch.arange(len(row)).numpy()
    full = len(row) // _STRIP
    (chosen,) = (strips[:full] >= bound).nonzero()
    (found,) = (row[: full * _STRIP].reshape(full, _STRIP)[chosen] >= bound).ravel().nonzero()
    ids = chosen[found // _STRIP] * _STRIP + found % _STRIP
    (tail,) = (row[full * _STRIP :] >= bound).nonzero()
    if not len(tail):
        return ids
    return torch.cat((torch.from_numpy(ids), torch.from_numpy(tail) + full * _STRIP)).numpy()


def _cut_mass(row: Row, law: Row, top_p: float) -> bool:
    """Keep the top-p; tell whether that could be decided. ``law`` is the row's softmax.

    Tokens below (1 - p) / V are out: all of them together do not reach 1 - p. The others are counted into bins by
    their logits until the bin that holds the edge is small enough to sort.
    """
    total = float(law.sum(dtype="float64"))
    edge = (1 - top_p) * total
    (ids,) = (law > 0.999 * edge / len(law)).nonzero()
    values = row[ids]
    weights = law[ids].astype("float64")
    below = total - float(weights.sum())
    while len(values) > _BINS:
        low = float(values.min())
        high = float(values.max())
        if high - low < _CLOSE:
            break
        bins = ((values - low) * ((_BINS - 0.5) / (high - low))).astype("int64")
        reached = below + torch.bincount(torch.from_numpy(bins), torch.from_numpy(weights)).numpy().cumsum()
        chosen = int(reached.searchsorted(edge, "right"))
        if chosen == len(reached):
            return False
        below = float(reached[chosen - 1]) if chosen else below
        ids, values, weights = (part[bins == chosen] for part in (ids, values, weights))
    order = values.argsort()
    removed = _count_removed(values[order], weights[order], below, edge, len(row))
    if removed is None:
        return False
    least = values[order[removed]]
    torch.threshold_(torch.from_numpy(row), float(least), -math.inf)
    row[ids[values == least]] = least  # the threshold takes the edge itself, too
    return True


def _count_removed(values: Row, weights: NDArray[np.floating], below: float, edge: float, vocab: int) -> int | None:
    """Count the first ``weights`` that with all before them stay within ``edge``.

    ``values`` are their logits, ascending. Returns: None where rounding or the order of equal logits may decide.
    """
    reached = below + weights.cumsum(dtype="float64")
    removed = int(reached.searchsorted(edge, "right"))
    near = edge * (_SUMS + _SUMS_PER_LOGIT * vocab)
    if below > edge or removed == len(weights):
        return None
    if removed and values[removed - 1] == values[removed]:
        return None
    last = float(reached[removed - 1]) if removed else below
    return None if edge - last <= near or reached[removed] - edge <= near else removed


def _cut_ratio(row: Row, best: float, min_p: float) -> bool:
    """Keep what is at least ``min_p`` times as likely as the best; tell whether that could be decided."""
    edge = best + math.log(min_p)
    if abs(row - edge).min() <= _EXPONENT:
        return False
    torch.threshold_(torch.from_numpy(row), edge, -math.inf)
    return True
