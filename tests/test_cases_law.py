"""User case C08: the law of the first tokens of whole runs, against enumeration with plain logits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from law import enumerate_law, p_value
from tiny import Handmade, RandomTree, Watch, disturbed, few, some, tiny

import hf_specgen.round.verify
from hf_specgen import DenseQ, Draft, Drafter, PromptLookup, SmallModel, SparseQ, SpeculativeDecoding, Tree
from hf_specgen.drafting.shapes import StaticShape
from hf_specgen.round.coins import Coins

ENOUGH = 1e-4
SETTINGS = {
    "plain": ({"top_k": 0}, 3_000),
    "temperature, top-k": ({"temperature": 0.7, "top_k": 3}, 2_000),
    "top-p, repetition": ({"top_p": 0.8, "repetition_penalty": 1.4, "top_k": 0}, 750),
    "min-p": ({"min_p": 0.3, "top_k": 0}, 2_000),
}


def model_of(vocab: int, seed: int = 0, layers: int = 2):
    """Build a model with a flat law, in float64: see test_sampling.py."""
    return tiny(seed, vocab=vocab, layers=layers, initializer_range=0.2).double()


@pytest.fixture(scope="module")
def eight():
    return model_of(8)


@pytest.fixture(scope="module")
def four():
    return model_of(4)


def prompt(vocab: int) -> torch.Tensor:
    return torch.randint(1, vocab, (1, 6), generator=torch.Generator().manual_seed(5))


def draw(
    model, drafter: Drafter | None, count: int, rule: str = "rejection", tokens: int = 3, **settings
) -> torch.Tensor:
    """Sample ``count`` texts in large batches, two tokens more than are compared; return the compared ones."""
    found = []
    rows = 250 if "repetition_penalty" in settings else 1000
    vocab = settings.pop("prompt_vocab", model.config.vocab_size)
    for seed, start in enumerate(range(0, count, rows)):
        ids = prompt(vocab).repeat(min(rows, count - start), 1)
        loop = SpeculativeDecoding(drafter, rule)
        result = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            custom_generate=loop,
            do_sample=True,
            max_new_tokens=tokens + 2,
            seed=seed,
            **settings,
        )
        found.append(result[:, 6 : 6 + tokens])
    return torch.cat(found)


@pytest.mark.parametrize("name", few(("plain", "top-p, repetition", *list(SETTINGS)[1::2]), "top-p, repetition"))
def test_deterministic_drafts(name: str, eight) -> None:
    settings, count = SETTINGS[name]
    law = enumerate_law(eight, prompt(8), do_sample=True, **settings)
    likely = [*prompt(8)[0].tolist(), *max(law, key=law.get)]
    lookup = Watch(PromptLookup(3, corpus=[likely * 2]))
    draws = draw(eight, lookup, count, **settings)
    assert lookup.longest >= 2
    assert p_value(draws, law, 8) > ENOUGH
    others = {
        "D+": SmallModel(disturbed(eight), 3),
        "D-": SmallModel(model_of(8, 9, 1), 3),
        "branches": PromptLookup(3, branches=2),
        "tree": RandomTree([likely] * 250, vocab=8),
    }
    for kind, drafter in others.items():
        assert torch.equal(draw(eight, drafter, 250, **settings), draws[:250]), kind
    assert p_value(draws[:, [1, 0, 2]], law, 8) < ENOUGH or len(law) < 9, "the test tells laws apart"


@pytest.mark.parametrize(("quality", "rule"), some(("D+", "D-"), ("rejection", "block", "gumbel")))
def test_sampled_drafts(quality: str, rule: str, four) -> None:
    count = 400 if rule == "gumbel" else 3_000
    law = enumerate_law(four, prompt(4), 4, do_sample=True, top_k=0)
    small = disturbed(four, 0.3) if quality == "D+" else model_of(4, 9, 1)
    watch = Watch(SmallModel(small, 3, sample=True))
    draws = draw(four, watch, count, rule, 4, top_k=0)
    assert watch.longest >= 2
    assert any(round.draft.q is not None for round in watch.rounds) == (rule != "gumbel")
    assert p_value(draws, law, 4) > ENOUGH


@pytest.mark.parametrize(("name", "rule"), some(("temperature, top-k", "top-p, repetition"), ("rejection", "block")))
def test_sampled_drafts_under_processors(name: str, rule: str, eight) -> None:
    settings, _ = SETTINGS[name]
    law = enumerate_law(eight, prompt(8), do_sample=True, **settings)
    watch = Watch(SmallModel(disturbed(eight, 0.3), 3, sample=True))
    draws = draw(eight, watch, 500, rule, **settings)
    assert watch.longest >= 2
    assert p_value(draws, law, 8) > ENOUGH


@pytest.mark.parametrize(("sizes", "sample"), some(((8, 10), (10, 8)), (True, False)))
def test_c15_padded_vocabularies_keep_the_law(sizes: tuple[int, int], sample: bool) -> None:
    ours, theirs = sizes
    model, small = model_of(ours), model_of(theirs)
    law = enumerate_law(model, prompt(8), do_sample=True, top_k=0)
    watch = Watch(SmallModel(small, 3, sample=sample))
    draws = draw(model, watch, 1_500, top_k=0, prompt_vocab=8)
    assert watch.longest >= 2
    assert max(watch.drafted) < 8
    assert p_value(draws, law, ours) > ENOUGH


class SampledTree(Handmade):
    """Draw two children of the root and two of the first child from one fixed law, i.i.d. or all different."""

    def __init__(self, law: list[float], different: bool, sparse: bool) -> None:
        self.law, self.different, self.sparse = torch.tensor(law), different, sparse

    def on_begin(self, sequences) -> None:
        self.generator = torch.Generator().manual_seed(sum(sequences.seeds.tolist()))

    def on_propose(self, sequences) -> Draft:
        rows, vocab = len(sequences), len(self.law)
        law = self.law.expand(2 * rows, -1)
        drawn = torch.multinomial(law, 2, not self.different, generator=self.generator).view(rows, 4)
        tree = Tree(torch.tensor([[-1, -1, 0, 0]]))
        room = torch.tensor(self.room)
        n_valid = torch.where(room > 1, 4, 2 * room.clamp(max=1))
        if self.sparse:
            kept = self.law.nonzero().flatten()
            q = SparseQ(kept.expand(rows, 4, -1), self.law[kept].expand(rows, 4, -1))
        else:
            q = DenseQ(self.law.log().expand(rows, 4, vocab))
        return Draft(drawn, tree, n_valid, q, self.different)


@pytest.mark.parametrize(("sparse", "different"), some((False, True), (False, True)))
def test_sampled_trees(sparse: bool, different: bool, four) -> None:
    law = enumerate_law(four, prompt(4), 4, do_sample=True, top_k=0)
    watch = Watch(SampledTree([0.7, 0.2, 0.1, 0.0], different, sparse))
    draws = draw(four, watch, 2_000, "rejection", 4, top_k=0)
    assert watch.longest == 2
    assert watch.off_spine > 100
    assert p_value(draws, law, 4) > ENOUGH


def residual_from_p(patch: pytest.MonkeyPatch) -> None:
    door = hf_specgen.round.verify.ops
    genuine = door.accept_or_draw

    def redraw(logits, ids, q, tokens, present, coins, different):
        accepted, choice, _, invalid = genuine(logits, ids, q, tokens, present, coins, different)
        return accepted, choice, door.draw(logits, coins[:, -1])[0], invalid

    patch.setattr(door, "accept_or_draw", redraw)
    patch.setattr(door, "residual_draw", lambda logits, ids, q, keep, take, coin: door.draw(logits, coin))


def coins_without_depth(patch: pytest.MonkeyPatch) -> None:
    genuine = Coins.uniform
    patch.setattr(Coins, "uniform", lambda self, rows, depth, use, sibling=0: genuine(self, rows, 0, use, sibling))


def noise_without_depth(patch: pytest.MonkeyPatch) -> None:
    genuine = Coins.gumbel
    patch.setattr(Coins, "gumbel", lambda self, rows, depth, vocab_size: genuine(self, rows, 0, vocab_size))


def greedy_with_a_law(patch: pytest.MonkeyPatch) -> None:
    """Hand over the softmax of tokens that were picked without chance."""

    def best(self, depth: int, scores: torch.Tensor, coins: object) -> torch.Tensor:
        return self.best(depth, scores)

    patch.setattr(StaticShape, "draw", best)


def siblings_with_replacement(patch: pytest.MonkeyPatch) -> None:
    genuine = SampledTree.on_propose
    patch.setattr(SampledTree, "on_propose", lambda self, rows: replace(genuine(self, rows), without_replacement=False))


BREAKS = {
    "rejection draws again from p": (residual_from_p, "small", "rejection"),
    "block draws again from p": (residual_from_p, "small", "block"),
    "one coin for every depth": (coins_without_depth, "greedy", "rejection"),
    "one noise for every depth": (noise_without_depth, "small", "gumbel"),
    "argmax drafts with a law": (greedy_with_a_law, "small", "rejection"),
    "argmax drafts with a law, block": (greedy_with_a_law, "small", "block"),
    "different siblings taken as i.i.d.": (siblings_with_replacement, "tree", "rejection"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_rule_bends_the_law(name: str, four, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls: each must be seen by the chi-square above."""
    spoil, kind, rule = BREAKS[name]
    small = model_of(4, 9, 1) if kind == "small" and rule != "gumbel" else disturbed(four, 0.3)
    drafter = SmallModel(four if kind == "greedy" else small, 3, sample=kind == "small")
    if kind == "tree":
        drafter = SampledTree([0.7, 0.2, 0.1, 0.0], True, False)
    law = enumerate_law(four, prompt(4), 3, do_sample=True, top_k=0)
    spoil(monkeypatch)
    count = 500 if rule == "gumbel" else 6_000 if kind == "tree" else 1_500
    draws = draw(four, drafter, count, rule, 3, top_k=0)
    assert p_value(draws, law, 4) < ENOUGH
