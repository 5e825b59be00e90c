"""What is written can be read: by us, tensor for tensor and setting for setting, and by the engines' rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from support_formats import (
    FACTS,
    VD,
    H,
    K,
    V,
    eagle3_file,
    eagle3_shapes,
    llama_config,
    opened,
    random,
    read,
    same,
    source_of,
)
from transformers import AutoConfig, LlamaConfig

from hf_specgen.checkpoints.config import DrafterConfig
from hf_specgen.checkpoints.formats.base import Checkpoint, layout_named
from hf_specgen.checkpoints.formats.specgen import VERSION
from hf_specgen.drafters.eagle import EagleDrafter
from hf_specgen.drafters.eagle3 import Eagle3Drafter
from hf_specgen.drafters.medusa import MedusaDrafter
from hf_specgen.errors import IncompatibleDrafter, SpecGenError
from hf_specgen.loading import drafter_class, load_drafter

IDS = "eagle_aux_hidden_state_layer_ids"
PART = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5}
LINEAR = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
SMALL = {
    "hidden_size": H,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": K,
    "vocab_size": V,
    "aux_layer_boundaries": [2, 4, 5],
    "target": {"name": "t/target"},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "few ids": {"draft_vocab_size": VD},
    "own embedding": {"own_embedding": True},
    "other target": {"own_embedding": True, "target_hidden_size": 24},
    "no layer ids": {"aux_layer_boundaries": None},
    "five layers": {"aux_layer_boundaries": [3, 4, 5, 6, 8], "rope_parameters": LINEAR},
    "wide heads, biases": {"head_dim": 8, "attention_bias": True, "mlp_bias": True},
    "norm before fc": {"norm_before_fc": True},
    "EAGLE-3.1": {"fc_norm": True, "norm_output": True},
    "rotated in part": {"rope_parameters": PART, "head_dim": 8, "attention_bias": True},
    "linear in part": {"rope_parameters": {**LINEAR, **PART, "rope_type": "linear"}, "head_dim": 8},
}
BEYOND_SGLANG: dict[str, dict[str, Any]] = {
    "norm before residual": {"norm_before_residual": True, "draft_vocab_size": VD},
    "qwen3": {"layer_type": "qwen3", "head_dim": 8},
    "deep": {"num_hidden_layers": 3},
    "window": {"sliding_window": 8},
    "one window": {"sliding_window": 8, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3, one window": {
        "layer_type": "qwen3",
        "sliding_window": 8,
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "qwen3 window": {"layer_type": "qwen3", "sliding_window": 8},
    "layer 1": {"aux_layer_boundaries": [1, 4, 5]},
    "boundaries like layer outputs": {"aux_layer_boundaries": [1, 3, 4]},
}
OURS_ALONE: dict[str, dict[str, Any]] = {
    "the target's head": {"own_head": False},
    "fc bias": {"fc_bias": True},
    "how to draft": {"tree": {"top_k": 3, "depth": 2, "nodes": 5}, "num_tokens": 4},
    "sampling": {"tree": [[0], [1], [0, 0]], "sample": True, "target": {"name": "t/x", "fingerprint": "ab"}},
}


def drafter(settings: dict[str, Any], seed: int = 0) -> Eagle3Drafter:
    torch.manual_seed(seed)
    made = Eagle3Drafter(DrafterConfig(method="eagle3", **{**SMALL, **settings}))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return made


def fields(checkpoint: Checkpoint) -> dict[str, Any]:
    return checkpoint.config.to_dict()


def written(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def round_trip(settings: dict[str, Any], layout: str, folder: Path) -> None:
    made = drafter(settings).checkpoint()
    layout_named(layout).write(made, folder)
    again = read(opened(folder))
    assert again.layout == layout
    assert again.warnings == ()
    assert same(again.tensors, made.tensors)
    if made.config.aux_layer_boundaries == []:  # the published rule, since the reader knows the target
        made.config.aux_layer_boundaries = [2, 4, 5] if layout != "specgen" else []
    if layout == "sglang-eagle3":  # names no target: it is for the one it is loaded with
        made.config.target = {"name": FACTS.name}
    assert fields(again) == fields(made)


@pytest.mark.parametrize("case", [*VARIANTS, *BEYOND_SGLANG, *OURS_ALONE])
def test_round_trip_of_ours(case: str, tmp_path: Path) -> None:
    round_trip({**VARIANTS, **BEYOND_SGLANG, **OURS_ALONE}[case], "specgen", tmp_path)


@pytest.mark.filterwarnings("ignore:SGLang replaces")
@pytest.mark.parametrize("case", [*VARIANTS, "the target's head"])
def test_round_trip_of_sglang(case: str, tmp_path: Path) -> None:
    round_trip({**VARIANTS, **OURS_ALONE}[case], "sglang-eagle3", tmp_path)


@pytest.mark.parametrize("case", [*VARIANTS, *BEYOND_SGLANG])
def test_round_trip_of_vllm(case: str, tmp_path: Path) -> None:
    round_trip({**VARIANTS, **BEYOND_SGLANG}[case], "vllm-speculators", tmp_path)


@pytest.mark.parametrize("case", [*BEYOND_SGLANG, "fc bias"])
def test_sglang_gets_nothing_it_would_serve_wrongly(case: str, tmp_path: Path) -> None:
    made = drafter({**BEYOND_SGLANG, **OURS_ALONE}[case]).checkpoint()
    with pytest.raises(IncompatibleDrafter, match="SGLang"):
        layout_named("sglang-eagle3").write(made, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_vllm_gets_nothing_it_cannot_serve(tmp_path: Path) -> None:
    for settings, reason in (
        ({"own_head": False}, r"lm_head.weight"),
        ({"fc_bias": True}, r"fc.bias"),
        ({"target": {}}, "the target's name"),
    ):
        with pytest.raises(IncompatibleDrafter, match=reason):
            layout_named("vllm-speculators").write(drafter(settings).checkpoint(), tmp_path)
    for layout in ("vllm-speculators", "sglang-eagle3"):
        eagle = Checkpoint(DrafterConfig(method="eagle"), {}, "specgen")
        with pytest.raises(IncompatibleDrafter, match="'eagle'"):
            layout_named(layout).write(eagle, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_layer_ids_as_each_reader_takes_them(tmp_path: Path) -> None:
    for bounds, sglang in (([2, 4, 5], [1, 3, 4]), ([3, 4, 6], [3, 4, 6]), ([0, 4, 6], [0, 4, 6])):
        made = drafter({"aux_layer_boundaries": bounds}).checkpoint()
        for layout in ("specgen", "sglang-eagle3", "vllm-speculators"):
            layout_named(layout).write(made, tmp_path)
            assert read(opened(tmp_path)).config.aux_layer_boundaries == bounds
            assert written(tmp_path)[IDS] == bounds  # vLLM reads the top, as boundaries
            inner = written(tmp_path).get("eagle_config", {}).get(IDS)
            ours = [index - 1 for index in bounds]
            assert inner == {"specgen": ours, "sglang-eagle3": sglang, "vllm-speculators": None}[layout]


@pytest.mark.parametrize("layer_type", ["llama", "qwen3"])
def test_others_parse_our_config(layer_type: str, tmp_path: Path) -> None:
    settings = {"rope_parameters": LINEAR, "layer_type": layer_type, "draft_vocab_size": VD, "sliding_window": 8}
    drafter(settings).save_pretrained(tmp_path)
    parsed = AutoConfig.from_pretrained(tmp_path)
    named = {"llama": "LlamaForCausalLMEagle3", "qwen3": "Eagle3Qwen3ForCausalLM"}[layer_type]
    assert (parsed.model_type, parsed.architectures) == (layer_type, [named])
    assert {name: parsed.rope_parameters[name] for name in LINEAR} == LINEAR
    assert (parsed.hidden_size, parsed.num_key_value_heads, parsed.head_dim) == (H, K, H // 4)
    assert (parsed.draft_vocab_size, parsed.vocab_size, parsed.tie_word_embeddings) == (VD, V, False)
    raw = written(tmp_path)
    assert (raw["rope_theta"], raw["rope_scaling"]) == (5e5, {"rope_type": "linear", "type": "linear", "factor": 2.0})
    assert raw["layer_types"] == ["sliding_attention"]
    assert raw["norm_before_residual"] is False
    names = set(opened(tmp_path).shapes)
    assert {"midlayer.hidden_norm.weight", "fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"} <= names


def test_the_library_finds_its_settings(tmp_path: Path) -> None:
    settings = {"draft_vocab_size": VD, "num_tokens": 4, "norm_before_residual": True, "rope_parameters": LINEAR}
    layout_named("vllm-speculators").write(drafter(settings).checkpoint(), tmp_path)
    raw = written(tmp_path)
    assert "model_type" not in raw
    assert raw["norm_before_residual"] is True
    spoken = raw["speculators_config"]
    assert spoken["verifier"] == {"name_or_path": "t/target", "architectures": []}
    assert spoken["proposal_methods"][0]["speculative_tokens"] == 4
    layers = LlamaConfig(**raw["transformer_layer_config"])
    assert (layers.num_hidden_layers, layers.head_dim) == (1, H // 4)
    assert layers.rope_parameters["rope_theta"] == 5e5
    assert "layers.0.hidden_norm.weight" in opened(tmp_path).shapes


def test_sglang_is_told_when_an_embedding_is_replaced(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="replaces the drafter's own embedding"):
        layout_named("sglang-eagle3").write(drafter({"own_embedding": True}).checkpoint(), tmp_path)


def test_a_head_without_ids_of_its_own_says_so(tmp_path: Path) -> None:
    drafter({"own_head": False}).save_pretrained(tmp_path)
    assert written(tmp_path)["draft_vocab_size"] is None  # SGLang: the target's head


@pytest.mark.parametrize("case", [*VARIANTS, *BEYOND_SGLANG, *OURS_ALONE])
def test_save_load_save_gives_the_same_bytes(case: str, tmp_path: Path) -> None:
    settings = {**VARIANTS, **BEYOND_SGLANG, **OURS_ALONE}[case]
    first, second = tmp_path / "first", tmp_path / "second"
    drafter(settings).save_pretrained(first)
    found = read(opened(first))
    again = Eagle3Drafter(found.config)
    again.load_state_dict(found.tensors)
    again.save_pretrained(second)
    for name in ("model.safetensors", "config.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


OTHERS: dict[str, tuple[type, dict[str, Any]]] = {
    "eagle": (EagleDrafter, {"own_head": False, "fc_bias": True, "own_embedding": True}),
    "eagle deep": (EagleDrafter, {"own_head": False, "num_hidden_layers": 2}),
    "medusa": (MedusaDrafter, {"num_heads": 3}),
    "medusa shared": (MedusaDrafter, {"num_heads": 2, "own_head": False, "tree": [[0], [0, 0]]}),
    "medusa few ids": (MedusaDrafter, {"num_heads": 2, "draft_vocab_size": VD}),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_methods_come_back_too(case: str, tmp_path: Path) -> None:
    maker, settings = OTHERS[case]
    made = maker(DrafterConfig(method=case.split()[0], **{**SMALL, "aux_layer_boundaries": None, **settings}))
    made.save_pretrained(tmp_path)
    again = read(opened(tmp_path))
    assert same(again.tensors, made.checkpoint().tensors)
    assert fields(again) == fields(made.checkpoint())
    if case.startswith("medusa"):
        assert written(tmp_path)["model_type"] == "hf_specgen"  # nobody takes it for a Llama


def test_dtypes_are_kept_and_maps_never_cast(tmp_path: Path) -> None:
    made = drafter({"draft_vocab_size": VD}).to(torch.bfloat16)
    made.save_pretrained(tmp_path)
    assert written(tmp_path)["dtype"] == written(tmp_path)["torch_dtype"] == "bfloat16"
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        kinds = {name: file.get_tensor(name).dtype for name in file.keys()}
    assert (kinds.pop("d2t"), kinds.pop("t2d")) == (torch.int64, torch.bool)
    assert set(kinds.values()) == {torch.bfloat16}


def test_a_drafter_can_be_saved_over_the_file_it_came_from(tmp_path: Path) -> None:
    drafter({}).save_pretrained(tmp_path)
    found = opened(tmp_path)
    loaded = found.load(found.shapes)
    kept = {name: tensor.clone() for name, tensor in loaded.items()}
    drafter({}, seed=1).save_pretrained(tmp_path)
    assert same(loaded, kept)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_third_party_heads_convert_to_every_layout(tmp_path: Path) -> None:
    config, tensors = eagle3_file()
    found = read(source_of(config, tensors))
    assert found.config.target == {"name": FACTS.name}
    for layout in ("specgen", "sglang-eagle3", "vllm-speculators"):
        layout_named(layout).write(found, tmp_path / layout)
        again = read(opened(tmp_path / layout))
        assert same(again.tensors, tensors)
        assert fields(again) == fields(found)


def test_complete_checkpoints() -> None:
    full = random(eagle3_shapes(vocab=V))
    part = {name: full[name] for name in full if name != "lm_head.weight"}
    found = read(source_of(llama_config(), part))
    module = Eagle3Drafter(found.config)
    module.load_state_dict(found.tensors, strict=True)  # nothing is left as it was drawn
    assert "lm_head.weight" not in module.state_dict()
    assert "embed_tokens.weight" not in module.state_dict()


def test_our_layout_refuses_what_does_not_belong(tmp_path: Path) -> None:
    made = drafter({"draft_vocab_size": VD})
    made.save_pretrained(tmp_path)
    source = opened(tmp_path)
    tensors = source.load(source.shapes)
    for name in tensors:
        with pytest.raises(IncompatibleDrafter, match=f"lacks the tensors {name}"):
            read(source_of(dict(source.config), {other: tensors[other] for other in tensors if other != name}))
    with pytest.raises(IncompatibleDrafter, match=r"not understood: extra.weight"):
        read(source_of(dict(source.config), {**tensors, "extra.weight": torch.ones(1)}))
    with pytest.raises(IncompatibleDrafter, match="missing, unknown or of another shape"):
        layout_named("specgen").write(Checkpoint(made.config, {"fc.weight": torch.ones(1)}, "specgen"), tmp_path)
    with pytest.raises(IncompatibleDrafter, match=r"fc.weight is of dtype torch.int8"):
        read(source_of(dict(source.config), {**tensors, "fc.weight": tensors["fc.weight"].to(torch.int8)}))
    with pytest.raises(IncompatibleDrafter, match="holds the target ids themselves"):
        read(source_of(dict(source.config), {**tensors, "d2t": torch.arange(V - VD, V), "t2d": tensors["t2d"]}))


@pytest.mark.parametrize("method", ["medusa", "eagle", "eagle3"])
def test_files_of_earlier_versions_hold_the_fields_of_every_method(method: str, tmp_path: Path) -> None:
    """One class served all methods once: what it wrote beside a method's own fields says nothing."""
    heads = {"medusa": {"num_heads": 2}, "eagle": {"own_head": False}, "eagle3": {}}[method]
    made = drafter_class(method)(DrafterConfig(method, **{**SMALL, "aux_layer_boundaries": None, **heads}))
    made.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    settings = json.loads(path.read_text())
    others = {"num_heads": 0, "num_head_layers": 1, "head_bias": True, "fc_bias": False, "norm_output": False}
    settings["specgen"] = {**others, "layer_type": "llama", **settings["specgen"]}
    path.write_text(json.dumps({"rope_theta": 10000.0, "intermediate_size": 128, **settings}))
    again = load_drafter(tmp_path)
    made.config.dtype = again.config.dtype
    assert again.config == made.config
    assert again.config != DrafterConfig(method, **{**SMALL, **heads, "num_tokens": 7})
    for name, tensor in made.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


def test_versions_and_settings_that_are_not_known(tmp_path: Path) -> None:
    drafter({}).save_pretrained(tmp_path)
    source = opened(tmp_path)
    for changed, reason in (
        ({"version": VERSION + 1}, "update hf_specgen"),
        ({"version": None}, "version None"),
        ({"surprise": 1}, "surprise"),
        ({"layer_type": "mamba"}, "mamba"),
        ({"method": "oracle"}, "method 'oracle'"),
        ({"method": None}, "method None"),
    ):
        config = {**source.config, "specgen": {**source.config["specgen"], **changed}}
        with pytest.raises(SpecGenError, match=reason):
            read(source_of(config, source.load(source.shapes)))


def test_layouts_that_only_read_say_so(tmp_path: Path) -> None:
    made = drafter({}).checkpoint()
    for layout in ("safeailab-eagle3", "modelopt-eagle3", "deepspec-eagle3", "old-vllm-eagle"):
        with pytest.raises(IncompatibleDrafter, match="choose another --to"):
            layout_named(layout).write(made, tmp_path)
