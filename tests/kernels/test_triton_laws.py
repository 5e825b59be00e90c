"""The law of what the Triton walks emit, enumerated through the kernels with coins just inside every box."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from coin_boxes import Case, Table, fixed, outcomes, weighted_drafts
from kernel_laws import BLOCK, CHAIN, DISTINCT, EVEN, SIBLINGS, THREE, TREE, P, Setting, law_error

triton = pytest.importorskip("triton")
from hf_specgen.kernels import triton_block, triton_walks  # noqa: E402 - after the guard

KERNELS = SimpleNamespace(
    match_tree=triton_walks.match_tree, reject_tree=triton_walks.reject_tree, block_chain=triton_block.block_chain
)


QUICK = {
    "deterministic tree": Setting(TREE),
    "one token, dense": Setting(replace(CHAIN, parents=(-1,), sparse=False)),
    "one token, sparse, truncated": Setting(Case(Table(4, 7), (-1,), Table(4, 2)), 0.5, True),
    "distinct siblings, sparse": Setting(DISTINCT),
    "a block of one": Setting(replace(BLOCK, parents=(-1,))),
}
SLOW = {
    "chain, sparse": Setting(CHAIN, 1.5),
    "chain, dense, truncated": Setting(replace(CHAIN, sparse=False), 0.7, True),
    "three siblings": Setting(replace(SIBLINGS, parents=(-1, -1, -1))),
    "siblings, dense": Setting(replace(SIBLINGS, sparse=False)),
    "distinct siblings, dense": Setting(replace(THREE, sparse=False)),
    "1-2": Setting(Case(Table(2, 3), (-1, 0, 0), Table(2, 4, zeros=False))),
    "1-2 distinct, dense": Setting(Case(P, (-1, 0, 0), EVEN, without_replacement=True, sparse=False)),
    "2-1, truncated": Setting(Case(Table(2, 3), (-1, -1, 0, 1), Table(2, 4, zeros=False)), 0.8, True),
    "cut short": Setting(replace(CHAIN, parents=(-1, 0, 1), n_valid=1)),
    "block": Setting(replace(BLOCK, parents=(-1, 0, 1)), 0.7),
    "block, dense, truncated": Setting(replace(BLOCK, sparse=False), 1.3, True),
    "block cut short": Setting(replace(BLOCK, parents=(-1, 0, 1), n_valid=2)),
    "certain drafter": Setting(Case(fixed("2/10", "5/10", "3/10"), (-1,), fixed("1", "0", "0"))),
    "disjoint": Setting(Case(fixed("0", "1"), (-1,), fixed("1", "0"), sparse=False)),
    "equal": Setting(Case(fixed("1/10", "3/10", "6/10"), (-1, 0), fixed("1/10", "3/10", "6/10"), rule="block")),
}


@pytest.mark.parametrize("name", QUICK)
def test_the_law(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert law_error(QUICK[name], monkeypatch, KERNELS) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_more_laws(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert law_error(SLOW[name], monkeypatch, KERNELS) < 1e-12


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*QUICK, *SLOW])
def test_the_law_on_a_card(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert law_error({**QUICK, **SLOW}[name], monkeypatch, on_the_card(KERNELS)) < 1e-12


def on_the_card(kernels: SimpleNamespace) -> SimpleNamespace:
    """Send the arguments of each operation to the card, and its answer back."""

    def there(operation: object) -> object:
        def run(*arguments: object) -> tuple[torch.Tensor, ...]:
            moved = [value.cuda() if isinstance(value, torch.Tensor) else value for value in arguments]
            return tuple(part.cpu() for part in operation(*moved))  # type: ignore[operator]

        return run

    return SimpleNamespace(**{name: there(operation) for name, operation in vars(kernels).items()})


def test_the_cases_are_no_trivial_ones() -> None:
    for setting in (*QUICK.values(), *SLOW.values()):
        drafts = list(weighted_drafts(setting.case))
        assert len(drafts) > 1 or setting.case.p((0,)) == setting.case.p((1,))
        assert any(len(list(outcomes(setting.case, draft))) > 1 for draft, _ in drafts) or len(drafts) == 1
