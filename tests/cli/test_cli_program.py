"""The program hf-specgen as the shell starts it: help, thread settings, exit codes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_specgen.cli import main


def test_help_lists_the_commands_without_loading_torch_here() -> None:
    text = CliRunner().invoke(main.app, ["--help"]).stdout
    assert re.findall(r"^  (generate|bench|verify) ", text, re.M) == ["generate", "bench", "verify"]
    for name in ("main", "generate", "bench", "verify", "options"):
        lines = Path(main.__file__).with_name(f"{name}.py").read_text().splitlines()
        top = "\n".join(line for line in lines if line.startswith(("import ", "from ")))
        assert not re.search(r"torch|transformers|hf_specgen\.(bench|generate)|session|writing", top)


PROGRAM = """
from hf_specgen.cli.main import App
app = App(add_completion=False)
@app.command()
def one() -> None:
    import torch
app()
"""


def test_the_program_waits_passively() -> None:
    """The setting must reach OpenMP, which reads it once when torch is loaded and prints what it read."""
    assert isinstance(main.app, main.App)
    variables = {**os.environ, "PYTHONPATH": str(Path(main.__file__).parents[2]), "OMP_DISPLAY_ENV": "true"}
    variables.pop("OMP_WAIT_POLICY", None)
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=variables, capture_output=True, text=True)
    assert done.returncode == 0
    assert re.findall(r"OMP_WAIT_POLICY = '(\w+)'", done.stderr) == ["PASSIVE"], "and it is loaded once"


def test_a_program_that_has_loaded_torch_starts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    executed: list[list[str]] = []
    monkeypatch.setattr(main.os, "execv", lambda _, arguments: executed.append(arguments))
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    main.wait_passively()
    assert executed == []
    monkeypatch.delenv("OMP_WAIT_POLICY")
    main.wait_passively()
    assert executed == [[sys.executable, *sys.orig_argv[1:]]]
    assert os.environ["OMP_WAIT_POLICY"] == "passive"
