"""TargetFacts: what a drafter must know of its target, and the fingerprint that tells one target from another."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel

_SAMPLED_ROWS = 16


@dataclass(frozen=True)
class TargetFacts:
    """Hold a target's sizes, its name and its fingerprint (both may be empty when nobody told).

    Sizes that are not known are 0.
    """

    hidden_size: int = 0
    vocab_size: int = 0
    num_layers: int = 0
    name: str = ""
    fingerprint: str = ""
    model_type: str = ""

    @classmethod
    def of(cls, model: PreTrainedModel) -> TargetFacts:
        """Read the facts off a loaded target."""
        return replace(cls.of_config(model.config), fingerprint=fingerprint(model))

    @classmethod
    def of_config(cls, config: PretrainedConfig) -> TargetFacts:
        """Read the facts off a target's configuration; the fingerprint stays empty."""
        settings = config.get_text_config(decoder=True).to_dict()
        return cls(
            hidden_size=int(settings.get("hidden_size") or settings.get("n_embd") or 0),
            vocab_size=int(settings["vocab_size"]),
            num_layers=int(settings.get("num_hidden_layers") or settings.get("n_layer") or 0),
            name=str(config.name_or_path or ""),
            model_type=str(settings.get("model_type") or ""),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as plain values."""
        return asdict(self)


def fingerprint(model: PreTrainedModel) -> str:
    """Return 16 hex digits that tell one target from another, see ``fingerprint_of``."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    return fingerprint_of(embedding.weight, embedding.weight if head is None else head.weight)


def fingerprint_of(embedding: Tensor, head: Tensor) -> str:
    """Return 16 hex digits from the sizes and a few rows of embedding and head, as bfloat16: the same in every dtype.

    Fine-tuning often leaves the embedding alone, hence the head. Empty where a weight holds no plain numbers (meta
    device, packed quantized weights).
    """
    digest = hashlib.sha256()
    for weight in (embedding, head):
        if weight.device.type == "meta" or not weight.is_floating_point():
            return ""
        weight = whole(weight)
        rows = torch.linspace(0, weight.shape[0] - 1, _SAMPLED_ROWS, device=weight.device).long()
        sample = weight.detach()[rows].to("cpu", torch.float32).to(torch.bfloat16).view(torch.int16)
        digest.update(repr(tuple(weight.shape)).encode())
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()[:16]


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor that may be sharded over processes."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
