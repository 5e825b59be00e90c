"""Fill a round's draft, level by level: the only place where drafted tokens are picked, drawn, coupled or left out.

A method is a ``LevelModel``: it gives the laws of one level after another and runs the nodes that were chosen. All else
happens here: processors, coins, shapes, unsure tokens, rows that are finished, the law that drawn tokens carry.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_specgen.drafting.drafter import Call, Session
from hf_specgen.drafting.growth import Growth
from hf_specgen.drafting.lengths import DraftSettings, FixedPlan
from hf_specgen.drafting.shapes import ABSENT, DynamicShape, in_target_ids
from hf_specgen.round.coins import Coins
from hf_specgen.round.records import DenseQ, Draft, Round, Tree, spread


@dataclass(frozen=True)
class Level:
    """Hold the nodes of one level that run: those whose children are drafted next.

    Shapes: ``tokens (R, F)`` target ids, negative where a node is absent; ``parents``: each node's place among those
    that ran at the level before, ``(F)`` for all rows, ``(R, F)`` row by row, or None for the same places. ``tree``
    holds all nodes that run so far, these last. ``wanted[p]``: how deep row p drafts.
    """

    depth: int
    tokens: Tensor
    parents: Tensor | None
    tree: Tree
    wanted: Sequence[int]

    def of_parents(self, states: Tensor) -> Tensor:
        """Return each node's parent's part of ``states (R, F_before, H)``: ``(R, F, H)``."""
        parents = self.parents
        if parents is None:
            return states
        if parents.dim() == 1:
            return states.index_select(1, parents)
        return states.gather(1, parents.unsqueeze(-1).expand(-1, -1, states.shape[-1]))


class LevelModel(ABC):
    """Give the laws of a draft, level by level. It serves one call, and keeps what that call needs.

    ``target_ids (V_draft)``: the target's ids of the ids that laws are over, None where they are the same.
    """

    target_ids: Tensor | None = None

    def keep(self, finished: list[bool]) -> None:  # noqa: B027 - most models keep nothing per row
        """Drop finished rows of the batch; called before every draft."""

    def rest(self) -> None:  # noqa: B027 - most models may rest as long as they like
        """Do what must be done in a round in which no row drafts."""

    @abstractmethod
    def start(self, wanted: list[int], nodes: int) -> list[int]:
        """Read what rows have got since they were read; return which rows of the batch take part, by place.

        ``wanted[r]``: how deep row r of the batch drafts, some of them more than 0; ``nodes`` will be run behind.
        """

    @abstractmethod
    def laws(self, depth: int) -> Tensor:
        """Return logits ``(R, F, V_draft)`` of the tokens at a depth, counted from 1 below the root.

        F is the number of nodes that ran at the level before (1 for the root), or 1 where one law serves all of them.
        """

    def advance(self, level: Level) -> None:  # noqa: B027 - laws that depend on the depth alone need no run
        """Run the nodes of a level, so that ``laws`` can be asked about their children."""

    def survival(self) -> Tensor | None:
        """Return how likely the best token of each node is kept ``(R, F)``, where a method knows more than its law."""
        return None

    def finish(self) -> None:  # noqa: B027 - most models leave nothing behind
        """Forget the nodes of this draft: the round decides which of them become text."""

    def observe(self, round: Round) -> None:  # noqa: B027 - a model without state has nothing to learn
        """Take what a finished round says: hidden states, accepted paths."""


class LevelSession(Session):
    """Draft with a level model: settle how deep every row goes, fill, learn from the round."""

    def __init__(self, call: Call, model: LevelModel, settings: DraftSettings) -> None:
        self.call = call
        self.model = model
        self.settings = settings

    @property
    def draft_cost(self) -> float:
        """Return what one level of a draft costs, in plain steps."""
        return self.settings.costs.draft

    def propose(self, room: list[int]) -> Draft:
        """Draft for the rows that have room and whose drafts pay."""
        self.model.keep(self.call.sequences.finished)
        wanted = self.settings.wanted(room)
        if not any(wanted):
            self.model.rest()
            return Draft.empty(self.call.rows, self.call.device)
        return fill(self.model, self.settings, self.call, wanted)

    def observe(self, round: Round) -> None:
        """Hand the round to the model, and learn how often drafts are accepted."""
        self.model.observe(round)
        self.settings.observe(round)


def fill(model: LevelModel, settings: DraftSettings, call: Call, wanted: list[int]) -> Draft:
    """Return the draft of the whole batch; ``wanted[r]`` bounds the depth of row r.

    A fixed shape takes tokens by rank, or draws siblings without replacement. A dynamic one keeps the likeliest nodes.
    """
    shape = settings.shape
    deepest = max(wanted)
    if isinstance(shape, DynamicShape):
        deepest = min(shape.depth, deepest)
        live = model.start(wanted, (deepest - 1) * shape.top_k)
        draft = _Filling(model, settings, call, live, wanted).dynamic(shape, deepest)
        draft = _with_all_parents(draft, live, call.rows)
    else:
        plan = settings.plan(deepest)
        live = model.start(wanted, len(plan.shape.internal))
        draft = _Filling(model, settings, call, live, wanted).fixed(plan)
    model.finish()
    return _over_batch(draft, live, call.rows)


class _Filling:
    """Fill one draft for the rows of the batch that ``live`` names by place."""

    def __init__(
        self, model: LevelModel, settings: DraftSettings, call: Call, live: list[int], wanted: list[int]
    ) -> None:
        self.model = model
        self.settings = settings
        self.sequences = call.sequences
        self.device = call.device
        self.live = live
        self.wanted = [wanted[row] for row in live]
        self.peaks: list[Tensor] = []
        self.depth = 0
        self.paths = torch.zeros(len(live), 1, 0, dtype=torch.long, device=self.device)

    def fixed(self, plan: FixedPlan) -> Draft:
        """Fill a shape that is the same for every row."""
        shape = plan.shape
        tokens: list[Tensor] = []
        drawn: list[Tensor] = []
        for depth in range(1, shape.max_depth + 1):
            scores = self._scores(depth)
            if self.settings.confidence:
                self._stop_unsure(scores)
                if depth > max(self.wanted):
                    break
            if self.settings.draws:
                picks = shape.draw(depth, scores, self._coins)
                drawn.append(shape.laws(depth, scores))
            else:
                picks = shape.best(depth, self._coupled(scores))
            tokens.append(self._in_target_ids(picks))
            if depth < shape.max_depth:
                level = plan.levels[depth - 1]
                run = tokens[-1] if level.run is None else tokens[-1].index_select(1, level.run)
                self._advance(run, level.parents, level.tree)
        if not tokens:
            return self._nothing()
        law = DenseQ(self._over_target(torch.cat(drawn, 1))) if drawn else None
        tree = plan.tree if len(tokens) == shape.max_depth else plan.tree.trim(sum(part.shape[1] for part in tokens))
        n_valid = shape.n_valid(torch.tensor(self.wanted, device=self.device))
        without_replacement = law is not None and not shape.is_chain
        return self._draft(torch.cat(tokens, 1), tree, n_valid, law, without_replacement)

    def dynamic(self, shape: DynamicShape, deepest: int) -> Draft:
        """Grow where the laws are sure: every row its own tree."""
        growth = Growth(shape)
        room = torch.tensor(self.wanted, device=self.device)
        for depth in range(1, deepest + 1):
            ids, parents = growth.add(self._scores(depth).float().log_softmax(-1))
            if depth < deepest:
                self._advance(self._in_target_ids(ids), parents, Tree(growth.frontier_parents()))
        nodes = shape.nodes
        if nodes is None:
            remaining = [self.sequences.remaining[row] for row in self.live]
            nodes = growth.paying(self.settings.costs, remaining, room)
        if not nodes:
            return self._nothing()
        ids, links, n_valid, _ = growth.finish(nodes, room)
        return self._draft(self._in_target_ids(ids), Tree(links, deepest=deepest), n_valid)

    def _draft(
        self, tokens: Tensor, tree: Tree, n_valid: Tensor, law: DenseQ | None = None, without_replacement: bool = False
    ) -> Draft:
        """Return the draft of the live rows; places behind a row's own nodes hold no token that could be accepted."""
        counted = torch.arange(tokens.shape[1], device=self.device) < n_valid[:, None]
        tokens = tokens.masked_fill(~counted, ABSENT)
        return Draft(tokens, tree, n_valid, law, without_replacement, self._broken())

    def _nothing(self) -> Draft:
        return replace(Draft.empty(len(self.live), self.device), broken=self._broken())

    def _broken(self) -> Tensor:
        """Tell whether the largest logits of some level are NaN or infinite."""
        peaks = torch.stack(self.peaks)
        return (peaks - peaks != 0).any()

    def _advance(self, tokens: Tensor, parents: Tensor | None, tree: Tree) -> None:
        level = Level(self.depth, tokens, parents, tree, self.wanted)
        if self._asks_prefixes:
            self.paths = torch.cat((level.of_parents(self.paths), tokens.unsqueeze(-1)), -1)
        self.model.advance(level)

    def _scores(self, depth: int) -> Tensor:
        """Return the scores that tokens of a depth are picked by, ``(R, F, V_draft)``."""
        self.depth = depth
        logits = self.model.laws(depth).to(self.device)
        self.peaks.append(logits.amax())
        if self.model.target_ids is None:
            logits = logits[..., : self.sequences.vocab_size]
        return self._processed(logits) if self._processes else logits

    @cached_property
    def _processes(self) -> bool:
        """Tell whether the processors are asked: not where they leave the order of the tokens as it is.

        The user's own code is asked about chains and drawn tokens only: a tree holds texts that no law would write.
        """
        warp = self.sequences.warp
        settings = self.settings
        if settings.draws or settings.couples:
            return True
        if warp.truncation is not None:  # the best stay the best
            return bool(settings.confidence and warp.steps)
        return settings.is_chain or warp.takes_any_text

    @property
    def _asks_prefixes(self) -> bool:
        return self._processes and self.sequences.warp.needs_prefix

    def _processed(self, logits: Tensor) -> Tensor:
        """Apply the target's processors, each node behind its own text."""
        width = logits.shape[1]
        if self._asks_prefixes:
            width = self.paths.shape[1]
        scores = self._over_target(logits.float()).expand(-1, width, -1).flatten(0, 1)
        texts = self.paths.flatten(0, 1)
        listed = texts.tolist() if self._asks_prefixes else []
        ends = self.sequences.stops.eos

        def prefix(place: int) -> Tensor | None:
            text = listed[place]
            if ABSENT in text or not ends.isdisjoint(text):
                return None
            return torch.cat([self.sequences.prefix(self.live[place // width]), texts[place : place + 1]], 1)

        owners = self._owners.repeat_interleave(width)
        scores = self.sequences.warp(scores, owners, prefix).unflatten(0, (len(self.live), width))
        ids = self.model.target_ids
        return scores if ids is None else scores[..., ids]

    def _coupled(self, scores: Tensor) -> Tensor:
        """Add the noise that the target will pick its token at this depth with, where it is shared."""
        if not self.settings.couples:
            return scores
        rows = torch.arange(len(scores), device=self.device)
        noise = self._coins.gumbel(rows, self.depth - 1, self.sequences.vocab_size).to(scores.dtype)
        ids = self.model.target_ids
        return scores + (noise if ids is None else noise[:, ids])[:, None]

    def _stop_unsure(self, scores: Tensor) -> None:
        """End rows before a token that is unsure. That is known before the token is drawn, so nothing is biased."""
        chances = self.model.survival()
        if chances is None:
            chances = torch.softmax(scores.float(), -1).amax(-1)
        for row, chance in enumerate(chances[:, 0].tolist()):
            if chance < self.settings.confidence:
                self.wanted[row] = min(self.wanted[row], self.depth - 1)

    def _in_target_ids(self, picks: Tensor) -> Tensor:
        return in_target_ids(picks, self.model.target_ids)

    def _over_target(self, scores: Tensor) -> Tensor:
        """Return scores over the target's ids: those that the drafter lacks are impossible for it."""
        vocab = self.sequences.vocab_size
        ids = self.model.target_ids
        if ids is None:
            return F.pad(scores, (0, vocab - scores.shape[-1]), value=float("-inf"))
        wide = scores.new_full((*scores.shape[:-1], vocab), float("-inf"))
        wide[..., ids] = scores
        return wide

    @cached_property
    def _coins(self) -> Coins:
        return self.sequences.coins().take(self._owners)

    @cached_property
    def _owners(self) -> Tensor:
        return torch.tensor(self.live, device=self.device)


def _over_batch(draft: Draft, live: list[int], rows: int) -> Draft:
    """Return the draft of the whole batch: rows that took no part get no nodes."""
    if len(live) == rows:
        return draft
    places = torch.tensor(live, device=draft.tokens.device)
    q = draft.q
    if isinstance(q, DenseQ):
        q = DenseQ(spread(q.logits, places, rows))
    tokens = spread(draft.tokens, places, rows)
    n_valid = spread(draft.n_valid, places, rows)
    return replace(draft, tokens=tokens, n_valid=n_valid, q=q)


def _with_all_parents(draft: Draft, live: list[int], rows: int) -> Draft:
    """Return a draft whose tree has a line for every row of the batch: what takes no part hangs on the root."""
    if len(live) == rows or not draft.width:
        return draft
    places = torch.tensor(live, device=draft.tokens.device)
    parents = spread(draft.tree.parents + 1, places, rows) - 1
    return replace(draft, tree=replace(draft.tree, parents=parents))
