"""Target: the model whose output law is kept, with its processors and its cache.

A *row* is a row of the batch, from the call's first round to its last; a *lane* is a row of one pass and of the cache,
which holds one row's text until that row is finished. ``live[lane]`` names the row. Letters: B rows, R lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specgen.models.cached_model import CachedModel
from hf_specgen.models.fixed_shapes import FixedShapes
from hf_specgen.models.passes import Pass
from hf_specgen.models.prompt import ChunkedPrompt, Prompt
from hf_specgen.models.visibility import TreeVisibility
from hf_specgen.round.coins import Coins
from hf_specgen.round.records import Draft, Round, Verdict, spread
from hf_specgen.round.sequences import Sequences
from hf_specgen.round.verify_dense import FLOATS, Dense, keeps_ties_by_id, never_empty
from hf_specgen.round.warp import Truncation


@dataclass(frozen=True)
class Scores:
    """Hold one pass's logits ``(R, S, V)`` and warp a lane's only where they are read.

    ``draft`` is the part of the round's draft that was scored. ``live (R)`` names the row of every lane; None: all are
    there in order. ``keys`` are the pass's coins where they were made before it. ``hidden`` is what the caller logs,
    ``taps`` and ``guesses (R, S)`` are what the drafter reads. ``of_prompt``: the pass read the prompts, which are
    committed already.
    """

    logits: Tensor
    draft: Draft
    sequences: Sequences
    hidden: tuple[Tensor, ...] = field(default=())
    live: Tensor | None = None
    keys: Coins | None = None
    taps: tuple[Tensor, ...] = field(default=())
    guesses: Tensor | None = None
    of_prompt: bool = False

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

    @property
    def untouched(self) -> Tensor | None:
        """Return all logits where no processor changes them, None otherwise."""
        return None if self.sequences.warp.steps else self.logits

    def at(self, lanes: Tensor, nodes: Tensor) -> Tensor:
        """Return processed float32 logits ``(P, V)`` at scored places: ``nodes (P)`` (0: the root) of ``lanes (P)``."""
        owners = lanes if self.live is None else self.live[lanes]
        warp = self.sequences.warp
        places: list[list[int]] = []
        if warp.needs_prefix:  # one wait for all
            places = torch.stack((owners, lanes, nodes, self._ended[lanes, nodes]), 1).tolist()

        def prefix(place: int) -> Tensor | None:
            owner, lane, node, ended = places[place]
            return None if ended else self._prefix(owner, lane, node)

        return warp(self.raw(lanes, nodes), owners, prefix)

    def raw(self, lanes: Tensor, nodes: Tensor) -> Tensor:
        """Return the model's own logits ``(P, V)`` at those places."""
        if len(lanes) == 1 and lanes.device.type == "cpu":  # a view: the copy comes with the cast
            return self.logits[int(lanes), int(nodes)].unsqueeze(0)
        if self.logits.is_contiguous():  # whole rows of memory: four times as fast as indexing by pairs
            return self.logits.flatten(0, 1).index_select(0, lanes * self.logits.shape[1] + nodes)
        return self.logits[lanes, nodes]

    def dense(self, folds: bool) -> Dense | None:
        """Return all logits and what is left to do to them; processors that no kernel knows are applied here.

        None where a processor may be asked only about texts that the target would write.
        """
        if not self.sequences.warp.takes_any_text:
            return None
        rows, scored, vocab = self.logits.shape
        logits, truncation = self.logits, self.sequences.warp.truncation
        folds = folds and not self.greedy  # of equal best tokens a warper may leave another than the first
        if truncation is not None and truncation.top_p < 1:
            folds = folds and keeps_ties_by_id(self.device, vocab)
        if truncation is None or not (folds or truncation == Truncation()):
            place = torch.arange(rows * scored, device=self.device)
            warped, truncation = self.at(place // scored, place % scored), Truncation()
            logits = (never_empty(warped) if self.greedy else warped).view(rows, scored, vocab)
        elif logits.dtype not in FLOATS:
            logits = logits.float()
        return Dense(logits, *(truncation._replace(temperature=0.0) if self.greedy else truncation))

    def coins(self) -> Coins:
        """Return the coins of the lanes that were scored."""
        if self.keys is not None:
            return self.keys
        coins = self.sequences.coins()
        return coins if self.live is None else coins.take(self.live)

    def place(self, row: int) -> int:
        """Return the lane of a row."""
        return row if self.live is None else self.live.tolist().index(row)

    @cached_property
    def _ended(self) -> Tensor:
        """``(R, S)`` bool: whether a drafted end of text stands at or above a place."""
        tokens = self.draft.tokens
        ends = torch.zeros_like(tokens, dtype=torch.bool)
        for token in self.sequences.stops.eos:
            ends |= tokens == token
        return (self.draft.tree.ancestors[:, :, 1:] & ends[:, None]).any(-1)

    def _prefix(self, row: int, lane: int, node: int) -> Tensor:
        """Return a row's text down to a scored node of its lane, ``(1, L)``."""
        prefix = self.sequences.prefix(row)
        if node == 0:
            return prefix
        drafted = self.draft.tokens[lane]
        tree = self.draft.tree
        if tree.is_chain:
            above = drafted[:node]
        else:
            above = drafted[tree.ancestors[lane if len(tree.ancestors) > 1 else 0, node, 1:]]
        # behind ids that do not exist nothing is ever read, but the fused path warps it with the rest
        return torch.cat([prefix, above.clamp(0, self.vocab_size - 1).unsqueeze(0)], 1)


class Target:
    """Drive the model: the prompt once, then one forward a round. Nothing else calls the target's forward."""

    def __init__(
        self,
        model: PreTrainedModel,
        sequences: Sequences,
        hidden_layers: Sequence[int] = (),
        guesses: bool = False,
        all_hidden: bool = False,
        prefill_chunk: int | None = None,
        shapes: FixedShapes | None = None,
    ) -> None:
        self.sequences = sequences
        self.wants_hidden = all_hidden
        self.wants_guesses = guesses
        self.prefill_chunk = prefill_chunk
        reserve = max(sequences.lengths) + sequences.budget + 1
        self.cached = CachedModel(model, len(sequences), reserve, hidden_layers, shapes)
        self.live = list(range(len(sequences)))
        self._prompt_seconds = 0.0

    @property
    def forward_seconds(self) -> float:
        """Return the wall time spent inside the model's own forward since the prompts were read."""
        return self.cached.seconds - self._prompt_seconds

    def prefill(self) -> Scores:
        """Read and commit the prompts. Their scores have an empty draft: the verdict is every row's first token."""
        sequences = self.sequences
        prompt = Prompt(sequences.left_padded(), sequences.lengths)
        if self.prefill_chunk is not None:
            prompt = ChunkedPrompt(prompt.ids, prompt.lengths, chunk=self.prefill_chunk)
        output = self.cached.prefill(prompt, self.wants_hidden)
        self._prompt_seconds = self.cached.seconds
        sequences.vocab_size = output.logits.shape[-1]  # the truth, whatever config and head say
        draft = Draft.empty(len(sequences), self.cached.device)
        return Scores(
            output.logits,
            draft,
            sequences,
            output.hidden,
            taps=output.taps,
            guesses=self._guesses(output.logits),
            of_prompt=True,
        )

    def score(self, draft: Draft) -> Scores:
        """Run one forward over the root and draft nodes of every unfinished row; finished rows leave their lanes."""
        self.live = self.cached.keep(self.live, self.sequences.finished)
        live = None
        coins = self.sequences.coins()  # what is copied to the device now does not wait for the pass
        if len(self.live) < len(self.sequences):
            live = torch.tensor(self.live, device=self.cached.device)
            draft = draft.take(live)
            coins = coins.take(live)
        output = self.cached.run(self._pass(draft))
        offered = draft.offered
        logits = output.logits
        if draft.scouts:  # what reads logits wants whole rows of memory
            logits = logits[:, : offered.width + 1].contiguous()
        guesses = self._guesses(output.logits)
        return Scores(logits, offered, self.sequences, output.hidden, live, coins, output.taps, guesses)

    def commit(self, draft: Draft, scores: Scores, verdict: Verdict) -> Round:
        """Keep the accepted path of every lane in the cache; the newest token stays uncached.

        ``verdict`` judges the lanes; the round that comes back holds every row of ``draft``. The round of the prompts
        carries the states of the whole prompts.
        """
        if scores.of_prompt:
            return Round(draft, verdict, scores.taps, scores.guesses)
        hidden = _on_path(scores.taps, verdict)
        guesses = scores.guesses
        judged = verdict
        if scores.live is not None:
            total = len(draft.tokens)
            verdict = verdict.spread(scores.live, total)
            hidden = tuple(spread(layer, scores.live, total) for layer in hidden)
            guesses = None if guesses is None else spread(guesses, scores.live, total)
        round = Round(draft, verdict, hidden, guesses)
        self._keep_path(round, judged)
        return round

    def _pass(self, draft: Draft) -> Pass:
        """Describe the pass over the roots and nodes of every lane; scouts stay within what their row may write."""
        tokens = torch.cat([self.sequences.roots(self.live), draft.tokens], 1)
        deepest = None
        if draft.scouts:
            room = self.sequences.room
            deepest = torch.tensor([room[row] for row in self.live], device=self.cached.device)
        return Pass(
            tokens,
            TreeVisibility(draft.tree),
            draft.n_valid,
            hidden=self.wants_hidden,
            scouts=draft.scouts,
            deepest=deepest,
        )

    def _guesses(self, logits: Tensor) -> Tensor | None:
        """Return the best token ``(R, S)`` at every position where the drafter reads it."""
        return logits.argmax(-1) if self.wants_guesses else None

    def _keep_path(self, round: Round, judged: Verdict) -> None:
        """Commit root and accepted path of every lane; ``judged`` is the verdict of the lanes."""
        paths = [round.paths[row] for row in self.live]
        straight = all(path == list(range(len(path))) for path in paths)
        longest = max(map(len, paths))
        counts = [len(path) + 1 for path in paths]
        self.cached.commit(counts, None if straight else judged.path[:, :longest], judged.n + 1)


def _on_path(layers: tuple[Tensor, ...], verdict: Verdict) -> tuple[Tensor, ...]:
    """Return each layer's states ``(R, K + 1, D)`` at the root and along the accepted path."""
    nodes = torch.cat([torch.zeros_like(verdict.next)[:, None], verdict.path + 1], 1)[..., None]
    return tuple(layer.gather(1, nodes.expand(-1, -1, layer.shape[-1])) for layer in layers)
