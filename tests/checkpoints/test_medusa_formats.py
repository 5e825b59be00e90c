"""Medusa checkpoints: each published layout is read exactly, what is wrong is named, what is written reads back."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from medusa_checkpoints import H, State, V, full_model, random_heads, saved, source_of
from safetensors.torch import save_file
from tiny import disturbed, ours, plain, prompts, tiny
from transformers import AutoModelForCausalLM

from hf_specgen import IncompatibleDrafter, SpecGenError
from hf_specgen.checkpoints.config import DrafterConfig
from hf_specgen.checkpoints.formats.base import Checkpoint, ReadOptions, Source, detect, layout_named
from hf_specgen.checkpoints.opening import open_source
from hf_specgen.drafters.medusa import MedusaDrafter
from hf_specgen.loading import load_drafter
from hf_specgen.models.facts import TargetFacts


def formula(state: State, head: int, blocks: int, states: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Compute a head from its tensors alone: x + SiLU(W x + b), as often as there are blocks, then U."""
    for block in range(blocks):
        name = f"{head}.{block}.linear"
        states = states + F.silu(F.linear(states, state[f"{name}.weight"], state.get(f"{name}.bias")))
    return F.linear(states, last)


def folder_of(tmp_path: Path, config: dict, state: State, file: str = "medusa_lm_head.safetensors") -> Path:
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file({name: tensor.clone() for name, tensor in state.items()}, tmp_path / file)
    else:
        torch.save(state, tmp_path / file)
    return tmp_path


def imagined(shapes: dict[str, tuple[int, ...]], config: dict | None = None, name: str = "imagined") -> Source:
    """Return a checkpoint of shapes alone."""

    def load(names):
        raise AssertionError("a plan reads no tensor")

    return Source(name, config or {}, shapes, load)


@pytest.fixture(scope="module")
def target():
    return tiny()


@pytest.mark.parametrize("blocks", [0, 1, 2])
def test_own_heads_in_a_pickle(blocks: int, tmp_path: Path) -> None:
    """M-a: the published config says 2 heads and the file holds 5."""
    state = random_heads(5, blocks)
    if blocks == 2:  # the reference repeats one block object
        state |= {
            f"{head}.1.linear.{kind}": state[f"{head}.0.linear.{kind}"]
            for head in range(5)
            for kind in ("weight", "bias")
        }
    config = {"base_model_name_or_path": "lmsys/some-7b", "medusa_num_heads": 2, "medusa_num_layers": 1}
    drafter = load_drafter(folder_of(tmp_path, config, state, "medusa_lm_head.pt"))
    assert drafter.report.layout == "medusa"
    assert drafter.config.target["name"] == "lmsys/some-7b"
    assert (drafter.config.num_heads, drafter.config.num_head_layers) == (5, blocks)
    assert any("medusa_num_heads=2" in note for note in drafter.report.notes)
    assert set(drafter.state_dict()) == set(state)
    states = torch.randn(3, H)
    for head in range(5):
        assert torch.equal(
            drafter.head(head, states), formula(state, head, blocks, states, state[f"{head}.{blocks}.weight"])
        )


@pytest.mark.parametrize("said", [{}, {"version": "2", "base_model_name_or_path": "N/A", "decoding_strategy": "x"}])
def test_shared_heads(said: dict, target, tmp_path: Path) -> None:
    """M-b: residual blocks alone, the logits are the target's head's; ``version`` may be missing."""
    state = random_heads(3, 1, own=False)
    folder = folder_of(tmp_path, {"medusa_num_heads": 3, "medusa_num_layers": 1, **said}, state)
    drafter = load_drafter(folder, target)
    assert drafter.report.layout == "medusa-shared-head"
    assert not drafter.config.own_head
    assert drafter.config.target["name"] == ""
    states = torch.randn(2, H)
    for head in range(3):
        assert torch.equal(drafter.head(head, states), formula(state, head, 1, states, target.lm_head.weight))
    alone = load_drafter(folder)  # nothing in the file tells the vocabulary
    assert alone.config.vocab_size == 0
    alone.attach(target)
    assert torch.equal(alone.head(2, states), drafter.head(2, states))


def test_a_full_model_gives_target_and_heads(target, tmp_path: Path) -> None:
    """M-c: Medusa-2; ``medusa_num_heads`` is missing in some repositories."""
    tuned = disturbed(target)
    tuned.model.embed_tokens.weight.data.copy_(target.model.embed_tokens.weight)  # fine-tuning left it alone
    state = random_heads(3, 1)
    folder = full_model(tmp_path / "whole", tuned, state)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert all(torch.equal(tensor, tuned.state_dict()[name]) for name, tensor in model.state_dict().items())
    model, drafter = MedusaDrafter.with_target(folder, dtype=torch.float32, local_files_only=True)
    assert all(torch.equal(tensor, tuned.state_dict()[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(SpecGenError, match="trust_remote_code"):
        MedusaDrafter.with_target(folder, trust_remote_code=True)
    assert drafter.report.layout == "medusa-model"
    assert all(torch.equal(tensor, state[name]) for name, tensor in drafter.state_dict().items())
    assert drafter.config.target["name"] == str(folder)
    assert drafter.config.target["num_layers"] == 2
    ids, mask = prompts([5, 9])
    model.generation_config.pad_token_id = 0
    assert torch.equal(ours(model, drafter, ids, mask), plain(model, ids, mask))


@pytest.mark.parametrize("way", ["direct", "specgen", "medusa"])
def test_heads_of_a_full_model_refuse_every_other_backbone(way: str, target, tmp_path: Path) -> None:
    tuned = tiny()
    tuned.lm_head.weight.data.mul_(1.01)  # the smallest of fine-tunings: the embedding is the base model's
    folder = full_model(tmp_path / "whole", tuned, random_heads(3, 1))
    if way == "specgen":
        load_drafter(folder).save_pretrained(tmp_path / "copy")
    elif way == "medusa":
        saved(load_drafter(folder), tmp_path / "copy")
    folder = folder if way == "direct" else tmp_path / "copy"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(IncompatibleDrafter, match=r"trained together with the backbone of .*whole"):
            load_drafter(folder, target)
        drafter = load_drafter(folder)
        ids, mask = prompts([5])
        with pytest.raises(IncompatibleDrafter, match="trained together"):  # before the first token
            ours(target, drafter, ids, mask)
    drafter.attach(tuned)
    assert torch.equal(ours(tuned, drafter, ids, mask), plain(tuned, ids, mask))
    load_drafter(folder, tuned.to(torch.bfloat16))  # the same backbone in another dtype


def test_a_full_model_in_shards_of_pickles(target, tmp_path: Path) -> None:
    state = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    heads = random_heads(2, 1)
    state |= {f"medusa_head.{name}": tensor for name, tensor in heads.items()}
    names = sorted(state)
    parts = {"pytorch_model-00001-of-00002.bin": names[::2], "pytorch_model-00002-of-00002.bin": names[1::2]}
    for file, held in parts.items():
        torch.save({name: state[name] for name in held}, tmp_path / file)
    index = {"weight_map": {name: file for file, held in parts.items() for name in held}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text(json.dumps({**target.config.to_dict(), "medusa_num_heads": 5}))
    drafter = load_drafter(tmp_path, target)
    assert torch.equal(drafter.state_dict()["1.1.weight"], heads["1.1.weight"])
    assert drafter.config.target["fingerprint"] == TargetFacts.of(target).fingerprint


def vllm_names(state: State, blocks: int, prefix: str = "") -> State:
    named: State = {}
    for name, tensor in state.items():
        head, place, *rest = name.split(".")
        own = f"lm_heads.{head}.weight" if rest == ["weight"] else f"blocks.{head}.layers.{place}.{rest[-1]}"
        named[prefix + own] = tensor
    return named


VLLM = {"architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": H, "num_heads": 3, "max_paths": 64}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
def test_vllm_heads(bias: bool, prefix: str, tmp_path: Path) -> None:
    """M-d: biases were dropped by the published conversion, which is said; a map that truncates nothing is not used."""
    state = random_heads(3, 2, bias=bias)
    config = {**VLLM, "num_hidden_layers": 2, "vocab_size": V, "truncated_vocab_size": None, "medusa_fc_bias": bias}
    named = vllm_names(state, 2, prefix) | {"token_map": torch.arange(V)}
    folder = folder_of(tmp_path, config, named, "model.safetensors")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        drafter = load_drafter(folder)
    assert drafter.report.layout == "medusa-vllm"
    assert any("no biases" in str(warning.message) for warning in seen) != bias
    states = torch.randn(4, H)
    for head in range(3):
        assert torch.equal(drafter.head(head, states), formula(state, head, 2, states, state[f"{head}.2.weight"]))
    assert drafter.target_ids is None


@pytest.mark.parametrize("whole", [False, True])
def test_vllm_heads_over_some_ids(whole: bool, tmp_path: Path) -> None:
    """M-d: token_map holds absolute ids in any order; heads may hold all rows, of which the map picks some."""
    some = torch.tensor([9, 3, 50, 63, 0, 17])
    state = random_heads(3, 1, vocab=V if whole else 6)
    config = {**VLLM, "num_hidden_layers": 1, "vocab_size": V, "truncated_vocab_size": 6}
    drafter = load_drafter(folder_of(tmp_path, config, vllm_names(state, 1) | {"token_map": some}, "model.safetensors"))
    assert (drafter.config.vocab_size, drafter.config.draft_vocab_size) == (V, 6)
    assert drafter.state_dict()["d2t"].dtype == torch.int64
    assert drafter.target_ids.tolist() == sorted(some.tolist())
    states = torch.randn(4, H)
    for head in range(3):
        rows = state[f"{head}.1.weight"][some] if whole else state[f"{head}.1.weight"]
        expected = torch.full((4, V), float("-inf"))
        expected[:, some] = formula(state, head, 1, states, rows)  # how the engine scatters them
        scattered = torch.full((4, V), float("-inf"))
        scattered[:, drafter.target_ids] = drafter.head(head, states)
        torch.testing.assert_close(scattered, expected, rtol=1e-6, atol=1e-6)
    half = load_drafter(tmp_path, dtype=torch.float16).half()
    assert half.target_ids.tolist() == sorted(some.tolist()), "a map is never cast"


@pytest.mark.parametrize("name", ["lm_head.weight", "lm_heads.0.weight", "all"])
def test_vllm_heads_with_the_original_head(name: str) -> None:
    """All heads share one matrix; a logit scale is folded into it."""
    state = random_heads(3, 1)
    last = state["0.1.weight"]
    named = {key: tensor for key, tensor in vllm_names(state, 1).items() if not key.startswith("lm_heads")}
    named |= {f"lm_heads.{head}.weight": last for head in range(3)} if name == "all" else {name: last}
    config = {**VLLM, "vocab_size": V, "original_lm_head": True, "logit_scale": 0.5}
    found = layout_named("medusa-vllm").read(source_of(named, config), ReadOptions())
    assert all(torch.equal(found.tensors[f"{head}.1.weight"], last * 0.5) for head in range(3))
    assert any("logit_scale" in note for note in found.notes)


def vicuna(prefix: str = "", own: bool = True, heads: int = 5) -> dict[str, tuple[int, ...]]:
    """List the tensors of heads for Vicuna-7B, as the published files have them."""
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(heads):
        shapes[f"{prefix}{head}.0.linear.weight"] = (4096, 4096)
        shapes[f"{prefix}{head}.0.linear.bias"] = (4096,)
        if own:
            shapes[f"{prefix}{head}.1.weight"] = (32000, 4096)
    return shapes


def vicuna_backbone() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (32000, 4096), "lm_head.weight": (32000, 4096)}
    for layer in range(32):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{kind}_proj.weight": (4096, 4096) for kind in "qkvo"}
        shapes |= {f"{at}.mlp.{kind}_proj.weight": (11008, 4096) for kind in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (4096, 11008)
        shapes |= {f"{at}.{kind}_layernorm.weight": (4096,) for kind in ("input", "post_attention")}
    return shapes | {"model.norm.weight": (4096,)}


def size(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(map(math.prod, shapes.values()))


@pytest.mark.parametrize(
    ("layout", "shapes", "config", "parameters"),
    [
        ("medusa", vicuna(), {"medusa_num_heads": 2, "medusa_num_layers": 1}, 5 * (4096**2 + 4096 + 32000 * 4096)),
        ("medusa-shared-head", vicuna(own=False, heads=3), {"version": "2"}, 3 * (4096**2 + 4096)),
        ("medusa-model", vicuna("medusa_head.") | vicuna_backbone(), {"vocab_size": 32000}, 739_266_560),
        (
            "medusa-vllm",
            {f"blocks.{head}.layers.0.weight": (4096, 4096) for head in range(5)}
            | {f"lm_heads.{head}.weight": (32000, 4096) for head in range(5)},
            {"vocab_size": 32000, "truncated_vocab_size": None, "num_heads": 5},
            739_246_080,
        ),
    ],
)
def test_names_and_shapes_for_vicuna_7b(layout: str, shapes: dict, config: dict, parameters: int) -> None:
    """Without a tensor: our module on the meta device has exactly the tensors of the file."""
    source = imagined(shapes, config, "lmsys/vicuna")
    assert detect(source).name == layout
    plan = detect(source).plan(source, ReadOptions(TargetFacts(hidden_size=4096, vocab_size=32000)))
    assert (plan.config.hidden_size, plan.config.vocab_size) == (4096, 32000)
    with torch.device("meta"):
        drafter = MedusaDrafter(plan.config)
    own = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    assert {name: shapes[file] for name, file in plan.names.items()} == own
    assert size(own) == parameters
    if layout == "medusa-vllm":
        assert 1_478_493_144 - 2 * size(own) == 984  # the published file: its header beside the bias-free weights
    if layout == "medusa-model":
        assert round(2 * size(shapes) / 1e9, 2) == 14.96


def broken(change: str) -> Source:
    shapes, config = {name: tuple(tensor.shape) for name, tensor in random_heads(3, 1).items()}, {}
    if change == "missing":
        del shapes["1.0.linear.bias"]
    elif change == "unknown":
        shapes["extra.weight"] = (3,)
    elif change == "shape":
        shapes["2.1.weight"] = (V + 1, H)
    elif change == "square":
        shapes["0.0.linear.weight"] = (H, H + 1)
    elif change == "backbone":
        shapes = {f"medusa_head.{name}": shape for name, shape in shapes.items()} | {"model.layers.0.x": (1,)}
    elif change == "stranger":
        shapes = {f"medusa_head.{name}": shape for name, shape in shapes.items()} | {"model.layers.0.x": (1,)}
        shapes |= {"model.embed_tokens.weight": (V, H), "medusa_extra.weight": (1,)}
    elif change == "quantised":
        shapes["0.0.linear.qweight"] = (3,)
    else:
        shapes = {f"blocks.{h}.layers.0.weight": (H, H) for h in range(2)}
        config = {"vocab_size": V}
        if change != "no head":
            rows = {"no map": 6, "other rows": 7}.get(change, 6)
            shapes |= {f"lm_heads.{h}.weight": (rows, H) for h in range(2)}
            config["truncated_vocab_size"] = 6
    return imagined(shapes, config)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("missing", "1.0.linear.bias"),
        ("unknown", "extra.weight"),
        ("shape", r"2\.1\.weight"),
        ("square", r"0\.0\.linear\.weight"),
        ("backbone", "lacks the tensor model.embed_tokens.weight"),
        ("stranger", "medusa_extra.weight"),
        ("quantised", "0.0.linear.qweight"),
        ("no head", "lm_heads.0.weight"),
        ("no map", "token_map"),
        ("other rows", "score 7 ids"),
    ],
)
def test_what_is_wrong_is_named(change: str, said: str) -> None:
    source = broken(change)
    with pytest.raises(IncompatibleDrafter, match=said):
        detect(source).plan(source, ReadOptions())


@pytest.mark.parametrize("token_map", [[0, 1, 1], [0, 1, 64], [-1, 0, 1], [0.5, 1.0, 2.0], [1, 2]])
def test_maps_that_are_none_are_refused(token_map: list) -> None:
    state = vllm_names(random_heads(2, 1, vocab=3), 1) | {"token_map": torch.tensor(token_map)}
    source = source_of(state, {"vocab_size": V, "truncated_vocab_size": 3})
    with pytest.raises(IncompatibleDrafter, match="token_map"):
        layout_named("medusa-vllm").read(source, ReadOptions())


def test_integers_are_no_weights() -> None:
    state = random_heads(2, 1)
    state["1.1.weight"] = state["1.1.weight"].to(torch.int8)
    with pytest.raises(IncompatibleDrafter, match=r"1\.1\.weight.*int8"):
        layout_named("medusa").read(source_of(state), ReadOptions())


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("blocks", [1, 2])
def test_what_is_written_reads_back(own: bool, blocks: int, tmp_path: Path) -> None:
    state = random_heads(3, blocks, own)
    if blocks == 2:  # tensors that share memory
        state |= {f"{head}.1.linear.weight": state[f"{head}.0.linear.weight"] for head in range(3)}
    sizes = {"hidden_size": H, "vocab_size": V, "num_heads": 3, "num_head_layers": blocks, "own_head": own}
    config = DrafterConfig(method="medusa", tree=[[0], [1]], target={"name": "a/b", "fingerprint": "12"}, **sizes)
    layout_named("medusa").write(Checkpoint(config, state, "specgen"), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "medusa_lm_head.safetensors"]
    stored = json.loads((tmp_path / "config.json").read_text())
    assert (stored["medusa_num_heads"], stored["medusa_num_layers"]) == (3, blocks)
    assert stored["base_model_name_or_path"] == "a/b"
    assert stored.get("version") == (None if own else "2")
    source = open_source(tmp_path)
    assert detect(source).name == ("medusa" if own else "medusa-shared-head")
    found = detect(source).read(source, ReadOptions(TargetFacts(vocab_size=V)))
    assert set(found.tensors) == set(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in found.tensors.items())
    assert (found.config.tree, found.config.target["fingerprint"]) == ([[0], [1]], "12")
    drafter = load_drafter(tmp_path)
    drafter.save_pretrained(tmp_path / "ours")
    again = load_drafter(tmp_path / "ours")
    assert again.report.layout == "specgen"
    assert all(torch.equal(tensor, state[name]) for name, tensor in again.state_dict().items())
    saved(drafter, tmp_path)  # over the files that it was loaded from
    assert torch.equal(load_drafter(tmp_path).state_dict()["0.0.linear.weight"], state["0.0.linear.weight"])


def test_missing_biases_are_written_as_zeros(tmp_path: Path) -> None:
    config = DrafterConfig(method="medusa", hidden_size=H, vocab_size=V, num_heads=2, head_bias=False)
    drafter = MedusaDrafter(config)
    again = load_drafter(saved(drafter, tmp_path))
    assert torch.count_nonzero(again.state_dict()["1.0.linear.bias"]) == 0
    states = torch.randn(2, H)
    assert torch.equal(again.head(1, states), drafter.head(1, states))


def test_what_the_layout_cannot_hold_is_not_written(tmp_path: Path) -> None:
    few = MedusaDrafter(DrafterConfig(method="medusa", hidden_size=H, vocab_size=V, draft_vocab_size=9, num_heads=2))
    with pytest.raises(IncompatibleDrafter, match="reduced vocabulary"):
        saved(few, tmp_path)
    with pytest.raises(IncompatibleDrafter, match="eagle"):
        layout_named("medusa").write(Checkpoint(DrafterConfig(method="eagle"), {}, "specgen"), tmp_path)
    assert not any(tmp_path.iterdir())
