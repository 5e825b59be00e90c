"""CachedModel: a causal language model driven over its own SlotCache, for targets and small drafters alike."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel

from hf_specgen.errors import UnsupportedTarget
from hf_specgen.models.attention import PassAttention, implementation_of
from hf_specgen.models.slot_cache import SlotCache
from hf_specgen.models.taps import Taps
from hf_specgen.models.wrappers import input_device, origin, row_counter
from hf_specgen.round.records import Tree

_CACHE_NAMES = ("cache", "past_key_values")


@dataclass(frozen=True)
class ForwardOutput:
    """Hold what one pass returned.

    Shapes: ``logits (B, S, V)`` (``(B, 1, V)``, each row's last prompt position, after a prefill); ``hidden``: the
    embedding output and one ``(B, S, D)`` per layer when asked for, else empty; ``taps``: one ``(B, S, D)`` per
    boundary that the model is tapped at.
    """

    logits: Tensor
    hidden: tuple[Tensor, ...] = ()
    taps: tuple[Tensor, ...] = ()


class CachedModel:
    """Run a model row by row: prompts once, then roots and draft nodes, with a rollback after each pass.

    ``taps`` are the boundaries whose hidden states every pass returns. ``fixed``: somebody counts the model's rows, so
    every pass holds the whole batch in its order; callers see no more of it than of any other, ``_places`` maps.
    ``seconds`` is the wall time spent inside the model's own forward (on a GPU: launching it).

    Raises: ``UnsupportedTarget`` when the model's cache, positions or layers cannot be driven this way.
    """

    def __init__(self, model: PreTrainedModel, rows: int, reserve: int = 0, taps: Sequence[int] = ()) -> None:
        self.model = model
        arguments = inspect.signature(type(model).forward).parameters
        check_arguments(model, arguments)
        self._cache_name = next(name for name in _CACHE_NAMES if name in arguments)
        self._trims_logits = "logits_to_keep" in arguments
        self.device = input_device(model)
        self.cache = SlotCache(model.config, rows, self.device, reserve)
        self.fixed = row_counter(model) is not None
        self._places = list(range(rows))
        self.seconds = 0.0
        self._one_kind = len(self.cache.groups) == 1
        self._attention = PassAttention(model)
        self._taps = Taps(model, taps)

    @property
    def lengths(self) -> list[int]:
        """Return each row's committed length."""
        return [self.cache.lengths[place] for place in self._places]

    def keep(self, live: list[int], finished: list[bool]) -> list[int]:
        """Drop finished rows; ``live[i]`` names the row of the batch at place ``i``. Return the new names by place."""
        if self.fixed:
            self._places = [place for place, row in zip(self._places, live, strict=True) if not finished[row]]
            return [row for row in live if not finished[row]]
        order = staying(live, finished)
        if len(order) == len(live):
            return live
        self.cache.keep(order)
        self._places = list(range(len(order)))
        return [live[place] for place in order]

    def commit(self, counts: list[int], paths: Tensor | None = None) -> None:
        """Keep what was accepted of the last pass, as ``SlotCache.commit`` does."""
        self.cache.commit(self._widened(counts, 0), None if paths is None else self._wide(paths, 0))

    def crop_rows(self, lengths: list[int]) -> None:
        """Set every row's committed length (a rollback)."""
        self.cache.crop_rows(self._widened(lengths))

    def prefill(self, ids: Tensor, lengths: list[int], hidden: bool = False, chunk: int | None = None) -> ForwardOutput:
        """Read left-padded prompts ``ids (B, W)``; row ``r`` holds ``lengths[r]`` real tokens at the end.

        ``chunk`` bounds how many columns one pass reads. Raises: ``ValueError`` for hidden states of a chunked prompt.
        """
        width = ids.shape[1]
        if chunk is not None and chunk < width:
            return self._prefill_chunks(ids, lengths, chunk, hidden)
        kept = self._widened(lengths)
        ids, lengths = self._wide(ids, 0), self._widened(lengths, 1)
        pads = torch.tensor([width - length for length in lengths], device=self.device)[:, None]
        columns = torch.arange(width, device=self.device)
        ragged = min(lengths) < width
        self.cache.begin_prefill(width, lengths, left_padded=True)
        last = torch.tensor([-1], device=self.device)  # a slice is not contiguous: torch would copy the head per row
        extra: dict[str, Any] = {"logits_to_keep": last} if self._trims_logits else {}
        output, tapped = self._call(
            ids,
            attention_mask=(columns >= pads).long() if ragged else None,
            position_ids=(columns - pads).clamp(min=0),
            output_hidden_states=hidden,
            **extra,
        )
        self.cache.crop_rows(kept)
        return self._output(output.logits[:, -1:], output, hidden, tapped)

    def extend(
        self,
        tokens: Tensor,
        tree: Tree,
        n_valid: Tensor | None = None,
        hidden: bool = False,
        keep: list[int] | None = None,
        undo: int = 0,
    ) -> ForwardOutput:
        """Score ``tokens (B, S)``: root and draft nodes after each row's committed slots. Commits nothing.

        Nodes beyond ``n_valid (B,)`` are computed at the root's position and mean nothing. ``keep`` names the columns
        whose logits are wanted, in order; all by default. ``undo`` committed tokens may yet be rolled back. Ids that do
        not exist are embedded as others: ``verify`` never accepts them, but they must not crash the pass.
        """
        extra: dict[str, Any] = {}
        if keep is not None and self._trims_logits:
            extra["logits_to_keep"] = torch.tensor(keep, device=self.device)
        self.cache.begin(tokens.shape[1], undo)
        if self._leaves_rows_out:
            if n_valid is None:
                n_valid = torch.full((len(tokens),), tokens.shape[1], device=self.device)
            tokens, n_valid = self._wide(tokens, 0), self._wide(n_valid, 0)
            tree = tree if len(tree.parents) == 1 else Tree(self._wide(tree.parents, -1))
        last = self.model.get_input_embeddings().weight.shape[0] - 1
        depth = tree.depth
        if n_valid is not None:
            depth = depth * (torch.arange(tokens.shape[1], device=self.device) <= n_valid[:, None])
        with self._attention.on():
            output, tapped = self._call(
                tokens.clamp(0, last),
                attention_mask=self._masks(tree),
                position_ids=self.cache.row_lengths[:, None] + depth,
                output_hidden_states=hidden,
                **extra,
            )
        logits = output.logits[:, keep] if keep is not None and not self._trims_logits else output.logits
        return self._output(logits, output, hidden, tapped)

    def _output(self, logits: Tensor, output: Any, hidden: bool, tapped: tuple[Tensor, ...]) -> ForwardOutput:
        """Bring results to the device of the input embeddings (a model spread over devices ends elsewhere)."""
        states = tuple(self._narrow(layer.to(self.device)) for layer in output.hidden_states) if hidden else ()
        return ForwardOutput(self._narrow(logits.to(self.device)), states, tuple(map(self._narrow, tapped)))

    @property
    def _leaves_rows_out(self) -> bool:
        """Tell whether a pass holds rows of the batch that its caller has dropped."""
        return len(self._places) < len(self.cache.lengths)

    def _widened(self, numbers: list[int], filler: int | None = None) -> list[int]:
        """Return one number for each row of the pass: those given, and for dropped rows ``filler``, or its length."""
        every = list(self.cache.lengths) if filler is None else [filler] * len(self.cache.lengths)
        for place, number in zip(self._places, numbers, strict=True):
            every[place] = number
        return every

    def _wide(self, part: Tensor, filler: int) -> Tensor:
        """Give a tensor of the caller's rows all rows of the pass; ``filler`` is what dropped ones hold."""
        if not self._leaves_rows_out:
            return part
        every = part.new_full((len(self.cache.lengths), *part.shape[1:]), filler)
        every[torch.tensor(self._places, device=part.device)] = part
        return every

    def _narrow(self, part: Tensor) -> Tensor:
        """Take the caller's rows out of those of the pass."""
        return part[torch.tensor(self._places, device=part.device)] if self._leaves_rows_out else part

    def _prefill_chunks(self, ids: Tensor, lengths: list[int], chunk: int, hidden: bool) -> ForwardOutput:
        """Read compact right-padded prompts ``chunk`` columns at a time."""
        width = ids.shape[1]
        index = torch.arange(width, device=self.device) + torch.tensor(
            [width - length for length in lengths], device=self.device
        ).unsqueeze(1)
        compact = ids.gather(1, index.clamp(max=width - 1))
        last: list[Tensor | None] = [None] * len(lengths)
        states: list[tuple[Tensor, ...]] = []
        tapped: list[tuple[Tensor, ...]] = []
        for start in range(0, max(lengths), chunk):
            tokens = compact[:, start : start + chunk]
            counts = [min(max(length - start, 0), tokens.shape[1]) for length in lengths]
            valid = torch.tensor(counts, device=self.device) - 1
            ends = sorted({count - 1 for count in counts if count})
            output = self.extend(tokens, Tree.chain(tokens.shape[1] - 1, self.device), valid, hidden, ends)
            states.append(output.hidden)
            tapped.append(output.taps)
            for row, count in enumerate(counts):
                if count:
                    last[row] = output.logits[row, ends.index(count - 1)].clone()
            self.commit(counts)
        logits = torch.stack([row for row in last if row is not None])[:, None]
        return ForwardOutput(logits, _left_pad(states, index, width), _left_pad(tapped, index, width))

    def _call(self, ids: Tensor, **arguments: Any) -> tuple[Any, tuple[Tensor, ...]]:
        arguments[self._cache_name] = self.cache
        begun = perf_counter()
        with self._taps.on() as seen:
            output = self.model(input_ids=ids, use_cache=True, return_dict=True, **arguments)
        self.seconds += perf_counter() - begun
        return output, self._taps.read(seen, self.device)

    def _masks(self, tree: Tree) -> Tensor | dict[str, Tensor]:
        masks = self.cache.masks(tree)
        if self._attention.implementation != "sdpa":  # eager adds its mask
            low = torch.finfo(self.model.dtype).min
            zero = torch.zeros((), dtype=self.model.dtype, device=self.device)
            masks = {kind: torch.where(mask, zero, low) for kind, mask in masks.items()}
        rows = len(self.cache.lengths)
        masks = {kind: mask.expand(rows, -1, -1, -1) for kind, mask in masks.items()}
        return next(iter(masks.values())) if self._one_kind else masks


def staying(live: list[int], finished: list[bool]) -> list[int]:
    """Return the places of unfinished rows as ``SlotCache.keep`` takes them: only rows behind the new end move."""
    places = [place for place, row in enumerate(live) if not finished[row]]
    front = len(places)
    movers = [place for place in places if place >= front]
    holes = set(range(front)).difference(places)
    return [movers.pop() if place in holes else place for place in range(front)]


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


def _left_pad(states: list[tuple[Tensor, ...]], index: Tensor, width: int) -> tuple[Tensor, ...]:
    """Join compact chunks of hidden states and move every row's tokens to the end."""
    padded = []
    for chunks in zip(*states, strict=True):
        compact = torch.cat(chunks, 1)
        source = torch.arange(width, device=compact.device) - (index[:, :1])
        padded.append(compact.gather(1, source.clamp(min=0)[..., None].expand(-1, -1, compact.shape[-1])))
    return tuple(padded)
