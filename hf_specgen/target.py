"""Target: the model whose output law is kept, with its processors and its cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specgen.draft import Draft, Round, Verdict
from hf_specgen.forward import CachedModel
from hf_specgen.sequences import Sequences
from hf_specgen.verify import verify


@dataclass(frozen=True)
class Scores:
    """Hold one pass's logits ``(B, S, V)`` and warp a row of them only when it is read."""

    logits: Tensor
    draft: Draft
    sequences: Sequences
    hidden: tuple[Tensor, ...] = field(default=())

    @property
    def greedy(self) -> bool:
        """Tell whether the law is one-hot at the best token."""
        return self.sequences.greedy

    @property
    def vocab_size(self) -> int:
        """Return V."""
        return self.logits.shape[-1]

    @property
    def device(self) -> torch.device:
        """Return where the logits live."""
        return self.logits.device

    def at(self, rows: Tensor, nodes: Tensor) -> Tensor:
        """Return processed float32 logits ``(R, V)`` at scored coordinates ``nodes`` (0 is the root) of ``rows``."""
        return self.sequences.warp(self.raw(rows, nodes), rows, lambda place: self._prefix(rows, nodes, place))

    def raw(self, rows: Tensor, nodes: Tensor) -> Tensor:
        """Return the model's own logits ``(R, V)`` at those places."""
        if len(rows) == 1 and rows.device.type == "cpu":  # a view: the copy comes with the cast
            return self.logits[int(rows), int(nodes)].unsqueeze(0)
        return self.logits[rows, nodes]

    def _prefix(self, rows: Tensor, nodes: Tensor, place: int) -> Tensor:
        row, node = int(rows[place]), int(nodes[place])
        prefix = self.sequences.prefix(row)
        if node == 0:
            return prefix
        ancestors = self.draft.tree.ancestors
        on_path = ancestors[row if len(ancestors) > 1 else 0, node, 1:]
        return torch.cat([prefix, self.draft.tokens[row, on_path].unsqueeze(0)], 1)


class Target:
    """Drive the model: the prompt once, then one forward a round. Nothing else calls the target's forward."""

    def __init__(
        self,
        model: PreTrainedModel,
        sequences: Sequences,
        hidden_layers: Sequence[int] = (),
        all_hidden: bool = False,
        prefill_chunk: int | None = None,
    ) -> None:
        self.sequences = sequences
        self.hidden_layers = tuple(hidden_layers)
        self.wants_hidden = all_hidden or bool(self.hidden_layers)
        self.prefill_chunk = prefill_chunk
        reserve = max(sequences.lengths) + sequences.budget + 1
        self.cached = CachedModel(model, len(sequences), reserve)
        self.scores: Scores | None = None

    def prefill(self) -> Round:
        """Read the prompts; the round that comes back has an empty draft and every row's first token."""
        sequences = self.sequences
        output = self.cached.prefill(sequences.left_padded(), sequences.lengths, self.wants_hidden, self.prefill_chunk)
        draft = Draft.empty(len(sequences), self.cached.device)
        self.scores = Scores(output.logits, draft, sequences, output.hidden)
        verdict = verify(self.scores, draft, sequences.coins(), sequences.rule)
        return Round(draft, verdict, self._picked(output.hidden))

    def score(self, draft: Draft) -> Scores:
        """Run one forward over every row's root and draft nodes."""
        # ids that do not exist cannot be accepted (``verify`` sees to it), but they must not crash the embedding
        drafted = draft.tokens.clamp(0, self.sequences.vocab_size - 1)
        tokens = torch.cat([self.sequences.roots(), drafted], 1)
        output = self.cached.extend(tokens, draft.tree, draft.n_valid, self.wants_hidden)
        self.scores = Scores(output.logits, draft, self.sequences, output.hidden)
        return self.scores

    def commit(self, draft: Draft, verdict: Verdict) -> Round:
        """Keep the accepted path in the cache; the newest token stays uncached. Finished rows keep their length."""
        hidden: tuple[Tensor, ...] = ()
        scores = self.scores
        if scores is not None and self.hidden_layers:
            nodes = torch.cat([torch.zeros_like(verdict.next)[:, None], verdict.path + 1], 1)
            hidden = tuple(
                layer.gather(1, nodes[..., None].expand(-1, -1, layer.shape[-1]))
                for layer in self._picked(scores.hidden)
            )
        round = Round(draft, verdict, hidden)
        counts = [len(path) + 1 if live else 0 for path, live in zip(round.paths, self.sequences.active, strict=True)]
        straight = all(path == list(range(len(path))) for path in round.paths)
        self.cached.cache.commit(counts, None if straight else verdict.path)
        return round

    def _picked(self, hidden: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(hidden[layer] for layer in self.hidden_layers) if hidden else ()
