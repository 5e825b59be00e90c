"""Tally: add up what drafters tell about batches, on the device, and say it once per log or evaluation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_specgen.drafting.learned import TrainingOutput


class Tally:
    """Sum losses and counts; nothing is brought to the host before ``told``."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def clear(self) -> None:
        """Start anew."""
        self._sums = {}

    def add(self, output: TrainingOutput, items: Tensor | None = None, **more: Tensor) -> None:
        """Add a batch: its counts; with ``items`` also its loss; ``more`` sums under their names."""
        parts = {"counts": output.counts, **more}
        device = output.counts.device
        if items is not None:
            parts |= {"loss": output.loss_sum, "items": items}
        for name, part in parts.items():
            exact = part.detach().to(device, torch.float32 if device.type == "mps" else torch.float64)
            self._sums[name] = self._sums[name] + exact if name in self._sums else exact

    def told(self, accelerator: Any) -> dict[str, float]:
        """Return the figures over all processes: every one must ask, with the same names."""
        if not self._sums:
            return {}
        names, parts = zip(*sorted(self._sums.items()), strict=True)
        whole = accelerator.reduce(torch.cat([part.flatten() for part in parts]), "sum").tolist()
        sums: dict[str, list[float]] = {}
        for name, part in zip(names, parts, strict=True):
            sums[name] = whole[: part.numel()]
            whole = whole[part.numel() :]
        found = {}
        if "items" in sums:
            found["loss"] = sums["loss"][0] / max(1.0, sums["items"][0])
        if sums.get("rounds", [0.0])[0]:
            found["acceptance_length"] = sums["tokens"][0] / sums["rounds"][0]
        counts = sums["counts"]
        for depth, (pairs, hits, alpha, alive) in enumerate(zip(*(counts[part::4] for part in range(4)), strict=True)):
            shares = {"top1": hits, "alpha": alpha, "prefix": alive}
            found |= {f"{name}_{depth + 1}": share / max(1.0, pairs) for name, share in shares.items()}
        return found
