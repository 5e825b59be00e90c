"""Lookups are copiers: one that tests define goes alone and beside another drafter, as prompt lookup does."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tiny import Watch, disturbed, ours, plain, prompts, texts_of, tiny

from hf_specgen import Call, Draft, SmallModel, SpecGenError, WithLookup
from hf_specgen.drafting.copier import Continuations, Copier, CopyingDrafter
from hf_specgen.round.costs import Costs, Rate

FREE = Costs()


class Recital(CopyingDrafter):
    """Copy from texts that are known beforehand, one for every row, from where the row now ends."""

    def __init__(self, texts: list[list[int]], rows: Sequence[int], others: bool = False) -> None:
        self.texts = texts
        self.rows = rows
        self.others = others
        self.costs = FREE

    def begin(self, call: Call) -> Copier:
        return Reciting(self, call)


class Reciting(Copier):
    """Recite three tokens at a time in some rows."""

    def __init__(self, drafter: Recital, call: Call) -> None:
        super().__init__(call)
        self.drafter = drafter
        self.reads_other_rows = drafter.others
        self.parted = False
        self.rate = Rate(0.99, 0.99)
        self.found: list[Continuations] = []

    def part_rows(self) -> None:
        self.parted = True

    def search(self, room: list[int]) -> list[Continuations]:
        self.found = []
        for row, (tokens, space) in enumerate(zip(self.call.sequences.tokens, room, strict=True)):
            start = len(tokens)
            known = self.drafter.texts[row][start : start + min(3, space)] if row in self.drafter.rows else []
            self.found.append(Continuations(self.rate, [known]))
        return self.found

    def cut(self, found: list[Continuations]) -> list[int]:
        return [continuations.length for continuations in found]

    def copies(self, counts: Sequence[int], branches: bool = True) -> Draft:
        texts = [continuations.texts[0] for continuations in self.found]
        return Draft.from_lists([text[:count] for text, count in zip(texts, counts, strict=True)], self.call.device)


def test_a_copier_of_ones_own_drafts_alone() -> None:
    model = tiny()
    ids, mask = prompts([9, 5])
    expected = plain(model, ids, mask)
    watch = Watch(Recital(texts_of(expected, mask), (0, 1)))
    assert torch.equal(ours(model, watch, ids, mask), expected)
    assert watch.longest == 3
    assert len(watch.rounds) == 9  # the prompt's, seven of four tokens, one of three


def test_rows_that_recite_copy_and_the_others_are_drafted_for() -> None:
    model = tiny()
    ids, mask = prompts([9, 5])
    expected = plain(model, ids, mask)
    small = Watch(SmallModel(disturbed(model), num_tokens=2))
    both = Watch(WithLookup(small, Recital(texts_of(expected, mask), (0,))))
    out = ours(model, both, ids, mask)
    assert torch.equal(out, expected)
    assert out.speculation.drafter == "Watch"
    drafted = [round.proposed for round in small.rounds]
    copied = [both.rounds[number].proposed[0] == 3 for number in range(len(drafted))]
    assert any(copied)
    assert any(proposed[1] for proposed in drafted)
    assert all(not proposed[0] for proposed, copies in zip(drafted, copied, strict=True) if copies)


def test_drawn_tokens_make_rows_learn_alone_and_refuse_copies_of_other_rows() -> None:
    model = tiny()
    ids, mask = prompts([9, 5])
    texts = texts_of(plain(model, ids, mask), mask)
    drawing = SmallModel(disturbed(model), sample=True)
    mix = Watch(WithLookup(drawing, Recital(texts, (0,))))
    ours(model, mix, ids, mask, do_sample=True, seed=4, max_new_tokens=6)
    assert mix.session.lookup.parted
    with pytest.raises(SpecGenError, match="other_rows=True"):
        ours(model, WithLookup(drawing, Recital(texts, (0,), others=True)), ids, mask, do_sample=True, seed=4)


def test_a_copier_is_no_partner_of_another_copier() -> None:
    with pytest.raises(SpecGenError, match="a drafter that does not copy"):
        WithLookup(Recital([], ()))
