"""EAGLE-3 as NVIDIA's Model Optimizer exports it: ``layers.0.*``, settings in ``eagle_config``, no ``t2d``."""

from __future__ import annotations

from hf_specgen.formats.base import Layout, Plan, ReadOptions, Source
from hf_specgen.formats.eagle3_common import (
    Reading,
    convention_of,
    first_layer_is,
    is_eagle3,
    nested,
    plain_ids,
    plan_eagle3,
)
from hf_specgen.formats.specforge import claims_of, norm_output_of


class ModelOptEagle3(Layout):
    """Read Model Optimizer's heads, and plain heads whose first layer is called ``layers.0``."""

    name = "modelopt-eagle3"
    order = 70

    def matches(self, source: Source) -> bool:
        """Tell by the name of the first layer, with an EAGLE-3 layer in it or ``eagle_config`` beside it."""
        return first_layer_is(source, "layers.0.") and (is_eagle3(source) or bool(source.config.get("eagle_config")))

    def plan(self, source: Source, options: ReadOptions) -> Plan:
        """Resolve config and names. Raises: ``IncompatibleDrafter`` as every layout does."""
        config, inner = source.config, nested(source)
        output, lines, doubts = norm_output_of(config)
        reading = Reading(
            title="EAGLE-3 in the layout of NVIDIA Model Optimizer",
            settings=config,
            ids=plain_ids(source, convention_of(source)),
            draft_vocab_size=config.get("draft_vocab_size") or config.get("truncated_vocab_size"),
            norm_before_residual=bool(config.get("norm_before_residual")),
            norm_output=output,
            claims=claims_of(config, inner),
            notes=lines,
            warnings=doubts,
        )
        return plan_eagle3(source, options, reading)


LAYOUT = ModelOptEagle3()
