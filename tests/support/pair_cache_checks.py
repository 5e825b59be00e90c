"""Compare a pair cache with a fresh reading after every round."""

from __future__ import annotations

import torch
from feature_cases import Steered, run_pairs, true_features
from transformers import DynamicCache

from hf_specgen import Round


class CheckCache(Steered):
    """Compare keys and values of every committed pair with a reading of the whole text without a slot cache."""

    def __init__(self, model, inner, texts, **settings) -> None:
        super().__init__(inner, texts, **settings)
        self.model, self.checked, self.wrapped, self.rests = model, 0, False, 0
        self.known: dict[int, int] = {}

    def on_observe(self, round: Round) -> None:
        super().on_observe(round)
        if len(self.rounds) == 1:
            return
        pairs = self.session.model.pairs
        drafted = any(round.proposed)
        self.rests += not drafted
        for place, (row, length) in enumerate(zip(pairs.live, pairs.cache.lengths, strict=True)):
            if drafted:
                assert length == len(self.before[row]) - 1, "every true pair was read"
            if length > self.known.get(row, 0):
                self.known[row] = length
                self.compare(pairs.cache, place, self.before[row][: length + 1])

    def compare(self, cache, place: int, text: list[int]) -> None:
        fresh = DynamicCache()
        run_pairs(self.inner, text[1:], true_features(self.inner, self.model, text), fresh)
        pairs = len(text) - 1
        for mine, true in zip(cache.layers, fresh.layers, strict=True):
            window, capacity = mine.group.window, mine.group.capacity
            index = torch.arange(0 if window is None else max(0, pairs - window + 1), pairs)
            self.wrapped |= pairs > capacity
            for own, other in ((mine.keys, true.keys), (mine.values, true.values)):
                torch.testing.assert_close(own[place, :, index % capacity], other[0, :, index], atol=1e-4, rtol=1e-4)
            self.checked += len(index)
