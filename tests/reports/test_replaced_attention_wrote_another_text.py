"""Reported: with attention replaced on a model of a tested class, a tree of drafts wrote another text, silently."""

from __future__ import annotations

from types import MethodType

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from tiny import RandomTree, Watch, build, drafter_of, ours, plain, prompts, texts_of, tiny
from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention

import hf_specgen.models.selfcheck
from hf_specgen import SpeculativeDecoding, UnsupportedTarget, prepack
from hf_specgen.models.makeup import makeup_of
from hf_specgen.models.selfcheck import check_target, round_error

OWN = LlamaAttention.forward


def causal_attention(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
    """Attend to all slots before a place, whatever a four-dimensional mask says: right for chains at one row alone."""
    if attention_mask is not None:
        width, slots = attention_mask.shape[-2:]
        attention_mask = torch.ones(1, 1, width, slots, dtype=torch.bool).tril(slots - width)
    return OWN(self, hidden_states, position_embeddings, attention_mask, **kwargs)


class CausalAttention(LlamaAttention):
    forward = causal_attention


def new_class(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    for layer in model.model.layers:
        layer.self_attn.__class__ = CausalAttention


def new_forward(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    for layer in model.model.layers:
        layer.self_attn.forward = MethodType(causal_attention, layer.self_attn)


def new_forward_under_hooks(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    new_forward(model, monkeypatch)
    hooked(model)


def patched_class(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaAttention, "forward", causal_attention)


def patched_function(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace a function that the layers call by its name in their file."""
    eager = modeling_llama.eager_attention_forward

    def causal(module, query, key, value, attention_mask, **kwargs):
        width, slots = query.shape[2], key.shape[2]
        hidden = torch.full((width, slots), torch.finfo(query.dtype).min).triu(slots - width + 1)
        return eager(module, query, key, value, hidden[None, None], **kwargs)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", causal)
    model.set_attn_implementation("eager")


WAYS = (new_class, new_forward, new_forward_under_hooks, patched_class, patched_function)


def hooked(model: PreTrainedModel) -> None:
    """Put accelerate's hooks on every module, as loading with ``device_map`` does."""
    for module in model.modules():
        add_hook_to_module(module, AlignDevicesHook(execution_device="cpu"))


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note the class of every model whose round is checked."""
    seen: list[str] = []

    def noted(model: PreTrainedModel, **settings: object) -> float:
        seen.append(type(model).__name__)
        return round_error(model, **settings)

    monkeypatch.setattr(hf_specgen.models.selfcheck, "round_error", noted)
    return seen


@pytest.mark.parametrize("way", WAYS)
def test_a_model_with_replaced_parts_is_tried_and_refused(way, monkeypatch: pytest.MonkeyPatch, checks: list) -> None:
    model = tiny()
    ids, mask = prompts([12])
    expected = plain(model, ids, mask)
    before = Watch(RandomTree(texts_of(expected, mask)))
    assert torch.equal(ours(model, before, ids, mask), expected)
    assert before.off_spine and not checks, "a stock model is not tried"
    way(model, monkeypatch)
    assert torch.equal(plain(model, ids, mask), expected), "plain decoding of one row does not notice"
    with pytest.raises(UnsupportedTarget, match="LlamaForCausalLM failed the one-round self-check"):
        ours(model, before.inner, ids, mask)
    assert checks == ["LlamaForCausalLM"]


def test_unchecked_it_would_write_another_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: what is refused above is wrong indeed, with a tree and one row."""
    model = tiny()
    ids, mask = prompts([12])
    expected = plain(model, ids, mask)
    new_class(model, monkeypatch)
    monkeypatch.setattr("hf_specgen.generate.check_target", lambda model, longest, rows: None)
    texts = texts_of(expected, mask)
    found = [ours(model, RandomTree(texts, seed=seed), ids, mask) for seed in range(4)]
    assert any(not torch.equal(text, expected) for text in found)


class Renamed(LlamaAttention):
    """Attend as the class above does."""


@pytest.mark.parametrize("kind", ["branches", "small"])
@pytest.mark.parametrize("lengths", [[12], [5, 17, 11, 24]])
def test_a_sound_replacement_is_tried_once_and_served(kind: str, lengths: list[int], checks: list[str]) -> None:
    model = tiny()
    for layer in model.model.layers:
        layer.self_attn.__class__ = Renamed
    ids, mask = prompts(lengths)
    expected = plain(model, ids, mask)
    for _ in range(2):
        watch = drafter_of(kind, model, texts_of(expected, mask))
        assert torch.equal(ours(model, watch, ids, mask), expected)
        assert watch.longest >= 2
    assert checks == ["LlamaForCausalLM"]


def test_what_changes_is_tried_again(checks: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    layer = model.model.layers[0]
    layer.self_attn.__class__ = Renamed
    check_target(model)
    check_target(model)
    assert len(checks) == 1
    layer.mlp.forward = MethodType(type(layer.mlp).forward, layer.mlp)  # the class's own, on the object: no change
    check_target(model)
    assert len(checks) == 1
    new_forward(model, monkeypatch)
    with pytest.raises(UnsupportedTarget):
        check_target(model)
    del layer.self_attn.forward, model.model.layers[1].self_attn.forward
    model.set_attn_implementation("eager")
    check_target(model)
    model.to(torch.bfloat16)
    check_target(model)
    assert len(checks) == 4


VECTOR = torch.randn(32, generator=torch.Generator().manual_seed(1))


def steer(place: int | slice):
    """Return a hook that adds a vector at some places of a pass: at the last one, as steering is often written."""

    def add(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[:, place] += VECTOR
        return output

    return add


LAST, ALL = -1, slice(None)


@pytest.mark.parametrize("kind", ["lookup", "tree"])
def test_a_hook_that_reads_places_of_a_pass_is_refused(kind: str, checks: list[str]) -> None:
    model, (ids, mask) = tiny(), prompts([12])
    for place in (ALL, LAST, ALL):
        handle = model.model.layers[0].mlp.register_forward_hook(steer(place))
        expected = plain(model, ids, mask)
        watch = drafter_of(kind, model, texts_of(expected, mask))
        if place is LAST:
            with pytest.raises(UnsupportedTarget, match="LlamaForCausalLM failed the one-round self-check"):
                ours(model, watch, ids, mask)
        else:
            assert torch.equal(ours(model, watch, ids, mask), expected) and watch.longest >= 2
        handle.remove()
    assert len(checks) == 3, "each hook is another, though it may stand at the same address"
    check_target(model)
    assert len(checks) == 3, "without one the model is as shipped"


def test_a_hook_on_all_modules_is_tried(checks: list[str]) -> None:
    last = steer(LAST)
    with nn.modules.module.register_module_forward_hook(
        lambda module, args, output: last(module, args, output) if type(module).__name__ == "LlamaMLP" else None
    ):
        with pytest.raises(UnsupportedTarget, match="self-check"):
            check_target(tiny())
    check_target(tiny())
    assert len(checks) == 1


def test_a_forward_at_the_address_of_one_that_is_gone_is_tried() -> None:
    """What tells functions apart must not be where they stand: addresses come back."""
    model, seen = tiny(), {}
    for _ in range(50):
        model.model.layers[0].mlp.forward = steer(ALL)
        address, makeup = id(model.model.layers[0].mlp.forward), makeup_of(model)
        del model.model.layers[0].mlp.forward
        if address in seen:
            assert makeup != seen[address]
            return
        seen[address] = makeup
    pytest.fail("no address came back")


@pytest.mark.parametrize("changed", [hooked, prepack, lambda model: model.requires_grad_(False)])
def test_what_does_not_change_the_computation_is_not_tried(changed, checks: list[str]) -> None:
    """accelerate puts a forward on every module, only to move tensors: reading all weights thirty times is too dear."""
    model = tiny()
    changed(model)
    check_target(model)
    assert not checks


def test_a_compiled_forward_of_the_class_is_not_tried(checks: list[str]) -> None:
    model = tiny()
    model.forward = torch.compile(model.forward, backend="eager")
    check_target(model)
    assert not checks


class Doubling(nn.Linear):
    def forward(self, hidden):
        return 2 * super().forward(hidden)


def test_the_look_at_a_model_is_cheap() -> None:
    """It happens in every call: far below the time of a pass, and it leaves nothing on the model."""
    model = build("qwen3", num_hidden_layers=8)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    first = makeup_of(model)
    assert first.is_own and not first.is_quantised and first == makeup_of(model)
    assert before == {name: dict(vars(module)) for name, module in model.named_modules()}
    model.model.layers[3].mlp.up_proj.__class__ = Doubling
    assert not makeup_of(model).is_own and makeup_of(model).parts != first.parts


def test_every_drafter_is_refused_and_none_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    new_class(model, monkeypatch)
    ids, _ = prompts([12])
    for loop in (SpeculativeDecoding(), SpeculativeDecoding(RandomTree([[1] * 50]))):
        with pytest.raises(UnsupportedTarget, match="self-check"):
            model.generate(ids, max_new_tokens=8, custom_generate=loop)
