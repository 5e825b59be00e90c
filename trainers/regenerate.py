"""Let a target answer prompts itself: a drafter learns best from texts that its target wrote.

Answers go to a file of JSON lines as token ids (text tokenised anew has other ids), batch by batch; a run that was
interrupted goes on where it stopped. Beside it stands ``<name>.meta.json``: whose answers they are and how they were
drawn.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from hf_specgen.chats import Chat, chat_of
from hf_specgen.drafting.drafter import Drafter
from hf_specgen.errors import SpecGenError, reason_of
from hf_specgen.generate import SpeculativeDecoding
from hf_specgen.models.facts import TargetFacts
from hf_specgen.round.stats import RowStats
from hf_specgen.trainers.disk import alone, append, write_whole, writing

FORMAT = 1
Progress = Callable[[int, int, str], None]
Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class Question:
    """Hold a prompt as the token ids that the target reads, and what it is called."""

    ids: tuple[int, ...]
    category: str = "all"
    name: str = ""


@dataclass(frozen=True)
class Sampling:
    """Hold how answers are drawn; temperature 0 takes the best token. Every prompt has a seed of its own."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def seeds(self, numbers: Sequence[int]) -> list[int]:
        """Return the seed of each prompt: the same whichever prompts it is answered with."""
        digests = (hashlib.blake2b(f"{self.seed}:{number}".encode(), digest_size=4) for number in numbers)
        return [int.from_bytes(digest.digest(), "little") >> 1 for digest in digests]


class Author(Protocol):
    """Answer prompts, given as token ids, each with its own seed."""

    def __call__(self, prompts: list[list[int]], seeds: list[int]) -> list[list[int]]:
        """Return each answer's token ids, up to and including the token that ends it."""
        ...


@dataclass
class TargetAuthor:
    """Answer with a model in this process, through our speculative decoding (``drafter`` None: without drafts)."""

    model: PreTrainedModel
    sampling: Sampling
    drafter: Drafter | None = None
    pad_token_id: int = 0
    stats: RowStats = field(default_factory=RowStats)

    def __call__(self, prompts: list[list[int]], seeds: list[int]) -> list[list[int]]:
        """Answer one batch."""
        width = max(map(len, prompts))
        ids = torch.tensor([[self.pad_token_id] * (width - len(row)) + row for row in prompts])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
        settings: dict[str, Any] = {"do_sample": False}
        if self.sampling.temperature:
            drawn = {name: asdict(self.sampling)[name] for name in ("temperature", "top_k", "top_p")}
            settings = {"do_sample": True, **drawn, "seed": seeds}
        out = self.model.generate(
            input_ids=ids.to(self.model.device),
            attention_mask=mask.to(self.model.device),
            max_new_tokens=self.sampling.max_new_tokens,
            pad_token_id=self.pad_token_id,
            custom_generate=SpeculativeDecoding(self.drafter),
            return_dict_in_generate=True,
            **settings,
        )
        self.stats.merge(out.speculation.total)
        ends = end_tokens(self.model)
        return [until_end(row, ends) for row in out.sequences[:, width:].tolist()]


def vllm_author(name: str, sampling: Sampling, **settings: Any) -> Author:
    """Answer with an installed vLLM: many prompts at once on GPUs. ``settings`` go to ``vllm.LLM``.

    Raises: ``SpecGenError`` when it is not installed, and for settings that it does not know.
    """
    if find_spec("vllm") is None:
        raise SpecGenError("vLLM is not installed: pip install vllm, or answer in this process (leave --vllm out).")
    vllm = import_module("vllm")
    try:
        model = vllm.LLM(**{"model": name, **settings})
    except (TypeError, ValueError) as error:
        raise SpecGenError(f"vLLM does not start with the settings {settings}: {reason_of(error)}.") from error

    def answer(prompts: list[list[int]], seeds: list[int]) -> list[list[int]]:
        drawn = {"max_tokens": sampling.max_new_tokens, "temperature": sampling.temperature, "top_p": sampling.top_p}
        each = [vllm.SamplingParams(**drawn, top_k=sampling.top_k or -1, seed=seed) for seed in seeds]
        texts = model.generate([{"prompt_token_ids": prompt} for prompt in prompts], each, use_tqdm=False)
        return [list(text.outputs[0].token_ids) for text in texts]

    return answer


def end_tokens(model: PreTrainedModel) -> frozenset[int]:
    """Return the ids that end a text of a model."""
    found = model.generation_config.eos_token_id
    return frozenset(() if found is None else found if isinstance(found, list) else (found,))


def until_end(row: list[int], ends: frozenset[int]) -> list[int]:
    """Cut a row behind its first end."""
    return row[: next((i for i, token in enumerate(row) if token in ends), len(row)) + 1]


@dataclass(frozen=True)
class RegenerationReport:
    """Hold what a run wrote: ``tokens`` of answers in ``seconds``; ``found`` answers were there before."""

    found: int
    written: int
    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        """Return tokens a second."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class AnswerSource:
    """Hold whose answers a file holds: the target's facts, how they are drawn, and what ends them."""

    facts: TargetFacts
    sampling: Sampling
    ends: frozenset[int] = frozenset()
    notes: dict[str, Any] = field(default_factory=dict)


def regenerate(
    questions: Sequence[Question],
    out: Path,
    author: Author,
    source: AnswerSource,
    batch_size: int = 32,
    decode: Decode | None = None,
    progress: Progress | None = None,
) -> RegenerationReport:
    """Write the answers that ``out`` (a .jsonl file) does not hold yet.

    A row has ``index``, ``name``, ``category``, ``prompt`` and ``completion`` (token ids), ``finished`` (it ended by
    itself) and, with ``decode``, ``text``.

    Raises: ``SpecGenError`` when the file holds answers of another target, to other prompts, or drawn otherwise, when
    another process writes it, and when it cannot be written.
    """
    if not questions:
        raise SpecGenError("there is no prompt to answer.")
    with alone(out):
        meta = _meta(questions, source)
        done = _resume(out, meta)
        tokens = 0
        start = time.perf_counter()
        here = 0
        for batch in _batches(questions, batch_size):
            todo = [number for number in batch if number not in done]
            if not todo:
                continue
            answers = author([list(questions[number].ids) for number in todo], source.sampling.seeds(todo))
            rows = [
                _row(number, questions[number], answer, source.ends, decode)
                for number, answer in zip(todo, answers, strict=True)
            ]
            if not (done or here):  # not before: a run that stops without an answer leaves nothing to refuse the next
                write_whole(meta_path(out), json.dumps(meta, indent=1, ensure_ascii=False) + "\n")
            append(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
            here = here + len(rows)
            tokens = tokens + sum(map(len, answers))
            if progress is not None:
                rate = tokens / (time.perf_counter() - start)
                progress(len(done) + here, len(questions), f"{tokens:,} tokens, {rate:.0f}/s")
    return RegenerationReport(len(done), here, tokens, time.perf_counter() - start)


def _row(number: int, question: Question, answer: list[int], ends: frozenset[int], decode: Decode | None) -> Any:
    row = {
        "index": number,
        "name": question.name,
        "category": question.category,
        "prompt": list(question.ids),
        "completion": answer,
        "finished": bool(answer) and answer[-1] in ends,
    }
    return row if decode is None else {**row, "text": decode(answer)}


def _batches(questions: Sequence[Question], size: int) -> Iterator[list[int]]:
    """Yield numbers of prompts of like length, the batches shuffled: what is left then takes as long as it seems."""
    order = sorted(range(len(questions)), key=lambda number: (len(questions[number].ids), number))
    groups = [order[start : start + size] for start in range(0, len(order), size)]
    random.Random(0).shuffle(groups)
    return iter(groups)


def meta_path(out: Path) -> Path:
    """Return where it is written whose answers a file holds."""
    return out.with_suffix(".meta.json")


def read_meta(out: Path) -> dict[str, Any] | None:
    """Return what is known of a file of answers, None when nothing is."""
    place = meta_path(out)
    try:
        return dict(json.loads(place.read_text(encoding="utf-8"))) if place.is_file() else None
    except (TypeError, ValueError) as error:
        raise SpecGenError(f"{place} is no JSON: {reason_of(error)}. Start anew (--restart), or mend it.") from error


def forget(out: Path) -> None:
    """Remove a file of answers, and what is known of it. Raises: ``SpecGenError`` when another process writes it."""
    with alone(out), writing(out):
        for path in (out, meta_path(out)):
            path.unlink(missing_ok=True)


def check_author(data: str | Path, facts: TargetFacts) -> str | None:
    """Return what is wrong with training on a file of answers for this target, None when nothing is or can be said."""
    meta = read_meta(Path(data))
    theirs = (meta or {}).get("target", {}).get("fingerprint")
    if not theirs or not facts.fingerprint or theirs == facts.fingerprint:
        return None
    whose = (meta or {})["target"].get("name") or "another target"
    return f"{data} holds answers of {whose} (fingerprint {theirs}), not of this target ({facts.fingerprint})"


def _meta(questions: Sequence[Question], source: AnswerSource) -> dict[str, Any]:
    digest = hashlib.sha256()
    for question in questions:
        digest.update(json.dumps(question.ids).encode())
    return {
        "format": FORMAT,
        "target": source.facts.to_dict(),
        "sampling": asdict(source.sampling),
        "prompts": {"count": len(questions), "sha256": digest.hexdigest()},
        **source.notes,
    }


_MUST_AGREE = ("format", "sampling", "prompts", "dtype", "chat_template_kwargs")
_SIZES = ("hidden_size", "vocab_size", "num_layers")


def _resume(out: Path, meta: dict[str, Any]) -> set[int]:
    """Return the numbers that a file holds already; cut off a torn last line.

    A file without an answer is nobody's: what may stand beside it says nothing.
    """
    kept = out.read_bytes() if out.exists() else b""
    whole = kept[: kept.rfind(b"\n") + 1]
    if whole.strip():
        _compare(out, meta)
    elif kept and read_meta(out) is None:
        raise _unknown(out)
    if len(whole) < len(kept):
        with writing(out):
            os.truncate(out, len(whole))
    return {_number(out, place, line) for place, line in enumerate(whole.split(b"\n"), start=1) if line}


def _unknown(out: Path) -> SpecGenError:
    return SpecGenError(
        f"{out} exists and {meta_path(out).name} beside it does not: whose answers it holds is not known. Give "
        "another file, or start anew (--restart)."
    )


def _number(out: Path, place: int, line: bytes) -> int:
    try:
        return int(json.loads(line)["index"])
    except (KeyError, TypeError, ValueError) as error:
        raise SpecGenError(
            f"line {place} of {out} is no answer ({line[:40]!r}): the disk lost it, or somebody changed the file. Take "
            "the line out, or start anew (--restart)."
        ) from error


def _compare(out: Path, meta: dict[str, Any]) -> None:
    """Raises: ``SpecGenError`` naming what differs between what a file's answers were made with and ``meta``."""
    known = read_meta(out)
    if known is None:
        raise _unknown(out)
    differ = [name for name in _MUST_AGREE if (known.get(name) or None) != (meta.get(name) or None)]
    theirs = known.get("target", {})
    ours = meta["target"]
    same = ("fingerprint", *_SIZES) if ours["fingerprint"] else ("fingerprint", *_SIZES, "name")
    if any(theirs.get(name) != ours[name] for name in same):
        differ.append("target")
    if differ:
        shown = "; ".join(f"{name} {known.get(name)} there, {meta.get(name)} here" for name in differ)
        raise SpecGenError(
            f"{out} holds answers that were made otherwise ({shown}). Go on with the same settings, give another file, "
            "or start anew (--restart)."
        )


def write_parquet(rows: Path, out: Path) -> None:
    """Write a finished file of answers as parquet, in the order of the prompts."""
    from datasets import load_dataset

    found = load_dataset("json", data_files=str(rows), split="train")
    places = found["index"][:]
    with writing(out):
        found.select(sorted(range(len(places)), key=places.__getitem__)).to_parquet(str(out))


def chat_prompts(dataset: Any, limit: int | None = None, strict: bool = False) -> list[Chat]:
    """Return each chat of a data set up to its last question; earlier answers stay as they are.

    Rows that cannot be read, or in which nobody asks, are left out and counted, with a warning.

    Raises: ``SpecGenError`` when more than half of the rows cannot be read (``strict``: when one cannot).
    """
    from hf_specgen.trainers.data import check_left_out, rows_in

    found: list[Chat] = []
    problems: list[str] = []
    for row in rows_in(dataset):
        if limit is not None and len(found) >= limit:
            break
        try:
            found.append(_question_of(row))
        except SpecGenError as error:
            if strict:
                raise
            problems.append(str(error))
    check_left_out(len(problems), len(problems) + len(found), problems[0] if problems else "")
    return found


def _question_of(row: Any) -> Chat:
    """Return a row's chat up to its last question. Raises: ``SpecGenError``."""
    try:
        chat = chat_of(row)
        asked = [place for place, message in enumerate(chat.messages, 1) if message.get("role") == "user"]
    except SpecGenError:
        raise
    except (AttributeError, KeyError, TypeError) as error:
        raise SpecGenError(f"a row cannot be read ({error}): {str(row)[:80]}. Leave it out.") from error
    if not asked:
        roles = ", ".join(str(message.get("role")) for message in chat.messages[:8])
        raise SpecGenError(f"in a row nobody asks: its roles are {roles}.")
    return replace(chat, messages=chat.messages[: asked[-1]])
