"""One EAGLE lesson: a target, a drafter and a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from fitted import untrained
from tiny import tiny
from torch import Tensor

from hf_specgen.drafters.eagle import EagleDrafter
from hf_specgen.drafting.learned import TrainingOutput
from hf_specgen.models.taps import FINAL, Taps
from hf_specgen.trainers.losses import Objective

SHARE, DECAY, LENGTH = 0.3, 0.5, 10


@dataclass
class Scene:
    """Hold a drafter in float64 and what its target says of two texts; features are noisy, not the wanted ones."""

    drafter: EagleDrafter
    ids: Tensor
    features: Tensor
    last: Tensor
    mask: Tensor
    head: Tensor

    def forward(self, **more: Any) -> TrainingOutput:
        given = {"share": SHARE, "decay": DECAY, **more}
        return self.drafter(
            self.ids, (self.features,), self.last, self.mask, Objective("kl", chunk=7), self.head, **given
        )


def scene(length: int = LENGTH, **settings: Any) -> Scene:
    model = tiny().double()
    drafter = untrained("eagle", model, [], **settings)
    drafter.attach(model)
    torch.manual_seed(2)
    ids, mask = torch.randint(1, 64, (2, length)), torch.rand(2, length) < 0.7
    taps = Taps(model, (FINAL,))
    with torch.no_grad(), taps.on() as seen:
        model(ids, use_cache=False)
        (last,) = taps.read(seen, torch.device("cpu"))
    noisy = last + 0.1 * torch.randn_like(last)
    return Scene(drafter, ids, noisy, last, mask, model.get_output_embeddings().weight.detach())
