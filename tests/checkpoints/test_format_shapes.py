"""Key lists and shapes of published checkpoints (Vicuna-7B, Llama-3-8B, Llama-3.1-8B), resolved without memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support_formats import LLAMA31_EAGLE3, shapes_only

from hf_specgen.checkpoints.config import DrafterConfig
from hf_specgen.checkpoints.formats.base import Plan, ReadOptions, Source, detect
from hf_specgen.checkpoints.methods import state_shapes
from hf_specgen.drafters.eagle import EagleDrafter
from hf_specgen.drafters.eagle3 import Eagle3Drafter
from hf_specgen.drafters.medusa import MedusaDrafter
from hf_specgen.errors import IncompatibleDrafter
from hf_specgen.models.facts import TargetFacts

VICUNA_EAGLE = {
    "embed_tokens.weight": (32000, 4096),
    "fc.weight": (4096, 8192),
    "fc.bias": (4096,),
    "layers.0.self_attn.q_proj.weight": (4096, 4096),
    "layers.0.self_attn.k_proj.weight": (4096, 4096),
    "layers.0.self_attn.v_proj.weight": (4096, 4096),
    "layers.0.self_attn.o_proj.weight": (4096, 4096),
    "layers.0.mlp.gate_proj.weight": (11008, 4096),
    "layers.0.mlp.up_proj.weight": (11008, 4096),
    "layers.0.mlp.down_proj.weight": (4096, 11008),
    "layers.0.post_attention_layernorm.weight": (4096,),
}
LLAMA3_EAGLE = {
    "embed_tokens.weight": (128256, 4096),
    "fc.weight": (4096, 8192),
    "layers.0.self_attn.q_proj.weight": (4096, 4096),
    "layers.0.self_attn.k_proj.weight": (1024, 4096),
    "layers.0.self_attn.v_proj.weight": (1024, 4096),
    "layers.0.self_attn.o_proj.weight": (4096, 4096),
    "layers.0.mlp.gate_proj.weight": (14336, 4096),
    "layers.0.mlp.up_proj.weight": (14336, 4096),
    "layers.0.mlp.down_proj.weight": (4096, 14336),
    "layers.0.post_attention_layernorm.weight": (4096,),
}
VICUNA_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "float16",
    "vocab_size": 32000,
}
LLAMA3_CONFIG = {
    **VICUNA_CONFIG,
    "bias": False,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
LLAMA31_CONFIG = {
    **{key: value for key, value in LLAMA3_CONFIG.items() if key not in ("bias", "rope_theta", "rope_scaling")},
    "draft_vocab_size": 32000,
}
TARGET = TargetFacts(hidden_size=4096, vocab_size=128256, num_layers=32, name="t/llama-3.1-8b")


def planned(source: Source, facts: TargetFacts | None = None) -> tuple[Plan, str]:
    layout = detect(source)
    return layout.plan(source, ReadOptions(facts or TargetFacts())), layout.name


def float_bytes(shapes: dict[str, tuple[int, ...]]) -> float:
    return sum(2 * math.prod(shape) for name, shape in shapes.items() if name not in ("d2t", "t2d")) / 1e9


@pytest.mark.parametrize(
    ("config", "shapes", "biased"), [(VICUNA_CONFIG, VICUNA_EAGLE, True), (LLAMA3_CONFIG, LLAMA3_EAGLE, False)]
)
def test_eagle_of_its_authors(config: dict[str, Any], shapes: dict[str, tuple[int, ...]], biased: bool) -> None:
    plan, layout = planned(shapes_only(config, shapes))
    assert layout == "eagle"
    assert plan.names == {name: name for name in shapes}
    assert state_shapes(plan.config) == shapes
    assert plan.config.fc_bias is biased
    assert plan.config.rope_parameters["rope_theta"] == (10000.0 if biased else 500000.0)


def test_eagle3_of_its_authors() -> None:
    plan, layout = planned(shapes_only(LLAMA31_CONFIG, LLAMA31_EAGLE3), TARGET)
    assert layout == "safeailab-eagle3"
    assert plan.names == {name: name for name in LLAMA31_EAGLE3}
    assert state_shapes(plan.config) == LLAMA31_EAGLE3
    assert plan.config.aux_layer_boundaries == [2, 16, 29]
    assert plan.config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}  # not the target's 500000
    assert any("base 10000 (the default" in note for note in plan.notes)
    assert any("32000 of the target's 128256" in note for note in plan.notes)
    assert "embedding: the target's" in plan.notes
    assert "head: the drafter's own" in plan.notes


def test_published_file_sizes() -> None:
    assert float_bytes(LLAMA3_EAGLE) == pytest.approx(1.554, abs=0.001)
    assert float_bytes(LLAMA31_EAGLE3) == pytest.approx(0.849, abs=0.001)


def test_every_tensor_counts() -> None:
    for name in LLAMA31_EAGLE3:
        short = {key: shape for key, shape in LLAMA31_EAGLE3.items() if key != name}
        if name == "t2d":  # rebuilt from d2t
            assert "t2d" not in planned(shapes_only(LLAMA31_CONFIG, short), TARGET)[0].names
            continue
        with pytest.raises(IncompatibleDrafter, match=name.replace("layers.0", "midlayer")):
            planned(shapes_only(LLAMA31_CONFIG, short), TARGET)
    for name in VICUNA_EAGLE:
        short = {key: shape for key, shape in VICUNA_EAGLE.items() if key != name}
        if name in ("embed_tokens.weight", "fc.bias"):  # the target's; fewer parameters
            assert name not in planned(shapes_only(VICUNA_CONFIG, short))[0].names
            continue
        with pytest.raises(IncompatibleDrafter, match=name):
            planned(shapes_only(VICUNA_CONFIG, short))


def test_every_shape_counts() -> None:
    for name, shape in LLAMA31_EAGLE3.items():
        wrong = {**LLAMA31_EAGLE3, name: (shape[0] + 2, *shape[1:])}
        with pytest.raises(IncompatibleDrafter, match=name):
            planned(shapes_only(LLAMA31_CONFIG, wrong), TARGET)


MODULES = {"eagle": EagleDrafter, "eagle3": Eagle3Drafter, "medusa": MedusaDrafter}
CONFIGS = {
    "medusa": {"num_heads": 3},
    "medusa shared head": {"num_heads": 2, "own_head": False, "num_head_layers": 2},
    "medusa few ids": {"num_heads": 2, "head_bias": False, "draft_vocab_size": 100},
    "eagle": {"own_head": False},
    "eagle bias": {"own_head": False, "fc_bias": True, "own_embedding": True, "num_hidden_layers": 2},
    "eagle biases": {"own_head": False, "attention_bias": True, "mlp_bias": True},
    "eagle3": {"draft_vocab_size": 100},
    "eagle3 unknown layers": {"aux_layer_boundaries": None},
    "eagle3 five": {"aux_layer_boundaries": [1, 2, 3, 4, 5], "layer_type": "qwen3", "head_dim": 32},
    "eagle3 deep": {"num_hidden_layers": 3, "norm_before_fc": True, "attention_bias": True, "fc_bias": True},
    "eagle3 fc_norm": {"fc_norm": True, "norm_output": True, "norm_before_residual": True, "own_embedding": True},
    "eagle3 other target": {"target_hidden_size": 96, "own_embedding": True, "fc_norm": True},
    "eagle3 target's head": {"own_head": False},
    "eagle3 window": {"sliding_window": 8, "num_key_value_heads": 2},
}


@pytest.mark.parametrize("case", CONFIGS)
def test_state_shapes_are_those_of_the_modules(case: str) -> None:
    settings = {"aux_layer_boundaries": [2, 4, 5], **CONFIGS[case]}
    config = DrafterConfig(method=case.split()[0], **settings)
    with torch.device("meta"):
        module = MODULES[config.method](config)
    assert state_shapes(config) == {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
