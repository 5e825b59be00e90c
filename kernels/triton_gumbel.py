"""Triton twin of ``gumbel_pick``: argmax(logits / T + G) without a noise tensor; each token's noise is made in place.

The noise of all tokens is made in float32; the few tokens within a margin of the best, which no rounding could
overturn, are then compared in float64.
"""

# ruff: noqa: PLR0913 - a kernel takes its arrays and sizes one by one, and is no function to cut up
# mypy: allow-untyped-defs, allow-incomplete-defs
# (the arguments of a kernel have Triton's types, which have no stubs)

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import reference_rows
from .common import GUMBEL
from .triton_common import (
    CHUNK,
    CHUNKS,
    POINTER,
    Variant,
    chunks_of,
    dense_rows,
    high_word,
    low_word,
    on_device,
    philox,
)

_STREAM = tl.constexpr(GUMBEL << 24)
_UNIT = tl.constexpr(2.0**-32)
_MARGIN = tl.constexpr(1e-3)  # a hundred times the error of the float32 scores
_CHUNK_WARPS = 16
_BEST_WARPS = 4


@triton.jit
def _quick_noise(bits):
    """Return -log(-log((bits + 0.5) / 2**32)) to about 1e-5, also where the inner logarithm ends in zero."""
    rest = ((bits ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * _UNIT
    series = rest * (1.0 + rest * (0.5 + rest * 0.33333334))
    inner = tl.where(rest < 0.015625, series, -tl.log((bits.to(tl.float32) + 0.5) * _UNIT))
    return -tl.log(inner)


@triton.jit
def _exact_score(logit, temperature, bits):
    inside = (bits.to(tl.float64) + 0.5) * _UNIT
    return logit.to(tl.float64) / temperature.to(tl.float64) - tl.log(-tl.log(inside))


@triton.jit(do_not_specialize=["chunks"])
def _gumbel_chunk_kernel(X, TEMPERATURE, SEED, ROW, POSITION, SCORES, PLACES, stride, vocab, chunks):
    number = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    row = X + number * stride
    block = chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4)
    lane = tl.arange(0, 4)[None, :]
    place = block[:, None] * 4 + lane
    x = tl.load(row + place, place < vocab, other=-math.inf).to(tl.float32)
    temperature = tl.load(TEMPERATURE + number)
    top = tl.max(tl.max(x, 1), 0)
    broken = tl.max(tl.max(((x != x) | (x == math.inf)).to(tl.int32), 1), 0)
    score = tl.where(broken > 0, math.nan, top).to(tl.float64)
    winner = tl.min(tl.min(tl.where(x == top, place, vocab), 1), 0)
    if (broken == 0) & (top > -math.inf) & (temperature > 0.0):
        seed = tl.load(SEED + number)
        position = low_word(tl.load(POSITION + number))
        owner = low_word(tl.load(ROW + number))
        stream = tl.full((), _STREAM, tl.uint32)
        low = low_word(seed)
        high = high_word(seed)
        even = tl.full((CHUNK // 4,), 0, tl.uint32)
        w0, w1, w2, w3 = philox(
            even + position, even + owner, even + stream, block.to(tl.uint32), even + low, even + high
        )
        bits = tl.where(lane < 2, tl.where(lane == 0, w0[:, None], w1[:, None]), 0)
        bits = tl.where(lane < 2, bits, tl.where(lane == 2, w2[:, None], w3[:, None]))
        slope = tl.minimum(tl.maximum(1.0 / temperature, 1e-30), 1e37)
        quick = (x - top) * slope + _quick_noise(bits)
        near = quick >= tl.max(tl.max(quick, 1), 0) - _MARGIN
        left = tl.sum(tl.sum(near.to(tl.int32), 1), 0)
        score = tl.full((), -math.inf, tl.float64)
        while left > 0:
            candidate = tl.min(tl.min(tl.where(near, place, 2147483647), 1), 0)
            word = tl.sum(tl.sum(tl.where(place == candidate, bits.to(tl.int64), 0), 1), 0)
            exact = _exact_score(tl.load(row + candidate).to(tl.float32), temperature, word)
            winner = tl.where(exact > score, candidate, winner)  # of equals the first
            score = tl.maximum(exact, score)
            near = near & (place != candidate)
            left -= 1
    tl.store(SCORES + number * chunks + chunk, score)
    tl.store(PLACES + number * chunks + chunk, winner)


@triton.jit(do_not_specialize=["chunks"])
def _gumbel_best_kernel(SCORES, PLACES, TOKEN, INVALID, chunks):
    number = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    scores = tl.load(SCORES + number * chunks + chunk, chunk < chunks, other=-math.inf)
    broken = tl.max((scores != scores).to(tl.int32), 0)
    best = tl.max(tl.where(scores == scores, scores, -math.inf), 0)
    first = tl.min(tl.where(scores == best, chunk, CHUNKS), 0)
    valid = (broken == 0) & (best > -math.inf)
    token = tl.load(PLACES + number * chunks + first, valid, other=0)
    tl.store(TOKEN + number, token.to(tl.int64))
    tl.store(INVALID + number, (valid == 0).to(tl.int8))


@torch.library.custom_op("hf_specgen::gumbel_pick", mutates_args=())
def _gumbel_pick(
    logits: Tensor, temperature: Tensor, seed: Tensor, row: Tensor, position: Tensor
) -> tuple[Tensor, Tensor]:
    logits, (count, vocab) = dense_rows(logits), logits.shape
    chunks, _ = chunks_of(vocab)
    token, invalid = _empty_pick(logits)
    scores = logits.new_empty(count, chunks, dtype=torch.float64)
    places = torch.empty_like(scores, dtype=torch.int32)
    if count:
        settings = [each.contiguous() for each in (temperature, seed, row, position)]
        with on_device(logits):
            _gumbel_chunk_kernel[count, chunks](
                logits,
                *settings,
                scores,
                places,
                logits.stride(0),
                vocab,
                chunks,
                num_warps=_CHUNK_WARPS,
                enable_fp_fusion=False,
            )
            _gumbel_best_kernel[count,](
                scores, places, token, invalid.view(torch.int8), chunks, num_warps=_BEST_WARPS, enable_fp_fusion=False
            )
    return token, invalid


@_gumbel_pick.register_fake
def _(logits: Tensor, temperature: Tensor, seed: Tensor, row: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    return _empty_pick(logits)


def _empty_pick(logits: Tensor) -> tuple[Tensor, Tensor]:
    token = logits.new_empty(logits.shape[0], dtype=torch.long)
    return token, torch.empty_like(token, dtype=torch.bool)


def gumbel_pick(
    logits: Tensor, temperature: Tensor, seed: Tensor, row: Tensor, position: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw argmax(logits / T + G), see ``reference_rows.gumbel_pick``, which float64 logits are handed to."""
    run = reference_rows.gumbel_pick if logits.dtype == torch.float64 else _gumbel_pick
    return run(logits, temperature, seed, row, position)


def variants() -> list[Variant]:
    """List what the kernels of this module are compiled to."""
    signature = {"SCORES": "*fp64", "PLACES": "*i32", "TOKEN": "*i64", "INVALID": "*i8", "chunks": "i32"}
    found: list[Variant] = [("gumbel_pick best", _gumbel_best_kernel, signature, {}, _BEST_WARPS)]
    for dtype, pointer in POINTER.items():
        signature = {"X": pointer, "TEMPERATURE": "*fp32", "SEED": "*i64", "ROW": "*i64", "POSITION": "*i64"}
        signature |= {"SCORES": "*fp64", "PLACES": "*i32", "stride": "i32", "vocab": "i32", "chunks": "i32"}
        name = f"gumbel_pick {str(dtype).removeprefix('torch.')}"
        found.append((name, _gumbel_chunk_kernel, signature, {}, _CHUNK_WARPS))
    return found
