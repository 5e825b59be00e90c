"""DistillTrainer: a small language model learns its target's law, so that it drafts better (DistillSpec)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer

from hf_specgen.checkpoints.card import CARD, training_part
from hf_specgen.drafters.small_model import check_vocabularies
from hf_specgen.drafting.learned import TrainingOutput
from hf_specgen.drafting.unrolling import Lesson, places
from hf_specgen.errors import SpecGenError
from hf_specgen.trainers.base import DrafterTrainer, DrafterTrainingArguments
from hf_specgen.trainers.frozen import FrozenTarget, prepared
from hf_specgen.trainers.students import Batch, HeadLesson, head_factor, rewritten

_USE = """## Speculative decoding

It drafts for the target that it was distilled from (`pip install hf_specgen`):

```python
drafter = hf_specgen.SmallModel(small)  # this model, loaded with AutoModelForCausalLM
hf_specgen.enable(target)
target.generate(**inputs, assistant_model=drafter)
```
"""


@dataclass
class DistillArguments(DrafterTrainingArguments):
    """Set up the distillation of a small language model.

    ``loss``: ``kl`` (forward), ``rkl`` (reverse), ``jsd`` with its ``beta``, ``tv`` (1 - acceptance). ``on_policy``:
    the share of rows whose last answer the small model writes anew before it learns from it.
    """

    beta: float = field(default=0.5, metadata={"help": "Of jsd: the target's share of the mixture."})
    on_policy: float = field(default=0.0, metadata={"help": "Share of rows whose answers the small model writes."})
    sampling_temperature: float = field(default=1.0, metadata={"help": "Temperature of those answers."})
    steps: int = field(default=5, metadata={"help": "Tokens of a draft, for what evaluation tells."})
    sample: bool = field(default=False, metadata={"help": "Drafts will be drawn: SmallModel(sample=True)."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.on_policy <= 1 or self.sampling_temperature <= 0 or self.steps < 1:
            raise SpecGenError(
                f"on_policy={self.on_policy}, sampling_temperature={self.sampling_temperature}, steps={self.steps} "
                "were given: a share of 0 to 1, a temperature above 0 and at least one token are required."
            )


class DistillTrainer(DrafterTrainer):
    """Train a small causal language model with the target's tokens: ``SmallModel`` drafts with it.

    It is saved as the ordinary model that it is. Ids are compared by number: ``target_tokenizer`` lets the target's
    tokens be compared with those of ``processing_class``, which is the small model's.
    Source: Zhou et al. 2024, "DistillSpec: improving speculative decoding via knowledge distillation".

    Raises: ``IncompatibleDrafter`` for other tokens, and for a model that does more to its logits than a matrix and a
    factor.
    """

    args: DistillArguments
    frozen_names: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        model: PreTrainedModel,
        target: PreTrainedModel,
        args: DistillArguments,
        data_collator: Any = None,
        target_tokenizer: PreTrainedTokenizerBase | None = None,
        **kwargs: Any,
    ) -> None:
        own = kwargs.get("processing_class")
        if own is not None and target_tokenizer is not None:
            check_vocabularies(target_tokenizer, own)
        uses_cache = model.config.to_dict().get("use_cache", True)
        super().__init__(model, target, args, data_collator, **kwargs)
        model.config.use_cache = uses_cache  # it is saved: what loads it shall be fast
        self.objective = replace(self.objective, beta=args.beta)

    def join(self, target: PreTrainedModel) -> None:
        """Put the target beside the small model, which takes nothing of it."""
        self.factor = head_factor(self.drafter)
        self.target = FrozenTarget(prepared(target, self.args.device), (), self.args.device)

    def run(self, model: nn.Module, batch: Batch, wants_rates: bool = False, **more: Any) -> TrainingOutput:
        """Let the target read a batch and the small model learn from it."""
        said = self.features(batch)
        documents = batch.get("document_ids")
        judged = batch["loss_mask"], self.objective, said["target_head"], documents, self.weights(batch), wants_rates
        lesson = Lesson(batch["input_ids"], (), said["last_hidden"], *judged)
        given = (
            {"attention_mask": batch["attention_mask"]} if documents is None else {"position_ids": places(documents)}
        )
        embedding = self.drafter.get_input_embeddings()
        head = self.drafter.get_output_embeddings()
        assert embedding is not None and head is not None
        ids = lesson.input_ids.clamp(max=len(embedding.weight) - 1)
        with HeadLesson(head, lesson, self.factor, self.args.steps, self.args.sample) as learned:
            return learned.output(model(input_ids=ids, use_cache=False, **given).logits)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | None]:
        """Return an optimizer step's batches, some answers written by the small model, and their supervised tokens."""

        def anew(batch: Batch) -> Batch:
            args = self.args
            step = self.state.global_step
            return rewritten(self.drafter, batch, args.on_policy, args.sampling_temperature, step)

        batches = map(anew, epoch_iterator) if self.args.on_policy else epoch_iterator
        return super().get_batch_samples(batches, num_batches, device)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write transformers' own card, as the model is an ordinary one, and the training's figures behind it."""
        kwargs["tags"] = kwargs.get("tags") or ["speculative-decoding", "draft-model", "distillspec"]
        kwargs.pop("finetuned_from", None)  # that is the small model's start, which transformers knows
        Trainer.create_model_card(self, *args, **kwargs)
        card = Path(self.args.output_dir) / CARD
        if self.is_world_process_zero() and card.is_file():
            text = card.read_text(encoding="utf-8").rstrip()
            card.write_text(f"{text}\n\n{_USE}\n{training_part(card.parent)}", encoding="utf-8")
