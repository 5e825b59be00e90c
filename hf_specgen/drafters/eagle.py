"""EagleDrafter: EAGLE-1 and EAGLE-2, one decoder layer that foretells the target's last hidden state."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hf_specgen.cache import SlotCache
from hf_specgen.drafter_config import DrafterConfig
from hf_specgen.drafters.features import FeatureDrafter
from hf_specgen.drafters.layers import DraftLayer
from hf_specgen.errors import SpecGenError
from hf_specgen.taps import FINAL


class EagleDrafter(FeatureDrafter):
    """Draft with EAGLE: features are what the target's head reads, and that head reads what the drafter foretells.

    EAGLE-2 is the same weights with a dynamic tree: ``config.tree = {"top_k": 10, "depth": 6, "nodes": 60}``.
    Source: Li et al. 2024, "EAGLE: speculative sampling requires rethinking feature uncertainty", and EAGLE-2.
    """

    method = "eagle"
    hidden_layers = (FINAL,)

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        if config.own_head or config.reduces_vocabulary or config.target_hidden_size != config.hidden_size:
            raise SpecGenError(
                "method 'eagle' got own_head, a reduced vocabulary or a hidden size of its own: it foretells what the "
                "target's head reads. Set own_head=False and the target's sizes, or use method 'eagle3'."
            )
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)
        layers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(
            DraftLayer(self.layer_config, config.layer_type, index, input_norm=index > 0) for index in layers
        )
        self.post_init()

    def fuse(self, hidden: tuple[Tensor, ...]) -> Tensor:
        """Return the features as they are."""
        return hidden[0].to(self.fc.weight.dtype)

    def step(
        self, tokens: Tensor, features: Tensor, positions: Tensor, mask: Tensor, cache: SlotCache | None
    ) -> Tensor:
        """Join token and feature, run the layers, see ``FeatureDrafter``."""
        states: Tensor = self.fc(torch.cat((self.embed(tokens).to(features.dtype), features), -1))
        rope = self.rotary(states, positions)
        for layer in self.layers:
            states = layer(states, rope, mask, cache)
        return states

    def logits(self, states: Tensor) -> Tensor:
        """Let the target's head read the foretold features."""
        return self.score(states)[..., : self.config.vocab_size]
