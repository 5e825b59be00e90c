"""A tokenizer of single characters and chat templates of every kind, for tests of training data."""

from __future__ import annotations

import string

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

SPECIAL = [
    "<pad>",
    "<unk>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "[INST]",
    "[/INST]",
]
THINKS = ["<think>", "</think>"]

CHATML = (
    "{% for m in messages %}"
    "{% if loop.first and m.role != 'system' %}<|im_start|>system\nBe good.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# the answer's end of turn is inside the mark, the line break behind it too
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>\n{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# the end of turn is outside the mark
MARKED_SHORT = MARKED.replace("<|im_end|>\n{% endgeneration %}", "{% endgeneration %}<|im_end|>\n")
MARKED_WRONG = MARKED.replace("m.role == 'assistant'", "m.role == 'nobody'")
GEMMA = (
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# no header before the answer, and so nothing to ask for it
INSTRUCT = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}</s>"
    "{% endif %}{% endfor %}"
)
# reasoning of earlier answers is dropped
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\nhm\n</think>\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# a header before the answer, and add_generation_prompt is ignored
HEADSTRONG = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"

# no answer has an end, a header follows
ENDLESS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED_ENDLESS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}{% for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
).replace("{{ m.content }}", "{% if m.content is string %}{{ m.content }}{% endif %}")

# as Qwen3's: the last answer gets an empty thought where it has none, and may be asked for without thinking
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think>\n"
    "{{ m.content.split('</think>')[0].split('<think>')[-1].strip() ~ '\n' if '</think>' in m.content else '' }}\n"
    "</think>\n\n{{ m.content.split('</think>')[-1].lstrip('\n') }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# as SmolLM3's: the mark goes around the header too
MARKED_THINKING = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}<|im_start|>assistant\n<think>\n\n</think>\n"
    "{{ m.content }}<|im_end|>\n{% endgeneration %}{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

CHAT = [
    {"role": "user", "content": "hi you"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "go on"},
    {"role": "assistant", "content": "no, I rest"},
]


def characters(
    template: str | None = CHATML, merges: tuple[tuple[str, str], ...] = (), thinks: bool = True
) -> PreTrainedTokenizerFast:
    """Build a tokenizer of printable characters; ``merges`` joins some pairs of them."""
    words = [*SPECIAL, *string.printable, *(left + right for left, right in merges)]
    inner = Tokenizer(
        models.BPE({word: i for i, word in enumerate(dict.fromkeys(words))}, list(merges), unk_token="<unk>")
    )
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="</s>",
        additional_special_tokens=[*SPECIAL[3:], *(THINKS if thinks else [])],
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )
