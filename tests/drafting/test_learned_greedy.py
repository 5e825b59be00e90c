"""Greedy texts of learned drafters are plain decoding's, token by token: {drafter} x {shape} x {batch} x {family}."""

from __future__ import annotations

import copy
import pickle
from itertools import product

import pytest
import torch
from fitted import fitted
from tiny import FAMILIES, Watch, build, few, ours, plain, prompts, texts_of, tiny

from hf_specgen import last_stats
from hf_specgen.drafting.learned import LearnedDrafter

SHAPES: dict[str, dict[str, object]] = {
    "chain": {"tree": "chain", "num_tokens": 4},
    "static": {"tree": [[0], [1], [2], [0, 0], [0, 1], [1, 0], [1, 1], [0, 0, 0], [0, 1, 0], [1, 0, 0], [0, 0, 0, 0]]},
    "dynamic": {"tree": {"top_k": 2, "depth": 4, "nodes": 5}},
}
METHODS: dict[str, dict[str, object]] = {
    "medusa": {"num_heads": 4},
    "eagle": {},
    "eagle3": {"reduced": True},
}
TARGETS = ("llama", "qwen3", "gemma3_text", "mistral", "gpt_oss")
BATCHES = {"one": [7], "four": [5, 9, 1, 7]}
# every target, method and shape
QUICK = [
    ("llama", "eagle", "dynamic"),
    ("llama", "eagle3", "static"),
    ("qwen3", "medusa", "dynamic"),
    ("mistral", "medusa", "chain"),
    ("gemma3_text", "eagle3", "dynamic"),
    ("gpt_oss", "eagle", "static"),
]

# every method and every shape at least once
SOME = [("medusa", "static"), ("eagle", "chain"), ("eagle3", "dynamic")]
OTHERS = [(method, shape) for method in METHODS for shape in SHAPES if (method, shape) not in SOME]
PAIRS = [*SOME, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in OTHERS)]


class Models:
    """Build each family once."""

    def __init__(self) -> None:
        self.known: dict[str, object] = {}

    def __call__(self, family: str):
        if family not in self.known:
            self.known[family] = build(family, FAMILIES[family][2][0])
        return self.known[family]


@pytest.fixture(scope="module")
def models() -> Models:
    return Models()


def learned(method: str, shape: str, model, texts: list[list[int]], **settings: object) -> LearnedDrafter:
    return fitted(method, model, texts, **{**METHODS[method], **SHAPES[shape], **settings})


@pytest.mark.parametrize(("family", "method", "shape"), few(product(TARGETS, METHODS, SHAPES), *QUICK))
def test_greedy_is_plain_greedy(family: str, method: str, shape: str, models) -> None:
    model = models(family)
    for lengths in BATCHES.values():
        ids, mask = prompts(lengths)
        expected = plain(model, ids, mask)
        watch = Watch(learned(method, shape, model, texts_of(expected, mask)))
        assert torch.equal(ours(model, watch, ids, mask), expected), lengths
        assert watch.longest >= 2
        fails = any(len(path) < max(round.reached) for round in watch.rounds[1:] for path in round.paths)
        assert fails or shape == "dynamic"
        assert all(round.draft.tree.is_chain for round in watch.rounds[1:]) == (shape == "chain")
        assert (watch.off_spine > 0) == (shape != "chain")
        assert last_stats(model).lossless


@pytest.mark.parametrize(("method", "shape"), PAIRS)
def test_rows_that_end_early_leave(method: str, shape: str, models) -> None:
    model = models("llama")
    ids, mask = prompts([5, 9, 1, 7])
    free = plain(model, ids, mask)
    ends = {"eos_token_id": [int(free[0, 15]), int(free[2, 20])], "pad_token_id": 0}
    watch = Watch(learned(method, shape, model, texts_of(free, mask)))
    assert torch.equal(ours(model, watch, ids, mask, **ends), plain(model, ids, mask, **ends))
    assert watch.longest >= 2


@pytest.mark.parametrize(("method", "shape"), few(product(METHODS, SHAPES), ("eagle3", "dynamic")))
def test_a_used_drafter_knows_nothing_of_the_call(method: str, shape: str, models) -> None:
    model = models("llama")
    ids, mask = prompts([5, 9])
    expected = plain(model, ids, mask)
    drafter = learned(method, shape, model, texts_of(expected, mask))
    state = {name: value.clone() for name, value in drafter.state_dict().items()}
    alone = plain(model, ids[1:], mask[1:])
    for candidate in (drafter, copy.deepcopy(drafter), pickle.loads(pickle.dumps(drafter))):
        watch = Watch(candidate)
        assert torch.equal(ours(model, watch, ids[1:], mask[1:]), alone)
        assert torch.equal(ours(model, watch, ids, mask), expected)
        assert watch.longest >= 2
    assert all(torch.equal(value, state[name]) for name, value in drafter.state_dict().items())
    assert not any(parameter is model.get_input_embeddings().weight for parameter in drafter.parameters())


@pytest.mark.parametrize("method", few(METHODS, "eagle3"))
def test_one_drafter_serves_targets_in_turn(method: str) -> None:
    first, second = tiny(0), tiny(1)
    ids, mask = prompts([5, 9])
    drafter = learned(method, "static", first, texts_of(plain(first, ids, mask), mask))
    for model in (first, second, first):
        watch = Watch(drafter)
        assert torch.equal(ours(model, watch, ids, mask), plain(model, ids, mask))
        assert (watch.longest >= 2) == (model is first) or model is second


@pytest.mark.parametrize(("method", "shape"), PAIRS)
def test_a_chunked_prompt_drafts_as_a_whole_one(method: str, shape: str, models) -> None:
    model = models("llama")
    ids, mask = prompts([23, 6, 11])
    expected = plain(model, ids, mask)
    drafter = learned(method, shape, model, texts_of(expected, mask))
    whole, chunked = Watch(drafter), Watch(drafter)
    ours(model, whole, ids, mask)
    assert torch.equal(ours(model, chunked, ids, mask, prefill_chunk_size=5), expected)
    assert [round.paths for round in chunked.rounds] == [round.paths for round in whole.rounds]
    assert whole.longest >= 2


@pytest.mark.parametrize("method", few(METHODS, "medusa", "eagle3"))
def test_default_shape_and_lengths(method: str, models) -> None:
    model = models("llama")
    ids, mask = prompts([5, 9, 1, 7])
    expected = plain(model, ids, mask)
    watch = Watch(learned(method, "chain", model, texts_of(expected, mask), tree=None, num_tokens=None, wrong=0))
    assert torch.equal(ours(model, watch, ids, mask), expected)
    assert all(round.draft.tree.is_chain for round in watch.rounds[1:])
    for asked in (1, 3):
        watch = Watch(learned(method, "chain", model, texts_of(expected, mask), wrong=0))
        assert torch.equal(ours(model, watch, ids, mask, num_assistant_tokens=asked), expected)
        assert watch.width == asked


@pytest.mark.parametrize(
    ("method", "shape"), few(product(METHODS, SHAPES), ("medusa", "static"), ("eagle3", "dynamic"))
)
def test_half_precision_targets_and_drafters(method: str, shape: str) -> None:
    model = tiny(vocab=32).to(torch.bfloat16)
    ids, mask = prompts([5, 9, 1], vocab=32)
    texts = texts_of(plain(model, ids, mask), mask)
    for dtype in (torch.bfloat16, torch.float32):
        watch = Watch(learned(method, shape, model, texts).to(dtype))
        found = ours(model, watch, ids, mask)
        assert found.shape == (3, 41)
        assert watch.longest >= 2
