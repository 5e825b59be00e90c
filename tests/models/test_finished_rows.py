"""Rows that are finished leave the pass: of the target, of a small model, and of everything that is judged."""

from __future__ import annotations

import pytest
import torch
from ragged_trees import RowBudget
from tiny import RandomTree, Watch, build, disturbed, few, plain, prompts, some, texts_of
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

from hf_specgen import Drafter, PromptLookup, SmallModel, SpeculativeDecoding
from hf_specgen.drafting.drafter import Reads
from hf_specgen.models.cached_model import CachedModel
from hf_specgen.models.passes import ForwardOutput, Pass
from hf_specgen.models.slot_cache import SlotCache
from hf_specgen.models.taps import FINAL

LENGTHS = [5, 17, 11, 8, 3]
FAMILIES = ["llama", "mistral", "gemma3_text", "gpt2", "deepseek_v3"]


class RowBias(LogitsProcessor):
    """Favour other tokens in every row, known by the row's first token, so that a mixed-up prefix shows."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for row, ids in enumerate(input_ids):
            first = int(ids[ids != 0][0])
            scores[row, first % 7 :: 7] += 3.0
        return scores


def drafters(model, texts: list[list[int]]) -> dict[str, Drafter]:
    return {
        "lookup": PromptLookup(4),
        "tree": RandomTree(texts),
        "small": SmallModel(disturbed(model), 3),
    }


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Record (rows given, rows in the cache's buffers) of every pass over a slot cache."""
    seen: list[tuple[int, int]] = []
    genuine = CachedModel.run

    def run(self: CachedModel, batch: Pass) -> ForwardOutput:
        output = genuine(self, batch)
        seen.append((len(batch.tokens), len(self.cache.layers[0].keys)))
        return output

    monkeypatch.setattr(CachedModel, "run", run)
    return seen


def run(model, drafter: Drafter | None, ids, mask, budgets: list[int], **settings):
    criteria = StoppingCriteriaList([RowBudget(ids.shape[1], budgets)])
    settings = {"max_new_tokens": 24, "pad_token_id": 0, "stopping_criteria": criteria, **settings}
    settings.setdefault("custom_generate", SpeculativeDecoding(drafter))
    return model.generate(input_ids=ids, attention_mask=mask, **settings)


@pytest.mark.parametrize(
    ("budgets", "family", "kind"),
    some(([3, 24, 9, 1, 15], [24, 2, 24, 2, 2], [1, 1, 2, 24, 1]), FAMILIES, ("lookup", "tree", "small")),
)
def test_text_is_plain_while_rows_leave(kind: str, family: str, budgets: list[int], passes: list) -> None:
    model = build(family)
    ids, mask = prompts(LENGTHS)
    whole = plain(model, ids, mask, max_new_tokens=24)
    expected = whole.clone()
    for row, budget in enumerate(budgets):
        expected[row, ids.shape[1] + budget :] = 0
    watch = Watch(drafters(model, texts_of(whole, mask))[kind])
    result = run(model, watch, ids, mask, budgets)
    assert torch.equal(result, expected[:, : result.shape[1]])
    rows = [given for given, _ in passes]
    assert all(given == held for given, held in passes), "the buffers hold the rows of the pass and no others"
    assert rows[0] == sum(budget > 1 for budget in budgets) or kind == "small"
    assert rows == sorted(rows, reverse=True) or kind == "small", "once a row has left it stays away"
    assert min(rows) < max(rows)
    assert watch.longest >= 1 or (kind == "lookup" and budgets[0] == 1), "one short row may repeat nothing"


@pytest.mark.parametrize("kind", few(("none", "lookup", "small"), "small"))
def test_sampled_rows_keep_their_coins_and_prefixes(kind: str) -> None:
    model = build("llama")
    ids, mask = prompts(LENGTHS)
    law = {"do_sample": True, "seed": 7, "logits_processor": LogitsProcessorList([RowBias()]), "top_k": 0}
    budgets = [3, 24, 9, 1, 15]
    drafter = {"none": None, "lookup": PromptLookup(4), "small": SmallModel(disturbed(model), 3, sample=False)}[kind]
    together = run(model, drafter, ids, mask, budgets, **law)
    for row, budget in enumerate(budgets):
        alone = run(model, None, ids, mask, [24] * 5, **law)[row, ids.shape[1] : ids.shape[1] + budget]
        assert torch.equal(together[row, ids.shape[1] : ids.shape[1] + budget], alone)


@pytest.mark.parametrize("kind", ["lookup", "tree", "small"])
def test_scores_and_hidden_states_belong_to_their_row(kind: str) -> None:
    model = build("llama")
    ids, mask = prompts(LENGTHS)
    asked = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "output_hidden_states": True,
    }
    whole = plain(model, ids, mask, max_new_tokens=24, **asked)
    budgets = [3, 24, 9, 1, 15]
    drafter = drafters(model, texts_of(whole.sequences, mask))[kind]
    result = run(model, drafter, ids, mask, budgets, **asked)
    for row, budget in enumerate(budgets):
        for step in range(budget):
            torch.testing.assert_close(result.scores[step][row], whole.scores[step][row], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(result.logits[step][row], whole.logits[step][row], atol=1e-4, rtol=1e-4)
            mine, theirs = result.hidden_states[step][-1][row, -1], whole.hidden_states[step][-1][row, -1]
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


def test_hidden_states_for_drafters_belong_to_their_row() -> None:
    """Finished rows are zero; the others carry the target's state of the token at that place."""
    model = build("llama")
    ids, mask = prompts(LENGTHS)
    whole = plain(model, ids, mask, max_new_tokens=24, return_dict_in_generate=True, output_hidden_states=True)
    budgets = [3, 24, 9, 1, 15]
    watch = Watch(PromptLookup(4))
    watch.inner.reads = lambda model: Reads(hidden=(1, FINAL))
    run(model, watch, ids, mask, budgets)
    written = [1] * len(LENGTHS)
    zeros = 0
    for round in watch.rounds[1:]:
        for row, path in enumerate(round.paths):
            if written[row] >= budgets[row]:
                zeros += 1
                assert not any(layer[row].any() for layer in round.hidden)
                continue
            for place in range(len(path) + 1):
                if written[row] + place < budgets[row]:
                    truth = whole.hidden_states[written[row] + place]
                    for layer, true in zip(round.hidden, truth[1:], strict=True):
                        torch.testing.assert_close(layer[row, place], true[row, -1], atol=1e-4, rtol=1e-4)
            written[row] += len(path) + 1
    assert zeros > 5


def test_rows_are_moved_within_the_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only rows behind the new end move: nothing is allocated, and each place knows its row."""
    config = build("llama").config
    cache = SlotCache(config, 5, reserve=8)
    states = torch.arange(5.0)[:, None, None, None].expand(5, 2, 4, 8).clone()
    cache.begin_prefill(4, [4] * 5, left_padded=False)
    for layer in range(2):
        cache.update(states, -states, layer)
    cache.crop_rows([4, 3, 2, 1, 4])
    storage = cache.layers[0].keys.data_ptr()
    cache.keep([0, 4, 2])
    assert cache.lengths == [4, 4, 2] and cache.row_lengths.tolist() == [4, 4, 2]
    assert cache.layers[1].keys[:, 0, 0, 0].tolist() == [0.0, 4.0, 2.0]
    assert cache.layers[1].values[:, 0, 0, 0].tolist() == [0.0, -4.0, -2.0]
    assert cache.layers[0].keys.data_ptr() == storage


@pytest.mark.parametrize("kind", ["lookup", "small"])
def test_mixed_up_rows_would_be_seen(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the caches move their rows but the names stay behind."""
    genuine = CachedModel.keep

    def keep(self: CachedModel, live: list[int], finished: list[bool]) -> list[int]:
        return sorted(genuine(self, live, finished))

    monkeypatch.setattr(CachedModel, "keep", keep)
    with pytest.raises(AssertionError):
        test_text_is_plain_while_rows_leave(kind, "llama", [3, 24, 9, 1, 15], [(5, 5), (1, 1)])
