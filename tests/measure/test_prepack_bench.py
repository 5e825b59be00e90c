"""--prepack: what is measured, compared and written, and that the measured model itself stays plain."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support_prepack import IDS, packed_calls, traces
from tiny import letters, tiny
from typer.testing import CliRunner, Result

from hf_specgen.bench import plots, report
from hf_specgen.cli import main
from hf_specgen.measure.compare import Divergence
from hf_specgen.measure.machine import Timing
from hf_specgen.measure.methods import Decoding, DrafterChoice, on_model, plain_method, prepacked_twin
from hf_specgen.measure.prompts import ChatPrompt
from hf_specgen.measure.run import BatchResult, Cell, Settings
from hf_specgen.models import prepack as packing
from hf_specgen.models.prepack import is_prepacked, packed_layers


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("target")
    tokenizer = letters()
    tokenizer.pad_token = "a"
    tokenizer.save_pretrained(folder)
    model = tiny()
    model.generation_config.eos_token_id = 63
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    file = tmp_path / "prompts.jsonl"
    lines = [("x", "abcdabcdabc"), ("x", "hellohello"), ("y", "xyzzyxyzzy")]
    file.write_text("".join(json.dumps({"prompt": text, "category": name}) + "\n" for name, text in lines))
    return str(file)


def fine(*arguments: str) -> Result:
    result = CliRunner().invoke(main.app, list(arguments))
    assert result.exit_code == 0, result.output
    return result


def test_a_twin_shares_the_weights_and_leaves_the_model_alone() -> None:
    model = tiny(tie_word_embeddings=True)
    before = traces(model)
    twin = prepacked_twin(model)
    assert traces(model) == before and not is_prepacked(model)
    assert is_prepacked(twin) and list(packed_layers(twin))
    assert [id(tensor) for tensor in twin.parameters()] == [id(tensor) for tensor in model.parameters()]
    inputs = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    method = on_model(twin, plain_method(), "name", "label")
    assert (method.name, method.label, method.max_rows) == ("name", "label", None)
    found, calls = packed_calls(lambda: method.generate(model, inputs, Decoding(4), pad_token_id=0))
    right, none = packed_calls(lambda: plain_method().generate(model, inputs, Decoding(4), pad_token_id=0))
    assert found.rows == right.rows and calls > 0 == none
    choice = DrafterChoice("small-model:x", model=model)
    assert is_prepacked(choice.prepacked().model) and choice.model is model
    assert DrafterChoice("prompt-lookup").prepacked().model is None


def test_bench_measures_four_ways_and_gives_both_ratios(target: str, prompts: str, tmp_path: Path) -> None:
    flags = ["--target", target, "--prompts", prompts, "--max-new-tokens", "6", "--repeats", "2", "--warmup", "0"]
    result, calls = packed_calls(lambda: fine("bench", *flags, "--no-stock", "--prepack", "--out", str(tmp_path)))
    assert calls > 0
    names = ["plain", "plain-prepacked", "ours", "ours-prepacked"]
    written = json.loads((tmp_path / "report.json").read_text())
    parts = written["methods"]
    assert list(parts) == names
    assert [part["label"] for part in parts.values()][1::2] == ["plain prepacked", "ours prepacked"]
    for name in ("ours", "ours-prepacked"):
        over = parts[name]["over_prepacked"]
        assert set(over) == {"speedup", "speedup_ci95", "speedup_repeats", "speedup_per_token"}
        assert over["speedup"] == pytest.approx(parts["plain-prepacked"]["seconds"] / parts[name]["seconds"])
        assert parts[name]["speedup"] == pytest.approx(parts["plain"]["seconds"] / parts[name]["seconds"])
        assert parts[name]["categories"]["y"]["over_prepacked"]["speedup_ci95"] is None
    assert "over_prepacked" not in parts["plain-prepacked"]
    assert all(parts[name]["identical"] == {"compared": 3, "same": 3} for name in names[1:])
    assert "Prepacked plain time / time" in result.stdout
    assert re.search(
        r"prepacked: plain \S+.*, ours .* \((speed-up|slower:) [\d.]+x over prepacked plain\)$", result.stdout
    )
    pictures = sorted(path.name for path in tmp_path.glob("*.png"))
    assert pictures == ["acceptance.png", "speedup.png", "speedup_prepacked.png"]
    axes = plots.speedup_figure(written, "plain-prepacked").axes[0]
    assert "against prepacked plain generate()" in axes.get_title()
    heights = [bar.get_height() for bar in axes.patches]
    expected = [
        part["over_prepacked"]["speedup"]
        for name in ("ours", "ours-prepacked")
        for part in (*parts[name]["categories"].values(), parts[name])
    ]
    assert heights == pytest.approx(expected)


def test_without_the_flag_nothing_is_packed(target: str, prompts: str, tmp_path: Path) -> None:
    flags = ["--target", target, "--prompts", prompts, "--max-new-tokens", "3", "--repeats", "1", "--warmup", "0"]
    result, calls = packed_calls(lambda: fine("bench", *flags, "--limit", "1", "--no-stock"))
    assert calls == 0 and "repacked" not in result.stdout


def test_over_prepacked_is_made_from_the_prepacked_times() -> None:
    seconds = {"plain": [4.0, 6.0], "plain-prepacked": [2.0, 3.0], "ours": [2.0, 4.0]}
    methods = [on_model(None, plain_method(), name, name) for name in seconds]
    same: list[Divergence | None] = [None]
    batches = []
    for place in range(2):
        cells = {name: Cell([[7]], [Timing(times[place], 0.0)]) for name, times in seconds.items()}
        batches.append(BatchResult([ChatPrompt.user("a", "x")], [[1]], cells, dict.fromkeys(cells, same)))
    built = report.build_report(batches, methods, Settings(Decoding(1)), {}, letters())["methods"]
    assert built["ours"]["speedup"] == pytest.approx(10 / 6)
    assert built["ours"]["over_prepacked"]["speedup"] == pytest.approx(5 / 6)
    low, high = built["ours"]["over_prepacked"]["speedup_ci95"]
    assert (low, high) == pytest.approx((0.75, 1.0))
    assert built["plain-prepacked"]["speedup"] == pytest.approx(2.0)


def test_the_float32_check_of_bench_uses_packed_weights(target: str, prompts: str) -> None:
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor multiplies no bfloat16")
    flags = ["--target", target, "--prompts", prompts, "--max-new-tokens", "3", "--repeats", "1", "--warmup", "0"]
    more = ["--dtype", "bfloat16", "--prepack", "--check-float32", "--no-stock", "--limit", "2"]
    assert "in float32, prepacked, 3 new tokens: identical to plain greedy: 2/2" in fine("bench", *flags, *more).stdout


def test_generate_and_verify_take_the_flag(target: str, prompts: str) -> None:
    common = ["generate", "abcdabcdabc", "--target", target, "--max-new-tokens", "8"]
    right, none = packed_calls(lambda: fine(*common))
    found, calls = packed_calls(lambda: fine(*common, "--prepack"))
    assert found.stdout == right.stdout and calls > 0 == none
    assert "prepacked" in found.stderr
    shown, calls = packed_calls(lambda: fine(*common, "--prepack", "--compare"))
    assert "identical" in shown.stdout and calls > 0
    flags = ["--target", target, "--prompts", prompts, "--limit", "2", "--max-new-tokens", "6", "--law-samples", "64"]
    result, calls = packed_calls(lambda: fine("verify", *flags, "--prepack", "--drafter", f"small-model:{target}"))
    assert result.stdout.startswith("identical to plain greedy: 2/2") and result.stdout.endswith("exact\n")
    assert calls > 0


def test_verify_compares_packed_with_plain(target: str, prompts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed weights that are wrong and slip through the self-check must be found."""
    reorder = torch.ops.mkldnn._reorder_linear_weight
    monkeypatch.setattr(packing._Packed, "_agrees", lambda *_: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", lambda matrix, rows: reorder(-matrix, rows))
    flags = ["--target", target, "--prompts", prompts, "--limit", "1", "--max-new-tokens", "6", "--law-samples", "0"]
    result = CliRunner().invoke(main.app, ["verify", *flags, "--prepack"])
    assert result.exit_code == 1 and "identical to plain greedy: 0/1" in result.stdout


def test_the_program_says_why_it_cannot(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    for command in (["generate", "abc"], ["bench"], ["verify"]):
        result: Any = CliRunner().invoke(main.app, [*command, "--target", target, "--prepack"])
        assert result.exit_code == 2 and "has no oneDNN with weight prepacking" in result.stderr
        assert result.stderr.count("\n") == 1 or command != ["generate", "abc"]
