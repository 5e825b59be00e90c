"""What the user's objects keep: marks that move with it, copies that have their own."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict, defaultdict
from functools import partial
from types import ModuleType

import pytest
import torch
from tiny import letters, tiny

from hf_specgen.round.state import State


class Box:
    def __init__(self, **kept: object) -> None:
        vars(self).update(kept)

    def grow(self) -> None:
        self.number += 1


class Items(list):
    """Keep a number beside the items."""

    number = 0


def pointing() -> Box:
    nodes = [{}, {}]
    return Box(nodes=nodes, at=nodes[0])


def loop_of_functions():
    kept = {"calls": 0}

    def helper() -> None:
        kept["calls"] += 1

    def process() -> None:
        helper()

    return process


def two_that_share():
    kept = [0]

    def write() -> None:
        kept[0] += 1

    def read() -> int:
        return kept[0]

    return Box(write=write, read=read)


def with_default(seen=[]):  # noqa: B006 - the fault that users write
    seen.append(1)


def itself():
    def process() -> None:
        vars(process)["calls"] = vars(process).get("calls", 0) + 1

    return process


# how an object is made, and what changes it
MOVES = {
    "attribute": (lambda: Box(number=0), lambda box: vars(box).update(number=1)),
    "new attribute": (Box, lambda box: vars(box).update(number=0)),
    "pointer": (pointing, lambda box: vars(box).update(at=box.nodes[1])),
    "order": (lambda: OrderedDict(a=1, b=2), lambda held: held.move_to_end("a")),
    "default": (lambda: defaultdict(int), lambda held: held["a"]),
    "list with an attribute": (lambda: Items([1]), lambda held: setattr(held, "number", 1)),
    "list with an attribute, its items": (lambda: Items([1]), lambda held: held.append(2)),
    "set": (lambda: {1}, lambda held: held.add(2)),
    "tensor": (lambda: Box(held=torch.zeros(3)), lambda box: box.held.add_(1)),
    "tensor behind its back": (lambda: Box(held=torch.zeros(3)), lambda box: box.held.data.add_(1)),
    "array": (lambda: Box(held=torch.zeros(3).numpy()), lambda box: box.held.fill(1)),
    "generator": (lambda: Box(held=torch.Generator()), lambda box: torch.rand(1, generator=box.held)),
    "functions": (loop_of_functions, lambda process: process()),
    "functions that share": (two_that_share, lambda box: box.write()),
    "own name": (itself, lambda process: process()),
    "partial": (lambda: partial(list.append, []), lambda function: function(1)),
    "method": (lambda: Box(number=0).grow, lambda method: method()),
}


@pytest.mark.parametrize("name", MOVES)
def test_a_change_moves_the_mark_of_the_object_and_of_no_copy(name: str) -> None:
    make, change = MOVES[name]
    value = [make()]
    state = State(value)
    before, twin = state.mark(value), state.copy(value)
    assert state.mark(value) == state.mark(twin) == before
    change(*twin)
    assert state.mark(value) == before != state.mark(twin)
    second = state.copy(twin)
    assert state.mark(second) == state.mark(twin), "a copy of a copy"
    change(*value)
    assert state.mark(value) == state.mark(twin), "the same change"


def test_functions_that_share_a_variable_share_it_in_a_copy() -> None:
    box = two_that_share()
    (twin,) = State([box]).copy([box])
    twin.write()
    assert (twin.read(), box.read()) == (1, 0)


def test_what_a_copy_shares_is_noted() -> None:
    """Deepcopy takes methods of built-in types as they are, with the object they belong to."""
    box = Box(write=[].append, kept=[])
    state = State([box])
    state.note_shared([box], state.copy([box]))
    before = state.place_marks()
    box.kept.append(1)
    assert state.place_marks() == before
    box.write(1)
    moved = state.moved_places(before, state.place_marks())
    assert "a builtin_function_or_method that its copies share" in moved


def test_what_is_only_read_is_shared() -> None:
    box = Box(model=tiny(), tokenizer=letters(), event=threading.Event())
    (twin,) = State([box]).copy([box])
    assert twin is not box
    assert all(vars(twin)[name] is vars(box)[name] for name in ("model", "tokenizer", "event"))


def test_tables_are_shared_unless_they_lead_back() -> None:
    small, large = Box(held=list(range(100))), Box(held=list(range(10_000)), weights=torch.zeros(3_000_000))
    assert State([small]).copy([small])[0].held is not small.held
    twin = State([large]).copy([large])[0]
    assert twin.held is large.held and twin.weights is large.weights
    state = State([large])
    mark = state.tables_mark()
    large.held[3] = -1
    assert state.tables_mark() != mark
    mark = state.tables_mark()
    large.weights[3] = -1
    assert state.tables_mark() != mark
    large.held.append(large)
    assert State([large]).copy([large])[0].held is not large.held


NUMBER = 0
LISTED: list[int] = []


class Counter:
    total = 0
    listed: list[int] = []  # noqa: RUF012 - the fault that users write

    def count(self) -> None:
        Counter.total += 1

    @staticmethod
    def rebind() -> None:
        global NUMBER
        NUMBER += 1

    @property
    def size(self) -> int:
        LISTED.append(1)
        return len(LISTED)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (Counter.count, "Counter.total"),
        (lambda counter: counter.listed.append(1), "Counter.listed"),
        (lambda counter: counter.rebind(), "the global NUMBER"),
        (lambda counter: counter.size, "the global LISTED"),
    ],
)
def test_places_that_no_copy_has_are_named(change, name: str) -> None:
    counter = Counter()
    state = State([counter])
    before = state.place_marks()
    change(counter)
    assert state.moved_places(before, state.place_marks()) == [name]


def test_a_default_is_a_place_of_its_class() -> None:
    kind = type("Kind", (), {"__module__": __name__, "run": with_default})
    state = State([kind()])
    before = state.place_marks()
    kind.run([])
    assert state.place_marks() == before
    with_default()
    assert state.place_marks() != before


class Same(dict):
    """Be its own copy."""

    def __deepcopy__(self, memo: object) -> Same:
        return self


@pytest.mark.parametrize("part", ["first", "second"])
def test_places_of_one_name_are_told_apart(part: str) -> None:
    box = Box(first=Same(number=0), second=Same(number=0))
    state = State([box])
    state.note_shared([box], state.copy([box]))
    before = state.place_marks()
    vars(box)[part]["number"] += 1
    assert state.moved_places(before, state.place_marks()) == ["a Same that its copies share"]


@pytest.fixture
def helper(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Put a module of the user's, which holds another, where imports find it."""
    outer, inner = ModuleType("helper_of_user"), ModuleType("helper_of_user.inner")
    outer.total, inner.total, outer.inner = 0, 0, inner
    inner.outer = outer  # a circle
    monkeypatch.setitem(sys.modules, outer.__name__, outer)
    monkeypatch.setitem(sys.modules, inner.__name__, inner)
    return outer


READERS = {
    "named": ("import helper_of_user\ndef ask(): return helper_of_user.inner.total", "inner"),
    "imported inside": ("def ask():\n    import helper_of_user as h\n    return h.total", "outer"),
    "a part inside": ("def ask():\n    import helper_of_user.inner as h\n    return h.total", "inner"),
}


@pytest.mark.parametrize("reader", READERS)
def test_what_a_module_of_the_users_holds_is_a_place(reader: str, helper: ModuleType) -> None:
    code, where = READERS[reader]
    namespace = {"__name__": __name__}
    exec(code, namespace)
    state = State([namespace["ask"]])
    before = state.place_marks()
    moved = helper if where == "outer" else helper.inner
    moved.total += 1
    assert state.moved_places(before, state.place_marks()) == [f"{moved.__name__}.total"]


def test_a_class_that_an_object_holds_is_a_place() -> None:
    kind = type("Kind", (), {"__module__": __name__, "total": 0})
    state = State([Box(held=[kind])])
    before = state.place_marks()
    kind.total += 1
    assert state.moved_places(before, state.place_marks()) == ["Kind.total"]
