"""Self-check: one ragged tree round against a plain forward, for architectures no test of ours has seen."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specgen.errors import UnsupportedTarget, reason_of
from hf_specgen.models.cached_model import CachedModel
from hf_specgen.models.makeup import Makeup, makeup_of
from hf_specgen.models.passes import Pass
from hf_specgen.models.prompt import Prompt
from hf_specgen.models.thresholds import Threshold, copy_of, lower, thresholds_of
from hf_specgen.models.visibility import TreeVisibility
from hf_specgen.models.wrappers import input_device, row_counter
from hf_specgen.round.records import Tree

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
_KEPT = ((1, 4), (0,))  # the path that is committed in even and odd rows
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-3}
_HALF_TOLERANCE = 0.2  # in bfloat16 sound models of 24 layers differ by 0.02 to 0.15, unsound ones by 0.4 and more
_JUNK_TOLERANCE = 1e-4  # passes of one shape round alike: without experts nothing but a leak differs
_LONGEST = 18  # tokens of the longest text that the check reads
_WIDEST = 64  # what a pass may hold beside the text: some models count slots where they should count positions
_READABLE = 4_096  # a threshold that cannot be lowered is passed at its own length up to here
_IMPOSSIBLE = 1000.0  # so far below the best, or at -inf, stand ids that only pad a vocabulary: no part of the spread


def check_target(model: PreTrainedModel, longest: int = 0, rows: int = 1) -> None:
    """Let tested architectures pass; try others once, and again when a part of them was replaced.

    ``longest`` is the length that a text may reach: what changes in a model within it is tried too. ``rows`` are the
    batch's: a model that holds data per row is tried in as many, since it cannot run fewer.

    Raises: ``UnsupportedTarget`` naming the model when accepted nodes get other logits than a plain forward gives.
    """
    makeup = makeup_of(model)
    stock = type(model).__module__.startswith("transformers.")  # another's class of the same name is not what we tested
    if stock and makeup.is_own and type(model).__name__ in TESTED:
        return
    counted = None if row_counter(model) is None else rows
    passed = _PASSED.get(model)
    if passed is None or passed.makeup != makeup:
        _check_round(model, makeup, counted)
        passed = _PASSED[model] = _Passed(makeup)
    for threshold in thresholds_of(model.config, _LONGEST):
        if longest + _WIDEST > threshold.value and threshold not in passed.thresholds:
            _check_beyond(model, makeup, threshold, counted)
            passed.thresholds.add(threshold)


def _check_round(model: PreTrainedModel, makeup: Makeup, rows: int | None) -> None:
    name = type(model).__name__
    try:
        worst = round_error(model, rows=rows)
        leak = leak_of(model, rows)
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


def _check_beyond(model: PreTrainedModel, makeup: Makeup, threshold: Threshold, rows: int | None) -> None:
    """Try a model on both sides of a threshold: lowered on a copy where it obeys, else at its own length.

    Raises: ``UnsupportedTarget`` naming the threshold.
    """
    limit, place = _limit(model, makeup), threshold.value
    exact = makeup.is_quantised or model.dtype in _TOLERANCE  # else half precision would hide what a scale changes
    try:
        copy = copy_of(model, in_float32=not exact)
        if copy is not None and _obeys(copy, threshold, rows):
            limit = limit if exact else _TOLERANCE[torch.float32]
            worst = round_error(copy, leaves=True, rows=rows)
        elif place <= _READABLE:
            worst = round_error(model, (place - 2, place + 9), leaves=True, rows=rows)
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
def round_error(
    model: PreTrainedModel, lengths: tuple[int, int] = (5, 11), leaves: bool = False, rows: int | None = None
) -> float:
    """Return the largest difference of any node's logits from a cacheless forward, relative to the logits' spread.

    Two rounds are scored, so that gathering a tree path and rolling back are covered as well. ``leaves`` asks about the
    deepest nodes alone. ``rows`` is how many rows every forward must have; None: two, compared with forwards of one.
    """
    device, count = input_device(model), rows or 2
    texts = [_tokens(model, 20, lengths[row % 2]) for row in range(count)]
    cached = CachedModel(model, count)
    first = cached.prefill(Prompt(_padded(texts), [len(text) for text in texts]))
    worst = _worst(model, texts, first.logits[:, 0], rows)
    visibility = TreeVisibility(Tree(torch.tensor([_PARENTS], device=device)))
    for start in (32, 46):
        block = torch.stack([_tokens(model, start + 7 * (row % 2), 7) for row in range(count)])
        scored = cached.run(Pass(block, visibility)).logits
        for node, path in enumerate(_PATHS):
            if not leaves or path in _LEAVES:
                places = [0, *(step + 1 for step in path)]
                longer = [torch.cat([text, block[row, places]]) for row, text in enumerate(texts)]
                worst = max(worst, _worst(model, longer, scored[:, node], rows))
        kept = [_KEPT[row % 2] for row in range(count)]
        paths = torch.tensor([[*path, 0][:2] for path in kept], device=device)
        cached.cache.commit([len(path) + 1 for path in kept], paths)
        texts = [
            torch.cat([text, block[row, [0, *(step + 1 for step in kept[row])]]]) for row, text in enumerate(texts)
        ]
    return worst


@torch.no_grad()
def leak_of(model: PreTrainedModel, rows: int | None = None) -> float:
    """Return how much logits move when nothing but tokens of other branches and of other rows change.

    Two passes of one shape differ only in nodes that are no ancestors of those that are compared.
    """
    device, count = input_device(model), rows or 2
    texts = [_tokens(model, 20, (5, 11)[row % 2]) for row in range(count)]
    cached = CachedModel(model, count)
    cached.prefill(Prompt(_padded(texts), [len(text) for text in texts]))
    visibility = TreeVisibility(Tree(torch.tensor([_PARENTS], device=device)))
    block = torch.stack([_tokens(model, 32 + 7 * (row % 2), 7) for row in range(count)])
    before = cached.run(Pass(block, visibility)).logits
    worst = 0.0
    for row in range(min(count, 2)):
        same = torch.tensor([0, *(node + 1 for node in _LEAVES[2 - row])], device=device)
        for start in (60, 77, 91):
            junk = torch.stack([_tokens(model, start + 7 * (other % 2), 7) for other in range(count)])
            junk[row, same] = block[row, same]
            moved = cached.run(Pass(junk, visibility)).logits
            worst = max(worst, *(_difference(before[row, node], moved[row, node]) for node in same.tolist()))
    return worst


@torch.no_grad()
def _obeys(copy: PreTrainedModel, threshold: Threshold, rows: int | None) -> bool:
    """Lower a copy's threshold; tell whether that changed what it computes: else a check would prove nothing."""
    texts = [_tokens(copy, 20, _LONGEST)] * (rows or 1)
    before = torch.stack(_plain(copy, texts, rows))
    lower(copy, threshold)
    return _worst(copy, texts, before, rows) > _JUNK_TOLERANCE


def _tokens(model: PreTrainedModel, start: int, count: int) -> Tensor:
    size = model.config.get_text_config(decoder=True).vocab_size
    device = input_device(model)
    return (torch.arange(start, start + count, device=device) * 7919 + 13) % size


def _padded(texts: list[Tensor]) -> Tensor:
    longest = max(texts, key=len)
    return torch.stack([torch.cat([longest[: len(longest) - len(text)], text]) for text in texts])


def _plain(model: PreTrainedModel, texts: list[Tensor], rows: int | None) -> list[Tensor]:
    """Return the last logits of plain forwards, whose positions are counted as ``generate()`` counts them.

    One forward a text; where ``rows`` are required one for all, in which what stands behind a text cannot be seen.
    """
    if rows is None:
        return [logits for text in texts for logits in _plain(model, [text], 1)]
    width = max(map(len, texts))
    ids = torch.stack([torch.cat([text, text[-1:].expand(width - len(text))]) for text in texts])
    positions = torch.arange(width, device=ids.device).expand_as(ids)
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    return [logits[row, len(text) - 1] for row, text in enumerate(texts)]


def _worst(model: PreTrainedModel, texts: list[Tensor], logits: Tensor, rows: int | None) -> float:
    """Return the largest difference of ``logits (B, V)`` from those of plain forwards over the rows' texts."""
    return max(_difference(plain, ours) for plain, ours in zip(_plain(model, texts, rows), logits, strict=True))


def _difference(plain: Tensor, ours: Tensor) -> float:
    """Return the largest difference of two rows of logits, relative to the first one's spread over possible ids."""
    plain, ours = plain.float(), ours.float()
    possible = plain > plain.max() - _IMPOSSIBLE
    if not torch.equal(possible, ours > ours.max() - _IMPOSSIBLE):
        return math.inf
    spread = plain[possible].std().clamp(min=1e-6)
    worst = float((plain - ours)[possible].abs().max() / spread) if possible.any() else math.inf
    return worst if math.isfinite(worst) else math.inf  # Python's max would pass over what is no number
