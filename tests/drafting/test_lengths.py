"""Draft lengths asked by the call, a config or the drafter, seen at the target's door; no config is touched."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from support_features import unchanged
from tiny import disturbed, ours, plain, prompts, some, texts_of, tiny
from transformers import GenerationConfig

from hf_specgen import Costs, PromptLookup, SmallModel, SpecGenError, SpeculativeDecoding, enable
from hf_specgen.drafting.drafter import Drafter
from hf_specgen.models.target import Target

ONE, FOUR = [12], [9, 4, 12, 7]
TOKENS = 40


class Widths(list):
    """Hold, per round, how many draft tokens of each row the target was asked to score; ``rooms``: how many it may."""

    def __init__(self) -> None:
        self.rooms: list[list[int]] = []

    def clear(self) -> None:
        super().clear()
        self.rooms.clear()


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> Iterator[Widths]:
    """Watch the target's door."""
    seen = Widths()
    score = Target.score

    def recorded(self: Target, draft):
        assert draft.width == max(draft.n_valid.tolist()), "no pass is wider than its longest draft"
        seen.append(draft.n_valid.tolist())
        seen.rooms.append(self.sequences.room)
        return score(self, draft)

    monkeypatch.setattr(Target, "score", recorded)
    yield seen


def perfect(kind: str, model, ids, mask, tokens: int | None = None) -> Drafter:
    """Build a drafter that is always right, so that only the asked length and the room bound its drafts."""
    if kind == "small":
        return SmallModel(copy.deepcopy(model), tokens)
    return PromptLookup(tokens, corpus=texts_of(plain(model, ids, mask, max_new_tokens=TOKENS + 30), mask))


def constant(tokens: int) -> list[int]:
    """Return the widths of a perfect drafter of constant length: one token of the budget is always the target's."""
    left, found = TOKENS - 1, []
    while left:
        found.append(min(tokens, left - 1))
        left -= found[-1] + 1
    return found


@pytest.mark.parametrize(
    ("where", "tokens", "rows"),
    some(
        ("call", "config", "model", "drafter", "call and all others", "constant"),
        (1, 3, 20),
        (("lookup", FOUR), ("small", ONE), ("small", FOUR)),
    ),
)
def test_a_number_is_a_constant_length(where: str, tokens: int, rows: tuple[str, list[int]], widths) -> None:
    kind, lengths = rows
    if where in ("config", "model"):
        tokens = min(tokens, 19)  # 20 is transformers' own default there and says nothing
    model = tiny()
    ids, mask = prompts(lengths)
    wanted = plain(model, ids, mask, max_new_tokens=TOKENS)
    own = {"drafter": tokens, "call and all others": 7}.get(where)
    drafter = perfect(kind, model, ids, mask, own)
    settings: dict[str, object] = {"max_new_tokens": TOKENS}
    if where in ("call", "call and all others"):
        settings["num_assistant_tokens"] = tokens
    if where == "constant":
        settings.update(num_assistant_tokens=tokens, num_assistant_tokens_schedule="constant")
    if where in ("model", "call and all others"):
        model.generation_config.num_assistant_tokens = tokens if where == "model" else 5
    if where == "config":
        config = copy.deepcopy(model.generation_config)
        config.update(num_assistant_tokens=tokens, max_new_tokens=TOKENS, do_sample=False)
        settings = {"generation_config": config}
    with unchanged(model):
        found = model.generate(ids, attention_mask=mask, custom_generate=SpeculativeDecoding(drafter), **settings)
    assert torch.equal(found, wanted)
    # every row drafts as many tokens as asked, or all that its budget leaves beside the target's own
    assert widths == [[min(tokens, room) for room in rooms] for rooms in widths.rooms]
    assert found.speculation.tokens_per_round > 1.4 if tokens > 1 else max(map(max, widths)) == 1
    if kind == "small":
        assert [max(row) for row in widths] == constant(tokens)


def test_the_small_models_own_generation_config_is_asked_last(widths) -> None:
    model, small = tiny(), tiny()
    ids, mask = prompts(ONE)
    small.generation_config.num_assistant_tokens = 3
    enable(model)
    with unchanged(model, small):
        ours(model, SmallModel(small), ids, mask, max_new_tokens=TOKENS)
        assert [row[0] for row in widths] == constant(3)
        widths.clear()
        plain(model, ids, mask, assistant_model=small, max_new_tokens=TOKENS)
        assert [row[0] for row in widths] == constant(3)
        widths.clear()
        ours(model, SmallModel(small, 5), ids, mask, max_new_tokens=TOKENS)
        assert [row[0] for row in widths] == constant(5)
        widths.clear()
        ours(model, SmallModel(small, 5), ids, mask, max_new_tokens=TOKENS, num_assistant_tokens=2)
        assert [row[0] for row in widths] == constant(2)


@pytest.mark.parametrize("where", ["call", "config", "drafter"])
def test_the_heuristic_schedule_grows_after_success_and_shrinks_after_failure(where: str, widths) -> None:
    model, small = tiny(), tiny()
    ids, mask = prompts(ONE)
    asked = {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "heuristic"}
    settings = asked if where == "call" else {}
    if where == "config":
        model.generation_config.update(**asked)
    if where == "drafter":
        small.generation_config.update(**asked)
    ours(model, SmallModel(small), ids, mask, max_new_tokens=60, **settings)
    assert [row[0] for row in widths][:5] == [3, 5, 7, 9, 11]
    widths.clear()
    with torch.no_grad():
        small.lm_head.weight.neg_()  # always wrong
    out = ours(model, SmallModel(small), ids, mask, max_new_tokens=20, **settings)
    assert out.speculation.num_accepted_tokens == 0
    assert [row[0] for row in widths] == [3, 2, *[1] * 16, 0]


def test_the_heuristic_schedule_is_kept_row_by_row(widths) -> None:
    model = tiny()
    ids, mask = prompts([12, 9])
    texts = texts_of(plain(model, ids, mask, max_new_tokens=60), mask)
    wrong = [token % 63 + 1 for token in texts[1]]
    pairs = [[token, other] for token, other in zip(texts[1], wrong, strict=True)]
    drafter = PromptLookup(4, max_ngram=1, corpus=[texts[0], *pairs])
    out = ours(model, drafter, ids, mask, max_new_tokens=60, num_assistant_tokens_schedule="heuristic")
    assert torch.equal(out, plain(model, ids, mask, max_new_tokens=60))
    lengths = [4, 4]
    rows = out.speculation.rows
    assert rows[0].num_accepted_tokens > rows[1].num_accepted_tokens
    assert {row[0] for row in widths} != {row[1] for row in widths}
    assert max(row[0] for row in widths) > lengths[0], "a row that succeeds drafts more"


def sharp(model, factor: float = 4.0):
    """Copy a model that likes the same tokens much more."""
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.lm_head.weight.mul_(factor)
    return copied


@pytest.mark.parametrize(
    "where",
    ["call", "drafter", *(pytest.param(w, marks=pytest.mark.slow) for w in ("config", "model", "drafter's config"))],
)
def test_an_unsure_drafter_stops_early(where: str, widths) -> None:
    model = tiny()
    small = sharp(disturbed(model))
    ids, mask = prompts(FOUR)
    wanted = plain(model, ids, mask)

    def run(threshold: float | None) -> list[list[int]]:
        widths.clear()
        target, draft = copy.deepcopy(model), copy.deepcopy(small)
        settings = {"assistant_confidence_threshold": threshold} if where == "call" else {}
        if where == "config":
            config = GenerationConfig(assistant_confidence_threshold=threshold, pad_token_id=0)
            settings = {"generation_config": config}
        if where == "model":
            target.generation_config.assistant_confidence_threshold = threshold
        if where == "drafter's config":
            draft.generation_config.assistant_confidence_threshold = threshold
        own = threshold if where == "drafter" else None
        with unchanged(target, draft):
            out = ours(target, SmallModel(draft, 6, confidence=own), ids, mask, **settings)
        assert torch.equal(out, wanted)
        return [list(row) for row in widths]

    free, half, strict = run(None), run(0.6), run(0.9999)
    assert max(max(row) for row in free[:3]) == 6
    drafted = [sum(map(sum, found)) for found in (free, half, strict)]
    assert drafted[0] > drafted[1] > drafted[2]
    assert any(0 < count < 6 for row in half[:5] for count in row), "a chain may end inside"


def test_the_threshold_is_the_probability_of_the_best_token(widths) -> None:
    """Recompute each draft with plain forwards of the drafter, up to its first unsure token."""
    model = tiny()
    small = sharp(disturbed(model))
    ids, mask = prompts(ONE)
    text = plain(model, ids, mask)[0].tolist()
    out = ours(model, SmallModel(small, 5, confidence=0.5), ids, mask)
    place = len(ids[0]) + 1
    for row in widths:
        draft: list[int] = []
        while len(draft) < min(5, len(text) - place - 1):
            law = small(input_ids=torch.tensor([text[:place] + draft])).logits[0, -1].softmax(-1)
            if law.max() < 0.5:
                break
            draft.append(int(law.argmax()))
        assert row[0] == len(draft)
        matched = next((i for i, token in enumerate(draft) if token != text[place + i]), len(draft))
        place += matched + 1
    assert place == len(text) and out.speculation.num_accepted_tokens > 0


@pytest.mark.parametrize("schedule", ["adaptive", "heuristic"])
def test_a_schedule_asked_in_the_call_is_not_remembered(schedule: str, widths) -> None:
    model = tiny()
    small = sharp(model, 50.0)
    ids, mask = prompts(ONE)
    drafter = SmallModel(small, 3, costs=Costs(slope=0.0, draft=0.001))
    config = copy.deepcopy(model.generation_config)
    config.update(max_new_tokens=TOKENS, do_sample=False)
    before = copy.deepcopy(config.to_dict())
    loop = SpeculativeDecoding(drafter)
    given = {"num_assistant_tokens": 6, "num_assistant_tokens_schedule": schedule, "generation_config": config}
    with unchanged(model, small):
        model.generate(ids, attention_mask=mask, custom_generate=loop, assistant_confidence_threshold=0.3, **given)
        assert max(row[0] for row in widths) > 3
        widths.clear()
        model.generate(ids, attention_mask=mask, custom_generate=loop, generation_config=config)
        assert [row[0] for row in widths] == constant(3)
        with pytest.raises(SpecGenError, match="one of constant"):
            model.generate(ids, custom_generate=loop, num_assistant_tokens_schedule="x", generation_config=config)
    assert config.to_dict() == before
    enable(model)
    with unchanged(model, small):
        model.generate(ids, attention_mask=mask, assistant_model=drafter, prompt_lookup_num_tokens=9, **given)
    assert config.to_dict() == before


@pytest.mark.parametrize("lengths", [ONE, FOUR])
def test_prompt_lookup_num_tokens_on_an_enabled_model_is_our_lookup(lengths: list[int], widths) -> None:
    model = tiny()
    ids, mask = prompts(lengths)
    wanted = plain(model, ids, mask, max_new_tokens=60)
    enable(model)
    with unchanged(model):
        out = plain(model, ids, mask, max_new_tokens=60, prompt_lookup_num_tokens=4, max_matching_ngram_size=2)
    assert torch.equal(out, wanted) and out.speculation.drafter == "PromptLookup"
    assert max(max(row) for row in widths) == 4
    widths.clear()
    model.generation_config.prompt_lookup_num_tokens = 2
    with unchanged(model):
        assert torch.equal(plain(model, ids, mask, max_new_tokens=60), wanted)
    assert max(max(row) for row in widths) == 2


@pytest.mark.parametrize("tokens", [3, 20])
def test_an_enabled_model_honours_the_calls_config_also_at_the_stock_default(tokens: int, widths) -> None:
    model = enable(tiny())
    ids, mask = prompts(ONE)
    config = GenerationConfig(num_assistant_tokens=tokens, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
    drafter = perfect("lookup", model, ids, mask, None)
    model.generate(ids, attention_mask=mask, assistant_model=drafter, generation_config=config)
    assert widths == [[min(tokens, room) for room in rooms] for rooms in widths.rooms]
    assert max(map(max, widths)) == min(tokens, TOKENS - 2)
    widths.clear()
    model.generate(ids, attention_mask=mask, assistant_model=drafter, generation_config=config, num_assistant_tokens=2)
    assert max(map(max, widths)) == 2, "the call's own number comes first"
