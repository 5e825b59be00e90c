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
