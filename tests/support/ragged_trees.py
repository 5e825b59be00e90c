"""Ragged rows and random trees."""

from __future__ import annotations

import random

import torch

from hf_specgen.round.records import Tree

LENGTHS = [5, 17, 11, 24]


def random_tree(chance: random.Random, rows: int, width: int) -> Tree:
    """Draw a tree a row, deep enough that paths of three nodes are common."""
    parents = [[chance.randint(max(-1, node - 3), node - 1) for node in range(width)] for _ in range(rows)]
    return Tree(torch.tensor(parents).view(rows, width))
