"""Copies of ``kernels/`` with one piece of text replaced: what a kernel with a known bug would compute."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

KERNELS = Path(__file__).resolve().parent.parent / "kernels"


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
