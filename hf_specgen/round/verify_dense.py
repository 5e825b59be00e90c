"""The same verdict in a few launches and without a wait: all rows' statistics, a draw at every node, one walk."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from hf_specgen import ops
from hf_specgen.round.coins import ACCEPT, SAMPLE, CoinSource
from hf_specgen.round.records import Draft, SparseQ, Verdict

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_BITONIC = 32  # torch sorts up to so many entries on a GPU by a network that mixes equal ones


@dataclass(frozen=True)
class Dense:
    """Hold the logits of every scored place, and what is still to be done to them; temperature 0 is greedy.

    Shapes: ``logits (B, S, V)`` of a dtype in ``FLOATS``.
    """

    logits: Tensor
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def keeps_ties_by_id(device: torch.device, vocab: int) -> bool:
    """Tell whether transformers' top-p keeps of equal logits those with the highest ids, as the kernels do.

    It keeps what its sort puts last: torch's merge and radix sorts on GPUs leave equal logits in order, its sort on
    CPUs mixes them.
    """
    return device.type == "cuda" and vocab > _BITONIC


def never_empty(logits: Tensor) -> Tensor:
    """Raise -inf to the lowest number: where processors ban every token, plain greedy decoding writes the first one."""
    return logits.clamp(min=torch.finfo(logits.dtype).min)


def verify_dense(dense: Dense, draft: Draft, coins: CoinSource | None, rule: str) -> Verdict:
    """Judge a draft as ``verify`` does, reading each row of logits once and only a resampled row again."""
    batch, scored, vocab = dense.logits.shape
    flat = dense.logits.reshape(-1, vocab)
    places = (batch, scored)
    if dense.temperature == 0 or coins is None:
        token, _, invalid = _draw(dense, flat, _constant(0.0, len(flat), torch.float64, flat.device))
        return _match(token, invalid, draft)
    if rule == "gumbel":
        rows, depth, _ = _numbers(*places, 1, flat.device)
        depth = depth if draft.tree.is_chain else draft.tree.depth.expand(batch, -1).flatten()
        temperature = _constant(dense.temperature, len(flat), torch.float32, flat.device)
        return _match(*coins.gumbel_pick(flat, temperature, rows, depth), draft)
    sample = _toss(coins, *places, SAMPLE, 1, flat.device).view(places)
    at_place = sample if draft.tree.is_chain else sample.gather(1, draft.tree.depth.expand(batch, -1))
    token, law, invalid = _draw(dense, flat, at_place.flatten())
    if draft.q is None or not draft.width:
        return _match(token, invalid, draft)
    temperature = _constant(dense.temperature, batch, torch.float32, flat.device)
    target = (dense.logits, temperature, law.view(*places, -1), token.view(places), invalid.view(places))
    q_ids, q = (draft.q.ids, draft.q.probs) if isinstance(draft.q, SparseQ) else (None, draft.q.logits)
    if rule == "block":
        accept = _toss(coins, batch, 1, ACCEPT, draft.width, flat.device)[:, 0]
        return Verdict(*ops.block_chain(*target, draft.tokens, draft.n_valid, q_ids, q, accept, sample))
    siblings = 1 if draft.tree.is_chain else draft.width
    accept = _toss(coins, *places, ACCEPT, siblings, flat.device)
    shape = (draft.tokens, draft.tree.parents, draft.n_valid)
    return Verdict(*ops.reject_tree(*target, *shape, q_ids, q, accept, sample, draft.without_replacement))


def _draw(dense: Dense, flat: Tensor, coin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token from the law of every row; also return the laws and which rows are broken."""
    cut = (dense.top_k > 0 or dense.top_p < 1 or dense.min_p > 0) and dense.temperature > 0
    top_k, top_p, min_p = (min(dense.top_k, flat.shape[1]), dense.top_p, dense.min_p) if cut else (0, 1.0, 0.0)
    rows = len(flat)
    device = flat.device
    settings = (
        _constant(dense.temperature, rows, torch.float32, device),
        _constant(top_k, rows, torch.int32, device),
        _constant(_not_above(top_p), rows, torch.float32, device),
        _constant(min_p, rows, torch.float32, device),
    )
    return ops.row_draw(flat, *settings, coin, *ops.row_stats(flat, settings[0], cut))


def _toss(coins: CoinSource, rows: int, depths: int, use: int, siblings: int, device: torch.device) -> Tensor:
    """Toss the coins of every row, depth and sibling at once, as ``coins.toss`` does: ``(B, depths, K)``."""
    row, depth, sibling = _numbers(rows, depths, siblings, device)
    return coins.uniform(row, depth, use, 0 if sibling is None else sibling).view(rows, depths, siblings)


# The rest is the same in every round: made anew, it would cost more launches than the verdict itself.


@lru_cache(maxsize=64)
def _constant(value: float, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # it outlives the call
        return torch.full((count,), value, dtype=dtype, device=device)


@lru_cache(maxsize=64)
def _numbers(rows: int, depths: int, siblings: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    """Number the row, the depth and the sibling (None: there is one) of every coin of a table."""
    with torch.inference_mode(False):
        place = torch.arange(rows * depths * siblings, device=device)
        sibling = place % siblings if siblings > 1 else None
        place = place // siblings
        return place // depths, place % depths, sibling


@lru_cache(maxsize=64)
def _not_above(value: float) -> float:
    """Round to float32, never up: where equal tokens reach the edge exactly, one more would stay."""
    single = torch.tensor(value, dtype=torch.float32)
    return float(single if float(single) <= value else single.nextafter(torch.zeros_like(single)))


def _match(token: Tensor, invalid: Tensor, draft: Draft) -> Verdict:
    places = (len(draft.tokens), draft.width + 1)
    drawn = (token.view(places), invalid.view(places))
    return Verdict(*ops.match_tree(*drawn, draft.tokens, draft.tree.parents, draft.n_valid))
