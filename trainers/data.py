"""Data for training: texts of any common shape become ``input_ids`` and ``loss_mask``, and batches of them.

``loss_mask[t]`` says that token t is supervised: the target writes it, so the drafter shall foresee it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import getfile
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import torch
from datasets import DatasetDict, IterableDataset, Value, load_dataset, load_from_disk
from datasets import Features as Columns
from datasets import Sequence as ListOf
from datasets.exceptions import DatasetGenerationError
from pyarrow.lib import ArrowInvalid  # type: ignore[import-untyped]
from torch import Tensor

from hf_specgen.chats import (
    are_messages,
    chat_of,
    check_text,
    message_of,
    settings_of,
    system_of,
    tools_of,
    with_system,
)
from hf_specgen.errors import SpecGenError, reason_of
from hf_specgen.trainers.masks import ChatOptions, ChatReader, preview

_LOG = logging.getLogger(__name__)

Row = dict[str, Any]
Data = Any  # datasets.Dataset or IterableDataset

_FILES = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}
_MASKS = ("loss_mask", "assistant_masks", "completion_mask")
_PACKED = ("lengths", "seq_lengths")  # of the texts that share a row
_ACCEPTED = "input_ids (with loss_mask or labels), messages, prompt with completion, text, or conversations"
_LEAST_SHARE = 0.01  # of a chat's tokens; below it the mask is wrong, or the data
_PEEKED = 64  # rows of a stream that are looked at before it is trusted
_MOST_LEFT_OUT = 0.5  # of the rows; more is no matter of single rows
_ROW = Columns(input_ids=ListOf(Value("int64")), loss_mask=ListOf(Value("bool")), problem=Value("string"))
PADDING = -1
"""The document id of padding."""


@dataclass(frozen=True)
class DataOptions:
    """Hold how texts become rows.

    ``max_length``: longer texts are cut, and rows that then supervise nothing are left out. ``packing``: several texts
    share a row of that length and stay apart (``document_ids``); ``window``: how many texts are packed together.
    ``chat``: what of a chat is supervised. ``num_proc``: processes that tokenise. ``strict``: stop at the first row
    that cannot be read exactly; otherwise it is left out and counted.
    """

    max_length: int = 2048
    packing: bool = False
    window: int = 10_000
    chat: ChatOptions = field(default_factory=ChatOptions)
    num_proc: int | None = None
    strict: bool = False


class Features(Protocol):
    """Hand out a text's stored hidden states, see ``trainers/feature_cache.py``."""

    def __getitem__(self, row: int) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return the features, one ``(T, D)`` per boundary, and the last hidden state ``(T, D)``."""
        ...


@dataclass
class DraftCollator:
    """Pad rows on the right and stack them.

    Shapes: ``input_ids``, ``attention_mask``, ``loss_mask (B, T)``; ``document_ids (B, T)`` where rows are packed
    (``PADDING`` behind the end); ``features`` and ``last_hidden`` from ``cache``; ``seeds (B,)`` when asked for: a
    number made from each row's tokens, the same however rows are batched; ``num_items`` scalar: supervised tokens.
    """

    pad_token_id: int = 0
    multiple_of: int = 1
    seeds: bool = False
    cache: Features | None = None

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Build one batch."""
        texts = [torch.as_tensor(row["input_ids"], dtype=torch.long) for row in rows]
        masks = [torch.as_tensor(_mask_of(row), dtype=torch.bool) for row in rows]
        for text, mask in zip(texts, masks, strict=True):
            if len(text) != len(mask):
                raise SpecGenError(f"a row has {len(text)} input_ids and a loss_mask of {len(mask)}: one per token.")
        width = max(map(len, texts))
        width += -width % self.multiple_of
        batch: dict[str, Any] = {
            "input_ids": _stacked(texts, width, self.pad_token_id),
            "attention_mask": _stacked([torch.ones_like(text) for text in texts], width, 0),
            "loss_mask": _stacked(masks, width, False),
        }
        if any(row.get(name) is not None for row in rows for name in _PACKED):
            documents = [_documents(_lengths(row)) for row in rows]
            batch["document_ids"] = _stacked(documents, width, PADDING)
        if self.cache is not None:
            batch.update(_stored(self.cache, rows, width))
        if self.seeds:
            batch["seeds"] = torch.tensor([row_seed(text) for text in texts])
        # last, as it has no rows: the size of a batch is read off its first tensor
        batch["num_items"] = batch["loss_mask"].sum().float()
        return batch


def _stacked(rows: Sequence[Tensor], width: int, fill: int | bool) -> Tensor:
    out = rows[0].new_full((len(rows), width, *rows[0].shape[1:]), fill)
    for target, row in zip(out, rows, strict=True):
        target[: len(row)] = row
    return out


def _lengths(row: Mapping[str, Any]) -> list[int]:
    size = len(row["input_ids"])
    lengths = next((list(row[name]) for name in _PACKED if row.get(name) is not None), [size])
    if sum(lengths) != size:
        raise SpecGenError(f"a row of {size} tokens has texts of {sum(lengths)} (lengths): they must add up to it.")
    return lengths


def _documents(lengths: Sequence[int]) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def _stored(cache: Features, rows: Sequence[Mapping[str, Any]], width: int) -> dict[str, Any]:
    if any("features_row" not in row for row in rows):
        raise SpecGenError("the rows name no features_row: train on the rows of the cache (FeatureCache.rows()).")
    found = [cache[int(row["features_row"])] for row in rows]
    for row, (_, last) in zip(rows, found, strict=True):
        if len(last) != len(row["input_ids"]):
            raise SpecGenError(
                f"row {row['features_row']} has {len(row['input_ids'])} tokens and the feature cache holds the states "
                f"of {len(last)} for it: the rows are not those that it was made from."
            )
    layers = zip(*(features for features, _ in found), strict=True)
    return {
        "features": tuple(_stacked(layer, width, 0) for layer in layers),
        "last_hidden": _stacked([last for _, last in found], width, 0),
    }


def row_seed(text: Tensor) -> int:
    """Return a number of 62 bits made from a row's tokens."""
    return int.from_bytes(hashlib.blake2b(text.numpy().tobytes(), digest_size=8).digest(), "little") >> 2


def load_data(source: str | Path, split: str = "train", streaming: bool = False, name: str | None = None) -> Data:
    """Open a data set: a file (jsonl, json, parquet, csv, txt), a folder of ``save_to_disk``, or a Hub id.

    ``name``: the configuration of a Hub data set.

    Raises: ``SpecGenError`` when there is none.
    """
    path = Path(source)
    try:
        if path.is_file():
            kind = _FILES.get(path.suffix)
            if kind is None:
                raise SpecGenError(f"{path} ends with {path.suffix!r}: one of {', '.join(_FILES)} is required.")
            return load_dataset(kind, data_files=str(path), split="train", streaming=streaming)
        if path.suffix in _FILES and not path.exists():
            raise SpecGenError(f"the data {str(source)!r} cannot be opened: there is no such file.")
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            found = load_from_disk(str(path))
            found = found[split] if isinstance(found, DatasetDict) else found
            return found.to_iterable_dataset() if streaming else found
        return load_dataset(str(source), name, split=split, streaming=streaming)
    except SpecGenError:
        raise
    except DatasetGenerationError as error:
        raise SpecGenError(f"the data {str(source)!r} cannot be read: {_broken(path, error)}.") from error
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise SpecGenError(
            f"the data {str(source)!r} (split {split}) cannot be opened: {reason_of(error)}. Give a file "
            f"({', '.join(_FILES)}), a folder of save_to_disk, or the id of a data set on the Hub."
        ) from error


def _broken(path: Path, error: Exception) -> str:
    """Say what is wrong with data that datasets could not read: of a file of JSON lines, with which line."""
    if path.is_file() and _FILES.get(path.suffix) == "json":
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="surrogateescape").split("\n"), 1):
            try:
                row = json.loads(line) if line.strip() else None
                check_text(json.dumps(row, ensure_ascii=False), f"line {number}")
            except json.JSONDecodeError as wrong:
                return f"line {number} is no JSON ({wrong.msg} at column {wrong.colno})"
            except SpecGenError as wrong:
                return reason_of(wrong)
    return reason_of(error.__cause__ or error)


def prepare_dataset(dataset: Data, tokenizer: Any = None, options: DataOptions | None = None) -> Data:
    """Turn a data set into rows of ``input_ids`` and ``loss_mask`` (and ``lengths`` where texts are packed).

    Taken are, in this order: input_ids, messages or conversations, prompt with completion (texts, messages, or token
    ids), text; rows of a feature cache stay as they are. ``tokenizer``: the target's; not needed for token ids. A
    stream stays one. Rows whose mask cannot be exact are left out, with a warning that counts them.

    Raises: ``SpecGenError`` for other columns, when more than half of the rows cannot be read (``strict``: when one
    cannot), when nothing is supervised, and when chats supervise almost nothing or everything.
    """
    options = options or DataOptions()
    columns = _columns(dataset)
    if "features_row" in columns:  # rows of a feature cache are as they were when it was written
        return dataset
    dataset = dataset.with_format(None)  # it may have been set to hand out tensors
    if "input_ids" in columns and any(name in columns for name in _PACKED):  # they are packed anew, if at all
        dataset = dataset.map(_Unpack(_code()), batched=True, remove_columns=columns)
        columns = ["input_ids", "loss_mask"]
    read, chats = _reader(columns, tokenizer, options)
    streams = isinstance(dataset, IterableDataset)
    more: dict[str, Any] = {} if streams else {"num_proc": options.num_proc}
    fit = _Fit(read, options.max_length, options.strict, _code())
    rows = _readable(dataset.map(fit, remove_columns=columns, features=_ROW, **more))
    _check(rows.take(_PEEKED) if streams else rows, chats)
    supervised = rows.filter(_supervises, **more)
    if not streams and len(supervised) < len(rows):
        _LOG.warning("%d of %d rows supervise nothing and are left out", len(rows) - len(supervised), len(rows))
    if tokenizer is not None:
        sample = next(iter(supervised))
        _LOG.info("a row, ⟦supervised⟧: %s", preview(sample["input_ids"], sample["loss_mask"], tokenizer))
    if not options.packing:
        return supervised
    join = _Pack(options.max_length)
    replaced = ["input_ids", "loss_mask"]
    return supervised.map(join, batched=True, batch_size=options.window, remove_columns=replaced)


def _columns(dataset: Data) -> list[str]:
    """Return the columns; a stream that does not know them is asked for a row."""
    if dataset.column_names is not None:
        return list(dataset.column_names)
    first = next(rows_in(dataset), None)
    if first is None:
        raise SpecGenError("the data holds no row.")
    return list(first)


def _readable(rows: Data) -> Data:
    """Leave out the rows that could not be read, and say how many; of a stream they are counted as it passes.

    Raises: ``SpecGenError`` when more than half of them could not, of a stream of those that are looked at first.
    """
    streams = isinstance(rows, IterableDataset)
    problems = [part["problem"] for part in rows_in(rows.take(_PEEKED))] if streams else list(rows["problem"])
    found = [problem for problem in problems if problem]
    check_left_out(len(found), len(problems), found[0] if found else "")
    if found and not streams:
        rows = rows.filter(_was_read, input_columns=["problem"])
    return (rows.filter(_CountsLeftOut()) if streams else rows).remove_columns("problem")


def rows_in(data: Data) -> Iterator[Row]:
    """Yield rows. Raises: ``SpecGenError`` for a stream's file that cannot be read further, with datasets' reason."""
    try:
        yield from data
    except ArrowInvalid as error:
        raise unreadable(error) from error


def unreadable(error: ArrowInvalid) -> SpecGenError:
    """Return what is said of a stream whose file cannot be read: it is found out when that place is reached."""
    return SpecGenError(f"the data cannot be read: {reason_of(error)}. Mend the file, or leave that row out of it.")


def check_left_out(number: int, total: int, first: str) -> None:
    """Warn of rows that are left out. Raises: ``SpecGenError`` when they are more than half of all."""
    if not number:
        return
    if number > _MOST_LEFT_OUT * total:
        raise SpecGenError(
            f"{number} of {total} rows cannot be read: this is no matter of single rows. The first: {first}"
        )
    _LOG.warning("%d of %d rows cannot be read exactly and are left out (strict stops there): %s", number, total, first)


def _was_read(problem: str) -> bool:
    return not problem


class _CountsLeftOut:
    """Let the rows of a stream through that could be read; of the others tell, ever more rarely."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, row: Row) -> bool:
        if _was_read(row["problem"]):
            return True
        self.number += 1
        if str(self.number).strip("0") == "1":  # the 1st, 10th, 100th
            _LOG.warning(
                "rows of the stream that cannot be read are left out, %d so far: %s", self.number, row["problem"]
            )
        return False


def _supervises(row: Row) -> bool:
    return any(row["loss_mask"])


Read = Callable[[Row], tuple[list[int], list[bool]]]


def _code() -> str:
    files = (Path(getfile(part)).read_bytes() for part in (prepare_dataset, ChatReader, chat_of))
    return hashlib.blake2b(b"".join(files)).hexdigest()


@dataclass(frozen=True)
class _Fit:
    """Read a row and cut it; one that cannot be read has a ``problem``, or stops everything (``strict``).

    ``code`` tells datasets, which keeps what was made on disk, that other code made it.
    """

    read: Read
    max_length: int
    strict: bool
    code: str

    def __call__(self, row: Row) -> Row:
        try:
            ids, mask = self.read(row)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            told = _told(error, row)
            if self.strict:
                raise told from error
            return {"input_ids": [], "loss_mask": [], "problem": str(told)}
        return {"input_ids": ids[: self.max_length], "loss_mask": mask[: self.max_length], "problem": ""}


def _told(error: Exception, row: Row) -> SpecGenError:
    if isinstance(error, SpecGenError):
        return error
    empty = ", ".join(name for name, value in row.items() if value is None) or "none"
    return SpecGenError(f"a row cannot be read ({error}); its columns without a value: {empty}.")


def _reader(columns: Sequence[str], tokenizer: Any, options: DataOptions) -> tuple[Read, bool]:
    """Return how a row is read, and whether it is a chat."""
    if "input_ids" in columns:
        return _read_ids, False
    given = "completion" if "completion" in columns else "answer"
    if "messages" in columns or "conversations" in columns:
        return _Chats(ChatReader(_needed(tokenizer), options.chat)), True
    if "prompt" in columns and given in columns:
        return _Pairs(tokenizer, options.chat, given), False
    if "text" in columns:
        return _Texts(_needed(tokenizer), options.chat), False
    raise SpecGenError(f"the data has the columns {', '.join(columns) or '(none)'}: {_ACCEPTED} is required.")


def _needed(tokenizer: Any) -> Any:
    if tokenizer is None:
        raise SpecGenError("the data holds text: give the target's tokenizer.")
    return tokenizer


def _mask_of(row: Mapping[str, Any]) -> Any:
    """Return a row's mask; without one every token is supervised, with several what all of them mark."""
    given = [row[name] for name in _MASKS if row.get(name) is not None]
    if len(given) > 1:
        return [all(bits) for bits in zip(*given, strict=True)]
    if given:
        return given[0]
    if row.get("labels") is not None:
        return [label != -100 for label in row["labels"]]
    return [True] * len(row["input_ids"])


def _read_ids(row: Row) -> tuple[list[int], list[bool]]:
    ids = list(row["input_ids"])
    mask = list(_mask_of(row))
    labels = row.get("labels")
    if len(ids) != len(mask):
        raise SpecGenError(f"a row has {len(ids)} input_ids and a mask of {len(mask)}: one per token is required.")
    if not all(isinstance(token, int) for token in ids):
        raise SpecGenError(f"a row's input_ids are {str(ids)[:60]}: one list of whole numbers is required.")
    if not set(mask) <= {False, True}:
        raise SpecGenError(f"a row's mask holds {sorted(set(mask))[:4]}: 0 or 1 per token is required.")
    if labels is not None and any(label not in (-100, token) for label, token in zip(labels, ids, strict=True)):
        raise SpecGenError(
            "a row's labels are neither -100 nor the token at their own place: they are shifted, or another text's. "
            "Give labels as transformers' models take them, or a loss_mask."
        )
    return ids, [bool(bit) for bit in mask]


@dataclass(frozen=True)
class _Unpack:
    """Take rows of several texts apart; ``code`` as in ``_Fit``."""

    code: str

    def __call__(self, batch: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {"input_ids": [], "loss_mask": []}
        for values in zip(*batch.values(), strict=True):
            row = dict(zip(batch, values, strict=True))
            ids, mask = _read_ids(row)
            lengths = _lengths(row)
            for end, length in zip(accumulate(lengths), lengths, strict=True):
                found["input_ids"].append(ids[end - length : end])
                found["loss_mask"].append(mask[end - length : end])
        return found


@dataclass(frozen=True)
class _Chats:
    reader: ChatReader

    def __call__(self, row: Row) -> tuple[list[int], list[bool]]:
        chat = chat_of(row)
        return self.reader.read(chat.messages, tools=chat.tools, settings=chat.settings)


@dataclass(frozen=True)
class _Texts:
    tokenizer: Any
    options: ChatOptions

    def __call__(self, row: Row) -> tuple[list[int], list[bool]]:
        _refuse_settings(row, self.options)
        ids = list(self.tokenizer(row["text"])["input_ids"])
        return ids, [True] * len(ids)


def _refuse_settings(row: Row, options: ChatOptions) -> None:
    """Refuse ``chat_template_kwargs`` where no template is applied. Raises: ``SpecGenError``."""
    if options.chat_template_kwargs or settings_of(row):
        raise SpecGenError(
            "chat_template_kwargs were given and the data holds plain text, which no chat template is applied to. "
            "Leave them out, or give messages."
        )


@dataclass(frozen=True)
class _Pairs:
    """Read a prompt and what the target wrote behind it: token ids, texts, or messages."""

    tokenizer: Any
    options: ChatOptions
    completion: str

    def __call__(self, row: Row) -> tuple[list[int], list[bool]]:
        prompt = row["prompt"]
        answer = row[self.completion]
        if are_messages(prompt):
            turns = answer if are_messages(answer) else [{"role": "assistant", "content": answer}]
            asked = with_system([message_of(turn) for turn in prompt], row)
            whole = [*asked, *map(message_of, turns)]
            reader = ChatReader(_needed(self.tokenizer), self.options)
            return reader.read(whole, len(asked), tools_of(row), settings_of(row))
        if isinstance(prompt, str) and system_of(row):
            raise SpecGenError(
                "a row has a system field beside a prompt that is plain text, which no chat template is applied to: "
                "give prompt as messages, or messages alone, or write the text into the prompt."
            )
        if isinstance(prompt, str):
            _refuse_settings(row, self.options)
        # each by itself: the target reads the prompt alone, whatever would follow it
        before = _ids(prompt, self.tokenizer, special=True)
        behind = _ids(answer, self.tokenizer, special=False)
        if isinstance(answer, str) and self.options.include_stop_token:
            end = self.tokenizer.eos_token_id
            behind += [] if end is None or behind[-1:] == [end] else [end]
        return before + behind, [False] * len(before) + [True] * len(behind)


def _ids(value: Any, tokenizer: Any, special: bool) -> list[int]:
    if isinstance(value, str):
        return list(_needed(tokenizer)(value, add_special_tokens=special)["input_ids"])
    return list(value)


def _check(rows: Data, chats: bool) -> None:
    """Count tokens. Raises: ``SpecGenError`` when the mask cannot be right."""
    tokens = supervised = 0
    for mask in _masks(rows):
        tokens = tokens + len(mask)
        supervised = supervised + int(sum(mask))
    if supervised == 0:
        raise SpecGenError(
            "0 supervised tokens: nothing in the data is the target's to write (no answer, or only behind max_length). "
            "Check roles and columns, or raise max_length."
        )
    share = supervised / tokens
    _LOG.info("%d tokens, %d of them (%.1f %%) supervised", tokens, supervised, 100 * share)
    if chats and not _LEAST_SHARE <= share < 1:
        raise SpecGenError(
            f"{supervised} of {tokens} tokens of the chats are supervised ({100 * share:.2f} %): at least "
            f"{100 * _LEAST_SHARE:.0f} % and not all are required. The chat template marks the wrong parts, or prompts "
            "dwarf the answers."
        )


def _masks(rows: Data) -> Iterator[Any]:
    if isinstance(rows, IterableDataset):
        yield from (row["loss_mask"] for row in rows)
        return
    for batch in rows.select_columns(["loss_mask"]).with_format("numpy").iter(1000):
        yield from batch["loss_mask"]


@dataclass(frozen=True)
class _Pack:
    """Put texts into rows of at most ``size`` tokens, each into the fullest row that still takes it, longest first."""

    size: int

    def __call__(self, batch: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        texts = batch["input_ids"]
        masks = batch["loss_mask"]
        bins = pack([len(text) for text in texts], self.size)
        return {
            "input_ids": [[token for i in chosen for token in texts[i]] for chosen in bins],
            "loss_mask": [[bit for i in chosen for bit in masks[i]] for chosen in bins],
            "lengths": [[len(texts[i]) for i in chosen] for chosen in bins],
        }


def pack(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Return which texts share a row, in the order of each row's first text; the longest are placed first.

    Raises: ``SpecGenError`` for a text longer than a row.
    """
    if max(lengths, default=0) > size:
        raise SpecGenError(f"a text of {max(lengths)} tokens does not fit a row of {size}: cut it first (max_length).")
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens that still fit, row), sorted
    for text in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = bisect_left(room, (lengths[text], -1))
        left, row = room.pop(at) if at < len(room) else (size, len(bins))
        if row == len(bins):
            bins.append([])
        bins[row].append(text)
        insort(room, (left - lengths[text], row))
    return sorted(sorted(chosen) for chosen in bins)
