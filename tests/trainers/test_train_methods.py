"""Medusa, EAGLE and distillation train the same in every layout, and go on from a checkpoint as if never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import method_runs
import pytest
import train_runs as runs
from method_runs import METHODS

pytestmark = pytest.mark.slow

NEAR = 1e-6
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"per_device_train_batch_size": 8},
    "accumulated": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
}
TWO: dict[str, dict[str, Any]] = {
    "two": {"per_device_train_batch_size": 4},
    "both": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    "sparse": {"per_device_train_batch_size": 1, "supervised": False},
}
SPARSE = {"sparse": {"per_device_train_batch_size": 2, "supervised": False}}
EVALUATION = {"evaluation": {"run": "train_runs.evaluate", "per_device_eval_batch_size": 2}}


def jobs(layouts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        f"{method} {name}": {"maker": f"method_runs.{method}_trainer", "exact": True, **layout}
        for method in METHODS
        for name, layout in layouts.items()
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("methods")
    alone = runs.alone(jobs({**LAYOUTS, **SPARSE, **EVALUATION}), folder / "alone")
    shards = {f"{method} shard": {"run": "method_runs.shard", "method": method} for method in ("medusa", "distill")}
    together = runs.together({**jobs({**TWO, **EVALUATION}), **shards}, folder / "together")
    return {**alone, **{f"{name} in two": job for name, job in together.items()}}


def gap(one: list[float], other: list[float]) -> float:
    assert len(one) == len(other) > 0
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("layout", ["accumulated", "two in two", "both in two"])
@pytest.mark.parametrize("method", METHODS)
def test_four_layouts_are_one(method: str, layout: str, found: dict[str, Any]) -> None:
    """One process, two, accumulation, and both: the same losses, gradient norms and weights after 20 steps."""
    one, other = found[f"{method} one"], found[f"{method} {layout}"]
    assert other["world"] == (2 if layout.endswith("two") else 1) and len(one["loss"]) == runs.STEPS
    for name in ("loss", "grad_norm", "weights"):
        assert gap(one[name], other[name]) < NEAR, name
    assert other["spread"] == 0.0 and one["loss"][0] != one["loss"][-1]


@pytest.mark.parametrize("method", METHODS)
def test_a_process_without_supervised_tokens_does_not_hang(method: str, found: dict[str, Any]) -> None:
    """Steps in which one process has nothing to learn go on, and give what one process would give."""
    one, two = found[f"{method} sparse"], found[f"{method} sparse in two"]
    mine, theirs = two["items"]
    assert any((a == 0) is not (b == 0) for a, b in zip(mine, theirs, strict=True))
    assert gap(one["loss"], two["loss"]) < NEAR and gap(one["weights"], two["weights"]) < NEAR


@pytest.mark.parametrize("method", METHODS)
def test_evaluation_is_the_same(method: str, found: dict[str, Any]) -> None:
    """Five rows on two processes come to what they come to on one."""
    one, two = found[f"{method} evaluation"], found[f"{method} evaluation in two"]
    names = [name for name in one if name.startswith("eval_") and "second" not in name and "time" not in name]
    assert two["world"] == 2 and {"eval_loss", "eval_top1_1", "eval_acceptance_length"} <= set(names)
    assert all(abs(one[name] - two[name]) < NEAR for name in names)


@pytest.mark.parametrize("method", ["medusa", "distill"])
def test_fsdp_shards_what_learns(method: str, found: dict[str, Any]) -> None:
    """Gradients under ``fully_shard`` equal the whole one's; a distilled model's head is a unit of its own there."""
    errors, largest = (found[f"{method} shard in two"][name] for name in ("errors", "largest"))
    for name, error in errors.items():
        assert error < 1e-5 * max(1.0, largest[name]), name
        assert largest[name] > 1e-4, name


@pytest.mark.parametrize("method", METHODS)
def test_resuming_changes_no_bit(method: str, tmp_path: Path) -> None:
    """Twenty steps, and ten and ten more from the checkpoint, give the same traces and the same weights."""
    whole, again = method_runs.resumed(str(tmp_path), method)
    assert again["weights"] == whole["weights"]
    assert again["loss"] == whole["loss"] and again["grad_norm"] == whole["grad_norm"]
