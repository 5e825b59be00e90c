"""Draft lengths and shapes: what a call, a configuration and a drafter's habits settle, and when drafting rests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import index

import torch
from torch import Tensor

from hf_specgen import ops
from hf_specgen.drafting.drafter import Call
from hf_specgen.drafting.shapes import DynamicShape, Shape, StaticShape, depth_of, parse_shape
from hf_specgen.errors import SpecGenError, warn
from hf_specgen.round.costs import Costs, Rate
from hf_specgen.round.records import Round, Tree
from hf_specgen.round.sequences import DraftRequest
from hf_specgen.round.typical import Typical

SCHEDULES = ("constant", "heuristic", "heuristic_transient", "adaptive")
_REST = 16


@dataclass
class DraftLength:
    """Choose how many tokens each row drafts.

    ``constant``: always ``num_tokens``. ``heuristic``: per row, two more after a fully accepted draft, one fewer
    otherwise. ``adaptive``: as many as pay at the acceptance seen so far and the given costs, at most ``num_tokens``.
    """

    schedule: str
    num_tokens: int
    costs: Costs
    current: list[int] = field(default_factory=list)

    @classmethod
    def choose(cls, request: DraftRequest, own: int | None, default: int, costs: Costs) -> DraftLength:
        """Settle the request of a call with a drafter's own setting: a number asks for a constant length.

        Raises: ``SpecGenError`` for an unknown schedule or a length below one.
        """
        asked = request.num_tokens if request.num_tokens is not None else own
        schedule = request.schedule or ("adaptive" if asked is None else "constant")
        length = default if asked is None else asked
        if schedule not in SCHEDULES:
            raise SpecGenError(
                f"num_assistant_tokens_schedule={schedule!r}: one of {', '.join(SCHEDULES)} is required."
            )
        try:
            whole = index(length)
        except TypeError:
            whole = 0
        if whole < 1:
            raise SpecGenError(
                f"num_assistant_tokens={length!r}: a whole number of at least 1 is required. For no drafts, pass no "
                "drafter."
            )
        return cls(schedule, whole, costs)

    def begin(self, rows: int) -> None:
        """Start every row at the configured length."""
        self.current = [self.num_tokens] * rows

    def bounds(self, room: Sequence[int]) -> list[int]:
        """Return the most tokens that each row may draft now."""
        return [min(length, space) for length, space in zip(self.current, room, strict=True)]

    def cut(self, available: Sequence[int], rates: Sequence[Rate], remaining: Sequence[int]) -> list[int]:
        """Return how many of each row's ``available`` tokens to propose; ``rates[r]`` is what is known of row r's.

        ``remaining[r]`` is what row r may yet write, 0 when it is finished.
        """
        if self.schedule != "adaptive":
            return list(available)
        survival = [rate.survival(count) for rate, count in zip(rates, available, strict=True)]
        width = self.costs.choose(survival, remaining)
        return [min(width, count) for count in available]

    def observe(self, round: Round) -> None:
        """Adapt the heuristic length of rows that drafted."""
        if self.schedule not in ("heuristic", "heuristic_transient"):
            return
        for row, (proposed, path) in enumerate(zip(round.proposed, round.paths, strict=True)):
            if proposed:
                full = len(path) == proposed
                self.current[row] = self.current[row] + 2 if full else max(1, self.current[row] - 1)


@dataclass
class Pace:
    """Decide before each round how many tokens every row drafts, and rest for a while when none would pay."""

    length: DraftLength
    rate: Rate
    _rest: int = 0
    _pause: int = 0

    def wanted(self, space: Sequence[int], remaining: Sequence[int]) -> list[int]:
        """Return each row's draft length, within its ``space``; ``remaining[r]`` is what row r may yet write."""
        bounds = self.length.bounds(space)
        if self._rest > 0:
            self._rest -= 1
            return [0] * len(bounds)
        wanted = self.length.cut(bounds, [self.rate] * len(bounds), remaining)
        if any(wanted) or not any(bounds):
            self._pause = 0 if any(wanted) else self._pause
            return wanted
        self._pause = max(_REST, 2 * self._pause)  # it does not pay now: rest, then try one token again
        self._rest = self._pause
        return [min(1, bound) for bound in bounds] if self._pause > _REST else wanted

    def observe(self, round: Round) -> None:
        """Learn from a round how often drafted tokens are accepted."""
        self.length.observe(round)
        for proposed, path in zip(round.proposed, round.paths, strict=True):
            if proposed:
                self.rate.observe(len(path), min(proposed, len(path) + 1))
        tried = sum(round.proposed)
        right = sum(len(path) for proposed, path in zip(round.proposed, round.paths, strict=True) if proposed)
        if self._rest > 0 and tried and 2 * right >= tried:  # a trial went well: try again at once, at the same pause
            self._rest = 0
            self._pause = self._pause // 2


def warn_shallow(name: str, asked: int | None, deepest: int, reason: str) -> None:
    """Say that a drafter cannot draft as many tokens in a row as somebody asked for."""
    if asked is not None and asked > deepest:
        warn(
            f"{asked} tokens a draft were asked for and {name} drafts at most {deepest}, because {reason}: drafts are "
            f"that long, and the text is the same. Ask for at most {deepest}, or leave the number to the drafter."
        )


@dataclass(frozen=True)
class Habits:
    """Say how a drafter drafts where nobody asks for anything else.

    ``usual``: the shape that ``tree=None`` means. ``longest``: the most tokens of a chain whose length follows what
    pays; ``constant``: those of a chain of constant length. ``deepest``: how many tokens in a row it can draft (None:
    any number), and the ``reason``. ``level_cost``: one level of a draft, in plain steps of the target. The other
    fields are the drafter's own settings; None leaves the choice open.
    """

    title: str
    usual: Shape
    longest: int
    constant: int
    level_cost: float
    deepest: int | None = None
    reason: str = ""
    tree: object = None
    num_tokens: int | None = None
    schedule: str | None = None
    confidence: float | None = None
    sample: bool = False
    costs: Costs | None = None


class DraftSettings:
    """Hold what is settled for one call: the shape of drafts, how tokens are chosen, and how deep each row goes.

    ``draws``: tokens are drawn from the drafter's own law, and carry it. ``couples``: they are picked with the noise
    that the target will use; dynamic trees take the likeliest ones. ``confidence``: a chain ends before a token whose
    law is flatter (0: never).

    Raises: ``SpecGenError`` for shapes, lengths and thresholds that cannot be, or cannot be drawn.
    """

    def __init__(self, call: Call, habits: Habits) -> None:
        self._sequences = call.sequences
        self.device = call.device
        asked = call.request.num_tokens
        self._number = habits.num_tokens if asked is None else asked
        asked_shape = parse_shape(habits.tree, habits.usual, habits.deepest)
        self.shape = bounded(asked_shape, self._number)
        self._bounded = habits.deepest is not None or self.shape is not asked_shape
        self._pays = isinstance(asked_shape, DynamicShape) and asked_shape.nodes is None
        samples = habits.sample and not call.sequences.greedy
        shares_noise = call.rule == "gumbel"
        self.couples = samples and shares_noise and isinstance(self.shape, StaticShape)
        self.draws = samples and not shares_noise
        self.costs = habits.costs or replace(call.costs, draft=habits.level_cost)
        check_shape(self.shape, call.device)
        if self.draws:
            check_drawn(self.shape, call.rule)
        threshold = call.request.confidence
        self.confidence = (habits.confidence if threshold is None else threshold) or 0.0
        check_confidence(self.confidence, self.is_chain)
        self._plans: dict[int, FixedPlan] = {}
        self._depth = depth_of(self.shape)
        self._pace: Pace | None = None
        self._settle_lengths(call, habits)

    @property
    def is_chain(self) -> bool:
        """Tell whether drafts are chains of best tokens, whose length follows what pays."""
        return is_best_chain(self.shape)

    def wanted(self, room: list[int]) -> list[int]:
        """Return how deep every row of the batch drafts now, at most ``room[r]``."""
        if self._pace is None:
            return [min(space, self._depth) for space in room]
        if self._bounded:
            room = [min(space, self._depth) for space in room]
        return self._pace.wanted(room, self._sequences.remaining)

    def observe(self, round: Round) -> None:
        """Learn from a round how often drafted tokens of a chain are accepted."""
        if self._pace is not None:
            self._pace.observe(round)

    def plan(self, depth: int) -> FixedPlan:
        """Return the fixed shape down to a depth; what follows from it is made once a call."""
        if depth not in self._plans:
            shape = self.shape
            assert isinstance(shape, StaticShape)
            cut = StaticShape.chain(depth) if self.is_chain else shape.cut(depth)
            self._plans[depth] = FixedPlan(cut, self.device)
        return self._plans[depth]

    def _settle_lengths(self, call: Call, habits: Habits) -> None:
        request = call.request
        schedule = request.schedule or habits.schedule
        if schedule is None and self.draws:
            schedule = "constant"  # what is drawn depends on the length: neighbours must not set it
        if schedule is None and self._pays:  # what a dynamic tree without a number of nodes asks for
            schedule = "adaptive"
        if not self.is_chain:
            self._bound_tree(request, habits)
            return
        own = habits.num_tokens
        if own is None and self.shape is not habits.usual:
            own = len(self.shape) if isinstance(self.shape, StaticShape) else None
        default = habits.constant if schedule == "constant" else habits.longest
        length = DraftLength.choose(replace(request, schedule=schedule), own, default, self.costs)
        length.begin(call.rows)
        self._pace = Pace(length, Rate(0.6, 0.7))
        if self._bounded and self._number is not None:
            warn_shallow(habits.title, length.num_tokens, self._depth, self._why(habits))

    def _bound_tree(self, request: DraftRequest, habits: Habits) -> None:
        """Cut a tree to the number of tokens asked for, which must be one; a larger one warns."""
        number = self._number
        if number is None:
            return
        length = DraftLength.choose(replace(request, schedule=None), number, number, self.costs)
        warn_shallow(habits.title, length.num_tokens, self._depth, self._why(habits))
        self._depth = min(self._depth, length.num_tokens)

    def _why(self, habits: Habits) -> str:
        """Return why drafts are no deeper."""
        if self._depth == habits.deepest:
            return habits.reason
        return f"its tree (tree={habits.tree!r}) is no deeper"


@dataclass(frozen=True)
class RunLevel:
    """Say how one level of a fixed tree goes on: which of its nodes run, below which of those that ran before.

    ``run`` and ``parents`` are places, None for all of them in order. ``tree`` holds all nodes that run so far.
    """

    run: Tensor | None
    parents: Tensor | None
    tree: Tree


class FixedPlan:
    """Hold a fixed shape with all that is the same in every round: its tree, and the levels that a drafter runs."""

    def __init__(self, shape: StaticShape, device: torch.device) -> None:
        self.shape = shape
        self.tree = shape.tree(device)
        self.levels: list[RunLevel] = []
        ran = 0
        for depth in range(1, shape.max_depth):
            level = shape.levels[depth - 1]
            before = shape.expanding(depth - 1)
            nodes = shape.expanding(depth)
            run = [node - level.start for node in nodes]
            parents = [before.index(shape.parents[node]) for node in nodes]
            ran += len(run)
            tree = self._running_tree(ran, device)
            places = _unless_all(run, len(level), device)
            self.levels.append(RunLevel(places, _unless_all(parents, len(before), device), tree))

    def _running_tree(self, ran: int, device: torch.device) -> Tree:
        if self.shape.is_chain:
            return Tree.chain(ran, device)
        return Tree(torch.tensor([self.shape.internal_parents[:ran]], device=device))


def _unless_all(places: list[int], count: int, device: torch.device) -> Tensor | None:
    if places == list(range(count)):
        return None
    return torch.tensor(places, device=device)


def bounded(shape: Shape, number: int | None) -> Shape:
    """Return what drafts look like: a tree cut at ``number`` tokens in a row, a dynamic one of width one as a chain.

    A chain stays as it is, since its length may change from round to round.
    """
    if isinstance(shape, DynamicShape):
        depth = shape.depth if shape.nodes is None else min(shape.depth, shape.nodes)
        return StaticShape.chain(depth) if shape.top_k == 1 or shape.nodes == 1 else shape
    if is_best_chain(shape) or number is None or number not in range(1, shape.max_depth):
        return shape
    return shape.cut(number)


def is_best_chain(shape: Shape) -> bool:
    """Tell whether a shape is a chain of the best tokens."""
    return isinstance(shape, StaticShape) and shape.is_chain and not any(shape.ranks)


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
