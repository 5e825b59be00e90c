"""Errors raised at the border, before any token is generated."""

from __future__ import annotations


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
