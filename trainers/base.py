"""DrafterTrainer: transformers' Trainer for drafters that learn from a frozen target in the same process.

A drafter's forward returns sums, and one number divides them: the count of all supervised tokens of an optimizer step.
So any split of the step over processes and accumulated batches gives the same gradient.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import datasets
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import HubStrategy

from hf_specgen.checkpoints.card import CardOptions, is_repository, write_card
from hf_specgen.drafting.learned import LearnedDrafter, TrainingOutput
from hf_specgen.errors import SpecGenError
from hf_specgen.models.facts import TargetFacts, whole
from hf_specgen.trainers.data import DraftCollator
from hf_specgen.trainers.frozen import FrozenTarget, prepared
from hf_specgen.trainers.losses import Objective
from hf_specgen.trainers.metrics import renewal
from hf_specgen.trainers.tally import Tally
from hf_specgen.trainers.worth import unwrap

_FED = ("input_ids", "loss_mask", "document_ids")


@dataclass
class DrafterTrainingArguments(TrainingArguments):
    """Set up the training of a drafter: transformers' arguments with safer defaults, and what all methods share.

    ``loss``: kl, rkl, tv, lk, ce or jsd. ``chunk_size``: rows whose logits exist at a time. ``loss_reduction``: every
    supervised ``token`` weighs the same, or every ``sequence``. ``eval_temperature``: what eval texts were sampled at;
    the figures of an evaluation are then those of both laws at that temperature (0: as in training).
    """

    learning_rate: float = 1e-4
    warmup_steps: float = 0.04
    logging_steps: float = 10
    logging_nan_inf_filter: bool = False  # it hides NaN, and waits for the device at every step
    remove_unused_columns: bool = False  # the collator reads columns that forward does not name
    ddp_find_unused_parameters: bool | None = False
    hub_strategy: HubStrategy | str = "end"  # what is uploaded on the way has no card yet
    max_length: int = field(default=2048, metadata={"help": "Tokens of a text that are read."})
    packing: bool = field(default=False, metadata={"help": "Put several short texts into one row."})
    loss: str = field(default="kl", metadata={"help": "kl, rkl, tv, lk, ce or jsd."})
    chunk_size: int = field(default=1024, metadata={"help": "Rows whose logits exist at a time."})
    loss_reduction: str = field(default="token", metadata={"help": "What weighs the same: token or sequence."})
    draft_vocab_size: int | None = field(default=None, metadata={"help": "Ids that a new drafter covers."})
    eval_temperature: float = field(default=0.0, metadata={"help": "Temperature that eval texts were sampled at."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.label_smoothing_factor:
            raise SpecGenError("label_smoothing_factor was given: drafters learn the target's own law. Leave it out.")
        if self.neftune_noise_alpha is not None:
            raise SpecGenError(
                f"neftune_noise_alpha={self.neftune_noise_alpha} was given: it adds noise to embeddings, and a drafter "
                "learns what its target says of the text as it is. Leave it out."
            )
        if self.loss_reduction not in ("token", "sequence"):
            raise SpecGenError(f"loss_reduction={self.loss_reduction!r}: 'token' or 'sequence' is required.")
        if self.eval_temperature < 0:
            raise SpecGenError(f"eval_temperature={self.eval_temperature}: 0 (greedy) or more is required.")
        if self.accelerator_config.dispatch_batches is None:  # batches of a stream differ in width
            self.accelerator_config.dispatch_batches = False

    @property
    def device(self) -> torch.device:
        """Return where training runs. With several processes 5.17 says "cpu:0", where no checkpoint can be read."""
        found: torch.device = super().device
        return torch.device("cpu") if found.type == "cpu" else found


class DrafterTrainer(Trainer):
    """Train a drafter next to its target: ``trainer = XTrainer(drafter, target, args, train_dataset=...)``.

    The target is no part of the trained module: it is not saved, not sharded, and its weights stay as they are.

    Raises: ``SpecGenError`` for a start that would train separate copies, ``IncompatibleDrafter`` when drafter and
    target do not fit.
    """

    loss_is_scaled_for_ga = True  # 5.24 reads it; 5.17 reads model_accepts_loss_kwargs
    args: DrafterTrainingArguments
    frozen_names: ClassVar[tuple[str, ...]] = ("embed_tokens.",)
    """Parameters whose names start so keep the values they have."""

    def __init__(
        self,
        model: LearnedDrafter | PreTrainedModel,
        target: PreTrainedModel,
        args: DrafterTrainingArguments,
        data_collator: Any = None,
        **kwargs: Any,
    ) -> None:
        check_start(args)
        check_checkpointing(model, args)
        collator = DraftCollator() if data_collator is None else data_collator
        super().__init__(model=model, args=args, data_collator=collator, **kwargs)
        self.model_accepts_loss_kwargs = True
        check_accelerator(self.accelerator)
        self.drafter = model
        self.join(target)
        for name, parameter in model.named_parameters():
            if name.startswith(self.frozen_names):
                parameter.requires_grad_(False)
        borrows = isinstance(model, LearnedDrafter) and not model.config.own_head
        self.objective = Objective(args.loss, chunk=args.chunk_size, softcap=self.target.softcap, borrows=borrows)
        self.tallies = {"train": Tally(), "eval": Tally()}
        self.add_callback(StopOnNaN())

    def join(self, target: PreTrainedModel) -> None:
        """Put the target beside the drafter, and note in the drafter's config whose it is."""
        target = prepared(target, self.args.device)
        facts = TargetFacts.of(target)
        known = {**facts.to_dict(), "name": public_name(facts.name)}
        self.drafter.config.target = {**self.drafter.config.target, **known}
        self.drafter.attach(target)
        self.target = FrozenTarget(target, self.drafter.hidden_layers, self.args.device)

    def settings(self) -> dict[str, Any]:
        """Return what the method adds to every forward of its drafter."""
        return {}

    def features(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return what the target says of a batch, as the drafter's forward names it."""
        if "features" in batch:  # from a cache
            self.target.compare(batch)
            features = batch["features"]
            last_hidden = batch["last_hidden"]
        else:
            features, last_hidden = self.target.read(batch)
        return {"features": tuple(features), "last_hidden": last_hidden, "target_head": self.target.head}

    def count(self, batch: dict[str, Any]) -> Tensor:
        """Return what a batch adds to the number that its loss is divided by: supervised tokens, or texts."""
        if self.args.loss_reduction == "token" and "num_items" in batch:
            return batch["num_items"].float()
        weights = self.weights(batch)
        return (batch["loss_mask"] if weights is None else weights).sum(dtype=torch.float32)

    def weights(self, batch: dict[str, Any]) -> Tensor | None:
        """Return the weight ``(B, T)`` of every token's loss, None for 1."""
        if self.args.loss_reduction == "token":
            return None
        return sequence_weights(batch["loss_mask"], batch.get("document_ids"))

    def run(self, model: nn.Module, batch: dict[str, Any], **more: Any) -> TrainingOutput:
        """Let the target read a batch and the drafter learn from it; ``model`` is the wrapped drafter."""
        fed = {name: batch[name] for name in _FED if name in batch}
        weights = self.weights(batch)
        fed = fed if weights is None else {**fed, "weights": weights}
        output: TrainingOutput = model(
            **fed, **self.features(batch), objective=self.objective, **self.settings(), **more
        )
        return output

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | None]:
        """Return an optimizer step's batches and how many items all processes have in it."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        total = torch.zeros((), device=device)
        for batch in batches:
            total = total + self.count(batch).to(device)
        if self._scale() > 1:
            total = self.accelerator.reduce(total, "sum")
        return batches, total

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the batch's share of the step's loss; gradients of processes are averaged, hence the factor."""
        items = self.count(inputs) if num_items_in_batch is None else torch.as_tensor(num_items_in_batch)
        output = self.run(model, inputs)
        self.tallies["train"].add(output)
        loss = output.loss_sum * (self._scale() / items.clamp(min=1).to(output.loss_sum.device))
        return (loss, output) if return_outputs else loss

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Return batches to evaluate on; a stream is filled up, so that no process repeats rows of it."""
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        chosen = self.eval_dataset[chosen] if isinstance(chosen, str) else chosen
        world = self.accelerator.num_processes
        if world > 1 and isinstance(chosen, IterableDataset | datasets.IterableDataset):
            eval_dataset = Filled(chosen, world * self.args.per_device_eval_batch_size)
        return super().get_eval_dataloader(eval_dataset)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor, None, None]:
        """Add a batch to the evaluation; rows that were only repeated to even out the processes do not count."""
        batch = self._once(inputs)
        items = self.count(batch).to(self.args.device)  # DeepSpeed would round it with the batch
        batch = self._prepare_inputs(batch)
        usual = self.objective
        if self.args.eval_temperature:  # best ids are the same at any
            self.objective = replace(usual, temperature=self.args.eval_temperature)
        try:
            with torch.no_grad(), self.compute_loss_context_manager():
                output = self.run(model, batch, wants_rates=True)
        finally:
            self.objective = usual
        more = {}
        if output.rates is not None:
            found = renewal(output.rates, batch["loss_mask"], batch.get("document_ids"))
            more = {"tokens": found.tokens, "rounds": found.rounds}
        self.tallies["eval"].add(output, items, **more)
        return output.loss_sum.detach() / items.clamp(min=1), None, None

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """Evaluate: the loss per supervised token over all processes, agreement per depth, acceptance length."""
        self.tallies["eval"].clear()
        fresh = not self.accelerator._models
        result = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        if fresh and not (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            self._unprepare()
        found = self.tallies["eval"].told(self.accelerator)
        result.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in found.items()})
        return result

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the drafter's agreement with its target since the last log."""
        if "loss" in logs:
            tally = self.tallies["train"]
            logs = {**logs, **tally.told(self.accelerator)}
            tally.clear()
        super().log(logs, start_time)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write our own card beside the drafter's files: the base model is the target, or ``finetuned_from``."""
        if self.is_world_process_zero():
            folder = Path(self.args.output_dir)
            name = str(self.hub_model_id or kwargs.get("model_name") or folder.name)
            base_model, license_name = (str(kwargs.get(key) or "") for key in ("finetuned_from", "license"))
            write_card(folder, CardOptions(name, base_model, license_name), overwrite=True)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save what was trained; in the folder that is published, without a pickle of this machine's settings."""
        super().save_model(output_dir, _internal_call)
        if self.args.should_save and output_dir in (None, self.args.output_dir):
            (Path(self.args.output_dir) / TRAINING_ARGS_NAME).unlink(missing_ok=True)

    def _unprepare(self) -> None:
        """Undo an evaluation before training: accelerate would not wrap the drafter, and each process train alone."""
        unwrap(self.model)
        self.accelerator._models.clear()

    def _scale(self) -> int:
        """Return by how many processes gradients are averaged; 1 where each counts for itself."""
        world: int = self.accelerator.num_processes
        return world if self.args.average_tokens_across_devices else 1

    def _once(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Take the supervision off rows of the last batch that were seen before."""
        state = self.accelerator.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return batch
        rows = len(batch["input_ids"])
        first = self.accelerator.process_index * rows
        real = torch.arange(first, first + rows, device=batch["loss_mask"].device) < state.remainder
        kept = {name: value for name, value in batch.items() if name != "num_items"}
        return {**kept, "loss_mask": batch["loss_mask"].bool() & real[:, None]}


class Filled(IterableDataset[Any]):
    """Fill a stream up to whole steps of all processes, with rows that supervise nothing: nobody's figures move."""

    def __init__(self, rows: Any, size: int) -> None:
        self.rows = rows
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        """Yield the rows and what fills the last step."""
        number = 0
        row = None
        for row in self.rows:
            number += 1
            yield row
        if row is not None:
            empty = {**row, "loss_mask": [False] * len(row["input_ids"])}
            yield from (empty for _ in range(-number % self.size))


class StopOnNaN(TrainerCallback):
    """Stop before a step that would fill the weights with NaN."""

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Raise ``SpecGenError`` for gradients that are not finite; with fp16 the scaler skips those by itself."""
        if args.fp16:
            return
        gradients = [parameter.grad for parameter in kwargs["model"].parameters() if parameter.grad is not None]
        if gradients and not bool(torch.stack([whole(part.sum()) for part in gradients]).sum().isfinite()):
            raise SpecGenError(
                f"the gradient of step {state.global_step + 1} is not finite: training stops before it spoils the "
                "weights. Lower learning_rate, keep the drafter in float32 (bf16=True computes in 16 bits), or look "
                "for a broken row in the data. The last checkpoint is good."
            )


def public_name(name: str) -> str:
    """Return how a model or a data set may be called in public: folders of this machine by their last part."""
    return name if is_repository(name) or not name else Path(name).name


def check_start(args: TrainingArguments) -> None:
    """Refuse a start of several processes that do not know of each other; one process uses one device."""
    asked = int(os.environ.get("WORLD_SIZE", "1"))
    if asked > 1 and args.world_size == 1:
        raise SpecGenError(
            f"{asked} processes were started and each would train alone into {args.output_dir}: on CPUs use_cpu=True "
            "is required (accelerate launch --multi_gpu --num_processes N ... --use_cpu)."
        )
    if args.n_gpu > 1:
        args._n_gpu = 1  # DataParallel copies the drafter at every step: start a process per device instead


def check_checkpointing(model: PreTrainedModel, args: TrainingArguments) -> None:
    """Refuse to compute activations anew in a model that cannot: transformers says so only when training begins."""
    if args.gradient_checkpointing and not model.supports_gradient_checkpointing:
        raise SpecGenError(
            f"gradient_checkpointing was given: {type(model).__name__} does not support it. Leave it out; a smaller "
            "chunk_size or per_device_train_batch_size saves memory."
        )


def check_accelerator(accelerator: Any) -> None:
    """Refuse to split a drafter otherwise than by batches or FSDP: its count of items would be wrong."""
    layout = accelerator.parallelism_config
    if layout is not None and layout.non_data_parallel_size > 1:
        raise SpecGenError(
            "the drafter is to be split by tensor, context or sequence parallelism: it is small, use DDP or FSDP. The "
            "target may be sharded when it is loaded (distributed_config)."
        )


def sequence_weights(mask: Tensor, documents: Tensor | None) -> Tensor:
    """Return weights ``(B, T)`` under which the supervised tokens of each text add up to 1."""
    supervised = mask.float()
    if documents is None:
        return supervised / supervised.sum(1, keepdim=True).clamp(min=1)
    text = documents - documents.min()
    sums = supervised.new_zeros(len(text), int(text.max()) + 1).scatter_add(1, text, supervised)
    return supervised / sums.gather(1, text).clamp(min=1)
