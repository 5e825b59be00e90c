"""FeatureDrafter: what EAGLE-like drafters share. They predict the target's next feature from its last one and a token.

Feature i of the target is paired with token i + 1; the drafter's layers run over these pairs, pair i at position i,
and pair i foretells token i + 2. Pairs of accepted tokens are always fed again with the target's own features.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specgen import ops
from hf_specgen.checkpoints.config import FeatureConfig
from hf_specgen.drafting.borrowed import TargetParts
from hf_specgen.drafting.drafter import Call
from hf_specgen.drafting.fill import Level, LevelModel, LevelSession
from hf_specgen.drafting.layers import Masks, Rotary
from hf_specgen.drafting.learned import LearnedDrafter
from hf_specgen.drafting.lengths import DraftSettings, Habits
from hf_specgen.drafting.pair_cache import PairCache
from hf_specgen.drafting.shapes import DynamicShape, Shape, StaticShape
from hf_specgen.drafting.warm_start import Layered, cover, warm_start
from hf_specgen.errors import IncompatibleDrafter
from hf_specgen.models.facts import LAYER_OVERHEAD, TOKEN_OVERHEAD, TargetFacts, logits_width
from hf_specgen.models.slot_cache import SlotCache
from hf_specgen.round.records import Round

AnyFeature = TypeVar("AnyFeature", bound="FeatureDrafter")

_LONGEST = 8
_CONSTANT = 4
_MOST_PENDING = 256  # columns of hidden states that wait while the drafter rests


class FeatureDrafter(LearnedDrafter):
    """Draft token by token with decoder layers that are fed the target's features, their own beyond the text.

    ``config.tree`` None means a chain on CPUs and a dynamic tree elsewhere (the latter unmeasured). A chain is as long
    as pays by the acceptance seen in the call, or ``num_tokens`` long. ``costs`` replaces the assumed costs,
    ``confidence`` ends a row of a chain where the best token's probability is lower.
    """

    config: FeatureConfig

    def __init__(self, config: FeatureConfig) -> None:
        super().__init__(config)
        self.layer_config = config.layer_config()
        self.rotary = Rotary(self.layer_config, config.layer_type)

    @classmethod
    def new(
        cls: type[AnyFeature], target: PreTrainedModel, ids: Tensor | None = None, warm: bool = True, **settings: Any
    ) -> tuple[AnyFeature, list[str]]:
        """Build a drafter with layers of the target's sizes, and weights where those fit, see ``LearnedDrafter``.

        Raises: ``SpecGenError`` for settings that build none.
        """
        facts = TargetFacts.of(target)
        fields = Layered.of(target).sizes(target) | cls.usual_fields(facts)
        fields |= {"vocab_size": facts.vocab_size, "target_hidden_size": facts.hidden_size, "target": facts.to_dict()}
        if fields.get("own_head", True):
            if ids is None and logits_width(target) < facts.vocab_size:
                ids = torch.arange(logits_width(target))  # a head may have fewer rows than there are ids
            fields["draft_vocab_size"] = facts.vocab_size if ids is None else len(ids)
        drafter = cls(cls.config_class(**{**fields, **settings}))
        cover(drafter, ids)
        drafter.float()
        return drafter, warm_start(drafter, target) if warm else ["random weights"]

    @abstractmethod
    def fuse(self, hidden: tuple[Tensor, ...]) -> Tensor:
        """Make features ``(B, S, H)`` of the target's ``hidden_layers``, one ``(B, S, D)`` each."""

    @abstractmethod
    def step(
        self, embedded: Tensor, features: Tensor, positions: Tensor, mask: Masks, cache: SlotCache | None
    ) -> Tensor:
        """Run the layers over pairs and return what is fed back as the next features, ``(B, S, H)``.

        Shapes: ``embedded (B, S, H)`` as ``embed`` returns them, ``features (B, S, H)``, ``positions (B or 1, S)``,
        ``mask`` bool ``(B or 1, 1, S, T)``, or one for each kind of layer.
        """

    @abstractmethod
    def logits(self, states: Tensor, parts: TargetParts | None = None) -> Tensor:
        """Return logits over the drafter's ids ``(B, S, V_draft)`` of what ``step`` returned.

        ``parts``: what is borrowed of the target, by default of the one that was attached.
        """

    def begin(self, call: Call) -> FeatureSession:
        """Start with empty rows; the prompt's features come with round zero.

        Raises: ``IncompatibleDrafter`` on another device than the target's, ``SpecGenError`` for a dynamic tree of
        drawn tokens or a threshold for trees.
        """
        parts = self.parts_of(call.target.model)
        mine = next(self.parameters()).device
        if mine != parts.device:
            raise IncompatibleDrafter(
                f"the drafter is on {mine} and the target's embedding on {parts.device}: one device is required. Call "
                f"drafter.to({str(parts.device)!r})."
            )
        return FeatureSession(self, parts, call)

    def habits(self, call: Call, parts: TargetParts) -> Habits:
        """Return how the drafter drafts where nobody asks for anything else."""
        config = self.config
        chain = StaticShape.chain(_LONGEST)
        on_cpu = call.device.type == "cpu"
        usual: Shape = chain if on_cpu or config.sample or not ops.has_doubles(call.device) else DynamicShape()
        return Habits(
            title=self.title,
            usual=usual,
            longest=_LONGEST,
            constant=_CONSTANT,
            level_cost=self._level_cost(call, parts),
            tree=config.tree,
            num_tokens=config.num_tokens,
            confidence=self.confidence,
            sample=config.sample,
            costs=self.costs,
        )

    def _level_cost(self, call: Call, parts: TargetParts) -> float:
        """Return the cost of one drafted token relative to one plain step of the target, by the weights both read."""
        sizes = {name: parameter.numel() for name, parameter in self.named_parameters()}
        read = sum(size for name, size in sizes.items() if not name.startswith("embed_tokens"))
        if not any(name.startswith("lm_head") for name in sizes):
            read += parts.head_size
        read += LAYER_OVERHEAD * self.config.num_hidden_layers + TOKEN_OVERHEAD
        return max(0.03, read / max(1, call.sequences.target_size))


class FeatureSession(LevelSession):
    """Draft for one call with pairs of the target's features."""

    model: FeatureLevels

    def __init__(self, drafter: FeatureDrafter, parts: TargetParts, call: Call) -> None:
        settings = DraftSettings(call, drafter.habits(call, parts))
        super().__init__(call, FeatureLevels(drafter, parts, call), settings)


class FeatureLevels(LevelModel):
    """Run an EAGLE-like drafter over the pairs of one call, with what it borrows of that call's target."""

    def __init__(self, drafter: FeatureDrafter, parts: TargetParts, call: Call) -> None:
        self.drafter = drafter
        self.parts = parts
        self.target_ids = drafter.target_ids
        self._sequences = call.sequences
        reserve = max(call.sequences.lengths) + call.sequences.budget + 1
        self.pairs = PairCache(self, drafter.layer_config, call.rows, call.device, reserve)
        self._prompt: list[int] | None = list(call.sequences.lengths)
        self._states = torch.empty(0)

    def fuse(self, hidden: tuple[Tensor, ...]) -> Tensor:
        """Make features of the target's hidden states, see ``FeatureDrafter.fuse``."""
        return self.drafter.fuse(hidden)

    def step(self, tokens: Tensor, features: Tensor, positions: Tensor, mask: Masks, cache: SlotCache | None) -> Tensor:
        """Run the layers over pairs of ``tokens (R, S)`` and features, see ``FeatureDrafter.step``."""
        return self.drafter.step(self.drafter.embed(tokens, self.parts), features, positions, mask, cache)

    def keep(self, finished: list[bool]) -> None:
        """Drop finished rows."""
        self.pairs.keep(finished)

    def rest(self) -> None:
        """Read what waits when there is too much of it."""
        if self.pairs.pending > _MOST_PENDING:
            self.pairs.read(self._texts())
            self.pairs.settle()

    def start(self, wanted: list[int], nodes: int) -> list[int]:
        """Read every true pair; the newest one becomes the root."""
        self._states = self.pairs.read(self._texts(), spare=nodes)
        return self.pairs.live

    def laws(self, depth: int) -> Tensor:
        """Return what the head says of the newest states."""
        return self.drafter.logits(self._states, self.parts)

    def advance(self, level: Level) -> None:
        """Run drafted pairs: a node's token beside its parent's state."""
        self._states = self.pairs.run(level.tokens, level.of_parents(self._states), level.tree)

    def finish(self) -> None:
        """Forget the drafted pairs."""
        self.pairs.settle()

    def observe(self, round: Round) -> None:
        """Take a round's features: of the whole prompt in round zero, else of root and accepted path."""
        if self._prompt is not None:
            width = round.hidden[0].shape[1]
            starts = [width - length for length in self._prompt]
            self.pairs.add(round.hidden, starts, self._prompt)
            self._prompt = None
            return
        counts = [len(path) + 1 for path in round.paths]
        longest = max(counts)
        hidden = tuple(layer[:, :longest] for layer in round.hidden)
        self.pairs.add(hidden, [0] * len(counts), counts)

    def _texts(self) -> list[list[int]]:
        return [self._sequences.tokens[row] for row in self.pairs.live]
