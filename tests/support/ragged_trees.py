"""Ragged rows, also in their ends, and random trees."""

from __future__ import annotations

import random

import torch
from transformers import StoppingCriteria

from hf_specgen.round.records import Tree

LENGTHS = [5, 17, 11, 24]


def random_tree(chance: random.Random, rows: int, width: int) -> Tree:
    """Draw a tree a row, deep enough that paths of three nodes are common."""
    parents = [[chance.randint(max(-1, node - 3), node - 1) for node in range(width)] for _ in range(rows)]
    return Tree(torch.tensor(parents).view(rows, width))


class RowBudget(StoppingCriteria):
    """End row ``r`` after its own number of new tokens: rows finish in any order wanted."""

    def __init__(self, width: int, budgets: list[int]) -> None:
        self.width, self.budgets = width, budgets

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        written = input_ids.shape[1] - self.width
        return torch.tensor([written >= budget for budget in self.budgets])
