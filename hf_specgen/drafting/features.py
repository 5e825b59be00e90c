"""FeatureDrafter: what EAGLE-like drafters share. They predict the target's next feature from its last one and a token.

Feature i of the target is paired with token i + 1; the drafter's layers run over these pairs, pair i at position i,
and pair i foretells token i + 2. Pairs of accepted tokens are always fed again with the target's own features.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace

import torch
from torch import Tensor

from hf_specgen import ops
from hf_specgen.checkpoints.config import DrafterConfig
from hf_specgen.drafting.drafter import DraftLength, Pace, warn_shallow
from hf_specgen.drafting.fill import Grower, Laws, Plan, check_confidence, check_drawn, check_shape
from hf_specgen.drafting.layers import Masks, Rotary
from hf_specgen.drafting.learned import LearnedDrafter
from hf_specgen.drafting.pair_cache import PairCache
from hf_specgen.drafting.shapes import DynamicShape, Shape, StaticShape, depth_of, parse_shape
from hf_specgen.errors import IncompatibleDrafter, SpecGenError
from hf_specgen.models.facts import LAYER_OVERHEAD, TOKEN_OVERHEAD
from hf_specgen.models.slot_cache import SlotCache
from hf_specgen.round.costs import Costs, Rate
from hf_specgen.round.records import DenseQ, Draft, Round, spread
from hf_specgen.round.sequences import Sequences

_DEEPEST = 8
_CONSTANT = 4
_MOST_PENDING = 256  # columns of hidden states that wait while the drafter rests


class FeatureDrafter(LearnedDrafter):
    """Draft token by token with decoder layers that are fed the target's features, their own beyond the text.

    ``config.tree`` None means a chain on CPUs and a dynamic tree elsewhere (the latter unmeasured). A chain is as long
    as pays by the acceptance seen in the call, or ``num_tokens`` long. ``costs`` replaces the assumed costs,
    ``confidence`` ends a row of a chain where the best token's probability is lower.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        self.layer_config = config.layer_config()
        self.rotary = Rotary(self.layer_config, config.layer_type)

    @abstractmethod
    def fuse(self, hidden: tuple[Tensor, ...]) -> Tensor:
        """Make features ``(B, S, H)`` of the target's ``hidden_layers``, one ``(B, S, D)`` each."""

    @abstractmethod
    def step(self, tokens: Tensor, features: Tensor, positions: Tensor, mask: Masks, cache: SlotCache | None) -> Tensor:
        """Run the layers over pairs and return what is fed back as the next features, ``(B, S, H)``.

        Shapes: ``tokens (B, S)`` target ids, ``features (B, S, H)``, ``positions (B or 1, S)``, ``mask`` bool
        ``(B or 1, 1, S, T)``, or one for each kind of layer.
        """

    @abstractmethod
    def logits(self, states: Tensor) -> Tensor:
        """Return logits over the drafter's ids ``(B, S, V_draft)`` of what ``step`` returned."""

    def to_target(self, ids: Tensor) -> Tensor:
        """Return the target's ids of the drafter's; negative ones stay."""
        offsets = self._buffers.get("d2t")
        return ids if offsets is None else torch.where(ids < 0, ids, ids + offsets[ids.clamp(min=0)])

    @property
    def draws(self) -> bool:
        """Tell whether ``config.sample`` asks for drawn tokens."""
        return self.config.sample

    @property
    def draft_cost(self) -> float:
        """Return what one level of a draft costs, in plain steps."""
        return self.session.costs.draft

    def begin(self, sequences: Sequences) -> None:
        """Start with empty rows; the prompt's features come with round zero.

        Raises: ``IncompatibleDrafter`` on another device than the target's, ``SpecGenError`` for a dynamic tree of
        drawn tokens or a threshold for trees.
        """
        self._session = None
        device = self.parts.device
        mine = next(self.parameters()).device
        if mine != device:
            raise IncompatibleDrafter(
                f"the drafter is on {mine} and the target's embedding on {device}: one device is required. Call "
                f"drafter.to({str(device)!r})."
            )
        self.keep_session(Session(self, sequences), sequences)

    def propose(self, sequences: Sequences) -> Draft:
        """Read the target's features of what was accepted, then draft for the rows that are not finished."""
        return self.session.propose(sequences)

    def observe(self, round: Round) -> None:
        """Keep the target's features, and learn how often drafts are accepted."""
        self.session.observe(round)

    @property
    def session(self) -> Session:
        """Return what the running call keeps. Raises: ``SpecGenError`` when there is none."""
        if not isinstance(self._session, Session):
            raise SpecGenError(f"{type(self).__name__} drafts inside generate() only: begin() comes first.")
        return self._session


class Session:
    """Keep what one ``generate()`` needs: pairs, shape, pace."""

    def __init__(self, drafter: FeatureDrafter, sequences: Sequences) -> None:
        rows, device = len(sequences), sequences.prompt.device
        self.drafter = drafter
        self.costs = drafter.costs or replace(sequences.costs, draft=_share(drafter, sequences))
        self.shape, self.pace, self._deepest = _choose(drafter, sequences, self.costs)
        asked = sequences.request.confidence
        self.confidence = (asked if asked is not None else drafter.confidence) or 0.0
        check_confidence(self.confidence, self.pace is not None)
        reserve = max(sequences.lengths) + sequences.budget + 1
        self.pairs = PairCache(drafter, drafter.layer_config, rows, device, reserve)
        self._ids = drafter.target_ids
        self._plans: dict[int, Plan] = {}
        self._prompt: list[int] | None = list(sequences.lengths)

    def propose(self, sequences: Sequences) -> Draft:
        """Draft one round."""
        self.pairs.keep(sequences.finished)
        live = self.pairs.live
        every = self._wanted(sequences)
        wanted = [every[row] for row in live]
        texts = [sequences.tokens[row] for row in live]
        if not any(wanted):
            if self.pairs.pending > _MOST_PENDING:
                self.pairs.read(texts)
                self.pairs.settle()
            return Draft.empty(len(sequences), sequences.prompt.device)
        laws = Laws(sequences, live, self.drafter.config.sample, self._ids)
        grower = Grower(self.drafter, self.pairs, laws)
        if isinstance(self.shape, DynamicShape):
            deepest = min(self.shape.depth, max(wanted))
            states = self.pairs.read(texts, spare=(deepest - 1) * self.shape.top_k)
            left = [sequences.remaining[row] for row in live]
            draft = grower.dynamic(self.shape, states, wanted, self.costs, left)
        else:
            plan = self._plan(self.shape, max(wanted))
            states = self.pairs.read(texts, spare=len(plan.shape.internal))
            draft = grower.fixed(plan, states, wanted, self.confidence)
        self.pairs.settle()
        return _spread(draft, live, len(sequences), isinstance(self.shape, DynamicShape))

    def observe(self, round: Round) -> None:
        """Take a round's features: of the whole prompt in round zero, else of root and accepted path."""
        if self._prompt is not None:
            width = round.hidden[0].shape[1]
            self.pairs.add(round.hidden, [width - length for length in self._prompt], self._prompt)
            self._prompt = None
            return
        counts = [len(path) + 1 for path in round.paths]
        longest = max(counts)
        self.pairs.add(tuple(layer[:, :longest] for layer in round.hidden), [0] * len(counts), counts)
        if self.pace is not None:
            self.pace.observe(round)

    def _wanted(self, sequences: Sequences) -> list[int]:
        """Return how deep every row of the batch drafts."""
        if self.pace is not None:
            return self.pace.wanted(sequences.room, sequences.remaining)
        return [min(room, self._deepest) for room in sequences.room]

    def _plan(self, shape: StaticShape, depth: int) -> Plan:
        if depth not in self._plans:
            cut = shape.cut(depth) if self.pace is None else StaticShape.chain(depth)
            self._plans[depth] = Plan(cut, self.drafter.parts.device)
        return self._plans[depth]


def _choose(drafter: FeatureDrafter, sequences: Sequences, costs: Costs) -> tuple[Shape, Pace | None, int]:
    """Settle the shape of the drafts, the pace of a chain, and how deep a tree may go."""
    config, request = drafter.config, sequences.request
    chain = StaticShape.chain(_DEEPEST)
    device = sequences.prompt.device
    usual = chain if device.type == "cpu" or config.sample or not ops.has_doubles(device) else DynamicShape()
    shape = parse_shape(config.tree, usual)
    check_shape(shape, device)
    draws = config.sample and not sequences.greedy
    if draws:
        check_drawn(shape, sequences.rule)
    if isinstance(shape, StaticShape) and shape.is_chain and not any(shape.ranks):
        if draws and request.schedule is None and sequences.rule != "gumbel":
            request = replace(request, schedule="constant")  # what is drawn depends on the length: neighbours no
        own = config.num_tokens if shape is chain or config.num_tokens else len(shape)
        default = _CONSTANT if request.schedule == "constant" else _DEEPEST
        length = DraftLength.choose(request, own, default, costs)
        length.begin(len(sequences))
        return shape, Pace(length, Rate(0.6, 0.7)), 0
    depth = depth_of(shape)
    asked = request.num_tokens if request.num_tokens is not None else config.num_tokens
    if asked is not None:
        length = DraftLength.choose(replace(request, schedule=None), asked, asked, costs)
        warn_shallow(drafter.title, length.num_tokens, depth, f"its tree (tree={config.tree!r}) is no deeper")
        depth = min(depth, length.num_tokens)
    return shape, None, depth


def _share(drafter: FeatureDrafter, sequences: Sequences) -> float:
    """Return what drafting a token costs, in plain steps: what is read for it and its layers, over the target's."""
    sizes = {name: parameter.numel() for name, parameter in drafter.named_parameters()}
    read = sum(size for name, size in sizes.items() if not name.startswith("embed_tokens"))
    if not any(name.startswith("lm_head") for name in sizes):
        read += drafter.parts.head_size
    read += LAYER_OVERHEAD * drafter.config.num_hidden_layers + TOKEN_OVERHEAD
    return max(0.03, read / max(1, sequences.target_size))


def _spread(draft: Draft, live: list[int], rows: int, per_row: bool) -> Draft:
    """Return the draft of the whole batch: finished rows get no nodes. ``per_row``: every row has its own tree."""
    if len(live) == rows:
        return draft
    place = torch.tensor(live, device=draft.tokens.device)
    tree, q = draft.tree, draft.q
    if per_row:
        spread_parents = tree.parents.new_full((rows, len(tree)), -1).index_copy_(0, place, tree.parents)
        tree = replace(tree, parents=spread_parents)
    if isinstance(q, DenseQ):
        q = DenseQ(spread(q.logits, place, rows))
    tokens, n_valid = (spread(part, place, rows) for part in (draft.tokens, draft.n_valid))
    return replace(draft, tokens=tokens, tree=tree, n_valid=n_valid, q=q)
