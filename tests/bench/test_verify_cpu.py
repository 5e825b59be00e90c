"""What verification reads and computes on CPU: rows on the path, once, and no sorts; its benchmark runs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_specgen.bench.dev import verify_cpu
from hf_specgen.round.verify import verify

VOCAB = 1000
CASES = {case.name: case for case in verify_cpu.CASES}


class Watch(TorchDispatchMode):
    """Count the rows of the vocabulary that each operation of torch works on."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sizes = [arg.numel() // VOCAB for arg in args if isinstance(arg, torch.Tensor) and arg.shape[-1:] == (VOCAB,)]
        self.rows[func.overloadpacket.__name__] += max(sizes, default=0)
        return func(*args, **(kwargs or {}))


def watched(name: str) -> tuple[Counter[str], int]:
    """Verify one round; return what ran, and how many nodes the walk visited."""
    scores, draft = verify_cpu.make_round(CASES[name], batch=4, gamma=8, vocab=VOCAB, seed=6)
    with Watch() as watch:
        verdict = verify(scores, draft, scores.coins(), CASES[name].rule)
    assert 0 < int(verdict.n.sum()) < 32, "some drafts must be cut for this to mean anything"
    return watch.rows, int((verdict.n + 1).sum())


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.rule != "block"])
def test_only_visited_nodes_are_normalised_and_nothing_is_sorted(name: str) -> None:
    rows, visited = watched(name)
    expected = {"greedy": 0, "gumbel": 0, "dense q chain": 2, "top-p .95": 2}.get(name, 1)
    assert rows["_softmax"] == expected * visited, "one softmax a law and visited node"
    assert not {"multinomial", "sort", "topk", "argsort"} & {op for op, count in rows.items() if count}


def test_the_straightforward_version_is_seen_to_do_all_of_it() -> None:
    """Negative control: every scored node is normalised, sorted and drawn from."""
    scores, draft = verify_cpu.make_round(CASES["top-p .95"], batch=4, gamma=8, vocab=VOCAB, seed=6)
    with Watch() as watch:
        verify_cpu.verify_plainly(CASES["top-p .95"], scores, draft)
    assert watch.rows["_softmax"] == 2 * 36 and watch.rows["multinomial"] == 36 and watch.rows["sort"] == 36


def test_the_benchmark_measures_every_case() -> None:
    measured = list(verify_cpu.measure_verify(batches=[2], gammas=[3], vocabs=[300], forward_ms=10.0, repeats=1))
    assert [row.case for row in measured] == list(CASES)
    for row in measured:
        assert row.ms > 0 and row.cpu_ms > 0 and row.plain_ms > 0
        assert row.share == pytest.approx(row.ms / 10.0)
