"""Rules that change what the target writes, for those who ask for them: typical acceptance."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from hf_specgen import ops
from hf_specgen.errors import SpecGenError, warn
from hf_specgen.round.coins import SAMPLE, CoinSource, toss
from hf_specgen.round.records import Draft, Verdict
from hf_specgen.round.verify_dense import Dense


@dataclass(frozen=True)
class Typical:
    """Accept drafted tokens that are typical of the target's law: ``p > min(threshold, alpha * exp(-H(p)))``. Lossy.

    Of equally deep accepted paths the likeliest is kept; then the target writes one token of its own, drawn from its
    processed law. With ``do_sample=False`` that token is the best one and p is the softmax at temperature 1, as
    Medusa's own loop has it at that temperature: the text is not the greedy one (``rejection`` keeps that).
    ``threshold`` is the paper's epsilon, ``alpha`` its delta.

    Raises: ``SpecGenError`` for values outside of (0, 1] and [0, inf).
    Source: Cai et al. 2024, "Medusa: simple LLM inference acceleration framework with multiple decoding heads", 3.3.1.
    """

    threshold: float = 0.09
    alpha: float = 0.3

    def __post_init__(self) -> None:
        if not (0 < self.threshold <= 1 and 0 <= self.alpha < float("inf")):
            raise SpecGenError(
                f"Typical(threshold={self.threshold}, alpha={self.alpha}): 0 < threshold <= 1 and 0 <= alpha are "
                "required. The paper's values are the defaults, 0.09 and 0.3."
            )

    def __str__(self) -> str:
        return f"typical(threshold={self.threshold:g}, alpha={self.alpha:g})"


def verify_typical(dense: Dense | None, draft: Draft, coins: CoinSource | None, rule: Typical) -> Verdict:
    """Keep the deepest path of typical tokens. The drafter's law plays no part, so drawn drafts are refused.

    ``dense``: logits that are warped already; their temperature is 1, or 0 for a greedy target.
    Raises: ``SpecGenError`` for drafts with a q, and where the laws of all nodes may not be asked for.
    """
    check_lossy(rule, draft.q is not None, dense is not None)
    assert dense is not None
    batch, scored, vocab = dense.logits.shape
    flat = dense.logits.reshape(-1, vocab)
    depth = draft.tree.depth.expand(batch, -1)
    coin = torch.zeros(batch, scored, dtype=torch.float64, device=flat.device)
    if coins is not None:
        coin = toss(coins, batch, scored, SAMPLE, 1, flat.device).squeeze(-1).gather(1, depth)
    one = torch.ones(len(flat), device=flat.device)
    statistics = ops.row_stats(flat, one, False)
    token, law, invalid = ops.row_draw(flat, one, one.int(), one, one, coin.flatten(), *statistics)
    if dense.temperature == 0:
        token, _ = ops.argmax(flat)
    law = law.view(batch, scored, -1)
    token = token.view(batch, scored)
    invalid = invalid.view(batch, scored)
    target = (dense.logits, one[:batch], law, token, invalid)
    shape = (draft.tokens, draft.tree.parents, draft.n_valid)
    return Verdict(*ops.typical_tree(*target, *shape, rule.threshold, rule.alpha))


def read_rule(rule: str | Typical, exact: Collection[str]) -> str | Typical:
    """Return one of the exact rules as it is, and a lossy one as an object.

    Raises: ``SpecGenError`` listing the rules.
    """
    if isinstance(rule, Typical) or rule in exact:
        return rule
    if rule == "typical":
        return Typical()
    raise SpecGenError(
        f"rule={rule!r} is unknown: one of {', '.join(sorted(exact))} is required, or 'typical', which is lossy."
    )


def check_lossy(rule: str | Typical, draws: bool, takes_any_text: bool) -> None:
    """Refuse what a lossy rule cannot judge: drafts drawn from a law, processors that must not see every text.

    Raises: ``SpecGenError`` saying what to do.
    """
    if isinstance(rule, Typical) and draws:
        raise SpecGenError(
            f"rule={str(rule)!r} got a drafter that draws its tokens: it judges picked ones only. Use a drafter with "
            "sample=False, or rule='rejection'."
        )
    if isinstance(rule, Typical) and not takes_any_text:
        raise SpecGenError(
            f"rule={str(rule)!r} reads the law behind every drafted token, and a logits processor of this call may be "
            "asked only about texts that the target writes. Leave the processor out, or use rule='rejection'."
        )


def warn_lossy(rule: Typical) -> None:
    """Say that the text is not the target's own, at the line outside of libraries that asked for it."""
    warn(
        f"rule={str(rule)!r} is lossy: the text does not follow the target's own law. Use rule='rejection' (the "
        "default) for exact text."
    )
