"""Triton twin of ``tree_attention``: flash decoding for few queries, the slots split over programs.

A program reads one split of one key/value head's slots once, for a tile of all queries that share the head. Splits
have a fixed length, so a row's bits depend neither on its neighbours nor on how long they are.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (the arguments of a kernel have Triton's types, which have no stubs)

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import reference_attention
from .triton_common import LOG2E, POINTER, Variant, on_device

__all__ = ["tree_attention", "variants"]

_SPLIT = 512
_FEW = 128  # wider passes read a prompt: their tiles fill a card, and their partial sums would fill its memory
_STEP = tl.constexpr(16)  # splits that are added up at once
# These change from round to round: a kernel must not be compiled for the parity of one of them.
_MOVING = ("mask_row", "mask_step", "shared", "group", "scored", "slots", "span", "splits")


@triton.jit
def _tanh(x):
    """Compute tanh from exp2: the exponential loses what is small, a series takes over there."""
    square = x * x
    series = 1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835))))
    tail = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    far = (1.0 - tail) / (1.0 + tail)
    return tl.where(tl.abs(x) < 0.3, x * series, tl.where(x < 0.0, -far, far))


@triton.jit
def _seen(MASK, query_stride, query, slot, there, end):
    """Load which slots the queries of a tile see: ``(BLOCK_M, BLOCK_N)`` int8."""
    inside = there[:, None] & (slot < end)[None, :]
    return tl.load(MASK + (query[:, None] * query_stride + slot[None, :]), inside, other=0)


@triton.jit
def _visible(  # noqa: PLR0913 - a kernel
    MASK, query_stride, query, there, start, end, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Find the blocks of a split outside of which no query of the tile sees a slot: nothing else is read."""
    first = end
    last = start
    for at in tl.range(start, end, BLOCK_N):
        seen = _seen(MASK, query_stride, query, at + tl.arange(0, BLOCK_N), there, end)
        some = tl.max(tl.max(seen.to(tl.int32), 1), 0) > 0
        first = tl.where(some & (first > at), at, first)
        last = tl.where(some, at + BLOCK_N, last)
    return first, tl.minimum(last, end)


@triton.jit
def _rows(X, step, place, inside, channel, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load keys or values; a head that fills its tile is not compared channel by channel."""
    mask = inside[:, None] if D == BLOCK_D else inside[:, None] & (channel < D)[None, :]
    return tl.load(X + (place[:, None] * step + channel[None, :]), mask, other=0.0)


@triton.jit
def _product(a, b, acc, UPCAST: tl.constexpr):
    """Add ``a b`` to ``acc`` in float32, float32 factors unrounded."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit(do_not_specialize=_MOVING)
def _split_kernel(  # noqa: PLR0913 - a kernel
    Q, K, V, MASK, SINKS, OUT, MAXIMA, SUMS,
    q_row, q_head, q_step, k_row, k_head, k_step, v_row, v_head, v_step, mask_row, mask_step,
    shared, group, scored, slots, span, splits, scale, softcap,
    CAPPED: tl.constexpr, SINK: tl.constexpr, WHOLE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    queries = group * scored
    tiles = tl.cdiv(queries, BLOCK_M)
    program = tl.program_id(0)
    split = tl.program_id(1)
    tile = program % tiles
    pair = program // tiles
    row = (pair // shared).to(tl.int64)
    kv = (pair % shared).to(tl.int64)
    place = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    there = place < queries
    # of the head group, of the draft
    member = place // scored
    step = place % scored
    channel = tl.arange(0, BLOCK_D)
    out_channel = tl.arange(0, BLOCK_DV)
    offset = member * q_head + step * q_step  # within a row of the batch 32 bits are enough
    q = tl.load(
        Q + (row * q_row + kv * group * q_head) + (offset[:, None] + channel[None, :]),
        there[:, None] & (channel < D)[None, :],
        other=0.0,
    )

    start = split * span
    end = tl.minimum(start + span, slots)
    mask = MASK + row * mask_row
    first, last = _visible(mask, mask_step, step, there, start, end, BLOCK_M, BLOCK_N)
    top = tl.full((BLOCK_M,), -math.inf, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    inner = tl.arange(0, BLOCK_N)
    for at in tl.range(first, last, BLOCK_N, num_stages=2):
        slot = at + inner
        seen = _seen(mask, mask_step, step, slot, there, last) != 0
        base = tl.full((), 0, tl.int64) + at  # the interpreter counts in Python numbers, which have no `to`
        keys = K + row * k_row + kv * k_head + base * k_step
        k = _rows(keys, k_step, inner, slot < last, channel, D, BLOCK_D)
        logits = _product(q, tl.trans(k), tl.zeros((BLOCK_M, BLOCK_N), tl.float32), UPCAST) * scale
        if CAPPED:
            logits = _tanh(logits / softcap) * softcap
        logits = tl.where(seen, logits * LOG2E, -math.inf)
        above = tl.maximum(top, tl.max(logits, 1))
        safe = tl.where(above == -math.inf, 0.0, above)  # -inf - -inf is NaN
        weight = tl.exp2(logits - safe[:, None])
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(weight, 1)
        values = V + row * v_row + kv * v_head + base * v_step
        v = _rows(values, v_step, inner, slot < last, out_channel, DV, BLOCK_DV)
        acc = _product(weight.to(v.dtype), v, acc * shrink[:, None], UPCAST)
        top = above

    if WHOLE:
        best = top
        sink = tl.full((BLOCK_M,), -math.inf, tl.float32)
        if SINK:
            sink = tl.load(SINKS + kv * group + member, there, other=0.0).to(tl.float32) * LOG2E
            best = tl.maximum(top, sink)
        safe = tl.where(best == -math.inf, 0.0, best)
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.exp2(sink - safe)
        out = acc * shrink[:, None] / tl.where(total > 0.0, total, 1.0)[:, None]
        # the output lies as (B, S, Hq, Dv)
        heads = shared * group
        base = OUT + (row * scored * heads + kv * group) * DV
        offset = (step * heads + member) * DV
        store = there[:, None] & (out_channel < DV)[None, :]
        tl.store(base + (offset[:, None] + out_channel[None, :]), out.to(OUT.dtype.element_ty), store)
    else:
        base = (pair.to(tl.int64) * splits + split) * queries
        tl.store(MAXIMA + base + place, top, there)
        tl.store(SUMS + base + place, total, there)
        store = (there & (top > -math.inf))[:, None] & (out_channel < DV)[None, :]
        tl.store(OUT + base * DV + (place[:, None] * DV + out_channel[None, :]), acc, store)


@triton.jit(do_not_specialize=_MOVING)
def _combine_kernel(  # noqa: PLR0913 - a kernel
    PARTIAL, MAXIMA, SUMS, SINKS, OUT, shared, group, scored, splits,
    SINK: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    queries = group * scored
    program = tl.program_id(0)
    place = program % queries
    pair = (program // queries).to(tl.int64)
    row = pair // shared
    head = (pair % shared) * group + place // scored
    channel = tl.arange(0, BLOCK_DV)
    inner = tl.arange(0, _STEP)
    best = tl.full((_STEP,), -math.inf, tl.float32)
    for at in tl.range(0, splits, _STEP):
        partial = (pair * splits + at + inner) * queries + place
        best = tl.maximum(best, tl.load(MAXIMA + partial, at + inner < splits, other=-math.inf))
    top = tl.max(best, 0)
    sink = -math.inf
    if SINK:
        sink = tl.load(SINKS + head).to(tl.float32) * LOG2E
        top = tl.maximum(top, sink)
    safe = tl.where(top == -math.inf, 0.0, top)
    total = tl.zeros((_STEP,), tl.float32)
    acc = tl.zeros((BLOCK_DV,), tl.float32)
    for at in tl.range(0, splits, _STEP):
        partial = (pair * splits + at + inner) * queries + place
        inside = at + inner < splits
        shrink = tl.exp2(tl.load(MAXIMA + partial, inside, other=-math.inf) - safe)
        total += shrink * tl.load(SUMS + partial, inside, other=0.0)
        # a split that sees nothing has written no sum
        read = (inside & (shrink > 0.0))[:, None] & (channel < DV)[None, :]
        part = tl.load(PARTIAL + partial[:, None] * DV + channel[None, :], read, other=0.0)
        acc += tl.sum(part * shrink[:, None], 0)
    mass = tl.sum(total, 0) + tl.exp2(sink - safe)
    out = acc / tl.where(mass > 0.0, mass, 1.0)
    offset = ((row * scored + place % scored) * (shared * group) + head) * DV
    tl.store(OUT + offset + channel, out.to(OUT.dtype.element_ty), channel < DV)


def _blocks(dim: int, value_dim: int, queries: int, wide: bool) -> dict[str, int]:
    """Choose a tile by the shape of a head and of the draft, never by the batch; ``wide`` elements take four bytes."""
    block_d, block_dv = (max(16, triton.next_power_of_2(size)) for size in (dim, value_dim))
    large = max(block_d, block_dv) > 128
    most = 16 if wide else 32 if large else 64
    return {
        "D": dim,
        "DV": value_dim,
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
        "BLOCK_M": min(most, max(16, triton.next_power_of_2(queries))),
        "BLOCK_N": 16 if wide and large else 32,
    }


def _warps(blocks: dict[str, int], wide: bool) -> int:
    """Choose the warps with which no tile of ``_blocks`` spills a register."""
    large = max(blocks["BLOCK_D"], blocks["BLOCK_DV"]) > 128
    return 8 if wide or large or blocks["BLOCK_M"] > 16 else 4


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


@torch.library.custom_op("hf_specgen::tree_attention", mutates_args=())
def _tree_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    rows, heads, width, dim = query.shape
    shared = key.shape[1]
    slots = key.shape[2]
    value_dim = value.shape[3]
    query = _dense(query)
    key = _dense(key)
    value = _dense(value)
    seen = _dense(mask.view(torch.uint8))
    out = query.new_empty(rows, width, heads, value_dim)
    if not out.numel():
        return out.transpose(1, 2)
    group = heads // shared
    queries = group * width
    pairs = rows * shared
    wide = query.element_size() == 4
    blocks = _blocks(dim, value_dim, queries, wide)
    few = width <= _FEW
    splits = triton.cdiv(slots, _SPLIT) if few else 1
    whole = splits <= 1
    span = _SPLIT if few else triton.cdiv(slots, blocks["BLOCK_N"]) * blocks["BLOCK_N"]
    stats = query.new_empty(0 if whole else 2 * pairs * splits * queries, dtype=torch.float32)
    maxima = stats[: len(stats) // 2]
    sums = stats[len(stats) // 2 :]
    sink = query if sinks is None else sinks.contiguous()
    target = out if whole else query.new_empty(pairs, splits, queries, value_dim, dtype=torch.float32)
    strides = [stride for tensor in (query, key, value) for stride in tensor.stride()[:3]]
    mask_row = seen.stride(0) if len(seen) > 1 else 0
    with on_device(query):
        _split_kernel[(pairs * triton.cdiv(queries, blocks["BLOCK_M"]), max(splits, 1))](
            query, key, value, seen, sink, target, maxima, sums, *strides, mask_row, seen.stride(2),
            shared, group, width, slots, span, splits, scale, softcap,
            CAPPED=softcap != 0, SINK=sinks is not None, WHOLE=whole, **blocks,
            UPCAST=not query.is_cuda,  # the interpreter, alone on a CPU, multiplies the bits of a bfloat16
            num_warps=_warps(blocks, wide), enable_fp_fusion=False,
        )  # fmt: skip
        if not whole:
            _combine_kernel[pairs * queries,](
                target, maxima, sums, sink, out, shared, group, width, splits,
                SINK=sinks is not None, DV=value_dim, BLOCK_DV=blocks["BLOCK_DV"], num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
    return out.transpose(1, 2)


@_tree_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    rows, heads, width, _ = query.shape
    return query.new_empty(rows, width, heads, value.shape[3]).transpose(1, 2)


def tree_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """Attend as ``reference_attention.tree_attention`` does, summing in float32.

    Softmax weights are rounded to the dtype of ``value``, logits are not. Other dtypes and heads wider than 256 take
    the reference.
    """
    usable = query.dtype == key.dtype == value.dtype and query.dtype in POINTER
    if not usable or max(query.shape[3], value.shape[3]) > 256:
        return reference_attention.tree_attention(query, key, value, mask, scale, softcap, sinks)
    out: Tensor = _tree_attention(query, key, value, mask, scale, softcap, sinks)
    return out


def variants() -> list[Variant]:
    """List what the kernels of this module are compiled to, for the heads and drafts that models have."""
    kinds_of: list[tuple[torch.dtype, int, int, tuple[str, ...]]] = [
        *((torch.bfloat16, dim, dim, ("split",)) for dim in (80, 96, 128)),
        (torch.bfloat16, 64, 64, ("split", "sinks")),
        (torch.bfloat16, 192, 128, ("split",)),
        (torch.bfloat16, 256, 256, ("split", "capped")),
        (torch.float16, 128, 128, ("split",)),
        (torch.float32, 128, 128, ("split",)),
    ]
    found: list[Variant] = []
    for dtype, dim, value_dim, kinds in kinds_of:
        wide = dtype == torch.float32
        pointer = POINTER[dtype]
        dtype_name = str(dtype).removeprefix("torch.")
        for queries in (16, 32, 64):
            blocks = _blocks(dim, value_dim, queries, wide)
            for kind in kinds if blocks["BLOCK_M"] == queries else ():
                capped = kind == "capped"
                flags = {"CAPPED": capped, "SINK": kind == "sinks", "WHOLE": kind != "split", "UPCAST": False}
                constants: dict[str, Any] = {**flags, **blocks}
                types = _types(_split_kernel, constants, pointer, "*fp32" if kind == "split" else pointer)
                name = f"tree_attention {dtype_name} {dim}/{value_dim} {queries} {kind}"
                found.append((name, _split_kernel, types, constants, _warps(blocks, wide)))
        if dim == 128:
            constants = {"SINK": True, "DV": dim, "BLOCK_DV": dim}
            types = _types(_combine_kernel, constants, pointer, pointer)
            found.append((f"tree_attention {dtype_name} combine", _combine_kernel, types, constants, 4))
    return found


def _types(kernel: Any, constants: dict[str, Any], pointer: str, out: str) -> dict[str, str]:
    """Give every argument of a kernel its type."""
    known = dict.fromkeys(constants, "constexpr") | dict.fromkeys(("Q", "K", "V", "SINKS"), pointer)
    known |= {"MASK": "*u8", "OUT": out, "PARTIAL": "*fp32", "MAXIMA": "*fp32", "SUMS": "*fp32"}
    known |= {"scale": "fp32", "softcap": "fp32"}
    return {name: known.get(name, "i32") for name in kernel.arg_names}
