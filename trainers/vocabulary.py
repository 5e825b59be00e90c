"""Reduce a drafter's vocabulary to the ids that the target writes most, counted over supervised tokens.

Source: Zhao et al. 2025, "FR-Spec: accelerating large-vocabulary language models via frequency-ranked speculative
sampling".
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from torch import Tensor

from hf_specgen.errors import SpecGenError

_ROWS = 1000  # that are read at once


def count_supervised(rows: Any, vocab_size: int, limit: int | None = None) -> Tensor:
    """Count how often each id is supervised in prepared rows (a data set, a stream, or a list of rows).

    ``limit``: rows that are counted, needed for an endless stream. Where processes work together each passes its own
    part (or all of them the same rows) and calls ``summed_over_processes``.

    Shapes: returns ``(vocab_size,)`` int64. Raises: ``SpecGenError`` for ids beyond the vocabulary.
    """
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for ids in _supervised(rows, limit):
        if len(ids) and (int(ids.max()) >= vocab_size or int(ids.min()) < 0):
            raise SpecGenError(
                f"the data has the token id {int(ids.max())} and the target {vocab_size} ids: it was tokenised for "
                "another model."
            )
        counts += torch.bincount(ids, minlength=vocab_size)
    return counts


def _supervised(rows: Any, limit: int | None) -> Iterable[Tensor]:
    if isinstance(rows, Dataset):
        known = rows if limit is None else rows.select(range(min(limit, len(rows))))
        batches = known.select_columns(["input_ids", "loss_mask"]).with_format("numpy").iter(_ROWS)
        pairs = (
            (batch["input_ids"][i], batch["loss_mask"][i]) for batch in batches for i in range(len(batch["loss_mask"]))
        )
    else:
        pairs = ((row["input_ids"], row["loss_mask"]) for row in islice(rows, limit))
    for ids, mask in pairs:
        yield torch.as_tensor(ids)[torch.as_tensor(mask, dtype=torch.bool)]


def summed_over_processes(counts: Tensor, device: torch.device | str = "cpu") -> Tensor:
    """Add up the counts of all processes, so that each chooses the same ids; ``device``: that they talk on."""
    if not (dist.is_available() and dist.is_initialized()):
        return counts
    total = counts.to(device)
    dist.all_reduce(total)
    return total.cpu()


def choose_vocabulary(counts: Tensor, size: int, always: Iterable[int] = ()) -> tuple[Tensor, Tensor]:
    """Choose the ``size`` most frequent ids, and among them ``always`` (ends of text, special tokens).

    Of equally frequent ids the lower ones are chosen, so that every process and every run chooses the same.

    Shapes: ``counts (V,)``. Returns: ``d2t (size,)`` int64 offsets (target id minus draft id) and ``t2d (V,)`` bool,
    as checkpoints hold them.
    Raises: ``SpecGenError`` for a size that does not hold ``always``, or that is no reduction.
    """
    kept = torch.tensor(sorted(set(always)), dtype=torch.long)
    if not 0 < size <= len(counts) or len(kept) > size:
        raise SpecGenError(
            f"a draft vocabulary of {size} ids was asked for: the target has {len(counts)}, and {len(kept)} special "
            "ids are always in it."
        )
    if len(kept) and (int(kept[-1]) >= len(counts) or int(kept[0]) < 0):
        raise SpecGenError(f"the special ids {kept.tolist()} are not all within the target's {len(counts)}.")
    ranked = counts.to(torch.long).clone()
    ranked[kept] = ranked.max() + 1
    chosen = ranked.argsort(descending=True, stable=True)[:size].sort().values
    known = torch.zeros(len(counts), dtype=torch.bool)
    known[chosen] = True
    return chosen - torch.arange(size), known


def coverage(counts: Tensor, known: Tensor) -> float:
    """Return the share of counted tokens that are in a vocabulary ``known (V,)`` (``t2d``)."""
    return float(counts[known].sum() / counts.sum().clamp(min=1))
