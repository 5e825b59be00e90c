"""The tensors of every drafter of ours, from its config alone: what a checkpoint must hold, no more and no less."""

from __future__ import annotations

from hf_specgen.checkpoints.config import DrafterConfig
from hf_specgen.errors import IncompatibleDrafter

# EAGLE-3 without layer ids reads three layers of the target, by the published rule.
DEFAULT_TAKEN = 3

Shapes = dict[str, tuple[int, ...]]


def state_shapes(config: DrafterConfig) -> Shapes:
    """Return the names and shapes of a drafter's ``state_dict``. Raises: ``IncompatibleDrafter`` for other methods."""
    makers = {"medusa": medusa_shapes, "eagle": eagle_shapes, "eagle3": eagle3_shapes}
    if config.method not in makers:
        raise IncompatibleDrafter(
            f"method {config.method!r} is unknown: one of {', '.join(sorted(makers))} is required. A newer hf_specgen "
            "may know it."
        )
    return makers[config.method](config)


def medusa_shapes(config: DrafterConfig) -> Shapes:
    """Return the tensors of Medusa heads: residual blocks, and own heads or none."""
    width = config.hidden_size
    found: Shapes = {}
    for head in range(config.num_heads):
        for block in range(config.num_head_layers):
            found[f"{head}.{block}.linear.weight"] = (width, width)
            if config.head_bias:
                found[f"{head}.{block}.linear.bias"] = (width,)
        if config.own_head:
            found[f"{head}.{config.num_head_layers}.weight"] = (config.draft_vocab_size, width)
    if config.reduces_vocabulary:
        found["d2t"] = (config.draft_vocab_size,)
    return found


def eagle_shapes(config: DrafterConfig) -> Shapes:
    """Return the tensors of an EAGLE-1 drafter: its first layer has no input norm, its head is the target's."""
    width = config.hidden_size
    found: Shapes = {"fc.weight": (width, width + config.target_hidden_size)}
    if config.fc_bias:
        found["fc.bias"] = (width,)
    for index in range(config.num_hidden_layers):
        layer = layer_shapes(config, width)
        if index:
            layer["input_layernorm.weight"] = (width,)
        found |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    if config.reduces_vocabulary:
        found["d2t"] = (config.draft_vocab_size,)
    return found | _ends(config)


def eagle3_shapes(config: DrafterConfig) -> Shapes:
    """Return the tensors of an EAGLE-3 drafter: its first layer reads embedding and feature side by side."""
    width = config.hidden_size
    taken = len(config.aux_layer_boundaries) or DEFAULT_TAKEN
    first = layer_shapes(config, 2 * width) | {"input_layernorm.weight": (width,), "hidden_norm.weight": (width,)}
    found = {f"midlayer.{name}": shape for name, shape in first.items()}
    for index in range(1, config.num_hidden_layers):
        layer = layer_shapes(config, width) | {"input_layernorm.weight": (width,)}
        found |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    found["fc.weight"] = (width, taken * config.target_hidden_size)
    found["norm.weight"] = (width,)
    if config.fc_bias:
        found["fc.bias"] = (width,)
    if config.norm_before_fc:
        found["input_norm.weight"] = (taken * config.target_hidden_size,)
    if config.fc_norm:
        found |= {f"fc_norm.{index}.weight": (config.target_hidden_size,) for index in range(taken)}
    if config.own_head:
        found["lm_head.weight"] = (config.draft_vocab_size, width)
    if config.reduces_vocabulary:
        found |= {"d2t": (config.draft_vocab_size,), "t2d": (config.vocab_size,)}
    return found | _ends(config)


def layer_shapes(config: DrafterConfig, taken: int) -> Shapes:
    """Return the tensors of one decoder layer whose attention reads ``taken`` features, without its input norms."""
    width = config.hidden_size
    inner = config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = (config.num_key_value_heads or config.num_attention_heads) * config.head_dim
    linear = {
        "self_attn.q_proj": (queries, taken),
        "self_attn.k_proj": (keys, taken),
        "self_attn.v_proj": (keys, taken),
        "self_attn.o_proj": (width, queries),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    found: Shapes = {f"{name}.weight": shape for name, shape in linear.items()}
    for name, shape in linear.items():
        if config.attention_bias if name.startswith("self_attn") else config.mlp_bias:
            found[f"{name}.bias"] = shape[:1]
    if config.layer_type == "qwen3":
        found |= {f"self_attn.{name}.weight": (config.head_dim,) for name in ("q_norm", "k_norm")}
    found["post_attention_layernorm.weight"] = (width,)
    return found


def _ends(config: DrafterConfig) -> Shapes:
    if not config.own_embedding:
        return {}
    return {"embed_tokens.weight": (config.vocab_size, config.hidden_size)}
