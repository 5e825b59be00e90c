"""EAGLE-1 as converted for vLLM before 2025: the settings nested in ``model``, the target's head and norms beside."""

from __future__ import annotations

from collections.abc import Mapping

from hf_specgen.checkpoints.formats.base import Layout, Plan, ReadOptions, Source
from hf_specgen.checkpoints.formats.eagle_common import plan_eagle
from hf_specgen.checkpoints.formats.shared import short_names
from hf_specgen.errors import IncompatibleDrafter


class OldVllmEagle(Layout):
    """Read conversions for old versions of vLLM; norms that converters made up are left out."""

    name = "old-vllm-eagle"
    order = 30

    def matches(self, source: Source) -> bool:
        """Tell by ``model_type`` and the nested settings."""
        return source.config.get("model_type") == "eagle" and isinstance(source.config.get("model"), Mapping)

    def plan(self, source: Source, options: ReadOptions) -> Plan:
        """Resolve config and names. Raises: ``IncompatibleDrafter`` as every layout does, and for fewer ids."""
        settings = source.config["model"]
        fewer = source.config.get("truncated_vocab_size")
        if source.has("token_map") or fewer not in (None, settings.get("vocab_size")):
            raise IncompatibleDrafter(
                f"{source.name} drafts {fewer or 'some'} of the target's ids (token_map): an EAGLE-1 drafter of the "
                "whole vocabulary is required. Load the one it was converted from."
            )
        names = short_names(source, "model.model.", "model.")
        return plan_eagle(source, options, names, settings, "EAGLE-1 as converted for old versions of vLLM")


LAYOUT = OldVllmEagle()
