"""Triton twin of block verification: see ``reference_walks.block_chain`` for what it computes."""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (the arguments of a kernel have Triton's types, which have no stubs)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_common import CHUNK, Variant, on_device
from .triton_residual import (
    COUNTS,
    NOISE,
    chance,
    draft_kinds,
    draw_left,
    kept_weights,
    read_law,
    read_rows,
    sum_left,
    view_draft,
    without_noise,
)
from .triton_walks import Walks, bits, empty_walks, match_tree, store_walk

__all__ = ["block_chain", "variants"]


@triton.jit(do_not_specialize=COUNTS)
def _reach(  # noqa: PLR0913 - a kernel
    logits,
    temperature,
    law,
    q_ids,
    q,
    maxima,
    sums,
    invalid,
    tokens,
    n_valid,
    reach,
    surplus,
    rows,
    shares,
    counts,
    vocab,
    q_vocab,
    nodes,
    listed,
    batch_stride,
    row_stride,
    q_batch_stride,
    q_row_stride,
    LIST: tl.constexpr,
):
    """Compute h along one chain and, of a listed q, what each place leaves: ``counts [tokens, broken place or -1]``."""
    b = tl.program_id(0).to(tl.int64)
    warmth = tl.load(temperature + b).to(tl.float32)
    length = tl.load(n_valid + b)
    h = tl.full([], 1.0, tl.float64)
    count = tl.full([], 0, tl.int32)
    broken = tl.full([], -1, tl.int32)
    tl.store(reach + b * (nodes + 1), h)
    for i in range(0, nodes):
        # int64: offsets of far rows need it
        place = b * nodes + i
        node = i + b * 0
        token = tl.load(tokens + place).to(tl.int32)
        counts_too = (count == i) & (i < length) & (token >= 0) & (token < vocab)
        count += counts_too.to(tl.int32)
        live = counts_too & (h > 0.0) & (warmth > 0.0) & (broken < 0)
        if live:
            broken = tl.where(tl.load(invalid + place + b) != 0, count - 1, broken)
            live = broken < 0
        after = tl.full([], 0.0, tl.float64)
        left = tl.full([], 0.0, tl.float64)
        if live:
            row = logits + b * batch_stride + node * row_stride
            q_row = q + b * q_batch_stride + node * q_row_stride
            p_law, total = read_law(law, warmth, place + b)
            view = view_draft(q_ids, q, q_row, maxima, sums, place, q_vocab, listed, row, vocab, p_law, total, LIST)
            p_token = h * (kept_weights(row, token, token < vocab, p_law).to(tl.float64) * (1.0 / total))
            q_token = chance(view, token, LIST)
            # The comparison decides, not the division; a token that q could not draw ends the block.
            possible = q_token > 0.0
            ratio = p_token / tl.where(possible, q_token, 1.0)
            after = tl.where(p_token >= q_token * (1.0 - NOISE), possible.to(tl.float64), ratio)
            if LIST > 0:
                _, q_of, p_of, outside = view
                left = h * outside + tl.sum(without_noise(h * p_of - q_of, h * p_of), 0)
        tl.store(surplus + place, left)
        tl.store(rows + place * 2, node)
        tl.store(rows + place * 2 + 1, tl.where(live, node, -1))
        tl.store(shares + place * 2, h)
        tl.store(shares + place * 2 + 1, 1.0)
        h = after
        tl.store(reach + place + b + 1, h)
    tl.store(counts + b * 2, count)
    tl.store(counts + b * 2 + 1, broken)


@triton.jit
def _greedy(drawn, invalid, tokens, here, nodes, length):
    """Follow the drawn tokens along a chain: how many, the next one, whether a row has no law."""
    depth = tl.full([], 0, tl.int32)
    place = here - here // (nodes + 1)  # b * nodes
    token = tl.load(drawn + here)
    bad = tl.load(invalid + here) != 0
    walking = bad == 0
    while walking:
        drafted = tl.load(tokens + place + depth, mask=(depth < nodes) & (depth < length), other=-1)
        walking = (drafted == token) & (token >= 0)
        if walking:
            depth += 1
            token = tl.load(drawn + here + depth)
            bad = tl.load(invalid + here + depth) != 0
            walking = bad == 0
    return depth, token, bad


@triton.jit(do_not_specialize=COUNTS)
def _keep(  # noqa: PLR0913 - a kernel
    temperature,
    law,
    drawn,
    invalid,
    tokens,
    n_valid,
    accept,
    reach,
    surplus,
    rows,
    masses,
    counts,
    path,
    accepted,
    last,
    broken,
    vocab,
    nodes,
    NODES: tl.constexpr,
):
    """Choose the longest block that passes, and leave only its place to be redrawn."""
    b = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, NODES)
    here = b * (nodes + 1)
    inside = lane < nodes
    place = b * nodes + lane
    count = tl.load(counts + b * 2)
    stopped = tl.load(counts + b * 2 + 1)
    live = tl.load(rows + place * 2 + 1, mask=inside, other=-1) >= 0
    if masses is None:
        left = tl.load(surplus + place, mask=live, other=0.0)
    else:
        chunks = tl.cdiv(vocab, CHUNK)
        left = tl.zeros([NODES], tl.float64)
        for chunk in range(0, chunks):
            left += tl.load(masses + place * chunks + chunk, mask=live, other=0.0)
        left = left / tl.load(law + (here + lane) * 4 + 1, mask=live, other=1.0)

    h = tl.load(reach + here + lane, mask=live, other=0.0)
    coin = tl.load(accept + place - 1, mask=live & (lane > 0), other=0.0)
    # h = 1 passes even when p = q leaves nothing
    passes = live & (lane > 0) & (lane < count) & ((h >= 1.0) | (coin * (left + 1.0 - h) < left))
    kept = tl.max(tl.where(passes, lane, 0), 0)
    full = tl.load(accept + b * nodes + count - 1, mask=count > 0, other=1.0) < tl.load(reach + here + count)
    kept = tl.where(full, count, kept)
    bad = stopped >= 0
    if tl.load(temperature + b) == 0.0:
        kept, token, bad = _greedy(drawn, invalid, tokens, here, nodes, tl.load(n_valid + b))
    elif bad:
        kept = kept * 0
        token = tl.load(drawn + here + stopped)
    else:
        token = tl.load(drawn + here + kept)
        bad = (kept == count) & (tl.load(invalid + here + kept) != 0)
    store_walk(path, accepted, last, broken, b, nodes, lane, tl.where(lane < kept, lane, 0), kept, token, bad)
    redrawn = live & (lane == kept) & (kept < count) & (stopped < 0)
    tl.store(rows + place * 2 + 1, tl.where(redrawn, lane, -1), mask=inside)


@torch.library.custom_op("hf_specgen::block_chain", mutates_args=())
def block_chain(  # noqa: PLR0913 - one operation decides everything
    logits: Tensor,
    temperature: Tensor,
    law: Tensor,
    drawn: Tensor,
    invalid: Tensor,
    tokens: Tensor,
    n_valid: Tensor,
    q_ids: Tensor | None,
    q: Tensor,
    accept: Tensor,
    sample: Tensor,
) -> Walks:
    """Judge chains as blocks: see ``reference_walks``."""
    if not tokens.numel():
        return match_tree(drawn, invalid, tokens, tokens, n_valid)
    walks = empty_walks(tokens)
    (batch, nodes) = tokens.shape
    n_valid = n_valid.contiguous()
    sample = sample.contiguous()
    tokens = tokens.contiguous()
    flags = bits(invalid)
    given = read_rows(logits, temperature, law, None, n_valid, q_ids, q)
    reach = sample.new_empty(batch, nodes + 1)
    surplus = sample.new_empty(batch, nodes)
    rows = tokens.new_empty(batch * nodes, 2, dtype=torch.int32)
    counts = rows.new_empty(batch, 2)
    shares = sample.new_empty(batch * nodes, 2)
    chains = (flags, tokens, n_valid)
    found = (reach, surplus, rows, shares, counts)
    with on_device(tokens):
        sizes = (*given.sizes, *given.strides, given.places)
        warps = _reach_warps(given.places)
        _reach[(batch,)](*given, *chains, *found, *sizes, num_warps=warps, enable_fp_fusion=False)
        # a dense q leaves sums that judge the blocks; a listed one is summed at the place that is redrawn alone
        masses = sum_left(given, rows, shares) if q_ids is None else None
        _keep[(batch,)](
            given.temperature,
            given.law,
            drawn.contiguous(),
            *chains,
            accept.contiguous(),
            reach,
            surplus,
            rows,
            masses,
            counts,
            *map(bits, walks),
            logits.shape[-1],
            nodes,
            triton.next_power_of_2(nodes),
            num_warps=1,
            enable_fp_fusion=False,
        )
    masses = sum_left(given, rows, shares) if masses is None else masses
    draw_left(given, rows, shares, masses, walks[1], sample, walks[2])
    return walks


@block_chain.register_fake
def _(
    logits: Tensor, temperature: Tensor, law: Tensor, drawn: Tensor, invalid: Tensor, tokens: Tensor, *others: object
) -> Walks:
    return empty_walks(tokens)


def _reach_warps(places: int) -> int:
    """Return the warps with which no register is spilled."""
    return 8 if places else 4


def variants() -> list[Variant]:
    """List what to compile where there is no GPU: name, kernel, signature, constants, warps."""
    walk = {"temperature": "*fp32", "law": "*fp64", "drawn": "*i64", "invalid": "*i8", "tokens": "*i64"}
    walk |= {"n_valid": "*i64", "accept": "*fp64", "reach": "*fp64", "surplus": "*fp64", "rows": "*i32"}
    walk |= {"shares": "*fp64", "masses": "*fp64", "counts": "*i32", "vocab": "i32", "nodes": "i32"}
    walk |= {"path": "*i64", "accepted": "*i64", "last": "*i64", "broken": "*i8"}
    found: list[Variant] = [
        ("block_chain keep dense", _keep, walk, {"NODES": 64}, 1),
        ("block_chain keep sparse", _keep, walk, {"NODES": 64, "masses": None}, 1),
    ]
    for name, types, constants in draft_kinds():
        warps = _reach_warps(int(str(constants["LIST"])))
        found.append((f"block_chain reach {name}", _reach, {**types, **walk}, constants, warps))
    return found
