"""TargetParts: what a drafter borrows from its target, and the few rows of its head that a short vocabulary reads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hf_specgen.errors import IncompatibleDrafter
from hf_specgen.models.facts import TargetFacts, holds_numbers, whole
from hf_specgen.models.wrappers import gives_each_row_its_adapter

_CLOSE = 0.02  # of the largest logit: two kernels of one matrix differ by less, also in bfloat16
_SAMPLED_ROWS = 16


@dataclass(frozen=True)
class HeadRows:
    """Hold a copy of some rows of the target's head: ``weight (n, H)`` and ``bias (n)`` of the target's ``ids (n)``.

    ``source`` and ``version`` tell when the head's weight has changed since.
    """

    ids: Tensor
    weight: Tensor
    bias: Tensor | None
    source: Tensor
    version: int

    @classmethod
    def of(cls, head: nn.Module, ids: Tensor, device: torch.device) -> HeadRows:
        """Gather rows of a head. Raises: ``IncompatibleDrafter`` for a head that is more than a matrix and a bias."""
        parameters = dict(head.named_parameters())
        source = parameters.get("weight")
        bias = parameters.get("bias")
        plain = source is not None and source.dim() == 2 and holds_numbers(source)
        if plain and source is not None:
            places = ids.to(source.device)
            weight = whole(source.detach())[places]
            some = None if bias is None else whole(bias.detach())[places]
            with torch.no_grad():
                telling = int(weight.abs().amax(1).argmax())  # rows of unused ids may be zeros
                probe = weight[telling : telling + 1]
                due = head(probe)[:, places]
                gap = float((F.linear(probe, weight, some) - due).abs().max())
            if gap <= _CLOSE * float(due.abs().max()):
                some = None if some is None else some.to(device)
                return cls(ids.to(device), weight.to(device), some, source, _version(source))
        raise IncompatibleDrafter(
            f"the drafter reads {len(ids)} rows of the target's head, and that head ({type(head).__name__}) is more "
            "than a matrix of floats with a bias, or lies elsewhere: a plain linear layer in memory is required. Merge "
            "adapters, load the target unquantised, or take the drafter before it was shortened."
        )

    def belong_to(self, head: nn.Module, ids: Tensor | None) -> bool:
        """Tell whether they are still the rows ``ids`` of a head.

        Fused optimizers and ``weight.data`` write past the version, so some rows are compared.
        """
        source = dict(head.named_parameters()).get("weight")
        same = source is self.source and _version(self.source) == self.version
        return same and ids is not None and torch.equal(self.ids, ids.to(self.ids.device)) and self._seem_the_same()

    def _seem_the_same(self) -> bool:
        source = self.source.detach()
        if source.is_meta or isinstance(source, DTensor):  # not here, or to be gathered by all processes at once
            return True
        some = torch.linspace(0, len(self.ids) - 1, _SAMPLED_ROWS, device=self.ids.device).long()
        now = source[self.ids[some].to(source.device)].to(self.weight.device)
        return now.dtype == self.weight.dtype and torch.equal(now, self.weight[some])


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


@dataclass(frozen=True)
class TargetParts:
    """Hold what a drafter borrows from its target: never saved, never trained with it, copied in ``rows`` alone."""

    facts: TargetFacts
    embedding: Tensor
    head: nn.Module
    device: torch.device
    dtype: torch.dtype
    scale: float = 1.0
    cap: float | None = None
    rows: HeadRows | None = None

    def logits(self, states: Tensor) -> Tensor:
        """Return what the target makes of states ``(..., H)`` behind its final norm: its head, its factor, its cap.

        With ``rows`` over their ids alone.
        """
        states_here = states.to(self.dtype)
        if self.rows is None:
            scores = cast(Tensor, self.head(states_here))
        else:
            scores = F.linear(states_here, self.rows.weight, self.rows.bias)
        scores = scores.to(states.device)  # the head of a model spread over devices may be on another one
        scores = scores if self.scale == 1 else scores * self.scale
        return scores if self.cap is None else self.cap * torch.tanh(scores / self.cap)

    def belong_to(self, model: PreTrainedModel, ids: Tensor | None = None) -> bool:
        """Tell whether they are still a model's: it may have moved, or have got another head.

        ``ids``: the rows of the head that are wanted, None for all.
        """
        embedding = model.get_input_embeddings()
        head = model.get_output_embeddings()
        same = embedding is not None and embedding.weight is self.embedding and head is self.head
        facts = replace(TargetFacts.of_config(model.config), fingerprint=self.facts.fingerprint) if same else None
        fits = facts == self.facts and (self.embedding.device, model.dtype) == (self.device, self.dtype)
        fits = fits and not gives_each_row_its_adapter(self.head)
        return fits and (ids is None if self.rows is None else self.rows.belong_to(self.head, ids))

    def narrowed(self, ids: Tensor | None) -> TargetParts:
        """Return them with some rows of the head, see ``HeadRows.of``; None: the whole head."""
        return replace(self, rows=None if ids is None else HeadRows.of(self.head, ids, self.device))

    @property
    def head_size(self) -> int:
        """Return how many weights a drafted token reads of the head."""
        return sum(part.numel() for part in self.head.parameters()) if self.rows is None else self.rows.weight.numel()

    @classmethod
    def of(cls, model: PreTrainedModel) -> TargetParts:
        """Take the parts of a target. Raises: ``IncompatibleDrafter`` for a model without a language-model head."""
        embedding = model.get_input_embeddings()
        head = model.get_output_embeddings()
        if embedding is None or head is None:
            raise IncompatibleDrafter(
                f"{type(model).__name__} has no token embedding or no language-model head: a causal language model is "
                "required. Load the target with AutoModelForCausalLM."
            )
        weight = whole(cast(Tensor, embedding.weight))
        if weight.is_meta or any(part.is_meta for part in head.parameters()):
            raise IncompatibleDrafter(
                f"the embedding or the head of {type(model).__name__} is offloaded, and a learned drafter reads both "
                "in every round: weights in memory are required. Give them a device in device_map=, or use a drafter "
                "that borrows nothing, such as PromptLookup or SmallModel."
            )
        if gives_each_row_its_adapter(head):
            raise IncompatibleDrafter(
                f"adapter_names= was given and the head of {type(model).__name__} has an adapter: a learned drafter "
                "runs the head over rows of its own, so one adapter for all rows is required there. Use a drafter that "
                "borrows nothing, such as PromptLookup or SmallModel."
            )
        return cls(TargetFacts.of(model), weight, head, weight.device, model.dtype, *_behind_head(model))


def _behind_head(model: PreTrainedModel) -> tuple[float, float | None]:
    """Return by what a target multiplies its head's output, and at what it caps it (None: it does not)."""
    settings = model.config.get_text_config(decoder=True).to_dict()
    scale = float(settings.get("logit_scale") or 1.0)
    scaling = float(settings.get("logits_scaling") or 1.0)
    if not str(settings.get("model_type")).startswith("hyperclovax"):  # it multiplies by what Granite divides by
        scaling = 1.0 / scaling
    cap = settings.get("final_logit_softcapping")
    return scale * scaling, float(cap) if cap else None
