"""SlotCache against a plain list per row: what each query may see, whatever was written, kept and rolled back."""

from __future__ import annotations

import copy
import pickle
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import FAMILIES, build, few
from transformers import AutoConfig

from hf_specgen import UnsupportedTarget, ops
from hf_specgen.models.cache_layers import AcceptedPath, SlotGroup
from hf_specgen.models.fixed_shapes import FixedShapes
from hf_specgen.models.layer_kinds import layer_kinds
from hf_specgen.models.slot_cache import SlotCache
from hf_specgen.models.visibility import TreeVisibility
from hf_specgen.round.records import Tree

WINDOW = 6
SHAPES = [None, FixedShapes(widths=(1, 3, 6), granule=16)]
LAYOUTS = {
    "full": ("llama", {}),
    "sliding": ("mistral", {"sliding_window": WINDOW}),
    "both": (
        "gemma3_text",
        {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "chunked": (
        "llama4_text",
        {
            "attention_chunk_size": WINDOW,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
        },
    ),
}


def config_of(layout: str):
    family, settings = LAYOUTS[layout]
    return AutoConfig.for_model(family, num_hidden_layers=2, vocab_size=64, **settings)


class Model:
    """Write a number per token into every layer, and know what each row should hold: ``texts[r]``."""

    def __init__(self, layout: str, rows: int, seed: int, reserve: int = 0, shapes: FixedShapes | None = None) -> None:
        self.cache = SlotCache(config_of(layout), rows, reserve=reserve, shapes=shapes)
        self.kinds = layer_kinds(config_of(layout))
        self.texts: list[list[float]] = [[] for _ in range(rows)]
        self.chance = random.Random(seed)
        self.next = 1.0
        self.wrapped = False

    def fresh(self, rows: int, width: int) -> torch.Tensor:
        block = torch.arange(self.next, self.next + rows * width).view(rows, width)
        self.next += rows * width
        return block

    def begin(self, width: int, undo: int = 0) -> None:
        """Announce a pass, padded where shapes are fixed."""
        shapes = self.cache.shapes
        self.cache.begin(width if shapes is None else shapes.width_of(width), undo)

    def write(self, block: torch.Tensor) -> list[torch.Tensor]:
        """Push a block through every layer; return the ``(B, slots)`` numbers that attention would read."""
        if self.cache.prefilling is None:
            block = torch.nn.functional.pad(block, (0, self.cache._width - block.shape[1]), value=-1.0)
        states = block[:, None, :, None].expand(-1, 2, -1, 3)
        found = []
        for layer in range(len(self.kinds)):
            keys, values = self.cache.update(states, -states, layer)
            assert torch.equal(keys, -values)
            assert torch.equal(keys[:, 0], keys[:, 1])
            found.append(keys[:, 0, :, 0])
        return found

    def prefill(self, lengths: list[int], left: bool) -> None:
        width = max(lengths)
        block = self.fresh(len(lengths), width)
        self.cache.begin_prefill(width, lengths, left_padded=left)
        self.write(block)
        self.cache.crop_rows(lengths)
        for row, length in enumerate(lengths):
            start = width - length if left else 0
            self.texts[row] = block[row, start : start + length].tolist()

    def round(self, width: int) -> None:
        """Score a random tree, compare what every query sees, and keep a random path of some rows."""
        rows = len(self.texts)
        parents = [[self.chance.randint(-1, node - 1) for node in range(width)] for _ in range(rows)]
        tree = Tree(torch.tensor(parents, dtype=torch.long).view(rows, width))
        block = self.fresh(rows, width + 1)
        self.begin(width + 1)
        self.check(tree, block, self.write(block))
        paths = [self.path(tree, row, self.chance.randint(-1, width - 1)) for row in range(rows)]
        counts = [len(path) + 1 if self.chance.random() < 0.8 else 0 for path in paths]
        deepest = max(map(len, paths))
        padded = [path + [0] * (deepest - len(path)) for path in paths]
        self.cache.commit(counts, torch.tensor(padded, dtype=torch.long).view(rows, deepest))
        for row, path in enumerate(paths):
            if counts[row]:
                self.texts[row] += block[row, [0, *(node + 1 for node in path)]].tolist()

    def draft(self, count: int) -> None:
        """Write and commit one token after another, as a drafter does, then keep some."""
        before = [list(text) for text in self.texts]
        for undo in range(count):
            block = self.fresh(len(self.texts), 1)
            self.begin(1, undo)
            self.check(Tree.chain(0), block, self.write(block))
            self.cache.commit([1] * len(self.texts))
            self.texts = [text + block[row].tolist() for row, text in enumerate(self.texts)]
        keep = [len(text) + self.chance.randint(0, count) for text in before]
        self.texts = [text[:length] for text, length in zip(self.texts, keep, strict=True)]
        self.cache.crop_rows(keep)

    @staticmethod
    def path(tree: Tree, row: int, node: int) -> list[int]:
        found = []
        while node >= 0:
            found.append(node)
            node = int(tree.parents[row, node])
        return found[::-1]

    def check(self, tree: Tree, block: torch.Tensor, read: list[torch.Tensor]) -> None:
        masks = self.cache.masks(TreeVisibility(tree))
        for (kind, window), numbers in zip(self.kinds, read, strict=True):
            group = self.cache.groups[kind, window]
            self.wrapped |= window is not None and max(self.cache.lengths) + len(tree) + 1 > group.capacity
            mask = masks[kind].expand(len(self.texts), -1, -1, -1)[:, 0]
            assert mask.shape[1:] == (self.cache._width, numbers.shape[1])
            assert mask[:, len(tree) + 1 :].any(-1).all(), "attention of a padded position has something to read"
            for row, text in enumerate(self.texts):
                for query in range(len(tree) + 1):
                    path = self.path(tree, row if len(tree.parents) > 1 else 0, query - 1)
                    whole = text + block[row, [0, *(node + 1 for node in path)]].tolist()
                    first = 0
                    if window is not None:
                        newest = len(whole) - 1
                        first = (
                            newest // window * window if kind == "chunked_attention" else max(0, newest - window + 1)
                        )
                    seen = numbers[row, mask[row, query]].tolist()
                    assert sorted(seen) == sorted(whole[first:]), (kind, row, query)


@pytest.mark.parametrize("layout", LAYOUTS)
@given(data=st.data())
def test_every_query_sees_its_own_past(layout: str, data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 3))
    reserve, shapes = data.draw(st.sampled_from([0, 20])), data.draw(st.sampled_from(SHAPES))
    model = Model(layout, rows, data.draw(st.integers(0, 99)), reserve, shapes)
    model.prefill([data.draw(st.integers(1, 12)) for _ in range(rows)], data.draw(st.booleans()))
    for step in data.draw(st.lists(st.integers(-6, 8), max_size=5)):
        model.round(step) if step >= 0 else model.draft(-step)


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_long_runs_wrap_and_grow(layout: str, shapes: FixedShapes | None) -> None:
    model = Model(layout, 3, seed=1, shapes=shapes)
    model.prefill([1, 9, 14], left=True)
    for width in [0, 3, 1, 7, 0, 2, 20, 5, 5, 0, 40, 3]:
        model.round(width)
        model.draft(width % 6 + 1)
    assert model.wrapped == (layout != "full")
    for (_, window), group in model.cache.groups.items():
        assert window is None or group.capacity <= window + 41
        assert shapes is None or window or group.capacity == 16 << (group.capacity // 16).bit_length() - 1


def depth_by_slot(lengths, parents, capacity, view, window, chunked, ancestors=None, right=ops.tree_mask):
    """Show the right nodes, but apply the window as if nodes stood one behind the other."""
    chain = Tree.chain(parents.shape[1]).parents
    near = right(lengths, chain, capacity, view, window, chunked)
    return right(lengths, parents, capacity, view, 0, False, ancestors) & near


@pytest.mark.parametrize("spoil", ["ring too small", "no undo", "gather left out", "depth by slot"])
def test_the_comparison_can_fail(spoil: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls."""
    if spoil == "ring too small":
        monkeypatch.setattr(
            SlotGroup, "needed", lambda self, longest, width, undo=0: min(longest + width, self.window or 999)
        )
    elif spoil == "no undo":
        begin = SlotCache.begin
        monkeypatch.setattr(SlotCache, "begin", lambda self, width, undo=0: begin(self, width))
    elif spoil == "gather left out":
        monkeypatch.setattr(AcceptedPath, "move", lambda self: None)
    else:
        monkeypatch.setattr(ops, "tree_mask", depth_by_slot)
    model = Model("sliding", 2, seed=0)
    model.prefill([3, 11], left=True)
    with pytest.raises((AssertionError, IndexError)):
        for _ in range(4):
            model.draft(6)
            model.round(6)


def test_reserved_slots_are_allocated_once() -> None:
    model = Model("full", 2, seed=0, reserve=60)
    model.prefill([4, 9], left=True)
    place = model.cache.layers[0].keys.data_ptr()
    for _ in range(4):
        model.round(6)
    assert model.cache.layers[0].keys.data_ptr() == place
    assert model.cache.layers[0].keys.shape[2] >= 60
    assert sum(layer.keys.shape[2] for layer in Model("full", 1, 0).cache.layers if layer.is_initialized) == 0
    model.round(60)  # beyond the reserve: grows, and nothing is lost (round() compares)
    assert model.cache.layers[0].keys.data_ptr() != place


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [torch.tensor([2, 0]), torch.tensor([True, False, True]), torch.tensor([1])])
def test_rows_can_be_selected(layout: str, rows: torch.Tensor) -> None:
    model = Model(layout, 3, seed=2)
    model.prefill([5, 8, 2], left=True)
    model.round(4)
    model.cache.batch_select_indices(rows)
    kept = torch.arange(3)[rows].tolist()
    model.texts = [model.texts[row] for row in kept]
    assert model.cache.lengths == [len(text) for text in model.texts]
    model.round(5)
    model.round(3)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_those_of_the_models_own_cache(family: str) -> None:
    model = build(family, "eager")
    ids = torch.randint(1, 64, (1, 12))
    theirs = model(ids, use_cache=True)
    layers = (theirs["cache"] if "cache" in theirs else theirs["past_key_values"]).layers
    kinds = layer_kinds(model.config)
    assert [window is not None for _, window in kinds] == [layer.is_sliding for layer in layers]
    assert {window for _, window in kinds} <= {None, 8}
    assert len(SlotCache(model.config, 1).groups) == len(set(kinds))


REFUSED = {
    "mamba2": ({}, "LinearAttentionLayer"),
    "qwen3_next": ({"num_hidden_layers": 4}, "linear_attention"),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, "conv"),
    "falcon_h1": ({}, "LinearAttentionAndFullAttentionLayer"),
    "bamba": ({}, "LinearAttentionLayer"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_layers_that_cannot_roll_back_are_refused(kind: str) -> None:
    settings, reason = REFUSED[kind]
    config = AutoConfig.for_model(kind, **{"num_hidden_layers": 2, **settings})
    with pytest.raises(UnsupportedTarget, match=reason) as caught:
        layer_kinds(config)
    assert type(config).__name__ in str(caught.value)
    assert "plain generate()" in str(caught.value)


def test_generate_is_told_what_the_cache_is() -> None:
    model = Model("sliding", 2, seed=0)
    assert model.cache.is_compileable is False
    model.prefill([5, 12], left=True)
    assert model.cache.get_seq_length() == 12
    assert model.cache.layers[0].get_max_length() == -1
    model.cache.begin(3)
    assert model.cache.layers[0].get_mask_sizes(3) == (model.cache.layers[0].group.view, 0)
    model.cache.begin_prefill(12, [5, 12], left_padded=True)
    assert model.cache.layers[0].get_mask_sizes(12) == (12, 0)


def test_a_pass_asks_for_its_mask_and_moves_once_a_group() -> None:
    model = Model("both", 2, seed=0)
    model.prefill([5, 12], left=True)
    with ops.record() as calls:
        model.cache.begin(3)
        model.cache.masks(TreeVisibility(Tree.chain(2)))
        model.write(model.fresh(2, 3))
        model.cache.commit([2, 2], torch.tensor([[1], [1]]))
    assert len(model.cache.groups) == 2
    assert calls == {("tree_mask", "reference"): 2, ("move_slots", "reference"): 2}


@pytest.mark.parametrize("layout", few(LAYOUTS, "both", "chunked"))
def test_the_kernels_keep_the_same_texts(layout: str) -> None:
    """The comparison with lists again, masks and moves by Triton: the rings wrap and grow here too."""
    pytest.importorskip("triton")
    model = Model(layout, 2, seed=3)
    model.prefill([3, 11], left=True)
    with ops.use_kernels("triton"), ops.record() as calls:
        for width in (4, 0, 7, 3):
            model.round(width)
            model.draft(2)
    assert {backend for _, backend in calls} == {"triton"}
    assert {operation for operation, _ in calls} == {"tree_mask", "move_slots"}


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda cache: pickle.loads(pickle.dumps(cache))}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_copy_lives_on_its_own(layout: str, way: str) -> None:
    first = Model(layout, 2, seed=4)
    first.prefill([4, 13], left=True)
    first.round(5)
    second = Model(layout, 2, seed=5)
    second.cache, second.texts, second.next = COPIES[way](first.cache), [list(text) for text in first.texts], 900.0
    assert all(layer.cache is second.cache for layer in second.cache.layers)
    assert all(layer.cache is first.cache for layer in first.cache.layers)
    for width in (3, 6):  # each compares what its queries see with its own texts
        first.round(width)
        second.round(width + 1)
    del first.cache
    second.round(2)


def test_a_shallow_copy_leaves_the_layers_where_they_are() -> None:
    model = Model("both", 1, seed=6)
    model.prefill([4], left=True)
    other = copy.copy(model.cache)
    assert all(layer.cache is model.cache for layer in other.layers)


def test_lengths_follow_on_the_device() -> None:
    """Counts that are on the device already are added there; host and device never part."""
    model = Model("full", 3, seed=7)
    model.prefill([4, 9, 2], left=True)
    model.cache.begin(4)
    model.write(model.fresh(3, 4))
    before = model.cache.row_lengths
    model.cache.commit([1, 3, 2], None, torch.tensor([1, 3, 2]))
    assert model.cache.lengths == model.cache.row_lengths.tolist() == [5, 12, 4]
    assert before.tolist() == [4, 9, 2], "what a pass still reads is not written to"
