"""Rows of logits with every edge, their settings, and what a row's law keeps."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from hf_specgen.kernels import reference_rows

INF = math.inf
LAST_COIN = 1.0 - 2.0**-53
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # elsewhere the interpreter runs on CPU tensors
DTYPES = [torch.bfloat16, torch.float16, torch.float32]

Drawn = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Batch:
    """Rows and their settings; every field has R entries."""

    logits: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    coin: Tensor

    def drawn_by(self, stats, draw, strips: bool = True, device: str = "cpu") -> Drawn:
        """Run ``row_stats`` and ``row_draw`` of one side and return the draw on the CPU."""
        fields = [each.to(device) for each in vars(self).values()]
        token, law, invalid = draw(*fields, *stats(fields[0], fields[1], strips))
        return token.cpu(), law.cpu(), invalid.cpu()

    def defined(self, strips: bool = True) -> Drawn:
        return self.drawn_by(reference_rows.row_stats, reference_rows.row_draw, strips)

    def rows(self, places: Tensor | slice) -> Batch:
        return Batch(*(each[places] for each in vars(self).values()))


def pick(source: torch.Generator, values: list[float], count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype)[torch.randint(0, len(values), (count,), generator=source)]


def edge_rows(source: torch.Generator, count: int, vocab: int) -> Tensor:
    """Draw rows of several spreads; the first ones are edges: equal, one survivor, negative, tied, holes, broken."""
    total = max(count, 10)
    scale = pick(source, [0.05, 1.0, 4.0, 40.0], total).unsqueeze(1)
    logits = torch.randn(total, vocab, generator=source) * scale
    holes = torch.rand(total, vocab, generator=source) < 0.4
    holes[:, int(torch.randint(0, vocab, (1,), generator=source))] = False
    edges = [
        torch.full((vocab,), 2.0),
        torch.full((vocab,), -INF).index_fill(0, torch.tensor([vocab // 2]), 1.0),
        -logits[0].abs() - 5,
        logits[1].round().clamp(-2, 2),
        logits[2].masked_fill(holes[2], -INF),
        logits[3].round().masked_fill(holes[3], -INF),
        logits[4].index_fill(0, torch.tensor([vocab // 3]), math.nan),
        logits[5].index_fill(0, torch.tensor([vocab - 1]), INF),
        torch.full((vocab,), -INF),
        torch.zeros(vocab).index_fill(0, torch.tensor([0]), -0.0),
    ]
    logits[: len(edges)] = torch.stack(edges)
    return logits[torch.randperm(total, generator=source)[:count]]


def random_batch(seed: int, count: int, vocab: int, dtype: torch.dtype, truncated: bool = True) -> Batch:
    """Draw a batch in which greedy, sampled and truncated rows, and edges, stand beside each other."""
    source = torch.Generator().manual_seed(seed)
    coin = torch.rand(count, generator=source, dtype=torch.float64)
    coin[::7], coin[3::11] = 0.0, LAST_COIN
    settings = (
        pick(source, [0, 0, 1, 2, 7, 50, 300], count).int(),
        pick(source, [1.0, 1.0, 0.9, 0.3, 0.0], count),
        pick(source, [0.0, 0.0, 0.1, 1e-3, 1.0], count),
    )
    if not truncated:
        settings = (settings[0] * 0, settings[1] * 0 + 1, settings[2] * 0)
    return Batch(
        edge_rows(source, count, vocab).to(dtype),
        pick(source, [0.0, 0.2, 0.7, 1.0, 1.0, 3.0], count),
        *settings,
        coin,
    )


def kept_by(law: Tensor, logits: Tensor) -> Tensor:
    """Mark the tokens that a row's law gives a chance."""
    x, threshold, tie = logits.double(), law[:, 2:3], law[:, 3:4]
    return ((x > threshold) | ((x == threshold) & (torch.arange(x.shape[1]) >= tie))) & (x > -INF)


def decided(batch: Batch, strips: bool = True) -> tuple[Tensor, Tensor]:
    """Tell for which rows the kept set, and for which the token, is the same for all nearby settings and coins."""
    sets, tokens = [], []
    for step in (-1, 0, 1):
        near = replace(
            batch,
            top_p=torch.where(batch.top_p < 1, batch.top_p + step * 2e-6, batch.top_p),
            min_p=batch.min_p * (1 + step * 2e-5) if step <= 0 else (batch.min_p * (1 + 2e-5)).clamp(max=1.0),
            coin=(batch.coin + step * 3e-6).clamp(0.0, LAST_COIN),
        )
        token, law, _ = near.defined(strips)
        sets.append(kept_by(law, batch.logits))
        tokens.append(token)
    same = (sets[0] == sets[1]).all(1) & (sets[1] == sets[2]).all(1)
    return same, same & (tokens[0] == tokens[1]) & (tokens[1] == tokens[2])


def differences(batch: Batch, found: Drawn, strips: bool = True) -> tuple[list[int], float]:
    """Compare a draw with the definition: rows that differ though they are decided, and the share of decided rows."""
    token, law, invalid = batch.defined(strips)
    same_set, same_token = decided(batch, strips)
    sampled = ~invalid & (batch.temperature > 0)
    wrong = (found[2] != invalid) | ((found[0] != token) & (same_token | ~sampled))
    wrong |= sampled & same_set & (kept_by(found[1], batch.logits) != kept_by(law, batch.logits)).any(1)
    wrong |= (found[1][:, 0] != law[:, 0]) | (~sampled & (found[1] != law).any(1))
    wrong |= sampled & same_set & ((found[1][:, 1] / law[:, 1] - 1).abs() > 1e-5)
    possible = kept_by(found[1], batch.logits).gather(1, found[0].unsqueeze(1)).squeeze(1)
    wrong |= sampled & ~possible
    return wrong.nonzero().flatten().tolist(), float(same_token.double().mean())


def warped(batch: Batch, monkeypatch) -> Tensor:
    """Return each row's logits as transformers' warpers leave them, in float64, with a sort that is stable."""
    with monkeypatch.context() as patch:
        patch.setattr(torch, "sort", partial(torch.sort, stable=True))
        rows = []
        for place in range(len(batch.coin)):
            one = batch.rows(slice(place, place + 1))
            scores, ids = one.logits.double(), torch.zeros(1, 1, dtype=torch.long)
            scores = hf.TemperatureLogitsWarper(float(one.temperature))(ids, scores)
            if int(one.top_k):
                scores = hf.TopKLogitsWarper(int(one.top_k))(ids, scores)
            if float(one.top_p) < 1:
                scores = hf.TopPLogitsWarper(float(one.top_p))(ids, scores)
            if float(one.min_p):
                scores = hf.MinPLogitsWarper(float(one.min_p))(ids, scores)
            rows.append(scores)
    return torch.cat(rows)
