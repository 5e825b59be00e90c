"""The definition of the walks that judge a whole round from its dense logits, in plain torch.

Row ``b`` scores ``S = N + 1`` places: 0 is the root, node ``i`` is ``i + 1``. ``logits (B, S, V)`` are the target's raw
logits; the law of place ``s`` is ``exp((x - max) / temperature) / total`` over the kept tokens, with
``law[b, s] = [max, total, threshold, tie]`` and a token kept iff ``x > threshold or (x == threshold and id >= tie)``.
``drawn[b, s]`` is what that law draws at the coin ``sample[b, depth of s]`` (the best token where the temperature is
0), and ``invalid[b, s]`` marks rows without a law. Nodes count below ``n_valid``, and when they carry a token of the
vocabulary. ``q`` is the drafter's law at each node, shared by siblings and read at the first of them: a list
(``q_ids (B, N, C)`` with probabilities ``q (B, N, C)``, zero where unused) or, with ``q_ids`` None, logits
``(B, N, V_draft)``. Coins are float64 in ``[0, 1)``.

Every walk returns ``path (B, N)``: the accepted nodes, then zeros; ``n (B)``: how many; ``next (B)``: the token after
them; ``invalid (B)`` bool: the walk reached a row without a law, and stopped there.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .reference import accept_siblings, block_step, residual_draw

__all__ = ["block_chain", "match_tree", "reject_tree", "typical_tree"]

Walks = tuple[Tensor, Tensor, Tensor, Tensor]
_Decide = Callable[[int, int, int], tuple[int | None, int]]  # (row, place, depth) -> child to descend to, token if none
_Law = tuple[Tensor, Tensor, Tensor]  # logits, temperature, law


def match_tree(drawn: Tensor, invalid: Tensor, tokens: Tensor, parents: Tensor, n_valid: Tensor) -> Walks:
    """Follow the child that carries the token drawn at its parent, the first such child in draft order.

    Shapes: ``drawn``, ``invalid`` ``(B, S)``; ``tokens (B, N)``, ``parents (B or 1, N)``, ``n_valid (B)``.
    Returns: as in the module. Source: Leviathan et al. 2023 for a q without chance.
    """
    lines = _lines(parents, len(drawn))

    def decide(b: int, place: int, depth: int) -> tuple[int | None, int]:
        return _match(drawn, tokens, n_valid, lines, b, place)

    return _walk(drawn, invalid, tokens, decide)


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
    """Offer each node's children in turn; when none is accepted draw from what they leave of p.

    With nothing rejected at the last node, or nothing left of p, ``drawn`` is emitted.
    Shapes: as in the module; ``accept (B, S, K)`` by depth and rank among siblings, ``sample (B, S)`` by depth.
    Returns: as in the module.
    Source: Leviathan et al. 2023, Chen et al. 2023 (chains); Miao et al. 2024, SpecInfer, algorithm 2 (trees).
    """
    lines = _lines(parents, len(drawn))
    vocab = logits.shape[-1]
    target = (logits, temperature, law)
    q = q.double()

    def decide(b: int, place: int, depth: int) -> tuple[int | None, int]:
        children = _children(lines[b], place)
        if temperature[b] == 0 or not children:
            return _match(drawn, tokens, n_valid, lines, b, place)
        offered = tokens[b, children].unsqueeze(0)
        first = slice(children[0], children[0] + 1)
        present = torch.tensor([_real(tokens, n_valid, b, child, vocab) for child in children]).to(tokens.device)
        p = _warped(target, b, place)
        ids = None if q_ids is None else q_ids[b, first]
        coins = accept[b : b + 1, depth, : len(children)]
        accepted, choice, scale, _ = accept_siblings(
            p, ids, q[b, first], offered.masked_fill(~present, 0), present[None], coins, without_replacement
        )
        if accepted:
            return children[int(choice)], -1
        if scale == 0:
            return None, int(drawn[b, place])
        token, _ = residual_draw(p, ids, q[b, first], torch.ones_like(scale), scale, sample[b, depth].view(1))
        return None, int(token)

    return _walk(drawn, invalid, tokens, decide)


def block_chain(  # noqa: PLR0913 - one launch decides everything
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
    """Keep the longest block of a chain whose own coin passes, then draw from what that block leaves of p.

    Shapes: as in the module; ``accept (B, N)``: the coin of each length from 1; ``sample (B, S)`` by depth.
    Returns: as in the module. Source: Sun et al. 2024, "Block verification accelerates speculative decoding",
    algorithm 2.
    """
    chain = torch.arange(-1, tokens.shape[1] - 1).unsqueeze(0)
    greedy = temperature == 0
    path, n, last, broken = match_tree(drawn, invalid, tokens, chain, n_valid)
    target = (logits, temperature, law)
    q = q.double()
    for b in (~greedy).nonzero().squeeze(1).tolist():
        kept, token, bad = _block(target, drawn, invalid, tokens, n_valid, (q_ids, q), (accept, sample), b)
        path[b] = torch.arange(tokens.shape[1]) * (torch.arange(tokens.shape[1]) < kept)
        n[b] = kept
        last[b] = token
        broken[b] = bad
    return path, n, last, broken


def typical_tree(  # noqa: PLR0913 - one launch decides everything
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
    """Keep the deepest path whose tokens all look typical: ``p > min(epsilon, delta exp(-H(p)))``. Lossy.

    Of equally deep paths the likeliest wins, then the first in draft order; ``drawn`` follows it. Where the temperature
    is 0 a token is typical iff it was drawn.
    Shapes: as in the module. Returns: as in the module.
    Source: Cai et al. 2024, "Medusa", section 3.3.1.
    """
    rows = len(drawn)
    vocab = logits.shape[-1]
    lines = _lines(parents, rows)
    target = (logits, temperature, law)
    path = torch.zeros_like(tokens)
    n = torch.zeros_like(n_valid)
    last = drawn[:, 0].clone()
    broken = invalid[:, 0].clone()
    for b in range(rows):
        steps: dict[int, list[int]] = {-1: []}  # the nodes of the path down to each kept node
        score = {-1: 0.0}  # log p of that path
        for node, parent in enumerate(lines[b]):
            if parent not in steps or not _real(tokens, n_valid, b, node, vocab):
                continue
            place = parent + 1
            broken[b] |= invalid[b, place]
            if invalid[b, place]:
                continue
            chance = _typical(target, drawn, b, place, int(tokens[b, node]), epsilon, delta)
            if chance > 0:
                steps[node] = [*steps[parent], node]
                score[node] = score[parent] + math.log(chance)
        deepest = max(steps, key=lambda node: (len(steps[node]), score[node], -node))
        n[b] = len(steps[deepest])
        last[b] = drawn[b, deepest + 1]
        broken[b] |= invalid[b, deepest + 1]
        path[b, : len(steps[deepest])] = torch.tensor(steps[deepest], dtype=torch.long)
    return path, n, last, broken


def _walk(drawn: Tensor, invalid: Tensor, tokens: Tensor, decide: _Decide) -> Walks:
    """Walk every row down its tree until nothing is accepted or a row has no law."""
    path = torch.zeros_like(tokens)
    n = torch.zeros_like(drawn[:, 0])
    last = drawn[:, 0].clone()
    broken = torch.zeros_like(invalid[:, 0])
    for b in range(len(drawn)):
        place = depth = 0
        while True:
            broken[b] = invalid[b, place]
            child, token = (None, int(drawn[b, place])) if broken[b] else decide(b, place, depth)
            if child is None:
                break
            path[b, depth] = child
            place = child + 1
            depth = depth + 1
        n[b] = depth
        last[b] = token
    return path, n, last, broken


def _match(
    drawn: Tensor, tokens: Tensor, n_valid: Tensor, lines: list[list[int]], b: int, place: int
) -> tuple[int | None, int]:
    token = int(drawn[b, place])
    carriers = (i for i in _children(lines[b], place) if i < n_valid[b] and tokens[b, i] == token >= 0)
    return next(carriers, None), token


def _block(  # noqa: PLR0913 - the walk's own arguments
    target: _Law,
    drawn: Tensor,
    invalid: Tensor,
    tokens: Tensor,
    n_valid: Tensor,
    law: tuple[Tensor | None, Tensor],
    coins: tuple[Tensor, Tensor],
    b: int,
) -> tuple[int, int, bool]:
    """Judge one chain: how many tokens are kept, the token after them, whether a row without a law was reached."""
    (q_ids, q) = law
    (accept, sample) = coins
    reach = [torch.ones(1, dtype=torch.float64, device=q.device)]
    surplus = []
    for i in range(tokens.shape[1]):
        if reach[i] == 0 or not _real(tokens, n_valid, b, i, target[0].shape[-1]):
            break
        if invalid[b, i]:
            return 0, int(drawn[b, i]), True
        ids = None if q_ids is None else q_ids[b, i : i + 1]
        left, after, _ = block_step(_warped(target, b, i), ids, q[b, i : i + 1], tokens[b, i : i + 1], reach[i])
        surplus.append(left)
        reach.append(after)

    kept = 0
    full = len(surplus)
    for i, h in enumerate(reach[1:], 1):
        coin = accept[b, i - 1]
        passes = (h >= 1) | (coin * (surplus[i] + 1 - h) < surplus[i]) if i < full else coin < h
        kept = i if passes else kept
    if kept == full:
        return kept, int(drawn[b, kept]), bool(invalid[b, kept])
    ids = None if q_ids is None else q_ids[b, kept : kept + 1]
    one = torch.ones_like(reach[kept])
    coin = sample[b, kept].view(1)
    drawn_left, _ = residual_draw(_warped(target, b, kept), ids, q[b, kept : kept + 1], reach[kept], one, coin)
    return kept, int(drawn_left), False


def _typical(target: _Law, drawn: Tensor, b: int, place: int, token: int, epsilon: float, delta: float) -> float:
    """Return a typical token's probability (1 where the temperature is 0), 0 for any other token."""
    if target[1][b] == 0:
        return float(token == int(drawn[b, place]))
    p = _warped(target, b, place)[0].softmax(-1)
    entropy = -torch.xlogy(p, p).sum()
    return float(p[token]) * bool(p[token] > torch.clamp(delta * torch.exp(-entropy), max=epsilon))


def _warped(target: _Law, b: int, place: int) -> Tensor:
    """Return the logits ``(1, V)`` of a place's law: divided by the temperature, -inf outside the kept set."""
    logits, temperature, law = target
    row = logits[b, place].double()
    (_, _, threshold, tie) = law[b, place]
    token = torch.arange(len(row), device=row.device)
    kept = (row > threshold) | ((row == threshold) & (token >= tie))
    return (row / temperature[b].double()).masked_fill(~kept, -torch.inf).unsqueeze(0)


def _lines(parents: Tensor, rows: int) -> list[list[int]]:
    return parents.expand(rows, -1).tolist()


def _children(parents: list[int], place: int) -> list[int]:
    return [node for node, parent in enumerate(parents) if parent == place - 1]


def _real(tokens: Tensor, n_valid: Tensor, b: int, node: int, vocab: int) -> bool:
    return node < int(n_valid[b]) and 0 <= int(tokens[b, node]) < vocab
