"""How many bytes each kernel moves, by formula from the kernels as they are written, beside the schemes of others.

Counted is what has to come from or go to memory at least once; what a program reads again at once stays in cache. The
figures of vLLM and SGLang were read from their sources, not profiled, and leave out what is small.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

CHUNK = 8192
STRIP = 128
LISTED_STRIPS = 256  # so many strips a truncated row looks into at most
_LAW = 8 + 32 + 1  # token, law, flag


@dataclass(frozen=True)
class Shape:
    """Name a round: rows, draft length, vocabulary, bytes of a logit of the target and of q, tokens in a listed q."""

    batch: int
    gamma: int
    vocab: int
    item: int = 2
    q_item: int = 2
    listed: int = 32

    @property
    def rows(self) -> int:
        """Return how many rows of logits a round scores."""
        return self.batch * (self.gamma + 1)

    @property
    def floor(self) -> int:
        """Return the bytes of the target's logits: each must be read once, for any row may be the one needed."""
        return self.rows * self.vocab * self.item

    @property
    def chunks(self) -> int:
        """Return the chunks of a row."""
        return -(-self.vocab // CHUNK)

    @property
    def again(self) -> int:
        """Return how many logits of a row are read again to draw from it: a chunk, then a strip of it."""
        return min(CHUNK, self.vocab) + min(STRIP, self.vocab)

    @property
    def strips(self) -> int:
        """Return the strips of a row."""
        return -(-self.vocab // STRIP)


def row_stats(shape: Shape, strips: bool = False) -> int:
    """Count the one full pass and what it notes: maximum, sum, best place a chunk; with ``strips`` maxima a strip."""
    return shape.floor + shape.rows * (4 + 12 * shape.chunks + 4 * shape.strips * strips)


def row_draw(shape: Shape, greedy: bool = False, top_k: int | None = None) -> int:
    """Count a draw: the chunks' sums, then one chunk and one strip of it.

    A truncated row reads its strips' maxima and the strips that can hold what stays, ``top_k`` of them or, with 0, all
    that are listed. Of its list one entry a strip is counted: a share of the bandwidth must not be flattered.
    """
    each = 12 + 8 * shape.chunks + _LAW
    if greedy:
        return shape.rows * (each + 4)
    if top_k is None:
        return shape.rows * (each + shape.again * shape.item)
    read = min(top_k or LISTED_STRIPS, LISTED_STRIPS, shape.strips)
    return shape.rows * (each + 12 + 4 * shape.strips + read * (12 + STRIP * shape.item))


def gumbel_pick(shape: Shape) -> int:
    """Count one full pass; noise is made in place."""
    return shape.floor + shape.rows * (4 + 24 + 24 * shape.chunks + 9)


def match_tree(shape: Shape) -> int:
    """Count tokens, parents and draws: no logit is read."""
    return shape.batch * (9 * (shape.gamma + 1) + 24 * shape.gamma + 8 + 17)


def _left(shape: Shape, places: int, drawn: int, dense: bool) -> int:
    """Count what is left of p at ``places`` rows, and the draw from ``drawn`` of them."""
    item = shape.item + shape.q_item * dense
    return places * (shape.vocab * item + 8 * shape.chunks) + drawn * (8 * shape.chunks + shape.again * item)


def _draft_sums(shape: Shape) -> int:
    return shape.batch * shape.gamma * (shape.vocab * shape.q_item + 8 * shape.chunks)


def reject_tree(shape: Shape, dense: bool, rejected: int | None = None) -> int:
    """Count a walk by recursive rejection where ``rejected`` rows of the batch (default: all) redraw their last token.

    Of a dense q every row is summed once; a listed one is read as it is.
    """
    rejected = shape.batch if rejected is None else rejected
    q = _draft_sums(shape) if dense else shape.batch * shape.gamma * shape.listed * 12
    return match_tree(shape) + q + _left(shape, rejected, rejected, dense)


def siblings(shape: Shape, rejected: int, redrawn: int) -> int:
    """Count a walk over children of the root alone: q once, and a pass over p and q for each that is rejected.

    ``rejected`` children in all, and ``redrawn`` rows of which none is accepted.
    """
    whole = shape.vocab * (shape.item + shape.q_item)
    q = shape.batch * (shape.vocab * shape.q_item + 8 * shape.chunks)
    return match_tree(shape) + q + (rejected - redrawn) * whole + _left(shape, redrawn, redrawn, True)


def block_chain(shape: Shape, dense: bool) -> int:
    """Count a block's verdict: a dense q asks what is left at every place, a listed one only where it ends."""
    q = _draft_sums(shape) if dense else shape.batch * shape.gamma * shape.listed * 12
    places = shape.batch * (shape.gamma if dense else 1)
    return match_tree(shape) + q + _left(shape, places, shape.batch, dense) + 40 * shape.rows


def typical_tree(shape: Shape) -> int:
    """Count the entropy of every place of a chain that has a child."""
    return match_tree(shape) + shape.batch * shape.gamma * (shape.vocab * shape.item + 8 * shape.chunks + 32)


@dataclass(frozen=True)
class Scheme:
    """Hold what one kind of verification moves: ours, and others' where they have such a path (bytes)."""

    name: str
    ours: Callable[[Shape], int]
    vllm_v2: Callable[[Shape], int] | None = None
    vllm_v1: Callable[[Shape], int] | None = None
    sglang: Callable[[Shape], int] | None = None


def _plain(shape: Shape) -> int:
    return row_stats(shape) + row_draw(shape)


def _vllm_v2(shape: Shape, q: bool = False, cut: int = 0, block: bool = False) -> int:
    """A float32 copy, temperature, statistics of the drafted rows, one row read again; ``cut`` is a truncation."""
    drafted = shape.batch * shape.gamma
    q_item = shape.q_item * q
    each = shape.rows * (shape.item + 4 + 8 + cut + (4 + q_item) * block)
    return shape.vocab * (each + (drafted + shape.batch) * (4 + q_item))


def _vllm_v1(shape: Shape, extra: int = 8) -> int:
    """A gather, a float32 copy, a clone, a softmax, the recovered token; ``extra``: temperature, q and noise, a cut."""
    return shape.rows * shape.vocab * (2 * shape.item + shape.item + 4 + 8 + 16 + 4 + extra)


def _sglang_tree(shape: Shape) -> int:
    """Division, softmax, renormalised top-k; zeros for q; the last row read twice."""
    return shape.vocab * (shape.rows * (shape.item + 20 + 12) + shape.batch * (shape.gamma * 4 + 16))


def _sglang_chain(shape: Shape) -> int:
    """A softmax of p alone (q comes as probabilities), and the last row of both twice."""
    return shape.vocab * (shape.rows * (3 * shape.item + 4) + shape.batch * 16)


SCHEMES = (
    Scheme(
        "greedy",
        lambda s: row_stats(s) + row_draw(s, greedy=True) + match_tree(s),
        lambda s: s.vocab * s.rows * (s.item + 4 + 4),
        lambda s: _vllm_v1(s, 0),
        lambda s: s.floor,
    ),
    Scheme("T = 1, drafts without chance", lambda s: _plain(s) + match_tree(s), _vllm_v2, _vllm_v1, _sglang_tree),
    Scheme("T = 1, q as logits", lambda s: _plain(s) + reject_tree(s, True), lambda s: _vllm_v2(s, q=True)),
    Scheme(
        "T = 1, q as probabilities (ours: listed)",
        lambda s: _plain(s) + reject_tree(s, False),
        None,
        lambda s: _vllm_v1(s, 16),
        _sglang_chain,
    ),
    Scheme(
        "top-k 50, top-p, drafts without chance",
        lambda s: row_stats(s, True) + row_draw(s, top_k=50) + match_tree(s),
        lambda s: _vllm_v2(s, cut=12),
        lambda s: _vllm_v1(s, 20),
        lambda s: _sglang_tree(s),
    ),
    Scheme(
        "block, q as logits",
        lambda s: _plain(s) + block_chain(s, True),
        lambda s: _vllm_v2(s, q=True, block=True),
    ),
    Scheme("block, q listed", lambda s: _plain(s) + block_chain(s, False)),
    Scheme("Gumbel coupling", lambda s: gumbel_pick(s) + match_tree(s)),
    Scheme("typical acceptance (lossy)", lambda s: _plain(s) + typical_tree(s)),
)


def byte_table(shape: Shape) -> str:
    """Write a Markdown table of megabytes, and in brackets of passes over the target's logits."""

    def cell(count: Callable[[Shape], int] | None) -> str:
        return "-" if count is None else f"{count(shape) / 1e6:.1f} ({count(shape) / shape.floor:.2f})"

    lines = ["| verification | floor | ours | vLLM V2 | vLLM V1 | SGLang |", "| --- | --- | --- | --- | --- | --- |"]
    for scheme in SCHEMES:
        cells = [cell(count) for count in (scheme.ours, scheme.vllm_v2, scheme.vllm_v1, scheme.sglang)]
        lines.append(f"| {scheme.name} | {shape.floor / 1e6:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
