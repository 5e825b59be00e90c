"""prepack and unpack: the same texts from packed weights, and nothing left behind."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support_prepack import IDS, MASK, packed_calls, text, traces
from tiny import FAMILIES, Watch, assert_ran, build, disturbed, drafter_of, ours, plain, prompts, some, texts_of, tiny
from torch import nn
from torch.autograd import forward_ad
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_specgen import Costs, PromptLookup, SmallModel, disable, enable, prepack, unpack
from hf_specgen.models.prepack import is_prepacked, packed_layers

HAS_BF16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()


# --- the same texts, from packed weights


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_stay_and_come_from_packed_weights(family: str) -> None:
    model = build(family, FAMILIES[family][2][0])
    before, calls = packed_calls(lambda: plain(model, IDS, MASK, max_new_tokens=8))
    assert calls == 0
    layers = list(packed_layers(prepack(model)))
    assert len(layers) >= 5 and not any(type(module) in (nn.Linear, Conv1D) for module in model.modules())
    after, calls = packed_calls(lambda: plain(model, IDS, MASK, max_new_tokens=8))
    assert torch.equal(after, before)
    assert calls >= 8 * 5


def test_wrong_packed_weights_would_show() -> None:
    model = prepack(tiny())
    right = text(model)
    head = model.lm_head
    negated = torch.ops.mkldnn._reorder_linear_weight(-head.weight.detach(), None)
    head._pack = replace(head._pack, weight=negated)
    assert not torch.equal(text(model), right)


@pytest.mark.parametrize(("kind", "lengths"), some(("lookup", "branches", "small", "tree"), ([12], [12, 5, 9, 3])))
def test_speculative_texts_are_those_of_the_unpacked_model(kind: str, lengths: list[int]) -> None:
    model = tiny()
    ids, mask = prompts(lengths)
    right = plain(model, ids, mask)
    watch = drafter_of(kind, model, texts_of(right, mask))
    prepack(model)
    if isinstance(watch.inner, SmallModel):
        prepack(watch.inner.model)
    out, calls = packed_calls(lambda: ours(model, watch, ids, mask))
    assert torch.equal(out, right) and calls > 0
    assert_ran(watch, kind)


def test_it_works_with_enable_in_either_order() -> None:
    model, small = tiny(), disturbed(tiny())
    right = text(model)
    for first, second in ((prepack, enable), (enable, prepack)):
        second(first(model))
        length = {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "constant"}
        asked = {"assistant_model": prepack(small), "max_new_tokens": 8, **length}
        out, calls = packed_calls(lambda asked=asked: plain(model, IDS, MASK, **asked))
        assert torch.equal(out, right) and calls > 0
        assert out.speculation.num_accepted_tokens > 0
        disable(unpack(model))
        assert torch.equal(text(model), right)


@pytest.mark.skipif(not HAS_BF16, reason="this processor multiplies no bfloat16")
def test_bfloat16_scores_agree() -> None:
    model = tiny().bfloat16()
    with torch.no_grad():
        right = model(IDS).logits
        found, calls = packed_calls(lambda: prepack(model)(IDS).logits)
    assert calls > 0 and found.dtype == torch.bfloat16
    assert (found - right).abs().max() <= 0.05 * right.abs().max()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
def test_every_form_of_input_is_served(kind: type[nn.Module], bias: bool) -> None:
    layer = nn.Linear(24, 40, bias=bias) if kind is nn.Linear else Conv1D(40, 24)
    holder = nn.ModuleList([layer])
    strided = torch.randn(24, 3).t()
    inputs = [torch.randn(24), torch.randn(2, 24), torch.randn(2, 3, 24), strided, torch.randn(0, 24)]
    with torch.no_grad():
        for given in inputs[1:] if kind is Conv1D else inputs:
            right = unpack(holder)[0](given)
            found, calls = packed_calls(lambda given=given: prepack(holder)[0](given))
            assert found.shape == right.shape and torch.allclose(found, right, atol=1e-6)
            assert calls >= (given.numel() > 0)
        for wrong in (torch.randn(2, 25), torch.randn(2, 24).double()):
            with pytest.raises(RuntimeError):
                layer(wrong)


# --- nothing is left behind, and the model can do all that it could


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
def test_unpack_restores_the_model_exactly(family: str) -> None:
    model = build(family, FAMILIES[family][2][0], tie_word_embeddings=True)
    seen: list[int] = []
    model.lm_head.register_forward_pre_hook(lambda *_: seen.append(1))
    before, generator = traces(model), torch.get_rng_state()
    prepack(model)
    assert torch.equal(torch.get_rng_state(), generator), "sampling afterwards must not change"
    assert traces(model)[1] == before[1] and traces(model)[3] == before[3]
    assert type(model.get_input_embeddings()) is not nn.Linear
    assert model.get_input_embeddings().weight is model.lm_head.weight
    text(model)
    assert seen, "hooks of others run"
    assert traces(model) != before
    unpack(model)
    assert traces(model) == before
    assert traces(unpack(model)) == before, "one that is not prepacked is left alone"


def test_twice_is_once() -> None:
    model = tiny()
    before = traces(model)
    prepack(model)
    packs = [layer._pack for layer in packed_layers(model)]
    once = traces(model)
    prepack(model)
    assert traces(model) == once and [layer._pack for layer in packed_layers(model)] == packs
    assert traces(unpack(model)) == before


def test_a_saved_model_is_the_plain_one(tmp_path: Path) -> None:
    model = tiny()
    model.save_pretrained(tmp_path / "plain")
    prepack(model).save_pretrained(tmp_path / "packed")
    names = {path.name: path.read_bytes() for path in (tmp_path / "plain").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "packed").iterdir()} == names
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert not list(packed_layers(again)) and torch.equal(text(again), text(model))


def through_torch(model: PreTrainedModel) -> PreTrainedModel:
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), through_torch])
def test_copies_are_prepacked_and_their_own(copied: Callable[[PreTrainedModel], PreTrainedModel]) -> None:
    model = prepack(tiny())
    right = text(model)
    other = copied(model)
    assert all(layer._pack is None for layer in packed_layers(other)), "packs are made at first use"
    found, calls = packed_calls(lambda: text(other))
    assert torch.equal(found, right) and calls > 0
    with torch.no_grad():
        other.lm_head.weight.neg_()
    assert not torch.equal(text(other), right)
    assert torch.equal(text(model), right)
    unpack(other)
    assert not list(packed_layers(other)) and not is_prepacked(other) and is_prepacked(model)


def test_gradients_are_those_of_the_plain_model() -> None:
    model, packed = tiny(), prepack(tiny())
    for each in (model, packed):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.5)
        _, calls = packed_calls(lambda each=each: each(IDS, labels=IDS).loss.backward())
        assert calls == 0
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), packed.parameters(), strict=True))
    found, calls = packed_calls(lambda: text(packed))
    assert torch.equal(found, text(model)) and calls > 0, "the step's weights, packed"


def test_fused_optimizers_leave_no_stale_weights() -> None:
    """They do not raise torch's version counter, and one token without positions does not begin a text."""
    model, token = prepack(tiny()), torch.tensor([[5]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    with torch.no_grad():
        found, calls = packed_calls(lambda: model(token).logits)
        assert torch.allclose(found, unpack(model)(token).logits, atol=1e-4) and calls > 0


def test_a_frozen_layer_passes_gradients_on() -> None:
    layer = nn.Sequential(nn.Linear(8, 8)).requires_grad_(False)
    given = torch.randn(2, 8, requires_grad=True)
    prepack(layer)(given).sum().backward()
    assert torch.allclose(given.grad, layer[0].weight.sum(0).expand(2, 8))


def test_forward_derivatives_are_those_of_the_plain_layer() -> None:
    layer = nn.Sequential(nn.Linear(8, 8)).requires_grad_(False)
    given, direction = torch.randn(2, 8), torch.randn(2, 8)
    right = torch.func.jvp(layer, (given,), (direction,))[1]
    prepack(layer)
    assert torch.equal(torch.func.jvp(layer, (given,), (direction,))[1], right)
    with torch.no_grad(), forward_ad.dual_level():
        out, calls = packed_calls(lambda: layer(forward_ad.make_dual(given, direction)))
        assert calls == 0 and torch.equal(forward_ad.unpack_dual(out).tangent, right)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_traces_hold_the_plain_layer() -> None:
    layer, given = prepack(nn.Sequential(nn.Linear(8, 8))), torch.randn(2, 8)
    with torch.no_grad():
        traced, calls = packed_calls(lambda: torch.jit.trace(layer, given, check_trace=False))
    assert calls == 0 and torch.equal(traced(given), unpack(layer)(given))


def test_autocast_and_compile_get_the_plain_layer() -> None:
    model = tiny()
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            right = model(IDS).logits
            prepack(model)
            found, calls = packed_calls(lambda: model(IDS).logits)
        assert calls == 0 and torch.equal(found, right)
        layer = model.lm_head
        compiled = torch.compile(layer, backend="eager", fullgraph=True)
        given = torch.randn(2, 32)
        found, calls = packed_calls(lambda: compiled(given))
        assert calls == 0 and torch.equal(found, torch.nn.functional.linear(given, layer.weight))


# --- what the loop knows


def test_the_costs_are_those_of_packed_weights() -> None:
    class Costing(Watch):
        def on_begin(self, sequences: Any) -> None:
            self.costs = sequences.costs
            super().on_begin(sequences)

    model, cpu = tiny(), torch.device("cpu")
    watch = Costing(PromptLookup(4))
    for change, expected in (
        (prepack, Costs.default(cpu, torch.float32, prepacked=True)),
        (unpack, Costs.default(cpu, torch.float32)),
    ):
        change(model)
        ours(model, watch, IDS, MASK)
        assert watch.costs == expected
    assert Costs.default(cpu, torch.float32).jump > 0 == Costs.default(cpu, torch.float32, prepacked=True).jump
    assert Costs.default(torch.device("meta"), torch.float32, prepacked=True) == Costs()
