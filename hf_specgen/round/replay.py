"""Replay: processors of the user's own, at every drafted text in the state that this text's own past has left them in.

Plain decoding calls a processor once for each prefix of the text, in order. Here every call is made on a copy that has
seen just those prefixes; what a round keeps becomes the row's past, and the user's own objects see it too where there
is one row. So nothing need be known of what a processor keeps, as long as a copy has it for its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

from torch import Tensor
from transformers import LogitsProcessor, PrefixConstrainedLogitsProcessor

from hf_specgen.errors import SpecGenError
from hf_specgen.round.state import State

Call = Callable[[LogitsProcessor, Tensor, Tensor], Tensor]
Text = tuple[int, ...]


@dataclass
class Held:
    """Hold processors as some text has left them, their mark, and copies that are as they are."""

    processors: list[Any]
    mark: Any
    spares: list[list[Any]] = field(default_factory=list)


class Called(NamedTuple):
    """Hold which processor was given what, and what it returned."""

    place: int
    given: Tensor
    returned: Tensor


@dataclass
class Visit:
    """Hold what happened at one text: how it left the processors, and the calls that were made.

    ``error``: what a processor raised. It counts once the text is kept: plain decoding might never ask about it.
    """

    held: Held
    ids: Tensor
    moved: bool
    calls: list[Called]
    error: Exception | None


class Branch:
    """Call the processors at one drafted text, each in its turn."""

    def __init__(self, ids: Tensor, text: Text, before: Held, state: State) -> None:
        self.ids = ids
        self.text = text
        self.before = before
        self._processors = before.spares.pop() if before.spares else state.copy(before.processors)
        self._calls: list[Called] = []
        self._error: Exception | None = None

    def call(self, place: int, scores: Tensor, call: Call) -> Tensor:
        """Ask the ``place``-th processor; when it raises, the scores come back as they are."""
        if self._error is not None:
            return scores
        try:
            returned = call(self._processors[place], self.ids, scores.clone())
        except Exception as error:
            self._error = error
            return scores
        self._calls.append(Called(place, scores, returned))
        return returned

    def end(self, state: State) -> Visit:
        """Return what happened; a copy that nothing has moved serves again."""
        mark = state.mark(self._processors)
        moved = self._error is not None or mark != self.before.mark
        held = Held(self._processors, mark) if moved else self.before
        if not moved:
            held.spares.append(self._processors)
        return Visit(held, self.ids, moved, self._calls, self._error)


@dataclass
class _Past:
    """Hold a row's kept text: its width, how it has left the processors, and what happened at texts beyond it."""

    held: Held
    width: int = 0
    visits: dict[Text, Visit] = field(default_factory=dict)


class Replay:
    """Give each row and drafted text the user's processors as that text's past has left them.

    ``may_keep_state=False`` refuses those that any call changes, for loops that share them between drafts.
    Raises: ``SpecGenError`` naming a processor that cannot be copied, or that keeps state where no copy has its own.
    """

    def __init__(self, processors: list[LogitsProcessor], rows: int, may_keep_state: bool = True) -> None:
        self.processors = processors
        self._may_keep_state = may_keep_state
        self.state = State(processors)
        self._places: list[Any] = []
        self._tables = self.state.tables_mark()
        self._first = Held(processors, self.state.mark(processors))
        self._pasts = [_Past(self._first) for _ in range(rows)]
        self.moves = False

    def begin(self, width: int) -> None:
        """Start every row at a prompt of ``width`` tokens; what was asked before is forgotten."""
        for past in self._pasts:
            past.width = width
            past.visits.clear()

    def branches(self, rows: list[int], ids: list[Tensor | None]) -> list[Branch | None]:
        """Return the processors as they are before each row is asked about its text ``(1, L)``, None about none."""
        self._places = self.state.place_marks()
        return [None if text is None else self._branch(row, text) for row, text in zip(rows, ids, strict=True)]

    def _branch(self, row: int, ids: Tensor) -> Branch:
        past = self._pasts[row]
        text = tuple(ids[0, past.width :].tolist())
        if not text:
            return Branch(ids, text, past.held, self.state)
        above = past.visits.get(text[:-1])
        if above is None and self.moves:
            raise RuntimeError(f"row {row}: processors that keep state were asked about a text before its beginning")
        return Branch(ids, text, past.held if above is None else above.held, self.state)

    def end(self, rows: list[int], branches: list[Branch | None]) -> None:
        """Note what happened on branches.

        Raises: ``SpecGenError`` when something was written that no copy has for its own.
        """
        self.check_places(self._places, self.state.place_marks())
        for row, branch in zip(rows, branches, strict=True):
            if branch is None:
                continue
            visit = branch.end(self.state)
            self._pasts[row].visits[branch.text] = visit
            self.moves |= visit.moved and visit.error is None
            if self.moves and not self._may_keep_state:
                raise refusal(self._changed(branch.before, visit.held), "what it keeps changes from call to call")

    def check_places(self, before: list[Any], now: list[Any]) -> None:
        """Refuse what was written where no copy has its own. Raises: ``SpecGenError``."""
        moved = self.state.moved_places(before, now)
        if moved:
            reason = f"it keeps state in {' and '.join(moved)}, which all rows and drafts share"
            raise refusal(self._named(moved), reason)

    def keep(self, row: int, token: int, call: Call) -> None:
        """Make a token that a row has kept part of its past, with what was asked before it.

        With one row the user's own processors are called, as plain decoding would. Raises: what they raise.
        """
        past = self._pasts[row]
        visit = past.visits.get(())
        if visit is not None and visit.error is not None:
            raise visit.error
        if visit is not None and visit.moved:
            past.held = self._called(visit, call) if len(self._pasts) == 1 else visit.held
        past.width += 1
        past.visits = {text[1:]: visit for text, visit in past.visits.items() if text[:1] == (token,)}

    def _called(self, visit: Visit, call: Call) -> Held:
        """Bring the user's own processors to where a visit has brought a copy; that copy may serve again."""
        for place, given, _ in visit.calls:
            call(self.processors[place], visit.ids, given.clone())
        return Held(self.processors, visit.held.mark, [visit.held.processors])

    def check_tables(self) -> None:
        """Refuse a table that was written to, for copies share it. Raises: ``SpecGenError``."""
        if self.tables_moved:
            reason = "it writes to a table that is too large to be copied for every drafted token"
            raise refusal(self._named([]), reason)

    def trial(self) -> Replay:
        """Return the same over copies, tables too, so that trying them leaves no trace.

        Raises: ``SpecGenError`` naming a processor that cannot be copied.
        """
        whole = State(self.processors)
        whole.share_nothing()
        for processor in self.processors:
            _check_copy(whole, processor)
        copies = whole.copy(self.processors)
        self.state.note_shared(self.processors, copies)
        trial = Replay(copies, len(self._pasts), self._may_keep_state)
        if not self.state.has_tables:
            trial.share_nothing()
        return trial

    def share_nothing(self) -> None:
        """Copy tables after all: one of them was seen to change."""
        self.state.share_nothing()
        self._tables = self.state.tables_mark()
        self._first.mark = self.state.mark(self.processors)

    @property
    def tables_moved(self) -> bool:
        """Tell whether a table was written to."""
        return bool(self.state.tables_mark() != self._tables)

    def visit(self, row: int, text: Text) -> Visit:
        """Return what happened at a text beyond a row's past."""
        return self._pasts[row].visits[text]

    def _changed(self, before: Held, after: Held) -> Any:
        pairs = zip(self.processors, before.processors, after.processors, strict=True)
        return next((own for own, a, b in pairs if self.state.mark([a]) != self.state.mark([b])), self.processors)

    def _named(self, places: list[str]) -> Any:
        """Return the processor whose class or code reaches one of the places named."""
        if len(self.processors) == 1:
            return self.processors[0]
        reached = ((own, [place.name for place in State([own]).places]) for own in self.processors)
        return next((own for own, names in reached if not set(names).isdisjoint(places)), self.processors)


def _check_copy(state: State, processor: LogitsProcessor) -> None:
    try:
        state.copy([processor])
    except Exception as error:
        reason = f"it cannot be copied, so a draft would change what it keeps ({error})"
        raise refusal(processor, reason) from error


def refusal(processor: Any, reason: str) -> SpecGenError:
    """Make the error that refuses a processor."""
    return SpecGenError(
        f"logits processor {label(processor)} cannot be replayed on draft tokens: {reason}. Required: scores that "
        "depend on (input_ids, scores) and on what a deep copy of it keeps. Use plain generate() with "
        "it, or make it compute its state from input_ids."
    )


def label(processor: Any) -> str:
    """Return what the user calls a processor."""
    if isinstance(processor, list):
        return " and ".join(map(label, processor))
    if type(processor) is PrefixConstrainedLogitsProcessor:
        return f"prefix_allowed_tokens_fn={label(processor._prefix_allowed_tokens_fn)}"
    if isinstance(processor, partial):
        return f"partial({label(processor.func)})"
    if isinstance(processor, MethodType):
        return f"{type(processor.__self__).__name__}.{processor.__name__}"
    return processor.__name__ if isinstance(processor, FunctionType) else type(processor).__name__
