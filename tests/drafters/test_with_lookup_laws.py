"""The law of whole sampled runs in which some rows copy while others draw their drafts, against enumeration."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fitted import untrained
from law import enumerate_law, p_value
from lookup_cases import CHEAP, Kept
from tiny import disturbed, few, some, tiny

from hf_specgen import (
    DenseQ,
    Draft,
    Drafter,
    PromptLookup,
    SmallModel,
    SparseQ,
    SpeculativeDecoding,
    WithLookup,
    use_kernels,
)
from hf_specgen.drafters import with_lookup
from hf_specgen.drafting.drafter import Call, Session
from hf_specgen.ops import record

ENOUGH = 1e-4
SHAPES: dict[str, dict[str, object]] = {
    "chain": {"tree": "chain", "num_tokens": 3},
    "static": {"tree": [[0], [1], [0, 0], [0, 1], [1, 0], [1, 1], [0, 0, 0]]},
}
KINDS = ("medusa", "eagle", "eagle3", "small")


@pytest.fixture(scope="module")
def four():
    return tiny(0, vocab=4, initializer_range=0.2).double()


@pytest.fixture(scope="module")
def eight():
    return tiny(0, vocab=8, initializer_range=0.2).double()


def prompt(vocab: int) -> torch.Tensor:
    return torch.randint(1, vocab, (1, 6), generator=torch.Generator().manual_seed(5))


def inner_of(kind: str, model, shape: str, **more: object) -> Drafter:
    if kind == "small":
        return SmallModel(disturbed(model, 0.4), 3, sample=True, costs=CHEAP)
    heads = {"num_heads": 3} if kind == "medusa" else {}
    drafter = untrained(kind, model, [1, 3, 4], sample=True, **heads, **SHAPES[shape], **more)
    drafter.costs = CHEAP
    return drafter


def watched(kind: str, model, shape: str, **more: object) -> Kept:
    return Kept(WithLookup(inner_of(kind, model, shape, **more), PromptLookup(costs=CHEAP)))


def draw(model, watch: Kept, count: int, rule: str = "rejection", tokens: int = 4, **settings) -> torch.Tensor:
    ids = prompt(model.config.vocab_size).repeat(count, 1)
    asked = {"attention_mask": torch.ones_like(ids), "custom_generate": SpeculativeDecoding(watch, rule)}
    asked |= {"do_sample": True, "seed": 0, "top_k": 0}
    return model.generate(ids, **asked, max_new_tokens=tokens + 2, **settings)[:, 6 : 6 + tokens]


def assert_mixed(watch: Kept, count: int) -> None:
    """Both drafted for many rows of the same rounds, and tokens of both were accepted."""
    assert watch.mixed >= 2
    for copied in (True, False):
        assert watch.row_rounds(copied) > count / 10, copied
        paths = [
            len(path)
            for line, round in zip(watch.rows, watch.rounds[1:], strict=True)
            for (mine, _), path in zip(line, round.paths, strict=True)
            if mine == copied
        ]
        assert max(paths) >= 2, copied


@pytest.mark.parametrize(
    ("kind", "shape", "rule"),
    [
        ("eagle", "static", "rejection"),
        ("medusa", "chain", "block"),
        ("small", "chain", "rejection"),
        *[
            pytest.param(kind, shape, rule, marks=pytest.mark.slow)
            for kind in KINDS
            for shape, rule in (("chain", "rejection"), ("chain", "block"), ("static", "rejection"))
            if (kind, shape) != ("small", "static")
        ],
    ],
)
def test_copies_among_drawn_drafts(kind: str, shape: str, rule: str, four) -> None:
    law = enumerate_law(four, prompt(4), 4, do_sample=True, top_k=0)
    watch = watched(kind, four, shape)
    draws = draw(four, watch, 1_000, rule)
    assert_mixed(watch, 1_000)
    assert all(round.draft.q is not None for round in watch.rounds[1:] if round.draft.width)
    assert (watch.off_spine > 20) == (shape == "static")
    assert p_value(draws, law, 4) > ENOUGH
    assert p_value(draws[:, [1, 0, 2, 3]], law, 4) < ENOUGH, "the test tells laws apart"


def test_under_processors_and_a_reduced_vocabulary(eight) -> None:
    settings = {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.3}
    law = enumerate_law(eight, prompt(8), 3, do_sample=True, top_k=0, **settings)
    watch = watched("eagle3", eight, "static", reduced=True)
    draws = draw(eight, watch, 300, tokens=3, **settings)
    assert_mixed(watch, 300)
    assert p_value(draws, law, 8) > ENOUGH


class Misreported(Kept):
    """Say of copied tokens that they were drawn from a flat law."""

    def on_propose(self, sequences) -> Draft:
        draft = super().on_propose(sequences)
        copied = self.session._copied
        if draft.q is None or not any(copied):
            return draft
        rows = torch.tensor(copied)
        if isinstance(draft.q, SparseQ):
            flat = torch.zeros(*draft.tokens.shape, sequences.vocab_size).double()
            return replace(draft, q=DenseQ(flat))
        return replace(draft, q=DenseQ(draft.q.logits.masked_fill(rows[:, None, None], 0.0)))


@pytest.mark.parametrize(("shape", "rule"), [("static", "rejection"), ("chain", "block")])
def test_a_wrong_law_of_copies_is_noticed(shape: str, rule: str, four) -> None:
    law = enumerate_law(four, prompt(4), 3, do_sample=True, top_k=0)
    watch = Misreported(WithLookup(inner_of("eagle", four, shape), PromptLookup(costs=CHEAP)))
    draws = draw(four, watch, 600, rule, tokens=3)
    assert watch.mixed >= 2
    assert p_value(draws, law, 4) < ENOUGH


@pytest.mark.parametrize("rule", few(("rejection", "block"), "block"))
def test_ids_that_no_law_can_name_are_not_offered(rule: str, eight) -> None:
    """A corpus of another tokenizer: its ids are copied as far as the target has them."""
    corpus = [
        [first, second, third, bad, 3] for first in range(8) for second in range(8) for third, bad in ((2, 8), (4, -1))
    ]
    for count in (1, 40):
        inner = inner_of("eagle", eight, "chain")
        watch = Kept(WithLookup(inner, PromptLookup(corpus=corpus, max_ngram=2, min_ngram=2, costs=CHEAP)))
        draws = draw(eight, watch, count, rule, tokens=20)
        assert 0 <= int(draws.min()) and int(draws.max()) < 8
        tokens = [round.draft.tokens for round in watch.rounds if round.draft.width]
        assert any(bool((part > 7).any() or (part < 0).any()) for part in tokens) and watch.row_rounds(True)


@pytest.mark.parametrize(("kind", "sample"), some(("eagle", "small"), (True, False)))
def test_a_row_writes_what_it_writes_alone(kind: str, sample: bool, eight) -> None:
    ids = torch.randint(1, 8, (3, 5), generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[1] * 5, [0, 0, 1, 1, 1], [0, 1, 1, 1, 1]])
    ids = ids * mask
    watch = watched(kind, eight, "static")
    if kind == "small":
        watch.inner.drafter.sample = sample
    else:
        watch.inner.drafter.config.sample = sample
    asked = {"do_sample": True, "top_k": 0, "max_new_tokens": 40, "custom_generate": SpeculativeDecoding(watch)}
    both = eight.generate(ids, attention_mask=mask, seed=[4, 5, 6], **asked)
    assert watch.mixed >= 3 or not sample
    for row, seed in enumerate((4, 5, 6)):
        real = mask[row].bool()
        one = eight.generate(ids[row : row + 1, real], seed=[seed], **asked)
        assert both[row, 5:].tolist() == one[0, int(real.sum()) :].tolist(), row


def test_a_decision_that_looks_at_the_neighbours_is_noticed(eight, monkeypatch) -> None:
    """What the test above is for: with rates that rows share, a drawn text depends on the batch."""
    begin = WithLookup.begin

    def shared(self: WithLookup, call: Call) -> Session:
        session = begin(self, call)
        session._groups = [with_lookup._Group(list(range(call.rows)))]
        return session

    monkeypatch.setattr(WithLookup, "begin", shared)
    with pytest.raises(AssertionError):
        for kind in ("eagle", "small"):
            test_a_row_writes_what_it_writes_alone(kind, True, eight)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "shape", "rule"),
    [("eagle", "static", "rejection"), ("medusa", "chain", "block"), ("small", "chain", "rejection")],
)
def test_the_fused_verdict_is_the_same(kind: str, shape: str, rule: str, eight) -> None:
    ids = prompt(8).repeat(4, 1)
    asked = {"do_sample": True, "seed": [1, 2, 3, 4], "top_k": 0, "max_new_tokens": 10}
    texts = []
    for kernels in ("reference", "triton"):
        watch = watched(kind, eight, shape)
        loop = SpeculativeDecoding(watch, rule)
        with use_kernels(kernels), record() as calls:
            texts.append(eight.generate(ids, attention_mask=torch.ones_like(ids), custom_generate=loop, **asked))
        walked = calls["block_chain" if rule == "block" else "reject_tree", "triton"]
        assert (walked > 0) == (kernels == "triton") and watch.mixed
    assert torch.equal(*texts)


@pytest.mark.parametrize("kind", ["medusa", "small"])
def test_shared_noise_keeps_the_text_of_the_seed(kind: str, eight) -> None:
    ids = prompt(8).repeat(40, 1)
    asked = {"do_sample": True, "seed": 0, "top_k": 0, "max_new_tokens": 8, "attention_mask": torch.ones_like(ids)}
    watch = watched(kind, eight, "chain")
    texts = [
        eight.generate(ids, custom_generate=SpeculativeDecoding(drafter, "gumbel"), **asked)
        for drafter in (None, watch)
    ]
    assert torch.equal(*texts) and watch.mixed >= 1 and watch.longest >= 2
    assert all(round.draft.q is None for round in watch.rounds)
