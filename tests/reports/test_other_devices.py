"""Reported: sampling and dynamic trees failed in mid-text without float64 (MPS); a small model waited twice a round."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import disturbed, drafter_of, ours, plain, prompts, texts_of, tiny
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_specgen import PromptLookup, SmallModel, SpecGenError, ops


class NoDoubles(TorchDispatchMode):
    """Stand in for a device that has no float64: whatever makes such a tensor fails as it does on MPS."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if any(isinstance(part, Tensor) and part.dtype == torch.float64 for part in tree_leaves(made)):
            raise TypeError(f"Cannot convert a MPS Tensor to float64 dtype ({func})")
        return made


def test_the_device_is_asked() -> None:
    assert ops.has_doubles(torch.device("cpu"))
    with NoDoubles():
        assert not ops.has_doubles(torch.device("cpu"))


@pytest.mark.parametrize("kind", ["lookup", "branches", "small", "medusa", "eagle"])
def test_greedy_text_needs_no_doubles(kind: str) -> None:
    model, (ids, mask) = tiny(layers=3), prompts([9, 14])
    expected = plain(model, ids, mask, max_new_tokens=12)
    watch = drafter_of(kind, model, texts_of(expected, mask))
    with NoDoubles():
        found = ours(model, watch, ids, mask, max_new_tokens=12)
    assert torch.equal(found, expected) and watch.longest >= 2


@pytest.mark.parametrize("rule", ["rejection", "block", "gumbel", "typical"])
def test_sampling_is_refused_by_name(rule: str) -> None:
    model, (ids, mask) = tiny(), prompts([9])
    with NoDoubles(), pytest.raises(SpecGenError, match=r"do_sample=True on cpu: coins and sums are float64"):
        ours(model, PromptLookup(4), ids, mask, do_sample=True, rule=rule)


@pytest.mark.filterwarnings("ignore:.*lossy")
def test_a_lossy_rule_is_refused_by_name() -> None:
    model, (ids, mask) = tiny(), prompts([9])
    with NoDoubles(), pytest.raises(SpecGenError, match=r"rule=typical.* on cpu"):
        ours(model, PromptLookup(4), ids, mask, rule="typical")


def test_dynamic_trees_are_refused_by_name() -> None:
    model, (ids, mask) = tiny(layers=3), prompts([9])
    eagle = drafter_of("eagle dynamic", model, [[1, 2, 3]])
    medusa = drafter_of("medusa", model, [[1, 2, 3]])
    medusa.inner.config.tree = {"top_k": 2, "depth": 4, "nodes": 8}
    for drafter in (eagle, medusa):
        with NoDoubles(), pytest.raises(SpecGenError, match="a dynamic tree on cpu: coins and sums are float64"):
            ours(model, drafter, ids, mask)


def test_a_small_model_reads_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is read from the device makes the host wait: one read a round, the round's own, is enough."""
    readers: list[str] = []

    def counted(own: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: Tensor, *args: Any) -> Any:
            readers.append(sys._getframe(1).f_code.co_filename.rpartition("/")[2])
            return own(tensor, *args)

        return read

    for name in ("tolist", "item", "__bool__", "__int__", "__index__", "cpu"):
        monkeypatch.setattr(Tensor, name, counted(vars(Tensor).get(name) or getattr(Tensor, name)))
    model, (ids, mask) = tiny(), prompts([9, 14])
    small = SmallModel(disturbed(model), 3)
    found = ours(model, small, ids, mask, max_new_tokens=12)
    assert found.speculation.num_accepted_tokens > 0
    assert "records.py" in readers, "the round's own read is counted"
    assert "small_model.py" not in readers and "cached_model.py" not in readers
