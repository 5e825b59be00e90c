"""The kernels folder, laid out for the Hub, loads as the ``kernels`` library loads it and works on its own."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch

from hf_specgen import ops
from hf_specgen.kernels import hub_layout

# two lanes with 2 and 1 tokens of text, a root and two nodes behind them, in 5 slots, without a window
MASK = (torch.tensor([2, 1]), torch.tensor([[-1, 0], [-1, -1]]), 5, 5, 0, False)
SEEN = [
    [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]],
    [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 0, 1, 0]],
]


def read(build: Path) -> dict:
    return json.loads((build / "metadata.json").read_text())


def load(build: Path, file: str = "__init__.py") -> ModuleType:
    """Import a build as ``kernels.importer`` does: from its path, under the identifier of its metadata."""
    name = read(build)["id"]
    spec = importlib.util.spec_from_file_location(name, build / file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = hub_layout.lay_out(tmp_path_factory.mktemp("hub"))
    return {build.name: build for build in found}


@pytest.fixture(scope="module")
def kernel(builds: dict[str, Path]) -> ModuleType:
    return load(builds["torch-cpu"])


def test_a_build_a_backend_with_what_the_library_reads(builds: dict[str, Path]) -> None:
    assert set(builds) == {"torch-cpu", "torch-cuda", "torch-rocm"}
    for name, build in builds.items():
        about = read(build)
        assert (about["name"], about["version"], about["license"]) == ("hf-specgen-kernels", 1, "Apache-2.0")
        assert about["backend"] == {"type": name.removeprefix("torch-")}
        assert about["python-depends"] == about["kernel-depends"] == []
        assert about["id"].isidentifier() and about["backend"]["type"] in about["id"]
        files = {path.relative_to(build).as_posix(): path for path in build.rglob("*.py")}
        assert {"__init__.py", "reference_slots.py", "triton_slots.py", "hf_specgen_kernels/__init__.py"} <= set(files)
        assert not {"hub_layout.py", "build.toml"} & set(files)
        digests = {path: hashlib.sha256(file.read_bytes()).digest() for path, file in files.items()}
        assert about["digest"]["files"] == {path: base64.b64encode(one).decode() for path, one in digests.items()}
        card = (build.parents[1] / "README.md").read_text()
        assert card.startswith("---\n") and "license: apache-2.0" in card
    assert len({read(build)["id"] for build in builds.values()}) == 3


def test_a_loaded_build_works_on_its_own(kernel: ModuleType) -> None:
    assert set(kernel.__all__) == set(ops.__all__)
    with ops.record() as ours, kernel.record() as theirs:
        seen = kernel.tree_mask(*MASK)
    assert seen.int().tolist() == SEEN
    assert (theirs, ours) == ({("tree_mask", "reference"): 1}, {})
    assert not [name for name, module in sys.modules.items() if name.startswith(f"{kernel.__name__}.hf_specgen")]


def test_its_operators_stand_beside_those_of_the_package(kernel: ModuleType) -> None:
    pytest.importorskip("triton")
    with kernel.use_kernels("triton"):
        theirs = kernel.tree_mask(*MASK)
    with ops.use_kernels("triton"):
        ours = ops.tree_mask(*MASK)
    assert torch.equal(theirs, ours)
    space = vars(torch.ops)[kernel.__name__]
    assert str(space.tree_mask.default) == f"{kernel.__name__}.tree_mask.default"
    assert str(torch.ops.hf_specgen.tree_mask.default) == "hf_specgen.tree_mask.default"


def test_every_module_of_a_build_imports(kernel: ModuleType) -> None:
    pytest.importorskip("triton")
    before = {name: vars(kernel)[name] for name in kernel.__all__}
    for path in Path(str(kernel.__file__)).parent.glob("*.py"):
        if path.name != "__init__.py":
            importlib.import_module(f"{kernel.__name__}.{path.stem}")
    assert {name: vars(kernel)[name] for name in kernel.__all__} == before, "a module hides an operation"


def test_other_sources_make_another_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: ModuleType) -> None:
    sources = hub_layout._sources()
    sources["triton_slots.py"] += "\n# one more line\n"
    monkeypatch.setattr(hub_layout, "_sources", lambda: sources)
    build = hub_layout.lay_out(tmp_path)[0]
    other = load(build)
    assert other.__name__ != kernel.__name__
    if find_spec("triton"):
        with other.use_kernels("triton"), kernel.use_kernels("triton"):
            assert torch.equal(other.tree_mask(*MASK), kernel.tree_mask(*MASK))


@pytest.mark.parametrize(
    "line",
    [
        "from hf_specgen.round.records import Tree",
        "    import hf_specgen",
        "x = 'hf_specgen.kernels.common'",
        "from hf_specgen import errors",
    ],
)
def test_a_source_that_reaches_back_is_refused(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = hub_layout._sources()
    sources["common.py"] += f"\n{line}\n"
    monkeypatch.setattr(hub_layout, "_sources", lambda: sources)
    with pytest.raises(ValueError, match=r"common\.py cannot leave the package"):
        hub_layout.lay_out(tmp_path)


def test_older_libraries_find_it_one_folder_down(builds: dict[str, Path], kernel: ModuleType) -> None:
    path = builds["torch-cpu"] / "hf_specgen_kernels" / "__init__.py"
    spec = importlib.util.spec_from_file_location("any_name_they_like", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert {name: vars(module)[name] for name in ops.__all__} == {name: vars(kernel)[name] for name in ops.__all__}


def test_settings_are_those_of_the_file() -> None:
    tomllib = pytest.importorskip("tomllib")
    text = (Path(hub_layout.__file__).parent / "build.toml").read_text()
    read_by_toml = tomllib.loads(text)
    assert hub_layout.settings() == read_by_toml["general"]
    assert read_by_toml["torch-noarch"] == {}


def test_the_library_itself_loads_it(builds: dict[str, Path], kernel: ModuleType) -> None:
    library = pytest.importorskip("kernels")
    if "get_local_kernel" not in vars(library):  # from the root of the repository our own folder answers to the name
        pytest.skip("the PyPI package `kernels` is not installed")
    loaded = library.get_local_kernel(builds["torch-cpu"].parents[1], backend="cpu")
    assert loaded.__name__ == kernel.__name__
    assert loaded.tree_mask(*MASK).int().tolist() == SEEN
