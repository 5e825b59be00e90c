"""Medusa checkpoints as producers write them."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from hf_specgen.checkpoints.formats.base import Source, layout_named
from hf_specgen.drafters.medusa import MedusaDrafter

H, V = 32, 64


State = dict[str, torch.Tensor]


def random_heads(count: int, blocks: int, own: bool = True, bias: bool = True, vocab: int = V, seed: int = 0) -> State:
    """Write down heads under the names of Medusa v0.1."""
    random = torch.Generator().manual_seed(seed)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random) * 0.2

    state: State = {}
    for head in range(count):
        for block in range(blocks):
            state[f"{head}.{block}.linear.weight"] = tensor(H, H)
            if bias:
                state[f"{head}.{block}.linear.bias"] = tensor(H)
        if own:
            state[f"{head}.{blocks}.weight"] = tensor(vocab, H)
    return state


def source_of(state: State, config: dict | None = None) -> Source:
    return Source(
        "made",
        config or {},
        {name: tuple(tensor.shape) for name, tensor in state.items()},
        lambda names: {name: state[name] for name in names},
    )


def saved(drafter: MedusaDrafter, folder: Path) -> Path:
    layout_named("medusa").write(drafter.checkpoint(), folder)
    return folder


def full_model(folder: Path, model, heads: State) -> Path:
    model.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    state |= {f"medusa_head.{name}": tensor for name, tensor in heads.items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
