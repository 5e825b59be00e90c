"""Losses of a drafter's head against its target's head, in chunks of rows: no ``(tokens, vocabulary)`` tensor is kept.

The gradient with respect to the logits is known in closed form for every loss here, so a chunk's part of it is made
while its laws are at hand, and ``backward`` only scales what is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_specgen.errors import SpecGenError
from hf_specgen.trainers.space import Space

_CPU_ELEMENTS = 1 << 24  # of a chunk's logits
_BLOCK = 64  # ids among which the best one is looked for at once


@dataclass(frozen=True)
class HeadLoss:
    """Hold what a head's loss came to; only ``loss_sum`` carries gradients.

    ``hits (N)`` tells where the best token is the target's best, ``alpha (N)`` is the acceptance probability of a drawn
    draft, sum of min(p, q) over the target's whole vocabulary. Of the label x: ``match (N)`` tells where it is the
    drafter's best token, ``ratio (N)`` is min(1, q(x) / p(x)). Without labels those two repeat ``hits`` and ``alpha``,
    without a teacher ``hits`` repeats ``match``, and ``alpha`` and ``ratio`` are q(x).
    """

    loss_sum: Tensor
    hits: Tensor
    alpha: Tensor
    match: Tensor
    ratio: Tensor


@dataclass(frozen=True)
class Objective:
    """Sum a loss over rows: a drafter's forward calls it with its states and the target's.

    ``kind``: ``kl`` KL(p, q); ``rkl`` KL(q, p); ``tv`` total variation, 1 - alpha; ``lk`` -log alpha; ``ce`` -log q of
    the label; ``jsd`` beta KL(p, m) + (1 - beta) KL(q, m) with m = beta p + (1 - beta) q. With a reduced vocabulary
    ``kl``, ``rkl`` and ``jsd`` see p normalised on it, ``tv`` and ``lk`` all of p.
    ``chunk``: rows whose logits exist at once, at most. ``temperature`` divides both heads' logits; ``softcap`` is the
    target's ``final_logit_softcapping``, the drafter's too where it ``borrows`` the target's head, as when it drafts.
    ``gate``: rows whose best token the drafter cannot write add no loss.

    Source: KL, reverse KL, JSD and TV for drafters: Zhou et al. 2024 (DistillSpec), section 4; the gate: Li et al. 2025
    (EAGLE-3), as its published training code masks rows.
    """

    kind: str = "kl"
    chunk: int = 1024
    beta: float = 0.5
    temperature: float = 1.0
    softcap: float | None = None
    gate: bool = True
    borrows: bool = False

    def __post_init__(self) -> None:
        if self.kind not in FORMULAS:
            raise SpecGenError(f"loss {self.kind!r} is not known: one of {', '.join(FORMULAS)} is required.")
        if self.chunk < 1 or not 0 < self.beta < 1 or self.temperature <= 0:
            raise SpecGenError(
                f"chunk={self.chunk}, beta={self.beta}, temperature={self.temperature} were given: at least one row, "
                "0 < beta < 1 and a temperature above 0 are required."
            )

    def __call__(  # noqa: PLR0913 - two heads, and what links their rows and vocabularies
        self,
        states: Tensor,
        weight: Tensor,
        teacher_states: Tensor | None,
        teacher_weight: Tensor | None,
        weights: Tensor,
        labels: Tensor | None = None,
        rows: Tensor | None = None,
        index: Tensor | None = None,
        teacher_bias: Tensor | None = None,
    ) -> HeadLoss:
        """Return the weighted sum of the loss over N rows.

        Shapes: ``states (N, H)``, ``weight (Vd, H)``: the drafter's head; ``teacher_states (N, D)``,
        ``teacher_weight (V, D)``, ``teacher_bias (V)``: the target's, None for ``ce`` from labels alone;
        ``weights (N)``; ``labels (N)`` and ``rows (Vd)`` are ids of the target: ``rows[i]`` is what draft id i means
        (None: ids are the same, the drafter may lack the last ones). ``index (N)``: row i's teacher is
        ``teacher_states[index[i]]``, of any number M: the target's head then runs once for states that share one. No
        rows at all is fine: the loss is 0 and its gradients are zeros.
        Raises: ``SpecGenError`` when something that the loss needs is missing or does not fit.
        """
        self._check(states, weight, teacher_weight, labels, rows)
        teacher = None
        if teacher_states is not None and teacher_weight is not None:
            if index is not None:  # states that no row asks for are not scored
                used, index = index.unique(return_inverse=True)
                teacher_states = teacher_states[used]
            teacher = _Teacher(teacher_states.detach(), teacher_weight.detach(), teacher_bias)
            if rows is None and len(weight) < len(teacher_weight):
                rows = torch.arange(len(weight), device=weight.device)
        job = _Job(self, teacher, weights, labels, rows, index, torch.is_grad_enabled())
        loss, hits, alpha, match, ratio = _Chunked.apply(states, weight, job)
        return HeadLoss(loss, hits, alpha, match, ratio)

    def _check(
        self, states: Tensor, weight: Tensor, teacher: Tensor | None, labels: Tensor | None, rows: Tensor | None
    ) -> None:
        if self.kind == "ce" and labels is None:
            raise SpecGenError("loss 'ce' needs labels: give them, or choose a loss against the target's law ('kl').")
        if teacher is None and (labels is None or self.kind != "ce"):
            raise SpecGenError(f"loss {self.kind!r} needs the target's states and head; only 'ce' can do without.")
        if rows is not None and len(rows) != len(weight):
            raise SpecGenError(f"{len(rows)} ids were given for a head of {len(weight)} rows: one per row is required.")
        if teacher is not None and len(teacher) < len(weight):
            raise SpecGenError(
                f"the drafter's head has {len(weight)} rows and the target's {len(teacher)}: at most as many are "
                "required. Leave out the rows that stand for no token of the target."
            )


@dataclass(frozen=True)
class _Teacher:
    states: Tensor
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class _Job:
    """Hold everything of one call that takes no gradient."""

    objective: Objective
    teacher: _Teacher | None
    weights: Tensor
    labels: Tensor | None
    rows: Tensor | None
    index: Tensor | None
    slopes: bool

    def inverse(self) -> Tensor | None:
        """Return the draft id of each target id, -1 where there is none; None when ids are the same."""
        if self.rows is None:
            return None
        size = len(self.teacher.weight) if self.teacher is not None else int(self.rows.max()) + 1
        ids = torch.full((size,), -1, dtype=torch.long, device=self.rows.device)
        ids[self.rows] = torch.arange(len(self.rows), device=self.rows.device)
        return ids


@dataclass
class Laws:
    """Hold both laws of some rows. A formula comes last and may overwrite all that is ``(n, Vd)``; ``spare`` is junk.

    Shapes: ``log_q, q, log_p, p, spare (n, Vd)``; ``mass (n, 1)``: of the target's law on the draft vocabulary, where
    ``p`` is normalised; ``labels (n)`` draft ids (-1: none) or None.
    """

    log_q: Tensor
    q: Tensor
    log_p: Tensor
    p: Tensor
    mass: Tensor
    spare: Tensor
    labels: Tensor | None
    beta: float


Slope = Callable[[], Tensor]
Formula = Callable[[Laws], tuple[Tensor, Slope]]


def _dot(one: Tensor, other: Tensor, room: Tensor) -> Tensor:
    """Return the dot products of rows ``(n)``; their products are left in ``room``, which may be one of them."""
    return torch.mul(one, other, out=room).sum(-1)


def best_of(values: Tensor) -> Tensor:
    """Return ``argmax(-1)`` of ``(n, width)``, on a CPU by the maxima of blocks: those it finds many times faster."""
    if values.device.type != "cpu" or values.shape[1] % _BLOCK:
        return values.argmax(-1)
    blocks = values.unflatten(1, (-1, _BLOCK))
    block = blocks.amax(-1).argmax(-1)
    return block * _BLOCK + blocks[torch.arange(len(values)), block].argmax(-1)


def _kl(laws: Laws) -> tuple[Tensor, Slope]:
    value = _dot(laws.p, laws.log_p.sub_(laws.log_q), laws.log_p)
    return value, lambda: laws.q.sub_(laws.p)


def _rkl(laws: Laws) -> tuple[Tensor, Slope]:
    gap = laws.log_q.sub_(laws.log_p)
    value = _dot(laws.q, gap, laws.log_p)
    return value, lambda: gap.sub_(value[:, None]).mul_(laws.q)


def _tv(laws: Laws) -> tuple[Tensor, Slope]:
    gap = torch.sub(laws.q, laws.p.mul_(laws.mass), out=laws.log_q)
    value = 0.5 * (torch.abs(gap, out=laws.spare).sum(-1) + (1 - laws.mass[:, 0]))

    def slope() -> Tensor:
        sign = gap.sign_().mul_(0.5)
        return sign.sub_(_dot(laws.q, sign, laws.spare)[:, None]).mul_(laws.q)

    return value, slope


def _lk(laws: Laws) -> tuple[Tensor, Slope]:
    p = laws.p.mul_(laws.mass)
    alpha = torch.minimum(p, laws.q, out=laws.spare).sum(-1).clamp_(min=torch.finfo(p.dtype).tiny)

    def slope() -> Tensor:
        below = torch.lt(laws.q, p, out=laws.spare)
        below.sub_(_dot(laws.q, below, p)[:, None])
        return below.mul_(laws.q).div_(-alpha[:, None])

    return -alpha.log(), slope


def _jsd(laws: Laws) -> tuple[Tensor, Slope]:
    beta = laws.beta
    log_m = torch.lerp(laws.q, laws.p, beta, out=laws.spare).clamp_(min=torch.finfo(laws.q.dtype).tiny).log_()
    to_p = _dot(laws.p, laws.log_p.sub_(log_m), laws.log_p)
    gap = laws.log_q.sub_(log_m)
    to_q = _dot(laws.q, gap, log_m)
    return beta * to_p + (1 - beta) * to_q, lambda: gap.sub_(to_q[:, None]).mul_(laws.q).mul_(1 - beta)


def _ce(laws: Laws) -> tuple[Tensor, Slope]:
    assert laws.labels is not None
    at = laws.labels.clamp(min=0)[:, None]
    value = -laws.log_q.gather(1, at)[:, 0]

    def slope() -> Tensor:
        return laws.q.scatter_add_(1, at, torch.full_like(at, -1, dtype=laws.q.dtype))

    return value, slope


FORMULAS: dict[str, Formula] = {"kl": _kl, "rkl": _rkl, "tv": _tv, "lk": _lk, "ce": _ce, "jsd": _jsd}
"""Per loss, from the laws of n rows: its value ``(n)``, and how to make its derivative by the drafter's logits."""


class _Chunked(torch.autograd.Function):
    """Make loss and gradients chunk by chunk in ``forward``; first derivatives only."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, job: _Job) -> tuple[Tensor, ...]:
        head = weight.to(_computed_in(states, weight))
        with torch.autocast(states.device.type, enabled=False):
            found = _Sums(states, weight, head, job, ctx.needs_input_grad)
            for part in _parts(job, len(states), _at_once(job, weight)):
                found.add(part)
        ctx.save_for_backward(found.by_states, found.by_weight)
        ctx.dtypes = states.dtype, weight.dtype
        ctx.mark_non_differentiable(found.hits, found.alpha, found.match, found.ratio)
        return found.loss, found.hits, found.alpha, found.match, found.ratio

    @staticmethod
    def backward(ctx: Any, by_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # only under create_graph; autograd's own guard would return a constant here
            raise SpecGenError("the chunked losses have first derivatives only: call backward without create_graph.")
        made = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return (*(None if slope is None else (slope * by_loss).to(dtype) for slope, dtype in made), None)


@dataclass(frozen=True)
class _LossPart:
    """Name the rows of one chunk, and of the teacher's: ``local`` maps one to the other (None: one by one)."""

    rows: slice | Tensor
    teacher: slice
    local: Tensor | None


def _at_once(job: _Job, weight: Tensor) -> int:
    """Return how many rows a chunk has: on a CPU, more than what fills this much memory take no less time."""
    width = len(weight) if job.teacher is None else len(job.teacher.weight)
    asked = job.objective.chunk
    return asked if weight.device.type != "cpu" else min(asked, max(1, _CPU_ELEMENTS // width))


def _parts(job: _Job, count: int, chunk: int) -> Iterator[_LossPart]:
    """Yield chunks of rows; rows that share a teacher come together."""
    if job.index is None or job.teacher is None:
        for start in range(0, count, chunk):
            rows = slice(start, min(start + chunk, count))
            yield _LossPart(rows, rows, None)
        return
    index, order = job.index.sort(stable=True)  # every state is asked for: a chunk's are all it needs, and no others
    ends = [min(start + chunk, count) for start in range(0, count, chunk)]
    bounds = index[[place for end in ends for place in ((end - 1) // chunk * chunk, end - 1)]].tolist()
    for number, end in enumerate(ends):
        start = number * chunk
        first = bounds[2 * number]
        last = bounds[2 * number + 1]
        yield _LossPart(order[start:end], slice(first, last + 1), index[start:end] - first)


class _Sums:
    """Add up chunks: the loss, what is known about each row, and the gradients that are asked for."""

    def __init__(self, states: Tensor, weight: Tensor, head: Tensor, job: _Job, needed: tuple[bool, ...]) -> None:
        self._job = job
        self._states = states
        self._weight = head
        self._inverse = job.inverse()
        self._kind = torch.promote_types(self._weight.dtype, torch.float32)
        self._space = Space(states.device)
        count = len(states)
        self.loss = states.new_zeros((), dtype=self._kind)
        self.alpha, self.ratio = (states.new_zeros(count, dtype=torch.float32) for _ in range(2))
        self.hits, self.match = (states.new_zeros(count, dtype=torch.bool) for _ in range(2))
        by_states, by_weight = (job.slopes and need for need in needed[:2])
        self.by_states = torch.zeros_like(states) if by_states else None
        self.by_weight = torch.zeros_like(weight, dtype=self._kind) if by_weight else None

    def add(self, part: _LossPart) -> None:
        """Read one chunk of rows."""
        job = self._job
        objective = self._job.objective
        states = self._states[part.rows].to(self._weight.dtype)
        capped = objective.softcap if objective.borrows else None
        log_q, q = self._law("q", states, self._weight, None, capped)
        best = best_of(log_q)
        weights = job.weights[part.rows].to(self._kind)
        labels, reachable = self._labels(part)
        if labels is not None and objective.kind == "ce":
            weights = weights * reachable
        if job.teacher is None:
            laws = self._alone(part, log_q, q, best, labels, reachable)
        else:
            laws, gate = self._beside(part, job.teacher, log_q, q, best, labels)
            if objective.gate and objective.kind != "ce":
                weights = weights * gate
        value, slope = FORMULAS[objective.kind](laws)
        self.loss += torch.where(weights != 0, value * weights, 0).sum()
        if self.by_states is not None or self.by_weight is not None:
            made = slope().mul_(weights[:, None] / objective.temperature)
            if capped:  # the derivative of capped logits by those before
                made.mul_(self._space.lend("q bend", len(made), made.shape[1], self._kind))
            self._store(part, made, states)

    def _store(self, part: _LossPart, slope: Tensor, states: Tensor) -> None:
        """Turn the derivative by logits into those by states and weight."""
        slope = slope.to(self._weight.dtype)
        if self.by_states is not None:
            self.by_states[part.rows] = (slope @ self._weight).to(self.by_states.dtype)
        if self.by_weight is not None and self.by_weight.dtype == slope.dtype:
            self.by_weight.addmm_(slope.T, states)
        elif self.by_weight is not None:
            self.by_weight += slope.T @ states

    def _law(
        self, name: str, states: Tensor, weight: Tensor, bias: Tensor | None = None, softcap: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities of some states under a head, and as much junk."""
        rows = len(states)
        width = len(weight)
        logits = torch.mm(states, weight.T, out=self._space.lend(f"{name} logits", rows, width, states.dtype))
        if bias is not None:
            logits.add_(bias)
        if softcap:
            logits.div_(softcap).tanh_()
            if name == "q" and self._job.slopes:
                self._space.lend("q bend", rows, width, self._kind).copy_(logits).square_().neg_().add_(1)
            logits.mul_(softcap)
        spare = logits
        if logits.dtype != self._kind:
            spare = self._space.lend(f"{name} exact", rows, width, self._kind).copy_(logits)
        if self._job.objective.temperature != 1:
            spare.div_(self._job.objective.temperature)
        law = self._space.lend(f"{name} law", rows, width, self._kind)
        return torch.ops.aten._log_softmax.out(spare, -1, False, out=law), spare

    def _taught(self, teacher: _Teacher, part: _LossPart) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Run the target's head once per state.

        Returns: ``(n, Vd)`` log-probabilities on the draft vocabulary, normalised there, and their exponentials,
        ``(n, 1)`` the logarithm of what the target gives that vocabulary, ``(n)`` the best ids of all.
        """
        states = teacher.states[part.teacher].to(teacher.weight.dtype)
        law, spare = self._law("p", states, teacher.weight, teacher.bias, self._job.objective.softcap)
        wanted = best_of(law)
        rows = self._job.rows
        within = torch.zeros_like(law[:, :1])
        if rows is not None:
            spare = torch.index_select(law, 1, rows, out=self._space.lend("p kept", len(law), len(rows), self._kind))
            law = self._space.lend("p kept law", len(law), len(rows), self._kind)
            torch.ops.aten._log_softmax.out(spare, -1, False, out=law)
            within = spare.amax(-1, keepdim=True) - law.amax(-1, keepdim=True)  # logsumexp takes 15 times as long
        p = torch.exp(law, out=spare)
        if part.local is not None:
            wanted = wanted[part.local]
            within = within[part.local]
            law, p = (self._shared(name, part.local, made) for name, made in (("shared law", law), ("shared p", p)))
        return law, p, within, wanted

    def _shared(self, name: str, rows: Tensor, made: Tensor) -> Tensor:
        """Return some rows ``(n)`` of what was made once for several."""
        return torch.index_select(made, 0, rows, out=self._space.lend(name, len(rows), made.shape[1], self._kind))

    def _labels(self, part: _LossPart) -> tuple[Tensor | None, Tensor]:
        """Return the labels as draft ids, -1 where the drafter has none, and where it has one."""
        labels = self._job.labels
        if labels is None:
            return None, self.match[:0]
        here = labels[part.rows]
        if self._inverse is not None:
            size = len(self._inverse)
            here = torch.where(here < size, self._inverse[here.clamp(0, size - 1)], -1)
        return here, (here >= 0) & (here < len(self._weight))

    def _alone(
        self, part: _LossPart, log_q: Tensor, spare: Tensor, best: Tensor, labels: Tensor | None, known: Tensor
    ) -> Laws:
        """Judge by labels alone."""
        assert labels is not None
        q = torch.exp(log_q, out=spare)
        at = q.gather(1, labels.clamp(0, q.shape[1] - 1)[:, None])[:, 0] * known
        self.hits[part.rows] = self.match[part.rows] = best == labels
        self.alpha[part.rows] = self.ratio[part.rows] = at.float()
        labels = labels.clamp(max=q.shape[1] - 1)
        return Laws(log_q, q, log_q, q, q[:, :1], q, labels, self._job.objective.beta)

    def _beside(
        self, part: _LossPart, teacher: _Teacher, log_q: Tensor, spare: Tensor, best: Tensor, labels: Tensor | None
    ) -> tuple[Laws, Tensor]:
        """Judge beside the target's law. Returns: the laws, and where the drafter can write the target's best token."""
        job = self._job
        objective = self._job.objective
        log_p, p, within, wanted = self._taught(teacher, part)
        q = torch.exp(log_q, out=spare)
        mass = within.exp()
        alone = self._space.lend("alone", len(q), q.shape[1], self._kind)
        alpha = torch.minimum(torch.mul(p, mass, out=alone), q, out=alone).sum(-1).float()
        means = best if job.rows is None else job.rows[best]
        self.hits[part.rows] = self.match[part.rows] = means == wanted
        self.alpha[part.rows] = self.ratio[part.rows] = alpha
        if labels is not None:
            at = labels.clamp(0, q.shape[1] - 1)[:, None]
            ratio = (log_q.gather(1, at) - log_p.gather(1, at) - within)[:, 0].clamp(max=0).exp() * (labels >= 0)
            self.match[part.rows] = best == labels
            self.ratio[part.rows] = ratio.float()
        gate = torch.ones_like(wanted, dtype=torch.bool)
        if job.rows is not None and self._inverse is not None:
            gate = self._inverse[wanted] >= 0
        return Laws(log_q, q, log_p, p, mass, alone, labels, objective.beta), gate


def _computed_in(states: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype of the head's product: autocast's, else the weight's, as the drafter computes when it drafts."""
    device = states.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
