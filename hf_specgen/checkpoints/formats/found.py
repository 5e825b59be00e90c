"""Found: one decision about a checkpoint, with the line that tells it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Found:
    """Hold one decision: its value, the line that tells it, and what it may cost."""

    value: Any
    note: str
    warnings: tuple[str, ...] = ()

    @classmethod
    def given(cls, what: str, value: Any) -> Found:
        """Return what the caller decided: nothing in the file can put it in doubt."""
        return cls(value, f"{what}: {value}, as the caller says")
