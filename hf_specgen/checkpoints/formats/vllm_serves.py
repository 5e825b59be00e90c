"""What vLLM leaves out of a drafter without a word (read in its source and run, version 0.32.0)."""

from __future__ import annotations

import warnings

from hf_specgen.checkpoints.config import DrafterConfig


def dropped_by_vllm(config: DrafterConfig) -> tuple[str, ...]:
    """Return the biases of an EAGLE drafter that vLLM has no place for and skips."""
    if config.method == "medusa":
        return ()
    fc = ("fc.bias",) if config.fc_bias else ()
    output = ("self_attn.o_proj.bias",) if config.layer_type == "qwen3" and config.attention_bias else ()
    return (*fc, *output)


def warn_of_vllm(config: DrafterConfig) -> None:
    """Warn where vLLM would serve another drafter than the one that is written."""
    dropped = dropped_by_vllm(config)
    if dropped:
        warnings.warn(
            f"vLLM reads no {', no '.join(dropped)}: the file is written so that vLLM refuses it, because it would "
            "draft with another drafter and fewer drafts would be accepted.",
            stacklevel=4,
        )
