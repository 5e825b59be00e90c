"""Every Triton kernel compiles for NVIDIA and AMD without a GPU, and spills no register at its own block sizes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hf_specgen.kernels import compile_only
from hf_specgen.kernels.compile_only import Compiled

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]
TARGETS = {"sm_80", "sm_90", "gfx942"}
GOOD = Compiled("row_stats bfloat16", "sm_90", 8, registers=75, shared=32)
AMD = Compiled("row_stats bfloat16", "gfx942", 8, registers=41, scalars=52, scalar_spills=3, shared=32)


def compiled(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the program in a process of its own: here kernels are interpreted, and their operators registered once."""
    command = [sys.executable, str(ROOT / "kernels" / "compile_only.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=1500, env=dict(os.environ))


@pytest.mark.slow
def test_small_kernels_compile_for_every_target_and_are_remembered(tmp_path: Path) -> None:
    few = ["--only", "uniform siblings,tree_mask chunked", "--workers", "1", "--cache", str(tmp_path / "cache")]
    first = compiled(*few, "--json", str(tmp_path / "all.json"), "--markdown")
    assert first.returncode == 0, first.stderr
    found = [Compiled(**one) for one in json.loads((tmp_path / "all.json").read_text())]
    assert {(one.kernel, one.target) for one in found} == {
        (kernel, target) for kernel in ("uniform siblings", "tree_mask chunked") for target in TARGETS
    }
    assert all(one.registers > 0 and not one.fault for one in found)
    assert all((one.scalars > 0) == (one.target == "gfx942") for one in found)
    assert first.stdout.startswith("| kernel | warps | sm_80 | sm_90 | gfx942 |")
    again = compiled(*few, "--markdown")
    assert again.stdout == first.stdout
    assert len(list((tmp_path / "cache").iterdir())) == 6
    # what the cache says is believed: a changed entry shows
    for path in (tmp_path / "cache").iterdir():
        path.write_text(path.read_text().replace('"spills": 0', '"spills": 50'))
    assert compiled(*few).returncode == 1


@pytest.mark.slow
def test_a_spill_is_found_and_fails() -> None:
    """Negative control: with too few registers a kernel spills, and the program says which."""
    run = compiled("--only", "tree_mask chunked", "--targets", "sm_90", "--max-registers", "32", "--no-cache")
    assert run.returncode == 1
    assert "tree_mask chunked on sm_90: spills registers" in run.stderr


def test_what_is_at_fault() -> None:
    assert GOOD.fault == AMD.fault == ""
    assert "spills registers (17; 68 bytes of stack)" in replace(GOOD, spills=17, stack=68).fault
    assert not replace(GOOD, spills=9, stack=36).fault, "Triton 3.6 spills 2 to 9 where 3.9 spills none"
    assert "shared memory" in replace(GOOD, shared=232_449).fault and not replace(GOOD, shared=232_448).fault
    assert replace(GOOD, error="does not compile: x").fault == "does not compile: x"


def test_the_table() -> None:
    table = compile_only.markdown([GOOD, AMD, replace(GOOD, kernel="row_stats float32", registers=80)])
    assert table.splitlines() == [
        "| kernel | warps | sm_90 | gfx942 |",
        "| --- | --- | --- | --- |",
        "| row_stats bfloat16 | 8 | 75 / 0 / 32 | 41+52 / 0+3 / 32 |",
        "| row_stats float32 | 8 | 80 / 0 / 32 |  |",
    ]
    brief = compile_only.markdown([GOOD, AMD, replace(GOOD, kernel="row_stats float32", registers=80)], brief=True)
    assert brief.splitlines()[2:] == ["| row_stats (2) | 8 | 80 / 0 / 32 | 41+52 / 0+3 / 32 |"]
    assert "| error |" in compile_only.markdown([replace(GOOD, error="no")])


def test_wrong_targets_are_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # the program takes it away
    assert compile_only.main(["--targets", "sm_90,avx2"]) == 2
    shown = capsys.readouterr()
    assert "avx2" in shown.err and not shown.out


@pytest.mark.slow
def test_wrong_names_are_refused() -> None:
    run = compiled("--only", "no such kernel")
    assert run.returncode == 2 and "no such kernel" in run.stderr and not run.stdout


@pytest.mark.slow
def test_no_kernel_spills(tmp_path: Path) -> None:
    run = compiled("--json", str(tmp_path / "all.json"), "--markdown")
    found = [Compiled(**one) for one in json.loads((tmp_path / "all.json").read_text())]
    assert run.returncode == 0, run.stderr
    assert {one.target for one in found} == TARGETS
    assert [one.kernel for one in found if one.fault] == []
    names = [one.kernel for one in found if one.target == "sm_80"]
    assert len(names) == len(set(names)) > 90
    named = {name.split()[0] for name in names}
    doors = set(re.findall(r'= _door\(\w+\.(\w+), "triton_', (ROOT / "hf_specgen" / "ops.py").read_text()))
    assert len(doors) > 10 and doors <= named, "every operation with a twin is compiled"
