"""Eagle3Drafter: EAGLE-3, a decoder layer over features fused from several layers of the target, with its own head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_specgen.checkpoints.config import FeatureConfig
from hf_specgen.checkpoints.formats.eagle3_common import norm_line, served_flags
from hf_specgen.checkpoints.methods import UNROLLED, Method
from hf_specgen.checkpoints.serving import eagle3_servers
from hf_specgen.drafting.borrowed import TargetParts
from hf_specgen.drafting.features import FeatureDrafter
from hf_specgen.drafting.layers import DraftLayer, LayerClasses, Masks, PairLayer
from hf_specgen.drafting.learned import Objective, TrainingOutput
from hf_specgen.drafting.unrolling import Lesson, unroll
from hf_specgen.drafting.warm_start import default_boundaries
from hf_specgen.errors import IncompatibleDrafter, SpecGenError
from hf_specgen.models.facts import TargetFacts
from hf_specgen.models.slot_cache import SlotCache

_FUSED = 3
_LEAST_LAYERS = 7  # with fewer the three default boundaries are not distinct


class Eagle3Config(FeatureConfig):
    """Describe an EAGLE-3 drafter: which norms stand where, beside the layers and the boundaries it reads.

    ``norm_before_fc`` norms the joined features, ``fc_norm`` each of them; ``norm_before_residual`` starts the
    residual stream at the normed feature; ``norm_output`` feeds back the normed state.
    """

    method = "eagle3"
    architecture = "LlamaForCausalLMEagle3"

    def __init__(
        self,
        method: str | None = None,
        norm_before_residual: bool = False,
        norm_before_fc: bool = False,
        fc_norm: bool = False,
        norm_output: bool = False,
        **kwargs: Any,
    ) -> None:
        self.norm_before_residual = norm_before_residual
        self.norm_before_fc = norm_before_fc
        self.fc_norm = fc_norm
        self.norm_output = norm_output
        super().__init__(method, **kwargs)

    @property
    def states_read(self) -> str:
        """Say which residual streams the drafter reads."""
        streams = ", ".join(map(str, self.aux_layer_boundaries)) or "chosen by the target's depth"
        return f"the residual streams after layers {streams}"

    @property
    def notes(self) -> tuple[str, ...]:
        """Say which streams are read, and which norms there are."""
        stated = self.aux_layer_boundaries or "(2, n // 2, n - 3) of the target's n, once it is known"
        return (f"target layers: boundaries {stated}, as the config states", norm_line(self))

    @property
    def served_as(self) -> str:
        """Return what engines may take the drafter for; SGLang has no name for Qwen3's layers, vLLM has one."""
        known = super().served_as
        if known != self.architecture:
            return known
        if self.dropped_by_vllm:
            return FeatureConfig.architecture
        return "Eagle3Qwen3ForCausalLM" if self.layer_type == "qwen3" else known

    @property
    def served_flags(self) -> dict[str, Any]:
        """Return what SGLang and vLLM read beside the layers' settings."""
        return served_flags(self)


class Eagle3Drafter(FeatureDrafter):
    """Draft with EAGLE-3: low, middle and high features of the target are fused, own states are fed back.

    Without ``aux_layer_boundaries`` they are (2, n // 2, n - 3) of the target's n layers.
    Source: Li et al. 2025, "EAGLE-3: scaling up inference acceleration of LLMs via training-time test".
    """

    config_class = Eagle3Config
    config: Eagle3Config
    method = "eagle3"

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        _check(config)
        hidden = config.hidden_size
        target = config.target_hidden_size
        norm = LayerClasses.of(config.layer_type).norm
        fused = len(config.aux_layer_boundaries) or _FUSED
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        if config.norm_before_fc:
            self.input_norm = norm(fused * target, eps=config.rms_norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(norm(target, eps=config.rms_norm_eps) for _ in range(fused))
        self.fc = nn.Linear(fused * target, hidden, bias=config.fc_bias)
        self.midlayer = PairLayer(self.layer_config, config.layer_type, config.norm_before_residual)
        further = range(1, config.num_hidden_layers)
        self.layers = nn.ModuleDict(
            {str(index): DraftLayer(self.layer_config, config.layer_type, index) for index in further}
        )
        self.norm = norm(hidden, eps=config.rms_norm_eps)
        if config.own_head:
            self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        if config.reduces_vocabulary:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
            self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)
        self.post_init()

    @classmethod
    def usual_fields(cls, facts: TargetFacts, steps: int | None = None) -> dict[str, Any]:
        """Return which residual streams of a target are read."""
        return {"aux_layer_boundaries": list(default_boundaries(facts.num_layers))}

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
        steps: int = 7,
        decay: float = 0.8,
        wants_rates: bool = False,
    ) -> TrainingOutput:
        """Compare the drafter with its target where it drafts ``steps`` tokens behind every place of a text.

        Shapes: ``input_ids, loss_mask, document_ids, weights (B, T)`` (``loss_mask``: token t is supervised),
        ``features``: one ``(B, T, D)`` per entry of ``hidden_layers``, ``last_hidden (B, T, D)``: what the target's
        head reads, ``target_head (V, D)``: its weight. Step k counts ``decay ** k``.
        """
        inputs = input_ids, features, last_hidden, loss_mask, objective, target_head, document_ids, weights, wants_rates
        return unroll(self, Lesson(*inputs), steps, decay, self.config.windows)

    def head_states(self, states: Tensor) -> Tensor:
        """Return what the head reads of what ``step`` returned."""
        return states if self.config.norm_output else self._normed(states)

    def head_weight(self, target_head: Tensor) -> Tensor:
        """Return the weight ``(V_draft, H)`` of the drafter's head, its own or the target's."""
        ids = self.target_ids
        if self.config.own_head:
            return self.lm_head.weight
        return target_head[: self.config.vocab_size] if ids is None else target_head[ids]

    @property
    def hidden_layers(self) -> tuple[int, ...]:  # type: ignore[override]
        """Return the boundaries of the target that are fused, in order; none where the target is not known yet."""
        return self.boundaries(self._parts.facts if self._parts is not None else None)

    def boundaries(self, facts: TargetFacts | None) -> tuple[int, ...]:
        """Return the boundaries of a target that are fused, in order.

        Raises: ``IncompatibleDrafter`` for a target with too few layers for the default ones.
        """
        named = tuple(self.config.aux_layer_boundaries)
        known = self.config.target.get("num_layers", 0) if facts is None else facts.num_layers
        if named or not known:
            return named
        if known < _LEAST_LAYERS:
            raise IncompatibleDrafter(
                f"the target has {known} layers, and the default boundaries (2, n // 2, n - 3) need {_LEAST_LAYERS}: "
                "give aux_layer_boundaries=[...]."
            )
        return (2, known // 2, known - 3)

    def fuse(self, hidden: tuple[Tensor, ...]) -> Tensor:
        """Join the target's features and bring them to the drafter's size."""
        parts = [layer.to(self.fc.weight.dtype) for layer in hidden]
        if self.config.fc_norm:
            parts = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
        joined = torch.cat(parts, -1)
        features: Tensor = self.fc(self.input_norm(joined) if self.config.norm_before_fc else joined)
        return features

    def step(
        self, embedded: Tensor, features: Tensor, positions: Tensor, mask: Masks, cache: SlotCache | None
    ) -> Tensor:
        """Run the layers over tokens beside features, see ``FeatureDrafter``."""
        rope = self.rotary(features, positions)
        states: Tensor = self.midlayer(embedded.to(features.dtype), features, rope, mask, cache)
        for layer in self.layers.values():
            states = layer(states, rope, mask, cache)
        return self._normed(states) if self.config.norm_output else states

    def logits(self, states: Tensor, parts: TargetParts | None = None) -> Tensor:
        """Score states over the drafter's own vocabulary."""
        scores = self.score(self.head_states(states), parts)
        return scores if self.config.own_head else scores[..., : self.config.vocab_size]

    def _normed(self, states: Tensor) -> Tensor:
        normed: Tensor = self.norm(states)
        return normed


def _check(config: Eagle3Config) -> None:
    """Refuse a configuration that contradicts itself."""
    taken = config.aux_layer_boundaries
    reasons = {
        f"aux_layer_boundaries={taken}, which do not grow strictly: features are taken in the order of the layers, as "
        "vLLM and SGLang take them; sort them, and the columns of fc with them": taken != sorted(set(taken)),
        "norm_before_fc and fc_norm are both set: they exclude each other": config.norm_before_fc and config.fc_norm,
        "own_embedding=False with another hidden size than the target's: the target's embedding does not fit": (
            not config.own_embedding and config.hidden_size != config.target_hidden_size
        ),
        "own_head=False with another hidden size than the target's: the target's head does not fit": (
            not config.own_head and config.hidden_size != config.target_hidden_size
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise SpecGenError(f"method 'eagle3' got {reason}.")


METHOD = Method(
    name="eagle3",
    title="EAGLE-3",
    drafter=Eagle3Drafter,
    config=Eagle3Config,
    trainer="hf_specgen.trainers.eagle3:Eagle3Trainer",
    depths=UNROLLED,
    learns_vocabulary=True,
    servers=eagle3_servers,
)
