"""A drafter's cache holds, after every round, what a fresh reading of the target's true features gives."""

from __future__ import annotations

from itertools import cycle

import pytest
import torch
from feature_cases import RAGGED, SHAPES, VARIANTS, drafter_of
from pair_cache_checks import CheckCache
from tiny import build, few, ours, plain, prompts, some, texts_of, tiny

from hf_specgen import Costs
from hf_specgen.drafting.pair_cache import PairCache


def run(name: str, shape: str, lengths: list[int], budget: int = 24, family: str = "llama", **more) -> CheckCache:
    """Write a text with steered drafts and return what was watched; the text is plain decoding's."""
    model = build(family)
    ids, mask = prompts(lengths)
    expected = plain(model, ids, mask, max_new_tokens=budget)
    method, settings = VARIANTS[name]
    watch = CheckCache(model, drafter_of(method, **settings, **SHAPES[shape]), texts_of(expected, mask), **more)
    result = ours(model, watch, ids, mask, max_new_tokens=budget)
    assert torch.equal(result, expected)
    assert watch.checked > 0 and watch.longest >= 2
    assert any(not round.draft.tree.is_chain for round in watch.rounds) == (shape != "chain")
    return watch


def check(name: str, shape: str, lengths: list[int]) -> None:
    watch = run(name, shape, lengths)
    assert shape == "chain" or watch.off_spine > 0
    if "window" not in name or max(lengths) > 3:  # short texts may go round a ring or not
        assert watch.wrapped == ("window" in name), "rings went round"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lengths", [[12], RAGGED])
def test_committed_pairs_are_the_targets_own(shape: str, lengths: list[int]) -> None:
    check("eagle", shape, lengths)


TURNS = list(zip(VARIANTS, cycle(SHAPES), strict=False))


@pytest.mark.parametrize(("name", "shape"), few(TURNS, *TURNS[1::2]))
def test_every_variant(name: str, shape: str) -> None:
    check(name, shape, RAGGED)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_in_every_shape(name: str, shape: str) -> None:
    for lengths in ([12], [1, 2, 3], RAGGED):
        check(name, shape, lengths)


@pytest.mark.parametrize("family", few(("qwen3", "mistral", "gemma3_text"), "gemma3_text"))
def test_other_targets(family: str) -> None:
    run("eagle3", "static" if family == "qwen3" else "dynamic", RAGGED, family=family)


@pytest.mark.parametrize(("name", "chunk"), some(("eagle", "eagle3, window, two layers"), (1, 3, 7)))
def test_long_prompts_are_read_in_chunks(name: str, chunk: int, monkeypatch) -> None:
    monkeypatch.setattr("hf_specgen.drafting.pair_cache._CHUNK", chunk)
    run(name, "chain" if chunk == 1 else "dynamic", [3, 29, 12, 1])


@pytest.mark.parametrize("name", few(("eagle", "eagle3, window, two layers"), "eagle3, window, two layers"))
def test_rests_and_what_waits_meanwhile(name: str, monkeypatch) -> None:
    model = tiny()
    ids, mask = prompts(RAGGED)
    expected = plain(model, ids, mask, max_new_tokens=70)
    for most in (256, 5):  # with room for five columns the pairs are read while it rests
        monkeypatch.setattr("hf_specgen.drafting.features._MOST_PENDING", most)
        drafter = drafter_of(*VARIANTS[name][:1], **VARIANTS[name][1], tree="chain")
        drafter.costs = Costs(slope=0.2, draft=0.2)
        watch = CheckCache(model, drafter, texts_of(expected, mask), hit=0.1)
        assert torch.equal(ours(model, watch, ids, mask, max_new_tokens=70), expected)
        proposed = [max(round.proposed) for round in watch.rounds[1:]]
        assert watch.rests > 10 and max(proposed[10:]) > 0 and watch.checked > 0
        first = proposed.index(0)
        assert any(proposed[first:]), "it drafts again after a rest"


@pytest.mark.parametrize("fault", ["features", "length"])
def test_a_wrong_cache_is_noticed(fault: str, monkeypatch) -> None:
    take, settle = PairCache.add, PairCache.settle

    def add(self: PairCache, hidden: tuple[torch.Tensor, ...], *columns: list[int]) -> None:
        take(self, tuple(layer * 1.01 for layer in hidden), *columns)

    if fault == "features":  # they are not the target's
        monkeypatch.setattr(PairCache, "add", add)
    else:  # a drafted pair stays
        monkeypatch.setattr(PairCache, "settle", lambda self: (settle(self), settle(self)))
    with pytest.raises(AssertionError):
        run("eagle", "chain", [12])
