"""The door to the kernels counts what passes through it."""

from __future__ import annotations

import pytest
import torch

from hf_specgen import ops

LOGITS = torch.zeros(1, 3)


def test_calls_are_counted_by_operation_and_backend() -> None:
    with ops.record() as calls:
        ops.argmax(LOGITS)
        ops.argmax(LOGITS)
        ops.draw(LOGITS, torch.zeros(1, dtype=torch.float64))
    ops.argmax(LOGITS)
    assert calls == {("argmax", "reference"): 2, ("draw", "reference"): 1}


def test_records_nest() -> None:
    with ops.record() as outer:
        ops.argmax(LOGITS)
        with ops.record() as inner:
            ops.argmax(LOGITS)
    assert inner == {("argmax", "reference"): 1}
    assert outer == {("argmax", "reference"): 2}


def test_a_record_closes_when_its_block_fails() -> None:
    with pytest.raises(RuntimeError), ops.record() as calls:
        ops.argmax(LOGITS)
        raise RuntimeError
    ops.argmax(LOGITS)
    assert calls == {("argmax", "reference"): 1}
