"""CachedModel: a causal language model driven over its own SlotCache, for targets and small drafters alike."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel

from hf_specgen.errors import UnsupportedTarget
from hf_specgen.models.attention import PassAttention, implementation_of
from hf_specgen.models.fixed_shapes import FixedShapes, StandingBuffers
from hf_specgen.models.passes import ForwardOutput, Pass
from hf_specgen.models.prompt import Positions, Prompt
from hf_specgen.models.slot_cache import SlotCache
from hf_specgen.models.taps import Taps
from hf_specgen.models.visibility import Visibility, placed
from hf_specgen.models.wrappers import input_device, origin, row_counter

_CACHE_NAMES = ("cache", "past_key_values")


class CachedModel:
    """Run a model lane by lane: prompts once, then roots and draft nodes, with a rollback after each pass.

    Callers name rows that are not finished, in the order of their lanes; a lane whose row is finished is idle and
    leaves as soon as the pass may change its shape. ``counted``: somebody counts the model's rows, so every pass holds
    the whole batch in its order. ``shapes``: passes have the shapes of this list, for a compiler or CUDA graphs.
    ``taps`` are the boundaries whose hidden states every pass returns. ``seconds`` is the wall time spent inside the
    model's own forward (on a GPU: launching it).

    Raises: ``UnsupportedTarget`` when the model's cache, positions or layers cannot be driven this way.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rows: int,
        reserve: int = 0,
        taps: Sequence[int] = (),
        shapes: FixedShapes | None = None,
    ) -> None:
        self.model = model
        arguments = inspect.signature(type(model).forward).parameters
        check_arguments(model, arguments)
        self._cache_name = next(name for name in _CACHE_NAMES if name in arguments)
        self._trims_logits = "logits_to_keep" in arguments
        self.device = input_device(model)
        self.cache = SlotCache(model.config, rows, self.device, reserve, shapes)
        self.counted = row_counter(model) is not None
        self.seconds = 0.0
        self._shapes = shapes
        self._standing = StandingBuffers()
        self._step = run_model if shapes is None else shapes.capture(run_model)
        self._positions = Positions()
        self._lanes = list(range(rows))
        self._served: Tensor | None = None  # the same lanes on the device, None when no lane is idle
        self._one_kind = len(self.cache.groups) == 1
        self._attention = PassAttention(model)
        self._taps = Taps(model, taps)

    @property
    def lengths(self) -> list[int]:
        """Return the committed length of each row that is not finished."""
        return [self.cache.lengths[lane] for lane in self._lanes]

    def keep(self, live: list[int], finished: list[bool]) -> list[int]:
        """Drop finished rows; ``live[i]`` names the row of the batch that is served i-th. Return the new names."""
        served = {lane: row for lane, row in zip(self._lanes, live, strict=True) if not finished[row]}
        present = len(self.cache.lengths)
        order = compacted(list(served), self._lanes_for(len(served), present))
        if len(order) < present:
            self.cache.keep(order)
            self._positions = self._positions.keep(order)
            served = {place: served[lane] for place, lane in enumerate(order) if lane in served}
        if list(served) != self._lanes:
            self._lanes = list(served)
            self._served = torch.tensor(self._lanes, device=self.device) if len(served) < self._total else None
        return list(served.values())

    def commit(self, counts: list[int], paths: Tensor | None = None, kept: Tensor | None = None) -> None:
        """Keep what was accepted of the last pass, as ``SlotCache.commit`` does."""
        if self._served is not None and paths is not None:
            paths = placed(paths, self._served, self._total)
        if self._served is not None and kept is not None:
            kept = placed(kept, self._served, self._total)
        self.cache.commit(self._widened(counts, [0] * self._total), paths, kept)

    def crop_rows(self, lengths: list[int]) -> None:
        """Set the committed length of every row that is not finished (a rollback)."""
        self.cache.crop_rows(self._widened(lengths, self.cache.lengths))

    def prefill(self, prompt: Prompt, hidden: bool = False) -> ForwardOutput:
        """Read the prompts into empty lanes. Returns: the logits behind each prompt, ``(R, 1, V)``."""
        lengths = self._widened(prompt.lengths, self.cache.lengths)
        if self._served is not None:
            prompt = prompt.widened(self._served, self._total)
        self._positions = prompt.positions
        output = prompt.read(self, hidden)
        if self._served is not None:  # what idle lanes read is no text of theirs
            self.cache.crop_rows(lengths)
        return self._narrowed(output)

    def run(self, batch: Pass) -> ForwardOutput:
        """Score positions behind each row's committed text, root first. Commits nothing."""
        if self._served is not None:
            batch = batch.widened(self._served, self._total)
        return self._narrowed(self.run_lanes(batch))

    def read_whole(self, prompt: Prompt, hidden: bool) -> ForwardOutput:
        """Read left-padded prompts of every lane in one pass, under the model's own mask."""
        self.cache.begin_prefill(prompt.width, prompt.lengths, left_padded=True)
        last = torch.tensor([-1], device=self.device)  # a slice is not contiguous: torch would copy the head per row
        trims = {"logits_to_keep": last} if self._trims_logits else {}
        with self._measured() as seen:
            output = run_model(self.model, **self._cached(hidden), **prompt.arguments(), **trims)
        self.cache.crop_rows(prompt.lengths)
        return self._read(output, output.logits[:, -1:], prompt.width, hidden, seen)

    def run_lanes(self, batch: Pass) -> ForwardOutput:
        """Run a pass over every lane."""
        width = batch.width if self._shapes is None else self._shapes.width_of(batch.width)
        self.cache.begin(width, batch.undo)
        arguments = self._arguments(batch, width)
        trims = batch.columns is not None and self._trims_logits
        if trims:
            arguments["logits_to_keep"] = torch.tensor(batch.columns, device=self.device)
        with self._attention.on(), self._measured() as seen:
            output = self._step(self.model, **self._cached(batch.hidden), **arguments)
        logits = output.logits
        if not trims:
            logits = logits[:, : batch.width] if batch.columns is None else logits[:, list(batch.columns)]
        if width != batch.width:  # what reads logits wants whole rows of memory
            logits = logits.contiguous()
        return self._read(output, logits, batch.width, batch.hidden, seen)

    def commit_lanes(self, counts: list[int]) -> None:
        """Keep ``counts[r]`` positions of the last pass in every lane."""
        self.cache.commit(counts)

    def _cached(self, hidden: bool) -> dict[str, Any]:
        """Return what every pass of the model is told beside ids, positions and masks."""
        return {self._cache_name: self.cache, "use_cache": True, "return_dict": True, "output_hidden_states": hidden}

    def _arguments(self, batch: Pass, width: int) -> dict[str, Any]:
        """Return ids, positions and masks of a pass of ``width`` positions, of which the batch needs the first."""
        last = self.model.get_input_embeddings().weight.shape[0] - 1
        tokens = batch.tokens.clamp(0, last)
        positions = self._positions.ids(self.cache.row_lengths[:, None] + batch.depth)
        masks = self._masks(batch.visibility)
        if self._shapes is not None:
            write = self._standing.write
            tokens = write("tokens", _padded(tokens, width))
            positions = write("positions", _padded(positions, width))
            masks = {kind: write(kind, mask) for kind, mask in masks.items()}
        mask = next(iter(masks.values())) if self._one_kind else masks
        return {"input_ids": tokens, "position_ids": positions, "attention_mask": mask}

    def _masks(self, visibility: Visibility) -> dict[str, Tensor]:
        """Return the mask of the pass for every kind of layer, as the model's attention takes it."""
        masks = self.cache.masks(visibility)
        if self._attention.implementation != "sdpa":  # eager adds its mask
            low = torch.finfo(self.model.dtype).min
            zero = torch.zeros((), dtype=self.model.dtype, device=self.device)
            masks = {kind: torch.where(mask, zero, low) for kind, mask in masks.items()}
        return {kind: mask.expand(self._total, -1, -1, -1) for kind, mask in masks.items()}

    @contextmanager
    def _measured(self) -> Iterator[dict[int, Tensor]]:
        """Read the taps and count the seconds of what runs inside."""
        begun = perf_counter()
        with self._taps.on() as seen:
            yield seen
        self.seconds += perf_counter() - begun

    def _read(self, output: Any, logits: Tensor, width: int, hidden: bool, seen: dict[int, Tensor]) -> ForwardOutput:
        """Bring results to the device of the input embeddings (a model spread over devices ends elsewhere)."""
        states = output.hidden_states if hidden else ()
        states = tuple(layer.to(self.device)[:, :width] for layer in states)
        tapped = tuple(layer[:, :width] for layer in self._taps.read(seen, self.device))
        return ForwardOutput(logits.to(self.device), states, tapped)

    @property
    def _total(self) -> int:
        """Return how many lanes a pass has."""
        return len(self.cache.lengths)

    def _lanes_for(self, unfinished: int, present: int) -> int:
        """Return how many lanes to keep for the rows that are not finished."""
        if self.counted:
            return present
        return unfinished if self._shapes is None else self._shapes.lanes_of(unfinished, present)

    def _widened(self, numbers: list[int], fillers: list[int]) -> list[int]:
        """Return one number a lane: those given, and for idle lanes ``fillers``."""
        every = list(fillers)
        for lane, number in zip(self._lanes, numbers, strict=True):
            every[lane] = number
        return every

    def _narrowed(self, output: ForwardOutput) -> ForwardOutput:
        """Leave idle lanes out."""
        served = self._served
        if served is None:
            return output
        hidden = tuple(layer[served] for layer in output.hidden)
        taps = tuple(layer[served] for layer in output.taps)
        return ForwardOutput(output.logits[served], hidden, taps)


def run_model(model: PreTrainedModel, **arguments: Any) -> Any:
    """Run a model: all that a compiler or a CUDA graph records of a pass (``FixedShapes.capture``)."""
    return model(**arguments)


def _padded(part: Tensor, width: int) -> Tensor:
    """Repeat the first position behind the others up to ``width``; shapes ``(..., S)``."""
    missing = width - part.shape[-1]
    return part if not missing else torch.cat([part, part[..., :1].expand(*part.shape[:-1], missing)], -1)


def compacted(lanes: list[int], count: int) -> list[int]:
    """Return which lane stands at each of ``count`` places when these must stay: only lanes behind the end move."""
    movers = [lane for lane in lanes if lane >= count]
    holes = set(range(count)).difference(lanes)
    return [movers.pop() if place in holes and movers else place for place in range(count)]


def staying(live: list[int], finished: list[bool]) -> list[int]:
    """Return the lanes of unfinished rows as ``SlotCache.keep`` takes them; ``live[i]`` is the row of lane ``i``."""
    lanes = [lane for lane, row in enumerate(live) if not finished[row]]
    return compacted(lanes, len(lanes))


def check_arguments(model: PreTrainedModel, arguments: Any) -> None:
    """Refuse models whose forward cannot take positions, a cache and a mask of ours, or needs more than them."""
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedTarget(
            f"{name} is an encoder-decoder model: a decoder-only model is required. Use plain generate()."
        )
    if "position_ids" not in arguments or not any(known in arguments for known in _CACHE_NAMES):
        raise UnsupportedTarget(
            f"{name}.forward takes no position_ids or no key/value cache: both are required to score rows of different "
            "lengths in one pass. Use plain generate()."
        )
    implementation = implementation_of(model)
    if implementation not in ("sdpa", "eager"):
        raise UnsupportedTarget(
            f"{name} runs with attn_implementation={implementation!r}: 'sdpa' or 'eager' is required, other kernels "
            f"cannot take a tree mask. Call model.set_attn_implementation('sdpa')."
        )
    _check_preparation(model)


def _check_preparation(model: PreTrainedModel) -> None:
    """Refuse what is not transformers' own preparation of a step: what it adds, a soft prompt, reaches no pass of ours.

    Functions are compared: PEFT puts a method on the object, and after the call the bound original.
    """
    if not isinstance(model, GenerationMixin):  # a drafter that cannot generate by itself
        return
    for method in (model.prepare_inputs_for_generation, model._update_model_kwargs_for_generation):
        used = cast(FunctionType, origin(method))
        own = inspect.getattr_static(type(model), used.__name__, None)
        if used is not own or not used.__module__.startswith("transformers."):
            raise UnsupportedTarget(
                f"{used.__module__}.{used.__qualname__} prepares the inputs of {type(model).__name__} for every step, "
                "and draft passes know token ids alone (it may add a soft prompt, as PEFT's prompt, prefix and "
                "p-tuning do): transformers' own method is required. Use plain generate(), or adapters that change "
                "weights (LoRA)."
            )
