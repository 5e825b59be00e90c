"""Medusa heads as vLLM calls them: read, and written where Medusa's own names cannot say it (some ids alone)."""

from __future__ import annotations

import re
import warnings as python_warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_specgen.checkpoints.config import DrafterConfig
from hf_specgen.checkpoints.formats.base import Checkpoint, Layout, Plan, ReadOptions, Source, check_names
from hf_specgen.checkpoints.formats.lent import HEAD
from hf_specgen.checkpoints.formats.medusa_common import KEY, Heads, kept_settings, served_settings, settings_kept
from hf_specgen.checkpoints.formats.shared import floats_only, match, refuse_unreadable, short_names, store
from hf_specgen.errors import IncompatibleDrafter

_PREFIX = "medusa_heads."
_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_SHARED = ("lm_head.weight", "lm_heads.0.weight")


class MedusaVllm(Layout):
    """Read and write ``blocks.*``, ``lm_heads.*`` (or one head for all) and the map of a truncated vocabulary."""

    name = "medusa-vllm"
    order = 40

    def matches(self, source: Source) -> bool:
        """Tell by names."""
        return any(_BLOCK.fullmatch(name.removeprefix(_PREFIX)) for name in source.shapes)

    def plan(self, source: Source, options: ReadOptions) -> Plan:
        """Resolve the vocabulary: the map counts only where the config truncates, as in vLLM.

        Raises: ``IncompatibleDrafter`` naming tensors that are missing, unknown or of the wrong shape.
        """
        refused = refuse_unreadable(source, {})
        plain = short_names(source, _PREFIX)
        heads = Heads(_names(source, plain))
        rows, hidden = heads.last(source)
        rows = rows if heads.own else 0
        vocab = int(source.config.get("vocab_size") or rows)
        kept = int(source.config.get("truncated_vocab_size") or vocab)
        if rows not in (0, vocab, kept):
            raise IncompatibleDrafter(
                f"the heads of {source.name} score {rows} ids: {vocab} (vocab_size) or {kept} (truncated_vocab_size) "
                "is required. The config belongs to other weights."
            )
        config = heads.config(hidden, vocab, kept, **settings_kept(source))
        others = {name: full for name, full in plain.items() if full not in heads.names.values()}
        dropped = {name for name in others if name == "token_map" or (_one(source) and name.startswith("lm_head"))}
        # the target's own head serves as well as a copy
        borrows = _one(source) and (_copied(source) or not config.reduces_vocabulary)
        absent = [] if heads.own or borrows else ["lm_heads.0.weight"]
        if config.reduces_vocabulary and "token_map" not in plain:
            absent.append("token_map")
        if absent:
            check_names(source, (), source.shapes, absent)
        known = {**others, **heads.names, **({"d2t": plain["token_map"]} if "token_map" in plain else {})}
        # a head may hold a row for every id of the target: the map then picks some
        stored = heads.config(hidden, vocab, rows or kept)
        names = match(source, known, stored, dropped=frozenset(dropped), spoken=_spoken)
        notes = heads.notes(source, kept)
        if config.reduces_vocabulary:
            names["d2t"] = plain["token_map"]
            notes += (f"vocabulary: {kept} of the target's {vocab} ids (token_map)",)
        scale = float(source.config.get("logit_scale") or 1.0)
        if scale != 1.0:
            notes += (f"logit_scale {scale:g} is multiplied into the language-model heads",)
        return Plan(config, names, notes, (*heads.warnings, *refused), _finish(source, scale))

    def write(self, checkpoint: Checkpoint, folder: Path) -> None:
        """Write ``config.json`` and ``model.safetensors``; a reduced vocabulary becomes ``token_map``.

        Raises: ``IncompatibleDrafter`` for another method, or when a head is borrowed and the target's was not read.
        """
        config = checkpoint.config
        found = checkpoint.tensors
        if config.method != "medusa":
            raise IncompatibleDrafter(f"layout 'medusa-vllm' holds Medusa heads and this is {config.method!r}.")
        tensors = {_spoken(name): tensor for name, tensor in found.items() if name != "d2t"}
        settings: dict[str, Any] = {}
        ids = found["d2t"].cpu() + torch.arange(len(found["d2t"])) if "d2t" in found else None
        if ids is not None:
            tensors["token_map"] = ids
        if not config.own_head:
            head = _lent_head(checkpoint)
            tensors[HEAD] = head if ids is None else head[ids.to(head.device)]
            settings["original_lm_head"] = True
        if ids is not None:
            python_warnings.warn(
                "vLLM 0.32.0 documents heads over some ids (token_map, truncated_vocab_size) and cannot load them: it "
                "stops with an error. Another version may.",
                stacklevel=2,
            )
        settings |= {
            **served_settings(config, config.vocab_size or len(tensors[HEAD])),
            "num_heads": config.num_heads,
            "num_hidden_layers": config.num_head_layers,
            "medusa_fc_bias": config.head_bias,
            "truncated_vocab_size": None if ids is None else len(ids),
            KEY: {**kept_settings(config), "own_head": config.own_head},
        }
        store(folder, settings, tensors)

    def borrowed(self, config: DrafterConfig) -> tuple[str, ...]:
        """Return the target's head where the heads end in it: vLLM reads no other."""
        return () if config.own_head else (HEAD,)


def _names(source: Source, plain: dict[str, str]) -> dict[str, str]:
    """Map our names to the file's; a head that all share stands under every head's name."""
    names = {}
    for name, theirs in plain.items():
        if block := _BLOCK.fullmatch(name):
            head, layer, kind = block.groups()
            names[f"{head}.{layer}.linear.{kind}"] = theirs
    found = Heads(dict(names))
    if _copied(source):
        return names
    shared = [name for name in _SHARED if name in plain and _one(source)]
    for head in range(found.count):
        own = shared[0] if shared else f"lm_heads.{head}.weight"
        if own in plain:
            names[f"{head}.{found.blocks}.weight"] = plain[own]
    return names


def _one(source: Source) -> bool:
    """Tell whether all heads share one language-model head."""
    return bool(source.config.get("original_lm_head"))


def _copied(source: Source) -> bool:
    """Tell whether the one head is a copy of the target's, as we mark it."""
    return (source.config.get(KEY) or {}).get("own_head") is False


def _spoken(name: str) -> str:
    """Return what vLLM calls a tensor of ours."""
    head, *rest = name.split(".")
    if not rest:
        return "token_map"
    return f"blocks.{head}.layers.{rest[0]}.{rest[-1]}" if "linear" in rest else f"lm_heads.{head}.weight"


def _lent_head(checkpoint: Checkpoint) -> Tensor:
    """Return the target's head. Raises: ``IncompatibleDrafter`` where it was not read."""
    if HEAD not in checkpoint.lent:
        raise IncompatibleDrafter(
            "vLLM needs a head in this layout and the drafter's heads end in the target's: its files are required "
            "(hf-specgen convert --target TARGET)."
        )
    return checkpoint.lent[HEAD]


def _finish(source: Source, scale: float) -> Callable[[Checkpoint], Checkpoint]:
    """Return what turns absolute ids into sorted offsets, picks the heads' rows, and folds a logit scale into them."""

    def finish(found: Checkpoint) -> Checkpoint:
        floats_only(source.name, found.tensors)
        config = found.config
        tensors = dict(found.tensors)
        last = [f"{head}.{config.num_head_layers}.weight" for head in range(config.num_heads) if config.own_head]
        if "d2t" in tensors:
            ids, order = _ids(source, tensors["d2t"], config).sort()
            tensors["d2t"] = ids - torch.arange(len(ids))
            for name in last:
                whole = len(tensors[name]) == config.vocab_size
                tensors[name] = tensors[name][ids if whole else order]
        for name in last if scale != 1.0 else ():
            tensors[name] = (tensors[name].float() * scale).to(tensors[name].dtype)
        return replace(found, tensors=tensors)

    return finish


def _ids(source: Source, token_map: Tensor, config: DrafterConfig) -> Tensor:
    """Return the map's ids as int64. Raises: ``IncompatibleDrafter`` for ids that are no ids, or stand there twice."""
    ids = token_map.to("cpu", torch.int64).flatten()
    good = len(ids) == config.draft_vocab_size and bool((token_map.cpu().flatten() == ids).all())
    if not good or int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size or len(ids.unique()) != len(ids):
        raise IncompatibleDrafter(
            f"{source.name}: token_map of shape {tuple(token_map.shape)} does not map {config.draft_vocab_size} draft "
            f"ids to different ids below {config.vocab_size}: the file is damaged."
        )
    return ids


LAYOUT = MedusaVllm()
