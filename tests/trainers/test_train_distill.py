"""Distillation: a small model learns its target's law through its own head, partly from what it writes itself."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from method_runs import decoded, distill_trainer, mixed_trainer, small, written
from tiny import build, letters, tiny
from torch import Tensor
from train_runs import Pad, arguments, texts
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_specgen import SmallModel, SpecGenError
from hf_specgen.errors import IncompatibleDrafter
from hf_specgen.trainers.data import DraftCollator
from hf_specgen.trainers.distill import DistillArguments, DistillTrainer
from hf_specgen.trainers.students import head_factor, last_answer, rewritten

LOSSES = ("kl", "rkl", "jsd", "tv", "ce")


def naive(model: PreTrainedModel, target: PreTrainedModel, batch: dict[str, Tensor], kind: str, beta: float) -> Tensor:
    """Return the loss from both models' whole logits, by its definition."""
    fed = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    log_q = model(**fed).logits[:, :-1].log_softmax(-1)
    with torch.no_grad():
        log_p = target(**fed).logits[:, :-1].log_softmax(-1)[..., : log_q.shape[-1]]
        log_p = log_p.log_softmax(-1) if kind in ("kl", "rkl", "jsd") else log_p
    p, q = log_p.exp(), log_q.exp()
    log_m = (beta * p + (1 - beta) * q).log()
    values = {
        "kl": (p * (log_p - log_q)).sum(-1),
        "rkl": (q * (log_q - log_p)).sum(-1),
        "jsd": beta * (p * (log_p - log_m)).sum(-1) + (1 - beta) * (q * (log_q - log_m)).sum(-1),
        "tv": 0.5 * (p - q).abs().sum(-1),
        "ce": -log_q.gather(-1, batch["input_ids"][:, 1:, None])[..., 0],
    }
    return (values[kind] * batch["loss_mask"][:, 1:]).sum()


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("tied", [False, True])
def test_the_loss_is_its_definition(kind: str, tied: bool, tmp_path: Path) -> None:
    """Loss and every gradient equal those of plain autograd over whole logits; the hooks are gone afterwards."""
    model, target = small(tie_word_embeddings=tied).double(), tiny().double()
    args = arguments(DistillArguments, tmp_path, loss=kind, beta=0.3)
    trainer = DistillTrainer(model, target, args, data_collator=Pad())
    batch = Pad()(texts(4))
    output = trainer.run(model, batch)
    output.loss_sum.backward()
    found = {name: part.grad for name, part in model.named_parameters()}
    model.zero_grad()
    loss = naive(model, target, batch, kind, 0.3)
    loss.backward()
    assert abs(float((output.loss_sum - loss).detach())) < 1e-6 * float(loss.detach())
    for name, part in model.named_parameters():
        assert float(part.grad.abs().max()) > 0, name
        torch.testing.assert_close(found[name], part.grad, rtol=1e-4, atol=1e-5)
    other = naive(model, target, batch, "tv" if kind == "kl" else "kl", 0.3)
    assert abs(float((output.loss_sum - other).detach())) > 1e-2


def test_no_logits_are_written(tmp_path: Path) -> None:
    """The head scores one position a row, however long the text; whole logits come back once the lesson is over."""
    trainer, batch, seen = distill_trainer(tmp_path), Pad()(texts(4)), []
    model = trainer.drafter
    handle = model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    trainer.run(model, batch)
    assert seen == [(4, 1, 64)]
    handle.remove()
    assert model(batch["input_ids"]).logits.shape == (*batch["input_ids"].shape, 64)
    trainer.objective = lambda *unused, **more: 1 // 0
    with pytest.raises(ZeroDivisionError):
        trainer.run(model, batch)
    assert not model.lm_head._forward_hooks and not model.lm_head._forward_pre_hooks


@pytest.mark.parametrize(("vocab", "other"), [(64, 60), (60, 64)])
def test_one_vocabulary_may_be_longer(vocab: int, other: int, tmp_path: Path) -> None:
    """Rows that only one of them has (padding, mostly) are left out."""
    model, target = small(vocab=vocab), tiny(vocab=other)
    trainer = DistillTrainer(model, target, arguments(DistillArguments, tmp_path, loss="tv"), data_collator=Pad())
    rows = [{**row, "input_ids": [1 + token % 59 for token in row["input_ids"]]} for row in texts(4)]
    batch = Pad()(rows)
    output = trainer.run(model, batch)
    if vocab < other:
        p = target(batch["input_ids"]).logits.softmax(-1)[:, :-1]
        batch["loss_mask"][:, 1:] &= p.argmax(-1) < vocab  # as for every drafter: what it cannot write is not learned
        lost = 0.5 * (p[..., vocab:].sum(-1) * batch["loss_mask"][:, 1:]).sum()
        assert abs(float((output.loss_sum - naive(model, target, batch, "tv", 0.5) - lost).detach())) < 1e-3
        beyond = {**batch, "input_ids": batch["input_ids"].clamp(min=63)}
        assert bool(trainer.run(model, beyond).loss_sum.isfinite())
    output.loss_sum.backward()
    assert model.lm_head.weight.grad[:60].abs().sum() > 0 and not model.lm_head.weight.grad[60:].any()


def test_what_is_done_to_logits_behind_the_head(tmp_path: Path) -> None:
    """A factor is learned through; a cap and a bias are refused with a reason."""
    assert head_factor(tiny()) == pytest.approx(1.0)
    scaled = build("cohere2", "eager", logit_scale=0.25)
    assert head_factor(scaled) == pytest.approx(0.25, rel=1e-4)
    trainer = DistillTrainer(scaled, tiny(), arguments(DistillArguments, tmp_path), data_collator=Pad())
    batch = Pad()(texts(3))
    torch.testing.assert_close(
        trainer.run(scaled, batch).loss_sum, naive(scaled, tiny(), batch, "kl", 0.5), rtol=1e-4, atol=1e-4
    )
    with pytest.raises(IncompatibleDrafter, match="caps its logits"):
        head_factor(build("gemma2", "eager", final_logit_softcapping=2.0))
    biased = tiny()
    biased.lm_head = torch.nn.Linear(32, 64)
    with pytest.raises(IncompatibleDrafter, match="matrix and a factor"):
        head_factor(biased)
    with pytest.raises(IncompatibleDrafter, match="no language-model head"):
        head_factor(tiny().model)


def test_other_tokens_are_refused(tmp_path: Path) -> None:
    """Tokenizers that give one id two meanings are noticed before anything is trained."""
    args, mine, theirs = arguments(DistillArguments, tmp_path), letters(), letters()
    DistillTrainer(small(), tiny(), args, data_collator=Pad(), processing_class=mine, target_tokenizer=theirs)
    theirs = letters(64)
    theirs.get_vocab = lambda: {token: 63 - place for token, place in mine.get_vocab().items()}
    with pytest.raises(IncompatibleDrafter, match="id 0 is"):
        DistillTrainer(small(), tiny(), args, data_collator=Pad(), processing_class=mine, target_tokenizer=theirs)


@pytest.mark.parametrize("settings", [{"on_policy": 1.5}, {"sampling_temperature": 0.0}, {"steps": 0}])
def test_refused_arguments(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(SpecGenError, match="were given"):
        arguments(DistillArguments, tmp_path, **settings)


def test_packed_texts_are_as_if_alone(tmp_path: Path) -> None:
    """Both models keep texts in one row apart."""
    trainer, rows = distill_trainer(tmp_path), texts(4)
    packed = {name: [item for row in rows for item in row[name]] for name in ("input_ids", "loss_mask")}
    packed["lengths"] = [len(row["input_ids"]) for row in rows]
    with torch.no_grad():
        apart, together = (trainer.run(trainer.drafter, DraftCollator()(part)) for part in (rows, [packed]))
    torch.testing.assert_close(together.loss_sum, apart.loss_sum, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(together.counts, apart.counts)


def test_nothing_to_learn_is_connected_to_everything(tmp_path: Path) -> None:
    """A batch without supervised tokens has loss 0 and a gradient of zeros for every parameter."""
    trainer, batch = distill_trainer(tmp_path), Pad()(texts(3))
    output = trainer.run(trainer.drafter, {**batch, "loss_mask": batch["loss_mask"] & False})
    output.loss_sum.backward()
    assert float(output.loss_sum.detach()) == 0.0 and not output.counts.any()
    assert all(part.grad is not None and not part.grad.any() for part in trainer.drafter.parameters())


def test_a_draft_of_several_tokens(tmp_path: Path) -> None:
    """The k-th token behind a place is judged where the text stands, as a draft that was right so far."""
    trainer, batch = distill_trainer(tmp_path, steps=3), Pad()(texts(4))
    with torch.no_grad():
        output = trainer.run(trainer.drafter, batch, wants_rates=True)
        mine = trainer.drafter(batch["input_ids"], attention_mask=batch["attention_mask"]).logits.argmax(-1)
    for row, place, step in torch.cartesian_prod(
        torch.arange(4), torch.arange(mine.shape[1]), torch.arange(3)
    ).tolist():
        at, rate = place + 2 + step, float(output.rates[row, place, step])
        if at < mine.shape[1] and batch["loss_mask"][row, at]:
            assert rate == float(mine[row, at - 1] == batch["input_ids"][row, at])
        else:
            assert rate != rate
    drawn = distill_trainer(tmp_path, steps=3, sample=True)
    with torch.no_grad():
        rates = drawn.run(drawn.drafter, batch, wants_rates=True).rates
    assert ((rates > 0) & (rates < 1)).any()


def test_it_stays_an_ordinary_model(tmp_path: Path) -> None:
    """What is saved is loaded by transformers alone, with its own settings, and the card is transformers' own."""
    trainer = distill_trainer(tmp_path, max_steps=2)
    before = copy.deepcopy(trainer.drafter.config.to_dict())
    trainer.train()
    trainer.save_model()
    trainer.create_model_card()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.use_cache and type(loaded) is type(trainer.drafter)
    assert {**loaded.config.to_dict(), "_name_or_path": ""}.items() >= {"hidden_size": before["hidden_size"]}.items()
    assert all(torch.equal(part, loaded.state_dict()[name]) for name, part in trainer.drafter.state_dict().items())
    assert "distillspec" in (tmp_path / "README.md").read_text()


def test_where_the_last_answer_starts() -> None:
    for mask, start in (([0, 0, 1, 1], 2), ([0, 1, 0, 1, 1], 3), ([1, 1, 1], 1), ([0, 0], 0), ([1, 0, 0], 1)):
        assert last_answer(torch.tensor(mask).bool()) == start


def test_own_answers_depend_on_row_and_step_alone() -> None:
    """A row is written anew in the same way whatever stands beside it; prompts stay, lengths do not grow."""
    model, batch = small().eval(), Pad()(texts(6))
    batch["num_items"] = batch["loss_mask"].sum().float()
    once = rewritten(model, batch, 1.0, 1.0, step=3)
    for row, given in enumerate(texts(6)):
        length = int(once["attention_mask"][row].sum())
        alone = rewritten(model, Pad()([given]), 1.0, 1.0, step=3)
        assert torch.equal(once["input_ids"][row, :length], alone["input_ids"][0, :length])
        assert once["input_ids"][row, :3].tolist() == given["input_ids"][:3] and length <= len(given["input_ids"])
        assert once["loss_mask"][row].nonzero().flatten().tolist() == list(range(3, length))
        written_there = once["input_ids"][row, 3:length].tolist()
        assert 7 not in written_there[:-1]  # the small model's end
        assert length == len(given["input_ids"]) or written_there[-1] == 7
    assert float(once["num_items"]) == float(once["loss_mask"].sum()) and not torch.equal(
        once["input_ids"], batch["input_ids"]
    )
    later = rewritten(model, batch, 1.0, 1.0, step=4)
    assert not torch.equal(once["input_ids"], later["input_ids"])
    assert rewritten(model, batch, 0.0, 1.0, step=3) is batch
    with pytest.raises(SpecGenError, match="packing=False"):
        rewritten(model, {**batch, "document_ids": batch["input_ids"]}, 1.0, 1.0, 0)
    with pytest.raises(SpecGenError, match="without the cache, or set on_policy=0"):
        rewritten(model, {**batch, "features": (), "last_hidden": torch.zeros(6, 9, 32)}, 1.0, 1.0, 0)


def test_own_answers_follow_the_small_models_law() -> None:
    """First tokens over many steps are draws of its law, at the temperature asked for; the target's law is another."""
    model, row = small().eval(), {"input_ids": [5, 9, 2, 1, 1], "loss_mask": [0, 0, 0, 1, 0]}
    rows = Pad()([{**row, "input_ids": [5, 9, 2, 1 + place % 63, 1 + place // 63]} for place in range(1500)])
    found = torch.bincount(rewritten(model, rows, 1.0, 0.7, 0)["input_ids"][:, 3], minlength=64) / 1500
    with torch.no_grad():
        laws = {t: (model(torch.tensor([[5, 9, 2]])).logits[0, -1] / t).softmax(-1) for t in (0.7, 2.0)}
    assert 0.5 * float((found - laws[0.7]).abs().sum()) < 0.07 < 0.5 * float((found - laws[2.0]).abs().sum())


def test_the_share_of_own_answers(tmp_path: Path) -> None:
    """About the share that is asked for is written anew, other rows in other steps; what is there is counted."""
    trainer = mixed_trainer(tmp_path, texts(200), on_policy=0.25)
    batch = Pad()(texts(200))
    changed = []
    for step in (0, 1):
        trainer.state.global_step = step
        (mixed,), items = trainer.get_batch_samples(iter([dict(batch)]), 1, torch.device("cpu"))
        changed.append((mixed["input_ids"] != batch["input_ids"]).any(1))
        assert float(items) == float(mixed["loss_mask"].sum()) < float(batch["loss_mask"].sum())
    assert all(0.15 < float(part.float().mean()) < 0.35 for part in changed) and not torch.equal(*changed)
    plain = distill_trainer(tmp_path)
    (same,), _ = plain.get_batch_samples(iter([dict(batch)]), 1, torch.device("cpu"))
    assert torch.equal(same["input_ids"], batch["input_ids"])


def test_distillation_makes_a_better_drafter(tmp_path: Path) -> None:
    """Evaluation tells the acceptance length of decoding exactly, before and after, and it rises."""
    target = tiny()
    rows = written(target, 3)
    model = tiny(seed=1, layers=1)
    args = arguments(DistillArguments, tmp_path, steps=4, logging_steps=500, learning_rate=3e-3, max_steps=120)
    trainer = DistillTrainer(model, target, args, data_collator=Pad(), train_dataset=rows, eval_dataset=rows)
    found = []
    for trains in (False, True):
        if trains:
            trainer.train()
        found.append(trainer.evaluate()["eval_acceptance_length"])
        assert found[-1] == pytest.approx(decoded(target, SmallModel(model, 4), rows), abs=1e-9)
    assert found[0] < 1.5 and found[1] > 2.5
