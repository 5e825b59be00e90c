"""Report: the drafter learns `<think>\\n\\n</think>\\n\\n`, which Qwen3's template writes and the target never does."""

from __future__ import annotations

import pytest
from support_text import CHAT, CHATML, MARKED_THINKING, THINKING, characters

from hf_specgen.errors import SpecGenError
from hf_specgen.trainers.masks import ChatOptions, ChatReader, preview


def supervised(template: str, chat: list, merges: tuple = (), **options: object) -> list[str]:
    tokenizer = characters(template, merges)
    ids, mask = ChatReader(tokenizer, ChatOptions(**options)).read(chat)
    shown = preview(ids, mask, tokenizer, len(ids))
    assert shown.replace("⟦", "").replace("⟧", "") == tokenizer.decode(ids)
    return [piece.split("⟧")[0] for piece in shown.split("⟦")[1:]]


def answering(content: str) -> list[dict]:
    return [CHAT[0], {"role": "assistant", "content": content}]


def test_what_the_template_adds_is_not_supervised() -> None:
    assert supervised(THINKING, answering("hello")) == ["hello<|im_end|>"]
    assert supervised(THINKING, answering(" hello")) == [" hello<|im_end|>"]
    assert supervised(THINKING, CHAT, turns="last") == ["no, I rest<|im_end|>"]
    assert supervised(THINKING, answering(""), reasoning=False) == ["<|im_end|>"]


def test_an_answers_own_thought_is() -> None:
    assert supervised(THINKING, answering("<think>\nhm\n</think>\n\nhello")) == [
        "<think>\nhm\n\n</think>\n\nhello<|im_end|>"
    ]
    own = "<think>\n\n</think>\n\nhello"  # the target wrote it: a text of its own
    assert supervised(CHATML, answering(own)) == [f"{own}<|im_end|>"]


@pytest.mark.parametrize(
    "block", ["<think></think>", "\n<think></think>\n", "<seed:think>\n</seed:think>", "[THINK][/THINK]"]
)
def test_other_spellings(block: str) -> None:
    added = CHATML.replace(
        "{{ m.content }}", f"{{% if m.role == 'assistant' %}}{block}{{% endif %}}{{{{ m.content }}}}"
    )
    assert supervised(added, CHAT) == ["hello<|im_end|>", "no, I rest<|im_end|>"]


def test_a_mark_around_header_and_thought() -> None:
    assert supervised(MARKED_THINKING, CHAT) == ["hello<|im_end|>", "no, I rest<|im_end|>"]
    whole = "{% if messages | length < 4 %}{{ raise_exception('whole chats') }}{% endif %}" + MARKED_THINKING
    inner = whole.replace("{% generation %}<|im_start|>assistant\n", "<|im_start|>assistant\n{% generation %}")
    assert supervised(inner, CHAT) == ["hello<|im_end|>", "no, I rest<|im_end|>"]


def test_a_token_across_the_border_is_refused() -> None:
    assert supervised(THINKING, answering("hello"), (("h", "e"),)) == ["hello<|im_end|>"]
    with pytest.raises(SpecGenError, match="joins the empty thought that the chat template adds"):
        supervised(THINKING, answering("hello"), (("\n", "h"),))


def test_asked_without_thinking_it_belongs_to_the_prompt() -> None:
    kwargs = {"enable_thinking": False}
    assert supervised(THINKING, answering("hello"), chat_template_kwargs=kwargs) == ["hello<|im_end|>"]
    tokenizer = characters(THINKING)
    ids, mask = ChatReader(tokenizer, ChatOptions(chat_template_kwargs=kwargs)).read(answering("hello"))
    asked = tokenizer.apply_chat_template(CHAT[:1], tokenize=False, add_generation_prompt=True, enable_thinking=False)
    assert tokenizer.decode(ids[: mask.index(True)]) == asked and asked.endswith("</think>\n\n")
