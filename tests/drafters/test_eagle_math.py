"""Every draft of whole runs is computed again from nothing but the text: plain target pass, float64, no cache.

The definitions are those of draft_math.py. Rows are ragged, end in different rounds, accept much and little: what is
left in a cache, fed to the wrong place or rolled back too far makes the next draft another one.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product

import pytest
import torch
from draft_math import EagleMath, MedusaMath, Path, Rollout, dynamic_paths, static_paths, streams
from fitted import fitted
from tiny import Watch, few, ours, plain, prompts, texts_of, tiny

from hf_specgen import Draft, Round
from hf_specgen.drafting.learned import LearnedDrafter

TREE = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 2), (0, 0, 0), (0, 1, 0), (1, 0, 1), (0, 0, 0, 0)]
SHAPES: dict[str, dict[str, object]] = {
    "chain": {"tree": "chain", "num_tokens": 4},
    "static": {"tree": [list(path) for path in TREE]},
    "dynamic": {"tree": {"top_k": 3, "depth": 4, "nodes": 9}},
}
BUDGET = 14


class Witness(Watch):
    """Keep what every proposal saw and what it was."""

    def on_begin(self, sequences) -> None:
        self.seen: list[tuple[list[list[int]], list[int], Draft]] = []
        super().on_begin(sequences)

    def on_propose(self, sequences) -> Draft:
        texts, room = [list(row) for row in sequences.tokens], list(self.room)
        draft = super().on_propose(sequences)
        self.seen.append((texts, room, draft))
        return draft


def drafted(draft: Draft, row: int) -> list[Path]:
    """Return the token path of each of a row's nodes, in order."""
    parents = draft.tree.parents[row if len(draft.tree.parents) > 1 else 0].tolist()
    paths: list[Path] = []
    for node in range(int(draft.n_valid[row])):
        assert parents[node] < node
        paths.append((*(paths[parents[node]] if parents[node] >= 0 else ()), int(draft.tokens[row, node])))
    return paths


class HeadRollout:
    """Let Medusa heads look like a rollout: the law behind a path depends on its length alone."""

    def __init__(self, maths: MedusaMath, state: torch.Tensor) -> None:
        self.maths, self.state_of = maths, state

    def law(self, path: Path) -> torch.Tensor:
        return self.maths.law(self.state_of, len(path))

    def ranked(self, path: Path, count: int) -> list[tuple[int, float]]:
        scores = self.law(path).log_softmax(-1)
        tokens = self.maths.ranked(self.state_of, len(path), count)
        return list(zip(tokens, scores.topk(count).values.tolist(), strict=True))


def rollout_of(model, drafter: LearnedDrafter, text: list[int]) -> Rollout | HeadRollout:
    """Compute a drafter behind a text afresh."""
    state, config = drafter.state_dict(), drafter.config
    embedding, head = model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()
    if config.method == "medusa":
        return HeadRollout(MedusaMath(config, state, head), streams(model, text[:-1], [-1])[0][-1])
    maths = EagleMath(config, state, embedding, head)
    return Rollout(maths, text, maths.feature(streams(model, text[:-1], config.aux_layer_boundaries or [-1])))


def expected_paths(rollout: Rollout | HeadRollout, shape: str, room: int) -> list[Path]:
    """Return the token paths that a draft must hold."""
    if shape == "dynamic":
        return sorted(dynamic_paths(rollout, 3, min(4, room), 9)) if room else []
    ranks = [(0,) * depth for depth in range(1, 5)] if shape == "chain" else TREE
    within = [path for path in ranks if len(path) <= room]
    return list(static_paths(within, lambda path, rank: rollout.ranked(path, rank + 1)[rank][0]).values())


@pytest.fixture(scope="module")
def model():
    return tiny(layers=3, max_position_embeddings=64).double()


def check(model, drafter: LearnedDrafter, shape: str, ids: torch.Tensor, mask: torch.Tensor) -> Witness:
    """Run a drafter and compare every draft of every row."""
    witness = Witness(drafter)
    wanted = plain(model, ids, mask, max_new_tokens=BUDGET)
    assert torch.equal(ours(model, witness, ids, mask, max_new_tokens=BUDGET), wanted)
    compared = 0
    for texts, rooms, draft in witness.seen:
        for row, (text, room) in enumerate(zip(texts, rooms, strict=True)):
            found = drafted(draft, row)
            if not room:
                assert not found
                continue
            due = expected_paths(rollout_of(model, drafter, text), shape, room)
            assert (sorted(found) if shape == "dynamic" else found) == due
            assert [len(path) for path in found] == sorted(len(path) for path in found), "level by level"
            compared += 1
    assert compared >= 9
    assert any(len(path) < max(round.reached) for round in witness.rounds[1:] for path in round.paths), "some fail"
    return witness


def run(model, method: str, shape: str, **settings: object) -> Witness:
    ids, mask = prompts([3, 7, 1])
    texts = texts_of(plain(model, ids, mask, max_new_tokens=BUDGET + 4), mask)
    drafter = fitted(method, model, texts, wrong=3, **{**SHAPES[shape], **settings})
    return check(model, drafter, shape, ids, mask)


ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
PART = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25}, "head_dim": 16}
EAGLE: dict[str, dict[str, object]] = {
    "plain": {},
    "bias": {"fc_bias": True, **ROPE},
    "qwen3, own embedding": {"layer_type": "qwen3", "own_embedding": True, "rms_norm_eps": 1e-3},
    "two layers, biases": {"num_hidden_layers": 2, "attention_bias": True, "mlp_bias": True, "head_dim": 16},
    "window": {"sliding_window": 4, "num_key_value_heads": 1},
    "rotated in part": {"attention_bias": True, **PART},
}
EAGLE3: dict[str, dict[str, object]] = {
    "plain": {"reduced": True},
    "full vocabulary, own width": {"hidden_size": 48, "own_embedding": True, "head_dim": 16, **ROPE},
    "norm before residual": {"norm_before_residual": True, "norm_before_fc": True, "reduced": True},
    "fc norm, norm output": {"fc_norm": True, "norm_output": True, "layer_type": "qwen3"},
    "two layers, biases": {"num_hidden_layers": 2, "attention_bias": True, "mlp_bias": True, "reduced": True},
    "window": {"sliding_window": 4, "num_hidden_layers": 2, "norm_output": True},
    "rotated in part": {"layer_type": "qwen3", "num_hidden_layers": 2, **PART},
    "one window": {"sliding_window": 3, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "the target's head": {"own_head": False, "rms_norm_eps": 1e-3},
    "four features": {"aux_layer_boundaries": [0, 1, 2, 3], "reduced": True},
}
MEDUSA: dict[str, dict[str, object]] = {
    "plain": {"num_heads": 4},
    "two blocks, reduced": {"num_heads": 4, "num_head_layers": 2, "reduced": True},
    "bare heads": {"num_heads": 4, "num_head_layers": 0},
}


METHODS = {"eagle": EAGLE, "eagle3": EAGLE3, "medusa": MEDUSA}


def cases(method: str) -> list[object]:
    """Pair every variant with every shape; on every run they take turns."""
    found = []
    for place, name in enumerate(METHODS[method]):
        for number, shape in enumerate(SHAPES):
            quick = place % 3 == number
            found.append(pytest.param(name, shape, marks=() if quick else pytest.mark.slow))
    return found


@pytest.mark.parametrize(("name", "shape"), cases("eagle"))
def test_e1a_drafts_of_eagle(name: str, shape: str, model) -> None:
    assert run(model, "eagle", shape, **EAGLE[name]).longest >= 2


@pytest.mark.parametrize(("name", "shape"), cases("eagle3"))
def test_e3a_drafts_of_eagle3(name: str, shape: str, model) -> None:
    assert run(model, "eagle3", shape, **EAGLE3[name]).longest >= 2


@pytest.mark.parametrize(("name", "shape"), cases("medusa"))
def test_drafts_of_medusa(name: str, shape: str, model) -> None:
    assert run(model, "medusa", shape, **MEDUSA[name]).longest >= 2


def own_ids(drafter: LearnedDrafter) -> torch.Tensor:
    """Return the target's ids of the drafter's vocabulary."""
    offsets = drafter.state_dict().get("d2t", torch.zeros(drafter.config.draft_vocab_size, dtype=torch.long))
    return offsets + torch.arange(len(offsets))


SAMPLED = [
    *[("eagle", name, shape) for name, shape in (("bias", "static"), ("two layers, biases", "chain"))],
    *[("eagle3", name, "static") for name in ("plain", "fc norm, norm output", "full vocabulary, own width")],
    *[("eagle3", name, "chain") for name in ("norm before residual", "window")],
    *[("medusa", name, "static") for name in ("two blocks, reduced", "bare heads")],
]


@pytest.mark.parametrize(("method", "name", "shape"), few(SAMPLED, SAMPLED[1], SAMPLED[3], SAMPLED[6], SAMPLED[8]))
def test_the_laws_that_drawn_drafts_carry(method: str, name: str, shape: str, model) -> None:
    ids, mask = prompts([3, 7])
    texts = texts_of(plain(model, ids, mask, max_new_tokens=BUDGET), mask)
    drafter = fitted(method, model, texts, wrong=3, sample=True, **SHAPES[shape], **METHODS[method][name])
    witness = Witness(drafter)
    ours(model, witness, ids, mask, max_new_tokens=BUDGET, do_sample=True, top_k=0, temperature=0.4, seed=1)
    mine, compared = own_ids(drafter), 0
    for texts, rooms, draft in witness.seen:
        for row, (text, room) in enumerate(zip(texts, rooms, strict=True)):
            paths = drafted(draft, row)
            rollout = rollout_of(model, drafter, text) if room else None
            for node, path in enumerate(paths):
                law = torch.full((64,), float("-inf"), dtype=torch.float64)
                law[mine] = rollout.law(path[:-1]) / 0.4
                found = draft.q.logits[row, node].double()
                torch.testing.assert_close(found.log_softmax(-1), law.log_softmax(-1), rtol=1e-5, atol=2e-5)
                compared += 1
            siblings = {}
            for path in paths:
                siblings.setdefault(path[:-1], []).append(path[-1])
            assert all(len(set(children)) == len(children) for children in siblings.values()), "without replacement"
    assert compared >= 30
    assert witness.longest >= 1


class Tampered(Witness):
    """Hand on the target's features of accepted tokens slightly changed, as if the drafter's own guesses were kept."""

    def on_observe(self, round: Round) -> None:
        changed = round
        if self.rounds:
            other = [0.7 * layer + 0.3 * layer.roll(1, -1) for layer in round.hidden]
            hidden = [torch.cat([a[:, :1], b[:, 1:]], 1) for a, b in zip(round.hidden, other, strict=True)]
            changed = replace(round, hidden=tuple(hidden))
        self.rounds.append(round)
        self.session.observe(changed)


@pytest.mark.parametrize(("method", "shape"), [("eagle", "chain"), ("eagle3", "dynamic"), ("medusa", "static")])
def test_a_kept_guess_is_noticed(method: str, shape: str, model, monkeypatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "Witness", Tampered)
    with pytest.raises(AssertionError):
        run(model, method, shape, **({"num_heads": 4} if method == "medusa" else {}))


@pytest.mark.slow
@pytest.mark.parametrize("flags", list(product([False, True], repeat=4)))
@pytest.mark.parametrize("layer_type", ["llama", "qwen3"])
def test_e3d_every_switch(layer_type: str, flags: tuple[bool, ...], model) -> None:
    names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    switches = dict(zip(names, flags, strict=True))
    if switches["norm_before_fc"] and switches["fc_norm"]:
        pytest.skip("exclude each other")
    longest = []
    for shape, layers, window in (("chain", 2, None), ("static", 1, 5), ("dynamic", 2, 5)):
        sizes = {"num_hidden_layers": layers, "sliding_window": window, "layer_type": layer_type, "reduced": True}
        longest.append(run(model, "eagle3", shape, **switches, **sizes).longest)
    assert min(longest) >= 1
    assert max(longest) >= 2
