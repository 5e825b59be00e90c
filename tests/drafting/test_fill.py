"""One place fills drafts: a method that gives laws, and nothing else, drafts chains and trees, drawn or picked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tiny import Watch, ours, plain, prompts, tiny
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from hf_specgen import Call, Drafter, Round
from hf_specgen.drafting.fill import Level, LevelModel, LevelSession
from hf_specgen.drafting.lengths import DraftSettings, Habits
from hf_specgen.drafting.shapes import StaticShape

VOCAB = 64
STEP = 7
TREE = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
SHAPES: dict[str, Any] = {"chain": None, "static": TREE, "dynamic": {"top_k": 3, "depth": 3, "nodes": 6}}


@dataclass
class Counting(Drafter):
    """Draft the newest token plus 7, 14, ... as the best guesses; ``chances`` are what it knows beyond its law."""

    tree: Any = None
    chances: list[float] | None = None
    confidence: float | None = None
    broken: bool = False
    sample: bool = False
    levels: list[Level] = field(default_factory=list)

    @property
    def draws(self) -> bool:
        return self.sample

    def begin(self, call: Call) -> LevelSession:
        habits = Habits(
            title="Counting",
            usual=StaticShape.chain(4),
            longest=4,
            constant=4,
            level_cost=0.0,
            tree=self.tree,
            num_tokens=4 if self.tree is None else None,
            confidence=self.confidence,
            sample=self.sample,
        )
        return LevelSession(call, CountingLevels(self, call), DraftSettings(call, habits))


class CountingLevels(LevelModel):
    """Keep the tokens of the newest level; the law behind each falls with the distance."""

    def __init__(self, drafter: Counting, call: Call) -> None:
        self.drafter = drafter
        self.call = call
        self.depth = 0
        self.newest = torch.empty(0)

    def start(self, wanted: list[int], nodes: int) -> list[int]:
        live = [row for row, want in enumerate(wanted) if want]
        self.newest = torch.tensor([[self.call.sequences.tokens[row][-1]] for row in live])
        return live

    def laws(self, depth: int) -> Tensor:
        self.depth = depth
        distance = torch.arange(VOCAB) - self.newest.unsqueeze(-1) - STEP
        logits = -0.5 * (distance % VOCAB).float()
        return logits * float("nan") if self.drafter.broken else logits

    def advance(self, level: Level) -> None:
        self.drafter.levels.append(level)
        self.newest = level.tokens

    def survival(self) -> Tensor | None:
        if self.drafter.chances is None:
            return None
        return torch.full(self.newest.shape, self.drafter.chances[self.depth - 1])

    def observe(self, round: Round) -> None:
        self.newest = torch.empty(0)


def drafted(drafter: Counting, lengths: tuple[int, ...] = (9, 5), **settings: Any) -> tuple[Watch, Tensor]:
    """Write a text with a watched drafter."""
    model = tiny()
    ids, mask = prompts(list(lengths))
    watch = Watch(drafter)
    return watch, ours(model, watch, ids, mask, max_new_tokens=8, **settings)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_method_gives_laws_and_every_shape_is_filled(shape: str) -> None:
    watch, text = drafted(Counting(SHAPES[shape]))
    ids, mask = prompts([9, 5])
    assert torch.equal(text, plain(tiny(), ids, mask, max_new_tokens=8))
    draft = watch.rounds[1].draft
    parents = draft.tree.parents.expand(len(draft.tokens), -1).tolist()
    roots = watch.rounds[0].verdict.next.tolist()
    for row, root in enumerate(roots):
        tokens = draft.tokens[row].tolist()
        best = {}
        for node in range(int(draft.n_valid[row])):
            above = root if parents[row][node] < 0 else tokens[parents[row][node]]
            rank = best[parents[row][node]] = best.get(parents[row][node], -1) + 1
            assert tokens[node] == (above + STEP + rank) % VOCAB
    assert int(draft.n_valid.max()) == (4 if shape == "chain" else 6)


@pytest.mark.parametrize("shape", ["chain", "static"])
def test_drawn_tokens_carry_their_law(shape: str) -> None:
    watch, _ = drafted(Counting(SHAPES[shape], sample=True), do_sample=True, seed=3)
    draft = watch.rounds[1].draft
    assert draft.q is not None
    assert draft.q.logits.shape == (*draft.tokens.shape, VOCAB)
    assert draft.without_replacement == (shape == "static")


def test_coupled_tokens_carry_no_law_and_a_seed_still_writes_one_text() -> None:
    watch, text = drafted(Counting(sample=True), do_sample=True, seed=3, rule="gumbel")
    ids, mask = prompts([9, 5])
    assert watch.rounds[1].draft.q is None
    assert torch.equal(text, ours(tiny(), None, ids, mask, max_new_tokens=8, do_sample=True, seed=3, rule="gumbel"))


def test_what_a_method_knows_beyond_its_law_ends_a_chain() -> None:
    """The law's own best token has a probability of 0.39 at every depth."""
    knows, _ = drafted(Counting(chances=[0.9, 0.8, 0.1, 0.9], confidence=0.3))
    law, _ = drafted(Counting(confidence=0.3))
    unsure, _ = drafted(Counting(confidence=0.5))
    assert knows.rounds[1].proposed == [2, 2]
    assert law.rounds[1].proposed == [4, 4]
    assert unsure.rounds[1].proposed == [0, 0]


def test_only_nodes_with_children_run_below_those_that_ran() -> None:
    drafter = Counting(TREE)
    drafted(drafter, (9,))
    first, second = drafter.levels[:2]
    assert first.tokens.shape == (1, 2)
    assert first.parents is None or first.parents.tolist() == [0, 0]
    assert second.tokens.shape == (1, 1)
    assert second.parents is not None
    assert second.parents.tolist() == [0]
    assert second.tree.parents.tolist() == [[-1, -1, 0]]


def test_logits_that_are_no_numbers_mark_the_draft() -> None:
    watch, _ = drafted(Counting(broken=True))
    assert bool(watch.rounds[1].draft.broken)
    sound, _ = drafted(Counting())
    assert not bool(sound.rounds[1].draft.broken)


class TwoTokens(LogitsProcessor):
    """Allow two tokens alone, by code of the user's own."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.masked_fill(torch.arange(VOCAB) % 32 != 0, float("-inf"))


@pytest.mark.parametrize(("shape", "asks"), [("chain", True), ("static", True), ("dynamic", False)])
def test_processors_of_the_user_see_chains_and_drawn_trees_alone(shape: str, asks: bool) -> None:
    """A dynamic tree holds texts that no law would write, also where the drafter would share the target's noise."""
    asked = {"do_sample": True, "seed": 3, "rule": "gumbel", "logits_processor": LogitsProcessorList([TwoTokens()])}
    watch, text = drafted(Counting(SHAPES[shape], sample=True), **asked)
    ids, mask = prompts([9, 5])
    assert torch.equal(text, ours(tiny(), None, ids, mask, max_new_tokens=8, **asked))
    allowed = [token % 32 == 0 for token in watch.drafted if token >= 0]
    assert allowed
    assert all(allowed) == asks
