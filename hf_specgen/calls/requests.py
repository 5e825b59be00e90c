"""What a call may ask: refusals with a reason before the first token, and the settings that are honoured."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import index
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from hf_specgen import ops
from hf_specgen.errors import SpecGenError
from hf_specgen.models.cached_model import check_arguments
from hf_specgen.models.facts import logits_width, step_size
from hf_specgen.models.layer_kinds import layer_kinds
from hf_specgen.models.prepack import is_prepacked
from hf_specgen.models.wrappers import input_device, shared_seed
from hf_specgen.round.costs import Costs
from hf_specgen.round.sequences import DraftRequest, OnTokens, Sequences, Stops
from hf_specgen.round.typical import Typical, read_rule, warn_lossy
from hf_specgen.round.verify import RULES
from hf_specgen.round.warp import Warp

_REFUSED_SETTINGS = {
    "penalty_alpha": "contrastive search ranks several continuations",
    "dola_layers": "DoLa contrasts layers of one step",
    "constraints": "constrained beam search keeps several hypotheses",
    "force_words_ids": "constrained beam search keeps several hypotheses",
    "assistant_early_exit": "early exit changes the model while it drafts",
    "output_attentions": "attention weights of draft passes have no plain shape",
}
_KNOWN_INPUTS = frozenset({"attention_mask", "position_ids", "use_cache", "logits_to_keep", "output_hidden_states"})
_PICTURE_MARKS = frozenset({"token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"})
_LOSSY_CACHES = ("quantized", "offloaded", "offloaded_static", "offloaded_hybrid", "paged")


@dataclass(frozen=True)
class Options:
    """Hold what a call may ask beyond transformers' own arguments."""

    rule: str | Typical = "rejection"
    seed: int | list[int] | Tensor | None = None
    generator: torch.Generator | None = None
    request: DraftRequest = field(default_factory=DraftRequest)
    streamer: BaseStreamer | None = None
    on_tokens: OnTokens | None = None
    tokenizer: PreTrainedTokenizerBase | None = None


def prepare(
    model: PreTrainedModel,
    input_ids: Tensor,
    warp: Warp,
    stops: Stops,
    config: GenerationConfig,
    options: Options,
    inputs: dict[str, Any],
) -> Sequences:
    """Make the rows of a call, with all that must be refused refused.

    Raises: ``SpecGenError`` saying what was given, what is required and what to do.
    """
    rule = read_rule(options.rule, RULES)
    if isinstance(rule, Typical):
        warn_lossy(rule)
    rows = len(input_ids)
    greedy = not config.do_sample
    if options.streamer is not None and rows > 1:
        raise SpecGenError(
            f"a streamer was given for {rows} rows: one row is required. Pass on_tokens=callback(row, tokens)."
        )
    tokens = real_tokens(input_ids, inputs.get("attention_mask"), inputs.get("position_ids"))
    check_positions(model, [len(row) for row in tokens], stops.max_length - input_ids.shape[1])
    vocab_size = logits_width(model)
    warp.check(input_ids, vocab_size, stops.eos, max(1, stops.max_length - input_ids.shape[1]))
    warp.check_apart(stops.others)
    device = input_device(model)
    if not greedy:
        ops.check_doubles(device, "do_sample=True")
    elif isinstance(rule, Typical):
        ops.check_doubles(device, f"rule={rule}")
    if options.seed is not None and options.generator is not None:
        raise SpecGenError("seed= and generator= were both given: one source of randomness is required. Drop one.")
    seed = 0 if greedy and options.seed is None else options.seed  # greedy text must not consume randomness
    seeds, row_ids = seed_rows(model, rows, seed, options.generator)
    return Sequences(
        prompt=input_ids.to(device),
        tokens=tokens,
        stops=stops,
        seeds=seeds,
        row_ids=row_ids,
        warp=warp,
        vocab_size=vocab_size,
        greedy=greedy,
        rule=rule,
        request=read_request(config, model.generation_config, options.request),
        streamer=options.streamer,
        on_tokens=options.on_tokens,
        costs=Costs.default(device, model.dtype, is_prepacked(model)),
        target_size=step_size(model),
        tokenizer=options.tokenizer,
    )


def check_request(model: PreTrainedModel, config: GenerationConfig, inputs: dict[str, Any]) -> None:
    """Refuse what cannot be served exactly.

    Raises: ``SpecGenError`` saying what was given, what is required and what to do.
    """
    check_arguments(model, inspect.signature(type(model).forward).parameters)
    layer_kinds(model.config)  # the model first: a recurrent cache or an encoder's output is no wish of the caller
    settings = config.to_dict()
    beams = settings.get("num_beams") or 1
    if beams > 1:
        raise SpecGenError(
            f"num_beams={beams}: speculative decoding needs num_beams=1. Drop the drafter for beam search."
        )
    for name, reason in _REFUSED_SETTINGS.items():
        if settings.get(name):
            raise SpecGenError(
                f"{name}={settings[name]!r} is not supported with a drafter: {reason}. Use plain generate()."
            )
    if settings.get("cache_implementation") in _LOSSY_CACHES:
        raise SpecGenError(
            f"cache_implementation={settings['cache_implementation']!r}: rows roll back in our own cache, which is "
            "kept "
            "whole and on the device. Leave it out."
        )
    _check_inputs(model, inputs)
    _check_sampling(settings)


def _check_inputs(model: PreTrainedModel, inputs: dict[str, Any]) -> None:
    for name in ("cache", "past_key_values", "cache_params"):
        cache = inputs.get(name)
        # generate() marks a caller's cache; one that it made itself is empty and ignored
        if cache is not None and ("_is_user_defined" in vars(cache) or cache.get_seq_length() > 0):
            given = "cache= (past_key_values=)" if name == "cache" else f"{name}="
            raise SpecGenError(
                f"{given} was given: the prompt must be read by our own cache, whose rows have their own lengths. "
                "Pass the whole prompt as input_ids and leave the cache out."
            )
    if inputs.get("inputs_embeds") is not None:
        raise SpecGenError("inputs_embeds= was given: drafters read token ids. Pass the prompt as input_ids.")
    for name, value in inputs.items():
        known = name in _KNOWN_INPUTS or name in ("cache", "past_key_values", "cache_params", "inputs_embeds")
        known = known or _marks_no_picture(model, name, value)
        if not known and value is not None and value is not False and value != {}:
            held = f" ({', '.join(value)})" if isinstance(value, dict) else ""  # images that generate() encoded itself
            raise SpecGenError(
                f"model input {name}={held} was given: only token ids and their attention mask are supported with a "
                "drafter (no images, audio or other features). Use plain generate()."
            )


def _marks_no_picture(model: PreTrainedModel, name: str, value: object) -> bool:
    """Tell whether an input only says that a text for a model of pictures holds none: elsewhere type 0 is embedded."""
    sees = model.config.get_text_config(decoder=True) is not model.config
    return sees and name in _PICTURE_MARKS and isinstance(value, Tensor) and not bool(value.any())


def _check_sampling(settings: dict[str, Any]) -> None:
    temperature = settings.get("temperature")
    if settings.get("do_sample") and temperature is not None and temperature <= 0:
        raise SpecGenError(
            f"temperature={temperature}: a positive number is required. Use do_sample=False for greedy text."
        )


def check_positions(model: PreTrainedModel, lengths: list[int], budget: int) -> None:
    """Refuse texts that cross the length where a model's rotary factors switch, since rows would switch together.

    Raises: ``SpecGenError`` with the limit.
    """
    settings = model.config.get_text_config(decoder=True).to_dict()
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    longest = max(lengths) + budget
    shortest = min(lengths)
    for inner in (rope, *(value for value in rope.values() if isinstance(value, dict))):  # one a layer kind, or one
        given = inner.get("rope_type")
        kind = given if isinstance(given, str) else ""
        if kind != "longrope" and "dynamic" not in kind:
            continue
        limit = inner.get("original_max_position_embeddings") or settings.get("original_max_position_embeddings")
        limit = limit or settings["max_position_embeddings"]
        if longest > limit and ("dynamic" in kind or shortest <= limit):
            raise SpecGenError(
                f"rope_type={kind!r} changes its factors at {limit} tokens and this batch spans {shortest} to "
                f"{longest}: all rows must stay on one side. Lower max_new_tokens, split the batch, or use plain "
                "generate()."
            )


def read_request(config: GenerationConfig, own: GenerationConfig | None, asked: DraftRequest) -> DraftRequest:
    """Settle draft settings: the call's own first, then those that somebody set in a generation config.

    ``config`` is merged and full of defaults: one of them counts only when the model's ``own`` config set something.
    """
    defaults = GenerationConfig._get_default_generation_params()
    merged = config.to_dict()
    set_on_model = own.to_dict() if own is not None else {}

    def settle(value: Any, name: str) -> Any:
        given = merged.get(name)
        meant = given != defaults.get(name) or set_on_model.get(name) is not None
        return value if value is not None else given if meant else None

    return DraftRequest(
        settle(asked.num_tokens, "num_assistant_tokens"),
        settle(asked.schedule, "num_assistant_tokens_schedule"),
        settle(asked.confidence, "assistant_confidence_threshold"),
    )


def real_tokens(input_ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> list[list[int]]:
    """Return each row's tokens without its padding.

    Raises: ``SpecGenError`` for empty rows, padding on the right, and position ids other than plain counting.
    """
    if input_ids.shape[1] == 0:
        raise SpecGenError("the prompt is empty: at least one token a row is required.")
    if mask is None:
        mask = torch.ones_like(input_ids)
    mask = mask.bool()
    for row, ends_in_pad in enumerate((~mask[:, -1]).tolist()):
        if ends_in_pad:
            raise SpecGenError(
                f"row {row} ends in padding: left padding is required (tokenizer.padding_side = 'left'), since the "
                "first "
                "new token is read off the last column."
            )
    counted = (mask.long().cumsum(-1) - 1).clamp(min=0)
    if positions is not None and not _plainly_counted(positions, counted, mask):
        raise SpecGenError(
            f"position_ids= of shape {tuple(positions.shape)} was given: rows are counted from their first real token, "
            "in every plane alike. Leave it out."
        )
    return [ids[keep].tolist() for ids, keep in zip(input_ids, mask, strict=True)]


def _plainly_counted(positions: Tensor, counted: Tensor, mask: Tensor) -> bool:
    """Tell whether ``positions (L)``, ``(B, L)`` or ``(planes, B, L)`` (time, height, width) count tokens alone."""
    planes = positions.broadcast_to(torch.broadcast_shapes(positions.shape, counted.shape))
    return bool(((planes == counted) | ~mask).all())


def seed_rows(
    model: PreTrainedModel, rows: int, seed: int | list[int] | Tensor | None, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Return ``seeds (B,)`` and ``row_ids (B,)``: one seed for all rows, numbered; or one seed a row, each row 0.

    Without a seed one is drawn from ``generator`` or torch's global generator, so ``torch.manual_seed`` works; the
    processes of a tensor-parallel model take the first one's.
    Raises: ``SpecGenError`` when the number of seeds is not the number of rows.
    """
    device = input_device(model)
    if seed is None:
        source = generator.device if generator is not None else "cpu"
        seed = shared_seed(model, int(torch.randint(0, 2**62, (1,), generator=generator, device=source)))
    given = seed.tolist() if isinstance(seed, Tensor) else seed
    try:
        if not isinstance(given, Iterable):
            return torch.full((rows,), _word(given), device=device), torch.arange(rows, device=device)
        seeds = [_word(number) for number in given]
    except TypeError as error:
        raise SpecGenError(f"seed={seed!r}: one int, or one int a row, is required.") from error
    if len(seeds) != rows:
        raise SpecGenError(f"{len(seeds)} seeds were given for {rows} rows: one int, or one seed a row, is required.")
    return torch.tensor(seeds, device=device), torch.zeros(rows, dtype=torch.long, device=device)


def _word(seed: SupportsIndex) -> int:
    """Return the 64-bit word of a whole number, signed as tensors hold it (torch's own seeds go up to 2**64 - 1)."""
    return (index(seed) + 2**63) % 2**64 - 2**63


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
