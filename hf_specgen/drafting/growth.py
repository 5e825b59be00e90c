"""Growth: the books of dynamic trees, another one for every row and round."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_specgen.drafting.shapes import NEVER, DynamicShape, top
from hf_specgen.round.costs import Costs


class Growth:
    """Keep the books of one dynamic tree a row, all on the device.

    ``add`` takes the drafter's laws at the nodes it ran last (the root first) and names the nodes to run next; after
    ``depth`` calls ``finish`` picks the nodes to draft. Node tokens are ids of the drafter's own vocabulary.
    Source: Li et al. 2024, EAGLE-2, section 4.
    """

    def __init__(self, shape: DynamicShape) -> None:
        self._shape = shape
        self._ids: list[Tensor] = []
        self._scores: list[Tensor] = []
        self._parents: list[Tensor] = []
        self._running: list[Tensor] = []
        self._frontier: tuple[Tensor, Tensor] | None = None  # cumulative score and place among all nodes, (B, F)

    @property
    def levels(self) -> int:
        """Return how many levels were added."""
        return len(self._ids)

    def add(self, log_q: Tensor) -> tuple[Tensor, Tensor]:
        """Expand the frontier; return the new one: ids ``(B, k)`` and each parent's place in the old one ``(B, k)``.

        Shapes: ``log_q (B, F, V_draft)`` log-probabilities: F is the width of the frontier, 1 where one law serves all.
        """
        rows, _, vocab = log_q.shape
        width = 1 if self._frontier is None else self._frontier[0].shape[1]
        k = min(self._shape.top_k, vocab)
        gained, ids = (part.expand(-1, width, -1) for part in top(log_q, k))
        gained = gained.float().nan_to_num(nan=NEVER, neginf=NEVER).clamp_(max=0.0)
        score, place = self._frontier or (gained.new_zeros(rows, 1), ids.new_full((rows, 1), -1))
        scores = (score.unsqueeze(-1) + gained).flatten(1)
        seen = sum(part.shape[1] for part in self._ids)
        ids = ids.flatten(1)
        self._ids.append(ids)
        self._scores.append(scores)
        self._parents.append(place.repeat_interleave(k, 1))
        best = _ranked(scores)[:, : self._shape.top_k]
        parent = best // k
        before = sum(part.shape[1] for part in self._running) - width
        self._running.append(before + parent if self._running else torch.full_like(parent, -1))
        self._frontier = scores.gather(1, best), best + seen
        return ids.gather(1, best), parent

    def frontier_parents(self) -> Tensor:
        """Return the tree of all frontiers named so far, the newest included: ``(B, M)``, -1 hangs on the root."""
        return torch.cat(self._running, 1)

    def finish(self, nodes: int, room: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Pick the likeliest ``nodes`` within ``room (B)`` tokens, level by level.

        Returns: ids ``(B, N)``, parents ``(B, N)``, ``n_valid (B)``, log-probabilities ``(B, N)``.
        """
        ids, parents = torch.cat(self._ids, 1), torch.cat(self._parents, 1)
        scores = self._within(room)
        chosen, links, n_valid = rerank(scores, parents, self._depth(scores.device), nodes)
        return ids.gather(1, chosen), links, n_valid, scores.gather(1, chosen)

    def paying(self, costs: Costs, remaining: Sequence[int], room: Tensor) -> int:
        """Return how many nodes a row the common pass should have; reads the device once.

        The probability of a path is taken for the chance that the target accepts it; what drafting cost is spent.
        """
        chances = self._within(room).exp().sort(-1, descending=True).values.double()
        return costs.choose(chances.tolist(), remaining, spent=costs.draft * self.levels)

    def _depth(self, device: torch.device) -> Tensor:
        """Return the depth of every node seen, ``(C)``."""
        return torch.cat(
            [torch.full((part.shape[1],), depth, device=device) for depth, part in enumerate(self._ids, 1)]
        )

    def _within(self, room: Tensor) -> Tensor:
        """Return the log-probabilities of all nodes seen, minus infinity where they lie too deep."""
        scores = torch.cat(self._scores, 1)
        return scores.masked_fill(self._depth(scores.device) > room.unsqueeze(1), NEVER)


def rerank(scores: Tensor, parents: Tensor, depth: Tensor, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Choose each row's ``nodes`` best of all candidates, and list them level by level.

    Scores never rise from parent to child; among equals the shallower is chosen, then the one listed first, so that
    no chosen node misses its parent. A score of minus infinity is never chosen: such places come last.

    Shapes: ``scores``, ``parents (B, C)``: a parent's place among the candidates, which stand before their children,
    -1 for the root; ``depth (C)``, rising. Returns: chosen places ``(B, N)``, parents within them ``(B, N)``,
    ``n_valid (B)``.
    """
    count = scores.shape[1]
    chosen = _ranked(scores)[:, :nodes]
    absent = scores.gather(1, chosen) == NEVER
    chosen = (chosen + absent * count).sort(-1).values
    absent, chosen = chosen >= count, chosen % count
    place = torch.zeros_like(parents).scatter_(
        1, chosen, torch.arange(chosen.shape[1], device=chosen.device).expand_as(chosen)
    )
    above = parents.gather(1, chosen)
    links = place.gather(1, above.clamp(min=0)).masked_fill((above < 0) | absent, -1)
    return chosen, links, (~absent).sum(1)


def _ranked(scores: Tensor) -> Tensor:
    """Return the places of each row from the best on; of equals the first comes first, on every device."""
    return scores.sort(dim=-1, descending=True, stable=True).indices
