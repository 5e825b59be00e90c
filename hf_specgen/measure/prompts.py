"""Prompt files: read them, choose from them, turn them into token ids; and the batches that prompts are run in."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor

from hf_specgen.chats import Chat, check_text, message_of, render, settings_of, tools_of, with_system
from hf_specgen.errors import SpecGenError, reason_of

UNCATEGORIZED = "all"
_ASKED = ("prompt", "turns", "messages", "conversations")
_OTHER_TABLES = {".csv", ".tsv", ".parquet", ".arrow", ".xlsx", ".gz", ".zst", ".zip"}


@dataclass(frozen=True)
class ChatPrompt:
    """Hold one prompt as chat messages, with the category it is reported under, the tools that may be called, and
    ``settings``: its own ``chat_template_kwargs``."""

    messages: tuple[Mapping[str, Any], ...]
    category: str = UNCATEGORIZED
    question_id: str = ""
    tools: Sequence[Any] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Return the contents of all messages, for models without a chat template."""
        return "\n\n".join(message.get("content", "") for message in self.messages)

    @classmethod
    def user(cls, text: str, category: str = UNCATEGORIZED, question_id: str = "") -> ChatPrompt:
        """Build the prompt that is one message of the user."""
        return cls(({"role": "user", "content": text},), category, question_id)


def own_prompts() -> list[ChatPrompt]:
    """Return the project's own 56 prompts: eight in each of seven categories."""
    source = resources.files("hf_specgen.measure") / "data" / "prompts.jsonl"
    return _parse_jsonl(source.read_text(encoding="utf-8"), "prompts.jsonl")


def read_prompts(path: str | Path) -> list[ChatPrompt]:
    """Read a prompt file: records from ``.jsonl`` (one a line) or ``.json`` (an array of them, or lines), anything else
    as text with one prompt a paragraph.

    A record has ``prompt`` (a string), ``turns`` (a list; the first turn is used), ``messages`` (role and content, the
    last one from the user) or ``conversations`` (from and value), and optionally ``system``, ``tools``, ``category``,
    ``question_id`` and ``chat_template_kwargs``. Paragraphs of a text file are separated by blank lines.

    Raises: SpecGenError naming file and line or row.
    """
    path = Path(path)
    if path.suffix.lower() in _OTHER_TABLES:
        raise SpecGenError(f"{path} ends with {path.suffix!r}: a .jsonl, .json or text file of prompts is required.")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecGenError(
            f"cannot read the prompt file {path}: {reason_of(error)}. Give a UTF-8 .jsonl, .json or text file."
        ) from None
    prompts = _parse(text, path)
    if not prompts:
        raise SpecGenError(f"{path} holds no prompt. Give one JSON record a line, or paragraphs of text.")
    return prompts


def _parse(text: str, path: Path) -> list[ChatPrompt]:
    if path.suffix.lower() == ".json" and text.lstrip().startswith("["):
        return _parse_array(text, str(path))
    is_records = path.suffix.lower() in {".json", ".jsonl", ".ndjson"}
    return _parse_jsonl(text, str(path)) if is_records else _parse_text(text)


def _parse_text(text: str) -> list[ChatPrompt]:
    paragraphs = [part.strip("\n") for part in "\n".join(line.rstrip() for line in text.splitlines()).split("\n\n")]
    return [ChatPrompt.user(part, question_id=str(i)) for i, part in enumerate(filter(str.strip, paragraphs), 1)]


def _parse_array(text: str, name: str) -> list[ChatPrompt]:
    try:
        records = json.loads(text)
    except json.JSONDecodeError as error:
        raise SpecGenError(
            f"{name}:{error.lineno}: not JSON ({error.msg} at column {error.colno}). Write an array of records."
        ) from None
    return [_prompt(record, f"{name}: record {number}", str(number)) for number, record in enumerate(records, 1)]


def _parse_jsonl(text: str, name: str) -> list[ChatPrompt]:
    # split("\n"), not splitlines: a record may hold U+2028, which is no line end in JSON lines
    lines = enumerate(text.split("\n"), 1)
    return [_parse_record(line, f"{name}:{number}", str(number)) for number, line in lines if line.strip()]


def _parse_record(line: str, where: str, default_id: str) -> ChatPrompt:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise SpecGenError(
            f"{where}: not JSON ({error.msg} at column {error.colno}). Write one record a line."
        ) from None
    return _prompt(record, where, default_id)


def _prompt(record: Any, where: str, default_id: str) -> ChatPrompt:
    if not isinstance(record, dict):
        raise SpecGenError(f"{where}: a record must be an object with prompt, turns or messages, got {record!r:.60}.")
    given = [key for key in _ASKED if key in record]
    if len(given) != 1:
        keys = ", ".join(given) or ", ".join(map(str, record)) or "nothing"
        raise SpecGenError(f"{where}: exactly one of {', '.join(_ASKED)} is required, found {keys}.")
    check_text(json.dumps(record, ensure_ascii=False), where)
    category = str(record.get("category") or UNCATEGORIZED)
    question_id = default_id if record.get("question_id") is None else str(record["question_id"])
    messages = _messages(given[0], record[given[0]], where)
    try:
        chat = Chat(with_system(messages, record), tools_of(record), settings_of(record))
    except SpecGenError as error:
        raise SpecGenError(f"{where}: {error}") from None
    return ChatPrompt(tuple(chat.messages), category, question_id, chat.tools, chat.settings)


def _messages(key: str, value: Any, where: str) -> list[dict[str, Any]]:
    if key == "prompt":
        return _from_prompt(value, where)
    return _from_turns(value, where) if key == "turns" else _from_messages(key, value, where)


def _from_prompt(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, str) or not value.strip():
        raise SpecGenError(f"{where}: prompt must be a string with text in it, got {value!r:.60}.")
    return [{"role": "user", "content": value}]


def _from_turns(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise SpecGenError(f"{where}: turns must be a list of strings, got {value!r:.60}.")
    return _from_prompt(value[0], where)


def _from_messages(key: str, value: Any, where: str) -> list[dict[str, Any]]:
    names = ("role", "content") if key == "messages" else ("from", "value")
    if not isinstance(value, list) or not value:
        raise SpecGenError(f"{where}: {key} must be a list of {{{', '.join(names)}}}, got {value!r:.60}.")
    for message in value:
        if not isinstance(message, dict) or not all(isinstance(message.get(name), str) for name in names):
            raise SpecGenError(f"{where}: every message needs the strings {' and '.join(names)}, got {message!r:.60}.")
    messages = [message_of(message) for message in value]
    if messages[-1]["role"] != "user":
        raise SpecGenError(f"{where}: the last message must be from the user, it is from {messages[-1]['role']!r}.")
    return messages


def select(prompts: Sequence[ChatPrompt], categories: Iterable[str] = (), limit: int | None = None) -> list[ChatPrompt]:
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


def encode(
    prompt: ChatPrompt, tokenizer: Any, chat: bool = True, settings: Mapping[str, Any] | None = None
) -> list[int]:
    """Turn a prompt into token ids, through the chat template where the tokenizer has one and ``chat`` is set.

    ``settings``: ``chat_template_kwargs``; the prompt's own win.

    Raises: SpecGenError when the prompt has no token, the template refuses it, or ``settings`` are for no template.
    """
    name = f"the prompt {prompt.question_id or prompt.text!r:.60}"
    applies = chat and bool(tokenizer.chat_template)
    if settings and not applies:
        why = "it was not to be used" if tokenizer.chat_template else "the tokenizer has none"
        raise SpecGenError(f"chat_template_kwargs were given and no chat template is applied: {why}. Leave them out.")
    text = _shown(prompt, tokenizer, settings or {}, name) if applies else prompt.text
    check_text(text, name)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"] if applies else tokenizer(text)["input_ids"]
    if not ids:
        raise SpecGenError(f"{name} has no token. Give some text.")
    return list(ids)


def _shown(prompt: ChatPrompt, tokenizer: Any, settings: Mapping[str, Any], name: str) -> str:
    tools = list(prompt.tools) if prompt.tools else None
    try:
        return str(render(tokenizer, Chat(prompt.messages, tools, {**settings, **prompt.settings}), asks=True))
    except TemplateError as error:
        roles = ", ".join(str(message.get("role")) for message in prompt.messages[:8])
        raise SpecGenError(
            f"the chat template refuses {name} ({roles}): {reason_of(error)}. Leave it out, or feed it as it is "
            "(--no-chat)."
        ) from error


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


MIXED = "several categories"


def batches(prompts: Sequence[ChatPrompt], size: int) -> list[list[ChatPrompt]]:
    """Cut the prompts into batches of ``size``: of one category where it fills them, then across categories what is
    left of each. Only the last batch may be smaller.
    """
    groups: dict[str, list[ChatPrompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.category, []).append(prompt)
    full = [group[i : i + size] for group in groups.values() for i in range(0, len(group) - size + 1, size)]
    rest = [prompt for group in groups.values() for prompt in group[len(group) - len(group) % size :]]
    return full + [rest[i : i + size] for i in range(0, len(rest), size)]


def category_of(batch: Sequence[ChatPrompt]) -> str:
    """Return the category that a batch's figures belong to: a batch has one time, which cannot be divided."""
    categories = {prompt.category for prompt in batch}
    return categories.pop() if len(categories) == 1 else MIXED
