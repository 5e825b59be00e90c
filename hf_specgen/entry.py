"""The ways into the loop beside ``custom_generate``: ``enable(model)`` and a mixin that take ``assistant_model=``."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch import nn
from transformers import (
    GenerationMixin,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)

from hf_specgen.drafters.prompt_lookup import PromptLookup
from hf_specgen.drafters.small_model import SmallModel
from hf_specgen.drafting.drafter import Drafter
from hf_specgen.errors import IncompatibleDrafter, SpecGenError
from hf_specgen.generate import SpeculativeDecoding
from hf_specgen.models.wrappers import bare, writer

Model = TypeVar("Model", bound=nn.Module)

_DRAFT_SETTINGS = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")


class SpeculativeMixin(GenerationMixin):
    """Give a model class a ``generate()`` that knows our drafters: ``class X(SpeculativeMixin, LlamaForCausalLM)``."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Route drafters to the loop; everything else is transformers' own ``generate()``."""
        return route(self, super().generate, args, kwargs)


class EnabledGenerate:
    """Stand in for ``generate`` on one model object; copies and pickles with it."""

    def __init__(self, model: nn.Module, replaced: Callable[..., Any] | None) -> None:
        self.model = model
        self.replaced = replaced

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Route drafters to the loop; everything else goes where it went before."""
        kind: Any = type(self.model)
        plain = self.replaced if self.replaced is not None else kind.generate.__get__(self.model)
        return route(self.model, plain, args, kwargs)


def enable(model: Model) -> Model:
    """Let ``model.generate()`` take our drafters in ``assistant_model=``; ``disable`` undoes it. Returns the model.

    A compiled or PEFT model may be given. Raises: ``SpecGenError`` for what holds no model that generates.
    """
    notes = writer(model).__dict__
    if not isinstance(notes.get("generate"), EnabledGenerate):
        notes["generate"] = EnabledGenerate(writer(model), notes.get("generate"))
    return model


def disable(model: Model) -> Model:
    """Undo ``enable``: the model is exactly as before. Returns the model."""
    notes = writer(model).__dict__
    ours = notes.get("generate")
    if isinstance(ours, EnabledGenerate):
        del notes["generate"]
        if ours.replaced is not None:
            notes["generate"] = ours.replaced
    return model


def route(model: nn.Module, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Translate a ``generate()`` call with a drafter into one with ``custom_generate``; pass others on untouched."""
    names = list(inspect.signature(GenerationMixin.generate).parameters)[1:]
    call = {**dict(zip(names, args, strict=False)), **kwargs}
    loop = call.get("custom_generate")
    if loop is None:
        drafter = _drafter(model, call)
        if drafter is None:
            return plain(*args, **kwargs)
        loop = SpeculativeDecoding(drafter)
    if not isinstance(loop, SpeculativeDecoding):
        return plain(*args, **kwargs)
    if loop is call.get("custom_generate") and call.get("assistant_model") is not None:
        raise SpecGenError(
            "assistant_model= and custom_generate=SpeculativeDecoding(...) were both given: one drafter is required. "
            "Pass the drafter to SpeculativeDecoding, or leave custom_generate= out."
        )
    if call.get("assistant_tokenizer") is not None:
        raise IncompatibleDrafter(
            "assistant_tokenizer= was given: a drafter must use the target's own tokens. Use a drafter of the target's "
            "family without assistant_tokenizer=, or disable(model) for transformers' own universal assisted decoding."
        )
    if _setting(model, call, "token_healing"):
        raise SpecGenError("token_healing=True is not supported with a drafter: it rewrites the prompt. Leave it out.")
    if call.pop("synced_gpus", None):
        raise SpecGenError(
            "synced_gpus=True: ranks would need equal numbers of rounds. Use plain generate() on sharded models."
        )
    bound = copy.copy(loop)
    bound.streamer = call.pop("streamer", None) or loop.streamer
    bound.tokenizer = call.pop("tokenizer", None) or loop.tokenizer
    for name in ("assistant_model", "prompt_lookup_num_tokens", "max_matching_ngram_size", "custom_generate"):
        call.pop(name, None)
    _translate_stop_strings(model, call, bound.tokenizer)
    _pass_draft_settings(call)
    return plain(custom_generate=bound, prompt_lookup_num_tokens=None, **call)


def _setting(model: nn.Module, call: dict[str, Any], name: str) -> Any:
    """Read a generation setting as generate() would: the call, the given config, the model's config."""
    if call.get(name) is not None:
        return call[name]
    own = cast(Any, model).generation_config  # a wrapper may have one of its own, which PEFT hands to the model
    for config in (call.get("generation_config"), own):
        value = config.to_dict().get(name) if config is not None else None
        if value is not None:
            return value
    return None


def _pass_draft_settings(call: dict[str, Any]) -> None:
    """Hand over what the given config sets: the loop sees it merged with defaults, here what is set was meant."""
    given = call.get("generation_config")
    settings = given.to_dict() if given is not None else {}
    for name in _DRAFT_SETTINGS:
        if settings.get(name) is not None:
            call.setdefault(name, settings[name])


def _drafter(model: nn.Module, call: dict[str, Any]) -> Drafter | None:
    """Return what is to draft, None where nothing was asked for. Raises: ``SpecGenError`` for what cannot draft."""
    given = call.get("assistant_model")
    if isinstance(given, type) and issubclass(given, Drafter):
        raise SpecGenError(f"assistant_model={given.__name__}: an instance is required. Pass {given.__name__}(...).")
    if isinstance(given, Drafter):
        return given
    if given is not None:
        inner = bare(given)
        return inner if isinstance(inner, Drafter) else SmallModel(cast(nn.Module, given))
    count = _setting(model, call, "prompt_lookup_num_tokens")
    if count is not None:
        return PromptLookup(count, _setting(model, call, "max_matching_ngram_size") or 3)
    return None


def _translate_stop_strings(model: nn.Module, call: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Turn ``stop_strings`` into a criterion, since a custom loop is not given the tokenizer."""
    strings = _setting(model, call, "stop_strings")
    if not strings:
        return
    if tokenizer is None:
        raise SpecGenError(f"stop_strings={strings!r} was given without a tokenizer: pass tokenizer= as well.")
    criterion = StopStringCriteria(tokenizer, strings)
    call["stopping_criteria"] = StoppingCriteriaList([*(call.get("stopping_criteria") or []), criterion])
    call["stop_strings"] = None
