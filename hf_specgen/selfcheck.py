"""Self-check: one ragged tree round against a plain forward, for architectures no test of ours has seen."""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specgen.draft import Tree
from hf_specgen.errors import UnsupportedTarget, reason_of
from hf_specgen.forward import CachedModel
from hf_specgen.makeup import Makeup, makeup_of
from hf_specgen.models import input_device
from hf_specgen.thresholds import Threshold, copy_of, lower, thresholds_of

TESTED = frozenset(
    f"{family}ForCausalLM"
    for family in (
        "Llama Qwen2 Qwen3 Mistral Gemma2 Gemma3 Phi3 GptOss Mixtral Qwen3Moe Olmo2 Cohere2 SmolLM3 DeepseekV3"
    ).split()
) | {"GPT2LMHeadModel"}
"""Architectures that the test-suite proves on tiny models; others are tried once per model object."""


@dataclass
class _Passed:
    """Remember what a model was made of when it passed, and the thresholds that it passed since."""

    makeup: Makeup
    thresholds: set[Threshold] = field(default_factory=set)


_PASSED: WeakKeyDictionary[PreTrainedModel, _Passed] = WeakKeyDictionary()
_PARENTS = (-1, -1, 0, 0, 1, 2)
_PATHS = ((), (0,), (1,), (0, 2), (0, 3), (1, 4), (0, 2, 5))
_LEAVES = ((0, 3), (1, 4), (0, 2, 5))
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-3}
_HALF_TOLERANCE = 0.2  # in bfloat16 sound models of 24 layers differ by 0.02 to 0.15, unsound ones by 0.4 and more
_JUNK_TOLERANCE = 1e-4  # passes of one shape round alike: without experts nothing but a leak differs
_LONGEST = 18  # tokens of the longest text that the check reads
_WIDEST = 64  # what a pass may hold beside the text: some models count slots where they should count positions
_READABLE = 4_096  # a threshold that cannot be lowered is passed at its own length up to here


def check_target(model: PreTrainedModel, longest: int = 0) -> None:
    """Let tested architectures pass; try others once, and again when a part of them was replaced.

    ``longest`` is the length that a text may reach: what changes in a model within it is tried too.

    Raises: ``UnsupportedTarget`` naming the model when accepted nodes get other logits than a plain forward gives.
    """
    makeup = makeup_of(model)
    stock = type(model).__module__.startswith("transformers.")  # another's class of the same name is not what we tested
    if stock and makeup.is_own and type(model).__name__ in TESTED:
        return
    passed = _PASSED.get(model)
    if passed is None or passed.makeup != makeup:
        _check_round(model, makeup)
        passed = _PASSED[model] = _Passed(makeup)
    for threshold in thresholds_of(model.config, _LONGEST):
        if longest + _WIDEST > threshold.value and threshold not in passed.thresholds:
            _check_beyond(model, makeup, threshold)
            passed.thresholds.add(threshold)


def _check_round(model: PreTrainedModel, makeup: Makeup) -> None:
    name = type(model).__name__
    try:
        worst, leak = round_error(model), leak_of(model)
    except UnsupportedTarget:
        raise
    except Exception as error:  # whatever unknown code raises, the user must hear which model and why
        raise UnsupportedTarget(
            f"{name} failed the one-round self-check with {type(error).__name__}: {reason_of(error)}. A decoder that "
            "takes a 4-D mask, position_ids and a key/value cache is required. Use plain generate()."
        ) from error
    limit = _limit(model, makeup)
    if not worst <= limit:
        raise UnsupportedTarget(
            f"{name} failed the one-round self-check: logits of draft nodes differ from a plain forward by "
            f"{worst:.2g} of "
            f"their spread (at most {limit:g} is allowed), so drafts would change its text. Use plain generate()."
        )
    limit = limit if _has_experts(model) else _JUNK_TOLERANCE
    if not leak <= limit:
        raise UnsupportedTarget(
            f"{name} failed the self-check: logits move by {leak:.2g} of their spread (at most {limit:g} is allowed) "
            "when only tokens of other draft nodes and other rows change, so drafts would change its text. A scale "
            "taken over a whole pass does that (int8 or float8 activations per tensor, LLM.int8 outliers): quantise "
            "activations per token, or weights alone. Use plain generate()."
        )


def _check_beyond(model: PreTrainedModel, makeup: Makeup, threshold: Threshold) -> None:
    """Try a model on both sides of a threshold: lowered on a copy where it obeys, else at its own length.

    Raises: ``UnsupportedTarget`` naming the threshold.
    """
    limit, place = _limit(model, makeup), threshold.value
    exact = makeup.is_quantised or model.dtype in _TOLERANCE  # else half precision would hide what a scale changes
    try:
        copy = copy_of(model, in_float32=not exact)
        if copy is not None and _obeys(copy, threshold):
            limit = limit if exact else _TOLERANCE[torch.float32]
            worst = round_error(copy, leaves=True)
        elif place <= _READABLE:
            worst = round_error(model, (place - 2, place + 9), leaves=True)
        else:
            worst = float("inf")
    except Exception as error:  # whatever unknown code raises, the user must hear at which length
        raise UnsupportedTarget(_beyond(model, threshold, f"{type(error).__name__}: {reason_of(error)}")) from error
    if not worst <= limit:
        found = f"logits of draft nodes differ by {worst:.2g} of their spread" if worst < float("inf") else "untested"
        raise UnsupportedTarget(_beyond(model, threshold, found))


def _beyond(model: PreTrainedModel, threshold: Threshold, found: str) -> str:
    room = threshold.value - _WIDEST
    shorter = f"Texts, with prompt and max_new_tokens, of at most {room} tokens are served. " if room > 0 else ""
    return (
        f"{type(model).__name__} changes with the length of a text ({threshold.name} = {threshold.value} in its "
        f"configuration), and beyond that its passes over drafts are not plain decoding's ({found}). {shorter}"
        "Use plain generate()."
    )


def _limit(model: PreTrainedModel, makeup: Makeup) -> float:
    """Return how much rounding may move logits; quantised layers jump where a value crosses a step."""
    return _HALF_TOLERANCE if makeup.is_quantised else _TOLERANCE.get(model.dtype, _HALF_TOLERANCE)


def _has_experts(model: PreTrainedModel) -> bool:
    """Tell whether experts see as many tokens of a pass as are sent to them, and round by that."""
    settings = model.config.get_text_config(decoder=True).to_dict()
    return any("experts" in name and isinstance(value, int) and value > 1 for name, value in settings.items())


@torch.no_grad()
def round_error(model: PreTrainedModel, lengths: tuple[int, int] = (5, 11), leaves: bool = False) -> float:
    """Return the largest difference of any node's logits from a cacheless forward, relative to the logits' spread.

    Two rounds are scored, so that gathering a tree path and rolling back are covered as well. ``leaves`` asks about the
    deepest nodes alone.
    """
    device = input_device(model)
    texts = [_tokens(model, 20, length) for length in lengths]
    cached = CachedModel(model, 2)
    first = cached.prefill(_padded(texts), list(lengths))
    worst = max(_error(model, text, first.logits[row, 0]) for row, text in enumerate(texts))
    tree = Tree(torch.tensor([_PARENTS], device=device))
    for start in (32, 46):
        block = torch.stack([_tokens(model, start, 7), _tokens(model, start + 7, 7)])
        scored = cached.extend(block, tree).logits
        for row, text in enumerate(texts):
            for node, path in enumerate(_PATHS):
                if not leaves or path in _LEAVES:
                    text_here = torch.cat([text, block[row, :1], block[row, 1:][list(path)]])
                    worst = max(worst, _error(model, text_here, scored[row, node]))
        kept = torch.tensor([[1, 4, 0], [0, 3, 0]], device=device)
        cached.cache.commit([3, 2], kept)
        texts = [torch.cat([texts[0], block[0, [0, 2, 5]]]), torch.cat([texts[1], block[1, :2]])]
    return worst


@torch.no_grad()
def leak_of(model: PreTrainedModel) -> float:
    """Return how much logits move when nothing but tokens of other branches and of the other row change.

    Two passes of one shape differ only in nodes that are no ancestors of those that are compared.
    """
    device = input_device(model)
    texts = [_tokens(model, 20, 5), _tokens(model, 20, 11)]
    cached = CachedModel(model, 2)
    cached.prefill(_padded(texts), [5, 11])
    tree = Tree(torch.tensor([_PARENTS], device=device))
    block = torch.stack([_tokens(model, 32, 7), _tokens(model, 39, 7)])
    before = cached.extend(block, tree).logits.float()
    worst = 0.0
    for row, path in enumerate(((0, 2, 5), (1, 4))):
        same = torch.tensor([0, *(node + 1 for node in path)], device=device)
        for start in (60, 77, 91):
            junk = torch.stack([_tokens(model, start, 7), _tokens(model, start + 7, 7)])
            junk[row, same] = block[row, same]
            moved = (cached.extend(junk, tree).logits[row, same].float() - before[row, same]).abs().max()
            worst = max(worst, float(moved / before[row, same].std().clamp(min=1e-6)))
    return worst


@torch.no_grad()
def _obeys(copy: PreTrainedModel, threshold: Threshold) -> bool:
    """Lower a copy's threshold; tell whether that changed what it computes: else a check would prove nothing."""
    text = _tokens(copy, 20, _LONGEST)
    before = _plain(copy, text)
    lower(copy, threshold)
    return _error(copy, text, before) > _JUNK_TOLERANCE


def _tokens(model: PreTrainedModel, start: int, count: int) -> Tensor:
    size = model.config.get_text_config(decoder=True).vocab_size
    device = input_device(model)
    return (torch.arange(start, start + count, device=device) * 7919 + 13) % size


def _padded(texts: list[Tensor]) -> Tensor:
    width = max(map(len, texts))
    return torch.stack([torch.cat([texts[-1][: width - len(text)], text]) for text in texts])


def _plain(model: PreTrainedModel, text: Tensor) -> Tensor:
    """Return the logits of a plain forward, whose positions are counted as ``generate()`` counts them."""
    positions = torch.arange(len(text), device=text.device)[None]
    return model(input_ids=text[None], position_ids=positions, use_cache=False).logits[0, -1]


def _error(model: PreTrainedModel, text: Tensor, logits: Tensor) -> float:
    plain = _plain(model, text).float()
    spread = plain.std().clamp(min=1e-6)
    return float((plain - logits.float()).abs().max() / spread)
