"""A warm start: new drafters are sized like their target, and begin with its weights where those fit.

A layer that starts as the target's last one, a head of the target's rows and its final norm learn in minutes what
random weights learn in hours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hf_specgen.checkpoints.config import DrafterConfig
from hf_specgen.drafting.layers import DraftLayer, PairLayer
from hf_specgen.drafting.learned import LearnedDrafter
from hf_specgen.errors import SpecGenError, UnsupportedTarget
from hf_specgen.models.facts import TargetFacts, holds_numbers, whole
from hf_specgen.models.taps import decoder_layers

_MANY_LAYERS = 7  # from here on the default boundaries of EAGLE-3 are distinct
_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")

Notes = list[str]


def default_boundaries(layers: int) -> tuple[int, ...]:
    """Return the residual streams that EAGLE-3 reads of a target: low, middle and high; the last of a shallow one."""
    if layers >= _MANY_LAYERS:
        return (2, layers // 2, layers - 3)
    return tuple(range(max(0, layers - 2), layers + 1))


def cover(drafter: LearnedDrafter, ids: Tensor | None) -> None:
    """Set the map of a reduced vocabulary. Raises: ``SpecGenError`` when it is not as large as the config says."""
    if not drafter.config.reduces_vocabulary:
        return
    size = drafter.config.draft_vocab_size
    if ids is None or len(ids) != size:
        raise SpecGenError(f"a draft vocabulary of {size} ids was asked for: exactly so many are required.")
    known = ids.sort().values.cpu()
    buffers = dict(drafter.named_buffers())
    buffers["d2t"].copy_(known - torch.arange(size))
    if "t2d" in buffers:
        buffers["t2d"].fill_(False)[known] = True


def covered(drafter: LearnedDrafter) -> Tensor | None:
    """Return the target's ids that a drafter covers, None for all."""
    offsets = dict(drafter.named_buffers()).get("d2t")
    return None if offsets is None else (offsets + torch.arange(len(offsets), device=offsets.device)).cpu()


@torch.no_grad()
def warm_start(drafter: LearnedDrafter, target: PreTrainedModel) -> Notes:
    """Copy what fits from a target into a drafter of EAGLE's kind: layers, final norm, head, embedding.

    Returns: what was taken and what was not, in words.
    """
    notes: Notes = []
    model = Layered.of(target)
    modules = drafter._modules
    if drafter.config.hidden_size != TargetFacts.of(target).hidden_size:
        return ["random weights: the drafter is not as wide as its target"]
    ours = [module for module in drafter.modules() if isinstance(module, DraftLayer)]
    if model.fits(drafter.config):
        for mine, theirs in zip(ours, model.layers[-len(ours) :], strict=False):
            _copy_layer(mine, theirs)
        taken = min(len(ours), len(model.layers))
        notes.append(f"the target's last {f'{taken} layers' if taken > 1 else 'layer'}")
    else:
        notes.append(f"random layers: {model.reason or 'other sizes than the target has'}")
    _pass_on(drafter, len(model.layers))
    scale = None if model.norm is None else norm_scale(model.norm)
    if "norm" in modules and scale is not None:
        _fill(drafter.get_parameter("norm.weight"), scale)
        notes.append("its final norm")
    known = covered(drafter)
    head = target.get_output_embeddings()
    if "lm_head" in modules and head is not None and holds_numbers(head.weight):
        rows = whole(head.weight)
        size = drafter.config.draft_vocab_size  # a padded head has more rows than there are ids
        _fill(drafter.get_parameter("lm_head.weight"), rows[:size] if known is None else rows[known.to(rows.device)])
        notes.append("its head" if known is None else f"{len(known)} rows of its head")
    embedding = target.get_input_embeddings().weight
    if "embed_tokens" in modules and holds_numbers(embedding):
        _fill(drafter.get_parameter("embed_tokens.weight"), whole(embedding)[: drafter.config.vocab_size])
        notes.append("its embedding")
    return notes


@dataclass(frozen=True)
class Layered:
    """Hold a target's layers and final norm; ``reason``: why its last layer is not one that a drafter can have."""

    layers: tuple[nn.Module, ...]
    norm: nn.Module | None
    reason: str = ""

    @classmethod
    def of(cls, target: PreTrainedModel) -> Layered:
        """Look at a target's modules."""
        try:
            layers = decoder_layers(target)
        except UnsupportedTarget:
            return cls((), None, "the target's layers cannot be told")
        return cls(layers, _final_norm(target), _why_not(layers[-1]))

    def fits(self, config: DrafterConfig) -> bool:
        """Tell whether the last layer has the shapes of a drafter's layer."""
        if self.reason:
            return False
        wanted = {name: vars(config)[name] for name in self._shapes()}
        return self._shapes() == wanted

    def _shapes(self) -> dict[str, Any]:
        last = self.layers[-1]
        sizes = {name: last.get_submodule(f"self_attn.{name}") for name in ("q_proj", "k_proj")}
        rows = {name: _shape(module)[0] for name, module in sizes.items()}
        normed = "q_norm" in dict(last.get_submodule("self_attn").named_children())
        config = vars(last.get_submodule("self_attn"))
        dim = int(config.get("head_dim") or 0)
        return {
            "hidden_size": _shape(sizes["q_proj"])[1],
            "head_dim": dim,
            "num_attention_heads": rows["q_proj"] // max(1, dim),
            "num_key_value_heads": rows["k_proj"] // max(1, dim),
            "intermediate_size": _shape(last.get_submodule("mlp.gate_proj"))[0],
            "layer_type": "qwen3" if normed else "llama",
        }

    def sizes(self, target: PreTrainedModel) -> dict[str, Any]:
        """Return the fields of a drafter's config that follow the target's layers."""
        known = target.config.get_text_config(decoder=True).to_dict()
        hidden = TargetFacts.of(target).hidden_size
        heads = int(known.get("num_attention_heads") or known.get("n_head") or max(1, hidden // 64))
        fields: dict[str, Any] = {
            "hidden_size": hidden,
            "intermediate_size": int(known.get("intermediate_size") or known.get("n_inner") or 4 * hidden),
            "num_attention_heads": heads,
            "num_key_value_heads": int(known.get("num_key_value_heads") or heads),
            "head_dim": hidden // heads if known.get("kv_lora_rank") else int(known.get("head_dim") or hidden // heads),
            "rms_norm_eps": float(known.get("rms_norm_eps") or 1e-6),
            "rope_parameters": _rope(known),
            "max_position_embeddings": int(known.get("max_position_embeddings") or known.get("n_positions") or 2048),
        }
        if self.reason:
            return fields
        last = self.layers[-1]
        biases = [last.get_submodule(f"self_attn.{name}")._parameters.get("bias") for name in _ATTENTION]
        fields |= self._shapes()
        fields["hidden_act"] = str(known.get("hidden_act") or "silu")
        fields["attention_bias"] = any(bias is not None for bias in biases)
        fields["mlp_bias"] = last.get_submodule("mlp.gate_proj")._parameters.get("bias") is not None
        return fields


def _rope(known: dict[str, Any]) -> dict[str, Any] | None:
    """Return the rotary settings of a target; of kinds of layers that have their own, the last layer's."""
    rope = known.get("rope_parameters") or {}
    if rope and all(isinstance(value, dict) or value is None for value in rope.values()):
        kinds = known.get("layer_types") or list(rope)
        rope = rope.get(kinds[-1]) or next((value for value in rope.values() if value), {})
    kept = {name: value for name, value in rope.items() if name != "partial_rotary_factor"}
    return kept if kept.get("rope_theta") else None


def _why_not(layer: nn.Module) -> str:
    """Return why a layer is not built like a drafter's, nothing where it is."""
    if set(dict(layer.named_children())) != _PARTS:
        return "the target's layers are built otherwise"
    attention, mlp = (dict(layer.get_submodule(name).named_children()) for name in ("self_attn", "mlp"))
    linear = [attention.get(name) for name in _ATTENTION] + [mlp.get(name) for name in _MLP]
    weights = [module._parameters.get("weight") if isinstance(module, nn.Linear) else None for module in linear]
    if any(weight is None for weight in weights) or set(attention) - {*_ATTENTION, "q_norm", "k_norm", "rotary_emb"}:
        return "the target's attention or MLP is built otherwise"
    if not all(weight is not None and holds_numbers(weight) for weight in weights):
        return "the target's weights are quantised"
    if any(norm_scale(layer.get_submodule(name)) is None for name in ("input_layernorm", "post_attention_layernorm")):
        return "the target's norms are of another kind"
    return ""


def _final_norm(target: PreTrainedModel) -> nn.Module | None:
    width = TargetFacts.of(target).hidden_size
    found = [
        module
        for module in target.get_decoder().children()
        if [tuple(parameter.shape) for parameter in module.parameters()] == [(width,)]
    ]
    return found[-1] if found else None


@torch.no_grad()
def norm_scale(norm: nn.Module) -> Tensor | None:
    """Return by what an RMS norm multiplies ``(H,)``, whichever way it stores that; None for any other norm."""
    parameters = list(norm.parameters())
    if len(parameters) != 1 or not parameters[0].is_floating_point():
        return None
    weight = parameters[0]
    if isinstance(weight, DTensor):
        return whole(weight)
    ones = torch.ones(1, 1, len(weight), device=weight.device, dtype=weight.dtype)
    # large: the epsilon must not show
    once = norm(1024 * ones)
    larger = norm(2048 * ones)
    same = bool((once - larger).abs().max() <= 0.01 * once.abs().max())
    return once[0, 0] if same and bool(once.any()) else None


def _copy_layer(mine: DraftLayer, theirs: nn.Module) -> None:
    weights = dict(theirs.named_parameters())
    for name, parameter in mine.named_parameters():
        place = name.replace("hidden_norm", "input_layernorm")
        if "norm" in name:
            scale = norm_scale(theirs.get_submodule(place.removesuffix(".weight")))
            assert scale is not None
            _fill(parameter, scale)
        elif place not in weights:  # Qwen2 has no bias behind its attention, ours has
            parameter.zero_()
        else:
            value = whole(weights[place])
            wide = isinstance(mine, PairLayer) and value.dim() == 2 and parameter.shape[1] == 2 * value.shape[1]
            # the token begins without weight: 24 steps on SmolLM2 ended at 11.2 so, at 11.7 with the feature's weights
            _fill(parameter, torch.cat((torch.zeros_like(value), value), 1) if wide else value)


def _pass_on(drafter: LearnedDrafter, layers: int) -> None:
    """Let ``fc`` pass on the feature that the target's last layer reads, or the nearest to it, and nothing else."""
    weight = drafter.get_parameter("fc.weight")
    width = drafter.config.target_hidden_size
    boundaries = drafter.config.aux_layer_boundaries
    if weight.shape[0] != width or weight.shape[1] % width:
        return
    near = [abs(boundary - (layers - 1)) for boundary in boundaries]
    place = near.index(min(near)) if near else weight.shape[1] // width - 1
    weight.zero_()
    weight[:, place * width : (place + 1) * width].fill_diagonal_(1.0)
    bias = drafter.get_submodule("fc")._parameters.get("bias")
    if bias is not None:
        bias.zero_()


def _fill(parameter: Tensor, value: Tensor) -> None:
    parameter.copy_(value.to(parameter.device, parameter.dtype))


def _shape(module: nn.Module) -> tuple[int, ...]:
    return tuple(module.get_parameter("weight").shape)
