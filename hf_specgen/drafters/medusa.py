"""MedusaDrafter: heads that read one hidden state and each guess a token further on (Cai et al. 2024, "Medusa")."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_specgen.checkpoints.config import DrafterConfig
from hf_specgen.drafting.borrowed import TargetParts
from hf_specgen.drafting.drafter import DraftLength, Pace, fit_width, no_numbers, warn_shallow
from hf_specgen.drafting.fill import check_confidence, check_drawn, check_shape
from hf_specgen.drafting.learned import LearnedDrafter, Objective, TrainingOutput
from hf_specgen.drafting.shapes import ABSENT, DynamicShape, Growth, Shape, StaticShape, depth_of, parse_shape, top
from hf_specgen.drafting.unrolling import Lesson, chosen, told, weighted
from hf_specgen.errors import IncompatibleDrafter, SpecGenError
from hf_specgen.models.facts import TOKEN_OVERHEAD, TargetFacts, holds_numbers, logits_width, other_layers, whole
from hf_specgen.models.taps import FINAL
from hf_specgen.models.wrappers import bare, input_device
from hf_specgen.round.coins import Coins
from hf_specgen.round.costs import Rate
from hf_specgen.round.records import DenseQ, Draft, Round, Tree, spread
from hf_specgen.round.sequences import Sequences

_HUB = ("revision", "token", "cache_dir", "local_files_only")


class ResBlock(nn.Module):
    """Add what a linear layer and SiLU make of a state to the state."""

    def __init__(self, size: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size, bias=bias)

    def forward(self, states: Tensor) -> Tensor:
        """Return new states of the same shape."""
        return states + F.silu(self.linear(states))


class MedusaDrafter(LearnedDrafter):
    """Draft with one head per token: head h reads the newest state of the target and guesses the token h + 2 further.

    Heads do not see each other's tokens: what a node may hold depends on its depth alone. ``config.tree``: None is a
    chain on CPUs and the tree ``"medusa"`` elsewhere (unmeasured there). ``num_tokens`` bounds how deep a draft goes,
    and a number beyond the heads warns.
    ``costs`` replaces the assumed costs of a pass, ``confidence`` ends a chain where the best token is less likely.

    Raises: ``IncompatibleDrafter`` for a config without heads, ``SpecGenError`` for a tree deeper than there are heads.
    Source: Cai et al. 2024, "Medusa: simple LLM inference acceleration framework with multiple decoding heads".
    """

    method = "medusa"
    hidden_layers = (FINAL,)

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        if config.num_heads < 1 or not (config.own_head or config.num_head_layers):
            raise IncompatibleDrafter(
                f"a Medusa config has num_heads={config.num_heads}, num_head_layers={config.num_head_layers} and "
                f"own_head={config.own_head}: at least one head that does something is required."
            )
        size = config.hidden_size
        for head in range(config.num_heads):
            parts: list[nn.Module] = [ResBlock(size, config.head_bias) for _ in range(config.num_head_layers)]
            if config.own_head:
                parts.append(nn.Linear(size, config.draft_vocab_size, bias=False))
            self.add_module(str(head), nn.Sequential(*parts))
        if config.reduces_vocabulary:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))

    @classmethod
    def for_target(
        cls, model: nn.Module, num_heads: int = 5, ids: Tensor | None = None, **settings: Any
    ) -> MedusaDrafter:
        """Build heads to train: their blocks add nothing yet, their last matrices are copies of the target's head.

        ``ids (V_draft)``: the target's ids that the heads cover, None for all. ``settings`` go to ``DrafterConfig``;
        with ``own_head=False`` the heads are blocks alone and share the target's head, which covers all ids.
        Raises: ``IncompatibleDrafter`` for a target without a language-model head, ``SpecGenError`` for both at once.
        """
        if ids is not None and not settings.get("own_head", True):
            raise SpecGenError("ids= and own_head=False were given: the target's head covers all ids. Drop one.")
        target = bare(model)
        facts = TargetFacts.of(target)
        sizes = {"hidden_size": facts.hidden_size, "vocab_size": facts.vocab_size, "target": facts.to_dict()}
        width = min(facts.vocab_size, logits_width(target))
        known = torch.arange(width) if ids is None else ids.cpu().sort().values
        sizes |= {"draft_vocab_size": len(known), "num_heads": num_heads}
        drafter = cls(DrafterConfig(cls.method, **{**sizes, **settings})).to(input_device(target))
        drafter.attach(target)
        with torch.no_grad():
            for name, parameter in drafter.named_parameters():
                parameter.zero_() if ".linear." in name else parameter.copy_(_head_rows(drafter.parts, known))
            for offsets in drafter.buffers():
                offsets.copy_(known - torch.arange(len(known)))
        return drafter

    @classmethod
    def with_target(cls, name: str | Path, **settings: Any) -> tuple[PreTrainedModel, MedusaDrafter]:
        """Load a Medusa-2 checkpoint whole: the backbone as the target, and the heads that belong to it.

        ``settings`` go to ``AutoModelForCausalLM.from_pretrained``. Raises: as ``load_drafter`` does.
        """
        if settings.get("trust_remote_code"):
            raise SpecGenError("trust_remote_code: nothing of a drafter's repository is ever executed. Leave it out.")
        target = AutoModelForCausalLM.from_pretrained(name, **settings)
        hub = {key: settings[key] for key in _HUB if key in settings}
        return target, cls.from_pretrained(name, target=target, **hub)

    def attach(self, model: nn.Module) -> None:
        """Attach as every drafter does; some layers too must be those that Medusa-2 heads were trained with."""
        before = self._parts
        super().attach(model)
        others = [] if self._parts is before else other_layers(model, self.config.target.get("layers") or {})
        if others:
            self._parts, name = before, self.config.target.get("name")
            raise IncompatibleDrafter(
                f"these Medusa-2 heads were trained together with the backbone of {name}, and {', '.join(others[:3])} "
                f"of the target are others. Load the target from there: AutoModelForCausalLM.from_pretrained({name!r})."
            )

    def check_target(self, facts: TargetFacts) -> None:
        """Refuse another backbone than the one Medusa-2 heads were trained with; else as every drafter does.

        Raises: ``IncompatibleDrafter``.
        """
        target = self.config.target
        known, name = target.get("fingerprint"), target.get("name")
        if target.get("own_backbone") and known and facts.fingerprint and known != facts.fingerprint:
            raise IncompatibleDrafter(
                f"these Medusa-2 heads were trained together with the backbone of {name or 'their checkpoint'} "
                f"(fingerprint {known}), and {facts.name or 'the target'} is another model ({facts.fingerprint}). Load "
                f"the target from the same checkpoint: AutoModelForCausalLM.from_pretrained({name!r})."
            )
        super().check_target(facts)

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
        decay: float = 0.8,
        wants_teacher: bool = True,
        wants_rates: bool = False,
    ) -> TrainingOutput:
        """Compare every head with the target at every place of a text; head h counts ``decay ** h``.

        Shapes: as in ``Eagle3Drafter.forward``. Head h at place t is judged by token t + 2 + h. Without
        ``wants_teacher`` the text alone judges, and the target's head is not run.
        """
        inputs = input_ids, features, last_hidden, loss_mask, objective, target_head, document_ids, weights, wants_rates
        lesson, ids, depths = Lesson(*inputs), input_ids.flatten(), []
        states, last = features[0].flatten(0, 1), last_hidden.flatten(0, 1)
        loss = torch.zeros((), device=states.device)
        for head in range(self.config.num_heads):
            place = chosen(lesson, 2 + head)
            token = place + 2 + head
            found = objective(
                self._head_states(head, states[place]),
                self._head_weight(head, target_head),
                last[token - 1] if wants_teacher else None,
                target_head if wants_teacher else None,
                weighted(lesson, place, 2 + head, decay**head),
                labels=ids[token],
                rows=self.target_ids,
            )
            loss = loss + found.loss_sum
            depths.append((place, found.hits, found.alpha, found.ratio if self.draws else found.match))
        return told(lesson, loss, depths)

    def _head_states(self, number: int, states: Tensor) -> Tensor:
        """Return what the last matrix of a head reads."""
        states = states.to(next(self.parameters()).dtype)
        for block in list(self.get_submodule(str(number)).children())[: self.config.num_head_layers]:
            states = block(states)
        return states

    def _head_weight(self, number: int, target_head: Tensor) -> Tensor:
        """Return the last matrix of a head, its own or the target's."""
        if not self.config.own_head:
            ids = self.target_ids
            return target_head[: self.config.vocab_size] if ids is None else target_head[ids]
        return self.get_submodule(f"{number}.{self.config.num_head_layers}").get_parameter("weight")

    def head(self, number: int, states: Tensor) -> Tensor:
        """Return one head's logits ``(..., V_draft)`` of states ``(..., H)``; head 0 guesses the token after the next.

        Source: Cai et al. 2024, section 2.1.
        """
        features = self.get_submodule(str(number))(states)
        if self.config.own_head:
            return torch.as_tensor(features)
        return self.parts.logits(features)

    def begin(self, sequences: Sequences) -> None:
        """Settle what to draft.

        Raises: ``SpecGenError`` for a tree that is deeper than there are heads or that cannot be drawn, and for a
        threshold for trees.
        """
        self.keep_session(_Session(self, sequences), sequences)

    @property
    def _open(self) -> _Session:
        if not isinstance(self._session, _Session):
            raise SpecGenError("MedusaDrafter was asked for a draft before begin(): the loop calls begin() first.")
        return self._session

    @property
    def draft_cost(self) -> float:
        """Return what one head costs, in plain steps."""
        return self._open.costs.draft

    def propose(self, sequences: Sequences) -> Draft:
        """Evaluate as many heads as the draft is deep, for the rows that draft."""
        return self._open.propose(sequences)

    def observe(self, round: Round) -> None:
        """Keep each row's newest state: that of the last accepted node."""
        self._open.observe(round)


class _Session:
    """Hold what one ``generate()`` needs: its shape and lengths, and each row's newest state ``(B, D)``."""

    def __init__(self, drafter: MedusaDrafter, sequences: Sequences) -> None:
        self._drafter, self._states = drafter, torch.empty(0)
        self._device, self._seen = sequences.prompt.device, False
        config, asked = drafter.config, sequences.request
        samples = config.sample and not sequences.greedy
        self._shares_noise = samples and sequences.rule == "gumbel"
        self._draws = samples and not self._shares_noise
        schedule = asked.schedule or ("constant" if self._draws else None)  # neighbours must not set what is drawn
        default = min(4, config.num_heads) if schedule == "constant" else config.num_heads
        self.costs = drafter.costs or replace(sequences.costs, draft=_cost(drafter, sequences))
        length = DraftLength.choose(replace(asked, schedule=schedule), config.num_tokens, default, self.costs)
        length.begin(len(sequences))
        self._pace = Pace(length, Rate(0.6, 0.7))
        number = asked.num_tokens if asked.num_tokens is not None else config.num_tokens
        shape = _shape(config, self._device)
        check_shape(shape, self._device)
        heads = f"it has {config.num_heads} head{'s' * (config.num_heads > 1)}"
        reason = heads if depth_of(shape) == config.num_heads else f"its tree (tree={config.tree!r}) is no deeper"
        warn_shallow(drafter.title, None if number is None else length.num_tokens, depth_of(shape), reason)
        self._shape = _bounded(shape, None if number is None else length.num_tokens)
        if self._draws:
            check_drawn(self._shape, sequences.rule)
        unsure = asked.confidence if asked.confidence is not None else drafter.confidence
        self._confidence = unsure or 0.0
        check_confidence(self._confidence, self._is_chain)
        self._peaks: list[Tensor] = []  # of the round being drafted
        self._parts: dict[int, tuple[StaticShape, Tree]] = {}
        ids = drafter.target_ids
        self._ids = None if ids is None else ids.to(self._device)
        # processors that only truncate leave the best tokens the best; a law of its own for every node of a tree is
        # worth its price only where tokens are drawn from it
        warp, grows = sequences.warp, isinstance(self._shape, DynamicShape)
        processed = warp.steps and (grows or samples or warp.truncation is None)
        self._warps = bool(processed) and (samples or self._is_chain or not warp.needs_prefix)

    @property
    def _is_chain(self) -> bool:
        return isinstance(self._shape, StaticShape) and self._shape.is_chain

    def observe(self, round: Round) -> None:
        """Take the state of the last accepted node, of the prompt's end in round zero."""
        states, self._seen, first = round.hidden[0], True, not self._seen
        if first:
            self._states = states[:, -1]
            return
        rows = torch.arange(len(states), device=states.device)
        self._states = states[rows, round.verdict.n]
        if self._is_chain:
            self._pace.observe(round)

    def propose(self, sequences: Sequences) -> Draft:
        """Draft for the rows that have room."""
        room = [min(space, depth_of(self._shape)) for space in sequences.room]
        wanted = self._pace.wanted(room, sequences.remaining) if self._is_chain else room
        live = [row for row, want in enumerate(wanted) if want]
        if not live:
            return Draft.empty(len(sequences), self._device)
        owners, self._peaks = torch.tensor(live, device=self._device), []
        some = next(self._drafter.parameters())
        states = self._states.index_select(0, owners).to(some.device, some.dtype)
        if isinstance(self._shape, DynamicShape):
            draft = self._grow(sequences, states, live, [wanted[row] for row in live])
        else:
            draft = self._fill(sequences, states, live, [wanted[row] for row in live])
        return replace(draft, broken=no_numbers(self._peaks, self._device))

    def _logits(self, depth: int, states: Tensor) -> Tensor:
        """Return the logits ``(R, V_draft)`` of the tokens ``depth`` below the root; ids that do not exist are cut."""
        logits = self._drafter.head(depth - 1, states).to(self._device)
        self._peaks.append(logits.amax())
        return logits

    def _fill(self, sequences: Sequences, states: Tensor, live: list[int], wanted: list[int]) -> Draft:
        """Fill a fixed tree, level by level."""
        (shape, _), owners = self._part(max(wanted)), torch.tensor(live, device=self._device)
        coins = sequences.coins().take(owners) if self._draws or self._shares_noise else None
        tokens, laws = torch.empty(len(live), 0, dtype=torch.long, device=self._device), []
        for depth in range(1, shape.max_depth + 1):
            logits = self._logits(depth, states)[:, : sequences.vocab_size]
            scores = self._processed(sequences, shape, depth, logits, owners, tokens)
            self._stop_unsure(scores, depth, wanted)
            if depth > max(wanted):
                break
            tokens = torch.cat([tokens, self._pick(shape, depth, scores, coins)], 1)
            if self._draws:
                laws.append(shape.laws(depth, scores))
        if not tokens.shape[1]:
            return Draft.empty(len(sequences), self._device)
        shape, tree = self._part(max(wanted))
        rows, n_valid = len(sequences), shape.n_valid(torch.tensor(wanted, device=self._device))
        q = DenseQ(self._spread(torch.cat(laws, 1), owners, rows)) if laws else None
        tokens = self._spread(self._with_pads(tokens, n_valid), owners, rows)
        return Draft(tokens, tree, self._spread(n_valid, owners, rows), q, self._draws and not shape.is_chain)

    def _part(self, depth: int) -> tuple[StaticShape, Tree]:
        """Return the fixed tree down to a depth; what is derived from it is made once a call."""
        assert isinstance(self._shape, StaticShape)
        if depth not in self._parts:
            shape = self._shape.cut(depth)
            self._parts[depth] = shape, shape.tree(self._device)
        return self._parts[depth]

    def _pick(self, shape: StaticShape, depth: int, scores: Tensor, coins: Coins | None) -> Tensor:
        """Return a level's tokens ``(R, n)`` in target ids: the best, drawn, or the best under the shared noise."""
        if coins is not None and self._draws:
            return shape.draw(depth, scores, coins)
        if coins is not None:
            rows = torch.arange(len(scores), device=self._device)
            scores = scores + coins.gumbel(rows, depth - 1, scores.shape[-1])[:, None]
        picked = shape.best(depth, scores)
        if self._ids is None or scores.shape[-1] != len(self._ids):
            return picked
        return self._ids[picked.clamp(min=0)].masked_fill(picked == ABSENT, ABSENT)

    def _processed(
        self, sequences: Sequences, shape: StaticShape, depth: int, logits: Tensor, owners: Tensor, tokens: Tensor
    ) -> Tensor:
        """Return scores of the nodes that a level hangs on, ``(R, F, V)``; F is 1 where all have the same.

        They are the head's own over draft ids, or processed ones over target ids.
        """
        if not (self._warps or self._draws or self._shares_noise):
            return logits[:, None]
        scores = self._over_target(logits, sequences.vocab_size)
        if not sequences.warp.needs_prefix:
            return sequences.warp(scores, owners, lambda _: None)[:, None]
        above = [_way(shape, node) for node in shape.expanding(depth - 1)]
        width, texts = len(above), tokens.tolist()

        def prefix(place: int) -> Tensor | None:
            row, way = place // width, above[place % width]
            text = [texts[row][node] for node in way]
            if ABSENT in text or not sequences.stops.eos.isdisjoint(text):
                return None
            return torch.cat([sequences.prefix(int(owners[row])), tokens[row : row + 1, way]], 1)

        flat = scores.repeat_interleave(width, 0)
        return sequences.warp(flat, owners.repeat_interleave(width), prefix).unflatten(0, (-1, width))

    def _over_target(self, logits: Tensor, vocab: int) -> Tensor:
        """Return float32 logits over the target's ids; those that the heads do not know are impossible."""
        if self._ids is None:
            return fit_width(logits.float(), vocab)
        return logits.new_full((len(logits), vocab), float("-inf"), dtype=torch.float32).index_copy_(
            1, self._ids, logits.float()
        )

    def _stop_unsure(self, scores: Tensor, depth: int, wanted: list[int]) -> None:
        """End chains at a token whose law is flat. The law is known before its token is drawn: nothing is biased."""
        if not self._confidence:
            return
        best = torch.softmax(scores[:, 0].float(), -1).amax(-1).tolist()
        for row, probability in enumerate(best):
            if probability < self._confidence:
                wanted[row] = min(wanted[row], depth - 1)

    def _grow(self, sequences: Sequences, states: Tensor, live: list[int], room: list[int]) -> Draft:
        """Take the likeliest paths of the product of the heads' laws, as many as asked for or as pay."""
        assert isinstance(self._shape, DynamicShape)
        owners, growth, best = torch.tensor(live, device=self._device), Growth(self._shape), []
        width = 1
        for depth in range(1, max(room) + 1):
            logits = self._logits(depth, states)[:, : sequences.vocab_size]
            if self._warps:
                scores = self._over_target(logits, sequences.vocab_size)
                logits = sequences.warp(scores, owners, lambda _: None)
            law = torch.log_softmax(logits.float(), -1)[:, None]
            chances, ids = top(law, min(self._shape.top_k, logits.shape[-1]))
            best.append(ids[:, 0] if self._ids is None or self._warps else self._ids[ids[:, 0]])
            width = growth.add(chances.expand(-1, width, -1))[0].shape[1]
        space = torch.tensor(room, device=self._device)
        remaining = [sequences.remaining[row] for row in live]
        nodes = self._shape.nodes
        nodes = growth.paying(self.costs, remaining, space) if nodes is None else nodes
        if nodes == 0:
            return Draft.empty(len(sequences), self._device)
        ranks, parents, n_valid, _ = growth.finish(nodes, space)
        depths = Tree(parents).depth[:, 1:] - 1
        rows = torch.arange(len(live), device=self._device)[:, None]
        tokens = self._with_pads(torch.stack(best, 1)[rows, depths, ranks], n_valid)
        total = len(sequences)
        parents = self._spread(parents + 1, owners, total) - 1  # rows that draft nothing hang everything on the root
        return Draft(
            self._spread(tokens, owners, total),
            Tree(parents, deepest=self._shape.depth),
            self._spread(n_valid, owners, total),
        )

    def _with_pads(self, tokens: Tensor, n_valid: Tensor) -> Tensor:
        """Mark the nodes behind a row's own as absent: a pad that is a token might be accepted."""
        counted = torch.arange(tokens.shape[1], device=tokens.device) < n_valid[:, None]
        return tokens.masked_fill(~counted, ABSENT)

    def _spread(self, part: Tensor, owners: Tensor, rows: int) -> Tensor:
        return part if len(part) == rows else spread(part, owners, rows)


def _head_rows(parts: TargetParts, ids: Tensor) -> Tensor:
    """Return rows of a target's head, with its factor. Raises: ``IncompatibleDrafter`` where it holds no floats."""
    head = parts.head.get_parameter("weight")
    if not holds_numbers(head):
        raise IncompatibleDrafter(
            f"the heads begin as copies of the target's, which holds no plain floats ({type(head).__name__}, "
            f"{head.dtype}): an unquantised head is required. Load the target unquantised, or pass own_head=False."
        )
    return whole(head.detach())[ids.to(head.device)] * parts.scale


def _way(shape: StaticShape, node: int) -> list[int]:
    """Return the nodes from the root's child down to a node; none for the root."""
    way: list[int] = []
    while node >= 0:
        way.append(node)
        node = shape.parents[node]
    return way[::-1]


def _shape(config: DrafterConfig, device: torch.device) -> Shape:
    """Return the shape asked for, no deeper than there are heads."""
    spec, heads = config.tree, config.num_heads
    chain = StaticShape.chain(heads)
    if spec is None and device.type != "cpu":
        spec = "medusa"
    return parse_shape(spec, chain, heads)


def _bounded(shape: Shape, number: int | None) -> Shape:
    """Cut a tree to a depth; a chain's length is settled elsewhere."""
    if number is None or (isinstance(shape, StaticShape) and shape.is_chain):
        return shape
    if isinstance(shape, DynamicShape):
        return replace(shape, depth=min(shape.depth, number))
    return shape.cut(number)


def _cost(drafter: MedusaDrafter, sequences: Sequences) -> float:
    """Return what one head costs, in plain steps of the target: what is read for it over what a step costs."""
    size = TOKEN_OVERHEAD + sum(weight.numel() for weight in drafter.get_submodule("0").parameters())
    if not drafter.config.own_head:
        size += drafter.parts.head_size
    return max(0.01, size / max(1, sequences.target_size))
