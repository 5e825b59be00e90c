"""Sequences: the rows being written, where each stops, and the keys of their coins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria, PreTrainedTokenizerBase, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from hf_specgen.errors import SpecGenError
from hf_specgen.round.coins import Coins
from hf_specgen.round.costs import Costs
from hf_specgen.round.criteria import Criteria
from hf_specgen.round.records import Round
from hf_specgen.round.typical import Typical
from hf_specgen.round.warp import Warp

OnTokens = Callable[[int, list[int]], None]
"""Receive a row's index and its new tokens, once a round."""


@dataclass(frozen=True)
class DraftRequest:
    """Hold what the caller asked of draft lengths; None leaves the choice to the drafter."""

    num_tokens: int | None = None
    schedule: str | None = None
    confidence: float | None = None


@dataclass(frozen=True)
class Stops:
    """Sort stopping criteria into those with a fast path and those that must see every prefix.

    Raises: ``SpecGenError`` when no length limit is among them.
    """

    max_length: int
    eos: frozenset[int]
    others: tuple[StoppingCriteria, ...]

    @classmethod
    def sort(cls, criteria: Sequence[StoppingCriteria]) -> Stops:
        """Sort criteria as ``generate()`` prepared them."""
        limits = [criterion.max_length for criterion in criteria if type(criterion) is MaxLengthCriteria]
        if not limits:
            raise SpecGenError("no length limit was given: pass max_new_tokens= or max_length=.")
        ends = [criterion for criterion in criteria if type(criterion) is EosTokenCriteria]
        eos = frozenset(int(token) for criterion in ends for token in criterion.eos_token_id.tolist())
        fast = (MaxLengthCriteria, EosTokenCriteria)
        return cls(min(limits), eos, tuple(criterion for criterion in criteria if type(criterion) not in fast))


@dataclass
class Sequences:
    """Hold the rows: the padded prompt ``prompt (B, L)``, the new tokens of each, and who is finished.

    ``tokens[r]`` are row ``r``'s real tokens, pads left out; ``lengths[r]`` their number. ``seeds`` and ``row_ids``
    ``(B,)`` key the coins, so a row's text does not depend on its neighbours. ``vocab_size`` is the width of the
    target's logits, not what its config says.
    """

    prompt: Tensor
    tokens: list[list[int]]
    stops: Stops
    seeds: Tensor
    row_ids: Tensor
    warp: Warp
    vocab_size: int
    greedy: bool = True
    rule: str | Typical = "rejection"
    request: DraftRequest = field(default_factory=DraftRequest)
    streamer: BaseStreamer | None = None
    on_tokens: OnTokens | None = None
    score_log: list[list[Tensor]] | None = None
    costs: Costs = field(default_factory=Costs)
    target_size: int = 1
    tokenizer: PreTrainedTokenizerBase | None = None

    def __post_init__(self) -> None:
        rows, width = self.prompt.shape
        self.budget = max(1, self.stops.max_length - width)  # plain decoding asks its criteria after a token
        self.ids = self.prompt.new_zeros(rows, width + self.budget)
        self.ids[:, :width] = self.prompt
        self.new = [0] * rows
        self.finished = [False] * rows
        self._criteria = Criteria(self.stops.others, rows)
        self.warp.begin(width)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def lengths(self) -> list[int]:
        """Return each row's number of real tokens, prompt included."""
        return [len(row) for row in self.tokens]

    @property
    def active(self) -> list[bool]:
        """Return which rows are still being written."""
        return [not finished for finished in self.finished]

    @property
    def done(self) -> bool:
        """Tell whether every row is finished."""
        return all(self.finished)

    @property
    def remaining(self) -> list[int]:
        """Return how many tokens each row may yet write, 0 when it is finished."""
        return [0 if f else self.budget - n for f, n in zip(self.finished, self.new, strict=True)]

    @property
    def room(self) -> list[int]:
        """Return how many draft tokens each row can use: one token of its budget is the target's own."""
        return [max(0, left - 1) for left in self.remaining]

    def left_padded(self) -> Tensor:
        """Return the real tokens ``(B, longest)``, zeros before shorter rows."""
        width = max(self.lengths)
        return torch.tensor([[0] * (width - len(row)) + row for row in self.tokens], device=self.prompt.device)

    def roots(self, rows: Sequence[int]) -> Tensor:
        """Return the newest token of the rows named, ``(R, 1)``."""
        return torch.tensor([[self.tokens[row][-1]] for row in rows], device=self.prompt.device)

    def prefix(self, row: int) -> Tensor:
        """Return row ``row`` as processors and criteria see it: ``(1, L + new)``, left padding included."""
        return self.ids[row : row + 1, : self.prompt.shape[1] + self.new[row]]

    def coins(self) -> Coins:
        """Return the coins of the next round: depth 0 is each row's next token."""
        positions = torch.tensor(self.lengths, device=self.prompt.device)
        return Coins(self.seeds, self.row_ids, positions)

    def append(self, round: Round) -> list[int]:
        """Add a round's tokens to every unfinished row, cut at its first stop; return how many each row kept.

        Raises: ``SpecGenError`` when the target's logits were not numbers.
        """
        kept = [0] * len(self)
        for row, tokens in enumerate(round.emitted):
            if self.finished[row]:
                continue
            if round.host[row][0]:
                raise SpecGenError(
                    f"the target's logits of row {row} at position {len(self.tokens[row])} are NaN or have no finite "
                    "value: "
                    "finite logits are required. Check the model's dtype and the logits processors."
                )
            kept[row] = self._extend(row, tokens)
        if self.done:
            self.warp.finish()
            self._criteria.finish()
        return kept

    def _extend(self, row: int, tokens: list[int]) -> int:
        start = self.prompt.shape[1] + self.new[row]
        tokens = tokens[: self.budget - self.new[row]]
        self.ids[row, start : start + len(tokens)] = torch.tensor(tokens)
        before = self.new[row]
        for token in tokens:
            self.tokens[row].append(token)
            self.new[row] += 1
            self.warp.keep(row, token)
            if self._stops_at(row, token):
                self.finished[row] = True
                break
        kept = self.new[row] - before
        self._stream(row, tokens[:kept])
        return kept

    def _stops_at(self, row: int, token: int) -> bool:
        stop = token in self.stops.eos or self.new[row] >= self.budget
        if not self._criteria:
            return stop
        scores = tuple(self.score_log[row][: self.new[row]]) if self.score_log is not None else None
        return self._criteria.meets(row, self.prefix(row), scores) or stop

    def _stream(self, row: int, tokens: list[int]) -> None:
        if self.streamer is not None:
            for token in tokens:
                self.streamer.put(torch.tensor([token]))
        if self.on_tokens is not None:
            self.on_tokens(row, tokens)

    def output(self, pad: int) -> Tensor:
        """Return ``(B, L + longest)``: the padded prompt and the new tokens, ``pad`` behind finished rows."""
        width = self.prompt.shape[1]
        longest = max(self.new)
        result = self.ids[:, : width + longest].clone()
        for row, count in enumerate(self.new):
            result[row, width + count :] = pad
        return result
