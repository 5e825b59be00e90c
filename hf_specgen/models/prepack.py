"""Weight prepacking on CPUs: linear layers keep a second copy of their weights, laid out as oneDNN reads them.

torch offers no public way that gains: ``torch.utils.mkldnn`` converts every input and output and reorders the weights
in each call. So two private operators are used, and every packed layer is compared with the plain one first.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from transformers.pytorch_utils import Conv1D

from hf_specgen.errors import SpecGenError
from hf_specgen.models.wrappers import roots

Model = TypeVar("Model", bound=nn.Module)

_LOG = logging.getLogger(__name__)
_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
_CHUNK = 61
_ODD = 0x1E3779B97F4A7C15
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WAY_OUT = "Prepacking needs plain float weights in CPU memory: leave prepack out for this model."


@dataclass(frozen=True)
class Pack:
    """Hold a layer's weights in oneDNN's layout (None: the plain layer serves), and what they were made from.

    ``source`` shares the weights' memory, so that no other tensor can come to lie at its address unnoticed.
    """

    weight: Tensor | None
    source: Tensor
    version: int
    checksum: int


class _Packed(nn.Module):
    """Compute from packed weights where that is the plain layer's result, else as the plain layer does."""

    weight: Tensor
    _pack: Pack | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Return what the plain layer returns; derivatives, autocast and tracing get the plain layer itself."""
        weight = self._parameters.get("weight")
        bias = self._parameters.get("bias")
        if weight is not None and weight.requires_grad and torch.is_grad_enabled() and not _is_traced():
            self.__dict__.pop("_pack", None)  # it may be trained now: fused optimizers write past the version counter
            return super().forward(input)
        if (
            _is_traced()
            or type(weight) is not nn.Parameter
            or type(input) is not Tensor
            or input.dtype is not weight.dtype
            or input.numel() == 0
            or not input.is_cpu
            or torch.is_autocast_enabled("cpu")
            or forward_ad.unpack_dual(input).tangent is not None
            or (torch.is_grad_enabled() and (input.requires_grad or _trains(bias)))
        ):
            return super().forward(input)
        pack = self._pack
        if pack is None or pack.version != _version(weight) or pack.source.data_ptr() != weight.data_ptr():
            pack = self.pack()
        if pack.weight is None:
            return super().forward(input)
        return torch.ops.mkldnn._linear_pointwise(input, pack.weight, bias, "none", [], "")

    def pack(self) -> Pack:
        """Pack the weights as they are now; a result that differs from the plain layer's is not used."""
        weight = self._parameters["weight"]
        bias = self._parameters["bias"]
        assert weight is not None
        source = weight.detach()
        with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
            packed = self._reorder(source) if weight.is_cpu else None
            if packed is not None and not self._agrees(packed, source, bias):
                packed = None
        self._pack = Pack(packed, source, _version(weight), _checksum(source) if weight.is_cpu else 0)
        return self._pack

    def is_packed(self) -> bool:
        """Pack the weights unless that was done since they last changed; tell whether the packed ones serve."""
        if type(self._parameters.get("weight")) is not nn.Parameter:  # pruned or parametrized: made anew in every call
            return False
        self.forget_if_changed()
        return (self._pack or self.pack()).weight is not None

    def forget_if_changed(self) -> None:
        """Drop the pack when the weights are no longer those it was made from, however they were written."""
        weight = self._parameters.get("weight")
        if self._pack is not None and weight is not None and weight.is_cpu:
            if _checksum(weight.detach()) != self._pack.checksum:
                self._pack = None

    def _reorder(self, weight: Tensor) -> Tensor | None:
        matrix = weight.t().contiguous() if isinstance(self, Conv1D) else weight
        try:
            return torch.ops.mkldnn._reorder_linear_weight(matrix, None)
        except RuntimeError:  # a dtype that this processor or this torch cannot do
            return None

    def _agrees(self, packed: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        """Compare with the plain layer on one row and on several; draws nothing from torch's generator."""
        width = weight.shape[0] if isinstance(self, Conv1D) else weight.shape[1]
        rows = torch.arange(5 * width, dtype=torch.float32, device="cpu").cos().view(5, width).to(weight.dtype)
        for count in (1, 5):
            try:
                expected = super().forward(rows[:count]).float()
                found = torch.ops.mkldnn._linear_pointwise(rows[:count], packed, bias, "none", [], "").float()
            except RuntimeError:
                return False
            limit = _TOLERANCE.get(weight.dtype, 0.0) * expected.abs().max()
            if found.shape != expected.shape or not bool(((found - expected).abs() <= limit).all()):
                return False
        return True

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Drop the pack where the weights are moved or cast: else it would hold the old ones in memory."""
        self.__dict__.pop("_pack", None)
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the pack out of copies and pickles: they make their own at first use."""
        return {name: value for name, value in self.__dict__.items() if name != "_pack"}


class PackedLinear(_Packed, nn.Linear):
    """Stand in for ``nn.Linear`` on a prepacked model."""


class PackedConv1D(_Packed, Conv1D):
    """Stand in for GPT-2's transposed linear layer on a prepacked model."""


def prepack(model: Model) -> Model:
    """Make a model on the CPU faster, ``generate()`` and everything else that runs without gradients; returns it.

    Linear layers, the head included, get a second copy of their weights: memory for weights doubles (but for the
    embedding). Parameters, state dict, hooks and saved files stay as they are, and so do the texts in float32; in
    bfloat16 a near-tie may fall the other way. Weights that are written later are packed anew at the next pass;
    writes past torch's version counter (``weight.data += x``, as adapters are merged) when the next text begins: all
    weights are read once then. With derivatives, autocast or tracing (``torch.compile``) the plain layers run, and
    weights that may be trained are packed anew afterwards. Copies and pickles are prepacked too and pack at first use;
    to load such a pickle hf_specgen must be installed. Twice is once; ``unpack`` undoes it.

    Raises: ``SpecGenError`` on GPUs, for quantised, sharded or offloaded weights, and where oneDNN does not serve.
    """
    _check(model)
    known = is_prepacked(model)
    try:
        layers, failed = _pack_layers(model)
    except BaseException:  # memory ran out, or the user lost patience
        if not known:
            unpack(model)
        raise
    if len(failed) == len(layers):
        unpack(model)
        kinds = ", ".join(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()}))
        raise SpecGenError(
            f"{type(model).__name__} ({kinds}) has no linear layer that oneDNN packs here, {len(layers)} were tried: "
            f"float32 ones are required, or bfloat16 where the processor has it. {_WAY_OUT}"
        )
    if failed:
        shapes = sorted({tuple(layer.weight.shape) for layer in failed})
        _LOG.warning("prepack: %d of %d layers stay plain, shapes %s", len(failed), len(layers), shapes)
    return model


def unpack(model: Model) -> Model:
    """Undo ``prepack``: the model is exactly as before; one that was never prepacked is left alone. Returns it."""
    for module in model.modules():
        if isinstance(module, _Packed):
            _restore(module)
        for key in [key for key, hook in module._forward_pre_hooks.items() if hook is _look_for_silent_writes]:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
    return model


def is_prepacked(model: nn.Module) -> bool:
    """Tell whether ``prepack`` was called on this model, or on a wrapper around it, and not undone."""
    hooks = [hook for root in _roots(model) for hook in root._forward_pre_hooks.values()]
    return any(hook is _look_for_silent_writes for hook in hooks)


def packed_layers(model: nn.Module) -> Iterator[_Packed]:
    """Yield the layers that compute from packed weights."""
    return (module for module in model.modules() if isinstance(module, _Packed))


_PACKED: dict[type[nn.Module], type[_Packed]] = {nn.Linear: PackedLinear, Conv1D: PackedConv1D}


def _roots(model: nn.Module) -> list[nn.Module]:
    """Return what ``generate()`` calls; a module around no transformers model stands for itself."""
    return [*roots(model)] or [model]


def _pack_layers(model: nn.Module) -> tuple[list[_Packed], list[_Packed]]:
    """Pack what can be packed; return all layers that were tried, and those among them that are plain again."""
    for module in model.modules():
        if type(module) in _PACKED and "forward" not in vars(module):
            module.__class__ = _PACKED[type(module)]
    for root in _roots(model):
        if not is_prepacked(root):
            root.register_forward_pre_hook(_look_for_silent_writes, with_kwargs=True)
    layers = list(packed_layers(model))
    failed = [layer for layer in layers if not layer.is_packed()]
    for layer in failed:
        _restore(layer)
    return layers, failed


def _restore(layer: _Packed) -> None:
    layer.__dict__.pop("_pack", None)
    for plain, packed in _PACKED.items():
        if type(layer) is packed:  # parametrized later: a class of its own, which computes plainly
            layer.__class__ = plain  # type: ignore[assignment]


def _look_for_silent_writes(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Compare all weights with their checksums when a text begins: writes through ``.data`` leave no other trace."""
    if not _is_traced() and _begins_text(args, kwargs):
        for layer in packed_layers(model):
            layer.forget_if_changed()


def _is_traced() -> bool:
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def _begins_text(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    positions = kwargs.get("position_ids")
    if isinstance(positions, Tensor):
        return bool((positions == 0).any())
    ids = kwargs.get("input_ids", args[0] if args else None)
    return not isinstance(ids, Tensor) or ids.shape[-1] > 1


def _check(model: nn.Module) -> None:
    """Refuse what cannot be packed, with the reason."""
    name = type(model).__name__
    if not torch.backends.mkldnn.is_available() or not _has_operators():
        raise SpecGenError(f"this torch ({torch.__version__}) has no oneDNN with weight prepacking. {_WAY_OUT}")
    for path, module in model.named_modules():
        if "_hf_hook" in vars(module):
            raise SpecGenError(
                f"{name} is offloaded or spread by accelerate ({path or 'the model'} carries its hook): its weights "
                "may come and go. Load it without device_map, or leave prepack out."
            )
    for path, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not is_plain(tensor):
            kind = f"{type(tensor).__name__} of {str(tensor.dtype).removeprefix('torch.')}"
            raise SpecGenError(f"{name} is quantised or sharded: {path} is a {kind}. {_WAY_OUT}")
        if not tensor.is_cpu:
            raise SpecGenError(f"{name} is not on the CPU: {path} is on {tensor.device}. {_WAY_OUT}")


def is_plain(tensor: Tensor) -> bool:
    """Tell whether a tensor is ordinary: no subclass, and not of a type that only quantised weights have."""
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
        return False
    usual = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.bool)
    return tensor.dtype in usual or tensor.dim() < 2


def _has_operators() -> bool:
    try:
        return bool(torch.ops.mkldnn._linear_pointwise and torch.ops.mkldnn._reorder_linear_weight)
    except AttributeError:
        return False


def _version(weight: Tensor) -> int:
    return 0 if weight.is_inference() else weight._version


def _trains(bias: Tensor | None) -> bool:
    return bias is not None and bias.requires_grad


def _checksum(weight: Tensor) -> int:
    """Mix the bits, read as whole integers: exact in any order of adding, and nearly at the speed of reading.

    61 words at a time are added up, and each sum is weighted by its place; the number is prime, so that rows or columns
    that trade places hardly ever stay within their sums. Words that trade places within one are not noticed.
    """
    flat = weight.contiguous().view(-1)
    size = flat.element_size()
    words = flat.view(_INTEGERS[math.gcd(flat.numel() * size, flat.storage_offset() * size, 8)])
    whole = len(words) // _CHUNK * _CHUNK
    sums = torch.cat((words[:whole].view(-1, _CHUNK).sum(1), words[whole:].sum(0, keepdim=True)))
    places = torch.arange(1, 2 * len(sums), 2, device="cpu")
    return int(((sums ^ (sums >> 32)) * places * _ODD).sum())
