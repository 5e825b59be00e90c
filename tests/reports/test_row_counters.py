"""Reported: a mixed-adapter batch failed as soon as one row ended, and a hook that holds a row each met another row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import peft
import pytest
import torch
from tiny import disturbed, drafter_of, garbled, ours, plain, prompts, texts_of, tiny
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP

from hf_specgen import IncompatibleDrafter, PromptLookup, SmallModel, SpeculativeDecoding, UnsupportedTarget
from hf_specgen.models.cached_model import CachedModel
from hf_specgen.models.wrappers import row_counter

SETTINGS = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": list(range(0, 64, 7))}


def mixed() -> peft.PeftModel:
    """Wrap a tiny model in two LoRA adapters that change its text."""
    torch.manual_seed(5)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    config.init_lora_weights = False
    model = peft.get_peft_model(tiny(), config, adapter_name="one").eval()
    model.add_adapter("two", config)
    return model


def written(output: Tensor, ids: Tensor) -> set[int]:
    """Return how many tokens the rows have up to their ends of text."""
    ends = torch.isin(output[:, ids.shape[1] :], torch.tensor(SETTINGS["eos_token_id"]))
    return set(ends.int().argmax(1).tolist())


def by_row(rows: int, width: int = 32) -> Tensor:
    """Return another steering vector for each row."""
    return torch.randn(rows, 1, width, generator=torch.Generator().manual_seed(2))


class PerRow(nn.Module):
    """Add a vector of each row's own behind another module, as an adapter of the user's might."""

    def __init__(self, inner: nn.Module, rows: int) -> None:
        super().__init__()
        self.inner, self.vectors = inner, by_row(rows)

    def forward(self, hidden: Tensor) -> Tensor:
        moved: Tensor = self.inner(hidden) + self.vectors
        return moved


def hooked(model: PreTrainedModel, rows: int) -> None:
    vectors = by_row(rows)
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output + vectors)


def entered(model: PreTrainedModel, rows: int) -> None:
    vectors = by_row(rows)
    model.model.layers[1].mlp.register_forward_pre_hook(lambda module, args: (args[0] + vectors,))


def patched(model: PreTrainedModel, rows: int) -> None:
    mlp, vectors = model.model.layers[0].mlp, by_row(rows)
    own = mlp.forward
    mlp.forward = lambda hidden: own(hidden) + vectors


def replaced(model: PreTrainedModel, rows: int) -> None:
    model.model.layers[0].mlp = PerRow(model.model.layers[0].mlp, rows)


COUNTERS = {"hook": hooked, "pre-hook": entered, "forward": patched, "module": replaced}


@pytest.mark.parametrize("counter", COUNTERS.values(), ids=COUNTERS)
def test_every_row_meets_its_own_vector(counter: Callable[[PreTrainedModel, int], None]) -> None:
    model, (ids, mask) = tiny(), prompts([5, 17, 11, 24])
    without = plain(model, ids, mask, **SETTINGS)
    counter(model, len(ids))
    expected = plain(model, ids, mask, **SETTINGS)
    assert not torch.equal(expected, without) and len(written(expected, ids)) > 1, "rows end one after another"
    for kind in ("lookup", "tree"):
        watch = drafter_of(kind, model, texts_of(plain(model, ids, mask, max_new_tokens=20), mask))
        assert torch.equal(ours(model, watch, ids, mask, **SETTINGS), expected), kind
        assert watch.longest >= 2


@pytest.mark.parametrize("lengths", [[12], [5, 17, 11], [17, 5, 11, 24, 6]])
def test_any_number_of_rows_is_served(lengths: list[int]) -> None:
    """The model is tried in as many rows as the batch has: three were refused."""
    model, (ids, mask) = tiny(), prompts(lengths)
    patched(model, len(ids))
    expected = plain(model, ids, mask, **SETTINGS)
    assert torch.equal(ours(model, PromptLookup(3), ids, mask, **SETTINGS), expected)


def test_every_row_meets_its_own_vector_on_a_patched_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only when the check has passed does the class's forward tell rows apart."""
    own, vectors = LlamaMLP.forward, [torch.zeros(4, 1, 32)]
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, hidden: own(self, hidden) + vectors[0])
    model, (ids, mask) = tiny(), prompts([5, 17, 11, 24])
    ours(model, PromptLookup(3), ids, mask, **SETTINGS)
    vectors[0] = by_row(4)
    expected = plain(model, ids, mask, **SETTINGS)
    assert len(written(expected, ids)) > 1, "rows end one after another"
    assert torch.equal(ours(model, PromptLookup(3), ids, mask, **SETTINGS), expected)


@contextmanager
def on_all(rows: int) -> Iterator[None]:
    """Hook every module of the process, as debuggers do; the vectors go to one kind."""
    vectors = by_row(rows)

    def move(module: nn.Module, args: object, output: Tensor) -> Tensor | None:
        return output + vectors if type(module).__name__ == "LlamaMLP" else None

    handle = nn.modules.module.register_module_forward_hook(move)
    try:
        yield
    finally:
        handle.remove()


def test_a_hook_on_all_modules() -> None:
    model, (ids, mask) = tiny(), prompts([5, 17, 11, 24])
    with on_all(len(ids)):
        expected = plain(model, ids, mask, **SETTINGS)
        corpus = [garbled(text) for text in texts_of(expected, mask)]
        assert torch.equal(ours(model, PromptLookup(4, corpus=corpus), ids, mask, **SETTINGS), expected)
    assert row_counter(model) is None


def test_a_chunked_prompt_keeps_its_rows_too() -> None:
    model, (ids, mask) = tiny(), prompts([5, 17, 11, 24])
    hooked(model, len(ids))
    expected = plain(model, ids, mask, **SETTINGS)
    found = ours(model, PromptLookup(4), ids, mask, prefill_chunk_size=6, **SETTINGS)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
def test_each_row_has_its_adapter(sample: bool) -> None:
    model, (ids, mask) = mixed(), prompts([5, 17, 11, 24])
    call = {"input_ids": ids, "attention_mask": mask, **SETTINGS, "adapter_names": ["two", "__base__", "one", "two"]}
    expected = model.generate(**call)
    texts = texts_of(expected, mask)
    assert len(written(expected, ids)) > 1, "rows end one after another"
    alone = [model.generate(**{**call, "input_ids": ids[:1], "attention_mask": mask[:1], "adapter_names": [name]})
             for name in ("one", "two", "__base__")]  # fmt: skip
    assert len({tuple(text[0].tolist()) for text in alone}) == 3, "each adapter writes another text"
    loop = SpeculativeDecoding(PromptLookup(4, corpus=texts))
    if not sample:
        found = model.generate(**call, custom_generate=loop)
        assert torch.equal(found, expected) and found.speculation.num_accepted_tokens > 0
        return
    drawn = {**call, "do_sample": True, "custom_generate": loop, "seed": [3, 4, 5, 6]}
    together = model.generate(**drawn)
    for row, name in enumerate(call["adapter_names"]):  # a row's text does not depend on its neighbours
        part = {"input_ids": ids[row : row + 1], "attention_mask": mask[row : row + 1], "adapter_names": [name]}
        single = model.generate(**{**drawn, **part, "seed": [3 + row]})
        assert together[row, : single.shape[1]].tolist() == single[0].tolist()


def test_a_small_model_that_counts_rows_drafts_as_ever() -> None:
    """The text is the target's either way; a small model that met other rows drafted for nothing, or failed."""
    model, (ids, mask) = tiny(), prompts([5, 17, 11, 24])
    small = disturbed(model, 0.0)
    for part in (model, small):
        hooked(part, len(ids))
    expected = plain(model, ids, mask, **SETTINGS)
    found = ours(model, SmallModel(small, 4), ids, mask, **SETTINGS)
    assert torch.equal(found, expected)
    told = found.speculation
    assert set(told.acceptance_rates) == {1.0}, "the same model in the same places is never wrong"


def test_what_stands_is_named() -> None:
    assert row_counter(tiny()) is None
    names = []
    for counter in COUNTERS.values():
        model = tiny()
        counter(model, 4)
        names.append(row_counter(model))
        assert CachedModel(model, 2).counted
    assert names == [
        "the hook <lambda> on model.layers.0.mlp",
        "the hook <lambda> on model.layers.1.mlp",
        "the patched forward of model.layers.0.mlp (LlamaMLP)",
        "model.layers.0.mlp (PerRow)",
    ]
    assert row_counter(mixed()) is None and not CachedModel(tiny(), 2).counted


def test_adapters_that_read_all_of_a_pass_are_refused() -> None:
    torch.manual_seed(5)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], alora_invocation_tokens=[7])
    model, (ids, mask) = peft.get_peft_model(tiny(), config).eval(), prompts([9, 5])
    with pytest.raises(UnsupportedTarget, match=r"_alora_offsets_pre_forward_hook.*Use plain generate"):
        model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=4, custom_generate=SpeculativeDecoding(PromptLookup())
        )


def test_a_learned_drafter_runs_no_head_with_an_adapter_for_each_row() -> None:
    torch.manual_seed(5)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["lm_head"], init_lora_weights=False)
    model, (ids, mask) = peft.get_peft_model(tiny(), config, adapter_name="one").eval(), prompts([5, 17])
    call = {"input_ids": ids, "attention_mask": mask, **SETTINGS}
    loop = SpeculativeDecoding(drafter_of("eagle", tiny(), [[1, 2, 3]]).inner)
    expected = model.generate(**call)
    found = model.generate(**call, custom_generate=loop)
    assert torch.equal(found, expected) and found.speculation.num_draft_tokens > 0, "one adapter for all is served"
    with pytest.raises(IncompatibleDrafter, match=r"adapter_names= was given and the head of LlamaForCausalLM"):
        model.generate(**call, adapter_names=["one", "__base__"], custom_generate=loop)
