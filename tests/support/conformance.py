"""What every drafting method must keep, whatever it drafts: the checks know a method by its record alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from law import enumerate_law, p_value
from tiny import Keep, Watch, disturbed, ours, plain, prompts, tiny
from transformers import PreTrainedModel

import hf_specgen
from hf_specgen import Drafter, SmallModel, SpeculativeDecoding
from hf_specgen.checkpoints.card import write_card
from hf_specgen.checkpoints.formats.base import layout_named
from hf_specgen.checkpoints.methods import methods

LENGTHS = [5, 11, 2, 8]
CHAIN = {"tree": "chain", "num_tokens": 3}
TREE = {"tree": {"top_k": 2, "depth": 3, "nodes": 6}}
ENOUGH = 1e-4
DRAWS = 1_500


def target(vocab: int = 64) -> PreTrainedModel:
    """Return a target in float64, so that texts are compared and not their rounding."""
    return tiny(vocab=vocab, layers=7, initializer_range=0.2).double()


def drafter_of(name: str, model: PreTrainedModel, **settings: Any) -> Drafter:
    """Return a new drafter of a method for a target; a method without checkpoints drafts with a model like it."""
    torch.manual_seed(3)
    method = methods()[name]
    if method.config is not None:
        return method.drafter.new(model, **settings)[0].to(model.dtype).eval()
    assert method.drafter is SmallModel
    settings.pop("tree", None)
    return SmallModel(disturbed(model, 0.3), settings.pop("num_tokens", 3), **settings)


def check_greedy_text_is_plain(name: str) -> None:
    model = target()
    for lengths in ([7], LENGTHS):
        ids, mask = prompts(lengths)
        wanted = plain(model, ids, mask)
        for shape in (CHAIN, TREE):
            watch = Watch(drafter_of(name, model, **shape))
            assert torch.equal(ours(model, watch, ids, mask), wanted), (lengths, shape)
            assert watch.width >= 2, "nothing was drafted"


def check_a_seed_is_one_text(name: str) -> None:
    """Drafts without chance leave the text of a seed as it is without a drafter; drawn ones repeat theirs."""
    model = target()
    ids, mask = prompts(LENGTHS)
    drawn = {"do_sample": True, "top_k": 0, "seed": 11, "max_new_tokens": 16}
    watch = Watch(drafter_of(name, model, **CHAIN))
    alone = ours(model, None, ids, mask, **drawn)
    assert torch.equal(ours(model, watch, ids, mask, **drawn), alone)
    assert watch.width >= 2
    twice = [ours(model, drafter_of(name, model, **CHAIN, sample=True), ids, mask, **drawn) for _ in range(2)]
    assert torch.equal(*twice)
    other = ours(model, drafter_of(name, model, **CHAIN, sample=True), ids, mask, **{**drawn, "seed": 12})
    assert not torch.equal(other, twice[0]), "the comparison can fail"


def check_drawn_drafts_keep_the_law(name: str) -> None:
    model = target(vocab=4)
    prompt = torch.tensor([[1, 3, 2, 1, 0, 3]])
    law = enumerate_law(model, prompt, 3, do_sample=True, top_k=0)
    ids = prompt.repeat(DRAWS, 1)
    for rule in ("rejection", "block"):
        watch = Watch(drafter_of(name, model, **CHAIN, sample=True))
        loop = SpeculativeDecoding(watch, rule)
        found = plain(model, ids, do_sample=True, top_k=0, seed=2, max_new_tokens=5, custom_generate=loop)[:, 6:9]
        assert any(round.draft.q is not None for round in watch.rounds), "no draft was drawn"
        assert p_value(found, law, 4) > ENOUGH, rule
    assert p_value(found[:, [1, 0, 2]], law, 4) < ENOUGH, "the test tells laws apart"


def check_budgets_are_kept(name: str) -> None:
    model = target()
    ids, mask = prompts(LENGTHS)
    for tokens in (1, 2, 5):
        watch = Watch(drafter_of(name, model, **CHAIN))
        found = ours(model, watch, ids, mask, max_new_tokens=tokens)
        assert torch.equal(found, plain(model, ids, mask, max_new_tokens=tokens)), tokens
        assert watch.width < tokens, "a draft is no longer than what may follow"


class Interrupts(Keep):
    """Stop the third time that tokens come."""

    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        if self.puts == 3:
            raise KeyboardInterrupt


def check_an_interrupted_call_leaves_nothing(name: str) -> None:
    model = target()
    ids, mask = prompts([7])
    wanted = plain(model, ids, mask)
    drafter = drafter_of(name, model, **CHAIN)
    before = model.config.to_dict(), model.generation_config.to_dict(), set(vars(model))
    with pytest.raises(KeyboardInterrupt):
        plain(model, ids, mask, custom_generate=SpeculativeDecoding(drafter, streamer=Interrupts()))
    assert (model.config.to_dict(), model.generation_config.to_dict(), set(vars(model))) == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.equal(plain(model, ids, mask), wanted)
    watch = Watch(drafter)
    assert torch.equal(ours(model, watch, ids, mask), wanted)
    assert watch.width >= 2


def check_files_come_back(name: str, folder: Path) -> None:
    """Saved, described, loaded, carded: the drafter that comes back drafts what was saved."""
    if methods()[name].config is None:
        return
    model = target()
    ids, mask = prompts(LENGTHS)
    drafter = drafter_of(name, model, **CHAIN)
    drafter.save_pretrained(folder)
    again = hf_specgen.load_drafter(folder, target=model)
    assert type(again) is type(drafter) and again.config.method == name
    assert again.config.to_dict()["num_tokens"] == 3
    drafted = []
    for kind in (drafter, again):
        watch = Watch(kind)
        ours(model, watch, ids, mask)
        drafted.append([round.draft.tokens.tolist() for round in watch.rounds])
    assert drafted[0] == drafted[1] and any(drafted[0])
    card = write_card(folder).read_text(encoding="utf-8")
    assert methods()[name].title in card and f"- {name}\n" in card


def check_the_layout_round_trips(name: str, layout: str, folder: Path) -> None:
    """A layout writes what it reads."""
    model = target()
    drafter = drafter_of(name, model)
    layout_named(layout).write(drafter.checkpoint(), folder)
    again = hf_specgen.load_drafter(folder, target=model, dtype=torch.float64)
    for key, tensor in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key


CHECKS: dict[str, Callable[[str], None]] = {
    "greedy text is plain": check_greedy_text_is_plain,
    "a seed is one text": check_a_seed_is_one_text,
    "drawn drafts keep the law": check_drawn_drafts_keep_the_law,
    "budgets are kept": check_budgets_are_kept,
    "an interrupted call leaves nothing": check_an_interrupted_call_leaves_nothing,
}
