"""What every checkpoint layout has in common: where files come from, what is read, and how layouts are found."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from hf_specgen.checkpoints.config import DrafterConfig
from hf_specgen.checkpoints.methods import DRAFTERS, checkpoint_methods, modules_of
from hf_specgen.errors import IncompatibleDrafter, SpecGenError
from hf_specgen.models.facts import TargetFacts

FORMATS = __name__.rpartition(".")[0]
PARALLEL = "it drafts all tokens in one pass over mask tokens, and was never fed its own states"
# Marks in a config or among tensors, longest first: another method's name, and why its layers cannot run as EAGLE-3's.
OTHER_METHODS = {
    "peagle": ("P-EAGLE", PARALLEL),
    "pard_token": ("parallel drafting", PARALLEL),
    "dflash": ("DFlash", PARALLEL),
    "dspark": ("DSpark", "it drafts blocks of masked tokens with a Markov head"),
    "xpress": ("XPress", "it drafts blocks of masked tokens and refines them"),
    "mtp": ("MTP", "it is the target's own prediction layer"),
}


@dataclass(frozen=True)
class Source:
    """Hold a checkpoint that was opened but not read: its config and the shape of every tensor.

    ``shapes``: tensor name to shape. ``load`` reads tensors by name (pickles with ``weights_only=True``).
    ``files``: what else lies beside them. Nothing in it is ever executed.
    """

    name: str
    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    load: Callable[[Iterable[str]], dict[str, Tensor]]
    files: tuple[str, ...] = ()

    def has(self, *names: str) -> bool:
        """Tell whether all of these tensors are there."""
        return all(name in self.shapes for name in names)


@dataclass(frozen=True)
class ReadOptions:
    """Hold what the caller decides: the target's facts if known, how layer ids are to be understood, and settings.

    ``aux_layer_convention``: ``boundary`` (ids name residual streams), ``layer_output`` (ids name decoder layers,
    boundary = id + 1) or None: as the layout's producer means them. ``given``: fields of ``DrafterConfig`` that replace
    what the checkpoint says, so that nothing is in doubt about them.
    """

    target: TargetFacts = field(default_factory=TargetFacts)
    aux_layer_convention: str | None = None
    given: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """Hold a drafter in our own terms: its config, tensors under our module names, and what was resolved.

    ``tensors`` is exactly the drafter's ``state_dict``. ``notes``: one line per decision that a user may want to see
    (layer boundaries, norms, vocabulary, who owns embedding and head). ``warnings``: what may cost acceptance.
    ``lent``: the target's own matrices that a layout writes beside the drafter's (``Layout.borrowed``), by our names.
    """

    config: DrafterConfig
    tensors: dict[str, Tensor]
    layout: str
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    lent: Mapping[str, Tensor] = field(default_factory=dict)


class Layout(ABC):
    """Know one published layout. A module of this package, or a drafter's own, defines it as ``LAYOUT``."""

    name: str
    """What ``inspect`` and ``convert --to`` call it."""
    order: int
    """Layouts are asked in this order; the first that matches reads."""

    @abstractmethod
    def matches(self, source: Source) -> bool:
        """Tell whether a checkpoint is of this layout, from its config and tensor names alone."""

    @abstractmethod
    def plan(self, source: Source, options: ReadOptions) -> Plan:
        """Resolve config and tensor names without reading a tensor.

        Raises: ``IncompatibleDrafter`` naming what is missing, unknown or of the wrong shape.
        """

    def read(self, source: Source, options: ReadOptions) -> Checkpoint:
        """Read the tensors of the plan. Raises: ``IncompatibleDrafter`` as ``plan`` does, and for bad values."""
        plan = self.plan(source, options)
        loaded = source.load(plan.names.values())
        tensors = {ours: loaded[theirs] for ours, theirs in plan.names.items()}
        return plan.finish(Checkpoint(plan.config, tensors, self.name, plan.notes, plan.warnings))

    def borrowed(self, config: DrafterConfig) -> tuple[str, ...]:
        """Return which of the target's matrices this layout's readers expect in the file, see ``Checkpoint.lent``."""
        return ()

    def write(self, checkpoint: Checkpoint, folder: Path) -> None:
        """Write the checkpoint into a folder as this layout.

        Raises: ``IncompatibleDrafter`` when the layout cannot hold it, saying why.
        """
        raise IncompatibleDrafter(f"layout {self.name!r} can be read but not written: choose another --to.")


@dataclass(frozen=True)
class Plan:
    """Hold how a checkpoint will be read: our tensor names to the file's, and what to do once they are loaded."""

    config: DrafterConfig
    names: dict[str, str]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    finish: Callable[[Checkpoint], Checkpoint] = field(default=lambda checkpoint: checkpoint)


def layouts() -> list[Layout]:
    """Return every layout, of this package and in drafters' own files, in the order they are asked."""
    found = [vars(module).get("LAYOUT") for package in (FORMATS, DRAFTERS) for module in modules_of(package)]
    return sorted((layout for layout in found if isinstance(layout, Layout)), key=lambda layout: layout.order)


def layout_named(name: str) -> Layout:
    """Return a layout by its name. Raises: ``SpecGenError`` listing the names."""
    known = {layout.name: layout for layout in layouts()}
    if name not in known:
        raise SpecGenError(f"layout {name!r} is unknown: one of {', '.join(sorted(known))} is required.")
    return known[name]


def other_method(source: Source) -> str:
    """Return what a checkpoint drafts by, where config or tensors name a method that is not known here; else nothing.

    Their layers look like EAGLE-3's, but they were trained to be run otherwise.
    """
    config = source.config
    told = [config.get("speculators_model_type"), *(config.get("architectures") or ())]
    told += [key for key in ("dflash_config", "pard_token") if config.get(key) is not None]
    told += ["peagle" for name in source.shapes if name.rpartition(".")[2] == "mask_hidden"]
    words = " ".join(str(word).lower() for word in told)
    known = checkpoint_methods()
    others = {mark: said for mark, said in OTHER_METHODS.items() if mark not in known}
    return next((f"{name}: {how}" for mark, (name, how) in others.items() if mark in words), "")


def detect(source: Source) -> Layout:
    """Return the layout of a checkpoint.

    Raises: ``IncompatibleDrafter`` saying what was found when no layout matches, or when it is another method's.
    """
    if other := other_method(source):
        raise IncompatibleDrafter(
            f"{source.name} is a drafter of a method that is not known here ({other}): EAGLE-1, EAGLE-3 or Medusa is "
            "required. Serve it with the engine it was trained for, or load an EAGLE-3 head of the same target."
        )
    for layout in layouts():
        if layout.matches(source):
            return layout
    some = ", ".join(sorted(source.shapes)[:6]) or "none"
    raise IncompatibleDrafter(
        f"{source.name} is no drafter checkpoint that is known here: its config says architectures="
        f"{source.config.get('architectures')!r}, model_type={source.config.get('model_type')!r}; its tensors begin "
        f"with {some}. Known layouts: {', '.join(layout.name for layout in layouts())}. A whole causal language model "
        "is used with SmallModel(model)."
    )


def check_names(source: Source, used: Collection[str], ignored: Collection[str], missing: Collection[str]) -> None:
    """Refuse a checkpoint with tensors missing or unknown: ``used`` are read, ``ignored`` are known and dropped.

    Raises: ``IncompatibleDrafter`` naming them.
    """
    unknown = sorted(set(source.shapes) - set(used) - set(ignored))
    if missing:
        raise IncompatibleDrafter(f"{source.name} lacks the tensors {', '.join(sorted(missing))}: it is incomplete.")
    if unknown:
        raise IncompatibleDrafter(
            f"{source.name} has tensors that are not understood: {', '.join(unknown[:8])}"
            f"{' ...' if len(unknown) > 8 else ''}. Loading without them would change the drafter; nothing was loaded."
        )
