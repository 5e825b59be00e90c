"""The feature cache: what is read back is what the target says, for this target only. Counts for a small vocabulary."""

from __future__ import annotations

import json
import multiprocessing
import pickle
import resource
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_calls import fine, refused, save
from datasets import Dataset
from fitted import untrained
from tiny import build, tiny
from torch import Tensor
from transformers import AutoModelForCausalLM

from hf_specgen.errors import IncompatibleDrafter, SpecGenError, UnsupportedTarget
from hf_specgen.models.facts import TargetFacts
from hf_specgen.models.taps import FINAL
from hf_specgen.trainers.data import DataOptions, DraftCollator, prepare_dataset
from hf_specgen.trainers.eagle3 import Eagle3Arguments, Eagle3Trainer
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


def test_what_is_stored_is_bit_by_bit_what_is_said(tmp_path: Path) -> None:
    """Texts of one length are batched alike when a cache is written and when a target is read: nothing is rounded."""
    model = tiny(layers=3)
    rows = Dataset.from_list([{"input_ids": list(range(i, i + 9)), "loss_mask": [True] * 9} for i in range(1, 5)])
    write_cache(tmp_path, rows, model, BOUNDARIES, CacheOptions(batch_size=4))
    cache = FeatureCache.open(tmp_path, TargetFacts.of(model), BOUNDARIES)
    batch = DraftCollator(cache=cache)(list(cache.rows()))
    features, last = FrozenTarget(model, BOUNDARIES, CPU).read(batch)
    assert torch.equal(batch["last_hidden"], last)
    assert all(torch.equal(stored, live) for stored, live in zip(batch["features"], features, strict=True))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_head_is_looked_at_though_the_target_is_not_run(tmp_path: Path, dtype: torch.dtype | None) -> None:
    """What a target does behind its head, and which target wrote the states, is found out from one row."""
    model, rows = build("cohere2", logit_scale=0.25), texts()
    write_cache(tmp_path, rows, model, (1,), CacheOptions(dtype=dtype))
    cache = FeatureCache.open(tmp_path, TargetFacts.of(model), (1,))
    batch = DraftCollator(cache=cache)(list(cache.rows()))
    live = FrozenTarget(model, (1,), CPU)
    live.read(batch)
    stored = FrozenTarget(model, (1,), CPU)
    stored.compare(batch)
    assert torch.equal(stored.head, live.head)
    assert not torch.equal(stored.head, model.get_output_embeddings().weight)
    facts = TargetFacts.of(model)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.mul_(1.5)
    assert TargetFacts.of(model) == facts, "fine-tuned: embedding and head are the same"
    with pytest.raises(IncompatibleDrafter, match="another target wrote them"):
        FrozenTarget(model, (1,), CPU).compare(batch)
    biased = tiny()
    biased.lm_head = torch.nn.Linear(32, 64)
    features = {"features": (torch.zeros(1, 3, 32),), "last_hidden": torch.zeros(1, 3, 32)}
    with torch.no_grad(), pytest.raises(UnsupportedTarget, match="a bias"):
        FrozenTarget(biased, (1,), CPU).compare({"input_ids": torch.tensor([[5, 9, 2]]), **features})


def test_a_trainer_compares_the_first_batch_of_a_cache(tmp_path: Path) -> None:
    model, rows = tiny(layers=3), texts()
    write_cache(tmp_path / "cache", rows, model, (1, 2, 3))
    cache = FeatureCache.open(tmp_path / "cache", TargetFacts.of(model), (1, 2, 3))
    drafter, _ = new_drafter("eagle3", model, aux_layer_boundaries=[1, 2, 3])
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(9)
    args = Eagle3Arguments(str(tmp_path / "out"), use_cpu=True, report_to=[], max_steps=1, steps=2)
    trainer = Eagle3Trainer(drafter, model, args, DraftCollator(cache=cache), train_dataset=cache.rows())
    with pytest.raises(IncompatibleDrafter, match="another target wrote them"):
        trainer.train()


def test_damaged_files_are_refused_when_a_cache_is_opened(tmp_path: Path) -> None:
    model, rows = tiny(layers=3), texts()
    folder = tmp_path / "cache"
    options = CacheOptions(shard_bytes=4 * 4 * 32 * 16, batch_size=2)
    write_cache(folder, rows, model, BOUNDARIES, options)
    facts, (first, second, *_) = TargetFacts.of(model), sorted(folder.glob("*.safetensors"))
    kept = second.read_bytes()
    second.write_bytes(kept[:-40])
    with pytest.raises(SpecGenError, match=r"features-00001.safetensors cannot be read.*cut off"):
        FeatureCache.open(folder, facts, BOUNDARIES)
    second.write_bytes(first.read_bytes())
    with pytest.raises(SpecGenError, match=r"features-00001.safetensors is not the file that was written"):
        FeatureCache.open(folder, facts, BOUNDARIES)
    second.unlink()
    with pytest.raises(SpecGenError, match=r"features-00001.safetensors cannot be read"):
        FeatureCache.open(folder, facts, BOUNDARIES)
    second.write_bytes(kept)
    cache = FeatureCache.open(folder, facts, BOUNDARIES)
    stored = cache.rows()
    with pytest.raises(SpecGenError, match="row 1 has 7 tokens and the feature cache holds the states of 3"):
        DraftCollator(cache=cache)([{**stored[0], "features_row": 1}])


def test_a_stopped_cache_is_written_anew_by_one_process(tmp_path: Path) -> None:
    model, rows = tiny(layers=3), texts()
    folder, options = tmp_path / "cache", CacheOptions(shard_bytes=1, batch_size=1)

    def stop(done: int, total: int, label: str) -> None:
        if done == 3:
            with ThreadPoolExecutor(1) as other, pytest.raises(SpecGenError, match="written by another process"):
                other.submit(write_cache, folder, rows, model, BOUNDARIES).result()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_cache(folder, rows, model, BOUNDARIES, options, stop)
    with pytest.raises(SpecGenError, match="no finished feature cache"):
        FeatureCache.open(folder, TargetFacts.of(model), BOUNDARIES)
    assert len(list(folder.glob("*.safetensors"))) == 3
    cache = write_cache(folder, rows, model, BOUNDARIES)
    assert len(list(folder.glob("*.safetensors"))) == 1 and not list(folder.glob("*.part"))
    again = write_cache(tmp_path / "again", cache.rows(), model, (FINAL,))  # the texts of a cache, for another drafter
    assert again.rows()["features_row"][:] == list(range(len(rows)))


def test_a_full_disk_leaves_no_cache(tmp_path: Path) -> None:
    model, rows = tiny(layers=3), texts()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))
    try:
        with pytest.raises(SpecGenError, match=r"features-00000.safetensors cannot be written"):
            write_cache(tmp_path, rows, model, BOUNDARIES)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / MANIFEST).exists()


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
    with pytest.raises(SpecGenError, match="token id 7 and the target 6 ids"):
        count_supervised(rows_of(([7], [1])), 6)


def _count_my_part(place: int, folder: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=place, world_size=2)
    rows = rows_of(([3, 3, 5], [0, 1, 1])) if place == 0 else rows_of(([5, 5, 1], [1, 1, 1]), ([2], [0]))
    total = summed_over_processes(count_supervised(rows, 8))
    offsets, _ = choose_vocabulary(total, 2, always=(7,))
    (folder / str(place)).write_text(json.dumps([total.tolist(), offsets.tolist()]))
    torch.distributed.destroy_process_group()


def test_processes_count_their_parts_and_choose_alike(tmp_path: Path) -> None:
    assert torch.equal(summed_over_processes(torch.tensor([1, 2])), torch.tensor([1, 2])), "alone"
    fork = multiprocessing.get_context("fork")
    children = [fork.Process(target=_count_my_part, args=(place, tmp_path)) for place in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    first, second = (json.loads((tmp_path / str(place)).read_text()) for place in range(2))
    assert first == second == [[0, 1, 0, 1, 0, 3, 0, 0], [5, 6]]
    alone = count_supervised(rows_of(([3, 3, 5], [0, 1, 1])), 8)
    assert choose_vocabulary(alone, 2, always=(7,))[0].tolist() == [3, 6], "its own part alone says something else"


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
    # fewer ids are seen than asked for: padded rows of the embedding, which stand last, come last
    offsets, known = choose_vocabulary(torch.tensor([0, 0, 0, 4, 0, 0]), 4, always=(4,))
    assert (offsets + torch.arange(4)).tolist() == [0, 1, 3, 4] and int(known.sum()) == 4


@pytest.mark.parametrize(
    ("size", "always", "message"),
    [(0, (), "0 ids was asked for"), (9, (), "the target has 8"), (1, (2, 3), "2 special ids"), (3, (8,), "not all")],
)
def test_sizes_that_cannot_be_are_refused(size: int, always: tuple[int, ...], message: str) -> None:
    with pytest.raises(SpecGenError, match=message):
        choose_vocabulary(torch.ones(8, dtype=torch.long), size, always)
