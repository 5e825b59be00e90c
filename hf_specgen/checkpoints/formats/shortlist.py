"""Shorten a checkpoint's draft vocabulary: fewer rows of a head are read for every drafted token.

Source: Zhao et al. 2025, "FR-Spec: accelerating large-vocabulary language models via frequency-ranked speculative
sampling".
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor

from hf_specgen.checkpoints.formats.base import Checkpoint
from hf_specgen.checkpoints.formats.shared import vocabulary_line
from hf_specgen.checkpoints.methods import state_shapes
from hf_specgen.errors import SpecGenError


def shortened(found: Checkpoint, ids: Tensor) -> Checkpoint:
    """Return a checkpoint that drafts only ``ids (n)``, target ids in any order, all of which it could draft before.

    Own heads keep those rows alone; a drafter that reads the target's head keeps the map, and takes the rows of the
    target that it is attached to. Raises: ``SpecGenError`` for ids that are none, stand twice, or were not drafted.
    """
    before = drafted_ids(found)
    ids = _checked(ids, before)
    if len(ids) == len(before):
        return found
    config = copy.deepcopy(found.config)
    config.draft_vocab_size = len(ids)
    places = torch.searchsorted(before, ids)
    tensors = dict(found.tensors)
    for name in config.head_names:
        tensors[name] = tensors[name][places.to(tensors[name].device)].contiguous()
    device = next(iter(found.tensors.values())).device
    tensors["d2t"] = (ids - torch.arange(len(ids))).to(device)
    if "t2d" in state_shapes(config):
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True).to(device)
    notes = (*(note for note in found.notes if not note.startswith("vocabulary:")), vocabulary_line(config))
    return replace(found, config=config, tensors=tensors, notes=notes)


def drafted_ids(found: Checkpoint) -> Tensor:
    """Return the target ids that a checkpoint drafts, in growing order, on the CPU."""
    if not found.config.reduces_vocabulary:
        return torch.arange(found.config.vocab_size)
    offsets = found.tensors["d2t"].cpu()
    return offsets + torch.arange(len(offsets))


def _checked(ids: Tensor, before: Tensor) -> Tensor:
    """Return ids in growing order. Raises: ``SpecGenError``."""
    whole = not ids.is_floating_point() and ids.dtype != torch.bool and ids.dim() == 1
    if not whole or not len(ids):
        raise SpecGenError(
            f"a draft vocabulary of shape {tuple(ids.shape)} and dtype {ids.dtype} was given: at least one target id, "
            "as a vector of whole numbers, is required (a mask: mask.nonzero()[:, 0])."
        )
    found = ids.detach().to("cpu", torch.long).sort().values
    if bool((found[1:] == found[:-1]).any()):
        raise SpecGenError("the draft vocabulary names an id twice: every id once is required (ids.unique()).")
    unknown = found[~torch.isin(found, before)]
    if len(unknown):
        raise SpecGenError(
            f"the draft vocabulary names {len(unknown)} ids that the drafter cannot draft (the first is "
            f"{int(unknown[0])}): ids among its {len(before)} are required."
        )
    return found
