"""EAGLE-3 as SpecForge writes and SGLang serves it: ``midlayer.*`` and a config that says more than the authors'."""

from __future__ import annotations

import warnings as python_warnings
from pathlib import Path

from hf_specgen.checkpoints.config import DrafterConfig
from hf_specgen.checkpoints.formats.base import Checkpoint, Layout, Plan, ReadOptions, Source
from hf_specgen.checkpoints.formats.eagle3_common import FIRST, IDS, OURS, first_layer_is, is_eagle3, served_flags
from hf_specgen.checkpoints.formats.eagle3_plain import plan_plain
from hf_specgen.checkpoints.formats.shared import layer_settings, store
from hf_specgen.errors import IncompatibleDrafter

SIGNS = ("eagle_config", IDS, OURS, "target_model_type", "norm_before_fc", "fc_norm", "norm_output")


class SpecForgeEagle3(Layout):
    """Read SpecForge's heads and everything like them; write the file that SGLang reads."""

    name = "sglang-eagle3"
    order = 80

    def matches(self, source: Source) -> bool:
        """Tell by the name of the first layer and settings that the authors' configs do not have."""
        known = any(source.config.get(sign) is not None for sign in SIGNS)
        return is_eagle3(source) and first_layer_is(source, FIRST) and known

    def plan(self, source: Source, options: ReadOptions) -> Plan:
        """Resolve config and names. Raises: ``IncompatibleDrafter`` as every layout does."""
        return plan_plain(source, options, "EAGLE-3 in SpecForge's layout, as SGLang reads it")

    def write(self, checkpoint: Checkpoint, folder: Path) -> None:
        """Write what SGLang reads. Raises: ``IncompatibleDrafter`` for drafters that it would serve wrongly.

        How to draft (tree, number of tokens) and the target's fingerprint are not part of it.
        """
        config = checkpoint.config
        _refuse_what_sglang_lacks(config)
        flags = served_flags(config)
        if config.aux_layer_boundaries:
            flags["eagle_config"][IDS] = ids_for_sglang(config.aux_layer_boundaries)
        flags[OURS] = list(config.aux_layer_boundaries)
        settings = {**layer_settings(checkpoint), **flags, "architectures": ["LlamaForCausalLMEagle3"]}
        store(folder, settings, checkpoint.tensors)


def ids_for_sglang(boundaries: list[int]) -> list[int]:
    """Return the ids that SGLang reads as these boundaries: it adds one if, and only if, the first id is 1.

    Raises: ``IncompatibleDrafter`` for boundaries that cannot be said so.
    """
    if boundaries[0] == 1:
        raise IncompatibleDrafter(
            f"SGLang cannot be told the boundaries {boundaries}: it takes a first id of 1 for the boundary 2. Convert "
            "to vllm-speculators."
        )
    return [boundary - 1 for boundary in boundaries] if boundaries[0] == 2 else list(boundaries)


def _refuse_what_sglang_lacks(config: DrafterConfig) -> None:
    if config.method != "eagle3":
        raise IncompatibleDrafter(f"layout 'sglang-eagle3' holds EAGLE-3 heads and this is {config.method!r}.")
    wrong = {
        "a bias of fc": config.fc_bias,
        "more than one layer": config.num_hidden_layers > 1,
        "norms of queries and keys (Qwen3 layers)": config.layer_type != "llama",
        "norm_before_residual": config.norm_before_residual,
        "a sliding window": config.sliding_window is not None,
        "some rows of the target's head": config.reduces_vocabulary and not config.own_head,
    }
    found = [name for name, is_so in wrong.items() if is_so]
    if found:
        raise IncompatibleDrafter(
            f"SGLang's EAGLE-3 reader does not know {', '.join(found)} and would serve another drafter without saying "
            "so. Convert to vllm-speculators."
        )
    if config.own_embedding and config.hidden_size == config.target_hidden_size:
        python_warnings.warn(
            "SGLang replaces the drafter's own embedding by the target's: if they differ, fewer drafts are accepted.",
            stacklevel=3,
        )


LAYOUT = SpecForgeEagle3()
