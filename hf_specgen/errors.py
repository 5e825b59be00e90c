"""Errors raised at the border, before any token is generated; warnings for whoever called; a reader that has left."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_LIBRARIES = ("hf_specgen", "transformers", "torch")
READER_GONE = 141
"""The exit code of a program whose output nobody reads any more: 128 and the number of SIGPIPE, as shells say it."""


class SpecGenError(ValueError):
    """Report a request that cannot be served exactly: what was given, what is required, what to do."""


class UnsupportedTarget(SpecGenError):
    """Report a target whose cache, mask or positions cannot be driven row by row."""


class IncompatibleDrafter(SpecGenError):
    """Report a drafter that does not fit the target (vocabulary, sizes, context)."""


def reason_of(error: BaseException | str) -> str:
    """Return the first line of an error for the middle of a sentence: without the dot that ends it."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(" .:;") if lines else type(error).__name__


@contextmanager
def piped() -> Iterator[None]:
    """End a program without a word when the reader of its output has left, as ``| head -1`` does."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except BrokenPipeError:  # what is left would be tried again at the end, and reported
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        raise SystemExit(READER_GONE) from None


def warn(message: str) -> None:
    """Warn at the line outside of libraries that called."""
    level = 1
    frame = sys._getframe(0)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _LIBRARIES:
        frame = frame.f_back
        level = level + 1
    warnings.warn(message, stacklevel=level)
