"""Costs and Rate: the worked numbers of the theory, the best lengths by brute force, and drafters that adapt."""

from __future__ import annotations

import copy
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from tiny import COMMON, Watch, build, ours, plain, prompts, texts_of, tiny
from transformers import LlavaConfig, LlavaForConditionalGeneration

from hf_specgen import Costs, PromptLookup, SmallModel
from hf_specgen.checkpoints.config import DrafterConfig
from hf_specgen.loading import drafter_class
from hf_specgen.models.facts import LAYER_OVERHEAD, PASS_OVERHEAD, step_size
from hf_specgen.round.costs import Rate


def expected_tokens(rate: float, width: int) -> float:
    """Sum tokens times probability over every number of accepted tokens, by hand."""
    stops = [rate**n * (1 - rate) * (n + 1) for n in range(width)]
    return sum(stops) + rate**width * (width + 1)


@pytest.mark.parametrize(
    ("rate", "width", "tokens"),
    [(0.7, 5, 2.94117), (0.8, 6, 3.951424), (0.8, 4, 3.3616), (0.75, 7, 3.60)],
)
def test_expected_tokens_of_the_theory(rate: float, width: int, tokens: float) -> None:
    assert expected_tokens(rate, width) == pytest.approx(tokens, abs=5e-3 if tokens == 3.60 else 5e-6)


@pytest.mark.parametrize(
    ("rate", "width", "draft", "speed"),
    [
        (0.8, 6, 0.1, 2.4696),
        (0.1, 6, 0.1, 0.694),
        (0.8, 4, 0.05, 2.80),
        (0.8, 8, 0.05, 3.09),
        (0.8, 4, 0.2, 1.87),
        (0.6, 4, 0.05, 1.92),
        (0.75, 7, 0.02, 3.16),
        (0.34, 3, 0.165, 1.00),
    ],
)
def test_a_round_costs_what_the_theory_says(rate: float, width: int, draft: float, speed: float) -> None:
    costs = Costs(slope=0.0, draft=draft)
    assert costs.forward(1, width) == 1.0, "a pass over more positions is free here"
    assert expected_tokens(rate, width) / costs.round(1, width) == pytest.approx(speed, abs=5e-3)


@pytest.mark.parametrize(
    ("rate", "draft", "width"), [(0.8, 0.05, 8), (0.8, 0.2, 4), (0.6, 0.05, 4), (0.1, 0.1, 0), (0.8, 1.0, 0)]
)
def test_the_best_length_is_the_theorys(rate: float, draft: float, width: int) -> None:
    costs = Costs(slope=0.0, draft=draft)
    assert chosen(costs, [(rate, rate)], [32], [9]) == [width]
    assert chosen(costs, [(rate, rate)], [3], [9]) == [min(3, width)], "never more than there is"


def chosen(costs: Costs, rates, bounds, remaining) -> list[int]:
    """Return each row's length of chain, from the rates of its first token and of later ones."""
    survival = [
        [first * later**depth for depth in range(bound)] for (first, later), bound in zip(rates, bounds, strict=True)
    ]
    width = costs.choose(survival, remaining)
    return [min(width, bound) for bound in bounds]


def test_free_drafts_are_taken_whole_and_dear_passes_end_them() -> None:
    assert chosen(Costs(slope=0.0), [(0.5, 0.5)], [12], [99]) == [12]
    assert chosen(Costs(slope=0.0, jump=10.0), [(0.5, 0.5)], [12], [99]) == [0]
    assert chosen(Costs(), [], [], []) == []
    assert chosen(Costs(), [(1.0, 1.0)], [0], [9]) == [0]


@pytest.mark.parametrize("seed", range(8))
def test_a_batch_gets_the_width_that_brute_force_finds(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = 1 + seed % 4
    rates = [tuple(row) for row in torch.rand(rows, 2, generator=generator).tolist()]
    bounds = torch.randint(0, 12, (rows,), generator=generator).tolist()
    costs = Costs(jump=0.3 * (seed % 2), row=0.05, slope=0.02, draft=0.03)
    left = torch.randint(20, 24, (rows,), generator=generator).tolist()
    share = 0.05 / (1 + 0.05 * (rows - 1))
    behind = [math.exp(number / 4) for number in left]
    worth = [rows * (share + (1 - rows * share) * weight / sum(behind)) for weight in behind]

    def speed(width: int) -> float:
        tokens = 0.0
        for value, (first, later), bound in zip(worth, rates, bounds, strict=True):
            count = min(width, bound)
            survival = [1.0, *(first * later**place for place in range(count))]
            ends = [*(a - b for a, b in itertools.pairwise(survival)), survival[-1]]
            tokens += 1 + value * sum(number * chance for number, chance in enumerate(ends))
        one = 1 + 0.05 * (rows - 1) + (costs.jump if rows > 1 else 0)
        wide = 1 + 0.05 * (rows - 1) + (costs.jump if rows * (1 + width) > 1 else 0) + 0.02 * rows * width
        return tokens / (wide / one + 0.03 * width)

    best = max(range(13), key=lambda width: (speed(width), -width))
    assert chosen(costs, rates, bounds, left) == [min(best, bound) for bound in bounds]


def test_tokens_of_the_row_that_ends_last_are_worth_most() -> None:
    """A batch lasts as long as its slowest row: the others only leave the pass earlier."""
    costs = Costs(row=0.08)
    assert costs.worth([40, 40, 40]) == pytest.approx([1.0] * 3)
    assert costs.worth([7]) == pytest.approx([1.0]) and costs.worth([0, 7]) == pytest.approx([0.0, 1.0])
    assert costs.worth([]) == [] and costs.worth([0, 0]) == [0.0, 0.0]
    first, last, gone = costs.worth([10, 60, 0])
    share = 0.08 / 1.08
    assert (first, last, gone) == pytest.approx((2 * share, 2 - 2 * share, 0.0), abs=1e-4)
    sure, never = (1.0, 1.0), (0.0, 0.0)
    assert Costs(row=3.0).worth([10, 60]) == pytest.approx([1.0] * 2), "where a row costs a pass, each saves as much"
    steep = Costs(row=0.08, slope=0.1)
    assert chosen(steep, [sure, never], [8, 8], [60, 10])[0] == 8, "the slow row drafts"
    assert chosen(steep, [sure, never], [8, 8], [10, 60]) == [0, 0], "haste of the fast row would not pay"


def test_default_costs_differ_by_device_and_dtype() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    known = [Costs.default(cpu, torch.float32), Costs.default(cpu, torch.bfloat16), Costs.default(gpu, torch.bfloat16)]
    assert len(set(known)) == 3
    for costs in known:
        assert costs.round(1, 0) == costs.round(4, 0) == 1.0, "a round without a draft is one plain step"
        assert costs.round(1, 4) > costs.round(1, 3) > 1.0
    assert known[2].round(1, 8) < known[1].round(1, 8) < known[0].round(1, 8)


def test_a_rate_starts_at_its_prior_and_moves_as_faded_counts_do() -> None:
    rate = Rate(first=0.3, later=0.7, weight=4.0, keep=0.9)
    assert rate.rates == pytest.approx((0.3, 0.7))
    rate.observe(0, 0)
    assert rate.rates == pytest.approx((0.3, 0.7)), "nothing decided, nothing learnt"
    outcomes = [(2, 3), (0, 1), (4, 4), (1, 2), (0, 5)]
    firsts, laters = [], []
    for matched, known in outcomes:
        rate.observe(matched, known)
        firsts.append((float(matched > 0), 1.0))
        if matched:  # the tokens after the first, up to the first wrong one
            laters.append((matched - 1.0, matched - 1.0 + (known > matched)))

    def faded(prior: float, seen: list[tuple[float, float]]) -> float:
        ages = [0.9 ** (len(seen) - 1 - place) for place in range(len(seen))]
        hits = prior * 4 * 0.9 ** len(seen) + sum(age * hit for age, (hit, _) in zip(ages, seen, strict=True))
        return hits / (4 * 0.9 ** len(seen) + sum(age * draws for age, (_, draws) in zip(ages, seen, strict=True)))

    assert rate.rates == pytest.approx((faded(0.3, firsts), faded(0.7, laters)))


@pytest.mark.parametrize(("matched", "limit"), [(0, 0.0), (3, 1.0)])
def test_a_rate_goes_to_what_always_happens_and_comes_back(matched: int, limit: float) -> None:
    rate = Rate(0.5, 0.5)
    seen = [rate.rates[0]]
    for _ in range(200):
        rate.observe(matched, 3)
        seen.append(rate.rates[0])
    steps = [abs(value - limit) for value in seen]
    assert all(later < before for before, later in itertools.pairwise(steps)) and steps[-1] < 1e-2
    for _ in range(60):
        rate.observe(3 - matched, 3)
    assert abs(rate.rates[0] - (1 - limit)) < 0.15, "old outcomes fade"


def negated(model):
    """Copy a model that always prefers what the original likes least."""
    worst = copy.deepcopy(model)
    with torch.no_grad():
        worst.lm_head.weight.neg_()
    return worst


@pytest.mark.parametrize("lengths", [[12], [12, 5, 9, 3]])
def test_a_small_model_that_is_always_wrong_soon_drafts_nothing(lengths: list[int]) -> None:
    model = tiny()
    ids, mask = prompts(lengths)
    watch = Watch(SmallModel(negated(model), costs=Costs(slope=0.0, draft=0.05)))
    out = ours(model, watch, ids, mask, max_new_tokens=80)
    assert torch.equal(out, plain(model, ids, mask, max_new_tokens=80))
    drafted = [sum(round.proposed) for round in watch.rounds]
    assert drafted[1] > 0, "it starts by drafting"
    assert out.speculation.num_accepted_tokens == 0
    assert sum(drafted[40:]) <= 2 * len(lengths), "later it only tries one token now and then"


@pytest.mark.parametrize("lengths", [[12], [12, 5, 9, 3]])
def test_a_small_model_that_is_always_right_drafts_its_maximum(lengths: list[int]) -> None:
    model = tiny()
    ids, mask = prompts(lengths)
    watch = Watch(SmallModel(copy.deepcopy(model), costs=Costs(slope=0.01, draft=0.01)))
    out = ours(model, watch, ids, mask, max_new_tokens=60)
    assert torch.equal(out, plain(model, ids, mask, max_new_tokens=60))
    total = out.speculation.total
    assert total.num_accepted_tokens == total.num_draft_tokens > 0
    assert watch.width == 8, "the default's upper bound"
    assert [max(round.proposed) for round in watch.rounds[3:-2]] == [8] * len(watch.rounds[3:-2])


@pytest.mark.parametrize(("lengths", "slope"), [([12], 0.05), ([12, 5, 9, 3], 0.01)])
def test_a_lookup_adapts_to_right_and_to_wrong_texts(lengths: list[int], slope: float) -> None:
    model = tiny()
    ids, mask = prompts(lengths)
    texts = texts_of(plain(model, ids, mask, max_new_tokens=80), mask)
    right = Watch(PromptLookup(corpus=texts, costs=Costs(slope=0.01)))
    out = ours(model, right, ids, mask, max_new_tokens=80)
    assert right.width == 16 and out.speculation.tokens_per_round > 6

    # no pair of tokens may come twice, so every copy from the row itself is wrong
    barred = {"no_repeat_ngram_size": 2, "max_new_tokens": 120}
    wrong = Watch(PromptLookup(costs=Costs(slope=slope)))
    out = ours(model, wrong, ids, mask, **barred)
    assert torch.equal(out, plain(model, ids, mask, **barred))
    drafted = [sum(round.proposed) for round in wrong.rounds]
    assert out.speculation.num_accepted_tokens == 0
    assert 0 < sum(drafted[:20]) and not any(drafted[40:]), "later nothing is proposed"


def weights_of(model, *parts: str) -> int:
    return sum(weight.numel() for name, weight in model.named_parameters() if any(part in name for part in parts))


@pytest.mark.parametrize(("family", "chosen", "of"), [("mixtral", 2, 4), ("qwen3_moe", 2, 4), ("deepseek_v3", 2, 4)])
def test_a_step_reads_the_experts_that_a_token_takes(family: str, chosen: int, of: int) -> None:
    model = build(family)
    every = sum(weight.numel() for weight in model.parameters())
    experts = weights_of(model, ".experts.")
    assert experts > 0
    read = every - weights_of(model, "embed_tokens") - experts + experts * chosen // of
    assert step_size(model) == read + PASS_OVERHEAD + 2 * LAYER_OVERHEAD


def test_an_embedding_counts_where_it_is_the_head() -> None:
    apart, tied = tiny(tie_word_embeddings=False), tiny(tie_word_embeddings=True)
    read = sum(weight.numel() for weight in tied.parameters())
    assert step_size(apart) == step_size(tied) == read + PASS_OVERHEAD + 2 * LAYER_OVERHEAD


def test_an_encoder_of_pictures_does_not_count() -> None:
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    sees = {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 14, **sizes}
    config = LlavaConfig(text_config={"model_type": "llama", **COMMON}, vision_config=sees)
    model = LlavaForConditionalGeneration(config)
    assert weights_of(model, "vision_tower") > 10_000
    assert step_size(model) == step_size(tiny()) + weights_of(model, "projector")


@pytest.mark.parametrize(
    ("method", "settings", "measured"),
    [
        ("eagle", {"own_head": False}, 0.141),
        ("eagle", {"own_head": False, "draft_vocab_size": 12_288}, 0.080),
        ("eagle3", {}, 0.148),
        ("eagle3", {"draft_vocab_size": 12_288}, 0.073),
        ("medusa", {"num_heads": 4}, 0.123),
        ("medusa", {"num_heads": 4, "draft_vocab_size": 12_288}, 0.036),
    ],
)
def test_the_cost_of_a_drafted_token_is_what_was_measured(method: str, settings: dict, measured: float) -> None:
    """SmolLM2's sizes, the figures of docs/benchmarks.md: neither the head nor the many small layers are all of it."""
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    head = 49_152 * 576
    target = head + 30 * (3 * 576 * 1536 + 2 * 576 * 576 + 2 * 576 * 192 + 2 * 576) + 576
    target += PASS_OVERHEAD + 30 * LAYER_OVERHEAD
    aux = [2, 15, 27] if method == "eagle3" else None
    config = DrafterConfig(method, **sizes, vocab_size=49_152, aux_layer_boundaries=aux, **settings)
    with torch.device("meta"):
        drafter = drafter_class(method)(config)
    rows = head if "draft_vocab_size" not in settings else 12_288 * 576
    parts = SimpleNamespace(head_size=rows)
    call = SimpleNamespace(sequences=SimpleNamespace(target_size=target), device=torch.device("cpu"))
    assert drafter.habits(call, parts).level_cost == pytest.approx(measured, rel=0.2)
