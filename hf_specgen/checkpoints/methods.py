"""Method: one record per way of drafting, found in the drafters' own files and read by everything that lists methods.

Loading, layouts, trainers, the command line, model cards and the conformance tests ask here; none of them holds a list
of names. A drafter's module defines its record as ``METHOD``; nothing else has to know the module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from hf_specgen.errors import IncompatibleDrafter, SpecGenError

DRAFTERS = "hf_specgen.drafters"
SINGLE = "single"
UNROLLED = "unrolled"
HEADS = "heads"
BASE_TRAINER = "hf_specgen.trainers.base:DrafterTrainer"


@dataclass(frozen=True)
class Method:
    """Name what belongs to one way of drafting.

    ``name``: what configs, ``hf-specgen train`` and tags call it; ``title``: what papers and cards call it.
    ``drafter``: the class that drafts. ``config``: its configuration, None where its files are no checkpoints of ours
    (a small language model). ``trainer``: where its trainer is, ``"package.module:Class"``.
    ``depths``: how a lesson reaches further than one token: ``"single"`` (it does not), ``"unrolled"`` (the same
    layers run on what they foretold), ``"heads"`` (a head for each depth). ``usual_steps``: how far, by default.
    ``learns_vocabulary``: whether a training may cover fewer ids than the target has.
    ``servers``: what a model card tells of other programs that serve it.
    """

    name: str
    title: str
    drafter: type[Any]
    config: type[Any] | None = None
    trainer: str = BASE_TRAINER
    depths: str = SINGLE
    usual_steps: int = 7
    learns_vocabulary: bool = False
    servers: Callable[..., list[dict[str, Any]]] = field(default=lambda *_: [])


def modules_of(package: str) -> list[ModuleType]:
    """Import every module of a package and return them, by name."""
    folders = import_module(package).__path__
    names = sorted(info.name for info in iter_modules(folders))
    return [import_module(f"{package}.{name}") for name in names]


def methods() -> dict[str, Method]:
    """Return the record of every module of ``hf_specgen.drafters`` that has one, by name."""
    records = [vars(module).get("METHOD") for module in modules_of(DRAFTERS)]
    return {record.name: record for record in records if isinstance(record, Method)}


def checkpoint_methods() -> dict[str, Method]:
    """Return the methods whose drafters are checkpoints of ours, by name."""
    return {name: method for name, method in methods().items() if method.config is not None}


def method_named(name: str) -> Method:
    """Return the record of a method whose drafters are checkpoints. Raises: ``IncompatibleDrafter`` for others."""
    known = checkpoint_methods()
    if name not in known:
        raise IncompatibleDrafter(
            f"method {name!r} is not known here: one of {', '.join(known)} is required. A newer hf_specgen may know it."
        )
    return known[name]


def config_class(name: str) -> type[Any]:
    """Return the configuration of a method. Raises: as ``method_named`` does."""
    kind = method_named(name).config
    assert kind is not None
    return kind


def usual_steps(name: str) -> int:
    """Return how far a method's lessons reach by default. Raises: ``SpecGenError`` for an unknown method."""
    return trained_method(name).usual_steps


def trained_method(name: str) -> Method:
    """Return the record of a method that can be trained. Raises: ``SpecGenError`` naming them for another."""
    known = methods()
    if name not in known:
        raise SpecGenError(f"method {name!r} is not known: one of {', '.join(known)} is required.")
    return known[name]


def field_names() -> tuple[str, ...]:
    """Return the fields of all methods' configurations together."""
    names = [name for method in checkpoint_methods().values() for name in config_class(method.name).field_names()]
    return tuple(dict.fromkeys(names))


def state_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of a drafter's ``state_dict``, from its modules built without memory.

    Raises: ``IncompatibleDrafter`` for a config that builds none.
    """
    drafter = method_named(config.method).drafter.skeleton(config)
    return {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
