"""Errors raised at the border, before any token is generated, and warnings for whoever called."""

from __future__ import annotations

import sys
import warnings

_LIBRARIES = ("hf_specgen", "transformers", "torch")


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


def warn(message: str) -> None:
    """Warn at the line outside of libraries that called."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _LIBRARIES:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
