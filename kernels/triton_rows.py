"""Triton twins of ``uniform`` and ``row_stats``: coins, and the one full pass over every row of logits."""

# ruff: noqa: PLR0913 - a kernel takes its arrays and sizes one by one, and is no function to cut up
# mypy: allow-untyped-defs, allow-incomplete-defs
# (the arguments of a kernel have Triton's types, which have no stubs)

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import reference_rows
from .triton_common import (
    CHUNK,
    POINTER,
    STRIP,
    Variant,
    chunks_of,
    dense_rows,
    high_word,
    low_word,
    on_device,
    philox,
    scale_of,
    weights,
)

_COINS = 128  # rows of one program
_WARPS = 8


@triton.jit(do_not_specialize=["count", "stream"])  # they change from call to call: no variant of its own for each
def _uniform_kernel(SEED, ROW, POSITION, SIBLING, OUT, count, stream, HAS_SIBLING: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    seed = tl.load(SEED + place, inside, other=0)
    streams = tl.full((BLOCK,), 0, tl.int64) + stream
    if HAS_SIBLING:
        streams = streams | tl.load(SIBLING + place, inside, other=0)
    high, low, _, _ = philox(
        low_word(tl.load(POSITION + place, inside, other=0)),
        low_word(tl.load(ROW + place, inside, other=0)),
        low_word(streams),
        tl.full((BLOCK,), 0, tl.uint32),
        low_word(seed),
        high_word(seed),
    )
    bits = ((high >> 5).to(tl.int64) << 26) | (low >> 6).to(tl.int64)
    tl.store(OUT + place, bits.to(tl.float64) * (1.0 / 9007199254740992.0), inside)


@torch.library.custom_op("hf_specgen::uniform", mutates_args=())
def _uniform(seed: Tensor, row: Tensor, position: Tensor, stream: int, sibling: Tensor | None) -> Tensor:
    out = torch.empty(seed.shape, dtype=torch.float64, device=seed.device)
    count = seed.numel()
    if count:
        places = [tensor.contiguous() for tensor in (seed, row, position, seed if sibling is None else sibling)]
        with on_device(seed):
            _uniform_kernel[triton.cdiv(count, _COINS),](
                *places,
                out,
                count,
                stream,
                HAS_SIBLING=sibling is not None,
                BLOCK=_COINS,
                num_warps=_WARPS // 2,
                enable_fp_fusion=False,
            )
    return out


@_uniform.register_fake
def _(seed: Tensor, row: Tensor, position: Tensor, stream: int, sibling: Tensor | None) -> Tensor:
    return seed.new_empty(seed.shape, dtype=torch.float64)


def uniform(seed: Tensor, row: Tensor, position: Tensor, use: int, sibling: int | Tensor = 0) -> Tensor:
    """Draw one coin of 53 bits for each ``(seed, row, position)``, bit-equal to ``common.uniform``."""
    if isinstance(sibling, Tensor):
        return _uniform(seed, row, position, use << 24, sibling)
    return _uniform(seed, row, position, use << 24 | sibling, None)


@triton.jit(do_not_specialize=["chunks", "strips"])
def _row_stats_kernel(
    X, TEMPERATURE, MAXIMA, SUMS, BEST, PARTS, stride, vocab, chunks, strips, STRIPS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    strip = tl.arange(0, CHUNK // STRIP)
    place = chunk * CHUNK + strip[:, None] * STRIP + tl.arange(0, STRIP)[None, :]
    x = tl.load(X + row * stride + place, place < vocab, other=-math.inf).to(tl.float32)
    parts = tl.max(x, 1)
    top = tl.max(parts, 0)
    temperature = tl.load(TEMPERATURE + row)
    best = -1
    if temperature > 0.0:
        anchor = tl.where(top == -math.inf, 0.0, top)
        total = tl.sum(tl.sum(weights(x, anchor, scale_of(temperature)), 1), 0)
    else:
        broken = tl.max(tl.max(((x != x) | (x == math.inf)).to(tl.int32), 1), 0)
        total = tl.where(broken > 0, math.nan, 1.0)
        best = tl.min(tl.min(tl.where(x == top, place, vocab), 1), 0)
    out = row * chunks + chunk
    tl.store(MAXIMA + out, top)
    tl.store(SUMS + out, total)
    tl.store(BEST + out, best)
    if STRIPS:
        number = chunk * (CHUNK // STRIP) + strip
        tl.store(PARTS + row * strips + number, parts, number < strips)


@torch.library.custom_op("hf_specgen::row_stats", mutates_args=())
def _row_stats(logits: Tensor, temperature: Tensor, strips: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logits, (count, vocab) = dense_rows(logits), logits.shape
    chunks, parts = chunks_of(vocab)
    out = _empty_stats(logits, chunks, parts if strips else 0)
    if count:
        with on_device(logits):
            _row_stats_kernel[count, chunks](
                logits,
                temperature,
                *out,
                logits.stride(0),
                vocab,
                chunks,
                parts,
                STRIPS=strips,
                num_warps=_WARPS,
                enable_fp_fusion=False,
            )
    return out


@_row_stats.register_fake
def _(logits: Tensor, temperature: Tensor, strips: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    chunks = -(-logits.shape[1] // 8192)
    parts = -(-logits.shape[1] // 128)
    return _empty_stats(logits, chunks, parts if strips else 0)


def _empty_stats(logits: Tensor, chunks: int, parts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    maxima = logits.new_empty(logits.shape[0], chunks, dtype=torch.float32)
    best = torch.empty_like(maxima, dtype=torch.int32)
    return maxima, torch.empty_like(maxima), best, logits.new_empty(logits.shape[0], parts, dtype=torch.float32)


def row_stats(logits: Tensor, temperature: Tensor, strips: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Read every row once, see ``reference_rows.row_stats``, which float64 logits are handed to."""
    if logits.dtype == torch.float64:
        return reference_rows.row_stats(logits, temperature, strips)
    return _row_stats(logits, temperature.contiguous(), strips)


def variants() -> list[Variant]:
    """List what the kernels of this module are compiled to."""
    coins = dict.fromkeys(("SEED", "ROW", "POSITION", "SIBLING"), "*i64")
    coins |= {"OUT": "*fp64", "count": "i32", "stream": "i64", "HAS_SIBLING": "constexpr", "BLOCK": "constexpr"}
    found: list[Variant] = [
        (f"uniform{' siblings' * has}", _uniform_kernel, coins, {"HAS_SIBLING": has, "BLOCK": _COINS}, _WARPS // 2)
        for has in (False, True)
    ]
    for dtype, pointer in POINTER.items():
        signature: dict[str, Any] = {"X": pointer, **dict.fromkeys(("TEMPERATURE", "MAXIMA", "SUMS"), "*fp32")}
        signature |= {"BEST": "*i32", "PARTS": "*fp32", "stride": "i32", "vocab": "i32", "chunks": "i32"}
        signature |= {"strips": "i32", "STRIPS": "constexpr"}
        for strips in (False, True):
            name = f"row_stats {str(dtype).removeprefix('torch.')}{' strips' if strips else ''}"
            found.append((name, _row_stats_kernel, signature, {"STRIPS": strips}, _WARPS))
    return found
