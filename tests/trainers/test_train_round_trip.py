"""A drafter that was saved and loaded again trains as before: frozen parts and buffers are whole."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from datasets import Dataset
from tiny import tiny

from hf_specgen.loading import load_drafter
from hf_specgen.trainers.eagle3 import Eagle3Arguments, Eagle3Trainer
from hf_specgen.trainers.warm_start import new_drafter


def trainer_of(drafter: object, model: object, folder: Path) -> Eagle3Trainer:
    torch.manual_seed(3)
    rows = [{"input_ids": torch.randint(1, 64, (9,)).tolist(), "loss_mask": [True] * 9} for _ in range(4)]
    args = Eagle3Arguments(str(folder), use_cpu=True, report_to=[], max_steps=2, steps=2, save_strategy="no")
    return Eagle3Trainer(drafter, model, args, train_dataset=Dataset.from_list(rows))


def test_a_loaded_drafter_trains_like_the_one_that_was_saved(tmp_path: Path) -> None:
    """Loading replaces parameters, so flags set when a drafter was built are lost: the trainer sets them."""
    model = tiny(layers=7)
    drafter, _ = new_drafter("eagle3", model, torch.arange(0, 64, 2), own_embedding=True)
    drafter.embed_tokens.weight.requires_grad_(False)
    with torch.no_grad():
        for part in drafter.parameters():
            part.add_(0.01 * torch.randn_like(part))
    drafter.save_pretrained(tmp_path / "drafter")
    loaded = load_drafter(tmp_path / "drafter", target=model).train()
    assert loaded.embed_tokens.weight.requires_grad, "this is what the trainer is up against"
    saved, kept = dict(drafter.named_buffers()), dict(loaded.named_buffers())
    assert set(saved) == set(kept) == {"d2t", "t2d"}, "a table that is not saved would be garbage after loading"
    assert all(torch.equal(part, saved[name]) for name, part in kept.items())
    embedding, weights = copy.deepcopy(loaded.embed_tokens.weight.detach()), []
    for number, one in enumerate((drafter, loaded)):
        trainer = trainer_of(one, model, tmp_path / str(number))
        assert not one.embed_tokens.weight.requires_grad
        trainer.train()
        weights.append({name: part.detach().clone() for name, part in one.named_parameters()})
    assert all(torch.equal(part, weights[1][name]) for name, part in weights[0].items())
    assert torch.equal(embedding, loaded.embed_tokens.weight)
    assert not torch.equal(weights[0]["fc.weight"], load_drafter(tmp_path / "drafter", target=model).fc.weight)
