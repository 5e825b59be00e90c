"""A shortened draft vocabulary: fewer rows of a head are read, own or the target's, and no text changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from eagle_lessons import scene
from fitted import untrained
from law import enumerate_law, p_value
from learned_law_cases import SETTINGS, SHAPES, draw, model_of, prompt
from method_runs import rolled_out
from oracle import VOCAB, drafter_from, eagle3_oracle, eagle_oracle, medusa_oracle, oracle_target
from oracle_cases import BUDGET, judged, random_prompts
from oracle_cases import SHAPES as DEPTHS
from tiny import Watch, build, few, ours, plain, prompts, some, tiny

from hf_specgen import IncompatibleDrafter, SpecGenError, load_drafter, write_card
from hf_specgen.checkpoints.formats.base import layout_named
from hf_specgen.drafting.learned import LearnedDrafter

KEPT = [1, 3, 4, 6]
KINDS: dict[str, tuple[str, dict[str, object]]] = {
    "medusa": ("medusa", {"num_heads": 3}),
    "medusa, the target's head": ("medusa", {"num_heads": 3, "own_head": False}),
    "eagle": ("eagle", {}),
    "eagle3": ("eagle3", {}),
    "eagle3, the target's head": ("eagle3", {"own_head": False}),
}
WITH_ORACLE = [kind for kind in KINDS if kind != "eagle3, the target's head"]  # EAGLE-3's oracle is its own head


def full(kind: str, model, **settings: object) -> LearnedDrafter:
    method, own = KINDS[kind]
    return untrained(method, model, [], **{**own, **settings})


def scores(drafter: LearnedDrafter, states: torch.Tensor) -> torch.Tensor:
    return drafter.head(1, states) if drafter.method == "medusa" else drafter.logits(states)


BEHIND = {"llama": {}, "gemma3_text": {"final_logit_softcapping": 2.0}, "cohere2": {"logit_scale": 0.1}}


@pytest.mark.parametrize("family", BEHIND)
@pytest.mark.parametrize("kind", KINDS)
def test_the_law_is_the_whole_heads_over_fewer_ids(kind: str, family: str) -> None:
    """Also behind the target's factor (Cohere) and cap (Gemma)."""
    model = build(family, **BEHIND[family]).double()
    whole = full(kind, model)
    ids = torch.tensor([40, 3, 17, 5])
    short = whole.shortened(ids)
    whole.attach(model)
    short.attach(model)
    states = torch.randn(2, 3, 32, dtype=torch.float64)
    known = ids.sort().values
    torch.testing.assert_close(scores(short, states), scores(whole, states)[..., known])
    assert torch.equal(short.target_ids, known)
    assert whole.target_ids is None and whole.config.draft_vocab_size == 64, "the drafter itself stays as it was"
    assert whole.config.own_head or short.parts.head_size == 4 * 32


@pytest.mark.parametrize(("kind", "shape"), some(KINDS, SHAPES))
def test_greedy_texts_stay_and_no_other_id_is_drafted(kind: str, shape: str) -> None:
    model = tiny()
    ids, mask = prompts([5, 17, 11])
    expected = plain(model, ids, mask, max_new_tokens=12)
    kept = sorted({*expected[:, ids.shape[1] :].flatten().tolist()[::2], 7})
    watch = Watch(full(kind, model, **SHAPES[shape]).shortened(torch.tensor(kept)))
    assert torch.equal(ours(model, watch, ids, mask, max_new_tokens=12), expected)
    drafted = {
        token
        for round in watch.rounds[1:]
        for row, count in enumerate(round.draft.n_valid.tolist())
        for token in round.draft.tokens[row, :count].tolist()
        if token >= 0
    }
    assert drafted and drafted <= set(kept)


@pytest.mark.parametrize("shape", DEPTHS)
@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind != "eagle3, the target's head"]
)  # the oracle has its own
def test_oracles_reach_their_full_depth(kind: str, shape: str) -> None:
    """Weights that know the target lose nothing when the ids that it writes are kept, and much when others are."""
    target = oracle_target("successor", [1, 2, 4, 7, 8, 11, 12, 14, 17, 19])
    settings, depth = DEPTHS[shape]
    method, own = KINDS[kind]
    if method == "medusa":
        weights = medusa_oracle(target, 5, own.get("own_head", True), **settings)
    elif method == "eagle":
        weights = eagle_oracle(target, "token", **settings)
    else:
        weights = eagle3_oracle(target, "token", **settings)
    drafter = drafter_from(weights)
    ids, mask = random_prompts([3, 8, 5])
    expected = plain(target.model, ids, mask, max_new_tokens=BUDGET)
    others = [token for token in range(VOCAB) if token != target.used[3]]
    for kept, loses in ((target.used, False), (others, True)):
        watch = Watch(drafter.shortened(torch.tensor(kept)))
        assert torch.equal(ours(target.model, watch, ids, mask, max_new_tokens=BUDGET), expected)
        assert (judged(watch, depth)[1] > 0) is loses


@pytest.fixture(scope="module")
def eight():
    return model_of(8)


CASES = [("medusa", "static"), ("medusa, the target's head", "chain"), ("eagle", "static"), ("eagle3", "chain")]


@pytest.mark.parametrize(("kind", "shape"), CASES)
def test_sampled_drafts_keep_the_law(kind: str, shape: str, eight) -> None:
    settings = SETTINGS["temperature, top-k"]
    law = enumerate_law(eight, prompt(8), 3, do_sample=True, **settings)
    watch = Watch(full(kind, eight, sample=True, **SHAPES[shape]).shortened(torch.tensor(KEPT)))
    draws = draw(eight, watch, 600, tokens=3, **settings)
    assert watch.longest >= 2
    for round in watch.rounds[1:]:
        drew = round.draft.n_valid > 0  # rows that draft nothing have no law
        assert not drew.any() or round.draft.q.logits[drew][:, 0, [0, 2, 5, 7]].isneginf().all()
    assert p_value(draws, law, 8) > 1e-4
    assert p_value(draws[:, [1, 0, 2]], law, 8) < 1e-4


@pytest.mark.parametrize(
    ("kind", "shape"),
    few(
        (*CASES, ("eagle", "dynamic"), ("eagle3, the target's head", "chain")),
        *(("medusa", "static"), ("eagle", "dynamic"), ("eagle3", "chain")),
    ),
)
def test_the_seeds_text_stays(kind: str, shape: str, eight) -> None:
    for rule, sample in (("rejection", False), ("gumbel", shape != "dynamic")):
        expected = draw(eight, None, 30, rule, top_k=0)
        watch = Watch(full(kind, eight, sample=sample, **SHAPES[shape]).shortened(torch.tensor(KEPT)))
        assert torch.equal(draw(eight, watch, 30, rule, top_k=0), expected)
        assert watch.longest >= 1


@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3"])
def test_typical(kind: str, eight) -> None:
    watch = Watch(full(kind, eight, **SHAPES["static"]).shortened(torch.tensor(KEPT)))
    with pytest.warns(UserWarning, match="typical"):
        draw(eight, watch, 20, "typical", top_k=0)
    assert watch.longest >= 1


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    model = tiny()
    short = full(kind, model).shortened(torch.arange(0, 64, 3))
    short.save_pretrained(tmp_path)
    loaded = load_drafter(tmp_path, target=model)
    assert torch.equal(loaded.target_ids, torch.arange(0, 64, 3))
    assert {name: tensor.tolist() for name, tensor in loaded.state_dict().items()} == {
        name: tensor.tolist() for name, tensor in short.state_dict().items()
    }
    assert any("drafts 22 of the target's 64 ids" in note for note in loaded.report.notes) or kind[:6] == "medusa"
    states = torch.randn(1, 2, 32)
    short.attach(model)
    assert torch.equal(scores(loaded, states), scores(short, states))


def test_again_and_wrong_ids() -> None:
    model = tiny()
    for kind in KINDS:
        short = full(kind, model).shortened(torch.tensor([9, 2, 30, 31]))
        again = short.shortened(torch.tensor([31, 9]))
        assert again.target_ids.tolist() == [9, 31]
        again.attach(model)
        short.attach(model)
        states = torch.randn(1, 1, 32)
        torch.testing.assert_close(scores(again, states), scores(short, states)[..., [1, 3]])
        with pytest.raises(SpecGenError, match=r"1 ids that the drafter cannot draft \(the first is 8"):
            short.shortened(torch.tensor([8, 9]))
    for ids, reason in (
        (torch.tensor([]), "at least one"),
        (torch.tensor([], dtype=torch.long), "at least one"),
        (torch.tensor([True, False]), "mask"),
        (torch.tensor([[1, 2]]), "vector"),
        (torch.tensor([1, 1]), "twice"),
        (torch.tensor([64]), "cannot draft"),
        (torch.tensor([-1]), "cannot draft"),
    ):
        with pytest.raises(SpecGenError, match=reason):
            full("eagle", model).shortened(ids)


def test_rows_follow_the_targets_head() -> None:
    """Another target, and a head that was trained meanwhile, are noticed; the head itself is not held twice."""
    model, other = tiny(), tiny(seed=1)
    drafter = full("eagle", model).shortened(torch.tensor([1, 5]))
    drafter.attach(model)
    rows = drafter.parts.rows
    drafter.attach(model)
    assert drafter.parts.rows is rows, "gathered once per target"
    drafter.attach(other)
    assert torch.equal(drafter.parts.rows.weight, other.lm_head.weight[[1, 5]])
    with torch.no_grad():
        other.lm_head.weight.mul_(2)
    drafter.attach(other)
    assert torch.equal(drafter.parts.rows.weight, other.lm_head.weight[[1, 5]])
    head, version = other.lm_head.weight, other.lm_head.weight._version
    head.grad = torch.ones_like(head)
    torch.optim.AdamW([head], fused=True).step()
    assert head._version == version, "it leaves no trace"
    drafter.attach(other)
    assert torch.equal(drafter.parts.rows.weight, head[[1, 5]])
    drafter.d2t.copy_(torch.tensor([2, 6]))
    drafter.attach(other)
    assert torch.equal(drafter.parts.rows.weight, other.lm_head.weight[[2, 7]])


def test_a_head_that_is_more_than_a_matrix_is_refused() -> None:
    class Adapted(torch.nn.Linear):
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return super().forward(states) + states.sum(-1, keepdim=True) + 1

    model = tiny()
    head = Adapted(32, 64, bias=False)
    model.set_output_embeddings(head)
    with pytest.raises(IncompatibleDrafter, match="Adapted"):
        full("eagle", model).shortened(torch.tensor([1, 5])).attach(model)
    with torch.no_grad():
        head.weight[0] = 0  # what an unused id often has
    head.forward = lambda states: torch.nn.functional.linear(states, 3 * head.weight)
    with pytest.raises(IncompatibleDrafter, match="Adapted"):
        full("eagle", model).shortened(torch.tensor([0, 5])).attach(model)
    biased = torch.nn.Linear(32, 64)
    model.set_output_embeddings(biased)
    drafter = full("eagle", model).shortened(torch.tensor([1, 5]))
    drafter.attach(model)
    states = torch.randn(2, 1, 32)
    torch.testing.assert_close(drafter.logits(states), biased(states)[..., [1, 5]])


def test_weights_and_settings_are_kept() -> None:
    drafter = full("eagle3", tiny()).eval()
    drafter.confidence = 0.3
    short = drafter.shortened(torch.tensor([1, 5]))
    assert short.confidence == 0.3 and not short.training
    assert short.fc.weight.data_ptr() == drafter.fc.weight.data_ptr(), "what does not change is shared"
    assert drafter.shortened(torch.arange(64)).target_ids is None


def test_layouts_that_cannot_say_it_refuse(tmp_path: Path) -> None:
    model = tiny()
    ids = torch.arange(0, 64, 4)
    for kind, layout in (
        ("eagle", "eagle"),
        ("medusa", "medusa"),
        ("medusa, the target's head", "medusa"),
        ("eagle3, the target's head", "sglang-eagle3"),
        ("eagle3, the target's head", "vllm-speculators"),
    ):
        found = full(kind, model).shortened(ids).checkpoint()
        with pytest.raises(IncompatibleDrafter):
            layout_named(layout).write(found, tmp_path)
    short = full("eagle3", model, aux_layer_boundaries=[0, 1, 2]).shortened(ids)
    layout_named("sglang-eagle3").write(short.checkpoint(), tmp_path)
    again = load_drafter(tmp_path, target=model)
    assert torch.equal(again.target_ids, ids)
    assert torch.equal(again.lm_head.weight, short.lm_head.weight)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_shortened_eagle_still_learns(steps: int) -> None:
    """Its training forward judges the ids that it drafts: hits and accepted shares are those of single drafts."""
    one = scene()
    ids = torch.arange(0, 64, 2)
    parts = one.drafter.parts
    one.drafter = one.drafter.shortened(ids)
    one.drafter._parts = parts.narrowed(ids)
    out = one.forward(steps=steps)
    counts = torch.zeros(steps, 3)
    for row in range(2):
        for pair in range(one.ids.shape[1] - 2):
            told = one.ids[row : row + 1], one.features[row : row + 1, : pair + 1]
            for step, state in enumerate(rolled_out(one.drafter, *told, steps)):
                ahead = pair + 2 + step
                if ahead < one.ids.shape[1] and one.mask[row, ahead]:
                    q, p = one.drafter.logits(state).softmax(-1), (one.head @ one.last[row, ahead - 1]).softmax(-1)
                    hit = int(ids[q.argmax()]) == int(p.argmax())
                    counts[step] += torch.tensor([1.0, hit, float(torch.minimum(p[ids], q).sum().detach())])
    torch.testing.assert_close(out.counts[:, :3], counts)
    out.loss_sum.backward()
    assert all(weight.grad.isfinite().all() for weight in one.drafter.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_cards_promise_no_other_program_what_it_cannot_read(kind: str, tmp_path: Path) -> None:
    """Only the own head of EAGLE-3 can be served elsewhere once it is short; whole ones all can."""
    drafter = full(kind, tiny())
    for place, short in (("whole", drafter), ("short", drafter.shortened(torch.arange(0, 64, 2)))):
        short.save_pretrained(tmp_path / place)
        write_card(tmp_path / place)
        text = (tmp_path / place / "README.md").read_text()
        assert ("vllm serve" in text or "text-generation-launcher" in text) is (place == "whole" or kind == "eagle3")
