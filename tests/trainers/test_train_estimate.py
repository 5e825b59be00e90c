"""The estimate of a training plan, against figures worked out by hand for Llama-3.1-8B."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_calls import call, fine, refused, save
from tiny import tiny
from transformers import LlamaConfig

from hf_specgen.errors import SpecGenError
from hf_specgen.trainers import estimate as work
from hf_specgen.trainers.warm_start import new_drafter

LLAMA_8B = LlamaConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    tie_word_embeddings=False,
)
EAGLE3 = work.TrainingPlan("eagle3", tokens=10**6, supervised=10**6, rows=1000, draft_vocab_size=32_000)


def test_a_large_target_is_counted_without_memory() -> None:
    sizes = work.measure(LLAMA_8B, EAGLE3)
    assert sizes.target == 8_030_261_248 and sizes.target_body == 8_030_261_248 - 2 * 128_256 * 4096
    # a layer with q, k and v of twice the input, its norms, the fusing of three streams, the head of 32,000 ids
    attention = 8192 * (4096 + 2 * 1024) + 4096 * 4096
    body = attention + 3 * 4096 * 14_336 + 4 * 4096
    assert sizes.drafter == body + 3 * 4096 * 4096 + 32_000 * 4096
    assert (sizes.once, sizes.head, sizes.repeated) == (3 * 4096 * 4096, 32_000 * 4096, body)
    found = work.estimate(EAGLE3, sizes)
    assert found.memory["target, frozen"] == pytest.approx(16.06e9, rel=1e-3)
    assert found.memory["drafter, gradients, Adam (float32)"] == 16 * sizes.drafter
    assert found.disk["a feature cache, if one is written (16 bits)"] == 10**6 * (4 * 4096 * 2 + 5)
    assert found.memory_total == sum(found.memory.values())
    # operations a token, in 10^9: target 2 N, layer 6 N seven times, its head at every unrolled step, the target's once
    expected = {work.TARGET: 14.0, "drafter": 10.5, "drafter's head": 5.5, "target's head": 1.05}
    assert {name: value / 1e9 for name, value in found.operations.items()} == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("method", ["medusa", "eagle", "eagle3"])
def test_the_counted_drafter_is_the_trained_one(method: str) -> None:
    model = tiny(layers=7)
    plan = work.TrainingPlan(method, 100, 50, 10, steps=2)
    sizes = work.measure(model.config, plan)
    drafter, _ = new_drafter(method, model, warm=False, **({"num_heads": 2} if method == "medusa" else {}))
    assert sizes.drafter == sum(parameter.numel() for parameter in drafter.parameters())
    assert sizes.target == sum(parameter.numel() for parameter in model.parameters())


def test_distillation_counts_its_small_model() -> None:
    plan = work.TrainingPlan("distill", 100, 50, 10)
    small = tiny(layers=1)
    sizes = work.measure(tiny().config, plan, small.config)
    assert sizes.drafter == sum(parameter.numel() for parameter in small.parameters())
    assert sizes.repeated + 2 * 64 * 32 == sizes.drafter
    with pytest.raises(SpecGenError, match="--draft-model"):
        work.measure(tiny().config, plan)


def test_steps_and_time_follow_the_plan() -> None:
    sizes = work.measure(LLAMA_8B, EAGLE3)
    many = work.TrainingPlan(
        "eagle3", 10**6, 10**6, 1000, epochs=2, batch=4, accumulation=5, processes=2, draft_vocab_size=32_000
    )
    found = work.estimate(many, sizes)
    assert found.optimizer_steps == 2 * 25
    one, two = work.estimate(EAGLE3, sizes).seconds(EAGLE3, 1e12, 1e12), found.seconds(many, 2e12, 1e12)
    assert two[work.TARGET] == pytest.approx(one[work.TARGET] / 2) and two["drafter"] == pytest.approx(one["drafter"])
    half = work.TrainingPlan("eagle3", 10**6, 5 * 10**5, 1000, draft_vocab_size=32_000)
    operations = work.estimate(half, sizes).operations
    assert operations["drafter's head"] == work.estimate(EAGLE3, sizes).operations["drafter's head"] / 2
    assert work.matmul_speed(size=64) > 0


SMOLLM2 = LlamaConfig(
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    tie_word_embeddings=True,
)


def test_what_was_measured_is_foretold() -> None:
    """Steps of docs/benchmarks.md on 2 cores whose bfloat16 products do 200 * 10^9 operations a second each."""
    speed = 0.5 * 2 * 200e9
    demo = work.TrainingPlan("eagle3", 1626, 1274, 8, steps=3, draft_vocab_size=8192, max_length=217)
    found = work.estimate(demo, work.measure(SMOLLM2, demo))
    assert 1 / 1.5 < sum(found.seconds(demo, speed, speed).values()) / 3.42 < 1.5
    whole = work.TrainingPlan("eagle3", 4096, 4080, 8, steps=1, max_length=512)
    sizes = work.measure(SMOLLM2, whole)
    found = work.estimate(whole, sizes)
    assert 1 / 1.5 < sum(found.seconds(whole, speed, speed).values()) / 13.4 < 1.5
    weights = found.memory["target, frozen"] + found.memory["libraries"] + 4 * sizes.drafter
    assert 1 / 1.5 < (found.memory_total - weights) / 1.317e9 < 1.5
    on_card = work.estimate(replace(whole, device="cuda"), sizes)
    assert on_card.memory["laws of a chunk of the loss"] > 2 * found.memory["laws of a chunk of the loss"]


def test_other_programs_do_not_change_the_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the time of our own threads counts, whatever passes on the wall."""
    monkeypatch.setattr(work.time, "perf_counter", lambda: pytest.fail("other programs were measured"))
    assert work.matmul_speed(size=64) > 0


def test_unrolled_tokens_share_the_targets_laws() -> None:
    one, seven = (work.TrainingPlan("eagle3", 100, 50, 1, steps=steps) for steps in (1, 7))
    sizes = work.measure(SMOLLM2, one)
    first, last = (work.estimate(plan, sizes).operations for plan in (one, seven))
    assert first["target's head"] == last["target's head"] and 7 * first["drafter's head"] == last["drafter's head"]


@pytest.mark.parametrize("wrong", [("flow", 9, 9, 1), ("eagle3", 0, 0, 1), ("eagle3", 9, 10, 1), ("eagle3", 9, 0, 1)])
def test_plans_that_cannot_be_are_refused(wrong: tuple[Any, ...]) -> None:
    with pytest.raises(SpecGenError):
        work.TrainingPlan(*wrong)


def test_the_command_counts_data_and_says_whether_it_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = save(tmp_path / "target", seed=0, layers=4)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": [5] * 4, "completion": [6] * 6}) + "\n" for _ in range(8)))
    command = ["estimate", "--target", target, "--data", str(rows), "--batch-size", "2", "--accumulation", "2"]
    shown = fine(*command, "--tflops", "1").stdout
    assert "data: 80 tokens (48 supervised) in 8 rows, 1 times: 2 steps of 4 rows" in shown
    assert "a feature cache" in shown and "10^12" in shown
    cut = fine(*command, "--max-length", "5", "--tflops", "1").stdout
    assert "40 tokens (8 supervised)" in cut
    measured: list[torch.dtype] = []
    monkeypatch.setattr(work, "matmul_speed", lambda device, kind: measured.append(kind) or 1e12)  # bfloat16 takes 5 s
    fits = fine("estimate", "--target", target, "--tokens", "1e3", "--memory", "100", "--method", "medusa", "--bf16")
    assert sorted(map(str, measured)) == ["torch.bfloat16", "torch.float32"], (
        "drafter and target, each in its own format"
    )
    assert (
        "It fits into 100 GB" in fits.stdout
        and "half of what matrix products reach here; padding is not counted" in fits.stdout
    )
    tight = call("estimate", "--target", target, "--tokens", "1e3", "--memory", "0.0001", "--tflops", "1")
    assert tight.exit_code == 1 and "does not fit" in tight.stdout and "--accumulation" in tight.stdout
    assert "exactly one of --data and --tokens" in refused("estimate", "--target", target)
    assert "cannot read the configuration" in refused("estimate", "--target", str(tmp_path), "--tokens", "1")


def test_no_weight_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.nn.init,
        "normal_",
        lambda tensor, *args, **kwargs: pytest.fail("memory was used") if tensor.device.type != "meta" else tensor,
    )
    work.measure(LLAMA_8B, EAGLE3)
