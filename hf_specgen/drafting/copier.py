"""Copying: the protocol behind lookups. A copier finds continuations of every row in texts; nothing is computed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from hf_specgen.drafting.drafter import Call, Drafter, Session
from hf_specgen.round.costs import Costs, Rate
from hf_specgen.round.records import Draft


class Continuations(NamedTuple):
    """Hold what may be copied into a row: texts, best first ([[]]: none), and how often such ones are right."""

    rate: Rate
    texts: list[list[int]]

    @property
    def length(self) -> int:
        """Return how many tokens the best one has."""
        return len(self.texts[0])


class Copier(Session):
    """Search, cut, copy: a session whose tokens are copies, so that they cost nothing and are certain.

    ``WithLookup`` asks for the parts one by one; alone, a copier proposes what ``search`` and ``cut`` give.
    """

    adapts: bool = True
    """Whether lengths follow what pays; else the copier copies as much as it finds."""
    reads_other_rows: bool = False
    """Whether what a row copies may depend on the other rows of the batch."""

    def __init__(self, call: Call) -> None:
        self.call = call

    @abstractmethod
    def search(self, room: list[int]) -> list[Continuations]:
        """Return what may be copied into every row, at most ``room[r]`` tokens; ``observe`` compares."""

    @abstractmethod
    def cut(self, found: list[Continuations]) -> list[int]:
        """Return how many tokens of what was found each row should copy when nothing else is drafted."""

    @abstractmethod
    def copies(self, counts: Sequence[int], branches: bool = True) -> Draft:
        """Return the draft of the first ``counts[r]`` tokens of what was found; without ``branches``: of the best."""

    @abstractmethod
    def part_rows(self) -> None:
        """Let every row learn from itself alone; by default rows may share what they learn."""

    def propose(self, room: list[int]) -> Draft:
        """Copy what was found, as far as that pays."""
        return self.copies(self.cut(self.search(room)))


class CopyingDrafter(Drafter):
    """Draft by copying alone. ``costs`` replaces the assumed costs of a pass, None leaves them."""

    costs: Costs | None = None

    @abstractmethod
    def begin(self, call: Call) -> Copier:
        """Return what copies in one ``generate()``."""
