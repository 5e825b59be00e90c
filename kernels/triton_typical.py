"""Triton twin of typical acceptance: see ``reference_walks.typical_tree`` for what it computes."""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (the arguments of a kernel have Triton's types, which have no stubs)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_common import CHUNK, POINTER, Variant, chunks_of, dense_rows, on_device, scale_of, weights
from .triton_residual import COUNTS, kept_weights, read_law
from .triton_walks import Walks, bits, empty_walks, node_lanes, parents_stride, store_walk

__all__ = ["typical_tree", "variants"]


@triton.jit(do_not_specialize=COUNTS)
def _spread(  # noqa: PLR0913 - a kernel
    logits,
    temperature,
    law,
    parents,
    n_valid,
    parts,
    vocab,
    nodes,
    parents_stride,
    batch_stride,
    row_stride,
    NODES: tl.constexpr,
):
    """Sum ``-w log2 w`` over one chunk of one place that has children: a part of its entropy."""
    item = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    b = item // (nodes + 1)
    place = (item % (nodes + 1)).to(tl.int32)
    warmth = tl.load(temperature + b).to(tl.float32)
    lane = tl.arange(0, NODES)
    counted = lane < tl.minimum(tl.load(n_valid + b), nodes)
    parent = tl.load(parents + b * parents_stride + lane, mask=counted, other=-2)
    if (warmth > 0.0) & (tl.sum((parent + 1 == place).to(tl.int32), 0) > 0):
        p_law, _ = read_law(law, warmth, item)
        index = chunk * CHUNK + tl.arange(0, CHUNK)
        row = logits + b * batch_stride + place.to(tl.int64) * row_stride
        weight = kept_weights(row, index, index < vocab, p_law)
        part = tl.where(weight > 0.0, -weight * tl.log2(tl.where(weight > 0.0, weight, 1.0)), 0.0)
        tl.store(parts + item * tl.num_programs(1) + chunk, tl.sum(part, 0))


@triton.jit
def _levels(kept, parent_of, score):
    """Number the levels of the nodes that hang on the root by kept nodes alone, from 1; the others are 0.

    Also add up ``score`` along the path down to each of them.
    """
    level = tl.where(kept & (parent_of == -1), 1, 0)
    seen = tl.full([], -1, tl.int32)
    count = tl.sum((level > 0).to(tl.int32), 0)
    while count > seen:
        line = tl.maximum(parent_of, 0)
        above = tl.gather(level, line, 0)
        over = tl.gather(score, line, 0)
        fresh = kept & (parent_of >= 0) & (above > 0) & (level == 0)
        level = tl.where(fresh, above + 1, level)
        score = tl.where(fresh, over + score, score)
        seen = count
        count = tl.sum((level > 0).to(tl.int32), 0)
    return level, score


@triton.jit(do_not_specialize=COUNTS)
def _typical(  # noqa: PLR0913 - a kernel
    logits,
    temperature,
    law,
    drawn,
    invalid,
    tokens,
    parents,
    n_valid,
    parts,
    path,
    accepted,
    last,
    broken,
    epsilon,
    delta,
    vocab,
    nodes,
    parents_stride,
    batch_stride,
    row_stride,
    NODES: tl.constexpr,
):
    """Judge all nodes of one row side by side, then follow the deepest path of typical ones, of two the likelier."""
    b = tl.program_id(0).to(tl.int64)
    lane, token_of, parent_of = node_lanes(tokens, parents, n_valid, b, nodes, parents_stride, NODES)
    real = (token_of >= 0) & (token_of < vocab) & (parent_of >= -1)  # what hangs nowhere has no row
    here = b * (nodes + 1)
    place = here + parent_of + 1
    warmth = tl.load(temperature + b).to(tl.float32)
    lost = tl.load(invalid + place, mask=real, other=0) != 0
    if warmth > 0.0:
        top = tl.load(law + place * 4, mask=real, other=0.0).to(tl.float32)
        total = tl.load(law + place * 4 + 1, mask=real, other=1.0)
        threshold = tl.load(law + place * 4 + 2, mask=real, other=0.0).to(tl.float32)
        tie = tl.load(law + place * 4 + 3, mask=real, other=0.0).to(tl.int32)
        row = logits + b * batch_stride + (parent_of + 1).to(tl.int64) * row_stride
        x = tl.load(row + token_of, mask=real, other=float("-inf")).to(tl.float32)
        inside = (x > threshold) | ((x == threshold) & (token_of >= tie))
        chance = tl.where(inside, weights(x, top, scale_of(warmth)), 0.0).to(tl.float64) / total
        chunks = tl.cdiv(vocab, CHUNK)
        spread = tl.zeros([NODES], tl.float64)
        for chunk in range(0, chunks):
            spread += tl.load(parts + place * chunks + chunk, mask=real, other=0.0).to(tl.float64)
        # the sum is in the weights' own unit: H = log2(total) + sum / total, in bits
        bits = tl.log2(total.to(tl.float32)) + (spread / total).to(tl.float32)
        kept = chance > tl.minimum(epsilon, delta * tl.exp2(-bits))
        score = tl.log2(tl.where(kept, chance, 1.0).to(tl.float32))
    else:
        kept = token_of == tl.load(drawn + place, mask=real, other=-1)
        score = tl.zeros([NODES], tl.float32)
    kept &= real & (lost == 0)

    level, score = _levels(kept, parent_of, score)
    depth = tl.max(level, 0)
    score = tl.where((level == depth) & (depth > 0), score, float("-inf"))
    node = tl.min(tl.where((score == tl.max(score, 0)) & (level == depth), lane, NODES), 0)
    node = tl.where(depth > 0, node, -1)
    token = tl.load(drawn + here + node + 1)
    bad = tl.load(invalid + here + node + 1) != 0
    reached = (parent_of == -1) | ((parent_of >= 0) & (tl.gather(level, tl.maximum(parent_of, 0), 0) > 0))
    bad |= tl.sum((real & reached & lost).to(tl.int32), 0) > 0

    steps = tl.zeros([NODES], tl.int32)
    above = depth
    while above > 0:
        above -= 1
        steps = tl.where(lane == above, node, steps)
        node = tl.sum(tl.where(lane == node, parent_of, 0), 0)
    store_walk(path, accepted, last, broken, b, nodes, lane, steps, depth, token, bad)


@torch.library.custom_op("hf_specgen::typical_tree", mutates_args=())
def typical_tree(  # noqa: PLR0913 - one operation decides everything
    logits: Tensor,
    temperature: Tensor,
    law: Tensor,
    drawn: Tensor,
    invalid: Tensor,
    tokens: Tensor,
    parents: Tensor,
    n_valid: Tensor,
    epsilon: float,
    delta: float,
) -> Walks:
    """Keep the deepest path of typical tokens (lossy): see ``reference_walks``."""
    walks = empty_walks(tokens)
    (batch, nodes) = tokens.shape
    vocab = logits.shape[-1]
    if not batch:
        return walks
    chunks, _ = chunks_of(vocab)
    logits = dense_rows(logits)
    temperature = temperature.contiguous()
    law = law.contiguous()
    parents = parents.contiguous()
    n_valid = n_valid.contiguous()
    parts = logits.new_empty(batch * (nodes + 1), chunks, dtype=torch.float32)
    geometry = (vocab, nodes, parents_stride(parents), *logits.stride()[:2], triton.next_power_of_2(max(nodes, 1)))
    with on_device(logits):
        _spread[(len(parts), chunks)](
            logits, temperature, law, parents, n_valid, parts, *geometry, num_warps=8, enable_fp_fusion=False
        )
        _typical[(batch,)](
            logits,
            temperature,
            law,
            drawn.contiguous(),
            bits(invalid),
            tokens.contiguous(),
            parents,
            n_valid,
            parts,
            *map(bits, walks),
            epsilon,
            delta,
            *geometry,
            num_warps=1,
            enable_fp_fusion=False,
        )
    return walks


@typical_tree.register_fake
def _(
    logits: Tensor, temperature: Tensor, law: Tensor, drawn: Tensor, invalid: Tensor, tokens: Tensor, *others: object
) -> Walks:
    return empty_walks(tokens)


def variants() -> list[Variant]:
    """List what to compile where there is no GPU: name, kernel, signature, constants, warps."""
    types = {"temperature": "*fp32", "law": "*fp64", "drawn": "*i64", "invalid": "*i8", "tokens": "*i64"}
    types |= {"parents": "*i64", "n_valid": "*i64", "parts": "*fp32", "path": "*i64", "accepted": "*i64"}
    types |= {"last": "*i64", "broken": "*i8", "epsilon": "fp32", "delta": "fp32"}
    types |= dict.fromkeys(("vocab", "nodes", "parents_stride"), "i32")
    types |= {"batch_stride": "i64", "row_stride": "i64"}
    found: list[Variant] = []
    for dtype in POINTER.values():
        rows = {**types, "logits": dtype}
        found.append((f"typical_tree entropy {dtype[1:]}", _spread, rows, {"NODES": 64}, 8))
        found.append((f"typical_tree {dtype[1:]}", _typical, rows, {"NODES": 64}, 1))
    return found
