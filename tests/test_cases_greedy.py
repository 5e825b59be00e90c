"""User cases C01, C02, C04, C05 and C06: greedy text, ends and budgets, with every drafter."""

from __future__ import annotations

import pytest
import torch
from tiny import (
    KINDS,
    LEARNED,
    TREES,
    Keep,
    RandomTree,
    Watch,
    assert_ran,
    build,
    disturbed,
    drafter_of,
    few,
    ours,
    plain,
    prompts,
    some,
    texts_of,
    tiny,
    with_learned,
)
from transformers import MaxLengthCriteria

from hf_specgen import PromptLookup, SmallModel, SpeculativeDecoding

ROWS = [5, 17, 11, 24]
GREEDY = ("lookup", "branches", "small", "tree")  # for a greedy target a sampling drafter drafts greedily: see C01
OWN = ("lookup", "branches", "small", "sampled", "tree")
RUNS = ((ROWS, GREEDY[2:]), ([12], GREEDY[:2]), (ROWS, GREEDY[:2]), ([12], GREEDY[2:]))


@pytest.fixture(scope="module")
def target():
    return tiny()


@pytest.fixture(scope="module")
def twelve() -> torch.Tensor:
    """Return P12."""
    torch.manual_seed(3)
    return torch.randint(1, 64, (1, 12))


@pytest.fixture(scope="module")
def ref(text: list[int]) -> list[int]:
    return text[12:]


@pytest.fixture(scope="module")
def text(target, twelve: torch.Tensor) -> list[int]:
    return plain(target, twelve, max_new_tokens=40)[0].tolist()


@pytest.mark.parametrize(
    "quality", few(("D+", "D-", "O", *KINDS), "D-", "O", "small", "branches", "tree", "eagle dynamic")
)
def test_c01_greedy_sweep(quality: str, target, twelve: torch.Tensor) -> None:
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), twelve], 1)
    cases = {
        "twelve": (twelve, torch.ones_like(twelve)),
        "one token": (twelve[:, :1], torch.ones(1, 1, dtype=torch.long)),
        "five pads": (padded, (torch.arange(17) >= 5).long()[None]),
    }
    small = {"D+": disturbed(target), "D-": tiny(9, layers=1), "O": target}
    longest = off_spine = 0
    for name, (ids, mask) in cases.items():
        expected = plain(target, ids, mask, max_new_tokens=40)
        texts = texts_of(expected, mask)
        watch = Watch(SmallModel(small[quality], 8)) if quality in small else drafter_of(quality, target, texts)
        assert torch.equal(ours(target, watch, ids, mask, max_new_tokens=40), expected), name
        longest, off_spine = max(longest, watch.longest), off_spine + watch.off_spine
    assert longest >= 2 or quality == "D-"
    assert bool(off_spine) == (quality in TREES)


def first_gap(result: torch.Tensor, expected, start: int) -> list[tuple[int, float]]:
    """Return, per row that differs, the first new token that does and plain decoding's top-2 logit gap there."""
    found = []
    for row in range(len(result)):
        differs = (result[row] != expected.sequences[row]).nonzero().flatten().tolist()
        if differs:
            best = expected.logits[differs[0] - start][row].float().topk(2).values
            found.append((differs[0] - start, float(best[0] - best[1])))
    return found


@pytest.mark.parametrize("kind", few(KINDS, "small", "branches", "eagle dynamic"))
def test_c01_bfloat16_differs_only_at_near_ties(kind: str, target) -> None:
    model = build("llama").bfloat16()
    torch.manual_seed(4)
    ids = torch.randint(1, 64, (20, 12))
    expected = plain(model, ids, max_new_tokens=40, return_dict_in_generate=True, output_logits=True)
    watch = drafter_of(kind, model, expected.sequences.tolist())
    gaps = first_gap(ours(model, watch, ids, max_new_tokens=40), expected, 12)
    assert_ran(watch, kind)
    assert all(gap <= 0.05 for _, gap in gaps), gaps
    assert len(gaps) < 10, "most rows are identical"


def test_c01_the_bfloat16_check_can_fail() -> None:
    model = build("llama").bfloat16()
    torch.manual_seed(4)
    ids = torch.randint(1, 64, (20, 12))
    expected = plain(model, ids, max_new_tokens=40, return_dict_in_generate=True, output_logits=True)
    other = plain(build("llama", seed=1).bfloat16(), ids, max_new_tokens=40)
    assert max(gap for _, gap in first_gap(other, expected, 12)) > 0.05


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_c02_eos_anywhere(every: bool, target, twelve: torch.Tensor, text: list[int], ref: list[int]) -> None:
    ends: list[int | list[int]] = [*ref[1:30], [ref[6], ref[15]]]
    longest = dict.fromkeys(GREEDY, 0)
    for place, eos in enumerate(ends):
        settings = {"eos_token_id": eos, "max_new_tokens": 40}
        if place % 3 == 0:
            settings["pad_token_id"] = eos if isinstance(eos, int) else eos[0]
        expected = plain(target, twelve, **settings)
        assert int(expected[0, -1]) in (eos if isinstance(eos, list) else [eos])
        for kind in GREEDY if every else (GREEDY[place % 4], GREEDY[(place + place // 4 % 3 + 1) % 4]):
            watch, streamer = drafter_of(kind, target, [text]), Keep()
            loop = SpeculativeDecoding(watch, streamer=streamer)
            assert torch.equal(plain(target, twelve, custom_generate=loop, **settings), expected), (kind, eos)
            assert streamer.tokens == expected[0].tolist()
            assert streamer.ended == 1
            longest[kind] = max(longest[kind], watch.longest)
    assert min(longest.values()) >= 2


@pytest.mark.parametrize("kind", few((*GREEDY, *LEARNED), "small", "branches", "eagle dynamic"))
def test_c02_eos_in_a_batch(kind: str, target) -> None:
    ids, mask = prompts(ROWS)
    free = plain(target, ids, mask, max_new_tokens=30)
    texts = texts_of(free, mask)
    new = free[:, 24:].tolist()
    cut_inside = 0
    for eos in ([new[0][4]], [new[1][7], new[2][3]], [new[3][11], new[0][20]], [row[9] for row in new]):
        settings = {"eos_token_id": eos, "pad_token_id": eos[0], "max_new_tokens": 30}
        watch = drafter_of(kind, target, texts)
        result = ours(target, watch, ids, mask, **settings)
        assert torch.equal(result, plain(target, ids, mask, **settings)), eos
        assert_ran(watch, kind)
        total = result.speculation.total
        cut_inside += total.num_accepted_tokens + total.num_rounds + 4 - total.num_tokens
    assert cut_inside > 0, "no row ended inside a block"


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [
        *some(("lookup", "small"), (1, 3, 10, 20)),
        ("branches", 3),
        ("tree", 3),
        ("tree", 10),
    ],
)
def test_c04_exact_budget(kind: str, tokens: int, target, twelve: torch.Tensor, text: list[int]) -> None:
    watch = drafter_of(kind, target, [text], tokens)
    widest = 0
    for budget in range(1, 21):
        limit = {"max_new_tokens": budget} if budget % 2 else {"max_length": 12 + budget}
        assert ours(target, watch, twelve, **limit)[0].tolist() == text[: 12 + budget]
        widest = max(widest, watch.width)
    assert widest >= min(tokens, 18)


@pytest.mark.parametrize("kind", with_learned(GREEDY))
def test_c04_no_position_beyond_the_models_limit(kind: str) -> None:
    model = build("gpt2", max_position_embeddings=40)
    seen: list[int] = []
    longest = 0
    handle = model.transformer.wpe.register_forward_pre_hook(lambda _, args: seen.append(int(args[0].max())))
    for lengths in ([28], [28, 3, 14, 21]):
        ids, mask = prompts(lengths)
        expected = plain(model, ids, mask, max_new_tokens=12)
        watch = drafter_of(kind, model, texts_of(expected, mask), 8)
        seen.clear()
        assert torch.equal(ours(model, watch, ids, mask, max_new_tokens=12), expected)
        longest = max(longest, watch.longest)
        assert 37 <= max(seen) < 40
    handle.remove()
    assert longest >= 2


def test_c04_a_prompt_of_500_in_a_model_of_512(target) -> None:
    ids, mask = prompts([500])
    expected = plain(target, ids, mask, max_length=512)
    seen: list[int] = []
    handle = target.model.rotary_emb.register_forward_pre_hook(
        lambda _, args, named: seen.append(int(named["position_ids"].max())), with_kwargs=True
    )
    for kind in GREEDY:
        watch = drafter_of(kind, target, expected.tolist(), 10)
        assert torch.equal(ours(target, watch, ids, mask, max_length=512), expected)
        assert watch.longest >= 2
    handle.remove()
    assert 508 <= max(seen) < 512


@pytest.mark.parametrize(("limit", "kind"), some((5, 24, 25, 29), (*GREEDY, *LEARNED)))
def test_c04_a_callers_own_length_limit(kind: str, limit: int, target) -> None:
    """Criteria are asked after a token, so a limit within the prompt leaves one."""
    ids, mask = prompts(ROWS)
    texts = texts_of(plain(target, ids, mask), mask)
    asked = {"stopping_criteria": [MaxLengthCriteria(limit)], "return_dict_in_generate": True, "output_scores": True}
    expected = plain(target, ids, mask, **asked)
    assert expected.sequences.shape[1] == max(limit, 25)
    watch = drafter_of(kind, target, texts)
    result = ours(target, watch, ids, mask, **asked)
    assert torch.equal(result.sequences, expected.sequences)
    assert len(result.scores) == len(expected.scores)
    assert watch.longest >= 2 or limit < 29


# Each takes the first plain tokens of the row, so that it changes something.
HISTORY = {
    "repetition": lambda new: {"repetition_penalty": 1.5},
    "no repeat": lambda new: {"no_repeat_ngram_size": 2},
    "bad words": lambda new: {"bad_words_ids": [[new[2]], [new[8], new[9]]]},
    "suppressed": lambda new: {"suppress_tokens": [5, 6, 7, new[0], new[3]]},
    "bias": lambda new: {"sequence_bias": [[[5], 5.0], [[new[4], new[5]], -9.0]]},
    "decay": lambda new: {"exponential_decay_length_penalty": (5, 1.5), "eos_token_id": 9},
    "forced eos": lambda new: {"forced_eos_token_id": 9},
    "begin suppressed": lambda new: {"begin_suppress_tokens": [new[0]]},
    "prompt penalty": lambda new: {"encoder_repetition_penalty": 3.0},
    "prompt n-grams": lambda new: {"encoder_no_repeat_ngram_size": 1},
    "allowed": lambda new: {
        "prefix_allowed_tokens_fn": lambda row, ids: [(3 * row + len(ids) + k) % 63 + 1 for k in range(9)]
    },
    "watermark": lambda new: {"watermarking_config": {"bias": 4.0, "seeding_scheme": "selfhash", "context_width": 2}},
    "all": lambda new: {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 9,
        "eos_token_id": new[4],
    },
}


@pytest.mark.parametrize(
    ("name", "lengths", "kinds"),
    few(
        [(name, *run) for name in HISTORY for run in RUNS],
        *((name, *RUNS[place % 2]) for place, name in enumerate(HISTORY)),
    ),
)
def test_c06_history_processors(name: str, lengths: list[int], kinds: tuple[str, ...], target) -> None:
    ids, mask = prompts(lengths)
    free = plain(target, ids, mask, max_new_tokens=20)
    settings = {"max_new_tokens": 20, **HISTORY[name](free[0, ids.shape[1] :].tolist())}
    expected = plain(target, ids, mask, **settings)
    assert not torch.equal(expected, free), "the processor did nothing"
    for kind in kinds:
        watch = drafter_of(kind, target, texts_of(expected, mask))
        assert torch.equal(ours(target, watch, ids, mask, **settings), expected), (lengths, kind)
        assert watch.longest >= 2 or len(lengths) == 1, kind


@pytest.mark.parametrize("kind", with_learned(GREEDY))
def test_c06_forced_first_token(kind: str, target) -> None:
    ids = torch.tensor([[7], [21], [7], [40]])
    settings = {"forced_bos_token_id": 9, "max_new_tokens": 20}
    expected = plain(target, ids, **settings)
    assert expected[:, 1].tolist() == [9] * 4
    watch = drafter_of(kind, target, expected.tolist())
    assert torch.equal(ours(target, watch, ids, **settings), expected)
    assert watch.longest >= 2


@pytest.mark.parametrize(("name", "sample"), some(("repetition", "no repeat", "bias", "allowed"), (False, True)))
def test_c06_an_identical_drafter_is_always_right(name: str, sample: bool, target, ref: list[int]) -> None:
    """The processors reach the drafter too: with the target as drafter nothing is refused."""
    ids, mask = prompts(ROWS)
    result = ours(target, SmallModel(target, 4, sample=sample), ids, mask, do_sample=sample, **HISTORY[name](ref))
    assert result.speculation.total.draft_acceptance_rate == 1.0


@pytest.mark.parametrize("place", [4, *(pytest.param(place, marks=pytest.mark.slow) for place in (1, 9))])
def test_c05_minimum_lengths(place: int, target, twelve: torch.Tensor, text: list[int]) -> None:
    longest = dict.fromkeys(GREEDY, 0)
    for least in (*({"min_new_tokens": n} for n in (3, 7, 11, 20)), {"min_length": 25}):
        settings = {"eos_token_id": text[12 + place], "max_new_tokens": 30, **least}
        expected = plain(target, twelve, **settings)
        found = (expected[0, 12:] == text[12 + place]).nonzero().flatten().tolist()
        assert not found or found[0] >= least.get("min_new_tokens", 13)
        for kind in GREEDY:
            watch = drafter_of(kind, target, expected.tolist())
            assert torch.equal(ours(target, watch, twelve, **settings), expected), (kind, settings)
            longest[kind] = max(longest[kind], watch.longest)
    assert min(longest.values()) >= 2


@pytest.mark.parametrize("kind", with_learned(GREEDY))
def test_c05_minimum_lengths_in_a_batch(kind: str, target, ref: list[int]) -> None:
    ids, mask = prompts(ROWS)
    settings = {"eos_token_id": ref[:10], "min_new_tokens": 9, "max_new_tokens": 20}
    expected = plain(target, ids, mask, **settings)
    watch = drafter_of(kind, target, texts_of(expected, mask))
    assert torch.equal(ours(target, watch, ids, mask, **settings), expected)
    assert watch.longest >= 2


def test_the_history_check_can_fail(target, ref: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: processors that see the committed text instead of each node's own prefix."""
    monkeypatch.setattr(
        "hf_specgen.models.target.Scores._prefix", lambda self, owner, row, node: self.sequences.prefix(owner)
    )
    ids, mask = prompts(ROWS)
    settings = {"no_repeat_ngram_size": 2}
    expected = plain(target, ids, mask, **settings)
    tree = RandomTree(texts_of(expected, mask))
    assert not torch.equal(ours(target, tree, ids, mask, **settings), expected)
    lookup = PromptLookup(4, corpus=texts_of(expected, mask))
    assert not torch.equal(ours(target, lookup, ids, mask, **settings), expected)
