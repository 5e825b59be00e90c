"""What a target lends its drafter and some readers expect in the drafter's own file: embedding and head."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from hf_specgen.checkpoints.config import DrafterConfig
from hf_specgen.checkpoints.formats.base import Source
from hf_specgen.checkpoints.formats.shared import FLOATS
from hf_specgen.errors import IncompatibleDrafter
from hf_specgen.models.facts import fingerprint_of

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
_NAMES = {
    EMBEDDING: ("embed_tokens", "wte", "embed_in", "word_embeddings", "tok_embeddings"),
    HEAD: ("lm_head", "embed_out", "output"),
}


def lent_by(target: Source, config: DrafterConfig, wanted: Iterable[str]) -> dict[str, Tensor]:
    """Read the matrices that a drafter borrows off the target's own files, by our names; a tied head is the embedding.

    Raises: ``IncompatibleDrafter`` when the files hold no such matrix of the drafter's sizes, a quantised one, or a
    head with a bias.
    """
    places = {name: _place(target, config, name) for name in wanted}
    loaded = target.load(sorted(set(places.values())))
    for name, tensor in loaded.items():
        if tensor.dtype not in FLOATS:
            raise IncompatibleDrafter(
                f"{target.name} holds {name} as {tensor.dtype}, quantised: float16, bfloat16 or float32 are required "
                "of what a drafter's file shall hold too. Give --target the unquantised model."
            )
    return {name: loaded[place].clone() for name, place in places.items()}


def is_made_for(target: Source, config: DrafterConfig) -> bool:
    """Tell whether files are those of the target that a drafter was made for, True where it cannot be told."""
    known, table = config.target.get("fingerprint"), _called(target, EMBEDDING)
    head = _called(target, HEAD) or table
    if not known or not table:
        return True
    loaded = target.load(sorted({table, head}))
    return fingerprint_of(loaded[table], loaded[head]) in ("", known)


def _place(target: Source, config: DrafterConfig, wanted: str) -> str:
    """Return how the target calls a matrix."""
    found = _called(target, wanted)
    if wanted == HEAD and found and found.removesuffix("weight") + "bias" in target.shapes:
        raise IncompatibleDrafter(
            f"the head of {target.name} has a bias ({found.removesuffix('weight')}bias), which no file of a drafter "
            "holds: readers would draft with another head. Keep the specgen layout."
        )
    found = found or (_called(target, EMBEDDING) if wanted == HEAD else "")
    shape = target.shapes.get(found, ())
    rows = config.vocab_size or (shape[0] if shape else 0)  # 0: the drafter's file did not say
    if shape != (rows, config.target_hidden_size):
        raise IncompatibleDrafter(
            f"{target.name} was asked for the matrix that the drafter borrows ({wanted}, {rows} x "
            f"{config.target_hidden_size}) and has {f'{found} of the shape {list(shape)}' if found else 'none'}: the "
            "target that the drafter was made for is required (--target)."
        )
    return found


def _called(target: Source, wanted: str) -> str:
    named = (name for name in sorted(target.shapes, key=len) if name.endswith(".weight") or name == wanted)
    return next((name for name in named if name.split(".")[-2] in _NAMES[wanted]), "")
