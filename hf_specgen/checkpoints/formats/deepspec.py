"""EAGLE-3 as DeepSpec saves it: Qwen3 layers, features of five layers, a head over the target's whole vocabulary."""

from __future__ import annotations

from hf_specgen.checkpoints.formats.base import Layout, Plan, ReadOptions, Source
from hf_specgen.checkpoints.formats.eagle3_common import Reading, plan_eagle3
from hf_specgen.checkpoints.formats.layer_ids import LAYER_OUTPUT, LayerIds
from hf_specgen.errors import IncompatibleDrafter

SERVED = "Qwen3Eagle3Model"
NAMES = (SERVED, "Gemma4Eagle3Model")


class DeepSpecEagle3(Layout):
    """Read DeepSpec's heads: ``target_layer_ids`` are layer outputs, the settings are the draft's own."""

    name = "deepspec-eagle3"
    order = 60

    def matches(self, source: Source) -> bool:
        """Tell by its architectures, or by ``target_layer_ids`` with ``ttt_length``."""
        config = source.config
        named = any(name in NAMES for name in config.get("architectures") or ())
        return named or ("target_layer_ids" in config and "ttt_length" in config)

    def plan(self, source: Source, options: ReadOptions) -> Plan:
        """Resolve config and names. Raises: ``IncompatibleDrafter`` as every layout does."""
        config = source.config
        if any(name in NAMES and name != SERVED for name in config.get("architectures") or ()):
            raise IncompatibleDrafter(
                f"{source.name} has Gemma layers ({config['architectures'][0]}): Llama or Qwen3 layers are required."
            )
        ids = config.get("target_layer_ids")
        # The rest of the config may be the target's: its own number of layers stands under a name of its own.
        settings = {
            **config,
            "num_hidden_layers": config.get("draft_num_hidden_layers") or config.get("num_hidden_layers"),
        }
        name = config.get("target_model_name_or_path")
        reading = Reading(
            title="EAGLE-3 in DeepSpec's layout",
            settings=settings,
            ids=LayerIds(None if ids is None else tuple(ids), LAYER_OUTPUT, certain=True),
            layer_type="qwen3",
            windows=True,
            draft_vocab_size=config.get("draft_vocab_size"),
            target={"name": name} if name else {},
            layers=config.get("num_target_layers") or 0,
        )
        return plan_eagle3(source, options, reading)


LAYOUT = DeepSpecEagle3()
