"""Drafters inside transformers' own assisted decoding: the texts of plain decoding, and a model left as it was."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from law import enumerate_law, p_value
from oracle import drafter_from, eagle3_oracle, eagle_oracle, medusa_oracle, oracle_target
from tiny import (
    Handmade,
    Keep,
    Watch,
    assert_ran,
    build,
    disturbed,
    drafter_of,
    few,
    garbled,
    plain,
    prompts,
    some,
    texts_of,
    tiny,
)
from transformers import GenerationConfig
from transformers.generation import CandidateGenerator

import hf_specgen.stock
from hf_specgen import (
    Draft,
    Drafter,
    IncompatibleDrafter,
    PromptLookup,
    SmallModel,
    SpecGenError,
    UnsupportedTarget,
    enable,
)
from hf_specgen.models.taps import FINAL
from hf_specgen.stock import StockCandidates, stock_candidates

FAMILIES = ["llama", "mistral", "gemma3_text", "gpt2", "qwen3"]


def traces(model) -> tuple:
    """Return what a block may change on a model."""
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    return hooks, sorted(model.__dict__), model.generation_config.to_dict()


def lossless(model, drafter: Drafter, ids, mask=None, **settings):
    """Run inside the block; the text must be plain decoding's and the model as before. Return the call's record."""
    expected = plain(model, ids, mask, **settings)
    plain(model, ids, mask, output_hidden_states=True, max_new_tokens=2)  # installs transformers' own hooks, for good
    before = traces(model)
    with stock_candidates(model, drafter) as calls:
        found = plain(model, ids, mask, **settings)
    assert torch.equal(found, expected)
    assert traces(model) == before
    assert len(calls) == 1 and isinstance(calls[0], CandidateGenerator)
    return calls[0]


@pytest.mark.parametrize(("kind", "family"), some(("lookup", "small", "branches", "tree"), FAMILIES))
def test_greedy_text_is_plain(kind: str, family: str) -> None:
    model = build(family)
    ids, mask = prompts([17])
    watch = drafter_of(kind, model, texts_of(plain(model, ids), mask))
    call = lossless(model, watch, ids)
    if kind in ("lookup", "small"):
        assert_ran(watch, kind)
        assert call.stats.num_accepted_tokens == sum(len(path) for round in watch.rounds for path in round.paths)
    else:  # only their first path is offered
        assert watch.longest >= 1
    assert call.stats.num_forwards == len(watch.rounds) - 1 < 31
    assert call.stats.total.num_tokens == 32


def test_padding_stops_and_streams() -> None:
    model = tiny()
    ids, mask = prompts([9, 17])
    ids, mask = ids[:1], mask[:1]
    text = plain(model, ids, mask)[0].tolist()
    drafter = PromptLookup(4, corpus=[text[8:]])
    end = text[-20]
    call = lossless(model, drafter, ids, mask, eos_token_id=end)
    assert call.stats.num_accepted_tokens >= 2
    for budget in (1, 2, 5, 7):
        lossless(model, drafter, ids, mask, max_new_tokens=budget)
    keep, asked = Keep(), GenerationConfig(do_sample=False, max_new_tokens=9, pad_token_id=0)
    with stock_candidates(model, drafter):
        model.generate(ids, attention_mask=mask, generation_config=asked, streamer=keep)
        scored = plain(model, ids, mask, return_dict_in_generate=True, output_scores=True)
    assert keep.tokens == text[: 17 + 9] and keep.puts < 8
    wanted = plain(model, ids, mask, return_dict_in_generate=True, output_scores=True)
    assert len(scored.scores) == len(wanted.scores) == 32
    torch.testing.assert_close(torch.cat(scored.scores), torch.cat(wanted.scores), atol=1e-4, rtol=1e-4)


def test_draft_lengths_are_asked_for_as_always() -> None:
    model = tiny()
    ids, mask = prompts([17])
    watch = drafter_of("small", model, texts_of(plain(model, ids), mask))
    watch.inner.num_tokens = None
    lossless(model, watch, ids, num_assistant_tokens=3, num_assistant_tokens_schedule="constant")
    assert {round.draft.width for round in watch.rounds[1:-1]} == {3}


class Reader(Handmade):
    """Draft a known text, two tokens in a row of which the second is often wrong, and keep every hidden state."""

    hidden_layers = (1, FINAL, 0)

    def __init__(self, text: list[int]) -> None:
        self.text = garbled(text, 3)
        self.states: dict[int, list[torch.Tensor]] = {}

    def on_begin(self, sequences) -> None:
        self.sequences, self.base = sequences, 0

    def on_propose(self, sequences) -> Draft:
        self.base = sequences.lengths[0] - 1
        return Draft.from_lists([self.text[self.base + 1 : self.base + 1 + min(2, self.room[0])]])

    def on_observe(self, round) -> None:
        count = len(self.sequences.tokens[0]) - 1 - self.base
        for place in range(count):
            self.states[self.base + place] = [layer[0, place] for layer in round.hidden]


def test_hidden_states_are_those_of_the_text() -> None:
    model = tiny()
    ids, mask = prompts([9, 17])
    ids, mask = ids[:1], mask[:1]
    text = texts_of(plain(model, ids, mask), mask)[0]
    reader = Reader(text)
    call = lossless(model, reader, ids, mask)
    assert call.stats.num_accepted_tokens > 5 and call.stats.acceptance_rates[1] < 1
    with torch.no_grad():
        states = model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
    assert sorted(reader.states) == list(range(len(text) - 1))
    for place, (first, final, embedded) in reader.states.items():
        torch.testing.assert_close(first, states[1][0, place], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(final, states[2][0, place], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(embedded, states[0][0, place], atol=1e-4, rtol=1e-4)


ORACLES = {
    "medusa": ("successor", lambda target, **settings: medusa_oracle(target, 4, **settings)),
    "eagle": ("delay", lambda target, **settings: eagle_oracle(target, "delay", **settings)),
    "eagle3": ("stairs", lambda target, **settings: eagle3_oracle(target, "feature", **settings)),
}


@pytest.mark.parametrize(("method", "length"), some(ORACLES, (1, 4, 9)))
def test_learned_drafters_reach_their_full_length(method: str, length: int) -> None:
    kind, weights = ORACLES[method]
    target = oracle_target(kind)
    ids = torch.arange(length)[None] % 20
    for settings in ({"tree": "chain", "num_tokens": 4}, {"tree": [[0], [1], [0, 0], [0, 0, 0], [0, 0, 0, 0]]}):
        watch = Watch(drafter_from(weights(target, **settings)))
        lossless(target.model, watch, ids, max_new_tokens=17)
        assert [len(path) for round in watch.rounds[1:-1] for path in round.paths] == [4] * 3


@pytest.fixture(scope="module")
def four():
    """A model with a flat law, its prompt, and the law of two tokens: the second is drafted."""
    model = tiny(vocab=4, layers=1, initializer_range=0.2).double()
    prompt = torch.tensor([[1, 3, 2, 1, 3]])
    return model, prompt, enumerate_law(model, prompt, 2, do_sample=True, temperature=0.7, top_k=3)


def draw(model, prompt, drafter: Drafter, count: int) -> tuple[torch.Tensor, list[StockCandidates]]:
    torch.manual_seed(11)
    with stock_candidates(model, drafter) as calls:
        texts = [
            plain(model, prompt, do_sample=True, temperature=0.7, top_k=3, max_new_tokens=3)[0, 5:7]
            for _ in range(count)
        ]
    return torch.stack(texts), calls


@pytest.mark.parametrize(("count", "sample"), few(product((150, 1500), (False, True)), (150, True)))
def test_the_law_of_sampling(count: int, sample: bool, four) -> None:
    """Picked drafts: stock draws its own tokens and compares. Drawn ones come with the law they were drawn from."""
    model, prompt, law = four
    watch = Watch(SmallModel(disturbed(model, 0.5), 2, sample=sample))
    draws, calls = draw(model, prompt, watch, count)
    drafted = sum(call.stats.num_draft_tokens for call in calls)
    assert 0.2 * drafted < sum(call.stats.num_accepted_tokens for call in calls) < 0.9 * drafted
    assert (watch.rounds[1].draft.q is not None) == sample
    assert p_value(draws, law, 4) > 1e-4


def test_another_law_than_the_drafts_own_would_be_seen(four, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt, law = four
    genuine = hf_specgen.stock._logits

    def bent(draft, path, vocab_size):
        return genuine(draft, path, vocab_size).argmin(-1, keepdim=True) == torch.arange(vocab_size)

    monkeypatch.setattr(hf_specgen.stock, "_logits", lambda *given: 50.0 * bent(*given))
    assert p_value(draw(model, prompt, SmallModel(disturbed(model, 0.5), 2, sample=True), 150)[0], law, 4) < 1e-4


def test_a_law_as_a_list_or_narrow_logits_becomes_whole_logits() -> None:
    from hf_specgen import DenseQ, SparseQ, Tree

    ids, probs = torch.tensor([[[2, 0, 2], [1, 3, 1]]]), torch.tensor([[[0.7, 0.3, 0.0], [0.25, 0.5, 0.25]]])
    draft = Draft(torch.tensor([[2, 3]]), Tree.chain(2), torch.tensor([2]), SparseQ(ids, probs))
    law = hf_specgen.stock._logits(draft, [0, 1], 5).softmax(-1)
    torch.testing.assert_close(law, torch.tensor([[[0.3, 0, 0.7, 0, 0], [0, 0.5, 0, 0.5, 0]]]))
    draft = Draft(torch.tensor([[2, 3]]), Tree.chain(2), torch.tensor([2]), DenseQ(torch.zeros(1, 2, 4)))
    law = hf_specgen.stock._logits(draft, [1], 5).softmax(-1)
    torch.testing.assert_close(law, torch.tensor([[[0.25, 0.25, 0.25, 0.25, 0.0]]]))


def test_ids_that_do_not_exist_end_a_draft() -> None:
    model = tiny()
    ids, _ = prompts([17])
    text = plain(model, ids)[0].tolist()
    corpus = [[*text[:22], text[22], 9999, text[24]], *([token, 70_000] for token in range(64))]
    assert lossless(model, PromptLookup(4, corpus=corpus), ids).stats.num_draft_tokens > 0


def test_an_enabled_model_goes_to_stock_inside_the_block_only() -> None:
    model = enable(tiny())
    ids, _ = prompts([17])
    with stock_candidates(model, PromptLookup(4)) as calls:
        model.generate(ids, do_sample=False, max_new_tokens=4)
    assert len(calls) == 1
    assert model.generate(ids, assistant_model=PromptLookup(4), max_new_tokens=4).speculation.rule == "rejection"
    model.generation_config.prompt_lookup_num_tokens = 3
    with pytest.raises(ZeroDivisionError), stock_candidates(model, PromptLookup(4)):
        1 / 0  # noqa: B018 - whatever happens inside
    assert model.generation_config.prompt_lookup_num_tokens == 3
    assert "_get_candidate_generator" not in model.__dict__ and "generate" in model.__dict__


def test_blocks_nest() -> None:
    model = tiny()
    ids, _ = prompts([17])
    with stock_candidates(model, PromptLookup(4)) as outer:
        with stock_candidates(model, SmallModel(disturbed(model), 3)) as inner:
            plain(model, ids, max_new_tokens=4)
        plain(model, ids, max_new_tokens=4)
    assert [call.stats.drafter for call in (*outer, *inner)] == ["PromptLookup", "SmallModel"]


def test_what_does_not_fit_is_refused() -> None:
    model = tiny()
    ids, mask = prompts([9, 17])
    with stock_candidates(model, PromptLookup(4)), pytest.raises(SpecGenError, match=r"2 rows.*SpeculativeDecoding"):
        plain(model, ids, mask)
    reader = Reader([])
    reader.hidden_layers = (7,)
    with pytest.raises(IncompatibleDrafter, match="boundaries 0 to 2"), stock_candidates(model, reader):
        raise AssertionError("the block was entered")
    before = traces(model)
    reader.hidden_layers = (1,)
    with stock_candidates(model, reader), pytest.raises(UnsupportedTarget, match="showed nothing at hidden state 1"):
        model.model.layers[0]._forward_hooks.clear()  # as a forward that was compiled before they came
        plain(model, ids[1:])
    assert traces(model) == before


def test_a_pass_that_shows_nothing_is_not_taken_for_the_one_before() -> None:
    model = tiny()
    text = torch.tensor([[1, 2, 3, 4]])
    with stock_candidates(model, Reader([0] * 9)) as calls:
        plain(model, text, max_new_tokens=1)
    assert isinstance(calls[0], StockCandidates) and calls[0].shown == {}
