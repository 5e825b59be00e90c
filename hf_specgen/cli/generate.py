"""``hf-specgen generate``: write text, or write it twice and compare."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_specgen.cli import options
from hf_specgen.cli.options import Dtype, Rule
from hf_specgen.errors import SpecGenError

Text = Annotated[str | None, typer.Argument(metavar="[PROMPT]", help="What to continue or answer.", show_default=False)]
File = Annotated[
    Path | None,
    typer.Option(
        "--file", help="A .jsonl or .json (records: prompt, turns, messages) or text file (a prompt a paragraph)."
    ),
]
Chat = Annotated[bool, typer.Option("--chat", help="Talk: one message a line, the conversation is kept. End: /exit.")]
Compare = Annotated[bool, typer.Option("--compare", help="Print plain and speculative text side by side, with times.")]
Batch = Annotated[int, typer.Option("--batch", min=1, help="Prompts of --file that are decoded together.")]


def generate(  # noqa: PLR0913 - one parameter a flag
    prompt: Text = None,
    file: File = None,
    chat: Chat = False,
    compare: Compare = False,
    target: options.Target = "demo",
    drafter: options.DrafterName = "prompt-lookup",
    num_tokens: options.NumTokens = None,
    max_new_tokens: options.MaxNewTokens = 256,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    seed: options.Seed = None,
    batch: Batch = 1,
    rule: options.RuleName = Rule.rejection,
    sample_drafts: options.SampleDrafts = False,
    no_chat: options.NoChat = False,
    chat_template_kwargs: options.TemplateSettings = None,
    dtype: options.DtypeName = Dtype.auto,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    prepack: options.Prepack = False,
) -> None:
    """Write text with speculative decoding. Text goes to stdout, everything else to stderr."""
    from hf_specgen.cli.session import (
        ModelFlags,
        note,
        open_session,
        read_decoding,
        require_sampling,
        template_settings,
    )
    from hf_specgen.cli.writing import Writer
    from hf_specgen.measure.prompts import ChatPrompt, read_prompts

    _check_source(prompt, file, chat, compare, batch, no_chat)
    template = template_settings(chat_template_kwargs, not no_chat)
    flags = ModelFlags(target, drafter, rule, sample_drafts, dtype, device, threads)
    decoding = read_decoding(max_new_tokens, temperature, top_k, top_p, seed)
    require_sampling(decoding, flags)
    if num_tokens is not None and drafter == "none":
        raise SpecGenError("--num-tokens has no effect with --drafter none. Leave one of them out.")
    prompts = [ChatPrompt.user(prompt)] if prompt is not None else [] if file is None else read_prompts(file)
    session = open_session(flags)
    if prepack:
        session = session.prepacked()
        note("Weights are prepacked, for plain and speculative texts alike.")
    writer = Writer(session, decoding, num_tokens, not no_chat, template)
    if chat:
        writer.talk()
    elif compare:
        writer.compare(prompts, batch)
    else:
        writer.write(prompts, batch)


def _check_source(prompt: str | None, file: Path | None, chat: bool, compare: bool, batch: int, no_chat: bool) -> None:
    if (prompt is not None) + (file is not None) + chat != 1:
        raise SpecGenError("exactly one of PROMPT, --file and --chat is required.")
    if prompt is not None and not prompt.strip():
        raise SpecGenError("the prompt is empty. Give some text.")
    if batch > 1 and file is None:
        raise SpecGenError("--batch decodes several prompts of a --file together. Give --file, or leave --batch out.")
    if chat and (compare or no_chat):
        other = "--compare" if compare else "--no-chat"
        raise SpecGenError(f"--chat does not go with {other}. Leave one of them out.")
