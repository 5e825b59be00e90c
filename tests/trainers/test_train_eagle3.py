"""EAGLE-3 training: the unrolled forward is what drafting does, at every place of a text at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from fitted import untrained
from method_runs import as_slowly, rolled_out
from tiny import tiny
from torch import Tensor

from hf_specgen.drafters.eagle3 import Eagle3Drafter
from hf_specgen.drafting import unrolling
from hf_specgen.drafting.layers import LayerClasses
from hf_specgen.drafting.learned import TrainingOutput
from hf_specgen.models.taps import FINAL, Taps
from hf_specgen.trainers.losses import Objective

STEPS, DECAY, LENGTH = 3, 0.5, 10
PART = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reduced": {"reduced": True},
    "two layers": {"num_hidden_layers": 2, "reduced": True},
    "qwen3": {"layer_type": "qwen3", "head_dim": 8},
    "rotated in part": {"rope_parameters": PART, "num_hidden_layers": 2},
    "norms": {"norm_before_residual": True, "fc_norm": True, "norm_output": True},
    "window": {"sliding_window": 4},
    "one window": {"sliding_window": 3, "num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]},
    "window below steps": {"sliding_window": 2},
    "target's head": {"own_head": False},
    "own embedding": {"own_embedding": True, "norm_before_fc": True},
}


@pytest.fixture(autouse=True)
def norms_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' norms go through float32; rounding there would hide small differences."""

    def forward(self: Any, states: Tensor) -> Tensor:
        return self.weight * states * (states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()

    for layer_type in ("llama", "qwen3"):
        monkeypatch.setattr(LayerClasses.of(layer_type).norm, "forward", forward)


@dataclass
class Scene:
    """Hold a drafter in float64 and what its target says of two texts."""

    drafter: Eagle3Drafter
    ids: Tensor
    features: tuple[Tensor, ...]
    last: Tensor
    mask: Tensor
    head: Tensor

    def forward(self, **more: Any) -> TrainingOutput:
        given = {"steps": STEPS, "decay": DECAY, "wants_rates": True, **more}
        return self.drafter(self.ids, self.features, self.last, self.mask, Objective("kl", chunk=7), self.head, **given)


def scene(length: int = LENGTH, **settings: Any) -> Scene:
    model = tiny(layers=3).double()
    drafter = untrained("eagle3", model, list(range(0, 64, 2)), **settings)
    drafter.attach(model)
    torch.manual_seed(2)
    ids = torch.randint(1, 64, (2, length))
    mask = torch.rand(2, length) < 0.7
    taps = Taps(model, (*drafter.hidden_layers, FINAL))
    with torch.no_grad(), taps.on() as seen:
        model(ids, use_cache=False)
        *features, last = taps.read(seen, torch.device("cpu"))
    head = model.get_output_embeddings().weight.detach()
    return Scene(drafter, ids, tuple(features), last, mask, head)


def rollout(scene: Scene, row: int, pair: int) -> list[Tensor]:
    """Draft behind one pair as decoding does."""
    features = scene.drafter.fuse(tuple(layer[row : row + 1, : pair + 1] for layer in scene.features))
    return rolled_out(scene.drafter, scene.ids[row : row + 1], features, STEPS)


def slowly(scene: Scene) -> tuple[Tensor, Tensor]:
    """Return loss and counts from single drafts and plain autograd."""
    drafter, rows = scene.drafter, scene.drafter.target_ids
    losses, counts = torch.zeros((), dtype=torch.float64), torch.zeros(STEPS, 4)
    for row in range(2):
        for pair in range(scene.ids.shape[1] - 2):
            alive = True
            for step, state in enumerate(rollout(scene, row, pair)):
                ahead = pair + 2 + step
                if not scene.mask[row, ahead]:
                    alive = False
                    continue
                q = drafter.logits(state).log_softmax(-1)
                whole = (scene.last[row, ahead - 1] @ scene.head.T).softmax(-1)
                p = whole if rows is None else whole[rows]
                best = q.argmax() if rows is None else rows[q.argmax()]
                within = rows is None or whole.argmax() in rows
                if within:
                    law = p / p.sum()
                    losses = losses + DECAY**step * (law * (law.log() - q)).sum()
                hit = bool(best == whole.argmax())
                alive = alive and hit
                counts[step] += torch.tensor([1.0, hit, float(torch.minimum(p, q.exp()).sum().detach()), alive])
    return losses, counts


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_unrolled_forward_is_the_real_rollout(variant: str) -> None:
    """Loss, counts and every gradient equal those of drafting behind each place by itself."""
    one = scene(**VARIANTS[variant])
    as_slowly(one.drafter, one.forward(), lambda: slowly(one))


def test_a_wrong_unroll_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: positions that stand still, states that are cut off, and a dense mask all change the loss."""
    one = scene()
    right = float(one.forward().loss_sum.detach())
    step = one.drafter.step
    twins = {
        "positions": lambda t, f, p, m, c: step(t, f, p * 0 + torch.arange(LENGTH), m, c),
        "features": lambda t, f, p, m, c: step(t, one.drafter.fuse(one.features), p, m, c),
        "tokens": lambda t, f, p, m, c: step(one.drafter.embed(one.ids), f, p, m, c),
    }
    for name, twin in twins.items():
        monkeypatch.setattr(one.drafter, "step", twin)
        assert abs(float(one.forward().loss_sum.detach()) - right) > 1e-3, name
    monkeypatch.setattr(one.drafter, "step", step)
    assert float(one.forward().loss_sum.detach()) == right
    monkeypatch.setattr(
        unrolling.StepMask, "_sees", lambda self, start, stop, *rest: torch.ones(stop - start, stop).bool()
    )
    assert abs(float(one.forward().loss_sum.detach()) - right) > 1e-3


def test_states_are_not_cut_off_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of later steps reaches the fused features through the steps before: a cut changes the gradient."""
    one, gradients = scene(), []
    step = one.drafter.step

    def cut(tokens: Tensor, features: Tensor, positions: Tensor, mask: Any, cache: Any) -> Tensor:
        later = int(positions.max()) >= LENGTH
        return step(tokens, features.detach() if later else features, positions, mask, cache)

    for twin in (step, cut):
        monkeypatch.setattr(one.drafter, "step", twin)
        one.drafter.zero_grad()
        one.forward().loss_sum.backward()
        gradients.append(one.drafter.fc.weight.grad.clone())
    assert float((gradients[0] - gradients[1]).abs().max()) > 1e-3


@pytest.mark.parametrize("chunk", [1, 4, 5])
def test_long_texts_attend_in_chunks(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of queries, made anew for the backward pass, give the same loss and gradients."""
    one = scene(sliding_window=6)
    one.forward().loss_sum.backward()
    whole = {name: part.grad for name, part in one.drafter.named_parameters()}
    one.drafter.zero_grad()
    monkeypatch.setattr(unrolling, "_CHUNK", chunk)
    output = one.forward()
    output.loss_sum.backward()
    for name, part in one.drafter.named_parameters():
        torch.testing.assert_close(part.grad, whole[name], rtol=1e-7, atol=1e-11)


def test_rates_name_the_places_of_a_draft() -> None:
    """rates[b, t, k] tells whether the draft's k-th token behind t + 2 tokens is the text's own."""
    one = scene(reduced=True)
    rates = one.forward().rates
    with torch.no_grad():
        for pair in range(LENGTH):
            states = rollout(one, 1, pair)
            for step in range(STEPS):
                ahead = pair + 2 + step
                if ahead < LENGTH and one.mask[1, ahead]:
                    best = one.drafter.to_target(one.drafter.logits(states[step]).argmax())
                    assert float(rates[1, pair, step]) == float(best == one.ids[1, ahead])
                else:
                    assert bool(rates[1, pair, step].isnan())


def test_packed_texts_are_as_if_alone() -> None:
    """Two texts in one row, each with the target's own features, give the sum of what each gives."""
    one = scene()
    apart = [one.forward()]
    packed = Scene(
        one.drafter,
        one.ids.reshape(1, -1),
        tuple(layer.reshape(1, 2 * LENGTH, -1) for layer in one.features),
        one.last.reshape(1, 2 * LENGTH, -1),
        one.mask.reshape(1, -1),
        one.head,
    )
    documents = torch.arange(2).repeat_interleave(LENGTH)[None]
    together = packed.forward(document_ids=documents)
    torch.testing.assert_close(together.loss_sum, apart[0].loss_sum, rtol=1e-10, atol=0)
    torch.testing.assert_close(together.counts, apart[0].counts)
    assert abs(float((packed.forward().loss_sum - together.loss_sum).detach())) > 1e-3  # without documents they mix


def test_nothing_to_learn_is_connected_to_everything() -> None:
    """A batch without supervised tokens has loss 0 and zeros for every gradient: other processes wait for them."""
    one = scene(reduced=True)
    one.mask[:] = False
    output = one.forward()
    output.loss_sum.backward()
    assert float(output.loss_sum) == 0.0 and not output.counts.any()
    for name, part in one.drafter.named_parameters():
        assert part.grad is not None and not part.grad.any(), name


@pytest.mark.parametrize("length", [1, 2, 3])
def test_short_texts(length: int) -> None:
    """Texts shorter than a draft are read, too."""
    one = scene(length)
    one.mask[:] = True
    output = one.forward()
    output.loss_sum.backward()
    assert output.counts[:, 0].tolist() == [2.0 * max(0, length - 2 - step) for step in range(STEPS)]


def test_weights_scale_tokens() -> None:
    """The weight of a token scales its loss at every step and leaves the counts alone."""
    one = scene()
    base = one.forward()
    twice = one.forward(weights=torch.full(one.ids.shape, 2.0))
    torch.testing.assert_close(twice.loss_sum, 2 * base.loss_sum)
    torch.testing.assert_close(twice.counts, base.counts)
