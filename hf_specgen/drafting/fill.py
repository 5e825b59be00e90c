"""Grow a round's draft below every row's newest pair: a chain, a fixed tree, or a tree that follows the scores."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from hf_specgen import ops
from hf_specgen.drafting.drafter import fit_width, no_numbers
from hf_specgen.drafting.pair_cache import PairCache
from hf_specgen.drafting.shapes import ABSENT, DynamicShape, Growth, Shape, StaticShape
from hf_specgen.errors import SpecGenError
from hf_specgen.round.coins import Coins
from hf_specgen.round.costs import Costs
from hf_specgen.round.records import DenseQ, Draft, Tree
from hf_specgen.round.sequences import Sequences
from hf_specgen.round.typical import Typical


class HeadModel(Protocol):
    """Turn states into logits over the drafter's own ids, and those into the target's."""

    def logits(self, states: Tensor) -> Tensor:
        """Return ``(B, S, V_draft)`` of states ``(B, S, H)``."""
        ...

    def to_target(self, ids: Tensor) -> Tensor:
        """Return the target's ids of the drafter's."""
        ...


@dataclass(frozen=True)
class Laws:
    """Turn logits into the scores that tokens are picked by: under the target's processors where they matter.

    ``live`` names the rows; ``ids (V_draft)`` are the target's ids of the drafter's, None where they are the same.
    Tokens are drawn by coins of the drafter's own when ``sample``, else the best are taken.
    """

    sequences: Sequences
    live: list[int]
    sample: bool
    ids: Tensor | None

    @property
    def draws(self) -> bool:
        """Tell whether tokens are drawn, and carry their law."""
        return self.sample and not self.sequences.greedy and self.sequences.rule != "gumbel"

    @property
    def couples(self) -> bool:
        """Tell whether tokens are picked with the noise that the target will use."""
        return self.sample and not self.sequences.greedy and self.sequences.rule == "gumbel"

    @cached_property
    def processes(self) -> bool:
        """Tell whether the processors must be asked: not where they leave the order of the tokens as it is."""
        warp = self.sequences.warp
        return self.draws or self.couples or (warp.truncation is None and warp.takes_any_text)

    @cached_property
    def coins(self) -> Coins:
        """Return the coins of the live rows."""
        return self.sequences.coins().take(self._owners)

    @cached_property
    def _owners(self) -> Tensor:
        return torch.tensor(self.live, device=self.sequences.prompt.device)

    def scores(self, logits: Tensor, paths: Tensor) -> Tensor:
        """Return scores ``(R, F, V_draft)`` of logits at nodes that ``paths (R, F, d)`` of target ids lead to."""
        if not self.processes:
            return logits
        rows, width, _ = logits.shape
        wide = self.widened(logits.float()).flatten(0, 1)
        texts = paths.flatten(0, 1)
        listed = texts.tolist() if self.sequences.warp.needs_prefix else []
        ends = self.sequences.stops.eos

        def prefix(place: int) -> Tensor | None:
            if ABSENT in listed[place] or not ends.isdisjoint(listed[place]):
                return None
            return torch.cat([self.sequences.prefix(self.live[place // width]), texts[place : place + 1]], 1)

        scores = self.sequences.warp(wide, self._owners.repeat_interleave(width), prefix).view(rows, width, -1)
        return scores if self.ids is None else scores[..., self.ids]

    def coupled(self, scores: Tensor, depth: int) -> Tensor:
        """Add the noise that the target will pick its token at a depth with, where it is shared."""
        if not self.couples:
            return scores
        place = torch.arange(len(scores), device=scores.device)
        noise = self.coins.gumbel(place, depth - 1, self.sequences.vocab_size).to(scores.dtype)
        return scores + (noise if self.ids is None else noise[:, self.ids])[:, None]

    def widened(self, scores: Tensor) -> Tensor:
        """Return scores over the target's ids: those that the drafter lacks are impossible for it."""
        if self.ids is None:
            return fit_width(scores, self.sequences.vocab_size)
        wide = scores.new_full((*scores.shape[:-1], self.sequences.vocab_size), float("-inf"))
        wide[..., self.ids] = scores
        return wide


@dataclass(frozen=True)
class _Level:
    """Say how one level of a fixed tree goes on: which of its nodes run, below which of those that ran before.

    None stands for all of them, in order.
    """

    run: Tensor | None
    parents: Tensor | None
    tree: Tree


class Plan:
    """Hold a fixed shape with all that is the same in every round: its tree, and the passes of a drafter."""

    def __init__(self, shape: StaticShape, device: torch.device) -> None:
        self.shape, self.tree = shape, shape.tree(device)
        self.levels: list[_Level] = []
        ran = 0
        for depth in range(1, shape.max_depth):
            level, nodes, before = shape.levels[depth - 1], shape.expanding(depth), shape.expanding(depth - 1)
            run = [node - level.start for node in nodes]
            parents = [before.index(shape.parents[node]) for node in nodes]
            ran += len(run)
            tree = Tree.chain(ran, device) if shape.is_chain else Tree(self._parents(ran, device))
            places = (_unless_all(run, len(level), device), _unless_all(parents, len(before), device))
            self.levels.append(_Level(*places, tree))

    def _parents(self, ran: int, device: torch.device) -> Tensor:
        return torch.tensor([self.shape.internal_parents[:ran]], device=device)


def _unless_all(places: list[int], count: int, device: torch.device) -> Tensor | None:
    return None if places == list(range(count)) else torch.tensor(places, device=device)


def check_shape(shape: Shape, device: torch.device) -> None:
    """Refuse shapes that a device cannot choose. Raises: ``SpecGenError``."""
    if isinstance(shape, DynamicShape):
        ops.check_doubles(device, "a dynamic tree")


def check_drawn(shape: Shape, rule: str | Typical) -> None:
    """Refuse shapes whose nodes cannot be drawn, or that the rule cannot judge then. Raises: ``SpecGenError``."""
    if isinstance(shape, DynamicShape):
        raise SpecGenError(
            "sample=True was asked for with a dynamic tree: which nodes it keeps depends on their probabilities, so "
            "they are no fair draws. Use a chain or a fixed tree, or sample=False (the text follows the target's law "
            "either way)."
        )
    if rule == "block" and not shape.is_chain:
        raise SpecGenError(
            "rule='block' judges chains only and the drafter draws a tree (sample=True): use tree='chain', "
            "rule='rejection', or sample=False."
        )


def check_confidence(confidence: float, is_chain: bool) -> None:
    """Refuse a threshold for trees. Raises: ``SpecGenError``."""
    if confidence and not is_chain:
        raise SpecGenError(
            "a confidence threshold was given for a draft tree: it ends chains only. Use tree='chain', or drop it."
        )


@dataclass(frozen=True)
class Grower:
    """Grow the draft of one round for the live rows of a cache."""

    model: HeadModel
    pairs: PairCache
    laws: Laws

    def fixed(self, plan: Plan, states: Tensor, wanted: list[int], confidence: float = 0.0) -> Draft:
        """Fill a tree that is the same for every row, level by level; ``wanted[r]`` bounds the depth of row r.

        A chain ends before a token whose law is flatter than ``confidence``. Shapes: ``states (R, 1, H)``.
        """
        shape = plan.shape
        tokens: list[Tensor] = []
        drawn: list[Tensor] = []
        peaks: list[Tensor] = []
        paths = torch.zeros(len(states), 1, 0, dtype=torch.long, device=states.device)
        for depth in range(1, shape.max_depth + 1):
            logits = self.model.logits(states)
            peaks.append(logits.amax())
            scores = self.laws.scores(logits, paths)
            if confidence:
                self._stop_unsure(scores, depth, wanted, confidence)
                if depth > max(wanted):
                    break
            ids = self._pick(shape, depth, self.laws.coupled(scores, depth))
            tokens.append(self.model.to_target(ids))
            if self.laws.draws:
                drawn.append(shape.laws(depth, scores))
            if depth == shape.max_depth:
                break
            level = plan.levels[depth - 1]
            chosen = _picked(tokens[-1], level.run)
            above = _picked(states, level.parents)
            if self.laws.processes:
                paths = _picked(paths, level.parents)
                paths = torch.cat((paths, chosen.unsqueeze(-1)), -1)
            states = self.pairs.run(chosen, above, level.tree)
        if not tokens:
            return replace(Draft.empty(len(states), states.device), broken=no_numbers(peaks, states.device))
        law = DenseQ(self.laws.widened(torch.cat(drawn, 1))) if drawn else None
        counts = shape.n_valid(torch.tensor(wanted, device=states.device))
        tree = plan.tree if len(tokens) == shape.max_depth else plan.tree.trim(len(tokens))
        different = law is not None and not shape.is_chain
        return Draft(torch.cat(tokens, 1), tree, counts, law, different, no_numbers(peaks, states.device))

    def dynamic(
        self, shape: DynamicShape, states: Tensor, wanted: list[int], costs: Costs, remaining: list[int]
    ) -> Draft:
        """Grow where the drafter is sure: every row its own tree, at most ``wanted[r]`` deep."""
        growth, peaks = Growth(shape), list[Tensor]()
        room = torch.tensor(wanted, device=states.device)
        paths = torch.zeros(len(states), 1, 0, dtype=torch.long, device=states.device)
        deepest = min(shape.depth, max(wanted))
        for depth in range(1, deepest + 1):
            logits = self.model.logits(states)
            peaks.append(logits.amax())
            scores = self.laws.scores(logits, paths)
            ids, parents = growth.add(scores.float().log_softmax(-1))
            if depth == deepest:
                break
            chosen = self.model.to_target(ids)
            above = states.gather(1, parents.unsqueeze(-1).expand(-1, -1, states.shape[-1]))
            if self.laws.processes:
                paths = paths.gather(1, parents.unsqueeze(-1).expand(-1, -1, paths.shape[-1]))
                paths = torch.cat((paths, chosen.unsqueeze(-1)), -1)
            states = self.pairs.run(chosen, above, Tree(growth.frontier_parents()))
        nodes = growth.paying(costs, remaining, room) if shape.nodes is None else shape.nodes
        if not nodes:
            return replace(Draft.empty(len(states), states.device), broken=no_numbers(peaks, states.device))
        ids, links, n_valid, _ = growth.finish(nodes, room)
        return Draft(
            self.model.to_target(ids),
            Tree(links, deepest=shape.depth),
            n_valid,
            broken=no_numbers(peaks, states.device),
        )

    def _pick(self, shape: StaticShape, depth: int, scores: Tensor) -> Tensor:
        """Return the drafter's ids ``(R, n)`` of a level's nodes."""
        if self.laws.draws:
            return shape.draw(depth, scores, self.laws.coins)
        return shape.best(depth, scores)

    def _stop_unsure(self, scores: Tensor, depth: int, wanted: list[int], confidence: float) -> None:
        """End rows at a node whose law is flat. The law is known before its token is drawn, so nothing is biased."""
        best = torch.softmax(scores[:, 0].float(), -1).amax(-1).tolist()
        for row, probability in enumerate(best):
            if probability < confidence:
                wanted[row] = min(wanted[row], depth - 1)


def _picked(part: Tensor, places: Tensor | None) -> Tensor:
    return part if places is None else part.index_select(1, places)
