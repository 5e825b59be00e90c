"""What one layer of a model keeps of every lane, and how it follows what the target accepts.

Keys and values in slots are one kind of layer (``SlotLayer``); a recurrent state is another subclass of ``LaneLayer``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from hf_specgen import ops
from hf_specgen.models.visibility import SlotMap


class LaneCache(Protocol):
    """Hold the layers: what a layer asks of its cache."""

    lengths: list[int]
    prefilling: list[int] | None

    def prompt_source(self, group: SlotGroup, width: int) -> Tensor | None:
        """Return which prompt column each slot takes."""
        ...


class AcceptedPath:
    """Tell every layer what was kept of the last pass, and move the slots of all of them together.

    ``counts[r]`` positions of lane r were kept: the first ones, or the root and ``nodes (R, K)``. Entries of ``nodes``
    beyond a lane's count may hold anything in range.
    """

    def __init__(self, lengths: Tensor, counts: list[int], nodes: Tensor | None) -> None:
        self.counts = counts
        self.nodes = nodes
        self._lengths = lengths
        self._buffers: dict[tuple[int, torch.device], list[Tensor]] = {}

    def gather(self, capacity: int, *buffers: Tensor) -> None:
        """Ask for the path's slots to be moved to the front in these buffers ``(R, H, capacity, D)``."""
        self._buffers.setdefault((capacity, buffers[0].device), []).extend(buffers)

    def move(self) -> None:
        """Move what was asked for: one launch for all buffers of a capacity and device."""
        if self.nodes is None:
            return
        front = self._lengths[:, None] + 1
        source = front + self.nodes
        destination = front + torch.arange(self.nodes.shape[1], device=front.device)
        for (capacity, _), buffers in self._buffers.items():
            ops.move_slots(buffers, source % capacity, destination % capacity)


class LaneLayer(CacheLayerMixin):
    """Keep one layer's state of every lane. The cache announces every pass and says what is kept of it."""

    is_sliding = False

    def __init__(self, cache: LaneCache) -> None:
        super().__init__()
        self._cache = ref(cache)  # weak: a cycle would keep every call's buffers until the collector runs

    def __getstate__(self) -> dict[str, Any]:
        """Leave the link to the cache out: a copied or unpickled cache ties its own layers."""
        return {name: value for name, value in self.__dict__.items() if name != "_cache"}

    @property
    def cache(self) -> LaneCache:
        """Return the cache this layer belongs to."""
        cache = self._cache()
        assert cache is not None, "a layer outlived its cache"
        return cache

    def get_seq_length(self) -> int:
        """Return the longest committed length (models read it only when no position ids are given)."""
        return max(self.cache.lengths)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return key length and offset as the model's own mask building expects them during prefill."""
        return query_length, 0

    def get_max_length(self) -> int:
        """Return -1: a layer holds as many tokens as are written."""
        return -1

    def grow(self, group: SlotGroup, capacity: int, source: Tensor | None) -> None:
        """Move to ``capacity`` slots where the layer belongs to ``group``; states without slots have nothing to do.

        ``source (R, capacity)`` names the old slot of each new one; None: each keeps its own.
        """

    def snapshot(self) -> None:
        """Remember the committed state: what is written from now on may be taken back up to here, in any lane."""

    def commit(self, path: AcceptedPath) -> None:
        """Keep what ``path`` says of the last pass and forget the rest of it."""
        raise NotImplementedError

    def crop(self, lengths: list[int]) -> None:
        """Return to ``lengths[r]`` committed tokens, none of them before the snapshot."""
        raise NotImplementedError

    def keep(self, order: list[int]) -> None:
        """Put lane ``order[i]`` at place ``i`` and forget the rest; only lanes behind ``len(order)`` move."""
        raise NotImplementedError


class Placement(Protocol):
    """Know where the positions of the pass that is under way are stored."""

    def store(self, buffer: Tensor, states: Tensor) -> None:
        """Write ``states (R, H, S, D)`` into ``buffer (R, H, capacity, D)``."""
        ...


@dataclass(frozen=True)
class LaneCopies:
    """Store a pass by copies, lane by lane where they differ: on a CPU eight times as fast as one scattered write."""

    starts: list[int]

    def store(self, buffer: Tensor, states: Tensor) -> None:
        """Write each lane's positions side by side from its start on."""
        width = states.shape[2]
        first = self.starts[0]
        if min(self.starts) == max(self.starts):
            buffer[:, :, first : first + width] = states
            return
        for row, start in enumerate(self.starts):
            buffer[row, :, start : start + width] = states[row]


@dataclass(frozen=True)
class Scatter:
    """Store a pass by one scattered write: no number of the host decides where.

    Shapes: ``lanes (R, 1)``: 0, 1, 2, ...; ``slots (R, S)``.
    """

    lanes: Tensor
    slots: Tensor

    def store(self, buffer: Tensor, states: Tensor) -> None:
        """Write position s of lane r to its slot."""
        lanes = self.lanes.to(buffer.device)
        slots = self.slots.to(buffer.device)
        buffer[lanes, :, slots] = states.transpose(1, 2)


@dataclass
class SlotGroup:
    """Describe the layers that share one visibility rule, and the pass that is under way.

    ``window`` is the sliding window or the chunk size, None for full attention. A ring of ``capacity`` slots needs
    ``capacity >= window + undo + width``: the pass at length L overwrites indices up to ``L + width - 1 - capacity``,
    and after a rollback of ``undo`` tokens the oldest index that a query may see is above ``L - undo - window``.
    """

    kind: str
    window: int | None
    capacity: int = 0
    view: int = 0
    placement: Placement | None = None

    def needed(self, longest: int, width: int, undo: int = 0) -> int:
        """Return how many slots a pass of ``width`` positions needs when the longest lane holds ``longest``."""
        linear = longest + width
        return linear if self.window is None else min(linear, self.window + undo + width)

    def slots(self, lengths: Tensor) -> SlotMap:
        """Return where these layers keep lanes of ``lengths (R)``."""
        return SlotMap(lengths, self.capacity, self.view, self.window or 0, self.kind == "chunked_attention")


class SlotLayer(LaneLayer):
    """Store one layer's keys and values; all index arithmetic belongs to the group and the cache."""

    def __init__(self, cache: LaneCache, group: SlotGroup) -> None:
        super().__init__(cache)
        self.group = group
        self.is_sliding = group.window is not None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate zeroed buffers (zeros, since a masked NaN still poisons a softmax product)."""
        shape = (key_states.shape[0], key_states.shape[1], self.group.capacity)
        self.keys = key_states.new_zeros(*shape, key_states.shape[-1])
        self.values = value_states.new_zeros(*shape, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store new states ``(R, H, width, D)`` and return what attention should read."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.cache.prefilling is not None:
            self._store_prompt(self.keys, key_states)
            self._store_prompt(self.values, value_states)
            return key_states, value_states
        self.store(key_states, value_states)
        view = self.group.view
        return self.keys[:, :, :view], self.values[:, :, :view]

    def store(self, key_states: Tensor, value_states: Tensor) -> None:
        """Write the pass that was announced behind every lane's text."""
        placement = self.group.placement
        assert placement is not None, "no pass was announced"
        placement.store(self.keys, key_states)
        placement.store(self.values, value_states)

    def commit(self, path: AcceptedPath) -> None:
        """Move an accepted path behind the root; kept positions in a row are where they belong already."""
        if path.nodes is not None and self.is_initialized:
            path.gather(self.group.capacity, self.keys, self.values)

    def crop(self, lengths: list[int]) -> None:
        """Do nothing: slots behind a lane's length are seen by nobody and overwritten later."""

    def grow(self, group: SlotGroup, capacity: int, source: Tensor | None) -> None:
        """Move to buffers of ``capacity`` slots."""
        if group is self.group and self.is_initialized:
            self.keys = _resized(self.keys, capacity, source)
            self.values = _resized(self.values, capacity, source)

    def keep(self, order: list[int]) -> None:
        """Put lane ``order[i]`` at place ``i``; nothing is allocated."""
        if not self.is_initialized:
            return
        for new, old in enumerate(order):
            if new != old:
                self.keys[new].copy_(self.keys[old])
                self.values[new].copy_(self.values[old])
        self.keys = self.keys[: len(order)]
        self.values = self.values[: len(order)]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the lanes named."""
        if self.is_initialized:
            self.keys = self.keys[indices.to(self.keys.device)]
            self.values = self.values[indices.to(self.values.device)]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return key length and offset as the model's own mask building expects them during prefill."""
        return (query_length, 0) if self.cache.prefilling is not None else (self.group.view, 0)

    def _store_prompt(self, buffer: Tensor, states: Tensor) -> None:
        source = self.cache.prompt_source(self.group, states.shape[2])
        if source is None:
            buffer[:, :, : states.shape[2]] = states
            return
        buffer[:, :, : source.shape[1]] = _taken(states, source)


def _resized(buffer: Tensor, capacity: int, source: Tensor | None) -> Tensor:
    """Return a larger buffer with the old slots in their new places."""
    if source is not None:
        return _taken(buffer, source)
    larger = buffer.new_zeros(*buffer.shape[:2], capacity, buffer.shape[-1])
    larger[:, :, : buffer.shape[2]] = buffer
    return larger


def _taken(states: Tensor, source: Tensor) -> Tensor:
    """Take columns ``source (R, T)`` of ``states (R, H, S, D)``."""
    index = source.to(states.device)[:, None, :, None]
    return states.gather(2, index.expand(-1, states.shape[1], -1, states.shape[3]))
