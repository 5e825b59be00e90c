"""Reported: a grammar that feeds itself only the new tokens passed the probe and wrote another text; a trie crashed it.

Processors that keep state are served: each row and drafted text meets them as its own past has left them. What no copy
has for its own (a class's attribute, a global) is refused by name.
"""

from __future__ import annotations

import importlib
import sys
from functools import partial

import pytest
import torch
from tiny import disturbed, drafter_of, ours, plain, prompts, some, texts_of, tiny, with_learned
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation import logits_process as hf

from hf_specgen import PromptLookup, SmallModel, SpecGenError
from hf_specgen.round.replay import Branch

KINDS = ("lookup", "branches", "small", "tree")
LENGTHS = {1: [12], 4: [5, 17, 11, 24]}


@pytest.fixture(scope="module")
def target():
    return tiny()


def pushed(scores: torch.Tensor, state: int) -> torch.Tensor:
    """Make a few tokens of a state likelier, so that another state writes another text."""
    return scores + 4.0 * (torch.arange(scores.shape[-1]) % 11 == state)


class Automaton(LogitsProcessor):
    """Feed an automaton the tokens that are new since the last call: the same call twice changes nothing."""

    def __init__(self, start: int) -> None:
        self.fed = start
        self.state = 0

    def __call__(self, input_ids, scores):
        for token in input_ids[0, self.fed :].tolist():
            self.state = (3 * self.state + token) % 11
        self.fed = input_ids.shape[1]
        return pushed(scores, self.state)


class Pure(LogitsProcessor):
    """Compute the automaton's state from the text: what plain decoding with an ``Automaton`` comes to."""

    def __init__(self, start: int) -> None:
        self.start = start

    def __call__(self, input_ids, scores):
        state = 0
        for token in input_ids[0, self.start :].tolist():
            state = (3 * state + token) % 11
        return pushed(scores, state)


class Quotes(LogitsProcessor):
    """Turn over at rare tokens: a few trial calls see no change."""

    def __init__(self, start: int) -> None:
        self.inside = False

    def __call__(self, input_ids, scores):
        self.inside ^= int(input_ids[0, -1]) % 9 == 4
        return pushed(scores, 3 if self.inside else 7)


def counting(start: int):
    """Close over a list."""
    seen: list[int] = []

    def process(input_ids, scores):
        seen.append(int(input_ids[0, -1]))
        return pushed(scores, sum(seen) % 11)

    return process


def fed_function(start: int):
    """Keep a state beside ``prefix_allowed_tokens_fn``, one for each row."""
    states: dict[int, int] = {}

    def allowed(row: int, sent: torch.Tensor) -> list[int]:
        states[row] = (states.get(row, 0) + int(sent[-1])) % 5
        return [token for token in range(1, 64) if token % 5 != states[row]]

    return allowed


MAKERS = {
    "automaton": lambda start: {"logits_processor": [Automaton(start)]},
    "quotes": lambda start: {"logits_processor": [Quotes(start)]},
    "closure": lambda start: {"logits_processor": [counting(start)]},
    "function": lambda start: {"prefix_allowed_tokens_fn": fed_function(start)},
}


def alone(target, ids: torch.Tensor, mask: torch.Tensor, make) -> torch.Tensor:
    """Write every row by itself, with processors of its own."""
    width = ids.shape[1]
    return torch.cat([plain(target, ids[r : r + 1], mask[r : r + 1], **make(width)) for r in range(len(ids))])


@pytest.mark.parametrize(("name", "kind", "rows"), some(MAKERS, KINDS, (1, 4)))
def test_the_text_is_plain_decodings(name: str, kind: str, rows: int, target) -> None:
    ids, mask = prompts(LENGTHS[rows])
    make = MAKERS[name]
    expected = alone(target, ids, mask, make)
    assert not torch.equal(expected, plain(target, ids, mask)), "the processor did nothing"
    watch = drafter_of(kind, target, texts_of(expected, mask))
    assert torch.equal(ours(target, watch, ids, mask, **make(ids.shape[1])), expected)
    assert watch.longest >= 2
    assert any(drafted > len(path) for r in watch.rounds for drafted, path in zip(r.proposed, r.paths, strict=True))


@pytest.mark.parametrize("kind", with_learned(()))
def test_the_text_with_learned_drafters(kind: str, target) -> None:
    ids, mask = prompts(LENGTHS[4])
    make = MAKERS["automaton"]
    expected = alone(target, ids, mask, make)
    watch = drafter_of(kind, target, texts_of(expected, mask))
    assert torch.equal(ours(target, watch, ids, mask, **make(ids.shape[1])), expected)
    assert watch.longest >= 2


def test_one_object_for_all_drafts_would_write_another_text(target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: drafts are asked about without a copy."""
    ids, mask = prompts(LENGTHS[1])
    expected = plain(target, ids, logits_processor=[Automaton(12)])
    monkeypatch.setattr("hf_specgen.round.state.State.copy", lambda self, values: values)
    monkeypatch.setattr("hf_specgen.round.warp.Warp.check", lambda *_: None)
    watch = drafter_of("lookup", target, texts_of(expected, mask))
    assert not torch.equal(ours(target, watch, ids, logits_processor=[Automaton(12)]), expected)


@pytest.mark.parametrize(("kind", "rule"), some(("sampled", "tree"), ("rejection", "block", "gumbel")))
def test_sampled_text_is_that_of_a_processor_without_state(kind: str, rule: str, target) -> None:
    ids, mask = prompts(LENGTHS[4])
    texts = texts_of(alone(target, ids, mask, MAKERS["automaton"]), mask)
    settings = {"do_sample": True, "seed": 5, "temperature": 0.4, "rule": rule, "max_new_tokens": 20}
    found = []
    for processor in (Automaton(ids.shape[1]), Pure(ids.shape[1])):
        watch = drafter_of(kind, target, texts)
        found.append(ours(target, watch, ids, mask, logits_processor=[processor], **settings))
        assert watch.longest >= 2
    assert torch.equal(*found)


def test_the_users_own_object_is_called_once_for_each_prefix(target) -> None:
    """With one row it ends as plain decoding leaves it, whatever was drafted and refused."""
    ids, mask = prompts(LENGTHS[1])

    class Diary(LogitsProcessor):
        def __init__(self) -> None:
            self.lines: list[tuple[list[int], float]] = []

        def __call__(self, input_ids, scores):
            self.lines.append((input_ids[0].tolist(), round(float(scores.max()), 3)))
            return pushed(scores, len(self.lines) % 11)

    theirs, mine = Diary(), Diary()
    expected = plain(target, ids, logits_processor=[theirs])
    watch = drafter_of("lookup", target, texts_of(expected, mask))
    assert torch.equal(ours(target, watch, ids, logits_processor=[mine]), expected)
    assert mine.lines == theirs.lines and len(mine.lines) == 32


def test_processors_that_share_an_object_go_on_sharing_it(target) -> None:
    class Reader(LogitsProcessor):
        def __init__(self, other: Automaton) -> None:
            self.other = other

        def __call__(self, input_ids, scores):
            return pushed(scores, (self.other.state + 5) % 11)

    def make(start: int) -> dict[str, object]:
        written = Automaton(start)
        return {"logits_processor": [written, Reader(written)]}

    ids, mask = prompts(LENGTHS[4])
    expected = alone(target, ids, mask, make)
    watch = drafter_of("small", target, texts_of(expected, mask))
    assert torch.equal(ours(target, watch, ids, mask, **make(ids.shape[1])), expected)


class ClassCounter(LogitsProcessor):
    calls = 0

    def __call__(self, input_ids, scores):
        ClassCounter.calls += 1
        return pushed(scores, ClassCounter.calls % 11)


class ClassList(LogitsProcessor):
    seen: list[int] = []  # noqa: RUF012 - the fault that users write

    def __call__(self, input_ids, scores):
        self.seen.append(1)
        return pushed(scores, len(self.seen) % 11)


SEEN: list[int] = []
COUNT = 0


class GlobalList(LogitsProcessor):
    def __call__(self, input_ids, scores):
        SEEN.append(int(input_ids[0, -1]))
        return pushed(scores, sum(SEEN) % 11)


def global_number(input_ids, scores):
    global COUNT
    COUNT += 1
    return pushed(scores, COUNT % 11)


def helper() -> int:
    SEEN.append(1)
    return len(SEEN) % 11


def behind_a_helper(input_ids, scores):
    return pushed(scores, helper())


def on_the_function(input_ids, scores):
    calls = vars(on_the_function)
    calls["count"] = calls.get("count", 0) + 1
    return pushed(scores, calls["count"] % 11)


class DefaultList(LogitsProcessor):
    def __call__(self, input_ids, scores, seen=[]):  # noqa: B006 - the fault that users write
        seen.append(1)
        return pushed(scores, len(seen) % 11)


class Nested(LogitsProcessor):
    def __init__(self, inner) -> None:
        self.inner = inner

    def __call__(self, input_ids, scores):
        return self.inner(input_ids, scores)


SHARING = {
    "ClassCounter": (ClassCounter, "ClassCounter.calls"),
    "ClassList": (ClassList, "ClassList.seen"),
    "GlobalList": (GlobalList, "the global SEEN"),
    "global_number": (lambda: global_number, "the global COUNT"),
    "behind_a_helper": (lambda: behind_a_helper, "the global SEEN"),
    "on_the_function": (lambda: on_the_function, "the global on_the_function"),
    "DefaultList": (DefaultList, "DefaultList.__call__"),
    "Nested": (lambda: Nested(ClassCounter()), "ClassCounter.calls"),
}


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", SHARING)
def test_state_that_no_copy_has_for_its_own_is_refused_by_name(name: str, rows: int, target) -> None:
    make, place = SHARING[name]
    ids, mask = prompts(LENGTHS[4][:rows])
    with pytest.raises(SpecGenError, match=rf"{name} cannot be replayed.*state in {place}.*plain generate"):
        ours(target, drafter_of("lookup", target, [[1]]), ids, mask, logits_processor=[make()])


def test_a_function_that_keeps_state_in_a_global_is_refused(target) -> None:
    def allowed(row: int, sent: torch.Tensor) -> list[int]:
        SEEN.append(1)
        return [len(SEEN) % 64, 7]

    with pytest.raises(SpecGenError, match=r"prefix_allowed_tokens_fn=allowed cannot.*the global SEEN"):
        ours(target, None, torch.tensor([[5, 6]]), prefix_allowed_tokens_fn=allowed)


def test_a_global_that_is_written_to_late_stops_the_call(target) -> None:
    """Nothing shows before the first token; no text comes back that plain decoding would not write."""
    ids = prompts(LENGTHS[1])[0]
    text = plain(target, ids)[0].tolist()

    def late(input_ids, scores):
        if input_ids.shape[1] > 30:
            SEEN.append(1)
        return scores

    with pytest.raises(SpecGenError, match=r"late cannot be replayed.*the global SEEN"):
        ours(target, drafter_of("small", target, [text]), ids, logits_processor=[late])


def test_tables_in_globals_are_no_state(target) -> None:
    ids = prompts(LENGTHS[1])[0]
    processor = partial(lambda table, ids, scores: pushed(scores, TABLE[int(ids[0, -1])] + table[0]), [0])
    expected = plain(target, ids, logits_processor=[processor])
    assert torch.equal(ours(target, drafter_of("small", target, [[1]]), ids, logits_processor=[processor]), expected)


TABLE = {token: token % 11 for token in range(64)}


class Sharer(LogitsProcessor):
    """Say that a copy is oneself."""

    def __init__(self) -> None:
        self.calls = 0

    def __deepcopy__(self, memo):
        return self

    def __call__(self, input_ids, scores):
        self.calls += 1
        return pushed(scores, self.calls % 11)


def test_copies_that_are_none_are_noticed(target) -> None:
    with pytest.raises(SpecGenError, match=r"Sharer cannot be replayed.*a Sharer that its copies share"):
        ours(target, None, torch.tensor([[5, 6]]), logits_processor=[Sharer()])


def trie(texts: list[list[int]], start: int) -> dict[tuple[int, ...], set[int]]:
    """Map every beginning to the tokens that may follow."""
    known: dict[tuple[int, ...], set[int]] = {}
    for text in texts:
        for end in range(start, len(text)):
            known.setdefault(tuple(text[start:end]), set()).add(text[end])
    return known


@pytest.mark.parametrize(("kind", "rows"), some(("lookup", "branches", "small", "sampled", "medusa"), (1, 4)))
def test_a_trie_that_raises_on_other_texts_is_never_asked_about_them(kind: str, rows: int, target) -> None:
    """Drafters and the probe keep to what it allows; it ends with the longest text that it knows."""
    ids, mask = prompts(LENGTHS[rows])
    width = ids.shape[1]
    free = plain(target, ids, mask, max_new_tokens=20)
    other = plain(target, ids, mask, max_new_tokens=20, suppress_tokens=free[:, width + 2].tolist())
    known = trie([*free.tolist(), *other.tolist()], 0)

    def allowed(row: int, sent: torch.Tensor) -> list[int]:
        return sorted(known[tuple(sent.tolist())])  # KeyError on anything else

    def process(input_ids, scores):
        return hf.PrefixConstrainedLogitsProcessor(allowed, 1)(input_ids, scores)

    settings = {"max_new_tokens": 20}
    settings |= {"prefix_allowed_tokens_fn": allowed} if kind == "branches" else {"logits_processor": [process]}
    expected = plain(target, ids, mask, **settings)
    watch = drafter_of(kind, target, texts_of(free, mask))
    assert torch.equal(ours(target, watch, ids, mask, **settings), expected)
    if kind != "medusa":
        assert watch.longest >= 2
    if kind in ("small", "sampled"):
        loop = SmallModel(disturbed(target), 4, sample=kind == "sampled")
        for rule in ("rejection", "block"):
            ours(target, loop, ids, mask, do_sample=True, seed=3, rule=rule, **settings)


def test_a_trie_is_not_blamed_for_texts_behind_a_stop(target) -> None:
    """A drafted text may run on behind a criterion's stop; what a processor raises there is of no account."""
    ids = prompts(LENGTHS[1])[0]
    free = plain(target, ids)[0].tolist()
    known = trie([free[:20]], 12)

    class Length(StoppingCriteria):
        def __call__(self, input_ids, scores, **_):
            return torch.tensor([input_ids.shape[1] >= 20])

    def process(input_ids, scores):
        raised = torch.full_like(scores, -torch.inf)
        raised[:, sorted(known[tuple(input_ids[0, 12:].tolist())])] = 0.0
        return scores + raised

    watch = drafter_of("lookup", target, [free])
    settings = {"logits_processor": [process], "stopping_criteria": [Length()]}
    assert ours(target, watch, ids, **settings)[0].tolist() == free[:20]
    with pytest.raises(KeyError):  # what plain decoding meets, ours reports too
        ours(target, watch, ids, logits_processor=[process])
    assert watch.longest >= 2


def test_a_large_trie_is_shared_by_all_copies(target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pointer into it is state, and exact; the trie itself is not copied for every token."""

    class Walker(LogitsProcessor):
        def __init__(self, root: dict, start: int) -> None:
            self.root = root
            self.node = root
            self.start = start

        def __call__(self, input_ids, scores):
            if input_ids.shape[1] > self.start:
                self.node = self.node.get(int(input_ids[0, -1]), self.root)
            return pushed(scores, len(self.node) % 11)

    dice = torch.Generator().manual_seed(0)
    root: dict = {}
    for word in torch.randint(1, 64, (4_000, 3), generator=dice).tolist():
        node = root
        for token in word:
            node = node.setdefault(token, {})
    ids = prompts(LENGTHS[1])[0]
    expected = plain(target, ids, logits_processor=[Walker(root, 12)])
    assert not torch.equal(expected, plain(target, ids)), "the trie did nothing"
    seen = []
    genuine = Branch.end
    monkeypatch.setattr(Branch, "end", lambda self, state: seen.append(self._processors) or genuine(self, state))
    mine = Walker(root, 12)
    watch = drafter_of("small", target, [[1]])
    assert torch.equal(ours(target, watch, ids, logits_processor=[mine]), expected)
    assert watch.longest >= 2
    copies = [held[0] for held in seen[-40:]]
    assert all(copy is not mine and copy.root is root for copy in copies)


def test_a_table_that_changes_is_copied_after_all(target) -> None:
    class Counts(LogitsProcessor):
        def __init__(self) -> None:
            self.counts = [0] * 10_000

        def __call__(self, input_ids, scores):
            self.counts[int(input_ids[0, -1])] += 1
            return pushed(scores, max(self.counts) % 11)

    ids, mask = prompts(LENGTHS[1])
    expected = plain(target, ids, logits_processor=[Counts()], max_new_tokens=12)
    watch = drafter_of("lookup", target, texts_of(expected, mask))
    assert torch.equal(ours(target, watch, ids, logits_processor=[Counts()], max_new_tokens=12), expected)


def test_a_table_that_changes_late_is_refused(target) -> None:
    class Late(LogitsProcessor):
        def __init__(self) -> None:
            self.table = [0] * 10_000

        def __call__(self, input_ids, scores):
            if input_ids.shape[1] > 30:
                self.table[3] += 1
            return scores

    with pytest.raises(SpecGenError, match=r"Late cannot be replayed.*table"):
        ours(target, None, prompts(LENGTHS[1])[0], logits_processor=[Late()])


def test_a_memory_of_texts_is_kept_by_each_row(target) -> None:
    """Look a text up under its beginning, as grammar libraries do: an unknown beginning starts anew."""

    def remembering():
        states: dict[tuple[int, ...], int] = {}

        def allowed(row: int, sent: torch.Tensor) -> list[int]:
            text = tuple(sent.tolist())
            if text not in states:
                states[text] = (states.get(text[:-1], 0) * 3 + text[-1]) % 5
            return [token for token in range(1, 64) if token % 5 != states[text]]

        return allowed

    ids, mask = prompts(LENGTHS[4])
    expected = plain(target, ids, mask, prefix_allowed_tokens_fn=remembering())
    watch = drafter_of("tree", target, texts_of(expected, mask))
    assert torch.equal(ours(target, watch, ids, mask, prefix_allowed_tokens_fn=remembering()), expected)
    assert watch.longest >= 2


COUNTING_LIBRARY = """
calls = 0
def even(token):
    global calls
    calls += 1
    return token % 2 == 0
"""


@pytest.mark.parametrize("installed", [True, False])
def test_what_an_installed_library_counts_is_no_state_of_the_caller(
    installed: bool, target, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function that called a library took minutes and was refused, for a counter deep inside that library."""
    folder = tmp_path / ("site-packages" if installed else "work")
    folder.mkdir()
    (folder / "counting_library.py").write_text(COUNTING_LIBRARY)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "counting_library", raising=False)
    monkeypatch.setitem(globals(), "library", importlib.import_module("counting_library"))
    ids, mask = prompts([12])
    settings = {"max_new_tokens": 8, "prefix_allowed_tokens_fn": even_tokens}
    if not installed:  # a module of the user's own may well keep what decides
        with pytest.raises(SpecGenError, match=r"counting_library\.|the global calls"):
            ours(target, PromptLookup(4), ids, mask, **settings)
        return
    expected = plain(target, ids, mask, **settings)
    assert torch.equal(ours(target, PromptLookup(4), ids, mask, **settings), expected)


def even_tokens(row: int, text: torch.Tensor) -> list[int]:
    return [token for token in range(64) if library.even(token)]  # noqa: F821 - set by the test


class Registered(LogitsProcessor):
    """Keep a state on a class that it was given, fed by new tokens alone, begun anew by a shorter text."""

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def __call__(self, input_ids, scores):
        width, state = self.kind.kept
        state = 0 if input_ids.shape[1] <= width else (3 * state + int(input_ids[0, -1]) + 1) % 7
        self.kind.kept = (input_ids.shape[1], state)
        scores = scores.clone()
        scores[:, state::7] -= 50
        return scores


def test_a_class_that_a_processor_holds_wrote_another_text(target) -> None:
    """Without drafts of its own a target asks it in order: only a drafter that asks too makes a detour."""
    ids, mask = prompts([12])

    def registered() -> list[LogitsProcessor]:
        return [Registered(type("Kind", (), {"__module__": __name__, "kept": (10**9, 0)}))]

    texts = texts_of(plain(target, ids, mask, logits_processor=registered()), mask)
    with pytest.raises(SpecGenError, match=r"Registered cannot be replayed.*Kind\.kept"):
        ours(target, drafter_of("small", target, texts), ids, mask, logits_processor=registered())
