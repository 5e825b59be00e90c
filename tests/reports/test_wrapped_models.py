"""Reported: compiled and PEFT-wrapped models crashed ``enable``, or fell silently into transformers' own loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
from datasets import Dataset
from tiny import disturbed, drafter_of, plain, prompts, texts_of, tiny
from torch import nn
from transformers import GenerationConfig, LlamaModel, PreTrainedModel

import hf_specgen
from hf_specgen import MedusaDrafter, PromptLookup, SmallModel, SpecGenError, SpeculativeDecoding, last_stats
from hf_specgen.entry import EnabledGenerate
from hf_specgen.models.prepack import is_prepacked
from hf_specgen.models.wrappers import bare, writer
from hf_specgen.trainers.medusa import MedusaArguments, MedusaTrainer

Wrap = Callable[[PreTrainedModel], nn.Module]
CALL = {"max_new_tokens": 16, "do_sample": False}


def adapted(model: PreTrainedModel) -> nn.Module:
    """Wrap a model in LoRA that changes its text."""
    torch.manual_seed(5)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config).eval()


class Parallel(nn.Module):
    """Stand in for data parallel wrappers: the model is a child, and nothing of it shows."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


WRAPS: dict[str, Wrap] = {
    "compiled": torch.compile,
    "peft": adapted,
    "compiled peft": lambda model: torch.compile(adapted(model)),
}
every_wrap = pytest.mark.parametrize(
    "wrap",
    [pytest.param(wrap, marks=pytest.mark.slow if name == "compiled" else (), id=name) for name, wrap in WRAPS.items()],
)


@every_wrap
def test_enable_takes_a_wrapped_model(wrap: Wrap) -> None:
    model, (ids, mask) = wrap(tiny()), prompts([9, 14])
    inputs = {"input_ids": ids, "attention_mask": mask, **CALL}
    expected = model.generate(**inputs)
    assert last_stats(model) is None
    assert hf_specgen.enable(model) is model
    assert hf_specgen.enable(model) is model, "twice is once"
    found = model.generate(**inputs, assistant_model=PromptLookup(4, corpus=texts_of(expected, mask)))
    assert torch.equal(found, expected) and found.speculation.num_accepted_tokens > 0
    assert last_stats(model) is last_stats(bare(model)) is found.speculation
    assert torch.equal(copy.deepcopy(writer(model)).generate(**inputs, assistant_model=PromptLookup(4)), expected)
    assert hf_specgen.disable(model) is model
    assert not any(isinstance(vars(part).get("generate"), EnabledGenerate) for part in model.modules())
    loop = SpeculativeDecoding(PromptLookup(4, corpus=texts_of(expected, mask)))
    found = model.generate(**inputs, custom_generate=loop)
    assert torch.equal(found, expected) and found.speculation.num_accepted_tokens > 0


def test_a_model_that_was_enabled_before_it_was_wrapped() -> None:
    inner, (ids, mask) = hf_specgen.enable(tiny()), prompts([9])
    model = hf_specgen.enable(adapted(inner))
    expected = model.generate(input_ids=ids, attention_mask=mask, **CALL)
    found = model.generate(input_ids=ids, attention_mask=mask, **CALL, assistant_model=PromptLookup(4))
    assert torch.equal(found, expected) and found.speculation is last_stats(model)
    hf_specgen.disable(model)
    found = model.generate(input_ids=ids, attention_mask=mask, **CALL, assistant_model=PromptLookup(4))
    assert torch.equal(found, expected) and found.speculation is last_stats(inner)


@every_wrap
def test_a_wrapped_small_model_drafts(wrap: Wrap) -> None:
    """It went to transformers' own loop, which takes one row and says nothing."""
    model, (ids, mask) = hf_specgen.enable(tiny()), prompts([9, 14])
    small = wrap(disturbed(tiny()))
    found = plain(model, ids, mask, **CALL, assistant_model=small, num_assistant_tokens=3)
    assert torch.equal(found, plain(tiny(), ids, mask, **CALL))
    assert found.speculation.drafter == "SmallModel" and found.speculation.num_draft_tokens > 0
    assert SmallModel(small).model is bare(small)


def test_a_compiled_drafter_is_a_drafter() -> None:
    model, (ids, mask) = hf_specgen.enable(tiny()), prompts([9])
    drafter = drafter_of("medusa", tiny(), [[1, 2, 3]]).inner
    found = plain(model, ids, mask, **CALL, assistant_model=torch.compile(drafter))
    assert torch.equal(found, plain(tiny(), ids, mask, **CALL))
    assert found.speculation.drafter == "MedusaDrafter" and found.speculation.num_draft_tokens > 0


@pytest.mark.parametrize("given", ["gpt2", nn.Linear(2, 2), nn.ModuleList([tiny(), tiny()]), 3], ids=type)
def test_what_cannot_draft_is_refused(given: object) -> None:
    model, (ids, mask) = hf_specgen.enable(tiny()), prompts([9])
    with pytest.raises(SpecGenError, match=r"holds [02] transformers models: one is required"):
        plain(model, ids, mask, **CALL, assistant_model=given)


def test_what_cannot_be_enabled_is_refused() -> None:
    with pytest.raises(SpecGenError, match=r"LlamaModel holds 0 models that can generate"):
        hf_specgen.enable(LlamaModel(tiny().config))
    assert writer(Parallel(adapted(tiny()))).__class__ is peft.PeftModelForCausalLM
    assert hf_specgen.enable(Parallel(tiny())).module.__dict__["generate"]


@pytest.mark.parametrize("where", ["wrapper", "model"])
def test_settings_of_a_peft_model_are_read(where: str) -> None:
    model, (ids, mask) = adapted(tiny()), prompts([9])
    inputs = {"input_ids": ids, "attention_mask": mask, **CALL}
    expected = model.generate(**inputs)
    settings = GenerationConfig(prompt_lookup_num_tokens=3, pad_token_id=0)
    (model if where == "wrapper" else bare(model)).generation_config = settings
    found = hf_specgen.enable(model).generate(**inputs)
    assert torch.equal(found, expected)
    assert found.speculation.drafter == "PromptLookup", "not transformers' own prompt lookup"


@every_wrap
def test_prepack_through_a_wrapper(wrap: Wrap) -> None:
    model, (ids, mask) = wrap(tiny()), prompts([9])
    inputs = {"input_ids": ids, "attention_mask": mask, **CALL}
    expected = model.generate(**inputs)
    assert hf_specgen.prepack(model) is model and is_prepacked(model) and is_prepacked(bare(model))
    found = model.generate(**inputs, custom_generate=SpeculativeDecoding(PromptLookup(4)))
    assert torch.equal(found, expected)
    assert not is_prepacked(hf_specgen.unpack(model))


@every_wrap
def test_a_drafter_is_loaded_for_a_wrapped_target(wrap: Wrap, tmp_path: Path) -> None:
    model, (ids, mask) = wrap(tiny()), prompts([9])
    MedusaDrafter.for_target(model, num_heads=2).save_pretrained(tmp_path)
    drafter = hf_specgen.load_drafter(tmp_path, target=model)
    assert drafter.parts.embedding is bare(model).get_input_embeddings().weight
    assert MedusaDrafter.from_pretrained(tmp_path, target=model).parts.facts == drafter.parts.facts
    inputs = {"input_ids": ids, "attention_mask": mask, **CALL}
    found = model.generate(**inputs, custom_generate=SpeculativeDecoding(drafter))
    assert torch.equal(found, model.generate(**inputs)) and found.speculation.num_draft_tokens > 0


@pytest.mark.parametrize("config", ["own", "wrapper's"])
def test_stock_candidates_of_a_peft_model(config: str) -> None:
    model, (ids, mask) = hf_specgen.enable(adapted(tiny())), prompts([9])
    inputs = {"input_ids": ids, "attention_mask": mask, **CALL}
    expected = model.generate(**inputs)
    if config == "wrapper's":
        model.generation_config = GenerationConfig(pad_token_id=0)
    with hf_specgen.stock_candidates(model, PromptLookup(4, corpus=texts_of(expected, mask))) as calls:
        assert torch.equal(model.generate(**inputs), expected)
    assert calls[0].stats.num_accepted_tokens > 0
    assert isinstance(vars(model)["generate"], EnabledGenerate)


@every_wrap
def test_a_drafter_is_trained_for_a_wrapped_target(wrap: Wrap, tmp_path: Path) -> None:
    target = wrap(tiny())
    rows = Dataset.from_list([{"input_ids": list(range(1, 13)), "loss_mask": [1] * 12}] * 2)
    arguments = MedusaArguments(str(tmp_path), max_steps=1, report_to=[], use_cpu=True, save_strategy="no")
    drafter = MedusaDrafter.for_target(target, num_heads=2)
    trainer = MedusaTrainer(drafter, target, arguments, train_dataset=rows)
    assert trainer.target.model is bare(target)
    assert trainer.train().global_step == 1
