"""Criteria: the stopping criteria that must see every beginning of a text, once and in order, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria

from hf_specgen.errors import SpecGenError
from hf_specgen.round.state import State


class Criteria:
    """Ask a batch's criteria about one row at a time; each row of several has copies of those of the user's own.

    A copy sees its row in every place of the batch and is read at the row's own, so criteria that know their batch
    work, and what one remembers of a row is not taken for another's.
    Raises: ``SpecGenError`` naming a criterion that cannot be copied.
    """

    def __init__(self, criteria: Sequence[StoppingCriteria], rows: int) -> None:
        self._rows = rows
        users = [criterion for criterion in criteria if _is_users(criterion)] if rows > 1 else []
        self._state = State(users)
        self._whole = State(users)  # rows share nothing, but reading tables anew at every token would take seconds
        self._whole.share_nothing()
        self._tables = self._state.tables_mark()
        self._of_row = [list(criteria) for _ in range(rows)]
        if users:
            self._of_row = [self._copied(list(criteria)) for _ in range(rows)]

    def _copied(self, criteria: list[StoppingCriteria]) -> list[StoppingCriteria]:
        try:
            copies = self._whole.copy(criteria)
        except Exception as error:
            for criterion in criteria:
                self._check_copy(criterion)
            raise criterion_refusal(criteria[0], self._rows, f"it cannot be copied ({error})") from error
        self._state.note_shared(criteria, copies)
        return copies

    def _check_copy(self, criterion: StoppingCriteria) -> None:
        try:
            self._whole.copy([criterion])
        except Exception as error:
            raise criterion_refusal(criterion, self._rows, f"it cannot be copied ({error})") from error

    def __bool__(self) -> bool:
        return bool(self._of_row[0])

    def meets(self, row: int, prefix: Tensor, scores: tuple[Tensor, ...] | None) -> bool:
        """Tell whether a row ends at ``prefix (1, L)``; every criterion sees it. ``scores``: ``(1, V)`` a new token.

        Raises: ``SpecGenError`` when a criterion wrote to something that all rows share.
        """
        ends = False
        for criterion in self._of_row[row]:
            if self._rows > 1 and _is_users(criterion):
                ends |= self._ask_copy(criterion, row, prefix, scores)
            else:
                ends |= bool(torch.as_tensor(criterion(prefix, scores)).any())
        return ends

    def finish(self) -> None:
        """Refuse, at the end, criteria that wrote to a table which all rows share. Raises: ``SpecGenError``."""
        if self._state.tables_mark() != self._tables:
            users = [criterion for criterion in self._of_row[0] if _is_users(criterion)]
            raise criterion_refusal(users[0], self._rows, "it keeps state in a large table, which all rows share")

    def _ask_copy(
        self, criterion: StoppingCriteria, row: int, prefix: Tensor, scores: tuple[Tensor, ...] | None
    ) -> bool:
        before = self._state.place_marks()
        everywhere = None if scores is None else tuple(step.expand(self._rows, -1) for step in scores)
        verdict = torch.as_tensor(criterion(prefix.repeat(self._rows, 1), everywhere)).flatten()
        moved = self._state.moved_places(before, self._state.place_marks())
        if moved:
            raise criterion_refusal(
                criterion, self._rows, f"it keeps state in {' and '.join(moved)}, which all rows share"
            )
        return bool(verdict[row] if len(verdict) == self._rows else verdict.any())


def _is_users(criterion: StoppingCriteria) -> bool:
    return not type(criterion).__module__.startswith("transformers.")


def criterion_refusal(criterion: Any, rows: int, reason: str) -> SpecGenError:
    """Make the error that refuses a criterion for a batch."""
    return SpecGenError(
        f"stopping criterion {type(criterion).__name__} was given for {rows} rows, which end one by one: {reason}. "
        "Required: a criterion whose deep copy has all that it keeps, one for each row. Keep its state on the object, "
        "or generate row by row."
    )
