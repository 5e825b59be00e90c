"""Reported: with an offloaded embedding (``device_map`` with cpu or disk) the call asked a meta weight where it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from tiny import disturbed, drafter_of, ours, plain, prompts, texts_of, tiny
from transformers import PreTrainedModel

from hf_specgen import IncompatibleDrafter, PromptLookup, SmallModel, UnsupportedTarget
from hf_specgen.models.selfcheck import round_error
from hf_specgen.models.wrappers import input_device
from hf_specgen.trainers.feature_cache import write_cache

Offload = Callable[[PreTrainedModel, Path], PreTrainedModel]


def to_cpu(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    cpu_offload(model, execution_device=torch.device("cpu"))
    return model


def to_disk(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    disk_offload(model, str(folder), execution_device=torch.device("cpu"))
    return model


def by_map(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    places = {"model.embed_tokens": "disk", "model.layers": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    return dispatch_model(model, {**places, "lm_head": "disk"}, main_device="cpu", offload_dir=str(folder))


OFFLOADS = {"cpu": to_cpu, "disk": to_disk, "device_map": by_map}
every_offload = pytest.mark.parametrize("offload", OFFLOADS.values(), ids=OFFLOADS)


@every_offload
def test_an_offloaded_target_writes_its_text(offload: Offload, tmp_path: Path) -> None:
    ids, mask = prompts([9, 14])
    expected = plain(tiny(), ids, mask, max_new_tokens=16)
    model = offload(tiny(), tmp_path)
    assert model.get_input_embeddings().weight.is_meta and input_device(model) == torch.device("cpu")
    lookup = PromptLookup(4, corpus=texts_of(expected, mask))
    found = ours(model, lookup, ids, mask, max_new_tokens=16)
    assert torch.equal(found, expected) and found.speculation.num_accepted_tokens > 0
    assert round_error(model) < 1e-3, "the self-check runs where the model computes"


@every_offload
def test_an_offloaded_small_model_drafts(offload: Offload, tmp_path: Path) -> None:
    target, (ids, mask) = tiny(), prompts([9, 14])
    small = offload(disturbed(target, 0.0), tmp_path)
    found = ours(target, SmallModel(small, 3), ids, mask, max_new_tokens=16)
    assert torch.equal(found, plain(target, ids, mask, max_new_tokens=16))
    assert found.speculation.num_accepted_tokens > 0


def test_learned_drafters_name_the_way_out(tmp_path: Path) -> None:
    model, (ids, mask) = to_cpu(tiny(), tmp_path), prompts([9])
    for kind in ("medusa", "eagle", "eagle3"):
        with pytest.raises(IncompatibleDrafter, match=r"is offloaded.*device_map=.*PromptLookup"):
            ours(model, drafter_of(kind, tiny(layers=3), [[1, 2, 3]]), ids, mask)


def test_weights_that_nothing_loads_are_refused() -> None:
    model, (ids, mask) = tiny().to("meta"), prompts([9])
    with pytest.raises(UnsupportedTarget, match=r"meta device and nothing loads it: weights in memory"):
        input_device(model)
    with pytest.raises(UnsupportedTarget, match="nothing loads it"):
        ours(model, PromptLookup(4), ids, mask)


def test_an_accelerator_by_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """``device_map`` names devices by number, and accelerate keeps the number."""
    model = to_cpu(tiny(), tmp_path)
    vars(model.get_input_embeddings())["_hf_hook"].execution_device = 1
    assert input_device(model) == torch.device("cuda", 1)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    assert input_device(model) == torch.device("xpu", 1)


def test_hidden_states_of_an_offloaded_target_are_stored(tmp_path: Path) -> None:
    rows = [{"input_ids": list(range(1, 9)), "loss_mask": [1] * 8}]
    model = to_cpu(tiny(), tmp_path)
    with pytest.raises(UnsupportedTarget, match="offloaded"):
        write_cache(tmp_path / "cache", rows, model, (1,))
