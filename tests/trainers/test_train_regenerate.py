"""The target's own answers: exact, resumable to the byte, refused where they would be mixed with others'."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import resource
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from cli_calls import PROMPT, call, save
from regenerate_cases import EOS, LENGTHS, model_and_questions, read, source_of
from tiny import some, tiny

from hf_specgen import PromptLookup
from hf_specgen.chats import Chat
from hf_specgen.cli import main
from hf_specgen.errors import SpecGenError
from hf_specgen.models.facts import TargetFacts
from hf_specgen.trainers import regenerate as work
from hf_specgen.trainers.data import load_data, prepare_dataset
from hf_specgen.trainers.disk import alone


def run(*arguments: object) -> Any:
    return call(*map(str, arguments))


def answer(
    folder: Path, sampling: work.Sampling, batch_size: int = 3, drafter: Any = None, progress: Any = None
) -> tuple[list[dict], work.RegenerationReport, work.TargetAuthor]:
    model, questions = model_and_questions()
    author = work.TargetAuthor(model, sampling, drafter)
    out = folder / "answers.jsonl"
    report = work.regenerate(
        questions, out, author, source_of(model, sampling), batch_size, lambda ids: " ".join(map(str, ids)), progress
    )
    return read(out), report, author


def test_answers_are_what_the_target_writes_alone(tmp_path: Path) -> None:
    rows, report, author = answer(tmp_path, work.Sampling(24), drafter=PromptLookup())
    model, questions = model_and_questions()
    assert [row["index"] for row in rows] == list(range(len(LENGTHS)))
    for row, question in zip(rows, questions, strict=True):
        ids = torch.tensor([question.ids])
        plain = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        wanted = plain[0, ids.shape[1] :].tolist()
        assert row["prompt"] == list(question.ids) and row["completion"] == wanted
        assert row["finished"] == (wanted[-1] in (EOS, 63)) and (row["finished"] or len(wanted) == 24)
        assert row["text"] == " ".join(map(str, wanted)) and row["name"] == question.name
    assert {row["finished"] for row in rows} == {True, False}, "both kinds of ends are seen"
    assert report.tokens == sum(len(row["completion"]) for row in rows) and report.written == len(rows)
    assert author.stats.num_accepted_tokens > 0, "drafts were used"


def test_padding_that_is_a_token_of_the_prompt_changes_nothing(tmp_path: Path) -> None:
    """Without a mask transformers takes every pad id in a prompt for padding."""
    model, questions = model_and_questions()
    inside = work.Question((0, 5, 0, 9, 3), name="pads")
    author = work.TargetAuthor(model, work.Sampling(8), pad_token_id=0)
    together = author([list(inside.ids), list(questions[3].ids)], [0, 0])
    assert together[0] == author([list(inside.ids)], [0])[0]


@pytest.mark.parametrize("killed", [1, 2])
def test_a_killed_run_goes_on_to_the_same_file(tmp_path: Path, killed: int) -> None:
    """A process that dies in the middle of a line leaves neither a lock nor a line behind."""
    sampling, whole, parts = work.Sampling(16, temperature=1.0, seed=5), tmp_path / "whole", tmp_path / "parts"
    answer(whole, sampling)
    calls = []

    def die(done: int, total: int, label: str) -> None:
        calls.append(done)
        if len(calls) == killed:
            work.append(parts / "answers.jsonl", b'{"index": 3, "name": "\xc3')
            os.kill(os.getpid(), signal.SIGKILL)

    child = multiprocessing.get_context("fork").Process(target=answer, args=(parts, sampling), kwargs={"progress": die})
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    _, report, _ = answer(parts, sampling)
    assert report.found + report.written == len(LENGTHS) and report.found > killed and report.written
    assert (parts / "answers.jsonl").read_bytes() == (whole / "answers.jsonl").read_bytes()


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    def both(done: int, total: int, label: str) -> None:
        with ThreadPoolExecutor(1) as other, pytest.raises(SpecGenError, match="written by another process"):
            other.submit(answer, tmp_path, work.Sampling(4)).result()

    rows, report, _ = answer(tmp_path, work.Sampling(4), progress=both)
    assert len(rows) == report.written == len(LENGTHS)


def test_a_place_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SpecGenError, match=r"cannot be written: .*Give another name"), alone(tmp_path / "file" / "a"):
        pass


def test_a_full_disk_keeps_what_was_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampling, whole, parts = work.Sampling(16), tmp_path / "whole", tmp_path / "parts"
    answer(whole, sampling)
    room = (whole / "answers.jsonl").stat().st_size * 2 // 3
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(SpecGenError, match=r"answers.jsonl cannot be written: .*What was finished before is kept"):
            answer(parts, sampling)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (parts / "answers.jsonl").stat().st_size == room, "cut in the middle of a line"
    meta = work.meta_path(parts / "answers.jsonl").read_bytes()
    monkeypatch.setattr(work, "write_whole", lambda *args: pytest.fail("what is known of a file is written once"))
    report = answer(parts, sampling)[1]
    assert 0 < report.found < len(LENGTHS) and work.meta_path(parts / "answers.jsonl").read_bytes() == meta
    assert read(parts / "answers.jsonl") == read(whole / "answers.jsonl")


@pytest.mark.parametrize(
    ("sampling", "torn"),
    some((work.Sampling(16), work.Sampling(16, temperature=1.0, top_k=20, seed=5)), (b"", b'{"index": 3, "comp')),
)
def test_an_interrupted_run_goes_on_to_the_same_file(tmp_path: Path, sampling: work.Sampling, torn: bytes) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    answer(whole, sampling)
    calls = []

    def interrupt(done: int, total: int, label: str) -> None:
        calls.append((done, total))
        assert label.endswith("/s")
        if len(calls) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answer(parts, sampling, progress=interrupt)
    with (parts / "answers.jsonl").open("ab") as file:
        file.write(torn)
    rows, report, _ = answer(parts, sampling)
    found = calls[-1][0]
    assert 0 < found < len(LENGTHS) and (report.found, report.written) == (found, len(LENGTHS) - found)
    assert (parts / "answers.jsonl").read_bytes() == (whole / "answers.jsonl").read_bytes()
    assert rows == read(whole / "answers.jsonl")
    again = answer(parts, sampling)[1]
    assert (again.found, again.written, again.tokens) == (len(LENGTHS), 0, 0)


def test_sampled_answers_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    drawn = work.Sampling(12, temperature=1.0, seed=3)
    one, _, _ = answer(tmp_path / "one", drawn, batch_size=1)
    many, _, _ = answer(tmp_path / "many", drawn, batch_size=7, drafter=PromptLookup())
    assert one == many
    other, _, _ = answer(tmp_path / "other", replace(drawn, seed=4), batch_size=7)
    assert [row["completion"] for row in other] != [row["completion"] for row in one]
    assert len(set(drawn.seeds(range(100)))) == 100


def test_answers_of_others_are_not_mixed_in(tmp_path: Path) -> None:
    sampling = work.Sampling(8)
    answer(tmp_path, sampling)
    model, questions = model_and_questions()
    out = tmp_path / "answers.jsonl"

    def go_on(model: Any, questions: list, sampling: work.Sampling) -> None:
        work.regenerate(questions, out, work.TargetAuthor(model, sampling), source_of(model, sampling))

    with pytest.raises(SpecGenError, match=r"made otherwise.*sampling .*'max_new_tokens': 8"):
        go_on(model, questions, work.Sampling(9))
    with pytest.raises(SpecGenError, match=r"prompts .* there, .* here"):
        go_on(model, questions[:-1], sampling)
    with pytest.raises(SpecGenError, match=r"target .* there, .* here"):
        go_on(tiny(seed=1), questions, sampling)
    source = source_of(model, sampling)
    other = replace(source, notes={"dtype": "bfloat16"})
    with pytest.raises(SpecGenError, match=r"dtype None there, bfloat16 here"):
        work.regenerate(questions, out, work.TargetAuthor(model, sampling), other)
    packed = replace(source, facts=replace(source.facts, fingerprint="", name="someone/else"))  # nothing to tell by
    work.regenerate(questions, tmp_path / "packed.jsonl", work.TargetAuthor(model, sampling), packed)
    with pytest.raises(SpecGenError, match=r"target .* there, .* here"):
        third = replace(packed, facts=replace(packed.facts, name="a/third"))
        work.regenerate(questions, tmp_path / "packed.jsonl", work.TargetAuthor(model, sampling), third)
    facts = TargetFacts.of(model)
    assert work.check_author(out, facts) is None
    assert "not of this target" in (work.check_author(out, TargetFacts.of(tiny(seed=1))) or "")
    assert work.check_author(tmp_path / "unknown.jsonl", facts) is None
    kept = out.read_bytes()
    out.write_bytes(kept.replace(b'{"index"', b"\x00" * 8, 1))
    with pytest.raises(SpecGenError, match=r"line 1 of .* is no answer"):
        go_on(model, questions, sampling)
    work.meta_path(out).write_text("")
    with pytest.raises(SpecGenError, match=r"meta.json is no JSON"):
        go_on(model, questions, sampling)
    work.meta_path(out).unlink()
    with pytest.raises(SpecGenError, match="whose answers it holds is not known"):
        go_on(model, questions, sampling)
    with pytest.raises(SpecGenError, match="no prompt"):
        go_on(model, [], sampling)


def test_the_file_is_data_for_training(tmp_path: Path) -> None:
    rows, report, _ = answer(tmp_path, work.Sampling(8))
    work.write_parquet(tmp_path / "answers.jsonl", tmp_path / "answers.parquet")
    for name in ("answers.jsonl", "answers.parquet"):
        prepared = prepare_dataset(load_data(tmp_path / name))
        assert sum(map(sum, prepared["loss_mask"])) == report.tokens
    assert [row["input_ids"] for row in prepared] == [row["prompt"] + row["completion"] for row in rows]


def test_prompts_are_taken_from_chats() -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    data = [
        {"messages": [*turns, {"role": "assistant", "content": "d"}]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "w"}]},
        {"prompt": "p", "completion": "x"},
        {"messages": [turns[1]]},
    ]
    found = work.chat_prompts(data)
    assert found == [Chat(turns), Chat([{"role": "user", "content": "q"}]), Chat([{"role": "user", "content": "p"}])]
    assert work.chat_prompts(data, 1) == [Chat(turns)]
    whole = {"prompt": "a", "messages": turns, "tools": '[{"name": "f"}]'}  # the first question stands beside the chat
    assert work.chat_prompts([whole]) == [Chat(turns, [{"name": "f"}])]
    with pytest.raises(SpecGenError, match="messages, conversations or prompt"):
        work.chat_prompts([{"text": "t"}])
    for row in ({"conversations": [{"from": "human"}]}, {"messages": [{"role": "user", "content": "a"}, None]}):
        with pytest.raises(SpecGenError, match="a row cannot be read"):
            work.chat_prompts([row])
    with pytest.raises(SpecGenError, match="tools are no JSON"):
        work.chat_prompts([{"messages": turns, "tools": "[{"}])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a stand-in of vLLM was asked for."""
    asked: dict[str, Any] = {}

    class LLM:
        def __init__(self, model: str, **settings: Any) -> None:
            if "nonsense" in settings:
                raise TypeError("unexpected keyword argument 'nonsense'")
            asked.update(model=model, **settings)

        def generate(self, prompts: list[dict], params: list[dict], use_tqdm: bool) -> list[Any]:
            asked["params"] = params
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=(*p["prompt_token_ids"], 9))]) for p in prompts]

    fake = ModuleType("vllm")
    vars(fake).update(LLM=LLM, SamplingParams=dict)
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setattr(work, "find_spec", lambda name: importlib.util.spec_from_loader(name, None))
    return asked


def test_vllm_answers_where_it_is_installed(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    author = work.vllm_author("m", work.Sampling(5, 0.5, 0, 0.9, 2), dtype="bfloat16")
    assert author([[1, 2], [3]], [11, 12]) == [[1, 2, 9], [3, 9]]
    assert asked["model"] == "m" and asked["dtype"] == "bfloat16"
    assert asked["params"][1] == {"max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": -1, "seed": 12}
    with pytest.raises(SpecGenError, match=r"does not start with the settings .*nonsense"):
        work.vllm_author("m", work.Sampling(), nonsense=1)
    monkeypatch.setattr(work, "find_spec", lambda name: None)
    with pytest.raises(SpecGenError, match="vLLM is not installed"):
        work.vllm_author("m", work.Sampling())


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("target"), seed=0, layers=2)


def test_the_command_answers_and_goes_on(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "new" / "answers.jsonl"
    prompts.write_text("\n\n".join([PROMPT, "the dog ran to", "a cat saw it", "go up in"]))
    command = ["regenerate", "--target", target, "--prompts", prompts, "--out", out, "--max-new-tokens", "8"]
    command += ["--batch-size", "1"]
    written = work.TargetAuthor.__call__
    calls: list[int] = []

    def twice(self: work.TargetAuthor, *args: Any) -> Any:
        calls.append(len(args[0]))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return written(self, *args)

    monkeypatch.setattr(work.TargetAuthor, "__call__", twice)
    stopped = run(*command)
    assert stopped.exit_code == main.INTERRUPTED and "the same command goes on" in stopped.stderr
    assert len(read(out)) == 2
    result = run(*command)
    assert result.exit_code == 0, result.output
    assert "2 answers were there. Wrote 2 answers with" in result.stdout and "tokens a row and pass" in result.stdout
    meta = json.loads(work.meta_path(out).read_text())
    assert meta["target"]["fingerprint"] and meta["sampling"]["max_new_tokens"] == 8 and meta["dtype"] == "float32"
    refused = run(*command[:-4], "--max-new-tokens", "9")
    assert refused.exit_code == 2 and "made otherwise" in refused.stderr
    with alone(out):
        kept = run(*command[:-4], "--max-new-tokens", "9", "--restart")
    assert kept.exit_code == 2 and "another process" in kept.stderr and len(read(out)) == 4
    anew = run(*command[:-4], "--max-new-tokens", "9", "--restart")
    assert anew.exit_code == 0 and "Wrote 4 answers" in anew.stdout


def test_the_command_reads_tasks_and_data_sets(target: str, tmp_path: Path) -> None:
    out = tmp_path / "tasks.parquet"
    shared = ["regenerate", "--target", target, "--max-new-tokens", "4", "--out"]
    assert run(*shared, out, "--task-prompts", "5", "--temperature", "1", "--drafter", "none").exit_code == 0
    rows = load_data(out)
    assert rows["index"][:] == [0, 1, 2, 3, 4] and len(set(rows["category"])) == 5
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("the cat", "a dog")))
    assert run(*shared, tmp_path / "chats_out.jsonl", "--data", chats, "--limit", "1").exit_code == 0
    assert len(read(tmp_path / "chats_out.jsonl")) == 1
    meta = json.loads((tmp_path / "chats_out.meta.json").read_text())
    assert meta["generation_config"]["eos_token_id"] is not None
    chats.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("the cat", "a dog " * 90)))
    some = run(*shared, tmp_path / "some.jsonl", "--data", chats)
    assert some.exit_code == 0 and "1 of 2 prompts are left out. The first: prompt 2 has" in some.stderr
    assert len(read(tmp_path / "some.jsonl")) == 1


def test_the_command_tells_vllm_format_room_and_what_it_is_given(
    target: str, tmp_path: Path, asked: dict[str, Any]
) -> None:
    """Left to itself it would answer in another number format than the one that is noted."""
    (tmp_path / "p.txt").write_text("the cat sat on\n\na dog")
    prompts = ["--target", target, "--prompts", tmp_path / "p.txt", "--max-new-tokens", "3", "--vllm", "--no-chat"]
    given = '{"tensor_parallel_size": 2, "gpu_memory_utilization": 0.5}'
    done = run("regenerate", *prompts, "--out", tmp_path / "a.jsonl", "--vllm-settings", given)
    assert done.exit_code == 0, done.output
    assert (asked["model"], asked["dtype"], asked["max_model_len"]) == (target, "float32", 4 + 3)
    assert asked["tensor_parallel_size"] == 2 and asked["gpu_memory_utilization"] == 0.5
    assert json.loads((tmp_path / "a.meta.json").read_text())["dtype"] == "float32"
    own = ["--vllm-settings", '{"dtype": "bfloat16", "max_model_len": 64}']
    assert run("regenerate", *prompts, "--out", tmp_path / "b.jsonl", *own).exit_code == 0
    assert (asked["dtype"], asked["max_model_len"]) == ("bfloat16", 64)
    assert json.loads((tmp_path / "b.meta.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--out", "x.jsonl", "--task-prompts", "1", "--vllm-settings", "{}"], "no effect without --vllm"),
        (["--out", "x.jsonl", "--task-prompts", "1", "--vllm", "--vllm-settings", "{"], "is no JSON"),
        (["--out", "x.jsonl", "--task-prompts", "1", "--vllm", "--vllm-settings", "[]"], "an object of arguments"),
        (["--out", "x.txt", "--task-prompts", "1"], "ends with .jsonl or .parquet"),
        (["--out", "x.jsonl"], "exactly one of --prompts, --task-prompts and --data"),
        (["--out", "x.jsonl", "--task-prompts", "1", "--seed", "1"], "--seed has no effect on greedy"),
        (["--out", "x.jsonl", "--task-prompts", "1", "--max-new-tokens", "400"], "context is 128"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_written(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("regenerate", "--target", target, *flags)
    assert result.exit_code == 2 and message in result.stderr
    assert not list(tmp_path.iterdir())
