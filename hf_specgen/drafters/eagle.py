"""EagleDrafter: EAGLE-1 and EAGLE-2, one decoder layer that foretells the target's last hidden state."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_specgen.checkpoints.config import FeatureConfig
from hf_specgen.checkpoints.methods import Method
from hf_specgen.checkpoints.serving import eagle_servers
from hf_specgen.drafting.borrowed import TargetParts
from hf_specgen.drafting.features import FeatureDrafter
from hf_specgen.drafting.layers import DraftLayer, Masks
from hf_specgen.drafting.learned import Objective, TrainingOutput
from hf_specgen.drafting.unrolling import Lesson, chosen, drafted, judge, weighted
from hf_specgen.errors import SpecGenError
from hf_specgen.models.facts import TargetFacts
from hf_specgen.models.slot_cache import SlotCache
from hf_specgen.models.taps import FINAL


class EagleConfig(FeatureConfig):
    """Describe an EAGLE-1 drafter: its layers stand between the target's embedding and the target's head."""

    method = "eagle"
    architecture = "LlamaForCausalLMEagle"

    @property
    def notes(self) -> tuple[str, ...]:
        """Say which features are read and how they are joined."""
        return ("target layers: what the head reads, after the last norm", f"fc: bias {self.fc_bias}")

    @property
    def served_flags(self) -> dict[str, Any]:
        """Return what SafeAILab's loader reads: it takes an absent ``bias`` for true."""
        return {"bias": self.fc_bias, "qkv_bias": self.attention_bias}


class EagleDrafter(FeatureDrafter):
    """Draft with EAGLE: features are what the target's head reads, and that head reads what the drafter foretells.

    EAGLE-2 is the same weights with a dynamic tree: ``config.tree = {"top_k": 10, "depth": 6, "nodes": 60}``.
    Source: Li et al. 2024, "EAGLE: speculative sampling requires rethinking feature uncertainty", and EAGLE-2.
    """

    config_class = EagleConfig
    config: EagleConfig
    method = "eagle"
    hidden_layers = (FINAL,)

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        if config.own_head or config.target_hidden_size != config.hidden_size:
            raise SpecGenError(
                "method 'eagle' got own_head or a hidden size of its own: it foretells what the target's head reads. "
                "Set own_head=False and the target's sizes, or use method 'eagle3'."
            )
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)
        layers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(
            DraftLayer(self.layer_config, config.layer_type, index, input_norm=index > 0) for index in layers
        )
        if config.reduces_vocabulary:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.post_init()

    @classmethod
    def usual_fields(cls, facts: TargetFacts, steps: int | None = None) -> dict[str, Any]:
        """Return that the head is the target's."""
        return {"own_head": False}

    def forward(  # noqa: PLR0913 - one lesson, as the trainer's batch names its parts
        self,
        input_ids: Tensor,
        features: tuple[Tensor, ...],
        last_hidden: Tensor,
        loss_mask: Tensor,
        objective: Objective,
        target_head: Tensor,
        document_ids: Tensor | None = None,
        weights: Tensor | None = None,
        steps: int = 1,
        decay: float = 0.8,
        share: float = 0.1,
        told_steps: int = 5,
        wants_rates: bool = False,
    ) -> TrainingOutput:
        """Compare foretold features with the target's (smooth L1), and, counting ``share``, what its head says of both.

        Shapes: as in ``Eagle3Drafter.forward``; ``features`` may be noisy, ``last_hidden`` is what is wanted. Step k
        counts ``decay ** k``; ``steps`` above 1 feed foretold features back. With ``wants_rates`` the counts reach
        ``told_steps`` steps, and the loss stays that of ``steps``.
        Source: Li et al. 2024, "EAGLE", section 3.2 (the loss); Zhang et al. 2024, "HASS" (more than one step).
        """
        inputs = input_ids, features, last_hidden, loss_mask, objective, target_head, document_ids, weights, wants_rates
        lesson = Lesson(*inputs)
        depth = max(steps, told_steps) if wants_rates else steps
        states = drafted(self, lesson, depth, self.config.windows)
        shares = [decay**step * (step < steps) for step in range(depth)]
        found = judge(self, lesson, states, [share * part for part in shares])
        loss = found.loss_sum
        for step in range(steps):
            place = chosen(lesson, 2 + step)
            foretold = states[step].flatten(0, 1)[place]
            wanted = last_hidden.flatten(0, 1)[place + 1 + step]
            exact = torch.promote_types(foretold.dtype, torch.float32)
            gap = F.smooth_l1_loss(foretold.to(exact), wanted.to(exact), reduction="none").mean(-1)
            loss = loss + (gap * weighted(lesson, place, 2 + step, shares[step])).sum()
        return found._replace(loss_sum=loss)

    def head_states(self, states: Tensor) -> Tensor:
        """Return what the head reads of what ``step`` returned: the foretold feature itself."""
        return states

    def head_weight(self, target_head: Tensor) -> Tensor:
        """Return the weight of the target's head, ``(V_draft, H)``."""
        ids = self.target_ids
        return target_head[: self.config.vocab_size] if ids is None else target_head[ids]

    def fuse(self, hidden: tuple[Tensor, ...]) -> Tensor:
        """Return the features as they are."""
        return hidden[0].to(self.fc.weight.dtype)

    def step(
        self, embedded: Tensor, features: Tensor, positions: Tensor, mask: Masks, cache: SlotCache | None
    ) -> Tensor:
        """Join token and feature, run the layers, see ``FeatureDrafter``."""
        states: Tensor = self.fc(torch.cat((embedded.to(features.dtype), features), -1))
        rope = self.rotary(states, positions)
        for layer in self.layers:
            states = layer(states, rope, mask, cache)
        return states

    def logits(self, states: Tensor, parts: TargetParts | None = None) -> Tensor:
        """Let the target's head read the foretold features."""
        return self.score(states, parts)[..., : self.config.vocab_size]


METHOD = Method(
    name="eagle",
    title="EAGLE",
    drafter=EagleDrafter,
    config=EagleConfig,
    trainer="hf_specgen.trainers.eagle:EagleTrainer",
    servers=eagle_servers,
)
