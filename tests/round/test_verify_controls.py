"""Negative controls: every known way to bend the law must be seen by the checks that pass on the real code."""

from __future__ import annotations

import inspect
import itertools
import types
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from coin_boxes import BoxCoins, Case, Table, TableScores, check, fixed, logs, solve
from torch import Tensor

import hf_specgen.round.verify as verify_module
from hf_specgen import ops
from hf_specgen.kernels import reference
from hf_specgen.round.coins import ACCEPT, SAMPLE
from hf_specgen.round.records import DenseQ, Draft, Tree
from hf_specgen.round.verify import verify

VISIBLE = 1e-3  # a bent law is at least this far away; a sound one is within 1e-12

CHAIN = Case(Table(3, 1), (-1, 0), Table(3, 2))
DENSE_CHAIN = replace(CHAIN, sparse=False)
SIBLINGS = Case(Table(3, 1, zeros=False), (-1, -1, -1), Table(3, 4, zeros=False))
DISTINCT = Case(Table(4, 5, zeros=False), (-1, -1, -1), Table(4, 105, zeros=False), without_replacement=True)
BLOCK = Case(Table(3, 1), (-1, 0, 1), Table(3, 3), rule="block")
IMPOSSIBLE = Case(fixed("0", "1/2", "1/2"), (-1,), fixed("1/2", "1/4", "1/4"))
ONE_HOT_TWINS = Case(fixed("5/10", "3/10", "2/10"), (-1, -1), fixed("1", "0", "0"))
TREE = Case(Table(3, 3), (-1, -1, 0, 0, 1), drafts=((0, 1, 0, 2, 2), (1, 1, 2, 0, 0)))

MUTATIONS = {  # case, text in the reference, what a bug would have written
    "residual dropped, sparse": (CHAIN, "p.scatter_add(-1, q_ids, left - listed)", "p"),
    "residual dropped, dense": (DENSE_CHAIN, "torch.addcmul(shared, q, ratio, value=-1)", "shared.clone()"),
    "accepts at equality, so u = 0 accepts p = 0": (
        IMPOSSIBLE,
        "(p_k > 0) & (certain | drawn)",
        "(certain | (coins[:, k] * q_k * mass <= p_k * room))",
    ),
    "mass left out of the test": (SIBLINGS, "coins[:, k] * q_k * mass <", "coins[:, k] * q_k <"),
    "what earlier siblings took is forgotten": (SIBLINGS, "p_child[:, k] - scale * q_k", "p_child[:, k].clone()"),
    "scale grows by one and not by the mass": (SIBLINGS, "scale + mass / room", "scale + 1"),
    "scale ignores the renormalised q": (DISTINCT, "scale + mass / room", "scale + mass"),
    "test ignores the renormalised q": (DISTINCT, "< p_k * room  #", "< p_k  #"),
    "the rejected sibling stays in q": (DISTINCT, "torch.where(miss, room - q_k, left)", "left"),
    "identical children count twice": (ONE_HOT_TWINS, "torch.where(miss, scale + mass / room, scale)", "scale"),
    "block: surplus of p itself": (
        BLOCK,
        "_mass_left(pair, reach, torch.ones_like(reach))",
        "_mass_left(pair, torch.ones_like(reach), reach)",
    ),
    "block: h does not accumulate": (BLOCK, "p_token = reach * p_token", "pass"),
    "block: h not clipped": (
        BLOCK,
        "torch.where(certain, (q_token > 0).double(), p_token / q_token)",
        "torch.where(q_token > 0, p_token / q_token, 0.0)",
    ),
    "draw returns the next token": (
        TREE,
        "inside.gather(-1, place).squeeze(-1), prefix",
        "(inside.gather(-1, place).squeeze(-1) + 1) % weights.shape[-1], prefix",
    ),
}


def mutant(module: types.ModuleType, old: str, new: str) -> types.ModuleType:
    """Compile a module again with one piece of its text replaced."""
    text = inspect.getsource(module)
    assert text.count(old) == 1, f"the control no longer fits the source: {old!r}"
    copy = types.ModuleType(module.__name__)
    copy.__package__ = module.__package__
    exec(compile(text.replace(old, new), module.__name__, "exec"), copy.__dict__)
    return copy


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutant_of_the_reference_fails_the_law_check(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, old, new = MUTATIONS[name]
    check(case)
    bent = mutant(reference, old, new)
    for operation in ("accept_or_draw", "residual_draw", "block_step", "draw"):
        monkeypatch.setattr(ops, operation, bent.__dict__[operation])
    assert solve(case).error > VISIBLE


WALK_MUTATIONS = {
    "the full block passes like a part": (
        BLOCK,
        "torch.where(length == n_valid, coin < reach, passes & (length < n_valid))",
        "passes & (length <= n_valid)",
    ),
    "the shortest block wins": (
        BLOCK,
        "kept = (passes * length).amax(1)",
        "kept = (~passes).long().argmax(1).sub(1).clamp(0)",
    ),
    "the bonus token is drawn from a residual": (
        BLOCK,
        "(kept < n_valid.squeeze(1)).double()",
        "torch.ones_like(reach[:, 0])",
    ),
    "every depth tosses the first coin": (CHAIN, "table[rows, depth], draft.", "table[rows, 0], draft."),
    "siblings share a coin": (
        SIBLINGS,
        "_table(coins, draft, ACCEPT, siblings=children.shape[-1])",
        "_table(coins, draft, ACCEPT).expand(-1, -1, children.shape[-1])",
    ),
    "padding nodes match": (replace(TREE, n_valid=1), "edges.masked_fill(~_real(scores, draft), -1)", "edges"),
    "a child of another parent matches": (
        TREE,
        "(draft.tree.parents + 1) * scores.vocab_size",
        "0 * draft.tree.parents",
    ),
}


@pytest.mark.parametrize("name", WALK_MUTATIONS)
def test_a_mutant_of_the_walk_fails_the_law_check(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, old, new = WALK_MUTATIONS[name]
    check(case)
    monkeypatch.setattr("coin_boxes.verify", mutant(verify_module, old, new).verify)
    assert solve(case).error > VISIBLE


def test_a_tail_kept_after_a_rejection_fails_the_law_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain that is walked on after its first token was corrected keeps tokens whose prefix was not emitted."""

    def keeps_tail(scores: TableScores, draft: Draft, coins: BoxCoins, rule: str) -> object:
        verdict = verify(scores, draft, coins, rule)
        return replace(
            verdict,
            n=torch.full_like(verdict.n, draft.width),
            path=torch.arange(draft.width).expand(len(verdict.n), -1),
        )

    monkeypatch.setattr("coin_boxes.verify", keeps_tail)
    assert solve(CHAIN).error > VISIBLE


CELLS = 60  # the thresholds below are multiples of 1/60 or lie inside a cell by less than the tolerance


def grid_coins(rows_before: int, gamma: int) -> tuple[BoxCoins, Tensor]:
    """Every pair (accept, sample) of cell midpoints for each row; also which row each belongs to."""
    midpoints = (torch.arange(CELLS) + 0.5).double() / CELLS
    row, accept, sample = torch.cartesian_prod(torch.arange(rows_before), *[torch.arange(CELLS)] * 2).unbind(1)
    columns = (
        midpoints[accept].unsqueeze(1).expand(-1, gamma + 1),
        midpoints[sample].unsqueeze(1).expand(-1, gamma + 1),
    )
    return BoxCoins({(ACCEPT, 0): columns[0], (SAMPLE, 0): columns[1]}), row


def first_token_law(p: list[str], q: list[str], draft_of: Callable[[int, Tensor], Draft], gamma: int = 1) -> Tensor:
    """The law of the first token when x is drafted with chance q(x) and handed over as ``draft_of`` says."""
    law = fixed(*p)(())
    coins, token = grid_coins(len(p), gamma)
    draft = draft_of(gamma, token)
    scores = TableScores(logs([law] * (gamma + 1)).expand(len(token), -1, -1))
    verdict = verify(scores, draft, coins)
    first = torch.where(verdict.n > 0, token, verdict.next)
    weight = torch.tensor([float(Fraction(w)) for w in q], dtype=torch.float64)[token] / CELLS**2
    return torch.zeros(len(p), dtype=torch.float64).index_add_(0, first, weight)


def chain(token: Tensor, gamma: int, n_valid: Tensor, q: list[str]) -> Draft:
    tokens = token.unsqueeze(1).expand(-1, gamma)
    law = logs([fixed(*q)(())] * gamma).expand(len(token), -1, -1)
    return Draft(tokens, Tree.chain(gamma), n_valid, DenseQ(law))


def close(law: Tensor, *expected: float) -> bool:
    return bool((law - torch.tensor(expected, dtype=torch.float64)).abs().max() < 1e-12)


P, Q = ["5/10", "3/10", "2/10"], ["2/10", "6/10", "2/10"]


def test_the_grid_finds_the_sound_rule_sound() -> None:
    sound = first_token_law(P, Q, lambda gamma, x: chain(x, gamma, torch.ones_like(x), Q))
    assert close(sound, 0.5, 0.3, 0.2)


def test_resampling_from_p_gives_the_known_wrong_law(monkeypatch: pytest.MonkeyPatch) -> None:
    def resample(logits: Tensor, q_ids: Tensor, q: Tensor, tokens: Tensor, *rest: Tensor) -> object:
        accepted, choice, _, invalid = reference.accept_or_draw(logits, q_ids, q, tokens, *rest)
        return accepted, choice, reference.draw(logits, rest[1][:, -1])[0], invalid

    monkeypatch.setattr(ops, "accept_or_draw", resample)
    p, q = ["1/10", "3/10", "6/10"], ["4/10", "4/10", "2/10"]
    assert close(first_token_law(p, q, lambda gamma, x: chain(x, gamma, torch.ones_like(x), q)), 0.14, 0.42, 0.44)


def test_accepting_on_an_independent_sample_accepts_less() -> None:
    """A drafted sample handed over without its q is matched against p's own draw: right law, .32 in place of .70."""
    coins, token = grid_coins(3, 1)
    scores = TableScores(logs([fixed(*P)(())] * 2).expand(len(token), -1, -1))
    weight = torch.tensor([0.2, 0.6, 0.2], dtype=torch.float64)[token] / CELLS**2
    sampled = chain(token, 1, torch.ones_like(token), Q)
    assert float((verify(scores, sampled, coins).n * weight).sum()) == pytest.approx(0.7, abs=1e-12)
    assert float((verify(scores, replace(sampled, q=None), coins).n * weight).sum()) == pytest.approx(0.32, abs=1e-12)


def test_the_softmax_of_an_argmax_drafter_handed_over_as_q_is_a_bias() -> None:
    p = ["51/100", "49/100"]
    always_first = ["1", "0"]
    wrong = first_token_law(p, always_first, lambda gamma, x: chain(x, gamma, torch.ones_like(x), p))
    assert close(wrong, 1.0, 0.0)


def test_looking_at_the_token_before_verifying_it_is_a_bias() -> None:
    """Verify unless x = b, else sample p afresh (theory: the non-anticipating rule)."""
    wrong = first_token_law(P, Q, lambda gamma, x: chain(x, gamma, (x != 1).long(), Q))
    assert close(wrong, 0.5, 0.18, 0.32)


STEPS_PER_SECOND = (1.0, 0.5, 0.45)  # when 0, 1, 2 drafts are verified


def best_length(first: float, second: float) -> int:
    """Choose how many drafts to verify after looking at both confidences."""
    tokens = (1.0, 1 + first, 1 + first + first * second)
    return max(range(3), key=lambda length: tokens[length] * STEPS_PER_SECOND[length])


def length_slot_by_slot(first: float, second: float) -> int:
    """Admit one slot at a time; stop at the first that does not raise the expected throughput."""
    tokens = (1.0, 1 + first, 1 + first + first * second)
    rates = [expected * speed for expected, speed in zip(tokens, STEPS_PER_SECOND, strict=True)]
    return next((i for i, (now, more) in enumerate(itertools.pairwise(rates)) if more <= now), 2)


@pytest.mark.parametrize(("choose", "chance"), [(best_length, 0.85), (length_slot_by_slot, 0.70)])
def test_the_number_verified_may_not_depend_on_the_drafted_token(
    choose: Callable[[float, float], int], chance: float
) -> None:
    p, q = ["7/10", "3/10"], ["1/2", "1/2"]
    lengths = torch.tensor([choose(0.8, 0.9), choose(0.8, 0.0)])
    law = first_token_law(p, q, lambda gamma, x: chain(x, gamma, lengths[x], q), gamma=2)
    assert close(law, chance, 1 - chance)


def test_deterministic_twins_offered_twice_are_a_bias() -> None:
    """Redrawing for the second of two identical children gives .75; following the drawn token keeps p."""
    p = fixed("1/2", "3/10", "2/10")
    twins = Case(p, (-1, -1), drafts=((0, 0),))
    assert check(twins).accepted == pytest.approx(0.5, abs=1e-12)
    coins, rows = grid_coins(1, 1)
    scores = TableScores(logs([p(())] * 3).expand(len(rows), -1, -1))
    draft = Draft(torch.zeros(len(rows), 2, dtype=torch.long), Tree(torch.tensor([[-1, -1]])), torch.full_like(rows, 2))
    first = verify(scores, draft, BoxCoins({(SAMPLE, 0): coins.values[SAMPLE, 0]}))
    again = verify(scores, draft, BoxCoins({(SAMPLE, 0): coins.values[ACCEPT, 0]}))
    assert float(((first.n > 0) | (again.n > 0)).double().mean()) == pytest.approx(0.75, abs=1e-12)
