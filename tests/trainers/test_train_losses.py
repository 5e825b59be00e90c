"""The chunked losses against plain autograd in float64: values, gradients, what is kept, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tiny import some
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_specgen.errors import SpecGenError
from hf_specgen.trainers import losses
from hf_specgen.trainers.losses import FORMULAS, HeadLoss, Laws, Objective, Slope

N, H, D, V, DRAFT, TEACHERS = 23, 6, 5, 19, 11, 9
KINDS = tuple(FORMULAS)


@dataclass
class Case:
    """Hold the inputs of one call; ``shared``: several rows have one teacher state."""

    states: Tensor
    weight: Tensor
    teacher_states: Tensor
    teacher_weight: Tensor
    weights: Tensor
    labels: Tensor
    rows: Tensor | None
    index: Tensor | None

    def run(self, objective: Objective) -> HeadLoss:
        return objective(
            self.states,
            self.weight,
            self.teacher_states,
            self.teacher_weight,
            self.weights,
            labels=self.labels,
            rows=self.rows,
            index=self.index,
        )


def make(reduced: bool = False, shared: bool = False, dtype: torch.dtype = torch.float64, frozen: bool = False) -> Case:
    source = torch.Generator().manual_seed(5 + 2 * reduced + shared)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=source, dtype=torch.float64).to(dtype)

    rows = torch.randperm(V, generator=source)[:DRAFT] if reduced else None
    index = torch.randint(0, TEACHERS, (N,), generator=source) if shared else None
    teacher, head = normal(TEACHERS if shared else N, D), normal(V, D)
    seen = teacher if index is None else teacher[index]
    likely = (seen @ head.T).argmax(-1)  # the drafter is like its target, and labels are often the best token
    return Case(
        torch.cat((seen + 0.7 * normal(N, D), normal(N, H - D)), 1).requires_grad_(),
        torch.cat((head if rows is None else head[rows], normal(V, H - D)[: DRAFT if reduced else V]), 1)
        .detach()
        .requires_grad_(not frozen),
        teacher,
        head,
        torch.rand(N, generator=source, dtype=torch.float64) * (torch.arange(N) % 5 != 3),
        torch.where(torch.arange(N) % 2 == 0, likely, torch.randint(0, V, (N,), generator=source)),
        rows,
        index,
    )


@dataclass
class Naive:
    """Hold what the plain version says."""

    loss: Tensor
    hits: Tensor
    alpha: Tensor
    match: Tensor
    ratio: Tensor


def naive(case: Case, objective: Objective) -> Naive:
    """Write every loss down as its definition, over whole tensors."""
    rows = torch.arange(len(case.weight)) if case.rows is None else case.rows
    index = torch.arange(N) if case.index is None else case.index
    teacher = case.teacher_states.double()[index] @ case.teacher_weight.double().T
    if objective.softcap is not None:
        teacher = objective.softcap * (teacher / objective.softcap).tanh()
    all_p = (teacher / objective.temperature).softmax(-1)
    scores = case.states.double() @ case.weight.double().T
    if objective.softcap is not None and objective.borrows:
        scores = objective.softcap * (scores / objective.softcap).tanh()
    q = (scores / objective.temperature).softmax(-1)
    part = all_p[:, rows]
    p = part / part.sum(-1, keepdim=True)
    m = objective.beta * p + (1 - objective.beta) * q
    scattered = torch.zeros_like(all_p).index_copy(1, rows, q)
    overlap = torch.minimum(all_p, scattered).sum(-1)
    at_label = scattered.gather(1, case.labels[:, None])[:, 0]
    known, best = torch.isin(case.labels, rows), torch.isin(all_p.argmax(-1), rows)
    values = {
        "kl": (p * (p / q).log()).sum(-1),
        "rkl": (q * (q / p).log()).sum(-1),
        "tv": 0.5 * (all_p - scattered).abs().sum(-1),
        "lk": -overlap.log(),
        "ce": -torch.where(known, at_label, 1.0).log(),
        "jsd": objective.beta * (p * (p / m).log()).sum(-1) + (1 - objective.beta) * (q * (q / m).log()).sum(-1),
    }
    counted = known if objective.kind == "ce" else best | torch.tensor(not objective.gate)
    loss = (values[objective.kind] * case.weights * counted).sum()
    p_label = all_p.gather(1, case.labels[:, None])[:, 0]
    hits, match = rows[q.argmax(-1)] == all_p.argmax(-1), rows[q.argmax(-1)] == case.labels
    return Naive(loss, hits, overlap, match, (at_label / p_label).clamp(max=1))


def gradients(loss: Tensor, case: Case) -> list[Tensor]:
    wanted = [tensor for tensor in (case.states, case.weight) if tensor.requires_grad]
    return list(torch.autograd.grad(loss, wanted))


def difference(case: Case, objective: Objective) -> float:
    """Return the largest difference from the plain version, of the loss and of all gradients."""
    found, plain = case.run(objective), naive(case, objective)
    pairs = [(found.loss_sum, plain.loss)]
    pairs += list(zip(gradients(found.loss_sum * 1.7, case), gradients(plain.loss * 1.7, case), strict=True))
    return max(float((ours - theirs).detach().abs().max()) for ours, theirs in pairs)


@pytest.mark.parametrize(("kind", "reduced", "shared"), some(KINDS, (False, True), (False, True)))
def test_values_and_gradients_are_autograds(kind: str, reduced: bool, shared: bool) -> None:
    for chunk in (1, 5, 64):
        assert difference(make(reduced, shared), Objective(kind, chunk)) < 1e-13
        assert difference(make(reduced, shared, frozen=True), Objective(kind, chunk)) < 1e-13
    odd = Objective(kind, 4, beta=0.3, temperature=0.7, softcap=2.0, gate=False)
    capped = replace(odd, borrows=True)
    for case in (make(reduced, shared), make(reduced, shared, frozen=True)):
        assert difference(case, odd) < 1e-13 and difference(case, capped) < 1e-13
    assert abs(float((case.run(odd).loss_sum - case.run(capped).loss_sum).detach())) > 1e-3


def _broken(kind: str) -> Callable[[Laws], tuple[Tensor, Slope]]:
    """Return a loss whose slope is that of its neighbour in the table: right values, wrong gradients."""
    other = KINDS[(KINDS.index(kind) + 1) % len(KINDS)]

    def formula(laws: Laws) -> tuple[Tensor, Slope]:
        copy = replace(laws, **{name: getattr(laws, name).clone() for name in ("log_q", "q", "log_p", "p", "spare")})
        return FORMULAS_BEFORE[kind](laws)[0], FORMULAS_BEFORE[other](copy)[1]

    return formula


FORMULAS_BEFORE = dict(FORMULAS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_slope_is_seen(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(losses.FORMULAS, kind, _broken(kind))
    assert difference(make(), Objective(kind, 5)) > 1e-3


@pytest.mark.parametrize("temperature", (1.0, 0.6))
@pytest.mark.parametrize("shared", (False, True))
@pytest.mark.parametrize("reduced", (False, True))
def test_what_is_told_about_rows(reduced: bool, shared: bool, temperature: float) -> None:
    case = make(reduced, shared)
    for kind in ("kl", "ce"):
        objective = Objective(kind, 5, temperature=temperature)
        found, plain = case.run(objective), naive(case, objective)
        assert torch.equal(found.hits, plain.hits) and torch.equal(found.match, plain.match)
        assert found.hits.any() and found.match.any()
        torch.testing.assert_close(found.alpha.double(), plain.alpha, rtol=0, atol=1e-6)
        torch.testing.assert_close(found.ratio.double(), plain.ratio, rtol=0, atol=1e-6)
        assert not any(part.requires_grad for part in (found.hits, found.alpha, found.match, found.ratio))


def test_alpha_counts_what_the_drafter_cannot_write() -> None:
    """Against the law renormalised on the draft vocabulary, alpha is too high: what some training loops log."""
    case = make(reduced=True)
    assert case.rows is not None
    renormalised = replace(case, teacher_weight=case.teacher_weight[case.rows], rows=None, labels=case.labels % DRAFT)
    right, wrong = case.run(Objective()).alpha, renormalised.run(Objective()).alpha
    assert (wrong >= right - 1e-7).all() and float((wrong - right).mean()) > 0.05


def test_labels_alone() -> None:
    """Cross entropy needs no teacher: hits are then the label's, alpha and ratio its probability."""
    for reduced in (False, True):
        case, objective = make(reduced), Objective("ce", 5)
        found = objective(case.states, case.weight, None, None, case.weights, labels=case.labels, rows=case.rows)
        plain = naive(case, objective)
        assert float((found.loss_sum - plain.loss).detach().abs()) < 1e-13
        pairs = zip(gradients(found.loss_sum, case), gradients(plain.loss, case), strict=True)
        assert all(torch.allclose(ours, theirs, atol=1e-13) for ours, theirs in pairs)
        assert torch.equal(found.hits, plain.match) and torch.equal(found.match, plain.match)
        q = (case.states @ case.weight.T).softmax(-1).detach()
        rows = torch.arange(V) if case.rows is None else case.rows
        at = torch.zeros(N, V, dtype=q.dtype).index_copy(1, rows, q).gather(1, case.labels[:, None])[:, 0]
        torch.testing.assert_close(found.alpha.double(), at, rtol=0, atol=1e-6)


def test_without_labels_the_target_is_the_text() -> None:
    case = make()
    found = Objective()(case.states, case.weight, case.teacher_states, case.teacher_weight, case.weights)
    assert torch.equal(found.match, found.hits) and torch.equal(found.ratio, found.alpha)


def test_a_shorter_draft_vocabulary_holds_the_first_ids() -> None:
    case = make()
    short = replace(case, weight=case.weight.detach()[:DRAFT].requires_grad_())
    named = replace(short, rows=torch.arange(DRAFT))
    assert torch.equal(short.run(Objective()).loss_sum, named.run(Objective()).loss_sum)
    assert torch.equal(short.run(Objective()).match, named.run(Objective()).match)


@pytest.mark.parametrize("kind", sorted({*KINDS} - {"ce"}))
def test_equal_laws_cost_nothing(kind: str) -> None:
    """A drafter that is its target: no loss, no gradient, no NaN where both laws are zero to the last bit."""
    states, weight = torch.randn(8, 4) * 60, torch.randn(16, 4)
    states.requires_grad_()
    labels = (states @ weight.T).argmax(-1)
    found = Objective(kind, 3)(states, weight, states, weight, torch.ones(8), labels=labels)
    found.loss_sum.backward()
    assert (
        float(found.loss_sum.detach().abs()) < 1e-4
        and states.grad is not None
        and float(states.grad.abs().max()) < 1e-3
    )
    assert found.hits.all() and float(found.alpha.min()) > 0.999


@pytest.mark.parametrize("kind", KINDS)
def test_far_laws_stay_finite(kind: str) -> None:
    states = (torch.randn(8, 4) * 300).requires_grad_()
    found = Objective(kind, 3)(
        states, torch.randn(6, 4), -300 * torch.randn(8, 4), torch.randn(16, 4), torch.ones(8),
        labels=torch.arange(8), rows=torch.arange(0, 12, 2),
    )  # fmt: skip
    found.loss_sum.backward()
    assert found.loss_sum.isfinite() and states.grad is not None and states.grad.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_other_dtypes(kind: str, dtype: torch.dtype) -> None:
    """The softmax is float32 whatever the heads are, and gradients come in the dtype of what they belong to."""
    case, objective = make(True, True, dtype), Objective(kind, 5)
    found, plain = case.run(objective), naive(case, objective)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    assert found.loss_sum.dtype == torch.float32
    torch.testing.assert_close(found.loss_sum.double(), plain.loss, rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(gradients(found.loss_sum, case), gradients(plain.loss, case), strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=4 * tolerance, atol=4 * tolerance)


def test_float32_states_over_a_frozen_bfloat16_head() -> None:
    """The product is made in the head's dtype, as when the drafter drafts through its target's head."""
    case = make(dtype=torch.bfloat16, frozen=True)
    exact = replace(case, states=case.states.detach().float().requires_grad_())
    ours, theirs = exact.run(Objective()), case.run(Objective())
    assert torch.equal(ours.loss_sum, theirs.loss_sum)
    (slope,) = gradients(ours.loss_sum, exact)
    assert slope.dtype == torch.float32


def test_autocast_makes_the_products_only() -> None:
    case, objective = make(dtype=torch.float32), Objective("kl", 5)
    with torch.autocast("cpu", torch.bfloat16):
        found = case.run(objective)
    slopes = gradients(found.loss_sum, case)
    assert found.loss_sum.dtype == torch.float32 and all(slope.dtype == torch.float32 for slope in slopes)
    rounded = replace(case, states=case.states.bfloat16(), weight=case.weight.bfloat16())
    assert torch.equal(found.loss_sum, rounded.run(objective).loss_sum)
    assert not torch.equal(found.loss_sum, case.run(objective).loss_sum)


def test_nothing_selected_stays_connected() -> None:
    """A rank without supervised tokens: every parameter gets a zero gradient, so nobody waits for it."""
    body, head = nn.Linear(H, H), nn.Linear(H, V, bias=False)
    states = body(torch.randn(4, H))[torch.zeros(4, dtype=torch.bool)]
    for index in (None, torch.zeros(0, dtype=torch.long)):
        found = Objective()(states, head.weight, torch.randn(0, D), torch.randn(V, D), torch.ones(0), index=index)
        found.loss_sum.backward(retain_graph=True)
        assert float(found.loss_sum.detach()) == 0 and found.hits.shape == found.alpha.shape == (0,)
        for parameter in (*body.parameters(), *head.parameters()):
            assert parameter.grad is not None and not parameter.grad.any()


def test_zero_weights_hide_what_is_not_finite() -> None:
    case = make()
    hidden = case.states.detach().clone()
    hidden[case.weights == 0] = 1e30
    spoiled = replace(case, states=hidden.requires_grad_())
    found, clean = spoiled.run(Objective("kl", 5)), case.run(Objective("kl", 5))
    assert float((found.loss_sum - clean.loss_sum).detach().abs()) < 1e-13


def test_backward_scales_and_repeats() -> None:
    case = make()
    loss = case.run(Objective("kl", 5)).loss_sum
    once = gradients(loss, replace(case))
    loss = case.run(Objective("kl", 5)).loss_sum
    for factor in (1.0, 3.0):  # the second pass over one graph must not see the first one's scale
        again = torch.autograd.grad(loss * factor, [case.states, case.weight], retain_graph=True)
        assert all(torch.allclose(one * factor, two) for one, two in zip(once, again, strict=True))


def test_second_derivatives_are_refused() -> None:
    case = make()
    with pytest.raises(SpecGenError, match="first derivatives only"):
        torch.autograd.grad(case.run(Objective()).loss_sum, case.states, create_graph=True)


class Sizes(TorchDispatchMode):
    """Record how many elements the largest new tensor had."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, Tensor):
                self.largest = max(self.largest, tensor.numel())
        return made


@pytest.mark.parametrize("kind", KINDS)
def test_no_tensor_of_tokens_by_vocabulary(kind: str) -> None:
    tokens, vocabulary, width, chunk = 512, 700, 16, 32
    states = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    inputs = torch.randn(tokens, width), torch.randn(vocabulary, width), torch.ones(tokens)
    with Sizes() as sizes, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        found = Objective(kind, chunk)(states, weight, *inputs, labels=torch.randint(0, vocabulary, (tokens,)))
        found.loss_sum.backward()
    assert sizes.largest == chunk * vocabulary
    assert sum(kept) == tokens * width + vocabulary * width
    with Sizes() as plain:
        (states @ weight.T).log_softmax(-1)
    assert plain.largest == tokens * vocabulary  # the record does see what the plain version makes


def test_shared_teachers_are_scored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scored = []

    def count(self: Any, name: str, states: Tensor, *rest: Any) -> Any:
        scored.extend([len(states)] * (name == "p"))
        return before(self, name, states, *rest)

    before = losses._Sums._law
    monkeypatch.setattr(losses._Sums, "_law", count)
    case = make(shared=True)
    case.run(Objective(chunk=8))
    assert sum(scored) <= TEACHERS + len(scored) and max(scored) < 8
    far = replace(case, teacher_states=case.teacher_states.repeat_interleave(50, 0), index=50 * case.index + 7)
    before_far = sum(scored)
    assert torch.equal(far.run(Objective(chunk=8)).loss_sum, case.run(Objective(chunk=8)).loss_sum)
    assert sum(scored) == 3 * before_far  # states between those that are asked for are not scored
    assert case.index is not None
    scored.clear()
    replace(case, teacher_states=case.teacher_states[case.index], index=None).run(Objective(chunk=8))
    assert sum(scored) == N


@pytest.mark.parametrize("width", (19, 64, 192))
def test_the_best_id_is_the_first_of_the_best(width: int) -> None:
    """Blocks find what argmax finds: ties go to the lower id, and NaN is the best."""
    values = torch.randint(0, 5, (200, width)).double()
    values[::7, width // 2] = torch.nan
    assert torch.equal(losses.best_of(values), values.argmax(-1))


def test_a_vocabulary_without_mass_is_still_a_law() -> None:
    """In float32 too, where the target gives the ids that the drafter knows next to nothing."""
    states, weight, teacher = torch.randn(3, 4), torch.randn(8, 4), torch.randn(8, 4)
    more = torch.ones(3, 4), torch.cat((teacher, torch.full((8, 4), 1e2))), torch.ones(3)
    found, alone = (
        Objective("kl", gate=False)(states, weight, *more),
        Objective("kl")(states, weight, more[0], teacher, more[2]),
    )
    torch.testing.assert_close(found.loss_sum, alone.loss_sum, rtol=1e-3, atol=0)
    assert not found.alpha.any() and alone.alpha.all()


def test_a_cpu_takes_no_more_than_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "_CPU_ELEMENTS", 8 * V)
    case = make()
    with Sizes() as sizes:
        case.run(Objective(chunk=1024))
    assert sizes.largest == 8 * V > N * H
    assert difference(make(), Objective()) < 1e-13


def test_no_gradient_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a slope was made")

    monkeypatch.setattr(losses._Sums, "_store", refuse)
    with torch.no_grad():
        assert not make().run(Objective()).loss_sum.requires_grad
    with pytest.raises(AssertionError, match="slope"):
        make().run(Objective())


def test_teacher_bias_counts() -> None:
    case, bias = make(), torch.randn(V, dtype=torch.float64)
    wide = replace(
        case,
        teacher_states=torch.cat((case.teacher_states, torch.ones(N, 1, dtype=torch.float64)), 1),
        teacher_weight=torch.cat((case.teacher_weight, bias[:, None]), 1),
    )
    found = Objective()(
        case.states, case.weight, case.teacher_states, case.teacher_weight, case.weights, teacher_bias=bias
    )
    assert float((found.loss_sum - wide.run(Objective()).loss_sum).detach().abs()) < 1e-12


def test_refusals() -> None:
    case = make()
    with pytest.raises(SpecGenError, match="not known"):
        Objective("mse")
    for settings in ({"chunk": 0}, {"beta": 1.0}, {"temperature": 0.0}):
        with pytest.raises(SpecGenError, match="required"):
            Objective(**settings)  # type: ignore[arg-type]
    teacher = case.teacher_states, case.teacher_weight, case.weights
    with pytest.raises(SpecGenError, match="needs labels"):
        Objective("ce")(case.states, case.weight, *teacher)
    with pytest.raises(SpecGenError, match="needs the target"):
        Objective("kl")(case.states, case.weight, None, None, case.weights, labels=case.labels)
    with pytest.raises(SpecGenError, match="one per row"):
        Objective()(case.states, case.weight, *teacher, rows=torch.arange(3))
    with pytest.raises(SpecGenError, match="at most as many"):
        Objective()(case.states, torch.cat((case.weight, case.weight)), *teacher)
