"""Model cards: front matter that tools read, figures as measured or not at all, no README lost; uploads."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_stand_in import Hub, put_config, stand_in
from huggingface_hub import ModelCard
from tiny import tiny

from hf_specgen import CardOptions, SpecGenError, load_drafter, write_card
from hf_specgen.checkpoints import card
from hf_specgen.checkpoints.config import DrafterConfig
from hf_specgen.checkpoints.formats.base import layout_named
from hf_specgen.drafters.eagle import EagleDrafter
from hf_specgen.drafters.eagle3 import Eagle3Drafter
from hf_specgen.drafters.medusa import MedusaDrafter
from hf_specgen.drafting import learned
from hf_specgen.drafting.learned import LearnedDrafter

TARGET = {"name": "org/target", "fingerprint": "0123456789abcdef", "revision": "f00d"}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 64, "target": TARGET}
KINDS: dict[str, tuple[type[LearnedDrafter], dict[str, Any]]] = {
    "medusa": (MedusaDrafter, {"num_heads": 3}),
    "eagle": (EagleDrafter, {"own_head": False, "max_position_embeddings": 77}),
    "eagle3": (Eagle3Drafter, {"aux_layer_boundaries": [2, 3, 4], "draft_vocab_size": 40, "num_tokens": 5}),
}


def new(kind: str, **settings: Any) -> LearnedDrafter:
    torch.manual_seed(0)
    made, own = KINDS[kind]
    drafter = made(DrafterConfig(**{"method": kind, **SIZES, **own, **settings}))
    if drafter.config.reduces_vocabulary:
        drafter.get_buffer("d2t").zero_()
    return drafter


def saved(folder: Path, kind: str = "eagle3", **settings: Any) -> Path:
    new(kind, **settings).save_pretrained(folder)
    return folder


def part(speedup: float, length: float, prompts: int = 4) -> dict[str, Any]:
    return {
        "prompts": prompts,
        "tokens_per_second": 12.345,
        "speedup": speedup,
        "speedup_ci95": [speedup - 0.1, speedup + 0.1],
        "acceptance": {
            "mean_acceptance_length": length,
            "tokens_per_round": length - 0.25,
            "acceptance_rates": [0.7, 0.456, 0.2],
        },
    }


def bench(**changes: Any) -> dict[str, Any]:
    """Return a report as ``hf-specgen bench`` writes it, cut to what a card reads."""
    kinds = {"rag": part(1.5, 2.1), "qa": part(1.234, 1.9)}
    ours = {**part(1.377, 2.02, 8), "categories": kinds, "identical": {"compared": 8, "same": 7}}
    ours["divergences"] = [{"shortfall": 0.125}]
    plain = {"prompts": 8, "tokens_per_second": 8.96, "categories": {"rag": {"tokens_per_second": 9.25}, "qa": {}}}
    return {
        "schema": "hf_specgen.bench/1",
        "machine": {"cpu": "Tiny CPU", "gpu": None, "cores": 2, "threads": 1, "torch": "2.13.0"},
        "target": {"name": "org/target", "dtype": "bfloat16", "device": "cpu"},
        "drafter": {"name": "learned:me/drafter", "rule": "rejection", "sampled": False},
        "settings": {"decoding": {"max_new_tokens": 128}, "batch_size": 4, "greedy": True, "chat": True},
        "prompts": [{}] * 8,
        "methods": {"plain": plain, "ours": ours},
        **changes,
    }


def text_of(folder: Path, **options: Any) -> str:
    return write_card(folder, CardOptions(**options), overwrite=True).read_text()


# --- front matter


@pytest.mark.parametrize("kind", KINDS)
def test_front_matter(tmp_path: Path, kind: str) -> None:
    text = text_of(saved(tmp_path, kind), license="apache-2.0", datasets=("org/chats",))
    assert ModelCard(text).data.to_dict() == {
        "library_name": "hf_specgen",
        "base_model": "org/target",
        "base_model_relation": "adapter",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "speculative-decoding-draft", "draft-model", kind, "hf_specgen"],
        "datasets": ["org/chats"],
        "license": "apache-2.0",
    }


@pytest.mark.parametrize("name", ["/users/me/models/target", "./target", "target", "", "models/target"])
def test_nothing_that_is_private_or_unknown_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / "models" / "target").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    text = text_of(saved(tmp_path / "drafter", target={"name": name}))
    data = ModelCard(text).data.to_dict()
    assert data.keys() == {"library_name", "pipeline_tag", "tags"}
    assert "/users" not in text and "fingerprint |" not in text and str(tmp_path) not in text
    assert "None is stated." in text
    given = text_of(tmp_path / "drafter", base_model="org/other")
    assert ModelCard(given).data.base_model == "org/other" and 'from_pretrained("org/other")' in given


# --- contents


@pytest.mark.parametrize("kind", KINDS)
def test_what_it_is_and_how_to_load_it(tmp_path: Path, kind: str) -> None:
    text = text_of(saved(tmp_path, kind), name="me/drafter")
    assert "# drafter\n" in text and "| target's fingerprint | `0123456789abcdef` |" in text
    assert "| target's revision | `f00d` |" in text and "hidden size 32, vocabulary 64" in text
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    calls = {ast.unparse(node) for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)}
    assert "hf_specgen.load_drafter('me/drafter', target=model)" in calls
    expected = {
        "medusa": ["| heads | 3 of 1 residual block(s) |", "--to medusa", "text-generation-launcher"],
        "eagle": ["texts of up to 77 tokens", "--to eagle", "--speculative-algorithm EAGLE ", '"method": "eagle"'],
        "eagle3": [
            "| draft vocabulary | 40 of 64 ids |",
            "residual streams after layers 2, 3, 4",
            '"model": "me/drafter", "num_speculative_tokens": 5',
            "--speculative-algorithm EAGLE3 ",
            "--speculative-num-draft-tokens 6",
        ],
    }[kind]
    assert not [words for words in expected if words not in text]
    assert "{{" not in text and "{%" not in text and "None" not in text.replace("None is stated", "")
    assert "Measured" not in text, "nothing was"


@pytest.mark.parametrize("first", [1, 2, 3])
def test_how_servers_are_told_the_layers(tmp_path: Path, first: int) -> None:
    """Our files are read as they are, except where a server would take the layer ids for others."""
    text = text_of(saved(tmp_path / "ours", aux_layer_boundaries=[first, 4, 5]), name="me/drafter")
    assert '"model": "me/drafter"' in text and "--to vllm" not in text
    assert ("--speculative-draft-model-path me/drafter" in text) == (first == 2)
    assert ("hf-specgen convert me/drafter out --to sglang-eagle3" in text) == (first == 3)
    assert ("SGLang" in text) == (first != 1)
    layout_named("vllm-speculators").write(
        new("eagle3", aux_layer_boundaries=[first, 4, 5]).checkpoint(), tmp_path / "theirs"
    )
    text = text_of(tmp_path / "theirs", name="me/drafter")
    assert "hf-specgen convert me/drafter out --to vllm-speculators" in text and '"model": "out"' in text


def table(text: str, title: str) -> list[list[str]]:
    lines = text[text.index(title) :].splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_figures_are_the_reports(tmp_path: Path) -> None:
    text = text_of(saved(tmp_path), bench=(bench(),))
    assert table(text, "### Tiny CPU, bfloat16") == [
        [
            "prompts of kind",
            "plain tokens/s",
            "tokens/s",
            "speed-up (95 % interval)",
            "acceptance length",
            "tokens per round",
            "prompts",
        ],
        ["---", *["---:"] * 6],
        ["rag", "9.2", "12.3", "1.50x (1.40-1.60)", "2.10", "1.85", "4"],
        ["qa", "", "12.3", "1.23x (1.13-1.33)", "1.90", "1.65", "4"],
        ["all", "9.0", "12.3", "1.38x (1.28-1.48)", "2.02", "1.77", "8"],
    ]
    assert table(text, "| position in")[0][1:] == ["1", "2", "3"] and table(text, "| position in")[2][1:] == [
        "0.70",
        "0.46",
        "0.20",
    ]
    assert "target org/target, batch 4, greedy, 128 new tokens, 8 prompts, chat template, 2 cores" in text
    assert "Texts identical to plain greedy: 7 of 8; the others part at a logit gap of at most 0.125." in text
    assert "Lossy**" not in text and "Acceptance length: 1 + accepted / drafts" in text


def test_figures_that_are_missing_are_left_out(tmp_path: Path) -> None:
    ours = {"speedup": 1.1, "categories": {}}
    text = text_of(saved(tmp_path), bench=(bench(methods={"ours": ours}, machine={}, target={}, settings={}),))
    columns = ["prompts of kind", "speed-up (95 % interval)"]
    assert table(text, "### One run") == [columns, ["---", "---:"], ["all", "1.10x"]]
    for word in ("| position in", "identical to plain", "temperature", "batch None", "None"):
        assert word not in text.replace("None is stated", "").replace("temperature and context", "")


def test_two_machines_and_a_lossy_rule(tmp_path: Path) -> None:
    gpu = bench(
        machine={"cpu": "Tiny CPU", "gpu": "Big GPU", "cores": 2},
        target={"name": "/users/me/secret/target", "dtype": "float16", "device": "cuda"},
        drafter={"name": "learned:x", "rule": "typical"},
    )
    text = text_of(saved(tmp_path), bench=(bench(), gpu))
    assert text.index("### Tiny CPU, bfloat16") < text.index("### Big GPU, float16")
    assert text.count('**Lossy**: measured with `rule="typical"`') == 1
    assert "/users/me" not in text and "target target," in text


@pytest.mark.parametrize(
    ("report", "words"),
    [
        ({"schema": "other/1"}, "schema 'other/1' is no result"),
        ({"schema": "hf_specgen.bench/1", "methods": {}}, "is no result"),
        (bench(drafter={"name": "prompt-lookup"}), "the report measured prompt-lookup, not this drafter"),
        (bench(drafter={"name": "small-model:x"}), "the report measured small-model:x"),
        (bench(drafter={"name": "prompt-lookup+learned:x"}), "the report measured prompt-lookup"),
    ],
)
def test_other_reports_are_refused(tmp_path: Path, report: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecGenError, match=words):
        write_card(saved(tmp_path), CardOptions(bench=(report,)))
    assert not (tmp_path / "README.md").exists()


def test_a_readme_is_never_lost(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(SpecGenError, match="exists and stays as it is"):
        write_card(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"
    write_card(tmp_path, overwrite=True)
    assert "speculative-decoding" in (tmp_path / "README.md").read_text()


def test_a_folder_without_a_drafter_gets_no_card(tmp_path: Path) -> None:
    with pytest.raises(SpecGenError, match=r"has no config\.json"):
        write_card(put_config(tmp_path / "x").parent)
    assert not (tmp_path / "README.md").exists()


def test_the_template_is_found_installed_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (card.card_folder() / card.TEMPLATE).is_file()
    inside = tmp_path / "hf_specgen"
    (inside / "model_cards").mkdir(parents=True)
    monkeypatch.setattr(card, "__file__", str(inside / "checkpoints" / "card.py"))
    assert card.card_folder() == inside / "model_cards"


# --- the Hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    found = stand_in(monkeypatch, tmp_path / "hub")
    monkeypatch.setattr(learned, "HfApi", found)
    return found


def test_push_and_load_again(hub: Hub) -> None:
    drafter = new("eagle3")
    address = drafter.push_to_hub("me/drafter", private=True, token="secret", commit_message="first")
    assert address.startswith("https://huggingface.co/me/drafter/commit/") and hub.token == "secret"
    (create, upload) = hub.uploads
    assert create == ("create_repo", {"repo": "me/drafter", "private": True, "exist_ok": True})
    assert upload[1]["commit_message"] == "first" and not upload[1]["create_pr"]
    folder = hub.root / "me" / "drafter"
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", "README.md"}
    text = (folder / "README.md").read_text()
    assert ModelCard(text).data.base_model == "org/target" and 'load_drafter("me/drafter"' in text
    with pytest.warns(UserWarning, match="another target"):
        loaded = load_drafter("me/drafter", tiny(layers=4))
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in drafter.state_dict().items())


def test_a_readme_on_the_hub_stays(hub: Hub) -> None:
    folder = hub.root / "me" / "drafter"
    folder.mkdir(parents=True)
    (folder / "README.md").write_text("mine")
    new("medusa").push_to_hub("me/drafter")
    assert (folder / "README.md").read_text() == "mine" and (folder / "model.safetensors").exists()
    new("medusa").push_to_hub("me/drafter", overwrite_card=True, card=CardOptions(license="mit", bench=(bench(),)))
    text = (folder / "README.md").read_text()
    assert ModelCard(text).data.license == "mit" and "### Tiny CPU" in text


def test_the_hub_says_no(hub: Hub) -> None:
    hub.gated.add("me/drafter")
    with pytest.raises(SpecGenError, match="gated"):
        new("medusa").push_to_hub("me/drafter")


def test_saving_knows_its_keywords(tmp_path: Path) -> None:
    drafter = new("medusa")
    with pytest.raises(SpecGenError, match=r"does not know push_to_hub.*drafter\.push_to_hub\(repo_id\)"):
        drafter.save_pretrained(tmp_path / "a", push_to_hub=True)
    drafter.save_pretrained(tmp_path / "a", is_main_process=False)
    assert not (tmp_path / "a").exists()
    doubled = {name: 2 * tensor for name, tensor in drafter.state_dict().items()}
    drafter.save_pretrained(tmp_path / "a", state_dict=doubled)
    assert torch.equal(load_drafter(tmp_path / "a").state_dict()["0.1.weight"], doubled["0.1.weight"])
    assert json.loads((tmp_path / "a" / "config.json").read_text())["specgen"]["target"] == TARGET
