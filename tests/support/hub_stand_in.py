"""A stand-in of the Hub over a folder of repositories, and small checkpoints to put into it. No network."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from hf_specgen.checkpoints import files

SHA = "0123abcd" * 5
Tensors = dict[str, Tensor]


def medusa_heads(
    heads: int = 3, width: int = 32, vocab: int = 64, seed: int = 0, dtype: Any = torch.float32
) -> Tensors:
    """Return random Medusa v0.1 heads, which need no other part to be told apart."""
    torch.manual_seed(seed)
    found: Tensors = {}
    for head in range(heads):
        found[f"{head}.0.linear.weight"] = 0.1 * torch.randn(width, width)
        found[f"{head}.0.linear.bias"] = 0.1 * torch.randn(width)
        found[f"{head}.1.weight"] = torch.randn(vocab, width)
    return found


def put_config(folder: Path, **settings: Any) -> Path:
    """Make a folder with a config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def put_heads(folder: Path, pickled: bool = False, **settings: Any) -> Path:
    """Write Medusa heads as their authors do."""
    put_config(folder, base_model_name_or_path="org/target", medusa_num_heads=2, medusa_num_layers=1)
    tensors = medusa_heads(**settings)
    if pickled:
        torch.save(tensors, folder / "medusa_lm_head.pt")
    else:
        save_file(tensors, folder / "medusa_lm_head.safetensors")
    return folder


class Watched(FileIO):
    """Read a file and count the bytes."""

    count = 0

    def read(self, size: int | None = -1) -> bytes:
        found = super().read(-1 if size is None else size)
        self.count += len(found)
        return found

    def readinto(self, buffer: Any) -> int:
        found = super().readinto(buffer)
        self.count += found
        return found


class Hub:
    """Serve the folders of ``root`` as repositories; keep what was asked."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.gated: set[str] = set()
        self.fetched: list[str] = []
        self.asked: list[tuple[str, Any]] = []
        self.bytes_read = 0
        self.down: Exception | None = None
        self.uploads: list[tuple[str, Any]] = []

    def __call__(self, token: Any = None) -> Hub:
        self.token = token
        return self

    def check(self, repo: str) -> Path:
        response: Any = SimpleNamespace(headers={}, request=None, status_code=404)
        if self.down is not None:
            raise self.down
        if repo in self.gated:
            raise GatedRepoError("gated", response=response)
        if not (self.root / repo).is_dir():
            raise RepositoryNotFoundError("not found", response=response)
        return self.root / repo

    def model_info(self, repo: str, revision: str | None = None) -> Any:
        folder = self.check(repo)
        self.asked.append((repo, revision))
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        return SimpleNamespace(sha=SHA, siblings=[SimpleNamespace(rfilename=name) for name in names])

    def parse_safetensors_file_metadata(self, repo: str, file: str, revision: str | None = None) -> Any:
        path = self.check(repo) / file
        with safe_open(path, framework="pt") as handle:
            shapes = {name: handle.get_slice(name).get_shape() for name in handle.keys()}
        return SimpleNamespace(tensors={name: SimpleNamespace(shape=shape) for name, shape in shapes.items()})

    def download(self, repo: str, file: str, **_: Any) -> str:
        path = self.check(repo) / file
        self.fetched.append(file)
        return str(path)

    @contextmanager
    def open(self, address: str, revision: str | None = None) -> Iterator[Watched]:
        owner, name, file = address.split("/", 2)
        with Watched(self.check(f"{owner}/{name}") / file) as handle:
            yield handle
        self.bytes_read += handle.count

    # what push_to_hub calls
    def create_repo(self, repo: str, **settings: Any) -> Any:
        self.uploads.append(("create_repo", {"repo": repo, **settings}))
        (self.root / repo).mkdir(parents=True, exist_ok=True)
        return SimpleNamespace(repo_id=repo)

    def file_exists(self, repo: str, file: str, revision: str | None = None) -> bool:
        return (self.check(repo) / file).exists()

    def upload_folder(self, repo_id: str, folder_path: Path, **settings: Any) -> Any:
        folder = self.check(repo_id)
        for path in Path(folder_path).iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        self.uploads.append(("upload_folder", {"repo": repo_id, **settings}))
        return SimpleNamespace(commit_url=f"https://huggingface.co/{repo_id}/commit/{SHA}")


def stand_in(monkeypatch: pytest.MonkeyPatch, root: Path) -> Hub:
    """Put a stand-in where the library asks the Hub."""
    hub = Hub(root)
    monkeypatch.setattr(files, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(files, "HfApi", hub)
    monkeypatch.setattr(files, "HfFileSystem", hub)
    monkeypatch.setattr(files, "hf_hub_download", hub.download)
    monkeypatch.setattr(files, "try_to_load_from_cache", lambda *_, **__: None)
    return hub
