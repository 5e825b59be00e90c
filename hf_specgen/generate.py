"""The loop, and the three ways into it: a ``custom_generate`` callable, ``enable(model)``, a mixin."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from hf_specgen.costs import Costs
from hf_specgen.draft import Draft
from hf_specgen.drafters.base import Drafter
from hf_specgen.drafters.prompt_lookup import PromptLookup
from hf_specgen.drafters.small_model import SmallModel
from hf_specgen.errors import IncompatibleDrafter, SpecGenError
from hf_specgen.outputs import OutputLog
from hf_specgen.requests import check_positions, check_request, check_rule, read_request, real_tokens, seed_rows
from hf_specgen.selfcheck import check_target
from hf_specgen.sequences import DraftRequest, OnTokens, Sequences, Stops
from hf_specgen.stats import AcceptanceStats, RowStats
from hf_specgen.target import Target
from hf_specgen.verify import verify
from hf_specgen.warp import Warp

Result = Tensor | GenerateDecoderOnlyOutput

_LAST: WeakKeyDictionary[PreTrainedModel, AcceptanceStats] = WeakKeyDictionary()


class NoDrafter(Drafter):
    """Propose nothing: every round is one plain step on the loop's own coins."""

    def begin(self, sequences: Sequences) -> None:
        """Need nothing."""

    def propose(self, sequences: Sequences) -> Draft:
        """Return the empty draft."""
        return Draft.empty(len(sequences), sequences.prompt.device)


class SpeculativeDecoding:
    """Decode speculatively inside ``generate(custom_generate=...)``; the text follows the target's own law.

    Args: ``drafter`` proposes (None: nothing is drafted); ``rule`` is ``rejection``, ``block`` or ``gumbel``;
    ``streamer`` and ``tokenizer`` must be given here when the model is not enabled, since ``generate()`` drops them.

    Source: Leviathan et al. 2023, Chen et al. 2023 (rejection); Miao et al. 2024 (trees); Sun et al. 2024 (block).
    """

    def __init__(
        self,
        drafter: Drafter | None = None,
        rule: str = "rejection",
        streamer: BaseStreamer | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        check_rule(rule)
        self.drafter = drafter if drafter is not None else NoDrafter()
        self.rule = rule
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
        rule: str | None = None,
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
        check_rule(rule or self.rule)
        check_request(model, generation_config, inputs)
        check_target(model)
        stops = Stops.sort(stopping_criteria)
        greedy = not generation_config.do_sample
        rows = len(input_ids)
        if self.streamer is not None and rows > 1:
            raise SpecGenError(
                f"a streamer was given for {rows} rows: one row is required. Pass on_tokens=callback(row, tokens)."
            )
        tokens = real_tokens(input_ids, inputs.get("attention_mask"), inputs.get("position_ids"))
        check_positions(model, [len(row) for row in tokens], stops.max_length - input_ids.shape[1])
        device = model.get_input_embeddings().weight.device
        log = OutputLog(generation_config, rows)
        seeds, row_ids = seed_rows(rows, 0 if greedy and seed is None else seed, generator, device)
        asked = DraftRequest(num_assistant_tokens, num_assistant_tokens_schedule, assistant_confidence_threshold)
        sequences = Sequences(
            prompt=input_ids.to(device),
            tokens=tokens,
            stops=stops,
            seeds=seeds,
            row_ids=row_ids,
            warp=Warp(logits_processor, rows),
            vocab_size=model.config.get_text_config(decoder=True).vocab_size,
            greedy=greedy,
            rule=rule or self.rule,
            request=read_request(generation_config, asked),
            streamer=self.streamer,
            on_tokens=on_tokens,
            score_log=log.scores,
            costs=Costs.default(device, model.dtype),
            target_size=sum(parameter.numel() for parameter in model.parameters()),
            tokenizer=self.tokenizer,
        )
        sequences.warp.check(input_ids, sequences.vocab_size)
        pad = pad_token(generation_config, stops, rows)
        target = Target(
            model, sequences, self.drafter.hidden_layers, log.hidden is not None, generation_config.prefill_chunk_size
        )
        if self.streamer is not None:
            self.streamer.put(input_ids.cpu())
        stats = self._run(target, sequences, log)
        if self.streamer is not None:
            self.streamer.end()
        _LAST[model] = stats
        return log.result(sequences, pad, stats)

    def _run(self, target: Target, sequences: Sequences, log: OutputLog) -> AcceptanceStats:
        """Run the rounds: propose, score, verify, commit, until every row is finished."""
        stats = AcceptanceStats(
            type(self.drafter).__name__, sequences.rule, rows=[RowStats() for _ in sequences.tokens]
        )
        clock = _Clock()
        self.drafter.begin(sequences)
        stats.draft_seconds += clock.lap()
        if sequences.done:
            return stats
        round = target.prefill()
        log.add(round, target.scores, sequences.active)
        sequences.append(round)
        stats.prefill_seconds = clock.lap()
        before = target.cached.seconds
        self.drafter.observe(round)
        while not sequences.done:
            draft = self.drafter.propose(sequences)
            stats.draft_seconds += clock.lap()
            scores = target.score(draft)
            verdict = verify(scores, draft, sequences.coins(), sequences.rule)
            stats.verify_seconds += clock.lap()
            round = target.commit(draft, verdict)
            stats.add(round, sequences.active)
            log.add(round, scores, sequences.active)
            sequences.append(round)
            stats.other_seconds += clock.lap()
            self.drafter.observe(round)
        stats.forward_seconds = target.cached.seconds - before
        for row, count in zip(stats.rows, sequences.new, strict=True):
            row.num_tokens = count
        return stats


class _Clock:
    """Measure laps of wall time."""

    def __init__(self) -> None:
        self._last = perf_counter()

    def lap(self) -> float:
        """Return the seconds since the last lap."""
        now = perf_counter()
        elapsed, self._last = now - self._last, now
        return elapsed


def pad_token(config: GenerationConfig, stops: Stops, rows: int) -> int:
    """Return what fills finished rows.

    Raises: ``SpecGenError`` when rows can end at different lengths and no token is known to fill them.
    """
    pad = config.pad_token_id
    if pad is None and stops.eos:
        pad = min(stops.eos) if not isinstance(config.eos_token_id, list) else config.eos_token_id[0]
    if pad is None and rows > 1 and stops.others:
        raise SpecGenError(f"{rows} rows can stop at different lengths and there is no pad token: pass pad_token_id=.")
    return int(pad) if pad is not None else 0


class SpeculativeMixin(GenerationMixin):
    """Give a model class a ``generate()`` that knows our drafters: ``class X(SpeculativeMixin, LlamaForCausalLM)``."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Route drafters to the loop; everything else is transformers' own ``generate()``."""
        return route(super().generate, args, kwargs)


class EnabledGenerate:
    """Stand in for ``generate`` on one model object; copies and pickles with it."""

    def __init__(self, model: PreTrainedModel, replaced: Callable[..., Any] | None) -> None:
        self.model = model
        self.replaced = replaced

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Route drafters to the loop; everything else goes where it went before."""
        plain = self.replaced if self.replaced is not None else type(self.model).generate.__get__(self.model)
        return route(plain, args, kwargs)


def enable(model: PreTrainedModel) -> PreTrainedModel:
    """Let ``model.generate()`` take our drafters in ``assistant_model=``; ``disable`` undoes it. Returns the model."""
    if not isinstance(model.__dict__.get("generate"), EnabledGenerate):
        model.__dict__["generate"] = EnabledGenerate(model, model.__dict__.get("generate"))
    return model


def disable(model: PreTrainedModel) -> PreTrainedModel:
    """Undo ``enable``: the model is exactly as before. Returns the model."""
    ours = model.__dict__.get("generate")
    if isinstance(ours, EnabledGenerate):
        del model.__dict__["generate"]
        if ours.replaced is not None:
            model.__dict__["generate"] = ours.replaced
    return model


def last_stats(model: PreTrainedModel) -> AcceptanceStats | None:
    """Return the statistics of the model's latest speculative ``generate()`` call, None before any."""
    return _LAST.get(model)


def route(plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Translate a ``generate()`` call with a drafter into one with ``custom_generate``; pass others on untouched."""
    names = list(inspect.signature(GenerationMixin.generate).parameters)[1:]
    call = {**dict(zip(names, args, strict=False)), **kwargs}
    loop = call.get("custom_generate")
    if loop is None:
        drafter = _drafter(plain, call)
        if drafter is None:
            return plain(*args, **kwargs)
        loop = SpeculativeDecoding(drafter)
    if not isinstance(loop, SpeculativeDecoding):
        return plain(*args, **kwargs)
    if call.pop("synced_gpus", None):
        raise SpecGenError(
            "synced_gpus=True: ranks would need equal numbers of rounds. Use plain generate() on sharded models."
        )
    bound = copy.copy(loop)
    bound.streamer = call.pop("streamer", None) or loop.streamer
    bound.tokenizer = call.pop("tokenizer", None) or loop.tokenizer
    for name in ("assistant_model", "prompt_lookup_num_tokens", "max_matching_ngram_size", "custom_generate"):
        call.pop(name, None)
    _translate_stop_strings(plain, call, bound.tokenizer)
    return plain(custom_generate=bound, prompt_lookup_num_tokens=None, **call)


def _setting(plain: Callable[..., Any], call: dict[str, Any], name: str) -> Any:
    """Read a generation setting as generate() would: the call, the given config, the model's config."""
    if call.get(name) is not None:
        return call[name]
    model = plain.__self__ if inspect.ismethod(plain) else None
    own = model.generation_config if isinstance(model, PreTrainedModel) else None
    for config in (call.get("generation_config"), own):
        value = config.to_dict().get(name) if config is not None else None
        if value is not None:
            return value
    return None


def _drafter(plain: Callable[..., Any], call: dict[str, Any]) -> Drafter | None:
    given = call.get("assistant_model")
    if isinstance(given, Drafter):
        return given
    if isinstance(given, PreTrainedModel):
        if call.get("assistant_tokenizer") is not None:
            raise IncompatibleDrafter(
                "assistant_tokenizer= was given: a drafter must use the target's own tokens. Use a drafter of the "
                "target's "
                "family without assistant_tokenizer=, or disable(model) for transformers' own universal assisted "
                "decoding."
            )
        return SmallModel(given)
    count = _setting(plain, call, "prompt_lookup_num_tokens")
    if given is None and count is not None:
        return PromptLookup(count, _setting(plain, call, "max_matching_ngram_size") or 3)
    return None


def _translate_stop_strings(
    plain: Callable[..., Any], call: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """Turn ``stop_strings`` into a criterion, since a custom loop is not given the tokenizer."""
    strings = _setting(plain, call, "stop_strings")
    if not strings:
        return
    if tokenizer is None:
        raise SpecGenError(f"stop_strings={strings!r} was given without a tokenizer: pass tokenizer= as well.")
    criterion = StopStringCriteria(tokenizer, strings)
    call["stopping_criteria"] = StoppingCriteriaList([*(call.get("stopping_criteria") or []), criterion])
    call["stop_strings"] = None
