"""Count which ids a target writes most, for a drafter with a shorter vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hf_specgen.errors import SpecGenError, reason_of

if TYPE_CHECKING:
    from hf_specgen.checkpoints.formats.base import Checkpoint


@dataclass(frozen=True)
class Counted:
    """Hold where ids are counted: the data, whose tokenizer reads it, and what its chat template is told."""

    data: str | None
    split: str = "train"
    tokenizer: str | None = None
    template: dict[str, Any] = field(default_factory=dict)


def with_fewer_ids(found: Checkpoint, size: int, source: Counted) -> Checkpoint:
    """Return a checkpoint that drafts the ``size`` ids which are supervised most in a data set, and ends of text.

    Raises: ``SpecGenError`` for no data, no tokenizer, or a size that is no reduction.
    """
    from hf_specgen.checkpoints.formats.shortlist import drafted_ids, shortened
    from hf_specgen.cli.session import note

    known = drafted_ids(found)
    data = source.data
    tokenizer = source.tokenizer or found.config.target.get("name") or None
    if data is None or not size < len(known):
        raise SpecGenError(
            f"--draft-vocab-size {size}: fewer ids than the drafter's {len(known)}, and --data FILE (answers of the "
            "target, in which ids are counted) are required."
        )
    try:
        from hf_specgen.trainers.data import DataOptions, load_data, prepare_dataset
        from hf_specgen.trainers.masks import ChatOptions
        from hf_specgen.trainers.sources import needs_tokenizer
        from hf_specgen.trainers.vocabulary import choose_vocabulary, count_supervised, coverage
    except ImportError as error:
        raise SpecGenError(f"counting needs {error.name}, which is not installed: pip install {error.name}") from None
    rows = load_data(data, source.split)
    speaks = _tokenizer(tokenizer) if needs_tokenizer(rows) else None
    options = DataOptions(chat=ChatOptions(chat_template_kwargs=source.template))
    counts = count_supervised(prepare_dataset(rows, speaks, options), found.config.vocab_size)
    before = counts[known].clone()
    ends = [] if speaks is None or speaks.eos_token_id is None else [speaks.eos_token_id]
    places = [int((known == end).nonzero()) for end in ends if bool((known == end).any())]
    _, kept = choose_vocabulary(before, size, places)
    share = 100 * coverage(counts, known[kept])
    note(f"a draft vocabulary of {size} ids, {share:.1f} % of the supervised tokens in {data}")
    short = shortened(found, known[kept])
    return replace(short, notes=(*short.notes, f"counted in {data}: {share:.1f} % of its tokens can be drafted"))


def _tokenizer(name: str | None) -> Any:
    from transformers import AutoTokenizer

    if name is None:
        raise SpecGenError("--data holds texts and the checkpoint names no target: give --target for its tokenizer.")
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise SpecGenError(f"the tokenizer of {name} cannot be loaded: {reason_of(error)}. Give --target.") from error
