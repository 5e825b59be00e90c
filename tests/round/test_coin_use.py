"""A coin that was looked at in one round must not decide again in a later one."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from tiny import disturbed, tiny
from torch import Tensor

import hf_specgen
from hf_specgen.round.coins import ACCEPT, DRAFT, Coins

Key = tuple[int, int, int]  # position, use, sibling


def run(monkeypatch: pytest.MonkeyPatch, rule: str) -> tuple[Counter[Key], hf_specgen.AcceptanceStats]:
    """Sample with sampled drafts and count which coins are tossed."""
    tossed: Counter[Key] = Counter()
    honest = Coins.uniform

    def watch(self: Coins, rows: Tensor, depth: Tensor | int, use: int, sibling: Tensor | int = 0) -> Tensor:
        positions = self.positions[rows] + depth
        for position, number in zip(positions.tolist(), (torch.zeros_like(rows) + sibling).tolist(), strict=True):
            tossed[position, use, number] += 1
        return honest(self, rows, depth, use, sibling)

    monkeypatch.setattr(Coins, "uniform", watch)
    model = tiny()
    drafter = hf_specgen.SmallModel(disturbed(model), num_tokens=5, sample=True)
    loop = hf_specgen.SpeculativeDecoding(drafter, rule=rule)
    out = model.generate(torch.arange(1, 9)[None], custom_generate=loop, do_sample=True, max_new_tokens=60, seed=5)
    return tossed, out.speculation


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_drafts_never_toss_a_coin_twice(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    tossed, stats = run(monkeypatch, rule)
    assert stats.num_draft_tokens > stats.num_accepted_tokens > 0, "some drafts must be cut for this to mean anything"
    drafts = [count for (_, use, _), count in tossed.items() if use == DRAFT]
    assert len(drafts) == stats.num_draft_tokens
    assert set(drafts) == {1}


def test_block_verification_never_tosses_an_accept_coin_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks at the coins of the whole block, so a coin behind the kept part is no longer fresh."""
    tossed, stats = run(monkeypatch, "block")
    accepts = [count for (_, use, _), count in tossed.items() if use == ACCEPT]
    assert sum(accepts) >= stats.num_draft_tokens > stats.num_accepted_tokens > 0
    assert set(accepts) == {1}


def test_keying_by_position_would_toss_coins_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the keys that a coin per absolute position would have had repeat in this very run."""
    tossed, _ = run(monkeypatch, "block")
    by_position = Counter(position + sibling for position, use, sibling in tossed if use == ACCEPT)
    assert max(by_position.values()) > 1
