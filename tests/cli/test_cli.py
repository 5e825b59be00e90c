"""The program hf-specgen: every command and flag, its messages and exit codes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_calls import PROMPT, WORDS, call, fine, refused, save
from cli_calls import target as target  # a fixture
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from hf_specgen.bench import exactness, plots
from hf_specgen.cli import writing
from hf_specgen.generate import SpeculativeDecoding
from hf_specgen.measure import methods
from hf_specgen.measure.compare import Divergence


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("small"), seed=1, layers=1)


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    file = tmp_path / "prompts.jsonl"
    records = [("x", PROMPT), ("x", "a dog ran to the big red dog and a dog ran"), ("y", "we saw it and we saw")]
    file.write_text("".join(json.dumps({"prompt": text, "category": name}) + "\n" for name, text in records))
    return str(file)


def plain_text(target: str, prompt: str, tokens: int, template: bool = True) -> str:
    from hf_specgen.measure.prompts import ChatPrompt, encode

    tokenizer = PreTrainedTokenizerFast.from_pretrained(target)
    ids = torch.tensor([encode(ChatPrompt.user(prompt), tokenizer, template)])
    model = AutoModelForCausalLM.from_pretrained(target)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


# --- generate


def test_generate_streams_the_plain_text(target: str) -> None:
    result = fine("generate", PROMPT, "--target", target, "--max-new-tokens", "20")
    assert result.stdout == plain_text(target, PROMPT, 20) + "\n"
    assert re.search(r"\[20 tokens in [\d.]+ s, [\d.]+ tokens/s, [\d.]+ per round, acceptance length", result.stderr)
    raw = fine("generate", PROMPT, "--target", target, "--max-new-tokens", "20", "--no-chat")
    assert raw.stdout == plain_text(target, PROMPT, 20, template=False) + "\n" != result.stdout


def test_generate_streams_once_a_round(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[str] = []
    monkeypatch.setattr(writing.typer, "echo", lambda text="", nl=True, **_: printed.append(text))
    fine("generate", PROMPT, "--target", target, "--max-new-tokens", "6", "--drafter", "none")
    assert len(printed) == 7  # six tokens, and what is left at the end
    assert "".join(printed) == plain_text(target, PROMPT, 6)


def test_incomplete_characters_wait() -> None:
    class Bytes:
        def decode(self, tokens: list[int], **_: Any) -> str:
            return bytes(tokens).decode(errors="replace")

    stream = writing.TextStream(Bytes())
    assert [stream.add([byte]) for byte in "aéb".encode()] == ["a", "", "é", "b"]
    assert stream.add("€".encode()[:2]) == ""
    assert stream.finish() == "\ufffd"


@pytest.mark.parametrize("batch", ["1", "2"])
def test_generate_answers_a_file_in_batches(target: str, prompts: str, batch: str) -> None:
    result = fine("generate", "--file", prompts, "--batch", batch, "--target", target, "--max-new-tokens", "8")
    texts = [json.loads(line)["prompt"] for line in Path(prompts).read_text().splitlines()]
    assert result.stdout == "".join(f"=== {i} ===\n{plain_text(target, text, 8)}\n" for i, text in enumerate(texts, 1))
    assert result.stderr.count("tokens/s") == {"1": 3, "2": 2}[batch]


def test_generate_samples_repeatably(target: str, small: str) -> None:
    common = ["generate", PROMPT, "--target", target, "--max-new-tokens", "12", "--temperature", "1.5"]
    seeded = [*common, "--seed", "3"]
    texts = {
        fine(*seeded, "--drafter", "none").stdout,
        fine(*seeded, "--drafter", f"small-model:{small}").stdout,
        fine(*seeded, "--num-tokens", "4").stdout,
    }
    assert len(texts) == 1
    assert fine(*common, "--seed", "4").stdout not in texts
    assert fine(*seeded, "--top-k", "1").stdout == fine(*seeded, "--top-p", "0.001").stdout not in texts
    free = fine(*common)
    seed = re.search(r"--seed (\d+)", free.stderr)
    assert seed is not None
    assert fine(*common, "--seed", seed[1]).stdout == free.stdout


def test_rule_and_sampled_drafts_reach_the_loop(target: str, small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, bool]] = []

    def spy(drafter: Any, rule: str, **rest: Any) -> SpeculativeDecoding:
        seen.append((rule, drafter.sample))
        return SpeculativeDecoding(drafter, rule=rule, **rest)

    monkeypatch.setattr(methods, "SpeculativeDecoding", spy)
    common = ["generate", PROMPT, "--target", target, "--drafter", f"small-model:{small}", "--max-new-tokens", "4"]
    fine(*common, "--temperature", "1", "--rule", "block", "--sample-drafts")
    fine(*common)
    assert seen == [("block", True), ("rejection", False)]


def test_generate_talks_and_remembers(target: str) -> None:
    result = fine(
        "generate", "--chat", "--target", target, "--max-new-tokens", "5", given="the cat\n\nand then\n/exit\n"
    )
    first = plain_text(target, "the cat", 5)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(target)
    history = [("user", "the cat"), ("assistant", first), ("user", "and then")]
    text = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in history], tokenize=False, add_generation_prompt=True
    )
    second = plain_text(target, text, 5, template=False)
    assert result.stdout == f"> {first}\n> > {second}\n> "
    assert fine("generate", "--chat", "--target", target, given="").stdout == "> "


def test_compare_shows_both_texts(target: str) -> None:
    result = fine("generate", PROMPT, "--target", target, "--max-new-tokens", "10", "--compare")
    words = plain_text(target, PROMPT, 10).split()
    assert result.stdout.count(" ".join(words[:3])) == 2
    assert re.search(r"─ plain ─.*─ speculative ─", result.stdout)
    assert "\nidentical\n" in result.stdout
    assert re.search(
        r"plain [\d.]+ s, speculative [\d.]+ s: (speed-up|slower:) [\d.]+x; acceptance length", result.stdout
    )


def test_compare_reports_the_first_divergence(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(SpeculativeDecoding):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            out = super().__call__(*args, **kwargs)
            out.sequences[0, -7] = 7  # the fourth of ten new tokens
            return out

    monkeypatch.setattr(methods, "SpeculativeDecoding", Wrong)
    result = fine("generate", PROMPT, "--target", target, "--max-new-tokens", "10", "--compare")
    word = plain_text(target, PROMPT, 10).split()[3]
    assert f"first divergence at token 3: '{word}' or 'cat', logit gap " in result.stdout


def test_compare_of_sampled_texts_uses_one_seed(target: str, prompts: str) -> None:
    options = ["--temperature", "1.2", "--seed", "1", "--max-new-tokens", "8", "--compare", "--batch", "3"]
    result = fine("generate", "--file", prompts, "--target", target, *options)
    assert result.stdout.count("\nidentical\n") == 3
    assert "no drafter, same seed" in result.stdout
    assert "=== 3 ===" in result.stdout


# --- bench


@pytest.fixture
def quick() -> list[str]:
    return ["--max-new-tokens", "6", "--repeats", "2", "--warmup", "0"]


def test_bench_measures_and_writes(target: str, prompts: str, quick: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "out"
    flags = ["--target", target, "--prompts", prompts, "--constant", "--num-tokens", "4", "--out", str(folder)]
    result = fine("bench", *flags, *quick)
    last = result.stdout.splitlines()[-1]
    assert re.match(r"(speed-up|slower:) [\d.]+x \(95 % interval .*\) \| acceptance length", last)
    assert last.endswith("identical to plain greedy: 3/3")
    assert sorted(path.name for path in folder.iterdir()) == ["acceptance.png", "report.json", "speedup.png"]
    report = json.loads((folder / "report.json").read_text())
    assert list(report["methods"]) == ["plain", "stock", "ours-constant", "ours"]
    assert [part["label"] for part in report["methods"].values()][1:3] == ["stock, 4 tokens", "ours, 4 tokens"]
    assert report["methods"]["plain"]["tokens"] == sum(prompt["plain_tokens"] for prompt in report["prompts"]) > 3
    assert list(report["methods"]["ours"]["categories"]) == ["x", "y"]
    assert all(report["methods"][name]["identical"]["same"] == 3 for name in ("stock", "ours-constant", "ours"))
    assert report["target"]["dtype"] == "float32"
    assert report["settings"]["decoding"]["max_new_tokens"] == 6
    assert report["machine"]["threads"] == torch.get_num_threads()
    if report["methods"]["ours"]["speedup"] < 1:
        assert last.startswith("slower")


def report_of(folder: Path, *arguments: str) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "write_plots", lambda report, folder: [])
        fine("bench", *arguments, "--out", str(folder))
    return dict(json.loads((folder / "report.json").read_text()))


def test_bench_flags_choose_prompts_methods_and_formats(
    target: str, small: str, prompts: str, quick: list[str], tmp_path: Path
) -> None:
    common = ["--target", target, "--prompts", prompts, *quick]
    report = report_of(tmp_path, *common, "--categories", "x", "--limit", "1", "--no-stock", "--dtype", "bfloat16")
    assert [prompt["id"] for prompt in report["prompts"]] == ["1"]
    assert list(report["methods"]) == ["plain", "ours"]
    assert report["target"]["dtype"] == "bfloat16"
    report = report_of(tmp_path, *common, "--batch-size", "2", "--drafter", f"small-model:{small}", "--warmup", "1")
    assert list(report["methods"]) == ["plain", "ours"]  # transformers' own takes one row only
    assert (report["settings"]["batch_size"], report["settings"]["warmup"]) == (2, 1)
    assert report["drafter"] == {"name": f"small-model:{small}", "rule": "rejection", "sampled": False}
    assert report["methods"]["ours"]["identical"] == {"compared": 3, "same": 3}
    threads = torch.get_num_threads()
    report = report_of(tmp_path, *common, "--drafter", "none", "--threads", "2", "--no-chat", "--device", "cpu")
    torch.set_num_threads(threads)
    assert report["machine"]["threads"] == 2
    assert report["settings"]["chat"] is False
    assert report["prompts"][0]["prompt_tokens"] == len(PROMPT.split())
    assert report["methods"]["ours"]["acceptance"]["num_draft_tokens"] == 0


def test_bench_of_sampling_compares_no_texts(target: str, prompts: str, quick: list[str], tmp_path: Path) -> None:
    flags = ["--temperature", "0.8", "--top-k", "9", "--top-p", "0.9", "--seed", "2"]
    report = report_of(tmp_path, "--target", target, "--prompts", prompts, *quick, *flags)
    decoding = {"max_new_tokens": 6, "temperature": 0.8, "top_k": 9, "top_p": 0.9, "seed": 2}
    assert report["settings"]["decoding"] == decoding
    assert report["methods"]["ours"]["identical"] is None
    assert list(report["methods"]) == ["plain", "stock", "ours"]


def test_bench_demo_is_a_preset(target: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from hf_specgen.cli import session

    loaded: list[str] = []
    load = session.load_target

    def stand_in(name: str, *rest: Any) -> tuple[Any, Any]:
        loaded.append(name)
        model, tokenizer = load(target, *rest)
        model.config.max_position_embeddings = 2048
        return model, tokenizer

    monkeypatch.setattr(session, "load_target", stand_in)
    flags = ["--demo", "--limit", "3", "--repeats", "1", "--max-new-tokens", "2", "--no-stock", "--warmup", "0"]
    report = report_of(tmp_path, *flags)
    assert loaded == ["demo"]
    assert [prompt["category"] for prompt in report["prompts"]] == ["summarization", "rag", "qa"]
    assert (report["settings"]["repeats"], report["settings"]["decoding"]["max_new_tokens"]) == (1, 2)
    assert "brings its own target" in refused("bench", "--demo", "--target", target)
    assert "in float32, 2 new tokens: identical to plain greedy: 3/3" in fine("bench", *flags).stdout
    assert "in float32" not in fine("bench", *flags, "--no-check-float32").stdout
    wrong = exactness.GreedyReport(3, [("x-1", Divergence(0, 5, 6, 9.0, 9.0))], 1e-3)
    monkeypatch.setattr(exactness, "check_greedy", lambda *rest: wrong)
    assert call("bench", *flags).exit_code == 1


# --- verify


def test_verify_passes_an_exact_pair(target: str, small: str, prompts: str) -> None:
    flags = ["--target", target, "--prompts", prompts, "--law-samples", "256", "--max-new-tokens", "12"]
    drafts = ["--drafter", f"small-model:{small}", "--sample-drafts", "--temperature", "1.5", "--law-tokens", "3"]
    result = fine("verify", *flags, *drafts, "--num-tokens", "3", "--batch-size", "2", "--limit", "3", "--seed", "1")
    lines = result.stdout.splitlines()
    assert lines[0] == "identical to plain greedy: 3/3 (batches: 1 of 2 rows, 1 of 1 row)"
    assert re.match(r"law of the first 3 tokens over '\w+', '\w+', '\w+', in float32, 256 samples:", lines[1])
    assert re.search(
        r"chi-square [\d.]+ at \d+ degrees of freedom, p = .* tokens drafted, \d+ accepted: fits", lines[2]
    )
    assert lines[3] == "exact"


def test_verify_fails_a_wrong_text(target: str, prompts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(SpeculativeDecoding):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            out = super().__call__(*args, **kwargs)
            out.sequences[0, -2] = 7
            return out

    monkeypatch.setattr(methods, "SpeculativeDecoding", Wrong)
    flags = ["--target", target, "--prompts", prompts, "--law-samples", "0", "--max-new-tokens", "6", "--limit", "1"]
    result = call("verify", *flags)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0] == "identical to plain greedy: 0/1"
    assert re.match(
        r"  1: first divergence at token 4, '\S+' \(plain\) or 'cat', logit gap [\d.]+: NOT A TIE", lines[1]
    )
    assert lines[-1].startswith("NOT EXACT")
    lenient = fine("verify", *flags, "--tolerance", "1000")
    assert "a tie up to 1000" in lenient.stdout


def test_verify_fails_a_wrong_law(target: str, prompts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    law = exactness.enumerate_law

    def shifted(*arguments: Any) -> dict[tuple[int, ...], float]:
        exact = law(*arguments)
        flat = 1 / len(exact)
        return {text: 0.5 * chance + 0.5 * flat for text, chance in exact.items()}

    monkeypatch.setattr(exactness, "enumerate_law", shifted)
    flags = ["--target", target, "--prompts", prompts, "--limit", "1", "--max-new-tokens", "4", "--law-samples", "512"]
    result = call("verify", *flags)
    assert result.exit_code == 1
    assert "DOES NOT FIT" in result.stdout


# --- errors and exit codes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate"], "exactly one of PROMPT, --file and --chat is required"),
        (["generate", "hi", "--chat"], "exactly one of PROMPT, --file and --chat"),
        (["generate", " "], "the prompt is empty"),
        (["generate", "hi", "--batch", "2"], "--batch decodes several prompts of a --file"),
        (["generate", "--chat", "--compare"], "--chat does not go with --compare"),
        (["generate", "hi", "--seed", "1"], "--seed has no effect on greedy decoding"),
        (["generate", "hi", "--temperature", "0", "--top-p", "0.5"], "--top-p has no effect on greedy decoding"),
        (["generate", "hi", "--rule", "block"], "--rule has no effect on greedy decoding"),
        (["generate", "hi", "--top-p", "0"], "--top-p 0 keeps no token"),
        (
            ["generate", "hi", "--drafter", "none", "--num-tokens", "3"],
            "--num-tokens has no effect with --drafter none",
        ),
        (["generate", "hi", "--drafter", "eagle"], "the drafter 'eagle' is unknown. Give one of: prompt-lookup"),
        (["generate", "hi", "--temperature", "1", "--sample-drafts"], "and learned:<id or path> can sample"),
        (["generate", "hi", "--max-new-tokens", "500"], "500 new ones are asked for, but the target's context is 128"),
        (["generate", "--file", "missing.jsonl"], "cannot read the prompt file missing.jsonl"),
        (["bench", "--categories", "none,qa"], "no prompt has the category 'none'; the file has: summarization"),
        (["bench", "--batch-size", "2", "--stock"], "it decodes one row, --batch-size is 2"),
        (["bench", "--drafter", "none", "--stock"], "it knows no drafter none"),
        (["bench", "--drafter", "none", "--constant"], "--constant has no effect with --drafter none"),
        (["verify", "--law-samples", "0", "--temperature", "1"], "--law-samples 0 leaves out"),
        (["verify", "--law-samples", "0", "--rule", "block"], "--rule has no effect"),
    ],
)
def test_bad_input_gives_one_message_and_exit_code_2(target: str, arguments: list[str], message: str) -> None:
    said = refused(*arguments, "--target", target)
    assert message in said
    assert said.startswith("Error: ")
    assert said.count("\n") == 1


def test_wrong_flags_are_usage_errors() -> None:
    for arguments in (
        ["generate", "hi", "--top-k", "0"],
        ["bench", "--dtype", "int3"],
        ["verify", "--law-tokens", "1"],
    ):
        assert refused(*arguments).startswith("Usage: ")


def test_unloadable_models_are_named(tmp_path: Path) -> None:
    assert "nowhere does not exist" in refused("generate", "hi", "--target", str(tmp_path / "nowhere"))
    assert "cannot load" in refused("generate", "hi", "--target", str(tmp_path))
    assert "the device 'tpu' cannot be used" in refused("generate", "hi", "--device", "tpu", "--target", str(tmp_path))


def test_other_vocabularies_are_refused(target: str, tmp_path: Path) -> None:
    other = save(tmp_path, 2, 1, [*WORDS[:5], *WORDS[:4:-1]])
    assert "id 5 is 'the' for the target and 'up'" in refused(
        "generate", "hi", "--target", target, "--drafter", f"small-model:{other}", "--max-new-tokens", "4"
    )


def test_chat_needs_a_template(tmp_path: Path) -> None:
    bare = save(tmp_path, 0, 1, template=None)
    assert "--chat needs a chat template" in refused("generate", "--chat", "--target", bare)


def test_interrupt_ends_with_130_and_leaves_no_files(
    target: str, prompts: str, quick: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Interrupted(SpeculativeDecoding):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            raise KeyboardInterrupt

    monkeypatch.setattr(methods, "SpeculativeDecoding", Interrupted)
    folder = tmp_path / "out"
    result = call("bench", "--target", target, "--prompts", prompts, *quick, "--out", str(folder))
    assert result.exit_code == 130
    assert result.stderr.endswith("Interrupted.\n")
    assert list(folder.iterdir()) == []


def test_missing_matplotlib_is_said_before_measuring(
    target: str, prompts: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said = refused("bench", "--target", target, "--prompts", prompts, "--out", str(tmp_path / "out"))
    assert "pip install matplotlib" in said
