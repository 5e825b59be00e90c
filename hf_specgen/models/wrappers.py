"""Models as callers hold them: inside wrappers, offloaded, with hooks and adapters that count the rows of a pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel

from hf_specgen.errors import SpecGenError, UnsupportedTarget

_RUNNERS = frozenset({"torch", "transformers", "accelerate", "hf_specgen"})
"""Packages whose hooks treat every row alike."""
_LAYERS = _RUNNERS | {"peft", "bitsandbytes", "torchao", "optimum", "gptqmodel", "awq", "hqq", "fbgemm_gpu"}
"""Packages whose modules treat every row alike."""
_ROW_HOOK = "_adapter_names_pre_forward_hook"  # PEFT's adapter of each row: it needs the batch's rows in their order


def roots(model: object) -> list[PreTrainedModel]:
    """Return the outermost transformers models: the model itself, or those inside a wrapper of another kind."""
    return [cast(PreTrainedModel, found) for found in _outermost(model, lambda part: isinstance(part, PreTrainedModel))]


def bare(model: object) -> PreTrainedModel:
    """Return the transformers model inside wrappers (``torch.compile``, PEFT, data parallel), itself without any.

    Raises: ``SpecGenError`` unless there is exactly one.
    """
    found = roots(model)
    return cast(PreTrainedModel, _only(found, model, "transformers models"))


def writer(model: object) -> nn.Module:
    """Return what ``model.generate()`` runs: the outermost object that has the method from its class (PEFT's has).

    Raises: ``SpecGenError`` unless there is exactly one.
    """
    found = _outermost(model, lambda part: "generate" in dir(type(part)))
    return _only(found, model, "models that can generate()")


def _outermost(model: object, fits: Callable[[nn.Module], bool]) -> list[nn.Module]:
    if not isinstance(model, nn.Module):  # a name, a class: callers are told what they gave
        return []
    if fits(model):
        return [model]
    return [part for child in model.children() for part in _outermost(child, fits)]


def _only(found: Sequence[nn.Module], model: object, wanted: str) -> nn.Module:
    if len(found) != 1:
        raise SpecGenError(
            f"{type(model).__name__} holds {len(found)} {wanted}: one is required, by itself or inside a wrapper such "
            "as torch.compile's or PEFT's. Pass the model that writes."
        )
    return found[0]


def driven(model: nn.Module) -> PreTrainedModel:
    """Return the model inside wrappers for passes that go around the wrapper.

    Raises: ``UnsupportedTarget`` when the wrapper puts soft prompts before the text, ``SpecGenError`` as ``bare``.
    """
    found = bare(model)
    for wrapper in model.modules():
        if wrapper is found:
            break
        if "active_peft_config" in dir(type(wrapper)):
            settings = cast(Any, wrapper).active_peft_config
            if settings.is_prompt_learning:
                raise UnsupportedTarget(
                    f"{type(wrapper).__name__} puts a soft prompt ({settings.peft_type.value}) before every text, and "
                    "draft passes know token ids alone: a model without one is required. Use plain generate(), or "
                    "adapters that can be merged (LoRA)."
                )
    return found


def shared_seed(model: PreTrainedModel, seed: int) -> int:
    """Return the seed of the first process of those that hold one tensor-parallel model: they must write one text.

    Processes that hold whole models, or parts of weights alone (FSDP), keep their own.
    """
    group = _tensor_group(model)
    if group is None:
        return seed
    parts = torch.tensor([seed >> 32, seed & 0xFFFFFFFF], device=input_device(model))
    dist.broadcast(parts, group=group, group_src=0)
    high, low = parts.tolist()
    return int(high << 32 | low)


def _tensor_group(model: PreTrainedModel) -> dist.ProcessGroup | None:
    """Return the processes among which the model's matrices are split, each with the same rows; None without any."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    meshes = [weight.device_mesh for weight in model.parameters() if isinstance(weight, DTensor)]
    for mesh in meshes:
        if mesh.mesh_dim_names is not None and "tp" in mesh.mesh_dim_names:
            return mesh.get_group("tp")
    joint = (model.tp_size or 1) > 1
    if joint or (meshes and not any(isinstance(part, FSDPModule) for part in model.modules())):
        return meshes[0].get_group() if meshes and meshes[0].ndim == 1 else dist.group.WORLD
    return None


def input_device(model: PreTrainedModel) -> torch.device:
    """Return where the model takes its token ids: where its embedding is computed, also while that is offloaded.

    Raises: ``UnsupportedTarget`` for an embedding without memory that nothing loads.
    """
    embedding = model.get_input_embeddings()
    device: torch.device = embedding.weight.device
    if device.type != "meta":
        return device
    hook = vars(embedding).get("_hf_hook")
    place = None if hook is None else hook.execution_device
    if place is None:
        raise UnsupportedTarget(
            f"the token embedding of {type(model).__name__} is on the meta device and nothing loads it: weights in "
            "memory are required. Load the model with device_map= (which offloads), or without low-memory tricks."
        )
    return torch.device(_accelerator(), place) if isinstance(place, int) else torch.device(place)


def _accelerator() -> str:
    found = torch.accelerator.current_accelerator()
    return "cuda" if found is None else found.type


def row_counter(model: nn.Module) -> str | None:
    """Return what may hold data of each row of the batch: a hook, a forward or a module that is nobody's we know.

    While it stands a pass must keep the batch's rows in their places. None where every row is treated alike.

    Raises: ``UnsupportedTarget`` for hooks of PEFT that read the whole pass: drafted tokens would change them.
    """
    for hook in (*torch_module._global_forward_hooks.values(), *torch_module._global_forward_pre_hooks.values()):
        if _package(origin(hook)) not in _RUNNERS:
            return f"the hook {_name(hook)} on all modules"
    found = None
    for name, part in model.named_modules():
        for hook in hooks_of(part):
            _check_adapter_hook(hook)
            if found is None and _package(origin(hook)) not in _RUNNERS:
                found = f"the hook {_name(hook)} on {name or 'the model'}"
        patched = "forward" in vars(part) and "_hf_hook" not in vars(part)
        kind = type(part)
        if found is None and (patched or not {_package(kind), _package(kind.forward)} <= _LAYERS):
            found = f"{'the patched forward of ' if patched else ''}{name or 'the model'} ({kind.__name__})"
    return found


def foreign_hooks(part: nn.Module | None) -> list[int]:
    """Name the forward hooks of one module, of all (None), that may do anything to a pass; no name is given twice."""
    before = torch_module._global_forward_pre_hooks
    behind = torch_module._global_forward_hooks
    if part is not None:
        before = part._forward_pre_hooks
        behind = part._forward_hooks
    known = _RUNNERS | {"peft"}  # PEFT's treat tokens alike where ``row_counter`` does not refuse them
    return [key for hooks in (before, behind) for key, hook in hooks.items() if _package(origin(hook)) not in known]


def hooks_of(part: nn.Module) -> Iterator[Callable[..., Any]]:
    """Yield the forward hooks of one module, those before and those behind it."""
    yield from part._forward_pre_hooks.values()
    yield from part._forward_hooks.values()


def gives_each_row_its_adapter(part: nn.Module) -> bool:
    """Tell whether PEFT's ``adapter_names=`` stands on one module: it can be run over the batch's rows alone."""
    return any(_package(origin(hook)) == "peft" for hook in hooks_of(part))


def origin(hook: Callable[..., Any]) -> object:
    """Return the function behind partial applications and bound methods, or the class of a callable object."""
    while isinstance(hook, partial):
        hook = hook.func
    if isinstance(hook, MethodType):
        return hook.__func__
    return hook if isinstance(hook, FunctionType) else type(hook)


def _check_adapter_hook(hook: Callable[..., Any]) -> None:
    source = origin(hook)
    if _package(source) == "peft" and _name(hook) != _ROW_HOOK:
        raise UnsupportedTarget(
            f"PEFT's hook {_name(hook)} reads all of a pass (aLoRA, X-LoRA and Poly do): drafted tokens would change "
            "what it does. Use plain generate(), or LoRA adapters, also one for each row (adapter_names=)."
        )


def _package(source: object) -> str:
    return str(cast(Any, source).__module__).partition(".")[0]


def _name(hook: Callable[..., Any]) -> str:
    return str(cast(Any, origin(hook)).__name__)
