"""The map from a drafter's few ids to the target's: ``d2t`` holds offsets, ``t2d`` a mask; both are checked here."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hf_specgen.checkpoints.formats.base import Checkpoint
from hf_specgen.checkpoints.formats.shared import PROBE
from hf_specgen.checkpoints.methods import state_shapes
from hf_specgen.errors import IncompatibleDrafter

# The largest integer below which every integer has a value of its own in the dtype.
EXACT = {torch.float16: 2**11, torch.bfloat16: 2**8, torch.float32: 2**24, torch.float64: 2**53}


def check_map(found: Checkpoint, source: str) -> Checkpoint:
    """Return the checkpoint with ``d2t`` as int64 offsets and ``t2d`` as a boolean mask that agree.

    ``t2d`` is rebuilt where the layout leaves it out and the drafter has one. A map of a full vocabulary must be the
    identity and is dropped. Raises: ``IncompatibleDrafter`` for absolute ids, ids out of range, order or precision.
    """
    tensors = dict(found.tensors)
    config = found.config
    extra = {name: tensors.pop(PROBE + name) for name in ("d2t", "t2d") if PROBE + name in tensors}
    if not config.reduces_vocabulary:
        _refuse_unless_identity(extra, source)
        return replace(found, tensors=tensors)
    size = config.vocab_size
    places = torch.arange(config.draft_vocab_size)
    mask = _mask(tensors["t2d"], source) if "t2d" in tensors else None
    offsets = _integers(tensors["d2t"], "d2t", source)
    _refuse_absolute(offsets, mask, size, source)
    ids = offsets + places
    if int(ids.min()) < 0 or int(ids.max()) >= size:
        raise IncompatibleDrafter(
            f"{source}: d2t leads to the target ids {int(ids.min())} to {int(ids.max())} and the target has {size}: "
            "offsets (target id - draft id) within its vocabulary are required. The map is another target's or damaged."
        )
    if bool((ids[1:] <= ids[:-1]).any()):
        raise IncompatibleDrafter(
            f"{source}: d2t leads to target ids that do not grow: offsets (target id - draft id) of different ids in "
            "growing order are required. The map is damaged, or stored in float16 or by another convention."
        )
    known = torch.zeros(size, dtype=torch.bool)
    known[ids] = True
    if mask is not None and not torch.equal(mask, known):
        raise IncompatibleDrafter(
            f"{source}: t2d marks {int(mask.sum())} ids, and they are not the {len(ids)} that d2t leads to: one of "
            "them is damaged. Take both from the original checkpoint."
        )
    tensors["d2t"] = offsets
    if "t2d" in state_shapes(config):
        tensors["t2d"] = known
    return replace(found, tensors=tensors)


def _refuse_absolute(offsets: Tensor, mask: Tensor | None, size: int, source: str) -> None:
    places = torch.arange(len(offsets))
    past_the_end = int((offsets + places).max()) >= size > int(offsets.max())
    growing = bool((offsets[1:] > offsets[:-1]).all())
    marked = mask is not None and torch.equal(mask.nonzero().flatten(), offsets) and bool(offsets.any())
    if (past_the_end and growing and int(offsets.min()) >= 0) or marked:
        raise IncompatibleDrafter(
            f"{source}: d2t holds the target ids themselves ({int(offsets[0])} to {int(offsets[-1])}): offsets "
            "(target id - draft id) are required. Subtract torch.arange(len(d2t)) from it and save it again."
        )


def _refuse_unless_identity(extra: dict[str, Tensor], source: str) -> None:
    offsets = extra.get("d2t")
    mask = extra.get("t2d")
    if (offsets is not None and bool(offsets.any())) or (mask is not None and not bool(mask.all())):
        raise IncompatibleDrafter(
            f"{source}: the drafter covers the target's whole vocabulary and its d2t or t2d is not the identity: a "
            "draft_vocab_size below vocab_size, or no map, is required. The config belongs to another checkpoint."
        )


def _integers(values: Tensor, name: str, source: str) -> Tensor:
    if not values.is_floating_point():
        return values.to("cpu", torch.int64)
    largest = float(values.abs().max())
    if not torch.equal(values, values.round()) or largest >= EXACT.get(values.dtype, 0):
        raise IncompatibleDrafter(
            f"{source}: {name} is stored as {values.dtype} and holds values up to {largest:g}, which that dtype cannot "
            "tell apart: the map is corrupt. Take it from the original checkpoint (int64)."
        )
    return values.to("cpu", torch.int64)


def _mask(values: Tensor, source: str) -> Tensor:
    if values.dtype != torch.bool and not bool(((values == 0) | (values == 1)).all()):
        raise IncompatibleDrafter(
            f"{source}: t2d holds values up to {int(values.max())}: a mask of the target's ids (0 or 1) is required, "
            "not a map of ids."
        )
    return values.to("cpu", torch.bool)
