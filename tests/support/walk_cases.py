"""Rounds for the walk kernels: random ragged batches, and the door through which boxes of coins reach the kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from coin_boxes import BoxCoins, TableScores
from torch import Tensor

from hf_specgen.kernels import reference
from hf_specgen.round.coins import ACCEPT, SAMPLE
from hf_specgen.round.records import DenseQ, Draft, SparseQ, Tree, Verdict

Walks = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Walk:
    """Everything that the walk operations take; ``warped`` are the logits of the rows' laws."""

    logits: Tensor
    temperature: Tensor
    law: Tensor
    drawn: Tensor
    invalid: Tensor
    draft: Draft
    accept: Tensor
    sample: Tensor
    warped: Tensor

    @property
    def q(self) -> tuple[Tensor | None, Tensor]:
        if isinstance(self.draft.q, SparseQ):
            return self.draft.q.ids, self.draft.q.probs
        assert self.draft.q is not None
        return None, self.draft.q.logits

    @property
    def rows(self) -> tuple[Tensor, ...]:
        return self.logits, self.temperature, self.law, self.drawn, self.invalid

    @property
    def drafted(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.draft.tokens, self.draft.tree.parents, self.draft.n_valid

    def match(self, module: ModuleType) -> Walks:
        return module.match_tree(self.drawn, self.invalid, *self.drafted)

    def reject(self, module: ModuleType) -> Walks:
        without = self.draft.without_replacement
        return module.reject_tree(*self.rows, *self.drafted, *self.q, self.accept, self.sample, without)

    def block(self, module: ModuleType) -> Walks:
        tokens, _, n_valid = self.drafted
        coins = self.accept[:, 0, : self.draft.width].contiguous()
        return module.block_chain(*self.rows, tokens, n_valid, *self.q, coins, self.sample)

    def typical(self, module: ModuleType, epsilon: float = 0.3, delta: float = 0.6) -> Walks:
        return module.typical_tree(*self.rows, *self.drafted, epsilon, delta)

    def at(self, index: Tensor) -> Walk:
        """Select rows of the batch."""
        draft, tree = self.draft, self.draft.tree
        if len(tree.parents) > 1:
            tree = Tree(tree.parents[index], tree.is_chain)
        q_ids, q = self.q
        given = DenseQ(q[index]) if q_ids is None else SparseQ(q_ids[index], q[index])
        draft = replace(draft, tokens=draft.tokens[index], tree=tree, n_valid=draft.n_valid[index], q=given)
        names = ("logits", "temperature", "law", "drawn", "invalid", "accept", "sample", "warped")
        return replace(self, draft=draft, **{name: vars(self)[name][index] for name in names})

    def to(self, device: str) -> Walk:
        """Move the round to a device."""
        draft = self.draft
        q_ids, q = self.q
        given = DenseQ(q.to(device)) if q_ids is None else SparseQ(q_ids.to(device), q.to(device))
        tree = Tree(draft.tree.parents.to(device), draft.tree.is_chain)
        draft = replace(draft, tokens=draft.tokens.to(device), tree=tree, n_valid=draft.n_valid.to(device), q=given)
        names = ("logits", "temperature", "law", "drawn", "invalid", "accept", "sample", "warped")
        return replace(self, draft=draft, **{name: vars(self)[name].to(device) for name in names})


def laws(logits: Tensor, temperature: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Describe rows ``(B, S, V)`` whose ``kept`` tokens are the best ones: the law as kernels read it, and its logits.

    Of tokens that tie at the edge the kept ones are the last.
    """
    x, ids = logits.double(), torch.arange(logits.shape[-1])
    threshold = x.masked_fill(~kept, math.inf).amin(-1)
    tie = torch.where(kept & (x == threshold.unsqueeze(-1)), ids, len(ids)).amin(-1).double()
    everything = kept.all(-1)
    threshold, tie = threshold.masked_fill(everything, -math.inf), tie.masked_fill(everything, 0.0)
    warm = torch.where(temperature > 0, temperature, 1.0).double().view(-1, 1, 1)
    top = x.amax(-1)
    total = (((x - top.unsqueeze(-1)) / warm).exp() * kept).sum(-1)
    total = torch.where(temperature.unsqueeze(1) > 0, total, 1.0)
    return torch.stack((top, total, threshold, tie), -1), (x / warm).masked_fill(~kept, -math.inf)


def draw_all(warped: Tensor, temperature: Tensor, depth: Tensor, sample: Tensor) -> tuple[Tensor, Tensor]:
    """Draw from every row at its depth's coin; the best token where the temperature is 0."""
    flat, coins = warped.flatten(0, 1), sample.gather(1, depth.expand_as(sample))
    best, invalid = reference.argmax(flat)
    token = torch.where(
        temperature.repeat_interleave(warped.shape[1]) > 0, reference.draw(flat, coins.flatten())[0], best
    )
    return token.view(coins.shape), invalid.view(coins.shape)


@dataclass(frozen=True)
class Kind:
    """What a random round looks like."""

    chain: bool = False
    sparse: bool = False
    without: bool = False
    truncated: bool = False
    greedy: bool = False
    broken: bool = False
    vocab: int = 40
    q_vocab: int | None = None
    nodes: int = 6
    rows: int = 4
    one_tree: bool = False
    dtype: torch.dtype = torch.float32


def make(kind: Kind, seed: int) -> Walk:
    """Make a round whose drafts are likely enough that walks go deep, from the seed alone."""
    source = torch.Generator().manual_seed(seed)
    rows, nodes, vocab = kind.rows, kind.nodes, kind.vocab
    places = nodes + 1
    logits = (torch.randn(rows, places, vocab, generator=source) * 2).to(kind.dtype)
    logits[torch.rand(rows, places, vocab, generator=source) < 0.2] = -math.inf
    logits[..., 1] = 1.0
    temperature = torch.tensor([1.0, 0.6, 1.5]).repeat(rows)[:rows]
    if kind.greedy:
        temperature[torch.rand(rows, generator=source) < 0.4] = 0.0
    kept = torch.ones_like(logits, dtype=torch.bool)
    if kind.truncated:
        # rank among the best, of two alike the later first
        order = logits.double().flip(-1).sort(dim=-1, descending=True, stable=True).indices.argsort(-1).flip(-1)
        kept = order < torch.randint(1, vocab + 1, (rows, places, 1), generator=source)
    law, warped = laws(logits, temperature, kept)
    tree = _tree(kind, source)
    draft = _draft(kind, warped, tree, source)
    sample = torch.rand(rows, places, generator=source, dtype=torch.float64)
    drawn, invalid = draw_all(warped, temperature, tree.depth, sample)
    if kind.broken:
        invalid = torch.rand(rows, places, generator=source) < 0.15
        logits, law = logits.clone(), law.clone()
        logits[invalid] = math.nan
        law[invalid] = torch.tensor([0.0, 1.0, -math.inf, 0.0], dtype=torch.float64)
    siblings = 1 if kind.chain else nodes
    accept = torch.rand(rows, places, max(siblings, nodes), generator=source, dtype=torch.float64)
    accept = accept[..., :siblings].contiguous() if not kind.chain else accept
    return Walk(logits, temperature, law, drawn, invalid, draft, accept, sample, warped)


def _tree(kind: Kind, source: torch.Generator) -> Tree:
    if kind.chain:
        return Tree.chain(kind.nodes)
    trees = 1 if kind.one_tree else kind.rows
    columns = [
        torch.randint(-1, i, (trees,), generator=source) if i else torch.full((trees,), -1) for i in range(kind.nodes)
    ]
    # few parents: siblings are what matters here
    return Tree(torch.stack([column.clamp(max=1) for column in columns], 1))


def _draft(kind: Kind, warped: Tensor, tree: Tree, source: torch.Generator) -> Draft:
    rows, nodes, vocab = kind.rows, kind.nodes, kind.q_vocab or kind.vocab
    parents = tree.parents.expand(rows, -1)
    noise = torch.randn(rows, nodes + 1, vocab, generator=source)
    guess = torch.where(warped.isinf(), -2.0, warped)[..., :vocab] * 0.7 + noise * 0.7
    guess = guess.gather(1, (parents + 1).unsqueeze(-1).expand(-1, -1, vocab)).float()  # siblings share q
    guess[..., 3] = -math.inf
    q: DenseQ | SparseQ = DenseQ(guess.to(kind.dtype))
    tokens = torch.multinomial(guess.softmax(-1).flatten(0, 1), 1, generator=source).view(rows, nodes)
    if kind.sparse:
        probs, ids = guess.softmax(-1).topk(min(9, vocab))
        place = torch.multinomial(probs.flatten(0, 1), 1, generator=source).view(rows, nodes, 1)
        tokens = ids.gather(-1, place).squeeze(-1)
        probs = probs.masked_fill(torch.rand(rows, nodes, probs.shape[-1], generator=source) < 0.1, 0.0)
        ids = torch.where(probs > 0, ids, ids[..., :1])  # an unused place may repeat an id
        probs = probs / probs.sum(-1, keepdim=True).clamp(min=1e-9)
        first = _first(parents).unsqueeze(-1).expand_as(ids)
        q = SparseQ(ids.gather(1, first), probs.gather(1, first))
    odd = torch.rand(rows, nodes, generator=source)
    tokens = tokens.masked_fill(odd < 0.05, -1).masked_fill(odd > 0.97, kind.vocab + 3)
    n_valid = torch.randint(0, nodes + 1, (rows,), generator=source)
    n_valid = torch.where(torch.rand(rows, generator=source) < 0.6, nodes, n_valid)
    return Draft(tokens, tree, n_valid, q, kind.without)


def _first(parents: Tensor) -> Tensor:
    """Name the first sibling of every node."""
    return (parents.unsqueeze(2) == parents.unsqueeze(1)).long().argmax(-1)


def agree(one: Walks, other: Walks) -> bool:
    """Compare walks in everything: paths are zero behind their end."""
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(one, other, strict=True))


def coins_of(walk: Walk, rule: str = "rejection") -> BoxCoins:
    """Hand the coins of a walk to ``verify``."""
    values = {(SAMPLE, 0): walk.sample}
    for k in range(walk.accept.shape[-1]):
        values[ACCEPT, k] = walk.accept[:, :, k] if rule != "block" else walk.accept[:, :1, k].expand_as(walk.sample)
    return BoxCoins(values)


def through(module: ModuleType, hide: bool = False, heat: float = 1.0) -> Callable[..., Verdict]:
    """Make a ``verify`` for ``coin_boxes.solve`` that judges with the walks of ``module``.

    ``heat`` is the temperature that the law needs; ``hide``: tokens of probability zero have finite logits, and only
    the law's threshold excludes them.
    """

    def judge(scores: TableScores, draft: Draft, coins: BoxCoins, rule: str) -> Verdict:
        wanted = scores.logits * heat
        kept = wanted > -math.inf
        low = wanted.masked_fill(~kept, math.inf).amin(-1, keepdim=True)
        # of two tokens at the edge the later ones are kept, so an excluded token may tie with the last kept one
        logits = torch.where(kept, wanted, low - 1.0 if hide else -math.inf).float()
        rows, places, _ = logits.shape
        temperature = torch.full((rows,), heat)
        law, warped = laws(logits, temperature, kept if hide else torch.ones_like(kept))
        depth = draft.tree.depth.expand(rows, -1)
        row = torch.arange(rows).unsqueeze(1).expand(-1, places)
        sample = coins.uniform(row, torch.arange(places).clamp(max=draft.tree.max_depth).expand(rows, -1), SAMPLE)
        drawn, invalid = draw_all(warped, temperature, depth, sample)
        uses = sorted(sibling for use, sibling in coins.values if use == ACCEPT)
        toss = [
            coins.uniform(row, torch.arange(places).clamp(max=draft.tree.max_depth).expand(rows, -1), ACCEPT, k)
            for k in uses
        ]
        accept = torch.stack(toss, -1) if toss else torch.zeros(rows, places, 1, dtype=torch.float64)
        if rule != "block":
            siblings = int((draft.tree.parents.unsqueeze(2) == draft.tree.parents.unsqueeze(1)).sum(-1).max())
            accept = accept[..., :siblings].contiguous()
        walk = Walk(logits, temperature, law, drawn, invalid, _in_float(draft), accept, sample, warped)
        run = walk.match if draft.q is None else walk.block if rule == "block" else walk.reject
        return Verdict(*run(module))

    return judge


def _in_float(draft: Draft) -> Draft:
    if isinstance(draft.q, SparseQ):
        return replace(draft, q=SparseQ(draft.q.ids, draft.q.probs.float()))
    return draft if draft.q is None else replace(draft, q=DenseQ(draft.q.logits.float()))
