"""Decide which drafted tokens the target keeps, and the token that follows them.

Three rules, one descent. *Sample and match* serves every draft that was picked without chance: the target draws its
own token at each node and follows the child that carries it. *Rejection* serves drafted samples: children are offered
to the target in turn, and what they leave of p is drawn from. *Block* judges a sampled chain as a whole.
All keep the target's law: see the papers named at each rule. (``lossy`` holds the rule that does not.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_specgen import ops
from hf_specgen.errors import SpecGenError
from hf_specgen.round.coins import ACCEPT, SAMPLE, CoinSource, toss
from hf_specgen.round.records import Draft, SparseQ, Tree, Verdict
from hf_specgen.round.typical import Typical, verify_typical
from hf_specgen.round.verify_dense import Dense, never_empty, verify_dense

RULES = frozenset({"rejection", "block", "gumbel"})


class ScoreSource(Protocol):
    """Give the target's processed logits where they are asked for; ``greedy`` makes their law one-hot at the best."""

    @property
    def greedy(self) -> bool: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def device(self) -> torch.device: ...

    @property
    def untouched(self) -> Tensor | None:
        """Return all logits ``(B, S, V)`` where nothing is to be done to them, None otherwise."""
        ...

    def at(self, rows: Tensor, nodes: Tensor) -> Tensor:
        """Return ``(R, V)`` logits of ``rows (R)`` at scored coordinates ``nodes (R)`` (0 is the root)."""
        ...

    def dense(self, folds: bool) -> Dense | None:
        """Return all logits for the fused path, None where it has none; ``folds``: it can do the truncation itself."""
        ...


class _Step(NamedTuple):
    """What one node decides, for R rows: descend to draft node ``child`` where ``found``, else emit ``token``."""

    found: Tensor
    child: Tensor
    token: Tensor
    invalid: Tensor


_Depth = Tensor | int  # of each row, or of all
_Decide = Callable[[Tensor, Tensor, _Depth], _Step]  # (rows, scored node, depth), each (R)
_Pick = Callable[[Tensor, Tensor, _Depth], tuple[Tensor, Tensor]]  # the same arguments -> token, invalid


def verify(scores: ScoreSource, draft: Draft, coins: CoinSource | None, rule: str | Typical = "rejection") -> Verdict:
    """Judge a draft so that the emitted tokens follow the target's law exactly (``Typical``: nearly).

    ``coins`` may be None when the target is greedy.
    Raises: SpecGenError for an unknown rule, missing coins, or ``rule="block"`` on a sampled tree.
    """
    if isinstance(rule, Typical):
        return verify_typical(scores.dense(False), draft, coins, rule)
    if rule not in RULES:
        raise SpecGenError(f"rule={rule!r} is unknown. Choose one of {sorted(RULES)}.")
    if not scores.greedy and coins is None:
        raise SpecGenError("verify() got coins=None for a target that samples. Pass a CoinSource such as Coins(...).")
    if rule == "block" and draft.q is not None and not (scores.greedy or draft.tree.is_chain):
        raise SpecGenError(
            "rule='block' got a tree of sampled tokens; it judges chains only. Use rule='rejection', or draft a chain."
        )
    dense = scores.dense(rule != "gumbel") if ops.fuses(scores.device) else None
    if dense is not None:
        return verify_dense(dense, draft, coins, rule)
    if scores.greedy or coins is None:
        return _descend(scores, draft, _matching(scores, draft, _greedy_pick(scores)))
    if rule == "gumbel":
        return _descend(scores, draft, _matching(scores, draft, _gumbel_pick(scores, coins)))
    if draft.q is None or not draft.width:
        return _descend(scores, draft, _matching(scores, draft, _sample_pick(scores, draft, coins)))
    if rule == "block":
        return _block(scores, draft, coins)
    return _descend(scores, draft, _rejection(scores, draft, coins))


def _descend(scores: ScoreSource, draft: Draft, decide: _Decide) -> Verdict:
    """Walk all rows down their trees, level by level."""
    return _descend_listed(draft, decide) if scores.device.type == "cpu" else _descend_tensors(draft, decide)


def _descend_tensors(draft: Draft, decide: _Decide) -> Verdict:
    """Walk on a device that must not be waited for: a row that has stopped repeats its last decision."""
    levels = draft.tree.max_depth
    device = draft.tokens.device
    rows = torch.arange(len(draft.tokens), device=device)
    node = depth = torch.zeros_like(rows)
    invalid = torch.zeros_like(rows, dtype=torch.bool)
    path = torch.zeros(len(rows), levels + 1, dtype=torch.long, device=device)
    for column in path.unbind(1):
        step = decide(rows, node, depth)
        column.copy_(step.child)
        node = torch.where(step.found, step.child + 1, node)
        depth = depth + step.found
        invalid = invalid | step.invalid
    return Verdict(path[:, :levels], depth, step.token, invalid)


def _descend_listed(draft: Draft, decide: _Decide) -> Verdict:
    """Walk on CPU: lists of a few rows are cheaper than tensors, and rows that have stopped are dropped."""
    batch = len(draft.tokens)
    levels = draft.tree.max_depth
    paths: list[list[int]] = [[] for _ in range(batch)]
    last = [0] * batch
    invalid = [False] * batch
    walking = list(range(batch))
    nodes = [0] * batch
    while walking:
        rows = torch.tensor(walking)
        depth = len(paths[walking[0]])
        step = decide(rows, torch.tensor(nodes), depth)
        outcome = list(zip(walking, *(part.tolist() for part in step), strict=True))
        for row, found, child, token, broken in outcome:
            invalid[row] |= broken
            last[row] = token
            if found:
                paths[row].append(child)
        walking = [row for row, found, *_ in outcome if found]
        nodes = [child + 1 for _, found, child, *_ in outcome if found]
    path = torch.tensor([path + [0] * (levels - len(path)) for path in paths]).view(batch, levels)
    return Verdict(path.long(), torch.tensor([len(path) for path in paths]), torch.tensor(last), torch.tensor(invalid))


def _matching(scores: ScoreSource, draft: Draft, pick: _Pick) -> _Decide:
    """Follow the child that carries the target's own token: accepts with p(x), the optimum for a one-hot q.

    Source: the special case of Leviathan et al. 2023 for a q without chance; two identical children count once.
    """
    # One number names an edge: parent and token. The child to follow is the first that carries it.
    edges = (draft.tree.parents + 1) * scores.vocab_size + draft.tokens
    edges = edges.masked_fill(~_real(scores, draft), -1)

    def decide(rows: Tensor, nodes: Tensor, depth: _Depth) -> _Step:
        token, invalid = pick(rows, nodes, depth)
        if not draft.width:
            return _Step(torch.zeros_like(invalid), torch.zeros_like(token), token, invalid)
        wanted = (nodes * scores.vocab_size + token).unsqueeze(1)
        found, child = (edges.index_select(0, rows) == wanted).max(1)
        return _Step(found, child, token, invalid)

    return decide


def _greedy_pick(scores: ScoreSource) -> _Pick:
    logits = scores.untouched
    if logits is None:
        return lambda rows, nodes, depth: ops.argmax(never_empty(scores.at(rows, nodes)))
    # the best of every place in one go is cheaper than a few calls and casts at every level
    token, invalid = (part.view(logits.shape[:2]) for part in ops.argmax(logits.flatten(0, 1)))
    return lambda rows, nodes, depth: (token[rows, nodes], invalid[rows, nodes])


def _sample_pick(scores: ScoreSource, draft: Draft, coins: CoinSource) -> _Pick:
    """Draw with the coin of (seed, row, position): the text is a function of the seed, whatever was drafted."""
    table = _table(coins, draft, SAMPLE).squeeze(-1)
    return lambda rows, nodes, depth: ops.draw(scores.at(rows, nodes), table[rows, depth])


def _gumbel_pick(scores: ScoreSource, coins: CoinSource) -> _Pick:
    """Draw argmax(log p + G) with the vector the drafter also used, so that alike laws pick alike tokens.

    Source: Daliri et al. 2025, "Coupling without communication and drafter-invariant speculative decoding".
    """

    def pick(rows: Tensor, nodes: Tensor, depth: _Depth) -> tuple[Tensor, Tensor]:
        return ops.gumbel_draw(scores.at(rows, nodes), coins.gumbel(rows, depth, scores.vocab_size))

    return pick


def _rejection(scores: ScoreSource, draft: Draft, coins: CoinSource) -> _Decide:
    """Offer each node's children in turn; when none is accepted draw from what they leave of p.

    Source: Leviathan et al. 2023, Chen et al. 2023 (chains); Miao et al. 2024, SpecInfer (trees).
    """
    children, present = _children(scores, draft)
    accept = _table(coins, draft, ACCEPT, siblings=children.shape[-1])
    table = torch.cat((accept, _table(coins, draft, SAMPLE)), -1)

    def decide(rows: Tensor, nodes: Tensor, depth: _Depth) -> _Step:
        logits = scores.at(rows, nodes)
        siblings = children[rows, nodes]
        real = present[rows, nodes]
        q_ids, q = _q_at(draft, rows, siblings[:, 0])
        tokens = draft.tokens[rows.unsqueeze(1), siblings].masked_fill(~real, 0)
        found, choice, token, invalid = ops.accept_or_draw(
            logits, q_ids, q, tokens, real, table[rows, depth], draft.without_replacement
        )
        return _Step(found, siblings.gather(1, choice.unsqueeze(1)).squeeze(1), token, invalid)

    return decide


def _block(scores: ScoreSource, draft: Draft, coins: CoinSource) -> Verdict:
    """Keep the longest block whose own coin passes, then draw from what that block leaves of p.

    ``reach`` is h, how likely a block of each length is worth keeping; ``surplus`` is R, the mass of
    ``max(h p - q, 0)``. A block passes with R / (R + 1 - h), a full one with h.
    Source: Sun et al. 2024, "Block verification accelerates speculative decoding", algorithm 2.
    """
    rows = everyone = torch.arange(len(draft.tokens), device=scores.device)
    length = torch.arange(draft.width + 1, device=scores.device)
    real = _real(scores, draft)
    n_valid = real.long().cumprod(1).sum(1, keepdim=True)
    tokens = draft.tokens.masked_fill(~real, 0)
    reach = (length == 0).double().repeat(len(rows), 1)
    surplus = torch.zeros_like(reach)
    invalid = torch.zeros_like(rows, dtype=torch.bool)
    for i in range(draft.width):
        rows = rows[_select((n_valid[rows, 0] > i) & (reach[rows, i] > 0))]
        if not len(rows):
            break
        logits = scores.at(rows, torch.full_like(rows, i))
        (q_ids, q) = _q_at(draft, rows, torch.full_like(rows, i))
        surplus[rows, i], reach[rows, i + 1], bad = ops.block_step(logits, q_ids, q, tokens[rows, i], reach[rows, i])
        invalid[rows] |= bad

    # every coin is looked at, also those behind the kept block: keyed by the round's start, none is tossed again later
    tossed = toss(coins, len(everyone), 1, ACCEPT, draft.width, scores.device)
    coin = F.pad(tossed[:, 0], (1, 0))  # length i has the coin of its last token
    passes = (reach >= 1) | (coin * (surplus + 1 - reach) < surplus)  # h = 1 passes even when p = q leaves R = 0
    passes = torch.where(length == n_valid, coin < reach, passes & (length < n_valid))
    kept = (passes * length).amax(1)
    keep = reach[everyone, kept]
    take = (kept < n_valid.squeeze(1)).double()
    logits = scores.at(everyone, kept)
    (q_ids, q) = _q_at(draft, everyone, kept.clamp(max=draft.width - 1))
    last, bad = ops.residual_draw(logits, q_ids, q, keep, take, _table(coins, draft, SAMPLE)[everyone, kept, 0])
    return Verdict(length[:-1].repeat(len(kept), 1), kept, last, invalid | bad)


def _select(mask: Tensor) -> Tensor:
    """List the rows to work on: those marked on CPU, elsewhere all of them, for a list would wait for the device."""
    return mask.nonzero().squeeze(1) if mask.device.type == "cpu" else torch.arange(mask.numel(), device=mask.device)


def _table(coins: CoinSource, draft: Draft, use: int, siblings: int = 1) -> Tensor:
    """Toss the coins of every depth that a draft reaches: ``(B, levels + 1, K)``."""
    return toss(coins, len(draft.tokens), draft.tree.max_depth + 1, use, siblings, draft.tokens.device)


def _counted(draft: Draft) -> Tensor:
    """Mark the nodes that are more than padding: ``(B, N)``."""
    return torch.arange(draft.width, device=draft.tokens.device) < draft.n_valid.unsqueeze(1)


def _known(scores: ScoreSource, draft: Draft) -> Tensor:
    """Mark the nodes whose token exists: ``(B, N)``."""
    return draft.tokens.clamp(0, scores.vocab_size - 1) == draft.tokens


def _real(scores: ScoreSource, draft: Draft) -> Tensor:
    """Mark the nodes that may be accepted: ``(B, N)``."""
    return _counted(draft) & _known(scores, draft)


def _children(scores: ScoreSource, draft: Draft) -> tuple[Tensor, Tensor]:
    """List the children of every scored node in draft order, and which of them are really there.

    Returns: node indices ``(B, S, K)`` and bool ``(B, S, K)``.
    """
    node = torch.arange(draft.width, device=draft.tokens.device)
    counted = _counted(draft)
    nowhere = draft.width + 1  # the parent of padding: its children are cut off below
    parents = torch.where(counted, draft.tree.parents + 1, nowhere)
    # every sibling has a coin of its own, also behind one whose token does not exist
    rank = (parents.unsqueeze(2) == parents.unsqueeze(1)).tril(-1).sum(-1) * counted
    siblings = _most_siblings(draft.tree, rank)
    children = parents.new_zeros(len(parents), draft.width + 2, siblings)
    present = torch.zeros_like(children, dtype=torch.bool)
    place = (torch.arange(len(parents), device=node.device).unsqueeze(1), parents, rank)
    children[place] = node.expand_as(parents)
    present[place] = counted & _known(scores, draft)
    return children[:, :-1], present[:, :-1]


def _most_siblings(tree: Tree, rank: Tensor) -> int:
    """Return how many children a node has at most; it is read from the device only where nobody told."""
    if tree.is_chain:
        return 1
    if tree.widest is not None:
        return tree.widest
    return int(rank.max()) + 1


def _q_at(draft: Draft, rows: Tensor, nodes: Tensor) -> tuple[Tensor | None, Tensor]:
    """Read the law that draft nodes were drawn from: ``(ids, probabilities)``, or ``(None, logits)``."""
    if isinstance(draft.q, SparseQ):
        return draft.q.ids[rows, nodes], draft.q.probs[rows, nodes]
    assert draft.q is not None
    logits = draft.q.logits
    if logits.is_contiguous():  # copying whole rows is three times as fast
        return None, logits.flatten(0, 1).index_select(0, rows * draft.width + nodes)
    return None, logits[rows, nodes]
