"""The benchmark of the losses and of whole training steps: it compares like with like, in processes of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_specgen.bench.dev import losses as bench
from hf_specgen.bench.dev import steps
from hf_specgen.errors import SpecGenError
from hf_specgen.trainers.losses import FORMULAS

SMALL = bench.LossCase(bench.PLAIN, tokens=64, vocab=100, width=8, repeats=1)


@pytest.mark.parametrize("kind", FORMULAS)
def test_the_benchmark_compares_like_with_like(kind: str) -> None:
    """All ways that are measured come to one loss and one gradient; a way that does not is refused."""
    for case in bench.cases_of([kind], [16], ["float32", "bfloat16"], SMALL):
        plain = bench.measure_here(replace(case, method=bench.PLAIN, chunk=0))
        found = bench.measure_here(case)
        bench.check_equal(plain, found)
        assert found.loss > 0 and found.by_states > 0 and (found.by_weight > 0) == case.trained
        with pytest.raises(SpecGenError, match="differ in by_states"):
            bench.check_equal(plain, replace(found, by_states=1.2 * found.by_states))


@pytest.mark.slow
def test_the_benchmark_measures_in_processes_of_their_own() -> None:
    """At a size where logits outweigh everything, the plain way takes three times the memory."""
    large = replace(SMALL, tokens=2048, vocab=16_384, width=64)
    plain, ours = bench.measure([large, replace(large, method=bench.OURS, chunk=256)])
    assert plain.peak > 3 * ours.peak > 0 and ours.cpu_seconds > 0
    assert bench.table([plain, ours]).row_count == 2


def test_steps_come_to_the_same() -> None:
    """A whole training step with the chunked loss is the plain one's: loss and gradient; another one is refused."""
    case = steps.StepCase(bench.PLAIN, steps.TINY, unroll=2, rows=2, length=16, repeats=1)
    plain, ours = steps.measure_here(case), steps.measure_here(replace(case, method=bench.OURS))
    steps.check_equal(plain, ours)
    assert plain.loss > 0 and plain.gradient > 0 and ours.cpu_seconds > 0
    with pytest.raises(SpecGenError, match="differ in gradient"):
        steps.check_equal(plain, replace(ours, gradient=1.2 * ours.gradient))


@pytest.mark.slow
def test_a_step_needs_a_third_of_the_plain_ones_memory() -> None:
    """Where logits outweigh everything else."""
    case = steps.StepCase(bench.PLAIN, replace(steps.TINY, vocab=32_768), rows=4, length=512, repeats=1, chunk=128)
    plain, ours = steps.measure(case), steps.measure(replace(case, method=bench.OURS))
    assert plain.peak > 3 * ours.peak > 0
    assert steps.table([plain, ours]).row_count == 2
