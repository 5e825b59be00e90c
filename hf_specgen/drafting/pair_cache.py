"""PairCache: a drafter's keys and values of (feature, token) pairs, fed with the target's own features every round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import PretrainedConfig

from hf_specgen.models.cached_model import staying
from hf_specgen.models.slot_cache import SlotCache
from hf_specgen.models.visibility import TreeVisibility
from hf_specgen.round.records import Tree

_CHUNK = 512  # columns one pass reads of a prompt: its mask has a row for each


class PairModel(Protocol):
    """Run a drafter's layers over pairs."""

    def fuse(self, hidden: tuple[Tensor, ...]) -> Tensor:
        """Make features ``(B, S, H)`` of the target's hidden states, one ``(B, S, D)`` per layer it asked for."""
        ...

    def step(
        self, tokens: Tensor, features: Tensor, positions: Tensor, mask: Mapping[str, Tensor], cache: SlotCache | None
    ) -> Tensor:
        """Return what is fed back as the next features, ``(B, S, H)``."""
        ...


@dataclass(frozen=True)
class _Block:
    """Hold hidden states that were not read yet: ``counts[r]`` columns of row r from ``starts[r]`` on."""

    hidden: tuple[Tensor, ...]
    starts: list[int]
    counts: list[int]


class PairCache:
    """Keep the true pairs of every unfinished row; drafted pairs stand behind them until the round is judged.

    Pair i of a row is in slot i of its lane and at position i. ``live[lane]`` names the row.
    """

    def __init__(
        self, model: PairModel, config: PretrainedConfig, rows: int, device: torch.device, reserve: int
    ) -> None:
        self.cache = SlotCache(config, rows, device, reserve)
        self.live = list(range(rows))
        self._model = model
        self._rows = rows
        self._device = device
        self._blocks: list[_Block] = []
        self._held = 0
        self._spare = 0

    @property
    def pending(self) -> int:
        """Return how many columns of hidden states wait to be read."""
        return sum(block.hidden[0].shape[1] for block in self._blocks)

    @property
    def owners(self) -> Tensor | None:
        """Return the row of every lane, None when all are there in order."""
        whole = len(self.live) == self._rows
        return None if whole else torch.tensor(self.live, device=self._device)

    def add(self, hidden: tuple[Tensor, ...], starts: list[int], counts: list[int]) -> None:
        """Take hidden states ``(B, C, D)``: row r's are ``counts[r]`` columns from ``starts[r]`` on."""
        self._blocks.append(_Block(tuple(layer.to(self._device) for layer in hidden), starts, counts))

    def keep(self, finished: list[bool]) -> None:
        """Drop finished rows."""
        order = staying(self.live, finished)
        if len(order) < len(self.live):
            self.cache.keep(order)
            self.live = [self.live[lane] for lane in order]

    def read(self, texts: Sequence[Sequence[int]], spare: int = 0) -> Tensor:
        """Read every pair that the texts of all lanes have and the cache lacks; the newest pair becomes the root.

        ``spare`` drafted pairs will follow. Returns: the state of the root ``(R, 1, H)``.
        """
        counts = [len(text) - 1 - length for text, length in zip(texts, self.cache.lengths, strict=True)]
        fresh = [list(text[len(text) - count :]) for text, count in zip(texts, counts, strict=True)]
        columns = [self._columns(row) for row in self.live]
        assert [len(line) for line in columns] == counts, "hidden states and text do not belong together"
        hidden = self._blocks[0].hidden
        if len(self._blocks) > 1:
            hidden = tuple(torch.cat(layer, 1) for layer in zip(*(b.hidden for b in self._blocks), strict=True))
        self._spare = spare
        for behind in range((max(counts) - 1) // _CHUNK * _CHUNK, -1, -_CHUNK):  # every row ends in the last pass
            spans = [slice(max(0, count - behind - _CHUNK), max(0, count - behind)) for count in counts]
            parts = [(text[span], line[span]) for text, line, span in zip(fresh, columns, spans, strict=True)]
            states = self._extend([text for text, _ in parts], hidden, [line for _, line in parts])
            taken = [len(text) for text, _ in parts]
            self.cache.commit([count - (behind == 0) for count in taken])
        self._blocks.clear()
        self._held = 1
        newest = torch.tensor(taken, device=self._device) - 1
        return states[torch.arange(len(taken), device=self._device), newest].unsqueeze(1)

    def run(self, tokens: Tensor, features: Tensor, tree: Tree) -> Tensor:
        """Run drafted pairs behind the root and what was run before; ``tree`` holds all of them, these come last.

        Shapes: ``tokens (R, F)``, ``features (R, F, H)``: the states of their parents. Returns: states ``(R, F, H)``.
        """
        width, held = tokens.shape[1], self._held
        self.cache.begin(width, max(0, self._spare + 1 - held - width), held)
        self._held += width
        depth = tree.depth[:, held:]
        positions = self.cache.row_lengths[:, None] + depth
        return self._model.step(tokens, features, positions, self._mask(tree, held), self.cache)

    def settle(self) -> None:
        """Forget the drafted pairs; the root is a true pair and stays."""
        self.cache.crop_rows([length + 1 for length in self.cache.lengths])
        self._held = 0

    def _columns(self, row: int) -> Sequence[int]:
        """Return where the pending hidden states of a row stand when all blocks are put side by side."""
        spans, offset = [], 0
        for block in self._blocks:
            start = offset + block.starts[row]
            spans.append(range(start, start + block.counts[row]))
            offset += block.hidden[0].shape[1]
        return spans[0] if len(spans) == 1 else [column for span in spans for column in span]

    def _extend(self, texts: list[list[int]], hidden: tuple[Tensor, ...], columns: list[Sequence[int]]) -> Tensor:
        """Run one pass over true pairs, ragged: the places behind a row's own are computed and mean nothing."""
        width = max(map(len, texts))
        tokens = torch.tensor([text + [0] * (width - len(text)) for text in texts], device=self._device)
        features = self._model.fuse(self._picked(hidden, columns, width))
        self.cache.begin(width, self._spare)
        tree = Tree.chain(width - 1, self._device)
        place = torch.arange(width, device=self._device)
        if min(map(len, texts)) < width:  # no position beyond the text's own is ever used
            place = place.minimum(torch.tensor([[max(0, len(text) - 1)] for text in texts], device=self._device))
        positions = self.cache.row_lengths[:, None] + place
        return self._model.step(tokens, features, positions, self._mask(tree, 0), self.cache)

    def _picked(self, hidden: tuple[Tensor, ...], columns: list[Sequence[int]], width: int) -> tuple[Tensor, ...]:
        """Take each live row's columns, padded to ``width`` by whatever stands behind them."""
        last = hidden[0].shape[1] - 1
        lines = []
        for line in columns:
            behind = line[-1] + 1 if line else 0
            lines.append([*line, *range(behind, behind + width - len(line))])
        owners, start = self.owners, lines[0][0]
        straight = list(range(start, start + width))
        if start + width - 1 <= last and all(line == straight for line in lines):
            parts = tuple(layer[:, start : start + width] for layer in hidden)
            return parts if owners is None else tuple(part[owners] for part in parts)
        index = torch.tensor(lines, device=self._device).clamp_(max=last)
        rows = torch.tensor(self.live, device=self._device)[:, None]
        return tuple(layer[rows, index] for layer in hidden)

    def _mask(self, tree: Tree, held: int) -> dict[str, Tensor]:
        """Return the ``(R or 1, 1, S, view)`` bool mask of the pass that was announced, for each kind of layer."""
        groups, lengths = self.cache.groups.values(), self.cache.lengths
        bounded = any(group.window is not None for group in groups)
        if not bounded and tree.is_chain and held == len(tree) and min(lengths) == max(lengths):
            everything = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self._device)
            return {group.kind: everything.expand(-1, -1, -1, group.view) for group in groups}
        return self.cache.masks(TreeVisibility(tree))
