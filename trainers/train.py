"""Train a drafter from the command line, in one process or in many.

hf-specgen train eagle3 --target org/model --data answers.jsonl --output my-drafter
accelerate launch --config_file ddp.yaml -m hf_specgen.trainers.train eagle3 --config eagle3.yaml
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import IterableDataset
from pyarrow.lib import ArrowInvalid  # type: ignore[import-untyped]
from transformers import PreTrainedModel, TrainingArguments, set_seed

from hf_specgen.checkpoints.methods import methods
from hf_specgen.errors import SpecGenError, piped
from hf_specgen.loading import load_drafter
from hf_specgen.models.facts import TargetFacts
from hf_specgen.trainers.base import DrafterTrainer, public_name
from hf_specgen.trainers.data import DraftCollator, unreadable
from hf_specgen.trainers.feature_cache import FeatureCache
from hf_specgen.trainers.metrics import AcceptanceCallback
from hf_specgen.trainers.report import best_step, figures, told, write_report
from hf_specgen.trainers.settings import (
    DTYPES,
    Job,
    TrainOptions,
    check_folder,
    newest_checkpoint,
    parse,
    parser_of,
    parts_of,
    resumed,
)
from hf_specgen.trainers.sources import authored, described, open_target, own_tokenizer, prompts_of, read_rows
from hf_specgen.trainers.vocabulary import choose_vocabulary, count_supervised, coverage
from hf_specgen.trainers.warm_start import always_covered, new_drafter
from hf_specgen.trainers.worth import Worth, acceptance, is_sharded, weigh

_LONGEST = 4  # tokens of a draft, for the figures before and after
_COUNTED = 20_000  # rows of a stream that the draft vocabulary is counted on

Load = Callable[[str, Any], tuple[PreTrainedModel, Any]]
Say = Callable[[str], None]


def main(
    argv: Sequence[str] | None = None, load: Load | None = None, known: Mapping[str, tuple[str, str]] | None = None
) -> dict[str, Any] | None:
    """Train as the arguments say. Returns: the figures that ``training.json`` holds; None when help was asked for.

    ``load`` opens a target: name and dtype in, model and tokenizer (None where there is none) out. ``known``: of
    targets with a name of their own, the id on the Hub and the license.
    """
    asked = list(sys.argv[1:] if argv is None else argv)
    if not asked or asked[0] in ("-h", "--help"):
        print(
            f"usage: hf-specgen train {{{','.join(methods())}}} --target T --data D --output FOLDER [--config FILE] ..."
        )
        return None
    method = asked[0]
    rest = asked[1:]
    if method not in methods():
        raise SpecGenError(f"train {method}: one of {', '.join(methods())} is required.")
    if "-h" in rest or "--help" in rest or "--help_all" in rest:
        print(parser_of(method, everything="--help_all" in rest).format_help())
        return None
    job = parse(method, rest)
    hub_id, license_name = (known or {}).get(job.options.target, (None, None))
    job.options.base_model = job.options.base_model or hub_id
    job.options.license = job.options.license or license_name
    return train(job, load or open_target)


def train(job: Job, load: Load = open_target) -> dict[str, Any]:
    """Train, evaluate, decode, and write the drafter, its figures and its card. Returns: the figures."""
    options = job.options
    args = job.args
    say: Say = _say if args.process_index == 0 else _silent
    if args.process_index == 0:
        check_folder(args)
    checkpoint = resumed(args)
    set_seed(args.seed)
    target, tokenizer = load(options.target, DTYPES[options.target_dtype])
    own = own_tokenizer(job, tokenizer)
    known = authored(options, TargetFacts.of(target), args.eval_temperature)
    rows, held_out = read_rows(options, args, tokenizer)
    drafter, start = make_drafter(job, target, tokenizer, rows)
    for line in opening(job, known.warnings, rows, held_out, start, checkpoint):
        say(line)
    args.eval_on_start = held_out is not None
    trainer = build(job, drafter, target, own, rows, held_out)
    prompts = prompts_of(held_out, options.decode_prompts)
    if options.decode_every and prompts:
        trainer.add_callback(AcceptanceCallback(trainer, prompts, options.decode_tokens, options.decode_every))
    before = decoded(trainer, prompts, options, None, say)
    seconds = timed(trainer, checkpoint, say)
    if held_out is not None and not is_evaluated(trainer):
        trainer.evaluate()
    worth = decoded(trainer, prompts, options, before, say)
    assert not isinstance(worth, float)
    trainer.save_model(_internal_call=True)  # otherwise it uploads, before there is a card
    apart = None if held_out is None else len(held_out)
    about = described(job, target, rows, known) | {"start": "; ".join(start), "seconds": round(seconds, 1)}
    about |= {"held_out": apart, "from_step": 0 if checkpoint is None else int(checkpoint.rpartition("-")[2])}
    found = figures(trainer, about, worth)
    card = {"finetuned_from": options.base_model, "license": options.license}
    if trainer.is_world_process_zero():
        paths = write_report(args.output_dir, found)
        trainer.create_model_card(**card)
        for line in [*told(found), *(worth.lines() if worth else ()), *closing(job, paths)]:
            say(line)
    trainer.accelerator.wait_for_everyone()
    if args.push_to_hub:
        trainer.push_to_hub(**card)
    return found


def opening(
    job: Job, warnings: Sequence[str], rows: Any, held_out: Any, start: Sequence[str], checkpoint: str | None
) -> list[str]:
    """Return what is to be known before a training starts, as lines."""
    options = job.options
    args = job.args
    texts = "a stream of texts" if isinstance(rows, IterableDataset) else f"{len(rows):,} texts"
    apart = "none is held out (--eval_data names some)" if held_out is None else f"{len(held_out):,} are held out"
    lines = [*(f"warning: {warning}" for warning in warnings), f"training on {texts}; {apart}"]
    lines.append(f"the drafter starts from: {'; '.join(start)}")
    if checkpoint is not None:
        lines.append(f"going on from {checkpoint}")
    elif str(args.resume_from_checkpoint).lower() in ("true", "yes"):
        lines.append(f"no finished checkpoint is in {args.output_dir}: training starts at step 0")
    if options.features is not None and options.data is not None:
        lines.append(f"the texts are those of {options.features}; --data is not read")
    return lines


def timed(trainer: DrafterTrainer, checkpoint: str | None, say: Say) -> float:
    """Train. Returns: the seconds; an interruption tells where to go on first.

    Raises: ``SpecGenError`` when there was nothing to train on.
    """
    begun = time.perf_counter()
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except KeyboardInterrupt:
        say(stopped(trainer.args, trainer.state.global_step))
        raise
    except ArrowInvalid as error:  # a stream's file is broken further on
        raise unreadable(error) from error
    if trainer.state.global_step == 0:
        raise SpecGenError(
            f"no step was made: num_train_epochs={trainer.args.num_train_epochs:g}, and batches of "
            f"{trainer.args.per_device_train_batch_size} texts per process (dataloader_drop_last leaves a smaller rest "
            "out). Give more texts, smaller batches, or more epochs."
        )
    return time.perf_counter() - begun


def stopped(args: TrainingArguments, step: int) -> str:
    """Return where an interrupted training goes on."""
    newest = newest_checkpoint(Path(args.output_dir))
    if newest is None:
        return f"stopped in step {step + 1}, before a checkpoint was written (--save_steps {args.save_steps:g})"
    return f"stopped in step {step + 1}: the same command with --resume_from_checkpoint true goes on from {newest.name}"


def closing(job: Job, paths: Sequence[Path]) -> list[str]:
    """Return what was written, and how to measure it."""
    folder = job.args.output_dir
    options = job.options
    names = ", ".join(path.name for path in paths)
    lines = [f"wrote the model, its card (README.md) and the figures ({names}) to {folder}"]
    if job.method != "distill":
        measure = f"hf-specgen bench --target {options.target} --drafter learned:{folder}"
        lines.append(f"these figures are rough; with intervals and more prompts: {measure}")
    return lines


def is_evaluated(trainer: DrafterTrainer) -> bool:
    """Tell whether the weights that are saved, the last or the best ones, are those of the newest evaluation."""
    state = trainer.state
    steps = [entry["step"] for entry in state.log_history if "eval_loss" in entry]
    return steps[-1:] == [state.global_step] and best_step(trainer) in (None, state.global_step)


def _say(line: str) -> None:
    print(line, flush=True)


def _silent(line: str) -> None:
    pass


def make_drafter(job: Job, target: PreTrainedModel, tokenizer: Any, rows: Any) -> tuple[Any, list[str]]:
    """Return the drafter to train, in float32, and what it starts from, in words."""
    options = job.options
    size = job.args.draft_vocab_size
    if methods()[job.method].config is None:
        model, _ = open_target(str(options.init_from), torch.float32)
        return model, [public_name(str(options.init_from))]
    if options.init_from is not None:
        return load_drafter(options.init_from, target, dtype=torch.float32).train(), [public_name(options.init_from)]
    ids = None
    notes = []
    vocabulary = int(target.config.get_text_config(decoder=True).vocab_size)
    if size is not None and size < vocabulary:
        counts = count_supervised(rows, vocabulary, _COUNTED if isinstance(rows, IterableDataset) else None)
        _, known = choose_vocabulary(counts, size, always_covered(target, tokenizer))
        ids = known.nonzero()[:, 0]
        share = 100 * coverage(counts, known)
        notes = [f"a draft vocabulary of {size} ids, {share:.1f} % of the supervised tokens"]
    drafter, start = new_drafter(job.method, target, ids, not options.cold, **options.drafter_settings())
    return drafter, [*start, *notes]


def build(job: Job, drafter: Any, target: PreTrainedModel, tokenizer: Any, rows: Any, held_out: Any) -> DrafterTrainer:
    """Return the method's trainer."""
    more: dict[str, Any] = {}
    if job.options.features is not None:
        cache = FeatureCache.open(job.options.features, TargetFacts.of(target), drafter.hidden_layers)
        more["data_collator"] = DraftCollator(cache=cache)
    kind, _ = parts_of(job.method)
    trainer = kind(
        drafter, target, job.args, train_dataset=rows, eval_dataset=held_out, processing_class=tokenizer, **more
    )
    if job.options.base_model and methods()[job.method].config is not None:
        drafter.config.target["name"] = job.options.base_model
    return trainer


def decoded(
    trainer: DrafterTrainer, prompts: list[list[int]], options: TrainOptions, before: float | Worth | None, say: Say
) -> Any:
    """Decode on the first process: before training the tokens per round, after it (``before`` is known) the worth."""
    found: float | Worth | None = None
    trained = trainer.state.global_step > 0
    if prompts and not is_sharded(trainer.drafter, trainer.target.model) and trainer.is_world_process_zero():
        length = draft_length(trainer)

        def progress(done: int, total: int, more: str) -> None:
            say(f"  {done} of {total}")

        given = trainer.drafter, trainer.target.model, prompts, options.decode_tokens, length, progress
        ways = "with the trained drafter, with prompt lookup and plainly" if trained else "with the untrained drafter"
        say(f"decoding {len(prompts)} held-out prompts {ways} ...")
        found = weigh(*given, before=before if isinstance(before, float) else None) if trained else acceptance(*given)
    trainer.accelerator.wait_for_everyone()
    return found


def draft_length(trainer: DrafterTrainer) -> int:
    """Return how many tokens are drafted for the figures before and after: as many as were trained, four at most."""
    heads = trainer.drafter.config.to_dict().get("num_heads")
    steps = int(trainer.args.to_dict().get("steps") or 1)  # 1: trained for one, and drafts more all the same
    return min(_LONGEST, int(heads or (steps if steps > 1 else _LONGEST)))


if __name__ == "__main__":
    try:
        with piped():
            main()
    except SpecGenError as error:
        sys.exit(f"Error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
