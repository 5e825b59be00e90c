"""Coins: random numbers that depend on the seed, the row, the position and the use, and on nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hf_specgen import ops
from hf_specgen.ops import ACCEPT, DRAFT, SAMPLE

__all__ = ["ACCEPT", "DRAFT", "SAMPLE", "CoinSource", "Coins", "toss"]


class CoinSource(Protocol):
    """Give the coin that a place owns: the same place, the same coin, whatever the batch or the device."""

    def uniform(self, rows: Tensor, depth: Tensor | int, use: int, sibling: Tensor | int = 0) -> Tensor:
        """Return coins in ``[0, 1)`` for the token drawn at ``depth``.

        Shapes: ``rows (R)``; ``depth`` and ``sibling`` ``(R)`` or one int for all. Returns: float64 ``(R)``.
        """
        ...

    def gumbel(self, rows: Tensor, depth: Tensor | int, vocab_size: int) -> Tensor:
        """Return the Gumbel vector of the token drawn at ``depth``; drafter and target share it.

        Shapes: ``rows (R)``, ``depth (R)`` or one int for all. Returns: float ``(R, vocab_size)``.
        """
        ...

    def gumbel_pick(
        self, logits: Tensor, temperature: Tensor, rows: Tensor, depth: Tensor | int
    ) -> tuple[Tensor, Tensor]:
        """Return ``argmax(logits / temperature + G)`` and whether the row is broken.

        Shapes: ``logits (R, V)``, ``temperature (R)``, ``rows (R)``, ``depth (R)`` or one int for all.
        """
        noise = self.gumbel(rows, depth, logits.shape[-1])
        return ops.gumbel_draw(logits.float() / temperature.unsqueeze(1), noise)


@dataclass(frozen=True)
class Coins(CoinSource):
    """Hold where each row of the batch stands, so that its coins can be computed.

    Shapes: ``seeds (B)``, ``row_ids (B)``: the row's number in the user's batch, ``positions (B)``: the absolute
    index of the token drawn at depth 0; all int64.
    """

    seeds: Tensor
    row_ids: Tensor
    positions: Tensor

    def take(self, rows: Tensor) -> Coins:
        """Return the coins of the rows named by ``rows (R)``."""
        return Coins(self.seeds[rows], self.row_ids[rows], self.positions[rows])

    def uniform(self, rows: Tensor, depth: Tensor | int, use: int, sibling: Tensor | int = 0) -> Tensor:
        """Return coins of 53 bits, see ``CoinSource``."""
        return ops.uniform(self.seeds[rows], self.row_ids[rows], self.positions[rows] + depth, use, sibling)

    def gumbel_pick(
        self, logits: Tensor, temperature: Tensor, rows: Tensor, depth: Tensor | int
    ) -> tuple[Tensor, Tensor]:
        """Pick without building G where a kernel can, see ``CoinSource``."""
        position = self.positions[rows] + depth
        return ops.gumbel_pick(logits, temperature, self.seeds[rows], self.row_ids[rows], position)

    def gumbel(self, rows: Tensor, depth: Tensor | int, vocab_size: int) -> Tensor:
        """Return Gumbel vectors; a longer vocabulary only appends to them, see ``CoinSource``."""
        return ops.gumbel_noise(self.seeds[rows], self.row_ids[rows], self.positions[rows] + depth, vocab_size)


def toss(coins: CoinSource, rows: int, depths: int, use: int, siblings: int, device: torch.device) -> Tensor:
    """Toss the coins of every row, depth and sibling at once: ``(B, depths, K)``."""
    place = torch.arange(rows * depths * siblings, device=device)
    sibling: Tensor | int = 0
    if siblings > 1:
        place, sibling = place // siblings, place % siblings
    return coins.uniform(place // depths, place % depths, use, sibling).view(rows, depths, siblings)
