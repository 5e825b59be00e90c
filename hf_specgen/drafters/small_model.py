"""SmallModel: a causal language model with the target's tokens drafts for it (Leviathan et al. 2023)."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specgen import ops
from hf_specgen.drafting.drafter import Drafter, DraftLength, Pace, fit_width, no_numbers
from hf_specgen.errors import IncompatibleDrafter
from hf_specgen.models.cached_model import CachedModel
from hf_specgen.models.facts import step_size
from hf_specgen.models.passes import Pass
from hf_specgen.models.prompt import Prompt
from hf_specgen.models.wrappers import driven
from hf_specgen.round.coins import DRAFT
from hf_specgen.round.costs import Costs, Rate
from hf_specgen.round.records import DenseQ, Draft, Round, Tree, spread
from hf_specgen.round.sequences import Sequences


class SmallModel(Drafter):
    """Draft with a smaller causal model over its own slot cache, a chain for every row of the batch.

    Args: ``model`` may be wrapped (``torch.compile``, PEFT's LoRA); ``num_tokens`` drafts that many in a row (None: as
    many as pay, up to 8); ``sample`` draws from the model's own law under the target's processors instead of taking
    its best token; ``tokenizer`` lets the vocabularies be compared when ``generate()`` is given the target's;
    ``confidence`` stops a row where the best token's probability is lower; ``costs`` replaces the assumed costs.

    Raises: ``UnsupportedTarget`` when the model cannot be driven row by row, ``IncompatibleDrafter`` when one id
    stands for two different strings.
    """

    def __init__(
        self,
        model: nn.Module,
        num_tokens: int | None = None,
        sample: bool = False,
        tokenizer: PreTrainedTokenizerBase | None = None,
        confidence: float | None = None,
        costs: Costs | None = None,
    ) -> None:
        self.model = driven(model)
        self.num_tokens, self.sample, self.tokenizer = num_tokens, sample, tokenizer
        self.confidence, self.costs = confidence, costs
        settings = self.model.config.get_text_config(decoder=True).to_dict()
        self.context = int(settings.get("max_position_embeddings") or settings.get("n_positions") or 1 << 30)

    @property
    def draws(self) -> bool:
        """Tell whether ``sample`` was asked for."""
        return self.sample

    @property
    def draft_cost(self) -> float:
        """Return what a pass of the model costs, in plain steps of the target."""
        return self._pace.length.costs.draft

    def for_call(self, model: PreTrainedModel) -> SmallModel:
        """Return a copy over the same model: calls may overlap."""
        return copy(self)

    def begin(self, sequences: Sequences) -> None:
        """Check the vocabularies and start with empty rows; the prompt is read at the first proposal."""
        if self.tokenizer is not None and sequences.tokenizer is not None:
            check_vocabularies(sequences.tokenizer, self.tokenizer)
        rows = len(sequences)
        share = step_size(self.model) / max(1, sequences.target_size)
        costs = self.costs or replace(sequences.costs, draft=max(0.03, share))
        own, asked = self.model.generation_config, sequences.request
        schedule = asked.schedule or own.num_assistant_tokens_schedule
        if self._draws(sequences) and schedule is None:
            schedule = "constant"  # what is drawn depends on the length, and the neighbours must not set it
        request = replace(asked, schedule=schedule)
        number = self.num_tokens if self.num_tokens is not None else own.num_assistant_tokens
        length = DraftLength.choose(request, number, 4 if schedule == "constant" else 8, costs)
        length.begin(rows)
        self._pace = Pace(length, Rate(0.6, 0.7))
        settings = (asked.confidence, self.confidence, own.assistant_confidence_threshold)
        self._confidence = next((value for value in settings if value is not None), 0.0)
        reserve = min(max(sequences.lengths) + sequences.budget + 1, self.context)
        self._cached = CachedModel(self.model, rows, reserve)
        self._live = list(range(rows))
        self._base = [0] * rows

    def _draws(self, sequences: Sequences) -> bool:
        """Tell whether tokens are drawn by coins of the drafter's own."""
        return self.sample and not sequences.greedy and sequences.rule != "gumbel"

    def propose(self, sequences: Sequences) -> Draft:
        """Catch up with the text, then draft one token after another for the rows that are not finished."""
        self._live = self._cached.keep(self._live, sequences.finished)
        every = self._wanted(sequences)
        if not any(every):
            self._base = list(self._cached.lengths)
            return Draft.empty(len(sequences), sequences.prompt.device)
        wanted = [every[row] for row in self._live]
        logits = self._catch_up(sequences, wanted)
        self._base = list(self._cached.lengths)
        chain, peaks = _Chain(sequences, self._live, self.sample and not sequences.greedy), list[Tensor]()
        while True:
            peaks.append(logits.amax())
            scores = chain.warp(logits)
            self._stop_unsure(scores, chain, wanted)
            if len(chain) >= max(wanted):
                break
            tokens = chain.pick(scores)
            if len(chain) >= max(wanted):
                break
            output = self._cached.run(Pass.chain(self._known(tokens), undo=len(chain) - 1))
            self._cached.commit([int(len(chain) < want) for want in wanted])
            logits = output.logits[:, 0]
        return replace(chain.draft(wanted), broken=no_numbers(peaks, sequences.prompt.device))

    def observe(self, round: Round) -> None:
        """Roll the drafter's cache back to the accepted tokens and learn how often they are."""
        self._pace.observe(round)
        lengths = [
            base + min(length - base, len(round.paths[row]))
            for base, length, row in zip(self._base, self._cached.lengths, self._live, strict=True)
        ]
        self._cached.crop_rows(lengths)

    def _wanted(self, sequences: Sequences) -> list[int]:
        """Return each row's draft length: within its budget, the drafter's context, and what pays."""
        space = [
            max(0, min(room, self.context - length))
            for room, length in zip(sequences.room, sequences.lengths, strict=True)
        ]
        return self._pace.wanted(space, sequences.remaining)

    def _catch_up(self, sequences: Sequences, wanted: list[int]) -> Tensor:
        """Feed every token the drafter has not read; return the logits ``(B, V_draft)`` after each row's newest."""
        lengths, texts = self._cached.lengths, [sequences.tokens[row] for row in self._live]
        pending = [
            text[length:] if want else []  # rows that draft nothing may be past the drafter's context: leave them
            for text, length, want in zip(texts, lengths, wanted, strict=True)
        ]
        if not any(lengths):
            pending = [row or text[:1] for row, text in zip(pending, texts, strict=True)]
            prompt = Prompt(self._padded(pending, left=True), [len(row) for row in pending])
            return self._cached.prefill(prompt).logits[:, 0]
        read = [len(row) for row in pending]
        counts = torch.tensor(read, device=self._cached.device)
        output = self._cached.run(Pass.chain(self._padded(pending, left=False), counts - 1))
        self._cached.commit(read)
        rows = torch.arange(len(pending), device=self._cached.device)
        return output.logits[rows, (counts - 1).clamp(min=0)]

    def _padded(self, rows: list[list[int]], left: bool) -> Tensor:
        width = max(map(len, rows))
        pads = [[0] * (width - len(row)) for row in rows]
        filled = [pad + row if left else row + pad for pad, row in zip(pads, rows, strict=True)]
        return self._known(torch.tensor(filled))

    def _known(self, tokens: Tensor) -> Tensor:
        """Map ids that the drafter has no embedding for to its last one: any guess is corrected by the target."""
        return tokens.to(self._cached.device).clamp(max=self.model.get_input_embeddings().weight.shape[0] - 1)

    def _stop_unsure(self, scores: Tensor, chain: _Chain, wanted: list[int]) -> None:
        """End rows at a node whose law is flat. The law is known before its token is drawn, so nothing is biased."""
        if not self._confidence:
            return
        best = torch.softmax(scores, -1).amax(-1).tolist()
        for row, probability in enumerate(best):
            if probability < self._confidence:
                wanted[row] = min(wanted[row], len(chain))


class _Chain:
    """Collect one draft, token by token, for the rows of the batch that ``live`` names."""

    def __init__(self, sequences: Sequences, live: list[int], sample: bool) -> None:
        self._sequences, self._live = sequences, live
        self._rows = torch.arange(len(live), device=sequences.prompt.device)
        self._owners = torch.tensor(live, device=sequences.prompt.device)
        self._coins = sequences.coins().take(self._owners) if sample else None
        self._tokens: list[Tensor] = []
        self._laws: list[Tensor] = []

    def __len__(self) -> int:
        return len(self._tokens)

    def warp(self, logits: Tensor) -> Tensor:
        """Return the drafter's logits over the target's ids, under the target's processors."""
        sequences = self._sequences
        logits = fit_width(logits.to(sequences.prompt.device, torch.float32), sequences.vocab_size)
        drafted = torch.stack(self._tokens, 1) if self._tokens else sequences.prompt[:, :0]
        texts = drafted.tolist() if sequences.warp.needs_prefix and sequences.stops.eos else []

        def prefix(place: int) -> Tensor | None:
            if texts and not sequences.stops.eos.isdisjoint(texts[place]):
                return None
            return torch.cat([sequences.prefix(self._live[place]), drafted[place : place + 1]], 1)

        return sequences.warp(logits, self._owners, prefix)

    def pick(self, scores: Tensor) -> Tensor:
        """Add one token a row, ``(B, 1)``: the best, a draw of the row's own coins, or the shared Gumbel choice."""
        depth = len(self._tokens)
        if self._coins is None:
            token, _ = ops.argmax(scores)
        elif self._sequences.rule == "gumbel":
            token, _ = ops.gumbel_draw(scores, self._coins.gumbel(self._rows, depth, scores.shape[-1]))
        else:
            # keyed by the round's start: block verification looks at the whole draft, and no coin may decide twice
            token, _ = ops.draw(scores, self._coins.uniform(self._rows, 0, DRAFT, sibling=depth))
            self._laws.append(scores)
        self._tokens.append(token)
        return token[:, None]

    def draft(self, wanted: list[int]) -> Draft:
        """Return the draft of the whole batch; it carries its law only when tokens were drawn by coins of its own."""
        rows, device = len(self._sequences), self._sequences.prompt.device
        if not self._tokens:
            return Draft.empty(rows, device)
        law = DenseQ(self._spread(torch.stack(self._laws, 1))) if self._laws else None
        tokens, counts = self._spread(torch.stack(self._tokens, 1)), self._spread(torch.tensor(wanted, device=device))
        return Draft(tokens, Tree.chain(tokens.shape[1], device), counts, law)

    def _spread(self, part: Tensor) -> Tensor:
        rows = len(self._sequences)
        return part if len(self._live) == rows else spread(part, self._owners, rows)


def check_vocabularies(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> None:
    """Require that every id both tokenizers know stands for the same string.

    Raises: ``IncompatibleDrafter`` naming the first id that differs.
    """
    if target is draft:
        return
    ours = {index: token for token, index in target.get_vocab().items()}
    theirs = {index: token for token, index in draft.get_vocab().items()}
    for index in sorted(ours.keys() & theirs.keys()):
        if ours[index] != theirs[index]:
            raise IncompatibleDrafter(
                f"id {index} is {ours[index]!r} for the target and {theirs[index]!r} for the drafter: one "
                "token-to-string map "
                "is required. Use a drafter of the target's own family, or PromptLookup()."
            )
