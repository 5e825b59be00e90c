"""The fused path inside ``generate()``: the Triton kernels judge every round, and the text is the same."""

from __future__ import annotations

import pytest
import torch
from tiny import RandomTree, Watch, disturbed, ours, plain, prompts, texts_of, tiny

from hf_specgen import PromptLookup, SmallModel, SpecGenError, SpeculativeDecoding, ops

pytest.importorskip("triton")

LENGTHS = [5, 11]
TOKENS = 6
LAWS = {
    "greedy": {},
    "temperature": {"do_sample": True, "seed": 3, "temperature": 0.7, "top_k": 0},
    "truncated": {"do_sample": True, "seed": 4, "temperature": 1.3, "top_k": 20, "min_p": 0.02},
    "nucleus": {"do_sample": True, "seed": 4, "temperature": 1.3, "top_k": 0, "top_p": 0.9},
    "history": {"do_sample": True, "seed": 5, "repetition_penalty": 1.3, "top_k": 30},
}


SAMPLED = ["temperature", "truncated", "nucleus", "history"]


def some(first, second, fast: set[tuple[str, str]]) -> list:
    """Pair everything with everything; what is not ``fast`` in the interpreter is for the slow run."""
    pairs = [(one, other) for one in first for other in second]
    return [pair if pair in fast else pytest.param(*pair, marks=pytest.mark.slow) for pair in pairs]


@pytest.fixture(scope="module")
def target():
    return tiny()


def drafter(kind: str, model, texts):
    return {
        "lookup": PromptLookup(3, corpus=texts),
        "tree": RandomTree(texts, nodes=5),
        "small": SmallModel(disturbed(model), 3),
        "sampled": SmallModel(disturbed(model, 0.3), 3, sample=True),
    }[kind]


def both(kind: str, model, texts, law: dict, rule: str = "rejection"):
    """Return the text of the reference and of the Triton kernels, and what ran in the second."""
    ids, mask = prompts(LENGTHS)
    loop = {"custom_generate": SpeculativeDecoding(drafter(kind, model, texts), rule), "max_new_tokens": TOKENS}
    expected = plain(model, ids, mask, **loop, **law)
    watch = Watch(drafter(kind, model, texts))
    loop["custom_generate"] = SpeculativeDecoding(watch, rule)
    with ops.use_kernels("triton"), ops.record() as calls:
        found = plain(model, ids, mask, **loop, **law)
    return expected, found, calls, watch


@pytest.mark.parametrize(
    ("kind", "law"), some(("lookup", "tree", "small"), LAWS, {("lookup", "greedy"), ("tree", "temperature")})
)
def test_drafts_without_chance(kind: str, law: str, target) -> None:
    ids, mask = prompts(LENGTHS)
    texts = texts_of(ours(target, None, ids, mask, max_new_tokens=TOKENS, **LAWS[law]), mask)
    expected, found, calls, watch = both(kind, target, texts, LAWS[law])
    assert torch.equal(found, expected)
    rounds = len(watch.rounds)
    assert calls["match_tree", "triton"] == calls["row_stats", "triton"] == calls["row_draw", "triton"] == rounds
    assert (not calls["draw", "reference"] and not calls["argmax", "reference"]) or kind == "small"
    assert watch.longest >= 1


@pytest.mark.parametrize(
    ("rule", "law"),
    some(("rejection", "block", "gumbel"), SAMPLED, {("rejection", "temperature")}),
)
def test_sampled_drafts(rule: str, law: str, target) -> None:
    """Every coin and every comparison is the same, so the text is, away from boundaries of the law."""
    expected, found, calls, watch = both("sampled", target, [], LAWS[law], rule)
    assert torch.equal(found, expected)
    walk = {"rejection": "reject_tree", "block": "block_chain", "gumbel": "match_tree"}[rule]
    drafted = sum(round.draft.width > 0 for round in watch.rounds)
    assert calls[walk, "triton"] >= drafted > 0
    assert not calls["accept_or_draw", "reference"] and not calls["block_step", "reference"]
    assert watch.longest >= 1


@pytest.mark.slow
def test_another_seed_gives_another_text(target) -> None:
    """Negative control: the comparisons above can fail."""
    law = LAWS["temperature"]
    _, found, _, _ = both("sampled", target, [], law)
    _, other, _, _ = both("sampled", target, [], {**law, "seed": 99})
    assert not torch.equal(found, other)


def test_reference_is_the_default_on_cpu_and_blocks_nest(target) -> None:
    ids, mask = prompts(LENGTHS)
    with ops.record() as calls:
        ours(target, PromptLookup(3), ids, mask, max_new_tokens=4)
    assert calls and {backend for _, backend in calls} == {"reference"}
    with ops.use_kernels("triton"):
        assert ops.fuses(ids.device)
        with pytest.raises(KeyError), ops.use_kernels("reference"):
            assert not ops.fuses(ids.device)
            raise KeyError
        assert ops.fuses(ids.device)
    assert not ops.fuses(ids.device)


def test_broken_logits_are_named(target) -> None:
    """NaN reaches the user as one error before anything is emitted, on the fused path too."""
    broken = disturbed(target)
    with torch.no_grad():
        broken.lm_head.weight[3] = float("nan")
    ids, mask = prompts(LENGTHS)
    for law in (LAWS["greedy"], LAWS["temperature"]):
        with ops.use_kernels("triton"), pytest.raises(SpecGenError, match="NaN"):
            ours(broken, PromptLookup(3), ids, mask, max_new_tokens=4, **law)
