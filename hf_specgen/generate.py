"""The loop: a ``custom_generate`` callable. The other ways into it are in ``entry``."""

from __future__ import annotations

from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from hf_specgen.calls.outputs import OutputLog
from hf_specgen.calls.requests import Options, check_request, pad_token, prepare
from hf_specgen.drafting.drafter import Call, Drafter, Session, TargetView
from hf_specgen.models.fixed_shapes import FixedShapes
from hf_specgen.models.selfcheck import check_target
from hf_specgen.models.target import Target
from hf_specgen.models.wrappers import bare
from hf_specgen.round.records import Draft
from hf_specgen.round.sequences import DraftRequest, OnTokens, Sequences, Stops
from hf_specgen.round.stats import AcceptanceStats, RowStats
from hf_specgen.round.typical import Typical, check_lossy, read_rule
from hf_specgen.round.verify import RULES, verify
from hf_specgen.round.warp import Warp

Result: TypeAlias = Tensor | GenerateDecoderOnlyOutput

_LAST: WeakKeyDictionary[PreTrainedModel, AcceptanceStats] = WeakKeyDictionary()


class NoDrafter(Drafter):
    """Propose nothing: every round is one plain step on the loop's own coins."""

    def begin(self, call: Call) -> Session:
        """Return a session that proposes nothing."""
        return Silence(call)


class Silence(Session):
    """Propose nothing."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def propose(self, room: list[int]) -> Draft:
        """Return the empty draft."""
        return Draft.empty(self._call.rows, self._call.device)


class SpeculativeDecoding:
    """Decode speculatively inside ``generate(custom_generate=...)``; the text follows the target's own law.

    Args: ``drafter`` proposes (None: nothing is drafted); ``rule`` is ``rejection``, ``block`` or ``gumbel``, or
    lossy: ``typical``, ``Typical(threshold, alpha)``;
    ``streamer`` and ``tokenizer`` must be given here when the model is not enabled, since ``generate()`` drops them.
    ``shapes`` (experimental; None: passes are as wide as their drafts) gives the target's passes few shapes.

    Source: Leviathan et al. 2023, Chen et al. 2023 (rejection); Miao et al. 2024 (trees); Sun et al. 2024 (block).
    """

    def __init__(
        self,
        drafter: Drafter | None = None,
        rule: str | Typical = "rejection",
        streamer: BaseStreamer | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        shapes: FixedShapes | None = None,
    ) -> None:
        self.rule = read_rule(rule, RULES)
        self.shapes = shapes
        self.drafter = drafter if drafter is not None else NoDrafter()
        self.streamer = streamer
        self.tokenizer = tokenizer

    def __call__(  # noqa: PLR0913 - generate() forwards only arguments that this signature names
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        *,
        seed: int | list[int] | Tensor | None = None,
        generator: torch.Generator | None = None,
        rule: str | Typical | None = None,
        on_tokens: OnTokens | None = None,
        num_assistant_tokens: int | None = None,
        num_assistant_tokens_schedule: str | None = None,
        assistant_confidence_threshold: float | None = None,
        **inputs: Any,
    ) -> Result:
        """Write every row to its end. Called by ``generate()`` after its own preparation.

        Shapes: ``input_ids (B, L)`` left-padded. ``seed``: one int, or one a row. ``on_tokens(row, tokens)`` is called
        with each row's new tokens once a round.
        Returns: what ``generate()`` returns, with ``speculation`` (``AcceptanceStats``) on it.
        Raises: ``SpecGenError`` before the first token for anything that cannot be served exactly.
        """
        options = Options(
            rule or self.rule,
            seed,
            generator,
            DraftRequest(num_assistant_tokens, num_assistant_tokens_schedule, assistant_confidence_threshold),
            self.streamer,
            on_tokens,
            self.tokenizer,
        )
        check_request(model, generation_config, inputs)
        stops = Stops.sort(stopping_criteria)
        check_target(model, stops.max_length, len(input_ids))
        pad = pad_token(generation_config, stops, len(input_ids))
        warp = Warp(logits_processor, len(input_ids))
        sequences = prepare(model, input_ids, warp, stops, generation_config, options, inputs)
        log = OutputLog(generation_config, len(sequences))
        sequences.score_log = log.scores
        check_lossy(sequences.rule, self.drafter.draws and not sequences.greedy, warp.takes_any_text)
        target = self._target(model, sequences, log, generation_config.prefill_chunk_size)
        stats = self._statistics(sequences)
        with stats.timed("draft"):
            session = self.drafter.begin(Call(sequences, TargetView(target.cached.model, target.cached.cache)))
        if self.streamer is not None:  # after the last refusal: nothing is streamed of a call that is refused
            self.streamer.put(sequences.prompt.cpu())
        if not sequences.done:
            self._run(session, target, sequences, stats, log)
        stats.forward_seconds = target.forward_seconds
        for row, count in zip(stats.rows, sequences.new, strict=True):
            row.num_tokens = count
        if self.streamer is not None:
            self.streamer.end()
        _LAST[model] = stats
        return log.result(sequences, pad, stats)

    def _run(
        self, session: Session, target: Target, sequences: Sequences, stats: AcceptanceStats, log: OutputLog
    ) -> None:
        """Run the rounds, the prompt's first, until every row is finished; docs/architecture.md prints this loop."""
        with stats.timed("prefill"):
            scores = target.prefill()
            verdict = verify(scores, scores.draft, scores.coins(), sequences.rule)
            round = target.commit(scores.draft, scores, verdict)
            log.add(round, scores, sequences.active)
            sequences.append(round)
        with stats.timed("draft"):
            session.observe(round)
        while not sequences.done:
            with stats.timed("draft"):
                draft = session.propose(sequences.room)
            with stats.timed("verify"):
                scores = target.score(draft)
                verdict = verify(scores, scores.draft, scores.coins(), sequences.rule)
            with stats.timed("other"):
                round = target.commit(draft, scores, verdict)
                log.add(round, scores, sequences.active)
                stats.add(round, sequences.append(round))
            with stats.timed("draft"):
                session.observe(round)

    def _target(
        self, model: PreTrainedModel, sequences: Sequences, log: OutputLog, prefill_chunk: int | None
    ) -> Target:
        """Return the model over an empty cache, its passes read as the drafter and the caller asked."""
        reads = self.drafter.reads(model)
        return Target(
            model,
            sequences,
            reads.hidden,
            reads.guesses,
            log.hidden is not None,
            prefill_chunk,
            self.shapes,
        )

    def _statistics(self, sequences: Sequences) -> AcceptanceStats:
        """Return empty statistics of a call."""
        return AcceptanceStats(
            self.drafter.title,
            str(sequences.rule),
            not isinstance(sequences.rule, Typical),
            [RowStats() for _ in sequences.tokens],
        )


def last_stats(model: nn.Module) -> AcceptanceStats | None:
    """Return the statistics of the model's latest speculative ``generate()`` call, None before any."""
    return _LAST.get(bare(model))
