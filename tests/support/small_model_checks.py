"""Compare the cache of a small model with a fresh reading after every round."""

from __future__ import annotations

import torch
from tiny import Watch
from transformers import (
    DynamicCache,
)

from hf_specgen import Round


class Follow(Watch):
    """Keep every proposal beside the text it was made for, and look at the drafter's cache after every round."""

    def on_begin(self, sequences) -> None:
        super().on_begin(sequences)
        self.sequences = sequences
        self.made: list[tuple[list[list[int]], list[int], object]] = []
        self.checked, self.wrapped = 0, False

    def on_propose(self, sequences):
        texts, room = [list(tokens) for tokens in sequences.tokens], self.room
        draft = super().on_propose(sequences)
        self.made.append((texts, room, draft))
        return draft

    def drafts(self, row: int) -> list[tuple[list[int], list[int]]]:
        """Return (text so far, drafted tokens) of every round of a row."""
        return [
            (texts[row], draft.tokens[row, : int(draft.n_valid[row])].tolist())
            for texts, room, draft in self.made
            if room[row] > 0
        ]


class CheckCache(Follow):
    """Compare the drafter's keys and values with a fresh reading of the row, after every round."""

    def on_observe(self, round: Round) -> None:
        super().on_observe(round)
        cached = self.session.model.cached
        for place, (row, length) in enumerate(zip(self.session.model.live, cached.lengths, strict=True)):
            tokens = self.sequences.tokens[row]
            if self.sequences.finished[row]:
                continue
            if proposed := round.proposed[row]:  # what it read and the target kept is not read again
                assert length >= len(self.made[-1][0][row]) + min(proposed - 1, len(round.paths[row]))
            assert length <= len(tokens) - 1, "the newest token is not the drafter's yet"
            if length:
                self.compare(cached, place, tokens[:length])

    def compare(self, cached, row: int, tokens: list[int]) -> None:
        fresh = DynamicCache()  # without the config: every layer keeps all of the text
        name = cached._cache_name
        with torch.no_grad():
            self.inner.model(input_ids=torch.tensor([tokens]), use_cache=True, **{name: fresh})
        for ours_, theirs in zip(cached.cache.layers, fresh.layers, strict=True):
            capacity, window = ours_.group.capacity, ours_.group.window
            index = torch.arange(0 if window is None else max(0, len(tokens) - window + 1), len(tokens))
            self.wrapped |= len(tokens) > capacity
            for mine, true in ((ours_.keys, theirs.keys), (ours_.values, theirs.values)):
                torch.testing.assert_close(mine[row, :, index % capacity], true[0, :, index], atol=1e-4, rtol=1e-4)
                self.checked += len(index)
