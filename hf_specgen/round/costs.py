"""Costs of a round relative to one plain step, and the draft lengths that pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

import torch

_AHEAD = 4.0  # tokens: a row this much ahead of another counts e times less


@dataclass(frozen=True)
class Costs:
    """Model a pass: ``1 + row (rows - 1) + slope (positions - rows)``, and ``jump`` more above one position.

    Units: plain steps of one row. ``jump`` is the price of leaving matrix-vector products (float32 on CPUs),
    ``slope`` that of one more position, ``draft`` that of drafting one token in every row. The defaults come from
    measurements of one 2-core machine and an assumption for GPUs; they steer draft lengths only, never the text.
    """

    jump: float = 0.0
    row: float = 0.0
    slope: float = 0.002
    draft: float = 0.0

    @classmethod
    def default(cls, device: torch.device, dtype: torch.dtype, prepacked: bool = False) -> Costs:
        """Return the figures for a device and dtype (docs/benchmarks.md says where they come from)."""
        if device.type != "cpu":
            return cls()
        if prepacked:  # in float32 too a pass of several positions is the same kind of product: no jump
            half = dtype in (torch.bfloat16, torch.float16)
            return cls(row=0.05, slope=0.03) if half else cls(row=0.03, slope=0.04)
        if dtype in (torch.bfloat16, torch.float16):
            return cls(row=0.08, slope=0.027)
        return cls(jump=0.5, row=0.033, slope=0.033)

    def forward(self, rows: int, width: int) -> float:
        """Return the cost of one pass over a root and ``width`` draft tokens in each of ``rows`` rows."""
        jump = self.jump if rows * (1 + width) > 1 else 0.0
        return 1.0 + self.row * (rows - 1) + jump + self.slope * rows * width

    def round(self, rows: int, width: int) -> float:
        """Return the cost of drafting and scoring ``width`` tokens in each row, over that of a plain step."""
        return self.forward(rows, width) / self.forward(rows, 0) + self.draft * width

    def gain(self, tokens: float, rows: int, width: int, spent: float) -> float:
        """Return what a round is worth per plain step: its tokens over its time.

        ``tokens``: what drafted tokens are expected to add to one token in each of ``rows`` rows, by ``worth``.
        ``width``: how many positions behind the root every row has in the pass. ``spent``: what drafting costs, in
        plain steps.
        """
        return (rows + tokens) / (self.forward(rows, width) / self.forward(rows, 0) + spent)

    def choose(self, survival: Sequence[Sequence[float]], remaining: Sequence[int], spent: float | None = None) -> int:
        """Return the common width of the pass that gains most; 0 where no draft pays.

        ``survival[r]``: how likely each of row r's tokens or nodes is accepted, the likeliest first; of a chain by
        depth. ``remaining[r]``: what row r may yet write, 0 when it is finished. ``spent``: what drafting has cost,
        whatever the width is; None: a chain is drafted, and every token costs ``draft``.
        """
        worth = self.worth(remaining)
        rows = sum(left > 0 for left in remaining)
        if not rows:
            return 0
        tokens = 0.0
        best = self.gain(tokens, rows, 0, spent or 0.0)
        best_width = 0
        for width in range(1, max(map(len, survival)) + 1):
            for value, chances in zip(worth, survival, strict=True):
                if width <= len(chances):
                    tokens += value * chances[width - 1]
            gain = self.gain(tokens, rows, width, self.draft * width if spent is None else spent)
            if gain > best:
                best = gain
                best_width = width
        return best_width

    def worth(self, remaining: Sequence[int]) -> list[float]:
        """Return what one more token of each row is worth; the unfinished rows' values sum to their number.

        A batch lasts as long as the row with the most left to write, so tokens of that row save whole passes; a row
        that is ahead only leaves the pass earlier, which saves its share of it.
        """
        rows, longest = sum(left > 0 for left in remaining), max(remaining, default=0)
        share = min(self.row / (1.0 + self.row * (rows - 1)), 1.0 / rows) if rows else 0.0
        behind = [exp((left - longest) / _AHEAD) if left > 0 else 0.0 for left in remaining]
        total = sum(behind)
        return [
            rows * (share + (1.0 - share * rows) * weight / total) if left > 0 else 0.0
            for left, weight in zip(remaining, behind, strict=True)
        ]


@dataclass
class Rate:
    """Estimate acceptance from outcomes: of first tokens, and of later ones given all before them.

    Old outcomes fade by ``keep`` per observation; ``first`` and ``later`` start as priors worth ``weight`` draws.
    """

    first: float = 0.5
    later: float = 0.8
    weight: float = 4.0
    keep: float = 0.96

    def __post_init__(self) -> None:
        self._first = [self.first * self.weight, self.weight]
        self._later = [self.later * self.weight, self.weight]

    def observe(self, matched: int, known: int) -> None:
        """Add one outcome: the first ``matched`` of ``known`` decided tokens were right."""
        if known:
            self._first = [self._first[0] * self.keep + (matched > 0), self._first[1] * self.keep + 1]
        if matched:
            trials = min(known - 1, matched)
            self._later = [self._later[0] * self.keep + matched - 1, self._later[1] * self.keep + trials]

    def survival(self, count: int) -> list[float]:
        """Return how likely the first 1, 2, ... ``count`` tokens are all accepted."""
        first, later = self.rates
        return [first * later**place for place in range(count)]

    @property
    def rates(self) -> tuple[float, float]:
        """Return the two current estimates."""
        return self._first[0] / self._first[1], self._later[0] / self._later[1]
