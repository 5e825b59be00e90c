"""Reported: with PEFT's prompt tuning the text was that of the model without its prompt."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import peft
import pytest
import torch
from tiny import ours, plain, prompts, tiny
from transformers import LlamaForCausalLM, PreTrainedModel

import hf_specgen
from hf_specgen import PromptLookup, SmallModel, SpecGenError, SpeculativeDecoding, UnsupportedTarget
from hf_specgen.models.cached_model import CachedModel
from hf_specgen.models.wrappers import bare, driven

SOFT = {
    "prompt tuning": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "prefix tuning": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "p-tuning": lambda: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=8),
}


def lora(model: PreTrainedModel) -> peft.PeftModel:
    """Wrap a model in LoRA that changes its text."""
    torch.manual_seed(5)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj", "up_proj"])
    config.init_lora_weights = False
    return peft.get_peft_model(model, config).eval()


def soft(kind: str) -> peft.PeftModel:
    """Wrap a tiny model in soft prompts of one kind."""
    return peft.get_peft_model(tiny(), SOFT[kind]()).eval()


@pytest.mark.parametrize("kind", SOFT)
def test_soft_prompts_are_refused_by_name(kind: str) -> None:
    wrapped, (ids, mask) = soft(kind), prompts([9])
    unprompted = plain(wrapped.base_model, ids, mask)
    with pytest.raises(UnsupportedTarget, match=r"peft\.peft_model.*soft prompt.*plain generate"):
        wrapped.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=4, custom_generate=SpeculativeDecoding(PromptLookup())
        )
    hf_specgen.enable(wrapped)
    with pytest.raises(UnsupportedTarget, match="soft prompt"):
        wrapped.generate(input_ids=ids, attention_mask=mask, max_new_tokens=4, assistant_model=PromptLookup())
    # PEFT leaves the bound original on the object: without the soft prompt the model is served as ever
    assert isinstance(vars(wrapped.base_model)["prepare_inputs_for_generation"], MethodType)
    assert torch.equal(ours(wrapped.base_model, PromptLookup(4), ids, mask), unprompted)


@pytest.mark.parametrize("make", [SmallModel, driven], ids=["small model", "trainers"])
def test_a_model_with_a_soft_prompt_is_not_run_around_it(make: Callable[[Any], object]) -> None:
    for kind in SOFT:
        with pytest.raises(UnsupportedTarget, match=r"PeftModelForCausalLM puts a soft prompt"):
            make(soft(kind))
    wrapped = lora(tiny())
    assert driven(wrapped) is bare(wrapped) is wrapped.base_model.model


def test_lora_is_served() -> None:
    """Negative control: PEFT's wrapper around weights alone changes no inputs."""
    wrapped, (ids, mask) = lora(tiny()), prompts([9, 5])
    expected = wrapped.generate(input_ids=ids, attention_mask=mask, max_new_tokens=24, do_sample=False)
    assert not torch.equal(expected, plain(tiny(), ids, mask, max_new_tokens=24)), "the adapters change the text"
    loop = SpeculativeDecoding(PromptLookup(4))
    found = wrapped.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=24, do_sample=False, custom_generate=loop
    )
    assert torch.equal(found, expected) and found.speculation.num_drafts > 0


class OwnInputs(LlamaForCausalLM):
    """Add a constant to every embedding, as a model that knows its user might."""

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(input_ids, **kwargs)
        inputs["inputs_embeds"] = self.get_input_embeddings()(inputs.pop("input_ids")) + 0.5
        return inputs


class OwnState(LlamaForCausalLM):
    """Carry something from step to step."""

    def _update_model_kwargs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        kept: dict[str, Any] = super()._update_model_kwargs_for_generation(*args, **kwargs)
        return kept


@pytest.mark.parametrize("kind", [OwnInputs, OwnState])
def test_a_class_that_prepares_its_own_steps_is_refused(kind: type[LlamaForCausalLM]) -> None:
    model, (ids, mask) = kind(tiny().config).eval(), prompts([9])
    with pytest.raises(UnsupportedTarget, match=kind.__name__):
        ours(model, PromptLookup(), ids, mask)
    with pytest.raises(UnsupportedTarget, match=kind.__name__):
        CachedModel(model, 1)


def test_a_function_on_the_object_is_refused() -> None:
    model, (ids, mask) = tiny(), prompts([9])
    own = model.prepare_inputs_for_generation
    model.prepare_inputs_for_generation = lambda *args, **kwargs: own(*args, **kwargs)
    with pytest.raises(SpecGenError, match="prepares the inputs of LlamaForCausalLM"):
        ours(model, PromptLookup(), ids, mask)
    model.prepare_inputs_for_generation = own
    assert torch.equal(ours(model, PromptLookup(4), ids, mask), plain(model, ids, mask))
