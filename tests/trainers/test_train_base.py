"""DrafterTrainer in one process: what is counted, saved and refused, beside twins that do it wrong."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import train_runs as runs
from safetensors import safe_open
from tiny import build, tiny
from train_runs import Pad, arguments, eagle3, eagle3_trainer, record, texts
from transformers import TrainingArguments

from hf_specgen import SpecGenError
from hf_specgen.errors import UnsupportedTarget
from hf_specgen.loading import load_drafter
from hf_specgen.models.taps import FINAL
from hf_specgen.trainers import base
from hf_specgen.trainers.base import DrafterTrainer, DrafterTrainingArguments, StopOnNaN
from hf_specgen.trainers.eagle3 import Eagle3Arguments, Eagle3Trainer
from hf_specgen.trainers.frozen import FrozenTarget

NEAR = 1e-6


def gap(one: list[float], other: list[float]) -> float:
    assert len(one) == len(other)
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


class MeanPerBatch(Eagle3Trainer):
    """The twin: every batch divides by its own count, and nobody divides by the number of batches."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **unused: Any) -> Any:
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch=None)


def steps_of(kind: type[Eagle3Trainer], folder: Path, **settings: Any) -> dict[str, Any]:
    drafter, model = eagle3()
    args = arguments(Eagle3Arguments, folder, steps=2, max_steps=3, **settings)
    trainer = kind(drafter, model, args, data_collator=Pad(), train_dataset=texts())
    trainer.train()
    return record(trainer)


def test_accumulated_batches_are_one_batch(tmp_path: Path) -> None:
    """Eight rows at once and four times two give the same losses, gradients and weights; a mean per batch does not."""
    layouts = [{"per_device_train_batch_size": 8}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}]
    one, four = (steps_of(Eagle3Trainer, tmp_path, **layout) for layout in layouts)
    for name in ("loss", "grad_norm", "weights"):
        assert gap(one[name], four[name]) < NEAR, name
    wrong = steps_of(MeanPerBatch, tmp_path, **layouts[1])
    assert wrong["loss"][0] > 3.5 * one["loss"][0] and wrong["grad_norm"][0] > 3 * one["grad_norm"][0]


@pytest.mark.slow
def test_sequences_may_weigh_the_same(tmp_path: Path) -> None:
    """With ``loss_reduction="sequence"`` accumulation changes nothing either, and the loss is another one."""
    layouts = [{"per_device_train_batch_size": 8}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}]
    one, four = (steps_of(Eagle3Trainer, tmp_path, loss_reduction="sequence", **layout) for layout in layouts)
    assert gap(one["loss"], four["loss"]) < NEAR and gap(one["weights"], four["weights"]) < NEAR
    assert abs(one["loss"][0] - steps_of(Eagle3Trainer, tmp_path, **layouts[0])["loss"][0]) > 1e-3
    mask = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 1]])
    each = base.sequence_weights(mask, torch.tensor([[0, 0, 0, 1, 1, 1, -1, -1]]))
    assert each.tolist() == [[0, 0.5, 0.5, 0, 0.5, 0.5, 0.5, 0.5]]
    assert base.sequence_weights(mask, None).sum() == 1 and base.sequence_weights(mask * 0, None).sum() == 0


def test_resuming_changes_no_bit(tmp_path: Path) -> None:
    """Ten steps, and five steps and five more from the checkpoint, give the same traces and the same weights."""
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "save_strategy": "steps"}
    settings |= {"max_steps": 10, "save_steps": 5}
    trainer = eagle3_trainer(tmp_path, **settings)
    trainer.train()
    whole = record(trainer)
    resumed = eagle3_trainer(tmp_path, **settings)
    with torch.no_grad():
        for part in resumed.drafter.parameters():
            part.add_(1)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    again = record(resumed)
    assert again["weights"] == whole["weights"]
    assert again["loss"] == whole["loss"] and again["grad_norm"] == whole["grad_norm"]
    (tmp_path / "checkpoint-5" / "optimizer.pt").unlink()  # the twin: moments lost
    lost = eagle3_trainer(tmp_path, **settings)
    lost.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert record(lost)["weights"] != whole["weights"]


def test_only_the_drafter_is_trained_and_saved(tmp_path: Path) -> None:
    """The checkpoint holds the drafter's tensors and no other; the target's weights, and frozen ones, stay."""
    drafter, model = eagle3(own_embedding=True)
    before = copy.deepcopy(model.state_dict())
    embedding = drafter.embed_tokens.weight.detach().clone()
    args = arguments(Eagle3Arguments, tmp_path, steps=2, max_steps=2, save_strategy="steps", save_steps=2)
    trainer = Eagle3Trainer(drafter, model, args, data_collator=Pad(), train_dataset=texts())
    trainer.train()
    folder = tmp_path / "checkpoint-2"
    with safe_open(folder / "model.safetensors", "pt") as saved:
        assert set(saved.keys()) == set(drafter.state_dict())
        held = sum(saved.get_tensor(name).nbytes for name in saved.keys())
    assert (folder / "model.safetensors").stat().st_size < held + 8000
    assert all(torch.equal(before[name], part) for name, part in model.state_dict().items())
    assert torch.equal(embedding, drafter.embed_tokens.weight)
    assert not any(part.requires_grad for part in model.parameters())
    assert model not in trainer.accelerator._models and model not in list(drafter.modules())
    loaded = load_drafter(folder, target=model)
    assert all(torch.equal(part, drafter.state_dict()[name]) for name, part in loaded.state_dict().items())
    told = json.loads((folder / "config.json").read_text())["specgen"]["target"]
    assert told["hidden_size"] == 32 and told["num_layers"] == 3 and len(told["fingerprint"]) == 16


def test_the_card_names_the_target(tmp_path: Path) -> None:
    """The card beside a trained drafter is ours, and its base model is the target."""
    drafter, model = eagle3()
    model.config._name_or_path = "someone/tiny"
    args = arguments(Eagle3Arguments, tmp_path, steps=2)
    trainer = Eagle3Trainer(drafter, model, args, data_collator=Pad(), train_dataset=texts())
    trainer.save_model()
    trainer.create_model_card(model_name="mine")
    text = (tmp_path / "README.md").read_text()
    assert "base_model: someone/tiny" in text and "# mine" in text and "library_name: hf_specgen" in text


@pytest.mark.parametrize("size", [1, 2, 5])
def test_evaluation_weighs_tokens(size: int, tmp_path: Path) -> None:
    """The evaluation's loss is the sum over all supervised tokens by their number, however rows are batched."""
    trainer = eagle3_trainer(tmp_path, per_device_eval_batch_size=size)
    found = trainer.evaluate()
    batch = Pad()(texts(5))
    with torch.no_grad():
        output = trainer.run(trainer.drafter, batch)
    assert abs(found["eval_loss"] - float(output.loss_sum / batch["num_items"])) < 1e-5
    pairs, hits, alpha, _ = output.counts[1].tolist()
    assert abs(found["eval_top1_2"] - hits / pairs) < 1e-6 and abs(found["eval_alpha_2"] - alpha / pairs) < 1e-6
    if size == 1:  # the twin: the mean of the batches' means
        means = []
        for row in texts(5):
            one = Pad()([row])
            with torch.no_grad():
                means.append(float(trainer.run(trainer.drafter, one).loss_sum / one["num_items"]))
        assert abs(sum(means) / 5 - found["eval_loss"]) > 1e-3


def test_evaluation_at_a_temperature(tmp_path: Path) -> None:
    """Texts sampled at a temperature are judged by both laws at it; best ids and the training loss stay."""
    cold, warm = (eagle3_trainer(tmp_path, eval_temperature=value) for value in (0.0, 2.0))
    objective, one, other = warm.objective, cold.evaluate(), warm.evaluate()
    assert one["eval_top1_1"] == other["eval_top1_1"] and abs(one["eval_alpha_1"] - other["eval_alpha_1"]) > 1e-2
    assert warm.objective is objective and objective.temperature == 1.0


def test_rows_that_were_repeated_do_not_count(tmp_path: Path) -> None:
    """At the end of the data, rows beyond the remainder lose their supervision, and the count is made anew."""
    trainer = eagle3_trainer(tmp_path)
    batch = Pad()(texts(4))
    assert trainer._once(batch) is batch
    state = trainer.accelerator.gradient_state

    class End:
        end_of_dataloader, remainder = True, 3

    state._add_dataloader(End)
    cut = trainer._once(batch)
    assert not cut["loss_mask"][3].any() and torch.equal(cut["loss_mask"][:3], batch["loss_mask"][:3])
    assert float(trainer.count(cut)) == float(batch["loss_mask"][:3].sum())
    state._remove_dataloader(End)


def test_a_step_that_is_not_finite_stops_the_training(tmp_path: Path) -> None:
    """NaN is met before the weights are touched; without the check they are NaN, and with the filter the log says 0."""

    def spoil(trainer: DrafterTrainer) -> None:
        run, calls = trainer.run, []

        def spoiled(*args: Any, **more: Any) -> Any:
            calls.append(1)
            output = run(*args, **more)
            return output._replace(loss_sum=output.loss_sum * torch.nan) if len(calls) == 3 else output

        trainer.run = spoiled

    trainer = eagle3_trainer(tmp_path, max_steps=6)
    spoil(trainer)
    with pytest.raises(SpecGenError, match="step 3 is not finite"):
        trainer.train()
    assert all(bool(part.isfinite().all()) for part in trainer.drafter.parameters())
    twin = eagle3_trainer(tmp_path, max_steps=6, logging_nan_inf_filter=True)
    twin.remove_callback(StopOnNaN)
    spoil(twin)
    twin.train()
    assert not any(bool(part.isfinite().all()) for part in twin.drafter.parameters() if part.grad is not None)
    assert all(loss == loss for loss in record(twin)["loss"])


def test_what_is_logged(tmp_path: Path) -> None:
    """Agreement since the last log, per drafted token, stands beside the loss."""
    trainer = eagle3_trainer(tmp_path, max_steps=4, logging_steps=2, learning_rate=0.0)
    seen = []
    run = trainer.run
    trainer.run = lambda *args, **more: (seen.append(run(*args, **more)), seen[-1])[1]
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    counts = sum(output.counts for output in seen[2:]).tolist()
    for depth, (pairs, hits, alpha, alive) in enumerate(counts):
        told = [logs[1][f"{name}_{depth + 1}"] for name in ("top1", "alpha", "prefix")]
        assert gap(told, [hits / pairs, alpha / pairs, alive / pairs]) < 1e-6


def test_defaults_and_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments are safe as they come, and what cannot work is refused with a reason."""
    args = Eagle3Arguments(output_dir=str(tmp_path), use_cpu=True)
    assert not (args.remove_unused_columns or args.logging_nan_inf_filter or args.ddp_find_unused_parameters)
    with pytest.raises(SpecGenError, match="label_smoothing_factor"):
        DrafterTrainingArguments(output_dir=str(tmp_path), use_cpu=True, label_smoothing_factor=0.1)
    with pytest.raises(SpecGenError, match="'token' or 'sequence'"):
        DrafterTrainingArguments(output_dir=str(tmp_path), use_cpu=True, loss_reduction="mean")
    with pytest.raises(SpecGenError, match="not known"):
        eagle3_trainer(tmp_path, loss="mse")
    drafter, model = eagle3()
    monkeypatch.setenv("WORLD_SIZE", "2")  # as in a process whose arguments do not know of the others
    with pytest.raises(SpecGenError, match="2 processes were started"):
        Eagle3Trainer(drafter, model, args)


def test_what_the_target_says(tmp_path: Path) -> None:
    """Features are the boundaries that the drafter asked for; the head explains the target's logits, factor and all."""
    ids = torch.tensor([[5, 9, 2, 44, 7]])
    for family in ("llama", "cohere2", "gemma2"):
        more = {"logit_scale": 0.25} if family == "cohere2" else {}
        more |= {"final_logit_softcapping": 2.0} if family == "gemma2" else {}
        model = build(family, "eager", **more)
        target = FrozenTarget(model, (0, 2, 1), torch.device("cpu"))
        features, last = target.read({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        with torch.no_grad():
            whole = model(ids, output_hidden_states=True)
        assert torch.equal(features[0], whole.hidden_states[0]) and torch.equal(features[2], whole.hidden_states[1])
        logits = last @ target.head.T
        logits = target.softcap * (logits / target.softcap).tanh() if target.softcap else logits
        torch.testing.assert_close(logits, whole.logits, rtol=1e-4, atol=1e-4)
        assert (family == "cohere2") is (not torch.equal(target.head, model.get_output_embeddings().weight))
    model = tiny()
    model.lm_head = torch.nn.Linear(32, 64)
    with torch.no_grad(), pytest.raises(UnsupportedTarget, match="a bias"):
        FrozenTarget(model, (1,), torch.device("cpu")).read({"input_ids": ids})


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "gpt2", "mistral"])
def test_padding_on_the_right_needs_no_mask(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts padded on the right are read as if alone, without a mask; padded on the left with one."""
    model, masks = build(family), []

    def see(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        masks.append(kwargs.get("attention_mask"))

    model.register_forward_pre_hook(see, with_kwargs=True)
    target = FrozenTarget(model, (1,), torch.device("cpu"))
    ids, mask = torch.randint(1, 64, (2, 14)), torch.ones(2, 14, dtype=torch.long)
    mask[1, 9:] = 0
    features, last = target.read({"input_ids": ids, "attention_mask": mask})
    assert masks[-1] is None
    alone, alone_last = target.read({"input_ids": ids[1:, :9]})
    torch.testing.assert_close(features[0][1, :9], alone[0][0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last[1, :9], alone_last[0], rtol=1e-4, atol=1e-5)
    _, left = target.read({"input_ids": ids.roll(5, 1), "attention_mask": mask.roll(5, 1)})
    assert torch.equal(masks[-1], mask.roll(5, 1))
    if family != "gpt2":  # its positions are learned: padding on the left is for rotary ones
        torch.testing.assert_close(left[1, 5:], last[1, :9], rtol=1e-4, atol=1e-4)


def test_the_last_states_reach_the_head_as_one_block() -> None:
    """A slice of them is not contiguous: torch would copy the head's whole weight for every row, in every step."""
    model, seen = build("llama"), []
    model.lm_head.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    target = FrozenTarget(model, (1,), torch.device("cpu"))
    for _ in range(2):  # the first one is checked
        target.read({"input_ids": torch.randint(1, 64, (3, 14))})
    assert [(part.shape[:2], part.is_contiguous()) for part in seen] == [((3, 1), True)] * 2


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "gpt2", "mistral"])
def test_packed_texts_stay_apart_in_the_target(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts in one row are read as if alone; a target that mixes them is noticed."""
    model = build(family)
    target = FrozenTarget(model, (1,), torch.device("cpu"))
    ids = torch.randint(1, 64, (2, 14))
    documents = torch.tensor([[0] * 5 + [1] * 7 + [-1] * 2, [0] * 14])
    features, last = target.read({"input_ids": ids, "document_ids": documents})
    for row, part in ((0, slice(0, 5)), (0, slice(5, 12)), (1, slice(0, 14))):
        alone, alone_last = target.read({"input_ids": ids[row : row + 1, part]})
        torch.testing.assert_close(features[0][row, part], alone[0][0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(last[row, part], alone_last[0], rtol=1e-4, atol=1e-5)
    mixed = FrozenTarget(model, (1,), torch.device("cpu"))
    monkeypatch.setattr("hf_specgen.trainers.frozen.places", lambda documents: torch.arange(14).expand_as(documents))
    with pytest.raises(UnsupportedTarget, match="packed texts see each other"):
        mixed.read({"input_ids": ids, "document_ids": documents})


def test_packing_trains_the_same_drafter(tmp_path: Path) -> None:
    """All texts in one row give the loss of one text a row."""
    from hf_specgen.trainers.data import DraftCollator

    rows = texts(4)
    trainer = eagle3_trainer(tmp_path)
    packed = {name: [item for row in rows for item in row[name]] for name in ("input_ids", "loss_mask")}
    packed["lengths"] = [len(row["input_ids"]) for row in rows]
    collate = DraftCollator()
    with torch.no_grad():
        apart, together = (trainer.run(trainer.drafter, collate(part)) for part in (rows, [packed]))
    torch.testing.assert_close(together.loss_sum, apart.loss_sum, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(together.counts, apart.counts)


@pytest.mark.slow
def test_sixteen_bits(tmp_path: Path) -> None:
    """bf16 computes in 16 bits and keeps the weights in 32: the loss stays near."""
    exact = eagle3_trainer(tmp_path, max_steps=3)
    exact.train()
    rough = eagle3_trainer(tmp_path, max_steps=3, bf16=True)
    rough.train()
    assert {part.dtype for part in rough.drafter.parameters()} == {torch.float32}
    losses = record(exact)["loss"], record(rough)["loss"]
    assert 0 < gap(*losses) < 0.03


def test_the_trainer_is_transformers_own(tmp_path: Path) -> None:
    """The best checkpoint by a figure of ours is kept, and arguments are a TrainingArguments."""
    trainer = eagle3_trainer(
        tmp_path,
        max_steps=4,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_alpha_1",
        greater_is_better=True,
    )
    assert isinstance(trainer.args, TrainingArguments) and FINAL not in trainer.target.boundaries
    trainer.train()
    scores = [entry["eval_alpha_1"] for entry in trainer.state.log_history if "eval_alpha_1" in entry]
    assert len(scores) == 2 and trainer.state.best_metric == max(scores)
    assert abs(trainer.evaluate()["eval_alpha_1"] - max(scores)) < 1e-6
    assert runs.VOCAB == 64
