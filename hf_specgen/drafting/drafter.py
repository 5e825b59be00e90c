"""The Drafter interface, and the draft lengths that all drafters share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import index
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from hf_specgen.errors import SpecGenError, warn
from hf_specgen.round.costs import Costs, Rate
from hf_specgen.round.records import Draft, Round
from hf_specgen.round.sequences import DraftRequest, Sequences

SCHEDULES = ("constant", "heuristic", "heuristic_transient", "adaptive")


class Drafter(ABC):
    """Propose tokens for every row; its distribution is q.

    A drafter is begun once per ``generate()`` and then alternates ``propose`` and ``observe``. It changes nothing
    outside itself, and two runs with the same text propose the same.
    """

    hidden_layers: tuple[int, ...] = ()
    """Which of the target's hidden states a round must carry: boundary b is the residual stream after b decoder
    layers (0: the embeddings), ``FINAL`` (-1) what the language-model head reads, after the final norm."""

    if not TYPE_CHECKING:  # checkers must still find misspelt names

        def __getattr__(self, name: str) -> Any:
            """Say what to do where transformers' own ``generate()`` was given a drafter as ``assistant_model``."""
            raise missing(self, name)

    @property
    def draws(self) -> bool:
        """Tell whether tokens are drawn from the drafter's own law when the target samples."""
        return False

    @property
    def title(self) -> str:
        """Return the name that statistics show."""
        return type(self).__name__

    @property
    def draft_cost(self) -> float:
        """Return what drafting one more token in every row costs in the running call, in plain steps of the target."""
        return 0.0

    def attach(self, model: PreTrainedModel) -> None:  # noqa: B027 - most drafters need nothing of the target
        """Learn whose text is drafted; called before ``begin`` of every ``generate()``.

        Raises: ``IncompatibleDrafter`` for a target it does not fit.
        """

    def for_call(self, model: PreTrainedModel) -> Drafter:
        """Attach, and return what drafts in one ``generate()``: this object, unless calls may overlap.

        A drafter that keeps what belongs to a call returns a shallow copy of itself, so that calls of several threads,
        or one inside another, do not meet.
        """
        self.attach(model)
        return self

    @abstractmethod
    def begin(self, sequences: Sequences) -> None:
        """Prepare for new rows; the prompt is not read by the target yet.

        Raises: ``IncompatibleDrafter`` or ``SpecGenError`` for requests it cannot serve.
        """

    @abstractmethod
    def propose(self, sequences: Sequences) -> Draft:
        """Return a draft that continues every row; finished rows and rows without room get no nodes."""

    def observe(self, round: Round) -> None:  # noqa: B027 - a drafter without state has nothing to learn
        """Learn from a finished round (round zero is the prompt's)."""


def missing(drafter: Drafter, name: str) -> AttributeError:
    """Return the error of an attribute that a drafter lacks; these are what a model that is not enabled looks for."""
    said = f"{type(drafter).__name__!r} object has no attribute {name!r}"
    if name in ("config", "generation_config"):
        said += (
            ". If it was given to generate() as assistant_model=: call hf_specgen.enable(model) first, or pass "
            "custom_generate=hf_specgen.SpeculativeDecoding(drafter)"
        )
    return AttributeError(said + ".")


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
        return self.costs.best_lengths([rate.rates for rate in rates], available, remaining)

    def observe(self, round: Round) -> None:
        """Adapt the heuristic length of rows that drafted."""
        if self.schedule not in ("heuristic", "heuristic_transient"):
            return
        for row, (proposed, path) in enumerate(zip(round.proposed, round.paths, strict=True)):
            if proposed:
                full = len(path) == proposed
                self.current[row] = self.current[row] + 2 if full else max(1, self.current[row] - 1)


def no_numbers(peaks: Sequence[Tensor], device: torch.device) -> Tensor:
    """Tell whether the largest logits of some passes are NaN or infinite: the ``broken`` of a draft."""
    found = torch.stack(list(peaks)).to(device)
    return (found - found != 0).any()


def fit_width(logits: Tensor, vocab: int) -> Tensor:
    """Return logits ``(..., vocab)`` over the target's ids: those that a drafter lacks are impossible for it."""
    logits = logits[..., :vocab]
    return F.pad(logits, (0, vocab - logits.shape[-1]), value=float("-inf"))


def warn_shallow(name: str, asked: int | None, deepest: int, reason: str) -> None:
    """Say that a drafter cannot draft as many tokens in a row as somebody asked for."""
    if asked is not None and asked > deepest:
        warn(
            f"{asked} tokens a draft were asked for and {name} drafts at most {deepest}, because {reason}: drafts are "
            f"that long, and the text is the same. Ask for at most {deepest}, or leave the number to the drafter."
        )


_REST = 16


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
            self._rest, self._pause = 0, self._pause // 2
