"""Self-check: one ragged tree round against a plain forward, for architectures no test of ours has seen."""

from __future__ import annotations

import math
from weakref import WeakSet

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specgen.draft import Tree
from hf_specgen.errors import UnsupportedTarget, reason_of
from hf_specgen.forward import CachedModel

TESTED = frozenset(
    f"{family}ForCausalLM"
    for family in (
        "Llama Qwen2 Qwen3 Mistral Gemma2 Gemma3 Phi3 GptOss Mixtral Qwen3Moe Olmo2 Cohere2 SmolLM3 DeepseekV3"
    ).split()
) | {"GPT2LMHeadModel"}
"""Architectures that the test-suite proves on tiny models; others are tried once per model object."""

_PASSED: WeakSet[PreTrainedModel] = WeakSet()
_PARENTS = (-1, -1, 0, 0, 1, 2)
_PATHS = ((), (0,), (1,), (0, 2), (0, 3), (1, 4), (0, 2, 5))
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-3}
_HALF_TOLERANCE = 0.2  # in bfloat16 sound models of 24 layers differ by 0.02 to 0.15, unsound ones by 0.4 and more
_IMPOSSIBLE = 1000.0  # so far below the best, or at -inf, stand ids that only pad a vocabulary: no part of the spread


def check_target(model: PreTrainedModel) -> None:
    """Let tested architectures pass; try others once, with two rows of different length and a tree.

    Raises: ``UnsupportedTarget`` naming the model when accepted nodes get other logits than a plain forward gives.
    """
    name = type(model).__name__
    stock = type(model).__module__.startswith("transformers.")  # another's class of the same name is not what we tested
    if (stock and name in TESTED) or model in _PASSED:
        return
    try:
        worst = round_error(model)
    except UnsupportedTarget:
        raise
    except Exception as error:  # whatever unknown code raises, the user must hear which model and why
        raise UnsupportedTarget(
            f"{name} failed the one-round self-check with {type(error).__name__}: {reason_of(error)}. A decoder that "
            "takes a 4-D mask, position_ids and a key/value cache is required. Use plain generate()."
        ) from error
    limit = _TOLERANCE.get(model.dtype, _HALF_TOLERANCE)
    if not worst <= limit:
        raise UnsupportedTarget(
            f"{name} failed the one-round self-check: logits of draft nodes differ from a plain forward by "
            f"{worst:.2g} of "
            f"their spread (at most {limit:g} is allowed), so drafts would change its text. Use plain generate()."
        )
    _PASSED.add(model)


@torch.no_grad()
def round_error(model: PreTrainedModel) -> float:
    """Return the largest difference of any node's logits from a cacheless forward, relative to the logits' spread.

    Two rounds are scored, so that gathering a tree path and rolling back are covered as well.
    """
    device = model.get_input_embeddings().weight.device
    size = model.config.get_text_config(decoder=True).vocab_size
    tokens = (torch.arange(64, device=device) * 7919 + 13) % size
    lengths, width = [5, 11], 11
    texts = [tokens[20 : 20 + length] for length in lengths]
    prompt = torch.stack([torch.cat([tokens[: width - len(text)], text]) for text in texts])
    cached = CachedModel(model, 2)
    first = cached.prefill(prompt, lengths)
    worst = max(_error(model, text, first.logits[row, 0]) for row, text in enumerate(texts))
    tree = Tree(torch.tensor([_PARENTS], device=device))
    for start in (32, 46):
        block = torch.stack([tokens[start : start + 7], tokens[start + 7 : start + 14]])
        scored = cached.extend(block, tree).logits
        for row, text in enumerate(texts):
            for node, path in enumerate(_PATHS):
                text_here = torch.cat([text, block[row, :1], block[row, 1:][list(path)]])
                worst = max(worst, _error(model, text_here, scored[row, node]))
        kept = torch.tensor([[1, 4, 0], [0, 3, 0]], device=device)
        cached.cache.commit([3, 2], kept)
        texts = [torch.cat([texts[0], block[0, [0, 2, 5]]]), torch.cat([texts[1], block[1, :2]])]
    return worst


def _error(model: PreTrainedModel, text: Tensor, logits: Tensor) -> float:
    plain = model(input_ids=text[None], use_cache=False).logits[0, -1].float()
    possible, ours = plain > plain.max() - _IMPOSSIBLE, logits.float()
    if not torch.equal(possible, ours > ours.max() - _IMPOSSIBLE):
        return math.inf
    spread = plain[possible].std().clamp(min=1e-6)
    worst = float((plain - ours)[possible].abs().max() / spread) if possible.any() else math.inf
    return worst if math.isfinite(worst) else math.inf  # Python's max would pass over what is no number
