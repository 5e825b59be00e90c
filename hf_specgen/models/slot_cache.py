"""SlotCache: a ``transformers.Cache`` whose rows have their own lengths.

Row ``r`` keeps its keys and values compact at slots ``0 .. lengths[r] - 1`` of preallocated buffers. A forward
writes to ``lengths[r] + i``; rolling back lowers a length; a tree path is gathered to the front. A sliding layer
keeps a ring: absolute index ``j`` lives at slot ``j % capacity``. A layer that never wraps is the same ring, so one
formula serves all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from transformers import Cache, PretrainedConfig
from transformers.cache_utils import CacheLayerMixin

from hf_specgen import ops
from hf_specgen.models.layer_kinds import layer_kinds
from hf_specgen.round.records import Tree

_SPARE = 32


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
    start: int | None = None
    starts: list[int] | None = None
    slots: Tensor | None = None

    def needed(self, longest: int, width: int, undo: int = 0) -> int:
        """Return how many slots a pass of ``width`` positions needs when the longest row holds ``longest``."""
        linear = longest + width
        return linear if self.window is None else min(linear, self.window + undo + width)

    def visible(self, cache: SlotCache, tree: Tree) -> Tensor:
        """Return the ``(B or 1, S, view)`` bool mask of root and nodes over this group's slots."""
        lengths, chunked = cache.row_lengths, self.kind == "chunked_attention"
        return ops.tree_mask(lengths, tree.parents, self.capacity, self.view, self.window or 0, chunked, tree.ancestors)


class SlotLayer(CacheLayerMixin):
    """Store one layer's keys and values; all index arithmetic belongs to the group and the cache."""

    def __init__(self, cache: SlotCache, group: SlotGroup) -> None:
        super().__init__()
        self._cache = ref(cache)  # weak: a cycle would keep every call's buffers until the collector runs
        self.group = group
        self.is_sliding = group.window is not None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the link to the cache out: a copied or unpickled cache ties its own layers."""
        return {name: value for name, value in self.__dict__.items() if name != "_cache"}

    @property
    def cache(self) -> SlotCache:
        """Return the cache this layer belongs to."""
        cache = self._cache()
        assert cache is not None, "a layer outlived its cache"
        return cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate zeroed buffers (zeros, since a masked NaN still poisons a softmax product)."""
        shape = (key_states.shape[0], key_states.shape[1], self.group.capacity)
        self.keys = key_states.new_zeros(*shape, key_states.shape[-1])
        self.values = value_states.new_zeros(*shape, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store new states ``(B, H, width, D)`` and return what attention should read."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.cache.prefilling is not None:
            self._store_prompt(self.keys, key_states)
            self._store_prompt(self.values, value_states)
            return key_states, value_states
        self._store(self.keys, key_states)
        self._store(self.values, value_states)
        view = self.group.view
        return self.keys[:, :, :view], self.values[:, :, :view]

    def _store(self, buffer: Tensor, states: Tensor) -> None:
        group = self.group
        if group.start is not None:
            buffer[:, :, group.start : group.start + states.shape[2]] = states
        elif group.starts is not None:
            for row, start in enumerate(group.starts):
                buffer[row, :, start : start + states.shape[2]] = states[row]
        elif group.slots is not None:
            slots = group.slots.to(buffer.device)
            rows = torch.arange(len(slots), device=buffer.device)[:, None]
            buffer[rows, :, slots] = states.transpose(1, 2)

    def _store_prompt(self, buffer: Tensor, states: Tensor) -> None:
        source = self.cache.prompt_source(self.group, states.shape[2])
        if source is None:
            buffer[:, :, : states.shape[2]] = states
            return
        index = source.to(states.device)[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])
        buffer[:, :, : source.shape[1]] = states.gather(2, index)

    def resize(self, capacity: int, source: Tensor | None) -> None:
        """Move to buffers of ``capacity`` slots; ``source (B, capacity)`` names the old slot of each new one."""
        if not self.is_initialized:
            return
        for name in ("keys", "values"):
            old = self.__dict__[name]
            new = old.new_zeros(*old.shape[:2], capacity, old.shape[-1])
            if source is None:
                new[:, :, : old.shape[2]] = old
            else:
                index = source.to(old.device)[:, None, :, None].expand(-1, old.shape[1], -1, old.shape[3])
                new.copy_(old.gather(2, index))
            self.__dict__[name] = new

    def keep(self, order: list[int]) -> None:
        """Put row ``order[i]`` at place ``i`` and forget the rest; only rows behind ``len(order)`` move."""
        if not self.is_initialized:
            return
        for new, old in enumerate(order):
            if new != old:
                self.keys[new].copy_(self.keys[old])
                self.values[new].copy_(self.values[old])
        self.keys, self.values = self.keys[: len(order)], self.values[: len(order)]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows named."""
        if self.is_initialized:
            self.keys = self.keys[indices.to(self.keys.device)]
            self.values = self.values[indices.to(self.values.device)]

    def get_seq_length(self) -> int:
        """Return the longest committed length (models read it only when no position ids are given)."""
        return max(self.cache.lengths)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return key length and offset as the model's own mask building expects them during prefill."""
        return (query_length, 0) if self.cache.prefilling is not None else (self.group.view, 0)

    def get_max_length(self) -> int:
        """Return -1: the buffers grow."""
        return -1


class SlotCache(Cache):
    """Hold every layer's slots and the committed length of every row.

    ``lengths`` lives on the host (one list entry a row) and mirrors ``row_lengths (B,)`` on the device.
    """

    def __init__(
        self, config: PretrainedConfig, rows: int, device: torch.device | str = "cpu", reserve: int = 0
    ) -> None:
        """Prepare empty rows for a model of ``config``; ``reserve`` slots are allocated at the first write."""
        self.lengths = [0] * rows
        self.device = torch.device(device)
        self.row_lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self.reserve = reserve
        self.prefilling: list[int] | None = None
        self._left_padded = False
        layers: list[SlotLayer] = []
        self.groups: dict[tuple[str, int | None], SlotGroup] = {}
        for kind, window in layer_kinds(config):
            group = self.groups.setdefault((kind, window), SlotGroup(kind, window))
            layers.append(SlotLayer(self, group))
        super().__init__(layers=layers)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Tie copied layers to this cache; those of a shallow copy stay with the cache they serve."""
        self.__dict__.update(state)
        for layer in self.layers:
            layer.__dict__.setdefault("_cache", ref(self))

    def begin_prefill(self, width: int, lengths: list[int], left_padded: bool) -> None:
        """Announce a pass over empty rows: ``lengths[r]`` of its ``width`` columns are row ``r``'s prompt."""
        self.prefilling, self._left_padded = lengths, left_padded
        for group in self.groups.values():
            self._grow(group, group.needed(max(width, self.reserve), 1))

    def prompt_source(self, group: SlotGroup, width: int) -> Tensor | None:
        """Return ``(B, slots)``: which prompt column each slot takes; None when columns are slots already."""
        lengths = self.prefilling or []
        if width <= group.capacity and (not self._left_padded or min(lengths) == width):
            return None
        length = torch.tensor(lengths, device=self.device)[:, None]
        slots = torch.arange(min(group.capacity, width), device=self.device)
        index = (length - 1) - (length - 1 - slots) % group.capacity
        if self._left_padded:
            index = index + (width - length)
        return index.clamp(0, width - 1)

    def begin(self, width: int, undo: int = 0, held: int = 0) -> None:
        """Announce a pass of ``width`` positions; the newest ``undo`` committed tokens may yet be rolled back.

        ``held`` positions of the passes before, uncommitted, stay behind every row's text, and these follow them: a
        tree that is grown level by level. Its first pass must announce the rest as ``undo``, so that rings have room.
        """
        self.prefilling = None
        starts = [length + held for length in self.lengths]
        longest, shortest = max(starts), min(starts)
        for group in self.groups.values():
            self._grow(group, group.needed(longest - held, held + width, undo))
            group.view = min(group.capacity, longest + width)
            fits = longest + width <= group.capacity
            group.start = longest if fits and longest == shortest else None
            # on CPU a copy per row is eight times faster than one scattered write
            group.starts = starts if fits and self.device.type == "cpu" else None
            if group.start is None and group.starts is None:
                offsets = torch.arange(held, held + width, device=self.device)
                group.slots = (self.row_lengths[:, None] + offsets) % group.capacity

    def masks(self, tree: Tree) -> dict[str, Tensor]:
        """Return, per layer kind, the ``(B or 1, 1, S, view)`` bool mask of the pass announced by ``begin``.

        ``tree`` covers what is held and what is new; a pass that holds something uses the last ``width`` queries.
        """
        return {group.kind: group.visible(self, tree)[:, None] for group in self.groups.values()}

    def commit(self, counts: list[int], paths: Tensor | None = None) -> None:
        """Keep the first ``counts[r]`` positions of the last pass; with ``paths (B, K)`` keep root and those nodes.

        Entries of ``paths`` beyond a row's count may hold anything in range.
        """
        if paths is not None and paths.shape[1]:
            self._gather(paths)
        self.crop_rows([length + count for length, count in zip(self.lengths, counts, strict=True)])

    def crop_rows(self, lengths: list[int]) -> None:
        """Set every row's committed length (a rollback; the slots behind are overwritten later)."""
        self.prefilling = None
        self.lengths = list(lengths)
        self.row_lengths = torch.tensor(self.lengths, device=self.device)

    def keep(self, order: list[int]) -> None:
        """Put row ``order[i]`` at place ``i`` and forget the rest; ``order[i]`` is ``i`` or behind ``len(order)``."""
        for layer in self.layers:
            layer.keep(order)
        self.crop_rows([self.lengths[row] for row in order])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows named by ``indices`` (int64 or bool)."""
        rows = torch.arange(len(self.lengths))[indices.cpu()]
        super().batch_select_indices(rows)
        self.crop_rows([self.lengths[row] for row in rows.tolist()])

    @property
    def is_compileable(self) -> bool:
        """Return False: generate must not compile around per-row lengths."""
        return False

    def _gather(self, paths: Tensor) -> None:
        front = self.row_lengths[:, None] + 1
        source = front + paths
        destination = front + torch.arange(paths.shape[1], device=self.device)
        for group in self.groups.values():
            buffers: dict[torch.device, list[Tensor]] = {}
            for layer in self.layers:
                if layer.group is group and layer.is_initialized:
                    buffers.setdefault(layer.keys.device, []).extend((layer.keys, layer.values))
            for nearby in buffers.values():
                ops.move_slots(nearby, source % group.capacity, destination % group.capacity)

    def _grow(self, group: SlotGroup, needed: int) -> None:
        if needed <= group.capacity:
            return
        doubled = max(needed, 2 * group.capacity)
        if group.window is not None:  # attention reads the whole ring: no more than a draft beyond the window
            doubled = max(needed, min(doubled, group.window + _SPARE))
        elif group.capacity >= self.reserve > 0:  # all that was asked for fits: a wide draft needs a little more
            doubled = needed + _SPARE
        source = None
        if max(self.lengths) > group.capacity > 0:
            last = self.row_lengths[:, None] - 1
            slots = torch.arange(doubled, device=self.device)
            source = (last - (last - slots) % doubled) % group.capacity
        for layer in self.layers:
            if layer.group is group:
                layer.resize(doubled, source)
        group.capacity = doubled
