"""EagleTrainer: EAGLE drafters learn to foretell the feature that the target's head will read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specgen.drafting.learned import LearnedDrafter
from hf_specgen.trainers.base import DrafterTrainer, DrafterTrainingArguments
from hf_specgen.trainers.data import DraftCollator, row_seed

_LENGTH = 512  # of a text that gets noise of the width asked for


@dataclass
class EagleArguments(DrafterTrainingArguments):
    """Set up the training of an EAGLE drafter; EAGLE-2 has the same weights.

    ``noise``: the width of what is added to the features of a text of 512 tokens; longer texts get less.
    """

    learning_rate: float = 5e-5
    adam_beta2: float = 0.95
    max_grad_norm: float = 0.5
    share: float = field(default=0.1, metadata={"help": "What the head's loss counts beside the features' own."})
    noise: float = field(default=0.2, metadata={"help": "Width of the noise on features; 0 for none."})
    steps: int = field(default=1, metadata={"help": "Tokens that are drafted behind every place of a text."})
    decay: float = field(default=0.8, metadata={"help": "What a drafted token counts, beside the one before it."})
    told_steps: int = field(default=5, metadata={"help": "Tokens of a draft, for what evaluation tells."})


class EagleTrainer(DrafterTrainer):
    """Train ``EagleDrafter``.

    Source: Li et al. 2024, "EAGLE: speculative sampling requires rethinking feature uncertainty", section 3.2.
    """

    args: EagleArguments

    def __init__(
        self,
        model: LearnedDrafter,
        target: PreTrainedModel,
        args: EagleArguments,
        data_collator: Any = None,
        **kwargs: Any,
    ) -> None:
        collator = DraftCollator(seeds=True) if data_collator is None else data_collator
        super().__init__(model, target, args, collator, **kwargs)

    def settings(self) -> dict[str, Any]:
        """Return how far the drafter unrolls, and what the parts of its loss count."""
        args = self.args
        return {"steps": args.steps, "decay": args.decay, "share": args.share, "told_steps": args.told_steps}

    def features(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return what the target says of a batch, with noise on the features in training."""
        said = super().features(batch)
        if not self.args.noise or not self.drafter.training:
            return said
        noise = self.args.noise * feature_noise(batch, said["last_hidden"], self.state.global_step)
        return {**said, "features": tuple(layer + noise for layer in said["features"])}


def feature_noise(batch: dict[str, Tensor], like: Tensor, step: int) -> Tensor:
    """Return noise ``(B, T, D)`` of mean 0 and width ``512 / length`` of each text.

    It depends on the step and on the row alone: neither on what stands beside it, nor on padding. Packed texts have
    their own lengths.
    """
    noise = torch.zeros_like(like)
    lengths = batch["attention_mask"].sum(1).tolist()
    seeds = batch["seeds"] if "seeds" in batch else row_seeds(batch["input_ids"], lengths)
    generator = torch.Generator(like.device)
    for row, (length, seed) in enumerate(zip(lengths, seeds.tolist(), strict=True)):
        generator.manual_seed(row_seed(torch.tensor([seed, step])))
        coins = torch.rand(length, like.shape[-1], generator=generator, device=like.device)
        size = torch.full((length, 1), float(length), device=like.device)
        if "document_ids" in batch:
            documents = batch["document_ids"][row, :length].clamp(min=0)
            size = torch.bincount(documents)[documents, None].float()
        noise[row, :length] = ((coins - 0.5) * _LENGTH / size).to(like.dtype)
    return noise


def row_seeds(ids: Tensor, lengths: list[int]) -> Tensor:
    """Return the numbers that a collator which gives no ``seeds`` would have given."""
    return torch.tensor([row_seed(row[:length]) for row, length in zip(ids.cpu(), lengths, strict=True)])
