"""MedusaDrafter: heads that read one hidden state and each guess a token further on (Cai et al. 2024, "Medusa")."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_specgen.checkpoints.config import DrafterConfig
from hf_specgen.checkpoints.methods import HEADS, Method
from hf_specgen.checkpoints.serving import medusa_servers
from hf_specgen.drafting.borrowed import TargetParts
from hf_specgen.drafting.drafter import Call
from hf_specgen.drafting.fill import LevelModel, LevelSession
from hf_specgen.drafting.learned import LearnedDrafter, Objective, TrainingOutput
from hf_specgen.drafting.lengths import DraftSettings, Habits
from hf_specgen.drafting.shapes import StaticShape
from hf_specgen.drafting.unrolling import Lesson, chosen, told, weighted
from hf_specgen.errors import IncompatibleDrafter, SpecGenError
from hf_specgen.models.facts import TOKEN_OVERHEAD, TargetFacts, holds_numbers, logits_width, other_layers, whole
from hf_specgen.models.taps import FINAL
from hf_specgen.models.wrappers import bare, input_device
from hf_specgen.round.records import Round

_HUB = ("revision", "token", "cache_dir", "local_files_only")


class MedusaConfig(DrafterConfig):
    """Describe Medusa heads: how many, of how many residual blocks, with or without biases and heads of their own."""

    method = "medusa"
    architecture = "MedusaDrafter"
    embeds_tokens = False

    def __init__(
        self,
        method: str | None = None,
        num_heads: int = 0,
        num_head_layers: int = 1,
        head_bias: bool = True,
        **kwargs: Any,
    ) -> None:
        self.num_heads = num_heads
        self.num_head_layers = num_head_layers
        self.head_bias = head_bias
        super().__init__(method, **kwargs)

    @property
    def deepest(self) -> int | None:
        """Return the number of heads: each guesses one token."""
        return self.num_heads or None

    @property
    def size(self) -> str:
        """Say in a line how large the drafter is."""
        return f"{self.num_heads} heads of hidden size {self.hidden_size}"

    @property
    def facts(self) -> dict[str, str]:
        """Return what a model card lists of the heads."""
        return {"heads": f"{self.num_heads} of {self.num_head_layers} residual block(s)"}

    @property
    def notes(self) -> tuple[str, ...]:
        """Say how many heads there are."""
        return (f"{self.num_heads} heads of {self.num_head_layers} residual blocks",)

    @property
    def head_names(self) -> tuple[str, ...]:
        """Return the name of every head's last matrix, none where they end in the target's head."""
        heads = range(self.num_heads) if self.own_head else ()
        return tuple(f"{head}.{self.num_head_layers}.weight" for head in heads)


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

    config_class = MedusaConfig
    config: MedusaConfig
    method = "medusa"
    hidden_layers = (FINAL,)

    def __init__(self, config: MedusaConfig) -> None:
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
        drafter = cls(MedusaConfig(**{**sizes, **settings})).to(input_device(target))
        drafter.attach(target)
        with torch.no_grad():
            for name, parameter in drafter.named_parameters():
                parameter.zero_() if ".linear." in name else parameter.copy_(_head_rows(drafter.parts, known))
            for offsets in drafter.buffers():
                offsets.copy_(known - torch.arange(len(known)))
        return drafter

    @classmethod
    def usual_fields(cls, facts: TargetFacts, steps: int | None = None) -> dict[str, Any]:
        """Return how many heads there are."""
        return {"num_heads": steps or METHOD.usual_steps}

    @classmethod
    def new(
        cls, target: PreTrainedModel, ids: Tensor | None = None, warm: bool = True, **settings: Any
    ) -> tuple[MedusaDrafter, list[str]]:
        """Build heads as ``for_target`` does, see ``LearnedDrafter``; they have no other beginning than a warm one."""
        fields = {**cls.usual_fields(TargetFacts.of(target)), **settings}
        heads = cls.for_target(target, ids=ids, **fields)
        return heads.float().cpu(), [f"{fields['num_heads']} heads that start as the target's own"]

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

    def check_backbone(self, model: PreTrainedModel) -> None:
        """Refuse a target some layers of which are not those that Medusa-2 heads were trained with."""
        name = self.config.target.get("name")
        others = other_layers(model, self.config.target.get("layers") or {})
        if others:
            raise IncompatibleDrafter(
                f"these Medusa-2 heads were trained together with the backbone of {name}, and {', '.join(others[:3])} "
                f"of the target are others. Load the target from there: AutoModelForCausalLM.from_pretrained({name!r})."
            )

    def check_target(self, facts: TargetFacts) -> None:
        """Refuse another backbone than the one Medusa-2 heads were trained with; else as every drafter does.

        Raises: ``IncompatibleDrafter``.
        """
        target = self.config.target
        known = target.get("fingerprint")
        name = target.get("name")
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
        lesson = Lesson(*inputs)
        ids = input_ids.flatten()
        depths = []
        states = features[0].flatten(0, 1)
        last = last_hidden.flatten(0, 1)
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

    def head(self, number: int, states: Tensor, parts: TargetParts | None = None) -> Tensor:
        """Return one head's logits ``(..., V_draft)`` of states ``(..., H)``; head 0 guesses the token after the next.

        ``parts``: what is borrowed of the target, by default of the one that was attached.
        Source: Cai et al. 2024, section 2.1.
        """
        features = self.get_submodule(str(number))(states)
        if self.config.own_head:
            return torch.as_tensor(features)
        return (parts or self.parts).logits(features)

    def begin(self, call: Call) -> MedusaSession:
        """Settle what to draft.

        Raises: ``SpecGenError`` for a tree that is deeper than there are heads or that cannot be drawn, and for a
        threshold for trees.
        """
        return MedusaSession(self, self.parts_of(call.target.model), call)

    def habits(self, call: Call, parts: TargetParts) -> Habits:
        """Return how the drafter drafts where nobody asks for anything else."""
        config = self.config
        heads = config.num_heads
        tree = config.tree
        if tree is None and call.device.type != "cpu":
            tree = "medusa"
        return Habits(
            title=self.title,
            usual=StaticShape.chain(heads),
            longest=heads,
            constant=min(4, heads),
            level_cost=self._head_cost(call, parts),
            deepest=heads,
            reason=f"it has {heads} head{'s' * (heads > 1)}",
            tree=tree,
            num_tokens=config.num_tokens,
            confidence=self.confidence,
            sample=config.sample,
            costs=self.costs,
        )

    def _head_cost(self, call: Call, parts: TargetParts) -> float:
        """Return the cost of one head relative to one plain step of the target, by the weights both read."""
        size = TOKEN_OVERHEAD + sum(weight.numel() for weight in self.get_submodule("0").parameters())
        if not self.config.own_head:
            size += parts.head_size
        return max(0.01, size / max(1, call.sequences.target_size))


class MedusaSession(LevelSession):
    """Draft for one call with one head per level."""

    model: MedusaLevels

    def __init__(self, drafter: MedusaDrafter, parts: TargetParts, call: Call) -> None:
        settings = DraftSettings(call, drafter.habits(call, parts))
        super().__init__(call, MedusaLevels(drafter, parts, call), settings)


class MedusaLevels(LevelModel):
    """Keep each row's newest state of the target ``(B, D)``; the law at a depth is that depth's head."""

    def __init__(self, drafter: MedusaDrafter, parts: TargetParts, call: Call) -> None:
        self.drafter = drafter
        self.parts = parts
        self._device = call.device
        ids = drafter.target_ids
        self.target_ids = None if ids is None else ids.to(call.device)
        self.states: Tensor | None = None
        self._read = torch.empty(0)

    def start(self, wanted: list[int], nodes: int) -> list[int]:
        """Take the states of the rows that draft."""
        if self.states is None:
            raise SpecGenError("MedusaDrafter was asked for a draft before round zero: the loop observes it first.")
        live = [row for row, want in enumerate(wanted) if want]
        weight = next(self.drafter.parameters())
        rows = torch.tensor(live, device=self.states.device)
        states = self.states if len(live) == len(wanted) else self.states.index_select(0, rows)
        self._read = states.to(weight.device, weight.dtype)
        return live

    def laws(self, depth: int) -> Tensor:
        """Return what the head of a depth says: one law for all nodes of the level."""
        return self.drafter.head(depth - 1, self._read, self.parts)[:, None]

    def observe(self, round: Round) -> None:
        """Take the state of each row's last accepted node, of the prompt's end in round zero."""
        states = round.hidden[0]
        if self.states is None:
            self.states = states[:, -1]
            return
        rows = torch.arange(len(states), device=states.device)
        self.states = states[rows, round.verdict.n]


def _head_rows(parts: TargetParts, ids: Tensor) -> Tensor:
    """Return rows of a target's head, with its factor. Raises: ``IncompatibleDrafter`` where it holds no floats."""
    head = parts.head.get_parameter("weight")
    if not holds_numbers(head):
        raise IncompatibleDrafter(
            f"the heads begin as copies of the target's, which holds no plain floats ({type(head).__name__}, "
            f"{head.dtype}): an unquantised head is required. Load the target unquantised, or pass own_head=False."
        )
    return whole(head.detach())[ids.to(head.device)] * parts.scale


METHOD = Method(
    name="medusa",
    title="Medusa heads",
    drafter=MedusaDrafter,
    config=MedusaConfig,
    trainer="hf_specgen.trainers.medusa:MedusaTrainer",
    depths=HEADS,
    usual_steps=4,
    learns_vocabulary=True,
    servers=medusa_servers,
)
