"""The ways into the loop: enable, disable, the mixin, custom_generate; and everything that must stay stock."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from pathlib import Path

import pytest
import torch
from tiny import Watch, disturbed, plain, prompts, tiny, unnoticed
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.generation.streamers import BaseStreamer

import hf_specgen
from hf_specgen import (
    Call,
    IncompatibleDrafter,
    PromptLookup,
    Session,
    SmallModel,
    SpecGenError,
    SpeculativeDecoding,
    SpeculativeMixin,
)

TOKENS = 24


class Mixed(SpeculativeMixin, LlamaForCausalLM):
    """A class of a user's own."""


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[PreTrainedModel, str]]:
    """Note the target's model and the drafter's name of every run of our loop."""
    seen: list[tuple[PreTrainedModel, str]] = []
    genuine = SpeculativeDecoding._run

    def run(self: SpeculativeDecoding, session, target, sequences, stats, log):
        seen.append((target.cached.model, type(self.drafter).__name__))
        return genuine(self, session, target, sequences, stats, log)

    monkeypatch.setattr(SpeculativeDecoding, "_run", run)
    return seen


def mixed(seed: int = 0) -> Mixed:
    stock = tiny(seed)
    model = Mixed(copy.deepcopy(stock.config)).eval()
    model.load_state_dict(stock.state_dict())
    model.generation_config = copy.deepcopy(stock.generation_config)
    return model


def ready(way: str, seed: int = 0) -> PreTrainedModel:
    """Build a model that takes drafters in ``assistant_model=``, by either way."""
    return mixed(seed) if way == "mixin" else hf_specgen.enable(tiny(seed))


WAYS = pytest.mark.parametrize("way", ["enable", "mixin"])
ROWS = pytest.mark.parametrize("lengths", [[12], [5, 17, 11, 24]])


def state_of(model: PreTrainedModel) -> dict[str, object]:
    """Describe all that a call must leave as it was."""
    modules = list(model.named_modules())
    return {
        "vars": {name: id(value) for name, value in vars(model).items()},
        "config": model.config.to_dict(),
        "generation": model.generation_config.to_dict(),
        "implementation": model.config._attn_implementation,
        "training": [module.training for _, module in modules],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for _, m in modules],
        "grads": [parameter.requires_grad for parameter in model.parameters()],
        "names": [name for name, _ in modules],
        "weights": {name: value.data_ptr() for name, value in model.state_dict().items()},
    }


def test_a_model_never_enabled_is_stock(runs: list) -> None:
    model = tiny()
    ids, mask = prompts([12])
    stock = LlamaForCausalLM.generate
    settings = {"attention_mask": mask, "do_sample": False, "max_new_tokens": TOKENS}
    expected = stock(model, ids, **settings)
    hf_specgen.enable(tiny(1))
    assert LlamaForCausalLM.generate is stock and "generate" not in vars(model)
    for drafting in ({}, {"prompt_lookup_num_tokens": 3}, {"assistant_model": disturbed(model)}, {"num_beams": 2}):
        result = model.generate(ids, **settings, **drafting)
        assert torch.equal(result, expected) or "num_beams" in drafting
        assert "speculation" not in vars(result)
    assert not runs and hf_specgen.last_stats(model) is None


@WAYS
@ROWS
def test_drafters_are_recognised(way: str, lengths: list[int], runs: list) -> None:
    model = ready(way)
    ids, mask = prompts(lengths)
    expected = plain(tiny(), ids, mask, max_new_tokens=TOKENS)
    corpus = [row[row != 0].tolist() for row in expected]
    calls = {
        "PromptLookup": {"assistant_model": PromptLookup(3, corpus=corpus)},
        "SmallModel": {"assistant_model": disturbed(tiny()), "num_assistant_tokens": 3},
        "NoDrafter": {"custom_generate": SpeculativeDecoding(None)},
    }
    for name, drafting in calls.items():
        result = plain(model, ids, mask, max_new_tokens=TOKENS, **drafting)
        assert torch.equal(result, expected), name
        assert runs.pop() == (model, name)
        assert result.speculation.drafter == name
        assert hf_specgen.last_stats(model) is result.speculation
        assert name == "NoDrafter" or result.speculation.num_accepted_tokens > 0
    assert not runs


@WAYS
def test_stock_arguments_for_prompt_lookup(way: str, runs: list, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ready(way)
    made: list[PromptLookup] = []
    genuine = PromptLookup.begin

    def begin(self: PromptLookup, call: Call) -> Session:
        made.append(self)
        return genuine(self, call)

    monkeypatch.setattr(PromptLookup, "begin", begin)
    ids, mask = prompts([5, 17, 11, 24])
    expected = plain(tiny(), ids, mask, max_new_tokens=TOKENS)
    config = GenerationConfig(do_sample=False, max_new_tokens=TOKENS, pad_token_id=0, prompt_lookup_num_tokens=4)
    before = config.to_dict()
    plain_calls = [
        ({"prompt_lookup_num_tokens": 3}, 3, 3),
        ({"prompt_lookup_num_tokens": 5, "max_matching_ngram_size": 2}, 5, 2),
    ]
    for settings, number, ngram in plain_calls:
        assert torch.equal(plain(model, ids, mask, max_new_tokens=TOKENS, **settings), expected)
        drafter = made.pop()
        assert (drafter.num_tokens, drafter.max_ngram) == (number, ngram)
    assert torch.equal(model.generate(ids, attention_mask=mask, generation_config=config), expected)
    assert made.pop().num_tokens == 4 and config.to_dict() == before
    model.generation_config.prompt_lookup_num_tokens = 6
    assert torch.equal(plain(model, ids, mask, max_new_tokens=TOKENS), expected)
    assert made.pop().num_tokens == 6
    assert torch.equal(plain(model, ids, mask, max_new_tokens=TOKENS, prompt_lookup_num_tokens=2), expected)
    assert made.pop().num_tokens == 2
    assert len(runs) == 5 and not made


@WAYS
def test_calls_without_a_drafter_are_untouched(way: str, runs: list) -> None:
    model, stock = ready(way), tiny()
    ids, mask = prompts([5, 17, 11, 24])
    for settings in (
        {},
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2},
        {"do_sample": True, "temperature": 0.7},
        {"return_dict_in_generate": True, "output_scores": True},
    ):
        results = []
        for each in (model, stock):
            torch.manual_seed(5)
            results.append(plain(each, ids, mask, max_new_tokens=8, **settings))
        mine, theirs = (r if isinstance(r, torch.Tensor) else r.sequences for r in results)
        assert torch.equal(mine, theirs)
        assert type(results[0]) is type(results[1])
    assert not runs and hf_specgen.last_stats(model) is None
    with pytest.raises(ValueError, match="num_beams=3"):
        plain(model, ids, mask, num_beams=3, assistant_model=PromptLookup(3))
    with pytest.raises(ValueError, match="num_assistant_tokenz"):
        plain(model, ids, mask, num_assistant_tokenz=3)


@WAYS
def test_another_custom_generate_is_untouched(way: str, runs: list) -> None:
    model = ready(way)
    ids, _ = prompts([12])
    heard: list[dict] = []

    def other(model, input_ids, generation_config, my_own=None, **kwargs):
        heard.append({"my_own": my_own, **kwargs})
        return input_ids + 1

    result = plain(model, ids, custom_generate=other, my_own="this", prompt_lookup_num_tokens=3)
    assert torch.equal(result, ids + 1) and heard[0]["my_own"] == "this" and not runs


@WAYS
def test_positional_arguments_and_configs(way: str, runs: list) -> None:
    model = ready(way)
    ids, _ = prompts([12])
    config = GenerationConfig(do_sample=False, max_new_tokens=9, pad_token_id=0)
    expected = plain(tiny(), ids, max_new_tokens=9)
    drafter = SmallModel(disturbed(tiny()), 3)
    assert torch.equal(model.generate(ids, config, assistant_model=drafter), expected)
    assert torch.equal(model.generate(ids, config, None, None, None, None, drafter), expected)
    assert torch.equal(model.generate(inputs=ids, generation_config=config, assistant_model=drafter), expected)
    assert torch.equal(model.generate(input_ids=ids, generation_config=config, assistant_model=drafter), expected)
    assert len(runs) == 4


def characters() -> PreTrainedTokenizerFast:
    """Build a tokenizer of 64 one-character words."""
    bare = Tokenizer(WordLevel({chr(59 + place): place for place in range(64)}, unk_token=";"))
    bare.pre_tokenizer = Split("", "isolated")
    bare.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=bare, unk_token=";", pad_token=";")


@WAYS
def test_stop_strings_and_streamers(way: str, runs: list) -> None:
    model, stock, tokenizer = ready(way), tiny(), characters()
    ids, _ = prompts([12])
    text = plain(stock, ids, max_new_tokens=TOKENS)[0, 12:].tolist()
    drafter = SmallModel(copy.deepcopy(stock), 5)
    stop = tokenizer.decode(text[7:9])
    expected = plain(stock, ids, max_new_tokens=TOKENS, stop_strings=stop, tokenizer=tokenizer)
    assert expected.shape[1] < 12 + TOKENS
    asked = {"assistant_model": drafter, "tokenizer": tokenizer, "max_new_tokens": TOKENS}
    assert torch.equal(plain(model, ids, stop_strings=stop, **asked), expected)
    config = GenerationConfig(stop_strings=[stop], pad_token_id=0)
    assert torch.equal(plain(model, ids, generation_config=config, **asked), expected)
    assert config.stop_strings == [stop]
    with pytest.raises(SpecGenError, match="tokenizer"):
        plain(model, ids, stop_strings=stop, assistant_model=drafter)

    class Listener(BaseStreamer):
        def __init__(self) -> None:
            self.heard: list[int] = []
            self.ends = 0

        def put(self, value) -> None:
            self.heard += value.flatten().tolist()

        def end(self) -> None:
            self.ends += 1

    ours, theirs = Listener(), Listener()
    plain(model, ids, assistant_model=drafter, streamer=ours)
    plain(stock, ids, streamer=theirs)
    assert ours.heard == theirs.heard and ours.ends == theirs.ends == 1
    assert len(runs) == 3


@WAYS
def test_what_cannot_be_translated_is_refused(way: str, runs: list) -> None:
    model = ready(way)
    ids, _ = prompts([12])
    with pytest.raises(SpecGenError, match="synced_gpus"):
        plain(model, ids, assistant_model=PromptLookup(3), synced_gpus=True)
    with pytest.raises(IncompatibleDrafter, match="assistant_tokenizer"):
        plain(model, ids, assistant_model=tiny(), tokenizer=characters(), assistant_tokenizer=characters())
    assert not runs


def test_disable_restores_exactly() -> None:
    model = tiny()
    ids, mask = prompts([12])
    before = state_of(model)
    assert hf_specgen.enable(model) is model
    assert {**state_of(model), "vars": 0} == {**before, "vars": 0}, "only vars(model) may differ, by one entry"
    plain(model, ids, mask, assistant_model=PromptLookup(3))
    assert hf_specgen.disable(model) is model
    assert state_of(model) == before
    hf_specgen.disable(model)
    assert state_of(model) == before
    assert model.generate.__func__ is LlamaForCausalLM.generate


def test_enable_twice_is_one_enable() -> None:
    model = tiny()
    first = hf_specgen.enable(model).generate
    assert hf_specgen.enable(model).generate is first
    hf_specgen.disable(model)
    assert "generate" not in vars(model)


def test_a_generate_of_the_objects_own_comes_back(runs: list) -> None:
    model = tiny()
    ids, mask = prompts([12])
    expected = plain(model, ids, mask)
    calls: list[dict] = []

    def own(*args, model: PreTrainedModel, **kwargs):
        calls.append(kwargs)
        return LlamaForCausalLM.generate(model, *args, **kwargs)

    mine = functools.partial(own, model=model)
    model.generate = mine
    hf_specgen.enable(model)
    assert torch.equal(plain(model, ids, mask), expected) and len(calls) == 1 and not runs
    result = plain(model, ids, mask, assistant_model=PromptLookup(3))
    assert torch.equal(result, expected) and len(calls) == 2 and len(runs) == 1
    hf_specgen.disable(model)
    assert vars(model)["generate"] is mine


def forwards_of(model: PreTrainedModel) -> list[int]:
    counted: list[int] = []
    model.register_forward_pre_hook(unnoticed(lambda *args: counted.append(1)))
    return counted


@WAYS
def test_a_deep_copy_drafts_for_itself(way: str, runs: list) -> None:
    model = ready(way)
    copied = copy.deepcopy(model)
    copied.load_state_dict(tiny(7).state_dict())
    old, new = forwards_of(model), forwards_of(copied)
    ids, mask = prompts([5, 17, 11, 24])
    drafting = {"assistant_model": SmallModel(tiny(7), 3)}
    result = plain(copied, ids, mask, **drafting)
    assert torch.equal(result, plain(tiny(7), ids, mask))
    assert result.speculation.num_accepted_tokens > 0
    assert new and not old and [target for target, _ in runs] == [copied]
    assert torch.equal(plain(model, ids, mask, **drafting), plain(tiny(), ids, mask))
    assert old and runs[-1][0] is model
    if way == "enable":
        hf_specgen.disable(copied)
        assert "generate" in vars(model) and "generate" not in vars(copied)


@WAYS
@pytest.mark.parametrize("how", ["pickle", "torch.save"])
def test_pickled_models_stay_enabled(way: str, how: str, runs: list) -> None:
    model = ready(way)
    ids, mask = prompts([12])
    plain(model, ids, mask, assistant_model=PromptLookup(3))
    if how == "pickle":
        loaded = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    before = forwards_of(model)
    result = plain(loaded, ids, mask, assistant_model=SmallModel(tiny(), 3))
    assert torch.equal(result, plain(tiny(), ids, mask))
    assert runs[-1] == (loaded, "SmallModel") and not before
    assert result.speculation.num_accepted_tokens > 0


def files_of(model: PreTrainedModel, folder: Path) -> dict[str, bytes]:
    model.save_pretrained(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_saved_files_are_those_of_the_plain_model(tmp_path: Path) -> None:
    model, ids = hf_specgen.enable(tiny()), prompts([12])[0]
    result = plain(model, ids, assistant_model=PromptLookup(3))
    files = files_of(model, tmp_path / "ours")
    assert files == files_of(tiny(), tmp_path / "stock") and "model.safetensors" in files
    assert model.state_dict().keys() == tiny().state_dict().keys()
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    assert "generate" not in vars(loaded), "enabling belongs to the object, not to the files"
    assert torch.equal(plain(loaded, ids), result)


def test_a_saved_mixin_model_comes_back(tmp_path: Path, runs: list) -> None:
    model, (ids, mask) = mixed(), prompts([5, 17, 11, 24])
    model.save_pretrained(tmp_path)
    loaded = Mixed.from_pretrained(tmp_path, dtype=torch.float32)
    result = plain(loaded, ids, mask, assistant_model=SmallModel(tiny(), 3))
    assert torch.equal(result, plain(tiny(), ids, mask))
    assert runs[-1][0] is loaded and result.speculation.num_accepted_tokens > 0
    stock = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(plain(stock, ids, mask), result)


def test_a_mixin_model_can_be_enabled_as_well(runs: list) -> None:
    model, (ids, mask) = hf_specgen.enable(mixed()), prompts([12])
    watch = Watch(SmallModel(tiny(), 3))
    assert torch.equal(plain(model, ids, mask, assistant_model=watch), plain(tiny(), ids, mask))
    assert len(runs) == 1 and watch.longest == 3


@WAYS
@pytest.mark.parametrize("training", [False, True])
def test_a_call_leaves_nothing_behind(way: str, training: bool, runs: list) -> None:
    model = ready(way).train(training)
    model.model.layers[0].eval()  # one module in another mode than the rest
    model.lm_head.weight.requires_grad_(False)
    heard: list[int] = []
    model.model.norm.register_forward_hook(lambda *args: heard.append(1))
    drafter = disturbed(tiny()).train(training)
    ids, mask = prompts([5, 17, 11, 24])
    before = state_of(model), state_of(drafter)
    for drafting in ({"assistant_model": drafter}, {"prompt_lookup_num_tokens": 3, "do_sample": True, "seed": 1}):
        plain(model, ids, mask, num_assistant_tokens=2, max_new_tokens=16, **drafting)
        assert (state_of(model), state_of(drafter)) == before
    assert heard and len(runs) == 2
    assert torch.is_grad_enabled()


def test_two_enabled_models_do_not_meet(runs: list) -> None:
    first, second = hf_specgen.enable(tiny(0)), hf_specgen.enable(tiny(4))
    ids, mask = prompts([12])
    results = [plain(model, ids, mask, assistant_model=SmallModel(tiny(4), 3)) for model in (first, second)]
    assert torch.equal(results[0], plain(tiny(0), ids, mask)) and torch.equal(results[1], plain(tiny(4), ids, mask))
    assert [target for target, _ in runs] == [first, second]
    assert hf_specgen.last_stats(first) is results[0].speculation
    assert hf_specgen.last_stats(second) is results[1].speculation
    # one drafts for the other, though it is enabled itself
    crossed = plain(second, ids, mask, assistant_model=first, num_assistant_tokens=2)
    assert torch.equal(crossed, results[1]) and runs[-1] == (second, "SmallModel")
    hf_specgen.disable(first)
    assert "generate" in vars(second)


class Adapter(torch.nn.Module):
    """Wrap a model as adapter libraries do: attributes and generate() go to the model inside."""

    def __init__(self, inner: PreTrainedModel) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def generate(self, *args, **kwargs):
        return self.inner.generate(*args, **kwargs)


@WAYS
@ROWS
def test_a_wrapper_that_passes_arguments_on(way: str, lengths: list[int], runs: list) -> None:
    inner = ready(way)
    wrapper = Adapter(Adapter(inner))
    ids, mask = prompts(lengths)
    result = plain(wrapper, ids, mask, assistant_model=SmallModel(disturbed(tiny()), 3))
    assert torch.equal(result, plain(tiny(), ids, mask))
    assert runs == [(inner, "SmallModel")] and result.speculation.num_accepted_tokens > 0
