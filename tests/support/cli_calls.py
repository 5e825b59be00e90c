"""Call the program hf-specgen in this process, on targets saved in a temporary folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from hf_specgen.cli import main

WORDS = (
    "<pad> </s> <unk> user assistant the a cat dog sat on mat ran to red big and saw it was in of so we go up".split()
)


TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)


PROMPT = "the cat sat on the mat and the cat sat on"


def save(folder: Path, seed: int, layers: int, words: list[str] = WORDS, template: str | None = TEMPLATE) -> str:
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", chat_template=template
    )
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    tokenizer.save_pretrained(folder)
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("target"), seed=0, layers=2)


def call(*arguments: str, given: str | None = None) -> Result:
    return CliRunner().invoke(main.app, list(arguments), input=given)


def fine(*arguments: str, given: str | None = None) -> Result:
    result = call(*arguments, given=given)
    assert result.exit_code == 0, result.output
    return result


def refused(*arguments: str) -> str:
    """Return the one message of a call that must end with exit code 2."""
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.output
    return result.stderr
