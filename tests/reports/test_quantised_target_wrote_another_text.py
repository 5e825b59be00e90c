"""Reported: a target whose activations share one scale per pass wrote another greedy text than plain decoding."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from tiny import build, drafter_of, ours, plain, prompts, texts_of, tiny
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_specgen import PromptLookup, UnsupportedTarget
from hf_specgen.models.selfcheck import check_target, leak_of


class PerTensor(nn.Linear):
    """Round activations to int8 steps of one scale for the whole pass."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(rounded(hidden, hidden.abs().amax()))


class PerToken(nn.Linear):
    """Round each position's activations by its own scale."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(rounded(hidden, hidden.abs().amax(-1, keepdim=True)))


class OutlierColumns(nn.Linear):
    """Keep columns that hold an outlier anywhere in the pass, and round the rest: LLM.int8's way."""

    def forward(self, hidden: Tensor) -> Tensor:
        outliers = (hidden.abs() > 2.0).flatten(0, -2).any(0)
        small = rounded(hidden, hidden.masked_fill(outliers, 0).abs().amax(-1, keepdim=True))
        return super().forward(torch.where(outliers, hidden, small))


def rounded(hidden: Tensor, largest: Tensor) -> Tensor:
    scale = largest.clamp(min=1e-6) / 127
    return ((hidden / scale).round().clamp(-127, 127) * scale).to(hidden.dtype)


def with_linears(kind: type[nn.Linear]) -> Callable[[PreTrainedModel], PreTrainedModel]:
    def change(model: PreTrainedModel) -> PreTrainedModel:
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = kind
        model.config.quantization_config = {"quant_method": "ours"}
        return model

    change.__name__ = kind.__name__
    return change


def torch_dynamic(model: PreTrainedModel) -> PreTrainedModel:
    """Quantise as torch itself does on CPUs: int8 weights, one scale per pass."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8, inplace=True)
    return quantised


LEAKING = [with_linears(PerTensor), with_linears(OutlierColumns), torch_dynamic]


@pytest.mark.parametrize("lengths", [[12], [5, 17, 11, 24]])
@pytest.mark.parametrize("quantise", LEAKING)
def test_scales_over_a_whole_pass_are_refused(quantise: Callable, lengths: list[int]) -> None:
    model = quantise(tiny())
    ids, mask = prompts(lengths)
    with pytest.raises(UnsupportedTarget, match=r"LlamaForCausalLM failed the .*self-check"):
        ours(model, PromptLookup(4), ids, mask)
    with pytest.raises(UnsupportedTarget, match=r"LlamaForCausalLM failed the .*self-check"):
        ours(model, None, ids, mask)  # rows that leave would move their neighbours' scale


@pytest.mark.parametrize("kind", [PerTensor, OutlierColumns])
def test_in_half_precision_rounding_does_not_hide_it(kind: type[nn.Linear]) -> None:
    model = with_linears(kind)(tiny(initializer_range=0.1)).to(torch.bfloat16)
    with pytest.raises(UnsupportedTarget, match="tokens of other draft nodes and other rows change"):
        check_target(model)


def test_unchecked_it_would_write_another_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control, and what must have been seen: some prompts' texts differ."""
    monkeypatch.setattr("hf_specgen.generate.check_target", lambda model, longest, rows: None)
    model = torch_dynamic(tiny())
    differ = 0
    for seed in range(4):
        ids, mask = prompts([12], seed=seed)
        expected = plain(model, ids, mask)
        watch = drafter_of("branches", model, texts_of(expected, mask))
        differ += not torch.equal(ours(model, watch, ids, mask), expected)
    assert differ


@pytest.mark.parametrize("lengths", [[12], [5, 17, 11, 24]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scale_per_token_is_served(dtype: torch.dtype, lengths: list[int]) -> None:
    model = with_linears(PerToken)(tiny()).to(dtype)
    assert leak_of(model) == 0
    ids, mask = prompts(lengths)
    expected = plain(model, ids, mask)
    watch = drafter_of("branches", model, texts_of(expected, mask))
    text = ours(model, watch, ids, mask)
    assert watch.longest >= 2
    if dtype is torch.float32:
        assert torch.equal(text, expected)


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral", "gpt2", "deepseek_v3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_models_do_not_leak(family: str, dtype: torch.dtype) -> None:
    """Passes of one shape round alike; experts get as many tokens as are sent to them, which rounds otherwise."""
    model = build(family, "eager").to(dtype)
    with_experts = family in ("mixtral", "deepseek_v3")
    assert leak_of(model) <= (0.02 if dtype is torch.bfloat16 else 1e-5) * with_experts


class FirstComeFirstServed(nn.Module):
    """Drop what exceeds a capacity of the pass, as experts with capacities do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor) -> Tensor:
        flat = hidden.flatten(0, -2)
        chosen = flat[:, 0] > 0
        dropped = chosen & (chosen.long().cumsum(0) > 3)
        return self.inner(hidden) * (~dropped).view(*hidden.shape[:-1], 1)


def test_experts_with_a_capacity_are_refused() -> None:
    model = tiny()
    for layer in model.model.layers:
        layer.mlp = FirstComeFirstServed(layer.mlp)
    with pytest.raises(UnsupportedTarget, match="self-check"):
        check_target(model)
    assert leak_of(model) > 0.01
