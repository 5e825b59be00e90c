"""Costs of a round relative to one plain step, and the draft lengths that pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Costs:
    """Model a pass over ``p`` positions (all rows together) as ``1 + jump * [p > 1] + slope * (p - 1)`` plain steps.

    ``jump`` is paid once as soon as a pass holds more positions than rows (float32 matrix products on CPUs change
    kernel there), ``slope`` per position, ``draft`` per drafted token. The defaults are measured figures of one
    2-core machine and one GPU-shaped guess; they steer draft lengths only, never the text.
    """

    jump: float = 0.0
    slope: float = 0.002
    draft: float = 0.0

    @classmethod
    def default(cls, device: torch.device, dtype: torch.dtype) -> Costs:
        """Return the figures for a device and dtype (docs/benchmarks.md says where they come from)."""
        if device.type != "cpu":
            return cls()
        if dtype in (torch.bfloat16, torch.float16):
            return cls(slope=0.018)
        return cls(jump=0.5, slope=0.03)

    def round(self, rows: int, width: int) -> float:
        """Return the cost of scoring ``width`` drafted tokens in each of ``rows`` rows, over the cost of none."""
        plain = 1.0 + self.slope * (rows - 1)
        scored = plain + self.slope * rows * width + (self.jump if width else 0.0)
        return scored / plain + self.draft * width

    def best_lengths(self, rates: Sequence[tuple[float, float]], available: Sequence[int]) -> list[int]:
        """Return each row's draft length that maximises tokens per cost of the common pass.

        ``rates[r]`` is the chance that the first token is accepted and the chance of each later one given all
        before; ``available[r]`` bounds the row.
        """
        rows = len(available)
        expected = [1.0] * rows
        best, best_width = float(rows), 0
        for width in range(1, max(available, default=0) + 1):
            for row, (first, later) in enumerate(rates):
                if width <= available[row]:
                    expected[row] += first * later ** (width - 1)
            gain = sum(expected) / self.round(rows, width)
            if gain > best:
                best, best_width = gain, width
        return [min(best_width, bound) for bound in available]


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

    @property
    def rates(self) -> tuple[float, float]:
        """Return the two current estimates."""
        return self._first[0] / self._first[1], self._later[0] / self._later[1]
