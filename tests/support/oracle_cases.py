"""Runs of drafters that know their target."""

from __future__ import annotations

import torch
from oracle import (
    VOCAB,
)
from tiny import Watch

BUDGET = 15


SHAPES = {
    "chain": ({"tree": "chain", "num_tokens": 4}, 4),
    "static": ({"tree": [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 0], [0, 0, 0, 0]]}, 4),
    "dynamic": ({"tree": {"top_k": 3, "depth": 5, "nodes": 12}}, 5),
}


def random_prompts(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random left-padded prompts and their mask."""
    source = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.randint(0, VOCAB, (len(lengths), width), generator=source)
    mask = torch.stack([torch.arange(width) >= width - length for length in lengths]).long()
    return ids * mask, mask


def judged(watch: Watch, depth: int, budget: int = BUDGET) -> tuple[int, int]:
    """Count the rounds of rows that could accept something, and those that accepted less than depth and room allow."""
    found = rounds = 0
    for row in range(len(watch.rounds[0].paths)):
        new = 1
        for round in watch.rounds[1:]:
            if new >= budget:
                break
            accepted, due = len(round.paths[row]), min(depth, budget - new - 1)
            found += accepted < due
            rounds += due > 0
            new += accepted + 1
    assert rounds >= 2
    return rounds, found
