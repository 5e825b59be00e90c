"""What the law checks of the walk kernels share: cases, the check, and copies of the kernels with a bug put in."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from coin_boxes import Case, Table, fixed, solve
from walk_cases import through

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
MARGIN = 2e-5  # the kernels weigh in float32; coins stay this far from every edge
UNSEEN = 2e-3  # how much of the law may lie in those margins
VISIBLE = 1e-3  # a bent law is at least this far away; a sound one is within 1e-12


@dataclass(frozen=True)
class Setting:
    """How the kernels are told a law: its temperature, and whether only its threshold excludes tokens."""

    case: Case
    heat: float = 1.0
    hide: bool = False


P, Q, EVEN = Table(3, 1), Table(3, 2), Table(3, 4, zeros=False)
CHAIN = Case(P, (-1, 0), Q)
SIBLINGS = Case(Table(3, 1, zeros=False), (-1, -1), EVEN)
DISTINCT = Case(fixed("1/10", "3/10", "6/10"), (-1, -1), fixed("5/10", "3/10", "2/10"), without_replacement=True)
PAIR = Case(Table(4, 5, zeros=False), (-1, -1), Table(4, 105, zeros=False), without_replacement=True)
THREE = Case(Table(4, 5, zeros=False), (-1, -1, -1), Table(4, 105, zeros=False), without_replacement=True)
BLOCK = Case(P, (-1, 0), Table(3, 3), rule="block")
IMPOSSIBLE = Case(fixed("0", "1/2", "1/2"), (-1,), fixed("1/2", "1/4", "1/4"))
TREE = Case(Table(3, 3), (-1, -1, 0, 0, 1), drafts=((0, 1, 0, 2, 2), (1, 1, 2, 0, 0)))


def law_error(setting: Setting, monkeypatch: pytest.MonkeyPatch, kernels: object) -> float:
    """Drive the kernels through every box of coins; return how far their law is from the target's."""
    monkeypatch.setattr("coin_boxes.MARGIN", MARGIN)
    monkeypatch.setattr("coin_boxes.verify", through(kernels, setting.hide, setting.heat))  # type: ignore[arg-type]
    result = solve(setting.case)
    assert result.unseen < UNSEEN
    return result.error


def mutate(folder: Path, name: str, file: str, old: str, new: str, modules: list[str]) -> list[ModuleType]:
    """Write a mutant package ``name`` into ``folder`` and import some of its modules; its operations are its own."""
    package = folder / name
    package.mkdir()
    for path in KERNELS.glob("*.py"):
        text = path.read_text().replace('"hf_specgen::', f'"{name}::')
        if path.name == file:
            assert text.count(old) == 1, f"the control no longer fits the source: {old!r}"
            text = text.replace(old, new)
        (package / path.name).write_text(text)
    sys.path.insert(0, str(folder))
    try:
        return [importlib.import_module(f"{name}.{module}") for module in modules]
    finally:
        sys.path.remove(str(folder))
