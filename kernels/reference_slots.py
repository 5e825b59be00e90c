"""The definition of the cache kernels: moving slots, building masks. Plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["move_slots", "pass_mask", "tree_mask"]


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
    if not window:
        return _written(lengths, ancestors, capacity, view)[0]
    return pass_mask(lengths, ancestors, ancestors.sum(-1) - 1, capacity, view, window, chunked)


def pass_mask(
    lengths: Tensor, inside: Tensor, depth: Tensor, capacity: int, view: int, window: int, chunked: bool
) -> Tensor:
    """Tell which slots the positions of any pass may see: their row's committed text, and what ``inside`` says.

    Slots, windows and chunks are those of ``tree_mask``; position ``s`` of the pass is at index ``lengths[b] + s`` and
    stands ``depth[b, s]`` behind the text.

    Shapes: ``lengths (B)``, ``inside (B or 1, S, S)`` bool, True at ``[b, s, t]`` where ``s`` sees ``t``; ``depth
    (B or 1, S)`` int64. Returns: bool ``(B, S, view)``.
    """
    seen, index = _written(lengths, inside, capacity, view)
    if not window:
        return seen
    rows = len(seen)
    query = (lengths[:, None] + depth).expand(rows, -1)
    own = (index - lengths[:, None]).expand(rows, -1)
    key = torch.where(own < 0, index, query.gather(1, own.clamp(min=0)))
    if chunked:
        return seen & (query[:, :, None] // window == key[:, None] // window)
    return seen & (query[:, :, None] - key[:, None] < window)


def _written(lengths: Tensor, inside: Tensor, capacity: int, view: int) -> tuple[Tensor, Tensor]:
    """Return what would be seen without a window ``(B, S, view)``, and the newest index at each slot ``(B, view)``."""
    width = inside.shape[-1]
    rows = max(len(lengths), len(inside))
    last = lengths[:, None] + (width - 1)
    columns = torch.arange(view, device=lengths.device)
    index = last - (last - columns) % capacity
    own = index - lengths[:, None]
    column = own.clamp(min=0)[:, None].expand(rows, width, -1)
    seen = inside.expand(rows, -1, -1).gather(2, column) & (own >= 0)[:, None]
    seen |= ((own < 0) & (index >= 0))[:, None]
    return seen, index


def _ancestors(parents: Tensor) -> Tensor:
    """Mark, in scored coordinates, every node's ancestors and itself: ``(B or 1, S, S)`` bool."""
    rows, width = parents.shape
    seen = torch.eye(width + 1, dtype=torch.bool, device=parents.device).repeat(rows, 1, 1)
    each = torch.arange(rows, device=parents.device)
    for node in range(width):  # parents come before children: a node sees what its parent sees, and itself
        seen[:, node + 1] |= seen[each, parents[:, node] + 1]
    return seen
