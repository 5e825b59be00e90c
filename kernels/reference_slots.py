"""The definition of the cache kernels: moving slots, building tree masks, looking up n-grams. Plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["match_ngrams", "move_slots", "tree_mask"]


def move_slots(buffers: list[Tensor], source: Tensor, destination: Tensor) -> None:
    """Copy slots ``source[b]`` to ``destination[b]`` in row b of every buffer, in place; the two may overlap.

    Walking along k, the text of a row must move towards its front, as an accepted path does (before a ring wraps:
    ``source`` ascends and ``source >= destination``); entries that do not may only follow those that do, and what
    they leave is undefined. No destination comes twice in a row.

    Shapes: ``buffers``: contiguous, each ``(B, H, T, D)``; ``source (B, K)``, ``destination (B, K)``, int64 in
    ``[0, T)``. ``H``, ``T``, ``D`` and dtype may differ between buffers.
    """
    places: dict[tuple[int, int, torch.device], tuple[Tensor, Tensor]] = {}
    for buffer in buffers:
        rows, heads, slots, width = buffer.shape
        key = heads, slots, buffer.device
        if key not in places:
            first = torch.arange(rows * heads, device=buffer.device).view(rows, heads, 1) * slots
            taken, put = (first + slot.to(buffer.device)[:, None] for slot in (source, destination))
            places[key] = taken.flatten(), put.flatten()
        taken, put = places[key]
        flat = buffer.view(rows * heads * slots, width)  # one index for all heads: half the time of a pair of indices
        flat.index_copy_(0, put, flat.index_select(0, taken))


def tree_mask(
    lengths: Tensor,
    parents: Tensor,
    capacity: int,
    view: int,
    window: int,
    chunked: bool,
    ancestors: Tensor | None = None,
) -> Tensor:
    """Tell which slots root and nodes may see: their row's committed text, the root, and their own ancestors.

    A row's text keeps index ``j`` at slot ``j % capacity``, the root at index ``lengths[b]``, node ``i`` at
    ``lengths[b] + 1 + i``; a slot holds the newest index that maps to it. A window (0: none) limits a query to keys
    less than ``window`` positions behind it, or, ``chunked``, to its own chunk of ``window`` positions; a node's
    position follows its depth.

    Shapes: ``lengths (B)``, ``parents (B or 1, N)`` int64, parents before children, -1 hangs on the root; ``view`` at
    most ``capacity``. ``ancestors (B or 1, S, S)`` bool is what ``parents`` imply, for callers that hold it already.
    Returns: bool ``(B, S, view)``, ``S = N + 1``, root first.
    """
    if ancestors is None:
        ancestors = _ancestors(parents)
    scored = parents.shape[1] + 1
    rows = max(len(lengths), ancestors.shape[0])
    last = lengths[:, None] + (scored - 1)
    columns = torch.arange(view, device=lengths.device)
    index = last - (last - columns) % capacity
    node = index - lengths[:, None]
    inside = node.clamp(min=0)[:, None].expand(rows, scored, -1)
    seen = ancestors.expand(rows, -1, -1).gather(2, inside) & (node >= 0)[:, None]
    seen |= ((node < 0) & (index >= 0))[:, None]
    if not window:
        return seen
    query = lengths[:, None] + ancestors.sum(-1) - 1
    key = torch.where(node < 0, index, query.expand(rows, -1).gather(1, node.clamp(min=0).expand(rows, -1)))
    if chunked:
        return seen & (query[:, :, None] // window == key[:, None] // window)
    return seen & (query[:, :, None] - key[:, None] < window)


def match_ngrams(ids: Tensor, lengths: Tensor, max_ngram: int, min_ngram: int, count: int) -> tuple[Tensor, Tensor]:
    """Copy what followed the latest earlier occurrence of the longest suffix of each row.

    Suffixes of ``max_ngram`` down to ``min_ngram`` tokens are looked for; past the end of the text the copy goes on
    with what it has copied.

    Shapes: ``ids (B, L)`` int64, row b's text is its first ``lengths[b]``. Returns: ``tokens (B, count)`` int64 and
    ``n (B)`` int64: ``count``, or 0 (and zeros) where nothing was found.
    Source: Saxena 2023, "Prompt lookup decoding".
    """
    rows, width = ids.shape
    if not width:
        return ids.new_zeros(rows, count), torch.zeros_like(lengths)
    place = torch.arange(width, device=ids.device)
    matched = torch.zeros(rows, width, dtype=torch.long, device=ids.device)
    alive = (place > 0) & (place < lengths[:, None])  # an occurrence counts when something follows it, at ``place``
    for back in range(1, max_ngram + 1):
        wanted = ids.gather(1, (lengths[:, None] - back).clamp(min=0))
        alive = alive & (place >= back) & (ids.roll(back, 1) == wanted)
        matched += alive
    score = (matched * (matched >= min_ngram) * width + place).amax(1, keepdim=True)  # the longest, then the latest
    found = score >= width
    start = score % width
    period = (lengths[:, None] - start).clamp(min=1)
    copied = start + torch.arange(count, device=ids.device) % period
    tokens = ids.gather(1, copied.clamp(max=width - 1)).masked_fill(~found, 0)
    return tokens, found.squeeze(1) * torch.full_like(lengths, count)


def _ancestors(parents: Tensor) -> Tensor:
    """Mark, in scored coordinates, every node's ancestors and itself: ``(B or 1, S, S)`` bool."""
    rows, width = parents.shape
    seen = torch.eye(width + 1, dtype=torch.bool, device=parents.device).repeat(rows, 1, 1)
    each = torch.arange(rows, device=parents.device)
    for node in range(width):  # parents come before children: a node sees what its parent sees, and itself
        seen[:, node + 1] |= seen[each, parents[:, node] + 1]
    return seen
