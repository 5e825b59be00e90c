"""The same verdict in a few launches and without a wait: all rows' statistics, a draw at every node, one walk."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_specgen import ops
from hf_specgen.coins import ACCEPT, SAMPLE, CoinSource, toss
from hf_specgen.draft import Draft, SparseQ, Verdict

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


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


def verify_dense(dense: Dense, draft: Draft, coins: CoinSource | None, rule: str) -> Verdict:
    """Judge a draft as ``verify`` does, reading each row of logits once and only a resampled row again."""
    batch, scored, vocab = dense.logits.shape
    flat = dense.logits.reshape(-1, vocab)
    temperature = flat.new_full((len(flat),), dense.temperature, dtype=torch.float32)
    depth, places = draft.tree.depth.expand(batch, -1), (batch, scored)
    if rule == "gumbel" and coins is not None and dense.temperature > 0:
        rows = torch.arange(batch, device=flat.device).repeat_interleave(scored)
        token, invalid = coins.gumbel_pick(flat, temperature, rows, depth.flatten())
        return _match(token, invalid, draft)
    sample = (
        torch.zeros_like(depth, dtype=torch.float64)
        if coins is None
        else toss(coins, *places, SAMPLE, 1, flat.device)[..., 0]
    )
    token, law, invalid = _draw(dense, flat, temperature, sample.gather(1, depth).flatten())
    if draft.q is None or coins is None or dense.temperature == 0 or not draft.width:
        return _match(token, invalid, draft)
    target = (dense.logits, temperature[:batch], law.view(*places, -1), token.view(places), invalid.view(places))
    q_ids, q = (draft.q.ids, draft.q.probs) if isinstance(draft.q, SparseQ) else (None, draft.q.logits)
    if rule == "block":
        accept = toss(coins, batch, 1, ACCEPT, draft.width, flat.device)[:, 0]
        return Verdict(*ops.block_chain(*target, draft.tokens, draft.n_valid, q_ids, q, accept, sample))
    siblings = 1 if draft.tree.is_chain else draft.width
    accept = toss(coins, *places, ACCEPT, siblings, flat.device)
    shape = (draft.tokens, draft.tree.parents, draft.n_valid)
    return Verdict(*ops.reject_tree(*target, *shape, q_ids, q, accept, sample, draft.without_replacement))


def _draw(dense: Dense, flat: Tensor, temperature: Tensor, coin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token from the law of every row; also return the laws and which rows are broken."""
    cut = (dense.top_k > 0 or dense.top_p < 1 or dense.min_p > 0) and dense.temperature > 0
    top_k = flat.new_full((len(flat),), min(dense.top_k, flat.shape[1]) if cut else 0, dtype=torch.int32)
    top_p = torch.full_like(temperature, _not_above(dense.top_p) if cut else 1.0)
    min_p = torch.full_like(temperature, dense.min_p if cut else 0.0)
    statistics = ops.row_stats(flat, temperature, cut)
    return ops.row_draw(flat, temperature, top_k, top_p, min_p, coin, *statistics)


def _not_above(value: float) -> float:
    """Round to float32, never up: where equal tokens reach the edge exactly, one more would stay."""
    single = torch.tensor(value, dtype=torch.float32)
    return float(single if float(single) <= value else single.nextafter(torch.zeros_like(single)))


def _match(token: Tensor, invalid: Tensor, draft: Draft) -> Verdict:
    places = (len(draft.tokens), draft.width + 1)
    drawn = (token.view(places), invalid.view(places))
    return Verdict(*ops.match_tree(*drawn, draft.tokens, draft.tree.parents, draft.n_valid))
