"""User cases C10, C12, C13 and C15: ragged batches, copies of a prompt, windows, padded vocabularies."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import product

import pytest
import torch
from tiny import (
    KINDS,
    LEARNED,
    Handmade,
    RandomTree,
    Watch,
    assert_ran,
    build,
    disturbed,
    drafter_of,
    few,
    ours,
    plain,
    prompts,
    some,
    texts_of,
    tiny,
)

from hf_specgen import Draft, PromptLookup, Round, SmallModel, SpeculativeDecoding
from hf_specgen.models.slot_cache import SlotCache
from hf_specgen.round.sequences import Sequences

SHORT = [3, 7, 12, 1]
OWN = [kind for kind in KINDS if kind not in LEARNED]


@pytest.fixture(scope="module")
def target():
    return tiny()


class ByRow(Handmade):
    """Let one model draft for row 0 and another for the rest."""

    def __init__(self, first: SmallModel, rest: SmallModel) -> None:
        self.first, self.rest = first, rest

    def on_begin(self, sequences: Sequences) -> None:
        self.sessions = [drafter.begin(self.call) for drafter in (self.first, self.rest)]

    def on_propose(self, sequences: Sequences) -> Draft:
        one, others = (session.propose(self.room) for session in self.sessions)
        if one.width != others.width:  # both are constant: only the last rounds of row 0 differ
            wider = one if one.width > others.width else others
            narrow = others if wider is one else one
            fill = wider.tokens.new_zeros(len(wider.tokens), wider.width - narrow.width)
            narrow = replace(narrow, tokens=torch.cat([narrow.tokens, fill], 1), tree=wider.tree)
            one, others = (narrow, wider) if wider is others else (wider, narrow)
        tokens = torch.cat([one.tokens[:1], others.tokens[1:]])
        return Draft(tokens, one.tree, torch.cat([one.n_valid[:1], others.n_valid[1:]]))

    def on_observe(self, round: Round) -> None:
        for session in self.sessions:
            session.observe(round)


@pytest.fixture(scope="module")
def ends(target) -> dict[str, object]:
    """Return settings under which row 0 ends at step 5 and row 2 at step 20, if nothing ends earlier."""
    ids, mask = prompts(SHORT)
    free = plain(target, ids, mask)[:, 12:]
    return {"eos_token_id": [int(free[0, 5]), int(free[2, 20])], "pad_token_id": 0}


@pytest.mark.parametrize("kind", few(("by row", *KINDS), "by row", "small", "lookup", "tree", "eagle dynamic"))
def test_c10_ragged_batch(kind: str, target, ends: dict) -> None:
    ids, mask = prompts(SHORT)
    expected = plain(target, ids, mask, **ends)
    lengths = [(row[12:] != 0).sum().item() for row in expected]
    assert len(set(lengths)) >= 3, "rows end at different steps"
    texts = texts_of(plain(target, ids, mask), mask)
    watch = (
        drafter_of(kind, target, texts)
        if kind in KINDS
        else Watch(ByRow(SmallModel(target, 4), SmallModel(tiny(9, layers=1), 4)))
    )
    result = ours(target, watch, ids, mask, **ends)
    assert torch.equal(result, expected)
    assert watch.longest >= 2
    for row, length in enumerate(lengths):
        assert (result[row, 12 + length :] == 0).all()
    rounds = watch.rounds
    if kind != "tree":  # the random trees of a row depend on its neighbours
        single = []
        for row in range(4):
            one, seen = (
                ids[row : row + 1, mask[row].bool()],
                drafter_of(kind if kind in KINDS else "small", target, texts),
            )
            if kind == "by row":
                seen = Watch(SmallModel(target if row == 0 else tiny(9, layers=1), 4))
            alone = ours(target, seen, one, **ends)
            assert alone[0, one.shape[1] :].tolist() == result[row, 12 : 12 + int(lengths[row])].tolist()
            single.append(alone.speculation.num_forwards)
        assert len(rounds) - 1 == result.speculation.num_forwards == max(single)


@pytest.mark.parametrize("kind", few(KINDS, "sampled", "lookup", "tree", "eagle dynamic"))
def test_c10_permuted_rows_give_permuted_text(kind: str, target, ends: dict) -> None:
    ids, mask = prompts(SHORT)
    texts = texts_of(plain(target, ids, mask), mask)
    order = torch.tensor([2, 0, 3, 1])
    expected = ours(target, drafter_of(kind, target, texts), ids, mask, **ends)
    watch = drafter_of(kind, target, [texts[row] for row in order])
    assert torch.equal(ours(target, watch, ids[order], mask[order], **ends), expected[order])
    assert watch.longest >= 2


class Frozen(Watch):
    """Look at finished rows before and after every proposal."""

    def on_begin(self, sequences: Sequences) -> None:
        self.frozen: dict[int, tuple[list[int], int]] = {}
        super().on_begin(sequences)

    def on_propose(self, sequences: Sequences) -> Draft:
        for row, finished in enumerate(sequences.finished):
            now = (list(sequences.tokens[row]), sequences.new[row])
            assert not finished or self.frozen.setdefault(row, now) == now
        draft = super().on_propose(sequences)
        for row, count in enumerate(draft.n_valid.tolist()):
            assert not sequences.finished[row] or count == 0, "a finished row got a draft"
        return draft


@pytest.mark.parametrize("kind", few(KINDS, "small", "branches", "tree", "eagle dynamic"))
def test_c10_a_finished_row_never_changes(kind: str, target, ends: dict) -> None:
    """Neither its text nor its cached length, while the others go on."""
    ids, mask = prompts(SHORT)
    watch = Frozen(drafter_of(kind, target, texts_of(plain(target, ids, mask), mask)).inner)
    ours(target, watch, ids, mask, **ends)
    assert len(watch.frozen) >= 2


@pytest.mark.parametrize("kind", few(KINDS, "sampled", "branches", "eagle dynamic"))
def test_c12_several_texts_of_one_prompt(kind: str, target) -> None:
    ids, _ = prompts([12])
    settings = {"do_sample": True, "max_new_tokens": 8, "top_k": 0, "num_return_sequences": 3}
    different = accepted = 0
    texts = ours(target, None, ids, seed=0, **settings).tolist()
    watch = drafter_of(kind, target, texts)
    for seed in range(20):
        result = ours(target, watch, ids, seed=seed, **settings)
        assert result.shape == (3, 20)
        assert (result[:, :12] == ids).all()
        different += len(set(map(tuple, result.tolist()))) > 1
        accepted = max(accepted, watch.longest)
    assert different == 20
    assert accepted >= 2


def test_c12_greedy_copies_fail_as_in_stock(target) -> None:
    ids, _ = prompts([12])
    with pytest.raises(Exception) as stock:
        plain(target, ids, num_return_sequences=3)
    with pytest.raises(type(stock.value)) as caught:
        ours(target, PromptLookup(), ids, num_return_sequences=3)
    assert "num_return_sequences" in str(caught.value)


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> list[SlotCache]:
    made: list[SlotCache] = []
    genuine = SlotCache.__init__

    def keep(self, *args, **settings) -> None:
        genuine(self, *args, **settings)
        made.append(self)

    monkeypatch.setattr(SlotCache, "__init__", keep)
    return made


@pytest.mark.parametrize(
    ("kind", "impl"),
    few(
        product(KINDS, ("sdpa", "eager")),
        *(("small", "sdpa"), ("eagle dynamic", "sdpa"), ("tree", "sdpa"), ("branches", "sdpa"), ("lookup", "eager")),
    ),
)
def test_c13_sliding_window(kind: str, impl: str, caches: list) -> None:
    model = build("mistral", impl)
    for lengths in ([3, 36, 12, 7],) if kind == "sampled" or kind in LEARNED else ([3], [12], [36], [3, 36, 12, 7]):
        ids, mask = prompts(lengths)
        expected = plain(model, ids, mask, max_new_tokens=40)
        watch = drafter_of(kind, model, texts_of(expected, mask), 8)
        caches.clear()
        result = ours(model, watch, ids, mask, max_new_tokens=40)
        assert torch.equal(result, expected), lengths
        assert watch.longest >= 2
        assert len(caches) == (2 if kind in ("small", "sampled") or kind.startswith("eagle") else 1)
        for cache in caches:
            assert max(cache.lengths) >= min(lengths) + 30
            for layer in cache.layers:  # window and draft, or 32 slots of spare, however long the text
                assert not layer.is_sliding or layer.keys.shape[2] <= 8 + max(watch.width + 1, 32)
        assert all(layer.is_sliding for layer in caches[0].layers)


class Proofread(Watch):
    """Compare each drafted token with what the small model says of the whole text, without a cache."""

    wrong = drafted_tokens = 0

    @torch.no_grad()
    def on_propose(self, sequences: Sequences) -> Draft:
        draft = super().on_propose(sequences)
        for row, (tokens, count) in enumerate(zip(draft.tokens.tolist(), draft.n_valid.tolist(), strict=True)):
            text = [*sequences.tokens[row], *tokens[:count]]
            best = self.inner.model(torch.tensor([text]), use_cache=False).logits[0].argmax(-1).tolist()
            start = len(text) - count
            self.wrong += sum(best[start + i - 1] != tokens[i] for i in range(count))
            self.drafted_tokens += count
        return draft


@pytest.mark.parametrize("family", few(("llama", "gemma3_text", "mistral", "gpt_oss"), "gemma3_text"))
def test_c13_drafts_come_from_the_true_past(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejected drafts must not have overwritten what a window still sees."""
    model = build(family, "eager" if family == "gpt_oss" else "sdpa")
    ids, mask = prompts([3, 36, 12, 7])
    watch = Proofread(SmallModel(disturbed(model), 9))
    ours(model, watch, ids, mask, max_new_tokens=24)
    assert watch.drafted_tokens > 100
    assert watch.longest >= 2
    assert watch.wrong == 0
    # negative control: rings that forget what may be rolled back
    genuine = SlotCache.begin
    monkeypatch.setattr(SlotCache, "begin", lambda self, width, undo=0: genuine(self, width))
    ours(model, watch, ids, mask, max_new_tokens=24)
    assert (watch.wrong > 0) == (family != "llama")


def padded(model, extra: int = 8):
    """Copy a model into a larger vocabulary whose extra tokens have wild output weights."""
    size = model.config.vocab_size
    larger = tiny(vocab=size + extra, layers=model.config.num_hidden_layers).to(model.dtype)
    state = model.state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = larger.state_dict()[name].clone()
        rows[:size] = state[name]
        rows[size:] = 10.0 if name.startswith("lm_head") else rows[size:]
        state[name] = rows
    larger.load_state_dict(state)
    return larger


@pytest.mark.parametrize(("larger", "sample"), some(("target", "drafter"), (False, True)))
def test_c15_padded_vocabulary(larger: str, sample: bool, target) -> None:
    target = copy.deepcopy(target).double()  # see test_sampling.py
    model = padded(target) if larger == "target" else target
    draft = disturbed(target) if larger == "target" else padded(disturbed(target))
    ids, mask = prompts([5, 17, 11, 24])
    expected = plain(model, ids, mask)
    if larger == "target":
        assert int(expected.max()) >= 64, "the target writes tokens that the drafter lacks"
    drafters = {
        "small": SmallModel(draft, 4, sample=sample),
        "lookup": PromptLookup(4, corpus=texts_of(expected, mask)),
        "tree": RandomTree(texts_of(expected, mask)),
    }
    for name, drafter in drafters.items():
        watch = Watch(drafter)
        assert torch.equal(ours(model, watch, ids, mask), expected), name
        assert watch.longest >= 2
        assert name != "small" or max(watch.drafted) < 64
    watch = Watch(drafters["small"])
    result = ours(model, watch, ids, mask, do_sample=True, top_k=0, seed=3)
    assert result.shape == expected.shape
    assert max(watch.drafted) < 64
    if not sample:
        assert torch.equal(result, ours(model, None, ids, mask, do_sample=True, top_k=0, seed=3))


def test_c10_the_comparison_can_fail(target, ends: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: rows that share the shortest accepted length, as a common cache length would force."""
    from hf_specgen.models.target import Target

    genuine = Target.commit

    def commit(self: Target, draft: Draft, scores, verdict):
        shortest = verdict.n.min().expand_as(verdict.n)
        return genuine(self, draft, scores, replace(verdict, n=shortest))

    ids, mask = prompts(SHORT)
    expected = plain(target, ids, mask, **ends)
    drafter = drafter_of("small", target, texts_of(expected, mask))
    monkeypatch.setattr(Target, "commit", commit)
    assert not torch.equal(plain(target, ids, mask, custom_generate=SpeculativeDecoding(drafter), **ends), expected)


def test_every_kind_left_the_spine_somewhere(target) -> None:
    ids, mask = prompts(SHORT)
    texts = texts_of(plain(target, ids, mask), mask)
    for kind in KINDS:
        watch = drafter_of(kind, target, texts)
        ours(target, watch, ids, mask)
        assert_ran(watch, kind)
