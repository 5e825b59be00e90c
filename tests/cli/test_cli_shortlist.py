"""hf-specgen convert with a shorter draft vocabulary, and what inspect says of settings that cannot be drafted with."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from cli_drafters import EAGLE3, call, fine, refused

from hf_specgen import SpecGenError, load_drafter
from hf_specgen.checkpoints.config import DrafterConfig
from hf_specgen.drafters.eagle3 import Eagle3Drafter
from hf_specgen.drafters.medusa import MedusaDrafter


@pytest.fixture
def eagle3(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    drafter = Eagle3Drafter(DrafterConfig("eagle3", **{**EAGLE3, "draft_vocab_size": 64}))
    drafter.shortened(torch.randperm(64)[:40]).save_pretrained(tmp_path / "eagle3")
    return tmp_path / "eagle3"


def test_convert_to_fewer_ids(eagle3: Path, tmp_path: Path) -> None:
    """The ids that answers hold most are kept, among those that the drafter knows; prompts do not count."""
    known = load_drafter(eagle3).target_ids.tolist()
    unknown = next(token for token in range(64) if token not in known)
    rows = [
        {"input_ids": [*known[:9], *known[20:24], *known[20:24], unknown, unknown], "loss_mask": [0] * 9 + [1] * 10}
    ]
    data = tmp_path / "answers.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows * 3))
    fine("convert", eagle3, tmp_path / "short", "--draft-vocab-size", "4", "--data", data)
    short, whole = load_drafter(tmp_path / "short"), load_drafter(eagle3)
    assert short.target_ids.tolist() == known[20:24]
    assert torch.equal(short.lm_head.weight, whole.lm_head.weight[20:24])
    assert short.t2d.nonzero()[:, 0].tolist() == known[20:24]
    assert "drafts 4 of the target's 64 ids" in fine("inspect", tmp_path / "short")
    fine("convert", eagle3, tmp_path / "served", "--to", "sglang-eagle3", "--draft-vocab-size", "4", "--data", data)
    assert load_drafter(tmp_path / "served").target_ids.tolist() == known[20:24]
    written = [
        {"prompt": row["input_ids"][:9], "completion": row["input_ids"][9:], "text": "as regenerate does"}
        for row in rows
    ]
    (tmp_path / "written.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    numbers = ["--draft-vocab-size", "4", "--data", tmp_path / "written.jsonl"]
    fine("convert", eagle3, tmp_path / "numbers", *numbers)  # no tokenizer is at hand, and none is needed
    assert load_drafter(tmp_path / "numbers").target_ids.tolist() == known[20:24]
    (tmp_path / "texts.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}))
    assert "--target" in refused(
        "convert", eagle3, tmp_path / "no", "--draft-vocab-size", "4", "--data", tmp_path / "texts.jsonl"
    )
    told = call("convert", eagle3, tmp_path / "again", "--draft-vocab-size", "4", "--data", data).stderr
    assert "80.0 % of the supervised tokens" in " ".join(told.split())
    for arguments, reason in (
        (["--draft-vocab-size", "4"], "--data FILE"),
        (["--draft-vocab-size", "40", "--data", data], "fewer ids than the drafter's 40"),
        (["--data", data], "--draft-vocab-size N"),
    ):
        assert reason in refused("convert", eagle3, tmp_path / "no", *arguments)
        assert not (tmp_path / "no").exists()


def test_inspect_tells_how_a_drafter_is_told_wrongly_to_draft(tmp_path: Path) -> None:
    """What is wrong with the tree or the length shows before the first text is asked for."""
    MedusaDrafter(DrafterConfig("medusa", hidden_size=32, vocab_size=64, num_heads=2)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for change, reason in (
        ({"tree": "bush"}, "tree='bush'"),
        ({"tree": [[1, 0]]}, "every node's parent is required"),
        ({"tree": [[0], [0, 0], [0, 0, 0]]}, "3 tokens deep and the drafter drafts 2"),
        ({"tree": {"top_k": 0, "depth": 2}}, "top_k=0"),
        ({"num_tokens": 0}, "num_tokens=0"),
        ({"num_tokens": "many"}, "num_tokens='many'"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, "specgen": {**config["specgen"], **change}}))
        result = call("inspect", tmp_path)
        assert result.exit_code == 1 and reason in " ".join(result.stdout.replace("│", " ").split()), result.output
        with pytest.raises(SpecGenError, match=re.escape(reason)):
            load_drafter(tmp_path)
        with pytest.raises(SpecGenError, match=re.escape(reason)):
            MedusaDrafter(DrafterConfig("medusa", hidden_size=32, vocab_size=64, num_heads=2, **change))
    (tmp_path / "config.json").write_text(json.dumps(config))
    for tree in ("chain", "medusa", "eagle", {"top_k": 2, "depth": 2, "nodes": 3}):
        assert load_drafter(tmp_path, tree=tree, num_tokens=3).config.tree == tree
    with pytest.raises(SpecGenError, match="num_tokens=0"):
        load_drafter(tmp_path, num_tokens=0)
