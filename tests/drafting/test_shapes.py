"""Shapes of drafts against EAGLE's published buffers and drafting, written again here from the papers' description."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from hf_specgen.drafting.growth import Growth, rerank
from hf_specgen.drafting.shapes import ABSENT, DynamicShape, StaticShape, parse_shape, top
from hf_specgen.errors import SpecGenError
from hf_specgen.round.coins import Coins
from hf_specgen.round.costs import Costs
from hf_specgen.round.records import Tree

EAGLE = [[0], [1], [2], [3], [0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [2, 0], [2, 1], [3, 0]]
EAGLE += [[0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 1, 1], [0, 2, 0], [0, 2, 1], [1, 0, 0]]
EAGLE += [[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]]
SKIPS = [[0], [2], [2, 1], [0, 0], [2, 1, 3]]  # ranks with gaps are fine where tokens are picked, not drawn
CHAIN = StaticShape.chain(3)


@dataclass
class Buffers:
    """What EAGLE-1 makes of a list of paths: nodes sorted by length, then by rank; node 0 is the root."""

    mask: list[list[int]]
    positions: list[int]
    leaves: list[list[int]]
    picks: list[int]


def buffers(paths: list[list[int]], top_k: int = 10) -> Buffers:
    """Build a static tree's buffers from strings of ranks alone.

    ``picks`` name a node's token in the list root, then ``top_k`` candidates of each node that has children.
    """
    lines = sorted((tuple(path) for path in paths), key=lambda line: (len(line), line))
    number = {(): 0, **{line: place for place, line in enumerate(lines, 1)}}
    mask = [[int(number_of in _above(line, number)) for number_of in range(len(lines) + 1)] for line in ((), *lines)]
    inner = sorted({line[:-1] for line in lines}, key=lambda line: (len(line), line))
    picks = [0, *(1 + top_k * inner.index(line[:-1]) + line[-1] for line in lines)]
    leaves = [line for line in lines if line not in inner]
    depth = max(map(len, lines))
    rows = [[0, *(number[line[: end + 1]] for end in range(len(line)))] for line in leaves]
    return Buffers(mask, [0, *map(len, lines)], sorted(row + [-1] * (depth + 1 - len(row)) for row in rows), picks)


def _above(line: tuple[int, ...], number: dict[tuple[int, ...], int]) -> set[int]:
    return {number[line[:end]] for end in range(len(line) + 1)}


def leaf_lines(tree: Tree, row: int = 0) -> list[list[int]]:
    parents = tree.parents[row].tolist()
    depth = tree.max_depth
    lines = []
    for leaf in set(range(len(parents))) - set(parents):
        line = [leaf]
        while parents[line[0]] >= 0:
            line.insert(0, parents[line[0]])
        lines.append([0, *(node + 1 for node in line)] + [-1] * (depth - len(line)))
    return sorted(lines)


@pytest.mark.parametrize("paths", [EAGLE, SKIPS, [[0], [0, 0], [0, 0, 0]], StaticShape.product((3, 2, 2)).paths])
def test_static_trees_are_eagles_buffers(paths: list[list[int]]) -> None:
    shape, expected = StaticShape.from_paths(reversed(paths)), buffers([list(path) for path in paths])
    tree = shape.tree()
    assert tree.ancestors[0].int().tolist() == expected.mask
    assert tree.depth[0].tolist() == expected.positions
    assert leaf_lines(tree) == expected.leaves
    assert (0, *shape.depths) == tuple(expected.positions)
    torch.manual_seed(0)
    logits = {(): torch.randn(40)} | {line: torch.randn(40) for line in shape.paths}
    inner = [(), *(shape.paths[node] for node in shape.internal)]
    flat = [-7, *(token for line in inner for token in logits[line].topk(10).indices.tolist())]
    tokens = [-7]
    for depth in range(1, shape.max_depth + 1):
        above = [shape.paths[node] if node >= 0 else () for node in shape.expanding(depth - 1)]
        tokens += shape.best(depth, torch.stack([logits[line] for line in above]).unsqueeze(0))[0].tolist()
    assert tokens == [flat[pick] for pick in expected.picks]


def test_the_named_eagle_tree() -> None:
    shape = parse_shape("eagle", CHAIN)
    assert isinstance(shape, StaticShape)
    assert [list(path) for path in shape.paths] == EAGLE
    assert [len(level) for level in shape.levels] == [4, 8, 8, 3, 2]
    assert shape.levels[1] == range(4, 12)
    assert (len(shape), shape.max_depth, shape.is_chain) == (25, 5, False)
    runs = [shape.expanding(depth) for depth in range(6)]
    assert runs == [(-1,), (0, 1, 2, 3), (4, 5, 6, 7), (12,), (20,), ()]
    assert shape.internal == tuple(node for run in runs[1:] for node in run)
    assert [(-1, *shape.internal)[at + 1] for at in shape.internal_parents] == [
        shape.parents[n] for n in shape.internal
    ]


def test_chains() -> None:
    chain = StaticShape.chain(3)
    assert chain == StaticShape.from_paths([[0], [0, 0], [0, 0, 0]]) == StaticShape.product((1, 1, 1))
    assert chain.is_chain
    assert chain.tree().is_chain
    assert chain.cut(2) == StaticShape.chain(2)
    assert StaticShape.chain(1).internal == ()


def test_cut_and_room_keep_whole_levels() -> None:
    shape = StaticShape.from_paths(EAGLE)
    assert shape.n_valid(torch.tensor([0, 1, 2, 3, 4, 5, 99])).tolist() == [0, 4, 12, 20, 23, 25, 25]
    for depth in range(1, 6):
        cut = shape.cut(depth)
        assert cut.paths == tuple(path for path in shape.paths if len(path) <= depth)
    assert shape.cut(5) is shape


def test_a_shared_law_serves_every_parent() -> None:
    """Medusa's heads know no parent: one law a depth."""
    shape = StaticShape.product((2, 3))
    logits = torch.randn(2, 1, 30)
    whole = shape.best(2, logits.expand(2, 2, 30))
    assert torch.equal(shape.best(2, logits), whole)
    assert whole.tolist() == [row[:3] * 2 for row in logits[:, 0].topk(3).indices.tolist()]
    assert torch.equal(shape.laws(2, logits), logits.expand(2, 6, 30))


def test_ranks_beyond_the_vocabulary_are_absent() -> None:
    shape = StaticShape.from_paths([[0], [1], [2], [3]])
    assert shape.best(1, torch.tensor([[[0.1, 0.3, 0.2]]])).tolist() == [[1, 2, 0, ABSENT]]
    assert StaticShape((-1,), (5,)).best(1, torch.zeros(2, 1, 3)).tolist() == [[ABSENT], [ABSENT]]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ([[0], [1, 0]], r"\[1, 0\] without \[1\]"),
        ([[0], [0]], r"\[0\] twice"),
        ([], "no paths"),
        ([[]], "path"),
        ([[0], [-1]], "path"),
        ([[0.5]], "path"),
        (["0"], "path"),
        ("sequoia", "sequoia"),
        (7, "tree=7"),
        ({"top_k": 4, "width": 3}, "width"),
        ({"top_k": 0}, "top_k=0"),
        ({"depth": 2.5}, "depth=2.5"),
        ({"nodes": 0}, "nodes=0"),
        ({"top_k": None}, "top_k=None"),
        ({"depth": True}, "depth=True"),
    ],
)
def test_bad_trees_are_refused(spec: object, said: str) -> None:
    with pytest.raises(SpecGenError, match=said):
        parse_shape(spec, CHAIN)


@pytest.mark.parametrize("bad", [((), ()), ((0,), (0,)), ((-1, -1), (1, 0)), ((-1, -1), (0, 0)), ((-1, 1), (0, 0))])
def test_nodes_out_of_order_are_refused(bad: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    with pytest.raises(SpecGenError):
        StaticShape(*bad)


def test_parse_shape() -> None:
    assert parse_shape(None, CHAIN) is CHAIN
    assert parse_shape("chain", CHAIN) is CHAIN
    assert parse_shape("chain", DynamicShape()) == StaticShape.chain(4)
    assert parse_shape([[1], [0], (1, 0)], CHAIN) == StaticShape((-1, -1, 1), (0, 1, 0))
    assert parse_shape({"top_k": 4, "nodes": None}, CHAIN) == DynamicShape(4, 6, None)
    assert parse_shape(CHAIN, DynamicShape()) is CHAIN
    medusa = parse_shape("medusa", CHAIN)
    assert isinstance(medusa, StaticShape)
    assert (len(medusa), medusa.max_depth, len(medusa.levels[0])) == (63, 4, 10)


def test_a_tree_deeper_than_the_drafter() -> None:
    assert parse_shape("eagle", CHAIN, deepest=2) == StaticShape.from_paths(EAGLE[:12])
    assert parse_shape(None, StaticShape.chain(9), deepest=2) == StaticShape.chain(2)
    for deep in (EAGLE, {"depth": 5}):
        with pytest.raises(SpecGenError, match="5 tokens deep and the drafter drafts 4"):
            parse_shape(deep, CHAIN, deepest=4)


class Model:
    """A drafter whose law after a path is random, but always the same; logits in float32."""

    def __init__(self, vocab: int, seed: int, sharp: float = 2.0) -> None:
        self.vocab, self.seed, self.sharp = vocab, seed, sharp

    def __call__(self, path: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(hash((self.seed, path)) % (1 << 60))
        return (self.sharp * torch.randn(self.vocab, generator=generator)).log_softmax(-1)


@dataclass
class Drafted:
    tokens: list[int]
    mask: list[list[int]]
    positions: list[int]
    leaves: list[list[int]]


def eagle2(model: Model, k: int, d: int, total: int) -> Drafted:
    """Draft one tree as EAGLE-2 numbers it: k first nodes, then ``d`` times k x k; ``total`` counts the root."""
    first = model(()).topk(k)
    paths = [(int(token),) for token in first.indices]
    frontier, scores = list(paths), first.values
    kept, kept_scores, parents = list(paths), scores.tolist(), [0] * k
    names = list(range(k))  # flat numbers of the frontier
    for _ in range(d):
        laws = torch.stack([model(path) for path in frontier]).topk(k)
        below = (scores[:, None] + laws.values).flatten()
        children = [(*path, int(token)) for path, row in zip(frontier, laws.indices, strict=True) for token in row]
        parents += [1 + names[place // k] for place in range(k * k)]
        best = below.topk(k)
        names = [len(kept) + int(place) for place in best.indices]
        kept, kept_scores = kept + children, kept_scores + below.tolist()
        frontier, scores = [children[int(place)] for place in best.indices], best.values
    chosen = torch.tensor(kept_scores).topk(total - 1).indices.sort().values.tolist()
    number = {0: 0, **{flat + 1: place for place, flat in enumerate(chosen, 1)}}
    above = [number[parents[flat]] for flat in chosen]
    mask = torch.eye(total, dtype=torch.long)
    mask[:, 0] = 1
    for place, parent in enumerate(above, 1):
        mask[place] |= mask[parent]
    lines = []
    for leaf in set(range(1, total)) - set(above):
        line = [leaf]
        while line[0]:
            line.insert(0, above[line[0] - 1])
        lines.append(line)
    deepest = max(map(len, lines))
    lines = [line + [-1] * (deepest - len(line)) for line in lines]
    return Drafted([kept[flat][-1] for flat in chosen], mask.tolist(), (mask.sum(1) - 1).tolist(), sorted(lines))


def grow(models: list[Model], shape: DynamicShape) -> tuple[Growth, list[list[tuple[int, ...]]]]:
    """Drive ``Growth`` as a drafter does, a row a model; also return the paths of all nodes run, a row each."""
    growth = Growth(shape)
    frontier: list[list[tuple[int, ...]]] = [[()] for _ in models]
    run: list[list[tuple[int, ...]]] = [[] for _ in models]
    for level in range(shape.depth):
        laws = [torch.stack([model(path) for path in row]) for model, row in zip(models, frontier, strict=True)]
        ids, above = growth.add(torch.stack(laws))
        frontier = [
            [(*row[parent], token) for token, parent in zip(*pair, strict=True)]
            for row, *pair in zip(frontier, ids.tolist(), above.tolist(), strict=True)
        ]
        run = [old + new for old, new in zip(run, frontier, strict=True)]
        assert growth.levels == level + 1
    return growth, run


@pytest.mark.parametrize(("total", "d", "k"), [(12, 4, 4), (60, 5, 10), (2, 1, 2), (7, 0, 6)])
def test_dynamic_trees_are_eagle_2s(total: int, d: int, k: int) -> None:
    models = [Model(vocab, seed) for vocab, seed in ((50, 1), (50, 2), (50, 3))]
    growth, _ = grow(models, DynamicShape(k, d + 1, total - 1))
    room = torch.full((3,), 99)
    ids, parents, n_valid, scores = growth.finish(total - 1, room)
    assert n_valid.tolist() == [total - 1] * 3
    for row, model in enumerate(models):
        expected, tree = eagle2(model, k, d, total), Tree(parents[row : row + 1])
        assert ids[row].tolist() == expected.tokens
        assert tree.ancestors[0].int().tolist() == expected.mask
        assert tree.depth[0].tolist() == expected.positions
        assert leaf_lines(tree) == expected.leaves
    assert len({tuple(row) for row in parents.tolist()}) > 1 or total < 12, "every row has a tree of its own"
    assert (scores <= 0).all()


def test_the_tree_that_runs() -> None:
    """``frontier_parents`` is what the drafter's mask is made of: the nodes run, in the order they were run."""
    models = [Model(40, 5), Model(40, 6)]
    growth, run = grow(models, DynamicShape(4, 4, 10))
    parents = growth.frontier_parents()
    assert parents.shape == (2, 16)
    tree = Tree(parents)
    for row, paths in enumerate(run):
        for node, path in enumerate(paths):
            above = [paths[other - 1] for other in tree.ancestors[row, node + 1].nonzero().flatten().tolist() if other]
            assert sorted(above, key=len) == [path[: end + 1] for end in range(len(path))]


def brute_force(model: Model, k: int, depth: int) -> dict[tuple[int, ...], float]:
    """Score every path that a wide enough growth sees."""
    scores: dict[tuple[int, ...], float] = {(): 0.0}
    for level in range(depth):
        for path in [path for path in scores if len(path) == level]:
            law = model(path).topk(k)
            for token, value in zip(law.indices.tolist(), law.values.tolist(), strict=True):
                scores[(*path, token)] = scores[path] + value
    scores.pop(())
    return scores


def lines_of(ids: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    lines: list[tuple[int, ...]] = []
    for token, parent in zip(ids, parents, strict=True):
        lines.append((*(lines[parent] if parent >= 0 else ()), token))
    return lines


@pytest.mark.parametrize("room", [1, 2, 3])
def test_room_bounds_the_depth_and_not_the_number_of_nodes(room: int) -> None:
    """A row with little room gets the best of its shallow nodes, as many as asked while there are any."""
    models = [Model(30, 8), Model(30, 9)]
    growth, _ = grow(models, DynamicShape(3, 3, 9))
    ids, parents, n_valid, scores = growth.finish(9, torch.tensor([room, 3]))
    assert n_valid.tolist() == [[3, 9, 9][room - 1], 9]
    lines = lines_of(ids[0, : n_valid[0]].tolist(), parents[0, : n_valid[0]].tolist())
    assert max(map(len, lines)) <= room
    assert parents[0, n_valid[0] :].tolist() == [-1] * int(9 - n_valid[0])
    if room < 3:  # the first two levels are seen in full
        allowed = brute_force(models[0], 3, room)
        assert set(lines) == set(sorted(allowed, key=lambda line: -allowed[line])[:9])
        assert scores[0, : n_valid[0]].tolist() == pytest.approx([allowed[line] for line in lines], abs=1e-5)


def test_no_room_and_no_nodes() -> None:
    growth, _ = grow([Model(30, 8)], DynamicShape(3, 2, 9))
    assert growth.finish(9, torch.tensor([0]))[2].tolist() == [0]
    ids, parents, n_valid, _ = growth.finish(0, torch.tensor([5]))
    assert (ids.shape, parents.shape, n_valid.tolist()) == ((1, 0), (1, 0), [0])


def orphans(chosen: Tensor, links: Tensor, n_valid: Tensor, parents: Tensor) -> int:
    """Count chosen nodes whose parent is not chosen, or not named right."""
    wrong = 0
    for row in range(len(chosen)):
        nodes = chosen[row, : n_valid[row]].tolist()
        for place, node in enumerate(nodes):
            above, link = int(parents[row, node]), int(links[row, place])
            wrong += link != -1 if above < 0 else not (0 <= link < place and nodes[link] == above)
    return wrong


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_ties_leave_no_orphan(dtype: torch.dtype) -> None:
    """A sure drafter gives children the very score of their parent; coarse scores tie across the whole tree."""
    torch.manual_seed(0)
    naive = 0
    for _ in range(40):
        growth = Growth(DynamicShape(4, 5, 20))
        for width in (1, 4, 4, 4, 4):
            growth.add((torch.randint(-2, 1, (3, width, 9)) * (torch.rand(3, width, 9) > 0.6)).to(dtype))
        scores, parents = growth._within(torch.full((3,), 9)), torch.cat(growth._parents, 1)
        depth = growth._depth(scores.device)
        nodes = int(torch.randint(1, 40, ()))
        result = rerank(scores, parents, depth, nodes)
        assert orphans(*result, parents) == 0
        assert result[0].shape[1] == nodes
        # negative control: the largest scores without a word about ties, as a plain topk may choose them
        shuffled = torch.randperm(scores.shape[1])
        chosen = shuffled[scores[:, shuffled].topk(nodes).indices].sort(-1).values
        for row, nodes_of_row in enumerate(chosen.tolist()):
            naive += sum(int(parents[row, node]) not in [-1, *nodes_of_row] for node in nodes_of_row)
    assert naive > 100


def test_equals_are_chosen_from_the_root_down() -> None:
    scores = torch.tensor([[-1.0, -1.0, -1.0, -1.0, -1.0, -2.0], [-1.0, -3.0, -1.0, -1.0, -1.0, -4.0]])
    parents, depth = torch.tensor([[-1, -1, 0, 1, 2, 3], [-1, -1, 0, 0, 2, 3]]), torch.tensor([1, 1, 2, 2, 3, 3])
    chosen, links, n_valid = rerank(scores, parents, depth, 3)
    assert chosen.tolist() == [[0, 1, 2], [0, 2, 3]]
    assert links.tolist() == [[-1, -1, 0], [-1, 0, 0]]
    assert n_valid.tolist() == [3, 3]


def test_broken_and_impossible_tokens_are_never_drafted() -> None:
    growth = Growth(DynamicShape(3, 2, 9))
    first = torch.tensor([[[-0.5, -math.inf, -1.0, -math.inf]], [[math.nan] * 4]])
    growth.add(first)
    growth.add(torch.full((2, 3, 4), -math.inf))
    ids, parents, n_valid, _ = growth.finish(9, torch.tensor([5, 5]))
    assert n_valid.tolist() == [2, 0]
    assert ids[0, :2].tolist() == [0, 2]
    assert ((parents >= -1) & (parents < torch.arange(9))).all()


def test_a_vocabulary_smaller_than_the_tree_is_wide() -> None:
    growth, run = grow([Model(3, 4)], DynamicShape(10, 3, 40))
    assert growth.frontier_parents().shape == (1, 3 + 9 + 10)
    ids, parents, n_valid, _ = growth.finish(40, torch.tensor([9]))
    lines = lines_of(ids[0].tolist(), parents[0].tolist())
    assert len(set(lines)) == int(n_valid) == ids.shape[1] == 3 + 9 + 27
    assert len(set(run[0])) == 22


def test_as_many_nodes_as_pay() -> None:
    """The number is the best of all numbers, a tree of a sure drafter is larger, and no room or no gain means none."""
    growth, _ = grow([Model(60, 1, sharp=4.0), Model(60, 2, sharp=4.0)], DynamicShape(5, 4, None))
    room, remaining = torch.tensor([9, 9]), [50, 50]
    costs = Costs(row=0.1, slope=0.05, draft=0.03)

    def gain(nodes: int) -> float:
        scores = growth.finish(nodes, room)[3]
        return (2 + float(scores.exp().sum())) / (costs.forward(2, nodes) / costs.forward(2, 0) + 4 * costs.draft)

    nodes = growth.paying(costs, remaining, room)
    assert nodes == max(range(60), key=gain)
    assert 1 < nodes < 60
    dear = replace(costs, draft=0.3)  # what was spent on drafting is shared by all nodes: more of them pay
    assert growth.paying(dear, remaining, room) > nodes
    assert growth.paying(Costs(slope=0.0001), remaining, room) > nodes
    assert growth.paying(Costs(slope=3.0), remaining, room) == 0
    assert growth.paying(costs, remaining, torch.tensor([0, 0])) == 0
    unsure, _ = grow([Model(60, 1, sharp=0.1)] * 2, DynamicShape(5, 4, None))
    assert unsure.paying(costs, remaining, room) == 0
    # a finished row weighs nothing: the other one decides
    alone, _ = grow([Model(60, 1, sharp=4.0)], DynamicShape(5, 4, None))
    pair = Costs(slope=0.05)
    assert growth.paying(pair, [50, 0], torch.tensor([9, 0])) == alone.paying(pair, [50], torch.tensor([9]))


@pytest.mark.parametrize("vocab", [12, 512, 1000, 6144, 49_152 // 4 + 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_top(vocab: int, dtype: torch.dtype) -> None:
    torch.manual_seed(vocab)
    scores = torch.randn(2, 3, vocab).to(dtype)
    scores[0, :, -1] += 9  # behind the last full strip
    for k in (1, 2, 10):
        values, ids = top(scores, k)
        assert torch.equal(values, scores.topk(k, -1).values)
        assert torch.equal(scores.gather(-1, ids), values)
        assert all(len(set(row)) == k for row in ids.flatten(0, 1).tolist())


def test_top_where_all_are_equal() -> None:
    values, ids = top(torch.zeros(1, 2, 8192), 5)
    assert not values.any()
    assert all(len(set(row)) == 5 for row in ids[0].tolist())


class HalfCoins(Coins):
    """Toss one half everywhere."""

    def uniform(self, rows: Tensor, depth: Tensor | int, use: int, sibling: Tensor | int = 0) -> Tensor:
        return torch.full((len(rows),), 0.5, dtype=torch.float64)


def test_a_level_of_a_drawn_chain_sends_no_list_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = StaticShape.chain(3)
    scores = torch.randn(2, 1, 8)
    coins = HalfCoins(torch.tensor([1, 1]), torch.tensor([0, 1]), torch.tensor([5, 9]))

    def refuse(*_: object, **__: object) -> Tensor:
        raise AssertionError("a list travels to the device")

    monkeypatch.setattr(torch, "tensor", refuse)
    assert chain.draw(2, scores, coins).shape == (2, 1)
    assert chain.laws(2, scores) is scores
    with pytest.raises(AssertionError, match="travels"):
        StaticShape.product([2]).draw(1, scores, coins)
