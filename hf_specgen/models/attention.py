"""Attention of a draft pass: few queries over the slots under a tree mask, instead of the model's own function.

transformers looks the function up by the name in the model's config. The name of ours stands there while a pass runs,
and only then. ``HF_SPECGEN_ATTENTION=model|tree`` or ``use_attention`` decide otherwise than ``PassAttention`` would.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from hf_specgen import ops
from hf_specgen.errors import SpecGenError

MODEL = "model"
TREE = "tree"
_VARIABLE = "HF_SPECGEN_ATTENTION"
# One name beside each implementation: another thread's forward may build its mask under one and read the other.
_NAMES = {"sdpa": "specgen_tree_sdpa", "eager": "specgen_tree_eager"}
_OWNERS = {ours: own for own, ours in _NAMES.items()}
# Eager is all these have. Our function rounds as theirs do and is several times faster.
_EAGER_MODELS = frozenset({"gemma2", "gemma2_text", "gpt_oss"})
_EAGER_FUNCTION = "eager_attention_forward"

_chosen: ContextVar[str | None] = ContextVar("chosen_attention", default=None)
_in_pass: ContextVar[bool] = ContextVar("in_pass", default=False)

Attention = Callable[..., tuple[Tensor, Tensor | None]]


@contextmanager
def use_attention(name: str) -> Iterator[None]:
    """Let passes of models driven from inside the block use the ``model``'s own attention, or ours: ``tree``.

    Blocks nest, the inner one decides. Raises: ``SpecGenError`` for another name.
    """
    token = _chosen.set(_check(name))
    try:
        yield
    finally:
        _chosen.reset(token)


def implementation_of(model: PreTrainedModel) -> str:
    """Return the implementation that the user chose, also while another thread's pass shows ours."""
    name = model.config.get_text_config(decoder=True)._attn_implementation
    return _OWNERS.get(name, name)


class PassAttention:
    """Choose the attention of one model's passes, and switch it on while one runs.

    Ours by default: where sdpa would copy keys and values for query heads that share them, and for families that have
    eager attention alone.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.implementation = implementation_of(model)
        choice = _chosen.get() or _from_environment() or (TREE if self._is_faster() else MODEL)
        self.name = _NAMES.get(self.implementation) if choice == TREE and self._is_possible() else None
        if self.name is not None:
            AttentionInterface.register(self.name, attend if self.implementation == "sdpa" else attend_as_eager)
            AttentionMaskInterface.register(self.name, AttentionMaskInterface()[self.implementation])

    @contextmanager
    def on(self) -> Iterator[None]:
        """Switch our function on; the config is as before afterwards."""
        if self.name is None:
            yield
            return
        text = self._model.config.get_text_config(decoder=True)
        text._attn_implementation = self.name
        token = _in_pass.set(True)
        try:
            yield
        finally:
            _in_pass.reset(token)
            text._attn_implementation = self.implementation

    def _is_faster(self) -> bool:
        settings = self._model.config.get_text_config(decoder=True).to_dict()
        if self.implementation == "eager":
            stock = type(self._model).__module__.startswith("transformers.")
            return stock and settings.get("model_type") in _EAGER_MODELS
        heads = settings.get("num_attention_heads")
        shared = settings.get("num_key_value_heads")
        return heads is not None and shared is not None and shared < heads

    def _is_possible(self) -> bool:
        """Tell whether calls that are no part of a pass can be handed to the model's own function."""
        return self.implementation == "sdpa" or _EAGER_FUNCTION in vars(sys.modules[type(self._model).__module__])


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Stand in for transformers' sdpa during a pass; anything else is handed to it.

    Shapes: ``query (B, Hq, S, D)``, ``key, value (B, Hkv, T, D)``, ``attention_mask (B, 1, S, T)`` bool. Returns:
    ``(B, S, Hq, D)`` and None.
    """
    # some models (Doge) make a mask of numbers for every head out of ours
    plain_mask = attention_mask is not None and attention_mask.dtype == torch.bool and attention_mask.shape[1] == 1
    if not plain_mask or not _is_ours(dropout, kwargs, ("softcap", "s_aux", "position_bias")):
        own = AttentionInterface()["sdpa"]
        return own(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    assert attention_mask is not None
    return _run(query, key, value, attention_mask, scaling)


def attend_as_eager(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Stand in for a model's own eager function during a pass; anything else is handed to it.

    Shapes: as ``attend``; ``attention_mask`` is zero where a query sees a slot, and the lowest number elsewhere.
    """
    if attention_mask is None or not _is_ours(dropout, kwargs, ("position_bias",)):
        own: Attention = vars(sys.modules[type(module).__module__])[_EAGER_FUNCTION]
        return own(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    return _run(query, key, value, attention_mask == 0, scaling, kwargs.get("softcap"), kwargs.get("s_aux"))


def _is_ours(dropout: float, kwargs: dict[str, Any], foreign: tuple[str, ...]) -> bool:
    in_pass = torch.compiler.is_compiling() or _in_pass.get()  # a compiler cannot read the variable
    return in_pass and dropout == 0 and all(kwargs.get(name) is None for name in foreign)


def _run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, None]:
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    out = ops.tree_attention(query, key, value, mask, scale, softcap or 0.0, sinks)
    return out.transpose(1, 2).contiguous(), None


def _from_environment() -> str | None:
    name = os.environ.get(_VARIABLE)
    return _check(name) if name else None


def _check(name: str) -> str:
    if name not in (MODEL, TREE):
        raise SpecGenError(f"attention {name!r} ({_VARIABLE} or use_attention): 'model' or 'tree' is required.")
    return name
