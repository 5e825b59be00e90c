"""Students: ordinary language models that learn as drafters do, and write some of the answers they learn from."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from hf_specgen.drafters.prompt_lookup import PromptLookup
from hf_specgen.drafting.learned import TrainingOutput
from hf_specgen.drafting.unrolling import Lesson, chosen, told, weighted
from hf_specgen.errors import IncompatibleDrafter, SpecGenError, UnsupportedTarget
from hf_specgen.trainers.data import row_seed
from hf_specgen.trainers.frozen import FrozenTarget
from hf_specgen.trainers.regenerate import Sampling, TargetAuthor

Batch = dict[str, Any]


class HeadLesson(AbstractContextManager["HeadLesson"]):
    """Let a model's head learn from what it is given, instead of writing logits ``(B, T, V)``.

    While it is open the head's module sees all states, makes the loss, and scores the first position alone. That
    happens inside the model's forward, so wrappers (DDP, FSDP) and autocast are in place. ``factor``: what the model
    multiplies the head's logits with. ``depth``: tokens of a draft that are told about; ``draws``: they are drawn.
    """

    def __init__(
        self, head: nn.Module, lesson: Lesson, factor: float = 1.0, depth: int = 1, draws: bool = False
    ) -> None:
        self._head = head
        self._lesson = lesson
        self._factor = factor
        self._depth = depth
        self._draws = draws
        self._states = torch.empty(0)
        self._handles: list[RemovableHandle] = []
        self._output: TrainingOutput | None = None

    def __enter__(self) -> HeadLesson:
        self._handles = [
            self._head.register_forward_pre_hook(self._narrow),
            self._head.register_forward_hook(self._learn, prepend=True),  # before FSDP takes the weight away
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def output(self, logits: Tensor) -> TrainingOutput:
        """Return what was learned; the model's own ``logits`` take part, with nothing, as wrappers watch them.

        Raises: ``IncompatibleDrafter`` for a model that does not call its head.
        """
        if self._output is None:
            raise IncompatibleDrafter("the model's forward does not call its output embeddings: it cannot be trained.")
        return self._output._replace(loss_sum=self._output.loss_sum + 0 * logits.sum(dtype=torch.float32))

    def _narrow(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self._states = inputs[0]
        return (inputs[0][:, :1],)

    def _learn(self, module: nn.Module, *unused: Any) -> None:
        lesson = self._lesson
        ids = self._lesson.input_ids.flatten()
        place = chosen(lesson, 1)
        found = lesson.objective(
            self._states.flatten(0, 1)[place] * self._factor,
            module.get_parameter("weight")[: len(lesson.target_head)],
            lesson.last_hidden.flatten(0, 1)[place],
            lesson.target_head,
            weighted(lesson, place, 1, 1.0),
            labels=ids[place + 1],
        )
        rate = found.ratio if self._draws else found.match
        every = [torch.zeros_like(ids, dtype=part.dtype) for part in (found.hits, found.alpha, rate)]
        by_token = [a.index_copy(0, place + 1, b) for a, b in zip(every, (found.hits, found.alpha, rate), strict=True)]
        depths = []
        for depth in range(self._depth):
            start = chosen(lesson, 2 + depth)
            hits, alpha, rate = (part[start + 2 + depth] for part in by_token)
            depths.append((start, hits, alpha, rate))
        self._output = told(lesson, found.loss_sum, depths)


def head_factor(model: PreTrainedModel) -> float:
    """Return what a model multiplies its head's logits with, mostly 1.

    Raises: ``IncompatibleDrafter`` for a model without a head, or that does more to its logits than that.
    """
    head = model.get_output_embeddings()
    training = model.training
    if head is None:
        raise IncompatibleDrafter(
            f"{type(model).__name__} has no language-model head: load the small model with AutoModelForCausalLM."
        )
    try:
        probe = FrozenTarget(model.eval(), (), model.device)
        probe.read({"input_ids": torch.arange(2, device=model.device)[None]})
    except UnsupportedTarget as error:
        raise IncompatibleDrafter(
            f"{type(model).__name__} cannot be trained as a drafter: it does more to its logits than a matrix and a "
            "factor (a bias, for one). Choose another small model of the target's family."
        ) from error
    finally:
        model.train(training)
    if probe.softcap:
        raise IncompatibleDrafter(
            f"{type(model).__name__} caps its logits (final_logit_softcapping={probe.softcap}), which is not trained "
            "through. Choose another small model of the target's family."
        )
    weight = head.weight.detach()
    scaled = probe.head.detach()
    return float((scaled * weight).sum() / (weight * weight).sum())


def rewritten(model: PreTrainedModel, batch: Batch, share: float, temperature: float, step: int) -> Batch:
    """Return a batch in which the model has written the last answer of a ``share`` of the rows anew.

    An answer is at most as long as the one it replaces. Which rows, and what is drawn, depend on ``step`` and on the
    row alone. Raises: ``SpecGenError`` for packed rows, and for rows with stored hidden states.
    """
    if "features" in batch or "last_hidden" in batch:
        raise SpecGenError(
            "on_policy writes answers anew, and the feature cache holds the hidden states of the old ones: train "
            "without the cache, or set on_policy=0."
        )
    if "document_ids" in batch:
        raise SpecGenError("on_policy needs rows of one text each: set packing=False, or on_policy=0.")
    lengths = batch["attention_mask"].sum(1).tolist()
    rows = [row[:length] for row, length in zip(batch["input_ids"].cpu(), lengths, strict=True)]
    seeds = [row_seed(torch.cat((row, row.new_tensor([step])))) for row in rows]
    starts = [last_answer(mask) for mask in batch["loss_mask"].cpu().bool()]
    todo = [row for row, start in enumerate(starts) if start and seeds[row] % 2**20 < share * 2**20]
    if not todo:
        return batch
    sampling = Sampling(max(lengths[row] - starts[row] for row in todo), temperature)
    training = model.training
    try:
        author = TargetAuthor(model.eval(), sampling, PromptLookup())
        with torch.no_grad():
            answers = author([rows[row][: starts[row]].tolist() for row in todo], [seeds[row] for row in todo])
    finally:
        model.train(training)
    batch = {name: part.clone() for name, part in batch.items()}
    for row, answer in zip(todo, answers, strict=True):
        start = starts[row]
        end = min(lengths[row], start + len(answer))
        batch["input_ids"][row, start:end] = torch.tensor(answer[: end - start], device=batch["input_ids"].device)
        for name in ("loss_mask", "attention_mask"):
            batch[name][row, start:end] = True
            batch[name][row, end:] = False
    batch["num_items"] = batch["loss_mask"].sum(dtype=torch.float32)
    return batch


def last_answer(mask: Tensor) -> int:
    """Return where the last stretch of supervised tokens starts, at least 1: something must come before; 0 for none."""
    first = mask.clone()
    first[1:] &= ~mask[:-1]
    starts = first.nonzero().flatten().tolist()
    return max(1, starts[-1]) if starts else 0
