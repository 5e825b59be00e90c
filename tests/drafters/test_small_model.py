"""SmallModel: its cache follows the text, its laws are the target's, its limits hold, and it never changes the text."""

from __future__ import annotations

import copy

import pytest
import torch
from small_model_checks import CheckCache, Follow
from tiny import Watch, build, disturbed, few, ours, plain, prompts, some, tiny, unnoticed
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    LogitsProcessorList,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from hf_specgen import Costs, DenseQ, IncompatibleDrafter, SmallModel, SpecGenError, SpeculativeDecoding
from hf_specgen.drafters.small_model import check_vocabularies

RAGGED = [5, 17, 11, 24]
READ = [*((f, False) for f in ("llama", "gpt2", "mistral", "gemma3_text")), ("llama", True), ("mistral", True)]
CHEAP = Costs(slope=0.01, draft=0.05)


def forms(model: PreTrainedModel) -> dict[str, PreTrainedModel]:
    """Return D+, D- and O of user_cases.md."""
    return {"D+": disturbed(model), "D-": tiny(9, layers=1), "O": copy.deepcopy(model)}


@pytest.mark.parametrize("lengths", few(([12], [1], RAGGED, [3, 7, 12, 1]), [1], RAGGED))
def test_greedy_text_is_plain_with_any_small_model(lengths: list[int]) -> None:
    model = tiny()
    ids, mask = prompts(lengths)
    expected = plain(model, ids, mask, max_new_tokens=40)
    for name, drafter in forms(model).items():
        watch = Watch(SmallModel(drafter, 5))
        assert torch.equal(ours(model, watch, ids, mask, max_new_tokens=40), expected), name
        assert watch.width == 5
        assert name == "D-" or watch.longest >= 2
        assert torch.equal(ours(model, SmallModel(drafter), ids, mask, max_new_tokens=40), expected), name


@pytest.mark.parametrize(("case", "lengths"), some(READ, (RAGGED, [12])))
def test_cache_holds_what_a_fresh_reading_gives(case: tuple[str, bool], lengths: list[int]) -> None:
    family, sample = case
    model = build(family)
    ids, mask = prompts(lengths)
    law = {"do_sample": True, "seed": 5, "temperature": 0.6} if sample else {}
    watch = CheckCache(SmallModel(disturbed(model), 4, sample=sample))
    result = ours(model, watch, ids, mask, **law)
    assert watch.checked > 0 and watch.longest >= 2
    assert watch.wrapped == (family in ("mistral", "gemma3_text")), "rings of sliding layers went round"
    assert result.speculation.num_accepted_tokens < result.speculation.num_draft_tokens
    assert sample or torch.equal(result, plain(model, ids, mask))


def test_cache_survives_rests_and_rows_that_draft_nothing() -> None:
    model = tiny()
    ids, mask = prompts(RAGGED)
    for settings in ({"confidence": 0.5, "num_tokens": 4}, {"costs": Costs(slope=0.2, draft=0.2)}):
        watch = CheckCache(SmallModel(disturbed(model, 0.1), **settings))
        assert torch.equal(ours(model, watch, ids, mask), plain(model, ids, mask))
        proposed = [count for round in watch.rounds for count in round.proposed]
        assert 0 in proposed[4:] and max(proposed) > 0 and watch.checked > 0


@pytest.mark.parametrize(("lengths", "k"), some(([1], [2], [7], RAGGED, [1, 2, 3, 4]), (1, 3, 6)))
def test_an_oracle_is_accepted_in_full(k: int, lengths: list[int]) -> None:
    model = tiny()
    ids, mask = prompts(lengths)
    budget = 23
    watch = Watch(SmallModel(copy.deepcopy(model), k))
    result = ours(model, watch, ids, mask, max_new_tokens=budget)
    assert torch.equal(result, plain(model, ids, mask, max_new_tokens=budget))
    written = 1
    for round in watch.rounds[1:]:
        expected = min(k, budget - written - 1)
        assert round.proposed == [expected] * len(lengths)
        assert [len(path) for path in round.paths] == [expected] * len(lengths)
        written += expected + 1
    assert written == budget
    assert len(watch.rounds) - 1 == -(-(budget - 1) // (k + 1))


def widened(model: PreTrainedModel, size: int, boost: bool) -> PreTrainedModel:
    """Copy a model into a larger padded vocabulary whose extra ids are as likely as others, or the likeliest."""
    wide, own = tiny(vocab=size), model.state_dict()
    with torch.no_grad():
        for name, value in wide.state_dict().items():
            value[: own[name].shape[0]].copy_(own[name])
        extra = wide.lm_head.weight[model.config.vocab_size :]
        if boost:  # rows of +10 and of -10: one of the two is always far above the rest
            extra.fill_(10.0)
            extra[1::2] = -10.0
    return wide


@pytest.mark.parametrize(("larger", "boost"), some(("drafter", "target"), (False, True)))
def test_padded_vocabularies(larger: str, boost: bool) -> None:
    small = tiny()
    wide = widened(small, 72, boost)
    target, drafter = (small, wide) if larger == "drafter" else (wide, small)
    ids, mask = prompts(RAGGED)
    seeded = {"do_sample": True, "seed": 3, "temperature": 0.4}
    gumbel = {**seeded, "rule": "gumbel"}
    for law, sample in (({}, False), (seeded, False), (gumbel, True)):
        law = {**law, "max_new_tokens": 20}
        expected = plain(target, ids, mask, **law) if len(law) == 1 else ours(target, None, ids, mask, **law)
        watch = Watch(SmallModel(drafter, 4, sample=sample))
        assert torch.equal(ours(target, watch, ids, mask, **law), expected)
        assert watch.drafted and max(watch.drafted) < 64
        assert watch.longest >= 2 or (larger == "target" and boost)
        if larger == "target" and boost:
            assert int(expected.max()) >= 64, "the drafter read ids that it has no embedding for"


def test_laws_over_padded_vocabularies_lie_on_the_targets_ids() -> None:
    small = tiny()
    wide = widened(small, 72, True)
    ids, _ = prompts([12])
    for target, drafter in ((small, wide), (wide, small)):
        watch = Watch(SmallModel(drafter, 4, sample=True))
        ours(target, watch, ids, do_sample=True, seed=1)
        laws = [round.draft.q.logits for round in watch.rounds[1:] if round.draft.width]
        assert laws and all(law.shape[-1] == target.config.vocab_size for law in laws)
        assert all(torch.isneginf(law[..., 64:]).all() for law in laws)
        assert max(watch.drafted) < 64


def positions_seen(model: PreTrainedModel) -> list[int]:
    """Note the largest position of every forward of a model."""
    seen: list[int] = []
    model.register_forward_pre_hook(
        unnoticed(lambda module, args, kwargs: seen.append(int(kwargs["position_ids"].max()))), with_kwargs=True
    )
    return seen


def short_sighted(model: PreTrainedModel, limit: int) -> PreTrainedModel:
    """Copy a GPT-2 with only the first ``limit`` learned positions."""
    short = build("gpt2", n_positions=limit, max_position_embeddings=limit)
    short.load_state_dict(
        {k: v[:limit] if k.endswith("wpe.weight") else v for k, v in model.state_dict().items()}, strict=True
    )
    return short


@pytest.mark.parametrize(
    ("family", "lengths"), some(("gpt2", "llama"), ([12], [31], [32], [33], [5, 40, 20, 31], [40, 45]))
)
def test_context_limit_of_learned_positions(family: str, lengths: list[int]) -> None:
    model = build(family)
    drafter = short_sighted(build("gpt2"), 32)
    assert drafter.transformer.wpe.weight.shape[0] == 32
    seen = positions_seen(drafter)
    ids, mask = prompts(lengths)
    watch = Follow(SmallModel(drafter, 4))
    result = ours(model, watch, ids, mask, max_new_tokens=36)
    assert torch.equal(result, plain(model, ids, mask, max_new_tokens=36))
    assert max(seen, default=0) <= 31
    for row in range(len(lengths)):
        drafts = watch.drafts(row)
        assert all(not drafted for text, drafted in drafts if len(text) >= 32), "nothing is drafted past the limit"
        assert any(len(text) >= 32 for text, _ in drafts)
        assert all(drafted for text, drafted in drafts if len(text) < 32)
        assert all(len(text) + len(drafted) <= 33 for text, drafted in drafts if drafted)
    assert watch.longest >= 2 or family == "llama" or min(lengths) >= 29


def drafter_law(model: PreTrainedModel, text: list[int], processors: LogitsProcessorList) -> torch.Tensor:
    """Compute a small model's law after a row's real tokens."""
    ids = torch.tensor([text])
    with torch.no_grad():
        return torch.softmax(processors(ids, model(input_ids=ids, use_cache=False).logits[:, -1].float()), -1)[0]


LAW = {"do_sample": True, "temperature": 0.7, "top_k": 12, "repetition_penalty": 1.3, "top_p": 1.0}


@pytest.mark.parametrize(("lengths", "rule"), some(([7, 12, 12, 9], [12]), ("rejection", "block", "gumbel")))
def test_sampling_under_the_targets_processors(rule: str, lengths: list[int]) -> None:
    model = tiny()
    drafter = disturbed(model)
    processors = LogitsProcessorList(
        [RepetitionPenaltyLogitsProcessor(1.3), TemperatureLogitsWarper(0.7), TopKLogitsWarper(12)]
    )
    ids, mask = prompts(lengths)
    ids = torch.where(mask.bool(), ids, ids[:, -1:])  # releases differ in whether padding counts as repeated
    watch = Follow(SmallModel(drafter, 4, sample=True))
    result = ours(model, watch, ids, mask, seed=2, rule=rule, **LAW)
    assert watch.longest >= 2
    unlike_best = 0
    for texts, room, draft in watch.made:
        assert (draft.q is None) == (rule == "gumbel" or draft.width == 0)
        for row, text in enumerate(texts):
            count = int(draft.n_valid[row]) if room[row] else 0
            for depth in range(count):
                law = drafter_law(drafter, text + draft.tokens[row, :depth].tolist(), processors)
                token = int(draft.tokens[row, depth])
                assert law[token] > 0
                unlike_best += token != int(law.argmax())
                if isinstance(draft.q, DenseQ):
                    own = torch.softmax(draft.q.logits[row, depth].float(), -1)
                    torch.testing.assert_close(own, law, atol=1e-4, rtol=1e-3)
    assert unlike_best > 5, "the drafter took its best token every time: it does not sample"
    if rule == "gumbel":
        assert torch.equal(result, ours(model, None, ids, mask, seed=2, rule=rule, **LAW))


@pytest.mark.parametrize("rule", few(("rejection", "block", "gumbel"), "block"))
def test_sampling_drafter_under_a_greedy_target_takes_its_best(rule: str) -> None:
    model = tiny()
    drafter = disturbed(model)
    ids, mask = prompts(RAGGED)
    watch = Follow(SmallModel(drafter, 4, sample=True))
    assert torch.equal(ours(model, watch, ids, mask, rule=rule), plain(model, ids, mask))
    assert watch.longest >= 2
    for row in range(4):
        for text, drafted in watch.drafts(row):
            for depth, token in enumerate(drafted):
                law = drafter_law(drafter, text + drafted[:depth], LogitsProcessorList())
                assert token == int(law.argmax())
    assert all(round.draft.q is None for round in watch.rounds)


@pytest.mark.parametrize(
    ("sample", "where"),
    few(
        ((True, "call"), (True, "drafter"), (False, "call"), (False, "its config")),
        *((True, "drafter"), (False, "its config")),
    ),
)
def test_confidence_stops_before_the_unsure_token(sample: bool, where: str) -> None:
    model, threshold = tiny(), 0.5 if sample else 0.3
    drafter = disturbed(model, 0.1)
    ids, mask = prompts(RAGGED)
    law = {"do_sample": True, "seed": 4, "temperature": 0.4, "top_k": 0} if sample else {}
    processors = LogitsProcessorList([TemperatureLogitsWarper(0.4)] if sample else [])
    own = {"confidence": threshold} if where == "drafter" else {}
    call = {"assistant_confidence_threshold": threshold} if where == "call" else {}
    if where.endswith("config"):
        drafter.generation_config.assistant_confidence_threshold = threshold
    watch = Follow(SmallModel(drafter, 4, sample=sample, **own))
    result = ours(model, watch, ids, mask, max_new_tokens=40, **law, **call)
    assert sample or torch.equal(result, plain(model, ids, mask, max_new_tokens=40))
    assert watch.longest >= 2
    lengths = set()
    for row, length in enumerate(RAGGED):
        for text, drafted in watch.drafts(row):
            bests = [float(drafter_law(drafter, text + drafted[:d], processors).max()) for d in range(len(drafted) + 1)]
            assert min(bests[:-1], default=1.0) >= threshold
            if len(drafted) < min(4, length + 40 - len(text) - 1):
                assert bests[-1] < threshold, "it stopped for another reason than its own doubt"
            lengths.add(len(drafted))
    assert {0, 4} < lengths, "some drafts were cut and some were not"


class Fickle(Watch):
    """Count how much is asked for; the drafter's own model is wrong while ``wrong`` is set."""

    def __init__(self, model: PreTrainedModel, right_after: int) -> None:
        oracle = copy.deepcopy(model)
        super().__init__(SmallModel(oracle, costs=CHEAP))
        self.right_after = right_after
        self.forwards = 0
        oracle.lm_head.register_forward_hook(self.spoil)

    def spoil(self, module, args, output):
        self.forwards += 1
        return output if min(self.sequences.new) >= self.right_after else output.roll(1, -1)

    def on_begin(self, sequences) -> None:
        self.sequences = sequences
        super().on_begin(sequences)


@pytest.mark.parametrize("lengths", few(([12], RAGGED), RAGGED))
def test_a_drafter_that_is_never_right_rests(lengths: list[int]) -> None:
    model = tiny()
    ids, mask = prompts(lengths)
    watch = Fickle(model, 10_000)
    assert torch.equal(ours(model, watch, ids, mask, max_new_tokens=200), plain(model, ids, mask, max_new_tokens=200))
    proposed = [sum(round.proposed) for round in watch.rounds]
    assert sum(proposed[:20]) > 0
    assert sum(proposed[-150:]) <= 8 * len(lengths), "almost nothing is asked for"
    extra = CHEAP.draft * watch.forwards
    extra += sum(CHEAP.forward(len(lengths), r.draft.width) / CHEAP.forward(len(lengths), 0) - 1 for r in watch.rounds)
    assert extra < 0.03 * 200, "finding out costs more than 3 % of plain decoding"


@pytest.mark.parametrize("lengths", few(([12], RAGGED), [12]))
def test_a_drafter_that_becomes_right_comes_back(lengths: list[int]) -> None:
    model = tiny()
    ids, mask = prompts(lengths)
    watch = Fickle(model, 60)
    assert torch.equal(ours(model, watch, ids, mask, max_new_tokens=240), plain(model, ids, mask, max_new_tokens=240))
    proposed = [max(round.proposed) for round in watch.rounds]
    assert 0 in proposed[20:60]
    assert proposed[-5:-2] == [8] * 3, "full drafts again at the end"
    # a rest lasts at most as long as all rounds before it, and the first trial that goes well ends it
    assert len(watch.rounds) < 2 * 60 + 180 / 8


def tokenizer_of(words: list[str]) -> PreTrainedTokenizerFast:
    model = WordLevel({word: place for place, word in enumerate(words)}, unk_token=words[0])
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), unk_token=words[0])


WORDS = [f"w{place}" for place in range(64)]


def test_vocabularies() -> None:
    target = tokenizer_of(WORDS)
    for same in (target, *map(tokenizer_of, (WORDS, [*WORDS, "more", "and more"], WORDS[:50]))):
        check_vocabularies(target, same)
    swapped = [*WORDS]
    swapped[7], swapped[31] = swapped[31], swapped[7]
    with pytest.raises(IncompatibleDrafter, match=r"id 7 is 'w7' for the target and 'w31' for the drafter"):
        check_vocabularies(target, tokenizer_of(swapped))


def test_vocabularies_are_compared_before_any_token() -> None:
    model = tiny()
    ids, _ = prompts([12])
    forwards = positions_seen(model)

    def call(words: list[str]):
        drafter = SmallModel(disturbed(model), 3, tokenizer=tokenizer_of(words))
        loop = SpeculativeDecoding(drafter, tokenizer=tokenizer_of(WORDS))
        return plain(model, ids, custom_generate=loop)

    with pytest.raises(IncompatibleDrafter, match="id 1 "):
        call([WORDS[0], WORDS[2], WORDS[1], *WORDS[3:]])
    assert not forwards
    assert call(WORDS).speculation.num_accepted_tokens > 0


@pytest.mark.parametrize("rows", [[12], RAGGED])
def test_drafter_in_another_dtype(rows: list[int]) -> None:
    model = tiny()
    drafter = copy.deepcopy(model).to(torch.bfloat16)
    ids, mask = prompts(rows)
    for sample in (False, True):
        watch = Watch(SmallModel(drafter, 4, sample=sample))
        assert torch.equal(ours(model, watch, ids, mask), plain(model, ids, mask))
        assert watch.longest >= 3
    law = {"do_sample": True, "seed": 1, "temperature": 0.5, "rule": "gumbel"}
    assert torch.equal(ours(model, watch, ids, mask, **law), ours(model, None, ids, mask, **law))
    assert drafter.dtype == torch.bfloat16


def test_used_again_and_for_another_target_it_starts_clean() -> None:
    first, second = tiny(), tiny(5)
    drafter = SmallModel(copy.deepcopy(first), 4)
    watch = Watch(drafter)
    for lengths, model in (([12], first), (RAGGED, first), ([9, 3], second), ([12], first)):
        ids, mask = prompts(lengths)
        result = ours(model, watch, ids, mask)
        assert torch.equal(result, plain(model, ids, mask))
        fresh = ours(model, SmallModel(copy.deepcopy(first), 4), ids, mask).speculation
        assert result.speculation.total == fresh.total, "what it learned in an earlier call leaks into this one"
        assert (watch.longest == 4) == (model is first)


@pytest.mark.parametrize("sampled", [False, True])
def test_target_drafts_for_itself(sampled: bool) -> None:
    model = build("mistral")
    ids, mask = prompts(RAGGED)
    law = {"do_sample": True, "seed": 6, "temperature": 0.5} if sampled else {}
    watch = Watch(SmallModel(model, 3, sample=False))
    expected = ours(model, None, ids, mask, **law) if sampled else plain(model, ids, mask)
    assert torch.equal(ours(model, watch, ids, mask, **law), expected)
    assert watch.longest == 3
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("number", [0, -1])
def test_draft_length_below_one_is_refused(number: int) -> None:
    model = tiny()
    ids, _ = prompts([12])
    for own, asked in ((None, number), (number, None)):
        with pytest.raises(SpecGenError, match="num_assistant_tokens"):
            ours(model, SmallModel(disturbed(model), own), ids, num_assistant_tokens=asked)


def test_models_without_rows_of_their_own_are_refused_as_drafters() -> None:
    model = tiny()
    ids, _ = prompts([12])
    mamba = MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4))
    with pytest.raises(SpecGenError, match="Mamba"):
        ours(model, SmallModel(mamba, 3), ids)
