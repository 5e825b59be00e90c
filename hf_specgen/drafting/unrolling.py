"""Unrolling: train a drafter on its own states, as it will draft ("training-time test").

Pair t joins the target's feature t with token t + 1. Step 0 reads all pairs with the target's features; step k reads
the tokens k further on and, as features, the states of step k - 1. Pair t of step k stands at position t + k; it sees
the pairs up to t of step 0, and itself in the steps after. That is what a draft of a chain sees behind pair t.
Source: Li et al. 2025, "EAGLE-3: scaling up inference acceleration of LLMs via training-time test", section 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_specgen.drafting.learned import Objective, TrainingOutput

Windows = Mapping[str, int | None]
ALL: Windows = {"full_attention": None}
_CHUNK = 512  # queries whose scores are kept for the backward pass; longer texts make them anew


@dataclass(frozen=True)
class Lesson:
    """Hold what a training forward is given, see ``Eagle3Drafter.forward``."""

    input_ids: Tensor
    features: tuple[Tensor, ...]
    last_hidden: Tensor
    loss_mask: Tensor
    objective: Objective
    target_head: Tensor
    document_ids: Tensor | None = None
    weights: Tensor | None = None
    wants_rates: bool = False


class Pupil(Protocol):
    """Run a drafter's layers over pairs, and its head."""

    def fuse(self, hidden: tuple[Tensor, ...]) -> Tensor:
        """Make features ``(B, S, H)`` of the target's hidden states."""
        ...

    def embed(self, tokens: Tensor) -> Tensor:
        """Return token embeddings ``(B, S, H)``."""
        ...

    def step(self, embedded: Tensor, features: Tensor, positions: Tensor, mask: Any, cache: Any) -> Tensor:
        """Return what is fed back as the next features, ``(B, S, H)``."""
        ...

    def head_states(self, states: Tensor) -> Tensor:
        """Return what the head reads of what ``step`` returned."""
        ...

    def head_weight(self, target_head: Tensor) -> Tensor:
        """Return the head's weight, the drafter's own or the target's."""
        ...

    @property
    def draws(self) -> bool:
        """Tell whether drafts are drawn instead of the best ids."""
        ...

    @property
    def target_ids(self) -> Tensor | None:
        """Return the target's id of each of the drafter's ids, None when they are the same."""
        ...


class StepCache:
    """Keep keys and values of every step, in the place of a cache: layers get those of all steps so far."""

    def __init__(self) -> None:
        self._kept: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add a step's ``(B, H, S, D)`` and return those of all steps, one behind the other."""
        kept = self._kept.setdefault(layer, [])
        kept.append((keys, values))
        if len(kept) == 1:
            return keys, values
        return torch.cat([key for key, _ in kept], 2), torch.cat([value for _, value in kept], 2)


@dataclass(frozen=True)
class StepMask:
    """Say what the pairs of one step see, in the place of a mask of ``S`` times all steps' ``S`` entries.

    ``documents (B, S)``: pairs see their own document; ``window``: positions that may be looked back.
    """

    documents: Tensor | None = None
    window: int | None = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attend as the module's docstring says.

        Shapes: ``query (B, Hq, S, D)``, ``key, value (B, Hkv, (k + 1) * S, D)`` of all steps. Returns:
        ``(B, S, Hq, D)``.
        """
        width, groups = query.shape[2], query.shape[1] // key.shape[1]
        query = query.unflatten(1, (key.shape[1], groups))
        parts = []
        for start in range(0, width, _CHUNK):
            stop = min(start + _CHUNK, width)
            inputs = query[:, :, :, start:stop], key, value, scale, start, stop, width
            if width > _CHUNK and torch.is_grad_enabled():
                parts.append(checkpoint(self._rows, *inputs, use_reentrant=False))
            else:
                parts.append(self._rows(*inputs))
        return torch.cat(parts, 3).flatten(1, 2).transpose(1, 2).contiguous()

    def _rows(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, start: int, stop: int, width: int
    ) -> Tensor:
        """Attend for the pairs ``start .. stop - 1``: ``query (B, Hkv, G, stop - start, D)``."""
        steps, exact = key.shape[2] // width, torch.promote_types(query.dtype, torch.float32)
        first = torch.einsum("bhgsd,bhtd->bhgst", query, key[:, :, :stop]).to(exact) * scale
        sees = self._sees(start, stop, steps - 1, query.device)
        scores = [first.masked_fill(~sees, -torch.inf)]
        own = [slice(step * width + start, step * width + stop) for step in range(1, steps)]
        scores += [(query * key[:, :, None, at]).sum(-1, keepdim=True).to(exact) * scale for at in own]
        weights = torch.cat(scores, -1).softmax(-1).to(value.dtype)
        out = torch.einsum("bhgst,bhtd->bhgsd", weights[..., :stop], value[:, :, :stop])
        for place, at in enumerate(own):
            out = out + weights[..., stop + place, None] * value[:, :, None, at]
        return out

    def _sees(self, start: int, stop: int, step: int, device: torch.device) -> Tensor:
        """Return ``(B or 1, 1, 1, stop - start, stop)`` bool: what a chunk sees of step 0."""
        here, there = torch.arange(start, stop, device=device)[:, None], torch.arange(stop, device=device)
        sees = here >= there
        if self.window is not None:
            sees = sees & (here + step - there < self.window)
        if self.documents is not None:
            documents = self.documents
            sees = sees & (documents[:, start:stop, None] == documents[:, None, :stop])
        return sees[None, None, None] if sees.dim() == 2 else sees[:, None, None]


def unroll(pupil: Pupil, lesson: Lesson, steps: int, decay: float, windows: Windows = ALL) -> TrainingOutput:
    """Run ``steps`` steps and compare each with the target; step k counts ``decay ** k``.

    Pair t of step k is judged by the target's law of token t + 2 + k, where that token is supervised and of the pair's
    own document. ``windows``: how far back layers of each kind see.
    """
    return judge(pupil, lesson, drafted(pupil, lesson, steps, windows), [decay**step for step in range(steps)])


def drafted(pupil: Pupil, lesson: Lesson, steps: int, windows: Windows = ALL) -> list[Tensor]:
    """Return the states ``(B, T, H)`` of every step."""
    ids = lesson.input_ids
    positions = places(torch.zeros_like(ids[:1]) if lesson.document_ids is None else lesson.document_ids)
    cache = StepCache()
    mask = {kind: StepMask(lesson.document_ids, window) for kind, window in windows.items()}
    states = pupil.fuse(lesson.features)
    unrolled = []
    for step in range(steps):
        states = pupil.step(pupil.embed(_later(ids, 1 + step)), states, positions + step, mask, cache)
        unrolled.append(states)
    return unrolled


def judge(pupil: Pupil, lesson: Lesson, unrolled: list[Tensor], shares: list[float]) -> TrainingOutput:
    """Compare all steps with the target at once: its head runs once for the states that steps share.

    ``shares``: what each step counts in the loss.
    """
    places = [chosen(lesson, 2 + step) for step in range(len(unrolled))]
    token = torch.cat([place + 2 + step for step, place in enumerate(places)])  # which one each pair foretells
    weights = torch.cat([weighted(lesson, place, 2 + step, shares[step]) for step, place in enumerate(places)])
    states = torch.cat([states.flatten(0, 1)[place] for states, place in zip(unrolled, places, strict=True)])
    found = lesson.objective(
        pupil.head_states(states),
        pupil.head_weight(lesson.target_head),
        lesson.last_hidden.flatten(0, 1),
        lesson.target_head,
        weights,
        labels=lesson.input_ids.flatten()[token],
        rows=pupil.target_ids,
        index=token - 1,
    )
    rates = found.ratio if pupil.draws else found.match
    sizes = [len(place) for place in places]
    each = zip(places, *(part.split(sizes) for part in (found.hits, found.alpha, rates)), strict=True)
    return told(lesson, found.loss_sum, list(each))


def told(lesson: Lesson, loss: Tensor, depths: list[tuple[Tensor, Tensor, Tensor, Tensor]]) -> TrainingOutput:
    """Sum up what was found. Of each depth: which of the ``B * T`` places were judged, their hits, alphas, rates."""
    shape, device = lesson.input_ids.shape, lesson.input_ids.device
    alive = torch.ones(shape.numel(), dtype=torch.bool, device=device)
    counts, rates = [], []
    for place, hits, alpha, rate in depths:
        alive = alive & torch.zeros_like(alive).index_copy(0, place, hits)
        parts = (torch.ones_like(alpha), hits, alpha, alive)
        counts.append(torch.stack([part.sum(dtype=torch.float32) for part in parts]))
        if lesson.wants_rates:
            empty = torch.full((shape.numel(),), torch.nan, device=device)
            rates.append(empty.index_copy(0, place, rate.float()))
    return TrainingOutput(loss, torch.stack(counts), torch.stack(rates, -1).unflatten(0, shape) if rates else None)


def weighted(lesson: Lesson, place: Tensor, ahead: int, share: float) -> Tensor:
    """Return what the tokens ``ahead`` of some places weigh in the loss, float32."""
    weights = torch.full_like(place, share, dtype=torch.float32)
    return weights if lesson.weights is None else weights * lesson.weights.flatten()[place + ahead].float()


def chosen(lesson: Lesson, ahead: int) -> Tensor:
    """Return which of the ``B * T`` places have a token ``ahead`` that is supervised and of the same document."""
    mask = _later(lesson.loss_mask.bool(), ahead)
    if lesson.document_ids is not None:
        mask = mask & (_later(lesson.document_ids, ahead) == lesson.document_ids)
    return mask.flatten().nonzero().squeeze(1)


def places(documents: Tensor) -> Tensor:
    """Return positions ``(B, T)`` that start anew with every text of ``documents (B, T)``."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - torch.where(first, index, 0).cummax(1).values


def _later(values: Tensor, ahead: int) -> Tensor:
    """Shift ``(B, T)`` left; what comes in is 0, and False."""
    return torch.cat((values[:, ahead:], torch.zeros_like(values[:, :ahead])), 1)
