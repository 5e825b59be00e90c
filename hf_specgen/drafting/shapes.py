"""Shapes of drafts: fixed trees, trees grown by score, and the tokens that their nodes take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise, product
from operator import index

import torch
from torch import Tensor

from hf_specgen import ops
from hf_specgen.drafting.sequoia import Paths, assumed_heads, best_paths
from hf_specgen.errors import SpecGenError
from hf_specgen.round.coins import DRAFT, CoinSource
from hf_specgen.round.records import Tree

NAMES = ("chain", "eagle", "medusa")
ABSENT = -1
"""The token of a node that is not there: never accepted, and clamped before it is embedded."""

# How many children each node of a level has, the root's level first; nodes behind the last one named have none.
# Source: Li et al. 2024, "EAGLE: speculative sampling requires rethinking feature uncertainty": its fixed tree.
_EAGLE = ((4,), (3, 2, 2, 1), (3, 2, 2, 1), (3,), (2,))
_MEDUSA_NODES = 63
_STRIP = 128
NEVER = float("-inf")


@dataclass(frozen=True)
class StaticShape:
    """Describe a tree that is the same in every round: parents before children, level after level.

    ``parents[i]`` is node i's parent, -1 the root; node i takes the ``ranks[i]``-th best token of its parent's law (0
    is the best), or, where siblings are drawn, one more token without replacement.
    Raises: ``SpecGenError`` for nodes out of order or repeated ranks.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.parents) != len(self.ranks) or not self.parents:
            raise SpecGenError(f"a tree got {len(self.parents)} parents and {len(self.ranks)} ranks: a node has both.")
        edges = list(zip(self.parents, self.ranks, strict=True))
        if min(self.ranks) < 0 or any(not -1 <= parent < node for node, parent in enumerate(self.parents)):
            raise SpecGenError("a tree's parents come before their children, from -1 on, and ranks count from 0.")
        if any(before >= after for before, after in pairwise(edges)):
            raise SpecGenError("a tree's nodes are listed level by level, siblings by rising rank, none twice.")

    @classmethod
    def chain(cls, gamma: int) -> StaticShape:
        """Build the tree of width one with ``gamma`` nodes."""
        return cls(tuple(range(-1, gamma - 1)), (0,) * gamma)

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]]) -> StaticShape:
        """Build a tree from the ranks on the way to each node, in any order.

        Raises: ``SpecGenError`` for paths without ranks, repeated ones, or a node whose parent is not listed.
        """
        lines = sorted((_path(path) for path in paths), key=lambda line: (len(line), line))
        place: dict[tuple[int, ...], int] = {(): -1}
        for node, line in enumerate(lines):
            if line in place:
                raise SpecGenError(f"the tree lists the path {list(line)} twice: list each node once.")
            if line[:-1] not in place:
                raise SpecGenError(
                    f"the tree lists {list(line)} without {list(line[:-1])}: every node's parent is required. Add it."
                )
            place[line] = node
        if not lines:
            raise SpecGenError("the tree has no paths: at least [[0]] is required. For no drafts, pass no drafter.")
        return cls(tuple(place[line[:-1]] for line in lines), tuple(line[-1] for line in lines))

    @classmethod
    def product(cls, widths: Sequence[int]) -> StaticShape:
        """Build the tree in which every node of depth d has ``widths[d]`` children."""
        levels = [range(width) for width in widths]
        return cls.from_paths(path for depth in range(1, len(levels) + 1) for path in product(*levels[:depth]))

    @classmethod
    def from_counts(cls, counts: Sequence[Sequence[int]]) -> StaticShape:
        """Build a tree from the number of children of each node of a level, the root's level first; rest: none."""
        parents: list[int] = []
        ranks: list[int] = []
        level = [-1]
        for children in counts:
            start = len(parents)
            for parent, count in zip(level, children, strict=False):
                parents += [parent] * count
                ranks += range(count)
            level = list(range(start, len(parents)))
        return cls(tuple(parents), tuple(ranks))

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Return each node's depth; the root's children have 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @property
    def max_depth(self) -> int:
        """Return the depth of the deepest node."""
        return self.depths[-1]

    @property
    def is_chain(self) -> bool:
        """Tell whether the tree has width one."""
        return self.max_depth == len(self)

    @cached_property
    def levels(self) -> tuple[range, ...]:
        """Return the nodes of each depth; ``levels[0]`` are the root's children."""
        starts = [self.depths.index(depth) for depth in range(1, self.max_depth + 1)]
        return tuple(range(*ends) for ends in zip(starts, [*starts[1:], len(self)], strict=True))

    @cached_property
    def internal(self) -> tuple[int, ...]:
        """Return the nodes that have children, the root left out: those a drafter runs."""
        return tuple(sorted(set(self.parents) - {-1}))

    @cached_property
    def internal_parents(self) -> tuple[int, ...]:
        """Return each internal node's parent as a place in ``internal``, -1 for the root: the tree that runs."""
        place = {node: number for number, node in enumerate((-1, *self.internal), -1)}
        return tuple(place[self.parents[node]] for node in self.internal)

    def expanding(self, depth: int) -> tuple[int, ...]:
        """Return the nodes of a depth that have children; depth 0 is the root, ``(-1,)``."""
        return (-1,) if depth == 0 else tuple(node for node in self.internal if self.depths[node] == depth)

    @cached_property
    def paths(self) -> Paths:
        """Return the ranks on the way to each node."""
        lines: list[tuple[int, ...]] = []
        for parent, rank in zip(self.parents, self.ranks, strict=True):
            lines.append((*(lines[parent] if parent >= 0 else ()), rank))
        return tuple(lines)

    def cut(self, depth: int) -> StaticShape:
        """Keep the nodes down to a depth."""
        kept = sum(level <= depth for level in self.depths)
        return self if kept == len(self) else StaticShape(self.parents[:kept], self.ranks[:kept])

    def tree(self, device: torch.device | str | None = None) -> Tree:
        """Return the tree; keep it for all rounds of a call, since its mask is made once."""
        if self.is_chain:
            return Tree.chain(len(self), device)
        parents = torch.tensor([self.parents], device=device)
        return Tree(parents, deepest=self.max_depth, widest=max(self.ranks) + 1)

    def n_valid(self, room: Tensor) -> Tensor:
        """Return how many nodes lie within ``room (B)`` tokens."""
        ends = torch.tensor([0, *(level.stop for level in self.levels)], device=room.device)
        return ends[room.clamp(0, self.max_depth)]

    def best(self, depth: int, logits: Tensor) -> Tensor:
        """Return the tokens ``(B, n)`` of a depth's nodes: the best of their parents' laws, by rank.

        A rank that the vocabulary does not have, or that is impossible, is ``ABSENT``: clamp tokens before they are
        embedded or mapped, and ask no processor about it.

        Shapes: ``logits (B, F, V)``: of ``expanding(depth - 1)``, or F = 1 where one law serves all parents.
        """
        ranks = [self.ranks[node] for node in self.levels[depth - 1]]
        width = min(max(ranks) + 1, logits.shape[-1])
        scores, ids = top(logits, width)
        ids = ids.masked_fill(scores == NEVER, ABSENT)
        if len(ranks) == 1 and width == max(ranks) + 1:  # a chain: no list travels to the device
            return ids[:, 0, -1:]
        picked = ids[:, self._slots(depth, logits.shape[1]), [min(rank, width - 1) for rank in ranks]]
        missing = [number for number, rank in enumerate(ranks) if rank >= width]
        picked[:, missing] = ABSENT
        return picked

    def laws(self, depth: int, scores: Tensor) -> Tensor:
        """Return the law that each node of a depth was drawn from, ``(B, n, V)``; ``scores`` as ``draw`` takes them."""
        slots = self._slots(depth, scores.shape[1])
        if slots == list(range(scores.shape[1])):  # no list travels to the device
            return scores
        return scores[:, slots]

    def draw(self, depth: int, scores: Tensor, coins: CoinSource) -> Tensor:
        """Draw the tokens ``(B, n)`` of a depth's nodes, siblings without replacement.

        A sibling that the law has no token left for is ``ABSENT``: clamp tokens before they are embedded, and before a
        processor reads them. The coins are keyed by the round's start and the node, as those of drawn chains are: the
        verdict looks at nodes behind the kept part too, and no coin may decide twice.

        Shapes: ``scores (B, F, V)``: processed logits of ``expanding(depth - 1)``, or F = 1 where one law serves all.
        Source: Chen et al. 2024, "Sequoia", section 3.2; Yang et al. 2024, "Multi-candidate speculative decoding".
        """
        batch, _, vocab = scores.shape
        width, level, device = len(self.expanding(depth - 1)), self.levels[depth - 1], scores.device
        rows = torch.arange(batch, device=device)
        if len(level) == 1 and width == 1:  # a chain: no list travels to the device
            token, spent = ops.draw(scores[:, 0], coins.uniform(rows, 0, DRAFT, sibling=level.start))
            return token.masked_fill(spent, ABSENT).unsqueeze(1)
        slots, left = self._slots(depth, width), scores.expand(batch, width, vocab)
        places = [slots[:number].count(slot) for number, slot in enumerate(slots)]
        tokens = torch.full((batch, len(level)), ABSENT, device=device)
        for place in range(max(places) + 1):
            mine = [number for number, at in enumerate(places) if at == place]
            parents = torch.tensor([slots[number] for number in mine], device=device)
            nodes = torch.tensor([level[number] for number in mine], device=device)
            coin = coins.uniform(rows.repeat_interleave(len(mine)), 0, DRAFT, sibling=nodes.repeat(batch))
            law = left.index_select(1, parents)
            drawn, spent = (part.view(batch, len(mine)) for part in ops.draw(law.flatten(0, 1), coin))
            tokens[:, mine] = drawn.masked_fill(spent, ABSENT)
            if place < max(places):
                left = left.clone() if place == 0 else left
                left[rows[:, None], parents, drawn] = NEVER
        return tokens

    def _slots(self, depth: int, width: int) -> list[int]:
        """Return for each node of a depth its parent's place in ``expanding(depth - 1)``; 0 where ``width`` is 1."""
        place = {node: number for number, node in enumerate(self.expanding(depth - 1))}
        return [place[self.parents[node]] if width > 1 else 0 for node in self.levels[depth - 1]]


@dataclass(frozen=True)
class DynamicShape:
    """Describe trees that grow where the drafter is sure, another one for every row and round.

    Each level keeps the ``top_k`` nodes of the highest probability and expands each by its ``top_k`` best tokens, to
    ``depth`` tokens behind the root; of all nodes seen the ``nodes`` likeliest are drafted (None: as many as pay). The
    root is not counted: EAGLE's own "total tokens" T and "depth" d are ``nodes = T - 1`` and ``depth = d + 1`` here.
    Source: Li et al. 2024, "EAGLE-2: faster inference of language models with dynamic draft trees".
    """

    top_k: int = 10
    depth: int = 6
    nodes: int | None = 60

    def __post_init__(self) -> None:
        for name, value in (("top_k", self.top_k), ("depth", self.depth), ("nodes", self.nodes)):
            if not (value is None and name == "nodes") and (isinstance(value, bool) or _whole(value) < 1):
                raise SpecGenError(f"a dynamic tree got {name}={value!r}: a whole number of at least 1 is required.")

    @property
    def candidates(self) -> int:
        """Return how many nodes are seen: the most that can be drafted."""
        return self.top_k + (self.depth - 1) * self.top_k**2


Shape = StaticShape | DynamicShape


def depth_of(shape: Shape) -> int:
    """Return how many tokens in a row a shape can hold."""
    return shape.max_depth if isinstance(shape, StaticShape) else shape.depth


def parse_shape(spec: object, default: Shape, deepest: int | None = None) -> Shape:
    """Read the ``tree`` of a configuration: None, a name, a list of paths of ranks, or a dynamic tree's numbers.

    ``"chain"`` is ``default`` where that is a chain, else one of 4 tokens. ``deepest`` is how many tokens in a row the
    drafter can draft: named trees are cut there.
    Raises: ``SpecGenError`` for anything else, or a tree that is deeper.
    """
    shape = _parse(spec, default)
    depth = depth_of(shape)
    if deepest is None or depth <= deepest:
        return shape
    if isinstance(shape, StaticShape) and (spec is None or isinstance(spec, str)):
        return shape.cut(deepest)
    raise SpecGenError(f"the tree is {depth} tokens deep and the drafter drafts {deepest}: cut the tree there.")


def _parse(spec: object, default: Shape) -> Shape:
    if spec is None:
        return default
    if isinstance(spec, StaticShape | DynamicShape):
        return spec
    if spec == "chain":
        return default if isinstance(default, StaticShape) and default.is_chain else StaticShape.chain(4)
    if spec == "eagle":
        return StaticShape.from_counts(_EAGLE)
    if spec == "medusa":
        return StaticShape.from_paths(best_paths(assumed_heads(4), _MEDUSA_NODES))
    if isinstance(spec, Mapping):
        known = {field.name for field in fields(DynamicShape)}
        unknown = sorted(map(str, set(spec) - known))
        if unknown:
            raise SpecGenError(
                f"tree={dict(spec)!r} has {', '.join(unknown)}: only {', '.join(sorted(known))} are known."
            )
        return DynamicShape(**spec)
    if isinstance(spec, Sequence) and not isinstance(spec, str):
        return StaticShape.from_paths(spec)
    raise SpecGenError(
        f"tree={spec!r}: one of {', '.join(map(repr, NAMES))}, a list of paths of ranks such as [[0], [1], [0, 0]], or "
        'a dynamic tree\'s {"top_k": 10, "depth": 6, "nodes": 60} is required.'
    )


def _path(path: object) -> tuple[int, ...]:
    line = tuple(map(_whole, path)) if isinstance(path, Sequence) and not isinstance(path, str) else ()
    if not line or min(line) < 0:
        raise SpecGenError(f"the tree has the path {path!r}: a list of ranks that count from 0 is required.")
    return line


def _whole(value: object) -> int:
    """Return a whole number, -1 for anything else."""
    try:
        return index(value)  # type: ignore[arg-type]
    except TypeError:
        return -1


def top(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the ``k`` largest of ``scores (B, F, V)`` and their ids, both ``(B, F, k)``, the largest first."""
    flat = scores.flatten(0, 1)
    if k == 1:
        ids = ops.argmax(flat)[0].unsqueeze(-1)
    elif flat.device.type == "cpu" and flat.shape[-1] >= 4 * k * _STRIP:
        ids = _top_of_strips(flat.float(), k)
    else:
        ids = flat.topk(k, -1).indices
    return flat.gather(-1, ids).unflatten(0, scores.shape[:2]), ids.unflatten(0, scores.shape[:2])


def _top_of_strips(rows: Tensor, k: int) -> Tensor:
    """Look for the largest in the k strips of the largest maxima only: five times as fast as ``topk`` on CPU."""
    full = rows.shape[-1] // _STRIP
    whole = rows[:, : full * _STRIP].unflatten(-1, (full, _STRIP))
    strips = whole.amax(-1).topk(k, -1).indices.sort(-1).values.unsqueeze(-1)
    ids = torch.add(torch.arange(_STRIP), strips, alpha=_STRIP).flatten(1)
    tail = torch.arange(full * _STRIP, rows.shape[-1]).expand(len(rows), -1)
    ids = torch.cat([ids, tail], 1)
    return ids.gather(1, rows.gather(1, ids).topk(k, -1).indices)


def in_target_ids(picks: Tensor, target_ids: Tensor | None) -> Tensor:
    """Return the target's ids of a drafter's ``picks``; ``ABSENT`` stays. ``target_ids`` None: the ids are the same."""
    if target_ids is None:
        return picks
    return target_ids[picks.clamp(min=0)].masked_fill(picks == ABSENT, ABSENT)
