"""Open a folder or a Hub repository as a drafter checkpoint. Nothing that lies in it is ever executed."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from hf_specgen.checkpoints.config import DrafterConfig
from hf_specgen.checkpoints.files import CONFIG, HubOptions, Shape, find_files, read_json, read_tensors, weight_files
from hf_specgen.checkpoints.formats.base import Checkpoint, Layout, Plan, ReadOptions, Source, detect, other_method
from hf_specgen.checkpoints.methods import field_names
from hf_specgen.errors import IncompatibleDrafter, SpecGenError

INT_MAPS = ("d2t", "t2d")
NOT_CHANGED = ("target",)


@dataclass(frozen=True)
class Report:
    """Hold what a checkpoint is and what was decided about it."""

    source: str
    layout: str
    config: DrafterConfig
    parameters: int
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def needs(self) -> tuple[str, ...]:
        """Return what a target must have and lend."""
        config = self.config
        sizes = f"a target of hidden size {config.target_hidden_size} and vocabulary {config.vocab_size}"
        if config.aux_layer_boundaries:
            sizes += f" with at least {max(config.aux_layer_boundaries)} layers"
        return (sizes, f"its hidden states: {config.states_read}", *config.lent)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        plain = json.loads(json.dumps(self.config.to_diff_dict(), default=str))
        return {
            "source": self.source,
            "layout": self.layout,
            "method": self.config.method,
            "parameters": self.parameters,
            "needs": list(self.needs),
            "notes": list(self.notes),
            "warnings": list(self.warnings),
            "config": {**plain, "method": self.config.method},
            "size": self.config.size,
        }

    def __str__(self) -> str:
        lines = [
            f"{self.source}: {self.config.method}, layout {self.layout}, {self.parameters:,} parameters",
            *(f"needs {need}" for need in self.needs),
            *self.notes,
            *(f"warning: {text}" for text in self.warnings),
        ]
        return "\n  ".join(lines)


@dataclass(frozen=True)
class Opened:
    """Hold a checkpoint whose layout is known and whose tensors are all accounted for; none was read."""

    source: Source
    layout: Layout
    options: ReadOptions
    plan: Plan
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> DrafterConfig:
        """Return the drafter's configuration with the caller's overrides."""
        return overridden(self.plan.config, self.overrides)

    @property
    def report(self) -> Report:
        """Return what was found and decided."""
        return self.told(self.config, self.plan.notes, self.plan.warnings)

    def told(self, config: DrafterConfig, notes: tuple[str, ...], warnings: tuple[str, ...]) -> Report:
        """Return what was found and decided in the end."""
        shapes = self.source.shapes
        learned = {theirs for ours, theirs in self.plan.names.items() if not ours.endswith(INT_MAPS)}
        count = sum(math.prod(shapes[name]) for name in learned)
        said = tuple(f"{name} = {value!r}, as the caller says" for name, value in self.overrides.items())
        return Report(self.source.name, self.layout.name, config, count, (*notes, *said), warnings)

    def read(self) -> Checkpoint:
        """Read the tensors. Raises: ``IncompatibleDrafter`` for bad values."""
        found = self.layout.read(self.source, self.options)
        config = overridden(found.config, self.overrides)
        return Checkpoint(config, found.tensors, found.layout, found.notes, found.warnings)


def open_checkpoint(name: str | Path, options: ReadOptions, settings: Mapping[str, Any] | None = None) -> Opened:
    """Open a folder or Hub repository, find its layout and account for every tensor; no weights are read.

    ``settings``: ``revision``, ``token``, ``cache_dir``, ``local_files_only``, and fields of ``DrafterConfig`` that
    replace what the checkpoint says.

    Raises: ``SpecGenError`` when it cannot be opened, ``IncompatibleDrafter`` when it cannot be used.
    """
    asked = dict(settings or {})
    hub = HubOptions(**{entry.name: asked.pop(entry.name) for entry in fields(HubOptions) if entry.name in asked})
    check_overrides(asked)
    source = open_source(name, hub)
    layout = identify(source)
    options = replace(options, given=asked)
    return Opened(source, layout, options, layout.plan(source, options), asked)


def check_overrides(asked: Mapping[str, Any]) -> None:
    """Refuse keywords that name no field of the configuration. Raises: ``SpecGenError``."""
    if "trust_remote_code" in asked:
        raise SpecGenError(
            "trust_remote_code: nothing of a drafter's repository is ever executed; every known layout is read by "
            "code of this library. Leave it out."
        )
    known = [name for name in field_names() if name not in NOT_CHANGED]
    unknown = sorted(set(asked) - set(known))
    if unknown:
        raise SpecGenError(
            f"{', '.join(unknown)}: unknown to load_drafter. It takes aux_layer_convention, dtype, device, "
            f"{', '.join(entry.name for entry in fields(HubOptions))} and the fields of DrafterConfig: "
            f"{', '.join(known)}."
        )


def overridden(config: DrafterConfig, overrides: Mapping[str, Any]) -> DrafterConfig:
    """Return a copy of a configuration with the caller's fields. Raises: ``SpecGenError`` for another method's."""
    changed = copy.deepcopy(config)
    config.check_fields(overrides)
    for name, value in overrides.items():
        setattr(changed, name, value)
    return changed


def open_source(name: str | Path, options: HubOptions | None = None) -> Source:
    """Open a folder or a Hub repository: its config and the shape of every tensor.

    Raises: ``SpecGenError`` when it is not there or cannot be fetched, ``IncompatibleDrafter`` when it holds no
    config or no weights that can be read safely.
    """
    files = find_files(str(name), options or HubOptions())
    if CONFIG not in files.listing:
        raise IncompatibleDrafter(
            f"{files.name} has no {CONFIG} (it holds {', '.join(files.listing[:6]) or 'nothing'}): a drafter is its "
            "config.json and its weights. Give the folder or repository that holds both."
        )
    config = read_json(files, CONFIG)
    holders: dict[str, str] = {}
    shapes: dict[str, Shape] = {}
    for file in weight_files(files):
        for tensor, shape in files.shapes(file).items():
            holders[tensor] = file
            shapes[tensor] = shape

    def load(names: Iterable[str]) -> dict[str, Tensor]:
        return read_tensors(files, holders, names)

    return Source(files.name, config, shapes, load, files.listing)


def identify(source: Source) -> Layout:
    """Return the layout of a checkpoint. Raises: ``IncompatibleDrafter`` saying what it is instead."""
    try:
        return detect(source)
    except IncompatibleDrafter:
        if other_method(source) or not is_whole_model(source):
            raise
    kind = (source.config.get("architectures") or ["a causal language model"])[0]
    raise IncompatibleDrafter(
        f"{source.name} is no drafter checkpoint but a whole causal language model ({kind}). To draft with it: "
        f"SmallModel(AutoModelForCausalLM.from_pretrained({source.name!r}))."
    )


def is_whole_model(source: Source) -> bool:
    """Tell whether a checkpoint looks like a causal language model: embeddings, and nothing that drafts."""
    parts = {part for name in source.shapes for part in name.split(".")}
    drafts = parts & {"fc", "fusion_fc", "midlayer", "medusa_head", "hidden_norm"}
    return bool(parts & {"embed_tokens", "wte", "embed_in", "word_embeddings", "tok_embeddings"}) and not drafts
