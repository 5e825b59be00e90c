"""EAGLE-3's switches, its vocabulary map, its boundaries, and the law of what it draws."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from feature_cases import RAGGED, REDUCED, SHAPES, Steered, config_of, drafter_of, rollout, true_features
from law import enumerate_law, p_value
from support_formats import LLAMA31_EAGLE3
from tiny import Watch, few, ours, plain, prompts, some, texts_of, tiny

from hf_specgen import DenseQ, Draft, IncompatibleDrafter, SpecGenError
from hf_specgen.checkpoints.config import DrafterConfig
from hf_specgen.drafters.eagle3 import Eagle3Drafter

LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "draft_vocab_size": 32000,
}
SWITCHES = {
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "q and k norms": {"layer_type": "qwen3"},
    "window": {"sliding_window": 3},
    "rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 20.0}},
}


def shapes_of(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(value.shape) for name, value in Eagle3Drafter(config).state_dict().items()}


def test_tensor_names_and_shapes() -> None:
    config = DrafterConfig("eagle3", aux_layer_boundaries=[2, 16, 29], **LLAMA_8B)
    assert shapes_of(config) == LLAMA31_EAGLE3
    whole = DrafterConfig("eagle3", **{**LLAMA_8B, "draft_vocab_size": None})
    assert shapes_of(whole).keys() == LLAMA31_EAGLE3.keys() - {"d2t", "t2d"}, "three boundaries are the default"
    small = shapes_of(config_of("eagle3"))
    more = {
        "norm_before_fc": {"input_norm.weight": (96,)},
        "fc_norm": {f"fc_norm.{place}.weight": (32,) for place in range(3)},
        "own_embedding": {"embed_tokens.weight": (64, 32)},
        "fc_bias": {"fc.bias": (32,)},
        "attention_bias": {f"midlayer.self_attn.{part}_proj.bias": () for part in "qkvo"},
        "mlp_bias": {f"midlayer.mlp.{part}_proj.bias": () for part in ("gate", "up", "down")},
    }
    for switch, added in more.items():
        found = shapes_of(config_of("eagle3", **{switch: True}))
        assert found.keys() - small.keys() == added.keys(), switch
        assert all(found[name] == shape for name, shape in added.items() if shape)
    qwen = shapes_of(config_of("eagle3", layer_type="qwen3", num_hidden_layers=2, head_dim=16))
    assert qwen["midlayer.self_attn.q_norm.weight"] == qwen["layers.1.self_attn.k_norm.weight"] == (16,)
    assert qwen["midlayer.self_attn.q_proj.weight"] == (64, 64) and qwen["layers.1.self_attn.q_proj.weight"] == (64, 32)
    assert "layers.1.input_layernorm.weight" in qwen and "layers.1.hidden_norm.weight" not in qwen
    assert "lm_head.weight" not in shapes_of(config_of("eagle3", own_head=False))


def test_random_weights_are_drawn_and_finite() -> None:
    drafter = Eagle3Drafter(config_of("eagle3", initializer_range=0.5, draft_vocab_size=16))
    spread = {name: value.std().item() for name, value in drafter.named_parameters() if value.dim() == 2}
    assert all(0.4 < value < 0.6 for value in spread.values()), spread
    assert torch.equal(drafter.norm.weight, torch.ones(32))
    assert drafter.target_ids.tolist() == list(range(16)) and int(drafter.t2d.sum()) == 16


@pytest.mark.parametrize("switch", SWITCHES)
def test_every_switch_changes_the_law(switch: str) -> None:
    model = tiny()
    text = prompts([14])[0][0].tolist()
    laws = []
    for settings in ({}, SWITCHES[switch]):
        drafter = drafter_of("eagle3", **settings)
        drafter.load_state_dict(drafter_of("eagle3").state_dict(), strict=False)
        drafter.attach(model)
        laws.append(rollout(drafter, text, true_features(drafter, model, text), [3, 5]).softmax(-1))
    assert (laws[0] - laws[1]).abs().sum() > 1e-3


def test_configurations_that_contradict_themselves() -> None:
    for settings, match in (
        ({"norm_before_fc": True, "fc_norm": True}, "exclude"),
        ({"hidden_size": 64, "target_hidden_size": 32}, "embedding does not fit"),
        ({"hidden_size": 64, "target_hidden_size": 32, "own_embedding": True, "own_head": False}, "head does not fit"),
    ):
        with pytest.raises(SpecGenError, match=match):
            Eagle3Drafter(config_of("eagle3", **settings))


def test_default_boundaries_follow_the_target() -> None:
    model = tiny(layers=8)
    ids, mask = prompts([9, 14])
    drafter = drafter_of("eagle3", aux_layer_boundaries=[], **SHAPES["static"])
    assert drafter.hidden_layers == ()
    expected = plain(model, ids, mask)
    assert torch.equal(ours(model, drafter, ids, mask), expected)
    assert drafter.reads(model).hidden == (2, 4, 5)
    known = drafter_of("eagle3", aux_layer_boundaries=[], target={"num_layers": 36})
    assert known.hidden_layers == (2, 18, 33)
    watch = Steered(drafter_of("eagle3", aux_layer_boundaries=[], **SHAPES["static"]), texts_of(expected, mask))
    assert torch.equal(ours(model, watch, ids, mask), expected) and watch.longest >= 2
    with pytest.raises(IncompatibleDrafter, match=r"2 layers.*aux_layer_boundaries"):
        ours(tiny(), drafter_of("eagle3", aux_layer_boundaries=[]), ids, mask)


@pytest.mark.parametrize("shape", SHAPES)
def test_only_ids_of_the_reduced_vocabulary_are_drafted(shape: str) -> None:
    model = tiny()
    ids, mask = prompts(RAGGED)
    expected = plain(model, ids, mask, max_new_tokens=12)
    for cast in (torch.float32, torch.float16):  # a cast must not touch the map
        drafter = drafter_of("eagle3", draft_vocab_size=len(REDUCED), **SHAPES[shape]).to(cast)
        assert drafter.d2t.dtype == torch.long and drafter.t2d.dtype == torch.bool
        assert drafter.target_ids.tolist() == REDUCED == drafter.t2d.nonzero().flatten().tolist()
        assert drafter.to_target(torch.tensor([-1, 0, 15])).tolist() == [-1, 0, 63]
        watch = Watch(drafter.float())
        assert torch.equal(ours(model, watch, ids, mask, max_new_tokens=12), expected)
        assert len(watch.drafted) > 5 and watch.drafted <= set(REDUCED)


@pytest.mark.parametrize(("shape", "reduced"), some(("chain", "static"), (False, True)))
def test_the_law_that_is_handed_over_is_the_processed_one(shape: str, reduced: bool) -> None:
    model = tiny()
    ids, mask = prompts([17, 17])  # older transformers penalise pads
    settings = {"draft_vocab_size": len(REDUCED)} if reduced else {}
    drafter = drafter_of("eagle3", sample=True, **settings, **SHAPES[shape])
    kept = []

    class Keep(Watch):
        def on_propose(self, sequences):
            draft = super().on_propose(sequences)
            kept.append(([list(row) for row in sequences.tokens], draft))
            return draft

    how = {"temperature": 1.3, "top_k": 9, "repetition_penalty": 1.5}
    ours(model, Keep(drafter), ids, mask, do_sample=True, seed=3, max_new_tokens=12, **how)
    texts, draft = kept[1]
    assert isinstance(draft.q, DenseQ) and draft.q.logits.shape == (2, draft.width, 64)
    assert draft.without_replacement == (shape == "static")
    parents = draft.tree.parents[0].tolist()
    for row, text in enumerate(texts):
        features, paths = true_features(drafter, model, text), [()] * draft.width
        for node, token in enumerate(draft.tokens[row].tolist()):
            above = paths[parents[node]] if parents[node] >= 0 else ()
            paths[node] = (*above, token)
            logits = torch.full((1, 64), float("-inf"))
            logits[0, drafter.target_ids if reduced else slice(None)] = rollout(drafter, text, features, list(above))
            due = processed(model, torch.tensor([[*text, *above]]), logits, **how)
            torch.testing.assert_close(draft.q.logits[row, node].softmax(-1), due, atol=1e-4, rtol=1e-3)
            assert due[token] > 0


def processed(model, text: torch.Tensor, logits: torch.Tensor, **settings) -> torch.Tensor:
    """Return the law that transformers' own processors make of logits behind a text."""
    kept = []

    def keep(model, input_ids, logits_processor, stopping_criteria, generation_config, **inputs):
        kept.append(logits_processor)
        return input_ids

    model.generate(text, custom_generate=keep, do_sample=True, max_new_tokens=4, pad_token_id=0, **settings)
    return kept[0](text, logits)[0].softmax(-1)


class RawLaw(Watch):
    """Hand over another law than the one that was drawn from."""

    def on_propose(self, sequences) -> Draft:
        draft = super().on_propose(sequences)
        return replace(draft, q=DenseQ(draft.q.logits * 0.3)) if isinstance(draft.q, DenseQ) else draft


VOCAB = 5
DRAWN = {
    "chain": ({"tree": "chain", "num_tokens": 2}, "rejection"),
    "block": ({"tree": "chain", "num_tokens": 2}, "block"),
    "static": ({"tree": [[0], [1], [0, 0], [1, 0], [1, 1]]}, "rejection"),
}


@pytest.mark.parametrize("name", few(DRAWN, "chain", "block"))
def test_the_text_of_drawn_drafts_follows_the_targets_law(name: str) -> None:
    settings, rule = DRAWN[name]
    model = tiny(vocab=VOCAB, initializer_range=0.6)
    prompt = torch.tensor([[1, 3, 2]])
    how = {"do_sample": True, "temperature": 0.8, "top_k": 0}
    law = enumerate_law(model, prompt, 3, **how)
    drafter = drafter_of("eagle3", kept=(1, 2, 4), vocab_size=VOCAB, draft_vocab_size=3, sample=True, **settings)
    rows = prompt.expand(3000, -1)
    for watch, holds in ((Watch(drafter), True), (RawLaw(drafter), False)):
        found = ours(model, watch, rows, seed=7, rule=rule, max_new_tokens=3, **how)
        assert watch.longest >= 1 and any(round.draft.q is not None for round in watch.rounds)
        assert (p_value(found[:, 3:], law, VOCAB) > 1e-3) == holds


@pytest.mark.parametrize(
    ("rope", "reason"),
    [
        ({"partial_rotary_factor": 0.0}, "above 0 and at most 1"),
        ({"partial_rotary_factor": 0.4}, "an even number"),
        ({"rotary_dim": 4}, "not rotary_dim"),
    ],
)
def test_rotary_settings_that_mean_nothing_are_refused(rope: dict, reason: str) -> None:
    with pytest.raises(SpecGenError, match=reason):
        drafter_of("eagle3", rope_parameters={"rope_type": "default", "rope_theta": 1e4, **rope})
