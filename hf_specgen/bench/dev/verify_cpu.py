"""Time ``verify`` alone on CPU beside a straightforward torch version of the same round.

The rows imitate a language model's: Gaussian logits with a few likely tokens, some rows sure of themselves, some not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import LogitsProcessor, MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hf_specgen.models.target import Scores
from hf_specgen.round.records import DenseQ, Draft, SparseQ, Tree
from hf_specgen.round.sequences import Sequences, Stops
from hf_specgen.round.verify import verify
from hf_specgen.round.warp import Warp

_LISTED = 32  # how many tokens a sparse q lists
_ACCEPTED = 0.9  # how often a drafted token is the one that the target is likeliest to want


@dataclass(frozen=True)
class VerifyCase:
    """Hold one way to verify: processors, rule, and the shape of what is drafted."""

    name: str
    processors: tuple[LogitsProcessor, ...] = ()
    rule: str = "rejection"
    q: str = "none"
    tree: bool = False
    greedy: bool = False


@dataclass(frozen=True)
class VerifyCost:
    """Hold the best of several runs. Units: milliseconds; ``cpu_ms`` is the calling thread's own time.

    ``plain_ms`` is the straightforward version's wall time, ``share`` the wall time over one forward's.
    """

    case: str
    batch: int
    gamma: int
    vocab: int
    ms: float
    cpu_ms: float
    plain_ms: float
    share: float | None
    accepted: float


CASES = (
    VerifyCase("greedy", greedy=True),
    VerifyCase("T=1"),
    VerifyCase("top-k 50", (TemperatureLogitsWarper(0.8), TopKLogitsWarper(50))),
    VerifyCase("top-p .95", (TemperatureLogitsWarper(0.8), TopPLogitsWarper(0.95))),
    VerifyCase("top-k 50, top-p .95", (TemperatureLogitsWarper(0.8), TopKLogitsWarper(50), TopPLogitsWarper(0.95))),
    VerifyCase("min-p .05", (MinPLogitsWarper(0.05),)),
    VerifyCase("dense q chain", q="dense"),
    VerifyCase("sparse q tree", q="sparse", tree=True),
    VerifyCase("block", rule="block", q="dense"),
    VerifyCase("gumbel", rule="gumbel"),
)


def measure_verify(
    cases: Sequence[VerifyCase] = CASES,
    batches: Sequence[int] = (1, 4, 8),
    gammas: Sequence[int] = (3, 8, 15),
    vocabs: Sequence[int] = (32_000, 49_152, 128_256, 151_936),
    forward_ms: float | None = None,
    repeats: int = 7,
) -> Iterable[VerifyCost]:
    """Yield a measurement for every case and shape; ``forward_ms`` is what the share refers to."""
    for vocab in vocabs:
        for batch in batches:
            for gamma in gammas:
                for case in cases:
                    yield _measured(case, batch, gamma, vocab, forward_ms, repeats)


@torch.no_grad()
def _measured(
    case: VerifyCase, batch: int, gamma: int, vocab: int, forward_ms: float | None, repeats: int
) -> VerifyCost:
    rounds = [make_round(case, batch, gamma, vocab, seed) for seed in range(4)]
    ours = [partial(verify, scores, draft, scores.coins(), case.rule) for scores, draft in rounds]
    accepted = [call().n for call in ours]
    times = [_best(call, repeats) for call in ours]
    plain = [_best(partial(verify_plainly, case, scores, draft), max(1, repeats // 3)) for scores, draft in rounds]
    ms, cpu_ms = (sum(column) / len(rounds) for column in zip(*times, strict=True))
    return VerifyCost(
        case.name,
        batch,
        gamma,
        vocab,
        ms,
        cpu_ms,
        sum(wall for wall, _ in plain) / len(rounds),
        ms / forward_ms if forward_ms else None,
        float(torch.stack(accepted).double().mean()),
    )


def _best(call: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Return the least wall time and the least time of this thread: others may share the cores."""
    walls = []
    cpus = []
    for _ in range(repeats + 1):
        wall = time.perf_counter_ns()
        cpu = time.thread_time_ns()
        call()
        cpus.append(time.thread_time_ns() - cpu)
        walls.append(time.perf_counter_ns() - wall)
    return min(walls[1:]) / 1e6, min(cpus[1:]) / 1e6


def make_round(case: VerifyCase, batch: int, gamma: int, vocab: int, seed: int) -> tuple[Scores, Draft]:
    """Make one round: scored logits in bfloat16 and a draft whose tokens are often likely."""
    source = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, gamma + 1, vocab, generator=source) * 2.5
    likely = torch.randint(0, vocab, (batch, gamma + 1, 4), generator=source)
    lift = torch.rand(batch, gamma + 1, 1, generator=source) * 5 + torch.tensor([15.0, 13.0, 12.0, 11.0])
    logits = logits.scatter(-1, likely, lift).bfloat16()
    tree = Tree(torch.tensor([[(node - 1) // 2 for node in range(gamma)]])) if case.tree else Tree.chain(gamma)
    above = tree.parents.expand(batch, -1) + 1
    drafted = logits.gather(1, above.unsqueeze(-1).expand(-1, -1, vocab)).float()
    q = drafted + torch.randn(drafted.shape, generator=source) * 0.5
    tokens = drafted.argmax(-1)
    guess = torch.rand(tokens.shape, generator=source) > _ACCEPTED
    tokens = torch.where(guess, torch.randint(0, vocab, tokens.shape, generator=source), tokens)
    law: DenseQ | SparseQ | None = None
    if case.q == "dense":
        tokens = _sampled(q, source)
        law = DenseQ(q)
    elif case.q == "sparse":
        best = q.topk(_LISTED, -1)
        probs = best.values.softmax(-1)
        tokens = best.indices.gather(-1, _sampled(best.values, source).unsqueeze(-1)).squeeze(-1)
        law = SparseQ(best.indices, probs)
    sequences = Sequences(
        torch.zeros(batch, 1, dtype=torch.long),
        [[0]] * batch,
        Stops(100, frozenset(), ()),
        torch.arange(batch) + seed,
        torch.arange(batch),
        Warp(case.processors, batch),
        vocab,
        case.greedy,
    )
    draft = Draft(tokens, tree, torch.full((batch,), gamma), law)
    return Scores(logits, draft, sequences), draft


def _sampled(logits: Tensor, source: torch.Generator) -> Tensor:
    return logits.flatten(0, 1).softmax(-1).multinomial(1, generator=source).view(logits.shape[:2])


def verify_plainly(case: VerifyCase, scores: Scores, draft: Draft) -> object:
    """Verify as one would write it down: every row processed, normalised and drawn from."""
    batch, scored, vocab = scores.logits.shape
    logits = scores.logits.flatten(0, 1).float()
    for processor in case.processors:
        logits = processor(torch.zeros(len(logits), 1, dtype=torch.long), logits)
    if case.greedy:
        return _matched(logits.argmax(-1).view(batch, scored), draft)
    p = logits.softmax(-1).view(batch, scored, vocab)
    if case.rule == "gumbel":
        noise = -torch.empty_like(p).exponential_().log()
        return _matched((p.log() + noise).argmax(-1), draft)
    if draft.q is None:
        return _matched(p.flatten(0, 1).multinomial(1).view(batch, scored), draft)
    q = _dense(draft.q, vocab)
    above = draft.tree.parents.expand(batch, -1) + 1
    chosen = draft.tokens.unsqueeze(-1)
    p_above = p.gather(1, above.unsqueeze(-1).expand(-1, -1, vocab))
    ratio = (p_above.gather(-1, chosen) / q.gather(-1, chosen)).squeeze(-1)
    kept = torch.rand_like(ratio) <= ratio
    rest = (p_above - q).clamp_(min=0)
    rest = rest / rest.sum(-1, keepdim=True).clamp_(min=1e-9) + 1e-12
    last = torch.cat((rest, p[:, -1:]), 1).flatten(0, 1).multinomial(1).view(batch, scored)
    return kept.long().cumprod(1).sum(1), last


def _dense(law: DenseQ | SparseQ, vocab: int) -> Tensor:
    if isinstance(law, DenseQ):
        return law.logits.softmax(-1)
    empty = torch.zeros(*law.ids.shape[:2], vocab)
    return empty.scatter_(-1, law.ids, law.probs)


def _matched(drawn: Tensor, draft: Draft) -> tuple[Tensor, Tensor]:
    above = draft.tree.parents.expand(len(drawn), -1) + 1
    kept = (drawn.gather(1, above) == draft.tokens).long().cumprod(1).sum(1)
    return kept, drawn.gather(1, kept.unsqueeze(1))
