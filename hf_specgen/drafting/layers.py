"""Decoder layers of neural drafters, composed of transformers' own attention, MLP and norm classes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig
from transformers.models.glm4_moe import modeling_glm4_moe as glm
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from hf_specgen import ops
from hf_specgen.checkpoints.config import PART
from hf_specgen.drafting.unrolling import StepMask
from hf_specgen.errors import SpecGenError
from hf_specgen.models.slot_cache import SlotCache

_NAME = "specgen_draft"

Rope = tuple[Tensor, Tensor]
Masks = Tensor | StepMask | Mapping[str, Tensor] | Mapping[str, StepMask] | None
"""What every layer sees, or what the layers of each kind see."""


@dataclass(frozen=True)
class LayerClasses:
    """Hold the classes of transformers that one ``layer_type`` is made of.

    Llama's and Qwen3's attention rotate whole heads; GLM's is the same, with and without norms of queries and keys,
    and rotates as many values as its rotary module makes factors for.
    """

    attention: type[nn.Module]
    mlp: type[nn.Module]
    norm: type[nn.Module]
    rotary: type[nn.Module]

    @classmethod
    def of(cls, layer_type: str, config: PretrainedConfig | None = None) -> LayerClasses:
        """Return the classes of a type; ``config``: of a layer. Raises: ``SpecGenError`` for one that is not known."""
        if config is not None and PART in config.rope_parameters:
            return replace(cls.of(layer_type), attention=glm.Glm4MoeAttention, rotary=glm.Glm4MoeRotaryEmbedding)
        if layer_type == "llama":
            return cls(llama.LlamaAttention, llama.LlamaMLP, llama.LlamaRMSNorm, llama.LlamaRotaryEmbedding)
        if layer_type == "qwen3":
            return cls(qwen3.Qwen3Attention, qwen3.Qwen3MLP, qwen3.Qwen3RMSNorm, qwen3.Qwen3RotaryEmbedding)
        raise SpecGenError(f"layer_type={layer_type!r} is unknown: 'llama' or 'qwen3' is required.")


class DraftLayer(nn.Module):
    """Run one decoder layer over a slot cache: attention and MLP, each behind its norm and beside its residual.

    ``input_norm=False`` leaves the norm before attention out, as the first layer of EAGLE does.
    """

    def __init__(self, config: PretrainedConfig, layer_type: str, index: int, input_norm: bool = True) -> None:
        super().__init__()
        classes = LayerClasses.of(layer_type, config)
        config._attn_implementation = _NAME
        self.index = index
        self.kind = (config.to_dict().get("layer_types") or ["full_attention"] * config.num_hidden_layers)[index]
        self.self_attn = classes.attention(config, index)
        bias = self.self_attn.get_submodule("o_proj")._parameters["bias"]
        if config.attention_bias and bias is None:  # GLM's attention leaves this one out
            self.self_attn.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, config.hidden_size)
        self.mlp = classes.mlp(config)
        self.post_attention_layernorm = self._norm(classes, config)
        if input_norm:
            self.input_layernorm = self._norm(classes, config)
        self._cache_name = _cache_name(classes.attention)
        _register()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make the attention known again in the process that unpickles."""
        super().__setstate__(state)
        _register()

    def forward(self, states: Tensor, rope: Rope, mask: Masks, cache: SlotCache | None) -> Tensor:
        """Return the residual stream behind the layer.

        Shapes: ``states (B, S, H)``, ``rope`` two ``(B or 1, S, D)``, ``mask (B or 1, 1, S, T)`` bool, True where seen,
        or one for each kind of layer.
        """
        norm = self._modules.get("input_layernorm")
        return self.run(states if norm is None else norm(states), states, rope, mask, cache)

    def run(self, inputs: Tensor, residual: Tensor, rope: Rope, mask: Masks, cache: SlotCache | None) -> Tensor:
        """Attend with ``inputs (B, S, H)``, already normed, beside ``residual (B, S, H)``; then the MLP."""
        own = mask[self.kind] if isinstance(mask, Mapping) else mask
        attended, _ = self.self_attn(inputs, position_embeddings=rope, attention_mask=own, **{self._cache_name: cache})
        residual = residual + attended
        return residual + self.mlp(self.post_attention_layernorm(residual))

    @staticmethod
    def _norm(classes: LayerClasses, config: PretrainedConfig) -> nn.Module:
        return classes.norm(config.hidden_size, eps=config.rms_norm_eps)


class PairLayer(DraftLayer):
    """Run the first layer of EAGLE-3: attention reads the normed token beside the normed feature.

    ``norm_before_residual``: the residual stream starts at the normed feature instead of the feature itself.
    Source: Li et al. 2025, "EAGLE-3: scaling up inference acceleration of LLMs via training-time test", section 3.
    """

    def __init__(self, config: PretrainedConfig, layer_type: str, norm_before_residual: bool) -> None:
        super().__init__(config, layer_type, 0)
        self.norm_before_residual = norm_before_residual
        self.hidden_norm = self._norm(LayerClasses.of(layer_type), config)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = self.self_attn.get_submodule(name)
            assert isinstance(narrow, nn.Linear)
            wide = nn.Linear(2 * narrow.in_features, narrow.out_features, bias=narrow.bias is not None)
            self.self_attn.register_module(name, wide)

    def forward(  # type: ignore[override]
        self, token: Tensor, feature: Tensor, rope: Rope, mask: Masks, cache: SlotCache | None
    ) -> Tensor:
        """Return the stream behind the layer. Shapes: ``token, feature (B, S, H)``, else as ``DraftLayer``'s."""
        normed = self.hidden_norm(feature)
        inputs = torch.cat((self.input_layernorm(token), normed), -1)
        return self.run(inputs, normed if self.norm_before_residual else feature, rope, mask, cache)


class Rotary:
    """Make the rotary factors of positions, in float32 whatever the drafter's dtype.

    Not a module: casting a drafter to 16 bits must not round its frequencies, and they are in no checkpoint.
    """

    def __init__(self, config: PretrainedConfig, layer_type: str) -> None:
        self._config = config
        self._type = layer_type
        self._made: tuple[torch.device, nn.Module] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is made when it is needed."""
        return {**self.__dict__, "_made": None}

    def __call__(self, like: Tensor, positions: Tensor) -> Rope:
        """Return cosines and sines ``(B or 1, S, R)`` of ``positions (B or 1, S)`` in the dtype of ``like``.

        R values of a head are rotated: all of them, or the first ones.
        """
        if self._made is None or self._made[0] != like.device:
            with torch.device("cpu"):  # a drafter may be built under another default, the meta device among them
                module = LayerClasses.of(self._type, self._config).rotary(self._config)
            self._made = like.device, module.to(like.device)
        cos, sin = self._made[1](like, positions)
        return cos, sin


def draft_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | StepMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend under a tree mask without repeating keys and values; with gradients it is transformers' own sdpa.

    A ``StepMask`` in its place attends itself.

    Shapes: ``query (B, Hq, S, D)``, ``key, value (B, Hkv, T, D)``, ``attention_mask (B or 1, 1, S, T)`` bool. Returns:
    ``(B, S, Hq, D)`` and None.
    """
    if isinstance(attention_mask, StepMask):
        return attention_mask.attend(query, key, value, query.shape[-1] ** -0.5 if scaling is None else scaling), None
    if torch.is_grad_enabled() or attention_mask is None or attention_mask.dtype != torch.bool:
        own = AttentionInterface()["sdpa"]
        return own(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    out = ops.tree_attention(query, key, value, attention_mask, scale, 0.0, None)
    return out.transpose(1, 2).contiguous(), None


def _register() -> None:
    AttentionInterface.register(_NAME, draft_attention)


def _cache_name(attention: type[nn.Module]) -> str:
    """Return what a class of transformers calls its cache: older ones say past_key_values."""
    return "cache" if "cache" in inspect.signature(attention.forward).parameters else "past_key_values"
