"""Settings of learned drafters whose law is enumerated."""

from __future__ import annotations

import torch
from tiny import tiny

from hf_specgen import Drafter, SpeculativeDecoding

WIDE = [[0], [1], [0, 0], [0, 1], [1, 0], [1, 1], [0, 0, 0]]


SHAPES: dict[str, dict[str, object]] = {
    "chain": {"tree": "chain", "num_tokens": 3},
    "static": {"tree": WIDE},
    "dynamic": {"tree": {"top_k": 2, "depth": 3, "nodes": 6}},
}


SETTINGS = {
    "plain": {"top_k": 0},
    "temperature, top-k": {"temperature": 0.7, "top_k": 3},
    "top-p, repetition": {"top_p": 0.8, "repetition_penalty": 1.4, "top_k": 0},
}


def model_of(vocab: int):
    """Build a model with a flat law, in float64."""
    return tiny(0, vocab=vocab, initializer_range=0.2).double()


def prompt(vocab: int) -> torch.Tensor:
    return torch.randint(1, vocab, (1, 6), generator=torch.Generator().manual_seed(5))


def draw(model, drafter: Drafter | None, count: int, rule: str = "rejection", tokens: int = 4, **settings):
    """Sample ``count`` texts, two tokens more than are compared; return the compared ones."""
    ids = prompt(model.config.vocab_size).repeat(count, 1)
    loop = SpeculativeDecoding(drafter, rule)
    asked = {"attention_mask": torch.ones_like(ids), "custom_generate": loop, "do_sample": True, "seed": 0}
    return model.generate(ids, **asked, max_new_tokens=tokens + 2, **settings)[:, 6 : 6 + tokens]
