"""What every command starts with: the models, the drafter, the way to decode, the prompts."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hf_specgen.chats import read_settings
from hf_specgen.cli.options import Dtype, Rule
from hf_specgen.errors import SpecGenError
from hf_specgen.measure.demo import load_target
from hf_specgen.measure.methods import (
    OURS,
    PLAIN_PREPACKED,
    Decoding,
    DecodingMethod,
    DrafterChoice,
    on_model,
    our_method,
    plain_method,
    prepacked_twin,
)
from hf_specgen.measure.prompts import ChatPrompt, own_prompts, read_prompts, select
from hf_specgen.measure.run import Progress as OnProgress
from hf_specgen.measure.task_prompts import task_prompts

FILE_WIDTH = 110


@dataclass(frozen=True)
class CommandSession:
    """Hold the loaded target with its tokenizer, and the drafter that the user chose."""

    name: str
    model: Any
    tokenizer: Any
    drafter: DrafterChoice

    def ours(self, num_tokens: int | None = None, name: str = OURS, label: str = "ours") -> DecodingMethod:
        """Build the method that decodes with the chosen drafter."""
        return our_method(self.drafter.make(num_tokens), name, label, self.drafter.rule, self.tokenizer)

    def prepacked(self) -> CommandSession:
        """Return a session over the same weights whose target and draft model are prepacked.

        Raises: SpecGenError where they cannot be.
        """
        return replace(self, model=prepacked_twin(self.model), drafter=self.drafter.prepacked())

    def bound(self, num_tokens: int | None = None, name: str = OURS, label: str = "ours prepacked") -> DecodingMethod:
        """Build the method that decodes on this session's own models, whatever model it is given."""
        return on_model(self.model, self.ours(num_tokens), name, label)

    def bound_plain(self) -> DecodingMethod:
        """Build the plain method of a prepacked session."""
        return on_model(self.model, plain_method(), PLAIN_PREPACKED, "plain prepacked")

    def describe(self) -> dict[str, Any]:
        """Return what a report must say about the target and the drafter."""
        model = self.model
        return {
            "target": {
                "name": self.name,
                "loaded_from": model.name_or_path,
                "architecture": type(model).__name__,
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "dtype": str(model.dtype).removeprefix("torch."),
                "device": model.device.type,
            },
            "drafter": {"name": self.drafter.spec, "rule": self.drafter.rule, "sampled": self.drafter.sample},
        }


@dataclass(frozen=True)
class PromptFlags:
    """Hold the flags that say where prompts come from: a file, or made-up tasks without the first ``skip``."""

    file: Path | None = None
    tasks: int | None = None
    seed: int = 0
    skip: int = 0


@dataclass(frozen=True)
class ModelFlags:
    """Hold the flags that say what is loaded."""

    target: str
    drafter: str
    rule: Rule
    sample_drafts: bool
    dtype: Dtype
    device: str
    threads: int | None


def out() -> Console:
    """Return the console for results."""
    width = None if sys.stdout.isatty() else FILE_WIDTH
    return Console(file=sys.stdout, highlight=False, markup=False, width=width)


def note(text: str) -> None:
    """Print a line of notes."""
    err().print(text, soft_wrap=True)


def err() -> Console:
    """Return the console for notes and progress, kept apart from results."""
    return Console(file=sys.stderr, highlight=False, markup=False)


def open_session(flags: ModelFlags) -> CommandSession:
    """Load target and drafter.

    Raises: SpecGenError when one cannot be loaded or does not exist.
    """
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if flags.threads is not None:
        torch.set_num_threads(flags.threads)
    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    dtype = kinds.get(flags.dtype.value)

    def load(name: str) -> tuple[Any, Any]:
        return load_target(name, dtype, flags.device, note)

    choice = DrafterChoice.parse(flags.drafter, load, flags.sample_drafts, flags.rule.value)
    model, tokenizer = load(flags.target)
    return CommandSession(flags.target, model, tokenizer, choice.fitted(model))


def read_decoding(
    max_new_tokens: int, temperature: float | None, top_k: int | None, top_p: float | None, seed: int | None
) -> Decoding:
    """Turn the sampling flags into one way to decode; ``top_k`` or ``top_p`` alone sample at temperature 1.

    Raises: SpecGenError for flags that would do nothing.
    """
    if temperature is None and (top_k is not None or top_p is not None):
        temperature = 1.0
    if top_p is not None and top_p <= 0.0:
        raise SpecGenError("--top-p 0 keeps no token. Give a number above 0, or leave it out for greedy decoding.")
    unused = [name for name, value in (("--top-k", top_k), ("--top-p", top_p), ("--seed", seed)) if value is not None]
    if not temperature and unused:
        raise SpecGenError(
            f"{unused[0]} has no effect on greedy decoding. Give --temperature above 0, or leave it out."
        )
    if seed is None:
        seed = random.SystemRandom().randrange(2**31) if temperature else 0
    return Decoding(max_new_tokens, temperature, top_k, top_p, seed)


def template_settings(text: str | None, chat: bool) -> dict[str, Any]:
    """Read --chat-template-kwargs. Raises: SpecGenError for what is no JSON object, and where no template is used."""
    found = read_settings(text, "--chat-template-kwargs")
    if found and not chat:
        raise SpecGenError("--chat-template-kwargs has no effect with --no-chat. Leave one of them out.")
    return found


def require_sampling(decoding: Decoding, flags: ModelFlags) -> None:
    """Refuse flags that only matter when tokens are sampled.

    Raises: SpecGenError.
    """
    if not decoding.greedy:
        return
    asked = (("--sample-drafts", flags.sample_drafts), ("--rule", flags.rule in (Rule.block, Rule.gumbel)))
    named = [name for name, given in asked if given]
    if named:
        raise SpecGenError(f"{named[0]} has no effect on greedy decoding. Give --temperature above 0, or leave it out.")


def choose_prompts(source: PromptFlags, categories: str | None, limit: int | None) -> list[ChatPrompt]:
    """Read or make the prompts (without any flag: the project's own) and keep what the flags ask for.

    Raises: SpecGenError for flags that contradict each other.
    """
    if source.tasks is None and (source.seed or source.skip):
        raise SpecGenError("--task-seed and --task-skip choose among --task-prompts: give that too, or leave them out.")
    if source.file is not None and source.tasks is not None:
        raise SpecGenError("--prompts and --task-prompts were given: one of them is required.")
    if source.tasks is not None:
        prompts = task_prompts(source.skip + source.tasks, source.seed)[source.skip :]
    else:
        prompts = own_prompts() if source.file is None else read_prompts(source.file)
    names = [name.strip() for name in (categories or "").split(",") if name.strip()]
    return select(prompts, names, limit)


@contextmanager
def progress_bar(title: str) -> Iterator[OnProgress]:
    """Show a bar on stderr; yields the callback that moves it."""
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=err(), transient=True) as bar:
        task = bar.add_task("", total=None)

        def move(done: int, total: int, label: str) -> None:
            bar.update(task, completed=done, total=total, description=label)

        yield move
