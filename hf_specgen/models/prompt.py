"""Prompt: what the first pass reads, how it is read, and which position ids the text has from then on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_specgen.models.passes import ForwardOutput, Pass
from hf_specgen.models.visibility import placed


class PromptReader(Protocol):
    """Run the passes of a prompt over every lane."""

    device: torch.device

    def read_whole(self, prompt: Prompt, hidden: bool) -> ForwardOutput:
        """Read a left-padded prompt in one pass of the model's own mask."""
        ...

    def run_lanes(self, batch: Pass) -> ForwardOutput:
        """Run a pass behind what was committed."""
        ...

    def commit_lanes(self, counts: list[int]) -> None:
        """Keep ``counts[r]`` positions of the last pass."""
        ...


@dataclass(frozen=True)
class Positions:
    """Give tokens their position ids: the index in their text. Models that count otherwise need a subclass."""

    def ids(self, index: Tensor) -> Tensor:
        """Return the position ids of tokens at ``index (R, S)`` of their texts, in the shape that the model takes."""
        return index

    def keep(self, order: list[int]) -> Positions:
        """Return the rule for the lanes that stay: lane ``order[i]`` at place ``i``."""
        return self


@dataclass(frozen=True)
class Prompt:
    """Hold left-padded prompts: lane ``r`` has ``lengths[r]`` real tokens at the end of ``ids (R, W)``.

    ``inputs`` are the further arguments of the model's first pass (pictures, an encoder's output), by name; tensors
    among them have a row a lane. ``positions`` is the rule of every pass, this one included. A prompt that is read
    otherwise (in chunks, behind a prefix that is cached already) overrides ``read``.
    """

    ids: Tensor
    lengths: list[int]
    inputs: Mapping[str, Any] = field(default_factory=dict)
    positions: Positions = field(default_factory=Positions)

    @property
    def width(self) -> int:
        """Return W, the number of columns."""
        return self.ids.shape[1]

    def read(self, reader: PromptReader, hidden: bool = False) -> ForwardOutput:
        """Read every column in one pass."""
        return reader.read_whole(self, hidden)

    def pads(self) -> Tensor:
        """``(R, 1)``: how many pads stand before each lane's text."""
        pads = [self.width - length for length in self.lengths]
        return torch.tensor(pads, device=self.ids.device)[:, None]

    def arguments(self) -> dict[str, Any]:
        """Return what the model's forward takes: ids, the mask of pads where there are any, positions, ``inputs``."""
        pads = self.pads()
        columns = torch.arange(self.width, device=self.ids.device)
        ragged = min(self.lengths) < self.width
        own = {
            "input_ids": self.ids,
            "attention_mask": (columns >= pads).long() if ragged else None,
            "position_ids": self.positions.ids((columns - pads).clamp(min=0)),
        }
        return {**own, **self.inputs}

    def widened(self, lanes: Tensor, total: int) -> Prompt:
        """Return the prompt of ``total`` lanes of which these are ``lanes (R)``; the others read one token."""
        lengths = [1] * total
        for lane, length in zip(lanes.tolist(), self.lengths, strict=True):
            lengths[lane] = length
        ids = placed(self.ids, lanes, total)
        return replace(self, ids=ids, lengths=lengths)


@dataclass(frozen=True)
class ChunkedPrompt(Prompt):
    """Read a prompt compact and right-padded, at most ``chunk`` columns a pass, through the masks of decoding."""

    chunk: int = 512

    def read(self, reader: PromptReader, hidden: bool = False) -> ForwardOutput:
        """Read chunk after chunk; what comes back has the shapes of one pass over the left-padded prompt."""
        if self.chunk >= self.width:
            return super().read(reader, hidden)
        width = self.width
        index = torch.arange(width, device=self.ids.device) + self.pads()
        compact = self.ids.gather(1, index.clamp(max=width - 1))
        last: list[Tensor | None] = [None] * len(self.lengths)
        states: list[tuple[Tensor, ...]] = []
        tapped: list[tuple[Tensor, ...]] = []
        for start in range(0, max(self.lengths), self.chunk):
            tokens = compact[:, start : start + self.chunk]
            counts = [min(max(length - start, 0), tokens.shape[1]) for length in self.lengths]
            n_valid = torch.tensor(counts, device=self.ids.device) - 1
            ends = tuple(sorted({count - 1 for count in counts if count}))
            output = reader.run_lanes(Pass.chain(tokens, n_valid, columns=ends, hidden=hidden))
            states.append(output.hidden)
            tapped.append(output.taps)
            for lane, count in enumerate(counts):
                if count:
                    last[lane] = output.logits[lane, ends.index(count - 1)].clone()
            reader.commit_lanes(counts)
        logits = torch.stack([line for line in last if line is not None])[:, None]
        return ForwardOutput(logits, _left_pad(states, index, width), _left_pad(tapped, index, width))


def _left_pad(states: list[tuple[Tensor, ...]], index: Tensor, width: int) -> tuple[Tensor, ...]:
    """Join compact chunks of hidden states and move every lane's tokens to the end."""
    padded = []
    for chunks in zip(*states, strict=True):
        compact = torch.cat(chunks, 1)
        source = torch.arange(width, device=compact.device) - index[:, :1]
        padded.append(compact.gather(1, source.clamp(min=0)[..., None].expand(-1, -1, compact.shape[-1])))
    return tuple(padded)
