"""Which tokens of a chat are supervised: exact for every kind of template, or refused."""

from __future__ import annotations

import pytest
from support_text import (
    CHAT,
    CHATML,
    ENDLESS,
    FORGETFUL,
    GEMMA,
    HEADSTRONG,
    INSTRUCT,
    MARKED,
    MARKED_ENDLESS,
    MARKED_SHORT,
    MARKED_WRONG,
    characters,
)

from hf_specgen.errors import SpecGenError
from hf_specgen.trainers.masks import ChatOptions, ChatReader, preview


def supervised(template: str, chat: list = CHAT, tokenizer=None, **options: object) -> list[str]:
    """Return the supervised pieces of a chat as text."""
    tokenizer = tokenizer or characters(template)
    ids, mask = ChatReader(tokenizer, ChatOptions(**options)).read(chat)
    assert len(ids) == len(mask)
    shown = preview(ids, mask, tokenizer, limit=len(ids))
    assert shown.replace("⟦", "").replace("⟧", "") == tokenizer.apply_chat_template(chat, tokenize=False)
    return [piece.split("⟧")[0] for piece in shown.split("⟦")[1:]]


@pytest.mark.parametrize(
    ("template", "answers"),
    [
        (CHATML, ["hello<|im_end|>", "no, I rest<|im_end|>"]),
        (MARKED, ["hello<|im_end|>", "no, I rest<|im_end|>"]),
        (MARKED_SHORT, ["hello<|im_end|>", "no, I rest<|im_end|>"]),
        (GEMMA, ["hello<end_of_turn>", "no, I rest<end_of_turn>"]),
        (INSTRUCT, [" hello</s>", " no, I rest</s>"]),
    ],
    ids=["chatml", "marked", "marked-short", "gemma", "instruct"],
)
def test_answers_and_their_ends_are_supervised(template: str, answers: list[str]) -> None:
    assert supervised(template) == answers
    assert supervised(template, turns="last") == answers[-1:]
    bare = [answer.removesuffix("<|im_end|>").removesuffix("<end_of_turn>").removesuffix("</s>") for answer in answers]
    assert supervised(template, include_stop_token=False) == bare


def test_what_is_supervised_is_what_the_target_would_write() -> None:
    """The tokens before an answer are those of the prompt alone: what the target reads when it decodes."""
    tokenizer = characters(CHATML)
    ids, mask = ChatReader(tokenizer, ChatOptions(turns="last")).read(CHAT)
    prompt = tokenizer.apply_chat_template(CHAT[:-1], tokenize=False, add_generation_prompt=True)
    start = mask.index(True)
    assert ids[:start] == tokenizer(prompt, add_special_tokens=False)["input_ids"]


def test_given_answers_are_not_supervised() -> None:
    tokenizer = characters(CHATML)
    ids, mask = ChatReader(tokenizer, ChatOptions()).read(CHAT, first=3)
    assert tokenizer.decode([token for token, bit in zip(ids, mask, strict=True) if bit]) == "no, I rest<|im_end|>"
    marked = characters(MARKED)
    ids, mask = ChatReader(marked, ChatOptions()).read(CHAT, first=3)
    assert marked.decode([token for token, bit in zip(ids, mask, strict=True) if bit]) == "no, I rest<|im_end|>"


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["chatml", "marked"])
def test_an_answer_to_nothing_is_not_supervised(template: str) -> None:
    assert supervised(template, CHAT[1:]) == ["no, I rest<|im_end|>"]


def test_reasoning_may_be_left_out() -> None:
    chat = [CHAT[0], {"role": "assistant", "content": "<think>\nhm\n</think>hello"}]
    assert supervised(CHATML, chat) == ["<think>\nhm\n</think>hello<|im_end|>"]
    assert supervised(CHATML, chat, reasoning=False) == ["hello<|im_end|>"]
    opened = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")
    tail = [CHAT[0], {"role": "assistant", "content": "<think>hm</think>hello"}]
    assert supervised(opened, tail) == ["hm</think>hello<|im_end|>"]
    assert supervised(opened, tail, reasoning=False) == ["hello<|im_end|>"]
    with pytest.raises(SpecGenError, match="no tokens <think>"):
        supervised(CHATML, chat, characters(CHATML, thinks=False), reasoning=False)


def test_a_template_that_forgets_is_refused_but_for_the_last_answer() -> None:
    with pytest.raises(SpecGenError, match=r"differently when others follow.*turns='last'"):
        supervised(FORGETFUL)
    assert supervised(FORGETFUL, turns="last") == ["<think>\nhm\n</think>\nno, I rest<|im_end|>"]


def test_a_header_that_cannot_be_told_from_the_answer_is_refused() -> None:
    with pytest.raises(SpecGenError, match="ignores add_generation_prompt and writes"):
        supervised(HEADSTRONG)


def test_a_token_across_the_border_is_refused() -> None:
    assert supervised(CHATML, CHAT[:2], characters(CHATML, merges=(("h", "e"),))) == ["hello<|im_end|>"]
    with pytest.raises(SpecGenError, match="joins the text before and behind a border of answer 1"):
        supervised(CHATML, CHAT[:2], characters(CHATML, merges=(("\n", "h"),)))
    for template in (MARKED, MARKED_SHORT):  # the mark of a character is its token's
        assert supervised(template, CHAT[:2], characters(template, merges=(("h", "e"),))) == ["hello<|im_end|>"]
        with pytest.raises(SpecGenError, match="joins the text before and behind a border of answer 1"):
            supervised(template, CHAT[:2], characters(template, merges=(("\n", "h"),)))


@pytest.mark.parametrize("template", [ENDLESS, MARKED_ENDLESS], ids=["rendered", "marked"])
def test_the_next_header_ends_no_answer(template: str) -> None:
    """It is a special token, and the template writes it, not the target."""
    assert supervised(template) == ["hello", "no, I rest"]


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["rendered", "marked"])
def test_what_a_template_refuses_is_told(template: str) -> None:
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + template
    assert len(supervised(strict)) == 2
    with pytest.raises(SpecGenError, match=r"refuses a chat of system, user, .*no system here"):
        supervised(strict, [{"role": "system", "content": "s"}, *CHAT])


def test_a_marked_template_need_not_render_parts_of_a_chat() -> None:
    """Marks are enough where earlier messages look otherwise when others follow, or a part is refused."""
    forgetful = MARKED.replace(
        "{{ m.content }}<|im_end|>\n{% endgen", "{{ loop.length }}{{ m.content }}<|im_end|>{% endgen"
    )
    assert supervised(forgetful) == ["4hello<|im_end|>", "4no, I rest<|im_end|>"]
    whole = "{% if messages | length < 4 %}{{ raise_exception('whole chats') }}{% endif %}" + MARKED
    assert supervised(whole) == ["hello<|im_end|>", "no, I rest<|im_end|>"]


def test_a_mark_that_finds_nothing_is_refused() -> None:
    with pytest.raises(SpecGenError, match="marks nothing in a chat with answers"):
        supervised(MARKED_WRONG)


def test_another_template_may_be_given() -> None:
    tokenizer = characters(FORGETFUL)
    ids, mask = ChatReader(tokenizer, ChatOptions(chat_template=MARKED)).read(CHAT)
    assert preview(ids, mask, tokenizer, len(ids)).count("⟦") == 2


def test_what_cannot_be_read_is_refused() -> None:
    with pytest.raises(SpecGenError, match="no single chat template"):
        ChatReader(characters(None), ChatOptions())
    with pytest.raises(SpecGenError, match="'all' or 'last'"):
        ChatOptions(turns="first")
