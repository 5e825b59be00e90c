"""Medusa heads learn: what they start from, what they are judged by, and what decoding then shows."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fitted import untrained
from method_runs import as_slowly, decoded, medusa_trainer, written
from safetensors import safe_open
from tiny import build, tiny
from torch import Tensor
from train_runs import Pad, arguments, texts

from hf_specgen import SpecGenError
from hf_specgen.drafters.medusa import MedusaDrafter
from hf_specgen.loading import load_drafter
from hf_specgen.models.taps import FINAL, Taps
from hf_specgen.trainers.losses import Objective
from hf_specgen.trainers.medusa import MedusaArguments, MedusaTrainer

HEADS, DECAY, LENGTH = 3, 0.5, 10
VARIANTS: dict[str, dict[str, Any]] = {
    "own heads": {},
    "reduced": {"reduced": True},
    "two blocks": {"num_head_layers": 2, "head_bias": False},
    "target's head": {"own_head": False},
}


@dataclass
class Scene:
    """Hold heads in float64 and what their target says of two texts."""

    drafter: MedusaDrafter
    ids: Tensor
    last: Tensor
    mask: Tensor
    head: Tensor

    def forward(self, kind: str = "kl", **more: Any) -> Any:
        given = {"decay": DECAY, "wants_rates": True, **more}
        return self.drafter(self.ids, (self.last,), self.last, self.mask, Objective(kind, chunk=7), self.head, **given)


def scene(length: int = LENGTH, **settings: Any) -> Scene:
    model = tiny().double()
    drafter = untrained("medusa", model, list(range(0, 64, 2)), num_heads=HEADS, **settings)
    drafter.attach(model)
    torch.manual_seed(2)
    ids, mask = torch.randint(1, 64, (2, length)), torch.rand(2, length) < 0.7
    taps = Taps(model, (FINAL,))
    with torch.no_grad(), taps.on() as seen:
        model(ids, use_cache=False)
        (last,) = taps.read(seen, torch.device("cpu"))
    return Scene(drafter, ids, last, mask, model.get_output_embeddings().weight.detach())


def slowly(scene: Scene, kind: str) -> tuple[Tensor, Tensor]:
    """Return loss and counts from the heads' own logits at one place after another, and plain autograd."""
    drafter, rows = scene.drafter, scene.drafter.target_ids
    loss, counts = torch.zeros((), dtype=torch.float64), torch.zeros(HEADS, 4)
    for row in range(2):
        for place in range(scene.ids.shape[1]):
            alive = True
            for head in range(HEADS):
                ahead = place + 2 + head
                if ahead >= scene.ids.shape[1] or not scene.mask[row, ahead]:
                    alive = False
                    continue
                q = drafter.head(head, scene.last[row, place]).log_softmax(-1)
                whole = (scene.last[row, ahead - 1] @ scene.head.T).softmax(-1)
                label = int(scene.ids[row, ahead])
                p = whole if rows is None else whole[rows]
                if kind == "kl" and (rows is None or whole.argmax() in rows):
                    law = p / p.sum()
                    loss = loss + DECAY**head * (law * (law.log() - q)).sum()
                if kind == "ce" and (rows is None or label in rows):
                    at = label if rows is None else int((rows == label).nonzero())
                    loss = loss - DECAY**head * q[at]
                best = q.argmax() if rows is None else rows[q.argmax()]
                hit = bool(best == whole.argmax())
                alive = alive and hit
                counts[head] += torch.tensor([1.0, hit, float(torch.minimum(p, q.exp()).sum().detach()), alive])
    return loss, counts


@pytest.mark.parametrize("kind", ["kl", "ce"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_forward_is_the_heads_one_by_one(variant: str, kind: str) -> None:
    """Loss, counts and every gradient equal those of each head at each place by itself."""
    one = scene(**VARIANTS[variant])
    as_slowly(one.drafter, one.forward(kind), lambda: slowly(one, kind))


def test_a_wrong_label_is_noticed() -> None:
    """Negative control: a text moved by one token, and a mask of everything, give another loss."""
    one = scene()
    right = float(one.forward("ce").loss_sum.detach())
    moved, everything = copy.copy(one), copy.copy(one)
    moved.ids, everything.mask = one.ids.roll(1, 1), torch.ones_like(one.mask)
    for wrong in (moved, everything):
        assert abs(float(wrong.forward("ce").loss_sum.detach()) - right) > 1e-2
    other = copy.copy(one)  # tokens that nobody foretells do not matter
    other.ids = torch.where(one.mask, one.ids, 1 + one.ids % 63)
    assert not torch.equal(other.ids, one.ids) and float(other.forward("ce").loss_sum.detach()) == right


def test_the_text_alone_may_judge() -> None:
    """Without the target's law the loss is the same, hits are the text's own, and a loss that needs it is refused."""
    one = scene(reduced=True)
    whole, alone = one.forward("ce"), one.forward("ce", wants_teacher=False)
    torch.testing.assert_close(alone.loss_sum, whole.loss_sum, rtol=1e-12, atol=0)
    assert torch.equal(alone.rates.nan_to_num(-1), whole.rates.nan_to_num(-1))
    assert alone.counts[:, 1].tolist() == [float(alone.rates[..., head].nansum()) for head in range(HEADS)]
    with pytest.raises(SpecGenError, match="needs the target's"):
        one.forward("kl", wants_teacher=False)


def test_packed_texts_are_as_if_alone() -> None:
    """Two texts in one row give the sum of what each gives; without documents they mix."""
    one = scene()
    packed = Scene(one.drafter, one.ids.view(1, -1), one.last.view(1, 2 * LENGTH, -1), one.mask.view(1, -1), one.head)
    documents = torch.arange(2).repeat_interleave(LENGTH)[None]
    apart, together = one.forward(), packed.forward(document_ids=documents)
    torch.testing.assert_close(together.loss_sum, apart.loss_sum, rtol=1e-10, atol=0)
    torch.testing.assert_close(together.counts, apart.counts)
    assert abs(float((packed.forward().loss_sum - together.loss_sum).detach())) > 1e-3


@pytest.mark.parametrize("kind", ["kl", "ce"])
def test_nothing_to_learn_is_connected_to_everything(kind: str) -> None:
    """A batch without supervised tokens has loss 0 and a gradient of zeros for every parameter."""
    one = scene(reduced=True)
    one.mask[:] = False
    output = one.forward(kind, wants_teacher=kind == "kl")
    output.loss_sum.backward()
    assert float(output.loss_sum.detach()) == 0.0 and not output.counts.any()
    for name, part in one.drafter.named_parameters():
        assert part.grad is not None and not part.grad.any(), name


@pytest.mark.parametrize("length", [1, 2, 3])
def test_short_texts(length: int) -> None:
    """Texts shorter than a draft are read, too."""
    one = scene(length)
    one.mask[:] = True
    output = one.forward()
    output.loss_sum.backward()
    assert output.counts[:, 0].tolist() == [2.0 * max(0, length - 2 - head) for head in range(HEADS)]


def test_weights_scale_tokens() -> None:
    """The weight of a token scales its loss at every head and leaves the counts alone."""
    one = scene()
    base, twice = one.forward(), one.forward(weights=torch.full(one.ids.shape, 2.0))
    torch.testing.assert_close(twice.loss_sum, 2 * base.loss_sum)
    torch.testing.assert_close(twice.counts, base.counts)


@pytest.mark.parametrize("settings", [{}, {"own_head": False}, {"num_head_layers": 2}])
def test_new_heads_say_what_the_target_says(settings: dict[str, Any]) -> None:
    """Before training every head is the target's own; random blocks are not."""
    model, states = tiny(), torch.randn(5, 32)
    drafter = MedusaDrafter.for_target(model, 2, **settings)
    drafter.attach(model)
    with torch.no_grad():
        wanted = model.lm_head(states)
        for head in range(2):
            assert torch.equal(drafter.head(head, states), wanted)
            other = untrained("medusa", model, [], num_heads=2, **settings)
            other.attach(model)
            assert not torch.allclose(other.head(head, states), wanted, atol=0.1)
    assert drafter.config.target["fingerprint"] and drafter.dtype == torch.float32


def test_new_heads_of_fewer_ids() -> None:
    """Rows of the target's head are those of the ids, in order; with the target's whole head they are refused."""
    model, states = tiny(), torch.randn(5, 32)
    drafter = MedusaDrafter.for_target(model, 2, ids=torch.tensor([9, 4, 60]))
    assert drafter.target_ids.tolist() == [4, 9, 60]
    torch.testing.assert_close(drafter.head(1, states), model.lm_head(states)[:, [4, 9, 60]])
    with pytest.raises(SpecGenError, match="covers all ids"):
        MedusaDrafter.for_target(model, 2, ids=torch.tensor([9, 4, 60]), own_head=False)


def test_new_heads_learn(tmp_path: Path) -> None:
    """Zero blocks are no dead end: every parameter moves."""
    trainer = medusa_trainer(tmp_path, max_steps=4)
    before = copy.deepcopy(trainer.drafter.state_dict())
    trainer.train()
    assert all(not torch.equal(before[name], part) for name, part in trainer.drafter.state_dict().items())


@pytest.mark.parametrize("heads", [{}, {"own_head": False}, {"ids": torch.arange(0, 64, 2)}])
def test_only_the_heads_are_saved(heads: dict[str, Any], tmp_path: Path) -> None:
    """The file holds the heads' tensors and no other, and what is loaded from it is what was trained."""
    trainer = medusa_trainer(tmp_path, heads=heads, max_steps=2)
    trainer.train()
    trainer.save_model()
    with safe_open(tmp_path / "model.safetensors", "pt") as saved:
        assert set(saved.keys()) == set(trainer.drafter.state_dict())
        assert any(".1.weight" in name for name in saved.keys()) is heads.get("own_head", True)
    loaded = load_drafter(tmp_path, target=trainer.target.model)
    assert all(torch.equal(part, loaded.state_dict()[name]) for name, part in trainer.drafter.state_dict().items())


def test_agreement_in_the_log(tmp_path: Path) -> None:
    """A training with ``ce`` logs agreement with the text; evaluation asks the target, and its loss is the same one."""
    trainer = medusa_trainer(tmp_path)
    batch = Pad()(texts(5))
    with torch.no_grad():
        cheap, whole = (trainer.run(trainer.drafter, batch, **more) for more in ({}, {"wants_rates": True}))
    torch.testing.assert_close(cheap.loss_sum, whole.loss_sum)
    assert not torch.equal(cheap.counts[:, 2], whole.counts[:, 2])
    found = trainer.evaluate()
    assert abs(found["eval_alpha_1"] - float(whole.counts[0, 2] / whole.counts[0, 0])) < 1e-6
    trainer = medusa_trainer(tmp_path, loss="kl")
    with torch.no_grad():
        assert torch.equal(
            trainer.run(trainer.drafter, batch).counts, trainer.run(trainer.drafter, batch, wants_rates=True).counts
        )


@pytest.mark.slow
def test_heads_learn_a_text_by_heart(tmp_path: Path) -> None:
    """Evaluation tells the acceptance length of decoding exactly, before, half-way and when the text is known."""
    rows = written(tiny(), 3)
    trainer = medusa_trainer(tmp_path, rows, logging_steps=500, learning_rate=1e-2)
    trainer.eval_dataset = rows
    trainer.drafter.config.tree, trainer.drafter.config.num_tokens = "chain", HEADS
    found = []
    for steps in (0, 20, 120):
        trainer.args.max_steps = steps
        if steps:
            trainer.train()
        found.append(trainer.evaluate()["eval_acceptance_length"])
        assert found[-1] == pytest.approx(decoded(trainer.target.model, trainer.drafter, rows), abs=1e-9)
    assert found[0] < 1.5 < found[1] < 0.9 * (HEADS + 1) < found[2]


@pytest.mark.parametrize("heads", [{}, {"own_head": False}])
def test_a_target_that_caps_its_logits(heads: dict[str, Any], tmp_path: Path) -> None:
    """What is trained is the law that drafts are drawn from: capped where the target's head is borrowed, else not."""
    model = build("gemma2", "eager", final_logit_softcapping=0.5).double()
    drafter = MedusaDrafter.for_target(model, HEADS, **heads).double()
    trainer = MedusaTrainer(drafter, model, arguments(MedusaArguments, tmp_path), train_dataset=texts())
    torch.manual_seed(3)
    states, seen = torch.randn(2, 5, drafter.config.hidden_size, dtype=torch.float64) * 3
    states.requires_grad_()
    head = trainer.target.head
    weight = drafter._head_weight(0, head)
    objective = replace(trainer.objective, kind="kl")
    found = objective(drafter._head_states(0, states), weight, seen, head, torch.ones(5, dtype=torch.float64))
    q, p = drafter.head(0, states).log_softmax(-1), (0.5 * ((seen @ head.T) / 0.5).tanh()).softmax(-1)
    wanted = (p * (p.log() - q)).sum()
    torch.testing.assert_close(found.loss_sum, wanted, rtol=1e-12, atol=1e-12)
    ours, theirs = (torch.autograd.grad(loss, states)[0] for loss in (found.loss_sum, wanted))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
