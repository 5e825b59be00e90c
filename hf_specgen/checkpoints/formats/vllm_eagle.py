"""EAGLE-1 as early versions of the speculators library wrote it: ``fusion_fc`` and ``transformer``."""

from __future__ import annotations

from hf_specgen.checkpoints.formats.base import Layout, Plan, ReadOptions, Source
from hf_specgen.checkpoints.formats.eagle_common import plan_eagle
from hf_specgen.checkpoints.formats.shared import short_names
from hf_specgen.checkpoints.formats.vllm_eagle3 import nested_settings
from hf_specgen.errors import IncompatibleDrafter

RENAMED = {"fusion_fc.": "fc.", "transformer.": "layers.0."}
NORMS = ("embedding_layernorm.weight", "pre_lm_head_layernorm.weight")
LAYERS = (None, "auto", "LlamaDecoderLayer")


class VllmEagle(Layout):
    """Read EAGLE-1 of the speculators library; its variant with added norms is refused."""

    name = "vllm-speculators-eagle"
    order = 20

    def matches(self, source: Source) -> bool:
        """Tell by ``speculators_model_type``."""
        return source.config.get("speculators_model_type") == "eagle"

    def plan(self, source: Source, options: ReadOptions) -> Plan:
        """Resolve config and names. Raises: ``IncompatibleDrafter`` as every layout does, and for added norms."""
        config = source.config
        norms = [name for name in NORMS if source.has(name)]
        if config.get("layernorms") or norms:
            raise IncompatibleDrafter(
                f"{source.name} has norms around EAGLE-1 (layernorms={config.get('layernorms')}"
                f"{', ' if norms else ''}{', '.join(norms)}): its writer and vLLM place them differently, so nobody "
                "can tell what it was trained as. A drafter with layernorms=false is required."
            )
        if config.get("transformer_layer_architecture") not in LAYERS:
            raise IncompatibleDrafter(
                f"{source.name} has layers of {config['transformer_layer_architecture']}: LlamaDecoderLayer is "
                "required."
            )
        return plan_eagle(
            source,
            options,
            {renamed(name): full for name, full in short_names(source).items()},
            nested_settings(source),
            "EAGLE-1 of the speculators library",
            theirs,
        )


def theirs(name: str) -> str:
    """Return the library's name of a tensor of ours."""
    prefix = next((prefix for prefix, ours in RENAMED.items() if name.startswith(ours)), "")
    return prefix + name.removeprefix(RENAMED.get(prefix, ""))


def renamed(name: str) -> str:
    """Return our name of a tensor."""
    prefix = next((prefix for prefix in RENAMED if name.startswith(prefix)), "")
    return RENAMED.get(prefix, "") + name.removeprefix(prefix)


LAYOUT = VllmEagle()
