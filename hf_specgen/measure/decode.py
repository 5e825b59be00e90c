"""Decode a batch once: every text that is compared or timed, here and in the trainers, comes from ``decode``."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from hf_specgen.generate import SpeculativeDecoding
from hf_specgen.models.wrappers import input_device
from hf_specgen.round.stats import AcceptanceStats

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Output:
    """Hold the new tokens of each row, up to and including the end of sequence, and our statistics if it was us."""

    rows: list[list[int]]
    stats: AcceptanceStats | None = None


def decode(model: Any, inputs: Inputs, loop: SpeculativeDecoding | None = None, **settings: Any) -> Output:
    """Call ``model.generate()`` once, with our loop or (None) without it, and return the new tokens.

    ``settings`` are arguments of ``generate()``; they or the ``generation_config`` among them must ask for a
    dictionary (``return_dict_in_generate``).
    """
    if loop is None:
        plain = model.generate(**inputs, **settings)
        return Output(cut(model, inputs, plain.sequences))
    ours = model.generate(**inputs, custom_generate=loop, **settings)
    return Output(cut(model, inputs, ours.sequences), ours.speculation)


def cut(model: Any, inputs: Inputs, sequences: Tensor) -> list[list[int]]:
    """Return each row's new tokens up to and including its first end of sequence."""
    eos = model.generation_config.eos_token_id
    ends = set(eos if isinstance(eos, list) else [eos])
    rows = []
    for row in sequences[:, inputs["input_ids"].shape[1] :].tolist():
        stop = next((i for i, token in enumerate(row) if token in ends), len(row))
        rows.append(row[: stop + 1])
    return rows


def one_row(model: Any, prompt: Sequence[int]) -> Inputs:
    """Return the inputs of a batch of one prompt without padding. Shapes: ``(1, T)``."""
    ids = torch.tensor([list(prompt)], device=input_device(model))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def greedy_config(model: Any, max_new_tokens: int) -> GenerationConfig:
    """Return a copy of the model's generation config that decodes greedily, one beam, into a dictionary."""
    config: GenerationConfig = copy.deepcopy(model.generation_config) or GenerationConfig()
    config.update(do_sample=False, num_beams=1, temperature=None, top_k=None, top_p=None)
    config.update(max_new_tokens=max_new_tokens, max_length=None, return_dict_in_generate=True)
    return config
