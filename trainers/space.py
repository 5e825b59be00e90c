"""Space: memory that is used again, chunk after chunk."""

from __future__ import annotations

import torch
from torch import Tensor


class Space:
    """Lend tensors that every chunk uses again: on a CPU, fresh pages cost more than what is computed in them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lent: dict[str, Tensor] = {}

    def lend(self, name: str, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Return ``(rows, width)`` of junk: the same memory for the same name."""
        known = self._lent.get(name)
        if known is None or known.numel() < rows * width or known.dtype != dtype:
            known = self._lent[name] = torch.empty(rows * width, dtype=dtype, device=self._device)
        return known[: rows * width].view(rows, width)
