"""What passes see, against dense masks written down from the texts: trees, blocks seen both ways, sparse views."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from ragged_trees import LENGTHS, random_tree
from tiny import build, prompts
from torch import Tensor
from transformers import AutoConfig

from hf_specgen import ops
from hf_specgen.models.cached_model import CachedModel
from hf_specgen.models.passes import Pass
from hf_specgen.models.prompt import Prompt
from hf_specgen.models.slot_cache import SlotCache
from hf_specgen.models.visibility import BlockVisibility, SlotMap, TreeVisibility, Visibility
from hf_specgen.round.records import Tree

WINDOW = 6
TEXTS = [3, 7, 15, 29]  # the last ones went round every ring
NAMES = {"full_attention": None, "sliding_attention": WINDOW, "chunked_attention": WINDOW}


@dataclass(frozen=True)
class SparseVisibility(Visibility):
    """Show only the first ``sinks`` and the last ``recent`` tokens of the text: a new kind is one class."""

    inner: Visibility
    sinks: int
    recent: int

    @property
    def depth(self) -> Tensor:
        return self.inner.depth

    def mask(self, slots: SlotMap) -> Tensor:
        mask = self.inner.mask(slots)
        last = slots.lengths[:, None] + self.depth.shape[1] - 1
        index = last - (last - torch.arange(slots.view)) % slots.capacity
        shown = (index < self.sinks) | (index >= slots.lengths[:, None] - self.recent)
        return mask & shown[:, None]

    def widened(self, lanes: Tensor, total: int) -> Visibility:
        return SparseVisibility(self.inner.widened(lanes, total), self.sinks, self.recent)


def config_of(kind: str):
    if kind == "chunked_attention":
        layers = {"layer_types": [kind], "no_rope_layers": [1], "attention_chunk_size": WINDOW}
        return AutoConfig.for_model("llama4_text", num_hidden_layers=1, vocab_size=64, **layers)
    window = {"sliding_window": NAMES[kind]}
    return AutoConfig.for_model("mistral", num_hidden_layers=1, vocab_size=64, **window)


def filled(kind: str, reserve: int = 0) -> SlotCache:
    """Return a cache in which every slot holds the index of its token, of ragged texts."""
    cache = SlotCache(config_of(kind), len(TEXTS), reserve=reserve)
    cache.begin_prefill(4, [1] * len(TEXTS), left_padded=False)
    write(cache, torch.zeros(len(TEXTS), 4))
    cache.crop_rows([0] * len(TEXTS))
    for start in range(0, max(TEXTS), 4):
        cache.begin(4)
        write(cache, torch.arange(start, start + 4.0).expand(len(TEXTS), -1))
        cache.commit([min(max(length - start, 0), 4) for length in TEXTS])
    assert cache.lengths == TEXTS
    return cache


def write(cache: SlotCache, numbers: Tensor) -> Tensor:
    """Push numbers through the layer; return the ``(R, view)`` numbers that attention reads."""
    keys, _ = cache.update(numbers[:, None, :, None], numbers[:, None, :, None], 0)
    return keys[:, 0, :, 0]


def near(kind: str, query: int, key: int) -> bool:
    if kind == "chunked_attention":
        return query // WINDOW == key // WINDOW
    return kind == "full_attention" or query - key < WINDOW


def seen_by_tree(tree: Tree, kind: str, row: int, place: int) -> set[float]:
    """Write down what a node sees: text by its index, nodes by 100 and their number (the root: 100)."""
    parents = tree.parents[row].tolist()
    path = [place]
    while path[-1] > 0:
        path.append(parents[path[-1] - 1] + 1)
    position = TEXTS[row] + len(path) - 1
    text = {float(index) for index in range(TEXTS[row]) if near(kind, position, index)}
    depths = {node: len(path) - 1 - step for step, node in enumerate(path)}
    return text | {100.0 + node for node, depth in depths.items() if near(kind, position, TEXTS[row] + depth)}


def seen_in_block(sizes: list[int], kind: str, row: int, place: int) -> set[float]:
    """Write down what a position of a block sees: the whole block, and the text near it."""
    position = TEXTS[row] + place
    text = {float(index) for index in range(TEXTS[row]) if near(kind, position, index)}
    return text | {100.0 + other for other in range(sizes[row]) if near(kind, position, TEXTS[row] + other)}


def compare(cache: SlotCache, visibility: Visibility, kind: str, expected) -> None:
    """Run a pass of numbers from 100 on, and compare what every position sees."""
    width = visibility.depth.shape[1]
    cache.begin(width)
    numbers = write(cache, torch.arange(100.0, 100 + width).expand(len(TEXTS), -1))
    mask = cache.masks(visibility)[kind].expand(len(TEXTS), -1, -1, -1)[:, 0]
    assert mask.shape == (len(TEXTS), width, numbers.shape[1])
    for row in range(len(TEXTS)):
        for place in range(width):
            seen = numbers[row, mask[row, place]].tolist()
            assert len(set(seen)) == len(seen)
            assert set(seen) == expected(row, place), (kind, row, place)


def blocks(width: int, sizes: list[int]) -> BlockVisibility:
    return BlockVisibility(width, torch.tensor(sizes))


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("reserve", [0, 60])
def test_trees_and_blocks_see_what_is_written_down(kind: str, reserve: int) -> None:
    """Ragged rows, whose rings have wrapped or not; one cache serves both, pass after pass."""
    cache = filled(kind, reserve)
    wrapped = any(group.window and max(TEXTS) > group.capacity for group in cache.groups.values())
    assert bool(wrapped) == (kind != "full_attention")
    chance = random.Random(4)
    for width in (1, 6, 3):
        tree = random_tree(chance, len(TEXTS), width)
        compare(cache, TreeVisibility(tree), kind, lambda r, p, tree=tree: seen_by_tree(tree, kind, r, p))
        sizes = [chance.randint(1, width) for _ in TEXTS]
        compare(cache, blocks(width, sizes), kind, lambda r, p, sizes=sizes: seen_in_block(sizes, kind, r, p))


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_a_new_kind_is_one_class(kind: str) -> None:
    """Attention sinks and recent tokens, of a tree and of a block."""
    cache = filled(kind)
    tree = random_tree(random.Random(2), len(TEXTS), 4)

    def shown(seen: set[float], row: int) -> set[float]:
        return {number for number in seen if number >= 100 or number < 2 or number >= TEXTS[row] - 3}

    sparse = SparseVisibility(TreeVisibility(tree), 2, 3)
    compare(cache, sparse, kind, lambda r, p: shown(seen_by_tree(tree, kind, r, p), r))
    sparse = SparseVisibility(blocks(4, [4, 1, 2, 3]), 2, 3)
    compare(cache, sparse, kind, lambda r, p: shown(seen_in_block([4, 1, 2, 3], kind, r, p), r))


FAULTS = ["block is causal", "padding is seen", "no window", "chunks are windows", "rings never wrap"]


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_can_fail(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls."""
    kind = "chunked_attention" if fault == "chunks are windows" else "sliding_attention"
    right = ops.pass_mask

    def wrong(lengths, inside, depth, capacity, view, window, chunked):
        if fault == "block is causal":
            inside = inside.tril()
        elif fault == "padding is seen":
            inside = torch.ones_like(inside)
        elif fault == "no window":
            window = 0
        elif fault == "chunks are windows":
            chunked = False
        else:
            capacity = 1 << 20
        return right(lengths, inside, depth, capacity, view, window, chunked)

    monkeypatch.setattr(ops, "pass_mask", wrong)
    cache = filled(kind)
    sizes = [4, 1, 2, 3]
    with pytest.raises(AssertionError):
        compare(cache, blocks(4, sizes), kind, lambda r, p: seen_in_block(sizes, kind, r, p))


def dense_logits(model, texts: list[list[int]], block: Tensor, sizes: list[int], bidirectional: bool) -> Tensor:
    """Score blocks by one forward a row without a cache, under a mask of numbers made by hand."""
    scored = []
    for row, text in enumerate(texts):
        ids = torch.tensor([[*text, *block[row, : sizes[row]].tolist()]])
        length = ids.shape[1]
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        if bidirectional:
            seen[len(text) :, len(text) :] = True
        window = model.config.to_dict().get("sliding_window")
        if window:
            places = torch.arange(length)
            seen &= places[:, None] - places < window
        positions = torch.arange(length)[None]
        logits = model(ids, attention_mask=seen[None, None], position_ids=positions, use_cache=False).logits
        scored.append(logits[0, len(text) :])
    return torch.nn.utils.rnn.pad_sequence(scored, batch_first=True)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_model_reads_a_block_both_ways(family: str) -> None:
    """Real layers, ragged rows and blocks, a round behind another; the causal reading is another one."""
    model = build(family)
    ids, mask = prompts(LENGTHS)
    texts = [row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True)]
    cached = CachedModel(model, len(LENGTHS))
    cached.prefill(Prompt(ids, LENGTHS))
    sizes = [5, 2, 4, 1]
    counts = torch.tensor(sizes)
    for _ in range(3):
        block = torch.randint(1, 64, (len(LENGTHS), 5))
        found = cached.run(Pass(block, BlockVisibility(5, counts), counts - 1)).logits
        both, causal = (dense_logits(model, texts, block, sizes, way) for way in (True, False))
        for row, size in enumerate(sizes):
            torch.testing.assert_close(found[row, :size], both[row, :size], atol=5e-5, rtol=1e-4)
            assert size == 1 or (found[row, :size] - causal[row, :size]).abs().max() > 1e-3
        follow = torch.randint(1, 64, (len(LENGTHS), 2))
        cached.run(Pass.chain(follow))
        cached.commit([2] * len(LENGTHS))
        texts = [text + follow[row].tolist() for row, text in enumerate(texts)]
