"""What the walks share on the device: laws of rows and of drafts, and the draw from what q leaves of p.

A walk stores what is to be redrawn, ``WIDTH`` places a row of the batch: ``rows [place, node of q or -1]`` and
``shares [keep, take]`` mean a draw from ``max(keep p - take q, 0)``. All chunks of those places are then summed side
by side, and one program a row of the batch draws.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (the arguments of a kernel have Triton's types, which have no stubs)

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_common import (
    CHUNK,
    CHUNKS,
    LOG2E,
    POINTER,
    STRIP,
    Variant,
    chunks_of,
    dense_rows,
    on_device,
    pick,
    scale_of,
    weights,
)

STRIPS = tl.constexpr(64)  # strips of a chunk
NOISE = tl.constexpr(2.0**-20)  # 8 ulps of float32 weights: the share of a weight that is rounding noise
RESOLVED = tl.constexpr(
    2.0**-21
)  # less is what rounding leaves when a list holds all of p: a coin of 0 must not see it
# They change from round to round: no variant of its own for each.
COUNTS = ("nodes", "listed", "siblings", "width", "parents_stride")


@triton.jit
def read_law(law, temperature, row):
    """Read a row's law: (max, log2(e)/T, threshold, tie) for ``kept_weights``, and its total."""
    here = law + row * 4
    top = tl.load(here).to(tl.float32)
    threshold = tl.load(here + 2).to(tl.float32)
    return (top, scale_of(temperature), threshold, tl.load(here + 3).to(tl.int32)), tl.load(here + 1)


@triton.jit
def kept_weights(row, index, inside, law):
    """Read the weights of tokens ``index`` of the row that starts at pointer ``row``; zero outside the law."""
    top, scale, threshold, tie = law
    x = tl.load(row + index, mask=inside, other=float("-inf")).to(tl.float32)
    kept = (x > threshold) | ((x == threshold) & (index >= tie))
    return tl.where(kept & inside, weights(x, top, scale), 0.0)


@triton.jit
def draft_weights(row, index, inside, top):
    """Read exp(logit - top) of a draft row."""
    return tl.exp2((tl.load(row + index, mask=inside, other=float("-inf")).to(tl.float32) - top) * LOG2E)


@triton.jit
def draft_total(maxima, sums, row, vocab):
    """Join the partial sums of a draft row: its largest logit and the total of its weights."""
    chunk = tl.arange(0, CHUNKS)
    chunks = tl.cdiv(vocab, CHUNK)
    most = tl.load(maxima + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    part = tl.load(sums + row * chunks + chunk, mask=chunk < chunks, other=0.0)
    top = tl.max(most, 0)
    scaled = tl.where(part == 0.0, 0.0, part * tl.exp2((most - top) * LOG2E))  # a NaN stays: such a q offers nothing
    return top, tl.sum(scaled.to(tl.float64), 0)


@triton.jit
def draft_list(q_ids, q, row, listed, LIST: tl.constexpr):
    """Read a listed draft law: ids, -1 where unused (there any id may stand), and normalised probabilities."""
    slot = tl.arange(0, LIST)
    chance = tl.load(q + row * listed + slot, mask=slot < listed, other=0.0).to(tl.float64)
    ids = tl.load(q_ids + row * listed + slot, mask=slot < listed, other=-1).to(tl.int32)
    total = tl.sum(chance, 0)  # a NaN in the list makes all of it NaN: such a q offers nothing
    return tl.where(chance > 0.0, ids, -1), chance * (1.0 / tl.where(total == 0.0, 1.0, total))


@triton.jit
def view_draft(  # noqa: PLR0913 - a device function
    q_ids, q, q_row, maxima, sums, place, q_vocab, listed, row, vocab, p_law, total, LIST: tl.constexpr
):
    """Read one node's q; of a list also p at its ids, and what of p lies outside of it."""
    if LIST == 0:
        top, q_total = draft_total(maxima, sums, place, q_vocab)
        view = (q_row, q_vocab, top, 1.0 / q_total)
    else:
        ids, q_of = draft_list(q_ids, q, place, listed, LIST)
        p_of = kept_weights(row, ids, (ids >= 0) & (ids < vocab), p_law).to(tl.float64) * (1.0 / total)
        outside = 1.0 - tl.sum(p_of, 0)
        view = (ids, q_of, p_of, tl.where(outside > RESOLVED, outside, 0.0))
    return view


@triton.jit
def chance(view, token, LIST: tl.constexpr):
    """Read q at a token; zero for one that is none (-1)."""
    if LIST == 0:
        q_row, q_vocab, top, unit = view
        found = draft_weights(q_row, token, (token >= 0) & (token < q_vocab), top).to(tl.float64) * unit
    else:
        ids, q_of, _, _ = view
        found = tl.sum(tl.where((ids == token) & (token >= 0), q_of, 0.0), 0)
    return found


@triton.jit
def without_noise(left, whole):
    """Set to zero what is left of ``whole`` where it is negative or no more than rounding noise."""
    return tl.where(left > whole * NOISE, left, 0.0)  # a NaN leaves nothing


@triton.jit
def left_over(row, start, vocab, law, draft, keep, ROWS: tl.constexpr, DENSE: tl.constexpr):  # noqa: PLR0913 - a device function
    """Compute ``max(keep w - take e, 0)`` for ROWS strips from ``start``: exactly zero where nothing is left."""
    index = start + tl.arange(0, ROWS)[:, None] * STRIP + tl.arange(0, STRIP)[None, :]
    rest = keep * kept_weights(row, index, index < vocab, law)
    if DENSE:
        q_row, q_vocab, q_top, take = draft
        rest = without_noise(rest - take * draft_weights(q_row, index, index < q_vocab, q_top), rest)
    else:
        ids, taken = draft  # one listed token at a time: subtracting sums instead would leave noise where all is taken
        end = start + ROWS * STRIP
        token = tl.min(tl.where(ids >= start, ids, end), 0)
        while token < end:
            gone = tl.sum(tl.where(ids == token, taken, 0.0), 0)
            rest = tl.where(index == token, without_noise(rest - gone, rest), rest)
            token = tl.min(tl.where(ids > token, ids, end), 0)
    return rest


@triton.jit
def _draft_of(q_ids, q, maxima, sums, b, node, nodes, listed, q_vocab, strides, take, LIST: tl.constexpr):  # noqa: PLR0913 - a device function
    """Gather what ``left_over`` needs to know of q, to take ``take`` of it."""
    place = b * nodes + node
    if LIST == 0:
        top, total = draft_total(maxima, sums, place, q_vocab)
        return q + b * strides[0] + node * strides[1], q_vocab, top, (take / total).to(tl.float32)
    else:
        ids, chance = draft_list(q_ids, q, place, listed, LIST)
        return ids, (take * chance).to(tl.float32)


@triton.jit(do_not_specialize=COUNTS)
def _left_masses(  # noqa: PLR0913 - a kernel
    logits,
    temperature,
    law,
    q_ids,
    q,
    maxima,
    sums,
    rows,
    shares,
    masses,
    vocab,
    q_vocab,
    nodes,
    listed,
    width,
    batch_stride,
    row_stride,
    q_batch_stride,
    q_row_stride,
    LIST: tl.constexpr,
):
    """Sum what is left in one chunk of one place."""
    item = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    place = tl.load(rows + item * 2).to(tl.int64)
    node = tl.load(rows + item * 2 + 1).to(tl.int64)
    if node >= 0:
        b = item // width
        p_law, total = read_law(law, tl.load(temperature + b), b * (nodes + 1) + place)
        keep = tl.load(shares + item * 2).to(tl.float32)
        take = tl.load(shares + item * 2 + 1) * total
        strides = (q_batch_stride, q_row_stride)
        draft = _draft_of(q_ids, q, maxima, sums, b, node, nodes, listed, q_vocab, strides, take, LIST)
        row = logits + b * batch_stride + place * row_stride
        rest = left_over(row, chunk * CHUNK, vocab, p_law, draft, keep, STRIPS, LIST == 0)
        tl.store(masses + item * tl.num_programs(1) + chunk, tl.sum(tl.sum(rest, 1).to(tl.float64), 0))


@triton.jit(do_not_specialize=COUNTS)
def _draw_left(  # noqa: PLR0913 - a kernel
    logits,
    temperature,
    law,
    q_ids,
    q,
    maxima,
    sums,
    rows,
    shares,
    masses,
    accepted,
    sample,
    last,
    vocab,
    q_vocab,
    nodes,
    listed,
    width,
    batch_stride,
    row_stride,
    q_batch_stride,
    q_row_stride,
    LIST: tl.constexpr,
):
    """Draw one row's token from what is left: chunk, then strip, then token; ``last`` stands where nothing is left."""
    b = tl.program_id(0).to(tl.int64)
    depth = tl.load(accepted + b)
    item = b * width + tl.minimum(depth, width - 1)
    place = tl.load(rows + item * 2).to(tl.int64)
    node = tl.load(rows + item * 2 + 1).to(tl.int64)
    if node >= 0:
        index = tl.arange(0, CHUNKS)
        chunks = tl.cdiv(vocab, CHUNK)
        mass = tl.load(masses + item * chunks + index, mask=index < chunks, other=0.0)
        whole = tl.sum(mass, 0)
        chunk, at, _ = pick(mass, tl.load(sample + b * (nodes + 1) + depth) * whole, CHUNKS)

        p_law, total = read_law(law, tl.load(temperature + b), b * (nodes + 1) + place)
        keep = tl.load(shares + item * 2).to(tl.float32)
        take = tl.load(shares + item * 2 + 1) * total
        strides = (q_batch_stride, q_row_stride)
        draft = _draft_of(q_ids, q, maxima, sums, b, node, nodes, listed, q_vocab, strides, take, LIST)
        row = logits + b * batch_stride + place * row_stride
        rest = left_over(row, chunk * CHUNK, vocab, p_law, draft, keep, STRIPS, LIST == 0)
        strip, at, _ = pick(tl.sum(rest, 1).to(tl.float64), at, STRIPS)
        start = chunk * CHUNK + strip * STRIP
        final = tl.sum(left_over(row, start, vocab, p_law, draft, keep, 1, LIST == 0), 0).to(tl.float64)
        token, _, piece = pick(final, at, STRIP)
        if (whole > 0.0) & (piece > 0.0):
            tl.store(last + b, (start + token).to(tl.int64))


@triton.jit(do_not_specialize=COUNTS)
def _draft_sums(  # noqa: PLR0913 - a kernel
    q, parents, n_valid, maxima, sums, vocab, nodes, parents_stride, batch_stride, row_stride, NODES: tl.constexpr
):
    """Sum one chunk of one node's q: its largest logit, and the sum of exp(logit - largest)."""
    place = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    b = place // nodes
    node = (place % nodes).to(tl.int32)
    needed = node < tl.load(n_valid + b)
    if parents is not None:  # siblings share q: it is read at the first of them
        lane = tl.arange(0, NODES)
        here = parents + b * parents_stride
        above = tl.load(here + lane, mask=lane < node, other=-2)
        needed &= tl.sum((above == tl.load(here + node)).to(tl.int32), 0) == 0
    if needed:
        index = chunk * CHUNK + tl.arange(0, CHUNK)
        row = q + b * batch_stride + node.to(tl.int64) * row_stride
        x = tl.load(row + index, mask=index < vocab, other=float("-inf"))
        x = x.to(tl.float32)
        most = tl.max(x, 0)
        part = tl.sum(tl.exp2((x - tl.where(most > float("-inf"), most, 0.0)) * LOG2E), 0)
        tl.store(maxima + place * tl.num_programs(1) + chunk, most)
        tl.store(sums + place * tl.num_programs(1) + chunk, part)


class Rows(NamedTuple):
    """Hold the target's rows and the drafter's laws as the kernels take them."""

    logits: Tensor
    temperature: Tensor
    law: Tensor
    q_ids: Tensor | None
    q: Tensor
    maxima: Tensor | None
    sums: Tensor | None

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Return V, V of the draft, nodes, places of a list."""
        return self.logits.shape[-1], self.q.shape[-1], self.q.shape[1], self.q.shape[-1]

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """Return the steps between rows of the batch and between places, of logits and of q."""
        return self.logits.stride(0), self.logits.stride(1), self.q.stride(0), self.q.stride(1)

    @property
    def places(self) -> int:
        """Return the power of two that holds a list, 0 for a dense q."""
        return 0 if self.q_ids is None else triton.next_power_of_2(max(self.q.shape[-1], 1))


def read_rows(
    logits: Tensor,
    temperature: Tensor,
    law: Tensor,
    parents: Tensor | None,
    n_valid: Tensor,
    q_ids: Tensor | None,
    q: Tensor,
) -> Rows:
    """Prepare what a walk reads; of a dense q the sums of every row that it may need.

    Shapes: as in ``reference_walks``; ``parents`` None for chains.
    """
    chunks_of(logits.shape[-1])
    logits = dense_rows(logits)
    temperature = temperature.contiguous()
    law = law.contiguous()
    if q_ids is not None:
        return Rows(logits, temperature, law, q_ids.contiguous(), q.contiguous(), None, None)
    q = dense_rows(q)
    rows, nodes, vocab = q.shape
    maxima = q.new_empty(rows, nodes, chunks_of(vocab)[0], dtype=torch.float32)
    sums = torch.empty_like(maxima)
    if maxima.numel():
        stride = nodes if parents is not None and len(parents) > 1 else 0
        steps = q.stride()[:2]
        places = triton.next_power_of_2(nodes)
        with on_device(q):
            _draft_sums[(rows * nodes, maxima.shape[-1])](
                q,
                parents,
                n_valid,
                maxima,
                sums,
                vocab,
                nodes,
                stride,
                *steps,
                places,
                num_warps=8,
                enable_fp_fusion=False,
            )
    return Rows(logits, temperature, law, None, q, maxima, sums)


def sum_left(given: Rows, rows: Tensor, shares: Tensor) -> Tensor:
    """Sum what is left, chunk by chunk: ``(places, chunks)`` float64, unset where nothing is redrawn."""
    chunks = chunks_of(given.logits.shape[-1])[0]
    masses = shares.new_empty(len(rows), chunks)
    with on_device(masses):
        _left_masses[(len(rows), chunks)](
            *given,
            rows,
            shares,
            masses,
            *given.sizes,
            len(rows) // len(given.q),
            *given.strides,
            given.places,
            num_warps=8,
            enable_fp_fusion=False,
        )
    return masses


def draw_left(
    given: Rows, rows: Tensor, shares: Tensor, masses: Tensor, n: Tensor, sample: Tensor, last: Tensor
) -> None:
    """Draw each row's token in place; of several places a row the one at depth ``n``."""
    width = len(rows) // len(given.q)
    with on_device(masses):
        _draw_left[(len(n),)](
            *given,
            rows,
            shares,
            masses,
            n,
            sample,
            last,
            *given.sizes,
            width,
            *given.strides,
            given.places,
            num_warps=16,
            enable_fp_fusion=False,
        )


def draft_kinds() -> list[tuple[str, dict[str, str], dict[str, object]]]:
    """List the kinds of target and draft rows: a name, the types of their arguments, their constants."""
    rows = {"temperature": "*fp32", "law": "*fp64", "q_ids": "*i64", "maxima": "*fp32", "sums": "*fp32"}
    rows |= dict.fromkeys(("vocab", "q_vocab", "nodes", "listed"), "i32")
    rows |= dict.fromkeys(("batch_stride", "row_stride", "q_batch_stride", "q_row_stride"), "i64")
    kinds: list[tuple[str, dict[str, str], dict[str, object]]] = []
    for dtype in POINTER.values():
        kinds.append((f"dense {dtype[1:]}", {**rows, "logits": dtype, "q": dtype}, {"q_ids": None, "LIST": 0}))
        sparse: dict[str, object] = {"maxima": None, "sums": None, "LIST": 64}
        kinds.append((f"sparse {dtype[1:]}", {**rows, "logits": dtype, "q": "*fp32"}, sparse))
    return kinds


def variants() -> list[Variant]:
    """List what to compile where there is no GPU: name, kernel, signature, constants, warps."""
    redraw = {"rows": "*i32", "shares": "*fp64", "masses": "*fp64", "width": "i32"}
    draw = {**redraw, "accepted": "*i64", "sample": "*fp64", "last": "*i64"}
    chunk = {"parents": "*i64", "n_valid": "*i64", "parents_stride": "i32"}
    found: list[Variant] = []
    for name, types, constants in draft_kinds():
        if constants["LIST"] == 0:
            found.append((f"draft_sums {name}", _draft_sums, {**types, **chunk}, {"NODES": 64}, 8))
        found.append((f"left_masses {name}", _left_masses, {**types, **redraw}, constants, 8))
        found.append((f"draw_left {name}", _draw_left, {**types, **draw}, constants, 16))
    return found
