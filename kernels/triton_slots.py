"""Triton twins of the cache kernels: see ``reference_slots`` for what each one computes."""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (the arguments of a kernel have Triton's types, which have no stubs)

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_common import Variant, on_device

__all__ = ["move_slots", "tree_mask", "variants"]

_BITS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}  # what moves is bits: one variant a width for all dtypes
_TILES = {16: 128, 128: 32}  # channels of a tile by slots of a tile
_COLUMNS = 1024
# They change from round to round: no variant of its own for each.
_MOVING = ("rows", "slots", "count", "parents_stride", "nodes", "capacity", "window", "width", "pieces")


@triton.jit(do_not_specialize=_MOVING[:3])
def _move(  # noqa: PLR0913 - a kernel's arguments are its geometry
    table,
    source,
    destination,
    rows,
    heads,
    slots,
    width,
    count,
    BITS: tl.constexpr,
    ALIGNED: tl.constexpr,
    SLOTS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Move the slots of one row and head in one buffer, CHANNELS of its channels."""
    pieces = tl.cdiv(width, CHANNELS)
    program = tl.program_id(0)
    place = program // pieces
    piece = program % pieces
    row = place // heads % rows
    start = tl.load(table + place // (heads * rows)).to(tl.pointer_type(BITS))
    if ALIGNED:
        start = tl.multiple_of(start, 16)
    start += (place % (heads * rows)).to(tl.int64) * slots * width
    channel = piece * CHANNELS + tl.arange(0, CHANNELS)
    for first in range(0, count, SLOTS):
        k = first + tl.arange(0, SLOTS)
        taken = tl.load(source + row.to(tl.int64) * count + k, mask=k < count, other=0)
        put = tl.load(destination + row.to(tl.int64) * count + k, mask=k < count, other=0)
        moves = (taken != put)[:, None] & (channel < width)[None, :]
        bits = tl.load(start + taken[:, None] * width + channel[None, :], mask=moves)
        tl.debug_barrier()  # a slot may be one program's source and destination: all reads come first
        tl.store(start + put[:, None] * width + channel[None, :], bits, mask=moves)
        tl.debug_barrier()


@triton.jit(do_not_specialize=_MOVING)
def _mask(  # noqa: PLR0913 - a kernel's arguments are its geometry
    lengths,
    parents,
    mask,
    parents_stride,
    nodes,
    capacity,
    view,
    window,
    CHUNKED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Fill one query's row of the mask, COLUMNS slots of it."""
    pieces = tl.cdiv(view, COLUMNS)
    program = tl.program_id(0)
    place = program // pieces
    piece = program % pieces
    row = place // (nodes + 1)
    query = place % (nodes + 1)
    length = tl.load(lengths + row)
    column = piece * COLUMNS + tl.arange(0, COLUMNS)
    index = length + nodes - (length + nodes - column) % capacity  # for slots ahead of the newest: out of every range
    node = index - length  # scored coordinates: the root is 0
    seen = (node < 0) & (index >= 0)
    steps = tl.zeros_like(node)
    climbed = length * 0
    current = query.to(tl.int64)
    while current > 0:
        seen |= node == current
        steps = tl.where(node == current, climbed, steps)
        above = tl.load(parents + row * parents_stride + current - 1) + 1
        current = tl.minimum(above, current - 1)  # parents come before children, so the climb always ends
        climbed += 1
    seen |= node == 0
    steps = tl.where(node == 0, climbed, steps)
    if window > 0:
        position = length + climbed
        key = tl.where(node < 0, index, position - steps)
        if CHUNKED:
            seen &= (position // window) == (key // window)
        else:
            seen &= position - key < window
    tl.store(mask + place.to(tl.int64) * view + column, seen.to(tl.int8), mask=column < view)


@torch.library.custom_op("hf_specgen::move_slots", mutates_args=("buffers",))
def move_slots(buffers: list[Tensor], source: Tensor, destination: Tensor) -> None:
    """Copy slots in place, in one launch for all buffers of one shape and dtype: see ``reference_slots``."""
    alike: dict[tuple[torch.Size, torch.dtype, torch.device], list[Tensor]] = {}
    for buffer in buffers:
        assert buffer.is_contiguous(), "move_slots takes contiguous buffers"
        alike.setdefault((buffer.shape, buffer.dtype, buffer.device), []).append(buffer)
    count = source.shape[1]
    tile = min(_TILES) if count <= min(_TILES) else max(_TILES)
    for (shape, dtype, device), group in alike.items():
        rows, heads, slots, width = shape
        programs = len(group) * rows * heads * triton.cdiv(width, _TILES[tile])
        if not programs * count:
            continue
        addresses = tuple(buffer.data_ptr() for buffer in group)
        with on_device(group[0]):
            _move[(programs,)](
                _table(addresses, device),
                source.to(device).contiguous(),
                destination.to(device).contiguous(),
                rows,
                heads,
                slots,
                width,
                count,
                BITS=_BITS[dtype.itemsize],
                ALIGNED=not any(address % 16 for address in addresses),
                SLOTS=tile,
                CHANNELS=_TILES[tile],
            )


@move_slots.register_fake
def _(buffers: list[Tensor], source: Tensor, destination: Tensor) -> None:
    return None


@lru_cache(maxsize=64)
def _table(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """Keep the addresses of a cache's buffers on the device: they change only when the buffers grow."""
    return torch.tensor(addresses, device=device)


@torch.library.custom_op("hf_specgen::tree_mask", mutates_args=())
def tree_mask(
    lengths: Tensor,
    parents: Tensor,
    capacity: int,
    view: int,
    window: int,
    chunked: bool,
    ancestors: Tensor | None = None,
) -> Tensor:
    """Tell which slots root and nodes may see: see ``reference_slots``; ``ancestors`` is not needed here."""
    rows = max(len(lengths), len(parents))
    nodes = parents.shape[1]
    if not rows * view:
        return torch.empty(rows, nodes + 1, view, dtype=torch.bool, device=lengths.device)
    mask = torch.empty(rows, nodes + 1, view, dtype=torch.bool, device=lengths.device)
    parents = parents.contiguous()
    with on_device(mask):
        _mask[(rows * (nodes + 1) * triton.cdiv(view, _COLUMNS),)](
            lengths.expand(rows).contiguous(),
            parents,
            mask.view(torch.int8),
            nodes if len(parents) > 1 else 0,
            nodes,
            capacity,
            view,
            window,
            CHUNKED=chunked,
            COLUMNS=_COLUMNS,
        )
    return mask


@tree_mask.register_fake
def _(
    lengths: Tensor,
    parents: Tensor,
    capacity: int,
    view: int,
    window: int,
    chunked: bool,
    ancestors: Tensor | None = None,
) -> Tensor:
    rows = parents.shape[0] if lengths.shape[0] == 1 else lengths.shape[0]
    return lengths.new_empty(rows, parents.shape[1] + 1, view, dtype=torch.bool)


def variants() -> list[Variant]:
    """List what to compile where there is no GPU: name, kernel, signature, constants, warps."""
    move = dict.fromkeys(("table", "source", "destination"), "*i64")
    move |= dict.fromkeys(("rows", "heads", "slots", "width", "count"), "i32")
    mask = {"lengths": "*i64", "parents": "*i64", "mask": "*i8"}
    mask |= dict.fromkeys(("parents_stride", "nodes", "capacity", "view", "window"), "i32")
    tile = {"ALIGNED": True, "SLOTS": 16, "CHANNELS": _TILES[16]}
    long = {"ALIGNED": True, "SLOTS": 128, "CHANNELS": _TILES[128]}
    chunks = {"CHUNKED": True, "COLUMNS": _COLUMNS}
    return [
        ("move_slots bf16", _move, move, {"BITS": tl.int16, **tile}, 4),
        ("move_slots fp32", _move, move, {"BITS": tl.int32, **tile}, 4),
        ("move_slots bf16, over 16 slots", _move, move, {"BITS": tl.int16, **long}, 4),
        ("tree_mask", _mask, mask, {**chunks, "CHUNKED": False}, 4),
        ("tree_mask chunked", _mask, mask, chunks, 4),
    ]
