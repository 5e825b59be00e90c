"""Reported: a folder that we wrote was read by SafeAILab, SpecForge, speculators or vLLM as another drafter."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from medusa_checkpoints import random_heads
from medusa_checkpoints import source_of as heads_of
from safetensors.torch import load_file
from support_formats import FACTS, VD, H, K, V, opened, read, same, source_of
from tiny import tiny
from typer.testing import CliRunner

from hf_specgen import IncompatibleDrafter, SpecGenError, load_drafter, write_card
from hf_specgen.checkpoints.config import DrafterConfig
from hf_specgen.checkpoints.formats.base import Checkpoint, ReadOptions, layout_named
from hf_specgen.checkpoints.formats.lent import EMBEDDING, HEAD, lent_by
from hf_specgen.checkpoints.opening import open_source
from hf_specgen.cli import main
from hf_specgen.drafters.eagle import EagleDrafter
from hf_specgen.drafters.eagle3 import Eagle3Drafter
from hf_specgen.drafters.medusa import MedusaDrafter
from hf_specgen.drafting.learned import LearnedDrafter
from hf_specgen.models.facts import TargetFacts

OURS, SGLANG, LIBRARY = "specgen", "sglang-eagle3", "vllm-speculators"
CLASSES = {"medusa": MedusaDrafter, "eagle": EagleDrafter, "eagle3": Eagle3Drafter}
SMALL = {
    "hidden_size": H,
    "vocab_size": V,
    "target": {"name": FACTS.name},
}
LAYER = {"intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": K}
LINEAR = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}


def new(method: str = "eagle3", **settings: Any) -> LearnedDrafter:
    torch.manual_seed(0)
    own: dict[str, Any] = {
        "medusa": {"num_heads": 2},
        "eagle": {**LAYER, "own_head": False},
        "eagle3": {**LAYER, "aux_layer_boundaries": [2, 4, 5]},
    }[method]
    drafter = CLASSES[method](DrafterConfig(method, **{**SMALL, **own, **settings}))
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return drafter


def written(checkpoint: Checkpoint, layout: str, folder: Path) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layout_named(layout).write(checkpoint, folder)
    return json.loads((folder / "config.json").read_text())


def with_lent(drafter: LearnedDrafter) -> Checkpoint:
    found = drafter.checkpoint()
    lent = {EMBEDDING: torch.randn(V, H), HEAD: torch.randn(V, H)}
    return Checkpoint(found.config, found.tensors, found.layout, lent=lent)


# --- keys that say nothing are read as something


@pytest.mark.parametrize("layout", [OURS, SGLANG, LIBRARY])
def test_what_is_off_is_not_written(layout: str, tmp_path: Path) -> None:
    """SpecForge before #879 reads ``norm_output: false`` as no norm; a ``target_hidden_size`` hides the embedding."""
    plain = written(new().checkpoint(), layout, tmp_path / "plain")
    assert "norm_output" not in plain and plain.get("target_hidden_size") is None
    assert layout == LIBRARY or "target_hidden_size" not in plain, "SafeAILab asks for the name alone"
    other = new(norm_output=True, target_hidden_size=24, own_embedding=True)
    told = written(other.checkpoint(), layout, tmp_path / "told")
    assert (told["norm_output"], told["target_hidden_size"]) == (True, 24)
    for name in ("plain", "told"):
        config = read(opened(tmp_path / name)).config
        assert (config.norm_output, config.target_hidden_size) == ((False, H) if name == "plain" else (True, 24))


@pytest.mark.parametrize("layout", [OURS, SGLANG, LIBRARY])
def test_the_old_spelling_is_read_too(layout: str, tmp_path: Path) -> None:
    made = new(rope_parameters=LINEAR).checkpoint()
    config = written(made, layout, tmp_path)
    config |= {"norm_output": False, "target_hidden_size": H}
    del config.get("transformer_layer_config", config)["rope_scaling"]["type"]
    found = read(source_of(config, load_file(tmp_path / "model.safetensors")))
    assert found.config.to_dict() == read(opened(tmp_path)).config.to_dict()
    assert found.config.rope_parameters == LINEAR and not found.config.norm_output


@pytest.mark.parametrize("layout", [OURS, SGLANG, LIBRARY, "eagle"])
def test_scaled_rope_has_both_names(layout: str, tmp_path: Path) -> None:
    """SafeAILab's loader reads ``rope_scaling["type"]`` and stops without it."""
    made = new("eagle" if layout == "eagle" else "eagle3", rope_parameters=LINEAR)
    config = written(made.checkpoint(), layout, tmp_path)
    scaling = config.get("transformer_layer_config", config)["rope_scaling"]
    assert scaling == {"type": "linear", "rope_type": "linear", "factor": 2.0}
    assert read(opened(tmp_path)).config.rope_parameters == LINEAR


@pytest.mark.parametrize("bias", [False, True])
def test_our_eagle_1_says_which_biases_it_has(bias: bool, tmp_path: Path) -> None:
    """SafeAILab's loader takes an absent ``bias`` for true."""
    made = new("eagle", fc_bias=bias, attention_bias=bias)
    config = written(made.checkpoint(), OURS, tmp_path)
    assert (config["bias"], config["qkv_bias"]) == (bias, bias)
    assert same(read(opened(tmp_path)).tensors, made.checkpoint().tensors)


# --- the target's own matrices


def test_the_library_gets_the_embedding(tmp_path: Path) -> None:
    """Its own loader keeps noise where the file has none."""
    made = with_lent(new())
    layout_named(LIBRARY).write(made, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert torch.equal(stored["embed_tokens.weight"], made.lent[EMBEDDING]) and len(stored) == len(made.tensors) + 1
    found = read(opened(tmp_path))
    assert found.config.own_embedding and torch.equal(found.tensors[EMBEDDING], made.lent[EMBEDDING])
    with pytest.warns(UserWarning, match="speculators library begins with noise"):
        layout_named(LIBRARY).write(new().checkpoint(), tmp_path)
    assert same(read(opened(tmp_path)).tensors, made.tensors)
    own = new(own_embedding=True).checkpoint()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layout_named(LIBRARY).write(own, tmp_path)
    assert same(read(opened(tmp_path)).tensors, own.tensors)


def call(*arguments: str | Path) -> Any:
    return CliRunner().invoke(main.app, ["convert", *map(str, arguments)])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = tiny(layers=6)
    model.save_pretrained(tmp_path_factory.mktemp("target"))
    return model


def of_target(model: Any, method: str, **settings: Any) -> LearnedDrafter:
    sizes = {"hidden_size": 32, "vocab_size": 64, "target": {"name": str(settings.pop("name", "t/none"))}}
    return new(method, **{**sizes, **settings})


@pytest.mark.parametrize("told", ["--target", "by the drafter", "not at all"])
@pytest.mark.parametrize("layout", [LIBRARY, "medusa", "medusa-vllm"])
def test_convert_reads_the_target(layout: str, told: str, target: Any, tmp_path: Path) -> None:
    target.save_pretrained(tmp_path / "target")
    method, own = ("eagle3", {}) if layout == LIBRARY else ("medusa", {"own_head": False})
    name = tmp_path / "target" if told == "by the drafter" else "t/none"
    drafter = of_target(target, method, name=name, **own)
    drafter.save_pretrained(tmp_path / "ours")
    more = ("--target", tmp_path / "target") if told == "--target" else ()
    result = call(tmp_path / "ours", tmp_path / "out", "--to", layout, *more)
    if layout == "medusa-vllm" and told == "not at all":
        assert result.exit_code == 2 and "--target TARGET" in result.output
        assert not (tmp_path / "out").exists()
        return
    assert result.exit_code == 0, result.output
    shapes = open_source(tmp_path / "out").shapes
    assert ((EMBEDDING if layout == LIBRARY else HEAD) in shapes) == (told != "not at all")
    again = load_drafter(tmp_path / "out", target)
    assert again.report.layout == ("medusa-shared-head" if layout == "medusa" else layout)
    assert not again.config.own_embedding and again.config.own_head == drafter.config.own_head
    assert same(again.checkpoint().tensors, drafter.checkpoint().tensors)


def test_another_target_is_refused(tmp_path: Path) -> None:
    tiny(hidden_size=16).save_pretrained(tmp_path / "other")
    of_target(None, "medusa", own_head=False).save_pretrained(tmp_path / "ours")
    result = call(tmp_path / "ours", tmp_path / "out", "--to", "medusa", "--target", tmp_path / "other")
    assert result.exit_code == 2 and not (tmp_path / "out").exists()


def test_a_model_of_the_same_name_and_size_is_not_the_target(target: Any, tmp_path: Path) -> None:
    """Its head was written into the drafter's file without a word, and readers drafted with it."""
    tiny(seed=1, layers=6).save_pretrained(tmp_path / "named")
    mark = {"name": str(tmp_path / "named"), "fingerprint": TargetFacts.of(target).fingerprint}
    of_target(target, "medusa", own_head=False).save_pretrained(tmp_path / "ours")
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    config["specgen"]["target"] |= mark
    (tmp_path / "ours" / "config.json").write_text(json.dumps(config))
    result = call(tmp_path / "ours", tmp_path / "out", "--to", "medusa")
    assert "not the target that the drafter was made for" in result.output
    assert result.exit_code == 0 and HEAD not in open_source(tmp_path / "out").shapes
    result = call(tmp_path / "ours", tmp_path / "asked", "--to", "medusa", "--target", tmp_path / "named")
    assert "warning" in result.output and HEAD in open_source(tmp_path / "asked").shapes
    target.to(torch.bfloat16).save_pretrained(tmp_path / "named")  # the mark is of no dtype
    target.float()
    result = call(tmp_path / "ours", tmp_path / "same", "--to", "medusa")
    assert "not the target" not in result.output and HEAD in open_source(tmp_path / "same").shapes


def test_a_quantised_matrix_is_not_lent() -> None:
    packed = {"embed_tokens.weight": torch.randn(V, H), "lm_head.weight": torch.ones(V, H, dtype=torch.int8)}
    with pytest.raises(IncompatibleDrafter, match=r"lm_head.weight as torch.int8"):
        lent_by(source_of({}, packed), new().config, (HEAD,))


def test_where_targets_keep_their_matrices() -> None:
    config = new().config
    table, other = torch.randn(V, H), torch.randn(V, H)
    names = {"model.language_model.embed_tokens.weight": table, "model.embed_tokens_per_layer.weight": other}
    assert torch.equal(lent_by(source_of({}, names), config, (HEAD,))[HEAD], table), "tied"
    named = source_of({}, {"transformer.wte.weight": table, "lm_head.weight": other})
    found = lent_by(named, config, (EMBEDDING, HEAD))
    assert torch.equal(found[EMBEDDING], table) and torch.equal(found[HEAD], other)
    biased = {"embed_in.weight": table, "embed_out.weight": other, "embed_out.bias": torch.ones(V)}
    with pytest.raises(IncompatibleDrafter, match="has a bias"):
        lent_by(source_of({}, biased), config, (HEAD,))
    for wrong in ({}, {"wte.weight": torch.ones(V + 1, H)}):
        with pytest.raises(IncompatibleDrafter, match=f"{V} x {H}"):
            lent_by(source_of({}, wrong), config, (EMBEDDING,))


# --- served by vLLM


MEDUSA: dict[str, dict[str, Any]] = {
    "own heads": {},
    "no biases": {"head_bias": False},
    "two blocks": {"num_head_layers": 2, "tree": [[0], [0, 0]]},
    "some ids": {"draft_vocab_size": VD},
    "the target's head": {"own_head": False},
    "the target's head, some ids": {"own_head": False, "draft_vocab_size": VD},
}


def heads(case: str) -> Checkpoint:
    drafter = new("medusa", **MEDUSA[case])
    if drafter.config.reduces_vocabulary:
        drafter.get_buffer("d2t").copy_(torch.arange(VD) * 2)  # the ids 0, 3, 6, ...
    return with_lent(drafter)


@pytest.mark.parametrize("case", MEDUSA)
def test_heads_under_the_names_of_vllm(case: str, tmp_path: Path) -> None:
    made = heads(case)
    config = written(made, "medusa-vllm", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert (config["architectures"], config["model_type"]) == (["MedusaModel"], "medusa")
    assert (config["hidden_size"], config["vocab_size"], config["num_heads"]) == (H, V, 2)
    assert config["medusa_fc_bias"] is made.config.head_bias
    assert {"blocks.0.layers.0.bias" in stored, config["medusa_fc_bias"]} in ({True}, {False})
    if made.config.reduces_vocabulary:
        assert stored["token_map"].tolist() == list(range(0, 3 * VD, 3)) and config["truncated_vocab_size"] == VD
    if not made.config.own_head:
        rows = made.lent[HEAD] if "token_map" not in stored else made.lent[HEAD][stored["token_map"]]
        assert config["original_lm_head"] and torch.equal(stored[HEAD], rows)
    again = read(open_source(tmp_path), ReadOptions(TargetFacts(hidden_size=H, vocab_size=V)))
    assert again.layout == "medusa-vllm" and same(again.tensors, made.tensors)
    ours, theirs = made.config.to_dict(), again.config.to_dict()
    assert theirs["target"].pop("name") == ours["target"].pop("name")
    assert {**theirs, "target": {}} == {**ours, "target": {}}


@pytest.mark.parametrize("case", ["own heads", "no biases", "two blocks", "the target's head"])
def test_heads_under_their_authors_names(case: str, tmp_path: Path) -> None:
    made = heads(case)
    config = written(made, "medusa", tmp_path)
    stored = load_file(tmp_path / "medusa_lm_head.safetensors")
    said = {"architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": H, "vocab_size": V}
    assert said.items() <= config.items() and config["medusa_fc_bias"] is True and "0.0.linear.bias" in stored
    shared = not made.config.own_head
    assert (HEAD in stored, config.get("original_lm_head", False), "version" in config) == (shared, shared, shared)
    again = read(open_source(tmp_path), ReadOptions(TargetFacts(hidden_size=H, vocab_size=V)))
    assert again.config.own_head is made.config.own_head and (HEAD in again.tensors) is False
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in made.tensors.items())
    if shared:
        bare = Checkpoint(made.config, made.tensors, made.layout)
        with pytest.warns(UserWarning, match="vLLM drafts noise"):
            layout_named("medusa").write(bare, tmp_path)
        with pytest.raises(IncompatibleDrafter, match="--target TARGET"):
            layout_named("medusa-vllm").write(bare, tmp_path / "none")


def test_heads_over_some_ids_are_beyond_this_vllm(tmp_path: Path) -> None:
    for case in ("some ids", "the target's head, some ids"):
        with pytest.warns(UserWarning, match=r"vLLM 0\.32\.0 .* cannot load"):
            layout_named("medusa-vllm").write(heads(case), tmp_path / case)
    with pytest.raises(IncompatibleDrafter, match="'medusa-vllm' holds heads over some"):
        layout_named("medusa").write(heads("some ids"), tmp_path)
    with pytest.raises(IncompatibleDrafter, match="'eagle3'"):
        layout_named("medusa-vllm").write(new().checkpoint(), tmp_path)


def test_a_strangers_one_head_stays_the_heads_own() -> None:
    """The mark that the one head is the target's is ours; in other files it may have been trained."""
    state = random_heads(2, 1)
    named = {f"blocks.{head}.layers.0.{kind}": state[f"{head}.0.linear.{kind}"] for head in (0, 1) for kind in KINDS}
    source = heads_of({**named, HEAD: state["0.1.weight"]}, {"vocab_size": 64, "original_lm_head": True})
    assert read(source, ReadOptions()).config.own_head


KINDS = ("weight", "bias")


def test_eagle_1_is_found_by_vllm(tmp_path: Path) -> None:
    """It puts "Eagle" before the name, and counts ``layer_types`` from the target's first layer."""
    config = written(new("eagle").checkpoint(), "eagle", tmp_path)
    assert config["architectures"] == ["LlamaForCausalLMEagle", "LlamaForCausalLM"]
    assert "layer_types" not in config
    assert same(read(opened(tmp_path)).tensors, new("eagle").checkpoint().tensors)


DROPPED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "eagle": ("eagle", "eagle", {"fc_bias": True}),
    "eagle3": (OURS, "eagle3", {"fc_bias": True}),
    "qwen3": (OURS, "eagle3", {"layer_type": "qwen3", "attention_bias": True}),
}


@pytest.mark.parametrize("case", DROPPED)
def test_biases_that_vllm_would_drop(case: str, tmp_path: Path) -> None:
    """Warned about, under a name that vLLM does not know, and no card promises that it serves them."""
    layout, method, settings = DROPPED[case]
    drafter = new(method, **settings)
    with pytest.warns(UserWarning, match="vLLM reads no"):
        layout_named(layout).write(drafter.checkpoint(), tmp_path)
    (name,) = json.loads((tmp_path / "config.json").read_text())["architectures"]
    assert name == {"eagle": "LlamaForCausalLMEagle"}.get(case, "SpecGenDrafter")
    assert same(read(opened(tmp_path)).tensors, drafter.checkpoint().tensors)
    card = write_card(tmp_path).read_text()
    assert "vllm serve" not in card and ("SGLang" in card) == (case != "eagle3")
    if method == "eagle3":
        with pytest.raises(IncompatibleDrafter, match=r"vLLM reads no .*\.bias"):
            layout_named(LIBRARY).write(drafter.checkpoint(), tmp_path / "none")


@pytest.mark.parametrize("layer_type", ["llama", "qwen3"])
def test_layers_of_qwen3_are_named(layer_type: str, tmp_path: Path) -> None:
    name = {"llama": "LlamaForCausalLMEagle3", "qwen3": "Eagle3Qwen3ForCausalLM"}[layer_type]
    assert written(new(layer_type=layer_type).checkpoint(), OURS, tmp_path)["architectures"] == [name]


@pytest.mark.parametrize("taken", [[3], [2, 4, 5], [1, 2, 4, 6, 8]])
def test_vllm_is_told_how_many_features(taken: list[int], tmp_path: Path) -> None:
    """In the library's layout it takes three where nobody says how many."""
    made = new(aux_layer_boundaries=taken).checkpoint()
    inner = written(made, LIBRARY, tmp_path)["transformer_layer_config"]
    assert inner.get("num_aux_hidden_states", 3) == len(taken)
    assert read(opened(tmp_path)).config.aux_layer_boundaries == taken


@pytest.mark.parametrize("taken", [[5, 4, 2], [2, 2, 5]])
def test_boundaries_that_do_not_grow_make_no_drafter(taken: list[int]) -> None:
    """vLLM takes features in the order of the layers, each once: another drafter."""
    with pytest.raises(SpecGenError, match="do not grow strictly"):
        new(aux_layer_boundaries=taken)


@pytest.mark.parametrize("case", MEDUSA)
def test_cards_of_heads(case: str, tmp_path: Path) -> None:
    made = heads(case)
    written(made, OURS, tmp_path)
    card = write_card(tmp_path).read_text()
    over_all, lines = (
        not made.config.reduces_vocabulary,
        '"method": "medusa", "model": "out", "num_speculative_tokens": 2',
    )
    assert ("text-generation-launcher" in card) == (lines in card) == over_all
    assert ("--to medusa-vllm --target t/target" in card) == (over_all and not made.config.own_head)
