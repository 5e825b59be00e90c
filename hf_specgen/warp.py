"""Warp: a list of logits processors applied to any node of a draft, each with its own true prefix."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, PrefixConstrainedLogitsProcessor

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

Prefix = Callable[[int], Tensor]
"""Give the padded token ids ``(1, L)`` that the i-th requested row of logits is conditioned on."""


class Warp:
    """Apply processors to a flat list of logits rows: score-only ones in one call, others row by row.

    Raises: ``SpecGenError`` naming the first processor that keeps state between calls, which a draft cannot replay.
    """

    def __init__(self, processors: Iterable[LogitsProcessor], rows: int) -> None:
        self.processors = list(processors)
        self.rows = rows
        self.needs_prefix = any(_name(processor) not in _SCORES_ONLY for processor in self.processors)

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
        scores = logits.to(torch.float32, copy=True)
        if not self.processors:
            return scores
        owners = batch_rows.tolist() if self.needs_prefix else []
        ids = [prefix(place) for place in range(len(owners))]
        for processor in self.processors:
            if _name(processor) in _SCORES_ONLY:
                scores = processor(batch_rows[:, None], scores)
            else:
                parts = [self._one(processor, ids[i], scores[i : i + 1], row) for i, row in enumerate(owners)]
                scores = torch.cat(parts)
        return scores

    def _one(self, processor: LogitsProcessor, ids: Tensor, scores: Tensor, row: int) -> Tensor:
        name = _name(processor)
        if self.rows == 1 or name in _PREFIX_ONLY:
            return processor(ids, scores)
        if isinstance(processor, PrefixConstrainedLogitsProcessor):
            allowed = processor._prefix_allowed_tokens_fn
            return PrefixConstrainedLogitsProcessor(lambda _, sent: allowed(row, sent), 1)(ids, scores)
        # a processor that knows its batch sees this row in every place and is read back at the row's own
        whole = processor(ids.repeat(self.rows, 1), scores.repeat(self.rows, 1))
        return whole[row : row + 1]


def _name(processor: LogitsProcessor) -> str:
    """Return the class name of a processor of transformers, or a full name that matches none of them."""
    kind = type(processor)
    return kind.__name__ if kind.__module__.startswith("transformers.") else f"{kind.__module__}.{kind.__qualname__}"


def _stateful(processor: LogitsProcessor, reason: str) -> SpecGenError:
    return SpecGenError(
        f"logits processor {type(processor).__name__} cannot be replayed on draft tokens: {reason}. Required: scores "
        "that "
        "depend on (input_ids, scores) alone, without state that changes from call to call. Use plain generate() with "
        "it, or make it compute its state from input_ids."
    )


def _probe(processor: LogitsProcessor, ids: Tensor, vocab_size: int) -> None:
    """Call a copy of an unknown processor three times on the prompt; state or scores that move betray it."""
    try:
        trial = copy.deepcopy(processor)
    except Exception as error:
        raise _stateful(processor, f"it cannot be copied to find out whether it keeps state ({error})") from error
    scores = torch.linspace(-1.0, 1.0, vocab_size, device=ids.device).repeat(len(ids), 1)
    trial(ids, scores.clone())  # the first call may prepare tables
    second = trial(ids, scores.clone())
    before = copy.deepcopy(_state(trial))
    third = trial(ids, scores.clone())
    if not torch.equal(second, third):
        raise _stateful(processor, "the same prompt gave other scores at the next call")
    if not _same(before, _state(trial)):
        raise _stateful(processor, "its attributes change from call to call")


def _state(processor: Any) -> dict[str, Any]:
    try:
        return vars(processor)
    except TypeError:  # slots or a built-in type: nothing to compare
        return {}


def _same(left: Any, right: Any, depth: int = 4) -> bool:
    """Compare two states; objects that define no equality are compared by their attributes, then taken as equal."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.shape == right.shape and torch.equal(left, right)
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key], depth) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(_same(a, b, depth) for a, b in zip(left, right, strict=True))
    if isinstance(left, int | float | str | bytes | bool | set | frozenset | None):
        return bool(left == right)
    return depth == 0 or _same(_state(left), _state(right), depth - 1)
