"""``hf-specgen regenerate``: the target's own answers, to train a drafter on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_specgen.cli import options
from hf_specgen.cli.options import Dtype, Rule
from hf_specgen.errors import SpecGenError, reason_of

if TYPE_CHECKING:
    from hf_specgen.measure.prompts import ChatPrompt
    from hf_specgen.trainers.regenerate import AnswerSource, Author, Question, RegenerationReport, Sampling

Out = Annotated[Path, typer.Option("--out", help="The .jsonl or .parquet file that is written.", show_default=False)]
Data = Annotated[
    str | None,
    typer.Option(
        "--data", help="Answer the questions of a data set: a file, a folder, or an id on the Hub (messages, prompt)."
    ),
]
Split = Annotated[str, typer.Option(help="The split of --data.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Prompts that are answered together.")]
Prepack = Annotated[
    bool, typer.Option("--prepack", help="Lay the weights out for oneDNN first: faster on a CPU, twice the memory.")
]
Vllm = Annotated[bool, typer.Option("--vllm", help="Answer with an installed vLLM, on GPUs.")]
VllmSettings = Annotated[
    str | None,
    typer.Option(
        "--vllm-settings", help="With --vllm: arguments of vllm.LLM as JSON, such as '{\"tensor_parallel_size\": 2}'."
    ),
]
Restart = Annotated[bool, typer.Option("--restart", help="Throw away what the file holds and start anew.")]


def regenerate(  # noqa: PLR0913 - one parameter a flag
    out: Out,
    target: options.Target = "demo",
    prompts: options.PromptFile = None,
    task_prompts: options.TaskPrompts = None,
    task_seed: options.TaskSeed = 0,
    data: Data = None,
    split: Split = "train",
    limit: options.Limit = None,
    drafter: options.DrafterName = "prompt-lookup",
    batch_size: BatchSize = 32,
    max_new_tokens: options.MaxNewTokens = 256,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    seed: options.Seed = None,
    no_chat: options.NoChat = False,
    chat_template_kwargs: options.TemplateSettings = None,
    strict: options.Strict = False,
    dtype: options.DtypeName = Dtype.auto,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    prepack: Prepack = False,
    vllm: Vllm = False,
    vllm_settings: VllmSettings = None,
    restart: Restart = False,
) -> None:
    """Let the target answer prompts, in batches and with speculative decoding, and keep its token ids.

    Interrupted, the same command goes on where it stopped. `hf-specgen train --data FILE` reads the file.
    """
    from hf_specgen.cli.session import ModelFlags, open_session, read_decoding, template_settings
    from hf_specgen.trainers import regenerate as work

    if out.suffix not in (".jsonl", ".parquet"):
        raise SpecGenError(f"--out {out}: a name that ends with .jsonl or .parquet is required.")
    decoding = read_decoding(max_new_tokens, temperature, top_k, top_p, (seed or 0) if temperature else seed)
    sampling = work.Sampling(max_new_tokens, temperature or 0.0, top_k or 0, top_p or 1.0, decoding.seed)
    template = template_settings(chat_template_kwargs, not no_chat)
    theirs = _vllm_settings(vllm_settings, vllm)
    chosen = _prompts(prompts, task_prompts, task_seed, data, split, limit, strict)
    session = open_session(ModelFlags(target, drafter, Rule.rejection, False, dtype, device, threads))
    reading = PromptReading(not no_chat, template, skips=data is not None and not strict)
    questions = _questions(chosen, session, reading, max_new_tokens)
    rows = out.with_suffix(".jsonl")
    if restart:
        work.forget(rows)
    if vllm:
        longest = max((len(question.ids) for question in questions), default=0)
        author, notes = _vllm(session, sampling, longest + max_new_tokens, theirs)
    else:
        author, notes = _author(session, sampling, prepack)
    source = _source(session, sampling, reading, notes)
    report = _write(questions, rows, author, source, batch_size, session.tokenizer)
    if out != rows:
        work.write_parquet(rows, out)
    _tell(report, out, author)


def _prompts(
    file: Path | None, tasks: int | None, task_seed: int, data: str | None, split: str, limit: int | None, strict: bool
) -> list[ChatPrompt]:
    from hf_specgen.measure.prompts import ChatPrompt, read_prompts, select
    from hf_specgen.measure.task_prompts import task_prompts

    if (file is not None) + (tasks is not None) + (data is not None) != 1:
        raise SpecGenError("exactly one of --prompts, --task-prompts and --data is required.")
    if data is not None:
        from hf_specgen.trainers.data import load_data
        from hf_specgen.trainers.regenerate import chat_prompts

        found = chat_prompts(load_data(data, split, streaming=limit is not None), limit, strict)
        return [
            ChatPrompt(tuple(chat.messages), question_id=str(i), tools=chat.tools, settings=chat.settings)
            for i, chat in enumerate(found, 1)
        ]
    return select(read_prompts(file) if file is not None else task_prompts(tasks or 0, task_seed), limit=limit)


@dataclass(frozen=True)
class PromptReading:
    """Hold how prompts become tokens: through the chat template (``settings``: what it is told) or as they are, and
    whether those that do not fit are left out.
    """

    chat: bool
    settings: dict[str, Any]
    skips: bool


def _questions(prompts: list[ChatPrompt], session: Any, reading: PromptReading, new_tokens: int) -> list[Question]:
    """Encode prompts; before anything is written those that do not fit are refused, or left out."""
    from hf_specgen.cli.session import note
    from hf_specgen.measure.prompts import encode
    from hf_specgen.measure.run import check_room
    from hf_specgen.trainers.regenerate import Question

    questions = []
    refused = ""
    for prompt in prompts:
        try:
            ids = encode(prompt, session.tokenizer, reading.chat, reading.settings)
            check_room(session.model, len(ids), new_tokens, f"prompt {prompt.question_id}")
        except SpecGenError as error:
            if not reading.skips:
                raise
            refused = refused or str(error)
            continue
        questions.append(Question(tuple(ids), prompt.category, prompt.question_id))
    if refused and not questions:
        raise SpecGenError(f"none of {len(prompts)} prompts can be answered. The first: {refused}")
    if refused:
        note(f"{len(prompts) - len(questions)} of {len(prompts)} prompts are left out. The first: {refused}")
    return questions


def _author(session: Any, sampling: Sampling, prepack: bool) -> tuple[Author, dict[str, Any]]:
    """Return the target in this process, and what is noted of it."""
    from hf_specgen.measure.prompts import pad_token
    from hf_specgen.models.prepack import prepack as prepacked
    from hf_specgen.trainers import regenerate as work

    if prepack:
        prepacked(session.model)
    author = work.TargetAuthor(session.model, sampling, session.drafter.make(), pad_token(session.tokenizer))
    # what else shapes the answers: a repetition penalty, for one
    config = json.loads(session.model.generation_config.to_json_string())
    return author, {"dtype": _format(session), "generation_config": config}


def _vllm_settings(text: str | None, vllm: bool) -> dict[str, Any]:
    if text is not None and not vllm:
        raise SpecGenError("--vllm-settings has no effect without --vllm. Leave it out.")
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise SpecGenError(f"--vllm-settings {text} is no JSON: {reason_of(error)}.") from error
    if not isinstance(found, dict):
        raise SpecGenError(f"--vllm-settings {text}: an object of arguments of vllm.LLM is required.")
    return found


def _vllm(session: Any, sampling: Sampling, length: int, settings: dict[str, Any]) -> tuple[Author, dict[str, Any]]:
    """Start vLLM with room for the longest text, and return it with what is noted of it."""
    from hf_specgen.trainers.regenerate import vllm_author

    given = {"dtype": _format(session), "max_model_len": length, **settings}
    author = vllm_author(session.model.name_or_path, sampling, **given)
    return author, {"dtype": given["dtype"], "vllm": given}


def _format(session: Any) -> str:
    """Return the number format of the target; vLLM left to itself would take another."""
    return str(session.model.dtype).removeprefix("torch.")


def _source(session: Any, sampling: Sampling, reading: PromptReading, notes: dict[str, Any]) -> AnswerSource:
    import transformers

    import hf_specgen
    from hf_specgen.models.facts import TargetFacts
    from hf_specgen.trainers.regenerate import AnswerSource, end_tokens

    notes = {
        "chat_template": reading.chat and bool(session.tokenizer.chat_template),
        "chat_template_kwargs": reading.settings,
        "versions": {"hf_specgen": hf_specgen.__version__, "transformers": transformers.__version__},
        **notes,
    }
    return AnswerSource(TargetFacts.of(session.model), sampling, end_tokens(session.model), notes)


def _write(
    questions: list[Question], rows: Path, author: Author, source: AnswerSource, batch_size: int, tokenizer: Any
) -> RegenerationReport:
    from hf_specgen.cli.session import note, progress_bar
    from hf_specgen.trainers import regenerate as work

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    try:
        with progress_bar("answering") as progress:
            return work.regenerate(questions, rows, author, source, batch_size, decode, progress)
    except KeyboardInterrupt:
        note(f"Every finished batch is in {rows}: the same command goes on from there.")
        raise


def _tell(report: RegenerationReport, out: Path, author: Author) -> None:
    from hf_specgen.trainers.regenerate import TargetAuthor

    before = f"{report.found} answers were there. " if report.found else ""
    passes = ""
    if isinstance(author, TargetAuthor) and report.written:
        passes = f", {author.stats.tokens_per_round:.2f} tokens a row and pass"
    typer.echo(
        f"{before}Wrote {report.written} answers with {report.tokens:,} tokens to {out}: "
        f"{report.rate:.0f} tokens/s{passes}."
    )
