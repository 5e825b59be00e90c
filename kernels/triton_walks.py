"""Triton twins of the tree walks: one program a row; see ``reference_walks`` for what each one computes."""

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
    STRIPS,
    chance,
    draft_kinds,
    draw_left,
    kept_weights,
    left_over,
    read_law,
    read_rows,
    sum_left,
    view_draft,
    without_noise,
)

__all__ = ["match_tree", "reject_tree", "variants"]

Walks = tuple[Tensor, Tensor, Tensor, Tensor]


@triton.jit
def node_lanes(tokens, parents, n_valid, b, nodes, parents_stride, NODES: tl.constexpr):
    """Read a row's nodes: number, token (-1 where padded), parent."""
    lane = tl.arange(0, NODES)
    counted = lane < tl.minimum(tl.load(n_valid + b), nodes)
    token = tl.load(tokens + b * nodes + lane, mask=counted, other=-1)
    parent = tl.load(parents + b * parents_stride + lane, mask=lane < nodes, other=-2)
    # parents come before children: a node that says otherwise hangs nowhere, and every walk ends
    return lane, token, tl.where(parent < lane, parent, -2).to(tl.int32)


@triton.jit
def store_walk(path, accepted, last, broken, b, nodes, lane, steps, depth, token, bad):  # noqa: PLR0913 - a device function
    """Write one row's walk."""
    tl.store(path + b * nodes + lane, steps.to(tl.int64), mask=lane < nodes)
    tl.store(accepted + b, depth.to(tl.int64))
    tl.store(last + b, token)
    tl.store(broken + b, bad.to(tl.int8))


@triton.jit(do_not_specialize=COUNTS)
def _match(  # noqa: PLR0913 - a kernel
    drawn,
    invalid,
    tokens,
    parents,
    n_valid,
    path,
    accepted,
    last,
    broken,
    nodes,
    parents_stride,
    NODES: tl.constexpr,
):
    """Follow the child that carries the drawn token."""
    b = tl.program_id(0).to(tl.int64)
    lane, token_of, parent_of = node_lanes(tokens, parents, n_valid, b, nodes, parents_stride, NODES)
    steps = tl.zeros([NODES], tl.int32)
    here = b * (nodes + 1)
    node = tl.full([], -1, tl.int32)
    depth = tl.full([], 0, tl.int32)
    token = tl.load(drawn + here)
    bad = tl.load(invalid + here) != 0
    walking = bad == 0
    while walking:
        child = tl.min(tl.where((parent_of == node) & (token_of == token) & (token_of >= 0), lane, NODES), 0)
        walking = child < NODES
        if walking:
            steps = tl.where(lane == depth, child, steps)
            node = child
            depth = depth + 1
            token = tl.load(drawn + here + child + 1)
            bad = tl.load(invalid + here + child + 1) != 0
            walking = bad == 0
    store_walk(path, accepted, last, broken, b, nodes, lane, steps, depth, token, bad)


@triton.jit
def _mass_left(q_view, row, vocab, p_law, total, scale, LIST: tl.constexpr):
    """Sum what ``scale q`` leaves of p."""
    if LIST == 0:
        q_row, q_vocab, q_top, q_unit = q_view
        draft = (q_row, q_vocab, q_top, (scale * total * q_unit).to(tl.float32))
        mass = tl.full([], 0.0, tl.float64)
        for chunk in range(0, tl.cdiv(vocab, CHUNK)):
            rest = left_over(row, chunk * CHUNK, vocab, p_law, draft, 1.0, STRIPS, True)
            mass += tl.sum(tl.sum(rest, 1).to(tl.float64), 0)
        return mass / total
    else:  # outside the list nothing is ever taken
        _, q_of, p_of, outside = q_view
        return outside + tl.sum(without_noise(p_of - scale * q_of, p_of), 0)


@triton.jit
def _offer(  # noqa: PLR0913 - a device function
    row,
    p_law,
    total,
    lane,
    mine,
    token_of,
    vocab,
    q_view,
    accept,
    WITHOUT: tl.constexpr,
    MANY: tl.constexpr,
    NODES: tl.constexpr,
    LIST: tl.constexpr,
):
    """Offer one node's children, those that ``mine`` marks.

    Returns: the accepted child, NODES if none is; the scale of q in what is left of p.
    """
    p_unit = 1.0 / total
    scale = tl.full([], 0.0, tl.float64)
    mass = tl.full([], 1.0, tl.float64)
    left = tl.full([], 1.0, tl.float64)
    chosen = tl.full([], NODES, tl.int32)
    rank = tl.full([], 0, tl.int32)
    child = tl.min(tl.where(mine, lane, NODES), 0)
    while child < NODES:
        token = tl.sum(tl.where(lane == child, token_of, 0), 0).to(tl.int32)
        q_child = chance(q_view, token, LIST)
        offered = q_child > 0.0
        if WITHOUT:
            offered &= tl.sum((mine & (lane < child) & (token_of == token)).to(tl.int32), 0) == 0
        if offered:
            if MANY:
                if scale > 0.0:
                    mass = _mass_left(q_view, row, vocab, p_law, total, scale, LIST)
            p_child = kept_weights(row, token, token < vocab, p_law).to(tl.float64) * p_unit
            p_left = without_noise(p_child - scale * q_child, p_child)
            room = tl.maximum(left, q_child)  # equal to left but for rounding, and never zero
            certain = q_child * mass - p_left * room <= p_child * NOISE
            drawn = tl.load(accept + rank) * q_child * mass < p_left * room  # no division
            if (p_left > 0.0) & (certain | drawn):
                chosen = child
            else:
                scale += mass / room
                if WITHOUT:
                    left = room - q_child
        rank += 1
        following = tl.min(tl.where(mine & (lane > child), lane, NODES), 0)
        child = tl.where(chosen < NODES, NODES, following)
    return chosen, scale


@triton.jit(do_not_specialize=COUNTS)
def _reject(  # noqa: PLR0913 - a kernel
    logits,
    temperature,
    law,
    q_ids,
    q,
    maxima,
    sums,
    drawn,
    invalid,
    tokens,
    parents,
    n_valid,
    accept,
    sample,
    path,
    accepted,
    last,
    broken,
    rows,
    shares,
    siblings,
    parents_stride,
    vocab,
    q_vocab,
    nodes,
    listed,
    batch_stride,
    row_stride,
    q_batch_stride,
    q_row_stride,
    WITHOUT: tl.constexpr,
    MANY: tl.constexpr,
    NODES: tl.constexpr,
    LIST: tl.constexpr,
):
    """Walk one row's tree by recursive rejection, and store what is to be redrawn where it ends."""
    b = tl.program_id(0).to(tl.int64)
    lane, token_of, parent_of = node_lanes(tokens, parents, n_valid, b, nodes, parents_stride, NODES)
    token_of = tl.where(token_of < vocab, token_of, -1)
    warmth = tl.load(temperature + b).to(tl.float32)
    steps = tl.zeros([NODES], tl.int32)
    here = b * (nodes + 1)
    node = tl.full([], -1, tl.int32)
    depth = tl.full([], 0, tl.int32)
    first = tl.full([], -1, tl.int32)
    scale = tl.full([], 0.0, tl.float64)
    token = tl.load(drawn + here)
    bad = tl.load(invalid + here) != 0
    walking = bad == 0
    while walking:
        mine = parent_of == node
        child = tl.min(tl.where(mine & (token_of == token) & (token_of >= 0), lane, NODES), 0)
        if (warmth > 0.0) & (tl.sum((mine & (token_of >= 0)).to(tl.int32), 0) > 0):
            first = tl.min(tl.where(mine, lane, NODES), 0)
            row = logits + b * batch_stride + (node + 1).to(tl.int64) * row_stride
            p_law, total = read_law(law, warmth, here + node + 1)
            q_row = q + b * q_batch_stride + first.to(tl.int64) * q_row_stride
            place = b * nodes + first
            q_view = view_draft(q_ids, q, q_row, maxima, sums, place, q_vocab, listed, row, vocab, p_law, total, LIST)
            coins = accept + (here + depth) * siblings
            child, scale = _offer(
                row, p_law, total, lane, mine, token_of, vocab, q_view, coins, WITHOUT, MANY, NODES, LIST
            )
        walking = child < NODES
        if walking:
            steps = tl.where(lane == depth, child, steps)
            node = child
            depth = depth + 1
            scale = tl.full([], 0.0, tl.float64)
            token = tl.load(drawn + here + child + 1)
            bad = tl.load(invalid + here + child + 1) != 0
            walking = bad == 0
    store_walk(path, accepted, last, broken, b, nodes, lane, steps, depth, token, bad)
    tl.store(rows + b * 2, node + 1)
    tl.store(rows + b * 2 + 1, tl.where(scale > 0.0, first, -1))
    tl.store(shares + b * 2, 1.0)
    tl.store(shares + b * 2 + 1, scale)


@torch.library.custom_op("hf_specgen::match_tree", mutates_args=())
def match_tree(drawn: Tensor, invalid: Tensor, tokens: Tensor, parents: Tensor, n_valid: Tensor) -> Walks:
    """Follow the child that carries the token drawn at its parent: see ``reference_walks``."""
    walks = empty_walks(tokens)
    nodes = tokens.shape[1]
    if len(tokens):
        places = triton.next_power_of_2(max(nodes, 1))
        with on_device(tokens):
            _match[(len(tokens),)](
                drawn.contiguous(),
                bits(invalid),
                tokens.contiguous(),
                parents.contiguous(),
                n_valid.contiguous(),
                *map(bits, walks),
                nodes,
                parents_stride(parents),
                places,
                num_warps=1,
                enable_fp_fusion=False,
            )
    return walks


@match_tree.register_fake
def _(drawn: Tensor, invalid: Tensor, tokens: Tensor, parents: Tensor, n_valid: Tensor) -> Walks:
    return empty_walks(tokens)


@torch.library.custom_op("hf_specgen::reject_tree", mutates_args=())
def reject_tree(  # noqa: PLR0913 - one launch decides everything
    logits: Tensor,
    temperature: Tensor,
    law: Tensor,
    drawn: Tensor,
    invalid: Tensor,
    tokens: Tensor,
    parents: Tensor,
    n_valid: Tensor,
    q_ids: Tensor | None,
    q: Tensor,
    accept: Tensor,
    sample: Tensor,
    without_replacement: bool,
) -> Walks:
    """Walk trees by recursive rejection: see ``reference_walks``."""
    if not tokens.numel():
        return match_tree(drawn, invalid, tokens, parents, n_valid)
    parents = parents.contiguous()
    n_valid = n_valid.contiguous()
    sample = sample.contiguous()
    given = read_rows(logits, temperature, law, parents, n_valid, q_ids, q)
    walks, batch, nodes = empty_walks(tokens), *tokens.shape
    rows = tokens.new_empty(batch, 2, dtype=torch.int32)
    shares = sample.new_empty(batch, 2)
    siblings = accept.shape[-1]
    many = siblings > 1
    with on_device(tokens):
        _reject[(batch,)](
            *given,
            drawn.contiguous(),
            bits(invalid),
            tokens.contiguous(),
            parents,
            n_valid,
            accept.contiguous(),
            sample,
            *map(bits, walks),
            rows,
            shares,
            siblings,
            parents_stride(parents),
            *given.sizes,
            *given.strides,
            without_replacement and many,
            many,
            triton.next_power_of_2(nodes),
            given.places,
            num_warps=_warps(given.places, many),
            enable_fp_fusion=False,
        )
    draw_left(given, rows, shares, sum_left(given, rows, shares), walks[1], sample, walks[2])
    return walks


@reject_tree.register_fake
def _(
    logits: Tensor, temperature: Tensor, law: Tensor, drawn: Tensor, invalid: Tensor, tokens: Tensor, *others: object
) -> Walks:
    return empty_walks(tokens)


def empty_walks(tokens: Tensor) -> Walks:
    """Make room for the walks of ``tokens (B, N)``."""
    rows = tokens.shape[0]
    n = tokens.new_empty(rows)
    last = tokens.new_empty(rows)
    return torch.empty_like(tokens), n, last, tokens.new_empty(rows, dtype=torch.bool)


def bits(flags: Tensor) -> Tensor:
    """Show bools as bytes, and anything else as it is, in one piece."""
    flags = flags.contiguous()
    return flags.view(torch.int8) if flags.dtype == torch.bool else flags


def parents_stride(parents: Tensor) -> int:
    """Return the step from one row's parents to the next: 0 where all rows share one tree."""
    return parents.shape[1] if len(parents) > 1 else 0


def _warps(places: int, many: bool) -> int:
    """Return the warps of a walk: only what is left of a dense q between siblings is work for more than four."""
    return 16 if many and not places else 4


def variants() -> list[Variant]:
    """List what to compile where there is no GPU: name, kernel, signature, constants, warps."""
    walk = {"drawn": "*i64", "invalid": "*i8", "tokens": "*i64", "parents": "*i64", "n_valid": "*i64"}
    walk |= {"path": "*i64", "accepted": "*i64", "last": "*i64", "broken": "*i8", "nodes": "i32"}
    walk |= {"parents_stride": "i32", "siblings": "i32", "accept": "*fp64", "sample": "*fp64"}
    walk |= {"rows": "*i32", "shares": "*fp64"}
    found: list[Variant] = [("match_tree", _match, walk, {"NODES": 64}, 1)]
    for name, types, constants in draft_kinds():
        warps = [_warps(int(str(constants["LIST"])), many) for many in (False, True)]
        plain = {**constants, "NODES": 64, "MANY": False, "WITHOUT": False}
        found.append((f"reject_tree {name}, chain", _reject, {**types, **walk}, plain, warps[0]))
        for without in (False, True):
            label = f"reject_tree {name}, siblings" + (" without replacement" if without else "")
            found.append((label, _reject, {**types, **walk}, {**plain, "MANY": True, "WITHOUT": without}, warps[1]))
    return found
