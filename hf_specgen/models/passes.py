"""The records of one pass over a cached model: what goes in, and what comes out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from hf_specgen.models.visibility import TreeVisibility, Visibility, placed
from hf_specgen.round.records import Tree


@dataclass(frozen=True)
class Pass:
    """Describe one forward over positions that stand behind every lane's committed text. It commits nothing.

    ``n_valid (R)``: positions behind the first ``n_valid[r] + 1`` of a lane are computed at the first one's position
    and mean nothing; None: all mean something. ``undo`` committed tokens may yet be rolled back. ``columns`` names the
    positions whose logits are wanted, in order; None: all. ``hidden`` asks for the hidden states of every layer.
    The last ``scouts`` positions are computed at their own depth whatever ``n_valid`` says, and no position deeper than
    ``deepest (R)``; None: no limit.

    Shapes: ``tokens (R, S)`` int64. Ids that do not exist are embedded as others: ``verify`` never accepts them, but
    they must not crash the pass.
    """

    tokens: Tensor
    visibility: Visibility
    n_valid: Tensor | None = None
    undo: int = 0
    columns: tuple[int, ...] | None = None
    hidden: bool = False
    scouts: int = 0
    deepest: Tensor | None = None

    @classmethod
    def chain(
        cls,
        tokens: Tensor,
        n_valid: Tensor | None = None,
        undo: int = 0,
        columns: tuple[int, ...] | None = None,
        hidden: bool = False,
    ) -> Pass:
        """Describe a pass over tokens that follow each other, ``(R, S)``."""
        tree = Tree.chain(tokens.shape[1] - 1, tokens.device)
        return cls(tokens, TreeVisibility(tree), n_valid, undo, columns, hidden)

    @property
    def width(self) -> int:
        """Return S, the number of positions."""
        return self.tokens.shape[1]

    @cached_property
    def depth(self) -> Tensor:
        """``(R or 1, S)`` int64: how far behind the committed text a position stands; 0 where it means nothing."""
        depth = self.visibility.depth
        if self.deepest is not None:
            depth = torch.minimum(depth, self.deepest[:, None])
        if self.n_valid is None:
            return depth
        places = torch.arange(self.width, device=depth.device)
        counts = places <= self.n_valid[:, None]
        if self.scouts:
            counts = counts | (places >= self.width - self.scouts)
        return depth * counts

    def widened(self, lanes: Tensor, total: int) -> Pass:
        """Return the pass over ``total`` lanes of which these are ``lanes (R)``; the others mean nothing."""
        n_valid = self.n_valid
        if n_valid is None:
            n_valid = torch.full_like(self.tokens[:, 0], self.width)
        tokens = placed(self.tokens, lanes, total)
        counts = placed(n_valid, lanes, total)
        deepest = self.deepest if self.deepest is None else placed(self.deepest, lanes, total)
        visibility = self.visibility.widened(lanes, total)
        return replace(self, tokens=tokens, n_valid=counts, visibility=visibility, deepest=deepest)


@dataclass(frozen=True)
class ForwardOutput:
    """Hold what one pass returned.

    Shapes: ``logits (R, S, V)`` (``(R, 1, V)``, each lane's last prompt position, after a prefill); ``hidden``: the
    embedding output and one ``(R, S, D)`` per layer when asked for, else empty; ``taps``: one ``(R, S, D)`` per
    boundary that the model is tapped at.
    """

    logits: Tensor
    hidden: tuple[Tensor, ...] = ()
    taps: tuple[Tensor, ...] = ()
