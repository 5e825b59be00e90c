"""EAGLE-3 files with one flat config, as SpecForge and Model Optimizer write them: read alike, told apart by names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_specgen.formats.base import Plan, ReadOptions, Source
from hf_specgen.formats.eagle3_common import OURS, Reading, convention_of, nested, plain_ids, plan_eagle3


def plan_plain(source: Source, options: ReadOptions, title: str) -> Plan:
    """Resolve config and names of a flat file. Raises: ``IncompatibleDrafter`` as every layout does."""
    config, inner = source.config, nested(source)
    output, lines, doubts = _norm_output_of(config)
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


def _norm_output_of(config: Mapping[str, Any]) -> tuple[bool, tuple[str, ...], tuple[str, ...]]:
    """Return what ``norm_output`` means in a file like SpecForge's, with notes and warnings.

    In SpecForge before its correction (#879) True meant plain EAGLE-3; the file does not say which version wrote it.
    """
    said = config.get("norm_output")
    if said and config.get(OURS) is None:
        line = (
            "norm_output: true is not followed: SpecForge meant plain EAGLE-3 by it until September 2026, and the file "
            "does not say when it was written. Pass norm_output=True if the drafter feeds back normalised states."
        )
        return False, (), (line,)
    lines = () if said is None or said else ("norm_output: false is read as plain EAGLE-3 (a norm before the head)",)
    return bool(said), lines, ()


def _claims_of(config: Mapping[str, Any], inner: Mapping[str, Any]) -> frozenset[str]:
    """Return which norms before ``fc`` a config asks for, at the top or in ``eagle_config``."""
    return frozenset(name for name in ("norm_before_fc", "fc_norm") if config.get(name) or inner.get(name))
