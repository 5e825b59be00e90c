"""The best tree for measured acceptance rates, by dynamic programming, done once (Chen et al. 2024, "Sequoia")."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specgen.drafting.drafter import Call, Drafter, Reads, Session
from hf_specgen.errors import SpecGenError
from hf_specgen.round.costs import Costs
from hf_specgen.round.records import Draft, Round

Paths = tuple[tuple[int, ...], ...]
Rates = Sequence[Sequence[float]]
"""``rates[d][r]``: how often the child of rank r is accepted where the d tokens above it were; no tree is deeper."""


class TreePlan(NamedTuple):
    """Hold a tree's paths, the tokens a round is expected to write with it, and those per plain step's time."""

    paths: Paths
    tokens: float
    gain: float


def same_rates(ranks: Sequence[float], depth: int) -> Rates:
    """Return rates that hold at every depth."""
    return [ranks] * depth


def assumed_heads(heads: int, ranks: int = 10) -> list[list[float]]:
    """Return assumed rates of Medusa heads: 60 % of first tokens are right, fewer further on, ranks as a power law.

    An assumption, not a measurement: measure your own heads' rates with ``RankRates`` for a better tree.
    """
    firsts = (0.6, 0.5, 0.45, 0.4, 0.38)
    return [[firsts[min(head, 4)] * (rank + 1) ** -2.3 for rank in range(ranks)] for head in range(heads)]


def expected_tokens(paths: Paths, rates: Rates) -> float:
    """Return the tokens a round is expected to write with a tree, the target's own included."""
    total = 1.0
    for path in paths:
        chance = 1.0
        for depth, rank in enumerate(path):
            chance *= rates[depth][rank] if depth < len(rates) and rank < len(rates[depth]) else 0.0
        total += chance
    return total


def best_paths(rates: Rates, nodes: int) -> Paths:
    """Return the tree of at most ``nodes`` nodes with the most accepted tokens; siblings have ranks 0, 1, 2, ...

    Source: Chen et al. 2024, "Sequoia", section 3.1, here with rates by depth too.
    """
    return _Table(_checked(rates), nodes).paths(nodes)


def best_plan(rates: Rates, costs: Costs, most: int = 64, rows: int = 1) -> TreePlan:
    """Return the tree, of whatever size and depth, that writes the most tokens in a plain step's time.

    A drafter pays ``costs.draft`` a level, the pass by the number of nodes. ``gain`` below 1 says: do not draft.
    """
    rates = _checked(rates)
    best = TreePlan((), 0.0, 0.0)
    for depth in range(1, len(rates) + 1):
        table = _Table(rates[:depth], most)
        for nodes, accepted in enumerate(table.accepted):
            cost = costs.forward(rows, nodes) / costs.forward(rows, 0) + costs.draft * depth
            if nodes and (1 + accepted) / cost > best.gain:
                best = TreePlan(table.paths(nodes), 1 + accepted, (1 + accepted) / cost)
    return best


def _checked(rates: Rates) -> Rates:
    if not rates or not all(len(ranks) and all(0 <= rate <= 1 for rate in ranks) for ranks in rates):
        raise SpecGenError(f"rates={rates!r}: for each depth a list of numbers from 0 to 1, one a rank, is required.")
    return rates


class _Table:
    """Hold the best forests of every depth, first rank and size.

    ``take[d][r][n]``: how many of at most n nodes go to the subtree of the child of rank r, the rest to its younger
    siblings; 0: no such child and none after it.
    """

    def __init__(self, rates: Rates, nodes: int) -> None:
        if nodes < 1:
            raise SpecGenError(f"nodes={nodes!r}: a tree has at least one node.")
        sizes = torch.arange(nodes + 1)
        self._rest = (sizes[:, None] - sizes).clamp(min=0)
        self._split = (sizes[:, None] >= sizes) & (sizes > 0)
        below = torch.zeros(nodes + 1, dtype=torch.float64)  # the best forest of the level below, by size
        self.take: list[list[list[int]]] = []
        for ranks in reversed(rates):
            subtree = 1.0 + torch.cat([below[:1], below[:-1]])
            forest = torch.zeros_like(below)
            level = []
            for rate in reversed(ranks):
                forest, size = self._join(rate * subtree, forest)
                level.append(size.tolist())
            self.take.append(level[::-1])
            below = forest
        self.take.reverse()
        self.accepted: list[float] = below.tolist()

    def _join(self, first: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
        """Share n nodes between the subtree of a child and its younger siblings."""
        value = torch.where(self._split, first + others[self._rest], 0.0)
        return value.max(1)

    def paths(self, nodes: int) -> Paths:
        """Read the best tree of at most ``nodes`` nodes."""
        found: list[tuple[int, ...]] = []
        open_nodes: list[tuple[tuple[int, ...], int]] = [((), nodes)]
        while open_nodes:
            path, left = open_nodes.pop()
            if len(path) == len(self.take):
                continue
            for rank, sizes in enumerate(self.take[len(path)]):
                size = sizes[left]
                if not size:
                    break
                found.append((*path, rank))
                open_nodes.append(((*path, rank), size - 1))
                left -= size
        return tuple(sorted(found, key=lambda line: (len(line), line)))


class RankRates:
    """Measure the rates that ``best_paths`` asks for, from rounds drafted with a fixed tree.

    ``paths`` are the tree's own. A child counts as tried where it was proposed below an accepted node.
    """

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        depth = max(map(len, paths))
        ranks = max(map(max, paths)) + 1
        self.tried = [[0] * ranks for _ in range(depth)]
        self.accepted = [[0] * ranks for _ in range(depth)]

    def observe(self, round: Round) -> None:
        """Count one round of every row. Raises: ``SpecGenError`` for drafts of more nodes than the tree has."""
        if max(round.proposed) > len(self._paths):
            raise SpecGenError(
                f"a draft of {max(round.proposed)} nodes was measured with a tree of {len(self._paths)}: the paths of "
                "the drafter's own tree are required."
            )
        for proposed, path in zip(round.proposed, round.paths, strict=True):
            texts: list[tuple[int, ...]] = [(), *(self._paths[node] for node in path)]
            kept = set(path)
            for node, line in enumerate(self._paths[:proposed]):
                if line[:-1] in texts:
                    self.tried[len(line) - 1][line[-1]] += 1
                    self.accepted[len(line) - 1][line[-1]] += node in kept

    @property
    def rates(self) -> Rates:
        """Return the rates seen; 0 where nothing was tried."""
        return [
            [hits / max(1, tries) for hits, tries in zip(*level, strict=True)]
            for level in zip(self.accepted, self.tried, strict=True)
        ]


class Measured(Drafter):
    """Pass a drafter that drafts a fixed tree through, and count: ``rates`` are those of its tree's ranks.

    Draft a wide tree on texts of your own, give ``best_plan`` the rates and your costs, and draft the tree it returns.
    """

    def __init__(self, inner: Drafter, paths: Paths) -> None:
        self.inner = inner
        self.counts = RankRates(paths)

    @property
    def rates(self) -> Rates:
        """Return the rates seen so far, in all calls."""
        return self.counts.rates

    def reads(self, model: PreTrainedModel) -> Reads:
        """Return what the drafter reads."""
        return self.inner.reads(model)

    def begin(self, call: Call) -> MeasuredSession:
        """Do as the drafter does."""
        return MeasuredSession(self.inner.begin(call), self.counts)


class MeasuredSession(Session):
    """Pass a session through, and count its rounds."""

    def __init__(self, inner: Session, counts: RankRates) -> None:
        self.inner = inner
        self.counts = counts

    @property
    def draft_cost(self) -> float:
        """Return the session's own cost."""
        return self.inner.draft_cost

    def propose(self, room: list[int]) -> Draft:
        """Do as the session does."""
        return self.inner.propose(room)

    def observe(self, round: Round) -> None:
        """Count the round and pass it on."""
        self.counts.observe(round)
        self.inner.observe(round)
