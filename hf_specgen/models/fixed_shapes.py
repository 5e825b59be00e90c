"""FixedShapes: passes of few shapes over standing buffers, so that a compiler or CUDA graph records each shape once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Step = Callable[..., Any]
"""The part of a pass that only touches the device: ``CachedModel`` calls it once a pass, with tensors alone."""


def run_eagerly(step: Step) -> Step:
    """Return the step as it is."""
    return step


@dataclass(frozen=True)
class FixedShapes:
    """Say which shapes passes may have. Without this record (the default) every pass is as wide as its own draft.

    The positions of a pass are padded to the smallest of ``widths`` that holds them; a wider pass keeps its width.
    Finished rows leave their lanes only when the rest fits the next smaller number of ``lanes``. Buffers and what
    attention reads of them are counted in ``granule`` slots, doubled until they suffice; a ring is read whole.
    ``capture`` receives the step of a pass and returns what runs instead of it, for instance
    ``functools.partial(torch.compile, fullgraph=True)``.

    A compiler with ``fullgraph=True`` refuses passes of drafters that read hidden states: their hooks are Python.
    Padding never changes a text: what is added is seen by nobody and overwritten by the next pass.
    """

    widths: tuple[int, ...] = (1, 2, 3, 5, 9, 17, 33, 65)
    lanes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    granule: int = 512
    capture: Callable[[Step], Step] = run_eagerly

    @property
    def widest(self) -> int:
        """Return the largest width that is padded to: buffers have room for it behind every text."""
        return max(self.widths)

    def width_of(self, asked: int) -> int:
        """Return how many positions a pass of ``asked`` positions computes."""
        return min((width for width in self.widths if width >= asked), default=asked)

    def lanes_of(self, unfinished: int, present: int) -> int:
        """Return how many of the ``present`` lanes a pass keeps for ``unfinished`` rows."""
        return min((count for count in self.lanes if unfinished <= count < present), default=present)

    def slots_of(self, needed: int) -> int:
        """Return the smallest number of slots on the list that holds ``needed``."""
        slots = self.granule
        while slots < needed:
            slots *= 2
        return slots


class StandingBuffers:
    """Keep one tensor per name and shape, at one address: graphs read there what every pass writes."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], Tensor] = {}

    def write(self, name: str, value: Tensor) -> Tensor:
        """Copy a value to where values of its name and shape stand."""
        key = (name, value.dtype, *value.shape)
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = self._buffers[key] = value.clone(memory_format=torch.contiguous_format)
        else:
            buffer.copy_(value)
        return buffer
