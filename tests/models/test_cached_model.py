"""CachedModel: logits and hidden states of ragged tree rounds against forwards that know no cache."""

from __future__ import annotations

import random

import pytest
import torch
from ragged_trees import LENGTHS, random_tree
from tiny import CASES, build, prompts, tiny
from transformers import AutoConfig, AutoModelForCausalLM

from hf_specgen import UnsupportedTarget
from hf_specgen.models.cached_model import CachedModel
from hf_specgen.models.passes import Pass
from hf_specgen.models.prompt import ChunkedPrompt, Prompt
from hf_specgen.models.visibility import TreeVisibility
from hf_specgen.round.records import Tree


def path_to(tree: Tree, row: int, node: int) -> list[int]:
    """Return the nodes from below the root down to ``node`` of a row (-1: the root itself)."""
    path = []
    while node >= 0:
        path.append(node)
        node = int(tree.parents[row, node])
    return path[::-1]


def prompt_of(ids: torch.Tensor, lengths: list[int], chunk: int | None) -> Prompt:
    """Return a prompt that is read whole, or in chunks."""
    return Prompt(ids, lengths) if chunk is None else ChunkedPrompt(ids, lengths, chunk=chunk)


def written(text: list[int], block: torch.Tensor, path: list[int]) -> list[int]:
    """Return a row's text with the root and a path of its block behind it."""
    return text + block[[0, *(node + 1 for node in path)]].tolist()


@torch.no_grad()
def plain_logits(model, texts: list[list[int]]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Return the last logits and hidden states of each text, by one right-padded pass without a cache."""
    width = max(map(len, texts))
    ids = torch.tensor([text + [0] * (width - len(text)) for text in texts])
    output = model(input_ids=ids, use_cache=False, output_hidden_states=True)
    last = [len(text) - 1 for text in texts]
    rows = torch.arange(len(texts))
    return output.logits[rows, last], tuple(layer[rows, last] for layer in output.hidden_states)


@torch.no_grad()
def largest_error(model, rounds: int = 4, width: int = 7, chunk: int | None = None, seed: int = 0) -> float:
    """Score random trees over ragged rows, keep random paths, and compare every node's logits and hidden state."""
    chance = random.Random(seed)
    ids, mask = prompts(LENGTHS)
    texts = [row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True)]
    cached = CachedModel(model, len(texts))
    first = cached.prefill(prompt_of(ids, LENGTHS, chunk))
    worst = float((first.logits[:, 0] - plain_logits(model, texts)[0]).abs().max())
    for _ in range(rounds):
        block = torch.tensor([[chance.randrange(1, 64) for _ in range(width + 1)] for _ in texts])
        tree = random_tree(chance, len(texts), width)
        scored = cached.run(Pass(block, TreeVisibility(tree), hidden=True))
        paths = [[path_to(tree, row, node) for node in range(-1, width)] for row in range(len(texts))]
        whole = [written(text, block[r], path) for r, text in enumerate(texts) for path in paths[r]]
        logits, hidden = plain_logits(model, whole)
        worst = max(worst, float((scored.logits.flatten(0, 1) - logits).abs().max()))
        for ours, theirs in zip(scored.hidden, hidden, strict=True):
            worst = max(worst, float((ours.flatten(0, 1) - theirs).abs().max()))
        kept = [chance.choice(row) for row in paths]
        deepest = max(map(len, kept))
        counts = [len(path) + 1 for path in kept]
        counts[chance.randrange(len(kept))] = 0  # a row that commits nothing must stay as it is
        straight = torch.tensor([path + [0] * (deepest - len(path)) for path in kept], dtype=torch.long)
        cached.cache.commit(counts, straight.view(len(kept), deepest))
        texts = [
            written(text, block[r], path) if count else text
            for r, (text, path, count) in enumerate(zip(texts, kept, counts, strict=True))
        ]
        assert cached.lengths == list(map(len, texts))
    return worst


@pytest.mark.parametrize(("family", "impl"), CASES)
def test_every_node_has_its_plain_logits(family: str, impl: str) -> None:
    assert largest_error(build(family, impl)) < 5e-5


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "phi3"])
def test_float64_agrees_to_the_last_digits(family: str) -> None:
    assert largest_error(build(family).double(), rounds=6) < 1e-10


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "gpt2"])
@pytest.mark.parametrize("chunk", [1, 3, 9, 23, 24, 50])
def test_a_prompt_read_in_chunks_is_the_same_prompt(family: str, chunk: int) -> None:
    assert largest_error(build(family), rounds=2, chunk=chunk) < 5e-5


@pytest.mark.parametrize("chunk", [None, 5])
def test_prompt_hidden_states_are_left_padded_as_in_plain(chunk: int | None) -> None:
    model = tiny()
    ids, mask = prompts(LENGTHS)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        ours = CachedModel(model, 4).prefill(prompt_of(ids, LENGTHS, chunk), hidden=True).hidden
        theirs = model(ids, attention_mask=mask, position_ids=positions, output_hidden_states=True).hidden_states
    assert len(ours) == len(theirs) == 3
    for mine, plain in zip(ours, theirs, strict=True):
        assert mine.shape == plain.shape
        assert float(((mine - plain) * mask[..., None]).abs().max()) < 1e-4


def test_wanted_columns_come_in_the_order_named() -> None:
    model = tiny()
    ids, _ = prompts(LENGTHS)
    cached = CachedModel(model, 4)
    cached.prefill(Prompt(ids, LENGTHS))
    block = torch.randint(1, 64, (4, 4))
    everything = cached.run(Pass.chain(block)).logits
    kept = cached.run(Pass.chain(block, columns=(3, 0))).logits
    assert torch.equal(kept, everything[:, [3, 0]])


def test_scoring_twice_changes_nothing() -> None:
    """A pass that is not committed leaves no trace: the next one overwrites its slots."""
    model = build("mistral")
    ids, _ = prompts(LENGTHS)
    cached = CachedModel(model, 4)
    cached.prefill(Prompt(ids, LENGTHS))
    block = torch.randint(1, 64, (4, 6))
    first = cached.run(Pass.chain(block)).logits
    cached.run(Pass.chain(torch.randint(1, 64, (4, 9))))
    assert torch.equal(cached.run(Pass.chain(block)).logits, first)


def test_places_behind_n_valid_stay_within_the_learned_positions() -> None:
    model = build("gpt2", max_position_embeddings=26)
    ids, _ = prompts(LENGTHS)
    cached = CachedModel(model, 4)
    cached.prefill(Prompt(ids, LENGTHS))
    seen: list[int] = []
    model.transformer.wpe.register_forward_pre_hook(lambda _, args: seen.append(int(args[0].max())))
    cached.run(Pass.chain(torch.randint(1, 64, (4, 6)), torch.tensor([5, 2, 0, 1])))
    assert seen == [25]
    with pytest.raises(IndexError):
        cached.run(Pass.chain(torch.randint(1, 64, (4, 6))))


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
REFUSED = {
    "t5": (
        {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 64},
        "encoder-decoder",
    ),
    "bloom": ({"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}, "position_ids"),
    "mpt": ({"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 64}, "position_ids"),
    "mamba": ({**SMALL, "state_size": 4}, "position_ids"),
    "lfm2": (
        {**SMALL, "intermediate_size": 64, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]},
        "conv",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_cannot_be_driven_are_refused_by_name(kind: str) -> None:
    settings, reason = REFUSED[kind]
    config = AutoConfig.for_model(kind, **settings)
    if kind == "t5":
        from transformers import T5ForConditionalGeneration as Model

        model = Model(config)
    else:
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedTarget, match=reason) as caught:
        CachedModel(model, 1)
    assert "plain generate()" in str(caught.value)


def test_attention_kernels_that_take_no_mask_are_refused() -> None:
    model = tiny()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedTarget, match=r"flash_attention_2.*set_attn_implementation"):
        CachedModel(model, 1)


@pytest.mark.parametrize("chunk", [None, 5])
def test_the_head_is_given_whole_rows(chunk: int | None) -> None:
    """Of states that are not contiguous torch makes a batch of products, with a copy of the head's weight in each."""
    model = tiny()
    seen: list[torch.Tensor] = []
    handle = model.lm_head.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    ids, _ = prompts(LENGTHS)
    try:
        CachedModel(model, len(LENGTHS)).prefill(prompt_of(ids, LENGTHS, chunk))
    finally:
        handle.remove()
    assert seen and all(states.is_contiguous() and states.shape[1] < ids.shape[1] for states in seen)
