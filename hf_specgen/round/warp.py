"""Warp: a list of logits processors applied to any node of a draft, each with its own true prefix."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    StoppingCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_specgen import ops
from hf_specgen.round.criteria import criterion_refusal
from hf_specgen.round.replay import Branch, Replay, Visit, label, refusal
from hf_specgen.round.state import common_parts

_SCORES_ONLY = frozenset(
    {
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TopHLogitsWarper",
        "MinPLogitsWarper",
        "TypicalLogitsWarper",
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "SuppressTokensLogitsProcessor",
    }
)
_PREFIX_ONLY = frozenset(
    {
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
        "SequenceBiasLogitsProcessor",
        "NoBadWordsLogitsProcessor",
        "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor",
        "ExponentialDecayLengthPenalty",
        "SuppressTokensAtBeginLogitsProcessor",
        "WatermarkLogitsProcessor",
    }
)
_BATCH_AWARE = frozenset(
    {
        "RepetitionPenaltyLogitsProcessor",
        "EncoderRepetitionPenaltyLogitsProcessor",
        "EncoderNoRepeatNGramLogitsProcessor",
        "PrefixConstrainedLogitsProcessor",
    }
)
_REPLAYABLE = _SCORES_ONLY | _PREFIX_ONLY | _BATCH_AWARE

Prefix = Callable[[int], Tensor | None]
"""Give the padded token ids ``(1, L)`` that the i-th requested row of logits is conditioned on.

None behind a drafted end of text: the row is never written, and a processor may know nothing of such a text.
"""


class Truncation(NamedTuple):
    """Hold what some of transformers' warpers, in the order of these fields, do together; the defaults do nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


class Warp:
    """Apply processors to a flat list of logits rows: score-only ones in one call, others row by row.

    ``steps`` are the processors with those warpers that one kernel does together made one step. Processors of the
    user's own, and functions of his inside transformers' processors, are called through ``replay``, which gives every
    row and drafted text copies with a past of their own; ``may_keep_state=False`` refuses those that need it.
    Raises: ``SpecGenError`` naming the first processor that a draft cannot replay.
    """

    def __init__(self, processors: Iterable[LogitsProcessor], rows: int, may_keep_state: bool = True) -> None:
        self.processors = list(processors)
        self.steps = _joined(self.processors)
        self.rows = rows
        self.needs_prefix = any(_name(processor) not in _SCORES_ONLY for processor in self.processors)
        users = [processor for processor in self.processors if _is_users(processor)]
        self._place_of = {id(processor): place for place, processor in enumerate(users)}
        self.replay = Replay(users, rows, may_keep_state) if users else None
        self._moved_on_trial = False

    @property
    def truncation(self) -> Truncation | None:
        """Return all that the processors do when it is no more than this, None otherwise."""
        if not self.steps:
            return Truncation()
        only = self.steps[0]
        return only if len(self.steps) == 1 and isinstance(only, Truncation) else None

    @property
    def takes_any_text(self) -> bool:
        """Tell whether no processor calls the user's code, which may refuse texts that the target would not write."""
        return self.replay is None

    def check(self, ids: Tensor, vocab_size: int, ends: Collection[int] = (), steps: int = 6) -> None:
        """Refuse what cannot be replayed, by trying copies on the prompt ``ids (B, L)`` and texts they allow behind it.

        No such text goes beyond ``steps`` tokens or one of ``ends``: plain decoding might not ask about it.
        Raises: ``SpecGenError`` naming the processor.
        """
        for processor in self.processors:
            if not _is_users(processor) and _name(processor) not in _REPLAYABLE:
                raise refusal(processor, "it keeps state, runs a model, or works on fixed batches of its own")
        if self.replay is None:
            return
        walks = (ids, vocab_size, ends, min(steps, 6))
        trial = self._tried(self.replay, *walks)
        if trial.tables_moved:
            self.replay.share_nothing()
            trial = self._tried(self.replay, *walks)
        self._moved_on_trial = trial.moves

    def _tried(self, replay: Replay, ids: Tensor, vocab_size: int, ends: Collection[int], steps: int) -> Replay:
        """Try copies of the user's processors, twice on the same texts and once between on others.

        Raises: ``SpecGenError`` naming a processor that is not the same the second time.
        """
        trial = copy.copy(self)
        trial.replay = replay.trial()
        places = replay.state.place_marks(tables_too=True)
        said, _, again = (_walk(trial, trial.replay, ids, vocab_size, ends, steps, seed) for seed in (1, 2, 1))
        replay.check_places(places, replay.state.place_marks(tables_too=True))
        if trial.replay.tables_moved:
            return trial.replay
        for first, second in zip(said, again, strict=False):
            for called, repeated in zip(first.calls, second.calls, strict=False):
                if not _same(called.returned, repeated.returned):
                    reason = "other scores come back for the same text, so they depend on more than a copy of it keeps"
                    raise refusal(replay.processors[called.place], reason)
        return trial.replay

    def check_apart(self, criteria: Sequence[StoppingCriteria]) -> None:
        """Refuse criteria of a batch that hold what processors were seen to change: rows have copies of both.

        Raises: ``SpecGenError`` naming both.
        """
        if self.replay is None or self.rows == 1 or not self._moved_on_trial:
            return
        users = self.replay.processors
        for criterion in criteria:
            for part in common_parts([criterion], users):
                reason = (
                    f"it holds a {type(part).__name__} that {label(users)} may write to, and rows have copies of both"
                )
                raise criterion_refusal(criterion, self.rows, reason)

    def begin(self, width: int) -> None:
        """Start every row at a prompt of ``width`` tokens."""
        if self.replay is not None:
            self.replay.begin(width)

    def keep(self, row: int, token: int) -> None:
        """Note a token that a row has kept. Raises: what a processor of the user's raised when asked for it."""
        if self.replay is not None:
            self.replay.keep(row, token, partial(self._one, row=row))

    def finish(self) -> None:
        """Refuse, at the end, processors that wrote where no copy could. Raises: ``SpecGenError``."""
        if self.replay is not None:
            self.replay.check_tables()

    def __call__(self, logits: Tensor, batch_rows: Tensor, prefix: Prefix) -> Tensor:
        """Return processed float32 logits ``(R, V)``; ``batch_rows (R,)`` names the batch row of each."""
        steps = self.steps if logits.device.type == "cpu" else self.processors
        copies = bool(steps) and isinstance(steps[0], Truncation) and logits.dtype != torch.float64
        scores = logits if copies else logits.to(torch.float32, copy=True)
        owners = batch_rows.tolist() if self.needs_prefix else []
        ids = [prefix(place) for place in range(len(owners))]
        branches: list[Branch | None] = [None] * len(owners)
        if self.replay is not None:
            branches = self.replay.branches(owners, ids)
        for processor in steps:
            if isinstance(processor, Truncation):
                scores = ops.truncate(scores, *processor)
            elif _name(processor) in _SCORES_ONLY:
                scores = processor(batch_rows[:, None], scores)
            else:
                parts = zip(owners, ids, branches, scores.split(1), strict=True)
                scores = torch.cat([self._asked(processor, *part) for part in parts])
        if self.replay is not None:
            self.replay.end(owners, branches)
        return scores

    def _asked(
        self, processor: LogitsProcessor, row: int, ids: Tensor | None, branch: Branch | None, scores: Tensor
    ) -> Tensor:
        """Ask a processor about one row of logits; one of the user's is asked on the branch of its text."""
        if ids is None:
            return scores
        place = self._place_of.get(id(processor))
        if branch is None or place is None:
            return self._one(processor, ids, scores, row)
        return branch.call(place, scores, partial(self._one, row=row))

    def _one(self, processor: LogitsProcessor, ids: Tensor, scores: Tensor, row: int) -> Tensor:
        name = _name(processor)
        if self.rows == 1 or name in _PREFIX_ONLY:
            return processor(ids, scores)
        if type(processor) is PrefixConstrainedLogitsProcessor:
            allowed = processor._prefix_allowed_tokens_fn
            prompt = row // processor._num_beams
            return PrefixConstrainedLogitsProcessor(lambda _, sent: allowed(prompt, sent), 1)(ids, scores)
        if name == "RepetitionPenaltyLogitsProcessor":
            return _row_of_penalty(processor, row)(ids, scores)
        # a processor that knows its batch sees this row in every place and is read back at the row's own
        whole = processor(ids.repeat(self.rows, 1), scores.repeat(self.rows, 1))
        return whole[row : row + 1]


def _joined(processors: list[LogitsProcessor]) -> list[LogitsProcessor | Truncation]:
    """Make one step of each run of warpers that stand in the order of ``Truncation``."""
    steps: list[LogitsProcessor | Truncation] = []
    last = len(Truncation._fields)
    for processor in processors:
        part = _part(processor)
        if part is None:
            steps.append(processor)
            last = len(Truncation._fields)
            continue
        field, value = part
        place = Truncation._fields.index(field)
        before = steps.pop() if place > last else Truncation()
        assert isinstance(before, Truncation)
        steps.append(before._replace(**{field: value}))
        last = place
    return steps


def _part(processor: LogitsProcessor) -> tuple[str, Any] | None:
    """Return the field of ``Truncation`` that a processor fills, and with what; subclasses may do anything else."""
    if type(processor) is TemperatureLogitsWarper:
        return "temperature", processor.temperature
    if type(processor) is TopKLogitsWarper and processor.filter_value == -torch.inf:
        return "top_k", processor.top_k
    if type(processor) not in (TopPLogitsWarper, MinPLogitsWarper):
        return None
    if processor.filter_value != -torch.inf or processor.min_tokens_to_keep != 1:
        return None
    if type(processor) is MinPLogitsWarper:
        return "min_p", processor.min_p
    return ("top_p", processor.top_p) if processor.top_p < 1 else None


def _row_of_penalty(processor: LogitsProcessor, row: int) -> LogitsProcessor:
    """Return a repetition penalty for one row: newer transformers keep every row's padding in it."""
    padding = vars(processor).get("prompt_ignore_length")
    if not isinstance(padding, Tensor):
        return processor
    single = copy.copy(processor)
    vars(single)["prompt_ignore_length"] = padding[row : row + 1]
    return single


def _name(processor: LogitsProcessor) -> str:
    """Return the class name of a processor of transformers, or a full name that matches none of them."""
    kind = type(processor)
    return kind.__name__ if kind.__module__.startswith("transformers.") else f"{kind.__module__}.{kind.__qualname__}"


def _is_users(processor: LogitsProcessor) -> bool:
    """Tell whether calling a processor runs code of the user's."""
    return type(processor) is PrefixConstrainedLogitsProcessor or not type(processor).__module__.startswith(
        "transformers."
    )


def _walk(
    warp: Warp, replay: Replay, ids: Tensor, vocab_size: int, ends: Collection[int], steps: int, seed: int
) -> list[Visit]:
    """Write some tokens that the processors allow behind a batch's first and last prompt; return what was asked.

    The walk ends before a text that none could write: where no token is left, where only an end is, where one raised.
    """
    dice = torch.Generator().manual_seed(seed)
    logits = torch.randn(vocab_size, generator=dice)
    rows = sorted({0, len(ids) - 1})
    owners = torch.tensor(rows, device=ids.device)
    texts = [ids[row : row + 1] for row in rows]
    warp.begin(ids.shape[1])
    found: list[Visit] = []
    written: list[tuple[int, ...]] = [()] * len(rows)
    for step in range(steps):
        given = torch.stack([logits.roll(7 * step + row) for row in rows]).to(ids.device)
        scores = warp(given, owners, texts.__getitem__).cpu()
        visits = [replay.visit(row, text) for row, text in zip(rows, written, strict=True)]
        found += visits
        chances = torch.rand(scores.shape, generator=dice).masked_fill(~(scores > -torch.inf), -1.0)
        chances[:, [end for end in ends if end < vocab_size]] = -1.0
        best, tokens = chances.max(-1)
        if any(visit.error is not None for visit in visits) or bool((best < 0).any()):
            break
        texts = [torch.cat([text, token.view(1, 1).to(text)], 1) for text, token in zip(texts, tokens, strict=True)]
        written = [(*text, int(token)) for text, token in zip(written, tokens, strict=True)]
    return found


def _same(scores: Tensor, others: Tensor) -> bool:
    return torch.allclose(scores, others, rtol=0.0, atol=0.0, equal_nan=True)
