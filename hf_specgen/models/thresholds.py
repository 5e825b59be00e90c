"""Lengths at which a model starts to compute otherwise (windows, chunks, scales, picked keys), read from its config."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

LOW = 8
"""What a threshold is lowered to: the self-check's texts lie on both sides of it."""

_NAMES = re.compile(
    r"window|chunk|floor|^keep_|^index_|^indexer_|sparse|block_(size|len)|local_attention|max_distance|rel_extent"
)
_OTHERS = re.compile(r"layers|pattern|step|head|dim|experts|mamba|vision|audio|chunk_size_feed_forward|freq|offset")
_SCALED = "llama_4_scaling_beta"
_SCALED_FROM = "original_max_position_embeddings"


@dataclass(frozen=True)
class Threshold:
    """Name a number of tokens in a configuration; ``path`` leads to it."""

    path: tuple[str, ...]
    value: int

    @property
    def name(self) -> str:
        """Return the setting's name as one would write it."""
        return ".".join(self.path)


def thresholds_of(config: PretrainedConfig, above: int) -> list[Threshold]:
    """Return what a text of more than ``above`` tokens may run into, smallest first."""
    settings = config.get_text_config(decoder=True).to_dict()
    found = [Threshold((name,), value) for name, value in settings.items() if _is_threshold(name, value)]
    rope = settings.get("rope_parameters") or {}
    kinds = [((), rope), *(((name,), inner) for name, inner in rope.items() if isinstance(inner, dict))]
    for path, inner in kinds:
        if inner.get(_SCALED) and isinstance(inner.get(_SCALED_FROM), int):
            found.append(Threshold(("rope_parameters", *path, _SCALED_FROM), inner[_SCALED_FROM]))
    return sorted((one for one in found if one.value > above), key=lambda one: one.value)


def copy_of(model: PreTrainedModel, in_float32: bool) -> PreTrainedModel | None:
    """Return a copy over the same weights that may be changed; None where that cannot be had.

    ``in_float32`` lets each module of the copy compute in float32, cast while it runs: half precision would hide small
    differences.
    """
    shared: dict[int, Any] = {}
    for module in model.modules():
        kept = [*module._parameters.values(), *module._buffers.values(), vars(module).get("_hf_hook")]
        shared.update({id(one): one for one in kept if one is not None})
    if in_float32 and any(parameter.is_meta for parameter in model.parameters()):
        return None  # weights that come when a module runs, and in their own dtype
    try:
        twin = copy.deepcopy(model, shared)
    except (TypeError, RuntimeError, NotImplementedError):  # something in it cannot be copied
        return None
    for module in twin.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.dim() == 1:  # rotary factors are written in place
                module._buffers[name] = buffer.clone()
        if in_float32 and any(_is_half(tensor) for tensor in module._parameters.values()):
            module.register_forward_pre_hook(_Float32(dict(module._parameters)).begin, prepend=True)
            module.register_forward_hook(_Float32(dict(module._parameters)).end, always_call=True)
    return twin


def lower(twin: PreTrainedModel, threshold: Threshold) -> None:
    """Set a threshold of a copy to ``LOW``, in its config and in modules that hold the number under the same name."""
    *way, name = threshold.path
    holder: dict[str, Any] = vars(twin.config.get_text_config(decoder=True))
    for step in way:
        holder = holder[step]
    holder[name] = LOW
    for module in twin.modules():
        if not way and vars(module).get(name) == threshold.value:
            vars(module)[name] = LOW


@dataclass(frozen=True)
class _Float32:
    """Cast one module's half-precision parameters while it runs."""

    own: dict[str, nn.Parameter | None]

    def begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        for name, parameter in self.own.items():
            if parameter is not None and _is_half(parameter):
                module._parameters[name] = nn.Parameter(parameter.detach().float(), requires_grad=False)

    def end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        module._parameters.update(self.own)


def _is_half(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.dtype in (torch.bfloat16, torch.float16)


def _is_threshold(name: str, value: Any) -> bool:
    counts = isinstance(value, int) and not isinstance(value, bool)
    return counts and _NAMES.search(name) is not None and _OTHERS.search(name) is None
