"""EAGLE-3 files with one flat config, as SpecForge and Model Optimizer write them: read alike, told apart by names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_specgen.checkpoints.formats.base import Plan, ReadOptions, Source
from hf_specgen.checkpoints.formats.eagle3_common import (
    FIRST,
    OURS,
    Reading,
    convention_of,
    first_layer_is,
    nested,
    plain_ids,
    plan_eagle3,
)


def plan_plain(source: Source, options: ReadOptions, title: str) -> Plan:
    """Resolve config and names of a flat file. Raises: ``IncompatibleDrafter`` as every layout does."""
    config = source.config
    inner = nested(source)
    output, lines, doubts = _norm_output_of(source, options)
    reading = Reading(
        title=title,
        settings=config,
        ids=plain_ids(source, convention_of(source)),
        draft_vocab_size=config.get("draft_vocab_size") or config.get("truncated_vocab_size"),
        norm_before_residual=bool(config.get("norm_before_residual")),
        norm_output=output,
        claims=_claims_of(config, inner),
        notes=lines,
        warnings=doubts,
    )
    return plan_eagle3(source, options, reading)


def _norm_output_of(source: Source, options: ReadOptions) -> tuple[bool, tuple[str, ...], tuple[str, ...]]:
    """Return what ``norm_output`` means, with notes and warnings: True feeds back normed states, as all engines do.

    In SpecForge before its correction (#879) True meant plain EAGLE-3. It calls the first layer ``midlayer``, and the
    file does not say which version wrote it.
    """
    config = source.config
    said = config.get("norm_output")
    decided = "norm_output" in options.given or config.get(OURS) is not None
    if said and first_layer_is(source, FIRST) and not decided:
        line = (
            "norm_output: true is followed, as SGLang and vLLM do: normalised states are fed back. SpecForge meant "
            "plain EAGLE-3 by it until September 2026, and the file does not say when it was written. Pass "
            "norm_output=False if few drafts are accepted behind the first."
        )
        return True, (), (line,)
    lines = () if said is None or said else ("norm_output: false is read as plain EAGLE-3 (a norm before the head)",)
    return bool(said), lines, ()


def _claims_of(config: Mapping[str, Any], inner: Mapping[str, Any]) -> frozenset[str]:
    """Return which norms before ``fc`` a config asks for, at the top or in ``eagle_config``."""
    return frozenset(name for name in ("norm_before_fc", "fc_norm") if config.get(name) or inner.get(name))
