"""What ``bench.kernels`` times: each operation on made-up rounds, beside a straightforward torch version of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_specgen import ops
from hf_specgen.bench import kernel_bytes as moved
from hf_specgen.bench.kernel_bytes import Shape
from hf_specgen.coins import ACCEPT, SAMPLE, Coins
from hf_specgen.draft import DenseQ, Draft, Tree
from hf_specgen.fused import Dense, verify_dense

_TOP_K, _TOP_P = 50, 0.95
_GUESSED = 0.8  # how often a drafted token is the target's likeliest
_BUFFERS, _HEADS, _SLOTS, _CHANNELS = 16, 8, 256, 128  # of the cache whose slots move
_TEXT = 2048  # tokens that are searched
_QUERY_HEADS = 32


@dataclass(frozen=True)
class Work:
    """Hold one operation on one shape: ours, the straightforward version, and how many bytes ours moves."""

    ours: Callable[[], object]
    plain: Callable[[], object]
    moved: int


@dataclass(frozen=True)
class Case:
    """Name an operation; ``by_vocab`` is False where no logits take part, so that one vocabulary is enough."""

    name: str
    prepare: Callable[[Inputs], Work]
    by_vocab: bool = True
    on_cpu: bool = False


class Inputs:
    """Make what the operations of one shape read, each when it is first asked for."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        self.shape, self.device, self.dtype = shape, device, dtype
        self.source = torch.Generator(device).manual_seed(7)

    def uniform(self, *size: int) -> Tensor:
        """Return float64 numbers in ``[0, 1)``."""
        return torch.rand(*size, generator=self.source, device=self.device, dtype=torch.float64)

    def integers(self, high: int, *size: int) -> Tensor:
        """Return int64 numbers below ``high``."""
        return torch.randint(0, high, size, generator=self.source, device=self.device)

    @cached_property
    def logits(self) -> Tensor:
        """Imitate a model's rows: Gaussian, with a few likely tokens; ``(B, S, V)``."""
        batch, places, vocab = self.shape.batch, self.shape.gamma + 1, self.shape.vocab
        rows = torch.randn(batch, places, vocab, generator=self.source, device=self.device, dtype=self.dtype) * 2.5
        lift = 10 + 5 * torch.rand(batch, places, 4, generator=self.source, device=self.device)
        return rows.scatter_(-1, self.integers(vocab, batch, places, 4), lift.to(self.dtype))

    @cached_property
    def flat(self) -> Tensor:
        return self.logits.flatten(0, 1)

    @cached_property
    def q(self) -> Tensor:
        """Disturb the target's rows: the drafter's logits ``(B, N, V)``."""
        rows = self.logits[:, :-1].clone()
        noise = torch.randn(rows.shape, generator=self.source, device=self.device, dtype=self.dtype)
        return rows.add_(noise, alpha=0.5)

    @cached_property
    def listed(self) -> tuple[Tensor, Tensor]:
        """Return the drafter's likeliest tokens and their probabilities ``(B, N, C)``."""
        best = self.q.float().topk(self.shape.listed, -1)
        return best.indices, best.values.softmax(-1)

    @cached_property
    def guesses(self) -> Tensor:
        """Return drafted tokens ``(B, N)``, most of them the target's likeliest."""
        best = self.logits[:, :-1].argmax(-1)
        return torch.where(self.uniform(*best.shape) < _GUESSED, best, self.integers(self.shape.vocab, *best.shape))

    @cached_property
    def sampled(self) -> Tensor:
        """Draw drafted tokens ``(B, N)`` from the list of q."""
        ids, probs = self.listed
        return ids.gather(-1, probs.flatten(0, 1).multinomial(1).view(*ids.shape[:2], 1)).squeeze(-1)

    @cached_property
    def chain(self) -> Tree:
        return Tree.chain(self.shape.gamma, self.device)

    @cached_property
    def n_valid(self) -> Tensor:
        return torch.full((self.shape.batch,), self.shape.gamma, device=self.device)

    @cached_property
    def temperature(self) -> Tensor:
        return torch.ones(self.shape.rows, device=self.device)

    @cached_property
    def settings(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return top-k, top-p and min-p that are off."""
        off = self.temperature
        return off.int() * 0, off, off * 0

    @cached_property
    def coin(self) -> Tensor:
        return self.uniform(self.shape.rows)

    @cached_property
    def stats(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return ops.row_stats(self.flat, self.temperature, False)

    @cached_property
    def drawn(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``(law (B, S, 4), token (B, S), invalid (B, S))``."""
        token, law, invalid = ops.row_draw(self.flat, self.temperature, *self.settings, self.coin, *self.stats)
        places = (self.shape.batch, self.shape.gamma + 1)
        return law.view(*places, 4), token.view(places), invalid.view(places)

    @cached_property
    def target(self) -> tuple[Tensor, ...]:
        """Return what the walks read of the target."""
        return (self.logits, self.temperature[: self.shape.batch], *self.drawn)

    @cached_property
    def coins(self) -> Coins:
        each = torch.arange(self.shape.batch, device=self.device)
        return Coins(each + 5, each, each + 100)


def _row_stats(given: Inputs, strips: bool = False) -> Work:
    return Work(
        lambda: ops.row_stats(given.flat, given.temperature, strips),
        lambda: given.flat.softmax(-1, dtype=torch.float32),
        moved.row_stats(given.shape, strips),
    )


def _row_draw(given: Inputs) -> Work:
    p = given.flat.softmax(-1, dtype=torch.float32)
    return Work(
        lambda: ops.row_draw(given.flat, given.temperature, *given.settings, given.coin, *given.stats),
        lambda: p.multinomial(1),
        moved.row_draw(given.shape),
    )


def _truncated(given: Inputs) -> Work:
    off = given.settings
    settings = (off[0] + _TOP_K, off[1] * _TOP_P, off[2])

    def ours() -> object:
        stats = ops.row_stats(given.flat, given.temperature, True)
        return ops.row_draw(given.flat, given.temperature, *settings, given.coin, *stats)

    def plain() -> object:
        logits = given.flat.float()
        logits = logits.masked_fill(logits < logits.topk(_TOP_K, -1).values[:, -1:], -torch.inf)
        ascending, order = logits.sort(dim=-1)
        gone = ascending.softmax(-1).cumsum(-1) <= 1 - _TOP_P
        gone[:, -1] = False
        logits = logits.masked_fill(gone.scatter(-1, order, gone), -torch.inf)
        return logits.softmax(-1).multinomial(1)

    return Work(ours, plain, moved.row_stats(given.shape, True) + moved.row_draw(given.shape, top_k=_TOP_K))


def _gumbel(given: Inputs) -> Work:
    seed, row, position = (given.integers(1 << 30, given.shape.rows) for _ in range(3))

    def plain() -> object:
        p = given.flat.softmax(-1, dtype=torch.float32)
        return (p / torch.empty_like(p).exponential_()).argmax(-1)

    ours = lambda: ops.gumbel_pick(given.flat, given.temperature, seed, row, position)  # noqa: E731
    return Work(ours, plain, moved.gumbel_pick(given.shape))


def _match_tree(given: Inputs) -> Work:
    _, token, invalid = given.drawn
    shape = (given.guesses, given.chain.parents, given.n_valid)
    return Work(
        lambda: ops.match_tree(token, invalid, *shape),
        lambda: _matched(token, given.guesses),
        moved.match_tree(given.shape),
    )


def _reject(given: Inputs, dense: bool) -> Work:
    ids, probs = (None, given.q) if dense else given.listed
    accept = given.uniform(given.shape.batch, given.shape.gamma + 1, 1)
    sample = given.uniform(given.shape.batch, given.shape.gamma + 1)
    shape = (given.sampled, given.chain.parents, given.n_valid)
    ours = lambda: ops.reject_tree(*given.target, *shape, ids, probs, accept, sample, False)  # noqa: E731
    rejected = int((ours()[1] < given.shape.gamma).sum())
    return Work(ours, lambda: _rejected(given, dense), moved.reject_tree(given.shape, dense, rejected))


def _siblings(given: Inputs) -> Work:
    nodes = range(given.shape.gamma)
    parents = torch.tensor([[(node + 1) // 3 - 1 for node in nodes]], device=given.device)
    above = parents + 1
    first = torch.tensor([3 * max((node + 1) // 3, 0) for node in nodes], device=given.device)
    q = given.logits[:, above[0]]  # siblings share q; the root's are the first
    tokens = q[:, first.clamp(max=given.shape.gamma - 1)].topk(3, -1).indices
    rank = torch.arange(given.shape.gamma, device=given.device) % 3
    tokens = tokens.gather(-1, rank.expand(given.shape.batch, -1).unsqueeze(-1)).squeeze(-1)
    accept = given.uniform(given.shape.batch, given.shape.gamma + 1, 3)
    sample = given.uniform(given.shape.batch, given.shape.gamma + 1)
    shape = (tokens, parents, given.n_valid)
    ours = lambda: ops.reject_tree(*given.target, *shape, None, q, accept, sample, True)  # noqa: E731
    return Work(ours, lambda: _rejected(given, True), moved.reject_tree(given.shape, True))
