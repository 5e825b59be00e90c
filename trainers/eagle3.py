"""Eagle3Trainer: EAGLE-3 drafters learn on their own states ("training-time test")."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hf_specgen.trainers.base import DrafterTrainer, DrafterTrainingArguments


@dataclass
class Eagle3Arguments(DrafterTrainingArguments):
    """Set up the training of an EAGLE-3 drafter: how many tokens it drafts in training, and what each counts."""

    steps: int = field(default=7, metadata={"help": "Tokens that are drafted behind every place of a text."})
    decay: float = field(default=0.8, metadata={"help": "What a drafted token counts, beside the one before it."})


class Eagle3Trainer(DrafterTrainer):
    """Train ``Eagle3Drafter``.

    Source: Li et al. 2025, "EAGLE-3: scaling up inference acceleration of LLMs via training-time test".
    """

    args: Eagle3Arguments

    def settings(self) -> dict[str, Any]:
        """Return how far the drafter unrolls."""
        return {"steps": self.args.steps, "decay": self.args.decay}
