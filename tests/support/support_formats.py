"""Small checkpoints of every EAGLE layout, written out key by key as their producers do."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from hf_specgen.checkpoints.formats.base import Checkpoint, ReadOptions, Source, detect
from hf_specgen.models.facts import TargetFacts

H, INNER, A, K, V, VD, N = 16, 24, 4, 2, 40, 12, 8
# The published head of Llama-3.1-8B.
LLAMA31_EAGLE3 = {
    "midlayer.self_attn.q_proj.weight": (4096, 8192),
    "midlayer.self_attn.k_proj.weight": (1024, 8192),
    "midlayer.self_attn.v_proj.weight": (1024, 8192),
    "midlayer.self_attn.o_proj.weight": (4096, 4096),
    "midlayer.mlp.gate_proj.weight": (14336, 4096),
    "midlayer.mlp.up_proj.weight": (14336, 4096),
    "midlayer.mlp.down_proj.weight": (4096, 14336),
    "midlayer.hidden_norm.weight": (4096,),
    "midlayer.input_layernorm.weight": (4096,),
    "midlayer.post_attention_layernorm.weight": (4096,),
    "fc.weight": (4096, 12288),
    "norm.weight": (4096,),
    "lm_head.weight": (32000, 4096),
    "d2t": (32000,),
    "t2d": (128256,),
}


FACTS = TargetFacts(hidden_size=H, vocab_size=V, num_layers=N, name="t/target")
OPTIONS = ReadOptions(target=FACTS)


def source_of(config: dict[str, Any], tensors: dict[str, Tensor], files: tuple[str, ...] = ()) -> Source:
    """Open a checkpoint that lies in memory."""

    def load(names: Iterable[str]) -> dict[str, Tensor]:
        return {name: tensors[name] for name in names}

    return Source("t/drafter", config, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, load, files)


def shapes_only(config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Source:
    """Open a checkpoint of which nothing may be read."""

    def load(names: Iterable[str]) -> dict[str, Tensor]:
        raise AssertionError(f"read {list(names)}")

    return Source("t/drafter", config, shapes, load)


def opened(folder: Path) -> Source:
    """Open a folder that a layout has written."""
    import json

    return source_of(json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors"))


def read(source: Source, options: ReadOptions = OPTIONS) -> Checkpoint:
    """Read a checkpoint with the layout that recognises it."""
    return detect(source).read(source, options)


def random(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    """Fill shapes with numbers."""
    torch.manual_seed(seed)
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def layer(prefix: str, taken: int, heads: int = A, keys: int = K, dim: int = H // A) -> dict[str, tuple[int, ...]]:
    """Return the keys of a decoder layer without its input norms."""
    return {
        f"{prefix}self_attn.q_proj.weight": (heads * dim, taken),
        f"{prefix}self_attn.k_proj.weight": (keys * dim, taken),
        f"{prefix}self_attn.v_proj.weight": (keys * dim, taken),
        f"{prefix}self_attn.o_proj.weight": (H, heads * dim),
        f"{prefix}mlp.gate_proj.weight": (INNER, H),
        f"{prefix}mlp.up_proj.weight": (INNER, H),
        f"{prefix}mlp.down_proj.weight": (H, INNER),
        f"{prefix}post_attention_layernorm.weight": (H,),
    }


def llama_config(**settings: Any) -> dict[str, Any]:
    """Return the settings that every plain config has."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": H,
        "intermediate_size": INNER,
        "max_position_embeddings": 64,
        "num_attention_heads": A,
        "num_key_value_heads": K,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "vocab_size": V,
        "torch_dtype": "float16",
        **settings,
    }


def eagle3_shapes(first: str = "midlayer.", features: int = 3, vocab: int = VD, dim: int = H // A) -> dict:
    """Return the keys of the authors' EAGLE-3 file without its vocabulary map."""
    return {
        **layer(first, 2 * H, dim=dim),
        f"{first}hidden_norm.weight": (H,),
        f"{first}input_layernorm.weight": (H,),
        "fc.weight": (H, features * H),
        "norm.weight": (H,),
        "lm_head.weight": (vocab, H),
    }


def vocabulary() -> dict[str, Tensor]:
    """Return a map of ``VD`` of ``V`` ids: offsets and mask."""
    used = torch.tensor([0, 1, 4, 5, 9, 11, 15, 16, 20, 31, 38, 39])
    mask = torch.zeros(V, dtype=torch.bool)
    mask[used] = True
    return {"d2t": used - torch.arange(VD), "t2d": mask}


def eagle3_file(first: str = "midlayer.", **settings: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config and tensors as EAGLE-3's authors publish them."""
    config = llama_config(draft_vocab_size=VD, max_position_embeddings=2048, **settings)
    return config, {**random(eagle3_shapes(first)), **vocabulary()}


def library_config(layers: int = 1, **settings: Any) -> dict[str, Any]:
    """Return a config of the speculators library: the layers' settings nested."""
    own = {"num_hidden_layers": layers, "head_dim": H // A, "rope_theta": 500.0, **settings.pop("inner", {})}
    inner = llama_config(**own)
    return {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {"": "config.Eagle3SpeculatorConfig"},
        "speculators_model_type": "eagle3",
        "speculators_version": "0.2.0",
        "draft_vocab_size": VD,
        "norm_before_residual": True,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": inner,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"name_or_path": "t/target", "architectures": ["LlamaForCausalLM"]},
        },
        **settings,
    }


def eagle_shapes(bias: bool = True) -> dict[str, tuple[int, ...]]:
    """Return the keys of the authors' EAGLE-1 file."""
    found = {"embed_tokens.weight": (V, H), "fc.weight": (H, 2 * H), **layer("layers.0.", H)}
    return {**found, "fc.bias": (H,)} if bias else found


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Tell whether names, dtypes and values are equal."""
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def renamed(tensors: dict[str, Tensor], old: str, new: str) -> dict[str, Tensor]:
    """Rename a prefix."""
    return {new + name.removeprefix(old) if name.startswith(old) else name: tensors[name] for name in tensors}
