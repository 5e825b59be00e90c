"""PromptLookup: what it finds equals a brute-force search, what it costs does not grow, what it changes is nothing."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import Watch, begun, garbled, ours, plain, prompts, some, texts_of, tiny

from hf_specgen import Costs, Draft, PromptLookup, Round, SpecGenError, Verdict
from hf_specgen.drafters.prompt_lookup import merge
from hf_specgen.round.sequences import DraftRequest, Sequences, Stops
from hf_specgen.round.warp import Warp

CPU = torch.device("cpu")
CPU_FLOAT32 = Costs.default(CPU, torch.float32)


def rows_of(texts: Sequence[Sequence[int]], budget: int = 64, **settings: object) -> Sequences:
    """Make rows as the loop would, without a model."""
    width = max(map(len, texts))
    prompt = torch.tensor([[0] * (width - len(text)) + list(text) for text in texts])
    keys = torch.zeros(len(texts), dtype=torch.long)
    stops = Stops(width + budget, frozenset(), ())
    return Sequences(prompt, [list(text) for text in texts], stops, keys, keys, Warp([], len(texts)), 99, **settings)


def paths_of(draft: Draft, row: int) -> list[list[int]]:
    """Return the tokens from the root down to every valid node of a row, in the order of the nodes."""
    parents = draft.tree.parents[row if len(draft.tree.parents) > 1 else 0].tolist()
    tokens, paths = draft.tokens[row].tolist(), []
    for node in range(int(draft.n_valid[row])):
        above = paths[parents[node]] if parents[node] >= 0 else []
        paths.append([*above, tokens[node]])
    return paths


def leaves_of(draft: Draft, row: int) -> list[list[int]]:
    """Return the paths that end nowhere else, in the order of their first nodes."""
    paths = paths_of(draft, row)
    firsts = [path[0] for path in paths if len(path) == 1]
    ends = [path for path in paths if not any(path == other[:-1] for other in paths)]
    return sorted(ends, key=lambda path: firsts.index(path[0]))


def proposals(drafter: PromptLookup, texts: Sequence[Sequence[int]], **settings: object) -> list[list[list[int]]]:
    sequences = rows_of(texts, **settings)
    session = begun(drafter, sequences)
    draft = session.propose(sequences.room)
    assert draft.q is None, "a lookup is deterministic and has no law of its own"
    return [leaves_of(draft, row) for row in range(len(texts))]


def brute_force(text: list[int], sources: list[list[int]], k: int, ngrams: tuple[int, int], branches: int):
    """Search every source for every suffix, longest first; return the latest continuations that differ first."""
    low, high = ngrams
    for n in range(min(high, len(text)), low - 1, -1):
        for source in sources:
            found: list[list[int]] = []
            for start in reversed(range(len(source) - n)):
                follows_new = source[start + n] not in [known[0] for known in found]
                if source[start : start + n] == text[-n:] and follows_new:
                    going_on = list(source)
                    for step in range(k):
                        going_on.append(going_on[start + n + step])
                    found.append(going_on[len(source) :])
            if found:
                return found[:branches]
    return []


def walk(draft: Draft, truths: list[list[int]], sequences: Sequences) -> Round:
    """Accept what the true texts hold, as a greedy target that writes them would."""
    found: list[list[int]] = []
    for row, truth in enumerate(truths):
        at, known = len(sequences.tokens[row]), paths_of(draft, row)
        fitting = [node for node, path in enumerate(known) if path == truth[at : at + len(path)]]
        found.append(sorted(fitting, key=lambda node: len(known[node])) if not sequences.finished[row] else [])
    width = max(map(len, found))
    path = torch.tensor([nodes + [0] * (width - len(nodes)) for nodes in found], dtype=torch.long)
    counts = torch.tensor([len(nodes) for nodes in found])
    last = [len(tokens) + len(nodes) for tokens, nodes in zip(sequences.tokens, found, strict=True)]
    following = torch.tensor([truth[min(at, len(truth) - 1)] for truth, at in zip(truths, last, strict=True)])
    return Round(draft, Verdict(path, counts, following, torch.zeros(len(truths), dtype=torch.bool)))


def play(drafter: PromptLookup, truths: list[list[int]], starts: list[int], **settings: object) -> list[Round]:
    """Let a drafter draft for rows that become ``truths``; return its rounds."""
    budget = settings.pop("budget", min(map(len, truths)) - max(starts))
    sequences = rows_of([t[:n] for t, n in zip(truths, starts, strict=True)], budget, **settings)
    session = begun(drafter, sequences)
    rounds: list[Round] = []
    while not sequences.done:
        active, room = sequences.active, sequences.room
        draft = session.propose(sequences.room)
        for row, space in enumerate(room):
            assert max(map(len, paths_of(draft, row)), default=0) <= space, "drafted beyond the budget"
            assert active[row] or int(draft.n_valid[row]) == 0, "drafted in a finished row"
        rounds.append(walk(draft, truths, sequences))
        sequences.append(rounds[-1])
        session.observe(rounds[-1])
    for row, tokens in enumerate(sequences.tokens):
        assert tokens == truths[row][: len(tokens)]
    return rounds


A, B, C, X, Y = 1, 2, 3, 8, 9


@pytest.mark.parametrize(
    ("text", "k", "expected"),
    [
        ([A, B, C, X, A, B, C, Y, A, B, C], 2, [[Y, A]]),
        ([1, 2, 3, 4, 1, 2], 2, [[3, 4]]),
        ([1, 2, 3], 2, []),
        ([7], 2, []),
        ([5, 5], 4, [[5, 5, 5, 5]]),
        ([1, 2, 3, 4, 1, 2], 9, [[3, 4, 1, 2, 3, 4, 1, 2, 3]]),
    ],
)
def test_vectors(text: list[int], k: int, expected: list[list[int]]) -> None:
    assert proposals(PromptLookup(k, max_ngram=3), [text]) == [expected]


TEXTS = st.lists(st.integers(1, 4), min_size=1, max_size=40)
GROWTH = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=9), max_size=4)


@settings(max_examples=300)
@given(TEXTS, GROWTH, st.integers(1, 5), st.integers(0, 4), st.integers(1, 3), st.integers(1, 7))
def test_equals_brute_force(
    text: list[int], growth: list[list[int]], low: int, more: int, branches: int, k: int
) -> None:
    drafter = PromptLookup(k, max_ngram=low + more, min_ngram=low, branches=branches)
    sequences = rows_of([text], budget=100)
    session = begun(drafter, sequences)
    for piece in [[], *growth]:
        sequences.tokens[0].extend(piece)
        sequences.new[0] += len(piece)
        whole = sequences.tokens[0]
        expected = brute_force(whole, [whole], k, (low, low + more), branches)
        assert leaves_of(session.propose(sequences.room), 0) == expected


@settings(max_examples=200)
@given(
    st.lists(TEXTS, min_size=2, max_size=3),
    st.lists(TEXTS, max_size=2),
    st.booleans(),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_sources_equal_brute_force(
    texts: list[list[int]], corpus: list[list[int]], other_rows: bool, high: int, branches: int
) -> None:
    drafter = PromptLookup(3, max_ngram=high, branches=branches, other_rows=other_rows, corpus=corpus)
    found = proposals(drafter, texts)
    for row, text in enumerate(texts):
        others = [other for place, other in enumerate(texts) if place != row] if other_rows else []
        assert found[row] == brute_force(text, [text, *others, *corpus], 3, (1, high), branches)


def test_own_text_comes_before_other_sources_at_equal_length() -> None:
    own, other, given_text = [1, 2, 5, 1, 2], [1, 2, 6, 7, 8], [1, 2, 7, 9]
    assert proposals(PromptLookup(1, other_rows=True, corpus=[given_text]), [own, other])[0] == [[5]]
    assert proposals(PromptLookup(1, other_rows=True, corpus=[given_text]), [[3, 1, 2], other])[0] == [[6]]
    assert proposals(PromptLookup(1, corpus=[given_text]), [[3, 1, 2], other])[0] == [[7]]
    # a longer match elsewhere beats a shorter one in the row's own text
    assert proposals(PromptLookup(1, corpus=[given_text]), [[2, 5, 1, 2]])[0] == [[7]]
    assert proposals(PromptLookup(1, max_ngram=1, corpus=[given_text]), [[2, 5, 1, 2]])[0] == [[5]]


def test_rows_are_independent_unless_asked() -> None:
    texts = [[1, 2, 3, 4, 1, 2], [1, 2, 9, 9, 5], [6, 7], [8, 8, 8]]
    together = proposals(PromptLookup(3, branches=2), texts)
    assert together == [proposals(PromptLookup(3, branches=2), [text])[0] for text in texts]
    assert [bool(found) for found in together] == [True, False, False, True]
    order = [2, 0, 3, 1]
    assert proposals(PromptLookup(3, branches=2), [texts[row] for row in order]) == [together[row] for row in order]


def test_min_ngram_leaves_short_matches_alone() -> None:
    text = [1, 2, 3, 9, 2, 3, 5, 3]
    assert proposals(PromptLookup(2, min_ngram=1), [text]) == [[[5, 3]]]
    assert proposals(PromptLookup(2, min_ngram=2), [text]) == [[]]


def test_other_rows_are_read_as_they_grow() -> None:
    sequences = rows_of([[1, 2], [5, 6]], budget=10)
    drafter = PromptLookup(2, other_rows=True)
    session = begun(drafter, sequences)
    assert session.propose(sequences.room).n_valid.tolist() == [0, 0]
    sequences.tokens[1] += [1, 2, 7]
    sequences.new[1] = 3
    assert leaves_of(session.propose(sequences.room), 0) == [[7, 7]]


def test_a_drafter_used_again_starts_clean() -> None:
    drafter = PromptLookup(2)
    assert proposals(drafter, [[1, 2, 3, 1, 2]]) == [[[3, 1]]]
    assert proposals(drafter, [[9, 1, 2]]) == [[]]
    assert proposals(copy.deepcopy(drafter), [[1, 2, 3, 1, 2], [4, 4]]) == [[[3, 1]], [[4, 4]]]


@settings(max_examples=200)
@given(
    st.lists(
        st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=5), max_size=4),
        min_size=1,
        max_size=4,
    )
)
def test_merge_is_a_trie(rows: list[list[list[int]]]) -> None:
    draft = merge(rows, CPU)
    parents = draft.tree.parents
    for row, texts in enumerate(rows):
        prefixes = {tuple(text[:end]) for text in texts for end in range(1, len(text) + 1)}
        paths = [tuple(path) for path in paths_of(draft, row)]
        assert set(paths) == prefixes, "every continuation is a path, and nothing else is"
        assert len(paths) == len(prefixes), "shared beginnings share nodes"
    before = torch.arange(draft.width)
    assert ((parents >= -1) & (parents < before)).all(), "parents come before children, also beyond n_valid"
    assert draft.tokens.shape == parents.shape == (len(rows), max(draft.n_valid.tolist()))
    assert draft.tree.ancestors.diagonal(dim1=1, dim2=2).all()
    for row, count in enumerate(draft.n_valid.tolist()):
        valid = draft.tree.ancestors[row, : count + 1]
        assert not valid[:, count + 1 :].any(), "a valid node sees no padding"
    assert (draft.tokens >= 0).all()


@settings(max_examples=60)
@given(st.lists(TEXTS, min_size=1, max_size=4), st.integers(1, 12), st.integers(1, 3), st.sampled_from([None, 3, 20]))
def test_never_beyond_the_budget_nor_in_finished_rows(
    texts: list[list[int]], budget: int, branches: int, k: int | None
) -> None:
    # `play` asserts both in every round; rows that copy well finish early
    truths = [text + (text * 40)[: budget + 4] for text in texts]
    drafter = PromptLookup(k, branches=branches, costs=Costs(slope=0.0))
    rounds = play(drafter, truths, [len(text) for text in texts], budget=budget)
    assert 1 <= len(rounds) <= budget


def test_one_row_finishes_first() -> None:
    repeats, novel = [1, 2, 3, 4] * 20, list(range(5, 85))
    rounds = play(PromptLookup(6), [repeats, novel], [8, 8], budget=21)
    proposed = [round.proposed for round in rounds]
    assert proposed[:3] == [[6, 0]] * 3, "three rounds of seven tokens write row 0 to its end"
    assert proposed[3:] == [[0, 0]] * 18, "after that nobody drafts"


def no_repeats_that_are_right(length: int) -> list[int]:
    """Return a text whose every token occurred before, each time followed by something else."""
    chooser, text = random.Random(0), list(range(1, 41))
    followed: dict[int, set[int]] = {token: {token + 1} for token in text}
    while len(text) < length:
        free = [token for token in range(1, 41) if token not in followed.get(text[-1], set())]
        if not free:
            followed[text[-1]] = set()
            continue
        text.append(chooser.choice(free))
        followed.setdefault(text[-2], set()).add(text[-1])
    return text


@pytest.mark.parametrize(("costs", "branches"), some((CPU_FLOAT32, Costs.default(CPU, torch.bfloat16)), (1, 2)))
def test_adaptive_proposes_nothing_where_it_does_not_pay(costs: Costs, branches: int) -> None:
    text = no_repeats_that_are_right(400)
    drafter = PromptLookup(branches=branches)
    rounds = play(drafter, [text], [40], costs=costs)
    found = sum(bool(brute_force(text[:at], [text[:at]], 1, (1, 3), 1)) for at in range(100, 400))
    assert found > 250, "a constant draft length would have drafted nearly always"
    assert sum(round.proposed[0] for round in rounds[-200:]) == 0
    extra = sum(costs.forward(1, round.draft.width) - costs.forward(1, 0) for round in rounds)
    assert extra <= 0.03 * len(rounds) * costs.forward(1, 0), "finding out costs more than 3 % of plain decoding"
    constant = play(PromptLookup(4, branches=branches), [text], [40], costs=costs)
    assert sum(round.proposed[0] for round in constant) > 600


@pytest.mark.parametrize("costs", [CPU_FLOAT32, Costs.default(CPU, torch.bfloat16)])
def test_adaptive_drafts_long_on_copying(costs: Costs) -> None:
    passage = list(range(1, 90))
    rounds = play(PromptLookup(), [passage * 4], [100], costs=costs)
    last = [round.proposed[0] for round in rounds[-8:-2]]
    assert last == [16] * 6
    assert len(rounds) < (3 * 89 - 11) / 10


def test_adaptive_comes_back_when_copying_begins() -> None:
    """What is found and not proposed teaches as well, so silence is no dead end."""
    novel = no_repeats_that_are_right(200)
    text = novel + list(range(50, 90)) * 6
    drafter = PromptLookup()
    sequences_before = play(drafter, [text], [40], costs=CPU_FLOAT32)
    quiet = [round for round in sequences_before if round.proposed[0] == 0]
    assert len(quiet) > 100
    assert max(round.proposed[0] for round in sequences_before[-4:]) > 8


@pytest.mark.parametrize(
    ("request_", "own", "widths"),
    [
        (DraftRequest(2), 5, [2, 2, 2]),
        (DraftRequest(), 5, [5, 5, 5]),
        (DraftRequest(2, "heuristic"), None, [2, 4, 6]),
        (DraftRequest(3, "constant"), None, [3, 3, 3]),
        (DraftRequest(3, "adaptive"), 5, [3, 3, 3]),
    ],
)
def test_draft_length_follows_the_call_then_the_drafter(request_: DraftRequest, own: int | None, widths: list) -> None:
    text = list(range(1, 20)) * 8
    rounds = play(PromptLookup(own), [text], [50], request=request_, costs=Costs(slope=0.0))
    assert [round.proposed[0] for round in rounds[:3]] == widths


@pytest.mark.parametrize(
    "bad", [{"max_ngram": 0}, {"min_ngram": 0}, {"min_ngram": 4}, {"branches": 0}, {"max_ngram": 2, "min_ngram": 3}]
)
def test_bounds_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(SpecGenError, match="min_ngram"):
        PromptLookup(**bad)


@pytest.mark.parametrize("bad", [DraftRequest(0), DraftRequest(-2), DraftRequest(None, "sometimes")])
def test_requests_are_refused(bad: DraftRequest) -> None:
    with pytest.raises(SpecGenError, match="num_assistant_tokens"):
        begun(PromptLookup(), rows_of([[1, 2]], request=bad))


class CountingDict(dict):
    """Count the reads and writes of every such dictionary."""

    uses = 0

    def get(self, *args: object) -> object:
        CountingDict.uses += 1
        return super().get(*args)

    def __setitem__(self, key: object, value: object) -> None:
        CountingDict.uses += 1
        super().__setitem__(key, value)


class CountingList(list):
    """Count how many tokens are read."""

    reads = 0

    def __getitem__(self, place: object) -> object:
        got = super().__getitem__(place)
        CountingList.reads += len(got) if isinstance(place, slice) else 1
        return got


@pytest.mark.parametrize("branches", [1, 3])
def test_work_of_a_round_does_not_grow_with_the_context(branches: int) -> None:
    work: dict[int, list[tuple[int, int]]] = {}
    for context in (60, 600, 6000):
        text = (list(range(1, 31)) * 300)[: context + 60]
        sequences = rows_of([text[:context]], budget=60)
        drafter = PromptLookup(4, branches=branches)
        session = begun(drafter, sequences)
        (source,) = session._rows
        source.followers = [CountingDict(index) for index in source.followers]
        source.tokens = CountingList(source.tokens)
        work[context] = []
        while not sequences.done:
            CountingDict.uses = CountingList.reads = 0
            round = walk(session.propose(sequences.room), [text], sequences)
            sequences.append(round)
            session.observe(round)
            work[context].append((CountingDict.uses, CountingList.reads))
        assert sum(uses for uses, _ in work[context]) > 0
    assert work[60] == work[600] == work[6000]
    assert max(uses for uses, _ in work[6000]) <= 2 * 3 * 5 + 3, "three reads and writes a new token, three to search"


@pytest.mark.parametrize(("sampled", "lengths", "branches"), some((False, True), ([12], [5, 17, 11, 24]), (1, 2, 3)))
def test_text_is_the_text_without_it(branches: int, lengths: list[int], sampled: bool) -> None:
    model = tiny()
    ids, mask = prompts(lengths)
    law = {"do_sample": True, "seed": 11, "temperature": 0.5, "repetition_penalty": 1.1} if sampled else {}
    expected = ours(model, None, ids, mask, **law) if sampled else plain(model, ids, mask)
    texts = texts_of(expected, mask)
    # the newest of the sources is wrong in every fifth token, the older ones elsewhere, the oldest is right
    corpus = [text + garbled(text, 7) + garbled(text, 5) if branches > 1 else garbled(text) for text in texts]
    for number, other_rows in ((5, False), (None, True)):
        watch = Watch(PromptLookup(number, branches=branches, corpus=corpus, other_rows=other_rows, costs=Costs()))
        result = ours(model, watch, ids, mask, **law)
        assert torch.equal(result, expected)
        assert watch.longest >= 3
        assert branches == 1 or watch.off_spine > 0
