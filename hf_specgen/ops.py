"""The only door to the kernels: every operation, chosen per call between the plain torch reference and Triton.

Triton runs where the tensors are on a GPU and Triton imports. ``HF_SPECGEN_KERNELS=reference|triton`` or the context
manager ``use_kernels`` decide otherwise; an operation without a Triton twin always runs as reference. A graph of
``torch.compile`` keeps what was chosen while it was recorded.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import ParamSpec, TypeVar, cast

import torch

from hf_specgen.errors import SpecGenError
from hf_specgen.kernels import reference, reference_attention, reference_rows, reference_slots, reference_walks
from hf_specgen.kernels.common import ACCEPT, DRAFT, GUMBEL, SAMPLE
from hf_specgen.kernels.truncate import truncate as truncate_rows

__all__ = [
    "ACCEPT",
    "DRAFT",
    "GUMBEL",
    "SAMPLE",
    "accept_or_draw",
    "accept_siblings",
    "argmax",
    "block_chain",
    "block_step",
    "check_doubles",
    "draw",
    "fuses",
    "gumbel_draw",
    "gumbel_noise",
    "gumbel_pick",
    "has_doubles",
    "match_tree",
    "move_slots",
    "pass_mask",
    "record",
    "reject_tree",
    "residual_draw",
    "row_draw",
    "row_stats",
    "tree_attention",
    "tree_mask",
    "truncate",
    "typical_tree",
    "uniform",
    "use_kernels",
]

P = ParamSpec("P")
R = TypeVar("R")

REFERENCE, TRITON = "reference", "triton"
_VARIABLE = "HF_SPECGEN_KERNELS"
_HOME = sys.modules[reference.__name__.rpartition(".")[0]]

_open: ContextVar[tuple[Counter[tuple[str, str]], ...]] = ContextVar("open_records", default=())
_chosen: ContextVar[str | None] = ContextVar("chosen_kernels", default=None)


@contextmanager
def record() -> Iterator[Counter[tuple[str, str]]]:
    """Count the calls made inside the block by ``(operation, backend)``; an outer block counts them too."""
    counts: Counter[tuple[str, str]] = Counter()
    token = _open.set((*_open.get(), counts))
    try:
        yield counts
    finally:
        _open.reset(token)


@contextmanager
def use_kernels(backend: str) -> Iterator[None]:
    """Run every operation inside the block as ``reference`` or ``triton``; blocks nest, the inner one decides.

    Raises: ``SpecGenError`` for another name, or for ``triton`` where it is not installed.
    """
    token = _chosen.set(_check(backend))
    try:
        yield
    finally:
        _chosen.reset(token)


def has_doubles(device: torch.device) -> bool:
    """Tell whether a device computes in float64; Apple's GPUs do not."""
    try:
        torch.empty(0, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return False
    return True


def check_doubles(device: torch.device, asked: str) -> None:
    """Refuse what needs float64 where there is none. Raises: ``SpecGenError``."""
    if not has_doubles(device):
        raise SpecGenError(
            f"{asked} on {device}: coins and sums are float64, which this device lacks. Run the model on a CPU or "
            "another GPU, or ask for greedy text and chains."
        )


def fuses(device: torch.device) -> bool:
    """Tell whether operations on tensors of this device run as Triton kernels."""
    chosen = _chosen.get() or _from_environment()
    if chosen is not None:
        return chosen == TRITON
    return device.type == "cuda" and _has_triton()


def _from_environment() -> str | None:
    backend = os.environ.get(_VARIABLE)
    return _check(backend) if backend else None


def _check(backend: str) -> str:
    if backend not in (REFERENCE, TRITON):
        raise SpecGenError(f"kernels {backend!r} ({_VARIABLE} or use_kernels): 'reference' or 'triton' is required.")
    if backend == TRITON and not _has_triton():
        raise SpecGenError("the Triton kernels were asked for, but triton is not installed. Run: pip install triton")
    return backend


@cache
def _has_triton() -> bool:
    found = find_spec("triton") is not None
    if not found:
        logging.getLogger(__name__).info("Triton is not installed: verification runs in plain torch.")
    return found


def _device(args: tuple[object, ...]) -> torch.device:
    """Return the device of the first tensor among the arguments, lists of tensors included."""
    for value in args:
        first = value[0] if isinstance(value, (list, tuple)) and value else value
        if isinstance(first, torch.Tensor):
            return first.device
    return torch.device("cpu")


def _door(kernel: Callable[P, R], twin: str | None = None) -> Callable[P, R]:
    """Wrap a reference kernel; ``twin`` names the module of ``kernels/`` that holds its Triton twin."""

    @wraps(kernel)
    def operation(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():  # a compiler cannot read the variables
            graph = kernel
            if twin is not None and _fuses_graph(_device(args)):
                graph = vars(vars(_HOME)[twin])[kernel.__name__]
            return graph(*args, **kwargs)
        fused = twin is not None and fuses(_device(args))
        for counts in _open.get():
            counts[kernel.__name__, TRITON if fused else REFERENCE] += 1
        run = _triton(twin, kernel.__name__) if twin is not None and fused else kernel
        return cast("Callable[P, R]", run)(*args, **kwargs)

    return operation


@torch.compiler.assume_constant_result
def _fuses_graph(device: torch.device) -> bool:
    """Choose while ``torch.compile`` records: the graph keeps what is chosen, and its calls are not counted."""
    fused = fuses(device)
    if fused:  # all twins at once: the compiler looks at the package's names only once
        for module in iter_modules(_HOME.__path__):
            if module.name.startswith("triton_"):
                importlib.import_module(_path(module.name))
    return fused


def _path(module: str) -> str:
    return f"hf_specgen.kernels.{module}"


@cache
def _triton(module: str, name: str) -> Callable[..., object]:
    """Import a twin when it is first needed: Triton is optional and slow to import."""
    return cast("Callable[..., object]", vars(importlib.import_module(_path(module)))[name])


accept_or_draw = _door(reference.accept_or_draw)
accept_siblings = _door(reference.accept_siblings)
argmax = _door(reference.argmax)
block_chain = _door(reference_walks.block_chain, "triton_block")
block_step = _door(reference.block_step)
draw = _door(reference.draw)
gumbel_draw = _door(reference.gumbel_draw)
gumbel_noise = _door(reference.gumbel_noise)
gumbel_pick = _door(reference_rows.gumbel_pick, "triton_gumbel")
match_tree = _door(reference_walks.match_tree, "triton_walks")
move_slots = _door(reference_slots.move_slots, "triton_slots")
pass_mask = _door(reference_slots.pass_mask)
reject_tree = _door(reference_walks.reject_tree, "triton_walks")
residual_draw = _door(reference.residual_draw)
row_draw = _door(reference_rows.row_draw, "triton_draw")
row_stats = _door(reference_rows.row_stats, "triton_rows")
tree_attention = _door(reference_attention.tree_attention, "triton_attention")
tree_mask = _door(reference_slots.tree_mask, "triton_slots")
truncate = _door(truncate_rows)
typical_tree = _door(reference_walks.typical_tree, "triton_typical")
uniform = _door(reference.uniform, "triton_rows")
