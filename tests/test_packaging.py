"""Prove that the wheel is whole and that the top-level ``kernels/`` folder harms nobody."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from transformers.utils import import_utils

ROOT = Path(__file__).resolve().parent.parent
MAPPED = ("kernels", "model_cards", "trainers")
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "hf_specgen", *MAPPED)
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info", "build")

# One worker builds the wheel for all tests of it.
pytestmark = pytest.mark.xdist_group("packaging")


def copy_tree(into: Path) -> Path:
    into.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, into / name, ignore=LEFT_OUT)
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, into / name)
    return into


def python(code: str, cwd: Path, *path: Path) -> subprocess.CompletedProcess[str]:
    """Run code as a user would who stands in ``cwd``, with ``path`` before the installed packages."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of the tree, without a network, and unpack it."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = copy_tree(folder / "tree")
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", *options, "."]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (archive,) = folder.glob("*.whl")
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(folder / "unpacked")
    return folder / "unpacked"


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def expected_files(tree: Path) -> set[str]:
    """List where each source file belongs in the wheel: mapped folders inside the package, no stand-ins."""
    stand_ins = {f"hf_specgen/{name}/__init__.py" for name in MAPPED}
    inside = {path for path in files(tree) if path.startswith(("hf_specgen/", *(f"{name}/" for name in MAPPED)))}
    inside = {path for path in inside if not path.startswith("hf_specgen/bench/dev/")}  # maintainers' clocks
    return {path if path.startswith("hf_specgen/") else f"hf_specgen/{path}" for path in inside - stand_ins}


def test_every_source_file_is_in_the_wheel(wheel: Path) -> None:
    inside = {path for path in files(wheel) if ".dist-info/" not in path}
    wanted = {path for path in expected_files(wheel.parent / "tree") if not Path(path).name.startswith(".")}
    assert inside == wanted, "pyproject.toml lists packages and package data"
    assert "hf_specgen/kernels/reference.py" in inside
    assert "hf_specgen/py.typed" in inside


@pytest.mark.slow
def test_nothing_is_top_level_but_the_package(wheel: Path) -> None:
    names = {path.name for path in wheel.iterdir() if path.suffix != ".dist-info"}
    assert names == {"hf_specgen"}


def metadata(wheel: Path) -> tuple[Message, Path]:
    (folder,) = wheel.glob("*.dist-info")
    return Parser().parsestr((folder / "METADATA").read_text()), folder


def test_metadata(wheel: Path) -> None:
    fields, folder = metadata(wheel)
    assert (fields["Name"], fields["License-Expression"], fields["Requires-Python"]) == (
        "hf_specgen",
        "Apache-2.0",
        ">=3.10",
    )
    assert "hf-specgen = hf_specgen.cli.main:app" in (folder / "entry_points.txt").read_text()
    assert (folder / "licenses" / "LICENSE").exists()
    required = [line for line in fields.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert not any(line.startswith("triton") for line in required), "a gigabyte that a CPU has no use for"


@pytest.mark.slow
def test_mapped_folders_import_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    code = """
import hf_specgen, hf_specgen.trainers, hf_specgen.kernels.reference as reference
print(hf_specgen.__file__, reference.__file__)
"""
    done = python(code, tmp_path, wheel)
    assert done.returncode == 0, done.stderr
    assert all(path.startswith(str(wheel)) for path in done.stdout.split())


# What of transformers looks at the PyPI package `kernels`; prints what it found.
ASK_TRANSFORMERS = """
import importlib.util, json
import transformers, transformers.integrations.hub_kernels
from transformers.utils import is_kernels_available
available = is_kernels_available()
spec = importlib.util.find_spec("kernels") if available else None
print(json.dumps([available, spec.origin if spec else None]))
"""


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    """Make a package that passes for the PyPI package ``kernels``, in a version that transformers takes."""
    package = tmp_path / "site" / "kernels"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("def __getattr__(name):\n    return type(name, (), {})\n")
    information = tmp_path / "site" / "kernels-0.dist-info"
    information.mkdir()
    version = import_utils.KERNELS_MIN_VERSION
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n")
    return tmp_path / "site"


def answer(done: subprocess.CompletedProcess[str]) -> list[object]:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow  # with the package is the harder case
def test_transformers_from_the_root_without_the_kernels_package(tmp_path: Path) -> None:
    installed = any(dist.name == "kernels" for dist in importlib.metadata.distributions())
    here = answer(python(ASK_TRANSFORMERS, ROOT))
    assert here[0] is False or installed
    if installed:
        assert here == answer(python(ASK_TRANSFORMERS, tmp_path))


@pytest.mark.slow
def test_transformers_from_the_root_with_the_kernels_package(stub: Path) -> None:
    assert answer(python(ASK_TRANSFORMERS, ROOT, stub)) == [True, str(stub / "kernels" / "__init__.py")]


@pytest.mark.slow
def test_an_init_file_in_kernels_would_break_transformers(stub: Path, tmp_path: Path) -> None:
    root = copy_tree(tmp_path / "root")
    (root / "kernels" / "__init__.py").touch()
    done = python(ASK_TRANSFORMERS, root, stub)
    assert done.returncode != 0
    assert "cannot import name" in done.stderr
