"""Refusals: raised before the target's first forward, naming what was given, what is required and what to do."""

from __future__ import annotations

import inspect

import pytest
import torch
import transformers
from support_features import Forwards, unchanged
from tiny import build, disturbed, ours, plain, prompts, some, tiny, unnoticed
from transformers import (
    AutoConfig,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
)

from hf_specgen import PromptLookup, SpecGenError, SpeculativeDecoding, UnsupportedTarget, enable

IDS, MASK = prompts([12])


class Stop(StoppingCriteria):
    """Stop where a token comes."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == 3


def refused(model, words: str, ids=IDS, mask=MASK, loop=None, error=SpecGenError, **settings) -> str:
    """Demand a refusal with these words, no forward, and a model that works as before."""
    counter = Forwards(model)
    given = {"do_sample": False, "max_new_tokens": 8, **settings}
    if ids is not None:
        given.update(input_ids=ids, attention_mask=mask)
    with unchanged(model), pytest.raises(error, match=words) as caught:
        if "assistant_model" in given or "prompt_lookup_num_tokens" in given:
            model.generate(**given)
        else:
            model.generate(custom_generate=loop or SpeculativeDecoding(PromptLookup(4)), **given)
    assert counter.stop() == 0, "refused too late"
    return str(caught.value)


def filled(model) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    model(input_ids=IDS[:, :-1], past_key_values=cache)
    return cache


MODES = {
    "beams": ({"num_beams": 2}, "num_beams=2.*needs num_beams=1.*Drop the drafter"),
    "group beams": ({"num_beams": 4, "num_return_sequences": 2}, "num_beams=4"),
    "contrastive": ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha=0.6 is not supported.*contrastive.*Use plain"),
    "dola": ({"dola_layers": "low"}, "dola_layers='low' is not supported.*Use plain"),
    "attentions": (
        {"output_attentions": True, "return_dict_in_generate": True},
        "output_attentions=True is not supported.*Use plain",
    ),
    "early exit": ({"assistant_early_exit": 1}, "assistant_early_exit=1 is not supported"),
    "offloaded": ({"cache_implementation": "offloaded"}, "cache_implementation='offloaded'.*Leave it out"),
    "rule": ({"rule": "typo"}, "rule='typo' is unknown: one of block, gumbel, rejection is required"),
    "schedule": ({"num_assistant_tokens_schedule": "typo"}, "schedule='typo'.*one of constant, heuristic"),
    "no tokens": ({"num_assistant_tokens": 0}, "num_assistant_tokens=0: a whole number of at least 1.*pass no drafter"),
    "negative tokens": ({"num_assistant_tokens": -2}, "num_assistant_tokens=-2: .*at least 1"),
    "broken tokens": ({"num_assistant_tokens": 2.5}, "num_assistant_tokens=2.5: a whole number"),
    "tokens as text": ({"num_assistant_tokens": "3"}, "num_assistant_tokens='3': a whole number"),
    "broken seed": ({"seed": 2.5, "do_sample": True}, "seed=2.5: one int, or one int a row, is required"),
    "seed as text": ({"seed": "x", "do_sample": True}, "seed='x': one int"),
    "seed and generator": (
        {"seed": 1, "generator": torch.Generator(), "do_sample": True},
        "seed= and generator= were both given.*Drop one",
    ),
    "seeds": ({"seed": [1, 2], "do_sample": True}, "2 seeds were given for 1 rows: one int, or one seed a row"),
    "positions": ({"position_ids": torch.arange(5, 17)[None]}, "position_ids= of shape .* was given.*Leave it out"),
}


@pytest.mark.parametrize("name", MODES)
def test_settings_that_cannot_be_served_exactly(name: str) -> None:
    settings, words = MODES[name]
    refused(tiny(), words, **settings)


@pytest.mark.parametrize("name", ["beams", "contrastive", "dola", "offloaded", "attentions"])
def test_the_same_in_a_generation_config_and_on_an_enabled_model(name: str) -> None:
    settings, words = MODES[name]
    config = GenerationConfig(do_sample=False, max_new_tokens=8, pad_token_id=0, **settings)
    model = tiny()
    refused(model, words, generation_config=config)
    enable(model)
    refused(model, words, generation_config=config, assistant_model=PromptLookup(4))
    refused(model, words, assistant_model=disturbed(tiny()), **settings)
    for key, value in settings.items():
        setattr(model.generation_config, key, value)
    refused(model, words, assistant_model=PromptLookup(4))


def test_the_quantised_cache_is_refused_by_us_or_by_transformers_before_it() -> None:
    refused(tiny(), "cache_implementation='quantized'|quant", cache_implementation="quantized", error=Exception)


def test_an_unknown_rule_is_refused_when_the_loop_is_made() -> None:
    with pytest.raises(SpecGenError, match="rule='typo' is unknown: one of block, gumbel, rejection is required"):
        SpeculativeDecoding(PromptLookup(4), rule="typo")


@pytest.mark.parametrize("lengths", [[12], [12, 5]])
def test_caches_of_the_caller(lengths: list[int]) -> None:
    model = tiny()
    ids, mask = prompts(lengths)
    words = "past_key_values=\\)? was given.*whole prompt as input_ids and leave the cache out"
    refused(model, words, ids, mask, past_key_values=DynamicCache(config=model.config))
    if "cache" in inspect.signature(type(model).forward).parameters:  # the name in newer transformers
        refused(model, words, ids, mask, cache=DynamicCache(config=model.config))
    if len(lengths) == 1:
        cache = filled(model)
        refused(model, words, ids, mask, past_key_values=cache)
        assert cache.get_seq_length() == 11, "the caller's cache is left alone"


def test_prompts_that_are_not_left_padded_token_ids() -> None:
    model = tiny()
    ids, mask = prompts([12, 5])
    refused(model, "row 1 ends in padding: left padding is required.*padding_side = 'left'", ids, mask.flip(1))
    hole = mask.clone()
    hole[1, -1] = 0
    refused(model, "row 1 ends in padding", ids, hole)
    refused(model, "row 0 ends in padding", ids, torch.zeros_like(mask))
    embeds = model.get_input_embeddings()(IDS).detach()
    refused(model, "inputs_embeds= was given.*Pass the prompt as input_ids", None, inputs_embeds=embeds)
    refused(model, "inputs_embeds= was given.*Pass the prompt as input_ids", inputs_embeds=embeds)


def test_an_empty_prompt() -> None:
    model = tiny()
    empty = torch.zeros(1, 0, dtype=torch.long)
    refused(model, "prompt is empty: at least one token a row is required", empty, torch.zeros_like(empty))


def test_more_inputs_than_token_ids() -> None:
    model = build("gpt2")
    refused(model, "model input token_type_ids= was given.*Use plain", token_type_ids=torch.zeros_like(IDS))
    states = torch.randn(1, 3, 32)
    refused(model, "model input encoder_hidden_states= was given.*Use plain", encoder_hidden_states=states)


def test_rotary_factors_that_switch_inside_the_batch() -> None:
    dynamic = tiny(
        max_position_embeddings=32, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    )
    refused(dynamic, "rope_type='dynamic'.*at 32 tokens.*12 to 42.*Lower max_new_tokens", max_new_tokens=30)
    assert ours(dynamic, PromptLookup(4), IDS, MASK, max_new_tokens=16).shape == (1, 28), "below the limit it runs"
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 1e4}
    phi = build(
        "phi3",
        max_position_embeddings=64,
        original_max_position_embeddings=16,
        rope_parameters={"rope_type": "longrope", "original_max_position_embeddings": 16, **factors},
    )
    refused(phi, "rope_type='longrope'.*at 16 tokens.*12 to 20.*split the batch", max_new_tokens=8)
    ids, mask = prompts([24, 10])
    refused(phi, "rope_type='longrope'.*10 to 28", ids, mask, max_new_tokens=4)
    ids, mask = prompts([24, 20])
    assert torch.equal(ours(phi, PromptLookup(4), ids, mask), plain(phi, ids, mask)), "on one side it runs"


class Quiet:
    """Stream to nowhere."""

    def put(self, value) -> None:
        raise AssertionError("nothing may be streamed")

    end = put


def test_streams_of_several_rows() -> None:
    ids, mask = prompts([12, 5])
    words = "streamer was given for 2 rows: one row is required.*on_tokens=callback"
    refused(tiny(), words, ids, mask, SpeculativeDecoding(PromptLookup(4), streamer=Quiet()))
    refused(enable(tiny()), words, ids, mask, assistant_model=PromptLookup(4), streamer=Quiet())
    returned = {"num_return_sequences": 2, "do_sample": True}
    refused(enable(tiny()), words, assistant_model=PromptLookup(4), streamer=Quiet(), **returned)


def test_nothing_is_streamed_of_a_refused_call() -> None:
    loop = SpeculativeDecoding(PromptLookup(4), streamer=Quiet())
    refused(tiny(), "num_assistant_tokens=0", loop=loop, num_assistant_tokens=0)
    refused(tiny(), "schedule='typo'", loop=loop, num_assistant_tokens_schedule="typo")


class Counting(LogitsProcessor):
    """Keep state in the class, where no copy has its own."""

    calls = 0

    def __call__(self, input_ids, scores):
        Counting.calls += 1
        return scores


@pytest.mark.parametrize("rows", [1, 2])
def test_processors_that_keep_state(rows: int) -> None:
    ids, mask = prompts([12, 5][:rows])
    words = "cannot be replayed on draft tokens.*Required.*Use plain generate"
    refused(tiny(), f"Counting {words}", ids, mask, logits_processor=[Counting()])
    refused(tiny(), f"UnbatchedClassifierFreeGuidanceLogitsProcessor {words}", ids, mask, guidance_scale=2.0)
    mark = SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=2)
    refused(tiny(), f"SynthIDTextWatermarkLogitsProcessor {words}", ids, mask, watermarking_config=mark, do_sample=True)


def test_what_an_enabled_model_is_asked_beside_the_drafter() -> None:
    model = enable(tiny())
    drafter = PromptLookup(4)
    refused(model, "synced_gpus=True.*Use plain", assistant_model=drafter, synced_gpus=True)
    words = "assistant_tokenizer= was given.*target's own tokens.*disable"
    refused(model, words, assistant_model=disturbed(tiny()), assistant_tokenizer=object(), tokenizer=object())
    refused(model, words, assistant_model=drafter, assistant_tokenizer=object(), tokenizer=object())
    loop = SpeculativeDecoding(drafter)
    words = "assistant_model= and custom_generate=.*both given: one drafter is required"
    refused(model, words, assistant_model=drafter, custom_generate=loop)
    words = "stop_strings=.*without a tokenizer: pass tokenizer="
    refused(model, words, assistant_model=drafter, stop_strings=["ab"])
    refused(model, "num_assistant_tokens=0", prompt_lookup_num_tokens=0)
    model.generation_config.stop_strings = ["ab"]
    refused(model, words, assistant_model=drafter)


def test_rows_that_can_differ_need_a_pad_token() -> None:
    model = tiny()
    model.generation_config.pad_token_id = None
    model.config.pad_token_id = None
    ids, mask = prompts([12, 5])
    stops = StoppingCriteriaList([Stop()])
    refused(model, "2 rows can stop at different lengths.*pass pad_token_id=", ids, mask, stopping_criteria=stops)
    assert len(ours(model, PromptLookup(4), ids, mask, max_new_tokens=8)) == 2, "rows of one length need none"
    assert ours(model, PromptLookup(4), IDS, MASK, stopping_criteria=stops).shape[0] == 1


@pytest.mark.parametrize(
    ("sampling", "value", "when"), some((False, True), (float("nan"), float("inf"), float("-inf")), (0, 3))
)
def test_logits_that_are_no_numbers(when: int, value: float, sampling: bool) -> None:
    model = tiny()
    calls = []

    def spoil(module, arguments, output):
        calls.append(1)
        if len(calls) > when:
            output.logits = torch.full_like(output.logits, value)
        return output

    hook = model.register_forward_hook(unnoticed(spoil))
    with (
        unchanged(model),
        pytest.raises(SpecGenError, match=r"logits of row 0 at position.*finite logits are required"),
    ):
        ours(model, PromptLookup(4), IDS, MASK, do_sample=sampling, seed=1)
    hook.remove()
    assert len(calls) == when + 1, "the first such logits end the call"
    assert torch.equal(ours(model, PromptLookup(4), IDS, MASK), plain(model, IDS, MASK))


def test_the_row_whose_logits_are_no_numbers_is_named() -> None:
    model = tiny()
    ids, mask = prompts([12, 5, 9])

    def spoil(module, arguments, output):
        output.logits[1] = float("nan")
        return output

    hook = model.register_forward_hook(unnoticed(spoil))
    with pytest.raises(SpecGenError, match="logits of row 1 at position 5 are NaN"):
        ours(model, PromptLookup(4), ids, mask)
    hook.remove()


SMALL = dict(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, pad_token_id=0, eos_token_id=None
)


def other(kind: str, class_name: str, **settings):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SMALL, "bos_token_id": None, **settings})
    model = getattr(transformers, class_name)(config).eval()
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model


RECURRENT = {
    "mamba": ("MambaForCausalLM", {"state_size": 4}),
    "mamba2": ("Mamba2ForCausalLM", {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 1, "expand": 2}),
    "lfm2": (
        "Lfm2ForCausalLM",
        {"num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]},
    ),
}


@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_targets(kind: str) -> None:
    class_name, settings = RECURRENT[kind]
    model = other(kind, class_name, **settings)
    before = plain(model, IDS, MASK, max_new_tokens=4)
    message = refused(model, "Use plain generate", error=UnsupportedTarget)
    assert class_name in message or type(model.config).__name__ in message
    refused(enable(model), "Use plain generate", error=UnsupportedTarget, assistant_model=PromptLookup(4))
    assert torch.equal(plain(model, IDS, MASK, max_new_tokens=4), before)


def test_recurrent_drafters_are_refused_before_the_target_runs() -> None:
    class_name, settings = RECURRENT["lfm2"]
    drafter = other("lfm2", class_name, **settings)
    counter = Forwards(drafter)
    refused(enable(tiny()), "Lfm2.*", error=UnsupportedTarget, assistant_model=drafter)
    assert counter.stop() == 0


def test_encoder_decoder_targets() -> None:
    model = other(
        "t5",
        "T5ForConditionalGeneration",
        d_model=32,
        d_ff=64,
        d_kv=8,
        num_heads=4,
        num_layers=2,
        decoder_start_token_id=0,
    )
    message = refused(
        model, "encoder-decoder model: a decoder-only model is required.*Use plain", error=UnsupportedTarget
    )
    assert "T5ForConditionalGeneration" in message
    refused(enable(model), "encoder-decoder", error=UnsupportedTarget, assistant_model=PromptLookup(4))


@pytest.mark.parametrize("name", ["flash_attention_2", "flex_attention", "kernels-community/flash-attn"])
def test_attention_that_takes_no_tree_mask(name: str) -> None:
    model = tiny()
    before = plain(model, IDS, MASK)
    model.config._attn_implementation_internal = name
    words = (
        f"LlamaForCausalLM runs with attn_implementation='{name}': 'sdpa' or 'eager' is required.*Call model.set_attn"
    )
    refused(model, words, error=UnsupportedTarget)
    model.set_attn_implementation("sdpa")
    assert torch.equal(ours(model, PromptLookup(4), IDS, MASK), before), "the advice works"
