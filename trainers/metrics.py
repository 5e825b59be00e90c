"""Metrics of a drafter: the acceptance length that decoding will have, from one teacher-forced pass; and real decoding.

The mean over all places of a text is not what decoding shows: a round begins where the last one ended, so places behind
a rejection are visited more often. The expected number of rounds obeys a renewal equation over the places of the text.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor
from transformers import (
    PreTrainedModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from hf_specgen.chats import Chat, check_settings, render
from hf_specgen.errors import SpecGenError
from hf_specgen.generate import SpeculativeDecoding
from hf_specgen.measure.compare import first_difference
from hf_specgen.measure.decode import decode, greedy_config, one_row
from hf_specgen.round.stats import RowStats
from hf_specgen.trainers.worth import is_sharded, live


class Renewal(NamedTuple):
    """Hold sums over texts: tokens written by rounds, and the rounds expected for them; ``tokens / rounds`` is tau.

    Shapes: scalars, float64 on the CPU, so that batches and processes add up.
    """

    tokens: Tensor
    rounds: Tensor

    @property
    def length(self) -> float:
        """Return the acceptance length, 1 where nothing was written."""
        return float(self.tokens / self.rounds) if self.rounds > 0 else 1.0


@torch.no_grad()
def renewal(rates: Tensor, loss_mask: Tensor, document_ids: Tensor | None = None) -> Renewal:
    """Return how many tokens and rounds it takes to write every supervised run of tokens, each as a text of its own.

    The first token of a run comes from reading its prompt, as in ``generate()``; rounds write the others. Texts
    must be the target's own (greedy, or sampled at the temperature of ``rates``): rounds are then exact for drafts that
    are picked, and expectations for drafts that are drawn.

    Shapes: ``rates (B, T, K)``: how likely the draft's k-th token behind the first t + 2 tokens is accepted when those
    before it are (NaN: unknown, 0); ``loss_mask (B, T)``; ``document_ids (B, T)``, where texts are packed.
    Source: the renewal equation, Feller 1968, vol. 1, chapter XIII, over rejection as in Leviathan et al. 2023.
    """
    runs = _runs(loss_mask.bool().cpu(), None if document_ids is None else document_ids.cpu())
    moves = _moves(rates.double().cpu())
    rows, width, reach = moves.shape
    written = torch.zeros_like(runs, dtype=torch.bool)
    written[:, 1:] = (runs[:, 1:] >= 0) & (runs[:, 1:] == runs[:, :-1])
    for step in range(1, reach + 1):  # a move that leaves the run ends the text
        moves[:, :, step - 1] *= torch.cat((runs[:, step:], torch.full_like(runs[:, :step], -2)), 1)[:, :width] == runs
    rounds = moves.new_zeros(rows, width + reach)  # [n]: those that follow when n tokens are known
    for place in range(width - 1, 1, -1):
        further = (moves[:, place] * rounds[:, place + 1 : place + 1 + reach]).sum(1)
        rounds[:, place] = torch.where(written[:, place], 1 + further, 0)
    begins = torch.zeros_like(written)
    begins[:, 1:] = written[:, 1:] & ~written[:, :-1]
    return Renewal(written.sum(dtype=torch.float64), rounds[:, :width][begins].sum())


def _runs(mask: Tensor, documents: Tensor | None) -> Tensor:
    """Number the supervised runs of tokens ``(B, T)``, -1 between them; what a text begins with is its prompt."""
    behind = torch.zeros_like(mask)
    behind[:, 1:] = True if documents is None else documents[:, 1:] == documents[:, :-1]
    mask = mask & behind
    first = mask.clone()
    first[:, 1:] &= ~(mask[:, :-1] & behind[:, 1:])
    return torch.where(mask, first.long().cumsum(1), -1)


def _moves(rates: Tensor) -> Tensor:
    """Return how likely a round writes 1 .. K + 1 tokens ``(B, T, K + 1)`` when n of the text's tokens are known."""
    behind = torch.zeros_like(rates)
    behind[:, 2:] = rates[:, :-2].nan_to_num(0.0)
    alive = torch.cat((torch.ones_like(behind[..., :1]), behind.cumprod(-1)), -1)
    return torch.cat((alive[..., :-1] - alive[..., 1:], alive[..., -1:]), -1)


class Trained(Protocol):
    """Name what the callback needs of a trainer."""

    args: Any
    drafter: Any
    target: Any
    processing_class: Any
    accelerator: Any

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Send figures to whatever ``report_to`` names."""
        ...


Prompt = str | Sequence[int] | Sequence[dict[str, Any]]


@dataclass(frozen=True)
class DecodedPrompts:
    """Hold what decoding showed: tokens written by rounds, rounds, prompts whose text was plain decoding's own."""

    tokens: int
    rounds: int
    equal: int
    prompts: int
    total: RowStats

    def metrics(self, prefix: str) -> dict[str, float]:
        """Return the figures under the names they are logged by."""
        found = {
            f"{prefix}_acceptance_length": self.tokens / self.rounds if self.rounds else 1.0,
            f"{prefix}_lossless": self.equal / self.prompts,
        }
        rates = enumerate(self.total.acceptance_rates, start=1)
        return found | {f"{prefix}_rate_{depth}": rate for depth, rate in rates}


class AcceptanceCallback(TrainerCallback):
    """Decode prompts with the live drafter: ``trainer.add_callback(AcceptanceCallback(trainer, prompts))``.

    Evaluations log ``eval_decoded_acceptance_length``, ``eval_decoded_rate_{k}`` (drafts whose first k tokens were
    accepted) and ``eval_decoded_lossless`` (prompts whose text is plain greedy decoding's); they can choose the best
    model. Prompts are texts, messages (``chat_template_kwargs`` are for their template) or token ids. The first process
    decodes, with a copy of the drafter in the target's dtype; every process logs the same. Nothing is decoded where
    drafter or target are sharded. Lengths and rates are those of greedy decoding, or of texts drawn at ``temperature``
    (the trainer's ``eval_temperature``).

    Raises: ``SpecGenError`` when a float32 target's text changes: the drafter, or this library, is broken.
    """

    def __init__(
        self,
        trainer: Trained,
        prompts: Sequence[Prompt],
        max_new_tokens: int = 128,
        every: int = 1,
        prefix: str = "eval_decoded",
        temperature: float | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if not prompts or every < 1 or max_new_tokens < 2:
            raise SpecGenError(
                f"{len(prompts)} prompts, every={every} and max_new_tokens={max_new_tokens} were given: a prompt, "
                "1 and 2 are the least that is required."
            )
        self.trainer = trainer
        self.prompts = prompts
        self.max_new_tokens = max_new_tokens
        self.every = every
        self.prefix = prefix
        self.chat_template_kwargs = check_settings(chat_template_kwargs or {})
        self.temperature = trainer.args.eval_temperature if temperature is None else temperature
        self._seen = 0
        self._step = -1
        self._plain: list[list[int]] | None = None

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Decode at every ``every``-th evaluated step; several data sets of one step count once."""
        if state.global_step == self._step:
            return
        self._step = state.global_step
        self._seen = self._seen + 1
        if (self._seen - 1) % self.every or self._sharded():
            return
        found = self.measure()
        kwargs.get("metrics", {}).update(found)
        self.trainer.log(dict(found))

    def measure(self) -> dict[str, float]:
        """Decode now. Returns: the figures, the same on every process; all of them must ask."""
        shared: list[Any] = [None]
        cause: Exception | None = None
        if self.trainer.accelerator.is_main_process:
            try:
                shared = [self._decoded().metrics(self.prefix)]
            except Exception as error:  # the other processes wait: they must hear of it
                cause = error
                shared = [f"{type(error).__name__}: {error}"]
        broadcast_object_list(shared)
        figures: dict[str, float] | str = shared[0]
        if isinstance(figures, str):
            raise SpecGenError(f"decoding with the drafter failed: {figures}") from cause
        return figures

    def _sharded(self) -> bool:
        if not is_sharded(self.trainer.drafter, self.trainer.target.model):
            return False
        warnings.warn("drafter or target are sharded: AcceptanceCallback decodes nothing.", stacklevel=2)
        return True

    @torch.no_grad()
    def _decoded(self) -> DecodedPrompts:
        """Decode every prompt alone, plainly once and with the drafter as it is now."""
        target: PreTrainedModel = self.trainer.target.model
        config = greedy_config(target, self.max_new_tokens)
        prompts = [self._ids(prompt) for prompt in self.prompts]
        if self._plain is None:
            self._plain = [decode(target, one_row(target, ids), generation_config=config).rows[0] for ids in prompts]
        loop = SpeculativeDecoding(live(self.trainer.drafter, target))
        drawn = copy.deepcopy(config)
        drawn.update(do_sample=True, temperature=self.temperature or 1.0, top_k=0, top_p=1.0)
        tokens = rounds = equal = 0
        total = RowStats()
        for number, (ids, wanted) in enumerate(zip(prompts, self._plain, strict=True)):
            inputs = one_row(target, ids)
            output = decode(target, inputs, loop, generation_config=config)
            text = output.rows[0]
            if text != wanted and target.dtype == torch.float32:
                raise SpecGenError(_difference_words(number, text, wanted))
            equal += text == wanted
            if self.temperature:
                output = decode(target, inputs, loop, generation_config=drawn, seed=number)
            assert output.stats is not None
            tokens += len(output.rows[0]) - 1
            rounds += output.stats.total.num_rounds
            total.merge(output.stats.total)
        return DecodedPrompts(tokens, rounds, equal, len(prompts), total)

    def _ids(self, prompt: Prompt) -> list[int]:
        tokenizer = self.trainer.processing_class
        if not isinstance(prompt, str) and all(isinstance(part, int) for part in prompt):
            return [int(part) for part in prompt]  # type: ignore[arg-type]
        if tokenizer is None:
            raise SpecGenError("prompts are texts and the trainer has no processing_class: give it one, or token ids.")
        if isinstance(prompt, str):
            return list(tokenizer(prompt)["input_ids"])
        chat = Chat(list(prompt), settings=self.chat_template_kwargs)  # type: ignore[arg-type]
        return list(render(tokenizer, chat, asks=True, tokenize=True, return_dict=True)["input_ids"])


def _difference_words(number: int, text: list[int], wanted: list[int]) -> str:
    position = first_difference(wanted, text) or 0
    ours = text[position : position + 3]
    plain = wanted[position : position + 3]
    return (
        f"prompt {number}: token {position} of the text differs from plain greedy decoding ({ours} "
        f"instead of {plain}). Please report it; decoding must not change a float32 text."
    )
