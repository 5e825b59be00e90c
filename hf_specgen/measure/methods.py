"""Ways to decode that are compared: plain, stock assisted, ours. A method is one small record."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from hf_specgen.drafters.prompt_lookup import PromptLookup
from hf_specgen.drafters.small_model import SmallModel
from hf_specgen.drafters.with_lookup import WithLookup
from hf_specgen.drafting.drafter import Drafter
from hf_specgen.drafting.learned import LearnedDrafter
from hf_specgen.errors import SpecGenError
from hf_specgen.generate import SpeculativeDecoding
from hf_specgen.loading import load_drafter
from hf_specgen.measure.decode import Inputs, Output, decode
from hf_specgen.models.prepack import prepack

Load = Callable[[str], tuple[Any, Any]]

PLAIN = "plain"
STOCK = "stock"
CONSTANT = "ours-constant"
OURS = "ours"
PLAIN_PREPACKED = "plain-prepacked"
OURS_PREPACKED = "ours-prepacked"
DRAFTERS = (
    "prompt-lookup, small-model:<id or path>, learned:<id or path>, none, or one of the middle two behind "
    "prompt-lookup+"
)
_COPIES = "prompt-lookup+"


@dataclass(frozen=True)
class Decoding:
    """Hold how tokens are chosen. Greedy unless ``temperature`` is given and above zero."""

    max_new_tokens: int = 128
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    @property
    def greedy(self) -> bool:
        """Say whether the best token is always taken."""
        return not self.temperature

    def kwargs(self) -> dict[str, Any]:
        """Return the keyword arguments of ``generate()``, without the seed."""
        if self.greedy:
            return {"max_new_tokens": self.max_new_tokens, "do_sample": False}
        sampling = {
            "do_sample": True,
            "temperature": self.temperature,
            "top_k": self.top_k or 0,
            "top_p": self.top_p or 1.0,
        }
        return {"max_new_tokens": self.max_new_tokens, **sampling}


@dataclass(frozen=True)
class DecodingMethod:
    """Name a way to decode: ``generate(model, inputs, decoding, **extra)`` returns the new tokens.

    ``max_rows`` is the largest batch that it can do (None: any).
    """

    name: str
    label: str
    generate: Callable[..., Output]
    max_rows: int | None = None


def stock_method(name: str, label: str, max_rows: int | None = None, **fixed: Any) -> DecodingMethod:
    """Build the method that calls the model's own ``generate()`` with ``fixed`` arguments, seeded globally."""

    def run(model: Any, inputs: Inputs, decoding: Decoding, **extra: Any) -> Output:
        torch.manual_seed(decoding.seed)
        return decode(model, inputs, return_dict_in_generate=True, **decoding.kwargs(), **fixed, **extra)

    return DecodingMethod(name, label, run, max_rows)


def plain_method() -> DecodingMethod:
    """Build the baseline: transformers' own decoding, one token a pass."""
    return stock_method(PLAIN, "plain generate()")


def our_method(
    drafter: Drafter | None,
    name: str = OURS,
    label: str = "ours",
    rule: str = "rejection",
    tokenizer: Any = None,
) -> DecodingMethod:
    """Build the method that decodes with a drafter of ours (None: our loop without drafts).

    ``tokenizer`` is the target's; with it the vocabularies of target and drafter are compared.
    """

    def run(model: Any, inputs: Inputs, decoding: Decoding, **extra: Any) -> Output:
        seed = {} if decoding.greedy else {"seed": decoding.seed}
        loop = SpeculativeDecoding(drafter, rule=rule, tokenizer=tokenizer)
        return decode(model, inputs, loop, return_dict_in_generate=True, **decoding.kwargs(), **seed, **extra)

    return DecodingMethod(name, label, run)


def prepacked_twin(model: Any) -> Any:
    """Return a prepacked model over the parameters of the given one, which stays as it is."""
    shared = [*model.parameters(), *model.buffers()]
    return prepack(copy.deepcopy(model, {id(tensor): tensor for tensor in shared}))


def on_model(model: Any, method: DecodingMethod, name: str, label: str) -> DecodingMethod:
    """Build the method that runs another one on ``model``, whatever model it is given."""

    def run(_: Any, inputs: Inputs, decoding: Decoding, **extra: Any) -> Output:
        return method.generate(model, inputs, decoding, **extra)

    return replace(method, name=name, label=label, generate=run)


@dataclass(frozen=True)
class DrafterChoice:
    """Hold which drafter the user named, with its weights loaded once; ``sample``: draw its drafts."""

    spec: str
    sample: bool = False
    rule: str = "rejection"
    model: Any = None
    tokenizer: Any = None
    learned: LearnedDrafter | None = None

    @classmethod
    def parse(cls, spec: str, load: Load, sample: bool = False, rule: str = "rejection") -> DrafterChoice:
        """Read one of ``DRAFTERS``; ``load`` fetches a draft model, ``fitted`` what needs the target.

        Raises: SpecGenError for anything else, and for ``sample`` without a draft model.
        """
        kind, _, name = spec.removeprefix(_COPIES).partition(":")
        if kind == "small-model" and name:
            return cls(spec, sample, rule, *load(name))
        if kind == "learned" and name:
            return cls(spec, sample, rule)
        if spec not in {"prompt-lookup", "none"}:
            raise SpecGenError(f"the drafter {spec!r} is unknown. Give one of: {DRAFTERS}.")
        if sample:
            raise SpecGenError(
                f"the drafter {spec!r} copies or drafts nothing. Only small-model:<id or path> "
                "and learned:<id or path> can sample."
            )
        return cls(spec, sample, rule)

    def fitted(self, target: Any) -> DrafterChoice:
        """Return the choice with a learned drafter loaded for a target. Raises: SpecGenError when it does not fit."""
        kind, _, name = self.spec.removeprefix(_COPIES).partition(":")
        if kind != "learned":
            return self
        settings: dict[str, Any] = {"sample": True} if self.sample else {}
        return replace(self, learned=load_drafter(name, target, **settings))

    def make(self, num_tokens: int | None = None) -> Drafter | None:
        """Build the drafter; ``num_tokens`` None leaves the draft length to it."""
        if self.spec == "none":
            return None
        drafter = self._made(num_tokens)
        return WithLookup(drafter, PromptLookup(num_tokens)) if self.spec.startswith(_COPIES) else drafter

    def _made(self, num_tokens: int | None) -> Drafter:
        if self.learned is not None:
            same_weights = copy.copy(self.learned)
            same_weights.config = copy.deepcopy(self.learned.config)
            same_weights.config.num_tokens = num_tokens or self.learned.config.num_tokens
            return same_weights
        if self.model is None:
            return PromptLookup(num_tokens)
        return SmallModel(self.model, num_tokens, sample=self.sample, tokenizer=self.tokenizer)

    def prepacked(self) -> DrafterChoice:
        """Return the same choice with a prepacked twin of the draft model, if there is one."""
        return self if self.model is None else replace(self, model=prepacked_twin(self.model))

    def stock(self, num_tokens: int) -> DecodingMethod | None:
        """Build transformers' counterpart at a constant draft length, batch 1 only; None where it has none."""
        label = f"stock, {num_tokens} tokens"
        if self.spec == "none" or self.learned is not None or self.spec.startswith(_COPIES):
            return None
        if self.model is None:
            return stock_method(STOCK, label, max_rows=1, prompt_lookup_num_tokens=num_tokens)
        method = stock_method(STOCK, label, max_rows=1, assistant_model=self.model)
        return DecodingMethod(STOCK, label, _with_draft_length(method, self.model, num_tokens), max_rows=1)


def _with_draft_length(method: DecodingMethod, draft_model: Any, num_tokens: int) -> Callable[..., Output]:
    def run(model: Any, inputs: Inputs, decoding: Decoding, **extra: Any) -> Output:
        # stock assisted decoding reads the draft length from the draft model's own configuration only
        kept = draft_model.generation_config
        draft_model.generation_config = type(kept).from_dict(
            {
                **kept.to_dict(),
                "num_assistant_tokens": num_tokens,
                "num_assistant_tokens_schedule": "constant",
                "assistant_confidence_threshold": 0.0,
            }
        )
        try:
            return method.generate(model, inputs, decoding, **extra)
        finally:
            draft_model.generation_config = kept

    return run
