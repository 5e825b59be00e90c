"""Which tokens of a chat the target writes: those are supervised, and nothing is guessed.

Two exact ways. A template with ``{% generation %}`` marks them itself. Any other template is rendered up to every
answer, with the header that asks for it, and must give a prefix of the whole chat, as text and as tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jinja2 import TemplateError

from hf_specgen.chats import Chat, Message, check_settings, render
from hf_specgen.errors import SpecGenError

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_THINKS = ("<think>", "</think>")
# what templates write where an answer has no thought: <think>\n\n</think>, <seed:think></seed:think>, [THINK][/THINK]
_NO_THOUGHT = re.compile(r"\s*(?:<(?P<tag>[^<>/\s]*think[^<>/\s]*)>\s*</(?P=tag)>|\[THINK\]\s*\[/THINK\])")
_LOOKED_AT = 64  # tokens of an answer: an empty thought stands at its beginning


class _Run(NamedTuple):
    """Hold where an answer starts and stops, where its message ends, and which message it is, where that is known."""

    start: int
    stop: int
    end: int
    message: Message | None


@dataclass(frozen=True)
class ChatOptions:
    """Hold what of a chat is supervised.

    ``turns``: ``all`` answers or the ``last``. ``include_stop_token``: the token that ends an answer too.
    ``reasoning``: what stands between ``<think>`` and ``</think>`` too. ``stop_ids``: what ends an answer, besides the
    tokenizer's special tokens. ``chat_template``: read chats with this one instead of the tokenizer's.
    ``chat_template_kwargs``: what the template is told beside the chat, such as ``enable_thinking``; a row's own win.
    """

    turns: str = "all"
    include_stop_token: bool = True
    reasoning: bool = True
    stop_ids: tuple[int, ...] = ()
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_settings(self.chat_template_kwargs)
        if self.turns not in ("all", "last"):
            raise SpecGenError(f"turns={self.turns!r}: 'all' or 'last' answers of a chat can be supervised.")


class ChatReader:
    """Turn chats into token ids and the mask of what the target writes.

    Raises: ``SpecGenError`` for a tokenizer without a chat template, or without the tokens that ``options`` need.
    """

    def __init__(self, tokenizer: Any, options: ChatOptions) -> None:
        self.tokenizer = tokenizer
        self.options = options
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
        self,
        messages: Sequence[Message],
        first: int = 0,
        tools: list[Any] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> tuple[list[int], list[bool]]:
        """Return a chat's token ids and which of them answers are made of; answers before ``first`` are given.

        An answer without anything before it answers nothing: it is not supervised. ``settings``: this chat's own
        ``chat_template_kwargs``.

        Raises: ``SpecGenError`` when the template leaves it open where an answer stands.
        """
        chat = Chat(list(messages), tools, {**self.options.chat_template_kwargs, **(settings or {})})
        every = [i for i, message in enumerate(chat.messages) if message.get("role") == "assistant"]
        answers = [i for i in every if i >= max(first, 1)]
        if self.options.turns == "last":
            answers = answers[-1:]
        try:
            if self.marks_answers and answers == every:
                ids, runs = self._marked(chat, answers)
            else:
                ids, runs = self._rendered(chat, answers)
        except TemplateError as error:
            raise SpecGenError(
                f"the chat template refuses a chat of {', '.join(str(turn.get('role')) for turn in chat.messages[:8])}:"
                f" {error}. Leave such rows out, or give a chat_template that takes them."
            ) from error
        mask = [False] * len(ids)
        for run in runs:
            self._mark(ids, mask, run)
        return ids, mask

    def _marked(self, chat: Chat, answers: list[int]) -> tuple[list[int], list[_Run]]:
        """Let the template say where answers are; a header within its mark is not the target's to write."""
        found = render(
            self.tokenizer,
            chat,
            template=self.template,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        ids = list(found["input_ids"])
        mask = [bool(bit) for bit in found["assistant_masks"]]
        if answers and not any(mask):
            raise SpecGenError(
                "the chat template has {% generation %} and marks nothing in a chat with answers: it does not go "
                "around the answers, or the tokenizer tells no character offsets. Mend it, or leave the mark out."
            )
        borders = self._borders(chat, answers, ids)
        marked = list(_runs(mask))
        if not borders:
            whose = [chat.messages[at] for at in answers] if len(answers) == len(marked) else [None] * len(marked)
            return ids, [_Run(*run, len(ids), message) for run, message in zip(marked, whose, strict=True)]
        runs = []
        for start, stop in marked:
            own, at = next(
                ((run, at) for run, at in zip(borders, answers, strict=True) if run.end >= stop),
                (_Run(start, stop, len(ids), None), 0),
            )
            holds_header = start < own.start < stop and start >= len(self._tokens(self._render(chat, at)))
            runs.append(_Run(own.start if holds_header else start, stop, own.end, own.message))
        return ids, runs

    def _borders(self, chat: Chat, answers: list[int], ids: list[int]) -> list[_Run]:
        """Return where answers begin and their messages end, none where the template shows a part otherwise.

        Raises: ``SpecGenError`` where the tokenizer joins what the target reads with what it writes.
        """
        borders = []
        whole = self._render(chat)
        for at in answers:
            try:
                before = self._render(chat, at, asks=True)
                behind = self._render(chat, at + 1)
            except TemplateError:  # it wants whole chats only
                return []
            if not (whole.startswith(before) and whole.startswith(behind)):
                return []
            start = self._prefix(before, whole, ids, at)
            part = self._tokens(behind)
            if ids[: len(part)] != part:
                return []
            borders.append(_Run(start, len(part), len(part), chat.messages[at]))
        return borders

    def _rendered(self, chat: Chat, answers: list[int]) -> tuple[list[int], list[_Run]]:
        """Render up to each answer and behind it, and count tokens."""
        whole = self._render(chat)
        ids = self._tokens(whole)
        runs = []
        for at in answers:
            before = self._render(chat, at, asks=True)
            behind = self._render(chat, at + 1)
            start, stop = (self._prefix(text, whole, ids, at) for text in (before, behind))
            self._check_header(chat, at, before, whole[len(before) : len(behind)])
            runs.append(_Run(start, stop, stop, chat.messages[at]))
        return ids, runs

    def _render(self, chat: Chat, upto: int | None = None, asks: bool = False) -> str:
        part = Chat(chat.messages[:upto], chat.tools, chat.settings)
        return str(render(self.tokenizer, part, asks, self.template))

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

    def _check_header(self, chat: Chat, at: int, before: str, answer: str) -> None:
        """Refuse a template that ignores ``add_generation_prompt`` and writes a header: it would be supervised."""
        if before != self._render(chat, at):
            return
        content = chat.messages[at].get("content")
        if isinstance(content, str) and not answer.lstrip().startswith(content.strip()):
            raise SpecGenError(
                f"the chat template ignores add_generation_prompt and writes {answer[:40]!r} before answer {at}: what "
                "the target is given and what it writes cannot be told apart. Give a chat_template that does."
            )

    def _mark(self, ids: list[int], mask: list[bool], run: _Run) -> None:
        """Mark one answer, up to the token that ends it; what the template writes before or behind is nobody's.

        Where its message ends, a special token behind that begins the next.
        """
        start = run.start
        stop = run.stop
        last = next((i for i in range(stop - 1, start - 1, -1) if ids[i] in self._stops), None)
        if last is None and stop < run.end and ids[stop] in self._stops:
            last = stop
            stop = stop + 1
        if last is not None and not self.tokenizer.decode(ids[last + 1 : stop]).strip():
            stop = last + 1 if self.options.include_stop_token else last
        start = self._behind_no_thought(ids, start, stop, run.message)
        mask[start:stop] = [True] * (stop - start)
        if self._thinks is not None:
            _unmark_thinking(*self._thinks, ids, mask, start, stop)

    def _behind_no_thought(self, ids: list[int], start: int, stop: int, message: Message | None) -> int:
        """Return where an answer itself begins, behind the empty thought that a template writes where it has none.

        Raises: ``SpecGenError`` where the tokenizer joins the two.
        """
        text = str(self.tokenizer.decode(ids[start : min(stop, start + _LOOKED_AT)]))
        found = _NO_THOUGHT.match(text)
        content = str((message or {}).get("content") or "")
        if found is None or _NO_THOUGHT.match(content):  # the answer's own: the target wrote it
            return start
        blanks = text[found.end() : len(text) - len(text[found.end() :].lstrip())]
        own = content[: len(content) - len(content.lstrip())]
        border = found.end() + len(blanks) - (len(own) if blanks.endswith(own) and len(own) < len(blanks) else 0)
        shown = ""
        place = start
        while len(shown) < border:
            place += 1
            shown = str(self.tokenizer.decode(ids[start:place]))
        if shown != text[:border]:
            raise SpecGenError(
                f"the tokenizer joins the empty thought that the chat template adds with the answer ({shown[-20:]!r}): "
                "its tokens are not those that the target would write. Say what the template needs to leave it out "
                "(chat_template_kwargs), or tokenise the data yourself (input_ids and loss_mask)."
            )
        return place

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
    ids = list(ids[:limit])
    mask = list(mask[:limit])
    pieces = []
    at = 0
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
