"""Reported: five Medusa heads asked for seven tokens draft five without a word; trees of every kind do the same."""

from __future__ import annotations

import warnings

import pytest
import torch
from fitted import fitted
from tiny import Watch, plain, prompts, texts_of, tiny

from hf_specgen import SpeculativeDecoding, WithLookup

SPINE = [[0], [1], [0, 0]]
DYNAMIC = {"top_k": 2, "depth": 3, "nodes": 6}
CASES = {
    "medusa": ("medusa", {"num_heads": 5, "num_head_layers": 1}, 5, "5 heads"),
    "medusa, one head": ("medusa", {"num_heads": 1, "num_head_layers": 1}, 1, "1 head:"),
    "medusa, tree": ("medusa", {"num_heads": 5, "num_head_layers": 1, "tree": SPINE}, 2, "no deeper"),
    "eagle, tree": ("eagle", {"tree": SPINE}, 2, "no deeper"),
    "eagle3, dynamic": ("eagle3", {"tree": DYNAMIC}, 3, "no deeper"),
}


@pytest.fixture(scope="module")
def case():
    model = tiny()
    ids, mask = prompts([9, 4])
    return model, ids, mask, plain(model, ids, mask, max_new_tokens=9)


def told(case, drafter, asked: dict[str, int]) -> tuple[list[str], str]:
    """Return the warnings of a call whose text must be plain, and the file they point at."""
    model, ids, mask, expected = case
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = plain(model, ids, mask, custom_generate=SpeculativeDecoding(drafter), max_new_tokens=9, **asked)
    assert torch.equal(found, expected)
    mine = [warning for warning in seen if "were asked for" in str(warning.message)]
    return [str(warning.message) for warning in mine], mine[0].filename if mine else ""


@pytest.mark.parametrize("name", CASES)
def test_a_number_beyond_a_drafters_depth_is_told_once(name: str, case) -> None:
    method, settings, most, reason = CASES[name]
    texts = texts_of(case[3], case[2])
    watch = Watch(fitted(method, case[0], texts, **settings))
    (message,), _ = told(case, watch, {"num_assistant_tokens": 7})
    assert type(watch.inner).__name__ in message
    assert message.startswith("7 tokens a draft") and f"at most {most}" in message and reason in message
    assert max(depth for round in watch.rounds for depth in round.reached) <= most
    assert told(case, watch, {"num_assistant_tokens": most}) == ([], "")
    assert told(case, watch, {}) == ([], "")
    (message,), _ = told(case, WithLookup(fitted(method, case[0], texts, **settings, num_tokens=8)), {})
    assert message.startswith("8 tokens a draft"), "what the config asks for counts as well"


def test_the_warning_points_at_the_call() -> None:
    model = tiny()
    ids, mask = prompts([9])
    drafter = fitted("medusa", model, [ids[0].tolist()], num_heads=2, num_head_layers=1)
    asked = {"custom_generate": SpeculativeDecoding(drafter), "num_assistant_tokens": 7, "max_new_tokens": 3}
    with pytest.warns(UserWarning, match="7 tokens a draft") as seen:
        model.generate(ids, attention_mask=mask, do_sample=False, **asked)
    assert seen[0].filename == __file__


def test_an_eagle_chain_is_as_long_as_asked(case) -> None:
    drafter = fitted("eagle", case[0], texts_of(case[3], case[2]), wrong=0, tree="chain")
    watch = Watch(drafter)
    assert told(case, watch, {"num_assistant_tokens": 7}) == ([], "")
    assert max(depth for round in watch.rounds for depth in round.reached) == 7
