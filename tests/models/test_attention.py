"""Attention of a pass: what the model's own computes, chosen where it is faster, and out of other callers' way."""

from __future__ import annotations

import random
import threading

import pytest
import torch
import transformers
from ragged_trees import LENGTHS, random_tree
from tiny import CASES, build, prompts, tiny
from torch import Tensor
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2_eager
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss_eager

from hf_specgen import SpecGenError, ops
from hf_specgen.kernels.reference_attention import tree_attention
from hf_specgen.models import attention
from hf_specgen.models.attention import PassAttention, use_attention
from hf_specgen.models.cached_model import CachedModel
from hf_specgen.models.passes import Pass
from hf_specgen.models.prompt import ChunkedPrompt, Prompt
from hf_specgen.models.visibility import TreeVisibility
from hf_specgen.round.records import Tree

GROUPED = "llama qwen2 qwen3 mistral gemma3_text phi3 mixtral qwen3_moe olmo2 cohere2 smollm3".split()
EAGER_ONLY = ["gemma2", "gpt_oss"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}  # a last digit or two


class Heads(torch.nn.Module):
    """Stand in for an attention layer, as far as eager functions read it."""

    def __init__(self, group: int, sinks: Tensor | None = None) -> None:
        super().__init__()
        self.num_key_value_groups, self.sinks, self.training = group, sinks, False


def inputs(heads: int, shared: int, dtype: torch.dtype = torch.float32, wide: int = 8) -> list[Tensor]:
    """Draw query, key, value and mask as a cache hands them over: views with gaps, heads of values narrower."""
    query = torch.randn(2, 5, heads, wide).to(dtype).transpose(1, 2)
    key, value = torch.randn(2, shared, 14, wide).to(dtype), torch.randn(2, shared, 14, wide - 2).to(dtype)
    mask = torch.rand(2, 1, 5, 9) > 0.4
    mask[..., 0] = True
    return [query, key[:, :, :9], value[:, :, :9], mask]


def repeated(tensor: Tensor, heads: int) -> Tensor:
    return tensor.repeat_interleave(heads // tensor.shape[1], 1)


@pytest.mark.parametrize(("heads", "shared"), [(4, 4), (4, 2), (4, 1), (6, 3)])
def test_folded_heads_attend_like_repeated_keys(heads: int, shared: int) -> None:
    query, key, value, mask = inputs(heads, shared)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query, repeated(key, heads), repeated(value, heads), attn_mask=mask, scale=0.3
    )
    assert float((tree_attention(query, key, value, mask, 0.3, 0.0, None) - wanted).abs().max()) < 1e-6
    moved = tree_attention(query, key, value, mask.roll(1, 2), 0.3, 0.0, None)
    assert float((moved - wanted).abs().max()) > 1e-2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", EAGER_ONLY)
def test_caps_and_sinks_round_as_the_models_do(family: str, dtype: torch.dtype) -> None:
    query, key, value, mask = inputs(6, 2, dtype)
    sinks = torch.randn(6).to(dtype)
    added = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    if family == "gemma2":
        wanted = gemma2_eager(Heads(3), query, key, value, added, scaling=0.7, softcap=1.5)[0]
        found = tree_attention(query, key, value, mask, 0.7, 1.5, None)
    else:
        wanted = gpt_oss_eager(Heads(3, sinks), query, key, value, added, scaling=0.7)[0]
        found = tree_attention(query, key, value, mask, 0.7, 0.0, sinks)
    plain = tree_attention(query, key, value, mask, 0.7, 0.0, None).transpose(1, 2)
    assert float((found.transpose(1, 2) - wanted).abs().max()) < CLOSE[dtype]
    assert float((plain - wanted).abs().max()) > 0.1


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("sunk", [False, True])
def test_a_query_that_sees_nothing_gets_zeros(dtype: torch.dtype, softcap: float, sunk: bool) -> None:
    query, key, value, mask = inputs(4, 2, dtype)
    mask[1, 0, 3] = False
    found = tree_attention(query, key, value, mask, 0.5, softcap, torch.randn(4).to(dtype) if sunk else None)
    assert found.isfinite().all()
    assert (found[1, :, 3] == 0).all() and (found[1, :, 2] != 0).any() and (found[0, :, 3] != 0).any()


@torch.no_grad()
def passes(model, which: str, tree: str) -> tuple[list[Tensor], int]:
    """Score rounds over ragged rows, past every window; return the logits and how often our attention ran."""
    chance = random.Random(5)
    ids, _ = prompts(LENGTHS)
    found = []
    with use_attention(which), ops.record() as calls:
        cached = CachedModel(model, len(LENGTHS))
        cached.prefill(Prompt(ids, LENGTHS))
        for _ in range(3):
            shape = Tree.chain(6) if tree == "chain" else random_tree(chance, len(LENGTHS), 6)
            block = torch.tensor([[chance.randrange(1, 64) for _ in range(7)] for _ in LENGTHS])
            found.append(cached.run(Pass(block, TreeVisibility(shape))).logits)
            cached.cache.commit([3, 1, 2, 0], torch.zeros(4, 2, dtype=torch.long) if tree == "chain" else None)
    return found, calls["tree_attention", "reference"]


@pytest.mark.parametrize("tree", ["chain", "tree"])
@pytest.mark.parametrize(("family", "impl"), CASES)
def test_every_family_gets_its_own_attention(family: str, impl: str, tree: str) -> None:
    model = build(family, impl)
    wanted, none = passes(model, "model", tree)
    found, calls = passes(model, "tree", tree)
    assert none == 0 and calls == 3 * model.config.num_hidden_layers
    assert max(float((mine - own).abs().max()) for mine, own in zip(found, wanted, strict=True)) < 5e-5
    assert model.config._attn_implementation == impl


@pytest.mark.parametrize(("family", "part"), [("gemma2", "softcap"), ("gpt_oss", "sinks"), ("mistral", "mask")])
def test_a_missing_part_would_be_seen(family: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls of the comparison above."""
    model = build(family, "eager", **({"attn_logit_softcapping": 2.0} if family == "gemma2" else {}))
    wanted, _ = passes(model, "model", "tree")

    def spoilt(query, key, value, mask, scale, softcap, sinks):
        if part == "mask":
            mask = mask | mask.roll(1, -1)
        return tree_attention(
            query, key, value, mask, scale, 0.0 if part == "softcap" else softcap, None if part == "sinks" else sinks
        )

    monkeypatch.setattr(ops, "tree_attention", spoilt)
    found, _ = passes(model, "tree", "tree")
    assert max(float((mine - own).abs().max()) for mine, own in zip(found, wanted, strict=True)) > 1e-3


@pytest.mark.parametrize("family", EAGER_ONLY)
def test_a_prompt_in_chunks_goes_through_it_too(family: str) -> None:
    model = build(family, "eager")
    ids, _ = prompts(LENGTHS)
    results = {}
    for which in ("model", "tree"):
        with use_attention(which), torch.no_grad(), ops.record() as calls:
            results[which] = CachedModel(model, 4).prefill(ChunkedPrompt(ids, LENGTHS, chunk=7)).logits
        assert calls["tree_attention", "reference"] == (8 if which == "tree" else 0)
    assert float((results["tree"] - results["model"]).abs().max()) < 5e-5


@pytest.mark.parametrize(("family", "impl"), CASES)
def test_the_default_is_what_is_faster(family: str, impl: str) -> None:
    ours = family in (GROUPED if impl == "sdpa" else EAGER_ONLY)
    assert (PassAttention(build(family, impl)).name is not None) == ours


def test_another_class_of_a_known_kind_keeps_its_own_eager() -> None:
    """What stands behind a foreign class's eager attention is unknown."""
    model = build("gpt_oss", "eager")
    model.__class__ = type("GptOssForCausalLM", (type(model),), {"__module__": __name__})
    assert PassAttention(model).name is None
    with use_attention("tree"):
        assert PassAttention(model).name is None  # nothing to hand other calls to


def test_the_choice_can_be_made_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    ours, own = attention._NAMES["sdpa"], None
    assert PassAttention(model).name == ours
    monkeypatch.setenv("HF_SPECGEN_ATTENTION", "model")
    assert PassAttention(model).name == own
    with use_attention("tree"):
        assert PassAttention(model).name == ours
        with pytest.raises(RuntimeError), use_attention("model"):
            assert PassAttention(model).name == own
            raise RuntimeError
        assert PassAttention(model).name == ours
    assert PassAttention(model).name == own
    monkeypatch.setenv("HF_SPECGEN_ATTENTION", "flash")
    with pytest.raises(SpecGenError, match="HF_SPECGEN_ATTENTION"):
        PassAttention(model)
    with pytest.raises(SpecGenError, match="'model' or 'tree'"), use_attention("sdpa"):
        pass


@pytest.mark.parametrize(("family", "impl"), [("llama", "sdpa"), ("gemma2", "eager"), ("gpt_oss", "eager")])
def test_a_pass_that_fails_leaves_the_config_alone(family: str, impl: str) -> None:
    model = build(family, impl)
    ids, _ = prompts(LENGTHS)
    cached = CachedModel(model, 4)
    cached.prefill(Prompt(ids, LENGTHS))
    during = []

    def fail(module, args, kwargs):
        during.append(model.config._attn_implementation)
        raise KeyboardInterrupt

    handle = model.model.layers[1].self_attn.register_forward_pre_hook(fail, with_kwargs=True)
    with pytest.raises(KeyboardInterrupt):
        cached.run(Pass.chain(torch.ones(4, 2, dtype=torch.long)))
    handle.remove()
    assert during == [attention._NAMES[impl]]
    assert model.config._attn_implementation == impl
    assert not attention._in_pass.get()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("family", "impl"), [("llama", "sdpa"), ("gemma2", "eager"), ("gpt_oss", "eager")])
def test_other_threads_keep_the_models_own_attention(family: str, impl: str, padded: bool) -> None:
    """Their plain generation runs in the middle of a pass, where the config shows our name."""
    model = build(family, impl)
    ids, mask = prompts(LENGTHS if padded else [12, 12, 12, 12])
    settings = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 6}
    wanted = model.generate(ids, **settings, return_dict_in_generate=True, output_logits=True)
    met = []

    def generate() -> None:
        with ops.record() as calls:
            met.append(model.config._attn_implementation)
            met.append(model.generate(ids, **settings, return_dict_in_generate=True, output_logits=True))
        met.append(dict(calls))

    def elsewhere(module, args, kwargs):
        if not met:
            thread = threading.Thread(target=generate)
            thread.start()
            thread.join()

    cached = CachedModel(model, 4)
    cached.prefill(Prompt(prompts(LENGTHS)[0], LENGTHS))
    handle = model.model.layers[1].self_attn.register_forward_pre_hook(elsewhere, with_kwargs=True)
    with torch.no_grad():
        cached.run(Pass.chain(torch.ones(4, 2, dtype=torch.long)))
    handle.remove()
    name, found, calls = met
    assert name == attention._NAMES[impl] and calls == {}
    assert torch.equal(found.sequences, wanted.sequences)
    assert all(map(torch.equal, found.logits, wanted.logits))


def test_a_call_with_parts_we_do_not_know_goes_to_the_models_own() -> None:
    query, key, value, mask = inputs(4, 2)
    value = value.new_ones(2, 2, 9, 8)
    module = Heads(2)
    token = attention._in_pass.set(True)
    try:
        with ops.record() as calls:
            attention.attend(module, query, key, value, mask, scaling=0.3, position_bias=None)
        assert calls == {("tree_attention", "reference"): 1}
        with ops.record() as calls:
            attention.attend(module, query, key, value, mask, scaling=0.3, s_aux=torch.ones(4))
            attention.attend(module, query, key, value, mask, dropout=0.5, scaling=0.3)
        assert calls == {}
    finally:
        attention._in_pass.reset(token)


def test_sdpa_that_ignores_the_cap_is_left_to_itself() -> None:
    """transformers before 5.24 lets Gemma2 run in sdpa, without its soft cap: so do we."""
    if not transformers.Gemma2ForCausalLM._supports_sdpa:
        pytest.skip("this transformers has no sdpa for Gemma2")
    model = build("gemma2", "sdpa", attn_logit_softcapping=0.5)
    found, calls = passes(model, "tree", "tree")
    assert calls == 0
    assert all(map(torch.equal, found, passes(model, "model", "tree")[0]))
