"""User cases C20 and C23: what a call returns and streams, and that it leaves nothing behind."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from tiny import KINDS, TREES, Keep, Watch, drafter_of, few, letters, plain, prompts, some, texts_of, tiny, unnoticed
from transformers import LogitsProcessor, TextIteratorStreamer

from hf_specgen import Costs, PromptLookup, SmallModel, SpecGenError, SpeculativeDecoding, disable, enable, last_stats

ROWS = [5, 17, 11, 24]
EVERYTHING = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
}


@pytest.fixture(scope="module")
def target():
    return tiny()


def run(model, drafter, ids, mask=None, streamer=None, on_tokens=None, **settings):
    extra = {} if on_tokens is None else {"on_tokens": on_tokens}
    loop = SpeculativeDecoding(drafter, streamer=streamer)
    return plain(model, ids, mask, custom_generate=loop, **extra, **settings)


def assert_close(ours, theirs, rows: list[int]) -> None:
    """Compare two results token by token, where rows are still unfinished; ``rows`` are their numbers of tokens."""
    assert torch.equal(ours.sequences, theirs.sequences)
    for name in ("scores", "logits"):
        mine, plain_ones = getattr(ours, name), getattr(theirs, name)
        assert len(mine) == len(plain_ones) == max(rows)
        for step, (here, there) in enumerate(zip(mine, plain_ones, strict=True)):
            alive = [row for row, count in enumerate(rows) if step < count]
            assert here.shape == there.shape
            assert here.dtype == there.dtype
            assert torch.allclose(here[alive], there[alive], atol=1e-4), (name, step)
    assert len(ours.hidden_states) == len(theirs.hidden_states) == max(rows)
    for step, (here, there) in enumerate(zip(ours.hidden_states, theirs.hidden_states, strict=True)):
        alive = [row for row, count in enumerate(rows) if step < count]
        assert [layer.shape for layer in here] == [layer.shape for layer in there]
        for layer, other in zip(here, there, strict=True):
            columns = slice(None) if step else slice(-min(ROWS), None)
            assert torch.allclose(layer[alive][:, columns], other[alive][:, columns], atol=1e-4), step


@pytest.mark.parametrize(
    ("kind", "settings"), some(KINDS, ({}, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}))
)
def test_c20_outputs_and_stream(kind: str, settings: dict, target) -> None:
    ids, mask = prompts([12])
    expected = plain(target, ids, mask, **EVERYTHING, **settings)
    watch, streamer = drafter_of(kind, target, expected.sequences.tolist()), Keep()
    result = run(target, watch, ids, mask, streamer, **EVERYTHING, **settings)
    assert watch.longest >= 2
    assert type(result) is type(expected)
    assert_close(result, expected, [32])
    assert streamer.tokens == result.sequences[0].tolist()
    assert streamer.puts == 33, "the prompt, then one token at a time"
    assert streamer.ended == 1
    assert result.speculation is last_stats(target)
    assert result.attentions is None


@pytest.mark.parametrize("kind", few(KINDS, "small", "branches", "tree", "eagle dynamic"))
def test_c20_outputs_of_a_batch(kind: str, target) -> None:
    ids, mask = prompts(ROWS)
    free = plain(target, ids, mask)
    settings = {"eos_token_id": [int(free[0, 24 + 5]), int(free[2, 24 + 20])], "repetition_penalty": 1.05}
    expected = plain(target, ids, mask, **EVERYTHING, **settings)
    counts = [int((row[24:] != 0).sum()) for row in expected.sequences]
    assert len(set(counts)) > 1
    watch = drafter_of(kind, target, texts_of(expected.sequences, mask))
    sent: dict[int, list[list[int]]] = {row: [] for row in range(4)}
    result = run(
        target, watch, ids, mask, on_tokens=lambda row, tokens: sent[row].append(tokens), **EVERYTHING, **settings
    )
    assert watch.longest >= 2
    assert_close(result, expected, counts)
    for row, count in enumerate(counts):
        assert [token for block in sent[row] for token in block] == result.sequences[row, 24 : 24 + count].tolist()
        assert all(sent[row])
    assert max(len(block) for blocks in sent.values() for block in blocks) >= 2, "a block comes at once"


def test_c20_sampled_scores_are_the_warped_ones(target) -> None:
    """The scores of a sampled run are those that plain decoding computes on the same text."""
    ids, mask = prompts(ROWS)
    warpers = {"do_sample": True, "temperature": 0.6, "top_k": 9, "repetition_penalty": 1.3}
    settings = {**EVERYTHING, **warpers, "seed": 3}
    result = run(target, drafter_of("tree", target, [[1]] * 4), ids, mask, **settings)
    forced = result.sequences

    class Follow(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            kept.append(scores.clone())
            only = torch.full_like(scores, float("-inf"))
            only[torch.arange(4), forced[:, input_ids.shape[1]]] = 0
            return only

    kept: list[torch.Tensor] = []
    plain(target, ids, mask, logits_processor=[Follow()], repetition_penalty=1.3)
    for step, scores in enumerate(result.scores):
        finite = scores[scores.isfinite()].view(4, 9)
        wanted = (kept[step] / 0.6).topk(9).values
        assert torch.allclose(finite.sort(descending=True).values, wanted, atol=1e-4), step


def test_c20_text_streams(target) -> None:
    ids, _ = prompts([12])
    streamer = TextIteratorStreamer(letters(), skip_prompt=True)
    result = run(target, PromptLookup(4), ids, streamer=streamer)
    assert "".join(streamer) == letters().decode(result[0, 12:])


def test_c20_a_streamer_for_several_rows_is_refused_with_the_way_out(target) -> None:
    ids, mask = prompts(ROWS)
    streamer = Keep()
    with pytest.raises(SpecGenError, match=r"streamer.*4 rows.*on_tokens="):
        run(target, PromptLookup(4), ids, mask, streamer)
    assert streamer.puts == 0


def state_of(model) -> tuple:
    """Return what a call must not change."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return (
        copy.deepcopy(model.config.to_dict()),
        model.config._attn_implementation,
        copy.deepcopy(model.generation_config.to_dict()),
        [len(vars(module)[name]) for module in model.modules() for name in hooks],
        [module.training for module in model.modules()],
        [parameter.requires_grad for parameter in model.parameters()],
        {name: value.data_ptr() for name, value in model.state_dict().items()},
        sorted(vars(model)),
        type(model),
    )


class RaisesAtFour(LogitsProcessor):
    """Raise at the fourth call of a run; the count lies outside, for a processor with state would be refused."""

    def __init__(self, error: type[BaseException], calls: list[int]) -> None:
        self.error, self.count = error, calls.append
        self.calls = lambda: len(calls)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.count(1)
        if self.calls() >= 4:
            raise self.error("stop here")
        return scores


@pytest.mark.parametrize(
    ("kind", "how"),
    few(
        product(KINDS, ("assistant_model", "custom_generate")),
        *(("lookup", "assistant_model"), ("small", "assistant_model"), ("branches", "custom_generate")),
        ("eagle dynamic", "assistant_model"),
    ),
)
def test_c23_no_residue(kind: str, how: str) -> None:
    model, other = tiny(), tiny(2)
    ids, mask = prompts([12])
    expected = plain(model, ids, mask)
    watch = drafter_of(kind, model, expected.tolist())
    models = [model, watch.inner.model if kind in ("small", "sampled") else other]
    before = [state_of(one) for one in models]
    if how == "assistant_model":
        enable(model)
        before[0] = state_of(model)
    call = {how: watch if how == "assistant_model" else SpeculativeDecoding(watch)}

    result = plain(model, ids, mask, num_assistant_tokens=3, **call)
    assert torch.equal(result, expected)
    assert watch.longest >= 2
    if kind != "tree":  # it draws its own sizes
        assert max(round.draft.tree.max_depth for round in watch.rounds) == 3
        assert watch.width <= (8 if kind in TREES else 3)
    assert [state_of(one) for one in models] == before
    for error in (RuntimeError, KeyboardInterrupt):
        with pytest.raises(error, match=r"stop here, at 2[2-9]"):
            plain(model, ids, mask, logits_processor=[Late(error)], **call)
        assert [state_of(one) for one in models] == before
        assert torch.equal(plain(model, ids, mask), expected)
        assert torch.equal(plain(model, ids, mask, **call), expected), "the drafter works again"
    if how == "assistant_model":
        disable(model)


@pytest.mark.parametrize(
    ("own", "given", "width"), [(20, None, 20), (None, None, 16), (5, None, 5), (5, 20, 20), (20, 7, 7)]
)
def test_c23_numbers_in_configs_are_read_and_left_alone(own: int | None, given: int | None, width: int) -> None:
    """Also where a number is transformers' own default; 16 is the lookup's own bound."""
    model = tiny()
    ids, mask = prompts([12])
    text = plain(model, ids, mask)[0].tolist()
    model.generation_config.num_assistant_tokens = own
    config = copy.deepcopy(model.generation_config)
    config.update(num_assistant_tokens=given, max_new_tokens=32)
    free = Costs(slope=0.0)
    watch = Watch(PromptLookup(corpus=[text], costs=free))
    loop = SpeculativeDecoding(watch)
    settings = {"generation_config": config} if given else {"max_new_tokens": 32, "do_sample": False}
    before = [state_of(model), config.to_dict()]
    result = model.generate(ids, attention_mask=mask, custom_generate=loop, **settings)
    assert result[0].tolist() == text
    assert watch.width == width
    assert [state_of(model), config.to_dict()] == before


class Late(LogitsProcessor):
    """Raise once the text has grown by ten tokens: inside a draft, after some rounds."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] >= 22:
            raise self.error(f"stop here, at {input_ids.shape[1]}")
        return scores


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_c23_an_error_at_the_fourth_call(error: type[BaseException], target) -> None:
    ids, mask = prompts(ROWS)
    expected = plain(target, ids, mask)
    before, calls = state_of(target), []
    with pytest.raises((error, SpecGenError), match=r"stop here|RaisesAtFour"):
        run(target, PromptLookup(4), ids, mask, logits_processor=[RaisesAtFour(error, calls)])
    assert state_of(target) == before
    assert torch.equal(plain(target, ids, mask), expected)


def test_c23_an_error_in_a_forward_pass_restores_the_attention(target) -> None:
    ids, mask = prompts(ROWS)
    before, calls = state_of(target), []

    def fail(module, args, output) -> None:
        calls.append(target.config._attn_implementation)
        if len(calls) == 4:
            raise KeyboardInterrupt

    handle = target.model.layers[0].register_forward_hook(unnoticed(fail))
    with pytest.raises(KeyboardInterrupt):
        run(target, Watch(SmallModel(tiny(2), 3)), ids, mask)
    handle.remove()
    assert len(set(calls)) == 2, "the pass under way used another attention"
    assert state_of(target) == before


def test_c23_the_residue_check_can_fail(target) -> None:
    before = state_of(target)
    target.config._attn_implementation = "eager"
    assert state_of(target) != before
    target.config._attn_implementation = "sdpa"
    handle = target.register_forward_hook(lambda *_: None)
    assert state_of(target) != before
    handle.remove()
    target.generation_config.num_assistant_tokens = 3
    assert state_of(target) != before
    target.generation_config.num_assistant_tokens = None
    assert state_of(target) == before
