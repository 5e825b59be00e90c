"""Drafter and Session: who proposes tokens, and what it knows of one call of ``generate()``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from hf_specgen.models.slot_cache import SlotCache
from hf_specgen.round.coins import Coins
from hf_specgen.round.costs import Costs
from hf_specgen.round.records import Draft, Round
from hf_specgen.round.sequences import DraftRequest, Sequences
from hf_specgen.round.typical import Typical


@dataclass(frozen=True)
class Reads:
    """Say what of the target's passes a drafter reads.

    ``hidden``: boundaries whose hidden states every round must carry; boundary b is the residual stream after b decoder
    layers (0: the embeddings), ``FINAL`` (-1) what the language-model head reads, after the final norm. ``guesses``:
    the target's best token at every node that was computed (``Round.guesses``).
    """

    hidden: tuple[int, ...] = ()
    guesses: bool = False


@dataclass(frozen=True)
class TargetView:
    """Show a drafter the target that it drafts for: its model, and the slots that its passes fill.

    ``cache`` may be read between rounds, never written to; None where transformers' own loop runs the target.
    """

    model: PreTrainedModel
    cache: SlotCache | None = None


@dataclass(frozen=True)
class Call:
    """Hold what one ``generate()`` gives its drafter: the rows that are written, and a view of the target."""

    sequences: Sequences
    target: TargetView

    @property
    def rows(self) -> int:
        """Return how many rows the batch has."""
        return len(self.sequences)

    @property
    def device(self) -> torch.device:
        """Return where tokens, laws and coins of the call live."""
        return self.sequences.prompt.device

    @property
    def request(self) -> DraftRequest:
        """Return what the caller asked of draft lengths."""
        return self.sequences.request

    @property
    def rule(self) -> str | Typical:
        """Return the rule that judges the drafts."""
        return self.sequences.rule

    @property
    def costs(self) -> Costs:
        """Return what passes of the target cost."""
        return self.sequences.costs

    def coins(self, live: torch.Tensor) -> Coins:
        """Return the coins of some rows of the batch, ``live (R)``, for the round that begins."""
        return self.sequences.coins().take(live)


class Session(ABC):
    """Draft for the rows of one call. It alternates ``propose`` and ``observe``, and dies with the call."""

    @property
    def draft_cost(self) -> float:
        """Return what drafting one more token in every row costs, in plain steps of the target."""
        return 0.0

    @abstractmethod
    def propose(self, room: list[int]) -> Draft:
        """Return a draft that continues every row of the batch.

        ``room[r]``: how many tokens row r may draft; rows without room (finished ones, those that another drafter
        drafts for) get no nodes.
        """

    def observe(self, round: Round) -> None:  # noqa: B027 - a session without state has nothing to learn
        """Learn from a finished round (round zero is the prompt's)."""


class Drafter(ABC):
    """Propose tokens for every row; its distribution is q.

    A drafter is what one makes, trains and shares: a call never writes to it, so one object serves several threads,
    nested calls and several targets. What belongs to a call is the ``Session`` that ``begin`` returns. Two runs with
    the same text propose the same.
    """

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

    def reads(self, model: PreTrainedModel) -> Reads:
        """Return what every round must carry, for this target.

        Raises: ``IncompatibleDrafter`` for a target that it does not fit.
        """
        return Reads()

    @abstractmethod
    def begin(self, call: Call) -> Session:
        """Return what drafts in one ``generate()``; the prompt is not read by the target yet.

        Raises: ``IncompatibleDrafter`` for a target that it does not fit, ``SpecGenError`` for requests that it cannot
        serve.
        """


def missing(drafter: Drafter, name: str) -> AttributeError:
    """Return the error of an attribute that a drafter lacks; these are what a model that is not enabled looks for."""
    said = f"{type(drafter).__name__!r} object has no attribute {name!r}"
    if name in ("config", "generation_config"):
        said += (
            ". If it was given to generate() as assistant_model=: call hf_specgen.enable(model) first, or pass "
            "custom_generate=hf_specgen.SpeculativeDecoding(drafter)"
        )
    return AttributeError(said + ".")
