"""New drafters take sizes and weights of their target: at first a drafter is the target's last layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import FAMILIES, build, tiny
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_specgen.drafters.eagle3 import Eagle3Drafter
from hf_specgen.drafting.features import FeatureDrafter
from hf_specgen.drafting.warm_start import cover, covered, norm_scale
from hf_specgen.errors import SpecGenError
from hf_specgen.models.taps import Taps
from hf_specgen.trainers.warm_start import always_covered, default_boundaries, new_drafter

SOME = torch.tensor([3, 7, 8, 20, 41, 63])


def of(family: str, **settings: Any) -> PreTrainedModel:
    """Return a target whose norms and biases are no ones and zeros."""
    implementation = "eager" if "sdpa" not in FAMILIES[family][2] else "sdpa"
    model = build(family, implementation, **settings)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@torch.no_grad()
def read(model: PreTrainedModel, ids: Tensor, boundaries: tuple[int, ...]) -> tuple[tuple[Tensor, ...], Tensor]:
    taps = Taps(model, boundaries)
    with taps.on() as seen:
        logits = model(ids).logits
        return taps.read(seen, ids.device), logits


@torch.no_grad()
def drafted(drafter: FeatureDrafter, hidden: tuple[Tensor, ...], ids: Tensor) -> Tensor:
    """Return a drafter's logits for features, each beside the token of its own place."""
    places = torch.arange(ids.shape[1])
    mask = places[:, None] >= places
    states = drafter.step(drafter.embed(ids), drafter.fuse(hidden), places[None], mask[None, None], None)
    return drafter.logits(states)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_at_first_the_drafter_is_the_targets_last_layer(family: str) -> None:
    model = of(family, num_hidden_layers=8)
    drafter, notes = new_drafter("eagle3", model, SOME, own_embedding=True, aux_layer_boundaries=[2, 4, 7])
    assert isinstance(drafter, Eagle3Drafter) and "the target's last layer" in notes
    drafter.attach(model)
    ids = torch.randint(1, 64, (2, 7), generator=torch.Generator().manual_seed(3))
    hidden, logits = read(model, ids, drafter.hidden_layers)
    torch.testing.assert_close(drafted(drafter, hidden, ids), logits[..., SOME], rtol=1e-4, atol=1e-4)
    cold, _ = new_drafter("eagle3", model, SOME, warm=False, own_embedding=True, aux_layer_boundaries=[2, 4, 7])
    cold.attach(model)
    assert isinstance(cold, Eagle3Drafter)
    assert (drafted(cold, hidden, ids) - logits[..., SOME]).abs().max() > 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gets_a_drafter_of_its_sizes(family: str) -> None:
    model = of(family)
    drafter, notes = new_drafter("eagle3", model, SOME)
    config = drafter.config
    assert (config.hidden_size, config.target_hidden_size, config.vocab_size) == (32, 32, 64)
    assert config.draft_vocab_size == 6 and covered(drafter).tolist() == SOME.tolist()
    assert config.aux_layer_boundaries == [0, 1, 2]
    head = model.get_output_embeddings().weight
    torch.testing.assert_close(drafter.get_parameter("lm_head.weight").data, head.data[SOME])
    like_llama = family in ("llama", "qwen2", "qwen3", "mistral", "smollm3")
    assert ("the target's last layer" in notes) == like_llama, notes
    assert config.layer_type == ("qwen3" if family == "qwen3" else "llama")
    assert all(parameter.dtype == torch.float32 and parameter.isfinite().all() for parameter in drafter.parameters())
    drafter.attach(model)  # sizes and fingerprint are the target's


def test_norms_are_read_by_what_they_do() -> None:
    """Gemma keeps the scale minus one; a layer norm is no RMS norm."""
    model = of("gemma3_text")
    norm = model.get_decoder().norm
    torch.testing.assert_close(norm_scale(norm), 1 + norm.weight.data)
    drafter, notes = new_drafter("eagle3", model, SOME)
    torch.testing.assert_close(drafter.get_parameter("norm.weight").data, 1 + norm.weight.data)
    assert "its final norm" in notes
    assert norm_scale(nn.LayerNorm(8)) is None
    _, notes = new_drafter("eagle3", of("gpt2"), SOME)
    assert "its final norm" not in notes


def test_several_layers_come_from_the_targets_last_ones() -> None:
    model = of("llama", num_hidden_layers=4)
    drafter, notes = new_drafter("eagle3", model, None, num_hidden_layers=2)
    assert "the target's last 2 layers" in notes and not drafter.config.reduces_vocabulary
    theirs = model.get_decoder().layers
    wide = drafter.get_parameter("midlayer.self_attn.k_proj.weight").data
    torch.testing.assert_close(wide[:, 32:], theirs[2].self_attn.k_proj.weight.data)
    mine = drafter.get_parameter("layers.1.mlp.up_proj.weight").data
    torch.testing.assert_close(mine, theirs[3].mlp.up_proj.weight.data)


def test_eagle_1_starts_from_the_last_layer_and_passes_the_feature_on() -> None:
    model = of("llama")
    drafter, _ = new_drafter("eagle", model)
    assert not drafter.config.own_head
    torch.testing.assert_close(drafter.get_parameter("fc.weight").data[:, 32:], torch.eye(32))
    theirs = model.get_decoder().layers[-1]
    mine = drafter.get_parameter("layers.0.self_attn.v_proj.weight").data
    torch.testing.assert_close(mine, theirs.self_attn.v_proj.weight.data)


def test_other_sizes_start_at_random_and_say_so() -> None:
    model = tiny()
    _, notes = new_drafter("eagle3", model, SOME, intermediate_size=48)
    assert any(note.startswith("random layers") for note in notes) and "6 rows of its head" in notes
    _, notes = new_drafter("eagle3", model, SOME, hidden_size=16, head_dim=4, own_embedding=True)
    assert notes == ["random weights: the drafter is not as wide as its target"]


def test_default_boundaries() -> None:
    assert default_boundaries(30) == (2, 15, 27)
    assert default_boundaries(32) == (2, 16, 29)
    assert [default_boundaries(layers) for layers in (1, 2, 6, 7)] == [(0, 1), (0, 1, 2), (4, 5, 6), (2, 3, 4)]


def test_a_map_of_another_size_is_refused() -> None:
    drafter, _ = new_drafter("eagle3", tiny(), SOME)
    with pytest.raises(SpecGenError, match="6 ids"):
        cover(drafter, SOME[:-1])
    assert covered(new_drafter("eagle3", tiny())[0]) is None


def test_ends_of_text_are_always_covered() -> None:
    model = tiny()
    assert always_covered(model) == []
    model.generation_config.eos_token_id = [5, 2]
    assert always_covered(model) == [2, 5]
