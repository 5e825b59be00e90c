"""Timed runs: methods interleaved over prompts, repeats and warm-up, texts kept for comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_specgen.errors import SpecGenError
from hf_specgen.measure.compare import Divergence, find_divergence
from hf_specgen.measure.decode import Inputs, Output
from hf_specgen.measure.machine import Stopwatch, Timing
from hf_specgen.measure.methods import PLAIN, Decoding, DecodingMethod
from hf_specgen.measure.prompts import ChatPrompt, batches, category_of, encode, pad_left, pad_token
from hf_specgen.round.stats import AcceptanceStats

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Settings:
    """Hold how a measurement is made: ``repeats`` timed and ``warmup`` untimed runs of every method."""

    decoding: Decoding = field(default_factory=Decoding)
    batch_size: int = 1
    repeats: int = 3
    warmup: int = 1
    chat: bool = True
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Cell:
    """Hold what one method did on one batch: its text, and a time for every repeat."""

    rows: list[list[int]] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    stats: list[AcceptanceStats] = field(default_factory=list)
    stable: bool = True

    def add(self, output: Output, timing: Timing) -> None:
        """Keep a repeat; the text of the first one counts, later ones must agree to be called stable."""
        if not self.timings:
            self.rows = output.rows
        self.stable = self.stable and output.rows == self.rows
        self.timings.append(timing)
        if output.stats is not None:
            self.stats.append(output.stats)


@dataclass
class BatchResult:
    """Hold one batch of prompts: its cells by method name, and per method where each row leaves the plain text."""

    prompts: list[ChatPrompt]
    ids: list[list[int]]
    cells: dict[str, Cell]
    divergences: dict[str, list[Divergence | None]] = field(default_factory=dict)

    @property
    def category(self) -> str:
        """Return the category that all prompts of the batch share, or that they are of several."""
        return category_of(self.prompts)


def run_bench(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[ChatPrompt],
    methods: Sequence[DecodingMethod],
    settings: Settings,
    progress: Progress | None = None,
) -> list[BatchResult]:
    """Time every method on every batch of prompts, the methods taking turns, and compare the greedy texts.

    The first method must be ``plain``. The order of the methods moves on by one with each repeat and batch, so that
    none always runs first.

    Raises: SpecGenError when a method cannot do the batch size, or a prompt does not fit the target.
    """
    _check_methods(methods, settings.batch_size)
    work = _encode_all(model, tokenizer, prompts, settings)
    pad = pad_token(tokenizer)
    total = len(work) * settings.repeats * len(methods)
    done = 0
    _warm_up(model, work, pad, methods, settings)
    for number, batch in enumerate(work):
        inputs = pad_left(batch.ids, pad, model.device)
        for repeat in range(settings.repeats):
            shift = (number + repeat) % len(methods)
            for method in [*methods[shift:], *methods[:shift]]:
                output, timing = timed_run(method, model, inputs, settings.decoding, pad_token_id=pad)
                batch.cells[method.name].add(output, timing)
                done += 1
                if progress is not None:
                    progress(done, total, f"{batch.category}: {method.label}")
        # at once, not at the end: an interrupted run has then compared all it has timed
        if settings.decoding.greedy:
            compare_texts(model, batch)
    return work


def timed_run(
    method: DecodingMethod, model: Any, inputs: Inputs, decoding: Decoding, **extra: Any
) -> tuple[Output, Timing]:
    """Decode one batch with a method and time the whole call."""
    watch = Stopwatch(model.device)
    with watch:
        output = method.generate(model, inputs, decoding, **extra)
    return output, watch.timing


def compare_texts(model: Any, batch: BatchResult) -> None:
    """Fill in where each method's rows leave the plain ones, with the target's gap there."""
    plain = batch.cells[PLAIN].rows
    for name, cell in batch.cells.items():
        if name != PLAIN:
            rows = zip(batch.ids, plain, cell.rows, strict=True)
            batch.divergences[name] = [find_divergence(model, ids, left, right) for ids, left, right in rows]


def check_room(model: Any, length: int, new_tokens: int, name: str) -> None:
    """Refuse a prompt that does not fit the target's context with its answer.

    Raises: SpecGenError.
    """
    config = model.config.get_text_config().to_dict()
    sizes = [config[key] for key in ("max_position_embeddings", "n_positions") if config.get(key)]
    context = min(sizes, default=length + new_tokens)
    if length + new_tokens > context:
        raise SpecGenError(
            f"{name} has {length} tokens and {new_tokens} new ones are asked for, but the target's context is "
            f"{context}. Shorten the prompt or lower --max-new-tokens."
        )


def _check_methods(methods: Sequence[DecodingMethod], batch_size: int) -> None:
    if not methods or methods[0].name != PLAIN:
        raise SpecGenError("the first method of a measurement must be the plain one: everything is compared with it.")
    for method in methods:
        if method.max_rows is not None and batch_size > method.max_rows:
            raise SpecGenError(f"{method.label} decodes at most {method.max_rows} row, the batch size is {batch_size}.")


def _encode_all(model: Any, tokenizer: Any, prompts: Sequence[ChatPrompt], settings: Settings) -> list[BatchResult]:
    work = []
    for group in batches(prompts, settings.batch_size):
        ids = [encode(prompt, tokenizer, settings.chat, settings.chat_template_kwargs) for prompt in group]
        for prompt, row in zip(group, ids, strict=True):
            check_room(model, len(row), settings.decoding.max_new_tokens, f"prompt {prompt.question_id}")
        work.append(BatchResult(group, ids, {}))
    if not work:
        raise SpecGenError("there is no prompt to run. Raise --limit or choose other --categories.")
    return work


def _warm_up(
    model: Any, work: list[BatchResult], pad: int, methods: Sequence[DecodingMethod], settings: Settings
) -> None:
    for batch in work:
        batch.cells = {method.name: Cell() for method in methods}
    inputs: Inputs = pad_left(work[0].ids, pad, model.device)
    for _ in range(settings.warmup):
        for method in methods:
            method.generate(model, inputs, settings.decoding, pad_token_id=pad)
