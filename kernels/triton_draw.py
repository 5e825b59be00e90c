"""Triton twin of ``row_draw``: one draw from every row, truncated or not, by inverting chunk, strip and element sums.

Truncation sorts nothing. The k-th largest strip maximum is a lower bound of the k-th largest logit, so the tokens that
can stay lie in few strips; they are listed in order of their ids, and the edges of top-k, top-p and min-p are
bisected over ordered integer keys. A row whose list overflows, or misses part of the nucleus, is bisected as a whole.
"""

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
    CHUNKS,
    FLOOR,
    KEY_SHIFT,
    LOWEST,
    POINTER,
    STRIP,
    Variant,
    chunks_of,
    dense_rows,
    key_of,
    on_device,
    pick,
    scale_of,
    value_of,
    weights,
)

LISTED_STRIPS = tl.constexpr(256)
LISTED = tl.constexpr(1024)
_GROUP = tl.constexpr(32)  # strips listed at a time
_PLAIN_WARPS = 8
_TRUNCATED_WARPS = 16


@triton.jit
def _chunk_of(row, chunk, vocab):
    """Return ids and float32 logits of a chunk, strip by strip."""
    place = chunk * CHUNK + tl.arange(0, CHUNK // STRIP)[:, None] * STRIP + tl.arange(0, STRIP)[None, :]
    return place, tl.load(row + place, place < vocab, other=-math.inf).to(tl.float32)


@triton.jit
def _counted(x, place, top, scale, threshold, tie, TIES: tl.constexpr):
    """Weigh what the law keeps; with TIES count one for each entry at the threshold instead."""
    if TIES:
        return tl.where(x == threshold, 1.0, 0.0)
    kept = (x > threshold) | ((x == threshold) & (place >= tie))
    return tl.where(kept, weights(x, top, scale), 0.0)


@triton.jit
def _chunk_masses(row, MAXIMA, vocab, chunks, top, scale, threshold, tie, TIES: tl.constexpr):
    """Return what ``_counted`` counts in each chunk, float64."""
    number = tl.arange(0, CHUNKS)
    masses = tl.zeros((CHUNKS,), tl.float64)
    for chunk in range(0, chunks):
        if tl.load(MAXIMA + chunk) >= threshold:
            place, x = _chunk_of(row, chunk, vocab)
            mass = tl.sum(tl.sum(_counted(x, place, top, scale, threshold, tie, TIES), 1).to(tl.float64), 0)
            masses = tl.where(number == chunk, mass, masses)
    return masses


@triton.jit
def _find(row, masses, at, vocab, top, scale, threshold, tie, TIES: tl.constexpr):
    """Invert the running sum at ``at``: chunk, then strip, then element, each against float64 sums of its own."""
    chunk, rest, mass = pick(masses, at, CHUNKS)
    place, x = _chunk_of(row, chunk, vocab)
    strips = tl.sum(_counted(x, place, top, scale, threshold, tie, TIES), 1).to(tl.float64)
    strip, rest, mass = pick(strips, rest * (tl.sum(strips, 0) / mass), CHUNK // STRIP)
    place = chunk * CHUNK + strip * STRIP + tl.arange(0, STRIP)
    x = tl.load(row + place, place < vocab, other=-math.inf).to(tl.float32)
    inside = _counted(x, place, top, scale, threshold, tie, TIES).to(tl.float64)
    element, rest, mass = pick(inside, rest * (tl.sum(inside, 0) / mass), STRIP)
    return chunk * CHUNK + strip * STRIP + element


@triton.jit
def _kth_key(keys, k, low, high):
    """Return the largest key in ``[low, high]`` that at least ``k`` of ``keys`` reach, or ``low``."""
    while low < high:
        key = (low | high) - ((low ^ high) >> 1)  # their mean rounded up, without overflow
        enough = tl.sum((keys >= key).to(tl.int32), 0) >= k
        low = tl.where(enough, key, low)
        high = tl.where(enough, high, key - 1)
    return low


@triton.jit
def _mass_key(keys, mass, goal, low, high):
    """Return the largest key in ``[low, high]`` such that what reaches it weighs ``goal``, or ``low``."""
    while low < high:
        key = (low | high) - ((low ^ high) >> 1)  # their mean rounded up, without overflow
        enough = tl.sum(tl.where(keys >= key, mass, 0.0), 0) >= goal
        low = tl.where(enough, key, low)
        high = tl.where(enough, high, key - 1)
    return low


@triton.jit
def _reaching(row, MAXIMA, vocab, chunks, top, scale, value):
    """Count and weigh the entries of a row that reach ``value``."""
    count = tl.full((), 0, tl.int32)
    mass = tl.full((), 0.0, tl.float64)
    for chunk in range(0, chunks):
        if tl.load(MAXIMA + chunk) >= value:
            _, x = _chunk_of(row, chunk, vocab)
            count += tl.sum(tl.sum((x >= value).to(tl.int32), 1), 0)
            mass += tl.sum(tl.sum(tl.where(x >= value, weights(x, top, scale), 0.0), 1).to(tl.float64), 0)
    return count, mass


@triton.jit
def _row_key(row, MAXIMA, vocab, chunks, top, scale, k, goal, low, high, SHIFT: tl.constexpr):
    """Return the largest key in ``[low, high]`` that ``k`` entries of the row reach, weighing ``goal``, or ``low``."""
    while low < high:
        key = (low | high) - ((low ^ high) >> 1)
        count, mass = _reaching(row, MAXIMA, vocab, chunks, top, scale, value_of(key, SHIFT))
        enough = (count >= k) & (mass >= goal)
        low = tl.where(enough, key, low)
        high = tl.where(enough, high, key - 1)
    return low


@triton.jit
def _ties_kept(goal, above, weight, ties):
    """Return how many of the entries at the edge of the nucleus stay: until ``goal`` is reached, at least one."""
    wanted = tl.ceil((goal - above) / tl.maximum(weight, 1e-300))
    return tl.minimum(tl.maximum(wanted, 1.0), ties)


@triton.jit
def _truncate_row(row, MAXIMA, vocab, chunks, top, scale, total, k, p, least, low, covered, SHIFT: tl.constexpr):
    """Find threshold and tie of a row by passes over all of it."""
    high = key_of(top, SHIFT)
    zero = tl.full((), 0.0, tl.float64)
    if k > 0:
        low = _row_key(row, MAXIMA, vocab, chunks, top, scale, k, zero, low, high, SHIFT)
        _, total = _reaching(row, MAXIMA, vocab, chunks, top, scale, value_of(low, SHIFT))
    elif covered == 0:
        # nothing below has weight
        low = key_of(tl.maximum(top + 1.01 * FLOOR / scale, LOWEST), SHIFT)
    edge = low
    tie = tl.full((), 0, tl.int32)
    if p < 1.0:
        edge = _row_key(row, MAXIMA, vocab, chunks, top, scale, 0, p * total, low, high, SHIFT)
    threshold = value_of(edge, SHIFT)
    if p < 1.0:
        count, _ = _reaching(row, MAXIMA, vocab, chunks, top, scale, threshold)
        over, above = _reaching(row, MAXIMA, vocab, chunks, top, scale, value_of(edge + 1, SHIFT))
        ties = (count - over).to(tl.float64)
        kept = _ties_kept(p * total, above, weights(threshold, top, scale).to(tl.float64), ties)
        if kept < ties:
            counts = _chunk_masses(row, MAXIMA, vocab, chunks, top, scale, threshold, 0, TIES=True)
            tie = _find(row, counts, ties - kept, vocab, top, scale, threshold, 0, TIES=True)
    if least > 0.0:
        lowest = top
        for chunk in range(0, chunks):
            if tl.load(MAXIMA + chunk) >= threshold:
                _, x = _chunk_of(row, chunk, vocab)
                stays = (x >= threshold) & (weights(x, top, scale) >= least)
                lowest = tl.minimum(lowest, tl.min(tl.min(tl.where(stays, x, top), 1), 0))
        tie = tl.where(lowest > threshold, 0, tie)
        threshold = lowest
    return threshold, tie


@triton.jit
def _list(row, STRIPS, IDS, VALUES, vocab, strips, low, PLACES: tl.constexpr, SHIFT: tl.constexpr):
    """Write the entries that reach ``low`` to IDS and VALUES in order; return how many (too many: not all written)."""
    number = tl.arange(0, PLACES)
    chosen = key_of(tl.load(STRIPS + number, number < strips, other=-math.inf), SHIFT) >= low
    used = tl.sum(chosen.to(tl.int32), 0)
    if used > LISTED_STRIPS:
        count = tl.full((), LISTED + 1, tl.int32)
    else:
        count = tl.full((), 0, tl.int32)
        tl.store(IDS + LISTED + tl.cumsum(chosen.to(tl.int32), 0) - 1, number, chosen)
        tl.debug_barrier()  # other threads read what was written; the interpreter would not miss this line
        for first in range(0, used, _GROUP):
            member = first + tl.arange(0, _GROUP)
            strip = tl.load(IDS + LISTED + member, member < used, other=0)
            place = strip[:, None] * STRIP + tl.arange(0, STRIP)[None, :]
            inside = (member < used)[:, None] & (place < vocab)
            x = tl.load(row + place, inside, other=-math.inf).to(tl.float32)
            hit = tl.reshape((key_of(x, SHIFT) >= low).to(tl.int32), (_GROUP * STRIP,))
            slot = count + tl.cumsum(hit, 0) - 1
            write = (hit > 0) & (slot < LISTED)
            tl.store(IDS + slot, tl.reshape(place, (_GROUP * STRIP,)), write)
            tl.store(VALUES + slot, tl.reshape(x, (_GROUP * STRIP,)), write)
            count += tl.sum(hit, 0)
        tl.debug_barrier()
    return count


@triton.jit
def _truncate_list(IDS, VALUES, count, top, scale, total, k, p, least, low, covered, coin, SHIFT: tl.constexpr):
    """Truncate and draw among the listed entries.

    Returns: whether the list held all that stays, token, total, threshold, tie.
    """
    slot = tl.arange(0, LISTED)
    place = tl.load(IDS + slot, slot < count, other=0)
    x = tl.load(VALUES + slot, slot < count, other=-math.inf)
    keys = key_of(x, SHIFT)
    weight = weights(x, top, scale)
    mass = weight.to(tl.float64)
    high = key_of(top, SHIFT)
    if k > 0:
        low = _kth_key(keys, k, low, high)
        total = tl.sum(tl.where(keys >= low, mass, 0.0), 0)
    enough = ((k > 0) | (covered > 0)).to(tl.int32)
    edge = low
    tie = tl.full((), 0, tl.int32)
    if p < 1.0:
        goal = p * total
        enough = enough | (tl.sum(mass, 0) >= goal).to(tl.int32)
        edge = _mass_key(keys, mass, goal, low, high)
        at_edge = keys == edge
        ties = tl.sum(at_edge.to(tl.int32), 0)
        above = tl.sum(tl.where(keys > edge, mass, 0.0), 0)
        each = tl.max(tl.where(at_edge, mass, 0.0), 0)
        kept_ties = _ties_kept(goal, above, each, ties.to(tl.float64)).to(tl.int32)
        behind = ties - tl.cumsum(at_edge.to(tl.int32), 0)  # ties of higher id
        tie = tl.min(tl.where(at_edge & (behind < kept_ties), place, 2147483647), 0)
    kept = (keys > edge) | ((keys == edge) & (place >= tie))
    kept = kept & (weight >= least) & (slot < count)
    threshold = tl.min(tl.where(kept, x, top), 0)
    tie = tl.min(tl.where(kept & (x == threshold), place, 2147483647), 0)
    mass = tl.where(kept, mass, 0.0)
    total = tl.sum(mass, 0)
    chosen, _, _ = pick(mass, coin * total, LISTED)
    token = tl.sum(tl.where(slot == chosen, place, 0), 0)
    return enough, token, total, threshold, tie


@triton.jit
def _lower_bound(STRIPS, strips, top, scale, k, least, PLACES: tl.constexpr, SHIFT: tl.constexpr):
    """Return a key that all listed entries reach, and whether min-p alone says that nothing below can stay."""
    number = tl.arange(0, PLACES)
    keys = key_of(tl.load(STRIPS + number, number < strips, other=-math.inf), SHIFT)
    nothing = key_of(tl.full((), LOWEST, tl.float32), SHIFT)  # -inf is never listed
    low = _kth_key(keys, tl.where(k > 0, k, LISTED_STRIPS), nothing, key_of(top, SHIFT))
    covered = tl.full((), 0, tl.int32)
    if (k <= 0) & (least > 0.0):
        span = tl.log2(least) / scale
        bound = tl.maximum(top + span - 1e-5 * (tl.abs(top) - span) - 1e-4 / scale, LOWEST)
        covered = (key_of(bound, SHIFT) >= low).to(tl.int32)
        low = tl.maximum(low, key_of(bound, SHIFT))
    return low, covered


@triton.jit(do_not_specialize=["chunks", "strips"])
def _row_draw_kernel(
    X, TEMPERATURE, TOP_K, TOP_P, MIN_P, COIN, MAXIMA, SUMS, BEST, STRIPS, IDS, VALUES, TOKEN, LAW, INVALID,
    stride, vocab, chunks, strips, TRUNCATE: tl.constexpr, PLACES: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    row = X + number * stride
    chunk = tl.arange(0, CHUNKS)
    MAXIMA += number * chunks
    maxima = tl.load(MAXIMA + chunk, chunk < chunks, other=-math.inf)
    sums = tl.load(SUMS + number * chunks + chunk, chunk < chunks, other=0.0)
    broken = tl.max((sums != sums).to(tl.int32), 0)
    top = tl.max(tl.where(maxima == maxima, maxima, -math.inf), 0)
    valid = (broken == 0) & (top > -math.inf) & (top < math.inf)
    temperature = tl.load(TEMPERATURE + number)
    coin = tl.load(COIN + number)
    token = tl.full((), 0, tl.int32)
    tie = tl.full((), 0, tl.int32)
    threshold = tl.full((), -math.inf, tl.float32)
    total = tl.full((), 1.0, tl.float64)
    if valid & (temperature <= 0.0):
        first = tl.min(tl.where(maxima == top, chunk, CHUNKS), 0)
        token = tl.load(BEST + number * chunks + first)
        threshold = top
        tie = token
    elif valid:
        scale = scale_of(temperature)
        masses = sums.to(tl.float64) * weights(maxima, top, scale).to(tl.float64)
        total = tl.sum(masses, 0)
        listed = tl.full((), 0, tl.int32)
        if TRUNCATE:
            k = tl.load(TOP_K + number)
            p = tl.load(TOP_P + number)
            least = tl.load(MIN_P + number)
            if (k > 0) | (p < 1.0) | (least > 0.0):
                STRIPS += number * strips
                IDS += number * (LISTED + LISTED_STRIPS)
                VALUES += number * LISTED
                low, covered = _lower_bound(STRIPS, strips, top, scale, k, least, PLACES, SHIFT)
                count = _list(row, STRIPS, IDS, VALUES, vocab, strips, low, PLACES, SHIFT)
                whole = total
                if count <= LISTED:
                    listed, token, total, threshold, tie = _truncate_list(
                        IDS, VALUES, count, top, scale, whole, k, p, least, low, covered, coin, SHIFT
                    )
                if listed == 0:
                    threshold, tie = _truncate_row(
                        row, MAXIMA, vocab, chunks, top, scale, whole, k, p, least, low, covered, SHIFT
                    )
                    masses = _chunk_masses(row, MAXIMA, vocab, chunks, top, scale, threshold, tie, TIES=False)
                    total = tl.sum(masses, 0)
        if listed == 0:
            token = _find(row, masses, coin * total, vocab, top, scale, threshold, tie, TIES=False)
    tl.store(TOKEN + number, token.to(tl.int64))
    tl.store(INVALID + number, (valid == 0).to(tl.int8))
    tl.store(LAW + number * 4, tl.where(valid, top, 0.0).to(tl.float64))
    tl.store(LAW + number * 4 + 1, total)
    tl.store(LAW + number * 4 + 2, threshold.to(tl.float64))
    tl.store(LAW + number * 4 + 3, tie.to(tl.float64))


@torch.library.custom_op("hf_specgen::row_draw", mutates_args=())
def _row_draw(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    coin: Tensor,
    maxima: Tensor,
    sums: Tensor,
    best: Tensor,
    strip_maxima: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    logits, (count, vocab) = dense_rows(logits), logits.shape
    chunks, strips = chunks_of(vocab)
    truncate = strip_maxima.shape[1] > 0
    settings = [each.contiguous() for each in (temperature, top_k.int(), top_p, min_p, coin)]
    stats = [each.contiguous() for each in (maxima, sums, best, strip_maxima)]
    ids = best.new_empty(count if truncate else 1, LISTED.value + LISTED_STRIPS.value)
    values = maxima.new_empty(count if truncate else 1, LISTED.value)
    token, law, invalid = out = _empty_draw(logits)
    if count:
        with on_device(logits):
            _row_draw_kernel[count,](
                logits, *settings, *stats, ids, values, token, law, invalid.view(torch.int8), logits.stride(0), vocab,
                chunks, strips, TRUNCATE=truncate, PLACES=max(triton.next_power_of_2(strips), 128),
                SHIFT=KEY_SHIFT[logits.dtype], num_warps=_TRUNCATED_WARPS if truncate else _PLAIN_WARPS,
                enable_fp_fusion=False,
            )  # fmt: skip
    return out


@_row_draw.register_fake
def _(logits: Tensor, *settings: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_draw(logits)


def _empty_draw(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    token = logits.new_empty(logits.shape[0], dtype=torch.long)
    law = logits.new_empty(logits.shape[0], 4, dtype=torch.float64)
    return token, law, torch.empty_like(token, dtype=torch.bool)


def row_draw(logits: Tensor, *settings: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token from every row, see ``reference_rows.row_draw``, which float64 logits are handed to."""
    run = reference_rows.row_draw if logits.dtype == torch.float64 else _row_draw
    return run(logits, *settings)


def variants() -> list[Variant]:
    """List what the kernels of this module are compiled to."""
    found: list[Variant] = []
    for dtype, pointer in POINTER.items():
        signature: dict[str, str] = {"X": pointer, "TEMPERATURE": "*fp32", "TOP_K": "*i32", "TOP_P": "*fp32"}
        signature |= {"MIN_P": "*fp32", "COIN": "*fp64", "MAXIMA": "*fp32", "SUMS": "*fp32", "BEST": "*i32"}
        signature |= {"STRIPS": "*fp32", "IDS": "*i32", "VALUES": "*fp32", "TOKEN": "*i64", "LAW": "*fp64"}
        signature |= {"INVALID": "*i8", **dict.fromkeys(("stride", "vocab", "chunks", "strips"), "i32")}
        signature |= dict.fromkeys(("TRUNCATE", "PLACES", "SHIFT"), "constexpr")
        for truncate in (False, True):
            constants: dict[str, Any] = {"TRUNCATE": truncate, "PLACES": 2048, "SHIFT": KEY_SHIFT[dtype]}
            name = f"row_draw {str(dtype).removeprefix('torch.')}{' truncated' if truncate else ''}"
            warps = _TRUNCATED_WARPS if truncate else _PLAIN_WARPS
            found.append((name, _row_draw_kernel, signature, constants, warps))
    return found
