"""EAGLE-3 as its authors publish it: ``midlayer.*``, no layer ids, no rope base. Source: Li et al. 2025."""

from __future__ import annotations

from hf_specgen.checkpoints.formats.base import Layout, Plan, ReadOptions, Source
from hf_specgen.checkpoints.formats.eagle3_common import (
    FIRST,
    Reading,
    first_layer_is,
    is_eagle3,
    plan_eagle3,
)
from hf_specgen.checkpoints.formats.layer_ids import LayerIds


class SafeAILabEagle3(Layout):
    """Read the authors' checkpoints: the target's layers by the published rule, rope of base 10000."""

    name = "safeailab-eagle3"
    order = 90

    def matches(self, source: Source) -> bool:
        """Tell by the name of the first layer; richer configs are SpecForge's, which is asked before."""
        return is_eagle3(source) and first_layer_is(source, FIRST)

    def plan(self, source: Source, options: ReadOptions) -> Plan:
        """Resolve config and names. Raises: ``IncompatibleDrafter`` as every layout does."""
        config = source.config
        reading = Reading(
            title="EAGLE-3 of its authors (SafeAILab)",
            settings=config,
            ids=LayerIds(None),
            # some producers (nebius) call it by the older name
            draft_vocab_size=config.get("draft_vocab_size") or config.get("truncated_vocab_size"),
            norm_before_residual=bool(config.get("norm_before_residual")),
        )
        return plan_eagle3(source, options, reading)


LAYOUT = SafeAILabEagle3()
