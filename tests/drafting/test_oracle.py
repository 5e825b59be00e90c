"""Drafters that know the target by construction reach the full depth of their shape in every round.

Every oracle has twins with one thing shifted by one; their acceptance must fall, or the oracle proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import oracle
import pytest
import torch
from oracle import (
    VOCAB,
    OracleTarget,
    Weights,
    drafter_from,
    eagle3_oracle,
    eagle_oracle,
    medusa_oracle,
    oracle_target,
)
from oracle_cases import BUDGET, SHAPES, judged, random_prompts
from tiny import Watch, ours, plain, some

from hf_specgen import Round
from hf_specgen.drafting.learned import LearnedDrafter

TARGETS = {
    "successor": ("successor", None),
    "stairs": ("stairs", None),
    "delay": ("delay", None),
    "some": ("successor", [1, 2, 4, 7, 8, 11, 12, 14, 17, 19]),
    "some delay": ("delay", [0, 2, 4, 5, 8, 9, 13, 14, 15, 18]),
}
# here the second guess is the right one at every node, so the accepted path is the last of each level
DECOYED = {
    "static": ({"tree": [[0], [1], [0, 0], [1, 0], [1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 1, 1]]}, 4),
    "dynamic": ({"tree": {"top_k": 4, "depth": 3, "nodes": 14}}, 3),
}
MEDUSA: dict[str, tuple[str, dict[str, object]]] = {
    "medusa": ("successor", {}),
    "medusa, the target's head": ("successor", {"own": False}),
    "medusa, reduced": ("some", {"reduced": True}),
}
EAGLE: dict[str, tuple[str, str, dict[str, object]]] = {
    "eagle, token": ("successor", "token", {}),
    "eagle, feature": ("stairs", "feature", {}),
    "eagle, attention": ("delay", "delay", {}),
    "eagle, attention, qwen3": ("delay", "delay", {"layer_type": "qwen3"}),
}
EAGLE3: dict[str, tuple[str, str, dict[str, object]]] = {
    "eagle3, token": ("successor", "token", {}),
    "eagle3, feature": ("stairs", "feature", {}),
    "eagle3, attention": ("delay", "delay", {}),
    "eagle3, token, reduced": ("some", "token", {"reduced": True}),
    "eagle3, attention, reduced": ("some delay", "delay", {"reduced": True}),
    "eagle3, feature, own width": ("stairs", "feature", {"hidden_size": 80, "own_embedding": True}),
    "eagle3, attention, qwen3": ("delay", "delay", {"layer_type": "qwen3"}),
    "eagle3, attention, norm before residual": ("delay", "delay", {"norm_before_residual": True}),
    "eagle3, feature, norm before fc": ("stairs", "feature", {"norm_before_fc": True}),
    "eagle3, feature, fc norm": ("stairs", "feature", {"fc_norm": True}),
    "eagle3, attention, norm output": ("delay", "delay", {"norm_output": True}),
    "eagle3, attention, window": ("delay", "delay", {"sliding_window": 4}),
}
NAMES = [*MEDUSA, *EAGLE, *EAGLE3]
ATTENTIVE = ["eagle, attention", "eagle3, attention"]


def target_of(name: str) -> str:
    return {**MEDUSA, **EAGLE, **EAGLE3}[name][0]


def weights_of(name: str, target: OracleTarget, **settings: object) -> Weights:
    if name in MEDUSA:
        return medusa_oracle(target, 5, **MEDUSA[name][1], **settings)
    kinds, write = (EAGLE, eagle_oracle) if name in EAGLE else (EAGLE3, eagle3_oracle)
    return write(target, kinds[name][1], **{**kinds[name][2], **settings})


class Texts:
    """Keep what plain decoding writes: many drafters meet the same prompts."""

    def __init__(self) -> None:
        self.targets = {name: oracle_target(kind, used) for name, (kind, used) in TARGETS.items()}
        self.known: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}

    def run(self, name: str, watch: Watch, lengths: list[int]) -> None:
        """Write texts behind random prompts; they must be plain decoding's, whatever the drafter is worth."""
        ids, mask = random_prompts(lengths)
        model, key = self.targets[name].model, (name, tuple(lengths))
        if key not in self.known:
            self.known[key] = plain(model, ids, mask, max_new_tokens=BUDGET)
        assert torch.equal(ours(model, watch, ids, mask, max_new_tokens=BUDGET), self.known[key])


@pytest.fixture(scope="module")
def texts() -> Texts:
    return Texts()


@pytest.mark.parametrize(("name", "shape"), some(NAMES, SHAPES))
def test_full_depth_at_every_prompt_length(name: str, shape: str, texts) -> None:
    settings, depth = SHAPES[shape]
    drafter = drafter_from(weights_of(name, texts.targets[target_of(name)], **settings))
    for lengths in ([1], [2], [9], [4, 1, 7, 3, 9, 2, 8, 6, 5]):
        watch = Watch(drafter)
        texts.run(target_of(name), watch, lengths)
        assert judged(watch, depth)[1] == 0, lengths
        assert all(round.draft.tree.is_chain for round in watch.rounds[1:]) == (shape == "chain")


@pytest.mark.parametrize("shape", DECOYED)
@pytest.mark.parametrize("name", ["medusa", "medusa, reduced", "eagle, token", "eagle3, token", "eagle3, attention"])
def test_full_depth_off_the_spine(name: str, shape: str, texts) -> None:
    settings, depth = DECOYED[shape]
    watch = Watch(drafter_from(weights_of(name, texts.targets[target_of(name)], decoy=True, **settings)))
    texts.run(target_of(name), watch, [4, 1, 7, 3])
    assert judged(watch, depth)[1] == 0
    assert watch.off_spine >= 4


class Late(Watch):
    """Hand on every hidden state one position too late."""

    def on_observe(self, round: Round) -> None:
        first = not self.rounds
        shifted = []
        for place, layer in enumerate(round.hidden):
            before = layer[:, :1] if first else self.newest[place]
            shifted.append(torch.cat([before, layer[:, :-1]], 1))
        at = torch.full_like(round.verdict.n, -1) if first else round.verdict.n
        self.newest = [layer[torch.arange(len(layer)), at][:, None] for layer in round.hidden]
        self.rounds.append(round)
        self.session.observe(replace(round, hidden=tuple(shifted)))


Twist = Callable[[LearnedDrafter, OracleTarget], None]
Pass = tuple[torch.Tensor, torch.Tensor]


def wrap_step(change: Callable[[torch.Tensor, torch.Tensor, list[int]], Pass]) -> Twist:
    """Change positions and mask of the passes over drafted pairs: those that begin behind the committed ones."""

    def twist(drafter: LearnedDrafter, target: OracleTarget) -> None:
        inner = drafter.step

        def step(tokens, features, positions, mask, cache):
            if bool((positions > cache.row_lengths[:, None]).all()):
                positions, mask = change(positions, mask, cache.lengths)
            return inner(tokens, features, positions, mask, cache)

        drafter.step = step

    return twist


def show_everything(
    positions: torch.Tensor, masks: dict[str, torch.Tensor], _: list[int]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Let drafted pairs see all others."""
    return positions, {kind: torch.ones_like(mask) for kind, mask in masks.items()}


def hide_ancestors(
    positions: torch.Tensor, masks: dict[str, torch.Tensor], lengths: list[int]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Let drafted pairs see the committed ones and themselves, but none that was drafted before."""
    hidden = {}
    for kind, shared in masks.items():
        mask = shared.expand(len(lengths), *shared.shape[1:]).clone()
        held = mask.shape[-1] - max(lengths) - mask.shape[2]
        for row, length in enumerate(lengths):
            mask[row, ..., length + 1 : length + held] = False
        hidden[kind] = mask
    return positions, hidden


def early_tokens(drafter: LearnedDrafter, target: OracleTarget) -> None:
    inner, follows = drafter.embed, torch.tensor(target.follows)
    drafter.embed = lambda tokens, parts: inner(follows[tokens.clamp(0, VOCAB - 1)], parts)


def shifted_map(drafter: LearnedDrafter, target: OracleTarget) -> None:
    drafter.d2t += 1


TWISTS: dict[str, Twist] = {
    "tokens": early_tokens,
    "positions": wrap_step(lambda positions, mask, _: (positions + 1, mask)),
    "positions back": wrap_step(lambda positions, mask, _: (positions - 1, mask)),
    "siblings seen": wrap_step(
        lambda positions, masks, _: (positions, {kind: torch.ones_like(mask) for kind, mask in masks.items()})
    ),
    "ancestors hidden": wrap_step(hide_ancestors),
    "map": shifted_map,
}
TWINS = [
    ("tokens", "eagle, token", "chain"),
    ("tokens", "eagle3, token", "static"),
    ("tokens", "eagle, attention", "dynamic"),
    ("tokens", "eagle3, attention", "chain"),
    *[(twist, name, "chain") for twist in ("positions", "positions back") for name in ATTENTIVE],
    ("siblings seen", "eagle3, attention", "static"),
    *[("ancestors hidden", name, shape) for shape in SHAPES for name in ATTENTIVE],
    ("map", "eagle3, token, reduced", "chain"),
    ("map", "eagle3, attention, reduced", "dynamic"),
    ("map", "medusa, reduced", "static"),
]


@pytest.mark.parametrize(("twist", "name", "shape"), TWINS)
def test_a_shifted_twin_accepts_less(twist: str, name: str, shape: str, texts) -> None:
    target, (settings, depth) = texts.targets[target_of(name)], SHAPES[shape]
    drafter = drafter_from(weights_of(name, target, **settings))
    TWISTS[twist](drafter, target)
    watch = Watch(drafter)
    texts.run(target_of(name), watch, [4, 1, 7, 3])
    rounds, found = judged(watch, depth)
    assert 2 * found > rounds


@pytest.mark.parametrize("name", ["medusa", "eagle, feature", "eagle3, feature", *ATTENTIVE])
def test_late_features_accept_less(name: str, texts) -> None:
    settings, depth = SHAPES["chain"]
    watch = Late(drafter_from(weights_of(name, texts.targets[target_of(name)], **settings)))
    texts.run(target_of(name), watch, [4, 1, 7, 3])
    rounds, found = judged(watch, depth)
    assert 2 * found > rounds


@pytest.mark.parametrize("boundaries", [[0, 1, 2], [0, 2, 3]])
def test_other_boundaries_accept_less(boundaries: list[int], texts) -> None:
    settings, depth = SHAPES["chain"]
    config, state = weights_of("eagle3, feature", texts.targets["stairs"], **settings)
    config.aux_layer_boundaries = boundaries
    watch = Watch(drafter_from((config, state)))
    texts.run("stairs", watch, [4, 1, 7, 3])
    rounds, found = judged(watch, depth)
    assert 2 * found > rounds


@pytest.mark.parametrize("distance", [oracle.DELAY - 1, oracle.DELAY + 1])
@pytest.mark.parametrize("name", ATTENTIVE)
def test_weights_that_look_elsewhere_accept_less(name: str, distance: int, texts, monkeypatch) -> None:
    settings, depth = SHAPES["chain"]
    monkeypatch.setattr(oracle, "DELAY", distance)
    watch = Watch(drafter_from(weights_of(name, texts.targets["delay"], **settings)))
    texts.run("delay", watch, [4, 1, 7, 3])
    rounds, found = judged(watch, depth)
    assert 2 * found > rounds


def test_medusa_heads_in_another_order_accept_less(texts) -> None:
    settings, depth = SHAPES["chain"]
    config, state = weights_of("medusa", texts.targets["successor"], **settings)
    shifted = {f"{(int(name[0]) + 1) % 5}{name[1:]}": value for name, value in state.items()}
    watch = Watch(drafter_from((config, shifted)))
    texts.run("successor", watch, [4, 1, 7, 3])
    rounds, found = judged(watch, depth)
    assert found == rounds
