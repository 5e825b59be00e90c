"""Which residual streams of the target feed a drafter: two numberings are in use, ours is the boundary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_specgen.checkpoints.formats.found import Found
from hf_specgen.errors import IncompatibleDrafter, SpecGenError

BOUNDARY = "boundary"
LAYER_OUTPUT = "layer_output"
CONVENTIONS = (BOUNDARY, LAYER_OUTPUT)
ASK = f"Pass aux_layer_convention={BOUNDARY!r} or {LAYER_OUTPUT!r} to decide, calibrate_aux_layers to measure."


@dataclass(frozen=True)
class LayerIds:
    """Hold the ids a config lists, and what its producer means by them.

    ``ids``: None where it lists none. ``convention``: ``boundary`` (id b: the stream after b layers) or
    ``layer_output`` (id i: what layer i returns, boundary i + 1). ``certain``: this layout means nothing else by them.
    ``served``: they stand where vLLM reads boundaries, so that ids of layer outputs were copied there.
    ``stated``: they are called boundaries, ``by`` the config itself or by the caller.
    """

    ids: tuple[int, ...] | None
    convention: str = BOUNDARY
    certain: bool = False
    served: bool = False
    stated: bool = False
    by: str = "the config"


def default_boundaries(layers: int) -> tuple[int, ...]:
    """Return the boundaries that EAGLE-3's authors take: low, middle, high. Source: Li et al. 2025, section 3.1."""
    return (2, layers // 2, layers - 3)


def default_outputs(layers: int) -> tuple[int, ...]:
    """Return the layers whose outputs SpecForge and Model Optimizer take: those of ``default_boundaries``."""
    return tuple(boundary - 1 for boundary in default_boundaries(layers))


def resolve(source: str, listed: LayerIds, layers: int, asked: str | None) -> Found:
    """Return the boundaries of a checkpoint for a target of ``layers`` decoder layers (0: not known).

    Empty where the config lists none and the target is not known: the published rule is applied when it is.
    Raises: ``IncompatibleDrafter`` when they cannot be known, repeat or lie outside the target.
    """
    if asked is not None and asked not in CONVENTIONS:
        raise SpecGenError(f"aux_layer_convention={asked!r}: one of {', '.join(CONVENTIONS)} is required.")
    if listed.ids is None:
        return _by_default(source, layers, asked)
    ids = tuple(int(index) for index in listed.ids)
    convention, why, doubt = _meaning(listed, ids, layers)
    if asked and listed.stated:
        doubt = (f"aux_layer_convention={asked!r} has no effect: {listed.by} states boundaries.",)
    elif asked:
        convention = asked
        why = "as asked"
        doubt = ()
    bounds = [index + (convention == LAYER_OUTPUT) for index in ids]
    warnings = list(doubt)
    if bounds != sorted(bounds):
        warnings.append(f"the layer ids {list(ids)} are not in order: features are taken in the order of the layers.")
    _refuse_impossible(source, sorted(bounds), layers, list(ids))
    what = "boundaries" if convention == BOUNDARY else "layer outputs (id + 1)"
    note = f"target layers: boundaries {sorted(bounds)}; the ids {list(ids)} are {what}, {why}"
    return Found(sorted(bounds), note, tuple(warnings))


def _by_default(source: str, layers: int, asked: str | None) -> Found:
    lines = [f"aux_layer_convention={asked!r} has no effect: the checkpoint lists no layer ids."] if asked else []
    if not layers:
        note = "target layers: none is listed; boundaries (2, n // 2, n - 3) of the target's n, once it is known"
        return Found([], note, tuple(lines))
    bounds = list(default_boundaries(layers))
    if len(set(bounds)) < len(bounds) or bounds != sorted(bounds):
        raise IncompatibleDrafter(
            f"{source} does not say which layers of the target it reads, and the published rule gives {bounds} for "
            f"{layers} layers: three different layers are required, so at least 7. List the layers in its config as "
            "eagle_config.eagle_aux_hidden_state_layer_ids."
        )
    note = f"target layers: boundaries {bounds}, by the published rule for {layers} layers (the config lists none)"
    return Found(bounds, note, tuple(lines))


def _meaning(listed: LayerIds, ids: tuple[int, ...], layers: int) -> tuple[str, str, tuple[str, ...]]:
    """Return convention, reason and doubts: what cannot be otherwise first, what the ids suggest, then the producer.

    Where the target is not known, the last id tells how many layers a published rule would speak of.
    """
    if listed.stated:
        return BOUNDARY, f"as {listed.by} states", ()
    if layers and max(ids) == layers:
        return BOUNDARY, f"since no layer has the index {layers}", ()
    if listed.served and ids == default_outputs(layers or ids[-1] + 4):
        return LAYER_OUTPUT, "since they are the layers of the published rule", (_copied(ids),)
    if listed.certain and not (listed.served and ids[0] == 1):
        return listed.convention, "as this layout means them", ()
    if ids == default_boundaries(layers or ids[-1] + 3):
        return BOUNDARY, "since they are the published rule's boundaries", ()
    if ids[0] == 1 and not listed.served:  # the first feature is the stream after two layers nearly everywhere
        return LAYER_OUTPUT, "since the first is 1", ()
    why = "as this layout means them" if listed.certain else "as most checkpoints of this layout"
    doubt = f"the layer ids {list(ids)} may be meant as boundaries or as layer outputs; they are read as "
    return listed.convention, why, (f"{doubt}{listed.convention}. {ASK}",)


def _copied(ids: tuple[int, ...]) -> str:
    return (
        f"the layer ids {list(ids)} are those of the published rule as layer outputs, so they were copied to where "
        f"vLLM reads boundaries; they are read as layer outputs, and vLLM would feed other features. {ASK}"
    )


def _refuse_impossible(source: str, bounds: Sequence[int], layers: int, ids: list[int]) -> None:
    repeated = len(set(bounds)) < len(bounds)
    if repeated or bounds[0] < 0 or (layers and bounds[-1] > layers):
        target = f"a target of {layers} layers" if layers else "any target"
        raise IncompatibleDrafter(
            f"{source} lists the layer ids {ids}, that is the boundaries {list(bounds)}, which do not fit {target}: "
            f"different boundaries from 0 to the number of layers are required. {ASK}"
        )
