"""The definition of tree attention, and the fastest plain torch for it: few queries over a slot cache under a mask."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["tree_attention"]


def tree_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """Attend with the head group folded into the query axis, so that keys and values are never repeated.

    A query that sees nothing gets zeros. ``softcap`` 0 is none; ``sinks`` adds one logit a head that takes weight and
    gives no value. These two round as Gemma 2 and GPT-OSS do in eager attention; without them it is torch's own.

    Shapes: ``query (B, Hq, S, D)``, ``key (B, Hkv, T, D)``, ``value (B, Hkv, T, Dv)``, ``mask (B or 1, 1, S, T)`` bool,
    ``sinks (Hq)``. Returns: ``(B, Hq, S, Dv)``.
    """
    rows, heads, width, dim = query.shape
    shared = key.shape[1]
    group = heads // shared
    folded = query.reshape(rows, shared, group * width, dim)
    if softcap == 0 and sinks is None:
        seen = mask if group == 1 else mask.repeat(1, 1, group, 1)
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=seen, scale=scale)
        return out.reshape(rows, heads, width, value.shape[-1])
    if key.dtype == torch.bfloat16 and not key.is_cuda:
        key = key.contiguous()  # a CPU multiplies a gapped bfloat16 view three times slower than it copies it
    logits = folded.matmul(key.mT).mul_(scale)
    if softcap:
        logits = logits.div_(softcap).tanh_().mul_(softcap)
    by_head = logits.view(rows, shared, group, width, -1)
    lowest = max(torch.finfo(logits.dtype).min, torch.finfo(torch.float32).min)  # finite where the softmax is float32
    by_head.masked_fill_(~mask[:, :, None], lowest)
    weights = (
        logits.softmax(-1, dtype=torch.float32) if sinks is None else _softmax_beside(by_head, sinks).flatten(2, 3)
    )
    out = weights.to(value.dtype).matmul(value).view(rows, heads, width, value.shape[-1])
    return out.mul_(mask.any(-1, keepdim=True))


def _softmax_beside(logits: Tensor, sinks: Tensor) -> Tensor:
    """Normalise beside one more logit a head: ``logits (B, Hkv, G, S, T)``; the sink's own weight is dropped."""
    rows, shared, group, width, _ = logits.shape
    sink = sinks.to(logits.dtype).view(1, shared, group, 1, 1).expand(rows, -1, -1, width, -1)
    logits = torch.cat((logits, sink), -1)
    logits -= logits.amax(-1, keepdim=True)
    return logits.softmax(-1)[..., :-1]
