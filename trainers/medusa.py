"""MedusaTrainer: Medusa heads learn what the target writes behind each of its states."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from hf_specgen.drafting.learned import TrainingOutput
from hf_specgen.trainers.base import DrafterTrainer, DrafterTrainingArguments


@dataclass
class MedusaArguments(DrafterTrainingArguments):
    """Set up the training of Medusa heads.

    The default loss is the cross entropy of the text itself, which the target should have written; ``kl`` learns the
    target's law, from any text, and runs the target's head once per head.
    """

    learning_rate: float = 1e-3
    lr_scheduler_type: str = "cosine"
    warmup_steps: float = 0.1
    loss: str = field(default="ce", metadata={"help": "kl, rkl, tv, lk, ce or jsd."})
    decay: float = field(default=0.8, metadata={"help": "What a head counts, beside the one before it."})


class MedusaTrainer(DrafterTrainer):
    """Train ``MedusaDrafter``; ``MedusaDrafter.for_target(target)`` makes one to start from.

    With the loss ``ce``, agreement in the log of a training is that with the text; evaluation always asks the target.
    Source: Cai et al. 2024, "Medusa: simple LLM inference acceleration framework with multiple decoding heads".
    """

    args: MedusaArguments

    def run(self, model: nn.Module, batch: dict[str, Tensor], **more: Any) -> TrainingOutput:
        """Let the heads learn from a batch; the target's law is made where somebody reads it."""
        asked = self.args.loss != "ce" or bool(more.get("wants_rates"))
        return super().run(model, batch, wants_teacher=asked, **more)

    def settings(self) -> dict[str, Any]:
        """Return what the heads count."""
        return {"decay": self.args.decay}
