"""EAGLE-3 in every layout: the same tensors under our names, or an error that names what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support_formats import (
    FACTS,
    OPTIONS,
    VD,
    A,
    H,
    N,
    V,
    eagle3_file,
    eagle3_shapes,
    layer,
    library_config,
    llama_config,
    random,
    read,
    renamed,
    same,
    source_of,
    vocabulary,
)
from torch import Tensor

from hf_specgen.checkpoints.formats.base import Checkpoint, ReadOptions, detect
from hf_specgen.errors import IncompatibleDrafter

Tensors = dict[str, Tensor]
IDS = "eagle_aux_hidden_state_layer_ids"
NESTED = {"eagle_config": {IDS: [1, 3, 4], "use_aux_hidden_state": True}}


def plain(changed: Tensors | None = None, without: tuple[str, ...] = (), **settings: Any) -> Checkpoint:
    config, tensors = eagle3_file(**settings)
    tensors = {**tensors, **(changed or {})}
    return read(source_of(config, {name: tensors[name] for name in tensors if name not in without}))


def library(changed: Tensors | None = None, without: tuple[str, ...] = (), **settings: Any) -> Checkpoint:
    _, tensors = eagle3_file("layers.0.")
    tensors = {**tensors, **(changed or {})}
    kept = {name: tensors[name] for name in tensors if name not in without}
    return read(source_of(library_config(**settings), kept))


def test_the_authors_file() -> None:
    config, tensors = eagle3_file()
    found = read(source_of(config, tensors))
    assert (found.layout, found.config.method, found.warnings) == ("safeailab-eagle3", "eagle3", ())
    assert same(found.tensors, tensors)
    assert found.config.aux_layer_boundaries == [2, N // 2, N - 3]
    assert (found.config.draft_vocab_size, found.config.vocab_size, found.config.own_embedding) == (VD, V, False)
    begun = [note.split(":")[0] for note in found.notes]
    wanted = ["layout", "target layers", "norms", "vocabulary", "rope", "attention", "embedding", "head"]
    assert begun == wanted


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("first", ["midlayer.", "layers.0."])
def test_names_of_one_head(first: str, prefix: str) -> None:
    config, tensors = eagle3_file(first)
    bare = ("lm_head", "d2t", "t2d")
    named = {name if name.startswith(bare) else prefix + name: tensor for name, tensor in tensors.items()}
    found = read(source_of(config, named))
    assert same(found.tensors, eagle3_file()[1])
    assert found.layout == ("safeailab-eagle3" if first == "midlayer." else "modelopt-eagle3")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_maps_come_out_as_offsets_and_mask(dtype: torch.dtype) -> None:
    wanted = vocabulary()
    for changed in ({"d2t": wanted["d2t"].to(dtype)}, {"t2d": wanted["t2d"].to(dtype)}):
        found = plain(changed)
        assert (found.tensors["d2t"].dtype, found.tensors["t2d"].dtype) == (torch.int64, torch.bool)
        assert same({name: found.tensors[name] for name in wanted}, wanted)


def test_a_missing_mask_is_rebuilt() -> None:
    assert same(plain(without=("t2d",)).tensors, eagle3_file()[1])


def test_absolute_ids_are_refused() -> None:
    ids = vocabulary()["d2t"] + torch.arange(VD)
    for without in ((), ("t2d",)):
        with pytest.raises(IncompatibleDrafter, match="holds the target ids themselves"):
            plain({"d2t": ids}, without)
    with pytest.raises(IncompatibleDrafter, match="holds the target ids themselves"):
        few = torch.arange(VD) * 2  # small enough to pass for offsets, but for the mask
        mask = torch.zeros(V, dtype=torch.bool)
        mask[few] = True
        plain({"d2t": few, "t2d": mask})


def test_damaged_maps_are_refused() -> None:
    offsets, mask = vocabulary().values()
    cases: list[tuple[Tensors, tuple[str, ...], str]] = [
        ({"d2t": offsets + 5}, ("t2d",), "leads to the target ids 5 to 44"),
        ({"d2t": offsets - 1}, ("t2d",), "leads to the target ids -1"),
        ({"d2t": offsets.flip(0)}, ("t2d",), "do not grow"),
        ({"d2t": offsets.float() + 0.5}, ("t2d",), "cannot tell apart"),
        ({"t2d": mask.roll(1)}, (), "not the 12"),
        ({"t2d": torch.arange(V)}, (), "not a map of ids"),
        ({"d2t": offsets[:-1]}, (), r"d2t has the shape \[11\]"),
        ({"t2d": mask[:-1]}, (), r"t2d has the shape \[39\]"),
    ]
    for changed, without, reason in cases:
        with pytest.raises(IncompatibleDrafter, match=reason):
            plain(changed, without)


def test_offsets_in_half_precision_are_refused_where_they_are_not_exact() -> None:
    size, ids = 5000, torch.arange(VD) * 300
    tensors = {**eagle3_file()[1], "d2t": (ids - torch.arange(VD)).half()}
    del tensors["t2d"]
    with pytest.raises(IncompatibleDrafter, match=r"torch.float16 .* corrupt"):
        read(source_of(llama_config(draft_vocab_size=VD, vocab_size=size), tensors))


def test_a_few_ids_need_a_map() -> None:
    with pytest.raises(IncompatibleDrafter, match="lacks the tensor d2t"):
        plain(without=("d2t",))
    with pytest.raises(IncompatibleDrafter, match="lacks the tensor d2t"):
        plain(without=("d2t", "t2d"))


@pytest.mark.parametrize("said", [None, V])
def test_a_full_vocabulary_has_no_map(said: int | None) -> None:
    tensors = random(eagle3_shapes(vocab=V))
    maps = {"d2t": torch.zeros(V, dtype=torch.int64), "t2d": torch.ones(V, dtype=torch.bool)}
    config = llama_config(draft_vocab_size=said)
    assert same(read(source_of(config, tensors)).tensors, tensors)
    if said:  # without it, a d2t in the file says that ids are left out
        assert same(read(source_of(config, tensors | maps)).tensors, tensors)
        with pytest.raises(IncompatibleDrafter, match="not the identity"):
            read(source_of(config, tensors | maps | {"d2t": torch.arange(V)}))
        with pytest.raises(IncompatibleDrafter, match="not the identity"):
            read(source_of(config, tensors | maps | {"t2d": torch.arange(V) > 3}))


def test_the_map_tells_an_unsaid_size() -> None:
    config, tensors = eagle3_file()
    config["draft_vocab_size"] = None
    assert read(source_of(config, tensors)).config.draft_vocab_size == VD
    config["truncated_vocab_size"] = VD  # nebius
    with pytest.raises(IncompatibleDrafter, match="drafts 12 of 40 ids and lacks the tensor d2t"):
        read(source_of(config, {name: tensors[name] for name in tensors if name != "d2t"}))
    assert read(source_of(config, tensors)).config.draft_vocab_size == VD
    config |= {"draft_vocab_size": V + 1}
    with pytest.raises(IncompatibleDrafter, match="exceeds vocab_size"):
        read(source_of(config, tensors))


def test_the_head_is_the_drafters_the_targets_or_the_embedding() -> None:
    full = random(eagle3_shapes(vocab=V))
    headless = {name: full[name] for name in full if name != "lm_head.weight"}
    own = {"embed_tokens.weight": torch.randn(V, H)}
    assert not read(source_of(llama_config(), headless)).config.own_head
    kept = read(source_of(llama_config(), full | own))
    assert torch.equal(kept.tensors["embed_tokens.weight"], own["embed_tokens.weight"])
    assert torch.equal(kept.tensors["lm_head.weight"], full["lm_head.weight"])
    tied = read(source_of(llama_config(tie_word_embeddings=True), headless | own))
    assert tied.config.own_head
    assert torch.equal(tied.tensors["lm_head.weight"], own["embed_tokens.weight"])
    assert tied.tensors["lm_head.weight"].data_ptr() != tied.tensors["embed_tokens.weight"].data_ptr()
    with pytest.raises(IncompatibleDrafter, match=r"lacks the tensor lm_head.weight"):
        plain(without=("lm_head.weight",))


def test_a_target_of_another_width_needs_an_embedding() -> None:
    wide = {"fc.weight": torch.randn(H, 3 * 24)}
    own = {"embed_tokens.weight": torch.randn(V, H)}
    assert plain(wide | own, target_hidden_size=24).config.target_hidden_size == 24
    assert plain(wide | own).config.target_hidden_size == 24  # read off fc
    with pytest.raises(IncompatibleDrafter, match=r"lacks the tensor embed_tokens.weight"):
        plain(wide, target_hidden_size=24)
    with pytest.raises(IncompatibleDrafter, match=r"embed_tokens.weight are required"):
        plain(wide)
    with pytest.raises(IncompatibleDrafter, match="not 3 layers of 20"):
        plain(wide | own, target_hidden_size=20)


def test_fc_is_never_left_out_by_width() -> None:
    narrow = {"fc.weight": torch.randn(H, H), "embed_tokens.weight": torch.randn(V, H)}
    config = {"eagle_config": {IDS: [1, 3], "use_aux_hidden_state": True}, "target_hidden_size": H // 2}
    found = plain(narrow, **config)
    assert (found.config.target_hidden_size, "fc.weight" in found.tensors) == (H // 2, True)
    assert "go by width" in found.warnings[0]
    with pytest.raises(IncompatibleDrafter, match=r"lacks the tensors fc.weight"):
        plain(without=("fc.weight",))


def test_every_tensor_is_named_when_it_is_missing() -> None:
    _, tensors = eagle3_file("layers.0.")
    for name in set(tensors) - {"t2d"}:
        said = name.replace("layers.0.hidden_norm", "(layers.0|midlayer).hidden_norm")
        with pytest.raises(IncompatibleDrafter, match=said):
            library(without=(name,))
    for name in ("midlayer.surprise.weight", "parallel_draft_heads.0.weight", "additional_layers.0.hidden_norm.weight"):
        with pytest.raises(IncompatibleDrafter, match=f"not understood: {name}"):
            plain({name: torch.ones(2)})


def test_leftovers_of_training_are_dropped() -> None:
    left = {"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(2), "verifier_norm.weight": torch.ones(H)}
    assert same(plain(left).tensors, eagle3_file()[1])


@pytest.mark.parametrize(
    ("changed", "settings", "files", "reason"),
    [
        ({"midlayer.mlp.up_proj.weight_scale": torch.ones(1)}, {}, (), "quantised weights .*weight_scale"),
        ({}, {"quantization_config": {"quant_method": "fp8"}}, (), "quantization_config"),
        ({"fc.weight": torch.ones(H, 3 * H, dtype=torch.int8)}, {}, (), r"fc.weight is of dtype torch.int8"),
        ({}, {}, ("adapter_model.safetensors",), r"adapter_model.safetensors"),
        ({"midlayer.self_attn.kv_a_proj_with_mqa.weight": torch.ones(2)}, {}, (), "latent attention"),
        ({}, {"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, (), "Eagle3DeepseekV2ForCausalLM"),
    ],
)
def test_what_is_refused_by_name(changed: Tensors, settings: dict, files: tuple[str, ...], reason: str) -> None:
    config, tensors = eagle3_file(**settings)
    with pytest.raises(IncompatibleDrafter, match=reason):
        read(source_of(config, tensors | changed, files))


def test_a_quantisation_file_alone_warns() -> None:
    config, tensors = eagle3_file("layers.0.", **NESTED)
    found = read(source_of(config, tensors, ("hf_quant_config.json",)))
    assert "no tensor is quantised" in found.warnings[0]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_aux_hidden_state", False),
        ("use_input_layernorm_in_first_layer", False),
        ("use_last_layernorm", False),
        ("use_mtp_layernorm", True),
    ],
)
def test_other_graphs_of_model_optimizer_are_refused(key: str, value: bool) -> None:
    config, tensors = eagle3_file("layers.0.", eagle_config={IDS: [1, 3, 4], key: value})
    with pytest.raises(IncompatibleDrafter, match=f"{key}={value}"):
        read(source_of(config, tensors))
    del tensors["layers.0.hidden_norm.weight"], tensors["fc.weight"]
    narrow = {**tensors, **random(layer("layers.0.", H))}
    with pytest.raises(IncompatibleDrafter, match=f"{key}={value}"):
        read(source_of(config, narrow))


def test_settings_of_model_optimizer_may_be_null() -> None:
    unsaid = {IDS: [1, 3, 4], "use_last_layernorm": None, "use_mtp_layernorm": None}
    config, tensors = eagle3_file("layers.0.", eagle_config=unsaid)
    assert read(source_of(config, tensors)).config.aux_layer_boundaries == [2, 4, 5]


def test_model_optimizer() -> None:
    config, tensors = eagle3_file("layers.0.", **NESTED)
    del tensors["t2d"]
    found = read(source_of(config, tensors))
    assert (found.layout, found.config.aux_layer_boundaries) == ("modelopt-eagle3", [2, 4, 5])
    assert same(found.tensors, eagle3_file()[1])


def test_the_norm_before_fc_is_told_by_its_tensor() -> None:
    norm = {"input_norm.weight": torch.randn(3 * H)}
    for settings in ({}, NESTED, {"norm_before_fc": False}, {"norm_before_fc": True}):
        assert plain(norm, **settings).config.norm_before_fc
    assert not plain().config.norm_before_fc
    inner = {"eagle_config": {**NESTED["eagle_config"], "norm_before_fc": True}}
    for settings in ({"norm_before_fc": True}, inner):
        with pytest.raises(IncompatibleDrafter, match=r"lacks the tensors input_norm.weight"):
            plain(**settings)


def test_a_norm_of_each_feature() -> None:
    norms = {f"fc_norm.{index}.weight": torch.randn(H) for index in range(3)}
    found = plain(norms, fc_norm=True)
    assert found.config.fc_norm and same(found.tensors, eagle3_file()[1] | norms)
    assert plain({f"model.{name}": norm for name, norm in norms.items()}).config.fc_norm  # NeMo
    with pytest.raises(IncompatibleDrafter, match=r"lacks the tensors fc_norm.2.weight"):
        plain({name: norms[name] for name in list(norms)[:2]}, fc_norm=True)
    with pytest.raises(IncompatibleDrafter, match="norm_before_fc and fc_norm"):
        plain(norms | {"input_norm.weight": torch.randn(3 * H)})


def test_norm_output_is_read_as_it_is_served() -> None:
    """SGLang and vLLM feed back normed states; SpecForge meant plain EAGLE-3 by it until September 2026."""
    found = plain(norm_output=True, **NESTED)
    assert (found.layout, found.config.norm_output) == ("sglang-eagle3", True)
    assert "Pass norm_output=False" in found.warnings[0] and len(found.warnings) == 1
    config, tensors = eagle3_file("layers.0.", norm_output=True, **NESTED)  # NeMo and Model Optimizer
    numbered = read(source_of(config, tensors))
    assert (numbered.layout, numbered.config.norm_output, numbered.warnings) == ("modelopt-eagle3", True, ())
    for said in (False, None):
        assert (plain(norm_output=said).config.norm_output, plain(norm_output=said).warnings) == (False, ())
    assert library(norm_output=True).config.norm_output  # the library means EAGLE-3.1 by it
    assert library(norm_output=True).warnings == ()


@pytest.mark.parametrize(
    ("settings", "given"),
    [
        ({"norm_output": True}, {"norm_output": False}),
        ({"layer_types": ["sliding_attention"], "sliding_window": 4}, {"sliding_window": 4}),
        ({"rope_theta": 5.0, "rope_parameters": {"rope_theta": 6.0}}, {"rope_parameters": {"rope_theta": 7.0}}),
        ({"eagle_config": {IDS: [0, 3, 5]}}, {"aux_layer_boundaries": [1, 4, 6]}),
    ],
)
def test_what_the_caller_decides_is_in_no_doubt(settings: dict[str, Any], given: dict[str, Any]) -> None:
    config, tensors = eagle3_file(**{**NESTED, **settings})
    assert len(read(source_of(config, tensors)).warnings) == 1
    decided = ReadOptions(FACTS, given=given)
    assert read(source_of(config, tensors), decided).warnings == ()
    for warned in (read(source_of(config, tensors), ReadOptions(FACTS, given={"rms_norm_eps": 1.0})).warnings,):
        assert len(warned) == 1


def test_a_decision_of_the_library_is_in_no_doubt() -> None:
    config, tensors = library_config(norm_before_residual=None), eagle3_file("layers.0.")[1]
    assert len(read(source_of(config, tensors)).warnings) == 1
    assert read(source_of(config, tensors), ReadOptions(FACTS, given={"norm_before_residual": False})).warnings == ()


def test_boundaries_that_the_caller_gives_replace_ids_that_cannot_be() -> None:
    config, tensors = eagle3_file(eagle_config={IDS: [1, 4, 99]})
    with pytest.raises(IncompatibleDrafter, match="do not fit"):
        read(source_of(config, tensors))
    found = read(source_of(config, tensors), ReadOptions(FACTS, given={"aux_layer_boundaries": [1, 4, 6]}))
    assert found.config.aux_layer_boundaries == [1, 4, 6]
    with pytest.raises(IncompatibleDrafter, match="not 2 layers"):
        read(source_of(config, tensors), ReadOptions(FACTS, given={"aux_layer_boundaries": [1, 4]}))


def test_norm_before_residual_absent_follows_who_serves_it() -> None:
    assert not plain().config.norm_before_residual
    assert plain(norm_before_residual=True).config.norm_before_residual
    absent = library(norm_before_residual=None)
    assert absent.config.norm_before_residual
    assert "read as true, as vLLM does" in absent.warnings[0]
    said = library(norm_before_residual=False)
    assert (said.config.norm_before_residual, said.warnings) == (False, ())


def test_the_library() -> None:
    found = library()
    assert (found.layout, found.warnings) == ("vllm-speculators", ())
    assert same(found.tensors, eagle3_file()[1])
    assert found.config.target == {"name": "t/target", "architectures": ["LlamaForCausalLM"]}
    assert found.config.num_tokens is None
    assert any("draft 5 a round" in note for note in found.notes)


def test_the_library_with_qwen3_layers_needs_their_norms() -> None:
    norms = {f"layers.0.self_attn.{name}.weight": torch.randn(H // A) for name in ("q_norm", "k_norm")}
    kind = {"inner": {"model_type": "qwen3"}}
    assert library(norms, **kind).config.layer_type == "qwen3"
    with pytest.raises(IncompatibleDrafter, match=r"layers.0.self_attn.k_norm.weight"):
        library(**kind)
    with pytest.raises(IncompatibleDrafter, match="not understood"):
        library(norms)
    with pytest.raises(IncompatibleDrafter, match="'gemma3'"):
        library(inner={"model_type": "gemma3"})


def test_the_library_leaves_defaults_of_the_layers_out() -> None:
    config = library_config()
    inner = config["transformer_layer_config"]
    del inner["hidden_size"], inner["num_key_value_heads"], inner["model_type"]
    _, tensors = eagle3_file("layers.0.")
    with pytest.raises(IncompatibleDrafter, match="4096"):  # the class's default, as transformers reads it
        read(source_of(config, tensors))


def test_further_layers_are_ordinary_ones() -> None:
    second = random({**layer("layers.1.", H), "layers.1.input_layernorm.weight": (H,)}, seed=1)
    _, tensors = eagle3_file("layers.0.")
    found = read(source_of(library_config(layers=2), tensors | second))
    assert found.config.num_hidden_layers == 2
    assert same(found.tensors, eagle3_file()[1] | second)
    with pytest.raises(IncompatibleDrafter, match=r"lacks the tensors layers.1.input_layernorm.weight"):
        library()
        read(source_of(library_config(layers=2), tensors | random(layer("layers.1.", H))))
    with pytest.raises(IncompatibleDrafter, match=r"not understood: layers.1"):
        library(second)


def test_deepspec() -> None:
    tensors = random(eagle3_shapes("layers.0.", 5, V) | {"embed_tokens.weight": (V, H)})
    tensors |= random({f"layers.0.self_attn.{name}.weight": (H // A,) for name in ("q_norm", "k_norm")})
    config = llama_config(
        architectures=["Qwen3Eagle3Model"],
        model_type="qwen3",
        num_hidden_layers=36,
        draft_num_hidden_layers=1,
        layer_types=["full_attention"],
        target_layer_ids=[0, 2, 3, 4, 6],
        ttt_length=7,
        target_model_name_or_path="t/target",
    )
    found = read(source_of(config, tensors))
    assert (found.layout, found.config.layer_type) == ("deepspec-eagle3", "qwen3")
    assert found.config.aux_layer_boundaries == [1, 3, 4, 5, 7]
    assert same(found.tensors, renamed(tensors, "layers.0.", "midlayer."))
    with pytest.raises(IncompatibleDrafter, match="Gemma4Eagle3Model"):
        read(source_of({**config, "architectures": ["Gemma4Eagle3Model"]}, tensors))


def test_nothing_is_read_while_planning() -> None:
    config, tensors = eagle3_file()
    source = source_of(config, {name: tensor.to("meta") for name, tensor in tensors.items()})
    assert detect(source).plan(source, OPTIONS).config.method == "eagle3"


def test_what_is_no_drafter_is_told() -> None:
    shapes = {"model.layers.0.input_layernorm.weight": torch.ones(H), "model.norm.weight": torch.ones(H)}
    with pytest.raises(IncompatibleDrafter, match=r"is no drafter checkpoint .* SmallModel"):
        read(source_of(llama_config(), shapes))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("peagle", "P-EAGLE"),
        ("dflash", "DFlash"),
        ("dflash2", "DFlash"),
        ("dspark", "DSpark"),
        ("xpress", "XPress"),
        ("mtp", "MTP"),
    ],
)
def test_other_methods_of_the_library_are_refused_with_the_reason(kind: str, name: str) -> None:
    with pytest.raises(IncompatibleDrafter, match=f"a method that is not known here \\({name}: it "):
        library(speculators_model_type=kind, mask_token_id=3)


@pytest.mark.parametrize(
    ("settings", "changed"),
    [
        ({"architectures": ["PeagleLlamaForCausalLM"]}, {}),
        ({"pard_token": 7}, {}),
        ({}, {"mask_hidden": torch.ones(1, 1, 3 * H)}),
        ({"architectures": ["DFlashDraftModel"]}, {}),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 3, 4]}}, {}),
    ],
)
def test_parallel_drafters_of_other_layouts_are_refused_with_the_reason(settings: dict, changed: Tensors) -> None:
    for first in ("midlayer.", "layers.0."):
        config, tensors = eagle3_file(first, **settings)
        with pytest.raises(IncompatibleDrafter, match="drafts all tokens in one pass"):
            read(source_of(config, tensors | changed))
