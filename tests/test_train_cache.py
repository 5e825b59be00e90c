"""The feature cache: what is read back is what the target says, for this target only. Counts for a small vocabulary."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from fitted import untrained
from test_cli import fine, refused, save
from tiny import tiny
from torch import Tensor
from transformers import AutoModelForCausalLM

from hf_specgen.errors import IncompatibleDrafter, SpecGenError
from hf_specgen.facts import TargetFacts
from hf_specgen.taps import FINAL
from hf_specgen.trainers.data import DataOptions, DraftCollator, prepare_dataset
from hf_specgen.trainers.feature_cache import MANIFEST, CacheOptions, FeatureCache, write_cache
from hf_specgen.trainers.frozen import FrozenTarget
from hf_specgen.trainers.losses import Objective
from hf_specgen.trainers.vocabulary import choose_vocabulary, count_supervised, coverage, summed_over_processes
from hf_specgen.trainers.warm_start import default_boundaries, new_drafter

BOUNDARIES = (2, 1, 3)  # not in order: the drafter's order counts
CPU = torch.device("cpu")


def texts(packing: bool = False) -> Any:
    torch.manual_seed(5)
    lengths = (7, 3, 12, 5, 9, 4)
    rows = [torch.randint(1, 64, (length,)).tolist() for length in lengths]
    data = Dataset.from_list([{"input_ids": row, "loss_mask": [i > 0 for i in range(len(row))]} for row in rows])
    return prepare_dataset(data, options=DataOptions(packing=packing, max_length=16))


def online(model: Any, row: dict) -> tuple[tuple[Tensor, ...], Tensor]:
    features, last = FrozenTarget(model, BOUNDARIES, CPU).read(DraftCollator()([row]))
    return tuple(layer[0] for layer in features), last[0]


@pytest.mark.parametrize("packing", [False, True], ids=["single", "packed"])
def test_what_is_read_is_what_the_target_says(tmp_path: Path, packing: bool) -> None:
    model, rows = tiny(layers=3).double(), texts(packing)  # rounding would depend on how rows are batched
    shown: list[tuple[int, int, str]] = []
    options = CacheOptions(batch_size=2, shard_bytes=4 * 8 * 32 * 16, notes={"max_length": 16})
    written = write_cache(tmp_path, rows, model, BOUNDARIES, options, lambda *step: shown.append(step))
    cache = FeatureCache.open(tmp_path, TargetFacts.of(model), BOUNDARIES)
    assert len(cache) == len(written) == len(rows) and len(cache.manifest["shards"]) > 1
    assert cache.manifest["max_length"] == 16 and cache.manifest["tokens"] == sum(map(len, rows["input_ids"]))
    assert shown[-1][:2] == (len(rows), len(rows))
    stored = cache.rows()
    assert stored["features_row"][:] == list(range(len(rows))) and ("lengths" in stored.column_names) == packing
    assert prepare_dataset(stored) is stored
    for row, number in zip(stored, reversed(range(len(rows))), strict=True):
        assert row["input_ids"] == rows[row["features_row"]]["input_ids"]
        features, last = cache[number]
        wanted, wanted_last = online(model, rows[number])
        torch.testing.assert_close(last, wanted_last, rtol=1e-5, atol=1e-5)
        for found, layer in zip(features, wanted, strict=True):
            torch.testing.assert_close(found, layer, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(features[0], features[1], atol=1e-2), "the boundaries are told apart"
    with pytest.raises(IndexError):
        cache[len(rows)]


def test_a_drafter_learns_the_same_from_the_cache(tmp_path: Path) -> None:
    model, rows = tiny(layers=3), texts()
    drafter = untrained("eagle3", model, list(range(0, 64, 2)))
    drafter.attach(model)
    write_cache(tmp_path, rows, model, drafter.hidden_layers)
    cache = FeatureCache.open(tmp_path, TargetFacts.of(model), drafter.hidden_layers)
    cache = pickle.loads(pickle.dumps(cache))
    stored = cache.rows()
    batch = DraftCollator(cache=cache)([stored[i] for i in range(4)])
    head = model.get_output_embeddings().weight.detach()

    def learn(features: tuple[Tensor, ...], last: Tensor) -> tuple[Tensor, list[Tensor]]:
        drafter.zero_grad()
        fed = batch["input_ids"], features, last, batch["loss_mask"], Objective("kl"), head
        loss = drafter(*fed, steps=3).loss_sum
        loss.backward()
        return loss.detach(), [part.grad.clone() for part in drafter.parameters() if part.grad is not None]

    offline = learn(batch["features"], batch["last_hidden"])
    live = learn(*FrozenTarget(model, drafter.hidden_layers, CPU).read(batch))
    assert live[0] > 0
    torch.testing.assert_close(offline, live, rtol=1e-5, atol=1e-6)
    with pytest.raises(SpecGenError, match="name no features_row"):
        DraftCollator(cache=cache)([rows[0]])


def test_the_last_hidden_state_is_kept_once_and_16_bits_stay_16(tmp_path: Path) -> None:
    model, rows = tiny(layers=3), texts()
    tmp_path.chmod(0o750)
    write_cache(tmp_path, rows, model, (FINAL,), CacheOptions(dtype=torch.bfloat16))
    assert {path.stat().st_mode & 0o777 for path in tmp_path.glob("*.safetensors")} == {0o640}
    cache = FeatureCache.open(tmp_path, TargetFacts.of(model), (FINAL,))
    assert cache.manifest["boundaries"] == [] and cache.manifest["dtype"] == "bfloat16"
    (feature,), last = cache[2]
    assert feature.dtype == torch.bfloat16 and torch.equal(feature, last)
    torch.testing.assert_close(last, online(model, rows[2])[1].bfloat16(), rtol=1e-2, atol=1e-2)
    size = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert size < 1.5 * cache.manifest["tokens"] * 32 * 2 + 2000


def test_a_cache_of_another_target_is_refused(tmp_path: Path) -> None:
    model, rows = tiny(layers=3), texts()
    folder = tmp_path / "cache"
    write_cache(folder, rows, model, BOUNDARIES)
    facts = TargetFacts.of(model)
    with pytest.raises(IncompatibleDrafter, match=r"another target.*fingerprint"):
        FeatureCache.open(folder, TargetFacts.of(tiny(seed=1, layers=3)), BOUNDARIES)
    with pytest.raises(IncompatibleDrafter, match="num_layers 3 there and 2 here"):
        FeatureCache.open(folder, TargetFacts.of(tiny()), BOUNDARIES)
    with pytest.raises(IncompatibleDrafter, match=r"\[0\] are missing"):
        FeatureCache.open(folder, facts, (0, 1))
    assert FeatureCache.open(folder, facts, (3, FINAL)).boundaries == (3, FINAL)
    with pytest.raises(SpecGenError, match="holds a cache"):
        write_cache(folder, rows, model, BOUNDARIES)
    with pytest.raises(SpecGenError, match="no finished feature cache"):
        FeatureCache.open(tmp_path / "nothing", facts, BOUNDARIES)
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**manifest, "format": 0}))
    with pytest.raises(SpecGenError, match="format 0"):
        FeatureCache.open(folder, facts, BOUNDARIES)
    (folder / MANIFEST).unlink()
    with pytest.raises(SpecGenError, match="no finished feature cache"):
        FeatureCache.open(folder, facts, BOUNDARIES)
    shutil.rmtree(folder)


def test_the_command_writes_what_training_reads(tmp_path: Path) -> None:
    target, out = save(tmp_path / "target", seed=0, layers=7), tmp_path / "cache"
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": [5] * 4, "completion": [6] * 6}) + "\n" for _ in range(5)))
    command = ["features", "--target", target, "--data", str(data), "--limit", "4", "--max-length", "8"]
    shown = fine(*command, "--out", str(out)).stdout
    assert "Wrote 4 rows with 32 tokens" in shown
    model = AutoModelForCausalLM.from_pretrained(target)
    cache = FeatureCache.open(out, TargetFacts.of(model), default_boundaries(7))
    assert cache.manifest["boundaries"] == [2, 3, 4] and cache.manifest["max_length"] == 8
    assert "holds a cache" in refused(*command, "--out", str(out))
    fine(*command, "--out", str(tmp_path / "medusa"), "--method", "medusa", "--store", "bfloat16", "--packing")
    small = FeatureCache.open(tmp_path / "medusa", TargetFacts.of(model), (FINAL,))
    assert small[0][1].dtype == torch.bfloat16 and small.manifest["boundaries"] == []
    drafter, _ = new_drafter("eagle3", model, aux_layer_boundaries=[1, 3, 6])
    drafter.save_pretrained(tmp_path / "drafter")
    fine(*command, "--out", str(tmp_path / "more"), "--init-from", str(tmp_path / "drafter"))
    assert FeatureCache.open(tmp_path / "more", TargetFacts.of(model), (1, 3, 6)).boundaries == (1, 3, 6)


# --- the vocabulary


def rows_of(*pairs: tuple[list[int], list[int]]) -> Any:
    return Dataset.from_list([{"input_ids": ids, "loss_mask": [bool(bit) for bit in mask]} for ids, mask in pairs])


def test_only_supervised_tokens_are_counted() -> None:
    rows = rows_of(([3, 3, 5], [0, 1, 1]), ([3, 7], [1, 0]))
    assert count_supervised(rows, 8).tolist() == [0, 0, 0, 2, 0, 1, 0, 0]
    assert count_supervised(rows, 8, limit=1).tolist() == [0, 0, 0, 1, 0, 1, 0, 0]
    assert count_supervised(rows.to_iterable_dataset(), 8)[3] == 2
    assert torch.equal(summed_over_processes(torch.tensor([1, 2])), torch.tensor([1, 2]))
    with pytest.raises(SpecGenError, match="token id 7 and the target 6 ids"):
        count_supervised(rows_of(([7], [1])), 6)


def test_the_most_frequent_ids_are_chosen_and_the_map_is_the_drafters() -> None:
    counts = torch.tensor([0, 9, 1, 0, 5, 5, 5, 2])
    offsets, known = choose_vocabulary(counts, 4, always=(6, 7))
    ids = offsets + torch.arange(4)
    assert ids.tolist() == [1, 4, 6, 7] and known.nonzero().flatten().tolist() == ids.tolist()
    assert offsets.dtype == torch.int64 and known.dtype == torch.bool
    assert coverage(counts, known) == pytest.approx(21 / 27)
    drafter = untrained("eagle3", tiny(vocab=8, layers=3), [1, 4], reduced=True)
    assert torch.equal(drafter.get_buffer("d2t"), offsets) and torch.equal(drafter.get_buffer("t2d"), known)
    assert choose_vocabulary(torch.zeros(5), 2)[0].tolist() == [0, 0], "of equals the lower ids"


@pytest.mark.parametrize(
    ("size", "always", "message"),
    [(0, (), "0 ids was asked for"), (9, (), "the target has 8"), (1, (2, 3), "2 special ids"), (3, (8,), "not all")],
)
def test_sizes_that_cannot_be_are_refused(size: int, always: tuple[int, ...], message: str) -> None:
    with pytest.raises(SpecGenError, match=message):
        choose_vocabulary(torch.ones(8, dtype=torch.long), size, always)
