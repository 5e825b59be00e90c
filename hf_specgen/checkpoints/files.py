"""Find the files of a drafter: in a folder or a Hub repository, tensors by name, shapes without reading them.

Nothing that lies beside them is ever executed, and no file of code is fetched.
"""

from __future__ import annotations

import json
import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from huggingface_hub import HfApi, HfFileSystem, hf_hub_download, try_to_load_from_cache
from huggingface_hub.constants import HF_HUB_OFFLINE
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hf_specgen.errors import IncompatibleDrafter, SpecGenError, reason_of

CONFIG = "config.json"
# the first that is there is read; heads of their own file go before a backbone that lies beside them
WEIGHTS = (
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)
SAFE = ".safetensors"
PICKLES = (".bin", ".pt")
INDEX = ".index.json"
# what a trainer leaves beside the weights
NO_WEIGHTS = {"training_state.pt", "optimizer.pt", "scheduler.pt", "training_args.bin", "optimizer.bin"}

Shape = tuple[int, ...]
# of httpx or httpx2, whichever the Hub's client uses; what is no HfHubHTTPError did not reach the Hub
HTTPError: type[BaseException] = HfHubHTTPError.__mro__[1]


@dataclass(frozen=True)
class HubOptions:
    """Hold what the Hub is asked with; the names are those of ``from_pretrained``."""

    revision: str | None = None
    token: str | bool | None = None
    cache_dir: str | Path | None = None
    local_files_only: bool = False


@dataclass(frozen=True)
class Files(ABC):
    """Know the names of a checkpoint's files and where they are."""

    name: str
    listing: tuple[str, ...]

    @abstractmethod
    def path(self, file: str) -> Path:
        """Return where a file lies on this machine; it is fetched if it must be."""

    @abstractmethod
    def shapes(self, file: str) -> dict[str, Shape]:
        """Return the shape of every tensor of a file without reading them."""


@dataclass(frozen=True)
class Folder(Files):
    """Know the files of a folder."""

    root: Path

    @classmethod
    def at(cls, root: Path, name: str) -> Folder:
        """List a folder."""
        return cls(name, tuple(sorted(path.name for path in root.iterdir() if path.is_file())), root)

    def path(self, file: str) -> Path:
        """Return the file's path."""
        return self.root / file

    def shapes(self, file: str) -> dict[str, Shape]:
        """Return the shapes in a file of tensors."""
        return local_shapes(self.path(file))


@dataclass(frozen=True)
class Repository(Files):
    """Know the files of one revision of a Hub repository; each is fetched when it is first needed."""

    revision: str
    options: HubOptions

    def path(self, file: str) -> Path:
        """Return the file's place in the local cache. Raises: ``SpecGenError`` when it cannot be fetched."""
        options = self.options
        # asked for by its branch, the config makes the cache remember which commit that was: needed to load offline
        revision = options.revision if file == CONFIG else self.revision
        with hub_errors(self.name):
            return Path(
                hf_hub_download(self.name, file, revision=revision, token=options.token, cache_dir=options.cache_dir)
            )

    def shapes(self, file: str) -> dict[str, Shape]:
        """Return the shapes in a file from its first bytes; the file is not fetched."""
        cached = try_to_load_from_cache(self.name, file, cache_dir=self.options.cache_dir, revision=self.revision)
        if isinstance(cached, str):
            return local_shapes(Path(cached))
        with hub_errors(self.name):
            if file.endswith(SAFE):
                found = HfApi(token=self.options.token).parse_safetensors_file_metadata(
                    self.name, file, revision=self.revision
                )
                return {name: tuple(info.shape) for name, info in found.tensors.items()}
            disk = HfFileSystem(token=self.options.token)
            with disk.open(f"{self.name}/{file}", revision=self.revision) as handle:
                return _named_shapes(_unpickle(handle, file, map_location="meta"))


def find_files(name: str, options: HubOptions) -> Files:
    """Return the files of a folder or, when there is no such folder, of a Hub repository."""
    path = Path(name).expanduser()
    if path.is_dir():
        return Folder.at(path, name)
    if path.exists():
        raise SpecGenError(f"{name} is a file: the folder that holds config.json and the weights is required.")
    if path.is_absolute() or name.startswith(".") or len(path.parts) > 2:
        raise SpecGenError(f"{name} does not exist: a folder, or a Hub repository as owner/name, is required.")
    with hub_errors(name):
        if options.local_files_only or HF_HUB_OFFLINE:
            return _cached(name, options)
        try:
            found = HfApi(token=options.token).model_info(name, revision=options.revision)
        except (HTTPError, ConnectionError) as error:
            if isinstance(error, HfHubHTTPError):
                raise
            return _cached(name, options)
        listing = tuple(sorted(entry.rfilename for entry in found.siblings or ()))
        return Repository(name, listing, found.sha or options.revision or "main", options)


def _cached(name: str, options: HubOptions) -> Files:
    found = try_to_load_from_cache(name, CONFIG, cache_dir=options.cache_dir, revision=options.revision)
    if not isinstance(found, str):
        raise LocalEntryNotFoundError(f"no {CONFIG} of {name} in the cache")
    return Folder.at(Path(found).parent, name)


@contextmanager
def hub_errors(name: str) -> Iterator[None]:
    """Turn what the Hub's client raises into one message that says what to do."""
    log_in = "log in with `hf auth login`, or pass token="
    try:
        yield
    except GatedRepoError as error:
        raise SpecGenError(
            f"{name} is gated: accept its terms at https://huggingface.co/{name}, then {log_in}."
        ) from error
    except RevisionNotFoundError as error:
        raise SpecGenError(f"{name} has no such revision: choose a branch, tag or commit of it.") from error
    except RepositoryNotFoundError as error:
        raise SpecGenError(
            f"{name} is neither a folder here nor a repository on the Hub that you may read: check the spelling; if it "
            f"is private, {log_in}."
        ) from error
    except HFValidationError as error:
        raise SpecGenError(
            f"{name} is neither a folder here nor the name of a Hub repository: {reason_of(error)}."
        ) from error
    except LocalEntryNotFoundError as error:
        raise SpecGenError(
            f"{name} is neither a folder here nor in the local cache, and the Hub was not asked or not reached: go "
            "online (unset HF_HUB_OFFLINE, leave local_files_only out) once, or give a folder."
        ) from error
    except (HTTPError, ConnectionError) as error:
        raise SpecGenError(
            f"{name}: the Hub could not be asked: {reason_of(error)}. Try again, or give a folder."
        ) from error


def weight_files(files: Files) -> list[str]:
    """Return the files that hold the tensors: one, or the shards that an index names.

    Raises: ``IncompatibleDrafter`` when there are none, several to choose from, or shards that are missing.
    """
    chosen = next((file for file in WEIGHTS if file in files.listing), None) or _only_weights(files)
    if not chosen.endswith(INDEX):
        return [chosen]
    shards = sorted(set(read_json(files, chosen).get("weight_map", {}).values()))
    strange = [shard for shard in shards if PurePosixPath(shard).name != shard or "\\" in shard]
    absent = [shard for shard in shards if shard not in files.listing]
    if strange or absent or not shards:
        raise IncompatibleDrafter(
            f"{files.name}: {chosen} names {'files elsewhere' if strange else 'files that are not there'}: "
            f"{', '.join(strange or absent) or 'none'}. Get the checkpoint anew."
        )
    return shards


def _only_weights(files: Files) -> str:
    found = [file for file in files.listing if is_weights(file)]
    safe = [file for file in found if file.endswith(SAFE)]
    candidates = safe or found
    if len(candidates) != 1:
        what = f"several files of weights ({', '.join(candidates)})" if candidates else "no weights"
        raise IncompatibleDrafter(
            f"{files.name} has {what}: one of {', '.join(WEIGHTS)} is required. Rename the one that is meant, or give "
            "the folder that holds it."
        )
    return candidates[0]


def is_weights(file: str) -> bool:
    """Tell whether a file name is that of tensors or of their index."""
    return file.endswith((SAFE, *PICKLES, INDEX)) and file not in NO_WEIGHTS and not file.startswith("rng_state")


def read_json(files: Files, file: str) -> dict[str, Any]:
    """Read a file that holds a JSON object. Raises: ``IncompatibleDrafter`` when it holds something else."""
    try:
        found = json.loads(files.path(file).read_text(encoding="utf-8"))
    except ValueError as error:
        raise IncompatibleDrafter(
            f"{files.name}: {file} is no JSON: {reason_of(error)}. Get the checkpoint anew."
        ) from error
    if not isinstance(found, dict):
        raise IncompatibleDrafter(f"{files.name}: {file} holds {type(found).__name__}, an object is required.")
    return found


def read_tensors(files: Files, holders: Mapping[str, str], names: Iterable[str]) -> dict[str, Tensor]:
    """Read tensors by name as copies: no file stays mapped, so that it may be overwritten."""
    wanted = list(names)
    read: dict[str, Tensor] = {}
    for file in sorted({holders[name] for name in wanted}):
        here = [name for name in wanted if holders[name] == file]
        path = files.path(file)
        if file.endswith(SAFE):
            with _opened_safely(path) as handle:
                read.update((name, handle.get_tensor(name).clone()) for name in here)
        else:
            found = _load_pickle(path)
            read.update((name, found[name].clone()) for name in here)
    return read


def local_shapes(path: Path) -> dict[str, Shape]:
    """Return the shapes in a file of tensors on this machine. Raises: ``IncompatibleDrafter`` when it is none."""
    if path.name.endswith(SAFE):
        with _opened_safely(path) as handle:
            return {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}
    return _named_shapes(_load_pickle(path))


@contextmanager
def _opened_safely(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as handle:
            yield handle
    except SafetensorError as error:
        raise IncompatibleDrafter(
            f"{path} is no readable safetensors file: {reason_of(error)}. Get it anew (in a git clone: git lfs pull)."
        ) from error


def _load_pickle(path: Path) -> dict[str, Tensor]:
    try:
        return _unpickle(path, path.name, map_location="cpu", mmap=True)
    except RuntimeError:  # files from before torch 1.6 cannot be mapped
        return _unpickle(path, path.name, map_location="cpu")


def _unpickle(file: Any, name: str, **how: Any) -> dict[str, Tensor]:
    try:
        found = torch.load(file, weights_only=True, **how)
    except (pickle.UnpicklingError, EOFError) as error:
        raise IncompatibleDrafter(
            f"{name} holds more than tensors, or is damaged: reading it could run code, so it is not read. Ask its "
            "author for a safetensors file."
        ) from error
    tensors = isinstance(found, dict) and all(isinstance(value, Tensor) for value in found.values())
    if not tensors:
        raise IncompatibleDrafter(f"{name} holds {type(found).__name__}, a dictionary of tensors is required.")
    return {str(key): value for key, value in found.items()}


def _named_shapes(tensors: Mapping[str, Tensor]) -> dict[str, Shape]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
