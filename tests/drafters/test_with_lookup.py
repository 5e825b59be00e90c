"""WithLookup: who drafts, row by row and round by round; neither drafter suffers from what the other one does."""

from __future__ import annotations

import pair_cache_checks
import pytest
import small_model_checks
import torch
from feature_cases import RAGGED, VARIANTS
from feature_cases import drafter_of as random_eagle
from fitted import fitted, untrained
from lookup_cases import CHEAP, Kept
from oracle import drafter_from, eagle3_oracle, eagle_oracle, medusa_oracle, oracle_target
from tiny import Watch, build, disturbed, few, garbled, ours, plain, prompts, some, texts_of, tiny

from hf_specgen import (
    Costs,
    Draft,
    Drafter,
    PromptLookup,
    Round,
    SmallModel,
    SpecGenError,
    Verdict,
    WithLookup,
    last_stats,
    stock_candidates,
)
from hf_specgen.drafters import with_lookup
from hf_specgen.drafters.prompt_lookup import LookupSession
from hf_specgen.drafting.copier import Continuations
from hf_specgen.drafting.lengths import DraftLength, Pace
from hf_specgen.round.costs import Rate

CHAIN = {"tree": "chain"}
DYNAMIC = {"tree": {"top_k": 2, "depth": 4, "nodes": 6}}
INNER: dict[str, tuple[str, dict[str, object]]] = {
    "eagle3, chain": ("eagle3", CHAIN),
    "eagle3, dynamic": ("eagle3", {**DYNAMIC, "reduced": True}),
    "eagle, static": ("eagle", {"tree": [[0], [1], [0, 0], [0, 1], [0, 0, 0]]}),
    "medusa, chain": ("medusa", {**CHAIN, "num_heads": 4, "num_head_layers": 1}),
    "medusa, dynamic": ("medusa", {**DYNAMIC, "num_heads": 4, "num_head_layers": 1}),
    "small": ("small", {}),
}


READ = [("eagle", {"tree": "chain"}), ("eagle3", DYNAMIC), ("eagle3, window, two layers", {"tree": "chain"})]


def inner_of(name: str, model, texts: list[list[int]], **more: object) -> Drafter:
    method, settings = INNER[name]
    if method == "small":
        return SmallModel(disturbed(model), costs=CHEAP)
    drafter = fitted(method, model, texts, 3, **{**settings, **more})
    drafter.costs = CHEAP
    return drafter


def lookup_of(texts: list[list[int]], keep: int, **settings: object) -> PromptLookup:
    """Return a lookup that knows every second stretch of ``keep`` tokens, with a wrong one here and there."""
    parts = [garbled(text)[start : start + keep] for text in texts for start in range(0, len(text), 2 * keep)]
    return PromptLookup(corpus=parts, min_ngram=2, costs=CHEAP, **settings)


@pytest.mark.parametrize("name", few(INNER, "eagle3, dynamic", "medusa, chain", "small"))
def test_greedy_text_is_plain_and_both_draft(name: str) -> None:
    model = tiny()
    ids, mask = prompts(RAGGED)
    for rows in (slice(2, 3), slice(0, 4)):
        batch, marks = ids[rows], mask[rows]
        batch, marks = batch[:, marks.sum(1).max().neg() :], marks[:, marks.sum(1).max().neg() :]
        expected = plain(model, batch, marks, max_new_tokens=60)
        texts = texts_of(expected, marks)
        for branches in (1, 2)[: len(batch)]:
            watch = Kept(WithLookup(inner_of(name, model, texts), lookup_of(texts, 12, branches=branches)))
            assert torch.equal(ours(model, watch, batch, marks, max_new_tokens=60), expected)
            assert watch.row_rounds(True) >= 3 and watch.row_rounds(False) >= 3, branches
            assert len(batch) == 1 or watch.mixed >= 2
            assert watch.longest >= 3


@pytest.mark.parametrize("family", few(("mistral", "gemma3_text"), "gemma3_text"))
def test_other_targets(family: str) -> None:
    model, (ids, mask) = build(family), prompts(RAGGED)
    expected = plain(model, ids, mask, max_new_tokens=50)
    texts = texts_of(expected, mask)
    watch = Kept(WithLookup(inner_of("eagle3, dynamic", model, texts), lookup_of(texts, 20)))
    assert torch.equal(ours(model, watch, ids, mask, max_new_tokens=50), expected)
    assert watch.row_rounds(True) >= 3 and watch.row_rounds(False) >= 3


# --- the other drafter's cache


@pytest.mark.parametrize(
    ("name", "shape", "most"),
    few(
        [(*case, most) for case in READ for most in (256, 5)],
        *((*READ[0], 256), (*READ[1], 5), (*READ[2], 256)),
    ),
)
def test_an_eagle_cache_holds_what_a_fresh_reading_gives(name: str, shape, most: int, monkeypatch) -> None:
    """Hidden states of rounds that copied are fed when it drafts again, or, when too many wait, before that."""
    monkeypatch.setattr("hf_specgen.drafting.features._MOST_PENDING", most)
    model, (ids, mask) = tiny(), prompts(RAGGED)
    expected = plain(model, ids, mask, max_new_tokens=60)
    texts, (method, settings) = texts_of(expected, mask), VARIANTS[name]
    drafter = random_eagle(method, **settings, **shape)
    drafter.costs = CHEAP
    inner = pair_cache_checks.CheckCache(model, drafter, texts, hit=0.8)
    watch = Kept(WithLookup(inner, lookup_of(texts, 12)))
    assert torch.equal(ours(model, watch, ids, mask, max_new_tokens=60), expected)
    assert inner.checked > 0 and watch.row_rounds(True) >= 3 and watch.row_rounds(False) >= 5 and watch.mixed
    assert max(len(path) for round in watch.rounds for path in round.paths) > 5, "long copies were accepted"


@pytest.mark.parametrize("family", few(("llama", "mistral"), "mistral"))
def test_a_small_models_cache_holds_what_a_fresh_reading_gives(family: str) -> None:
    model, (ids, mask) = build(family), prompts(RAGGED)
    expected = plain(model, ids, mask, max_new_tokens=60)
    texts = texts_of(expected, mask)
    inner = small_model_checks.CheckCache(SmallModel(disturbed(model), costs=CHEAP))
    watch = Kept(WithLookup(inner, lookup_of(texts, 12)))
    assert torch.equal(ours(model, watch, ids, mask, max_new_tokens=60), expected)
    assert inner.checked > 0 and watch.row_rounds(True) >= 5 and watch.row_rounds(False) >= 5 and watch.mixed


def test_medusa_reads_the_newest_state() -> None:
    """After copies of any length its oracle is right at once: it read the state of the last accepted token."""
    target = oracle_target("successor")
    ids = torch.tensor([[3, 5], [2, 9], [1, 1]])
    expected = plain(target.model, ids, max_new_tokens=60)
    lookup = lookup_of(expected.tolist(), 11)
    watch = Kept(WithLookup(oracle_of("medusa", target), lookup))
    assert torch.equal(ours(target.model, watch, ids, max_new_tokens=60), expected)
    assert watch.row_rounds(True) >= 3 and watch.row_rounds(False) >= 3
    assert missed(watch, copied=False) == 0


# --- who learns from what


class Never(PromptLookup):
    """Find something in every row and round, and always the wrong thing."""

    def begin(self, call):
        return NeverRight(self, call)


class NeverRight(LookupSession):
    def _search(self, row: int, bound: int) -> Continuations:
        found = super()._search(row, bound)
        newest = self._rows[row].tokens[-1]  # no target below repeats a token
        return Continuations(self._rates[row][2], [[newest] * bound]) if bound else found


def oracle_of(method: str, target, **settings: object):
    if method == "medusa":
        weights = medusa_oracle(target, 4, **{"tree": "chain", **settings})
    else:
        make = eagle_oracle if method == "eagle" else eagle3_oracle
        weights = make(target, "token", **{"tree": "chain", **settings})
    drafter = drafter_from(weights)
    drafter.costs = CHEAP
    return drafter


def missed(watch: Kept, copied: bool) -> int:
    """Count the rows and rounds of one of the two in which less than all was accepted."""
    return sum(
        copies == copied and len(path) < round.reached[row]
        for line, round in zip(watch.rows, watch.rounds[1:], strict=True)
        for row, ((copies, _), path) in enumerate(zip(line, round.paths, strict=True))
    )


@pytest.mark.parametrize(("method", "shape"), some(("medusa", "eagle", "eagle3"), (CHAIN, DYNAMIC)))
def test_a_lookup_that_is_always_wrong_costs_the_other_nothing(method: str, shape) -> None:
    target = oracle_target("successor")
    ids = torch.tensor([[3, 5], [2, 9], [1, 1], [7, 4]])
    expected = plain(target.model, ids, max_new_tokens=60)
    watch = Kept(WithLookup(oracle_of(method, target, **shape), Never(costs=CHEAP)))
    assert torch.equal(ours(target.model, watch, ids, max_new_tokens=60), expected)
    (group,) = watch.session._groups
    assert watch.row_rounds(True) >= 1, "it was tried"
    assert watch.row_rounds(True) <= 4 * 4, "and given up"
    assert missed(watch, copied=False) == 0
    assert group.rate.rates[0] > 0.8 and group.rate.rates[1] > 0.8
    if shape is CHAIN:
        (pace,) = watch.paces
        assert pace.rate.rates[0] > 0.8 and pace.rate.rates[1] > 0.8 and not pace._rest
    assert watch.session.lookup._rates[0][2].rates[0] < 0.1


def test_a_drafter_that_is_always_wrong_costs_the_lookup_nothing() -> None:
    model, (ids, mask) = tiny(), prompts(RAGGED)
    expected = plain(model, ids, mask, max_new_tokens=60)
    lookup = PromptLookup(corpus=texts_of(expected, mask), costs=CHEAP)
    watch = Kept(WithLookup(SmallModel(tiny(9, layers=1), costs=CHEAP), lookup))
    assert torch.equal(ours(model, watch, ids, mask, max_new_tokens=60), expected)
    assert watch.row_rounds(True) > watch.row_rounds(False) and missed(watch, copied=True) <= 8
    (group,) = watch.session._groups
    assert watch.session.lookup._rates[0][2].rates[0] > 0.7
    assert group.rate.rates[0] <= 0.6, "no copy taught it"
    assert watch.session.other.settings._pace.rate.rates[0] <= 0.6


def test_where_every_row_copies_the_other_does_not_run() -> None:
    model, ids = tiny(), prompts([12])[0]
    expected = plain(model, ids, max_new_tokens=100)
    small = disturbed(model)
    passes: list[int] = []
    small.register_forward_pre_hook(lambda *_: passes.append(1))
    lookup = PromptLookup(corpus=expected.tolist(), costs=CHEAP)
    watch = Kept(WithLookup(SmallModel(small, costs=CHEAP), lookup))
    assert torch.equal(ours(model, watch, ids, max_new_tokens=100), expected)
    assert watch.row_rounds(False) == 0 and watch.longest > 8 and not passes
    stats = last_stats(model)
    assert stats is not None and stats.num_forwards < 20


def test_a_resting_drafter_leaves_its_rows_to_the_lookup() -> None:
    class Silent(Watch):
        def on_propose(self, sequences) -> Draft:
            return Draft.empty(len(sequences), sequences.prompt.device)

        def on_observe(self, round) -> None: ...

    model, (ids, mask) = tiny(), prompts(RAGGED)
    expected = plain(model, ids, mask)
    lookup = PromptLookup(max_ngram=1, corpus=texts_of(expected, mask), costs=CHEAP)  # promises less than is assumed
    watch = Kept(WithLookup(Silent(SmallModel(tiny(1))), lookup))
    assert torch.equal(ours(model, watch, ids, mask), expected)
    assert watch.row_rounds(True) >= 6 and watch.row_rounds(False) == 0
    assert any(copied for copied, _ in watch.rows[0])


def test_what_is_not_used_is_tried_again() -> None:
    """A drafter that failed at first is asked again after a while, and kept when it has become good."""
    target = oracle_target("successor")

    class Late(Watch):
        def on_propose(self, sequences) -> Draft:
            draft = super().on_propose(sequences)
            wrong = sequences.lengths[0] < 40
            return Draft((draft.tokens + 1) % 20, draft.tree, draft.n_valid) if wrong and draft.width else draft

    ids = torch.tensor([[3, 5]])
    expected = plain(target.model, ids, max_new_tokens=200)
    text = expected[0].tolist()
    corpus = [text[place : place + 4] for place in range(len(text) - 4)]  # copies are right for a token or two
    lookup = PromptLookup(1, corpus=corpus, costs=CHEAP)
    late = Late(oracle_of("eagle3", target))
    watch = Kept(WithLookup(late, lookup))
    assert torch.equal(ours(target.model, watch, ids, max_new_tokens=200), expected)
    drafted = [bool(count) and not copied for ((copied, count),) in watch.rows]
    first = next(place for place in range(4, len(drafted)) if not any(drafted[place : place + 8]))
    assert any(drafted[:first]) and any(drafted[first:]), "given up, and tried again"
    assert all(drafted[-5:-1])


def a_round(proposed: list[int], accepted: list[int], width: int = 4) -> Round:
    rows = len(proposed)
    path = torch.arange(width).expand(rows, -1)
    verdict = Verdict(path, torch.tensor(accepted), torch.zeros(rows).long(), torch.zeros(rows).bool())
    draft = Draft.from_lists([[0] * width] * rows)
    return Round(Draft(draft.tokens, draft.tree, torch.tensor(proposed)), verdict)


def test_a_part_of_a_round_shows_its_own_rows_only() -> None:
    whole = a_round([4, 3, 0], [2, 3, 0])
    assert with_lookup._Part.of(whole, [True] * 3) is whole
    part = with_lookup._Part.of(whole, [False, True, True])
    assert (part.proposed, part.reached, part.paths) == ([0, 3, 0], [0, 3, 0], whole.paths)
    assert part.emitted == whole.emitted and part.draft.n_valid.tolist() == [0, 3, 0]


def test_no_copy_ends_a_rest() -> None:
    """A trial of one row fails while another row copies seven tokens: the drafter goes on resting."""
    pace = Pace(DraftLength("adaptive", 4, Costs()), Rate(0.1, 0.1), _rest=5, _pause=32)
    pace.observe(with_lookup._Part.of(a_round([1, 4], [0, 4]), [True, False]))
    assert (pace._rest, pace._pause) == (5, 32)
    pace.observe(a_round([1, 0], [1, 0]))
    assert (pace._rest, pace._pause) == (0, 16)


# --- what is decided


def settled(copies, rate=(0.6, 0.7), room=None, costs=CHEAP, widths=None, remaining=None, depth=4):
    group = with_lookup._Group(list(range(len(copies))), Rate(*rate), depth, depth)
    room = room or [20] * len(copies)
    widths = widths or range(1, max(length for length, _ in copies) + 1)
    return with_lookup._plan(costs, copies, group, remaining or [n + 1 for n in room], room, widths)


def test_who_promises_more_drafts() -> None:
    sure, poor, none = (16, (0.9, 0.95)), (16, (0.1, 0.5)), (0, (0.5, 0.5))
    assert settled([poor]) == [(0, True)] == settled([none])
    assert settled([sure])[0][0] >= 8 and settled([sure])[0][1] is False
    (first, asked), other = settled([sure, poor], costs=Costs(slope=0.002, draft=0.005))
    assert first >= 8 and not asked and other == (0, True), "each row has its own"
    copied = settled([sure, poor], costs=Costs(slope=0.002, draft=5.0))
    assert [asks for _, asks in copied] == [False, False], "too dear for one row"
    assert settled([poor], rate=(0.01, 0.01))[0][1] is False
    assert settled([poor], rate=(0.01, 0.01), costs=Costs(slope=0.5, draft=0.5)) == [(0, True)], "nothing pays"
    assert settled([sure, none], room=[20, 0], remaining=[21, 1])[1] == (0, False)
    assert settled([sure], widths=range(5, 6)) == [(5, False)], "a length that was asked for"


def test_a_number_holds_for_both() -> None:
    model, (ids, mask) = tiny(), prompts(RAGGED)
    expected = plain(model, ids, mask, max_new_tokens=60)
    texts = texts_of(expected, mask)
    watch = Kept(WithLookup(inner_of("eagle3, chain", model, texts), lookup_of(texts, 12)))
    assert torch.equal(ours(model, watch, ids, mask, max_new_tokens=60, num_assistant_tokens=3), expected)
    counts = {copied: [c for line in watch.rows[:12] for mine, c in line if mine == copied and c] for copied in (0, 1)}
    assert set(counts[0]) == set(counts[1]) == {3}


# --- the rest of a drafter's life


def test_statistics_name_both_and_any_way_in_works() -> None:
    model, (ids, mask) = tiny(), prompts([17])
    expected = plain(model, ids, mask)
    texts = texts_of(expected, mask)
    drafter = WithLookup(inner_of("eagle3, chain", model, texts), lookup_of(texts, 6))
    out = ours(model, drafter, ids, mask, return_dict_in_generate=True)
    assert torch.equal(out.sequences, expected) and out.speculation.drafter == "PromptLookup + Eagle3Drafter"
    assert drafter.reads(model).hidden == drafter.drafter.hidden_layers != ()
    with stock_candidates(model, drafter) as calls:
        assert torch.equal(plain(model, ids, mask), expected)
    assert calls[0].stats.drafter == "PromptLookup + Eagle3Drafter" and calls[0].stats.num_accepted_tokens > 4


def test_an_interrupted_call_leaves_nothing_behind() -> None:
    model, (ids, mask) = tiny(), prompts(RAGGED)
    expected = plain(model, ids, mask)
    texts = texts_of(expected, mask)
    drafter = WithLookup(inner_of("eagle3, chain", model, texts), lookup_of(texts, 12))
    ours(model, drafter, ids, mask)
    before = [dict(vars(part)) for part in (drafter, drafter.drafter, drafter.lookup)]
    calls = []

    def stop(row: int, tokens: list[int]) -> None:
        calls.append(row)
        if len(calls) == 18:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ours(model, drafter, ids, mask, on_tokens=stop)
    for part, names in zip((drafter, drafter.drafter, drafter.lookup), before, strict=True):
        assert set(vars(part)) == set(names) and all(vars(part)[name] is value for name, value in names.items())
    inner: list[torch.Tensor] = []

    def again(row: int, tokens: list[int]) -> None:
        if not inner:
            inner.append(ids)
            inner[0] = ours(model, drafter, ids[:2], mask[:2])

    assert torch.equal(ours(model, drafter, ids, mask, on_tokens=again), expected)
    assert torch.equal(inner[0], plain(model, ids[:2], mask[:2]))


def test_what_it_is_not_for() -> None:
    model, ids = tiny(), prompts([9])[0]
    for other in (PromptLookup(), WithLookup(SmallModel(tiny(1))), tiny(1)):
        with pytest.raises(SpecGenError, match="a drafter that does not copy is required"):
            WithLookup(other)
    sampled = WithLookup(untrained("eagle", model, [1, 3], sample=True, **CHAIN), PromptLookup(other_rows=True))
    asked = {"do_sample": True, "seed": 1, "max_new_tokens": 8}
    with pytest.raises(SpecGenError, match="would depend on its neighbours"):
        ours(model, sampled, ids, **asked)
    assert torch.equal(ours(model, sampled, ids), plain(model, ids)), "greedy texts have no such limit"
    ours(model, sampled, ids, rule="gumbel", **asked)
    with pytest.raises(SpecGenError, match="picked ones only"), pytest.warns(UserWarning, match="lossy"):
        ours(model, sampled, ids, rule="typical", **asked)
    tree = WithLookup(untrained("eagle", model, [1, 3], sample=True, tree=[[0], [1]]))
    with pytest.raises(SpecGenError, match="judges chains only"):
        ours(model, tree, ids, rule="block", **asked)
