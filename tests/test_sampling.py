"""Seeds: the text is a function of seed, row and prompt, whoever drafts and whoever shares the batch."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from tiny import Watch, assert_ran, build, disturbed, drafter_of, few, plain, prompts, some, texts_of, tiny

import hf_specgen.ops
from hf_specgen import PromptLookup, SmallModel, SpecGenError, SpeculativeDecoding, enable
from hf_specgen.drafting import fill
from hf_specgen.round.coins import Coins
from hf_specgen.round.sequences import Sequences

ROWS = [5, 17, 11, 24]
NEW = 22
SEEDS = [11, 12, 13, 2**40 + 14]
DETERMINISTIC = ("lookup", "branches", "small", "tree")
WARPERS = {
    "plain": {"temperature": 0.4, "top_k": 0},
    "top-k": {"temperature": 0.7, "top_k": 8},
    "top-p": {"temperature": 0.8, "top_p": 0.8, "top_k": 0},
    "min-p, typical": {"temperature": 0.8, "min_p": 0.05, "typical_p": 0.9, "top_k": 0},
    "epsilon, eta": {"temperature": 0.8, "epsilon_cutoff": 0.01, "eta_cutoff": 0.01, "top_k": 0},
    "history": {"temperature": 0.5, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "top_k": 0},
}


@pytest.fixture(scope="module")
def target():
    """Return the model in float64: in float32 a coin on a boundary of two laws would follow the batch's shape."""
    return tiny().double()


def sample(model, drafter, ids, mask=None, rule: str = "rejection", **settings) -> torch.Tensor:
    settings = {"temperature": 0.4, "top_k": 0, "max_new_tokens": NEW, **settings}
    return plain(model, ids, mask, do_sample=True, custom_generate=SpeculativeDecoding(drafter, rule), **settings)


@pytest.mark.parametrize(("name", "rows"), few(product(WARPERS, (4, 1)), ("top-p", 4), ("history", 4), ("top-k", 1)))
def test_any_drafter_gives_the_text_of_the_seed(name: str, rows: int, target) -> None:
    ids, mask = prompts(ROWS if rows == 4 else [12])
    settings = {"seed": 5, **WARPERS[name]}
    expected = sample(target, None, ids, mask, **settings)
    assert not torch.equal(expected, plain(target, ids, mask, max_new_tokens=NEW)), "the coins decided something"
    texts = texts_of(expected, mask)
    for kind in DETERMINISTIC:
        for tokens in (2, 7) if kind == "small" else (4,):
            watch = drafter_of(kind, target, texts, tokens)
            assert torch.equal(sample(target, watch, ids, mask, **settings), expected), (kind, tokens)
            if rows == 4:
                assert_ran(watch, kind)
            else:
                assert watch.longest >= 1
    assert torch.equal(sample(target, PromptLookup(), ids, mask, **settings), expected), "default settings"
    assert not torch.equal(sample(target, None, ids, mask, **{**settings, "seed": 6}), expected)


@pytest.mark.parametrize(("rule", "kind"), some(("rejection", "gumbel"), (None, *DETERMINISTIC)))
def test_a_row_of_a_batch_is_the_row_alone(kind: str | None, rule: str, target) -> None:
    ids, mask = prompts(ROWS)
    plain_rows = sample(target, None, ids, mask, rule, seed=SEEDS)
    texts = texts_of(plain_rows, mask)
    watch = drafter_of(kind, target, texts) if kind else None
    together = sample(target, watch, ids, mask, rule, seed=SEEDS)
    assert torch.equal(together, plain_rows)
    order = [3, 1]
    watch = drafter_of(kind, target, [texts[row] for row in order]) if kind else None
    pair = sample(target, watch, ids[order], mask[order], rule, seed=[SEEDS[row] for row in order])
    assert torch.equal(pair, together[order])
    for row in range(4):
        one = ids[row : row + 1, mask[row].bool()]
        watch = drafter_of(kind, target, texts[row : row + 1]) if kind else None
        alone = sample(target, watch, one, rule=rule, seed=SEEDS[row])
        assert alone[0, one.shape[1] :].tolist() == together[row, 24:].tolist(), row
    assert len({tuple(text[-NEW:]) for text in texts}) == 4


@pytest.mark.parametrize(
    ("tokens", "rows"), [(3, 1), (3, 4), *(pytest.param(n, 4, marks=pytest.mark.slow) for n in (1, 8))]
)
def test_gumbel_gives_the_text_of_the_seed_for_sampled_drafts_too(tokens: int, rows: int, target) -> None:
    ids, mask = prompts(ROWS if rows == 4 else [12])
    seed = SEEDS[:rows] if rows == 4 else 9
    expected = sample(target, None, ids, mask, "gumbel", seed=seed)
    for model in (target, disturbed(target), tiny(9, layers=1)):
        for drawn in (False, True):
            watch = Watch(SmallModel(model, tokens, sample=drawn))
            result = sample(target, watch, ids, mask, "gumbel", seed=seed)
            assert torch.equal(result, expected)
            assert all(round.draft.q is None for round in watch.rounds)
            if model is target and drawn:
                assert result.speculation.total.draft_acceptance_rate == 1.0
                assert watch.longest == tokens
    assert not torch.equal(sample(target, None, ids, mask, "rejection", seed=seed), expected)


def test_coupled_drafts_are_accepted_more_often_than_greedy_ones(target) -> None:
    ids, mask = prompts([9] * 16)
    settings = {"temperature": 1.0, "seed": 1}
    rates = []
    for drawn in (False, True):
        drafter = SmallModel(disturbed(target), 3, sample=drawn)
        rates.append(sample(target, drafter, ids, mask, "gumbel", **settings).speculation.total.draft_acceptance_rate)
    assert rates[1] > 1.2 * rates[0]


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_sampled_drafts_are_repeatable(rule: str, target) -> None:
    """Their text depends on the drafter, but on nothing else; a row of a batch is the row alone."""
    ids, mask = prompts(ROWS)
    watch = Watch(SmallModel(disturbed(target), 4, sample=True))
    first = sample(target, watch, ids, mask, rule, seed=SEEDS)
    assert watch.longest >= 2
    assert any(round.draft.q is not None for round in watch.rounds)
    assert torch.equal(sample(target, watch, ids, mask, rule, seed=SEEDS), first)
    assert not torch.equal(sample(target, None, ids, mask, rule, seed=SEEDS), first)
    for row in range(4):
        one = ids[row : row + 1, mask[row].bool()]
        alone = sample(target, SmallModel(disturbed(target), 4, sample=True), one, rule=rule, seed=SEEDS[row])
        assert alone[0, one.shape[1] :].tolist() == first[row, 24:].tolist()


@pytest.mark.parametrize(
    "kind", ["sampled", "tree", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("lookup", "small"))]
)
def test_manual_seed_makes_runs_repeatable(kind: str, target) -> None:
    ids, mask = prompts(ROWS)
    texts = texts_of(plain(target, ids, mask), mask)

    drafter = drafter_of(kind, target, texts)

    def run(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return sample(target, drafter, ids, mask)

    first = run(1)
    assert torch.equal(run(1), first)
    assert not torch.equal(run(2), first)
    torch.manual_seed(1)
    one, two = sample(target, drafter, ids, mask), sample(target, drafter, ids, mask)
    assert torch.equal(one, first)
    assert not torch.equal(two, one), "the next call goes on with new coins"


def test_where_the_seed_comes_from(target) -> None:
    ids, mask = prompts(ROWS)
    watch = PromptLookup(4)
    state = torch.get_rng_state()
    plain(target, ids, mask, custom_generate=SpeculativeDecoding(watch))
    assert torch.equal(torch.get_rng_state(), state), "greedy text draws nothing"
    seeded = sample(target, watch, ids, mask, seed=4)
    assert torch.equal(torch.get_rng_state(), state), "a given seed draws nothing"
    generators = [torch.Generator().manual_seed(8) for _ in range(2)]
    drawn = [sample(target, watch, ids, mask, generator=generator) for generator in generators]
    assert torch.equal(*drawn)
    assert torch.equal(torch.get_rng_state(), state), "a given generator is used instead"
    assert not torch.equal(sample(target, watch, ids, mask, generator=generators[0]), drawn[0])
    assert not torch.equal(drawn[0], seeded)
    with pytest.raises(SpecGenError, match=r"seed= and generator="):
        sample(target, watch, ids, mask, seed=4, generator=generators[0])
    assert torch.equal(
        sample(target, watch, ids, mask, seed=torch.tensor(SEEDS)), sample(target, watch, ids, mask, seed=SEEDS)
    )
    with pytest.raises(SpecGenError, match="3 seeds were given for 4 rows"):
        sample(target, watch, ids, mask, seed=[1, 2, 3])


def test_one_seed_numbers_the_rows(target) -> None:
    ids = prompts([12])[0].repeat(4, 1)
    rows = sample(target, PromptLookup(4), ids, seed=7)
    assert len(set(map(tuple, rows.tolist()))) == 4
    assert torch.equal(sample(target, PromptLookup(4), ids[:1], seed=7)[0], rows[0])
    assert torch.equal(sample(target, PromptLookup(4), ids[:1], seed=7, num_return_sequences=4), rows)
    assert torch.equal(sample(target, PromptLookup(4), ids, seed=[7] * 4), rows[:1].expand(4, -1)), (
        "a seed a row: row 0"
    )


@pytest.mark.parametrize(
    "settings", [{"prefill_chunk_size": 3}, {"num_assistant_tokens": 2}, {"cache_implementation": "static"}]
)
def test_how_the_work_is_cut_does_not_change_the_text(settings: dict, target) -> None:
    ids, mask = prompts(ROWS)
    expected = sample(target, None, ids, mask, seed=3)
    watch = drafter_of("small", target, [])
    assert torch.equal(sample(target, watch, ids, mask, seed=3, **settings), expected)
    assert watch.longest >= 2


def test_both_entries_and_both_places_of_the_rule_agree(target) -> None:
    ids, mask = prompts(ROWS)
    model = enable(build("llama").double())
    for rule in ("rejection", "gumbel"):
        expected = sample(target, None, ids, mask, rule, seed=2)
        settings = {"do_sample": True, "temperature": 0.4, "top_k": 0, "max_new_tokens": NEW, "seed": 2, "rule": rule}
        assert torch.equal(plain(model, ids, mask, assistant_model=PromptLookup(4), **settings), expected)
        loop = SpeculativeDecoding(PromptLookup(4))
        assert torch.equal(plain(target, ids, mask, custom_generate=loop, **settings), expected)


def test_float32_differs_only_where_a_coin_falls_on_a_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of a batch and the rows alone, whose logits differ in the last digits."""
    drawn: list[tuple[torch.Tensor, torch.Tensor]] = []
    genuine = hf_specgen.ops.draw

    def draw(logits: torch.Tensor, coin: torch.Tensor):
        drawn.append((logits.double().softmax(-1).cumsum(-1), coin))
        return genuine(logits, coin)

    monkeypatch.setattr(hf_specgen.ops, "draw", draw)
    model = tiny()
    ids, mask = prompts(ROWS)
    same = 0
    for first in range(3):
        seeds = list(range(4 * first, 4 * first + 4))
        together = sample(model, None, ids, mask, seed=seeds)[:, 24:].tolist()
        for row, seed in enumerate(seeds):
            drawn.clear()
            alone = sample(model, None, ids[row : row + 1, mask[row].bool()], seed=seed)[0, -NEW:].tolist()
            differs = [step for step in range(NEW) if alone[step] != together[row][step]]
            same += not differs
            if differs:
                laws, coin = drawn[differs[0]]
                assert float((laws[0] - coin[0]).abs().min()) < 1e-4
    assert same >= 10


def padded_positions(patch: pytest.MonkeyPatch) -> None:
    def coins(self: Sequences) -> Coins:
        width = self.prompt.shape[1]
        return Coins(self.seeds, self.row_ids, torch.tensor([width + count for count in self.new]))

    patch.setattr(Sequences, "coins", coins)


def numbered_rows(patch: pytest.MonkeyPatch) -> None:
    def coins(self: Sequences) -> Coins:
        return Coins(self.seeds, torch.arange(len(self)), torch.tensor(self.lengths))

    patch.setattr(Sequences, "coins", coins)


@pytest.mark.parametrize("spoil", [padded_positions, numbered_rows])
def test_coins_that_know_the_batch_would_be_seen(spoil, target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls of the batch checks."""
    spoil(monkeypatch)
    with pytest.raises(AssertionError):
        test_a_row_of_a_batch_is_the_row_alone("lookup", "rejection", target)


def test_coins_by_round_would_be_seen(target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the drafter checks: coins that count rounds instead of positions."""
    rounds = {"count": 0}

    def coins(self: Sequences) -> Coins:
        rounds["count"] += 1
        return Coins(self.seeds, self.row_ids, torch.full_like(self.seeds, 1000 * rounds["count"]))

    monkeypatch.setattr(Sequences, "coins", coins)
    with pytest.raises(AssertionError):
        test_any_drafter_gives_the_text_of_the_seed("plain", 4, target)


def test_uncoupled_drafts_would_be_seen(target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the gumbel check: a drafter with noise of its own."""
    genuine = fill._Filling._coupled

    def coupled(self, scores):
        self._coins = Coins(self._coins.seeds + 1, self._coins.row_ids, self._coins.positions)
        return genuine(self, scores)

    monkeypatch.setattr(fill._Filling, "_coupled", coupled)
    with pytest.raises(AssertionError):
        test_gumbel_gives_the_text_of_the_seed_for_sampled_drafts_too(3, 4, target)
