"""Sampling with Medusa heads: the law is the target's, whatever was drafted and however."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from law import enumerate_law, p_value
from support_medusa import fitted
from tiny import Watch, few, ours, plain, prompts, some, texts_of, tiny
from transformers import LogitsProcessorList

from hf_specgen import DenseQ, SpeculativeDecoding
from hf_specgen.drafting import fill
from hf_specgen.drafting.shapes import ABSENT
from hf_specgen.round.warp import Warp

ENOUGH, NEW = 1e-4, 3
TREE = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
SHAPES = {"chain": "chain", "static": TREE}
SETTINGS = {
    "plain": {"top_k": 0},
    "temperature, top-k": {"temperature": 0.7, "top_k": 3},
    "top-p, repetition": {"top_p": 0.8, "repetition_penalty": 1.4, "top_k": 0},
}


@pytest.fixture(scope="module")
def six():
    """A target of six tokens with a flat law, in float64."""
    return tiny(vocab=6, initializer_range=0.2).double()


def prompt() -> torch.Tensor:
    return torch.randint(1, 6, (1, 5), generator=torch.Generator().manual_seed(5))


def heads_for(model, **settings):
    """Fit heads to texts that the target samples: alike laws, far from equal."""
    torch.manual_seed(3)
    texts = plain(model, prompt().repeat(40, 1), do_sample=True, top_k=0, max_new_tokens=8).tolist()
    if settings.get("tree") == "chain":
        settings["num_tokens"] = 3
    drafter = fitted(model, texts, **settings)
    with torch.no_grad():
        for head in range(3):
            drafter.get_submodule(str(head))[-1].weight.mul_(0.15)  # flat laws: every draw may come
    return drafter


def draw(model, drafter, count: int, rule: str = "rejection", **settings) -> torch.Tensor:
    """Sample ``count`` texts and return their first new tokens; two more are written."""
    ids = prompt().repeat(count, 1)
    result = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        custom_generate=SpeculativeDecoding(drafter, rule),
        do_sample=True,
        max_new_tokens=NEW + 2,
        seed=11,
        **settings,
    )
    return result[:, 5 : 5 + NEW]


@pytest.mark.parametrize(
    ("rule", "shape"), some(("gumbel", "rejection", "block"), SHAPES, fast=[("rejection", "static")])
)
def test_drawn_drafts_keep_the_law(shape: str, rule: str, six) -> None:
    if rule == "block" and shape == "static":
        pytest.skip("refused: see test_medusa.py")
    law = enumerate_law(six, prompt(), NEW, do_sample=True, top_k=0)
    watch = Watch(heads_for(six, tree=SHAPES[shape], sample=True))
    draws = draw(six, watch, 400 if rule == "gumbel" else 1_500, rule, top_k=0)
    assert watch.longest >= 2
    assert shape == "chain" or watch.off_spine > 0
    laws = [round.draft.q for round in watch.rounds if round.draft.width]
    assert all(isinstance(q, DenseQ) for q in laws) == (rule != "gumbel")
    assert p_value(draws, law, 6) > ENOUGH


@pytest.mark.parametrize(
    ("shape", "name"),
    few(
        product(SHAPES, ("temperature, top-k", "top-p, repetition")),
        ("static", "top-p, repetition"),
    ),
)
def test_drawn_drafts_keep_the_law_under_processors(shape: str, name: str, six) -> None:
    settings = SETTINGS[name]
    law = enumerate_law(six, prompt(), NEW, do_sample=True, **settings)
    watch = Watch(heads_for(six, tree=SHAPES[shape], sample=True))
    draws = draw(six, watch, 350 if "repetition_penalty" in settings else 1_000, **settings)
    assert watch.longest >= 2
    assert p_value(draws, law, 6) > ENOUGH


class FlatQ(DenseQ):
    """Forget the law."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__(torch.zeros_like(logits))


@pytest.mark.parametrize("shape", few(SHAPES, "static"))
def test_the_test_sees_a_law_that_was_not_drawn_from(shape: str, six, monkeypatch) -> None:
    """Negative control: q of the unprocessed heads, while tokens come from the processed ones."""
    settings = SETTINGS["temperature, top-k"]
    law = enumerate_law(six, prompt(), NEW, do_sample=True, **settings)
    monkeypatch.setattr(fill, "DenseQ", FlatQ)
    draws = draw(six, heads_for(six, tree=SHAPES[shape], sample=True), 1_500, **settings)
    assert p_value(draws, law, 6) < 1e-6


@pytest.mark.parametrize("told", [True, False])
def test_siblings_are_drawn_without_replacement_and_the_verdict_is_told(told: bool, six, monkeypatch) -> None:
    """Heads that are far from the target, so that second siblings matter; untold, the law is another."""
    law = enumerate_law(six, prompt(), NEW, do_sample=True, top_k=0)
    drafter = heads_for(six, tree=[[0], [1], [2]], sample=True)
    with torch.no_grad():
        torch.manual_seed(1)
        drafter.get_submodule("0")[-1].weight.normal_(std=0.3)
    watch, made = Watch(drafter), fill.Draft
    if not told:
        monkeypatch.setattr(fill, "Draft", lambda *parts: made(*parts[:4]))
        monkeypatch.setattr(fill.Draft, "empty", made.empty, raising=False)
    draws = draw(six, watch, 2_500, top_k=0)
    assert watch.off_spine > 0
    assert p_value(draws, law, 6) > ENOUGH if told else p_value(draws, law, 6) < 1e-6


@pytest.mark.parametrize(("name", "tree"), some(SETTINGS, ("chain", TREE, {"top_k": 3, "depth": 3, "nodes": 8})))
def test_picked_drafts_leave_the_text_to_the_seed(name: str, tree, six) -> None:
    """Deterministic drafts: the same seed writes the same text with any tree and with none."""
    watch = Watch(heads_for(six, tree=tree))
    draws = draw(six, watch, 150, **SETTINGS[name])
    assert watch.longest >= 2
    assert all(round.draft.q is None for round in watch.rounds)
    assert torch.equal(draws, draw(six, None, 150, **SETTINGS[name]))


def test_picked_drafts_keep_the_law(six) -> None:
    law = enumerate_law(six, prompt(), NEW, do_sample=True, top_k=0)
    assert p_value(draw(six, heads_for(six, tree=TREE), 1_500, top_k=0), law, 6) > ENOUGH


@pytest.mark.parametrize("ids", [4, 6])
def test_drawn_drafts_over_some_ids(ids: int, six) -> None:
    """Ids that the heads do not know have probability zero in q, and come from the target alone."""
    law = enumerate_law(six, prompt(), NEW, do_sample=True, top_k=0)
    watch = Watch(heads_for(six, tree=TREE, sample=True, draft_vocab_size=ids))
    draws = draw(six, watch, 1_500, top_k=0)
    assert watch.longest >= 2
    assert len(watch.drafted - {ABSENT}) == ids
    for round in watch.rounds:
        for row, count in enumerate(round.proposed):
            assert not count or int((round.draft.q.logits[row, 0] > float("-inf")).sum()) == ids
    assert p_value(draws, law, 6) > ENOUGH


@pytest.mark.parametrize(("tree", "rule"), [("chain", "rejection"), ("chain", "block"), (TREE, "rejection")], ids=str)
def test_a_head_may_know_none_of_the_tokens_that_are_allowed(tree, rule: str, six) -> None:
    """Its law is empty there: the node is absent, and the target goes on alone."""
    known = 4

    def ban(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        banned = (torch.arange(6) < known) & (input_ids.shape[1] == 6)
        return scores.masked_fill(banned, float("-inf"))

    settings = {"top_k": 0, "logits_processor": LogitsProcessorList([ban])}
    law = enumerate_law(six, prompt(), NEW, do_sample=True, **settings)
    drafter = heads_for(six, tree=tree, sample=True, draft_vocab_size=known)
    assert drafter.target_ids.tolist() == list(range(known))
    watch = Watch(drafter)
    draws = draw(six, watch, 250, rule, **settings)
    first = watch.rounds[1].draft.tokens[0].tolist()
    assert first[0] == ABSENT
    assert p_value(draws, law, 6) > ENOUGH


class Memory:
    """Ban the second newest token of the text that it is shown."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores.scatter_(1, input_ids[:, -2:-1], float("-inf"))
        return scores


@pytest.mark.parametrize("tree", ["chain", TREE], ids=str)
@pytest.mark.parametrize("sample", [True, False])
def test_processors_with_a_memory_see_the_drafted_prefix(
    tree, sample: bool, six, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every node's q is the head's law under its own prefix; end-of-text tokens end what processors are shown."""
    seen: list[list[int]] = []
    genuine = Warp._one

    def shown_to(self: Warp, processor, ids: torch.Tensor, scores: torch.Tensor, row: int) -> torch.Tensor:
        if isinstance(processor, Memory):
            seen.extend(ids.tolist())
        return genuine(self, processor, ids, scores, row)

    monkeypatch.setattr(Warp, "_one", shown_to)
    drafter = heads_for(six, tree=tree, sample=sample)
    watch = Watch(drafter)
    ids, mask = prompts([4, 7, 5, 6, 7, 7], vocab=6)
    settings = {"do_sample": True, "seed": 3, "max_new_tokens": 24, "eos_token_id": 5, "top_k": 0}
    text = ours(six, watch, ids, mask, logits_processor=LogitsProcessorList([Memory()]), **settings)
    assert len(seen) > 50 and not any(5 in shown[7:] for shown in seen)
    again = ours(six, None, ids, mask, logits_processor=LogitsProcessorList([Memory()]), **settings)
    assert sample or torch.equal(text, again)
    assert watch.longest >= 1
    if not sample:
        return
    for round in watch.rounds:
        draft = round.draft
        for row, count in enumerate(round.proposed):
            parents = draft.tree.parents[0].tolist()
            for node in range(count):
                above = parents[node]
                grand = parents[above] if above >= 0 else None
                if grand is not None and grand >= 0 and draft.tokens[row, above] != 5 and draft.tokens[row, grand] != 5:
                    banned = int(draft.tokens[row, grand])
                    assert draft.q.logits[row, node, banned] == float("-inf")
                    assert draft.tokens[row, node] != banned


def test_a_row_writes_the_same_beside_any_neighbours(six) -> None:
    """Drawn drafts have a constant length, and their coins are the row's own."""
    ids, mask = prompts([4, 9, 6], vocab=6)
    for tree in ("chain", TREE):
        drafter = heads_for(six, tree=tree, sample=True)
        settings = {"do_sample": True, "top_k": 0, "max_new_tokens": 14}
        whole = texts_of(ours(six, drafter, ids, mask, seed=[5, 6, 7], **settings), mask)
        for row, seed in enumerate((5, 6, 7)):
            alone = ids[row : row + 1, ids.shape[1] - int(mask[row].sum()) :]
            assert ours(six, drafter, alone, seed=[seed], **settings)[0].tolist() == whole[row]
