"""What training shows is what decoding does: the acceptance length of an evaluation is that of ``generate()``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from fitted import untrained
from tiny import tiny
from torch import Tensor
from train_runs import Pad, arguments
from transformers import PreTrainedModel

from hf_specgen import SpeculativeDecoding
from hf_specgen.drafting.learned import LearnedDrafter
from hf_specgen.trainers.eagle3 import Eagle3Arguments, Eagle3Trainer

PROMPTS, START, AHEAD = 4, 6, 3
WRITTEN = 1 + 6 * (AHEAD + 1)  # the first token, and six full rounds


@dataclass
class Learned:
    """Hold a drafter that knows a target's own texts nearly by heart, and what its evaluation says."""

    model: PreTrainedModel
    drafter: LearnedDrafter
    texts: Tensor
    told: dict[str, float]


def write(model: PreTrainedModel, prompts: Tensor, **more: Any) -> Any:
    usual = dict(attention_mask=torch.ones_like(prompts), max_new_tokens=WRITTEN, pad_token_id=0)
    return model.generate(prompts, **{**usual, **more})


def learn(folder: Path, steps: int, sampled: bool, **settings: Any) -> Learned:
    model = tiny(layers=3)
    torch.manual_seed(1)
    prompts = torch.randint(1, 64, (PROMPTS, START))
    texts = torch.cat(
        [write(model, prompts[row : row + 1], do_sample=sampled, **seeded(row)) for row in range(PROMPTS)]
    )
    mask = [0] * START + [1] * WRITTEN
    rows = [{"input_ids": row.tolist(), "loss_mask": mask} for row in texts]
    shape = {"tree": "chain", "num_tokens": AHEAD, "intermediate_size": 256}
    drafter = untrained("eagle3", model, list(range(64)), **shape, **settings)
    more = {"learning_rate": 1e-2, "per_device_train_batch_size": PROMPTS, "max_steps": steps, "loss": "ce"}
    args = arguments(Eagle3Arguments, folder, steps=AHEAD, logging_steps=50, **more)
    trainer = Eagle3Trainer(drafter, model, args, data_collator=Pad(), train_dataset=rows, eval_dataset=rows)
    trainer.train()
    return Learned(model, drafter.eval(), texts, trainer.evaluate())


def seeded(row: int) -> dict[str, Any]:
    """Return the call that takes coins of its own, so that a text does not depend on who drafts."""
    return {"custom_generate": SpeculativeDecoding(None), "seed": row}


def measured(one: Learned, **more: Any) -> tuple[float, int]:
    """Decode every prompt; return tokens per round and how many texts are the given ones."""
    rounds = same = 0
    for row, text in enumerate(one.texts):
        call = {**seeded(row), "custom_generate": SpeculativeDecoding(one.drafter)}
        out = write(one.model, text[None, :START], return_dict_in_generate=True, **call, **more)
        rounds += out.speculation.total.num_rounds
        same += out.sequences[0].tolist() == text.tolist()
    return PROMPTS * (WRITTEN - 1) / rounds, same


@pytest.mark.slow  # half learned and sampled are fast
def test_greedy_texts_are_learned_by_heart(tmp_path: Path) -> None:
    """Nearly all drafts are accepted, and the evaluation says how many, to the last digit."""
    one = learn(tmp_path, 150, sampled=False)
    length, same = measured(one, do_sample=False)
    assert same == PROMPTS
    assert length == pytest.approx(one.told["eval_acceptance_length"], abs=1e-9)
    assert length >= 0.9 * (AHEAD + 1)


def test_a_drafter_that_is_often_wrong(tmp_path: Path) -> None:
    """Half learned, the figure is exact too, where the mean over all places and the product of shares are not."""
    one = learn(tmp_path, 15, sampled=False)
    length, same = measured(one, do_sample=False)
    assert same == PROMPTS and 1.2 < length < 3.0
    assert length == pytest.approx(one.told["eval_acceptance_length"], abs=1e-9)
    tops, prefixes = ([one.told[f"eval_{name}_{k + 1}"] for k in range(AHEAD)] for name in ("top1", "prefix"))
    product = 1 + tops[0] + tops[0] * tops[1] + tops[0] * tops[1] * tops[2]
    assert min(abs(1 + sum(prefixes) - length), abs(product - length)) > 1e-3


@pytest.mark.slow
def test_sampled_texts(tmp_path: Path) -> None:
    """Picked drafts of sampled texts: the text is the coins' and the target's alone, so the figure is exact again."""
    one = learn(tmp_path, 60, sampled=True)
    length, same = measured(one, do_sample=True)
    assert same == PROMPTS and length > 1.3
    assert length == pytest.approx(one.told["eval_acceptance_length"], abs=1e-9)
