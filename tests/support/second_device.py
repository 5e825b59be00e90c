"""A second device on a machine that has none: its tensors name another device and are computed on the CPU.

``with SecondDevice() as device:`` opens it, ``device.adopt(model)`` moves a module's weights there in place and
``device.put(tensor)`` one tensor. Inside the block tensors of two devices do not mix, as on CUDA: 0-dim CPU tensors in
pointwise operations and CPU indices are all that is let through. ``device.events`` counts what an accelerator would
feel, by source line and section:

* ``launch``: an operator that computes or copies on the device (a custom operator counts the kernels that Triton's
  interpreter runs; some operators are several kernels on a real device);
* ``wait``: the host waits for numbers (``item``, ``tolist``, ``bool``, ``nonzero``, masks as indices, copies);
* ``upload``: numbers go from ordinary host memory to the device.

Nothing is timed, and gradients are not followed. ``SecondDevice("mps:0", lacks=[torch.float64])`` has no such dtype.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

aten = torch.ops.aten

READS = {
    "_local_scalar_dense",
    "_unique2",
    "bincount",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
}
"""Operators whose result the host must know before it goes on."""

ALLOCATIONS = {
    "_reshape_alias",
    "_unsafe_view",
    "alias",
    "detach",
    "empty",
    "empty_like",
    "empty_strided",
    "lift_fresh",
    "new_empty",
    "new_empty_strided",
    "resize_",
    "set_",
    "view",
}
"""Operators that start no kernel."""

COPIES = {"_to_copy", "copy_", "lift_fresh"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
TAKES_SCALARS = {"where", "masked_fill", "masked_fill_", "fill", "fill_", "index_fill", "index_fill_"} | INDEXING

NAME = "cuda:99"
"""A card that no machine has: tensors that the project keeps per device are never mistaken for a real card's."""

PROJECT = Path(__file__).resolve().parents[2]
SOURCES = (f"{PROJECT}/hf_specgen/", f"{PROJECT}/kernels/", "/site-packages/transformers/")


class Event(NamedTuple):
    """Name one kind of event, its operator, the source line that asked for it, and the section of the run."""

    kind: str
    operator: str
    line: str
    section: str


class DeviceTensor(Tensor):
    """Stand for a tensor of the second device; ``payload`` is the CPU tensor that holds its numbers."""

    payload: Tensor

    @staticmethod
    def __new__(cls, payload: Tensor, device: torch.device) -> DeviceTensor:
        """Wrap a CPU tensor of the same shape, strides and dtype."""
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls,
            payload.size(),
            strides=payload.stride(),
            storage_offset=payload.storage_offset(),
            dtype=payload.dtype,
            layout=payload.layout,
            device=device,
            requires_grad=False,
        )
        wrapper.payload = payload
        return wrapper

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse: outside of the block there is no second device. What ``nn.Parameter`` needs is let through."""
        if func is aten.detach.default:
            return DeviceTensor(args[0].payload, args[0].device)
        raise RuntimeError(f"{func}: a tensor of the second device was used outside of `with SecondDevice()`")

    def __repr__(self, *_: Any, **__: Any) -> str:
        return f"DeviceTensor({self.payload!r})"


class SecondDevice:
    """Open a second device for a block, refuse what mixes devices, and count events in ``events``.

    ``section`` labels what is counted from now on.
    """

    def __init__(self, name: str = NAME, lacks: Iterable[torch.dtype] = ()) -> None:
        self.device = torch.device(name)
        self.lacks = frozenset(lacks)
        self.events: Counter[Event] = Counter()
        self.section = ""
        self.kernels = 0
        self._layers = ExitStack()

    def __enter__(self) -> SecondDevice:
        self._layers.enter_context(_device_without_driver())
        self._layers.enter_context(_counted_kernels(self))
        self._layers.enter_context(_Operators(self))
        self._layers.enter_context(_PythonLayer(self))
        return self

    def __exit__(self, *error: Any) -> None:
        self._layers.close()

    def put(self, tensor: Tensor) -> DeviceTensor:
        """Return a tensor of the second device with the same numbers; nothing is counted."""
        if isinstance(tensor, DeviceTensor):
            return tensor
        return DeviceTensor(tensor.detach(), self.device)

    def adopt(self, module: nn.Module) -> nn.Module:
        """Move a module's parameters and buffers to the second device in place; tied ones stay tied."""
        moved: dict[int, Tensor] = {}
        for part in module.modules():
            for name, tensor in part._parameters.items():
                if tensor is not None:
                    part._parameters[name] = self._adopted(tensor, moved)
            for name, tensor in part._buffers.items():
                if tensor is not None:
                    part._buffers[name] = self._adopted(tensor, moved)
        return module

    def _adopted(self, tensor: Tensor, moved: dict[int, Tensor]) -> Any:
        if isinstance(tensor.data, DeviceTensor):
            return tensor
        if id(tensor) not in moved:
            copy = self.put(tensor.data)
            moved[id(tensor)] = nn.Parameter(copy, False) if isinstance(tensor, nn.Parameter) else copy
        return moved[id(tensor)]

    def made(self, result: Any) -> Any:
        """Wrap an operator's result. Raises: ``TypeError`` when the device lacks its dtype."""
        if type(result) is not Tensor:
            return result
        if result.dtype in self.lacks:
            raise TypeError(f"Cannot convert a {self.device.type} tensor to {result.dtype} (at {calling_line()})")
        return DeviceTensor(result, self.device)

    def count(self, kind: str, operator: Any, times: int = 1) -> None:
        """Count an event of the source line that runs."""
        self.events[Event(kind, str(operator), calling_line(), self.section)] += times

    def total(self, kind: str, section: str | None = None) -> int:
        """Return how often a kind was counted, in one section or in all."""
        matching = (
            count for event, count in self.events.items() if event.kind == kind and section in (None, event.section)
        )
        return sum(matching)

    def listing(self, kind: str) -> str:
        """Return the events of a kind, the most frequent first: the text of a failed assertion."""
        lines: Counter[str] = Counter()
        for event, count in self.events.items():
            if event.kind == kind:
                lines[f"{event.section}: {event.line} {event.operator}"] += count
        return "\n".join(f"{count} {line}" for line, count in lines.most_common())


def payload_of(value: Any) -> Any:
    """Return the CPU tensor behind a tensor of the second device, in lists too, and anything else as it is."""
    if isinstance(value, DeviceTensor):
        return value.payload
    if type(value) in (list, tuple):
        return type(value)(map(payload_of, value))
    if type(value) is dict:
        return {name: payload_of(part) for name, part in value.items()}
    return value


def tensors_among(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among an operator's arguments, those in lists included."""
    tensors = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif type(value) in (list, tuple):
            tensors += tensors_among(value)
    return tensors


def mixed_devices(operator: Any) -> RuntimeError:
    """Return the error that CUDA raises for tensors of two devices."""
    message = "Expected all tensors to be on the same device, but found at least two devices"
    return RuntimeError(f"{message} ({operator}, at {calling_line()})")


def calling_line() -> str:
    """Return the innermost line of the project or of transformers, such as ``hf_specgen/generate.py:120``."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = short_name(frame.f_code.co_filename)
        if file:
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


@cache
def short_name(file: str) -> str:
    """Return a source file's name from its package on, nothing for files of others."""
    for source in SOURCES:
        if source in file:
            package = source.rstrip("/").rpartition("/")[2]
            return f"{package}/{file.partition(source)[2]}"
    return ""


@contextmanager
def _device_without_driver() -> Iterator[None]:
    """Let a CPU build of torch take the name of a device that it has no driver for."""
    lazy_init = torch.cuda._lazy_init
    lifted = torch._C._only_lift_cpu_tensors()
    torch.cuda._lazy_init = lambda: None
    torch._C._ensureCUDADeviceGuardSet()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=) becomes a copy that is seen
    try:
        yield
    finally:
        torch.cuda._lazy_init = lazy_init
        torch._C._set_only_lift_cpu_tensors(lifted)


@contextmanager
def _counted_kernels(device: SecondDevice) -> Iterator[None]:
    """Count the kernels that Triton's interpreter runs."""
    if find_spec("triton") is None:
        yield
        return
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def counted_launch(executor: Any, *args: Any, **kwargs: Any) -> Any:
        device.kernels += 1
        return launch(executor, *args, **kwargs)

    GridExecutor.__call__ = counted_launch
    try:
        yield
    finally:
        GridExecutor.__call__ = launch


class _Operators(TorchDispatchMode):
    """Run every operator on the payloads, check its devices and count it."""

    def __init__(self, owner: SecondDevice) -> None:
        super().__init__()
        self.owner = owner

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = tensors_among((*args, *kwargs.values()))
        wanted = kwargs.get("device")
        lands_here = wanted is not None and torch.device(wanted).type == self.owner.device.type
        if not lands_here and not any(isinstance(tensor, DeviceTensor) for tensor in tensors):
            return func(*args, **kwargs)
        if wanted is not None:
            kwargs["device"] = torch.device("cpu")
        goes_to_host = wanted is not None and not lands_here
        name = func._schema.name.split("::")[1]
        if name in COPIES and tensors:
            goes_to_host = self._count_copy(func, name, tensors, lands_here, goes_to_host)
        else:
            self._check_devices(func, name, args, tensors)
            self._count_operator(func, name, args)
        kernels = self.owner.kernels
        result = func(*payload_of(args), **payload_of(kwargs))
        if func.namespace not in ("aten", "prims"):
            self.owner.count("launch", func, self.owner.kernels - kernels or 1)
        if goes_to_host:
            return result
        return self._wrapped(func, args, kwargs, result)

    def _count_copy(self, func: Any, name: str, tensors: list[Tensor], lands_here: bool, goes_to_host: bool) -> bool:
        """Count a copy by its direction, and tell whether its result is a tensor of the host."""
        in_place = name == "copy_"
        source = tensors[-1] if in_place else tensors[0]
        from_host = not isinstance(source, DeviceTensor)
        to_host = goes_to_host or (in_place and not isinstance(tensors[0], DeviceTensor))
        if from_host and (lands_here or in_place):
            self.owner.count("launch" if in_place and source.dim() == 0 else "upload", func)
            return False
        self.owner.count("wait" if to_host else "launch", func)
        return to_host

    def _count_operator(self, func: Any, name: str, args: Any) -> None:
        if func.namespace not in ("aten", "prims"):
            return
        if name in READS or (name == "repeat_interleave" and len(args) == 1):
            self.owner.count("wait", func)
        if name in INDEXING:
            self._count_indices(func, args[1])
        if not func.is_view and name not in ALLOCATIONS and name != "_local_scalar_dense":
            self.owner.count("launch", func)

    def _count_indices(self, func: Any, indices: Any) -> None:
        for index in indices:
            if not isinstance(index, Tensor):
                continue
            if index.dtype in (torch.bool, torch.uint8):
                self.owner.count("wait", func)
            if not isinstance(index, DeviceTensor):
                self.owner.count("upload", func)

    def _check_devices(self, func: Any, name: str, args: Any, tensors: list[Tensor]) -> None:
        """Refuse what CUDA refuses. Raises: ``RuntimeError``."""
        strangers = [tensor for tensor in tensors if not isinstance(tensor, DeviceTensor)]
        if len(strangers) == len(tensors):
            return
        if name in INDEXING:
            if not isinstance(args[0], DeviceTensor):
                raise mixed_devices(func)
            strangers = [value for value in args[2:3] if isinstance(value, Tensor)]
            strangers = [value for value in strangers if not isinstance(value, DeviceTensor)]
        takes_scalars = torch.Tag.pointwise in func.tags or name in TAKES_SCALARS
        if any(stranger.dim() > 0 or not takes_scalars for stranger in strangers):
            raise mixed_devices(func)

    def _wrapped(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """Return the result as the device's; what was written in place is the argument itself."""
        written, returned = _written(func)
        if not any(returned):
            return self.owner.made(result) if type(result) is Tensor else tree_map(self.owner.made, result)
        places = [args[position] if position < len(args) else kwargs.get(name) for position, name in written]
        return places[0] if len(returned) == 1 else tuple(places)


@cache
def _written(func: Any) -> tuple[list[tuple[int, str]], list[bool]]:
    """Return an operator's arguments that it writes (position and name), and which of its results they are."""
    arguments = enumerate(func._schema.arguments)
    written = [(position, each.name) for position, each in arguments if each.alias_info and each.alias_info.is_write]
    returned = [each.alias_info is not None and each.alias_info.is_write for each in func._schema.returns]
    return written, returned


class _PythonLayer(TorchFunctionMode):
    """Do what a CPU build of torch refuses for a foreign device before any operator is reached."""

    def __init__(self, owner: SecondDevice) -> None:
        super().__init__()
        self.owner = owner

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func is Tensor.__getitem__:
            return self._get_item(func, *args)
        if func is Tensor.__setitem__:
            return self._set_item(func, *args)
        if func is nn.functional.scaled_dot_product_attention:
            return self._beside_dispatcher(func, args, kwargs)
        if func in (Tensor.to, Tensor.cuda):
            return self._move(first, func, args[1:], kwargs)
        if isinstance(first, DeviceTensor):
            if func is Tensor.new_tensor:
                return torch.tensor(args[1], **{"dtype": first.dtype, "device": first.device, **kwargs})
            if func in GUARDED:
                return GUARDED[func](*args, **kwargs)
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if "not linked with support" not in str(error):
                raise
            return self._beside_dispatcher(func, args, kwargs)

    def _get_item(self, func: Any, tensor: Tensor, index: Any) -> Any:
        plain_index, gathers = self._read_index(func, tensor, index)
        if not isinstance(tensor, DeviceTensor):
            return func(tensor, plain_index)
        if gathers:
            self.owner.count("launch", "aten.index.Tensor")
        with torch._C._DisableTorchDispatch():
            return self.owner.made(tensor.payload[plain_index])

    def _set_item(self, func: Any, tensor: Tensor, index: Any, value: Any) -> None:
        plain_index, scatters = self._read_index(func, tensor, index)
        into_device = isinstance(tensor, DeviceTensor)
        from_device = isinstance(value, DeviceTensor)
        if not into_device and not from_device:
            func(tensor, plain_index, value)
            return
        block = isinstance(value, Tensor) and value.dim() > 0
        if into_device != from_device and (block or not into_device):
            if scatters:
                raise mixed_devices(func)
            self.owner.count("upload" if into_device else "wait", "aten.copy_.default")
        else:
            self.owner.count("launch", "aten.index_put_" if scatters else "aten.copy_")
        with torch._C._DisableTorchDispatch():
            payload_of(tensor)[plain_index] = payload_of(value)

    def _read_index(self, func: Any, tensor: Tensor, index: Any) -> tuple[Any, bool]:
        """Return an index of CPU tensors, and whether it gathers: then the result is no view."""
        parts = index if isinstance(index, tuple) else (index,)
        gathers = False
        for part in parts:
            listed = isinstance(part, list | range) or (isinstance(part, Tensor) and part.dim() > 0)
            gathers = gathers or listed
            if isinstance(part, DeviceTensor):
                self._check_index(func, tensor, part)
            elif listed and isinstance(tensor, DeviceTensor):
                self.owner.count("upload", "a host's index")
        plain_parts = tuple(map(payload_of, parts))
        return (plain_parts if isinstance(index, tuple) else plain_parts[0]), gathers

    def _check_index(self, func: Any, tensor: Tensor, part: DeviceTensor) -> None:
        if not isinstance(tensor, DeviceTensor):
            raise mixed_devices(func)
        if part.dim() == 0 or part.dtype in (torch.bool, torch.uint8):
            self.owner.count("wait", "aten.nonzero" if part.dim() else "aten._local_scalar_dense")

    def _beside_dispatcher(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a function of tensors on the payloads, as one launch."""
        tensors = tensors_among((*args, *kwargs.values()))
        strangers = [tensor for tensor in tensors if not isinstance(tensor, DeviceTensor)]
        if len(strangers) == len(tensors):
            return func(*args, **kwargs)
        if any(stranger.dim() > 0 for stranger in strangers):
            raise mixed_devices(func)
        self.owner.count("launch", func.__name__)
        with torch._C._DisableTorchDispatch():
            result = func(*payload_of(args), **payload_of(kwargs))
        if args and result is payload_of(args[0]):
            return args[0]
        return tree_map(self.owner.made, result)

    def _move(self, tensor: Any, func: Any, args: Any, kwargs: Any) -> Any:
        """Do what ``Tensor.to`` and ``Tensor.cuda`` do."""
        wanted: dict[str, Any] = {"dtype": tensor.dtype, "device": tensor.device, "copy": False}
        if func is Tensor.cuda:
            wanted["device"] = self.owner.device
        flags = iter(("non_blocking", "copy"))
        for value in args:
            if isinstance(value, Tensor):
                wanted |= {"device": value.device, "dtype": value.dtype}
            elif isinstance(value, torch.dtype):
                wanted["dtype"] = value
            elif isinstance(value, bool):
                wanted[next(flags)] = value
            elif value is not None:
                wanted["device"] = value
        wanted |= {name: value for name, value in kwargs.items() if value is not None}
        device = torch.device(wanted["device"])
        if (device.type, wanted["dtype"], wanted["copy"]) == (tensor.device.type, tensor.dtype, False):
            return tensor
        return aten._to_copy(tensor, dtype=wanted["dtype"], device=device)


GUARDED: dict[Any, Callable[..., Any]] = {
    Tensor.tolist: lambda tensor: tensor.cpu().tolist(),
    Tensor.__invert__: lambda tensor: aten.bitwise_not(tensor),
    Tensor.__int__: lambda tensor: int(tensor.item()),
    Tensor.__index__: lambda tensor: int(tensor.item()),
    Tensor.__float__: lambda tensor: float(tensor.item()),
    Tensor.nonzero: lambda tensor: aten.nonzero(tensor),
    torch.nonzero: lambda tensor: aten.nonzero(tensor),
    torch.isin: lambda tensor, choices, **_: aten.any.dim(aten.eq.Tensor(tensor.unsqueeze(-1), choices), -1),
}
"""Functions that torch's Python layer guards, and an unguarded way to do the same."""
