"""Statistics: worked numbers, merging, and invariants of real runs counted in other ways."""

from __future__ import annotations

import itertools
import json
from time import perf_counter

import pytest
import torch
from tiny import KINDS, RandomTree, assert_ran, drafter_of, few, ours, plain, prompts, texts_of, tiny

from hf_specgen import AcceptanceStats, Draft, PromptLookup, Round, RowStats, Tree, Verdict, enable, last_stats

LENGTHS = [9, 4, 12, 7]


def verdict_of(counts: list[int], width: int) -> Verdict:
    rows = len(counts)
    path = torch.arange(width).repeat(rows, 1)
    return Verdict(path, torch.tensor(counts), torch.ones(rows, dtype=torch.long), torch.zeros(rows, dtype=torch.bool))


def round_of(drafted: list[list[int]], counts: list[int]) -> Round:
    draft = Draft.from_lists(drafted)
    return Round(draft, verdict_of(counts, draft.width))


def test_the_worked_example_of_the_theory() -> None:
    """Accepted 3, 2, 1, 0 of 3 drafted: mean accepted 1.5, length with the bonus token 2.5."""
    stats = AcceptanceStats(rows=[RowStats()])
    for accepted in (3, 2, 1, 0):
        stats.add(round_of([[1, 2, 3]], [accepted]), [accepted + 1])
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens, stats.num_forwards) == (4, 12, 6, 4)
    assert stats.num_accepted_tokens / stats.num_drafts == 1.5
    assert stats.mean_acceptance_length == stats.tokens_per_round == 2.5
    assert stats.acceptance_rates == [0.75, 0.5, 0.25]
    assert stats.total.draft_acceptance_rate == 0.5
    rates = [1.0, *stats.acceptance_rates]
    conditional = [later / before for before, later in itertools.pairwise(rates)]
    assert conditional == pytest.approx([3 / 4, 2 / 3, 1 / 2]), "of those that got there"


def test_rounds_without_a_draft_count_for_tau_only() -> None:
    stats = AcceptanceStats(rows=[RowStats()])
    stats.add(round_of([[1, 2]], [2]), [3])
    stats.add(round_of([[]], [0]), [1])
    assert (stats.total.num_rounds, stats.num_drafts) == (2, 1)
    assert stats.mean_acceptance_length == 3.0
    assert stats.tokens_per_round == 2.0
    empty = AcceptanceStats(rows=[RowStats()])
    assert (empty.mean_acceptance_length, empty.tokens_per_round, empty.acceptance_rates) == (1.0, 1.0, [])


def test_what_stands_behind_the_end_of_a_text_counts_as_drafted_only() -> None:
    """Row 0 ends at its second accepted token, row 1 at the last one, row 2 at the bonus token, row 3 writes on."""
    stats = AcceptanceStats(rows=[RowStats() for _ in range(4)])
    stats.add(round_of([[1, 2, 3, 4]] * 4, [4, 4, 4, 2]), [2, 4, 5, 3])
    assert [row.num_accepted_tokens for row in stats.rows] == [2, 4, 4, 2]
    assert [row.num_round_tokens for row in stats.rows] == [2, 4, 5, 3]
    assert [row.accepted_at for row in stats.rows] == [[1, 1], [1] * 4, [1] * 4, [1, 1, 0, 0]]
    assert [row.drafted_at for row in stats.rows] == [[1, 1], [1] * 4, [1] * 4, [1] * 4]
    assert stats.num_draft_tokens == 16
    assert stats.tokens_per_round == stats.mean_acceptance_length == 14 / 4
    assert stats.acceptance_rates == [1.0, 1.0, 2 / 3, 2 / 3]


def test_ragged_drafts_and_finished_rows_are_counted_row_by_row_and_merged() -> None:
    stats = AcceptanceStats(rows=[RowStats(), RowStats(), RowStats()])
    stats.add(round_of([[1, 2, 3], [1], []], [2, 1, 0]), [3, 2, 1])
    stats.add(round_of([[1], [1, 2], [5, 5]], [0, 2, 2]), [1, 3, 0])
    first, second, third = stats.rows
    assert (first.drafted_at, first.accepted_at) == ([2, 1, 1], [1, 1, 0])
    assert (second.drafted_at, second.accepted_at) == ([2, 1], [2, 1])
    assert (third.num_rounds, third.num_drafts, third.num_draft_tokens) == (1, 0, 0)
    total = stats.total
    assert (total.num_rounds, total.num_drafts, total.num_draft_tokens, total.num_accepted_tokens) == (5, 4, 7, 5)
    assert stats.acceptance_rates == [3 / 4, 2 / 2, 0 / 1]
    assert total.mean_acceptance_length == 1 + 5 / 4
    assert first.acceptance_rates == [0.5, 1.0, 0.0], "merging leaves the rows as they are"


def test_positions_of_a_tree_are_depths_of_the_rows_own_nodes() -> None:
    """Row 0 has three siblings (depth 1); row 1 a chain of two; places beyond a row's nodes hang anywhere."""
    parents = torch.tensor([[-1, -1, -1, 2, 3], [-1, 0, 1, 2, 3]])
    draft = Draft(torch.ones(2, 5, dtype=torch.long), Tree(parents), torch.tensor([3, 2]))
    stats = AcceptanceStats(rows=[RowStats(), RowStats()])
    stats.add(Round(draft, verdict_of([1, 2], 2)), [2, 3])
    assert (stats.rows[0].drafted_at, stats.rows[0].accepted_at) == ([1], [1])
    assert (stats.rows[1].drafted_at, stats.rows[1].accepted_at) == ([1, 1], [1, 1])
    assert stats.num_draft_tokens == 5
    nothing = Draft(torch.ones(1, 2, dtype=torch.long), Tree(torch.tensor([[-1, 0]])), torch.tensor([0]))
    stats.add(Round(nothing, verdict_of([0], 1)), [1, 0])
    assert stats.rows[0].num_drafts == 1 and stats.rows[0].num_rounds == 2


class Forwards:
    """Count a model's own forwards, unnoticed."""

    __module__ = "torch"

    def __init__(self, model) -> None:
        self.count = 0
        self.hook = model.register_forward_pre_hook(self)

    def __call__(self, *unused) -> None:
        self.count += 1


@pytest.mark.parametrize("kind", few(KINDS, "lookup", "sampled", "tree", "eagle dynamic"))
def test_real_runs_add_up(kind: str) -> None:
    model = tiny()
    ids, mask = prompts(LENGTHS)
    reference = plain(model, ids, mask)
    watch = drafter_of(kind, model, texts_of(reference, mask))
    counter = Forwards(model)
    begun = perf_counter()
    sampling = {"do_sample": True, "seed": 3} if kind == "sampled" else {}
    out = ours(model, watch, ids, mask, **sampling)
    wall = perf_counter() - begun
    counter.hook.remove()
    assert_ran(watch, kind)
    stats = out.speculation
    assert counter.count == stats.num_forwards + 1, "one forward a round and one for the prompt"
    assert (stats.rule, stats.lossless, len(stats.rows)) == ("rejection", True, 4)

    for number, row in enumerate(stats.rows):
        written, proposed, accepted, rounds = 1, 0, 0, 0
        for round in watch.rounds[1:]:
            if written < 32:
                written += len(round.emitted[number])
                proposed += round.proposed[number]
                accepted += len(round.paths[number])
                rounds += 1
        assert (row.num_rounds, row.num_draft_tokens, row.num_accepted_tokens) == (rounds, proposed, accepted)
        assert 1 + accepted + rounds == written == row.num_tokens == 32
        assert row.num_round_tokens == 31
    assert stats.total.num_tokens == out.numel() - ids.numel()

    parts = [stats.prefill_seconds, stats.draft_seconds, stats.verify_seconds, stats.other_seconds]
    assert all(part > 0 for part in parts) and stats.seconds == pytest.approx(sum(parts))
    assert 0 < stats.forward_seconds <= stats.verify_seconds
    assert stats.seconds <= wall


def test_tokens_behind_a_stop_are_not_returned_and_finished_rows_count_no_more() -> None:
    model = tiny()
    ids, mask = prompts(LENGTHS)
    reference = plain(model, ids, mask)
    eos = int(reference[0, ids.shape[1] + 9])
    wanted = plain(model, ids, mask, eos_token_id=eos)
    watch = drafter_of("tree", model, texts_of(reference, mask), tokens=6)
    out = ours(model, watch, ids, mask, eos_token_id=eos)
    assert torch.equal(out, wanted)
    stats, cut = out.speculation, 0
    for number, row in enumerate(stats.rows):
        text = wanted[number, ids.shape[1] :].tolist()
        length = text.index(eos) + 1 if eos in text else len(text)
        emitted, rounds = 1, 0
        for round in watch.rounds[1:]:
            if emitted >= length:
                break
            emitted += len(round.emitted[number])
            rounds += 1
        assert row.num_tokens == length == row.num_round_tokens + 1
        assert row.num_rounds == rounds
        assert row.tokens_per_round * rounds == pytest.approx(length - 1)
        own = row.num_round_tokens - row.num_accepted_tokens
        assert own == rounds - (length < emitted)
        cut += emitted - length
    lengths = [row.num_tokens for row in stats.rows]
    assert min(lengths) < max(lengths), "some row must finish early"
    assert min(row.num_rounds for row in stats.rows) < stats.num_forwards
    assert cut > 0, "some stop must fall inside a round"


def test_nothing_drafted_is_told_as_such() -> None:
    model = tiny()
    ids, mask = prompts(LENGTHS)
    stats = ours(model, None, ids, mask).speculation
    assert (stats.drafter, stats.num_drafts, stats.num_forwards) == ("NoDrafter", 0, 31)
    assert stats.mean_acceptance_length == stats.tokens_per_round == 1.0


@pytest.mark.parametrize("as_dict", [False, True])
def test_statistics_ride_on_every_result_and_stay_with_the_model(as_dict: bool) -> None:
    model, other = tiny(), tiny(1)
    ids, mask = prompts([12])
    assert last_stats(model) is None
    out = ours(model, PromptLookup(4), ids, mask, return_dict_in_generate=as_dict)
    assert last_stats(model) is out.speculation and last_stats(other) is None
    numbers = out.speculation.to_dict()
    assert json.loads(json.dumps(numbers)) == numbers
    names = "num_drafts num_draft_tokens num_accepted_tokens mean_acceptance_length acceptance_rates num_tokens"
    assert set(names.split()) <= set(numbers)
    assert (numbers["drafter"], numbers["num_rows"], numbers["num_tokens"]) == ("PromptLookup", 1, 32)
    assert numbers["num_accepted_tokens"] == out.speculation.num_accepted_tokens > 0
    with pytest.raises(ValueError):
        ours(model, PromptLookup(4), ids, mask, num_beams=2)
    assert last_stats(model) is out.speculation, "a refused call leaves the latest numbers"
    plain(model, ids, mask)
    assert last_stats(model) is out.speculation


def test_an_enabled_model_and_a_text_of_one_token_have_statistics_too() -> None:
    model = enable(tiny())
    ids, mask = prompts([12])
    out = model.generate(ids, attention_mask=mask, assistant_model=RandomTree([[]]), max_new_tokens=1, do_sample=False)
    stats = last_stats(model)
    assert stats is out.speculation
    assert (stats.drafter, stats.num_forwards, stats.total.num_tokens) == ("RandomTree", 0, 1)
    assert stats.verify_seconds == 0 < stats.prefill_seconds
