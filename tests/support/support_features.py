"""What the feature and refusal tests share: counting forwards and proving that a call leaves nothing behind."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel


class Forwards:
    """Count a model's own forwards, unnoticed."""

    __module__ = "torch"

    def __init__(self, model: PreTrainedModel) -> None:
        self.count = 0
        self._hook = model.register_forward_pre_hook(self)

    def __call__(self, *unused: Any) -> None:
        self.count += 1

    def stop(self) -> int:
        """Take the hook off and return the count."""
        self._hook.remove()
        return self.count


def state_of(model: PreTrainedModel) -> dict[str, Any]:
    """Copy everything about a model that a call could leave changed."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_with_kwargs")
    return {
        "config": copy.deepcopy(model.config.to_dict()),
        "implementation": model.config.get_text_config(decoder=True)._attn_implementation,
        "generation": copy.deepcopy(model.generation_config.to_dict()),
        "hooks": [[len(vars(module)[name]) for name in hooks] for module in model.modules()],
        "attributes": sorted(name for module in model.modules() for name in vars(module)),
        "training": [module.training for module in model.modules()],
        "grad": [parameter.requires_grad for parameter in model.parameters()],
        "weights": sum(float(parameter.detach().double().sum()) for parameter in model.parameters()),
        "grad mode": torch.is_grad_enabled(),
    }


@contextmanager
def unchanged(*models: PreTrainedModel) -> Iterator[None]:
    """Fail when a model is not as it was, however the block ends."""
    before = [state_of(model) for model in models]
    try:
        yield
    finally:
        for model, state in zip(models, before, strict=True):
            after = state_of(model)
            assert after == state, [name for name in state if after[name] != state[name]]
