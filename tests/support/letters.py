"""A tokenizer of letters."""

from __future__ import annotations

VOCAB = 40


class Letters:
    """A tokenizer of single letters, as far as the bench asks for one."""

    chat_template = None
    pad_token_id, eos_token_id = 0, None

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) % VOCAB for letter in text]}

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(token + 65) for token in tokens)
