"""Medusa-2 heads belong to the backbone they were trained with, also where only its layers tell it from another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from medusa_checkpoints import full_model, random_heads, saved
from tiny import tiny

from hf_specgen import IncompatibleDrafter, load_drafter
from hf_specgen.models.facts import TargetFacts


@pytest.mark.parametrize("way", ["direct", "specgen", "medusa"])
@pytest.mark.parametrize("weight", ["model.layers.0.self_attn.v_proj.weight", "model.layers.1.mlp.down_proj.weight"])
def test_a_backbone_with_other_layers_alone_is_refused(weight: str, way: str, tmp_path: Path) -> None:
    """Adapters leave embedding and head as they were: the base model's fingerprint is the fine-tuned one's."""
    tuned, target = tiny(), tiny()
    tuned.get_parameter(weight).data.mul_(1.1)
    folder = full_model(tmp_path / "whole", tuned, random_heads(3, 1))
    if way != "direct":
        drafter, folder = load_drafter(folder), tmp_path / "copy"
        drafter.save_pretrained(folder) if way == "specgen" else saved(drafter, folder)
    assert TargetFacts.of(tuned).fingerprint == TargetFacts.of(target).fingerprint
    for kind in (torch.float32, torch.bfloat16):
        tuned, other = tuned.to(kind), tiny().to(kind)
        drafter = load_drafter(folder, tuned)
        with pytest.raises(IncompatibleDrafter, match=f"trained together with the backbone of .*{weight}"):
            drafter.attach(other)
        assert drafter.parts.head is tuned.lm_head, "the refused one is not kept"
        with pytest.raises(IncompatibleDrafter, match="trained together"):
            load_drafter(folder, other)
