"""What the Triton kernels share: Philox on the device, weights, ordered keys, and an exact inverse of a running sum."""

# mypy: allow-untyped-defs, allow-incomplete-defs
# (the arguments of a kernel have Triton's types, which have no stubs)

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Sizes never depend on the batch or on the card: a row's bits are the same whoever its neighbours are.
CHUNK = tl.constexpr(8192)
STRIP = tl.constexpr(128)
CHUNKS = tl.constexpr(128)  # places for a row's chunks: vocabularies up to 2**20
FLOOR = tl.constexpr(-100.0)  # a weight below 2**-100 of the largest is zero, in every kernel alike
LOWEST = tl.constexpr(-3.4028234663852886e38)
LOG2E = tl.constexpr(1.4426950408889634)
_MULTIPLY_EVEN = tl.constexpr(0xD2511F53)
_MULTIPLY_ODD = tl.constexpr(0xCD9E8D57)
_WEYL_EVEN = tl.constexpr(0x9E3779B9)
_WEYL_ODD = tl.constexpr(0xBB67AE85)

MAX_VOCAB = 8192 * 128
# Bits of an ordered key that carry nothing: a bfloat16 ends after 16 bits, a float16 after 19.
KEY_SHIFT = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
POINTER = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}

# Every launch says enable_fp_fusion=False: Triton's own choice changes with its version, and the bits with it.

Variant = tuple[str, Any, dict[str, str], dict[str, Any], int]
"""One compilation: name, jit function, signature (argument to type), constants, warps."""


def on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Make the tensor's GPU the current one: Triton launches there."""
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else nullcontext()


def dense_rows(logits: Tensor) -> Tensor:
    """Return logits whose rows are contiguous; the rows themselves may lie anywhere."""
    return logits if logits.stride(-1) == 1 or logits.shape[-1] == 1 else logits.contiguous()


def chunks_of(vocab_size: int) -> tuple[int, int]:
    """Return how many chunks and strips a row has.

    Raises: ValueError beyond 2**20 tokens.
    """
    if not 0 < vocab_size <= MAX_VOCAB:
        raise ValueError(f"the vocabulary has {vocab_size} tokens; the kernels take 1 to {MAX_VOCAB}.")
    return -(-vocab_size // 8192), -(-vocab_size // 128)


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Encrypt uint32 counters with Philox4x32-10 (Salmon et al. 2011); bit-equal to ``common.philox``."""
    for _ in tl.static_range(10):
        even = c0
        odd = c2
        c0 = tl.umulhi(tl.full(odd.shape, _MULTIPLY_ODD, tl.uint32), odd) ^ c1 ^ k0
        c2 = tl.umulhi(tl.full(even.shape, _MULTIPLY_EVEN, tl.uint32), even) ^ c3 ^ k1
        c1 = odd * tl.full(odd.shape, _MULTIPLY_ODD, tl.uint32)
        c3 = even * tl.full(even.shape, _MULTIPLY_EVEN, tl.uint32)
        k0 = k0 + tl.full(k0.shape, _WEYL_EVEN, tl.uint32)
        k1 = k1 + tl.full(k1.shape, _WEYL_ODD, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def low_word(value):
    """Return the low 32 bits of an int64."""
    return (value & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def high_word(value):
    """Return the high 32 bits of an int64."""
    return ((value >> 32) & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def scale_of(temperature):
    """Return log2(e) / T, so that exp((x - max) / T) = exp2((x - max) * scale) needs no division per element."""
    # within bounds: 0 * inf and -inf * 0 are NaN
    return tl.minimum(tl.maximum((1.0 / temperature) * LOG2E, 1e-30), 1e37)


@triton.jit
def weights(x, top, scale):
    """Return exp2((x - top) * scale), exactly zero below the floor; ``top`` must be finite."""
    exponent = (x - top) * scale
    return tl.where(exponent < FLOOR, 0.0, tl.exp2(exponent))


@triton.jit
def key_of(x, SHIFT: tl.constexpr):
    """Map float32 to int32 in the same order, both zeros to one key, without the SHIFT bits that carry nothing."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> SHIFT


@triton.jit
def value_of(key, SHIFT: tl.constexpr):
    """Invert ``key_of``."""
    low = (1 << SHIFT) - 1
    bits = tl.where(key < 0, ((key << SHIFT) | low) ^ 0x7FFFFFFF, key << SHIFT)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def pick(mass, at, N: tl.constexpr):
    """Find the place whose piece of the running float64 sum of ``mass (N)`` holds ``at``; never an empty place.

    Returns: the place, what of ``at`` lies inside its piece, and the piece's mass.
    """
    place = tl.arange(0, N)
    prefix = tl.cumsum(mass, 0)
    # A parallel scan is not monotone, and rounding can push `at` past the end: only places with mass count.
    first = tl.min(tl.where((mass > 0.0) & (prefix > at), place, N))
    last = tl.max(tl.where(mass > 0.0, place, 0))
    chosen = tl.where(first < N, first, last)
    before = tl.sum(tl.where(place < chosen, mass, 0.0))
    piece = tl.sum(tl.where(place == chosen, mass, 0.0))
    return chosen, tl.minimum(tl.maximum(at - before, 0.0), piece), piece
