"""A cache of what a target says of texts, so that training reads files instead of running the target.

A folder of safetensors shards, ``rows.parquet`` with the texts, and ``cache.json``, written last, that says whose
hidden states these are. Hidden states are kept and never logits: those are made anew with the target's head.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from hf_specgen.errors import IncompatibleDrafter, SpecGenError, reason_of
from hf_specgen.models.facts import TargetFacts
from hf_specgen.models.taps import FINAL
from hf_specgen.models.wrappers import input_device
from hf_specgen.trainers.data import DraftCollator
from hf_specgen.trainers.disk import alone, write_whole, writing
from hf_specgen.trainers.frozen import FrozenTarget

FORMAT = 1
MANIFEST = "cache.json"
ROWS = "rows.parquet"
_WINDOW = 16  # batches whose rows are sorted by length together
_SIZES = ("hidden_size", "vocab_size", "num_layers")

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class CacheOptions:
    """Hold how a cache is written; ``dtype`` None keeps the target's, ``shard_bytes`` is the size of one file."""

    dtype: torch.dtype | None = None
    batch_size: int = 8
    shard_bytes: int = 2 << 30
    notes: dict[str, Any] = field(default_factory=dict)


def write_cache(
    folder: str | Path,
    rows: Any,
    target: PreTrainedModel,
    boundaries: Sequence[int],
    options: CacheOptions | None = None,
    progress: Progress | None = None,
) -> FeatureCache:
    """Run a target over prepared rows (a data set) and keep its hidden states at ``boundaries`` and before the head.

    Raises: ``SpecGenError`` for a folder that holds a cache already, that another process writes, or that cannot be
    written.
    """
    options = options or CacheOptions()
    folder = Path(folder)
    with alone(folder / MANIFEST):
        if (folder / MANIFEST).exists():
            raise SpecGenError(f"{folder} holds a cache: give another folder, or remove it first.")
        for left in folder.glob("features-*.safetensors"):  # of a run that was stopped
            left.unlink()
        return _write(folder, rows, target, tuple(boundaries), options, progress)


def _write(
    folder: Path,
    rows: Any,
    target: PreTrainedModel,
    boundaries: tuple[int, ...],
    options: CacheOptions,
    progress: Progress | None,
) -> FeatureCache:
    kept = tuple(boundary for boundary in dict.fromkeys(boundaries) if boundary != FINAL)
    reader = FrozenTarget(target, kept, input_device(target))
    shards = _Shards(folder, options.shard_bytes, [])
    for done, (features, last) in enumerate(_states(reader, rows, options), 1):
        shards.add(features, last)
        if progress is not None:
            progress(done, len(rows), f"{shards.tokens:,} tokens")
    shards.flush()
    texts = rows.remove_columns([name for name in rows.column_names if name == "features_row"])
    with writing(folder / ROWS):
        texts.add_column("features_row", list(range(len(rows)))).to_parquet(str(folder / ROWS))
    manifest = {
        "format": FORMAT,
        "target": TargetFacts.of(target).to_dict(),
        "boundaries": list(kept),
        "dtype": str(options.dtype or target.dtype).removeprefix("torch."),
        "rows": len(rows),
        "tokens": shards.tokens,
        "shards": shards.written,
        **options.notes,
    }
    write_whole(folder / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    return FeatureCache(folder, manifest, boundaries)


def _states(reader: FrozenTarget, rows: Any, options: CacheOptions) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each row's ``features (T, n * D)`` and ``last_hidden (T, D)``, in order."""
    collate = DraftCollator()
    size = options.batch_size
    for start in range(0, len(rows), size * _WINDOW):
        window = [rows[i] for i in range(start, min(start + size * _WINDOW, len(rows)))]
        order = sorted(range(len(window)), key=lambda i: len(window[i]["input_ids"]))
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for first in range(0, len(order), size):
            chosen = order[first : first + size]
            batch = {
                name: value.to(reader.device)
                for name, value in collate([window[i] for i in chosen]).items()
                if name != "num_items"
            }
            features, last = reader.read(batch)
            joined = torch.cat(features, -1) if features else last[..., :0]
            for place, i in enumerate(chosen):
                length = len(window[i]["input_ids"])
                kept = (state[place, :length].to("cpu", options.dtype or state.dtype) for state in (joined, last))
                found[i] = tuple(state.clone() for state in kept)  # type: ignore[assignment]
        yield from (found[i] for i in range(len(window)))


@dataclass
class _Shards:
    """Collect rows and write a file whenever enough have come together."""

    folder: Path
    size: int
    written: list[dict[str, Any]]
    tokens: int = 0
    first: int = 0
    held: int = 0
    features: list[Tensor] = field(default_factory=list)
    last: list[Tensor] = field(default_factory=list)

    def add(self, features: Tensor, last: Tensor) -> None:
        self.features.append(features)
        self.last.append(last)
        self.tokens += len(last)
        self.held += sum(state.numel() * state.element_size() for state in (features, last))
        if self.held >= self.size:
            self.flush()

    def flush(self) -> None:
        if not self.last:
            return
        name = f"features-{len(self.written):05d}.safetensors"
        lengths = torch.tensor([0, *(len(state) for state in self.last)])
        tensors = {
            "features": torch.cat(self.features),
            "last_hidden": torch.cat(self.last),
            "offsets": lengths.cumsum(0),
        }
        with writing(self.folder / name):
            try:
                save_file(tensors, self.folder / name)
            except SafetensorError as error:
                raise OSError(str(error)) from error
        (self.folder / name).chmod(self.folder.stat().st_mode & 0o666)  # safetensors writes for the owner alone
        tokens = len(tensors["last_hidden"])
        self.written.append({"file": name, "first": self.first, "rows": len(self.last), "tokens": tokens})
        self.first += len(self.last)
        self.features = []
        self.last = []
        self.held = 0


class FeatureCache:
    """Read the hidden states of a text's row; files are opened when they are first read, in every process anew."""

    def __init__(self, folder: Path, manifest: dict[str, Any], boundaries: tuple[int, ...]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.boundaries = boundaries
        self._first = [int(shard["first"]) for shard in manifest["shards"]]
        self._files: dict[int, tuple[Any, Tensor]] = {}

    @classmethod
    def open(cls, folder: str | Path, facts: TargetFacts, boundaries: Sequence[int]) -> FeatureCache:
        """Open a cache for a target and the hidden states that a drafter reads of it.

        Raises: ``SpecGenError`` for a folder without a finished cache, or whose files are missing or cut off,
        ``IncompatibleDrafter`` when it is another target's or lacks a boundary. Targets that share embedding and head
        look alike here: what is stored is compared with the target itself when a drafter first learns from it.
        """
        folder = Path(folder)
        try:
            manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise SpecGenError(
                f"{folder} holds no finished feature cache ({reason_of(error)}): write one with write_cache."
            ) from error
        if manifest.get("format") != FORMAT:
            raise SpecGenError(
                f"{folder} is of format {manifest.get('format')}, and {FORMAT} can be read: write it anew."
            )
        _check_target(folder, manifest["target"], facts)
        missing = [b for b in boundaries if b != FINAL and b not in manifest["boundaries"]]
        if missing:
            raise IncompatibleDrafter(
                f"{folder} holds the hidden states at the boundaries {manifest['boundaries']} and the drafter reads "
                f"{list(boundaries)}: {missing} are missing. Write a cache for this drafter."
            )
        cache = cls(folder, manifest, tuple(boundaries))
        for shard, told in enumerate(manifest["shards"]):
            cache._check(shard, int(told["rows"]), told.get("tokens"))
        cache._files.clear()
        return cache

    def __getstate__(self) -> dict[str, Any]:
        """Leave open files out."""
        return {**self.__dict__, "_files": {}}

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self.manifest["rows"])

    def rows(self) -> Any:
        """Return the texts as a data set with ``features_row``: what to train on."""
        return Dataset.from_parquet(str(self.folder / ROWS))

    def _check(self, shard: int, rows: int, known: int | None) -> None:
        """Raises: ``SpecGenError`` for a file that is not as it was written."""
        place = self.folder / self.manifest["shards"][shard]["file"]
        try:
            file, offsets = self._opened(shard)
            tokens = {file.get_slice(name).get_shape()[0] for name in ("features", "last_hidden")}
        except (OSError, SafetensorError) as error:
            raise SpecGenError(
                f"{place} cannot be read: {reason_of(error)}. It was cut off or left behind when the cache was copied: "
                "copy it again, or write the cache anew."
            ) from error
        if len(offsets) != rows + 1 or tokens != {int(offsets[-1]) if known is None else known}:
            raise SpecGenError(
                f"{place} is not the file that was written ({rows} rows of {known} tokens are required). Copy the "
                "whole folder again."
            )

    def __getitem__(self, row: int) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return a row's features, one ``(T, D)`` per boundary, and its last hidden state ``(T, D)``."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        shard = max(i for i, first in enumerate(self._first) if first <= row)
        file, offsets = self._opened(shard)
        place = row - self._first[shard]
        start = int(offsets[place])
        stop = int(offsets[place + 1])
        last = file.get_slice("last_hidden")[start:stop]
        joined = file.get_slice("features")[start:stop]
        width = last.shape[-1]
        kept = self.manifest["boundaries"]
        parts = tuple(
            last if boundary == FINAL else joined[:, kept.index(boundary) * width :][:, :width]
            for boundary in self.boundaries
        )
        return parts, last

    def _opened(self, shard: int) -> tuple[Any, Tensor]:
        if shard not in self._files:
            file = safe_open(self.folder / self.manifest["shards"][shard]["file"], "pt")
            self._files[shard] = file, file.get_tensor("offsets")
        return self._files[shard]


def _check_target(folder: Path, theirs: dict[str, Any], facts: TargetFacts) -> None:
    ours = facts.to_dict()
    differ = [name for name in _SIZES if theirs[name] != ours[name]]
    if theirs["fingerprint"] and ours["fingerprint"] and theirs["fingerprint"] != ours["fingerprint"]:
        differ.append("fingerprint")
    if differ:
        shown = ", ".join(f"{name} {theirs[name]} there and {ours[name]} here" for name in differ)
        raise IncompatibleDrafter(
            f"{folder} holds the hidden states of another target, {theirs['name'] or 'unnamed'} ({shown}). Load that "
            "target, or write a cache for this one."
        )
