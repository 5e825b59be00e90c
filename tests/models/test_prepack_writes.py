"""Weights written after prepacking are never stale, and what cannot be packed is refused or left plain."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support_prepack import IDS, MASK, packed_calls, text, traces
from tiny import ours, plain, some, tiny
from torch import nn
from torch.nn.utils import parametrizations, prune
from transformers import PreTrainedModel

from hf_specgen import PromptLookup, SpecGenError, prepack, unpack
from hf_specgen.models import prepack as packing
from hf_specgen.models.prepack import PackedLinear, is_prepacked, packed_layers

# --- never stale


def other_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tiny(seed=5).state_dict().items()}


def load(model: PreTrainedModel) -> None:
    model.load_state_dict(other_weights(model))


def load_by_assignment(model: PreTrainedModel) -> None:
    model.load_state_dict(other_weights(model), assign=True)


@torch.no_grad()
def merge(model: PreTrainedModel) -> None:
    model.lm_head.weight += torch.randn(64, 4) @ torch.randn(4, 32)


def merge_past_the_counter(model: PreTrainedModel) -> None:
    before = model.lm_head.weight._version, model.lm_head.weight.data_ptr()
    model.lm_head.weight.data += torch.randn(64, 4) @ torch.randn(4, 32)
    assert (model.lm_head.weight._version, model.lm_head.weight.data_ptr()) == before, "nothing tells but the bits"


@torch.no_grad()
def swap_past_the_counter(model: PreTrainedModel) -> None:
    model.lm_head.weight.data.copy_(model.lm_head.weight.flip(0))  # a plain sum stays


def replace_data(model: PreTrainedModel) -> None:
    model.lm_head.weight.data = model.lm_head.weight.data.neg()


def replace_parameter(model: PreTrainedModel) -> None:
    model.lm_head.weight = nn.Parameter(-model.lm_head.weight.detach())


def change_type(model: PreTrainedModel) -> None:
    merge_past_the_counter(model)
    model.double().float()


WRITES = [load, load_by_assignment, merge, merge_past_the_counter, swap_past_the_counter, replace_data]
WRITES += [replace_parameter, change_type]


@pytest.mark.parametrize(("write", "speculative"), some(WRITES, (True, False)))
def test_written_weights_are_seen(write: Callable[[PreTrainedModel], None], speculative: bool) -> None:
    model = prepack(tiny())
    old = text(model)
    write(model)
    fresh = tiny()
    fresh.load_state_dict(model.state_dict())
    right = text(fresh)
    assert not torch.equal(right, old)
    found, calls = packed_calls(
        lambda: ours(model, PromptLookup(4), IDS, MASK, max_new_tokens=8) if speculative else text(model)
    )
    assert torch.equal(found, right) and calls > 0


@pytest.mark.parametrize("write", [merge, merge_past_the_counter])
def test_without_looking_they_would_not_be(
    write: Callable[[PreTrainedModel], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for look in ("_version", "_checksum"):
        monkeypatch.setattr(packing, look, lambda weight: 0)
    model = prepack(tiny())
    old = text(model)
    write(model)
    assert torch.equal(text(model), old)
    assert not torch.equal(text(unpack(model)), old)


def test_weights_are_read_once_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepack(tiny())
    read: list[torch.Tensor] = []
    real = packing._checksum
    monkeypatch.setattr(packing, "_checksum", lambda weight: read.append(weight) or real(weight))
    layers = len(list(packed_layers(model)))
    plain(model, IDS, MASK, max_new_tokens=9)
    assert len(read) == layers
    ours(model, PromptLookup(4), IDS, MASK, max_new_tokens=9)
    assert len(read) == 2 * layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(3, 5), (8, 8), (1, 1)])
def test_the_checksum_sees_every_element(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight = torch.randn(40, 40).to(dtype)[1 : 1 + shape[0], 1 : 1 + shape[1]]
    before = packing._checksum(weight)
    assert packing._checksum(weight.clone()) == before
    for place in range(weight.numel()):
        changed = weight.clone()
        changed.view(-1)[place] *= 1.5
        assert packing._checksum(changed) != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [48, 64, 250])
def test_the_checksum_sees_moves_and_signs(dtype: torch.dtype, width: int) -> None:
    """A plain sum of words sees neither: it has no places, and the highest bit of two words cancels."""
    weight = torch.randn(70, width).to(dtype)
    rows, columns, signs = weight.clone(), weight.clone(), weight.clone()
    rows[[3, 44]] = weight[[44, 3]]
    columns[:, [0, 8]] = weight[:, [8, 0]]
    signs[20:60:20, 3] *= -1
    assert len({packing._checksum(one) for one in (weight, rows, columns, signs)}) == 4


def test_moved_or_cast_weights_free_the_packs() -> None:
    model = prepack(tiny())
    for change in (lambda: model.double(), lambda: model.to("meta")):
        change()
        assert all(layer._pack is None for layer in packed_layers(model))


def test_weights_made_in_inference_mode_are_packed() -> None:
    with torch.inference_mode():
        model = prepack(tiny())
        right, calls = packed_calls(lambda: text(model))
        assert calls > 0
        model.lm_head.weight.neg_()
        assert not torch.equal(text(model), right)


# --- refusals and fallbacks


class Wrapped(torch.Tensor):
    """A tensor subclass, as quantised and sharded weights are."""


def quantised() -> PreTrainedModel:
    model = tiny()
    model.lm_head.weight = nn.Parameter(torch.zeros(64, 32, dtype=torch.int8), requires_grad=False)
    return model


def packed_elsewhere() -> PreTrainedModel:
    model = tiny()
    model.model.layers[0].register_buffer("qweight", torch.zeros(4, 4, dtype=torch.int32))
    return model


def sharded() -> PreTrainedModel:
    model = tiny()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().as_subclass(Wrapped))
    return model


def offloaded() -> PreTrainedModel:
    from accelerate.hooks import ModelHook, add_hook_to_module

    model = tiny()
    add_hook_to_module(model.model.layers[1], ModelHook())
    return model


REFUSED = [
    (lambda: tiny().to("meta"), r"not on the CPU: model.embed_tokens.weight is on meta"),
    (quantised, r"quantised or sharded: lm_head.weight is a Parameter of int8"),
    (packed_elsewhere, r"model.layers.0.qweight is a Tensor of int32"),
    (sharded, r"lm_head.weight is a Wrapped of float32"),
    (offloaded, r"model.layers.1 carries its hook.*Load it without device_map"),
    (
        lambda: tiny().double(),
        r"LlamaForCausalLM \(float64\) has no linear layer that oneDNN packs here, 15 were tried",
    ),
    (lambda: nn.Sequential(nn.ReLU()), r"no linear layer .* 0 were tried: float32 ones are required"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_what_cannot_be_packed_is_refused_unchanged(make: Callable[[], nn.Module], message: str) -> None:
    model = make()
    before = traces(model)
    with pytest.raises(SpecGenError, match=message) as caught:
        prepack(model)
    assert "leave prepack out" in str(caught.value)
    assert traces(model) == before


@pytest.mark.gpu
def test_a_model_on_an_accelerator_is_refused() -> None:
    with pytest.raises(SpecGenError, match="is not on the CPU"):
        prepack(tiny().to(torch.accelerator.current_accelerator()))


def test_a_type_that_cannot_be_packed_runs_plain_and_comes_back() -> None:
    model = prepack(tiny()).double()
    right, calls = packed_calls(lambda: text(model))
    assert calls == 0 and torch.equal(right, text(tiny().double()))
    _, calls = packed_calls(lambda: text(model.float()))
    assert calls > 0


def test_a_torch_without_the_operators_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(SpecGenError, match=r"this torch \(.*\) has no oneDNN"):
        prepack(tiny())


def test_a_layer_that_fails_the_self_check_stays_plain(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny()
    right = text(model)
    product = torch.ops.mkldnn._linear_pointwise

    def wrong_for_the_head(rows: torch.Tensor, *rest: Any) -> torch.Tensor:
        out = product(rows, *rest)
        return out * 1.001 if out.shape[-1] == 64 and rows.shape[-1] == 32 else out

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", wrong_for_the_head)
    with caplog.at_level(logging.WARNING, "hf_specgen"):
        prepack(model)
    assert [record.getMessage() for record in caplog.records] == [
        "prepack: 5 of 15 layers stay plain, shapes [(64, 32)]"  # the head, and gate and up of two layers
    ]
    assert type(model.lm_head) is nn.Linear
    assert len(list(packed_layers(model))) == 10
    assert torch.equal(text(model), right)


def test_a_layer_that_others_patched_is_left_to_them() -> None:
    model = tiny()
    model.lm_head.forward = lambda rows: torch.nn.functional.linear(rows, -model.lm_head.weight)
    right = text(model)
    assert torch.equal(text(prepack(model)), right)
    assert type(model.lm_head) is nn.Linear


def pruned(layer: nn.Module) -> None:
    prune.l1_unstructured(layer, "weight", 0.3)


@pytest.mark.parametrize("change", [pruned, parametrizations.weight_norm])
@pytest.mark.parametrize("before", [True, False])
def test_weights_that_are_made_in_every_call_run_plain(change: Callable[[nn.Module], None], before: bool) -> None:
    model = tiny()
    change(model.lm_head)
    right = text(model)
    if before:
        prepack(model)
    else:
        model = prepack(tiny())
        change(model.lm_head)
    found, calls = packed_calls(lambda: text(model))
    assert torch.equal(found, right) and calls > 0
    assert torch.equal(text(unpack(model)), right)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_an_interruption_leaves_the_model_as_it_was(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny()
    before, real, packed = traces(model), packing._checksum, []

    def stops(weight: torch.Tensor) -> int:
        packed.append(weight)
        if len(packed) == 3:
            raise error
        return real(weight)

    monkeypatch.setattr(packing, "_checksum", stops)
    with pytest.raises(error):
        prepack(model)
    assert len(packed) == 3 and traces(model) == before
    prepack(model)
    del packed[:]
    with pytest.raises(error):
        prepack(model)
    assert is_prepacked(model), "as it was before that call"


def test_a_layer_that_fails_by_itself_is_left_plain() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].bias = nn.Parameter(model[1].bias.detach().double())
    prepack(model)
    assert [type(layer) for layer in model] == [PackedLinear, nn.Linear]


# --- models inside other modules


class Wrapper(nn.Module):
    """A model inside another module, as adapters hold it."""

    def __init__(self, inner: PreTrainedModel) -> None:
        super().__init__()
        self.inner = inner


def test_a_wrapper_is_prepacked_where_generate_enters() -> None:
    model = tiny()
    before = traces(model)
    wrapper = prepack(Wrapper(model))
    assert is_prepacked(wrapper) and is_prepacked(model) and isinstance(model.lm_head, PackedLinear)
    old = text(model)
    merge_past_the_counter(model)
    assert not torch.equal(text(model), old)
    unpack(wrapper)
    assert traces(model)[0] == before[0] and traces(model)[2] == before[2]
