"""Which tokens of a chat the target writes: those are supervised, and nothing is guessed.

Two exact ways. A template with ``{% generation %}`` marks them itself. Any other template is rendered up to every
answer, with the header that asks for it, and must give a prefix of the whole chat, as text and as tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from hf_specgen.errors import SpecGenError, reason_of

Message = Mapping[str, Any]
_Run = tuple[int, int, int]  # where an answer starts and stops, and where its message ends
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_THINKS = ("<think>", "</think>")


@dataclass(frozen=True)
class ChatOptions:
    """Hold what of a chat is supervised.

    ``turns``: ``all`` answers or the ``last``. ``include_stop_token``: the token that ends an answer too.
    ``reasoning``: what stands between ``<think>`` and ``</think>`` too. ``stop_ids``: what ends an answer, besides the
    tokenizer's special tokens. ``chat_template``: read chats with this one instead of the tokenizer's.
    """

    turns: str = "all"
    include_stop_token: bool = True
    reasoning: bool = True
    stop_ids: tuple[int, ...] = ()
    chat_template: str | None = None

    def __post_init__(self) -> None:
        if self.turns not in ("all", "last"):
            raise SpecGenError(f"turns={self.turns!r}: 'all' or 'last' answers of a chat can be supervised.")


class ChatReader:
    """Turn chats into token ids and the mask of what the target writes.

    Raises: ``SpecGenError`` for a tokenizer without a chat template, or without the tokens that ``options`` need.
    """

    def __init__(self, tokenizer: Any, options: ChatOptions) -> None:
        self.tokenizer, self.options = tokenizer, options
        template = options.chat_template or tokenizer.chat_template
        if not isinstance(template, str):
            raise SpecGenError(
                "the data holds chats and the tokenizer has no single chat template: set tokenizer.chat_template or "
                "give chat_template."
            )
        self.template = template
        self.marks_answers = bool(_MARKS.search(template))
        self._stops = {*options.stop_ids, *tokenizer.all_special_ids} - {tokenizer.unk_token_id}
        self._thinks = None if options.reasoning else self._thinking_ids()

    def read(
        self, messages: Sequence[Message], first: int = 0, tools: Sequence[Any] | None = None
    ) -> tuple[list[int], list[bool]]:
        """Return a chat's token ids and which of them answers are made of; answers before ``first`` are given.

        An answer without anything before it answers nothing: it is not supervised.

        Raises: ``SpecGenError`` when the template leaves it open where an answer stands.
        """
        every = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
        answers = [i for i in every if i >= max(first, 1)]
        if self.options.turns == "last":
            answers = answers[-1:]
        try:
            if self.marks_answers and answers == every:
                ids, runs = self._marked(messages, tools, answers)
            else:
                ids, runs = self._rendered(messages, answers, tools)
        except TemplateError as error:
            raise SpecGenError(
                f"the chat template refuses a chat of {', '.join(str(turn.get('role')) for turn in messages[:8])}: "
                f"{error}. Leave such rows out, or give a chat_template that takes them."
            ) from error
        mask = [False] * len(ids)
        for start, stop, end in runs:
            self._mark(ids, mask, start, stop, end)
        return ids, mask

    def _marked(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, answers: list[int]
    ) -> tuple[list[int], list[_Run]]:
        """Let the template say where answers are."""
        found = self.tokenizer.apply_chat_template(
            list(messages),
            tools=tools,
            chat_template=self.template,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        ids, mask = list(found["input_ids"]), [bool(bit) for bit in found["assistant_masks"]]
        if answers and not any(mask):
            raise SpecGenError(
                "the chat template has {% generation %} and marks nothing in a chat with answers: it does not go "
                "around the answers, or the tokenizer tells no character offsets. Mend it, or leave the mark out."
            )
        ends = self._ends(messages, answers, tools, ids)
        return ids, [(start, stop, next((end for end in ends if end >= stop), len(ids))) for start, stop in _runs(mask)]

    def _ends(
        self, messages: Sequence[Message], answers: list[int], tools: Sequence[Any] | None, ids: list[int]
    ) -> list[int]:
        """Return where the messages of answers end, none where the template shows a part of a chat otherwise.

        Raises: ``SpecGenError`` where the tokenizer joins what the target reads with what it writes.
        """
        ends, whole = [], self._render(messages, tools)
        for at in answers:
            try:
                before, behind = self._render(messages[:at], tools, asks=True), self._render(messages[: at + 1], tools)
            except TemplateError:  # it wants whole chats only
                return []
            if not (whole.startswith(before) and whole.startswith(behind)):
                return []
            self._prefix(before, whole, ids, at)
            part = self._tokens(behind)
            if ids[: len(part)] != part:
                return []
            ends.append(len(part))
        return ends

    def _rendered(
        self, messages: Sequence[Message], answers: list[int], tools: Sequence[Any] | None
    ) -> tuple[list[int], list[_Run]]:
        """Render up to each answer and behind it, and count tokens."""
        whole = self._render(messages, tools)
        ids = self._tokens(whole)
        runs = []
        for at in answers:
            before = self._render(messages[:at], tools, asks=True)
            behind = self._render(messages[: at + 1], tools)
            start, stop = (self._prefix(text, whole, ids, at) for text in (before, behind))
            self._check_header(messages, at, tools, before, whole[len(before) : len(behind)])
            runs.append((start, stop, stop))
        return ids, runs

    def _render(self, messages: Sequence[Message], tools: Sequence[Any] | None, asks: bool = False) -> str:
        text: str = self.tokenizer.apply_chat_template(
            list(messages), tools=tools, chat_template=self.template, tokenize=False, add_generation_prompt=asks
        )
        return text

    def _tokens(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _prefix(self, text: str, whole: str, ids: list[int], at: int) -> int:
        """Return how many tokens of the whole a part of it takes. Raises: ``SpecGenError`` where it is no prefix."""
        if not whole.startswith(text):
            raise SpecGenError(
                f"the chat template renders the first {at + 1} messages differently when others follow, so answer {at} "
                f"cannot be found (up to it: ...{text[-60:]!r}). Supervise the last answer only (turns='last'), or "
                "give a chat_template that marks answers with {% generation %}."
            )
        part = self._tokens(text)
        if ids[: len(part)] != part:
            raise SpecGenError(
                f"the tokenizer joins the text before and behind a border of answer {at} (...{text[-30:]!r}): its "
                "tokens are not those that the target would read and write. Give a chat_template with a special token "
                "there, or tokenise the data yourself (input_ids and loss_mask)."
            )
        return len(part)

    def _check_header(
        self, messages: Sequence[Message], at: int, tools: Sequence[Any] | None, before: str, answer: str
    ) -> None:
        """Refuse a template that ignores ``add_generation_prompt`` and writes a header: it would be supervised."""
        if before != self._render(messages[:at], tools):
            return
        content = messages[at].get("content")
        if isinstance(content, str) and not answer.lstrip().startswith(content.strip()):
            raise SpecGenError(
                f"the chat template ignores add_generation_prompt and writes {answer[:40]!r} before answer {at}: what "
                "the target is given and what it writes cannot be told apart. Give a chat_template that does."
            )

    def _mark(self, ids: list[int], mask: list[bool], start: int, stop: int, end: int) -> None:
        """Mark one answer, up to the token that ends it; what the template writes behind that is nobody's.

        ``end``: where its message ends; a special token behind that begins the next.
        """
        last = next((i for i in range(stop - 1, start - 1, -1) if ids[i] in self._stops), None)
        if last is None and stop < end and ids[stop] in self._stops:
            last, stop = stop, stop + 1
        if last is not None and not self.tokenizer.decode(ids[last + 1 : stop]).strip():
            stop = last + 1 if self.options.include_stop_token else last
        mask[start:stop] = [True] * (stop - start)
        if self._thinks is not None:
            _unmark_thinking(*self._thinks, ids, mask, start, stop)

    def _thinking_ids(self) -> tuple[int, int]:
        found = [self.tokenizer.convert_tokens_to_ids(token) for token in _THINKS]
        if any(token is None or token == self.tokenizer.unk_token_id for token in found):
            raise SpecGenError(
                f"reasoning=False: the tokenizer has no tokens {' and '.join(_THINKS)}. Leave reasoning=True."
            )
        return int(found[0]), int(found[1])


def _unmark_thinking(begin: int, end: int, ids: list[int], mask: list[bool], start: int, stop: int) -> None:
    """Take the supervision off what stands between the tokens ``begin`` and ``end`` of an answer."""
    opened: int | None = None
    for i in range(start, stop):
        if ids[i] == begin:
            opened = i
        elif ids[i] == end:
            first = start if opened is None else opened
            mask[first : i + 1] = [False] * (i + 1 - first)
            opened = None
    if opened is not None:
        mask[opened:stop] = [False] * (stop - opened)


def preview(ids: Sequence[int], mask: Sequence[bool], tokenizer: Any, limit: int = 400) -> str:
    """Return the first ``limit`` tokens as text, supervised parts in ⟦ ⟧: look at it before training."""
    ids, mask = list(ids[:limit]), list(mask[:limit])
    pieces, at = [], 0
    for start, stop in _runs(mask):
        pieces += [tokenizer.decode(ids[at:start]), "⟦", tokenizer.decode(ids[start:stop]), "⟧"]
        at = stop
    return "".join([*pieces, tokenizer.decode(ids[at:])])


def _runs(mask: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Yield the borders of each run of True."""
    start = None
    for i, bit in enumerate([*mask, False]):
        if bit and start is None:
            start = i
        elif not bit and start is not None:
            yield start, i
            start = None


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
