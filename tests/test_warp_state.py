"""Processors that keep state between calls: found on a copy and refused by name, wherever the state hides."""

from __future__ import annotations

from collections import deque
from functools import partial

import pytest
import torch
from transformers import LogitsProcessor
from transformers.generation import logits_process as hf

from hf_specgen import SpecGenError
from hf_specgen.warp import Warp

VOCAB = 64


class Counter(LogitsProcessor):
    """Count calls in an attribute."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores


class Grower(LogitsProcessor):
    """Keep something of every call in a container made by ``kind``."""

    def __init__(self, kind) -> None:
        self.kept = kind()

    def __call__(self, input_ids, scores):
        self.kept.append(0)
        return scores


class Nested(LogitsProcessor):
    """Keep state in another object, as grammar processors do."""

    def __init__(self, inner) -> None:
        self.inner = inner

    def __call__(self, input_ids, scores):
        return self.inner(input_ids, scores)


class TensorState(LogitsProcessor):
    """Change a tensor in place."""

    def __init__(self) -> None:
        self.seen = torch.zeros(VOCAB)

    def __call__(self, input_ids, scores):
        self.seen[3] += 1
        return scores


class ArrayState(LogitsProcessor):
    """Change a numpy array in place."""

    def __init__(self) -> None:
        self.seen = torch.zeros(VOCAB).numpy()

    def __call__(self, input_ids, scores):
        self.seen[3] += 1
        return scores


class Slots:
    """Count calls in a slot, where vars() does not look."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores


class SlotsBelow(Slots, LogitsProcessor):
    """Count calls in a slot of a parent class."""


class Fading(LogitsProcessor):
    """Give other scores at every call."""

    def __call__(self, input_ids, scores):
        return scores + torch.rand_like(scores)


class Uncopyable(LogitsProcessor):
    """Cannot be copied, so nothing can be found out."""

    def __deepcopy__(self, memo):
        raise TypeError("a handle of a foreign library")

    def __call__(self, input_ids, scores):
        return scores


def counting_closure():
    calls = 0

    def process(input_ids, scores):
        nonlocal calls
        calls += 1
        return scores

    return process


def remembering_closure():
    seen: list[int] = []

    def process(input_ids, scores):
        seen.append(int(input_ids[0, -1]))
        return scores

    return process


STATEFUL = {
    "counter": Counter,
    "list": lambda: Grower(list),
    "deque": lambda: Grower(deque),
    "tensor": TensorState,
    "array": ArrayState,
    "slots": Slots,
    "inherited slots": SlotsBelow,
    "nested": lambda: Nested(Counter()),
    "nested slots": lambda: Nested(Slots()),
    "nested closure": lambda: Nested(counting_closure()),
    "random": Fading,
    "uncopyable": Uncopyable,
    "closure": counting_closure,
    "closure over a list": remembering_closure,
    "method": lambda: Counter().__call__,
    "partial": lambda: partial(lambda seen, ids, scores: seen.append(1) or scores, []),
}


@pytest.mark.parametrize("name", STATEFUL)
def test_processors_that_keep_state_are_refused_and_left_alone(name: str) -> None:
    processor = STATEFUL[name]()
    ids = torch.ones(2, 4, dtype=torch.long)
    named = {"closure": "process", "closure over a list": "process", "method": "Counter.__call__"}
    label = named.get(name, type(processor).__name__)
    with pytest.raises(SpecGenError, match=f"{label} cannot be replayed"):
        Warp([hf.TemperatureLogitsWarper(0.5), processor], 2).check(ids, VOCAB)
    calls = {"counter": lambda: processor.calls, "slots": lambda: processor.calls}
    lists = {"list": lambda: processor.kept, "closure over a list": lambda: processor.__closure__[0].cell_contents}
    assert not {**calls, **lists}.get(name, list)(), "the probe must work on a copy"
