"""Processors that keep state between calls: drafts are asked about on copies, wherever the state hides."""

from __future__ import annotations

from collections import deque
from functools import partial

import pytest
import torch
from tiny import tiny
from transformers import LogitsProcessor
from transformers.generation import logits_process as hf

from hf_specgen import PromptLookup, SpecGenError, stock_candidates
from hf_specgen.round.state import State
from hf_specgen.round.warp import Warp

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
    "closure": counting_closure,
    "closure over a list": remembering_closure,
    "method": lambda: Counter().__call__,
    "partial": lambda: partial(lambda seen, ids, scores: seen.append(1) or scores, []),
}


IDS = torch.ones(1, 4, dtype=torch.long)


def asked(warp: Warp, *drafted: int) -> None:
    text = torch.cat([IDS, torch.tensor([[*drafted]], dtype=torch.long)], 1)
    warp(torch.zeros(1, VOCAB), torch.zeros(1, dtype=torch.long), lambda _: text)


@pytest.mark.parametrize("name", STATEFUL)
def test_the_users_object_sees_the_kept_text_alone(name: str) -> None:
    """It ends as if it had been called on that text's beginnings, each once: not on the trial, not on drafts."""
    mine, theirs = STATEFUL[name](), STATEFUL[name]()
    state = State([mine])
    fresh = state.mark([mine])
    warp = Warp([hf.TemperatureLogitsWarper(0.5), mine], 1)
    warp.check(IDS, VOCAB)
    warp.begin(4)
    asked(warp)
    asked(warp, 7)
    asked(warp, 7, 8)
    asked(warp, 9)
    assert state.mark([mine]) == fresh
    warp.keep(0, 7)
    warp.keep(0, 9)
    for text in ([1, 1, 1, 1], [1, 1, 1, 1, 7]):
        theirs(torch.tensor([text]), torch.zeros(1, VOCAB))
    assert state.mark([mine]) == state.mark([theirs]) != fresh


@pytest.mark.parametrize("name", STATEFUL)
def test_loops_that_ask_one_object_about_drafts_refuse_them(name: str) -> None:
    named = {"closure": "process", "closure over a list": "process", "method": "Counter.__call__"}
    processor = STATEFUL[name]()
    with pytest.raises(SpecGenError, match=f"{named.get(name, type(processor).__name__)}.*cannot be replayed"):
        Warp([hf.TemperatureLogitsWarper(0.5), processor], 1, may_keep_state=False).check(IDS, VOCAB)


def test_transformers_own_loop_with_a_drafter_refuses_state() -> None:
    model = tiny()
    with stock_candidates(model, PromptLookup(3)), pytest.raises(SpecGenError, match="Counter cannot be replayed"):
        model.generate(IDS, logits_processor=[Counter()], max_new_tokens=8, do_sample=False)


@pytest.mark.parametrize(("kind", "words"), [(Fading, "other scores"), (Uncopyable, "cannot be copied")])
def test_what_cannot_be_replayed_is_refused(kind: type, words: str) -> None:
    with pytest.raises(SpecGenError, match=f"{kind.__name__} cannot be replayed.*{words}"):
        Warp([kind()], 2).check(IDS.expand(2, -1), VOCAB)


def test_a_text_is_never_asked_about_before_its_beginning() -> None:
    warp = Warp([Counter()], 1)
    warp.begin(4)
    asked(warp)
    with pytest.raises(RuntimeError, match="before its beginning"):
        asked(warp, 7, 8)


def test_what_a_processor_raises_counts_once_its_text_is_kept() -> None:
    def process(input_ids, scores):
        if input_ids[0, -1] == 7:
            raise KeyError("unknown text")
        return scores

    warp = Warp([process], 1)
    warp.begin(4)
    asked(warp)
    asked(warp, 7)
    warp.keep(0, 7)
    with pytest.raises(KeyError, match="unknown text"):
        warp.keep(0, 9)
