"""How every EAGLE-1 layout becomes one drafter: no input norm, no last norm, the target's head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from hf_specgen.checkpoints.config import DrafterConfig
from hf_specgen.checkpoints.formats.base import Checkpoint, Plan, ReadOptions, Source
from hf_specgen.checkpoints.formats.shared import (
    PROBE,
    floats_only,
    head_lines,
    layer_fields,
    match,
    output_biases,
    overruled,
    refuse_unreadable,
    rope_and_window,
    vocabulary_line,
    with_output_biases,
)
from hf_specgen.errors import IncompatibleDrafter

HEAD = "lm_head.weight"
# An EAGLE-1 layer has neither; converters for an old vLLM wrote ones in their place.
STAND_INS = ("layers.0.input_layernorm.weight", "norm.weight")


def plan_eagle(
    source: Source,
    options: ReadOptions,
    names: Mapping[str, str],
    settings: Mapping[str, Any],
    title: str,
    spoken: Callable[[str], str] = str,
) -> Plan:
    """Resolve a checkpoint of any EAGLE-1 layout; ``names`` maps our names to the file's, ``spoken`` tells an error's.

    Raises: ``IncompatibleDrafter`` naming what does not fit.
    """
    warnings = [*refuse_unreadable(source, settings)]
    fields = layer_fields(source, settings, names, "layers.0.")
    told = overruled(settings, fields)
    settings = {**settings, "num_hidden_layers": fields["num_hidden_layers"]}
    rope, window = rope_and_window(source, settings, fields, options, followed=False)
    config = DrafterConfig(
        "eagle",
        **fields,
        own_embedding="embed_tokens.weight" in names,
        own_head=False,
        rope_parameters=rope.value,
        **window.value,
    )
    head = tuple(source.shapes[names[HEAD]]) if HEAD in names else ()
    if head and head != (config.vocab_size, config.hidden_size):
        raise IncompatibleDrafter(
            f"{source.name}: lm_head.weight has the shape {list(head)} and the target's head is "
            f"{[config.vocab_size, config.hidden_size]}: EAGLE-1 with a head of its own is not supported."
        )
    stand_ins = [name for name in STAND_INS if name in names]
    found = match(source, names, config, output_biases(config), frozenset({HEAD, *stand_ins}), spoken)
    found |= {PROBE + name: names[name] for name in stand_ins}
    if stand_ins:
        warnings.append(
            f"{', '.join(stand_ins)} left out: EAGLE-1 has no such norms; converters wrote ones there for an old vLLM."
        )
    lines = head_lines(config)
    notes = (
        f"layout: {title}",
        "target layers: what the head reads, after the last norm",
        f"norms: none before the first layer, none at the end; fc {'with' if config.fc_bias else 'without'} bias",
        vocabulary_line(config),
        rope.note,
        window.note,
        *lines[:1],
        *told,
        f"{lines[1]}{' (the copy in the file is not read)' if head else ''}",
    )
    doubts = (*warnings, *rope.warnings, *window.warnings)
    return Plan(config, found, notes, doubts, lambda got: finish_eagle(got, source.name))


def finish_eagle(found: Checkpoint, source: str) -> Checkpoint:
    """Check dtypes and stand-ins, make output biases. Raises: ``IncompatibleDrafter`` for norms that were trained."""
    floats_only(source, found.tensors)
    tensors = with_output_biases(found)
    for name in STAND_INS:
        stand_in = tensors.pop(PROBE + name, None)
        if stand_in is not None and not torch.equal(stand_in, torch.ones_like(stand_in)):
            raise IncompatibleDrafter(
                f"{source}: {name} is not all ones, so it was trained: EAGLE-1 without norms before the first layer "
                "and at the end is required. Load the drafter in its authors' layout."
            )
    return replace(found, tensors=tensors)
