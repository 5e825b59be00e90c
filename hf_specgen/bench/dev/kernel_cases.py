"""What ``bench.kernels`` times: each operation on made-up rounds, beside a straightforward torch version of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_specgen import ops
from hf_specgen.bench.dev import kernel_bytes as moved
from hf_specgen.bench.dev.kernel_bytes import Shape
from hf_specgen.round.coins import Coins
from hf_specgen.round.records import DenseQ, Draft, Tree
from hf_specgen.round.verify_dense import Dense, verify_dense

_TOP_K = 50
_TOP_P = 0.95
_GUESSED = 0.8  # how often a drafted token is the target's likeliest
# of the cache whose slots move
_BUFFERS = 16
_HEADS = 8
_SLOTS = 256
_CHANNELS = 128
# of the attention; a CPU gets a quarter of the slots
_QUERY_HEADS = 32
_CONTEXT = 2048
_EPSILON = 0.3
_DELTA = 0.09


@dataclass(frozen=True)
class Work:
    """Hold one operation on one shape: ours, the straightforward version, and how many bytes ours moves."""

    ours: Callable[[], object]
    plain: Callable[[], object]
    moved: int


@dataclass(frozen=True)
class KernelCase:
    """Name an operation.

    ``by_vocab`` is False where no logits take part: one vocabulary is enough. ``on_cpu`` marks what also runs, in plain
    torch, on a CPU; the others' references are definitions and not what a CPU does.
    """

    name: str
    prepare: Callable[[Inputs], Work]
    by_vocab: bool = True
    on_cpu: bool = False


class Inputs:
    """Make what the operations of one shape read, each when it is first asked for."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        self.shape = shape
        self.device = device
        self.dtype = dtype
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
        batch = self.shape.batch
        places = self.shape.gamma + 1
        vocab = self.shape.vocab
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
    def target(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return what the walks read of the target."""
        return self.logits, self.temperature[:: self.shape.gamma + 1], *self.drawn

    @cached_property
    def coins(self) -> Coins:
        each = torch.arange(self.shape.batch, device=self.device)
        return Coins(each + 5, each, each + 100)


def _row_stats(given: Inputs) -> Work:
    ours = partial(ops.row_stats, given.flat, given.temperature, False)
    return Work(ours, partial(given.flat.softmax, -1, dtype=torch.float32), moved.row_stats(given.shape))


def _row_draw(given: Inputs) -> Work:
    p = given.flat.softmax(-1, dtype=torch.float32)
    ours = partial(ops.row_draw, given.flat, given.temperature, *given.settings, given.coin, *given.stats)
    return Work(ours, partial(p.multinomial, 1), moved.row_draw(given.shape))


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
    places = [given.integers(1 << 30, given.shape.rows) for _ in range(3)]

    def plain() -> object:
        p = given.flat.softmax(-1, dtype=torch.float32)
        return (p / torch.empty_like(p).exponential_()).argmax(-1)

    ours = partial(ops.gumbel_pick, given.flat, given.temperature, *places)
    return Work(ours, plain, moved.gumbel_pick(given.shape))


def _match_tree(given: Inputs) -> Work:
    _, token, invalid = given.drawn
    ours = partial(ops.match_tree, token, invalid, given.guesses, given.chain.parents, given.n_valid)
    return Work(ours, partial(_matched, token, given.guesses), moved.match_tree(given.shape))


def _reject(given: Inputs, dense: bool) -> Work:
    shape = given.shape
    p = given.logits.softmax(-1, dtype=torch.float32)
    law: tuple[Tensor | None, Tensor] = (None, given.q) if dense else given.listed
    drafted = (given.sampled, given.chain.parents, given.n_valid)
    coins = (given.uniform(shape.batch, shape.gamma + 1, 1), given.uniform(shape.batch, shape.gamma + 1))
    ours = partial(ops.reject_tree, *given.target, *drafted, *law, *coins, False)
    rejected = int((ours()[1] < shape.gamma).sum())
    plain = lambda: _rejected(p, _dense(given, dense), given.sampled)  # noqa: E731
    return Work(ours, plain, moved.reject_tree(shape, dense, rejected))


def _siblings(given: Inputs) -> Work:
    """Hang all nodes on the root: each rejected one changes what is left of p for the next."""
    shape = given.shape
    p = given.logits[:, 0].softmax(-1, dtype=torch.float32)
    parents = torch.full((1, shape.gamma), -1, device=given.device)
    tokens = given.q[:, 0].softmax(-1, dtype=torch.float32).multinomial(shape.gamma, replacement=True)
    coins = (given.uniform(shape.batch, shape.gamma + 1, shape.gamma), given.uniform(shape.batch, shape.gamma + 1))
    ours = partial(ops.reject_tree, *given.target, tokens, parents, given.n_valid, None, given.q, *coins, False)
    path, n, _, _ = ours()
    rejected = torch.where(n > 0, path[:, 0], shape.gamma)  # siblings, a row
    redrawn = int((n == 0).sum())
    return Work(ours, partial(_in_turn, p, given, tokens), moved.siblings(shape, int(rejected.sum()), redrawn))


def _block(given: Inputs) -> Work:
    shape = given.shape
    p = given.logits.softmax(-1, dtype=torch.float32)
    coins = (given.uniform(shape.batch, shape.gamma), given.uniform(shape.batch, shape.gamma + 1))
    ours = partial(ops.block_chain, *given.target, given.sampled, given.n_valid, None, given.q, *coins)
    return Work(ours, partial(_blocks, p, given), moved.block_chain(shape, True))


def _typical(given: Inputs) -> Work:
    p = given.logits.softmax(-1, dtype=torch.float32)
    drafted = (given.guesses, given.chain.parents, given.n_valid)
    ours = partial(ops.typical_tree, *given.target, *drafted, _EPSILON, _DELTA)
    return Work(ours, partial(_typical_path, p, given), moved.typical_tree(given.shape))


def _verify(given: Inputs, sampled: bool) -> Work:
    """Judge a chain from its logits to its verdict, as a round of ``generate()`` does."""
    shape = given.shape
    tokens = given.sampled if sampled else given.guesses
    draft = Draft(tokens, given.chain, given.n_valid, DenseQ(given.q) if sampled else None)
    ours = partial(verify_dense, Dense(given.logits), draft, given.coins, "rejection")
    rejected = int((ours().n < shape.gamma).sum())
    walk = moved.reject_tree(shape, True, rejected) if sampled else moved.match_tree(shape)

    def plain() -> object:
        p = given.logits.softmax(-1, dtype=torch.float32)
        return _rejected(p, _dense(given, True) if sampled else None, tokens)

    return Work(ours, plain, moved.row_stats(shape) + moved.row_draw(shape) + walk)


def _move_slots(given: Inputs) -> Work:
    batch = given.shape.batch
    gamma = given.shape.gamma
    size = (batch, _HEADS, _SLOTS, _CHANNELS)
    buffers = [torch.zeros(size, device=given.device, dtype=given.dtype) for _ in range(_BUFFERS)]
    destination = torch.arange(_SLOTS - 2 * gamma, _SLOTS - gamma, device=given.device).repeat(batch, 1)
    source = destination + torch.arange(1, gamma + 1, device=given.device)
    each = torch.arange(batch, device=given.device).unsqueeze(1)

    def plain() -> None:
        for buffer in buffers:
            buffer[each, :, destination] = buffer[each, :, source]

    count = 2 * _BUFFERS * batch * _HEADS * gamma * _CHANNELS * given.shape.item
    return Work(partial(ops.move_slots, buffers, source, destination), plain, count)


def _tree_mask(given: Inputs) -> Work:
    batch = given.shape.batch
    gamma = given.shape.gamma
    lengths = given.integers(1000, batch) + 1
    view = 1024 + gamma
    parents = torch.tensor([[(node - 1) // 2 for node in range(gamma)]], device=given.device)

    def plain() -> object:
        places = torch.arange(view, device=given.device)
        seen = Tree(parents).ancestors.expand(batch, -1, -1)
        node = (places - lengths.unsqueeze(1)).unsqueeze(1).expand(-1, gamma + 1, -1)
        inside = seen.gather(2, node.clamp(0, gamma))
        return (node < 0) | (inside & (node >= 0) & (node <= gamma))

    count = batch * (gamma + 1) * view
    return Work(partial(ops.tree_mask, lengths, parents, view, view, 0, False), plain, count)


def _tree_attention(given: Inputs) -> Work:
    batch = given.shape.batch
    places = given.shape.gamma + 1
    slots = _CONTEXT if given.device.type == "cuda" else _CONTEXT // 4

    def made(heads: int, width: int) -> Tensor:
        size = (batch, heads, width, _CHANNELS)
        return torch.randn(size, generator=given.source, device=given.device, dtype=given.dtype)

    query = made(_QUERY_HEADS, places)
    key = made(_HEADS, slots)
    value = made(_HEADS, slots)
    mask = torch.ones(batch, 1, places, slots, dtype=torch.bool, device=given.device).tril(slots - places)
    group = _QUERY_HEADS // _HEADS

    def plain() -> object:
        keys = key.repeat_interleave(group, 1)
        values = value.repeat_interleave(group, 1)
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=_CHANNELS**-0.5)

    count = given.shape.item * (2 * key.numel() + 2 * query.numel()) + mask.numel()
    ours = partial(ops.tree_attention, query, key, value, mask, _CHANNELS**-0.5, 0.0, None)
    return Work(ours, plain, count)


def _dense(given: Inputs, dense: bool) -> Tensor:
    """Return q as float32 probabilities ``(B, N, V)``."""
    if dense:
        return given.q.softmax(-1, dtype=torch.float32)
    ids, probs = given.listed
    return torch.zeros(given.q.shape, device=given.device).scatter_(-1, ids, probs)


def _matched(drawn: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    kept = (drawn[:, :-1] == tokens).long().cumprod(1).sum(1)
    return kept, drawn.gather(1, kept.unsqueeze(1))


def _rejected(p: Tensor, q: Tensor | None, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Accept with min(1, p/q), then draw from what q leaves of p at the first rejected place."""
    chosen = tokens.unsqueeze(-1)
    ratio = p[:, :-1].gather(-1, chosen)
    ratio = (ratio if q is None else ratio / q.gather(-1, chosen)).squeeze(-1)
    kept = (torch.rand_like(ratio) < ratio).long().cumprod(1).sum(1)
    place = kept.view(-1, 1, 1)
    row = p.gather(1, place.expand(-1, 1, p.shape[-1])).squeeze(1)
    inside = (kept < tokens.shape[1]).unsqueeze(1)
    at = place.clamp(max=tokens.shape[1] - 1)
    if q is None:
        rest = row.scatter(1, chosen.gather(1, at).squeeze(1), 0.0)
    else:
        rest = (row - q.gather(1, at.expand(-1, 1, q.shape[-1])).squeeze(1)).clamp_(min=0)
    return kept, torch.where(inside, rest, row).add_(1e-12).multinomial(1)


def _in_turn(p: Tensor, given: Inputs, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Offer siblings one after the other, renormalising what each leaves."""
    q = given.q[:, 0].softmax(-1, dtype=torch.float32)
    found = torch.zeros(len(p), dtype=torch.bool, device=p.device)
    for token in tokens.unsqueeze(-1).unbind(1):
        ratio = (p.gather(1, token) / q.gather(1, token)).squeeze(1)
        found |= torch.rand_like(ratio) < ratio
        rest = (p - q).clamp_(min=0).add_(1e-12)
        p = torch.where(found.unsqueeze(1), p, rest / rest.sum(-1, keepdim=True))
    return found, p.multinomial(1)


def _blocks(p: Tensor, given: Inputs) -> tuple[Tensor, Tensor]:
    """Run h down the chain (Sun et al. 2024, algorithm 2), then draw from what the kept block leaves."""
    q = given.q.softmax(-1, dtype=torch.float32)
    tokens = given.sampled.unsqueeze(-1)
    reach = torch.ones(len(p), 1, device=p.device)
    kept = torch.zeros_like(given.n_valid)
    last = p[:, 0]
    for i in range(tokens.shape[1]):
        left = (reach * p[:, i] - q[:, i]).clamp_(min=0)
        mass = left.sum(-1, keepdim=True)
        passes = torch.rand_like(reach) <= (mass / (mass + 1 - reach).clamp_(min=1e-12) if i else 1.0)
        kept = torch.where(passes.squeeze(1), i, kept)
        last = torch.where(passes, left, last)
        ratio = p[:, i].gather(1, tokens[:, i]) / q[:, i].gather(1, tokens[:, i])
        reach = (reach * ratio).clamp_(max=1)
    full = torch.rand_like(reach) < reach
    kept = torch.where(full.squeeze(1), tokens.shape[1], kept)
    return kept, torch.where(full, p[:, -1], last).add(1e-12).multinomial(1)


def _typical_path(p: Tensor, given: Inputs) -> tuple[Tensor, Tensor]:
    above = p[:, :-1]
    entropy = -torch.xlogy(above, above).sum(-1)
    kept = above.gather(-1, given.guesses.unsqueeze(-1)).squeeze(-1) > (_DELTA * (-entropy).exp()).clamp(max=_EPSILON)
    n = kept.long().cumprod(1).sum(1)
    return n, given.drawn[1].gather(1, n.unsqueeze(1))


CHAIN = "verify a chain"
CHAIN_Q = "verify a chain, dense q"
CASES = (
    KernelCase(CHAIN, partial(_verify, sampled=False)),
    KernelCase(CHAIN_Q, partial(_verify, sampled=True)),
    KernelCase("row_stats", _row_stats),
    KernelCase("row_draw", _row_draw),
    KernelCase("row_stats + row_draw, top-k 50, top-p .95", _truncated),
    KernelCase("gumbel_pick", _gumbel),
    KernelCase("match_tree", _match_tree),
    KernelCase("reject_tree, dense q", partial(_reject, dense=True)),
    KernelCase("reject_tree, listed q", partial(_reject, dense=False)),
    KernelCase("reject_tree, siblings", _siblings),
    KernelCase("block_chain, dense q", _block),
    KernelCase("typical_tree", _typical),
    KernelCase("tree_attention", _tree_attention, by_vocab=False, on_cpu=True),
    KernelCase("tree_mask", _tree_mask, by_vocab=False, on_cpu=True),
    KernelCase("move_slots", _move_slots, by_vocab=False, on_cpu=True),
)
