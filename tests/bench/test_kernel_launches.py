"""A fused verdict launches its kernels and little else: counted on the made-up rounds of the kernels' clock."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_specgen import ops
from hf_specgen.bench.dev.kernel_bytes import Shape
from hf_specgen.bench.dev.kernel_cases import Inputs
from hf_specgen.round.records import DenseQ, Draft, Tree
from hf_specgen.round.verify_dense import Dense, verify_dense

pytest.importorskip("triton")


class Launched(TorchDispatchMode):
    """Count the operations of torch that would be launches on a GPU: views and allocations are none."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if func.namespace == "aten" and not func.is_view and name not in ("empty", "new_empty", "empty_like", "detach"):
            self.names[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("kind", "rule", "most", "truncated"),
    [
        ("greedy", "rejection", 0, False),
        ("plain", "rejection", 4, True),
        pytest.param("greedy", "rejection", 0, True, marks=pytest.mark.slow),
        pytest.param("plain", "rejection", 4, False, marks=pytest.mark.slow),
    ],
)
def test_little_is_launched_around_the_kernels(kind: str, rule: str, most: int, truncated: bool) -> None:
    check_launches(kind, rule, most, truncated)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "rule", "most"), [("q", "rejection", 8), ("q", "block", 8), ("plain", "gumbel", 4)])
def test_little_is_launched_around_the_other_walks(kind: str, rule: str, most: int) -> None:
    check_launches(kind, rule, most, False)


def check_launches(kind: str, rule: str, most: int, truncated: bool) -> None:
    """Count in a second round: what is the same in every round is there by then, whatever mode it was made in."""
    given = Inputs(Shape(2, 3, 300), torch.device("cpu"), torch.bfloat16)
    dense = Dense(given.logits, float(kind != "greedy"), *((20, 0.9, 0.01) if truncated else ()))
    q = DenseQ(given.q) if kind == "q" else None
    tokens = given.sampled if q else given.guesses
    verdicts = []
    for guard in (torch.inference_mode, torch.no_grad):
        draft = Draft(tokens, Tree.chain(3), given.n_valid, q)  # a tree of its own, as in every round
        with ops.use_kernels("triton"), guard(), Launched() as launched:
            verdicts.append(verify_dense(dense, draft, given.coins, rule))
    assert launched.names.total() <= most, launched.names
    assert all(torch.equal(*pair) for pair in zip(*(vars(each).values() for each in verdicts), strict=True))
