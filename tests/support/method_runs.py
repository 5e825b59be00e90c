"""Trainers of Medusa heads, EAGLE drafters and distilled models on tiny targets, for ``train_runs.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from fitted import untrained
from tiny import Watch, ours, plain, tiny
from torch import Tensor
from train_runs import STEPS, Job, Pad, arguments, record, texts
from transformers import PreTrainedModel

from hf_specgen.drafters.medusa import MedusaDrafter
from hf_specgen.drafting.drafter import Drafter
from hf_specgen.trainers.base import DrafterTrainer
from hf_specgen.trainers.distill import DistillArguments, DistillTrainer
from hf_specgen.trainers.eagle import EagleArguments, EagleTrainer
from hf_specgen.trainers.medusa import MedusaArguments, MedusaTrainer

METHODS = ("medusa", "eagle", "distill", "mixed")


def data(rows: Any) -> dict[str, Any]:
    return {"data_collator": Pad(), "train_dataset": rows or texts(), "eval_dataset": texts(5)}


def target(exact: bool) -> PreTrainedModel:
    """Return a tiny target; ``exact``: in float64, so that layouts differ by no rounding."""
    return tiny().double() if exact else tiny()


def medusa_trainer(
    folder: str | Path, rows: Any = None, heads: Any = None, exact: bool = False, **settings: Any
) -> DrafterTrainer:
    """Return a trainer of three Medusa heads."""
    model = target(exact)
    drafter = MedusaDrafter.for_target(model, 3, **(heads or {})).to(model.dtype)
    return MedusaTrainer(drafter, model, arguments(MedusaArguments, folder, **settings), **data(rows))


def eagle_trainer(folder: str | Path, rows: Any = None, exact: bool = False, **settings: Any) -> DrafterTrainer:
    """Return a trainer of an EAGLE drafter, with noise."""
    model = target(exact)
    return EagleTrainer(
        untrained("eagle", model, []), model, arguments(EagleArguments, folder, **settings), **data(rows)
    )


def small(**settings: Any) -> PreTrainedModel:
    """Return a small model that ends its texts with token 7."""
    model = tiny(seed=1, layers=1, **settings)
    model.generation_config.eos_token_id = 7
    return model


def distill_trainer(folder: str | Path, rows: Any = None, exact: bool = False, **settings: Any) -> DrafterTrainer:
    """Return a trainer of a small model."""
    model = target(exact)
    return DistillTrainer(small().to(model.dtype), model, arguments(DistillArguments, folder, **settings), **data(rows))


def mixed_trainer(folder: str | Path, rows: Any = None, **settings: Any) -> DrafterTrainer:
    """Return a trainer of a small model that writes half of what it learns from."""
    return distill_trainer(folder, rows, **{"on_policy": 0.5, "loss": "rkl", **settings})


def written(model: PreTrainedModel, rows: int, length: int = 40) -> list[dict[str, Any]]:
    """Return prompts of four tokens with what a target writes behind them."""
    torch.manual_seed(7)
    found = plain(model, torch.randint(1, 64, (rows, 4)), max_new_tokens=length).tolist()
    return [{"input_ids": text, "loss_mask": [0] * 4 + [1] * length} for text in found]


def decoded(model: PreTrainedModel, drafter: Drafter, rows: list[dict[str, Any]]) -> float:
    """Write the texts anew with a drafter and return tokens per round; the first token comes with the prompt."""
    tokens = rounds = 0
    for row in rows:
        start = row["loss_mask"].index(1)
        watch, left = Watch(drafter), len(row["loss_mask"]) - start
        text = ours(model, watch, torch.tensor([row["input_ids"][:start]]), max_new_tokens=left)
        assert text[0].tolist() == row["input_ids"]
        tokens, rounds = tokens + left - 1, rounds + len(watch.rounds) - 1  # without the prompt's round
    return tokens / rounds


def rolled_out(drafter: Any, ids: Tensor, features: Tensor, steps: int) -> list[Tensor]:
    """Draft behind the last of some pairs as decoding does: true features up to it, then the drafter's own states.

    Shapes: ``ids (1, T)`` of the whole text, ``features (1, pair + 1, H)``. Returns: the states ``(H,)``.
    """
    pair, found = features.shape[1] - 1, []
    for depth in range(min(steps, ids.shape[1] - 2 - pair)):
        width = pair + 1 + depth
        place = torch.arange(width)
        every = place[:, None] >= place
        near = every & (place[:, None] - place < (drafter.config.sliding_window or width))
        masks = {"full_attention": every[None, None], "sliding_attention": near[None, None]}
        states = drafter.step(drafter.embed(ids[:, 1 : width + 1]), features, place[None], masks, None)
        features = torch.cat((features, states[:, -1:]), 1)
        found.append(states[0, -1])
    return found


def as_slowly(drafter: Any, output: Any, slowly: Any, near: float = 1e-9, gradients: Any = (1e-7, 1e-10)) -> None:
    """Demand loss, counts and every gradient of what ``slowly`` computes one by one; ``gradients``: rtol and atol."""
    output.loss_sum.backward()
    found = {name: part.grad for name, part in drafter.named_parameters()}
    drafter.zero_grad()
    loss, counts = slowly()
    loss.backward()
    assert abs(float((output.loss_sum - loss).detach())) < near * float(loss.detach())
    torch.testing.assert_close(output.counts, counts, rtol=1e-5, atol=1e-5)
    assert counts[:, 0].min() > 3
    for name, part in drafter.named_parameters():
        assert part.grad is not None and float(part.grad.abs().max()) > 0, name
        torch.testing.assert_close(found[name], part.grad, rtol=gradients[0], atol=gradients[1])


def maker(method: str) -> Any:
    return globals()[f"{method}_trainer"]


def resumed(folder: str, method: str, **settings: Any) -> tuple[Job, Job]:
    """Return the records of twenty steps, and of the last ten of them from the checkpoint on."""
    settings |= {"save_strategy": "steps", "save_steps": STEPS // 2, "per_device_train_batch_size": 4}
    whole, again = (maker(method)(folder, **settings) for _ in range(2))
    whole.train()
    with torch.no_grad():
        for part in again.drafter.parameters():
            part.add_(1)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-{STEPS // 2}")
    return record(whole), record(again)


def shard(folder: str, method: str) -> Job:
    """Return the errors of the gradients of what FSDP2 shards, each process reading half the rows."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    trainer = maker(method)(folder)
    model, rows = trainer.drafter, texts(8)
    rank, world = trainer.accelerator.process_index, trainer.accelerator.num_processes
    trainer.run(model, Pad()(rows)).loss_sum.backward()
    wanted = {name: part.grad.clone() for name, part in model.named_parameters()}
    model.zero_grad()
    mesh = init_device_mesh("cpu", (world,))
    units = (
        [model.get_submodule("0.0")]
        if method == "medusa"
        else [*model.model.layers, model.model.embed_tokens, model.lm_head]
    )
    for unit in [*units, model]:
        fully_shard(unit, mesh=mesh)
    (trainer.run(model, Pad()(rows[rank::world])).loss_sum * world).backward()
    parts = dict(model.named_parameters())
    assert all(isinstance(part, DTensor) for part in parts.values())
    errors = {name: float((part.grad.full_tensor() - wanted[name]).abs().max()) for name, part in parts.items()}
    torch.distributed.barrier()
    return {"errors": errors, "largest": {name: float(part.abs().max()) for name, part in wanted.items()}}
