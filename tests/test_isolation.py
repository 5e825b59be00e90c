"""Calls, rows and threads do not disturb one another, and a call leaves nothing behind."""

from __future__ import annotations

import gc
import threading

import torch
from tiny import disturbed, prompts, tiny
from transformers import LogitsProcessor, StoppingCriteria

import hf_specgen
from hf_specgen.models.cache_layers import SlotLayer
from hf_specgen.models.cached_model import CachedModel
from hf_specgen.models.passes import Pass
from hf_specgen.models.prompt import Prompt
from hf_specgen.models.slot_cache import SlotCache
from hf_specgen.models.visibility import TreeVisibility

LOOP = hf_specgen.SpeculativeDecoding


def test_threads_on_one_model_keep_their_texts() -> None:
    """A pass names our attention in the shared config; another thread's plain forward may read it there."""
    model, (ids, mask) = tiny(), prompts([5, 17, 11, 24])
    single = ids[3:4]
    plain = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=20)
    alone = model.generate(single, do_sample=False, max_new_tokens=20)
    wrong: list[str] = []
    done = threading.Event()

    def speculate() -> None:
        while not done.is_set():
            loop = LOOP(hf_specgen.PromptLookup(4))
            out = model.generate(ids, attention_mask=mask, custom_generate=loop, do_sample=False, max_new_tokens=20)
            wrong.extend(["ours"] * (not torch.equal(out, plain)))

    thread = threading.Thread(target=speculate)
    thread.start()
    try:
        for _ in range(12):
            out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=20)
            wrong.extend(["plain"] * (not torch.equal(out, plain)))
            out = model.generate(single, do_sample=False, max_new_tokens=20)
            wrong.extend(["plain single"] * (not torch.equal(out, alone)))
    finally:
        done.set()
        thread.join()
    assert wrong == []
    assert model.config._attn_implementation == "sdpa"


def test_a_call_leaves_no_cache_behind() -> None:
    """No cycle keeps the buffers: they go with the call, not with the collector's next visit."""
    model, (ids, mask) = tiny(), prompts([5, 9])
    gc.collect()
    gc.disable()
    try:
        before = sum(isinstance(thing, SlotLayer) for thing in gc.get_objects())
        for _ in range(3):
            loop = LOOP(hf_specgen.PromptLookup(4))
            model.generate(ids, attention_mask=mask, custom_generate=loop, do_sample=False, max_new_tokens=8)
        assert sum(isinstance(thing, SlotLayer) for thing in gc.get_objects()) == before
    finally:
        gc.enable()


def test_drafted_ids_that_do_not_exist_are_only_rejected() -> None:
    model, ids = tiny(), torch.tensor([[7, 8, 9, 7, 8]])
    plain = model.generate(ids, do_sample=False, max_new_tokens=12)
    drafter = hf_specgen.PromptLookup(4, corpus=[[token, 9999, 70_000, 5] for token in range(64)])
    out = model.generate(ids, custom_generate=LOOP(drafter), do_sample=False, max_new_tokens=12)
    assert out.speculation.num_draft_tokens > 0
    assert torch.equal(out, plain)


class OwnTarget(StoppingCriteria):
    """Stop each row at a token of its own, as criteria that know their batch do."""

    def __init__(self, targets: list[int]) -> None:
        self.targets = targets

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        return torch.tensor([int(row[-1]) == self.targets[place] for place, row in enumerate(input_ids)])


def test_criteria_that_know_their_batch_stop_the_right_row() -> None:
    model, (ids, mask) = tiny(), prompts([5, 17, 11, 24])
    settings = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 24}
    free = model.generate(ids, **settings)[:, ids.shape[1] :]
    targets = [int(free[row, 4 + 3 * row]) for row in range(4)]
    settings["eos_token_id"] = next(token for token in range(1, 64) if token not in free)
    plain = model.generate(ids, stopping_criteria=[OwnTarget(targets)], **settings)
    loop = LOOP(hf_specgen.PromptLookup(4))
    out = model.generate(ids, custom_generate=loop, stopping_criteria=[OwnTarget(targets)], **settings)
    assert len({int((row != 0).sum()) for row in plain[:, ids.shape[1] :]}) > 1, "rows must stop at different lengths"
    assert torch.equal(out, plain)


class CountsGrowth(LogitsProcessor):
    """Count the newest token whenever the text has grown: the same answer for the same call, twice in a row."""

    def __init__(self) -> None:
        self.longest = 0
        self.counts = torch.zeros(64)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] > self.longest:
            self.longest = input_ids.shape[1]
            self.counts[input_ids[0, -1]] += 1
        return scores - self.counts


def test_processors_that_follow_the_text_are_served() -> None:
    model, ids = tiny(), torch.tensor([[5, 6, 7]])
    settings = {"do_sample": False, "max_new_tokens": 24}
    expected = model.generate(ids, logits_processor=[CountsGrowth()], **settings)
    loop = LOOP(hf_specgen.SmallModel(disturbed(model), 3))
    out = model.generate(ids, custom_generate=loop, logits_processor=[CountsGrowth()], **settings)
    assert torch.equal(out, expected)
    assert out.speculation.num_accepted_tokens < out.speculation.num_draft_tokens, "nothing was refused"


def test_sampled_drafts_do_not_listen_to_the_neighbours() -> None:
    """The default length of drawn drafts is constant, since what accept/residual writes depends on it."""
    model, (ids, mask) = tiny(), prompts([5, 17, 11, 24])
    drafter = hf_specgen.SmallModel(disturbed(model), sample=True, costs=hf_specgen.Costs(slope=0.01))
    settings = {"do_sample": True, "max_new_tokens": 30, "pad_token_id": 0}
    batch = model.generate(ids, attention_mask=mask, custom_generate=LOOP(drafter), seed=[3, 4, 5, 6], **settings)
    assert batch.speculation.num_accepted_tokens > 10
    for row, seed in enumerate((3, 4, 5, 6)):
        single = ids[row : row + 1, int(mask[row].argmax()) :]
        alone = model.generate(single, custom_generate=LOOP(drafter), seed=seed, **settings)
        assert torch.equal(alone[0, single.shape[1] :], batch[row, ids.shape[1] :])


def test_hidden_states_have_the_width_of_the_padded_prompt() -> None:
    model = tiny()
    ids, mask = torch.tensor([[0] * 9 + [5, 6, 7]]), torch.tensor([[0] * 9 + [1] * 3])
    settings = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 5}
    settings |= {"return_dict_in_generate": True, "output_hidden_states": True}
    plain = model.generate(ids, **settings)
    out = model.generate(ids, custom_generate=LOOP(hf_specgen.PromptLookup(4)), **settings)
    assert [layer.shape for layer in out.hidden_states[0]] == [layer.shape for layer in plain.hidden_states[0]]
    for ours, theirs in zip(out.hidden_states[0], plain.hidden_states[0], strict=True):
        assert torch.allclose(ours[:, 9:], theirs[:, 9:], atol=1e-5)


def test_a_wide_draft_at_the_end_does_not_double_the_buffers() -> None:
    model = tiny()
    cached = CachedModel(model, 1, reserve=200)
    cached.prefill(Prompt(torch.randint(1, 64, (1, 190)), [190]))
    tree = hf_specgen.Tree(torch.full((1, 20), -1))
    cached.run(Pass(torch.ones(1, 21, dtype=torch.long), TreeVisibility(tree)))
    (group,) = cached.cache.groups.values()
    assert 190 + 21 <= group.capacity < 2 * 200
    assert isinstance(cached.cache, SlotCache)
