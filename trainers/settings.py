"""What ``hf-specgen train`` is asked to do: options, the arguments of a method's trainer, YAML files of both."""

from __future__ import annotations

import dataclasses
import json
from argparse import SUPPRESS
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

import torch
import yaml  # type: ignore[import-untyped]
from transformers import HfArgumentParser, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from hf_specgen.chats import read_settings
from hf_specgen.checkpoints.methods import checkpoint_methods, config_class, field_names, methods
from hf_specgen.errors import SpecGenError, reason_of
from hf_specgen.trainers.base import DrafterTrainer, DrafterTrainingArguments

DTYPES = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SHOWN = {
    *("output_dir", "learning_rate", "num_train_epochs", "max_steps", "per_device_train_batch_size", "warmup_steps"),
    *("gradient_accumulation_steps", "eval_strategy", "eval_steps", "save_strategy", "save_steps", "bf16", "use_cpu"),
    *("push_to_hub", "hub_model_id", "report_to", "seed", "resume_from_checkpoint", "load_best_model_at_end"),
}


@dataclass
class TrainOptions:
    """Hold what is trained on what; the rest are the arguments of the method's trainer."""

    target: str = field(metadata={"help": "The model that the drafter is for: a folder or a Hub id."})
    data: str | None = field(
        default=None, metadata={"help": "Texts, best the target's own: a file, a folder, or a Hub id."}
    )
    split: str = field(default="train", metadata={"help": "The split of --data."})
    data_name: str | None = field(default=None, metadata={"help": "The configuration of a Hub data set."})
    streaming: bool = field(default=False, metadata={"help": "Read --data as a stream (needs --max_steps)."})
    num_proc: int | None = field(default=None, metadata={"help": "Processes that tokenise."})
    limit: int | None = field(default=None, metadata={"help": "At most that many rows of --data."})
    turns: str = field(default="all", metadata={"help": "Answers of a chat that are supervised: all or last."})
    chat_template_kwargs: str | None = field(
        default=None,
        metadata={"help": "What the chat template is told, as JSON, such as '{\"enable_thinking\": false}'."},
    )
    strict: bool = field(
        default=False, metadata={"help": "Stop at a row that cannot be read exactly, in place of leaving it out."}
    )
    eval_data: str | None = field(default=None, metadata={"help": "Texts to evaluate on, instead of rows of --data."})
    eval_split: str = field(default="train", metadata={"help": "The split of --eval_data."})
    eval_rows: int = field(default=64, metadata={"help": "Rows to evaluate on, at most a tenth of --data; 0: none."})
    target_dtype: str = field(default="auto", metadata={"help": "Of the target: auto, float32, bfloat16, float16."})
    init_from: str | None = field(default=None, metadata={"help": "Go on from this drafter; its vocabulary stays."})
    drafter_config: str | None = field(
        default=None, metadata={"help": "JSON: fields of a new drafter's DrafterConfig."}
    )
    cold: bool = field(default=False, metadata={"help": "Start a new drafter from random weights."})
    features: str | None = field(
        default=None, metadata={"help": "A folder of hf-specgen features: its texts and hidden states are read."}
    )
    decode_prompts: int = field(default=6, metadata={"help": "Held-out prompts to decode before and after; 0: none."})
    decode_tokens: int = field(default=64, metadata={"help": "New tokens of each."})
    decode_every: int = field(default=0, metadata={"help": "Decode them at every so-manieth evaluation too; 0: never."})
    base_model: str | None = field(
        default=None, metadata={"help": "The target's id on the Hub, for the card; for a --target that is a folder."}
    )
    license: str | None = field(default=None, metadata={"help": "Of the drafter, for its card, such as apache-2.0."})

    def __post_init__(self) -> None:
        """Refuse what would fail later, or be ignored. Raises: ``SpecGenError``."""
        if self.data is None and self.features is None:
            raise SpecGenError(
                "--data is required: texts, best the target's own (hf-specgen regenerate writes them); or --features, "
                "a folder of hf-specgen features."
            )
        if self.target_dtype not in DTYPES:
            raise SpecGenError(f"--target_dtype {self.target_dtype}: one of {', '.join(DTYPES)} is required.")
        least = {"limit": 1, "eval_rows": 0, "decode_prompts": 0, "decode_tokens": 2, "decode_every": 0}
        for name, smallest in least.items():
            value = vars(self)[name]
            if value is not None and value < smallest:
                raise SpecGenError(f"--{name} {value}: at least {smallest} is required.")
        self.drafter_settings()
        self.template_settings()

    def template_settings(self) -> dict[str, Any]:
        """Return ``chat_template_kwargs``. Raises: ``SpecGenError`` for what is no JSON object."""
        return read_settings(self.chat_template_kwargs, "--chat_template_kwargs")

    def drafter_settings(self) -> dict[str, Any]:
        """Return ``drafter_config``. Raises: ``SpecGenError`` for what is no JSON, or names no field."""
        try:
            found = json.loads(self.drafter_config or "{}")
        except ValueError as error:
            raise SpecGenError(f"--drafter_config {self.drafter_config} is no JSON: {reason_of(error)}.") from error
        known = set(field_names())
        unknown = sorted(set(found) - known) if isinstance(found, dict) else [str(found)]
        if unknown:
            raise SpecGenError(
                f"--drafter_config: {', '.join(unknown)} is no field of DrafterConfig: {', '.join(sorted(known))}."
            )
        return dict(found)


@dataclass(frozen=True)
class Job:
    """Hold a command: the method, what is trained on what, the trainer's arguments."""

    method: str
    options: TrainOptions
    args: DrafterTrainingArguments

    def check(self) -> Job:
        """Refuse combinations that would fail later, or be ignored. Raises: ``SpecGenError``."""
        options = self.options
        args = self.args
        method = methods()[self.method]
        distils = method.config is None
        if distils and options.init_from is None:
            raise SpecGenError("--init_from is required: the small language model that learns from the target.")
        if distils and options.features is not None:
            raise SpecGenError(
                f"--features is for {', '.join(checkpoint_methods())}: a small model learns next to its target. Give "
                "--data."
            )
        if options.features is not None and options.eval_data is not None:
            raise SpecGenError("--eval_data beside --features: no hidden states are kept of those texts. Leave it out.")
        if args.draft_vocab_size is not None and not method.learns_vocabulary:
            able = [name for name, other in methods().items() if other.learns_vocabulary]
            raise SpecGenError(f"--draft_vocab_size is for {' and '.join(able)}: {self.method} has no such head.")
        if (options.init_from or distils) and (args.draft_vocab_size is not None or options.drafter_settings()):
            raise SpecGenError("--draft_vocab_size and --drafter_config are for new drafters: --init_from has its own.")
        if not distils:
            config_class(self.method).check_fields(options.drafter_settings())
        if options.streaming and args.max_steps < 1:
            raise SpecGenError("--streaming needs --max_steps: the length of a stream is not known.")
        return self


class _Parser(HfArgumentParser):
    """Refuse with one message instead of pages of usage."""

    def error(self, message: str) -> NoReturn:
        raise SpecGenError(f"{message} (hf-specgen train METHOD --help lists them)")


def parts_of(method: str) -> tuple[type[DrafterTrainer], type[DrafterTrainingArguments]]:
    """Return the trainer that a method's record names, and its arguments."""
    module, _, name = methods()[method].trainer.partition(":")
    kind: type[DrafterTrainer] = vars(import_module(module))[name]
    return kind, get_type_hints(kind)["args"]


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

    Raises: ``SpecGenError`` for unknown or missing ones, and for those that do not go together.
    """
    line = [f"--output_dir{part[8:]}" if part.split("=")[0] == "--output" else part for part in argv]
    line = [piece for part in line for piece in (part.split("=", 1) if part.startswith("--config=") else [part])]
    while "--config" in line:
        place = line.index("--config")
        if place + 1 == len(line):
            raise SpecGenError("--config names no file.")
        line = [*from_yaml(line[place + 1]), *line[:place], *line[place + 2 :]]
    if not any(part.split("=")[0] in ("--output_dir", "--output-dir") for part in line):
        raise SpecGenError("--output FOLDER is required: where the drafter goes.")
    try:
        options, args, unknown = parser_of(method).parse_args_into_dataclasses(line, return_remaining_strings=True)
    except SpecGenError:
        raise
    except ValueError as error:  # what TrainingArguments refuse
        raise SpecGenError(str(error)) from error
    if unknown:
        raise SpecGenError(f"unknown arguments: {' '.join(unknown)} (hf-specgen train {method} --help_all lists them)")
    return Job(method, options, args).check()


def from_yaml(path: str | Path) -> list[str]:
    """Return a YAML file's settings as arguments. Raises: ``SpecGenError`` for a file that holds no mapping."""
    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise SpecGenError(f"--config {path} cannot be read: {reason_of(error)}.") from error
    if not isinstance(found, dict):
        raise SpecGenError(f"--config {path} holds no settings: lines of `name: value` are required.")
    if "config" in found:
        raise SpecGenError(f"--config {path} names a config itself: one file is read.")
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


def asks_to_resume(args: TrainingArguments) -> bool:
    """Tell whether training goes on from a checkpoint; false and no are words for none."""
    return args.resume_from_checkpoint is not None and str(args.resume_from_checkpoint).lower() not in ("false", "no")


def check_folder(args: TrainingArguments) -> None:
    """Refuse to mix two trainings. Raises: ``SpecGenError`` for a folder that holds a drafter or a checkpoint."""
    folder = Path(args.output_dir)
    newest = newest_checkpoint(folder)
    is_trained = (folder / "config.json").is_file()
    if (newest is None and not is_trained) or (newest is not None and asks_to_resume(args)):
        return
    if not asks_to_resume(args):
        what = "a model" if newest is None or is_trained else newest.name
        raise SpecGenError(f"{folder} holds {what} already: give another --output, or --resume_from_checkpoint true.")
    if resumed(args) is None:
        raise SpecGenError(f"{folder} holds a model and no checkpoint to go on from: give another --output.")


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the last checkpoint that was finished: what tells the step is written last."""
    names = [path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdecimal()]
    return max(filter(_is_finished, names), key=lambda path: int(path.name.removeprefix("checkpoint-")), default=None)


def _is_finished(checkpoint: Path) -> bool:
    try:
        return bool(json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8")))
    except (OSError, ValueError):  # ValueError: the disk was full, or the process killed, meanwhile
        return False


def resumed(args: TrainingArguments) -> str | None:
    """Return what to resume from: the folder that is named, or the newest checkpoint of the output folder for ``true``.

    None: training starts anew. Raises: ``SpecGenError`` for a folder that holds no finished checkpoint.
    """
    if not asks_to_resume(args):
        return None
    asked = str(args.resume_from_checkpoint)
    if asked.lower() in ("true", "yes"):
        newest = newest_checkpoint(Path(args.output_dir))
        return None if newest is None else str(newest)
    if not _is_finished(Path(asked)):
        raise SpecGenError(
            f"--resume_from_checkpoint {asked}: the folder of a finished checkpoint is required, or true."
        )
    return asked
