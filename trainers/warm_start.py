"""New drafters to train, of any method, and what a draft vocabulary of theirs must hold."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_specgen.drafting.learned import LearnedDrafter
from hf_specgen.drafting.warm_start import default_boundaries, warm_start
from hf_specgen.loading import drafter_class
from hf_specgen.models.wrappers import bare

__all__ = ["always_covered", "default_boundaries", "new_drafter", "warm_start"]


def new_drafter(
    method: str, target: nn.Module, ids: Tensor | None = None, warm: bool = True, **settings: Any
) -> tuple[LearnedDrafter, list[str]]:
    """Build a drafter for a target, in float32 on the CPU. ``settings`` go to the method's configuration.

    ``ids (V_draft)``: the target's ids that it covers, None for all. ``warm=False``: random weights. A target whose
    layers are built otherwise than Llama's or Qwen3's gives its head and embedding alone.

    Returns: the drafter, and what was taken from the target in words.
    Raises: ``SpecGenError`` for a method or settings that build none.
    """
    return drafter_class(method).new(bare(target), ids, warm, **settings)


def always_covered(target: PreTrainedModel, tokenizer: Any = None) -> Iterable[int]:
    """Return the ids that every draft vocabulary holds: those that end a text."""
    ends = target.generation_config.eos_token_id if target.generation_config is not None else None
    found = set(ends if isinstance(ends, list) else [] if ends is None else [ends])
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return sorted(found)
