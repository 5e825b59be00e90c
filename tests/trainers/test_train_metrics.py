"""The renewal acceptance length against decoding, simulated and real; the callback that decodes at evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import train_runs
from fitted import fitted, untrained
from tiny import letters, tiny
from torch import Tensor, nn
from train_runs import eagle3_trainer, together
from transformers import PreTrainedModel, TrainerCallback

from hf_specgen import SpecGenError, SpeculativeDecoding
from hf_specgen.drafting.learned import LearnedDrafter
from hf_specgen.models.taps import FINAL, Taps
from hf_specgen.trainers import worth
from hf_specgen.trainers.losses import Objective
from hf_specgen.trainers.metrics import AcceptanceCallback, Renewal, renewal

Run = tuple[int, int, int]  # row, first and last + 1 place of what is written
PROMPT, AHEAD, WRITTEN = [5, 9, 2, 7], 3, 40


def walk(rates: Tensor, row: int, known: int, end: int) -> int:
    """Count rounds as decoding goes: draft, keep what is right and one token more, again."""
    rounds = 0
    while known < end:
        right = 0
        while right < rates.shape[2] and rates[row, known - 2, right] == 1:
            right += 1
        known, rounds = known + right + 1, rounds + 1
    return rounds


def expected(rates: Tensor, row: int, known: int, end: int) -> float:
    """Average over every way a text may be written: slow, and straight from the rule."""
    if known >= end:
        return 0.0
    total, alive = 1.0, 1.0
    for depth in range(rates.shape[2]):
        rate = float(rates[row, known - 2, depth]) if known + depth < end else 0.0
        total += alive * (1 - rate) * expected(rates, row, known + depth + 1, end)
        alive *= rate
    return total + alive * expected(rates, row, known + rates.shape[2] + 1, end)


def masked(rows: int, width: int, runs: list[Run]) -> Tensor:
    mask = torch.zeros(rows, width, dtype=torch.bool)
    for row, first, last in runs:
        mask[row, first:last] = True
    return mask


RUNS: list[Run] = [(0, 3, 30), (1, 2, 5), (1, 9, 10), (1, 11, 26), (2, 20, 32)]


@pytest.mark.parametrize("ahead", (1, 3, 7))
def test_certain_rates_are_a_walk(ahead: int) -> None:
    """Tokens and rounds of several runs in a batch are exactly those of walking through each."""
    torch.manual_seed(ahead)
    rates = (torch.rand(4, 32, ahead) < 0.7).float()
    found = renewal(rates, masked(4, 32, RUNS))
    assert float(found.tokens) == sum(last - first - 1 for _, first, last in RUNS)
    assert float(found.rounds) == sum(walk(rates, row, first + 1, last) for row, first, last in RUNS)
    assert found.length == float(found.tokens) / float(found.rounds) > 1.3


def test_uncertain_rates_are_the_expectation() -> None:
    torch.manual_seed(0)
    rates, runs = torch.rand(2, 16, 3), [(0, 1, 13), (1, 4, 16)]
    found = renewal(rates, masked(2, 16, runs))
    wanted = sum(expected(rates, row, first + 1, last) for row, first, last in runs)
    assert abs(float(found.rounds) - wanted) < 1e-9


def test_documents_are_texts_of_their_own() -> None:
    """Packed texts without a gap, supervised from their first token on: that one is the prompt."""
    torch.manual_seed(1)
    rates, documents = torch.ones(1, 20, 4), torch.tensor([[0] * 8 + [1] * 7 + [-1] * 5])
    mask = masked(1, 20, [(0, 0, 15)])
    found = renewal(rates, mask, documents)
    assert float(found.tokens) == 6 + 5
    assert float(found.rounds) == walk(rates, 0, 2, 8) + walk(rates, 0, 10, 15) == 3
    assert float(renewal(rates, mask).tokens) == 13  # without documents it is one text


def test_nothing_supervised_and_unknown_rates() -> None:
    nothing = renewal(torch.rand(2, 5, 3), torch.zeros(2, 5))
    assert (float(nothing.tokens), float(nothing.rounds), nothing.length) == (0.0, 0.0, 1.0)
    unknown = renewal(torch.full((1, 9, 3), torch.nan), masked(1, 9, [(0, 2, 9)]))
    assert unknown.length == 1.0 and float(unknown.rounds) == 6
    for width in (1, 2):
        assert float(renewal(torch.rand(1, width, 3), torch.ones(1, width)).tokens) == 0
    parts = [renewal(rates, masked(4, 32, RUNS)) for rates in torch.rand(2, 4, 32, 3)]
    both = Renewal(*(sum(column) for column in zip(*parts, strict=True)))  # type: ignore[arg-type]
    assert both.length != parts[0].length and both.length == float(both.tokens / both.rounds)


def test_the_mean_over_places_is_something_else() -> None:
    """Rounds visit every hard place and few easy ones: the mean over all places promises more than decoding gives."""
    rates = torch.ones(1, 60, 3)
    rates[0, 20:30] = 0
    found = renewal(rates, masked(1, 60, [(0, 3, 60)]))
    assert found.length == 56 / walk(rates, 0, 4, 60)
    mean = float((1 + rates[0, 2:58].cumprod(-1).sum(-1)).mean())
    assert mean > 1.2 * found.length


def told_of(drafter: LearnedDrafter, model: PreTrainedModel, ids: Tensor, start: int) -> Renewal:
    """Score texts in one teacher-forced pass and return their tokens and rounds."""
    (found,) = told_of_each(drafter, model, ids, start)
    return found


@torch.no_grad()
def told_of_each(drafter: LearnedDrafter, model: PreTrainedModel, ids: Tensor, start: int) -> list[Renewal]:
    drafter.attach(model)
    taps = Taps(model, (*drafter.hidden_layers, FINAL))
    with taps.on() as seen:
        model(ids, use_cache=False)
        *features, last = taps.read(seen, torch.device("cpu"))
    mask = (torch.arange(ids.shape[1]) >= start).expand(ids.shape)
    head = model.get_output_embeddings().weight
    output = drafter(ids, tuple(features), last, mask, Objective(), head, steps=AHEAD, wants_rates=True)
    return [renewal(*row) for row in zip(output.rates.split(1), mask.split(1), strict=True)]


PROMPTS = (PROMPT, [1, 2, 3, 4])


def decode(model: PreTrainedModel, drafter: LearnedDrafter | None, prompt: Any, **settings: Any) -> Any:
    ids = torch.tensor(prompt).view(-1, len(PROMPT))
    loop = SpeculativeDecoding(drafter)
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=WRITTEN, custom_generate=loop, **settings
    )


def test_greedy_decoding_is_exactly_as_told() -> None:
    """An EAGLE-3 drafter that is right at some places: tokens and rounds of real decoding, prompt by prompt."""
    model = tiny(layers=3)
    prompts = [[seed, 9, 2, 7 + seed] for seed in range(1, 5)]
    texts = decode(model, None, prompts, do_sample=False).tolist()
    lengths = []
    for wrong, reduced in ((0, False), (3, False), (4, True)):
        drafter = fitted("eagle3", model, texts, wrong=wrong, num_tokens=AHEAD, tree="chain", reduced=reduced)
        out = decode(model, drafter, prompts, do_sample=False)
        assert out.tolist() == texts
        for told, row in zip(told_of_each(drafter, model, out, len(PROMPT)), out.speculation.rows, strict=True):
            assert (float(told.tokens), float(told.rounds)) == (WRITTEN - 1, row.num_rounds)
            lengths.append(told.length)
    assert max(lengths) > 3 and min(lengths) < 2.5


def test_sampled_texts_with_picked_drafts_are_exactly_as_told() -> None:
    """Sample and match: the text is the coins' own, so its rounds are no chance either."""
    model = tiny(layers=3)
    model.get_output_embeddings().weight.data *= 8  # laws with a favourite
    texts = [decode(model, None, PROMPT, do_sample=True, top_k=0, seed=seed)[0].tolist() for seed in range(3)]
    drafter = fitted("eagle3", model, texts, wrong=4, num_tokens=AHEAD, tree="chain")
    for seed in range(3):
        out = decode(model, drafter, PROMPT, do_sample=True, top_k=0, seed=seed)
        assert out[0].tolist() == texts[seed]
        told = told_of(drafter, model, out, len(PROMPT))
        assert float(told.rounds) == out.speculation.total.num_rounds < WRITTEN - 2


def test_drawn_drafts_are_within_noise() -> None:
    """Given the text, rounds are chance: over many texts their mean difference from the expectation is none."""
    model = tiny(layers=3)
    drafter = untrained("eagle3", model, list(range(0, 64, 2)), num_tokens=AHEAD, tree="chain", sample=True)
    out = decode(model, drafter, [PROMPT] * 64, do_sample=True, top_k=0, seed=0)
    rounds = torch.tensor([float(row.num_rounds) for row in out.speculation.rows])

    def surprise() -> float:
        told = [float(one.rounds) for one in told_of_each(drafter, model, out, len(PROMPT))]
        gaps = rounds - torch.tensor(told)
        return float(gaps.mean().abs() / gaps.std() * len(gaps) ** 0.5)

    assert rounds.std() > 0.5 and surprise() < 3
    drafter.config.sample = False  # the twin: rates of picked drafts
    assert surprise() > 20


def callback_of(trainer: Any, **settings: Any) -> AcceptanceCallback:
    callback = AcceptanceCallback(trainer, PROMPTS, **{"max_new_tokens": 16, **settings})
    trainer.add_callback(callback)
    return callback


class Sent(TrainerCallback):
    """Stand in for ``report_to``."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **unused: Any) -> None:
        self.logs.append(dict(logs))


def test_the_callback_decodes_with_the_live_drafter(tmp_path: Path) -> None:
    """Figures of real decoding join the evaluation, are logged, and leave the drafter as it was."""
    trainer, sent = eagle3_trainer(tmp_path, steps=AHEAD), Sent()
    model, drafter = trainer.target.model, trainer.drafter
    drafter.config.num_tokens, drafter.config.tree = AHEAD, "chain"
    callback_of(trainer)
    trainer.add_callback(sent)
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    found = trainer.evaluate()
    outs = [decode(model, drafter, prompt, do_sample=False)[:, : len(prompt) + 16] for prompt in PROMPTS]
    told = [told_of(drafter, model, out, len(prompt)) for out, prompt in zip(outs, PROMPTS, strict=True)]
    length = float(sum(part.tokens for part in told) / sum(part.rounds for part in told))
    assert found["eval_decoded_acceptance_length"] == pytest.approx(length, abs=1e-12)
    assert found["eval_decoded_lossless"] == 1.0 and {f"eval_decoded_rate_{k}" for k in (1, 2, 3)} <= set(found)
    assert any("eval_decoded_acceptance_length" in logs for logs in sent.logs)
    assert any("eval_decoded_acceptance_length" in entry for entry in trainer.state.log_history)
    assert all(torch.equal(before[name], tensor) for name, tensor in drafter.state_dict().items())
    assert any(parameter.requires_grad for parameter in drafter.parameters())


def test_the_callback_decodes_at_the_evaluations_temperature(tmp_path: Path) -> None:
    """Lengths are those of texts drawn at ``eval_temperature``, the same at every look; losslessness stays greedy's."""
    found = {}
    for heat in (0.0, 2.0):
        trainer = eagle3_trainer(tmp_path, steps=AHEAD, eval_temperature=heat)
        drafter, model = trainer.drafter, trainer.target.model
        drafter.config.num_tokens, drafter.config.tree = AHEAD, "chain"
        torch.manual_seed(1)
        torch.nn.init.normal_(drafter.lm_head.weight)  # one that is right at least once at the higher temperature
        callback = callback_of(trainer)
        found[heat] = callback.measure()
        assert found[heat]["eval_decoded_lossless"] == 1.0
    assert callback.measure() == found[2.0]
    drawn = dict(do_sample=True, temperature=2.0, top_k=0, top_p=1.0, max_new_tokens=16)
    tokens = rounds = 0
    for number, prompt in enumerate(PROMPTS):
        ids = torch.tensor([prompt])
        out = model.generate(ids, custom_generate=SpeculativeDecoding(drafter), seed=number, **drawn)
        tokens, rounds = tokens + out.shape[1] - ids.shape[1] - 1, rounds + out.speculation.total.num_rounds
    assert found[2.0]["eval_decoded_acceptance_length"] == pytest.approx(tokens / rounds, abs=1e-12)
    assert found[2.0]["eval_decoded_acceptance_length"] != found[0.0]["eval_decoded_acceptance_length"]
    assert AcceptanceCallback(trainer, PROMPTS, temperature=0.5).temperature == 0.5


@pytest.mark.slow
def test_the_callback_follows_training(tmp_path: Path) -> None:
    """It decodes at evaluations while training goes on, every second one when asked, and may choose the best model."""
    texts = [decode(tiny(layers=3), None, PROMPT, do_sample=False)[0].tolist()]
    rows = [{"input_ids": texts[0], "loss_mask": [0] * len(PROMPT) + [1] * WRITTEN}] * 8
    schedule = dict(eval_strategy="steps", eval_steps=4, max_steps=16, learning_rate=2e-2)
    trainer = eagle3_trainer(tmp_path, rows, **schedule)
    callback_of(trainer, every=2, max_new_tokens=WRITTEN)
    trainer.drafter.config.tree = "chain"
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "eval_decoded_acceptance_length" in entry]
    assert [entry["step"] for entry in entries] == [4, 12]
    assert "eval_decoded_acceptance_length" not in trainer.evaluate()  # that step was evaluated: it counts once


def test_decoding_in_the_targets_dtype(tmp_path: Path) -> None:
    """A float32 drafter of a bfloat16 target decodes as a copy; a text that differs at a near-tie is only told."""
    trainer = eagle3_trainer(tmp_path, steps=AHEAD)
    callback = callback_of(trainer)
    trainer.target.model.to(torch.bfloat16)
    found = callback.measure()
    assert 0 <= found["eval_decoded_lossless"] <= 1 and found["eval_decoded_acceptance_length"] >= 1
    assert all(parameter.dtype == torch.float32 for parameter in trainer.drafter.parameters())
    callback._plain = [[0] * 16, [0] * 16]
    assert callback.measure()["eval_decoded_lossless"] == 0.0


def test_a_changed_text_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = eagle3_trainer(tmp_path, steps=AHEAD)
    callback = callback_of(trainer)
    callback.measure()
    assert callback._plain is not None
    callback._plain[1][5] += 1
    with pytest.raises(SpecGenError, match=r"prompt 1: token 5 of the text differs"):
        trainer.evaluate()
    monkeypatch.setattr(worth, "DTensor", nn.Parameter)  # as if sharded
    with pytest.warns(UserWarning, match="decodes nothing"):
        trainer.state.global_step += 1
        assert "eval_decoded_lossless" not in trainer.evaluate()


def test_prompts_of_every_kind(tmp_path: Path) -> None:
    trainer = eagle3_trainer(tmp_path)
    callback = AcceptanceCallback(trainer, ["ab", [3, 4], [{"role": "user", "content": "ab"}]], max_new_tokens=2)
    with pytest.raises(SpecGenError, match="no processing_class"):
        callback.measure()
    tokenizer = letters()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}b"
    trainer.processing_class = tokenizer
    assert callback._ids("ab") == tokenizer("ab")["input_ids"] and callback._ids([3, 4]) == [3, 4]
    assert callback._ids([{"role": "user", "content": "ab"}]) == tokenizer("abb")["input_ids"]
    assert callback.measure()["eval_decoded_lossless"] == 1.0
    for settings in ({"every": 0}, {"max_new_tokens": 1}):
        with pytest.raises(SpecGenError, match="least that is required"):
            AcceptanceCallback(trainer, ["ab"], **settings)  # type: ignore[arg-type]
    with pytest.raises(SpecGenError, match="0 prompts"):
        AcceptanceCallback(trainer, [])


def shared_job(folder: str, broken: bool = False) -> dict[str, Any]:
    """Evaluate as one of several processes; ``broken``: the first one finds another text."""
    trainer = eagle3_trainer(folder)
    callback = callback_of(trainer)
    decoded = 0
    inner = callback._decoded

    def count() -> Any:
        nonlocal decoded
        decoded += 1
        if broken:
            raise SpecGenError("another text")
        return inner()

    callback._decoded = count  # type: ignore[method-assign]
    try:
        figures = trainer.evaluate()
    except SpecGenError as error:
        figures = {"error": str(error)}
    every: list[Any] = [None] * trainer.args.world_size
    torch.distributed.all_gather_object(every, (decoded, figures))
    return {"world": trainer.args.world_size, "every": every}


@pytest.mark.slow
def test_two_processes_tell_the_same(tmp_path: Path) -> None:
    """The first process decodes; the other hears the figures, or the error: nobody waits for ever."""
    run = "test_train_metrics.shared_job"
    found = together({"fine": {"run": run}, "broken": {"run": run, "broken": True}}, tmp_path)
    for job in found.values():
        assert job["world"] == 2 and [decoded for decoded, _ in job["every"]] == [1, 0]
    one, other = (figures for _, figures in found["fine"]["every"])
    assert one["eval_decoded_acceptance_length"] == other["eval_decoded_acceptance_length"] >= 1
    assert all("another text" in figures["error"] for _, figures in found["broken"]["every"])
    assert train_runs.HERE == Path(__file__).resolve().parents[1] / "support"
