"""StateStepDrafter: a toy method in one file. One linear layer makes the next state of a state and a token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_specgen.checkpoints.config import DrafterConfig
from hf_specgen.checkpoints.formats.base import Checkpoint, Layout, Plan, ReadOptions, Source
from hf_specgen.checkpoints.formats.shared import match, store
from hf_specgen.checkpoints.methods import UNROLLED, Method
from hf_specgen.drafting.borrowed import TargetParts
from hf_specgen.drafting.drafter import Call
from hf_specgen.drafting.fill import Level, LevelModel, LevelSession
from hf_specgen.drafting.learned import LearnedDrafter, Objective, TrainingOutput
from hf_specgen.drafting.lengths import DraftSettings, Habits
from hf_specgen.drafting.shapes import StaticShape
from hf_specgen.drafting.unrolling import Lesson, unroll
from hf_specgen.models.facts import TargetFacts
from hf_specgen.models.taps import FINAL
from hf_specgen.round.records import Round


class StateStepConfig(DrafterConfig):
    """Describe the toy: a square layer, with or without a bias."""

    method = "state_step"

    def __init__(self, method: str | None = None, step_bias: bool = True, **kwargs: Any) -> None:
        self.step_bias = step_bias
        super().__init__(method, **kwargs)


class StateStepDrafter(LearnedDrafter):
    """Step from the target's last state to the next, token by token; the target's head says what a state means."""

    config_class = StateStepConfig
    config: StateStepConfig
    method = "state_step"
    hidden_layers = (FINAL,)

    def __init__(self, config: StateStepConfig) -> None:
        super().__init__(config)
        self.joint = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.step_bias)
        self.post_init()

    @classmethod
    def usual_fields(cls, facts: TargetFacts, steps: int | None = None) -> dict[str, Any]:
        """Return that the head is the target's."""
        return {"own_head": False}

    def forward(
        self,
        input_ids: Tensor,
        features: tuple[Tensor, ...],
        last_hidden: Tensor,
        loss_mask: Tensor,
        objective: Objective,
        target_head: Tensor,
        document_ids: Tensor | None = None,
        weights: Tensor | None = None,
        wants_rates: bool = False,
    ) -> TrainingOutput:
        """Compare three unrolled steps with the target."""
        inputs = input_ids, features, last_hidden, loss_mask, objective, target_head, document_ids, weights, wants_rates
        return unroll(self, Lesson(*inputs), 3, 0.8)

    def fuse(self, hidden: tuple[Tensor, ...]) -> Tensor:
        """Return the one state that is read."""
        return hidden[0].to(self.joint.weight.dtype)

    def step(self, embedded: Tensor, features: Tensor, *_: Any) -> Tensor:
        """Return the next states of states and tokens."""
        return features + torch.tanh(self.joint(torch.cat((embedded.to(features.dtype), features), -1)))

    def head_states(self, states: Tensor) -> Tensor:
        """Return what the target's head reads."""
        return states

    def head_weight(self, target_head: Tensor) -> Tensor:
        """Return the target's head."""
        return target_head[: self.config.vocab_size]

    def begin(self, call: Call) -> LevelSession:
        """Settle what to draft."""
        habits = Habits(
            title="StateStepDrafter",
            usual=StaticShape.chain(4),
            longest=4,
            constant=3,
            level_cost=0.1,
            tree=self.config.tree,
            num_tokens=self.config.num_tokens,
            sample=self.config.sample,
        )
        return LevelSession(
            call, StateStepLevels(self, self.parts_of(call.target.model), call), DraftSettings(call, habits)
        )


class StateStepLevels(LevelModel):
    """Keep each row's newest state of the target ``(B, H)``, and the states of the newest level."""

    def __init__(self, drafter: StateStepDrafter, parts: TargetParts, call: Call) -> None:
        self.drafter = drafter
        self.parts = parts
        self.sequences = call.sequences
        self.newest: Tensor | None = None
        self.level = torch.empty(0)

    def start(self, wanted: list[int], nodes: int) -> list[int]:
        """Step over the newest token of the rows that draft."""
        live = [row for row, depth in enumerate(wanted) if depth]
        assert self.newest is not None
        last = torch.tensor([[self.sequences.tokens[row][-1]] for row in live], device=self.newest.device)
        states = self.drafter.fuse((self.newest[live],))[:, None]
        self.level = self.drafter.step(self.drafter.embed(last, self.parts), states)
        return live

    def laws(self, depth: int) -> Tensor:
        """Return what the target's head says of the newest states."""
        return self.drafter.score(self.level, self.parts)

    def advance(self, level: Level) -> None:
        """Step over the tokens of a level."""
        embedded = self.drafter.embed(level.tokens, self.parts)
        self.level = self.drafter.step(embedded, level.of_parents(self.level))

    def observe(self, round: Round) -> None:
        """Take the state of each row's last accepted node, of the prompt's end in round zero."""
        states = round.hidden[0]
        if self.newest is None:
            self.newest = states[:, -1]
        else:
            self.newest = states[torch.arange(len(states)), round.verdict.n]


class StateStepLayout(Layout):
    """Read and write the toy's published files: a config of three keys, the layer under another name."""

    name = "state-step"
    order = 5

    def matches(self, source: Source) -> bool:
        """Tell by the key ``state_step``."""
        return bool(source.config.get("state_step"))

    def plan(self, source: Source, options: ReadOptions) -> Plan:
        """Resolve the names."""
        names = {name.replace("step.", "joint."): name for name in source.shapes}
        sizes = {name: source.config[name] for name in ("hidden_size", "vocab_size")}
        config = StateStepConfig(step_bias="joint.bias" in names, own_head=False, **sizes)
        return Plan(config, match(source, names, config))

    def write(self, checkpoint: Checkpoint, folder: Path) -> None:
        """Write config and layer."""
        config = checkpoint.config
        said = {"state_step": True, "hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
        tensors = {name.replace("joint.", "step."): tensor for name, tensor in checkpoint.tensors.items()}
        store(folder, said, tensors)


LAYOUT = StateStepLayout()
METHOD = Method(
    name="state_step",
    title="State step",
    drafter=StateStepDrafter,
    config=StateStepConfig,
    depths=UNROLLED,
    usual_steps=3,
)
