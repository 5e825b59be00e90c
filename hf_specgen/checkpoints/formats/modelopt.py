"""EAGLE-3 as NVIDIA's Model Optimizer exports it: ``layers.0.*``, settings in ``eagle_config``, no ``t2d``."""

from __future__ import annotations

from hf_specgen.checkpoints.formats.base import Layout, Plan, ReadOptions, Source
from hf_specgen.checkpoints.formats.eagle3_common import first_layer_is, is_eagle3
from hf_specgen.checkpoints.formats.eagle3_plain import plan_plain


class ModelOptEagle3(Layout):
    """Read Model Optimizer's heads, and plain heads whose first layer is called ``layers.0``."""

    name = "modelopt-eagle3"
    order = 70

    def matches(self, source: Source) -> bool:
        """Tell by the name of the first layer, with an EAGLE-3 layer in it or ``eagle_config`` beside it."""
        return first_layer_is(source, "layers.0.") and (is_eagle3(source) or bool(source.config.get("eagle_config")))

    def plan(self, source: Source, options: ReadOptions) -> Plan:
        """Resolve config and names. Raises: ``IncompatibleDrafter`` as every layout does."""
        return plan_plain(source, options, "EAGLE-3 in the layout of NVIDIA Model Optimizer")


LAYOUT = ModelOptEagle3()
