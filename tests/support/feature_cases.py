"""EAGLE drafters with random weights, drafts steered towards the right text, and pairs computed without a cache."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch
from tiny import Watch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_specgen import Draft
from hf_specgen.checkpoints.config import DrafterConfig
from hf_specgen.drafters.eagle import EagleDrafter
from hf_specgen.drafters.eagle3 import Eagle3Drafter
from hf_specgen.drafting.features import FeatureDrafter

RAGGED = [5, 17, 11, 24]
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "initializer_range": 0.3,
}
TREE = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0], [1, 0, 0], [1, 0, 0, 0]]
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"tree": "chain", "num_tokens": 4},
    "static": {"tree": TREE},
    "dynamic": {"tree": {"top_k": 3, "depth": 4, "nodes": 9}},
}
REDUCED = [0, 1, 2, 5, 7, 9, 12, 13, 20, 21, 30, 33, 40, 41, 50, 63]
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle": ("eagle", {}),
    "eagle, bias, own embedding": ("eagle", {"fc_bias": True, "own_embedding": True}),
    "eagle, three layers, qwen3": ("eagle", {"num_hidden_layers": 3, "layer_type": "qwen3", "head_dim": 16}),
    "eagle, window": ("eagle", {"sliding_window": 6}),
    "eagle3": ("eagle3", {}),
    "eagle3, reduced, own width": (
        "eagle3",
        {"draft_vocab_size": len(REDUCED), "hidden_size": 48, "target_hidden_size": 32, "own_embedding": True},
    ),
    "eagle3, every norm": (
        "eagle3",
        {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True, "layer_type": "qwen3"},
    ),
    "eagle3, fc norms, biases, two layers": (
        "eagle3",
        {"fc_norm": True, "fc_bias": True, "attention_bias": True, "mlp_bias": True, "num_hidden_layers": 2},
    ),
    "eagle3, window, two layers": ("eagle3", {"sliding_window": 6, "num_hidden_layers": 2}),
    "eagle3, the target's head": ("eagle3", {"own_head": False, "aux_layer_boundaries": [2]}),
}


def config_of(method: str, **settings: Any) -> DrafterConfig:
    """Return the configuration of a drafter for the tiny target."""
    own = {"own_head": False} if method == "eagle" else {"aux_layer_boundaries": [0, 1, 2]}
    return DrafterConfig(method=method, **{**SIZES, **own, **settings})


def drafter_of(method: str, seed: int = 0, kept: tuple[int, ...] = (), **settings: Any) -> FeatureDrafter:
    """Build a drafter with random weights, biases and norms; ``kept`` are the ids of a reduced vocabulary."""
    torch.manual_seed(seed)
    config = config_of(method, **settings)
    drafter = (EagleDrafter if method == "eagle" else Eagle3Drafter)(config).eval()
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter += 0.2 * torch.randn_like(parameter)
    if config.reduces_vocabulary:
        ids = torch.tensor(REDUCED if config.vocab_size == 64 else kept)
        drafter.d2t.copy_(ids - torch.arange(len(ids)))
        drafter.t2d.fill_(False)[ids] = True
    return drafter


class Steered(Watch):
    """Put the right continuation on a random way down each draft, so that any part of any path is accepted."""

    def __init__(self, inner: FeatureDrafter, texts: list[list[int]], hit: float = 0.7, seed: int = 0) -> None:
        super().__init__(inner)
        self.texts, self.hit, self.seed = texts, hit, seed

    def on_begin(self, sequences) -> None:
        super().on_begin(sequences)
        self.random, self.sequences = random.Random(self.seed), sequences

    def on_propose(self, sequences) -> Draft:
        self.before = [list(tokens) for tokens in sequences.tokens]
        draft = super().on_propose(sequences)
        self.own = draft
        tokens = draft.tokens.clone()
        for row, count in enumerate(draft.n_valid.tolist()):
            parents = draft.tree.parents[row if len(draft.tree.parents) > 1 else 0].tolist()[:count]
            node, place = -1, len(self.before[row])
            while self.random.random() < self.hit and place < len(self.texts[row]):
                children = [child for child, parent in enumerate(parents) if parent == node]
                if not children:
                    break
                node = self.random.choice(children)
                tokens[row, node] = self.texts[row][place]
                place += 1
        return replace(draft, tokens=tokens)


def true_features(drafter: FeatureDrafter, model: PreTrainedModel, text: list[int]) -> Tensor:
    """Return the features ``(1, P, H)`` of a text's pairs, from one plain pass of the target over it."""
    with torch.no_grad():
        states = model(input_ids=torch.tensor([text]), output_hidden_states=True, use_cache=False).hidden_states
        if drafter.hidden_layers == (-1,):
            return drafter.fuse((states[-1][:, :-1],))
        kept = list(states)
        with Last(model) as last:  # transformers' last entry is after the final norm
            model(input_ids=torch.tensor([text]), use_cache=False)
        kept[-1] = last.output
        return drafter.fuse(tuple(kept[boundary][:, :-1] for boundary in drafter.hidden_layers))


class Last:
    """Keep what the last decoder layer returns."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.layer = model.model.layers[-1]

    def __enter__(self) -> Last:
        self.handle = self.layer.register_forward_hook(self.keep)
        return self

    def keep(self, module, inputs, output) -> None:
        self.output = output[0] if isinstance(output, tuple) else output

    def __exit__(self, *error: object) -> None:
        self.handle.remove()


def run_pairs(
    drafter: FeatureDrafter, tokens: list[int], features: Tensor, cache: DynamicCache | None = None
) -> Tensor:
    """Run the layers over all pairs of one row at once, with a causal mask (and window) of this file's own."""
    place = torch.arange(len(tokens))
    apart = place[:, None] - place
    window = drafter.config.sliding_window or len(tokens)
    mask = ((apart >= 0) & (apart < window))[None, None]
    with torch.no_grad():
        return drafter.step(drafter.embed(torch.tensor([tokens])), features, place[None], mask, cache)


def rollout(drafter: FeatureDrafter, text: list[int], features: Tensor, path: list[int]) -> Tensor:
    """Return the drafter's logits ``(V_draft)`` behind a text and a drafted path, one token after another."""
    tokens = text[1:]
    for token in [*path, None]:
        states = run_pairs(drafter, tokens, features)
        if token is None:
            break
        tokens, features = [*tokens, token], torch.cat((features, states[:, -1:]), 1)
    with torch.no_grad():
        return drafter.logits(states[:, -1:])[0, 0].float()
