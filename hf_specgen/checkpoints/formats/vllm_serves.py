"""What vLLM leaves out of a drafter without a word (read in its source and run, version 0.32.0)."""

from __future__ import annotations

import warnings

from hf_specgen.checkpoints.config import DrafterConfig


def warn_of_vllm(config: DrafterConfig) -> None:
    """Warn where vLLM would serve another drafter than the one that is written."""
    dropped = config.dropped_by_vllm
    if dropped:
        warnings.warn(
            f"vLLM reads no {', no '.join(dropped)}: the file is written so that vLLM refuses it, because it would "
            "draft with another drafter and fewer drafts would be accepted.",
            stacklevel=4,
        )
