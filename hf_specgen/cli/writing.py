"""Write the texts of ``hf-specgen generate``: streamed, from a file, as a conversation, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import typer
from rich.columns import Columns
from rich.panel import Panel
from rich.text import Text

from hf_specgen.cli.session import CommandSession, note, out
from hf_specgen.errors import SpecGenError, reason_of
from hf_specgen.measure.compare import Divergence, find_divergence, ratio_words
from hf_specgen.measure.decode import Output
from hf_specgen.measure.machine import Timing
from hf_specgen.measure.methods import Decoding, DecodingMethod, our_method, plain_method
from hf_specgen.measure.prompts import ChatPrompt, encode, pad_left, pad_token
from hf_specgen.measure.run import check_room, timed_run

WARM_UP_TOKENS = 8


@dataclass
class TextStream:
    """Turn tokens into text as they come; a character whose bytes are incomplete waits for the rest."""

    tokenizer: Any
    tokens: list[int] = field(default_factory=list)
    shown: str = ""

    def add(self, tokens: Sequence[int]) -> str:
        """Return the text that became certain with ``tokens``."""
        self.tokens.extend(tokens)
        text = str(self.tokenizer.decode(self.tokens, skip_special_tokens=True))
        return self._advance(text) if not text.endswith("\ufffd") else ""

    def finish(self) -> str:
        """Return what is left, certain or not."""
        return self._advance(str(self.tokenizer.decode(self.tokens, skip_special_tokens=True)))

    def _advance(self, text: str) -> str:
        fresh = text[len(self.shown) :]
        self.shown = text
        return fresh


@dataclass(frozen=True)
class Writer:
    """Write texts with one session and one way to decode."""

    session: CommandSession
    decoding: Decoding
    num_tokens: int | None
    chat_template: bool
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def method(self) -> DecodingMethod:
        """Return our method, with a drafter that knows nothing of earlier texts."""
        return self.session.ours(self.num_tokens)

    def write(self, prompts: Sequence[ChatPrompt], batch: int) -> None:
        """Write the answer to every prompt; single rows are streamed, rows of a batch follow when all are done."""
        for start in range(0, len(prompts), batch):
            group = prompts[start : start + batch]
            if len(prompts) > 1 and len(group) == 1:
                typer.echo(self._heading(group[0]))
            output, timing = self._run(self.method, self._encode(group), stream=len(group) == 1)
            if len(group) > 1:
                for prompt, row in zip(group, output.rows, strict=True):
                    typer.echo(f"{self._heading(prompt)}\n{self._decode(row)}")
            self._note(output, timing)

    def talk(self) -> None:
        """Answer line after line until the input ends or says /exit.

        Raises: SpecGenError when the tokenizer has no chat template.
        """
        if not self.session.tokenizer.chat_template:
            raise SpecGenError(f"--chat needs a chat template, {self.session.name} has none. Give a PROMPT instead.")
        history: list[dict[str, str]] = []
        while True:
            try:
                line = input("> ").strip()
            except EOFError:
                return
            except UnicodeDecodeError as error:
                raise SpecGenError(f"a line is no text: {reason_of(error)}. UTF-8 is required.") from None
            if line == "/exit":
                return
            if not line:
                continue
            history.append({"role": "user", "content": line})
            output, timing = self._run(self.method, self._encode([ChatPrompt(tuple(history))]), stream=True)
            history.append({"role": "assistant", "content": self._decode(output.rows[0])})
            self._note(output, timing)

    def compare(self, prompts: Sequence[ChatPrompt], batch: int) -> None:
        """Write every text twice and print both side by side, with the first divergence and the ratio of times.

        Greedy texts are compared with plain ``generate()``; sampled ones with our loop without a drafter at the same
        seed, because transformers draws other random numbers.
        """
        plain = plain_method() if self.decoding.greedy else our_method(None, tokenizer=self.session.tokenizer)
        ours = self.method
        for start in range(0, len(prompts), batch):
            group = prompts[start : start + batch]
            ids = self._encode(group)
            if start == 0:
                short = replace(self, decoding=replace(self.decoding, max_new_tokens=WARM_UP_TOKENS))
                for method in (plain, ours):
                    short._run(method, ids)
            left, left_time = self._run(plain, ids)
            right, right_time = self._run(ours, ids)
            for prompt, row, undrafted, drafted in zip(group, ids, left.rows, right.rows, strict=True):
                if len(prompts) > 1:
                    out().print(self._heading(prompt))
                self._show_pair(row, undrafted, drafted)
            out().print(self._times(left, left_time, right, right_time), soft_wrap=True)

    def _encode(self, prompts: Sequence[ChatPrompt]) -> list[list[int]]:
        given = self.chat_template, self.chat_template_kwargs
        rows = [encode(prompt, self.session.tokenizer, *given) for prompt in prompts]
        for row in rows:
            check_room(self.session.model, len(row), self.decoding.max_new_tokens, "the prompt")
        return rows

    def _run(self, method: DecodingMethod, ids: list[list[int]], stream: bool = False) -> tuple[Output, Timing]:
        pad = pad_token(self.session.tokenizer)
        inputs = pad_left(ids, pad, self.session.model.device)
        text = TextStream(self.session.tokenizer)

        def show(row: int, tokens: Sequence[int]) -> None:
            typer.echo(text.add(tokens), nl=False)

        extra = {"on_tokens": show} if stream else {}
        output, timing = timed_run(method, self.session.model, inputs, self.decoding, pad_token_id=pad, **extra)
        if stream:
            typer.echo(text.finish())
        return output, timing

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self.session.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def _heading(self, prompt: ChatPrompt) -> str:
        return f"=== {prompt.question_id} ==="

    def _note(self, output: Output, timing: Timing) -> None:
        tokens = sum(map(len, output.rows))
        line = f"[{tokens} tokens in {timing.wall:.2f} s, {tokens / timing.wall:.1f} tokens/s"
        if output.stats is not None and output.stats.num_drafts:
            stats = output.stats
            line += f", {stats.tokens_per_round:.2f} per round, acceptance length {stats.mean_acceptance_length:.2f}"
        seed = "" if self.decoding.greedy else f", --seed {self.decoding.seed}"
        note(f"{line}{seed}]")

    def _show_pair(self, ids: list[int], plain: list[int], ours: list[int]) -> None:
        model = self.session.model
        divergence = find_divergence(model, ids, plain, ours)
        position = len(plain) if divergence is None else divergence.position
        width = max(24, (out().width - 2) // 2)
        title = "plain" if self.decoding.greedy else "no drafter, same seed"
        panels = [
            Panel(self._marked(tokens, position), title=name, width=width)
            for name, tokens in ((title, plain), ("speculative", ours))
        ]
        out().print(Columns(panels, padding=(0, 0)))
        out().print(self._verdict(divergence), soft_wrap=True)

    def _marked(self, tokens: list[int], position: int) -> Text:
        same = self._decode(tokens[:position])
        return Text(same).append(self._decode(tokens)[len(same) :], style="bold yellow")

    def _verdict(self, divergence: Divergence | None) -> str:
        if divergence is None:
            return "identical"
        plain, other = divergence.words(self.session.tokenizer)
        where = f"first divergence at token {divergence.position}: {plain} or {other}"
        gap = f", logit gap {divergence.gap:.4f} between the target's two best" if self.decoding.greedy else ""
        return where + gap

    def _times(self, left: Output, left_time: Timing, right: Output, right_time: Timing) -> str:
        counts = [sum(map(len, output.rows)) for output in (left, right)]
        ratio = ratio_words(left_time.wall / right_time.wall)
        line = f"plain {left_time.wall:.2f} s, speculative {right_time.wall:.2f} s: {ratio}"
        if counts[0] != counts[1]:
            line += f" ({counts[0]} and {counts[1]} tokens)"
        if right.stats is not None:
            line += f"; acceptance length {right.stats.mean_acceptance_length:.2f}"
        return line
