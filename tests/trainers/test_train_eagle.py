"""EAGLE training: features are foretold at every place as drafting will do it; noise belongs to a row and a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from eagle_lessons import DECAY, LENGTH, SHARE, Scene, scene
from method_runs import as_slowly, decoded, eagle_trainer, rolled_out, written
from safetensors import safe_open
from tiny import tiny
from torch import Tensor
from train_runs import Pad, texts

from hf_specgen.loading import load_drafter
from hf_specgen.trainers.data import DraftCollator
from hf_specgen.trainers.eagle import feature_noise
from hf_specgen.trainers.losses import Objective
from hf_specgen.trainers.warm_start import new_drafter

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias and two layers": {"fc_bias": True, "num_hidden_layers": 2},
    "window": {"sliding_window": 4, "own_embedding": True},
}


def slowly(scene: Scene, steps: int) -> tuple[Tensor, Tensor]:
    """Return loss and counts from single drafts and plain autograd."""
    loss, counts = torch.zeros((), dtype=torch.float64), torch.zeros(steps, 4)
    for row in range(2):
        for pair in range(scene.ids.shape[1] - 2):
            alive = True
            for step, state in enumerate(
                rolled_out(scene.drafter, scene.ids[row : row + 1], scene.features[row : row + 1, : pair + 1], steps)
            ):
                ahead = pair + 2 + step
                if not scene.mask[row, ahead]:
                    alive = False
                    continue
                wanted = scene.last[row, ahead - 1]
                q, p = scene.drafter.logits(state).log_softmax(-1), (scene.head @ wanted).softmax(-1)
                loss = loss + DECAY**step * (F.smooth_l1_loss(state, wanted) + SHARE * (p * (p.log() - q)).sum())
                hit = bool(q.argmax() == p.argmax())
                alive = alive and hit
                counts[step] += torch.tensor([1.0, hit, float(torch.minimum(p, q.exp()).sum().detach()), alive])
    return loss, counts


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_forward_is_the_real_rollout(variant: str, steps: int) -> None:
    """Loss, counts and every gradient equal those of drafting behind each place by itself."""
    one = scene(**VARIANTS[variant])
    as_slowly(one.drafter, one.forward(steps=steps), lambda: slowly(one, steps), near=1e-6, gradients=(1e-4, 1e-5))


def test_both_losses_count() -> None:
    """Negative control: features alone, and features moved by one, give other losses; the head's share is linear."""
    one = scene()
    none, some, more = (float(one.forward(share=share).loss_sum.detach()) for share in (0.0, 0.1, 0.2))
    assert some - none == pytest.approx(more - some) and some - none > 1e-2
    one.last = one.last.roll(1, 1)
    assert abs(float(one.forward(share=0.0).loss_sum.detach()) - none) > 1e-2


def test_evaluation_looks_further() -> None:
    """With rates the counts reach further than the steps that are trained; the loss stays."""
    one = scene()
    short, far = one.forward(), one.forward(wants_rates=True, told_steps=3)
    torch.testing.assert_close(far.loss_sum, short.loss_sum)
    torch.testing.assert_close(far.counts, slowly(one, 3)[1], rtol=1e-5, atol=1e-5)
    assert far.rates.shape == (2, LENGTH, 3) and short.rates is None and short.counts.shape == (1, 4)


def test_packed_texts_are_as_if_alone() -> None:
    """Two texts in one row give the sum of what each gives; without documents they mix."""
    one = scene()
    wide = (one.features.view(1, 2 * LENGTH, -1), one.last.view(1, 2 * LENGTH, -1))
    packed = Scene(one.drafter, one.ids.view(1, -1), *wide, one.mask.view(1, -1), one.head)
    documents = torch.arange(2).repeat_interleave(LENGTH)[None]
    apart, together = one.forward(steps=2), packed.forward(steps=2, document_ids=documents)
    torch.testing.assert_close(together.loss_sum, apart.loss_sum, rtol=1e-6, atol=0)
    torch.testing.assert_close(together.counts, apart.counts)
    assert abs(float((packed.forward(steps=2).loss_sum - together.loss_sum).detach())) > 1e-3


def test_nothing_to_learn_is_connected_to_everything() -> None:
    """A batch without supervised tokens has loss 0 and a gradient of zeros for every parameter."""
    one = scene()
    one.mask[:] = False
    output = one.forward(steps=2)
    output.loss_sum.backward()
    assert float(output.loss_sum.detach()) == 0.0 and not output.counts.any()
    for name, part in one.drafter.named_parameters():
        assert part.grad is not None and not part.grad.any(), name


@pytest.mark.parametrize("length", [1, 2, 3])
def test_short_texts_and_weights(length: int) -> None:
    """Texts shorter than a draft are read, too; the weight of a token scales both parts of its loss."""
    one = scene(length)
    one.mask[:] = True
    output, twice = one.forward(steps=2), one.forward(steps=2, weights=torch.full(one.ids.shape, 2.0))
    assert output.counts[:, 0].tolist() == [2.0 * max(0, length - 2 - step) for step in range(2)]
    torch.testing.assert_close(twice.loss_sum, 2 * output.loss_sum)


def batch_of(rows: list[dict[str, Any]], **settings: Any) -> dict[str, Any]:
    return DraftCollator(**settings)(rows)


def test_noise_belongs_to_row_and_step() -> None:
    """It is the same alone and beside longer rows, with the collator's seeds and without; another one at every step."""
    rows = texts(4)
    lengths = [len(row["input_ids"]) for row in rows]
    together = batch_of(rows, seeds=True, multiple_of=8)
    noise = feature_noise(together, torch.zeros(*together["input_ids"].shape, 32), 3)
    for place, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        alone = feature_noise(batch_of([row]), torch.zeros(1, length, 32), 3)
        assert torch.equal(noise[place, :length], alone[0]) and not noise[place, length:].any()
        assert float(alone.abs().max()) <= 256 / length < 1.1 * float(alone.abs().max())
        assert abs(float(alone.mean())) < 4 * 512 / length / (12 * 32 * length) ** 0.5
    assert not torch.equal(noise, feature_noise(together, torch.zeros_like(noise), 4))
    assert not torch.equal(noise[0, :5], noise[1, :5])
    before = torch.get_rng_state()
    feature_noise(together, torch.zeros_like(noise), 3)
    assert torch.equal(before, torch.get_rng_state())


def test_noise_of_packed_texts() -> None:
    """Each text in a row has the width of its own length."""
    row = {"input_ids": list(range(1, 49)), "loss_mask": [1] * 48, "lengths": [8, 40]}
    noise = feature_noise(batch_of([row]), torch.zeros(1, 48, 32), 0)
    widths = [float(part.abs().max()) for part in (noise[:, :8], noise[:, 8:])]
    assert widths == pytest.approx([256 / 8, 256 / 40], rel=0.1)


def test_noise_is_for_training_alone(tmp_path: Path) -> None:
    """Features in evaluation are the target's; the features that are wanted never carry noise."""
    trainer, batch = eagle_trainer(tmp_path), Pad()(texts(3))
    trainer.drafter.train()
    noisy = trainer.features(batch)
    trainer.drafter.eval()
    clean = trainer.features(batch)
    assert torch.equal(clean["features"][0], clean["last_hidden"]) and torch.equal(
        noisy["last_hidden"], clean["last_hidden"]
    )
    added = (noisy["features"][0] - clean["features"][0]) * batch["attention_mask"][..., None]
    torch.testing.assert_close(
        added, trainer.args.noise * feature_noise(batch, clean["last_hidden"], 0), rtol=1e-4, atol=1e-5
    )
    trainer.args.noise = 0.0
    trainer.drafter.train()
    assert torch.equal(trainer.features(batch)["features"][0], clean["last_hidden"])


def test_only_the_drafter_is_saved(tmp_path: Path) -> None:
    """The file holds the drafter's tensors, not the target's head, and what is loaded from it is what was trained."""
    trainer = eagle_trainer(tmp_path, max_steps=2)
    before = trainer.drafter.fc.weight.detach().clone()
    trainer.train()
    trainer.save_model()
    with safe_open(tmp_path / "model.safetensors", "pt") as saved:
        assert set(saved.keys()) == set(trainer.drafter.state_dict()) and "lm_head.weight" not in saved.keys()
    loaded = load_drafter(tmp_path, target=trainer.target.model)
    assert torch.equal(loaded.fc.weight, trainer.drafter.fc.weight) and not torch.equal(loaded.fc.weight, before)


@pytest.mark.slow
def test_a_drafter_learns_a_text_by_heart(tmp_path: Path) -> None:
    """Evaluation tells the acceptance length of decoding exactly, before, half-way and when the text is known."""
    model = tiny()
    rows = written(model, 3)
    settings = {"share": 1.0, "noise": 0.01, "told_steps": 4, "steps": 2}
    trainer = eagle_trainer(tmp_path, rows, logging_steps=500, learning_rate=3e-3, **settings)
    trainer.eval_dataset = rows
    trainer.drafter.config.tree, trainer.drafter.config.num_tokens = "chain", 4
    found = []
    for steps in (0, 40, 150):
        trainer.args.max_steps = steps
        if steps:
            trainer.train()
        found.append(trainer.evaluate()["eval_acceptance_length"])
        assert found[-1] == pytest.approx(decoded(model, trainer.drafter, rows), abs=1e-9)
    assert found[0] < 1.5 < found[1] < found[2] and found[2] > 4


def test_a_new_drafter_has_the_targets_layer() -> None:
    """The warm start fits the training forward: no head of its own, features of the target's size."""
    model = tiny()
    drafter, notes = new_drafter("eagle", model)
    drafter.attach(model)
    one = scene()
    output = drafter(one.ids, (one.last.float(),), one.last.float(), one.mask, Objective("kl"), one.head.float())
    assert output.counts[0, 0] > 0 and any("layer" in note for note in notes)
