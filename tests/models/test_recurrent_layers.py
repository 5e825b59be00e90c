"""A layer with a recurrent state beside one with keys and values: rejected drafts leave no trace in either."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from tiny import build
from torch import Tensor

from hf_specgen.models.cache_layers import AcceptedPath, LaneCache, LaneLayer
from hf_specgen.models.slot_cache import SlotCache
from hf_specgen.models.visibility import TreeVisibility
from hf_specgen.round.records import Tree

DECAY = 0.5


def run_through(state: Tensor, inputs: Tensor) -> Tensor:
    """Return the states ``(S, D)`` after each of ``inputs (S, D)``: a sum that forgets, and so knows the order."""
    states = []
    for token in inputs:
        state = torch.tanh(DECAY * state + token)
        states.append(state)
    return torch.stack(states) if states else inputs


class RecurrentLayer(LaneLayer):
    """Keep one state per lane, and what was written since the snapshot: what is taken back is computed anew."""

    def __init__(self, cache: LaneCache) -> None:
        super().__init__(cache)
        self.states: list[Tensor] = []
        self.kept: list[Tensor] = []
        self.base: list[Tensor] = []
        self.starts: list[int] = []

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Begin every lane with the zero state."""
        rows, _, width = key_states.shape
        self.states = [key_states.new_zeros(width) for _ in range(rows)]
        self.is_initialized = True
        self.snapshot()

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Run the states through inputs ``(R, S, D)``; return them all. Pads before a prompt are left out."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.written = list(key_states)
        prompts = self.cache.prefilling
        if prompts is not None:
            self.kept = [line[len(line) - length :] for line, length in zip(self.written, prompts, strict=True)]
            self.rewind()
            return torch.stack(self.states)
        results = [run_through(state, line) for state, line in zip(self.states, self.written, strict=True)]
        self.states = [states[-1] for states in results]
        return torch.stack(results)

    def snapshot(self) -> None:
        """Remember the states of the committed text."""
        if self.is_initialized:
            self.base = list(self.states)
            self.kept = [state.new_zeros(0, len(state)) for state in self.states]
            self.starts = list(self.cache.lengths)

    def commit(self, path: AcceptedPath) -> None:
        """Keep the first tokens of the pass."""
        assert path.nodes is None, "a recurrent state follows chains only"
        taken = [line[:count] for line, count in zip(self.written, path.counts, strict=True)]
        self.kept = [torch.cat(pair) for pair in zip(self.kept, taken, strict=True)]
        self.rewind()

    def crop(self, lengths: list[int]) -> None:
        """Forget what stands behind the lengths."""
        spans = zip(self.kept, lengths, self.starts, strict=True)
        self.kept = [line[: length - start] for line, length, start in spans]
        self.rewind()

    def keep(self, order: list[int]) -> None:
        """Let finished rows go."""
        for name in ("states", "kept", "base", "starts"):
            self.__dict__[name] = [self.__dict__[name][lane] for lane in order]

    def rewind(self) -> None:
        """Compute the states of what was kept from the snapshot on."""
        pairs = zip(self.base, self.kept, strict=True)
        self.states = [run_through(state, line)[-1] if len(line) else state for state, line in pairs]


class Decoder:
    """Feed random tokens to a recurrent layer and to a layer of keys and values, and know what every row holds."""

    def __init__(self, lengths: list[int], seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.chance = random.Random(seed)
        self.cache = SlotCache(build("llama").config, len(lengths))
        self.cache.layers[1] = RecurrentLayer(self.cache)
        self.texts = [torch.zeros(0, 3, dtype=torch.float64) for _ in lengths]
        block = self.tokens(max(lengths))
        self.cache.begin_prefill(block.shape[1], lengths, left_padded=True)
        self.write(block)
        self.cache.crop_rows(lengths)
        self.texts = [line[len(line) - length :] for line, length in zip(block, lengths, strict=True)]

    def tokens(self, width: int) -> Tensor:
        return torch.randn(len(self.texts), width, 3, dtype=torch.float64, generator=self.generator)

    def write(self, block: Tensor) -> tuple[Tensor, Tensor]:
        """Push a block through both layers; return what each of them gives."""
        keys, _ = self.cache.update(block[:, None], -block[:, None], 0)
        return keys[:, 0], self.cache.layers[1].update(block, block)

    def check(self, block: Tensor, keys: Tensor, states: Tensor) -> None:
        """Compare both layers with the whole texts, read from their beginning."""
        mask = self.cache.masks(TreeVisibility(Tree.chain(block.shape[1] - 1)))["full_attention"]
        for row, text in enumerate(self.texts):
            whole = torch.cat([text, block[row]])
            torch.testing.assert_close(states[row], run_through(torch.zeros_like(whole[0]), whole)[len(text) :])
            assert torch.equal(keys[row, mask.expand(len(self.texts), -1, -1, -1)[row, 0, -1]], whole)

    def round(self, width: int, counts: list[int] | None = None) -> None:
        """Score a chain, compare every position, and keep some of it."""
        block = self.tokens(width)
        self.cache.begin(width)
        self.check(block, *self.write(block))
        counts = counts or [self.chance.randint(0, width) for _ in self.texts]
        self.cache.commit(counts)
        self.texts = [torch.cat([t, line[:n]]) for t, line, n in zip(self.texts, block, counts, strict=True)]

    def draft(self, count: int) -> None:
        """Commit one token after another, as a small drafter does, then go back behind some of them."""
        before = list(self.texts)
        for undo in range(count):
            block = self.tokens(1)
            self.cache.begin(1, undo)
            self.check(block, *self.write(block))
            self.cache.commit([1] * len(self.texts))
            self.texts = [torch.cat([text, line]) for text, line in zip(self.texts, block, strict=True)]
        kept = [len(text) + self.chance.randint(0, count) for text in before]
        self.cache.crop_rows(kept)
        self.texts = [text[:length] for text, length in zip(self.texts, kept, strict=True)]

    def leave(self, order: list[int]) -> None:
        self.cache.keep(order)
        self.texts = [self.texts[row] for row in order]


def write_rounds() -> None:
    decoder = Decoder([5, 1, 9, 3])
    for width in (4, 1, 6, 2):
        decoder.round(width)
        decoder.draft(width)
    decoder.round(5, [5, 0, 2, 1])
    decoder.leave([3, 1, 2])
    decoder.round(3)
    decoder.leave([2])
    decoder.draft(4)
    decoder.round(4, [2])
    decoder.round(1)


def test_rejected_tokens_leave_no_trace() -> None:
    """Ragged rows, drafted chains of which nothing to all is kept, tokens committed one by one and taken back."""
    write_rounds()


begin = SlotCache.begin
FAULTS = {
    "the pass is not taken back": (RecurrentLayer, "commit", lambda self, path: None),
    "a rollback is not followed": (RecurrentLayer, "crop", lambda self, lengths: None),
    "a snapshot of what may be taken back": (SlotCache, "begin", lambda self, width, undo=0: begin(self, width)),
    "rows stay where they were": (RecurrentLayer, "keep", lambda self, order: None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_state_that_is_not_restored_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls."""
    decoder = Decoder([5, 1, 9, 3])  # read rightly: what follows goes wrong
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises((AssertionError, ValueError, IndexError)):
        for width in (4, 1, 6, 2):
            decoder.round(width)
            decoder.draft(width)
        decoder.leave([3, 1, 2])
        decoder.round(3)


def test_a_copied_cache_has_states_of_its_own() -> None:
    decoder = Decoder([5, 2])
    decoder.round(4)
    other = copy.deepcopy(decoder.cache)
    assert other.layers[1].cache is other
    decoder.round(6, [6, 6])
    theirs, ours = other.layers[1].states, decoder.cache.layers[1].states
    assert not torch.equal(theirs[0], ours[0])
