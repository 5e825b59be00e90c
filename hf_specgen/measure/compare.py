"""Compare texts and times: where two texts part, how near a tie that was, and what a ratio may be called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Divergence:
    """Hold where a text leaves the plain one, and the target's scores there, the plain text forced before it.

    ``plain`` and ``other`` are the two tokens (None: that text had already ended). ``gap`` is the distance between
    the two best scores. ``shortfall`` is how far the lower of the two tokens stays below the best score: rounding
    explains the divergence only when it is small (None: one text had ended, which rounding never explains).
    """

    position: int
    plain: int | None
    other: int | None
    gap: float
    shortfall: float | None

    def words(self, tokenizer: Any) -> tuple[str, str]:
        """Return the plain and the other token in quotes, or that the text ended there."""
        return _token_words(tokenizer, self.plain), _token_words(tokenizer, self.other)

    def is_tie(self, tolerance: float) -> bool:
        """Say whether both tokens are the best one up to ``tolerance``."""
        return self.shortfall is not None and self.shortfall <= tolerance


def _token_words(tokenizer: Any, token: int | None) -> str:
    if token is None:
        return "end of text"
    return repr(tokenizer.decode([token]))


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first position where two token lists differ, a missing token included; None when they are equal."""
    for position, (left, right) in enumerate(zip(plain, other, strict=False)):
        if left != right:
            return position
    return None if len(plain) == len(other) else min(len(plain), len(other))


def find_divergence(model: Any, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int]) -> Divergence | None:
    """Return where ``other`` leaves ``plain`` (new tokens only) and the target's gap there; None when equal."""
    position = first_difference(plain, other)
    if position is None:
        return None
    scores = next_scores(model, torch.tensor([[*prompt, *plain[:position]]]))[0]
    best, second = scores.topk(2).values.tolist()
    left = plain[position] if position < len(plain) else None
    right = other[position] if position < len(other) else None
    shortfall = None if left is None or right is None else best - float(scores[[left, right]].min())
    return Divergence(position, left, right, best - second, shortfall)


def next_scores(model: Any, prefixes: torch.Tensor, **settings: Any) -> torch.Tensor:
    """Return the target's processed scores for the token after each prefix, from one plain forward over all of them.

    ``settings`` are those of ``generate()``; greedy unless they say otherwise.

    Shapes: ``prefixes (R, T)``; returns ``(R, V)`` float32 on the CPU.
    """
    # generate() and not forward(): the scores are those that decoding sees, processors included
    block = prefixes.to(model.device)
    asked = {"max_new_tokens": 1, "return_dict_in_generate": True, "output_scores": True}
    options = {"do_sample": False, **settings, **asked}
    out = model.generate(input_ids=block, attention_mask=torch.ones_like(block), **options)
    scores: torch.Tensor = out.scores[0]
    return scores.float().cpu()


def tie_tolerance(dtype: torch.dtype) -> float:
    """Return the gap up to which a different greedy token is rounding noise in ``dtype``."""
    # bfloat16 logits of one text differ by up to about 0.5 between a pass of one token and a pass of several
    known = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.1}
    return known.get(dtype, 0.5)


def ratio_words(ratio: float) -> str:
    """Say what a ratio of plain time to our time is: a speed-up only when it is one."""
    if ratio >= 1.0:
        return f"speed-up {ratio:.2f}x"
    # three places where two would round the loss away
    return f"slower: {ratio:.2f}x" if ratio < 0.995 else f"slower: {min(ratio, 0.999):.3f}x"


def short_ratio(ratio: float) -> str:
    """Say the same in a table cell."""
    return ratio_words(ratio).removeprefix("speed-up ")
