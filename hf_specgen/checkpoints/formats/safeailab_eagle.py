"""EAGLE-1 and EAGLE-2 as their authors publish them, and as SGLang and vLLM take them over. Source: Li et al. 2024."""

from __future__ import annotations

from pathlib import Path

from hf_specgen.checkpoints.formats.base import Checkpoint, Layout, Plan, ReadOptions, Source
from hf_specgen.checkpoints.formats.eagle3_common import is_eagle3
from hf_specgen.checkpoints.formats.eagle_common import plan_eagle
from hf_specgen.checkpoints.formats.shared import layer_settings, short_names, store
from hf_specgen.checkpoints.formats.vllm_serves import warn_of_vllm
from hf_specgen.errors import IncompatibleDrafter


class SafeAILabEagle(Layout):
    """Read and write the authors' layout: ``fc`` over embedding and feature, one layer without an input norm."""

    name = "eagle"
    order = 100

    def matches(self, source: Source) -> bool:
        """Tell by ``fc`` of 2H features beside a layer, or by a layer without an input norm."""
        shapes = {name.removeprefix("model."): shape for name, shape in source.shapes.items()}
        fc = tuple(shapes.get("fc.weight", ()))
        layer = "layers.0.self_attn.q_proj.weight" in shapes
        paired = len(fc) == 2 and fc[1] == 2 * fc[0]
        # whole models without input norms exist too (OLMo 2), but they have a last norm
        absent = ("layers.0.input_layernorm.weight", "norm.weight")
        bare = "layers.0.post_attention_layernorm.weight" in shapes and not any(name in shapes for name in absent)
        return ((layer and paired) or bare) and not is_eagle3(source)

    def plan(self, source: Source, options: ReadOptions) -> Plan:
        """Resolve config and names. Raises: ``IncompatibleDrafter`` as every layout does."""
        return plan_eagle(source, options, short_names(source, "model."), source.config, "EAGLE-1/2 of its authors")

    def write(self, checkpoint: Checkpoint, folder: Path) -> None:
        """Write what the authors' code, SGLang and vLLM read. Raises: ``IncompatibleDrafter`` for other drafters.

        How to draft (tree, number of tokens) and the target's fingerprint are not part of it.
        """
        config = checkpoint.config
        tensors = dict(checkpoint.tensors)
        wrong = {
            f"method {config.method!r}": config.method != "eagle",
            "norms of queries and keys (Qwen3 layers)": config.layer_type != "llama",
            "a shortened draft vocabulary (d2t)": config.reduces_vocabulary,
            "a sliding window": config.sliding_window is not None,
            "heads that are rotated in part": config.rotary_size < config.head_dim,
            f"head_dim {config.head_dim} (hidden_size / heads is required)": config.head_dim
            * config.num_attention_heads
            != config.hidden_size,
            "biases of the MLP": config.mlp_bias,
        }
        biases = [name for name in tensors if name.endswith("self_attn.o_proj.bias")]
        wrong["biases of o_proj"] = any(bool(tensors[name].any()) for name in biases)
        found = [name for name, is_so in wrong.items() if is_so]
        if found:
            raise IncompatibleDrafter(
                f"layout 'eagle' cannot hold {', '.join(found)}: its readers would take another drafter for it. Keep "
                "the specgen layout."
            )
        for name in biases:
            del tensors[name]
        warn_of_vllm(config)
        # vLLM puts "Eagle" before the name and takes the first that it knows; without the second it refuses the file
        served = [] if config.dropped_by_vllm else ["LlamaForCausalLM"]
        settings = {
            **layer_settings(checkpoint),
            "architectures": ["LlamaForCausalLMEagle", *served],
            "bias": config.fc_bias,
            "qkv_bias": config.attention_bias,
        }
        settings["attention_bias"] = False  # it would ask for a bias of o_proj too
        del settings["layer_types"]  # vLLM counts them from the target's first layer and finds none of ours
        store(folder, settings, tensors)


LAYOUT = SafeAILabEagle()
