"""What a model is made of: whether all of it is the code that our tests ran, and whether it changed since."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any
from weakref import ref

from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from hf_specgen.models.attention import implementation_of
from hf_specgen.models.prepack import is_plain
from hf_specgen.models.wrappers import foreign_hooks

_OWN_WRITERS = frozenset({"transformers", "torch", "hf_specgen"}) | sys.stdlib_module_names
_OWN_MODULES = (
    "transformers.models.",
    "transformers.activations",
    "transformers.pytorch_utils",
    "torch.nn.modules.",
    "hf_specgen.models.prepack",
)
_QUANTISING = ("torch.ao.", "torchao.", "bitsandbytes.")


@dataclass(frozen=True)
class Makeup:
    """Tell what a model is made of.

    ``is_own``: every module is of a class of transformers' models, of torch.nn or ours, runs that class's own forward
    without hooks of the user's, and holds plain tensors. ``is_quantised``: linear layers may round what they read.
    ``parts`` differ when a module, a forward, a hook, the attention or the dtype was replaced.
    """

    is_own: bool
    is_quantised: bool
    parts: tuple[object, ...]


def makeup_of(model: PreTrainedModel) -> Makeup:
    """Look at every module of a model once; a few microseconds a module."""
    kinds: dict[type[nn.Module], bool] = {}
    files: dict[str, bool] = {}
    parts: list[object] = [implementation_of(model), model.dtype]
    quantised = vars(model.config).get("quantization_config") is not None
    everywhere = foreign_hooks(None)
    own = _is_own_attention(model) and not quantised and not everywhere
    parts.append(everywhere)
    for module in model.modules():
        kind = type(module)
        if kind not in kinds:
            if kind.__module__ not in files:
                files[kind.__module__] = _is_own_file(kind.__module__)
            kinds[kind] = files[kind.__module__] and _is_own_function(kind.forward)
            quantised = quantised or kind.__module__.startswith(_QUANTISING)
        replaced = _replaced_forward(module)
        hooks = foreign_hooks(module)
        own = own and kinds[kind] and replaced is None and not hooks
        parts.append((kind, _identity(replaced), hooks))
        if not quantised:
            tensors = (*module._parameters.values(), *module._buffers.values())
            quantised = any(tensor is not None and not is_plain(tensor) for tensor in tensors)
    parts += [_identity(kind.forward) for kind in kinds]
    return Makeup(own and not quantised, quantised, tuple(parts))


def _is_own_file(name: str) -> bool:
    """Tell whether a Python module is one of ours to know, and the functions in it are as they were shipped.

    Models call some by their name there (rotary embedding, eager attention), so replacing one changes the model.
    """
    if not name.startswith(_OWN_MODULES):
        return False
    functions = (value for value in vars(sys.modules[name]).values() if isinstance(value, FunctionType))
    return not name.startswith("transformers.models.") or all(map(_is_own_function, functions))


def _is_own_function(function: Any) -> bool:
    """Tell whether transformers, torch, Python or this library wrote a function (``wraps`` hides who wrapped it)."""
    if not isinstance(function, FunctionType):
        return False
    writers = (function.__module__, str(function.__globals__.get("__name__")))
    return all(writer.partition(".")[0] in _OWN_WRITERS for writer in writers)


def _is_own_attention(model: PreTrainedModel) -> bool:
    """Tell whether the attention that the config names is transformers' own (models look it up in a table)."""
    written_in = sys.modules.get(type(model).__module__)  # a class made at run time may name a file that is not there
    table = AttentionInterface()
    if written_in is not None:
        table = vars(written_in).get("ALL_ATTENTION_FUNCTIONS", table)
    function = table.get(implementation_of(model))
    return function is None or _is_own_function(function)


def _replaced_forward(module: nn.Module) -> Any | None:
    """Return the forward that somebody put on a module object, None where its class's own runs.

    accelerate's hooks, which only move tensors, and ``torch.compile`` put a forward around the class's own.
    """
    forward = vars(module).get("forward")
    if forward is None:
        return None
    hook = vars(module).get("_hf_hook")
    if hook is not None and all(type(part).__module__ == "accelerate.hooks" for part in _hooks(hook)):
        forward = vars(module)["_old_forward"]
    if isinstance(forward, FunctionType):
        forward = vars(forward).get("_torchdynamo_orig_callable", forward)
    is_own = isinstance(forward, MethodType) and forward.__self__ is module
    return None if is_own and forward.__func__ is type(module).forward else forward


def _hooks(hook: Any) -> Iterator[Any]:
    yield hook
    for part in vars(hook).get("hooks", ()):
        yield from _hooks(part)


def _identity(function: Any | None) -> object:
    """Return what tells a callable from another without keeping it, and what it closes over, alive."""
    if isinstance(function, MethodType):
        return (*_identity_of(function.__func__), id(function.__self__))
    return None if function is None else _identity_of(function)


def _identity_of(function: Any) -> tuple[object, object]:
    code: object = function.__code__ if isinstance(function, FunctionType) else type(function)
    try:
        return ref(function), code  # the next one of the same code may get the address of one that is gone
    except TypeError:
        return id(function), code
