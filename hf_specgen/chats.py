"""Chats: what a row of data or a prompt file says, and how a tokenizer's template shows it to a model.

Every reader of chats (training data, regenerate, prompt files) and every place that renders one goes through here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_specgen.errors import SpecGenError, reason_of

Row = dict[str, Any]
Message = Mapping[str, Any]

_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant", "bing": "assistant"}
_SYSTEM_FIELDS = ("system", "system_prompt")
_SYSTEM_ROLES = ("system", "developer")
_SETTINGS = "chat_template_kwargs"
# what a call sets itself: as settings they would be given twice, or return something else
_OF_THE_CALL = {"conversation", "messages", "tools", "chat_template", "add_generation_prompt", "tokenize"} | {
    *("continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs"),
}


@dataclass(frozen=True)
class Chat:
    """Hold messages of role and content, the tools that may be called, and ``settings`` that the template reads."""

    messages: Sequence[Message]
    tools: list[Any] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


def chat_of(row: Mapping[str, Any]) -> Chat:
    """Read a row's chat: its messages behind what the row says as ``system``, its tools, its template settings.

    Raises: ``SpecGenError`` for a row without messages, conversations, or prompt, and for two system messages.
    """
    turns: Any = row.get("messages") or row.get("conversations")
    if not turns and isinstance(row.get("prompt"), str):
        turns = [{"role": "user", "content": row["prompt"]}]
    turns = turns or row.get("prompt")
    if not are_messages(turns):
        raise SpecGenError(f"a row has the columns {', '.join(row)}: messages, conversations or prompt is required.")
    return Chat(with_system([message_of(turn) for turn in turns], row), tools_of(row), settings_of(row))


def are_messages(value: Any) -> bool:
    """Tell whether a value is a list of messages."""
    return isinstance(value, Sequence) and bool(value) and isinstance(value[0], Mapping)


def message_of(turn: Message) -> Row:
    """Return a turn as a message of role and content, also one that says ``from`` and ``value``."""
    if "from" not in turn:
        none = {"content": None} if turn.get("content", "") is None else {}  # beside calls: templates ask whether it is
        return {**known(turn), **none}
    return {"role": _ROLES.get(turn["from"], turn["from"]), "content": turn["value"]}


def with_system(messages: list[Row], row: Mapping[str, Any]) -> list[Row]:
    """Put what a row says as ``system`` or ``system_prompt`` before its messages.

    Raises: ``SpecGenError`` for what is no text, and where the row says two different things.
    """
    said = system_of(row)
    if not said:
        return messages
    if messages and messages[0].get("role") in _SYSTEM_ROLES:
        if messages[0].get("content") == said:
            return messages
        raise SpecGenError(
            f"a row's system field says {said[:60]!r} and its first message, of the role {messages[0]['role']}, "
            f"{str(messages[0].get('content'))[:60]!r}: one of them is required."
        )
    return [{"role": "system", "content": said}, *messages]


def system_of(row: Mapping[str, Any]) -> str:
    """Return what a row says as ``system`` or ``system_prompt``, empty where it says nothing.

    Raises: ``SpecGenError`` for what is no text, and for two texts.
    """
    given = {name: row[name] for name in _SYSTEM_FIELDS if row.get(name) is not None}
    for name, value in given.items():
        if not isinstance(value, str):
            raise SpecGenError(
                f"a row's {name} is {value!r:.60}: a text is required. Rename what means something else."
            )
    texts = {value for value in given.values() if value.strip()}
    if len(texts) > 1:
        raise SpecGenError("a row's system and system_prompt are two texts: one of them is required.")
    return texts.pop() if texts else ""


def settings_of(row: Mapping[str, Any]) -> Row:
    """Return what a row says as ``chat_template_kwargs``: an object, or the same as JSON."""
    found = row.get(_SETTINGS) or {}
    return read_settings(found, f"a row's {_SETTINGS}") if isinstance(found, str) else check_settings(known(found))


def tools_of(row: Mapping[str, Any]) -> list[Any] | None:
    """Return the tools that a row's chat may call: a list, or the same as JSON."""
    tools: Any = row.get("tools") or None
    if isinstance(tools, str):
        try:
            return json.loads(tools) or None  # no table filled anything in
        except ValueError as error:
            raise SpecGenError(f"a row's tools are no JSON ({reason_of(error)}): {tools[:60]!r}.") from error
    return known(tools)


def known(value: Any) -> Any:
    """Leave out what is None: a table fills in the keys that other rows have, and templates would show them."""
    if isinstance(value, Mapping):
        return {name: known(part) for name, part in value.items() if part is not None}
    return [known(part) for part in value] if isinstance(value, list) else value


def read_settings(text: str | None, name: str = _SETTINGS) -> Row:
    """Read settings of the chat template that were given as JSON; ``name`` is what errors call them.

    Raises: ``SpecGenError`` for what is no JSON object, and for names that are not the template's to read.
    """
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise SpecGenError(
            f'{name} {text} is no JSON: {reason_of(error)}. An object such as {{"enable_thinking": false}} is required.'
        ) from error
    return check_settings(found, name)


def check_settings(settings: Any, name: str = _SETTINGS) -> Row:
    """Return settings of the chat template as a dict. Raises: ``SpecGenError`` as ``read_settings`` does."""
    if not isinstance(settings, Mapping):
        raise SpecGenError(f"{name}: {settings!r:.60} is no object of names and values.")
    taken = sorted(_OF_THE_CALL & set(settings))
    if taken:
        raise SpecGenError(f"{name}: {', '.join(taken)} is no setting of the template. Leave it out.")
    return dict(settings)


def render(tokenizer: Any, chat: Chat, asks: bool = False, template: str | None = None, **wanted: Any) -> Any:
    """Apply a chat template: the tokenizer's or ``template``, with the header of an answer where one is asked for.

    ``wanted`` says what ``apply_chat_template`` returns; by default it is the text.

    Raises: ``SpecGenError`` for settings that the template does not read; what the template raises passes through.
    """
    shown = tokenizer.chat_template if template is None else template
    if isinstance(shown, str):
        unread = [name for name in chat.settings if not re.search(rf"\b{re.escape(name)}\b", shown)]
        if unread:
            raise SpecGenError(
                f"{_SETTINGS}: the chat template reads no {' and no '.join(unread)}, so nothing would change. Look for "
                "the name in the template (tokenizer.chat_template), or leave it out."
            )
    more = {"tools": chat.tools, "chat_template": template}
    given = {name: value for name, value in more.items() if value is not None}
    return tokenizer.apply_chat_template(
        list(chat.messages), add_generation_prompt=asks, **given, **chat.settings, **{"tokenize": False, **wanted}
    )


def check_text(text: str, name: str) -> None:
    """Refuse a text that no tokenizer can read. Raises: ``SpecGenError``."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise SpecGenError(
            f"{name} holds half a character ({text[error.start]!r}, a lone surrogate, behind "
            f"{text[max(0, error.start - 20) : error.start]!r}): it was cut apart, or is no UTF-8. Mend it, or leave "
            "it out."
        ) from None
