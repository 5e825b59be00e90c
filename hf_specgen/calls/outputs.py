"""OutputLog: what ``return_dict_in_generate`` promises, collected token by token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput

from hf_specgen.models.target import Scores
from hf_specgen.round.records import Round
from hf_specgen.round.sequences import Sequences
from hf_specgen.round.stats import AcceptanceStats


class OutputLog:
    """Collect scores, logits and hidden states per emitted token; rows are joined by token index at the end.

    Where a row has finished, its scores put all mass on the pad token and its hidden states are zero.
    """

    def __init__(self, config: GenerationConfig, rows: int) -> None:
        asked = bool(config.return_dict_in_generate)
        self.returns_dict = asked
        self.scores: list[list[Tensor]] | None = [[] for _ in range(rows)] if asked and config.output_scores else None
        self.logits: list[list[Tensor]] | None = [[] for _ in range(rows)] if asked and config.output_logits else None
        self.hidden: list[list[tuple[Tensor, ...]]] | None = None
        if asked and config.output_hidden_states:
            self.hidden = [[] for _ in range(rows)]
        self._prompt_hidden: tuple[Tensor, ...] = ()
        self._width = 0

    @property
    def is_empty(self) -> bool:
        """Tell whether nothing per token was asked for."""
        return self.scores is None and self.logits is None and self.hidden is None

    def add(self, round: Round, scores: Scores, active: list[bool]) -> None:
        """Log every token that a round emitted, before it is cut."""
        if self.is_empty:
            return
        if self.hidden is not None and not self._prompt_hidden:
            self._prompt_hidden = scores.hidden
        for row, path in enumerate(round.paths):
            if active[row]:
                self._add_row(row, torch.tensor([0, *(node + 1 for node in path)], device=scores.device), scores)

    def _add_row(self, row: int, nodes: Tensor, scores: Scores) -> None:
        place = scores.place(row)
        owner = torch.full_like(nodes, place)
        if self.logits is not None:
            self.logits[row].extend(scores.raw(owner, nodes).float().split(1))
        if self.scores is not None:
            self.scores[row].extend(scores.at(owner, nodes).split(1))
        if self.hidden is not None:
            for node in nodes.tolist():
                self.hidden[row].append(tuple(layer[place : place + 1, node : node + 1] for layer in scores.hidden))

    def result(self, sequences: Sequences, pad: int, stats: AcceptanceStats) -> Tensor | GenerateDecoderOnlyOutput:
        """Return what ``generate()`` returns, with ``speculation`` on it."""
        tokens = sequences.output(pad)
        self._width = sequences.prompt.shape[1]
        if not self.returns_dict:
            tokens.speculation = stats  # type: ignore[attr-defined]
            return tokens
        steps = max(sequences.new)
        output = GenerateDecoderOnlyOutput(
            sequences=tokens,
            scores=_join(self.scores, sequences.new, steps, pad),
            logits=_join(self.logits, sequences.new, steps, pad),
            hidden_states=self._join_hidden(sequences.new, steps),
        )
        output.speculation = stats
        return output

    def _padded(self, layer: Tensor) -> Tensor:
        """Give the prompt's states the width of the padded prompt (columns that pad every row are not read)."""
        return torch.nn.functional.pad(layer, (0, 0, self._width - layer.shape[1], 0))

    def _join_hidden(self, counts: list[int], steps: int) -> tuple[tuple[Tensor, ...], ...] | None:
        if self.hidden is None:
            return None
        joined: list[tuple[Tensor, ...]] = [tuple(self._padded(layer) for layer in self._prompt_hidden)]
        empty = tuple(torch.zeros_like(layer[:1, :1]) for layer in self._prompt_hidden)
        for step in range(1, steps):
            rows = [log[step] if step < count else empty for log, count in zip(self.hidden, counts, strict=True)]
            joined.append(tuple(torch.cat(layers) for layers in zip(*rows, strict=True)))
        return tuple(joined)


def _join(log: list[list[Tensor]] | None, counts: list[int], steps: int, pad: int) -> tuple[Any, ...] | None:
    if log is None:
        return None
    finished = torch.full_like(log[0][0], float("-inf"))
    finished[0, pad] = 0.0
    return tuple(
        torch.cat([row[step] if step < count else finished for row, count in zip(log, counts, strict=True)])
        for step in range(steps)
    )
