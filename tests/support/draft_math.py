"""EAGLE and Medusa written out from a state dict: all pairs at once, who sees whom given, no cache, float64.

Pair ``i`` joins the feature of text position ``i`` with token ``i + 1`` and predicts token ``i + 2``. The equations are
those of Li et al. 2024 (EAGLE), Li et al. 2025 (EAGLE-3) and Cai et al. 2024 (Medusa); nothing is shared with
the drafters they are compared with.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specgen.checkpoints.config import DrafterConfig

State = dict[str, Tensor]
Path = tuple[int, ...]


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``weight * x / sqrt(mean(x^2) + eps)``."""
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def turned(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Turn ``x (P, heads, D)`` by RoPE: coordinates m and m + D/2 by the angle ``position * base^(-2m/D)``."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None].to(x.dtype) * base ** (-torch.arange(half, dtype=x.dtype) / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


class EagleMath:
    """Compute an EAGLE-1 or EAGLE-3 drafter. ``embedding (V, H)`` and ``head`` are the target's, used where the
    drafter has none of its own."""

    def __init__(self, config: DrafterConfig, state: State, embedding: Tensor, head: Tensor) -> None:
        self.config, self.eps = config, config.rms_norm_eps
        self.state = {name: value.double() if value.is_floating_point() else value for name, value in state.items()}
        self.embedding = self.state.get("embed_tokens.weight", embedding.double())
        self.head = self.state.get("lm_head.weight", head.double())

    def linear(self, name: str, x: Tensor) -> Tensor:
        bias = self.state.get(f"{name}.bias")
        return x @ self.state[f"{name}.weight"].T + (0.0 if bias is None else bias)

    def norm(self, name: str, x: Tensor) -> Tensor:
        return rms(x, self.state[f"{name}.weight"], self.eps)

    def feature(self, streams: list[Tensor]) -> Tensor:
        """Make features ``(P, H)`` of the target's streams ``(P, Ht)`` each: EAGLE-1 takes its one as it is."""
        if self.config.method == "eagle":
            return streams[0].double()
        parts = [stream.double() for stream in streams]
        if self.config.fc_norm:
            parts = [self.norm(f"fc_norm.{place}", part) for place, part in enumerate(parts)]
        joined = torch.cat(parts, -1)
        if self.config.norm_before_fc:
            joined = self.norm("input_norm", joined)
        return self.linear("fc", joined)

    def attention(self, name: str, x: Tensor, positions: Tensor, sees: Tensor) -> Tensor:
        config, pairs = self.config, len(x)
        base = float(config.rope_parameters["rope_theta"])
        heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads, "v": config.num_key_value_heads}
        made = {
            part: self.linear(f"{name}.{part}_proj", x).view(pairs, n, config.head_dim) for part, n in heads.items()
        }
        for part in ("q", "k"):
            if f"{name}.{part}_norm.weight" in self.state:
                made[part] = self.norm(f"{name}.{part}_norm", made[part])
            size = int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1))
            rest = made[part][..., size:]
            made[part] = torch.cat([turned(made[part][..., :size], positions, base), rest], -1)
        layer = int(name.split(".")[1]) if name.startswith("layers.") else 0
        if config.sliding_window and (config.layer_types is None or config.layer_types[layer] == "sliding_attention"):
            sees = sees & (positions[:, None] - positions < config.sliding_window)
        mixed = []
        for head in range(heads["q"]):
            source = head // (heads["q"] // heads["k"])
            scores = made["q"][:, head] @ made["k"][:, source].T / math.sqrt(config.head_dim)
            mixed.append(scores.masked_fill(~sees, -math.inf).softmax(-1) @ made["v"][:, source])
        return self.linear(f"{name}.o_proj", torch.cat(mixed, -1))

    def opened(self, name: str, y: Tensor) -> Tensor:
        """Return what the last matrix of a layer's MLP reads."""
        x = self.norm(f"{name}.post_attention_layernorm", y)
        return silu(self.linear(f"{name}.mlp.gate_proj", x)) * self.linear(f"{name}.mlp.up_proj", x)

    def mlp(self, name: str, y: Tensor) -> Tensor:
        return self.linear(f"{name}.mlp.down_proj", self.opened(name, y))

    def first(self, tokens: Tensor, features: Tensor, positions: Tensor, sees: Tensor) -> tuple[str, Tensor]:
        """Return the first layer's name and its stream between attention and MLP."""
        embedded = self.embedding[tokens]
        if self.config.method == "eagle":
            x = self.linear("fc", torch.cat([embedded, features], -1))
            return "layers.0", x + self.attention("layers.0.self_attn", x, positions, sees)
        hidden = self.norm("midlayer.hidden_norm", features)
        both = torch.cat([self.norm("midlayer.input_layernorm", embedded), hidden], -1)
        residual = hidden if self.config.norm_before_residual else features
        return "midlayer", residual + self.attention("midlayer.self_attn", both, positions, sees)

    def before_mlp(self, tokens: Tensor, features: Tensor, positions: Tensor, sees: Tensor) -> tuple[str, Tensor]:
        """Return the last layer's name and its stream between attention and MLP."""
        name, y = self.first(tokens, features, positions, sees)
        for layer in range(1, self.config.num_hidden_layers):
            z = y + self.mlp(name, y)
            name = f"layers.{layer}"
            y = z + self.attention(f"{name}.self_attn", self.norm(f"{name}.input_layernorm", z), positions, sees)
        return name, y

    def states(self, tokens: Tensor, features: Tensor, positions: Tensor, sees: Tensor) -> Tensor:
        """Return what every pair feeds to the next step, ``(P, H)``; ``sees[q, k]``: pair q attends to pair k."""
        name, y = self.before_mlp(tokens, features, positions, sees)
        z = y + self.mlp(name, y)
        return self.norm("norm", z) if self.config.to_dict().get("norm_output") else z

    def logits(self, states: Tensor) -> Tensor:
        """Return logits over the draft vocabulary; EAGLE-1 has no norm before its head."""
        if self.config.method == "eagle3" and not self.config.norm_output:
            states = self.norm("norm", states)
        return states @ self.head.T

    def to_target(self, draft_id: int) -> int:
        """Map an id of the draft vocabulary: ``d2t`` holds offsets."""
        return draft_id + int(self.state["d2t"][draft_id]) if "d2t" in self.state else draft_id


class Rollout:
    """Draft behind one text: the law after any drafted path, each path computed from nothing but the text.

    ``tokens`` is the whole text, its newest token (the root) last; ``features`` are those of all positions before it.
    """

    def __init__(self, maths: EagleMath, tokens: list[int], features: Tensor) -> None:
        assert len(features) == len(tokens) - 1
        self.maths, self.tokens, self.features = maths, tokens[1:], features
        self._states: dict[Path, Tensor] = {}

    def state(self, path: Path) -> Tensor:
        """Return the newest state behind root and ``path``."""
        if path not in self._states:
            drafted = [self.state(path[:depth]) for depth in range(len(path))]
            features = torch.cat([self.features, *(state[None] for state in drafted)])
            tokens = torch.tensor([*self.tokens, *path])
            order = torch.arange(len(tokens))
            self._states[path] = self.maths.states(tokens, features, order, order[:, None] >= order)[-1]
        return self._states[path]

    def law(self, path: Path) -> Tensor:
        """Return draft logits ``(Vd,)`` of the token behind ``path``, in target ids."""
        return self.maths.logits(self.state(path))

    def ranked(self, path: Path, count: int) -> list[tuple[int, float]]:
        """Return the ``count`` best next tokens (target ids) with their log-probabilities, best first."""
        best = self.law(path).log_softmax(-1).topk(count)
        return [
            (self.maths.to_target(token), score)
            for token, score in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]


class MedusaMath:
    """Compute Medusa heads: ``x`` is what the target's head reads at the newest cached position."""

    def __init__(self, config: DrafterConfig, state: State, head: Tensor) -> None:
        self.config, self.head = config, head.double()
        self.state = {name: value.double() if value.is_floating_point() else value for name, value in state.items()}

    def law(self, x: Tensor, head: int) -> Tensor:
        """Return the logits of head ``head``, which guesses the token ``head + 2`` after the position of ``x``."""
        x = x.double()
        for layer in range(self.config.num_head_layers):
            bias = self.state.get(f"{head}.{layer}.linear.bias", torch.zeros(()).double())
            x = x + silu(x @ self.state[f"{head}.{layer}.linear.weight"].T + bias)
        own = self.state.get(f"{head}.{self.config.num_head_layers}.weight")
        return x @ (self.head if own is None else own).T

    def ranked(self, x: Tensor, head: int, count: int) -> list[int]:
        """Return the ``count`` best tokens of a head in target ids, best first."""
        best = self.law(x, head).topk(count).indices.tolist()
        return [token + int(self.state["d2t"][token]) if "d2t" in self.state else token for token in best]


@torch.no_grad()
def streams(model: PreTrainedModel, text: list[int], boundaries: tuple[int, ...] | list[int]) -> list[Tensor]:
    """Read a text afresh and return the residual stream ``(P, D)`` at each boundary; -1: what the head reads."""
    kept: list[Tensor] = []
    layers = model.model.layers

    def keep(module, inputs, output):
        kept.append(output if isinstance(output, Tensor) else output[0])

    hook = layers[-1].register_forward_hook(keep)
    try:
        states = model(torch.tensor([text]), use_cache=False, output_hidden_states=True).hidden_states
    finally:
        hook.remove()
    found = [*states[:-1], kept[-1], states[-1]]
    return [(found[-1] if boundary == -1 else found[boundary])[0] for boundary in boundaries]


def static_paths(shape: list[Path], choose) -> dict[Path, Path]:
    """Return the token path of every rank path; ``choose(tokens so far, rank)`` gives the next token."""
    tokens: dict[Path, Path] = {(): ()}
    for ranks in sorted(shape, key=len):
        above = tokens[ranks[:-1]]
        tokens[ranks] = (*above, choose(above, ranks[-1]))
    return {ranks: path for ranks, path in tokens.items() if ranks}


def dynamic_paths(rollout: Rollout, top_k: int, depth: int, nodes: int) -> dict[Path, float]:
    """Return EAGLE-2's tree as token paths with cumulative log-probabilities (Li et al. 2024, section 4)."""
    scored: dict[Path, float] = {}
    frontier: dict[Path, float] = {(): 0.0}
    for _ in range(depth):
        level = {
            (*path, token): score + gain
            for path, score in frontier.items()
            for token, gain in rollout.ranked(path, top_k)
        }
        scored.update(level)
        frontier = dict(sorted(level.items(), key=lambda item: -item[1])[:top_k])
    best = sorted(scored.items(), key=lambda item: (-item[1], len(item[0])))
    return dict(best[:nodes])
