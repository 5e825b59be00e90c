"""The law of whole sampled runs with learned drafters, against enumeration with plain logits."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from fitted import untrained
from law import enumerate_law, p_value
from learned_law_cases import SETTINGS, SHAPES, draw, model_of, prompt
from tiny import Watch, few, some

from hf_specgen import DenseQ, Draft, SpecGenError, SpeculativeDecoding

ENOUGH = 1e-4
METHODS: dict[str, dict[str, object]] = {"medusa": {"num_heads": 3}, "eagle": {}, "eagle3": {}}
QUICK = [("medusa", "static"), ("eagle", "dynamic"), ("eagle3", "chain")]
PAIRS = [
    pytest.param(method, shape, marks=() if (method, shape) in QUICK else pytest.mark.slow)
    for method in METHODS
    for shape in SHAPES
]


@pytest.fixture(scope="module")
def eight():
    return model_of(8)


@pytest.fixture(scope="module")
def four():
    return model_of(4)


@pytest.mark.parametrize(
    ("name", "method", "shape"),
    [
        pytest.param(name, *pair, marks=() if pair == quick else pytest.mark.slow)
        for name, quick in zip(SETTINGS, QUICK, strict=True)
        for pair in product(METHODS, SHAPES)
    ],
)
def test_deterministic_drafts_change_no_text(name: str, method: str, shape: str, eight) -> None:
    """Sample-and-match: the text is a function of the seed alone, and follows the target's law without a drafter."""
    watch = Watch(untrained(method, eight, [1, 3, 4], reduced=method == "eagle3", **METHODS[method], **SHAPES[shape]))
    for rule in ("rejection", "gumbel"):
        expected = draw(eight, None, 40, rule, **SETTINGS[name])
        assert torch.equal(draw(eight, watch, 40, rule, **SETTINGS[name]), expected), rule
        assert watch.longest >= 1 + (method != "medusa")
        assert all(round.draft.q is None for round in watch.rounds)


def sampled(method: str, model, shape: str, **settings: object) -> Watch:
    return Watch(untrained(method, model, [1, 3, 4], sample=True, **METHODS[method], **SHAPES[shape], **settings))


@pytest.mark.parametrize(
    ("method", "shape", "rule"),
    [
        *[(method, "static", "rejection") for method in METHODS],
        ("medusa", "chain", "block"),
        ("eagle3", "chain", "block"),
        pytest.param("eagle", "chain", "rejection", marks=pytest.mark.slow),
        pytest.param("medusa", "chain", "rejection", marks=pytest.mark.slow),
        pytest.param("eagle", "chain", "block", marks=pytest.mark.slow),
        pytest.param("eagle3", "chain", "rejection", marks=pytest.mark.slow),
    ],
)
def test_sampled_drafts(method: str, shape: str, rule: str, four) -> None:
    law = enumerate_law(four, prompt(4), 4, do_sample=True, top_k=0)
    watch = sampled(method, four, shape)
    draws = draw(four, watch, 1_000, rule, top_k=0)
    assert watch.longest >= 2
    assert all(round.draft.q is not None for round in watch.rounds[1:] if round.draft.width)
    assert (watch.off_spine > 100) == (shape == "static")
    assert p_value(draws, law, 4) > ENOUGH
    assert p_value(draws[:, [1, 0, 2, 3]], law, 4) < ENOUGH, "the test tells laws apart"


@pytest.mark.parametrize(
    ("drafter", "name"),
    few(
        product(
            (("medusa", "chain"), ("medusa", "static"), ("eagle", "static"), ("eagle3", "static")),
            ("temperature, top-k", "top-p, repetition"),
        ),
        (("medusa", "static"), "temperature, top-k"),
        (("eagle3", "static"), "top-p, repetition"),
    ),
)
def test_sampled_drafts_under_processors(name: str, drafter: tuple[str, str], eight) -> None:
    method, shape = drafter
    settings, count = SETTINGS[name], 200 if name == "top-p, repetition" else 800
    law = enumerate_law(eight, prompt(8), 3, do_sample=True, **settings)
    watch = sampled(method, eight, shape, reduced=method == "eagle3")
    draws = draw(eight, watch, count, tokens=3, **settings)
    assert watch.longest >= 2
    assert p_value(draws, law, 8) > ENOUGH


@pytest.mark.parametrize(("method", "shape"), some(METHODS, ("chain", "static")))
def test_coupled_drafts_change_no_text(method: str, shape: str, eight) -> None:
    """rule='gumbel': sampled drafts share the target's noise, the text is that of the seed."""
    expected = draw(eight, None, 40, "gumbel", top_k=0)
    watch = sampled(method, eight, shape, reduced=method == "eagle3")
    assert torch.equal(draw(eight, watch, 40, "gumbel", top_k=0), expected)
    assert watch.longest >= 2
    assert all(round.draft.q is None for round in watch.rounds)
    plain = Watch(untrained(method, eight, [1, 3, 4], reduced=method == "eagle3", **METHODS[method], **SHAPES[shape]))
    draw(eight, plain, 40, "gumbel", top_k=0)
    assert accepted(watch) > accepted(plain), "shared noise agrees more often than the best token"


def accepted(watch: Watch) -> float:
    paths = [len(path) for round in watch.rounds[1:] for path in round.paths]
    return sum(paths) / len(paths)


@pytest.mark.parametrize("method", METHODS)
def test_drawn_dynamic_trees_are_refused(method: str, four) -> None:
    with pytest.raises(SpecGenError, match="dynamic tree"):
        draw(four, sampled(method, four, "dynamic"), 2, top_k=0)


class Misreported(Watch):
    """Hand over another law than the drafted tokens were drawn from."""

    def on_propose(self, sequences) -> Draft:
        draft = super().on_propose(sequences)
        return draft if draft.q is None else self.change(draft)

    def change(self, draft: Draft) -> Draft:
        return replace(draft, q=DenseQ(torch.zeros_like(draft.q.logits)))


class Replaced(Misreported):
    """Say that siblings were drawn with replacement."""

    def change(self, draft: Draft) -> Draft:
        return replace(draft, without_replacement=False)


# the seed: a random drafter whose siblings weigh enough for the fault to show in 2,000 texts
@pytest.mark.parametrize(
    ("fault", "method", "seed"), [(Misreported, "eagle", 0), (Replaced, "eagle3", 2), (Replaced, "medusa", 0)]
)
def test_a_wrong_law_is_noticed(fault: type[Misreported], method: str, seed: int, four) -> None:
    law = enumerate_law(four, prompt(4), 3, do_sample=True, top_k=0)
    watch = fault(sampled(method, four, "static", seed=seed).inner)
    draws = draw(four, watch, 2_000, tokens=3, top_k=0)
    assert watch.longest >= 2
    assert p_value(draws, law, 4) < ENOUGH


@pytest.mark.parametrize(("method", "shape"), PAIRS)
def test_a_row_writes_what_it_writes_alone(method: str, shape: str, eight) -> None:
    ids = torch.randint(1, 8, (3, 5), generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[1] * 5, [0, 0, 1, 1, 1], [0, 1, 1, 1, 1]])
    ids = ids * mask
    for sample in (False, True):
        if sample and shape == "dynamic":
            continue
        drafter = untrained(method, eight, [1, 3, 4], sample=sample, **METHODS[method], **SHAPES[shape])
        asked = {"do_sample": True, "top_k": 0, "max_new_tokens": 12}
        loop = SpeculativeDecoding(drafter)
        both = eight.generate(ids, attention_mask=mask, custom_generate=loop, seed=[4, 5, 6], **asked)
        for row, seed in enumerate((4, 5, 6)):
            real = mask[row].bool()
            one = eight.generate(ids[row : row + 1, real], custom_generate=loop, seed=[seed], **asked)
            assert both[row, 5:].tolist() == one[0, int(real.sum()) :].tolist(), (sample, row)


def allowed(row: int, text: torch.Tensor) -> list[int]:
    """Allow what no drafter below knows at every second place; stand for a grammar that knows its own texts only."""
    new = text.tolist()[6:]
    assert all(token in ([5, 4] if place % 2 else [3, 6]) for place, token in enumerate(new)), f"no such text: {new}"
    return [5, 4] if len(new) % 2 else [3, 6]


@pytest.mark.parametrize(("method", "shape"), some(METHODS, ("chain", "static")))
def test_no_processor_is_asked_about_impossible_drafts(method: str, shape: str, eight) -> None:
    """Where fewer tokens are possible than a tree has ranks, or none, what is left over is no token."""
    watch = sampled(method, eight, shape, reduced=method == "eagle3")
    for rule in ("gumbel", "rejection"):
        texts = draw(eight, watch, 8, rule, tokens=7, top_k=0, prefix_allowed_tokens_fn=allowed)
        assert all(allowed(0, torch.tensor([0] * 6 + text)) for text in texts.tolist())
        assert watch.width and watch.longest
        if rule == "gumbel":
            expected = draw(eight, None, 8, rule, tokens=7, top_k=0, prefix_allowed_tokens_fn=allowed)
            assert torch.equal(texts, expected)
