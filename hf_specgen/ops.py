"""The only door to the kernels: every operation is called here, and a test can ask which path served it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import ParamSpec, TypeVar

from hf_specgen.kernels import reference
from hf_specgen.kernels.common import ACCEPT, DRAFT, GUMBEL, SAMPLE

__all__ = [
    "ACCEPT",
    "DRAFT",
    "GUMBEL",
    "SAMPLE",
    "accept_siblings",
    "argmax",
    "block_step",
    "draw",
    "gumbel_draw",
    "gumbel_noise",
    "record",
    "residual_draw",
    "uniform",
]

P = ParamSpec("P")
R = TypeVar("R")

_open: ContextVar[tuple[Counter[tuple[str, str]], ...]] = ContextVar("open_records", default=())


@contextmanager
def record() -> Iterator[Counter[tuple[str, str]]]:
    """Count the calls made inside the block by ``(operation, backend)``; an outer block counts them too."""
    counts: Counter[tuple[str, str]] = Counter()
    token = _open.set((*_open.get(), counts))
    try:
        yield counts
    finally:
        _open.reset(token)


def _door(kernel: Callable[P, R]) -> Callable[P, R]:
    @wraps(kernel)
    def operation(*args: P.args, **kwargs: P.kwargs) -> R:
        for counts in _open.get():
            counts[kernel.__name__, "reference"] += 1
        return kernel(*args, **kwargs)

    return operation


accept_siblings = _door(reference.accept_siblings)
argmax = _door(reference.argmax)
block_step = _door(reference.block_step)
draw = _door(reference.draw)
gumbel_draw = _door(reference.gumbel_draw)
gumbel_noise = _door(reference.gumbel_noise)
residual_draw = _door(reference.residual_draw)
uniform = _door(reference.uniform)
