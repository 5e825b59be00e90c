"""TargetFacts: what a drafter must know of its target, and the fingerprint that tells one target from another."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel

_SAMPLED_ROWS = 16
# What is paid beside reading weights, in weights: by a decoder layer (norms, rope, attention, many small products and
# the Python between them), by a pass of a model (masks, picking a token, the loop), and by a drafted token beside its
# layers and its head. Measured on a 2-core CPU (docs/benchmarks.md); large models hide all three.
LAYER_OVERHEAD = 5_000_000
PASS_OVERHEAD = 8_000_000
TOKEN_OVERHEAD = 3_000_000
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k")


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


def logits_width(model: PreTrainedModel) -> int:
    """Return how many logits a model gives, V: its head's rows, which may be more or fewer than its config's ids."""
    head = model.get_output_embeddings()
    known = model.config.get_text_config(decoder=True).vocab_size
    return head.out_features if isinstance(head, nn.Linear) else int(known)


def step_size(model: PreTrainedModel) -> int:
    """Return what a pass over one token costs, in weights read: matrices, and what is paid beside them.

    An embedding is looked up, so it counts only where it is the head too; of a layer's experts those that a token
    takes count, of encoders of pictures and sound nothing.
    """
    settings = model.config.get_text_config(decoder=True).to_dict()
    experts, chosen = (_first_number(settings, names) for names in (_EXPERTS, _CHOSEN))
    head = model.get_output_embeddings()
    unread = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    unread -= set() if head is None else {id(weight) for weight in head.parameters()}
    own = (model.config.model_type, settings.get("model_type"))
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and part.config.model_type not in own:
            unread.update(map(id, part.parameters()))
    found = PASS_OVERHEAD + LAYER_OVERHEAD * TargetFacts.of_config(model.config).num_layers
    for name, weight in model.named_parameters():
        shared = weight.dim() == 3 and len(weight) == experts
        if experts > chosen > 0 and (shared or ".experts." in name):
            found += weight.numel() * chosen // experts
        elif id(weight) not in unread:
            found += weight.numel()
    return found


def _first_number(settings: dict[str, Any], names: tuple[str, ...]) -> int:
    return next((settings[name] for name in names if isinstance(settings.get(name), int)), 0)


def fingerprint(model: PreTrainedModel) -> str:
    """Return 16 hex digits that tell one target from another, see ``fingerprint_of``."""
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    return fingerprint_of(embedding.weight, embedding.weight if head is None else head.weight)


def fingerprint_of(embedding: Tensor, head: Tensor) -> str:
    """Return 16 hex digits from the sizes and a few rows of embedding and head, as bfloat16: the same in every dtype.

    Fine-tuning often leaves the embedding alone, hence the head. Empty where a weight holds no plain numbers (meta
    device, packed quantized weights).
    """
    digest = hashlib.sha256()
    for weight in (embedding, head):
        if not holds_numbers(weight):
            return ""
        weight = whole(weight)
        rows = torch.linspace(0, weight.shape[0] - 1, _SAMPLED_ROWS, device=weight.device).long()
        sample = weight.detach()[rows].to("cpu", torch.float32).to(torch.bfloat16).view(torch.int16)
        digest.update(repr(tuple(weight.shape)).encode())
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()[:16]


def other_layers(model: PreTrainedModel, marks: Mapping[str, str]) -> list[str]:
    """Return the weights of a model that are not those that ``marks`` (name to ``fingerprint_of``) were made from.

    Weights that the model lacks or that hold no plain numbers are not judged.
    """
    weights = dict(model.named_parameters())
    made = {name: fingerprint_of(weights[name], weights[name]) for name in marks if name in weights}
    return sorted(name for name, mark in made.items() if mark and mark != marks[name])


def holds_numbers(weight: Tensor) -> bool:
    """Tell whether a weight is plain floats in memory, sharded or not, so that rows of it can be read and copied.

    Packed weights may pose as floats: a tensor's subclass that multiplies, and knows nothing else (torchao's do).
    """
    plain = isinstance(weight, DTensor) or type(weight) in (Tensor, nn.Parameter)
    return plain and weight.is_floating_point() and weight.device.type != "meta"


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor that may be sharded over processes."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
