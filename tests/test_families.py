"""Greedy and seeded text of every supported family: with any drafter the same as without."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from tiny import CASES, FAMILIES, assert_ran, build, drafter_of, few, ours, plain, prompts, texts_of

import hf_specgen.models.attention
from hf_specgen import PromptLookup, SpeculativeDecoding
from hf_specgen.models.cache_layers import AcceptedPath, SlotGroup
from hf_specgen.models.cached_model import CachedModel
from hf_specgen.models.slot_cache import SlotCache
from hf_specgen.models.visibility import SlotMap, TreeVisibility
from hf_specgen.round.records import Tree

TOKENS = 22
BATCHES = {1: [12], 4: [5, 17, 11, 24]}
GROUPED = {
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma3_text",
    "phi3",
    "mixtral",
    "qwen3_moe",
    "olmo2",
    "cohere2",
    "smollm3",
}
EAGER_ONLY = {"gemma2", "gpt_oss"}
EXPERTS = {"gpt_oss", "mixtral", "qwen3_moe", "deepseek_v3"}
WINDOWED = {"mistral", "gemma2", "gemma3_text", "gpt_oss", "cohere2"}
# Layer layouts that a supported class can have besides the one in tiny.FAMILIES
VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "qwen2 sliding upper layers": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3 sliding upper layers": ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "phi3 sliding": ("phi3", {"sliding_window": 8}),
    "mixtral sliding": ("mixtral", {"sliding_window": 8}),
    "qwen3_moe sliding": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}),
    "mistral full": ("mistral", {"sliding_window": None}),
    "llama one shared head": ("llama", {"num_key_value_heads": 1}),
    "llama no shared heads": ("llama", {"num_key_value_heads": 4}),
    "llama tied, yarn": (
        "llama",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "gemma2 three layers": (
        "gemma2",
        {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "gemma2 in sdpa": ("gemma2", {}),  # 5.17 only: later ones refuse a soft cap there
    "deepseek_v3 dense": ("deepseek_v3", {"first_k_dense_replace": 2}),
}


# Where sdpa is fast, plain eager is a second mask format: one family with a window, one without and one of experts.
EAGER_TOO = {"llama", "gemma3_text", "mixtral"}
ALIKE = {"qwen2", "qwen3", "phi3", "olmo2", "smollm3", "qwen3_moe"}
FAST = [
    (family, impl, 4)
    for family, impl in CASES
    if family not in ALIKE and (impl == FAMILIES[family][2][0] or family in EAGER_TOO)
]


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Record (query columns, key heads) of every call of our attention."""
    calls: list[tuple[int, int]] = []
    genuine = hf_specgen.models.attention._run

    def spy(query, key, value, mask, *settings):
        assert mask.dtype == torch.bool
        assert query.shape[1] > key.shape[1], "keys were repeated before they came here"
        calls.append((query.shape[2], key.shape[1]))
        return genuine(query, key, value, mask, *settings)

    monkeypatch.setattr(hf_specgen.models.attention, "_run", spy)
    return calls


@pytest.fixture
def wraps(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Collect the layer kinds whose rings went round."""
    kinds: set[str] = set()
    genuine = SlotCache.begin

    def begin(self: SlotCache, width: int, undo: int = 0) -> None:
        genuine(self, width, undo)
        kinds.update(g.kind for g in self.groups.values() if g.window and max(self.lengths) + width > g.capacity)

    monkeypatch.setattr(SlotCache, "begin", begin)
    return kinds


def check_all_drafters(model, rows: int) -> None:
    ids, mask = prompts(BATCHES[rows])
    expected = plain(model, ids, mask, max_new_tokens=TOKENS)
    texts = texts_of(expected, mask)
    for kind in ("lookup", "branches", "small", "tree"):
        watch = drafter_of(kind, model, texts)
        result = ours(model, watch, ids, mask, max_new_tokens=TOKENS)
        assert torch.equal(result, expected), f"{kind}, {rows} rows"
        assert_ran(watch, kind)
        assert result.speculation.num_forwards < TOKENS - 1
    assert torch.equal(ours(model, PromptLookup(), ids, mask, max_new_tokens=TOKENS), expected), "default settings"


@pytest.mark.parametrize(
    ("family", "impl", "rows"),
    few(
        [(*case, rows) for case in CASES for rows in BATCHES], *FAST, ("llama", "sdpa", 1), ("gemma3_text", "eager", 1)
    ),
)
def test_greedy_text_is_plain(family: str, impl: str, rows: int, packed: list, wraps: set[str]) -> None:
    model = build(family, impl)
    check_all_drafters(model, rows)
    assert bool(packed) == (family in (GROUPED if impl == "sdpa" else EAGER_ONLY))
    assert bool(wraps) == (family in WINDOWED)
    assert model.config._attn_implementation == impl


@pytest.mark.parametrize(
    "name",
    few(
        VARIANTS,
        "qwen3 sliding upper layers",
        "llama one shared head",
        "llama tied, yarn",
        "gemma2 three layers",
        "deepseek_v3 dense",
    ),
)
def test_greedy_text_of_other_layouts(name: str, wraps: set[str]) -> None:
    family, settings = VARIANTS[name]
    if "in sdpa" in name and not transformers.Gemma2ForCausalLM._supports_sdpa:
        pytest.skip("this transformers has no sdpa for Gemma2")
    model = build(family, "eager" if name == "gemma2 three layers" else "sdpa", **settings)
    check_all_drafters(model, 4)
    assert bool(wraps) == ("sliding" in name or "gemma2" in name)


# Those that only build their layers otherwise are slow: the greedy runs above prove the same passes.
@pytest.mark.parametrize("family", few(FAMILIES, "llama", "gemma3_text", "mixtral"))
def test_seeded_text_is_the_same_with_any_drafter(family: str) -> None:
    """In float64, where no coin falls between the laws of two passes of different width."""
    model = build(family, FAMILIES[family][2][0])
    if family in EXPERTS:
        model.set_experts_implementation("eager")  # the others know no float64
    model = model.double()
    lengths = [12] * 4 if family == "gemma2" else BATCHES[4]  # eager float64 with padding is NaN in transformers itself
    ids, mask = prompts(lengths)
    settings = {"do_sample": True, "seed": 7, "temperature": 0.3, "top_k": 20, "max_new_tokens": TOKENS}
    expected = ours(model, None, ids, mask, **settings)
    assert len(set(map(tuple, expected.tolist()))) == 4
    texts = texts_of(expected, mask)
    for kind in ("branches", "small", "tree"):
        watch = drafter_of(kind, model, texts)
        assert torch.equal(ours(model, watch, ids, mask, **settings), expected), kind
        assert_ran(watch, kind)
    assert not torch.equal(ours(model, None, ids, mask, **{**settings, "seed": 8}), expected)


def causal(parents: torch.Tensor) -> torch.Tensor:
    scored = parents.shape[1] + 1
    return torch.ones(1, scored, scored, dtype=torch.bool).tril().expand(len(parents), -1, -1)


def break_gather(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AcceptedPath, "move", lambda self: None)


def break_tree_mask(patch: pytest.MonkeyPatch) -> None:
    genuine = SlotCache.masks

    def masks(self: SlotCache, visibility: TreeVisibility) -> dict[str, torch.Tensor]:
        tree = visibility.tree
        wrong = Tree(tree.parents)
        wrong.__dict__["ancestors"], wrong.__dict__["depth"] = causal(tree.parents), tree.depth
        return genuine(self, TreeVisibility(wrong))

    patch.setattr(SlotCache, "masks", masks)


def break_depth(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tree, "depth", property(lambda self: torch.arange(len(self) + 1).expand(len(self.parents), -1)))


def break_window(patch: pytest.MonkeyPatch) -> None:
    def slots(self: SlotGroup, lengths: torch.Tensor) -> SlotMap:
        return SlotMap(lengths, self.capacity, self.view)

    patch.setattr(SlotGroup, "slots", slots)


def break_commit(patch: pytest.MonkeyPatch) -> None:
    genuine = SlotCache.commit

    def commit(self: SlotCache, counts: list[int], paths: torch.Tensor | None = None, kept: object = None) -> None:
        genuine(self, [count - (count > 1) for count in counts], paths)

    patch.setattr(SlotCache, "commit", commit)


def break_eager_mask(patch: pytest.MonkeyPatch) -> None:
    def masks(self: CachedModel, visibility: TreeVisibility) -> dict[str, torch.Tensor]:
        masks = self.cache.masks(visibility)
        return {kind: mask.expand(len(self.lengths), -1, -1, -1) for kind, mask in masks.items()}

    patch.setattr(CachedModel, "_masks", masks)


BREAKS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str, str, str]] = {
    "path not gathered": (break_gather, "llama", "sdpa", "tree"),
    "causal instead of tree mask": (break_tree_mask, "llama", "eager", "tree"),
    "slots instead of depths as positions": (break_depth, "llama", "sdpa", "tree"),
    "no window": (break_window, "mistral", "sdpa", "lookup"),
    "one token fewer committed": (break_commit, "llama", "sdpa", "lookup"),
    "bool mask in eager": (break_eager_mask, "llama", "eager", "lookup"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_part_changes_the_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls: each of these must be seen by the comparison above."""
    spoil, family, impl, kind = BREAKS[name]
    model = build(family, impl)
    ids, mask = prompts(BATCHES[4])
    expected = plain(model, ids, mask)
    drafter = drafter_of(kind, model, texts_of(expected, mask))
    spoil(monkeypatch)
    result = plain(model, ids, mask, custom_generate=SpeculativeDecoding(drafter))
    assert not torch.equal(result, expected)
