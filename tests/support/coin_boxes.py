"""Compute the law of a verification rule exactly: every draft, every box of coins.

A case is solved twice. In fractions, straight from the papers' normalised formulas, as boxes of coins that lead to one
outcome; then by the code under test, driven with coins just inside both ends of every box. The law that the code
shows is compared with the target's own.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction

import torch
from torch import Tensor

from hf_specgen.round.coins import ACCEPT, SAMPLE
from hf_specgen.round.records import DenseQ, Draft, Round, SparseQ, Tree, Verdict
from hf_specgen.round.verify import verify

Weights = list[Fraction]
Prefix = tuple[int, ...]
Coin = tuple[int, int, int]  # depth, use, sibling
Ends = tuple[Fraction, Fraction]

ONE = Fraction(1)
MARGIN = 1e-14  # how far inside the ends of a box the code is asked
LAST_COIN = 1.0 - 2.0**-53


@dataclass(frozen=True)
class Table:
    """A language model over a tiny vocabulary: weights after each prefix, made up on first use from the seed."""

    vocab: int
    seed: int
    grid: int = 10
    zeros: bool = True

    def __call__(self, prefix: Prefix) -> Weights:
        source = random.Random(f"{self.seed} {prefix}")
        counts = [source.randint(0 if self.zeros else 1, self.grid) for _ in range(self.vocab)]
        counts[source.randrange(self.vocab)] += 1
        return normal([Fraction(count) for count in counts])


def fixed(*weights: str) -> Callable[[Prefix], Weights]:
    """The same law after every prefix."""
    return lambda prefix: [Fraction(weight) for weight in weights]


@dataclass(frozen=True)
class Case:
    """Everything that makes a round: the two models, the tree, the rule. Without q the drafts are listed."""

    p: Callable[[Prefix], Weights]
    parents: tuple[int, ...]
    q: Callable[[Prefix], Weights] | None = None
    drafts: tuple[Prefix, ...] = ()
    rule: str = "rejection"
    without_replacement: bool = False
    sparse: bool = True
    n_valid: int | None = None

    @property
    def valid(self) -> int:
        return len(self.parents) if self.n_valid is None else self.n_valid

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    @property
    def levels(self) -> int:
        return max((len(self.line(node)) for node in range(len(self.parents))), default=0)

    def line(self, node: int) -> list[int]:
        """The nodes from the root down to ``node``, which may be -1."""
        return [] if node < 0 else [*self.line(self.parents[node]), node]

    def prefix(self, tokens: Prefix, node: int) -> Prefix:
        return tuple(tokens[step] for step in self.line(node))

    def children(self, node: int) -> list[int]:
        return [child for child in range(self.valid) if self.parents[child] == node]


def normal(weights: Weights) -> Weights:
    total = sum(weights, Fraction(0))
    return [weight / total for weight in weights]


def rest(p: Weights, q: Weights, keep: Fraction = ONE) -> Weights:
    return [max(Fraction(0), keep * a - b) for a, b in zip(p, q, strict=True)]


def weighted_drafts(case: Case, tokens: Prefix = (), weight: Fraction = ONE) -> Iterator[tuple[Prefix, Fraction]]:
    """Every draft of positive probability."""
    if case.q is None:
        yield from ((draft, ONE / len(case.drafts)) for draft in case.drafts)
        return
    if len(tokens) == len(case.parents):
        yield tokens, weight
        return
    parent = case.parents[len(tokens)]
    law = list(case.q(case.prefix(tokens, parent)))
    if case.without_replacement:
        for sibling in range(len(tokens)):
            if case.parents[sibling] == parent:
                law[tokens[sibling]] = Fraction(0)
        law = normal(law) if any(law) else [ONE]  # nothing left to draw: the drafter pads with token 0
    for token, chance in enumerate(law):
        if chance:
            yield from weighted_drafts(case, (*tokens, token), weight * chance)


@dataclass(frozen=True)
class Outcome:
    """A box of coins and what is emitted there."""

    emitted: Prefix
    measure: Fraction = ONE
    box: dict[Coin, Ends] = field(default_factory=dict)

    def within(self, coin: Coin, low: Fraction, high: Fraction) -> Outcome:
        return replace(self, measure=self.measure * (high - low), box={**self.box, coin: (low, high)})

    def drawn(self, depth: int, weights: Weights) -> Iterator[Outcome]:
        edges = list(itertools.accumulate(normal(weights), initial=Fraction(0)))
        for token, (low, high) in enumerate(itertools.pairwise(edges)):
            if high > low:
                grown = self.within((depth, SAMPLE, 0), low, high)
                yield replace(grown, emitted=(*self.emitted, token))


def outcomes(case: Case, tokens: Prefix) -> Iterator[Outcome]:
    """Split the coins' cube into the boxes of each outcome, for one draft."""
    if case.q is None:
        return _match(case, tokens, -1, Outcome(()))
    if case.rule == "block":
        return _block(case, tokens)
    return _recursive(case, tokens, -1, Outcome(()))


def _match(case: Case, tokens: Prefix, node: int, so_far: Outcome) -> Iterator[Outcome]:
    for drawn in so_far.drawn(len(so_far.emitted), case.p(so_far.emitted)):
        carriers = [child for child in case.children(node) if tokens[child] == drawn.emitted[-1]]
        if carriers:
            yield from _match(case, tokens, carriers[0], drawn)
        else:
            yield drawn


def _recursive(case: Case, tokens: Prefix, node: int, so_far: Outcome) -> Iterator[Outcome]:
    assert case.q is not None
    depth, left, q = len(so_far.emitted), case.p(so_far.emitted), case.q(so_far.emitted)
    for sibling, child in enumerate(case.children(node)):
        token = tokens[child]
        if not q[token]:
            continue
        threshold = min(ONE, left[token] / q[token])
        if threshold:
            taken = so_far.within((depth, ACCEPT, sibling), Fraction(0), threshold)
            yield from _recursive(case, tokens, child, replace(taken, emitted=(*so_far.emitted, token)))
        if threshold == 1:
            return
        so_far = so_far.within((depth, ACCEPT, sibling), threshold, ONE)
        left = normal(rest(left, q))
        if case.without_replacement:
            q = [Fraction(0) if v == token else weight for v, weight in enumerate(q)]
            q = normal(q) if any(q) else q
    yield from so_far.drawn(depth, left)


def _block(case: Case, tokens: Prefix) -> Iterator[Outcome]:
    assert case.q is not None
    gamma = case.valid
    p = [case.p(tokens[:i]) for i in range(gamma + 1)]
    q = [case.q(tokens[:i]) for i in range(gamma)]
    h = [ONE]
    for i in range(gamma):
        h.append(min(ONE, h[-1] * p[i][tokens[i]] / q[i][tokens[i]]))
    so_far = Outcome(())
    for length in range(gamma, -1, -1):
        surplus = sum(rest(p[length], q[length], h[length])) if length < gamma else None
        if surplus is None:
            passes = h[length]
        else:
            passes = ONE if surplus + 1 - h[length] == 0 else surplus / (surplus + 1 - h[length])
        weights = p[gamma] if surplus is None else rest(p[length], q[length], h[length])
        coin = (0, ACCEPT, length - 1)
        kept = so_far.within(coin, Fraction(0), passes) if length else so_far
        if kept.measure:
            yield from replace(kept, emitted=tokens[:length]).drawn(length, weights)
        if passes == 1:
            return
        so_far = so_far.within(coin, passes, ONE)


@dataclass
class BoxCoins:
    """Coins from a table: ``values[use, sibling]`` is ``(B, levels + 1)``."""

    values: dict[tuple[int, int], Tensor]

    def uniform(self, rows: Tensor, depth: Tensor | int, use: int, sibling: Tensor | int = 0) -> Tensor:
        if isinstance(sibling, int):
            return self.values[use, sibling][rows, depth]
        tables = torch.stack([self.values[use, number] for number in range(int(sibling.max()) + 1)])
        return tables[sibling, rows, depth]

    def gumbel(self, rows: Tensor, depth: Tensor | int, vocab_size: int) -> Tensor:
        raise AssertionError("no Gumbel vector was asked for")


@dataclass
class TableScores:
    """Logits ``(B, S, V)`` held in memory; remembers what was read."""

    logits: Tensor
    greedy: bool = False
    read: list[tuple[int, int]] = field(default_factory=list)

    @property
    def vocab_size(self) -> int:
        return self.logits.shape[-1]

    @property
    def device(self) -> torch.device:
        return self.logits.device

    @property
    def untouched(self) -> None:
        return None

    def dense(self, folds: bool) -> None:
        return None

    def at(self, rows: Tensor, nodes: Tensor) -> Tensor:
        self.read += zip(rows.tolist(), nodes.tolist(), strict=True)
        return self.logits[rows, nodes]


def logs(rows: list[Weights]) -> Tensor:
    return torch.tensor([[float(weight) for weight in row] for row in rows], dtype=torch.float64).log()


def build_draft(case: Case, drafts: list[Prefix]) -> Draft:
    """One row a draft, with its q."""
    width, rows = len(case.parents), len(drafts)
    tokens = torch.tensor(drafts, dtype=torch.long).view(rows, width)
    tree = Tree.chain(width) if case.is_chain else Tree(torch.tensor([case.parents]))
    n_valid = torch.full((rows,), case.valid)
    if case.q is None or not width:
        return Draft(tokens, tree, n_valid)
    laws = [[case.q(case.prefix(draft, case.parents[node])) for node in range(width)] for draft in drafts]
    dense = torch.stack([logs(law) for law in laws])
    if not case.sparse:
        return Draft(tokens, tree, n_valid, DenseQ(dense), case.without_replacement)
    # The list is shuffled, and a place of probability zero repeats an id that is listed elsewhere.
    vocab = dense.shape[-1]
    order = [*reversed(range(vocab)), 0]
    probs = dense.exp()[..., order]
    probs[..., -1] = 0.0
    return Draft(
        tokens, tree, n_valid, SparseQ(torch.tensor(order).expand(probs.shape), probs), case.without_replacement
    )


def build_scores(case: Case, drafts: list[Prefix]) -> TableScores:
    nodes = range(-1, len(case.parents))
    return TableScores(torch.stack([logs([case.p(case.prefix(draft, node)) for node in nodes]) for draft in drafts]))


def inside(ends: Ends, end: int) -> float:
    """Step into the interval; an accepting one that spans all coins ends at a threshold that rounding may lower."""
    low, high = float(ends[0]), float(ends[1])
    if end == 0:
        return low + MARGIN if low else 0.0
    return LAST_COIN if high == 1 and low else high - MARGIN


@dataclass
class Result:
    """The law that the code shows, the target's, how much measure lies in the margins, and E[accepted]."""

    law: dict[Prefix, float]
    target: dict[Prefix, float]
    unseen: float
    accepted: float
    accepted_in_theory: float

    @property
    def error(self) -> float:
        """Total variation between the code's law and the target's."""
        keys = {*self.law, *self.target}
        return sum(abs(self.law.get(key, 0.0) - self.target.get(key, 0.0)) for key in keys) / 2


def follow(p: Callable[[Prefix], Weights], prefix: Prefix, length: int) -> Iterator[tuple[Prefix, Fraction]]:
    """Every continuation of ``prefix`` to ``length`` tokens under p."""
    if len(prefix) == length:
        yield prefix, ONE
        return
    for token, chance in enumerate(p(prefix)):
        if chance:
            yield from ((line, chance * more) for line, more in follow(p, (*prefix, token), length))


def coins_for(case: Case, boxes: list[dict[Coin, Ends]]) -> BoxCoins:
    """Two rows a box: every coin just inside its lower end, then its upper end; free coins at the extremes."""
    siblings = max((case.parents.count(parent) for parent in case.parents), default=1)
    if case.rule == "block":  # the coins of a block belong to its first position, numbered along it
        siblings = max(1, len(case.parents))
    shape = (2 * len(boxes), case.levels + 1)
    free = torch.tensor([0.0, LAST_COIN], dtype=torch.float64).repeat(len(boxes)).unsqueeze(1).expand(shape)
    uses = [(SAMPLE, 0), *((ACCEPT, sibling) for sibling in range(siblings))]
    values = {use: free.clone() for use in uses}
    for row, box in enumerate(boxes):
        for (depth, use, sibling), ends in box.items():
            for end in (0, 1):
                values[use, sibling][2 * row + end, depth] = inside(ends, end)
    return BoxCoins(values)


def solve(case: Case) -> Result:
    """Drive ``verify`` through every box of every draft."""
    plan = [(draft, weight, end) for draft, weight in weighted_drafts(case) for end in outcomes(case, draft)]
    drafts = [draft for draft, _, _ in plan for _ in (0, 1)]
    unique = list(dict.fromkeys(drafts))
    place = {draft: row for row, draft in enumerate(unique)}
    index = torch.tensor([place[draft] for draft in drafts])
    scores, draft = build_scores(case, unique), take(build_draft(case, unique), index)
    verdict = verify(
        TableScores(scores.logits[index]), draft, coins_for(case, [end.box for *_, end in plan]), case.rule
    )
    return tally(case, plan, Round(draft, verdict).emitted)


def take(draft: Draft, index: Tensor) -> Draft:
    """Select rows of a draft (its tree may be shared)."""
    tree, q = draft.tree, draft.q
    if len(tree.parents) > 1:
        tree = Tree(tree.parents[index], tree.is_chain)
    if isinstance(q, SparseQ):
        q = SparseQ(q.ids[index], q.probs[index])
    elif isinstance(q, DenseQ):
        q = DenseQ(q.logits[index])
    return replace(draft, tokens=draft.tokens[index], n_valid=draft.n_valid[index], tree=tree, q=q)


def tally(case: Case, plan: list[tuple[Prefix, Fraction, Outcome]], emitted: list[list[int]]) -> Result:
    law: dict[Prefix, float] = defaultdict(float)
    unseen = accepted = in_theory = 0.0
    for (_, weight, end), lower, upper in zip(plan, emitted[0::2], emitted[1::2], strict=True):
        mass = float(weight * end.measure)
        unseen += mass * sum(2 * MARGIN / float(high - low) for low, high in end.box.values())
        in_theory += mass * (len(end.emitted) - 1)
        for line in (lower, upper):
            accepted += mass / 2 * (len(line) - 1)
            for whole, chance in follow(case.p, tuple(line), case.levels + 1):
                law[whole] += mass / 2 * float(chance)
    target = {line: float(chance) for line, chance in follow(case.p, (), case.levels + 1)}
    return Result(dict(law), target, unseen, accepted, in_theory)


def check(case: Case) -> Result:
    """Assert that the law is the target's to 1e-12 and return the result."""
    result = solve(case)
    assert result.error <= 1e-12, (case, result.error)
    assert result.unseen <= 1e-12, (case, result.unseen)
    assert abs(result.accepted - result.accepted_in_theory) <= 1e-12
    return result


def same(one: Verdict, other: Verdict) -> bool:
    """Compare the parts of two verdicts that mean something."""

    def meaning(verdict: Verdict) -> list[tuple[list[int], int, bool]]:
        columns = (verdict.path.tolist(), verdict.n.tolist(), verdict.next.tolist(), verdict.invalid.tolist())
        return [(path[:n], token, invalid) for path, n, token, invalid in zip(*columns, strict=True)]

    return meaning(one) == meaning(other)
