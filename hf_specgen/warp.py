"""Warp: a list of logits processors applied to any node of a draft, each with its own true prefix."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain
from types import CellType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_specgen import ops
from hf_specgen.errors import SpecGenError

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

    ``steps`` are the processors with those warpers that one kernel does together made one step.
    Raises: ``SpecGenError`` naming the first processor that keeps state between calls, which a draft cannot replay.
    """

    def __init__(self, processors: Iterable[LogitsProcessor], rows: int) -> None:
        self.processors = list(processors)
        self.steps = _joined(self.processors)
        self.rows = rows
        self.needs_prefix = any(_name(processor) not in _SCORES_ONLY for processor in self.processors)

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
        return all(
            _name(processor) in _REPLAYABLE and type(processor) is not PrefixConstrainedLogitsProcessor
            for processor in self.processors
        )

    def check(self, ids: Tensor, vocab_size: int) -> None:
        """Refuse processors that keep state, by trying copies of unknown ones on the prompt ``ids (B, L)``."""
        for processor in self.processors:
            name = _name(processor)
            if name in _REPLAYABLE:
                continue
            if type(processor).__module__.startswith("transformers."):
                raise _stateful(processor, "it keeps state, runs a model, or works on fixed batches of its own")
            _probe(processor, ids, vocab_size)

    def __call__(self, logits: Tensor, batch_rows: Tensor, prefix: Prefix) -> Tensor:
        """Return processed float32 logits ``(R, V)``; ``batch_rows (R,)`` names the batch row of each."""
        steps = self.steps if logits.device.type == "cpu" else self.processors
        copies = bool(steps) and isinstance(steps[0], Truncation) and logits.dtype != torch.float64
        scores = logits if copies else logits.to(torch.float32, copy=True)
        owners = batch_rows.tolist() if self.needs_prefix else []
        ids = [prefix(place) for place in range(len(owners))]
        for processor in steps:
            if isinstance(processor, Truncation):
                scores = ops.truncate(scores, *processor)
            elif _name(processor) in _SCORES_ONLY:
                scores = processor(batch_rows[:, None], scores)
            else:
                parts = zip(owners, ids, scores.split(1), strict=True)
                scores = torch.cat([self._one(processor, text, part, row) for row, text, part in parts])
        return scores

    def _one(self, processor: LogitsProcessor, ids: Tensor | None, scores: Tensor, row: int) -> Tensor:
        if ids is None:
            return scores
        name = _name(processor)
        if self.rows == 1 or name in _PREFIX_ONLY:
            return processor(ids, scores)
        if type(processor) is PrefixConstrainedLogitsProcessor:
            allowed, prompt = processor._prefix_allowed_tokens_fn, row // processor._num_beams
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


def _stateful(processor: LogitsProcessor, reason: str) -> SpecGenError:
    return SpecGenError(
        f"logits processor {_label(processor)} cannot be replayed on draft tokens: {reason}. Required: scores that "
        "depend on (input_ids, scores) alone, without state that changes from call to call. Use plain generate() with "
        "it, or make it compute its state from input_ids."
    )


def _label(processor: Any) -> str:
    """Return what the user calls a processor."""
    if isinstance(processor, MethodType):
        return f"{type(processor.__self__).__name__}.{processor.__name__}"
    return processor.__name__ if isinstance(processor, FunctionType) else type(processor).__name__


def _probe(processor: LogitsProcessor, ids: Tensor, vocab_size: int) -> None:
    """Try copies of an unknown processor on the prompt and on drafts; state or scores that move betray it."""
    try:
        trial = _copied(processor)
    except Exception as error:
        raise _stateful(processor, f"it cannot be copied to find out whether it keeps state ({error})") from error
    scores = torch.linspace(-1.0, 1.0, vocab_size, device=ids.device).repeat(len(ids), 1)
    trial(ids, scores.clone())  # the first call may prepare tables
    second = trial(ids, scores.clone())
    before = _snapshot(trial, {})
    third = trial(ids, scores.clone())
    if not torch.equal(second, third):
        raise _stateful(processor, "the same prompt gave other scores at the next call")
    if before != _snapshot(trial, {}):
        raise _stateful(processor, "its attributes change from call to call")
    if not torch.equal(_last_scores(processor, ids, scores, (1, 1)), _last_scores(processor, ids, scores, ())):
        raise _stateful(processor, "its scores depend on the texts it was called with before")


def _last_scores(processor: Any, ids: Tensor, scores: Tensor, detour: tuple[int, ...]) -> Tensor:
    """Return what a fresh copy says of the prompt and one token, after it has seen the prompt and a rejected draft."""
    trial = _copied(processor)
    trial(ids, scores.clone())
    for length in range(1, len(detour) + 1):
        drafted = ids.new_tensor(detour[:length]).expand(len(ids), -1)
        trial(torch.cat([ids, drafted], 1), scores.clone())
    return trial(torch.cat([ids, torch.zeros_like(ids[:, :1])], 1), scores.clone())


def _copied(processor: Any) -> Any:
    """Copy a processor deeply; a function with the variables it closes over, which deepcopy would share."""
    if not isinstance(processor, FunctionType):
        return copy.deepcopy(processor)
    cells = tuple(CellType(copy.deepcopy(cell.cell_contents)) for cell in processor.__closure__ or ())
    defaults = copy.deepcopy(processor.__defaults__)
    trial = FunctionType(processor.__code__, processor.__globals__, processor.__name__, defaults, cells)
    trial.__kwdefaults__ = copy.deepcopy(processor.__kwdefaults__)
    trial.__dict__.update(copy.deepcopy(processor.__dict__))
    return trial


def _snapshot(value: Any, seen: dict[int, Any]) -> Any:
    """Return plain data that differs once anything that ``value`` holds has changed; ``seen`` stops at cycles."""
    if isinstance(value, int | str | bytes | None | type | ModuleType):
        return value
    if isinstance(value, float | complex):
        return repr(value)
    if id(value) in seen:
        return type(value)
    seen[id(value)] = value
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return tuple(value.shape), value.dtype, hash(flat.numpy().tobytes())
    if isinstance(value, dict):
        return {key: _snapshot(item, seen) for key, item in value.items()}
    if isinstance(value, list | tuple | deque):
        return [_snapshot(item, seen) for item in value]
    if isinstance(value, set | frozenset):
        return frozenset(value)
    return type(value), [_snapshot(part, seen) for part in _parts(value)]


def _parts(value: Any) -> list[Any]:
    """Return all that an object keeps: attributes, slots, closed-over variables, the state of built-in types."""
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return [cells, value.__defaults__, value.__kwdefaults__, value.__dict__]
    if isinstance(value, MethodType):
        return [value.__self__]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    parts: list[Any] = []
    try:
        parts.append(vars(value))
    except TypeError:  # no attributes of its own: what pickle would keep, if it can
        with suppress(Exception):
            parts += [list(part) if isinstance(part, Iterator) else part for part in value.__reduce_ex__(2)[1:]]
    members = [vars(kind).values() for kind in type(value).__mro__ if "__slots__" in vars(kind)]
    for member in chain.from_iterable(members):
        if isinstance(member, MemberDescriptorType):
            with suppress(AttributeError):
                parts.append(member.__get__(value, type(value)))
    return parts
