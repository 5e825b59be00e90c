"""Bugs put into the Triton walks on purpose must show in the law check that the real ones pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from coin_boxes import Case, fixed
from kernel_laws import (
    BLOCK,
    CHAIN,
    IMPOSSIBLE,
    PAIR,
    SIBLINGS,
    THREE,
    TREE,
    VISIBLE,
    Setting,
    law_error,
    mutate,
)

triton = pytest.importorskip("triton")

SMALL = replace(CHAIN, parents=(-1,))
WALKS, LEFT, BLOCKS = "triton_walks.py", "triton_residual.py", "triton_block.py"
MUTATIONS = {  # case, file, its text, what a bug would have written
    "mass left out of the test": (SIBLINGS, WALKS, "* q_child * mass <", "* q_child <"),
    "accepts at equality, so u = 0 accepts p = 0": (
        IMPOSSIBLE,
        WALKS,
        "(p_left > 0.0) & (certain | drawn)",
        "certain | (tl.load(accept + rank) * q_child * mass <= p_left * room)",
    ),
    "scale ignores the renormalised q": (PAIR, WALKS, "scale += mass / room", "scale += mass"),
    "scale grows by one and not by the mass": (SIBLINGS, WALKS, "scale += mass / room", "scale += 1.0"),
    "test ignores the renormalised q": (THREE, WALKS, "< p_left * room  #", "< p_left  #"),
    "the rejected sibling stays in q": (PAIR, WALKS, "left = room - q_child", "left = left"),
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
        "(parent_of >= node) & (token_of == token)",
    ),
    "residual dropped, sparse": (SMALL, LEFT, "without_noise(rest - gone, rest)", "rest"),
    "residual dropped, dense": (
        replace(SMALL, sparse=False),
        LEFT,
        "without_noise(rest - take * draft_weights(q_row, index, index < q_vocab, q_top), rest)",
        "rest",
    ),
    "only the head of the residual is drawn": (SMALL, LEFT, "+ depth) * whole", "+ depth) * 0.5 * whole"),
    "block: h does not accumulate": (BLOCK, BLOCKS, "p_token = h * (", "p_token = ("),
    "block: surplus of p itself": (
        BLOCK,
        BLOCKS,
        "without_noise(h * p_of - q_of, h * p_of)",
        "without_noise(p_of - q_of, p_of)",
    ),
    "block: the residual of p itself": (
        BLOCK,
        BLOCKS,
        "tl.store(shares + place * 2, h)",
        "tl.store(shares + place * 2, h * 0 + 1)",
    ),
    "block: h not clipped": (
        BLOCK,
        BLOCKS,
        "tl.where(p_token >= q_token * (1.0 - NOISE), possible.to(tl.float64), ratio)",
        "tl.where(possible, ratio, 0.0)",
    ),
    "block: a whole block always passes": (BLOCK, BLOCKS, "kept = tl.where(full, count, kept)", "kept = count"),
    "block: the shortest block wins": (
        BLOCK,
        BLOCKS,
        "kept = tl.where(full, count, kept)",
        "kept = tl.where(full & (kept == 0), count, kept)",
    ),
}
QUICK = ["accepts at equality, so u = 0 accepts p = 0", "residual dropped, dense"]


def mutant_error(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> float:
    case, file, old, new = MUTATIONS[name]
    package = f"mutant_{list(MUTATIONS).index(name)}"
    walks, block = mutate(folder, package, file, old, new, ["triton_walks", "triton_block"])
    kernels = SimpleNamespace(match_tree=walks.match_tree, reject_tree=walks.reject_tree, block_chain=block.block_chain)
    return law_error(Setting(case), monkeypatch, kernels)


@pytest.mark.parametrize("name", QUICK)
def test_a_mutant_of_the_kernels_fails_the_law_check(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert mutant_error(name, tmp_path, monkeypatch) > VISIBLE


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MUTATIONS if name not in QUICK])
def test_every_mutant_fails_the_law_check(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert mutant_error(name, tmp_path, monkeypatch) > VISIBLE


@pytest.mark.slow
def test_a_threshold_that_is_not_read_fails_the_law_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = "tl.where(kept & inside, weights", "tl.where(inside, weights"
    (walks,) = mutate(tmp_path, "mutant_kept", LEFT, old, new, ["triton_walks"])
    setting = Setting(Case(fixed("1/2", "0", "1/2"), (-1,), fixed("1/4", "1/2", "1/4")), hide=True)
    (sound,) = mutate(tmp_path, "mutant_none", LEFT, old, old, ["triton_walks"])
    assert law_error(setting, monkeypatch, sound) < 1e-12
    assert law_error(setting, monkeypatch, walks) > VISIBLE
