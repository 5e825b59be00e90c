"""Rotary settings of a draft config, in the styles of transformers 4 and 5; what no drafter can mean is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_specgen.checkpoints.config import OTHER_ROTARY, PART
from hf_specgen.checkpoints.formats.base import Source
from hf_specgen.checkpoints.formats.found import Found
from hf_specgen.errors import IncompatibleDrafter

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
DEFAULT_BASE = 10000.0


def rope_of(source: Source, settings: Mapping[str, Any], head_dim: int, layers: int = 1) -> Found:
    """Return rope parameters from a draft config in the style of transformers 4, of 5, or of both.

    The base is the draft's own (10000 where its config names none), never the target's. Of a head of ``head_dim``
    values the first ``partial_rotary_factor`` are rotated, named at the top or among the rope parameters.
    Raises: ``IncompatibleDrafter`` for a kind that is not known and for other spellings of it.
    """
    rope = {**dict(settings.get("rope_scaling") or {}), **_given(source, settings, layers)}
    warnings = []
    for name in ("rope_theta", PART):
        top = settings.get(name)
        if top is not None and rope.get(name) not in (None, top):
            warnings.append(f"{name} {top} and {rope[name]} are given: the second (rope_parameters) is used.")
    named = rope.get("rope_theta") or settings.get("rope_theta")
    part = next((value for value in (rope.get(PART), settings.get(PART)) if value is not None), 1)
    old = rope.pop("type", None)
    kind = rope.get("rope_type") or old or "default"
    sections = rope.get("mrope_section")
    if "mrope" in (kind, old) or sections:  # text positions are equal on all three axes
        kind = "default"
        rope = {key: value for key, value in rope.items() if not key.startswith("mrope")}
    size = _rotated(source, {**settings, **rope}, kind, part, head_dim)
    if sections and 2 * sum(sections) != size:
        raise IncompatibleDrafter(
            f"{source.name} has mrope_section {sections}, which rotates {2 * sum(sections)} values of a head, and "
            f"{PART} {part} of {head_dim}, which rotates {size}: both have to say the same. Add the {PART} that it was "
            f"trained with to its config.json, or pass rope_parameters=."
        )
    rope |= {"rope_type": kind, "rope_theta": float(named or DEFAULT_BASE), PART: part if size < head_dim else None}
    rope = {key: value for key, value in rope.items() if value is not None}
    whose = "from the draft config" if named else "the default, for the draft config names none"
    over = f", over the first {size} of {head_dim} values of a head" if size < head_dim else ""
    note = f"rope: {kind}, base {rope['rope_theta']:g} ({whose}; the target's is not used){over}"
    return Found(rope, note, tuple(warnings))


def _given(source: Source, settings: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return ``rope_parameters``; of sets for kinds of layers the one that all layers share."""
    given = dict(settings.get("rope_parameters") or {})
    if not any(isinstance(value, Mapping) for value in given.values()):
        return given
    kinds = dict.fromkeys((settings.get("layer_types") or ["full_attention"])[:layers])
    sets = [dict(given.get(kind) or {}) for kind in kinds]
    if any(other != sets[0] for other in sets):
        raise IncompatibleDrafter(
            f"{source.name} has rope_parameters of their own for its layers {', '.join(kinds)}: one set for all layers "
            "of a drafter is required."
        )
    return sets[0]


def _rotated(source: Source, said: Mapping[str, Any], kind: str, part: Any, head_dim: int) -> int:
    """Return how many values of a head are rotated. Raises: ``IncompatibleDrafter``."""
    size = int(head_dim * part) if isinstance(part, int | float) and 0 < part <= 1 else 0
    if kind not in ROPE_TYPES or not size or size % 2:
        raise IncompatibleDrafter(
            f"{source.name} asks for rope {kind!r} with {PART} {part} of {head_dim} values: one of "
            f"{', '.join(ROPE_TYPES)} over an even number of values is required."
        )
    # what says the same in other words (all of a head, nothing interleaved) does no harm
    harmless = (None, False, 1, 1.0, head_dim)
    others = [name for name in OTHER_ROTARY if said.get(name) not in harmless]
    if others:
        raise IncompatibleDrafter(
            f"{source.name} says {others[0]}={said[others[0]]} in its config: rope_theta, {PART} and rope_parameters "
            "are what a drafter's rotation is read from. Write it so, if the drafter was trained with it."
        )
    return size
