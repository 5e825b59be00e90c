"""Prompt files: read them, choose from them, turn them into token ids."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_specgen.errors import SpecGenError, reason_of

UNCATEGORIZED = "all"


@dataclass(frozen=True)
class Prompt:
    """Hold one prompt as chat messages, with the category it is reported under and the tools that may be called."""

    messages: tuple[dict[str, Any], ...]
    category: str = UNCATEGORIZED
    question_id: str = ""
    tools: Sequence[Any] | None = None

    @property
    def text(self) -> str:
        """Return the contents of all messages, for models without a chat template."""
        return "\n\n".join(message.get("content", "") for message in self.messages)

    @classmethod
    def user(cls, text: str, category: str = UNCATEGORIZED, question_id: str = "") -> Prompt:
        """Build the prompt that is one message of the user."""
        return cls(({"role": "user", "content": text},), category, question_id)


def own_prompts() -> list[Prompt]:
    """Return the project's own 56 prompts: eight in each of seven categories."""
    source = resources.files("hf_specgen.bench") / "data" / "prompts.jsonl"
    return _parse_jsonl(source.read_text(encoding="utf-8"), "prompts.jsonl")


def read_prompts(path: str | Path) -> list[Prompt]:
    """Read a prompt file: ``.jsonl`` with one record a line, anything else as text with one prompt a paragraph.

    A record has ``prompt`` (a string), ``turns`` (a list; the first turn is used) or ``messages`` (role and content,
    the last one from the user), and optionally ``category`` and ``question_id``. Paragraphs of a text file are
    separated by blank lines.

    Raises: SpecGenError naming file and line.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecGenError(
            f"cannot read the prompt file {path}: {reason_of(error)}. Give a UTF-8 .jsonl or text file."
        ) from None
    prompts = _parse_jsonl(text, str(path)) if path.suffix in {".jsonl", ".ndjson"} else _parse_text(text)
    if not prompts:
        raise SpecGenError(f"{path} holds no prompt. Give one JSON record a line, or paragraphs of text.")
    return prompts


def _parse_text(text: str) -> list[Prompt]:
    paragraphs = [part.strip("\n") for part in "\n".join(line.rstrip() for line in text.splitlines()).split("\n\n")]
    return [Prompt.user(part, question_id=str(i)) for i, part in enumerate(filter(str.strip, paragraphs), 1)]


def _parse_jsonl(text: str, name: str) -> list[Prompt]:
    # split("\n"), not splitlines: a record may hold U+2028, which is no line end in JSON lines
    lines = enumerate(text.split("\n"), 1)
    return [_parse_record(line, f"{name}:{number}", str(number)) for number, line in lines if line.strip()]


def _parse_record(line: str, where: str, default_id: str) -> Prompt:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise SpecGenError(
            f"{where}: not JSON ({error.msg} at column {error.colno}). Write one record a line."
        ) from None
    if not isinstance(record, dict):
        raise SpecGenError(f"{where}: a record must be an object with prompt, turns or messages, got {record!r:.60}.")
    given = [key for key in ("prompt", "turns", "messages") if key in record]
    if len(given) != 1:
        found = ", ".join(given) or ", ".join(map(str, record)) or "nothing"
        raise SpecGenError(f"{where}: exactly one of prompt, turns, messages is required, found {found}.")
    category = str(record.get("category") or UNCATEGORIZED)
    question_id = default_id if record.get("question_id") is None else str(record["question_id"])
    return Prompt(_messages(given[0], record[given[0]], where), category, question_id)


def _messages(key: str, value: Any, where: str) -> tuple[dict[str, str], ...]:
    if key == "prompt":
        return _from_prompt(value, where)
    return _from_turns(value, where) if key == "turns" else _from_messages(value, where)


def _from_prompt(value: Any, where: str) -> tuple[dict[str, str], ...]:
    if not isinstance(value, str) or not value.strip():
        raise SpecGenError(f"{where}: prompt must be a string with text in it, got {value!r:.60}.")
    return ({"role": "user", "content": value},)


def _from_turns(value: Any, where: str) -> tuple[dict[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise SpecGenError(f"{where}: turns must be a list of strings, got {value!r:.60}.")
    return _from_prompt(value[0], where)


def _from_messages(value: Any, where: str) -> tuple[dict[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise SpecGenError(f"{where}: messages must be a list of {{role, content}}, got {value!r:.60}.")
    for message in value:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise SpecGenError(f"{where}: every message needs the strings role and content, got {message!r:.60}.")
    if value[-1]["role"] != "user":
        raise SpecGenError(f"{where}: the last message must be from the user, it is from {value[-1]['role']!r}.")
    return tuple({"role": message["role"], "content": message["content"]} for message in value)


def select(prompts: Sequence[Prompt], categories: Iterable[str] = (), limit: int | None = None) -> list[Prompt]:
    """Keep the named categories, then at most ``limit`` prompts taken from them in turn.

    Raises: SpecGenError when a category does not occur.
    """
    known = list(dict.fromkeys(prompt.category for prompt in prompts))
    wanted = list(dict.fromkeys(categories)) or known
    missing = [name for name in wanted if name not in known]
    if missing:
        raise SpecGenError(f"no prompt has the category {missing[0]!r}; the file has: {', '.join(known)}.")
    groups = [[prompt for prompt in prompts if prompt.category == name] for name in wanted]
    if limit is None:
        return [prompt for group in groups for prompt in group]
    sizes = [0] * len(groups)
    while sum(sizes) < limit and any(size < len(group) for size, group in zip(sizes, groups, strict=True)):
        for i, group in enumerate(groups):
            sizes[i] += sizes[i] < len(group) and sum(sizes) < limit
    return [prompt for size, group in zip(sizes, groups, strict=True) for prompt in group[:size]]


def encode(prompt: Prompt, tokenizer: Any, chat: bool = True) -> list[int]:
    """Turn a prompt into token ids, through the chat template where the tokenizer has one and ``chat`` is set.

    Raises: SpecGenError when the prompt has no token.
    """
    if chat and tokenizer.chat_template:
        more = {"tools": list(prompt.tools)} if prompt.tools else {}
        text = tokenizer.apply_chat_template(list(prompt.messages), tokenize=False, add_generation_prompt=True, **more)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        ids = tokenizer(prompt.text)["input_ids"]
    if not ids:
        raise SpecGenError(f"the prompt {prompt.question_id or prompt.text!r:.60} has no token. Give some text.")
    return list(ids)


def pad_left(rows: Sequence[Sequence[int]], pad_id: int, device: torch.device | str | None = None) -> dict[str, Tensor]:
    """Stack ragged rows into ``input_ids`` and ``attention_mask``, padded on the left.

    Shapes: both ``(B, L)`` int64.
    """
    width = max(map(len, rows))
    ids = [[pad_id] * (width - len(row)) + list(row) for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {
        "input_ids": torch.tensor(ids, device=device),
        "attention_mask": torch.tensor(mask, device=device),
    }


def pad_token(tokenizer: Any) -> int:
    """Return the id to pad with: the tokenizer's pad, else its end of sequence, else 0."""
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    return 0


def batches(prompts: Sequence[Prompt], size: int) -> list[list[Prompt]]:
    """Cut the prompts into batches of ``size`` that do not mix categories; the last of a category may be smaller."""
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    return [group[i : i + size] for group in groups.values() for i in range(0, len(group), size)]
