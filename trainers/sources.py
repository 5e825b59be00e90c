"""Where a training gets its models and texts from, and what is known of them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from datasets import IterableDataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_specgen.drafters.small_model import check_vocabularies
from hf_specgen.errors import IncompatibleDrafter, SpecGenError, reason_of
from hf_specgen.models.facts import TargetFacts
from hf_specgen.trainers.base import DrafterTrainingArguments, public_name
from hf_specgen.trainers.data import DataOptions, load_data, prepare_dataset
from hf_specgen.trainers.feature_cache import MANIFEST, ROWS
from hf_specgen.trainers.masks import ChatOptions
from hf_specgen.trainers.regenerate import check_author, read_meta
from hf_specgen.trainers.settings import Job, TrainOptions

_DEMO = "demo"  # as bench/demo.py calls it


def open_target(name: str, dtype: Any) -> tuple[PreTrainedModel, Any]:
    """Open a target and its tokenizer; token ids need none."""
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    except (OSError, ValueError, KeyError) as error:
        if name == _DEMO and not Path(name).exists():
            raise SpecGenError(
                "the name demo is known to the hf-specgen command alone, which fetches that model: under accelerate "
                "launch its folder is required (the command says `Saved in FOLDER`; it lies under HF_SPECGEN_CACHE or "
                "HF_HOME/hf_specgen), or its id on the Hub, HuggingFaceTB/SmolLM2-135M-Instruct."
            ) from error
        raise SpecGenError(f"the model {name!r} cannot be opened: {reason_of(error)}.") from error
    return model, open_tokenizer(name)


def open_tokenizer(name: str) -> Any:
    """Open a model's tokenizer, None where there is none."""
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError):
        return None


def needs_tokenizer(data: Any) -> bool:
    """Tell by the first row whether a data set holds texts or messages, not token ids alone."""
    row: dict[str, Any] = next(iter(data), {})
    pair = (row.get("prompt"), row.get("completion" if "completion" in row else "answer"))
    return "input_ids" not in row and not all(
        isinstance(part, list) and not any(isinstance(one, dict) for one in part[:1]) for part in pair
    )


def own_tokenizer(job: Job, tokenizer: Any) -> Any:
    """Return the tokenizer that is saved beside what is trained: a small model's own, else the target's.

    Raises: ``IncompatibleDrafter`` when an id of the small model's stands for another string than the target's.
    """
    if job.method != "distill":
        return tokenizer
    small = str(job.options.init_from)
    own = open_tokenizer(small)
    if own is None or tokenizer is None:
        return own or tokenizer
    try:
        check_vocabularies(tokenizer, own)
    except IncompatibleDrafter as error:
        raise IncompatibleDrafter(
            f"{small} cannot draft for {job.options.target}, their tokens differ: {reason_of(error)}. Take a small "
            "model of the target's family."
        ) from error
    return own


@dataclasses.dataclass(frozen=True)
class Authored:
    """Hold what is known of who wrote the texts: in words for the card, ``warnings`` for the one who trains, and the
    ``chat_template_kwargs`` that they were made with.
    """

    words: str = ""
    warnings: tuple[str, ...] = ()
    template: dict[str, Any] = dataclasses.field(default_factory=dict)


def authored(options: TrainOptions, facts: TargetFacts, temperature: float) -> Authored:
    """Compare what ``hf-specgen regenerate`` wrote down beside its answers with the target and ``eval_temperature``.

    Raises: ``SpecGenError`` for answers of a target with other tokens (of another one with these, it is a warning), and
    for texts that are tokens already and were made with other ``chat_template_kwargs`` than those that are given.
    """
    given = options.template_settings()
    if options.features is not None:
        manifest = _manifest(options.features)
        cached = dict(manifest.get("chat_template_kwargs") or {})
        check_template(f"--features {options.features}", cached, given)
        return Authored(str(manifest.get("authors") or ""), template=cached)
    texts = answered(str(options.data), facts)
    judged = texts if options.eval_data is None else answered(options.eval_data, facts)
    for name, part in ((options.data, texts), (options.eval_data, judged)):
        if part.template is not None:
            check_template(str(name), part.template, given)
    warnings = list(dict.fromkeys(part.warning for part in (texts, judged) if part.warning))
    if judged.temperature not in (None, temperature) and options.eval_rows:
        warnings.append(
            f"the texts to evaluate on were written at temperature {judged.temperature:g}, and evaluation judges at "
            f"{temperature:g}: --eval_temperature {judged.temperature:g} makes its figures those of decoding."
        )
    made, asked = (given if part.template is None else part.template for part in (texts, judged))
    if made != asked and options.eval_rows:
        warnings.append(
            f"the texts to train on were made with the chat_template_kwargs {json.dumps(made)}, those to evaluate on "
            f"with {json.dumps(asked)}: figures on texts of another form are not those of decoding."
        )
    return Authored(texts.words, tuple(warnings), made)


def check_template(name: str, made: dict[str, Any], given: dict[str, Any]) -> None:
    """Refuse settings of the template that tokens were not made with. Raises: ``SpecGenError``."""
    if given and given != made:
        raise SpecGenError(
            f"{name} holds tokens that were made with the chat_template_kwargs {json.dumps(made)}, and "
            f"{json.dumps(given)} cannot change them. Leave chat_template_kwargs out, or make the texts anew with them."
        )


@dataclasses.dataclass(frozen=True)
class Answered:
    """Hold what is known of a file of answers: in words, what is wrong with it for a target, its temperature, and the
    ``chat_template_kwargs`` of its prompts (None: it is no such file).
    """

    words: str = ""
    warning: str = ""
    temperature: float | None = None
    template: dict[str, Any] | None = None


def answered(data: str, facts: TargetFacts) -> Answered:
    """Read what ``hf-specgen regenerate`` wrote down beside a file. Raises: ``SpecGenError`` for other tokens."""
    meta = read_meta(Path(data)) if Path(data).is_file() else None
    if meta is None:
        return Answered()
    wrong = check_author(data, facts)
    if wrong is not None and meta["target"].get("vocab_size") != facts.vocab_size:
        raise SpecGenError(f"{wrong}, whose token ids mean other texts. Let this target answer: hf-specgen regenerate.")
    sampling = meta.get("sampling", {})
    drawn = float(sampling.get("temperature") or 0.0)
    whose = "another model's" if wrong is not None else "the target's own"
    how = f"drawn at temperature {drawn:g}" if drawn else "greedy"
    words = f"{whose} answers, {how}, up to {sampling.get('max_new_tokens')} tokens each"
    if wrong is not None:
        wrong += (
            ": they teach less, and acceptance on them is not what decoding shows. hf-specgen regenerate lets this "
            "target answer."
        )
    return Answered(words, wrong or "", drawn, dict(meta.get("chat_template_kwargs") or {}))


def read_rows(options: TrainOptions, args: DrafterTrainingArguments, tokenizer: Any) -> tuple[Any, Any]:
    """Return the rows to train on and those to evaluate on (None: none), ready for the collator."""
    chat = ChatOptions(turns=options.turns, chat_template_kwargs=options.template_settings())
    settings = DataOptions(args.max_length, args.packing, chat=chat, num_proc=options.num_proc, strict=options.strict)
    apart = dataclasses.replace(settings, packing=False)
    with args.main_process_first(desc="reading the data"):
        if options.features is not None:
            data = load_data(Path(options.features) / ROWS)
        else:
            data = load_data(str(options.data), options.split, options.streaming, options.data_name)
        streams = isinstance(data, IterableDataset)
        if options.limit is not None:
            data = data.take(options.limit) if streams else data.select(range(min(options.limit, len(data))))
        splits = bool(options.eval_data is None and options.eval_rows and not streams and len(data) > 1)
        rows = prepare_dataset(data, tokenizer, apart if splits else settings)
        held_out = None
        if options.eval_data is not None and options.eval_rows:
            held_out = load_data(options.eval_data, options.eval_split)
            held_out = held_out.select(range(min(options.eval_rows, len(held_out))))
            held_out = prepare_dataset(held_out, tokenizer, apart)
        elif splits and len(rows) > 1:  # what is left of the data: a part of it may hold nothing that can be read
            parts = rows.train_test_split(test_size=max(1, min(options.eval_rows, len(rows) // 10)), seed=args.seed)
            rows = parts["train"]
            held_out = parts["test"]
        if splits and args.packing:
            rows = prepare_dataset(rows, tokenizer, settings)
    return rows, held_out


def described(job: Job, target: PreTrainedModel, rows: Any, known: Authored) -> dict[str, Any]:
    """Return what a training was made of; folders of this machine are told by their last part."""
    options = job.options
    streams = isinstance(rows, IterableDataset)
    data = options.data
    if data is None:
        data = str(_manifest(str(options.features)).get("data") or options.features)
    return {
        "method": job.method,
        "target": public_name(str(target.config.name_or_path or options.target)),
        "base_model": options.base_model or "",
        "license": options.license or "",
        "data": public_name(data),
        "dtype": str(target.dtype).removeprefix("torch."),
        "authors": known.words,
        "chat_template_kwargs": known.template,
        "texts": None if streams else len(rows),
        "tokens": None if streams else sum(sum(mask) for mask in rows["loss_mask"]),
    }


def _manifest(folder: str) -> dict[str, Any]:
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise SpecGenError(f"--features {folder} holds no finished feature cache: hf-specgen features writes one.")
    return dict(json.loads(path.read_text(encoding="utf-8")))


def prompts_of(rows: Any, number: int) -> list[list[int]]:
    """Return what stands before the first supervised token of some rows, two tokens at least."""
    found: list[list[int]] = []
    for row in () if rows is None or number < 1 else rows:
        first = list(row["loss_mask"]).index(True)
        found.append(list(row["input_ids"][: max(2, first)]))
        if len(found) == number:
            break
    return found
