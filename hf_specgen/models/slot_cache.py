"""SlotCache: a ``transformers.Cache`` whose lanes have their own lengths.

Lane ``r`` keeps its keys and values compact at slots ``0 .. lengths[r] - 1`` of preallocated buffers. A forward
writes to ``lengths[r] + i``; rolling back lowers a length; a tree path is gathered to the front. A sliding layer
keeps a ring: absolute index ``j`` lives at slot ``j % capacity``. A layer that never wraps is the same ring, so one
formula serves all of them. Layers own what they keep (``cache_layers``); the cache knows lengths and passes.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor
from transformers import Cache, PretrainedConfig

from hf_specgen.models.cache_layers import AcceptedPath, LaneCopies, LaneLayer, Placement, Scatter, SlotGroup, SlotLayer
from hf_specgen.models.fixed_shapes import FixedShapes, StandingBuffers
from hf_specgen.models.layer_kinds import layer_kinds
from hf_specgen.models.visibility import Visibility

_SPARE = 32


class SlotCache(Cache):
    """Hold every layer's state and the committed length of every lane.

    ``lengths`` lives on the host (one list entry a lane) and mirrors ``row_lengths (R,)`` on the device. With
    ``shapes`` buffers, views and slots have the sizes of its list, and no number of the host decides where a pass is
    stored; without it they grow with the text.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        rows: int,
        device: torch.device | str = "cpu",
        reserve: int = 0,
        shapes: FixedShapes | None = None,
    ) -> None:
        """Prepare empty lanes for a model of ``config``; ``reserve`` slots are allocated at the first write."""
        self.lengths = [0] * rows
        self.device = torch.device(device)
        self.row_lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self.reserve = reserve
        self.shapes = shapes
        self.prefilling: list[int] | None = None
        self._left_padded = False
        self._width = 0
        self._held = 0
        self._standing = StandingBuffers()
        layers: list[LaneLayer] = []
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
        """Announce a pass over empty lanes: ``lengths[r]`` of its ``width`` columns are lane ``r``'s prompt."""
        self.prefilling = lengths
        self._left_padded = left_padded
        self._remember()
        for group in self.groups.values():
            self._grow(group, group.needed(max(width, self.reserve), self._room(1)))

    def prompt_source(self, group: SlotGroup, width: int) -> Tensor | None:
        """Return ``(R, slots)``: which prompt column each slot takes; None when columns are slots already."""
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

        ``held`` positions of the passes before, uncommitted, stay behind every lane's text, and these follow them: a
        tree that is grown level by level. Its first pass must announce the rest as ``undo``, so that rings have room.
        """
        self.prefilling = None
        self._width = width
        self._held = held
        if not undo and not held:
            self._remember()
        starts = [length + held for length in self.lengths]
        longest = max(starts)
        for group in self.groups.values():
            self._grow(group, group.needed(longest - held, held + self._room(width), undo))
            group.view = self._view(group, longest + width)
            group.placement = self._placement(group, starts)

    def masks(self, visibility: Visibility) -> dict[str, Tensor]:
        """Return, per layer kind, the ``(R or 1, 1, width, view)`` bool mask of the pass announced by ``begin``.

        ``visibility`` covers what is held and what is new; the mask is that of what is new. Where it covers less than
        was announced, the positions behind it see what the first new one sees.
        """
        masks = {}
        for group in self.groups.values():
            mask = visibility.mask(group.slots(self.row_lengths))[:, self._held :]
            missing = self._width - mask.shape[1]
            if missing:
                mask = torch.cat([mask, mask[:, :1].expand(-1, missing, -1)], 1)
            masks[group.kind] = mask[:, None]
        return masks

    def commit(self, counts: list[int], paths: Tensor | None = None, kept: Tensor | None = None) -> None:
        """Keep the first ``counts[r]`` positions of the last pass; with ``paths (R, K)`` keep root and those nodes.

        Entries of ``paths`` beyond a lane's count may hold anything in range. ``kept (R)`` are the counts where they
        are on the device already: nothing is copied there.
        """
        moves = paths is not None and paths.shape[1] > 0
        path = AcceptedPath(self.row_lengths, counts, paths if moves else None)
        for layer in self.layers:
            layer.commit(path)
        path.move()
        lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self._set_lengths(lengths, None if kept is None else self.row_lengths + kept)

    def crop_rows(self, lengths: list[int]) -> None:
        """Set every lane's committed length (a rollback; the slots behind are overwritten later)."""
        for layer in self.layers:
            layer.crop(lengths)
        self._set_lengths(lengths)

    def keep(self, order: list[int]) -> None:
        """Put lane ``order[i]`` at place ``i`` and forget the rest; ``order[i]`` is ``i`` or behind ``len(order)``."""
        for layer in self.layers:
            layer.keep(order)
        self._set_lengths([self.lengths[lane] for lane in order])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the lanes named by ``indices`` (int64 or bool)."""
        lanes = torch.arange(len(self.lengths))[indices.cpu()]
        super().batch_select_indices(lanes)
        self._set_lengths([self.lengths[lane] for lane in lanes.tolist()])

    @property
    def is_compileable(self) -> bool:
        """Return False: generate must not compile around lengths of its own."""
        return False

    def _remember(self) -> None:
        for layer in self.layers:
            layer.snapshot()

    def _set_lengths(self, lengths: list[int], on_device: Tensor | None = None) -> None:
        self.prefilling = None
        self.lengths = list(lengths)
        self.row_lengths = torch.tensor(self.lengths, device=self.device) if on_device is None else on_device

    def _room(self, width: int) -> int:
        """Return how many positions behind the text buffers must have room for."""
        return width if self.shapes is None else max(width, self.shapes.widest)

    def _view(self, group: SlotGroup, needed: int) -> int:
        """Return how many slots attention reads; rings of fixed shapes are read whole."""
        if self.shapes is None:
            return min(group.capacity, needed)
        return group.capacity if group.window is not None else min(group.capacity, self.shapes.slots_of(needed))

    def _placement(self, group: SlotGroup, starts: list[int]) -> Placement:
        """Choose how the pass is stored: by copies on a CPU unless shapes are fixed or a ring wraps, else by slots."""
        fits = max(starts) + self._width <= group.capacity
        if fits and self.shapes is None and self.device.type == "cpu":
            return LaneCopies(starts)
        offsets = torch.arange(self._held, self._held + self._width, device=self.device)
        slots = (self.row_lengths[:, None] + offsets) % group.capacity
        lanes = torch.arange(len(slots), device=self.device)[:, None]
        if self.shapes is None:
            return Scatter(lanes, slots)
        return Scatter(self._standing.write("lanes", lanes), self._standing.write(group.kind, slots))

    def _grow(self, group: SlotGroup, needed: int) -> None:
        if needed <= group.capacity:
            return
        larger = self._larger(group, needed)
        source = None
        if max(self.lengths) > group.capacity > 0:
            last = self.row_lengths[:, None] - 1
            slots = torch.arange(larger, device=self.device)
            source = (last - (last - slots) % larger) % group.capacity
        for layer in self.layers:
            layer.grow(group, larger, source)
        group.capacity = larger

    def _larger(self, group: SlotGroup, needed: int) -> int:
        """Return the capacity to grow to."""
        doubled = max(needed, 2 * group.capacity)
        if group.window is not None:  # attention reads the whole ring: no more than a draft beyond the window
            return max(needed, min(doubled, group.window + _SPARE))
        if self.shapes is not None:
            return self.shapes.slots_of(needed)
        if group.capacity >= self.reserve > 0:  # all that was asked for fits: a wide draft needs a little more
            return needed + _SPARE
        return doubled
