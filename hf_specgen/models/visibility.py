"""Visibility: what every position of a pass sees, of the committed text and of the pass itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hf_specgen import ops
from hf_specgen.round.records import Tree


@dataclass(frozen=True)
class SlotMap:
    """Say where one kind of layer keeps the text: index ``j`` of a lane is at slot ``j % capacity``.

    Attention reads the first ``view`` slots. ``window`` limits a query to keys less than ``window`` positions behind
    it, or, ``chunked``, to its own chunk of ``window`` positions; 0: no limit.

    Shapes: ``lengths (R)`` int64, the committed tokens of each lane.
    """

    lengths: Tensor
    capacity: int
    view: int
    window: int = 0
    chunked: bool = False


class Visibility(ABC):
    """Say what the ``S`` positions of a pass see. The first one stands right behind the committed text.

    A new kind of pass is a subclass: caches, rings and models ask for nothing but ``depth``, ``mask`` and ``widened``.
    """

    @property
    @abstractmethod
    def depth(self) -> Tensor:
        """``(R or 1, S)`` int64: how many positions behind the committed text each position stands."""

    @abstractmethod
    def mask(self, slots: SlotMap) -> Tensor:
        """Return ``(R or 1, S, view)`` bool: True where a position sees a slot."""

    @abstractmethod
    def widened(self, lanes: Tensor, total: int) -> Visibility:
        """Return the visibility of ``total`` lanes of which these are ``lanes (R)``; the others see what they like."""


@dataclass(frozen=True)
class TreeVisibility(Visibility):
    """Let root and draft nodes see the whole text, the root, and their own ancestors."""

    tree: Tree

    @property
    def depth(self) -> Tensor:
        """Return the depth of the root (0) and of every node."""
        return self.tree.depth

    def mask(self, slots: SlotMap) -> Tensor:
        """Return what root and nodes see, root first."""
        tree = self.tree
        window, chunked = slots.window, slots.chunked
        return ops.tree_mask(slots.lengths, tree.parents, slots.capacity, slots.view, window, chunked, tree.ancestors)

    def widened(self, lanes: Tensor, total: int) -> TreeVisibility:
        """Hang the nodes of the other lanes on their roots."""
        parents = self.tree.parents
        return self if len(parents) == 1 else TreeVisibility(Tree(placed(parents, lanes, total, -1)))


@dataclass(frozen=True)
class BlockVisibility(Visibility):
    """Let every position of a block see the whole text and the whole block, in both directions (DFlash).

    Positions behind a lane's own ``sizes (R)`` are computed and seen by nobody. Positions count up from the text.
    """

    width: int
    sizes: Tensor

    @cached_property
    def depth(self) -> Tensor:
        """Return 0, 1, 2, ... for the positions of the block."""
        return torch.arange(self.width, device=self.sizes.device)[None]

    def mask(self, slots: SlotMap) -> Tensor:
        """Return the text and the lane's own block for every position."""
        inside = self.depth[:, None] < self.sizes[:, None, None]
        seen = inside.expand(-1, self.width, -1)
        return ops.pass_mask(slots.lengths, seen, self.depth, slots.capacity, slots.view, slots.window, slots.chunked)

    def widened(self, lanes: Tensor, total: int) -> BlockVisibility:
        """Give the other lanes a block of one position."""
        return BlockVisibility(self.width, placed(self.sizes, lanes, total, 1))


def placed(part: Tensor, lanes: Tensor, total: int, filler: int = 0) -> Tensor:
    """Place ``part (R, ...)`` at ``lanes (R)`` of ``total`` lanes that hold ``filler``."""
    return part.new_full((total, *part.shape[1:]), filler).index_copy_(0, lanes, part)
