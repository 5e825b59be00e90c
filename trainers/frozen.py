"""FrozenTarget: the model that drafters learn from. It is read, never trained, and no part of what is trained."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather, pad_across_processes
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hf_specgen.drafting.unrolling import places
from hf_specgen.errors import IncompatibleDrafter, UnsupportedTarget
from hf_specgen.models.facts import holds_numbers, whole
from hf_specgen.models.taps import FINAL, Taps
from hf_specgen.models.wrappers import driven

_NEAR = 0.02  # of the largest logit: 16-bit rounding stays below
_STORED = 0.05  # of the norm of hidden states: so is rounding, through many layers


class FrozenTarget:
    """Read a target's hidden states at a drafter's ``boundaries``, and hold the weight of its head.

    ``prepared`` puts the model in its place first.
    """

    def __init__(self, target: nn.Module, boundaries: Sequence[int], device: torch.device) -> None:
        self.model = model = driven(target)
        self.device = device
        self.boundaries = tuple(boundaries)
        if any(weight.is_meta for weight in model.get_output_embeddings().parameters()):
            raise UnsupportedTarget(
                f"the head of {type(model).__name__} is offloaded, and a drafter learns against its weight: a head in "
                "memory is required. Give it a device in device_map=."
            )
        self._taps = Taps(model, (*self.boundaries, FINAL))
        self._checked = self._checked_packing = self._compared = False
        settings = model.config.get_text_config(decoder=True).to_dict()
        self.softcap: float | None = settings.get("final_logit_softcapping")
        self._sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
        self._joint = int(model.tp_size or 1)
        if self._joint > 1 and self._joint != PartialState().num_processes:
            raise UnsupportedTarget(
                f"the target is split over {self._joint} of {PartialState().num_processes} processes (tp_size): tensor "
                "parallelism over all of them is required, or fsdp_size instead."
            )
        known = inspect.signature(model.forward).parameters
        # as an index: a slice of the last states is not contiguous, and their product with the head copies it per row
        last: int | Tensor = 1 if self._sharded or self._joint > 1 else torch.tensor([-1])
        self._short = {"logits_to_keep": last} if "logits_to_keep" in known else {}
        self._head: Tensor | None = None

    @property
    def head(self) -> Tensor:
        """Return ``(V, D)`` whose product with the last hidden state is the logits; its scale is the model's own."""
        if self._head is None:
            weight = self.model.get_output_embeddings().weight
            if not holds_numbers(weight):
                raise UnsupportedTarget(
                    f"the target's head holds no plain floats ({type(weight).__name__}, {weight.dtype}): training "
                    "reads it as a matrix. Load the target with an unquantised head."
                )
            self._head = whole(weight).to(self.device)
        return self._head

    @torch.no_grad()
    def compare(self, batch: Mapping[str, Any]) -> None:
        """Hold the hidden states that a batch brings against what the target says of its first row; once is enough.

        Raises: ``IncompatibleDrafter`` when they are another target's, ``UnsupportedTarget`` as ``read`` does.
        """
        if self._compared:
            return
        self._compared = True
        part = {name: batch[name][:1] for name in ("input_ids", "attention_mask", "document_ids") if name in batch}
        features, last = self.read(part)
        size = int(part["attention_mask"].sum()) if "attention_mask" in part else last.shape[1]
        for stored, live in zip((*batch["features"], batch["last_hidden"]), (*features, last), strict=True):
            said = stored[0, :size].float()
            wanted = live[0, :size].float()
            if float((said - wanted).norm()) > _STORED * float(wanted.norm()):
                raise IncompatibleDrafter(
                    "the stored hidden states are not what the target says of the text: another target wrote them (a "
                    "fine-tuned one may have the same embedding and head), or read other tokens. Write a cache for "
                    "this target."
                )

    @torch.no_grad()
    def read(self, batch: Mapping[str, Tensor]) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return the features, one ``(B, T, D)`` per boundary, and the last hidden state ``(B, T, D)``.

        Of the batch: ``input_ids``, ``attention_mask``, and ``document_ids`` where texts are packed: they stay apart.
        """
        documents = batch.get("document_ids")
        mask = batch.get("attention_mask")
        if documents is not None and not (self._checked_packing or self._sharded):  # all processes run it alike
            self._check_packing(batch["input_ids"], documents)
        if mask is not None and self._joint == 1 and bool((mask[:, 1:] <= mask[:, :-1]).all()):
            mask = None  # nothing stands before what is left out: the causal order hides it
        hidden = self._run(batch["input_ids"], mask, documents)
        return hidden[:-1], hidden[-1]

    def _run(self, ids: Tensor, mask: Tensor | None, documents: Tensor | None) -> tuple[Tensor, ...]:
        behind = mask if documents is None else places(documents)
        given = {"input_ids": ids, "attention_mask" if documents is None else "position_ids": behind}
        if self._joint > 1:
            given = {name: joined(part) for name, part in given.items() if part is not None}
        with self._taps.on() as seen:
            logits = self.model(**given, use_cache=False, **self._short).logits
            hidden = self._taps.read(seen, self.device)
        last = hidden[-1][:, -1]
        if self._joint > 1:
            first = PartialState().process_index * len(ids)
            own = slice(first, first + len(ids))
            hidden = tuple(part[own, : ids.shape[1]] for part in hidden)
        if not self._checked:
            self._check_head(last, logits[:, -1].to(self.device))
        return hidden

    def _check_head(self, states: Tensor, logits: Tensor) -> None:
        """Take over a constant factor behind the head. Raises: ``UnsupportedTarget`` for anything else there."""
        wanted = whole(logits).float()
        plain = (states.to(self.head.dtype) @ self.head.T).float()
        if self.softcap:
            plain = self.softcap * (plain / self.softcap).tanh()
        scale = float((wanted * plain).sum() / (plain * plain).sum().clamp(min=1e-12))
        if float((wanted - scale * plain).abs().max()) > _NEAR * float(wanted.abs().max()):
            raise UnsupportedTarget(
                f"{type(self.model).__name__} does more to its logits than a matrix and a factor (a bias, for one): "
                "drafters are trained against the matrix alone. Train on a target without it."
            )
        if abs(scale - 1) > _NEAR / 10:
            self._head = self.head * scale
        self._checked = True

    def _check_packing(self, ids: Tensor, documents: Tensor) -> None:
        """Compare the last text of a packed row with itself alone. Raises: ``UnsupportedTarget`` if they differ."""
        last = (documents[0] == documents[0].max()).nonzero()[:, 0]
        start = int(last[0])
        stop = int(last[-1]) + 1
        if start == 0:
            return  # one text: nothing to keep apart
        self._checked_packing = True
        alone = self._run(ids[:1, start:stop], None, None)[-1][0]
        packed = self._run(ids[:1], None, documents[:1])[-1][0, start:stop]
        if float((alone - packed).float().abs().max()) > _NEAR * float(alone.float().abs().max()):
            raise UnsupportedTarget(
                f"{type(self.model).__name__} lets packed texts see each other (it does not tell them apart by their "
                "positions): set packing=False."
            )


def joined(part: Tensor) -> Tensor:
    """Return the rows of all processes: those that share a model's layers must run the same batch."""
    return gather(pad_across_processes(part, dim=1))


def prepared(target: nn.Module, device: torch.device) -> PreTrainedModel:
    """Put a target in evaluation mode, without gradients, on ``device``; sharded, spread and quantised ones stay.

    Wrappers are taken off. Raises: ``UnsupportedTarget`` for soft prompts.
    """
    model = driven(target)
    model.eval().requires_grad_(False)
    return model.to(device) if _may_move(model) else model


def _may_move(model: PreTrainedModel) -> bool:
    """Tell whether a model is plain: sharded, spread and quantised ones have a place already."""
    settings = vars(model)
    plain = not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    return plain and not settings.get("hf_device_map") and settings.get("hf_quantizer") is None
