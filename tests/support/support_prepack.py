"""What the tests of prepacking share: which path ran, and everything that prepacking could leave on a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import plain, prompts
from torch import nn
from transformers import PreTrainedModel

IDS, MASK = prompts([12, 5])


def text(model: PreTrainedModel) -> torch.Tensor:
    """Write eight tokens the plain way."""
    return plain(model, IDS, MASK, max_new_tokens=8)


def packed_calls(run: Callable[[], Any]) -> tuple[Any, int]:
    """Return what ``run`` returns, and how many products with packed weights it made."""
    product, made = torch.ops.mkldnn._linear_pointwise, []

    def counted(*arguments: Any) -> torch.Tensor:
        made.append(1)
        return product(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops.mkldnn, "_linear_pointwise", counted)
        return run(), len(made)


def traces(model: nn.Module) -> list[Any]:
    """Return everything about a model that prepacking could leave behind."""
    modules = [(name, type(module), sorted(vars(module))) for name, module in model.named_modules()]
    tensors = [
        (name, id(tensor), tensor._version, tensor.data_ptr(), tensor.requires_grad)
        for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    ]
    hooks = [
        (dict(module._forward_pre_hooks), dict(module._forward_hooks), dict(module._forward_pre_hooks_with_kwargs))
        for module in model.modules()
    ]
    return [modules, tensors, hooks, list(model.state_dict())]
