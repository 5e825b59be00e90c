"""Comparison, timed runs, reports, plots, exactness checks."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from letters import VOCAB, Letters
from tiny import few
from transformers import LlamaConfig, LlamaForCausalLM

from hf_specgen import SmallModel, WithLookup
from hf_specgen.bench import exactness, plots, report
from hf_specgen.errors import SpecGenError
from hf_specgen.measure import machine, run
from hf_specgen.measure.compare import Divergence, find_divergence, first_difference, ratio_words, tie_tolerance
from hf_specgen.measure.decode import Output
from hf_specgen.measure.methods import Decoding, DecodingMethod, DrafterChoice, our_method, plain_method
from hf_specgen.measure.prompts import ChatPrompt, pad_left
from hf_specgen.round.stats import AcceptanceStats, RowStats


def tiny(seed: int = 0, layers: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


# --- comparison


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2, 3], [1, 2]) == 2
    assert first_difference([], [4]) == 0


def test_divergence_on_a_constructed_pair() -> None:
    model = tiny()
    prompt, plain = [3, 1, 4, 1, 5], [9, 2, 6]
    with torch.no_grad():
        scores = model(torch.tensor([[*prompt, *plain[:2]]])).logits[0, -1]
    best, second = scores.topk(2).values.tolist()
    found = find_divergence(model, prompt, plain, [9, 2, 7, 8])
    assert found is not None
    assert (found.position, found.plain, found.other) == (2, 6, 7)
    assert found.gap == pytest.approx(best - second, abs=1e-5)
    assert found.shortfall == pytest.approx(best - min(scores[6], scores[7]).item(), abs=1e-5)
    assert find_divergence(model, prompt, plain, list(plain)) is None
    ended = find_divergence(model, prompt, plain, [9, 2])
    assert ended is not None
    assert (ended.position, ended.plain, ended.other, ended.shortfall) == (2, 6, None, None)


def test_a_divergence_is_a_tie_only_when_both_tokens_are_near_the_best() -> None:
    assert Divergence(0, 1, 2, gap=0.01, shortfall=0.01).is_tie(0.05)
    assert not Divergence(0, 1, 2, gap=0.01, shortfall=3.0).is_tie(0.05)
    assert not Divergence(0, 1, None, gap=0.0, shortfall=None).is_tie(math.inf)
    assert tie_tolerance(torch.float32) == 1e-3 < tie_tolerance(torch.bfloat16) == 0.5


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        (1.324, "speed-up 1.32x"),
        (1.0, "speed-up 1.00x"),
        (0.9999, "slower: 0.999x"),
        (0.9961, "slower: 0.996x"),
        (0.934, "slower: 0.93x"),
    ],
)
def test_a_ratio_below_one_is_never_called_a_speed_up(ratio: float, words: str) -> None:
    assert ratio_words(ratio) == words


# --- timed runs, with decoders whose times and texts are known


class Clock:
    """Replace the stopwatch: each method takes the seconds that it says."""

    def __init__(self, device: torch.device) -> None:
        self.timing = machine.Timing(0.0, 0.0)

    def __enter__(self) -> Clock:
        CALLS.clear()
        return self

    def __exit__(self, *_: object) -> None:
        self.timing = machine.Timing(CALLS[0], 0.0)


CALLS: list[float] = []


def scripted(name: str, seconds: dict[str, list[float]], change: dict[str, int], order: list[str]) -> DecodingMethod:
    """Build a method that takes ``seconds`` per category and repeat, and writes 7 except where ``change`` says."""
    turn: Counter[str] = Counter()

    def generate(model: Any, inputs: dict[str, torch.Tensor], decoding: Decoding, **extra: Any) -> Output:
        length = inputs["input_ids"].shape[1]
        category = {3: "short", 5: "long"}[length]
        CALLS.append(seconds[category][turn[category] % len(seconds[category])])
        turn[category] += 1
        order.append(name)
        rows = [[7] * decoding.max_new_tokens for _ in inputs["input_ids"]]
        if category in change:
            rows[0][change[category]] = 8
        stats = AcceptanceStats("stub", rows=[RowStats(4, 2, 6, 3, 8, 7, [2, 2, 2], [2, 1, 0])], num_forwards=4)
        stats.draft_seconds, stats.verify_seconds, stats.forward_seconds, stats.other_seconds = 0.5, 3.0, 2.8, 0.5
        return Output(rows, stats if name == "ours" else None)

    return DecodingMethod(name, f"the {name} one", generate)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A report over three prompts in two categories, with plain, stock and our times made up."""
    monkeypatch.setattr(run, "Stopwatch", Clock)
    order: list[str] = []
    methods = [
        scripted("plain", {"short": [2.0, 3.0, 9.0], "long": [4.0]}, {}, order),
        scripted("stock", {"short": [2.0], "long": [4.0]}, {}, order),
        scripted("ours", {"short": [1.0], "long": [5.0]}, {"long": 2}, order),
    ]
    prompts = [
        ChatPrompt.user("abc", "short", "s1"),
        ChatPrompt.user("abd", "short", "s2"),
        ChatPrompt.user("abcde", "long", "l1"),
    ]
    settings = run.Settings(Decoding(max_new_tokens=4), repeats=3, warmup=0)
    steps: list[tuple[int, int, str]] = []
    results = run.run_bench(
        tiny(), Letters(), prompts, methods, settings, lambda done, total, label: steps.append((done, total, label))
    )
    context = {
        "machine": {"cpu": "test", "threads": 1, "gpu": None},
        "target": {"name": "tiny", "dtype": "float32", "device": "cpu"},
    }
    built = report.build_report(results, methods, settings, context, Letters())
    return {"report": built, "order": order, "steps": steps}


def test_methods_take_turns_and_progress_counts(measured: dict[str, Any]) -> None:
    order = measured["order"]
    assert order[:9] == ["plain", "stock", "ours", "stock", "ours", "plain", "ours", "plain", "stock"]
    assert Counter(order[::3]) == {"plain": 3, "stock": 3, "ours": 3}
    assert measured["steps"][-1] == (27, 27, "long: the plain one")


def test_report_counts(measured: dict[str, Any]) -> None:
    built = measured["report"]
    ours = built["methods"]["ours"]
    assert built["methods"]["plain"]["seconds"] == 3.0 + 3.0 + 4.0  # medians of the repeats
    assert built["methods"]["plain"]["tokens_per_second"] == 12 / 10
    assert ours["speedup"] == pytest.approx(10 / 7)
    assert ours["speedup_per_token"] == pytest.approx(10 / 7)
    assert ours["categories"]["short"]["speedup"] == pytest.approx(6 / 2)
    assert ours["categories"]["long"]["speedup"] == pytest.approx(4 / 5)
    assert ours["categories"]["long"]["speedup_ci95"] is None  # one prompt has no spread
    assert ours["categories"]["short"]["speedup_ci95"] == pytest.approx([3.0, 3.0])
    low, high = ours["speedup_ci95"]
    assert (low, high) == pytest.approx((0.8, 3.0))
    # summed over the prompts, plain took 2 + 2 + 4, 3 + 3 + 4 and 9 + 9 + 4 s in the three repeats, ours 7 s each
    slow, fast = ours["speedup_repeats"]
    assert slow == pytest.approx((8 + 0.2 * 2) / 7)
    assert fast == pytest.approx((10 + 0.8 * 12) / 7)
    assert ours["speedup_over_stock"] == pytest.approx(8 / 7)
    assert ours["categories"]["short"]["speedup_over_stock"] == pytest.approx(2.0)


def test_report_finds_the_divergence(measured: dict[str, Any]) -> None:
    ours = measured["report"]["methods"]["ours"]
    assert ours["identical"] == {"compared": 3, "same": 2}
    assert measured["report"]["methods"]["stock"]["identical"] == {"compared": 3, "same": 3}
    (found,) = ours["divergences"]
    assert (found["prompt"], found["position"], found["plain"], found["other"]) == ("l1", 2, 7, 8)
    assert (found["plain_text"], found["other_text"]) == ("H", "I")
    expected = find_divergence(tiny(), [ord(letter) % VOCAB for letter in "abcde"], [7] * 4, [7, 7, 8, 7])
    assert expected is not None
    assert found["gap"] == pytest.approx(expected.gap, abs=1e-5)


def test_report_sums_acceptance(measured: dict[str, Any]) -> None:
    acceptance = measured["report"]["methods"]["ours"]["acceptance"]
    assert (acceptance["num_rounds"], acceptance["num_drafts"], acceptance["num_forwards"]) == (12, 6, 12)
    assert acceptance["mean_acceptance_length"] == pytest.approx(1 + 9 / 6)
    assert acceptance["tokens_per_round"] == pytest.approx(1 + 9 / 12)
    assert acceptance["acceptance_rates"] == [1.0, 0.5, 0.0]
    assert acceptance["seconds"]["forward"] == pytest.approx(3 * 2.8)
    assert acceptance["outside_forward"] == pytest.approx(1 - 2.8 / 4.0)
    assert measured["report"]["methods"]["plain"].get("acceptance") is None


def test_summary_and_tables_say_what_the_numbers_say(measured: dict[str, Any]) -> None:
    from rich.console import Console

    built = measured["report"]
    line = report.summary_line(built)
    assert line.startswith("speed-up 1.43x (95 % interval 0.80-3.00) | acceptance length 2.50 | 1.75 tokens per round")
    assert "identical to plain greedy: 2/3 (the others part at a logit gap of at most" in line
    console = Console(width=120, record=True, file=open("/dev/null", "w"))
    console.print(report.render(built))
    text = console.export_text()
    assert "slower: 0.80x" in text
    assert "1.43x (0.80-3.00)" in text
    assert "the ours one: identical to plain greedy 2/3" in text
    assert "the ours one against stock: speed-up 1.14x" in text


def test_report_survives_json_and_the_disk(measured: dict[str, Any], tmp_path: Path) -> None:
    built = measured["report"]
    report.write_json(built, tmp_path / "deep" / "report.json")
    assert json.loads((tmp_path / "deep" / "report.json").read_text()) == json.loads(json.dumps(built))
    assert built["schema"] == "hf_specgen.bench/1"
    assert built["prompts"][2] == {"id": "l1", "category": "long", "prompt_tokens": 5, "plain_tokens": 4}
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["report.json"]


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(report.os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        report.write_atomic(tmp_path / "x.json", b"{}")
    assert list(tmp_path.iterdir()) == []


def test_plots_show_bars_errors_and_the_line_at_one(measured: dict[str, Any], tmp_path: Path) -> None:
    built = measured["report"]
    paths = plots.write_plots(built, tmp_path)
    assert [path.name for path in paths] == ["speedup.png", "acceptance.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    axes = plots.speedup_figure(built).axes[0]
    assert [bar.get_height() for bar in axes.patches[3:]] == pytest.approx([3.0, 0.8, 10 / 7])
    assert any(list(line.get_ydata()) == [1.0, 1.0] for line in axes.lines)
    assert "tiny, float32, batch 1, greedy, 4 new tokens, 3 prompts" in axes.get_title()
    figure = plots.acceptance_figure(built)
    assert figure is not None
    assert list(figure.axes[0].lines[0].get_ydata()) == [1.0, 0.5, 0.0]


def test_impossible_measurements_are_refused_before_they_start() -> None:
    model, prompts, plain = tiny(), [ChatPrompt.user("abc", question_id="p")], plain_method()
    settings = run.Settings(Decoding(max_new_tokens=300))
    with pytest.raises(SpecGenError, match=r"prompt p has 3 tokens and 300 new ones .* context is 256"):
        run.run_bench(model, Letters(), prompts, [plain], settings)
    with pytest.raises(SpecGenError, match="the first method of a measurement must be the plain one"):
        run.run_bench(model, Letters(), prompts, [our_method(None)], run.Settings())
    stock = DrafterChoice("prompt-lookup").stock(3)
    assert stock is not None
    with pytest.raises(SpecGenError, match="stock, 3 tokens decodes at most 1 row, the batch size is 2"):
        run.run_bench(model, Letters(), prompts, [plain, stock], run.Settings(batch_size=2))
    with pytest.raises(SpecGenError, match="there is no prompt"):
        run.run_bench(model, Letters(), [], [plain], run.Settings())


# --- real decoding


def test_methods_agree_on_greedy_texts() -> None:
    model = tiny()
    small = DrafterChoice("small-model:x", model=tiny(1, layers=1))
    lookup = DrafterChoice("prompt-lookup")
    stocks = [lookup.stock(3), small.stock(3)]
    methods = [*filter(None, stocks), our_method(lookup.make(3)), our_method(small.make(3)), our_method(None)]
    inputs = pad_left([[1, 2, 3, 1, 2, 3, 1, 2]], 0)
    before = small.model.generation_config.to_dict()
    texts = [method.generate(model, inputs, Decoding(12), pad_token_id=0).rows for method in [plain_method(), *methods]]
    assert len(texts) == 6
    assert all(text == texts[0] for text in texts)
    assert len(texts[0][0]) == 12
    assert small.model.generation_config.to_dict() == before


def test_texts_end_with_the_end_of_sequence() -> None:
    model = tiny()
    inputs = pad_left([[1, 2, 3], [4, 5, 6]], 0)
    free = plain_method().generate(model, inputs, Decoding(8), pad_token_id=0).rows
    model.generation_config.eos_token_id = [free[0][2]]
    ended = plain_method().generate(model, inputs, Decoding(8), pad_token_id=0).rows
    assert ended[0] == free[0][: free[0].index(free[0][2]) + 1]
    assert our_method(None).generate(model, inputs, Decoding(8), pad_token_id=0).rows == ended


def test_sampling_is_seeded_and_the_drafter_does_not_change_it() -> None:
    model, decoding = tiny(), Decoding(12, temperature=0.9, top_k=20, top_p=0.95, seed=5)
    assert decoding.kwargs() == {
        "max_new_tokens": 12,
        "do_sample": True,
        "temperature": 0.9,
        "top_k": 20,
        "top_p": 0.95,
    }
    inputs = pad_left([[1, 2, 3, 1, 2]], 0)
    drafters = (None, DrafterChoice("prompt-lookup").make(4))
    alone, helped = (our_method(drafter).generate(model, inputs, decoding, pad_token_id=0) for drafter in drafters)
    other = our_method(None).generate(model, inputs, Decoding(12, 0.9, 20, 0.95, seed=6), pad_token_id=0)
    assert alone.rows == helped.rows != other.rows
    assert helped.stats is not None
    assert helped.stats.num_draft_tokens > 0


def test_unknown_drafters_are_refused() -> None:
    def load(name: str) -> tuple[Any, Any]:
        return SimpleNamespace(name=name), "tokenizer"

    behind = [f"prompt-lookup+{rest}" for rest in ("", "none", "prompt-lookup", "learned:", "small-model:", "eagle")]
    for spec in ("eagle", "small-model", "small-model:", "learned:", "prompt-lookup:x", *behind):
        with pytest.raises(SpecGenError, match="prompt-lookup, small-model:<id or path>, learned:<id or path>, none"):
            DrafterChoice.parse(spec, load)
    with pytest.raises(SpecGenError, match="Only small-model"):
        DrafterChoice.parse("prompt-lookup", load, sample=True)
    choice = DrafterChoice.parse("small-model:a/b:c", load, sample=True)
    assert (choice.model.name, choice.tokenizer, choice.sample) == ("a/b:c", "tokenizer", True)
    both = DrafterChoice.parse("prompt-lookup+small-model:a+b", load, sample=True)
    assert (both.model.name, both.sample) == ("a+b", True)


def test_copies_and_a_small_model_are_made_prepacked_and_asked_for_a_length() -> None:
    choice = DrafterChoice("prompt-lookup+small-model:x", model=tiny(1, layers=1))
    for made in (choice, choice.prepacked()):
        both = made.make(3)
        assert isinstance(both, WithLookup) and isinstance(both.drafter, SmallModel)
        assert both.drafter.model is made.model and both.drafter.num_tokens == both.lookup.num_tokens == 3
    assert choice.prepacked().model is not choice.model
    assert choice.stock(3) is None, "transformers has no counterpart"


# --- exactness


def biased(method: DecodingMethod, chance: float) -> DecodingMethod:
    """Spoil a method: with ``chance`` the second token becomes a copy of the first."""
    generator = torch.Generator().manual_seed(1)

    def generate(*args: Any, **kwargs: Any) -> Output:
        output = method.generate(*args, **kwargs)
        for row in output.rows:
            if torch.rand((), generator=generator) < chance:
                row[1] = row[0]
        return output

    return DecodingMethod(method.name, method.label, generate)


def test_enumerated_law_sums_to_one_and_matches_a_hand_made_chain() -> None:
    model, ids, tokens = tiny(), [1, 2, 3], [4, 5]
    others = [token for token in range(VOCAB) if token not in tokens]
    law = exactness.enumerate_law(model, ids, tokens, Decoding(temperature=0.7), others)
    assert len(law) == 8
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-9)
    chance = 1.0
    for place, token in enumerate((5, 4, 4)):
        with torch.no_grad():
            logits = model(torch.tensor([[*ids, *(5, 4, 4)[:place]]])).logits[0, -1, tokens].double() / 0.7
        chance *= logits.softmax(-1)[tokens.index(token)].item()
    assert law[5, 4, 4] == pytest.approx(chance, rel=1e-4)


@pytest.mark.parametrize("spec", few(("prompt-lookup", "small-model:sampled", "none"), "small-model:sampled"))
def test_the_law_check_passes_ours_and_fails_a_biased_one(spec: str) -> None:
    model = tiny()
    small = tiny(1, layers=1) if spec.startswith("small") else None
    choice = DrafterChoice(spec, sample=small is not None, model=small)
    method, expected = our_method(choice.make(3)), spec != "none"
    checked = exactness.check_law(model, [1, 2, 3], method, Decoding(temperature=1.5), 4, 512, expected)
    assert checked.passed, checked
    assert checked.failure == ""
    assert checked.degrees >= 20
    assert (checked.drafted > 0) == expected
    spoilt = exactness.check_law(model, [1, 2, 3], biased(method, 0.2), Decoding(temperature=1.5), 4, 512, expected)
    assert spoilt.p_value < 1e-6
    assert "DOES NOT FIT" in spoilt.failure


def test_the_law_check_says_when_nothing_was_tested() -> None:
    model = tiny()
    idle = exactness.check_law(model, [1, 2, 3], our_method(None), Decoding(temperature=1.5), 4, 128, True)
    assert not idle.passed
    assert "the drafter proposed nothing" in idle.failure
    sure = exactness.check_law(model, [1, 2, 3], our_method(None), Decoding(temperature=0.01), 2, 64, False)
    assert "NOTHING WAS TESTED" in sure.failure
    with pytest.raises(SpecGenError, match="temperature above 0"):
        exactness.check_law(model, [1], our_method(None), Decoding())


def test_chi_square_against_hand_made_numbers() -> None:
    law = {(1,): 0.5, (2,): 0.3, (3,): 0.19, (4,): 0.01}
    counts = Counter({(1,): 40, (2,): 35, (3,): 22, (4,): 3})
    statistic, degrees, outside = exactness.chi_square(law, counts)
    # the rare cell joins the next one: expected 20, seen 25
    assert statistic == pytest.approx(100 / 50 + 25 / 30 + 25 / 20)
    assert (degrees, outside) == (2, 0)
    assert exactness.upper_tail(statistic, degrees) == pytest.approx(math.exp(-statistic / 2))
    assert exactness.chi_square(law, Counter({(1,): 50, (9,): 50}))[2] == 50


def test_greedy_check_separates_ties_from_errors() -> None:
    model, prompts = tiny(), [ChatPrompt.user("abcabc", question_id="p"), ChatPrompt.user("xyxyxy", question_id="q")]
    settings = run.Settings(Decoding(6), repeats=1, warmup=0)
    fine = exactness.check_greedy(
        model, Letters(), prompts, our_method(DrafterChoice("prompt-lookup").make(3)), settings, 1e-3
    )
    assert (fine.same, fine.compared, fine.passed) == (2, 2, True)

    def wrong(*args: Any, **kwargs: Any) -> Output:
        output = our_method(None).generate(*args, **kwargs)
        output.rows[0][3] = (output.rows[0][3] + 1) % VOCAB
        return output

    bad = exactness.check_greedy(model, Letters(), prompts, DecodingMethod("ours", "wrong", wrong), settings, 1e-3)
    assert (bad.same, bad.compared, bad.passed) == (0, 2, False)
    assert [(name, found.position) for name, found in bad.failures] == [("p", 3), ("q", 3)]
    assert exactness.GreedyReport(2, bad.divergences, tolerance=1e9).passed
