"""Taps: read chosen hidden states of a model while a pass runs, and no others.

``output_hidden_states`` keeps every layer alive and its last entry is normalised, so the stream after the last layer
is not among them; hooks read just what is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from hf_specgen.errors import IncompatibleDrafter, UnsupportedTarget

FINAL = -1
"""Names the input of the language-model head (after the final norm), beside the boundaries 0 .. number of layers."""


class Taps:
    """Read a model's hidden states at ``boundaries``: the stream after that many decoder layers, or ``FINAL``.

    Hooks of the caller's own run first: what they change is what is read.

    Raises: ``IncompatibleDrafter`` for boundaries that the model does not have, ``UnsupportedTarget`` when its decoder
    layers cannot be told.
    """

    def __init__(self, model: PreTrainedModel, boundaries: Sequence[int] = ()) -> None:
        self.boundaries = tuple(boundaries)
        self._name = type(model).__name__
        if not self.boundaries:
            return
        settings = model.config.get_text_config(decoder=True).to_dict()
        self._width = int(settings.get("hidden_size") or settings.get("n_embd") or settings.get("d_model") or 0)
        self._decoder: nn.Module = model.get_decoder()
        self._layers = decoder_layers(model) if any(boundary != FINAL for boundary in self.boundaries) else ()
        wrong = [boundary for boundary in self.boundaries if not FINAL <= boundary <= len(self._layers)]
        if wrong:
            raise IncompatibleDrafter(
                f"the drafter reads hidden states {wrong} of {self._name}, which has {len(self._layers)} layers: "
                f"boundaries 0 to {len(self._layers)}, or FINAL ({FINAL}), are required. Load the drafter's own target."
            )

    @contextmanager
    def on(self) -> Iterator[dict[int, Tensor]]:
        """Install the hooks; the dictionary holds what this thread's newest pass has shown. They go on any exit."""
        seen: dict[int, Tensor] = {}
        handles: list[RemovableHandle] = []
        try:
            for boundary in set(self.boundaries):
                handles.append(self._install(boundary, seen))
            if handles:
                owner = get_ident()
                clear = _in_thread(owner, seen.clear)
                handles.append(self._decoder.register_forward_pre_hook(clear))
            yield seen
        finally:
            for handle in handles:
                handle.remove()

    def read(self, seen: dict[int, Tensor], device: torch.device) -> tuple[Tensor, ...]:
        """Return one ``(B, S, D)`` tensor per boundary, in their order, on ``device``.

        Raises: ``UnsupportedTarget`` when a boundary was not passed or holds something else than the stream.
        """
        for boundary in self.boundaries:
            state = seen.get(boundary)
            if state is None or state.dim() != 3 or state.shape[-1] != self._width:
                found = "nothing" if state is None else f"shape {tuple(state.shape)}"
                raise UnsupportedTarget(
                    f"{self._name} showed {found} at hidden state {boundary}: (rows, positions, {self._width}) is "
                    "required by this drafter (a compiled forward hides its layers). Use a drafter that reads no "
                    "hidden states, such as PromptLookup."
                )
        return tuple(seen[boundary].to(device) for boundary in self.boundaries)

    def _install(self, boundary: int, seen: dict[int, Tensor]) -> RemovableHandle:
        owner = get_ident()

        def keep(state: object) -> None:
            if get_ident() == owner and isinstance(state, Tensor):  # others may run the model meanwhile
                seen[boundary] = state

        def enters(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            keep(args[0] if args else kwargs.get("hidden_states"))

        def leaves(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            keep(output if isinstance(output, Tensor) else output[0])

        if boundary == 0:
            return self._layers[0].register_forward_pre_hook(enters, with_kwargs=True)
        module = self._decoder if boundary == FINAL else self._layers[boundary - 1]
        return module.register_forward_hook(leaves)


def decoder_layers(model: PreTrainedModel) -> tuple[nn.Module, ...]:
    """Return a model's decoder layers in order: the one outermost list of as many modules as its config says.

    Raises: ``UnsupportedTarget`` when there is none, or more than one.
    """
    settings = model.config.get_text_config(decoder=True).to_dict()
    count = settings.get("num_hidden_layers") or settings.get("n_layer") or settings.get("num_layers")
    lists = [
        (name.count("."), tuple(module))
        for name, module in model.get_decoder().named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    depth = min((depth for depth, _ in lists), default=0)
    found = [layers for at, layers in lists if at == depth]
    if len(found) != 1:
        raise UnsupportedTarget(
            f"{type(model).__name__} has {len(found)} lists of {count} decoder layers: one is required to read its "
            "hidden states. Use a drafter that reads none, such as PromptLookup or SmallModel."
        )
    return found[0]


def _in_thread(owner: int, act: Callable[[], None]) -> Callable[..., None]:
    def hook(*_: object) -> None:
        if get_ident() == owner:
            act()

    return hook
