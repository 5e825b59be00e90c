"""Calls of one drafter may overlap, and what it borrows from a target is that target's own, now."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import transformers
from fitted import fitted, untrained
from tiny import COMMON, FAMILIES, Keep, Watch, build, disturbed, few, ours, plain, prompts, some, texts_of, tiny
from torch import nn

from hf_specgen import (
    PromptLookup,
    SmallModel,
    SpecGenError,
    SpeculativeDecoding,
    WithLookup,
    load_drafter,
    stock_candidates,
)
from hf_specgen.drafting.learned import TargetParts
from hf_specgen.drafting.sequoia import Measured
from hf_specgen.models.taps import FINAL, Taps

CHAIN = {"tree": "chain", "num_tokens": 3}
TREE = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
DYNAMIC = {"top_k": 2, "depth": 3, "nodes": 5}
METHODS: dict[str, dict[str, object]] = {"medusa": {"num_heads": 3}, "eagle": {}, "eagle3": {}}
KINDS = (*METHODS, "lookup", "small", "measured", "both")


def drafter_of(kind: str, model, texts: list[list[int]], tree: object = None):
    if kind in METHODS:
        return fitted(kind, model, texts, **METHODS[kind], tree=tree or DYNAMIC)
    if kind == "both":
        return WithLookup(drafter_of("eagle3", model, texts), PromptLookup(corpus=[text[-8:] for text in texts]))
    if kind == "measured":
        return Measured(fitted("eagle", model, texts, tree=[[0], [1], [0, 0]]), ((0,), (1,), (0, 0)))
    return PromptLookup(4, corpus=texts) if kind == "lookup" else SmallModel(disturbed(model), 4)


@pytest.mark.parametrize("kind", few(KINDS, "both", "small", "eagle3"))
def test_a_call_inside_another(kind: str) -> None:
    """A callback that generates with the same drafter disturbs nothing."""
    model, (ids, mask) = tiny(), prompts([5, 9, 7])
    expected = plain(model, ids, mask)
    drafter = drafter_of(kind, model, texts_of(expected, mask))
    inner = []

    def once(row: int, tokens: list[int]) -> None:
        if not inner:
            inner.append(None)
            inner[0] = ours(model, drafter, ids[:2, 4:], mask[:2, 4:], max_new_tokens=9)

    outer = ours(model, drafter, ids, mask, on_tokens=once)
    assert torch.equal(outer, expected)
    assert torch.equal(inner[0], plain(model, ids[:2, 4:], mask[:2, 4:], max_new_tokens=9))
    assert outer.speculation.total.num_accepted_tokens > 0


@pytest.mark.parametrize("kind", few(KINDS, "both", "small", "eagle3"))
def test_threads_share_a_drafter(kind: str) -> None:
    """Two targets and batches of other sizes take turns in the middle of each other's rounds."""
    models, (ids, mask) = (tiny(), tiny(1)), prompts([5, 9, 7])
    expected = plain(models[0], ids, mask)
    drafter = drafter_of(kind, models[0], texts_of(expected, mask))
    turn = threading.Barrier(2, timeout=60)
    wrong: list[object] = []

    def write(model, rows: slice) -> None:
        calls = iter(range(6))

        def meet(row: int, tokens: list[int]) -> None:
            if next(calls, None) is not None:
                turn.wait()

        try:
            text = ours(model, drafter, ids[rows], mask[rows], on_tokens=meet)
            wrong.extend([rows] * (not torch.equal(text, plain(model, ids[rows], mask[rows]))))
        except Exception as error:
            wrong.append(error)
            turn.abort()

    threads = [
        threading.Thread(target=write, args=args) for args in ((models[0], slice(0, 2)), (models[1], slice(2, 3)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("method", METHODS)
def test_a_call_leaves_the_drafter_as_it_was(method: str) -> None:
    model, (ids, mask) = tiny(), prompts([5, 9])
    drafter = drafter_of(method, model, [[1, 2, 3, 4]], CHAIN["tree"])
    ours(model, drafter, ids, mask)
    before = dict(vars(drafter))
    ours(model, drafter, ids, mask)
    assert all(vars(drafter)[name] is value for name, value in before.items())
    assert drafter._borrowed, "the target's fingerprint is not taken anew in every call"


@pytest.mark.parametrize("method", few(METHODS, "eagle3"))
def test_another_head_is_borrowed(method: str) -> None:
    """The embedding stays where it is, the head is replaced: what was borrowed before is not used."""
    model, (ids, mask) = tiny(), prompts([5, 9])
    drafter = drafter_of(method, model, [[1, 2, 3, 4]])
    ours(model, drafter, ids, mask)
    kept = drafter.parts_of(model)
    ours(model, drafter, ids, mask)
    assert drafter.parts_of(model) is kept
    model.set_output_embeddings(nn.Linear(32, 64, bias=False))
    assert torch.equal(ours(model, drafter, ids, mask), plain(model, ids, mask))
    assert drafter.parts_of(model).head is model.lm_head


def test_parts_of_a_model_that_moved_or_shares_an_embedding() -> None:
    model = tiny()
    parts = TargetParts.of(model)
    assert parts.belong_to(model)
    deeper = tiny(layers=3)
    deeper.model.embed_tokens, deeper.lm_head = model.model.embed_tokens, model.lm_head
    assert not parts.belong_to(deeper), "its default layers are others"
    assert not TargetParts(parts.facts, parts.embedding, parts.head, torch.device("meta"), parts.dtype).belong_to(model)
    assert not parts.belong_to(model.double())


@pytest.mark.parametrize("method", METHODS)
def test_what_the_rule_cannot_judge_is_refused_before_anything_is_written(method: str) -> None:
    model, ids = tiny(), prompts([6])[0]
    drafter = untrained(method, model, [1, 2], **METHODS[method], tree=TREE, sample=True)
    streamer = Keep()
    loop = SpeculativeDecoding(drafter, "block", streamer=streamer)
    with pytest.raises(SpecGenError, match="judges chains only"):
        model.generate(ids, custom_generate=loop, do_sample=True, max_new_tokens=6)
    assert streamer.puts == 0
    assert torch.equal(ours(model, drafter, ids), plain(model, ids)), "greedy texts have no such limit"


@pytest.mark.parametrize("method", METHODS)
def test_shared_noise_is_not_taken_for_confidence(method: str) -> None:
    model, ids = tiny(vocab=8, initializer_range=0.02), torch.tensor([[1, 2, 3]])
    drafter = untrained(method, model, [1, 3, 4], **METHODS[method], **CHAIN, sample=True)
    with torch.no_grad():  # all laws are flat
        for parameter in (*drafter.parameters(), *([model.lm_head.weight] if method == "eagle" else ())):
            parameter.mul_(1e-3)
    for rule in ("gumbel", "rejection"):
        watch = Watch(drafter)
        loop = SpeculativeDecoding(watch, rule)
        asked = {"do_sample": True, "max_new_tokens": 20, "top_k": 0, "seed": 0}
        model.generate(ids, custom_generate=loop, assistant_confidence_threshold=0.5, **asked)
        assert watch.width == 0, rule
        model.generate(ids, custom_generate=loop, **asked)
        assert watch.width == 3, rule


BEHIND = {
    "gemma2": {"final_logit_softcapping": 2.0},
    "gemma3_text": {"final_logit_softcapping": 2.0},
    "cohere2": {"logit_scale": 0.1},
}


@pytest.mark.parametrize("family", BEHIND)
def test_what_a_target_does_behind_its_head_is_borrowed_with_it(family: str) -> None:
    """A cap or a factor leaves the best token the best, but not how sure it is: draws and dynamic trees need both."""
    model = build(family, FAMILIES[family][2][0], **BEHIND[family])
    ids, _ = prompts([9])
    parts, taps = TargetParts.of(model), Taps(model, (FINAL,))
    with torch.no_grad(), taps.on() as seen:
        logits = model(ids).logits
        (states,) = taps.read(seen, model.device)
    torch.testing.assert_close(parts.logits(states), logits)
    assert not torch.allclose(parts.head(states), logits, atol=0.1)
    drafter = untrained("eagle", model, [1, 2])
    drafter.attach(model)
    torch.testing.assert_close(drafter.logits(states), logits)


@pytest.mark.parametrize("name", ["GraniteForCausalLM", "HyperCLOVAXForCausalLM"])
def test_factors_of_one_name_that_mean_opposite_things(name: str) -> None:
    kind = getattr(transformers, name, None) or pytest.skip(f"this transformers has no {name}")
    torch.manual_seed(0)
    model = kind(kind.config_class(**COMMON, logits_scaling=4.0)).eval()
    taps = Taps(model, (FINAL,))
    with torch.no_grad(), taps.on() as seen:
        logits = model(prompts([9])[0]).logits
        (states,) = taps.read(seen, model.device)
    torch.testing.assert_close(TargetParts.of(model).logits(states), logits)


def test_new_heads_hold_the_targets_factor() -> None:
    from hf_specgen.drafters.medusa import MedusaDrafter

    model = build("cohere2", **BEHIND["cohere2"])
    heads = MedusaDrafter.for_target(model, num_heads=1)
    states = torch.randn(3, 32)
    torch.testing.assert_close(heads.head(0, states), heads.parts.logits(states))


@pytest.mark.parametrize("kind", ["eagle", "small"])
def test_stocks_own_loop_leaves_the_drafter_as_it_was(kind: str) -> None:
    model, (ids, mask) = tiny(), prompts([9])
    expected = plain(model, ids, mask)
    drafter = drafter_of(kind, model, texts_of(expected, mask), "chain")
    before = set(vars(drafter))
    with stock_candidates(model, drafter) as calls:
        assert torch.equal(plain(model, ids, mask), expected)
        assert torch.equal(plain(model, copy.copy(ids[:, 2:])), plain(model, ids[:, 2:]))
    assert calls[0].stats.total.num_accepted_tokens > 0
    assert set(vars(drafter)) == before


@pytest.mark.parametrize("kind", ["medusa", "eagle", "lookup", "measured"])
def test_a_model_that_is_not_enabled_says_so(kind: str) -> None:
    model, ids = tiny(), prompts([6])[0]
    drafter = drafter_of(kind, model, [[1, 2, 3, 4]])
    with pytest.raises(AttributeError, match=r"enable\(model\)"):
        model.generate(ids, assistant_model=drafter, max_new_tokens=3)
    with pytest.raises(AttributeError, match=r"no attribute 'colour'\.?$"):
        _ = drafter.colour
    assert not hasattr(drafter, "generation_config")


@pytest.mark.parametrize("method", METHODS)
def test_a_threshold_for_a_tree_is_refused(method: str) -> None:
    model, ids = tiny(), prompts([6])[0]
    for tree in (TREE, DYNAMIC):
        with pytest.raises(SpecGenError, match="ends chains only"):
            ours(model, drafter_of(method, model, [[1, 2, 3, 4]], tree), ids, assistant_confidence_threshold=0.5)


@pytest.mark.parametrize("settings", [{"hidden_size": 30, "target_hidden_size": 32}, {"layer_type": "mamba"}])
def test_sizes_that_build_nothing_are_refused_by_our_own_errors(settings: dict[str, object], tmp_path) -> None:
    """transformers has an error of its own for a size that the heads do not divide."""
    drafter_of("eagle3", tiny(), [[1, 2, 3, 4]]).save_pretrained(tmp_path)
    with pytest.raises(SpecGenError, match=r"builds no Eagle3Drafter|layer_type"):
        load_drafter(tmp_path, **settings)


@pytest.mark.parametrize(("kind", "tree"), some((*METHODS, "small"), ("chain", TREE, DYNAMIC)))
def test_heads_are_given_whole_rows(kind: str, tree: object) -> None:
    """Of states that are not contiguous torch makes a batch of products, with a copy of the head's weight in each."""
    model, (ids, mask) = tiny(), prompts([6, 6, 6])
    expected = plain(model, ids, mask)
    drafter = drafter_of(kind, model, texts_of(expected, mask), tree)
    models = [model, drafter.model if isinstance(drafter, SmallModel) else drafter]
    heads = [part for whole in models for name, part in whole.named_modules() if name.endswith("lm_head")]
    seen: list[bool] = []
    handles = [head.register_forward_pre_hook(lambda _, given: seen.append(given[0].is_contiguous())) for head in heads]
    try:
        assert torch.equal(ours(model, drafter, ids, mask), expected)
    finally:
        for handle in handles:
            handle.remove()
    assert len(seen) > 6 and all(seen)
