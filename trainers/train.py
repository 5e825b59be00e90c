"""Train a drafter from the command line, in one process or in many.

hf-specgen train eagle3 --target org/model --data answers.jsonl --output my-drafter
accelerate launch --config_file ddp.yaml -m hf_specgen.trainers.train eagle3 --config eagle3.yaml
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from argparse import SUPPRESS
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

import torch
import yaml  # type: ignore[import-untyped]
from datasets import IterableDataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedModel,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from hf_specgen.card import is_repository
from hf_specgen.errors import SpecGenError
from hf_specgen.facts import TargetFacts
from hf_specgen.loading import load_drafter
from hf_specgen.trainers.base import DrafterTrainer, DrafterTrainingArguments
from hf_specgen.trainers.data import DataOptions, DraftCollator, load_data, prepare_dataset
from hf_specgen.trainers.feature_cache import ROWS, FeatureCache
from hf_specgen.trainers.masks import ChatOptions
from hf_specgen.trainers.metrics import AcceptanceCallback
from hf_specgen.trainers.report import figures, told, write_report
from hf_specgen.trainers.vocabulary import choose_vocabulary, count_supervised, coverage
from hf_specgen.trainers.warm_start import always_covered, new_drafter
from hf_specgen.trainers.worth import Worth, acceptance, is_sharded, weigh

METHODS = ("medusa", "eagle", "eagle3", "distill")
_DTYPES = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LONGEST = 4  # tokens of a draft, for the figures before and after
_COUNTED = 20_000  # rows of a stream that the draft vocabulary is counted on
_SHOWN = {
    *("output_dir", "learning_rate", "num_train_epochs", "max_steps", "per_device_train_batch_size", "warmup_steps"),
    *("gradient_accumulation_steps", "eval_strategy", "eval_steps", "save_strategy", "save_steps", "bf16", "use_cpu"),
    *("push_to_hub", "hub_model_id", "report_to", "seed", "resume_from_checkpoint", "load_best_model_at_end"),
}

Load = Callable[[str, Any], tuple[PreTrainedModel, Any]]
Say = Callable[[str], None]


@dataclass
class TrainOptions:
    """Hold what is trained on what; the rest are the arguments of the method's trainer."""

    target: str = field(metadata={"help": "The model that the drafter is for: a folder or a Hub id."})
    data: str = field(metadata={"help": "Texts, best the target's own: a file, a folder, or a Hub id."})
    split: str = field(default="train", metadata={"help": "The split of --data."})
    data_name: str | None = field(default=None, metadata={"help": "The configuration of a Hub data set."})
    streaming: bool = field(default=False, metadata={"help": "Read --data as a stream (needs --max_steps)."})
    num_proc: int | None = field(default=None, metadata={"help": "Processes that tokenise."})
    limit: int | None = field(default=None, metadata={"help": "At most that many rows of --data."})
    turns: str = field(default="all", metadata={"help": "Answers of a chat that are supervised: all or last."})
    eval_data: str | None = field(default=None, metadata={"help": "Texts to evaluate on, instead of rows of --data."})
    eval_split: str = field(default="train", metadata={"help": "The split of --eval_data."})
    eval_rows: int = field(default=64, metadata={"help": "Rows to evaluate on, at most a tenth of --data; 0: none."})
    target_dtype: str = field(default="auto", metadata={"help": "Of the target: auto, float32, bfloat16, float16."})
    init_from: str | None = field(default=None, metadata={"help": "Go on from this drafter; its vocabulary stays."})
    drafter_config: str | None = field(
        default=None, metadata={"help": "JSON: fields of a new drafter's DrafterConfig."}
    )
    cold: bool = field(default=False, metadata={"help": "Start a new drafter from random weights."})
    features: str | None = field(default=None, metadata={"help": "A feature cache, read instead of the target."})
    decode_prompts: int = field(default=6, metadata={"help": "Held-out prompts to decode before and after; 0: none."})
    decode_tokens: int = field(default=64, metadata={"help": "New tokens of each."})
    decode_every: int = field(default=0, metadata={"help": "Decode them at every so-manieth evaluation too; 0: never."})


@dataclass(frozen=True)
class Job:
    """Hold a command: the method, what is trained on what, the trainer's arguments."""

    method: str
    options: TrainOptions
    args: DrafterTrainingArguments


class _Parser(HfArgumentParser):
    """Refuse with one message instead of pages of usage."""

    def error(self, message: str) -> NoReturn:
        raise SpecGenError(f"{message} (hf-specgen train METHOD --help lists them)")


def main(argv: Sequence[str] | None = None, load: Load | None = None) -> dict[str, Any] | None:
    """Train as the arguments say. Returns: the figures that ``training.json`` holds; None when help was asked for.

    ``load`` opens a target: name and dtype in, model and tokenizer (None where there is none) out.
    """
    asked = list(sys.argv[1:] if argv is None else argv)
    if not asked or asked[0] in ("-h", "--help"):
        print(
            f"usage: hf-specgen train {{{','.join(METHODS)}}} --target T --data D --output FOLDER [--config FILE] ..."
        )
        return None
    method, rest = asked[0], asked[1:]
    if method not in METHODS:
        raise SpecGenError(f"train {method}: one of {', '.join(METHODS)} is required.")
    if "-h" in rest or "--help" in rest or "--help_all" in rest:
        print(parser_of(method, everything="--help_all" in rest).format_help())
        return None
    return train(parse(method, rest), load or open_target)


def parts_of(method: str) -> tuple[type[DrafterTrainer], type[DrafterTrainingArguments]]:
    """Return the trainer of a method, the one in ``trainers/<method>.py``, and its arguments."""
    home = f"hf_specgen.trainers.{method}"
    found = [
        kind
        for kind in vars(import_module(home)).values()
        if isinstance(kind, type) and issubclass(kind, DrafterTrainer) and kind.__module__ == home
    ]
    return found[0], get_type_hints(found[0])["args"]


def parser_of(method: str, everything: bool = False) -> HfArgumentParser:
    """Return the parser of a method's arguments; help tells those of ``TrainingArguments`` only when asked."""
    parser = _Parser([TrainOptions, parts_of(method)[1]], prog=f"hf-specgen train {method}", allow_abbrev=False)
    parser.description = (
        "All of transformers' TrainingArguments are taken too (--help_all). --config FILE: the same, YAML."
    )
    theirs = {part.name for part in dataclasses.fields(TrainingArguments)} - _SHOWN
    for action in parser._actions:
        if action.dest in theirs and not everything:
            action.help = SUPPRESS
    return parser


def parse(method: str, argv: Sequence[str]) -> Job:
    """Read arguments; those of ``--config FILE`` (YAML) come first, so that the line's own win.

    Raises: ``SpecGenError`` for unknown or missing ones.
    """
    line = [f"--output_dir{part[8:]}" if part.split("=")[0] == "--output" else part for part in argv]
    while "--config" in line:
        place = line.index("--config")
        if place + 1 == len(line):
            raise SpecGenError("--config names no file.")
        line = [*from_yaml(line[place + 1]), *line[:place], *line[place + 2 :]]
    if not any(part.split("=")[0] in ("--output_dir", "--output-dir") for part in line):
        raise SpecGenError("--output FOLDER is required: where the drafter goes.")
    try:
        options, args, unknown = parser_of(method).parse_args_into_dataclasses(line, return_remaining_strings=True)
    except ValueError as error:  # what TrainingArguments refuse
        raise SpecGenError(str(error)) from error
    if unknown:
        raise SpecGenError(f"unknown arguments: {' '.join(unknown)} (hf-specgen train {method} --help_all lists them)")
    if options.target_dtype not in _DTYPES:
        raise SpecGenError(f"--target_dtype {options.target_dtype}: one of {', '.join(_DTYPES)} is required.")
    if method == "distill" and options.init_from is None:
        raise SpecGenError("--init_from is required: the small language model that learns from the target.")
    return Job(method, options, args)


def from_yaml(path: str | Path) -> list[str]:
    """Return a YAML file's settings as arguments. Raises: ``SpecGenError`` for a file that holds no mapping."""
    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise SpecGenError(f"--config {path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise SpecGenError(f"--config {path} holds no settings: lines of `name: value` are required.")
    line: list[str] = []
    for name, value in found.items():
        flag = "--output_dir" if name == "output" else f"--{name}"
        if value is None:
            continue
        if isinstance(value, list):
            line += [flag, *map(str, value)]
        else:
            line += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return line


def open_target(name: str, dtype: Any) -> tuple[PreTrainedModel, Any]:
    """Open a target and its tokenizer; token ids need none."""
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise SpecGenError(f"the target {name!r} cannot be opened: {reason}") from error
    return model, open_tokenizer(name)


def open_tokenizer(name: str) -> Any:
    """Open a model's tokenizer, None where there is none."""
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError):
        return None


def train(job: Job, load: Load = open_target) -> dict[str, Any]:
    """Train, evaluate, decode, and write the drafter, its figures and its card. Returns: the figures."""
    options, args = job.options, job.args
    say: Say = _say if args.process_index == 0 else _silent
    if args.process_index == 0:
        check_folder(args)
    set_seed(args.seed)
    target, tokenizer = load(options.target, _DTYPES[options.target_dtype])
    rows, held_out = read_rows(options, args, tokenizer)
    drafter, start = make_drafter(job, target, tokenizer, rows)
    for note in start:
        say(f"the drafter starts from: {note}")
    args.eval_on_start = held_out is not None
    trainer = build(job, drafter, target, tokenizer, rows, held_out)
    prompts = prompts_of(held_out, options.decode_prompts)
    if options.decode_every and prompts:
        trainer.add_callback(AcceptanceCallback(trainer, prompts, options.decode_tokens, options.decode_every))
    before = decoded(trainer, prompts, options, args, None)
    begun = time.perf_counter()
    trainer.train(resume_from_checkpoint=resumed(args))
    seconds = time.perf_counter() - begun
    if held_out is not None and not is_evaluated(trainer):
        trainer.evaluate()
    worth = decoded(trainer, prompts, options, args, before)
    assert not isinstance(worth, float)
    trainer.save_model()
    about = {**described(job, rows), "start": "; ".join(start), "seconds": round(seconds, 1)}
    found = figures(trainer, about, worth)
    if trainer.is_world_process_zero():
        paths = write_report(args.output_dir, found)
        trainer.create_model_card()
        for line in [*told(found), *(worth.lines() if worth else ()), f"wrote {', '.join(map(str, paths))}"]:
            say(line)
    trainer.accelerator.wait_for_everyone()
    if args.push_to_hub:
        trainer.push_to_hub()
    return found


def is_evaluated(trainer: DrafterTrainer) -> bool:
    """Tell whether the trained weights were evaluated already."""
    steps = [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry]
    return steps[-1:] == [trainer.state.global_step]


def _say(line: str) -> None:
    print(line, flush=True)


def _silent(line: str) -> None:
    pass


def check_folder(args: TrainingArguments) -> None:
    """Refuse to mix two trainings. Raises: ``SpecGenError`` for a folder that holds a drafter already."""
    folder = Path(args.output_dir)
    if args.resume_from_checkpoint is None and (folder / "config.json").is_file():
        raise SpecGenError(f"{folder} holds a model already: give another --output, or --resume_from_checkpoint true.")


def resumed(args: TrainingArguments) -> str | bool | None:
    """Return what to resume from: a folder, or the newest checkpoint of the output folder for ``true``."""
    asked = args.resume_from_checkpoint
    if asked is None or str(asked).lower() in ("false", "no"):
        return None
    if str(asked).lower() not in ("true", "yes"):
        return str(asked)
    return get_last_checkpoint(args.output_dir) if Path(args.output_dir).is_dir() else None


def read_rows(options: TrainOptions, args: DrafterTrainingArguments, tokenizer: Any) -> tuple[Any, Any]:
    """Return the rows to train on and those to evaluate on (None: none), ready for the collator."""
    chat = ChatOptions(turns=options.turns)
    settings = DataOptions(args.max_length, args.packing, chat=chat, num_proc=options.num_proc)
    apart = dataclasses.replace(settings, packing=False)
    with args.main_process_first(desc="reading the data"):
        if options.features is not None:
            data = load_data(Path(options.features) / ROWS)
        else:
            data = load_data(options.data, options.split, options.streaming, options.data_name)
        if options.limit is not None:
            data = data.take(options.limit) if options.streaming else data.select(range(min(options.limit, len(data))))
        held_out = None
        if options.eval_data is not None and options.eval_rows:
            held_out = load_data(options.eval_data, options.eval_split)
            held_out = held_out.select(range(min(options.eval_rows, len(held_out))))
        elif options.eval_rows and not isinstance(data, IterableDataset) and len(data) > 1:
            parts = data.train_test_split(test_size=max(1, min(options.eval_rows, len(data) // 10)), seed=args.seed)
            data, held_out = parts["train"], parts["test"]
        rows = prepare_dataset(data, tokenizer, settings)
        held_out = None if held_out is None else prepare_dataset(held_out, tokenizer, apart)
    return rows, held_out


def make_drafter(job: Job, target: PreTrainedModel, tokenizer: Any, rows: Any) -> tuple[Any, list[str]]:
    """Return the drafter to train, in float32, and what it starts from, in words."""
    options, size = job.options, job.args.draft_vocab_size
    settings = json.loads(options.drafter_config) if options.drafter_config else {}
    if job.method == "distill":
        model, _ = open_target(str(options.init_from), torch.float32)
        return model, [str(options.init_from)]
    if options.init_from is not None:
        if size is not None or settings:
            raise SpecGenError("--draft_vocab_size and --drafter_config are for new drafters: --init_from has its own.")
        return load_drafter(options.init_from, target, dtype=torch.float32).train(), [options.init_from]
    ids, notes = None, []
    vocabulary = int(target.config.get_text_config(decoder=True).vocab_size)
    if size is not None and size < vocabulary and job.method != "eagle":
        counts = count_supervised(rows, vocabulary, _COUNTED if isinstance(rows, IterableDataset) else None)
        _, known = choose_vocabulary(counts, size, always_covered(target, tokenizer))
        ids = known.nonzero()[:, 0]
        share = 100 * coverage(counts, known)
        notes = [f"a draft vocabulary of {size} ids, {share:.1f} % of the supervised tokens"]
    drafter, start = new_drafter(job.method, target, ids, not options.cold, **settings)
    return drafter, [*start, *notes]


def build(job: Job, drafter: Any, target: PreTrainedModel, tokenizer: Any, rows: Any, held_out: Any) -> DrafterTrainer:
    """Return the method's trainer."""
    more: dict[str, Any] = {}
    if job.options.features is not None:
        cache = FeatureCache.open(job.options.features, TargetFacts.of(target), drafter.hidden_layers)
        more["data_collator"] = DraftCollator(cache=cache)
    kind, _ = parts_of(job.method)
    return kind(
        drafter, target, job.args, train_dataset=rows, eval_dataset=held_out, processing_class=tokenizer, **more
    )


def prompts_of(rows: Any, number: int) -> list[list[int]]:
    """Return what stands before the first supervised token of some rows, two tokens at least."""
    found: list[list[int]] = []
    for row in () if rows is None or number < 1 else rows:
        first = list(row["loss_mask"]).index(True)
        found.append(list(row["input_ids"][: max(2, first)]))
        if len(found) == number:
            break
    return found


def decoded(
    trainer: DrafterTrainer, prompts: list[list[int]], options: TrainOptions, args: Any, before: float | Worth | None
) -> Any:
    """Decode on the first process: before training the tokens per round, after it (``before`` is known) the worth."""
    found: float | Worth | None = None
    trained = trainer.state.global_step > 0
    if prompts and not is_sharded(trainer.drafter, trainer.target.model) and trainer.is_world_process_zero():
        length = draft_length(trainer)
        given = trainer.drafter, trainer.target.model, prompts, options.decode_tokens, length
        found = weigh(*given, before=before if isinstance(before, float) else None) if trained else acceptance(*given)
    trainer.accelerator.wait_for_everyone()
    return found


def draft_length(trainer: DrafterTrainer) -> int:
    """Return how many tokens are drafted for the figures before and after: as many as were trained, four at most."""
    heads = trainer.drafter.config.to_dict().get("num_heads")
    steps = int(trainer.args.to_dict().get("steps") or 1)  # 1: trained for one, and drafts more all the same
    return min(_LONGEST, int(heads or (steps if steps > 1 else _LONGEST)))


def described(job: Job, rows: Any) -> dict[str, Any]:
    """Return what a training was made of; folders of this machine are told by their last part."""
    options = job.options

    def public(name: str) -> str:
        return name if is_repository(name) else Path(name).name

    tokens = None if isinstance(rows, IterableDataset) else sum(sum(mask) for mask in rows["loss_mask"])
    texts = None if isinstance(rows, IterableDataset) else len(rows)
    about = {"target": public(options.target), "data": public(options.data), "texts": texts, "tokens": tokens}
    return {"method": job.method, **about}


if __name__ == "__main__":
    try:
        main()
    except SpecGenError as error:
        sys.exit(f"Error: {error}")
