"""The law of what the Triton walks emit, enumerated through the kernels; bugs put into them on purpose must show."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from coin_boxes import Case, Table, fixed, outcomes, solve, weighted_drafts
from kernel_mutants import mutate
from walk_cases import through

triton = pytest.importorskip("triton")
from hf_specgen.kernels import triton_block, triton_walks  # noqa: E402 - after the guard

MARGIN = 2e-5  # the kernels weigh in float32; coins stay this far from every edge
UNSEEN = 2e-3  # how much of the law may lie in those margins
VISIBLE = 4e-3  # a bent law is at least this far away; a sound one is within 1e-12
KERNELS = SimpleNamespace(
    match_tree=triton_walks.match_tree, reject_tree=triton_walks.reject_tree, block_chain=triton_block.block_chain
)


@dataclass(frozen=True)
class Setting:
    """How the kernels are told a law: its temperature, and whether only its threshold excludes tokens."""

    case: Case
    heat: float = 1.0
    hide: bool = False


P, Q, EVEN = Table(3, 1), Table(3, 2), Table(3, 4, zeros=False)
CHAIN = Case(P, (-1, 0), Q)
SIBLINGS = Case(Table(3, 1, zeros=False), (-1, -1), EVEN)
DISTINCT = Case(fixed("1/10", "3/10", "6/10"), (-1, -1), fixed("5/10", "3/10", "2/10"), without_replacement=True)
THREE = Case(Table(4, 5, zeros=False), (-1, -1, -1), Table(4, 105, zeros=False), without_replacement=True)
BLOCK = Case(P, (-1, 0), Table(3, 3), rule="block")
IMPOSSIBLE = Case(fixed("0", "1/2", "1/2"), (-1,), fixed("1/2", "1/4", "1/4"))
TREE = Case(Table(3, 3), (-1, -1, 0, 0, 1), drafts=((0, 1, 0, 2, 2), (1, 1, 2, 0, 0)))

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
    "distinct siblings, three of them": Setting(THREE),
    "1-2": Setting(Case(P, (-1, 0, 0), EVEN)),
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


def law_error(setting: Setting, monkeypatch: pytest.MonkeyPatch, kernels: object = KERNELS) -> float:
    """Drive the kernels through every box of coins; return how far their law is from the target's."""
    monkeypatch.setattr("coin_boxes.MARGIN", MARGIN)
    monkeypatch.setattr("coin_boxes.verify", through(kernels, setting.hide, setting.heat))  # type: ignore[arg-type]
    result = solve(setting.case)
    assert result.unseen < UNSEEN
    return result.error


@pytest.mark.parametrize("name", QUICK)
def test_the_law(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert law_error(QUICK[name], monkeypatch) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_more_laws(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert law_error(SLOW[name], monkeypatch) < 1e-12


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


SMALL = replace(CHAIN, parents=(-1,))
WALKS, LEFT, BLOCKS = "triton_walks.py", "triton_residual.py", "triton_block.py"
MUTATIONS = {  # case, file, its text, what a bug would have written
    "mass left out of the test": (SIBLINGS, WALKS, "* q_child * mass <", "* q_child <"),
    "accepts at equality, so u = 0 accepts p = 0": (
        IMPOSSIBLE,
        WALKS,
        "mass < p_child * room:",
        "mass <= p_child * room:",
    ),
    "scale ignores the renormalised q": (THREE, WALKS, "scale += mass / room", "scale += mass"),
    "scale grows by one and not by the mass": (SIBLINGS, WALKS, "scale += mass / room", "scale += 1.0"),
    "test ignores the renormalised q": (THREE, WALKS, "p_child * room:", "p_child:"),
    "the rejected sibling stays in q": (THREE, WALKS, "left = room - q_child", "left = left"),
    "what earlier siblings took is forgotten": (SIBLINGS, WALKS, " - scale * q_child", ""),
    "siblings share a coin": (SIBLINGS, WALKS, "tl.load(accept + rank)", "tl.load(accept)"),
    "every depth tosses the first coin": (CHAIN, WALKS, "(here + depth) * siblings", "here * siblings"),
    "padding nodes are offered": (
        replace(CHAIN, n_valid=1),
        WALKS,
        "counted = lane < tl.minimum(tl.load(n_valid + b), nodes)",
        "counted = lane < nodes",
    ),
    "a child of another parent matches": (
        TREE,
        WALKS,
        "(parent_of == node) & (token_of == token)",
        "(token_of == token)",
    ),
    "residual dropped, sparse": (SMALL, LEFT, "tl.maximum(rest - gone, 0.0)", "rest"),
    "residual dropped, dense": (
        replace(SMALL, sparse=False),
        LEFT,
        "tl.maximum(rest - take * draft_weights(q_row, index, index < q_vocab, q_top), 0.0)",
        "rest",
    ),
    "only the tail of the residual is drawn": (SMALL, LEFT, "coin * whole", "whole"),
    "block: h does not accumulate": (BLOCK, BLOCKS, "p_token = h * (", "p_token = ("),
    "block: surplus of p itself": (BLOCK, BLOCKS, "tl.maximum(h * p_of - q_of, 0.0)", "tl.maximum(p_of - q_of, 0.0)"),
    "block: the residual of p itself": (
        BLOCK,
        BLOCKS,
        "tl.store(shares + place * 2, h)",
        "tl.store(shares + place * 2, h * 0 + 1)",
    ),
    "block: h not clipped": (
        BLOCK,
        BLOCKS,
        "tl.where(p_token < q_token, p_token / q_token",
        "tl.where(q_token > 0, p_token / q_token",
    ),
    "block: a whole block always passes": (BLOCK, BLOCKS, "kept = tl.where(full, count, kept)", "kept = count"),
    "block: the shortest block wins": (
        BLOCK,
        BLOCKS,
        "kept = tl.where(full, count, kept)",
        "kept = tl.where(full & (kept == 0), count, kept)",
    ),
}
FIRST = "mass left out of the test"


def mutant_error(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> float:
    case, file, old, new = MUTATIONS[name]
    package = f"mutant_{list(MUTATIONS).index(name)}"
    walks, block = mutate(folder, package, file, old, new, ["triton_walks", "triton_block"])
    kernels = SimpleNamespace(match_tree=walks.match_tree, reject_tree=walks.reject_tree, block_chain=block.block_chain)
    return law_error(Setting(case), monkeypatch, kernels)


def test_a_mutant_of_the_kernels_fails_the_law_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert mutant_error(FIRST, tmp_path, monkeypatch) > VISIBLE


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MUTATIONS if name != FIRST])
def test_every_mutant_fails_the_law_check(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert mutant_error(name, tmp_path, monkeypatch) > VISIBLE


def test_a_threshold_that_is_not_read_fails_the_law_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = "tl.where(kept & inside, weights", "tl.where(inside, weights"
    (walks,) = mutate(tmp_path, "mutant_kept", LEFT, old, new, ["triton_walks"])
    setting = Setting(Case(fixed("1/2", "0", "1/2"), (-1,), fixed("1/4", "1/2", "1/4")), hide=True)
    assert law_error(setting, monkeypatch) < 1e-12
    assert law_error(setting, monkeypatch, walks) > VISIBLE


def test_the_cases_are_no_trivial_ones() -> None:
    for setting in (*QUICK.values(), *SLOW.values()):
        drafts = list(weighted_drafts(setting.case))
        assert len(drafts) > 1 or setting.case.p((0,)) == setting.case.p((1,))
        assert any(len(list(outcomes(setting.case, draft))) > 1 for draft, _ in drafts) or len(drafts) == 1
