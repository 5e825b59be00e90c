"""SmallModel: a causal language model with the target's tokens drafts for it (Leviathan et al. 2023)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from hf_specgen.checkpoints.methods import Method
from hf_specgen.drafting.drafter import Call, Drafter
from hf_specgen.drafting.fill import Level, LevelModel, LevelSession
from hf_specgen.drafting.lengths import DraftSettings, Habits
from hf_specgen.drafting.shapes import StaticShape
from hf_specgen.errors import IncompatibleDrafter
from hf_specgen.models.cached_model import CachedModel
from hf_specgen.models.facts import step_size
from hf_specgen.models.passes import Pass
from hf_specgen.models.prompt import Prompt
from hf_specgen.models.wrappers import driven
from hf_specgen.round.costs import Costs
from hf_specgen.round.records import Draft, Round

_LONGEST = 8
_CONSTANT = 4


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
        self.num_tokens = num_tokens
        self.sample = sample
        self.tokenizer = tokenizer
        self.confidence = confidence
        self.costs = costs
        settings = self.model.config.get_text_config(decoder=True).to_dict()
        self.context = int(settings.get("max_position_embeddings") or settings.get("n_positions") or 1 << 30)

    @property
    def draws(self) -> bool:
        """Tell whether ``sample`` was asked for."""
        return self.sample

    def begin(self, call: Call) -> SmallModelSession:
        """Check the vocabularies and start with empty rows; the prompt is read at the first proposal."""
        if self.tokenizer is not None and call.sequences.tokenizer is not None:
            check_vocabularies(call.sequences.tokenizer, self.tokenizer)
        return SmallModelSession(self, call)

    def habits(self, call: Call) -> Habits:
        """Return how the model drafts where nobody asks for anything else; its generation config may say so."""
        own = self.model.generation_config
        share = step_size(self.model) / max(1, call.sequences.target_size)
        return Habits(
            title=self.title,
            usual=StaticShape.chain(_LONGEST),
            longest=_LONGEST,
            constant=_CONSTANT,
            level_cost=max(0.03, share),
            num_tokens=own.num_assistant_tokens if self.num_tokens is None else self.num_tokens,
            schedule=own.num_assistant_tokens_schedule,
            confidence=own.assistant_confidence_threshold if self.confidence is None else self.confidence,
            sample=self.sample,
            costs=self.costs,
        )


class SmallModelSession(LevelSession):
    """Draft for one call with a small model, as far as its context reaches."""

    model: SmallModelLevels

    def __init__(self, drafter: SmallModel, call: Call) -> None:
        super().__init__(call, SmallModelLevels(drafter, call), DraftSettings(call, drafter.habits(call)))
        self._context = drafter.context

    def propose(self, room: list[int]) -> Draft:
        """Draft within the model's context."""
        lengths = self.call.sequences.lengths
        space = [max(0, min(own, self._context - length)) for own, length in zip(room, lengths, strict=True)]
        return super().propose(space)


class SmallModelLevels(LevelModel):
    """Run a small model over its own slot cache, one token after another; the cache follows the text."""

    def __init__(self, drafter: SmallModel, call: Call) -> None:
        self.sequences = call.sequences
        reserve = min(max(call.sequences.lengths) + call.sequences.budget + 1, drafter.context)
        self.cached = CachedModel(drafter.model, call.rows, reserve)
        self.live = list(range(call.rows))
        self._vocab = drafter.model.get_input_embeddings().weight.shape[0]
        self._read = [0] * call.rows  # how many tokens of each row were text when the round began
        self._logits = torch.empty(0)

    def keep(self, finished: list[bool]) -> None:
        """Drop finished rows."""
        self.live = self.cached.keep(self.live, finished)
        self._read = list(self.cached.lengths)

    def start(self, wanted: list[int], nodes: int) -> list[int]:
        """Read every token that the model has not read; rows that draft nothing may be past its context."""
        lengths = self.cached.lengths
        texts = [self.sequences.tokens[row] for row in self.live]
        pending = [text[length:] for text, length in zip(texts, lengths, strict=True)]
        for place, row in enumerate(self.live):
            if not wanted[row]:
                pending[place] = []
        if any(lengths):
            self._logits = self._read_on(pending)
        else:
            self._logits = self._read_prompts([row or text[:1] for row, text in zip(pending, texts, strict=True)])
        self._read = list(self.cached.lengths)
        return self.live

    def laws(self, depth: int) -> Tensor:
        """Return the logits behind each row's newest token."""
        return self._logits.float()

    def advance(self, level: Level) -> None:
        """Read one drafted token a row; it is kept in rows that go on drafting."""
        output = self.cached.run(Pass.chain(self._known(level.tokens), undo=level.depth - 1))
        self.cached.commit([int(level.depth < want) for want in level.wanted])
        self._logits = output.logits

    def observe(self, round: Round) -> None:
        """Roll the cache back to the accepted tokens."""
        lengths = []
        for read, length, row in zip(self._read, self.cached.lengths, self.live, strict=True):
            lengths.append(read + min(length - read, len(round.paths[row])))
        self.cached.crop_rows(lengths)

    def _read_prompts(self, rows: list[list[int]]) -> Tensor:
        """Read the beginnings of all texts; return the logits ``(R, 1, V)`` behind them."""
        prompt = Prompt(self._padded(rows, left=True), [len(row) for row in rows])
        return self.cached.prefill(prompt).logits

    def _read_on(self, rows: list[list[int]]) -> Tensor:
        """Read what was written since; return the logits ``(R, 1, V)`` behind each row's newest token."""
        read = [len(row) for row in rows]
        counts = torch.tensor(read, device=self.cached.device)
        output = self.cached.run(Pass.chain(self._padded(rows, left=False), counts - 1))
        self.cached.commit(read)
        places = torch.arange(len(rows), device=self.cached.device)
        return output.logits[places, (counts - 1).clamp(min=0)].unsqueeze(1)

    def _padded(self, rows: list[list[int]], left: bool) -> Tensor:
        width = max(map(len, rows))
        pads = [[0] * (width - len(row)) for row in rows]
        filled = [pad + row if left else row + pad for pad, row in zip(pads, rows, strict=True)]
        return self._known(torch.tensor(filled))

    def _known(self, tokens: Tensor) -> Tensor:
        """Map ids that the model has no embedding for to its last one: any guess is corrected by the target."""
        return tokens.to(self.cached.device).clamp(0, self._vocab - 1)


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


METHOD = Method(
    name="distill",
    title="small language model",
    drafter=SmallModel,
    trainer="hf_specgen.trainers.distill:DistillTrainer",
)
