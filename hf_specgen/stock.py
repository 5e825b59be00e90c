"""Stock: any drafter as a ``CandidateGenerator`` that transformers' own assisted decoding drives, one row at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation import CandidateGenerator

from hf_specgen import ops
from hf_specgen.calls.requests import read_request, real_tokens, seed_rows
from hf_specgen.drafting.drafter import Call, Drafter, TargetView
from hf_specgen.entry import EnabledGenerate, disable, enable
from hf_specgen.errors import SpecGenError
from hf_specgen.models.facts import logits_width, step_size
from hf_specgen.models.prepack import is_prepacked
from hf_specgen.models.taps import Taps
from hf_specgen.models.wrappers import bare, input_device, writer
from hf_specgen.round.costs import Costs
from hf_specgen.round.records import DenseQ, Draft, Round, SparseQ, Verdict
from hf_specgen.round.sequences import DraftRequest, Sequences, Stops
from hf_specgen.round.stats import AcceptanceStats, RowStats
from hf_specgen.round.warp import Warp

_MAKE = "_get_candidate_generator"


class StockCandidates(CandidateGenerator):
    """Translate between a drafter's rounds and stock's calls, for one ``generate()`` of one row.

    The prompt's pass drafts nothing: it is round zero. Of a tree the first path is offered. Tokens that were drawn
    come with their law, so that stock's own speculative sampling judges them; picked ones come without, and stock
    draws and compares. ``stats`` counts what happened; ``shown`` holds what ``taps`` saw in the newest pass.

    Raises: ``SpecGenError`` for more than one row.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        drafter: Drafter,
        config: GenerationConfig,
        processors: LogitsProcessorList,
        input_ids: Tensor,
        mask: Tensor | None,
    ) -> None:
        if len(input_ids) != 1:
            raise SpecGenError(
                f"{len(input_ids)} rows were given to transformers' assisted decoding: one row is required. Use "
                "custom_generate=SpeculativeDecoding(drafter) for batches."
            )
        self.taps = Taps(model)
        self.shown: dict[int, Tensor] = {}
        self.stats = AcceptanceStats(drafter.title, "stock", rows=[RowStats()])
        vocab_size = logits_width(model)
        warp = Warp(processors, 1, may_keep_state=False)  # stock asks the same objects about every draft
        warp.check(input_ids, vocab_size)
        device = input_device(model)
        if config.do_sample and drafter.draws:
            ops.check_doubles(device, "do_sample=True with drawn tokens")
        seeds, row_ids = seed_rows(model, 1, None if config.do_sample else 0, None)
        self._sequences = Sequences(
            prompt=input_ids.to(device),
            tokens=real_tokens(input_ids, mask, None),
            stops=Stops(int(config.max_length), frozenset(), ()),
            seeds=seeds,
            row_ids=row_ids,
            warp=warp,
            vocab_size=vocab_size,
            greedy=not config.do_sample,
            request=read_request(config, model.generation_config, DraftRequest()),
            costs=Costs.default(device, model.dtype, is_prepacked(model)),
            target_size=step_size(model),
        )
        self.session = drafter.begin(Call(self._sequences, TargetView(model)))
        ends = config.eos_token_id
        self._ends = frozenset([ends] if isinstance(ends, int) else ends or ())
        self._draft: Draft | None = None
        self._path: list[int] = []

    def get_candidates(self, input_ids: Tensor, **_: object) -> tuple[Tensor, Tensor | None]:
        """Return the text with the drafted tokens behind it, and the law they were drawn from, if any.

        Shapes: ``input_ids (1, L)``; returns ``(1, L + n)`` and logits ``(1, n, V)`` or None.
        """
        if not self._sequences.new[0]:
            return input_ids, None
        draft = self.session.propose(self._sequences.room).offered  # stock computes nothing that it does not judge
        self._draft = draft
        self._path = path = self._first_path(draft)
        tokens = draft.tokens[:, path].to(input_ids.device)
        logits = _logits(draft, path, self._sequences.vocab_size) if path else None
        return torch.cat([input_ids, tokens], 1), logits

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """Hand the drafter the round that stock has just finished: ``input_ids (1, L)`` ends with its tokens."""
        sequences, count = self._sequences, int(num_matches)
        device = sequences.prompt.device
        hidden = self.taps.read(self.shown, device)
        self.shown.clear()  # a pass that shows nothing must not be taken for the one before
        draft = self._draft
        if draft is None:
            draft, length = Draft.empty(1, device), sequences.lengths[0]
            hidden = tuple(layer[:, -length:] for layer in hidden)
        path = torch.tensor([self._path], dtype=torch.long, device=device).view(1, -1)
        n, invalid = torch.tensor([count], device=device), torch.zeros(1, dtype=torch.bool, device=device)
        round = Round(draft, Verdict(path, n, input_ids[:, -1].to(device), invalid), hidden)
        is_prompt = not sequences.new[0]
        written = sequences.append(round)
        if not is_prompt:
            self.stats.add(round, written)
        self.stats.rows[0].num_tokens = sequences.new[0]
        self.session.observe(round)

    def _first_path(self, draft: Draft) -> list[int]:
        """Follow first children from the root to an end of text; stop before an id that does not exist."""
        parents = draft.tree.parents[0].tolist()
        tokens, count = draft.tokens[0].tolist(), int(draft.n_valid[0])
        path, node = [], -1
        while node in parents[:count]:
            node = parents.index(node)
            if not 0 <= tokens[node] < self._sequences.vocab_size:
                break
            path.append(node)
            if tokens[node] in self._ends:  # up to 5.17 stock accepts what stands behind it
                break
        return path


@contextmanager
def stock_candidates(model: nn.Module, drafter: Drafter) -> Iterator[list[StockCandidates]]:
    """Let every plain ``model.generate()`` inside the block run stock assisted decoding with this drafter.

    ``with stock_candidates(model, drafter) as calls: model.generate(**inputs)``. Nothing else need be passed; draft
    lengths are asked for as always (``num_assistant_tokens``). The list gets one ``StockCandidates`` a call, with its
    ``stats``. transformers has no argument for a candidate generator, so the block replaces, on this one model, the
    method that makes it, and sets ``prompt_lookup_num_tokens`` in the model's generation config, which selects
    assisted decoding; both are as before on exit. One thread may use the model meanwhile.

    Raises: ``IncompatibleDrafter`` and ``UnsupportedTarget`` where the drafter does not fit the model.
    """
    target, outer = bare(model), writer(model)
    taps = Taps(target, drafter.reads(target).hidden)
    calls: list[StockCandidates] = []
    with ExitStack() as stack:
        shown = stack.enter_context(taps.on())

        def make(
            generation_config: GenerationConfig,
            input_ids: Tensor,
            logits_processor: LogitsProcessorList,
            model_kwargs: dict[str, Any],
            **_: object,
        ) -> StockCandidates:
            mask = model_kwargs.get("attention_mask")
            made = StockCandidates(target, drafter, generation_config, logits_processor, input_ids, mask)
            made.taps = taps
            made.shown = shown
            calls.append(made)
            return made

        stack.callback(_restore, target.__dict__, _MAKE, target.__dict__.get(_MAKE))
        target.__dict__[_MAKE] = make
        config = cast(Any, outer).generation_config  # PEFT hands its own to the model
        stack.callback(_restore, vars(config), "prompt_lookup_num_tokens", config.prompt_lookup_num_tokens)
        config.prompt_lookup_num_tokens = 1
        for part in {outer, target}:
            if isinstance(part.__dict__.get("generate"), EnabledGenerate):  # it would take the call for the loop
                disable(part)
                stack.callback(enable, part)
        yield calls


def _restore(names: dict[str, Any], name: str, value: object) -> None:
    if value is None and name == _MAKE:
        del names[name]
    else:
        names[name] = value


def _logits(draft: Draft, path: list[int], vocab_size: int) -> Tensor | None:
    """Return the law of drawn tokens along a path as logits ``(1, n, V)``, None for picked ones."""
    if draft.q is None:
        return None
    if isinstance(draft.q, SparseQ):
        ids, probs = draft.q.ids[:, path], draft.q.probs[:, path].float()
        return probs.new_zeros(1, len(path), vocab_size).scatter_add_(2, ids, probs).log()
    assert isinstance(draft.q, DenseQ)
    logits = draft.q.logits[:, path].float()
    return torch.nn.functional.pad(logits, (0, vocab_size - logits.shape[-1]), value=float("-inf"))
