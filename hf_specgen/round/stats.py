"""Acceptance statistics: counts of rounds, and the numbers made from them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import index
from time import perf_counter
from typing import Any, Literal, SupportsIndex

from torch.serialization import DEFAULT_PROTOCOL as _FILE_PROTOCOL

from hf_specgen.errors import warn
from hf_specgen.round.records import Round


@dataclass
class RowStats:
    """Count what happened in one row. Names follow vLLM's per-request metrics.

    What stands behind the end of a text was not written: it is neither accepted nor a place that a draft reached.
    ``num_draft_tokens`` has it, for it was drafted and scored. ``num_round_tokens`` are the tokens that rounds wrote:
    ``num_tokens`` without the one that follows the prompt.
    """

    num_rounds: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_tokens: int = 0
    num_round_tokens: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    def add(self, proposed_depth: int, proposed: int, accepted: int, written: int) -> None:
        """Count one round: nodes proposed, how deep they reached, how many were accepted, and tokens written.

        ``written`` is ``accepted + 1`` unless the text ended before.
        """
        reached = proposed_depth if written > accepted else written
        self.num_rounds += 1
        self.num_drafts += proposed > 0
        self.num_draft_tokens += proposed
        self.num_accepted_tokens += min(accepted, written)
        self.num_round_tokens += written
        grow = reached - len(self.drafted_at)
        self.drafted_at += [0] * grow
        self.accepted_at += [0] * grow
        for depth in range(reached):
            self.drafted_at[depth] += 1
            self.accepted_at[depth] += depth < accepted

    def merge(self, other: RowStats) -> None:
        """Add another row's counts to these."""
        self.num_rounds += other.num_rounds
        self.num_drafts += other.num_drafts
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        self.num_tokens += other.num_tokens
        self.num_round_tokens += other.num_round_tokens
        grow = len(other.drafted_at) - len(self.drafted_at)
        self.drafted_at += [0] * grow
        self.accepted_at += [0] * grow
        for depth, (drafted, accepted) in enumerate(zip(other.drafted_at, other.accepted_at, strict=True)):
            self.drafted_at[depth] += drafted
            self.accepted_at[depth] += accepted

    @property
    def mean_acceptance_length(self) -> float:
        """Return tokens written per draft: the bonus token counts, rounds without a draft do not."""
        without_draft = self.num_rounds - self.num_drafts  # each of these wrote one token
        return (self.num_round_tokens - without_draft) / self.num_drafts if self.num_drafts else 1.0

    @property
    def tokens_per_round(self) -> float:
        """Return tau: tokens written per round, the one that follows the prompt left out."""
        return self.num_round_tokens / self.num_rounds if self.num_rounds else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Return alpha: accepted / drafted tokens."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_rates(self) -> list[float]:
        """Return, per draft position, accepted / drafts that reached it (unconditional)."""
        return [a / d if d else 0.0 for a, d in zip(self.accepted_at, self.drafted_at, strict=True)]


@dataclass
class AcceptanceStats:
    """Accumulate one ``generate()`` call: per row, in total, and where the seconds went.

    Units: seconds of wall time. ``verify_seconds`` holds the target's forward (``forward_seconds``) and the verdict;
    ``other_seconds`` everything else after the prompt; ``prefill_seconds`` the prompt. ``num_broken_rounds`` are
    those whose drafter computed logits that are NaN or infinite.
    """

    drafter: str = ""
    rule: str = "rejection"
    lossless: bool = True
    rows: list[RowStats] = field(default_factory=list)
    num_forwards: int = 0
    num_broken_rounds: int = 0
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    forward_seconds: float = 0.0
    other_seconds: float = 0.0

    @contextmanager
    def timed(self, part: Literal["prefill", "draft", "verify", "other"]) -> Iterator[None]:
        """Add the wall time of the block to the seconds of one part of the call."""
        begun = perf_counter()
        yield
        elapsed = perf_counter() - begun
        if part == "prefill":
            self.prefill_seconds += elapsed
        elif part == "draft":
            self.draft_seconds += elapsed
        elif part == "verify":
            self.verify_seconds += elapsed
        else:
            self.other_seconds += elapsed

    def add(self, round: Round, written: list[int]) -> None:
        """Count one verified round, of which each row wrote so many tokens: none where it was finished before.

        Warns: once, where the drafter's own logits were no numbers.
        """
        self.num_forwards += 1
        if round.broken and not self.num_broken_rounds:
            warn(
                f"{self.drafter} computes logits that are NaN or infinite, so that its drafts are worth nothing: the "
                "text is the target's own, only slower. Check its weights and dtype (float16 overflows where bfloat16 "
                "and float32 do not)."
            )
        self.num_broken_rounds += round.broken
        for row, path in enumerate(round.paths):
            if written[row]:
                self.rows[row].add(round.reached[row], round.proposed[row], len(path), written[row])

    @property
    def total(self) -> RowStats:
        """Return the sum over rows."""
        total = RowStats()
        for row in self.rows:
            total.merge(row)
        return total

    @property
    def num_drafts(self) -> int:
        """Return how many (row, round) pairs proposed at least one token."""
        return self.total.num_drafts

    @property
    def num_draft_tokens(self) -> int:
        """Return how many tokens were proposed."""
        return self.total.num_draft_tokens

    @property
    def num_accepted_tokens(self) -> int:
        """Return how many proposed tokens were accepted and written."""
        return self.total.num_accepted_tokens

    @property
    def mean_acceptance_length(self) -> float:
        """Return tokens written per draft over all rows (the bonus token counts)."""
        return self.total.mean_acceptance_length

    @property
    def tokens_per_round(self) -> float:
        """Return tau over all rows: tokens per row and target forward."""
        return self.total.tokens_per_round

    @property
    def acceptance_rates(self) -> list[float]:
        """Return the unconditional acceptance rate per draft position."""
        return self.total.acceptance_rates

    @property
    def seconds(self) -> float:
        """Return the wall time of the whole call inside the loop."""
        return self.prefill_seconds + self.draft_seconds + self.verify_seconds + self.other_seconds

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        """Become plain numbers in a file of ``torch.save``, which the default ``torch.load`` and any process reads.

        It pickles with protocol 2; others (copies, other processes) keep the object.
        """
        if index(protocol) > _FILE_PROTOCOL:
            return super().__reduce_ex__(protocol)
        return OrderedDict, (), None, None, iter(self.to_dict().items())

    def to_dict(self) -> dict[str, object]:
        """Return plain numbers, ready for JSON."""
        total = self.total
        return {
            "drafter": self.drafter,
            "rule": self.rule,
            "lossless": self.lossless,
            "num_rows": len(self.rows),
            "num_forwards": self.num_forwards,
            "num_broken_rounds": self.num_broken_rounds,
            "num_tokens": total.num_tokens,
            "num_round_tokens": total.num_round_tokens,
            "num_rounds": total.num_rounds,
            "num_drafts": total.num_drafts,
            "num_draft_tokens": total.num_draft_tokens,
            "num_accepted_tokens": total.num_accepted_tokens,
            "mean_acceptance_length": total.mean_acceptance_length,
            "tokens_per_round": total.tokens_per_round,
            "draft_acceptance_rate": total.draft_acceptance_rate,
            "acceptance_rates": total.acceptance_rates,
            "seconds": self.seconds,
            "prefill_seconds": self.prefill_seconds,
            "draft_seconds": self.draft_seconds,
            "verify_seconds": self.verify_seconds,
            "forward_seconds": self.forward_seconds,
            "other_seconds": self.other_seconds,
        }
