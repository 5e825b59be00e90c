"""Targets whose next token is known by construction, and drafters whose weights are written down to know it too.

A residual stream holds one-hot blocks: A who the token is, B what attention fetched, C scratch, and a constant ONE.
Three targets: ``successor`` (next = f(current)), ``stairs`` (every layer's MLP goes one step: boundary b holds g^b of
the token, next = g^n), ``delay`` (attention fetches the token ``DELAY`` back, next = f of it).
Three ways for a drafter to know: by the ``token`` of a pair, by its ``feature`` (of the token before, so it applies
the map twice), by attention over the features of earlier pairs (``delay``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import torch
from tiny import build
from torch import Tensor
from transformers import PreTrainedModel

from hf_specgen.checkpoints.config import DrafterConfig
from hf_specgen.drafting.learned import LearnedDrafter

VOCAB, WIDTH, DELAY, LAYERS = 20, 64, 3, 3
A, B, C, ONE = 0, VOCAB, 2 * VOCAB, 3 * VOCAB
DRAFT_HEAD, TARGET_HEAD = 48, 32
DRAFT_BASE, TARGET_BASE = 30.0, 10.0
DECOY = 1.03
CLASSES = {
    "medusa": ("medusa", "MedusaDrafter"),
    "eagle": ("eagle", "EagleDrafter"),
    "eagle3": ("eagle3", "Eagle3Drafter"),
}

Map = Callable[[int], int]
State = dict[str, Tensor]
Weights = tuple[DrafterConfig, State]


@dataclass(frozen=True)
class OracleTarget:
    """Hold a target and what is known of it: ``follows[s]`` is the token after source ``s``."""

    kind: str
    model: PreTrainedModel
    follows: list[int]
    used: list[int]

    def ones(self, boundary: int) -> int:
        """Count the stream's ones at a boundary: its squared norm. Attention of ``delay`` sits in the second layer."""
        return 3 if self.kind == "delay" and boundary >= 2 else 2

    def held(self, boundary: int, token: int) -> int:
        """Return which token block A holds at a boundary when the text holds ``token``."""
        for _ in range(boundary if self.kind == "stairs" else 0):
            token = self.step(token)
        return token

    def step(self, token: int) -> int:
        """Go one of the steps of ``stairs``: one token further on the cycle."""
        return self.used[(self.used.index(token) + 1) % len(self.used)]

    def ahead(self, token: int, steps: int) -> int:
        """Return the token that many steps further in a text where each follows from the one before."""
        for _ in range(steps):
            token = self.follows[token]
        return token

    def decoy(self, token: int) -> int:
        """Return a token that is wrong wherever ``token`` is right."""
        return self.ahead(token, 7)


def write(block: Tensor, into: int, out_of: int, mapped: Map = lambda s: s, scale: float = 1.0) -> None:
    """Add to a matrix ``(out, in)``: one-hot ``s`` of the block at ``out_of`` becomes one-hot ``mapped(s)``."""
    for source in range(VOCAB):
        block[into + mapped(source), out_of + source] += scale


def peak(head_dim: int, base: float, distance: int, gain: float = 100.0) -> tuple[Tensor, Tensor]:
    """Return query and key ``(D,)``, before RoPE, whose score is greatest ``distance`` positions apart."""
    half = head_dim // 2
    angles = base ** (-torch.arange(half, dtype=torch.float64) / half)
    apart = torch.arange(-200, 201)[:, None] * angles
    scores = gain * apart.cos().sum(1) / head_dim**0.5
    lost = scores[200] - torch.cat([scores[:200], scores[201:]])
    assert lost.min() > 20, "one distance wins clearly"
    query = gain * torch.cat([(distance * angles).cos(), -(distance * angles).sin()])
    return query, torch.cat([torch.ones(half), torch.zeros(half)]).double()


def cycle(used: list[int], seed: int) -> list[int]:
    """Return a map of the vocabulary into ``used`` that is one cycle there: nothing repeats too soon."""
    source = torch.Generator().manual_seed(seed)
    order = [used[place] for place in torch.randperm(len(used), generator=source).tolist()]
    after = dict(zip(order, order[1:] + order[:1], strict=True))
    return [after.get(token, used[token % len(used)]) for token in range(VOCAB)]


def oracle_target(kind: str, used: list[int] | None = None, seed: int = 0) -> OracleTarget:
    """Build a Llama of three layers that writes by the rule of ``kind``, only tokens of ``used`` (default: all)."""
    used = used or list(range(VOCAB))
    sizes = {"hidden_size": WIDTH, "head_dim": TARGET_HEAD, "intermediate_size": 32, "num_hidden_layers": LAYERS}
    rope = {"rope_type": "default", "rope_theta": TARGET_BASE}
    model = build("llama", vocab_size=VOCAB, rope_parameters=rope, **sizes)
    follows = cycle(used, seed)
    if kind == "stairs":  # three steps of one each
        order = [0]
        while len(order) < VOCAB:
            order.append(follows[order[-1]])
        used = order
        follows = [order[(order.index(token) + LAYERS) % VOCAB] for token in range(VOCAB)]
    target = OracleTarget(kind, model, follows, used)
    state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    for name, value in state.items():
        if "norm" in name:
            value.fill_(1.0)
    embedding, head = state["model.embed_tokens.weight"], state["lm_head.weight"]
    write(embedding.T, A, 0)
    embedding[:, ONE] = 1.0
    scale = (WIDTH / 2) ** 0.5
    if kind == "delay":
        query, key = peak(TARGET_HEAD, TARGET_BASE, DELAY)
        name = "model.layers.1.self_attn"
        state[f"{name}.q_proj.weight"][:TARGET_HEAD, ONE] = query.float() / scale
        state[f"{name}.k_proj.weight"][:TARGET_HEAD, ONE] = key.float() / scale
        write(state[f"{name}.v_proj.weight"], 0, A, scale=1 / scale)
        write(state[f"{name}.o_proj.weight"], B, 0)
    for layer in range(LAYERS if kind == "stairs" else 0):
        mapping_mlp(state, f"model.layers.{layer}.mlp", target.step, scale, 1.0)
    write(head, 0, B if kind == "delay" else A, (lambda s: s) if kind == "stairs" else follows.__getitem__, 2.0)
    model.load_state_dict(state)
    return target


def mapping_mlp(state: State, name: str, mapped: Map, scale: float, amplitude: float) -> None:
    """Write an MLP that turns one-hot s of block A, of size ``scale``, into one-hot mapped(s) of size ``amplitude``."""
    state[f"{name}.gate_proj.weight"][:VOCAB, ONE] = 6.0 / scale
    write(state[f"{name}.up_proj.weight"], 0, A, mapped, 1 / scale)
    write(state[f"{name}.up_proj.weight"], 0, A, scale=-1 / scale)
    opened = float(torch.nn.functional.silu(torch.tensor(6.0)))
    write(state[f"{name}.down_proj.weight"], A, 0, scale=amplitude / opened)


def blank(config: DrafterConfig, attention_width: int) -> State:
    """Return a drafter layer's tensors, all zero but the norms, under names without a layer's prefix."""
    width, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    state = {
        "self_attn.q_proj.weight": torch.zeros(queries, attention_width),
        "self_attn.k_proj.weight": torch.zeros(keys, attention_width),
        "self_attn.v_proj.weight": torch.zeros(keys, attention_width),
        "self_attn.o_proj.weight": torch.zeros(width, queries),
        "mlp.gate_proj.weight": torch.zeros(inner, width),
        "mlp.up_proj.weight": torch.zeros(inner, width),
        "mlp.down_proj.weight": torch.zeros(width, inner),
        "post_attention_layernorm.weight": torch.ones(width),
    }
    if config.layer_type == "qwen3":
        state["self_attn.q_norm.weight"] = torch.full((dim,), 50.0)
        state["self_attn.k_norm.weight"] = torch.ones(dim)
    return state


def aim(state: State, config: DrafterConfig, head: int, distance: int, one: int, scale: float) -> None:
    """Point a query head at the pair ``distance`` back; ``one`` is the column of the constant, of size ``scale``."""
    dim, group = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    query, key = peak(dim, DRAFT_BASE, distance)
    state["self_attn.q_proj.weight"][head * dim : (head + 1) * dim, one] = query.float() / scale
    place = head // group * dim
    state["self_attn.k_proj.weight"][place : place + dim, one] = key.float() / scale


def layer_settings(hidden_size: int = WIDTH, **settings: object) -> dict[str, object]:
    """Return the sizes of an oracle's layer: four query heads over two key heads, wider than the stream."""
    sizes = {"hidden_size": hidden_size, "intermediate_size": 32, "vocab_size": VOCAB, "target_hidden_size": WIDTH}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": DRAFT_HEAD}
    return {**sizes, **heads, "rope_parameters": {"rope_type": "default", "rope_theta": DRAFT_BASE}, **settings}


def eagle_oracle(target: OracleTarget, way: str, decoy: bool = False, **settings: object) -> Weights:
    """Write down EAGLE-1 weights that know the target by ``way``; with ``decoy`` the second guess is the right one."""
    config = DrafterConfig("eagle", own_head=False, **layer_settings(**settings))
    scale = (WIDTH / target.ones(LAYERS)) ** 0.5  # of a one in the target's normalised features
    layer, fc = blank(config, WIDTH), torch.zeros(WIDTH, 2 * WIDTH)
    fc[ONE, ONE] = scale
    if way == "feature":
        write(fc, A, WIDTH + A, target.follows.__getitem__)
    else:
        write(fc, A, A, lambda s: target.held(LAYERS, s), scale)
    if decoy:
        write(fc, A, A, target.decoy, DECOY * scale)
    if way == "delay":
        write(fc, C, WIDTH + A)
        aim(layer, config, 0, DELAY - 1, ONE, scale)
        write(layer["self_attn.v_proj.weight"], 0, C)
        write(layer["self_attn.o_proj.weight"], B, 0)
    return config, {"fc.weight": fc, **{f"layers.0.{name}": value for name, value in layer.items()}}


def eagle3_oracle(
    target: OracleTarget, way: str, decoy: bool = False, reduced: bool = False, **settings: object
) -> Weights:
    """Write down EAGLE-3 weights that know the target by ``way``: a pair's state is the stream of the next position."""
    boundaries = [1, 2, 3]
    limits = {"draft_vocab_size": len(target.used)} if reduced else {}
    config = DrafterConfig("eagle3", aux_layer_boundaries=boundaries, **layer_settings(**limits, **settings))
    width, ones = config.hidden_size, 3 if way == "delay" else 2
    unit = (width / ones) ** 0.5  # a one of features and states, so that every norm leaves them alone
    read = (width / 2) ** 0.5  # a one of the normalised embedding
    layer = blank(config, 2 * width)
    state = {"fc.weight": feature_weights(target, config, unit, ones), "norm.weight": torch.ones(width)}
    dim, out = config.head_dim, layer["self_attn.o_proj.weight"]
    if way == "feature":
        mapping_mlp(layer, "mlp", target.follows.__getitem__, unit, unit)
    else:
        for head, distance in enumerate((DELAY - 1, 0, 0)):
            aim(layer, config, head, distance, width + ONE, unit)
        values = layer["self_attn.v_proj.weight"]
        write(values, 0, width + A)
        write(values, dim, A, scale=unit / read)
        write(values, dim + VOCAB, width + B)
        write(out, A, dim, scale=-1.0)
        write(out, A, 2 * dim)
        write(out, B, 2 * dim + VOCAB, scale=-1.0)
    if way == "delay":
        write(out, B, 0)
    state |= {f"midlayer.{name}": value for name, value in layer.items()}
    state |= {f"midlayer.{name}.weight": torch.ones(width) for name in ("hidden_norm", "input_layernorm")}
    state |= switched(config)
    if config.own_embedding:
        state["embed_tokens.weight"] = torch.zeros(VOCAB, width)
        write(state["embed_tokens.weight"].T, A, 0)
        state["embed_tokens.weight"][:, ONE] = 1.0
    return config, state | draft_head(target, config, "lm_head.weight", B if way == "delay" else A, decoy)


def feature_weights(target: OracleTarget, config: DrafterConfig, unit: float, ones: int) -> Tensor:
    """Write ``fc``: it decodes block A of three boundaries (weights 1, 1, -1) and takes B from the last."""
    counts = [target.ones(boundary) for boundary in config.aux_layer_boundaries]
    weight = torch.zeros(config.hidden_size, len(counts) * WIDTH)
    for slot, (boundary, share) in enumerate(zip(config.aux_layer_boundaries, (1.0, 1.0, -1.0), strict=True)):
        grown = 1.0
        if config.fc_norm:
            grown = (WIDTH / counts[slot]) ** 0.5
        elif config.norm_before_fc:
            grown = (len(counts) * WIDTH / sum(counts)) ** 0.5
        undone = {target.held(boundary, token): token for token in range(VOCAB)}
        write(weight, A, slot * WIDTH + A, undone.__getitem__, share * unit / grown)
        weight[ONE, slot * WIDTH + ONE] = share * unit / grown
        if slot == 2 and ones == 3:
            write(weight, B, slot * WIDTH + B, scale=unit / grown)
    return weight


def switched(config: DrafterConfig) -> State:
    """Return the weights that only some variants have."""
    slots = len(config.aux_layer_boundaries)
    state: State = {}
    if config.norm_before_fc:
        state["input_norm.weight"] = torch.ones(slots * WIDTH)
    if config.fc_norm:
        state |= {f"fc_norm.{slot}.weight": torch.ones(WIDTH) for slot in range(slots)}
    return state


def draft_head(
    target: OracleTarget, config: DrafterConfig, name: str, block: int, decoy: bool = False, steps: int = 1
) -> State:
    """Return a head that reads a block and names the token ``steps`` further, in the draft vocabulary, and the map."""
    kept = target.used if config.reduces_vocabulary else list(range(VOCAB))
    weight = torch.zeros(len(kept), config.hidden_size)
    write(weight, 0, block, lambda s: kept.index(target.ahead(s, steps)), 2.0)
    if decoy:
        write(weight, 0, block, lambda s: kept.index(target.decoy(target.ahead(s, steps))), 2.0 * DECOY)
    state = {name: weight}
    if config.reduces_vocabulary:
        ids = torch.tensor(kept)
        state["d2t"] = ids - torch.arange(len(kept))
        if config.method == "eagle3":
            state["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True)
    return state


def medusa_oracle(
    target: OracleTarget,
    heads: int = 4,
    own: bool = True,
    decoy: bool = False,
    reduced: bool = False,
    **settings: object,
) -> Weights:
    """Write down Medusa heads: the block maps once (own heads) or all the way (the target's head reads the rest)."""
    limits = {"draft_vocab_size": len(target.used)} if reduced else {}
    sizes = {"hidden_size": WIDTH, "target_hidden_size": WIDTH, "vocab_size": VOCAB, **limits}
    config = DrafterConfig("medusa", num_heads=heads, num_head_layers=1, own_head=own, **sizes, **settings)
    scale = (WIDTH / target.ones(LAYERS)) ** 0.5
    state: State = {}
    for head in range(heads):
        weight, bias = torch.zeros(WIDTH, WIDTH), torch.zeros(WIDTH)
        write(weight, A, A, partial(target.ahead, steps=1 if own else head + 1), 4.0)
        bias[A : A + VOCAB] = -2.0 * scale  # the block writes 2 * scale, twice what is there
        state |= {f"{head}.0.linear.weight": weight, f"{head}.0.linear.bias": bias}
        if own:
            state |= draft_head(target, config, f"{head}.1.weight", A, decoy, head + 1)
    return config, state


def drafter_from(weights: tuple[DrafterConfig, State | None], dtype: torch.dtype = torch.float32) -> LearnedDrafter:
    """Build the drafter of a configuration and its weights: every tensor must be there and no other.

    Without weights it is what its constructor makes of it.
    """
    config, state = weights
    module, name = CLASSES[config.method]
    drafter = vars(import_module(f"hf_specgen.drafters.{module}"))[name](config)
    if state is not None:
        drafter.load_state_dict(state)
    return drafter.to(dtype).eval()
