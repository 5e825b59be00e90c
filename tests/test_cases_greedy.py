"""Checks C01, C02, C04, C05 and C06 of docs/user_cases: greedy text, ends and budgets, with every drafter."""

from __future__ import annotations

import pytest
import torch
from tiny import (
    KINDS,
    Keep,
    RandomTree,
    Watch,
    assert_ran,
    build,
    disturbed,
    drafter_of,
    ours,
    plain,
    prompts,
    texts_of,
    tiny,
)

from hf_specgen import PromptLookup, SmallModel, SpeculativeDecoding

ROWS = [5, 17, 11, 24]


@pytest.fixture(scope="module")
def target():
    return tiny()


@pytest.fixture(scope="module")
def twelve() -> torch.Tensor:
    """Return P12."""
    torch.manual_seed(3)
    return torch.randint(1, 64, (1, 12))


@pytest.fixture(scope="module")
def ref(target, twelve: torch.Tensor) -> list[int]:
    return plain(target, twelve, max_new_tokens=40)[0, 12:].tolist()


def watch_for(kind: str, target, twelve: torch.Tensor, tokens: int = 4) -> Watch:
    text = plain(target, twelve, max_new_tokens=40)[0].tolist()
    return drafter_of(kind, target, [text], tokens)


@pytest.mark.parametrize("quality", ["D+", "D-", "O", *KINDS])
def test_c01_greedy_sweep(quality: str, target, twelve: torch.Tensor) -> None:
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), twelve], 1)
    cases = {
        "twelve": (twelve, torch.ones_like(twelve)),
        "one token": (twelve[:, :1], torch.ones(1, 1, dtype=torch.long)),
        "five pads": (padded, (torch.arange(17) >= 5).long()[None]),
    }
    small = {"D+": disturbed(target), "D-": tiny(9, layers=1), "O": target}
    for name, (ids, mask) in cases.items():
        expected = plain(target, ids, mask, max_new_tokens=40)
        text = texts_of(expected, mask)
        watch = Watch(SmallModel(small[quality], 8)) if quality in small else drafter_of(quality, target, text, 8)
        assert torch.equal(ours(target, watch, ids, mask, max_new_tokens=40), expected), name
        if quality in KINDS:
            assert_ran(watch, quality)
        else:
            assert quality == "D-" or watch.longest >= 2


def first_gap(result: torch.Tensor, expected, start: int) -> list[tuple[int, float]]:
    """Return, per row that differs, the first new token that does and plain decoding's top-2 logit gap there."""
    found = []
    for row in range(len(result)):
        differs = (result[row] != expected.sequences[row]).nonzero().flatten().tolist()
        if differs:
            best = expected.logits[differs[0] - start][row].float().topk(2).values
            found.append((differs[0] - start, float(best[0] - best[1])))
    return found


@pytest.mark.parametrize("kind", KINDS)
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


@pytest.mark.parametrize("kind", KINDS)
def test_c02_eos_anywhere(kind: str, target, twelve: torch.Tensor, ref: list[int]) -> None:
    ends: list[int | list[int]] = [*ref[1:30], [ref[6], ref[15]]]
    longest = 0
    for place, eos in enumerate(ends):
        settings = {"eos_token_id": eos, "max_new_tokens": 40}
        if place % 3 == 0:
            settings["pad_token_id"] = eos if isinstance(eos, int) else eos[0]
        watch, streamer = watch_for(kind, target, twelve), Keep()
        loop = SpeculativeDecoding(watch, streamer=streamer)
        result = plain(target, twelve, custom_generate=loop, **settings)
        assert torch.equal(result, plain(target, twelve, **settings)), eos
        assert int(result[0, -1]) in (eos if isinstance(eos, list) else [eos])
        assert streamer.tokens == result[0].tolist()
        assert streamer.ended == 1
        longest = max(longest, watch.longest)
    assert longest >= 2


@pytest.mark.parametrize("kind", KINDS)
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 3, 10, 20])
def test_c04_exact_budget(kind: str, tokens: int, target, twelve: torch.Tensor, ref: list[int]) -> None:
    widest = 0
    for budget in range(1, 21):
        limit = {"max_new_tokens": budget} if budget % 2 else {"max_length": 12 + budget}
        watch = watch_for(kind, target, twelve, tokens)
        result = ours(target, watch, twelve, **limit)
        assert result[0, 12:].tolist() == ref[:budget]
        widest = max(widest, watch.width)
    assert widest >= tokens if kind != "tree" else widest >= 2


@pytest.mark.parametrize("kind", KINDS)
def test_c04_no_position_beyond_the_models_limit(kind: str) -> None:
    model = build("gpt2", max_position_embeddings=40)
    seen: list[int] = []
    handle = model.transformer.wpe.register_forward_pre_hook(lambda _, args: seen.append(int(args[0].max())))
    for lengths in ([28], [28, 3, 14, 21]):
        ids, mask = prompts(lengths)
        expected = plain(model, ids, mask, max_new_tokens=12)
        watch = drafter_of(kind, model, texts_of(expected, mask), 8)
        seen.clear()
        assert torch.equal(ours(model, watch, ids, mask, max_new_tokens=12), expected)
        assert_ran(watch, kind)
        assert 37 <= max(seen) < 40
    handle.remove()


HISTORY = {
    "repetition": lambda ref: {"repetition_penalty": 1.5},
    "no repeat": lambda ref: {"no_repeat_ngram_size": 2},
    "bad words": lambda ref: {"bad_words_ids": [[ref[2]], [ref[8], ref[9]]]},
    "suppressed": lambda ref: {"suppress_tokens": [5, 6, 7, ref[0], ref[3]]},
    "bias": lambda ref: {"sequence_bias": [[[5], 5.0], [[ref[4], ref[5]], -9.0]]},
    "decay": lambda ref: {"exponential_decay_length_penalty": (5, 1.5), "eos_token_id": ref[3]},
    "forced eos": lambda ref: {"forced_eos_token_id": 9, "max_new_tokens": 17},
    "forced bos": lambda ref: {"forced_bos_token_id": 9},
    "begin suppressed": lambda ref: {"begin_suppress_tokens": [ref[0]]},
    "prompt penalty": lambda ref: {"encoder_repetition_penalty": 1.6},
    "prompt n-grams": lambda ref: {"encoder_no_repeat_ngram_size": 1},
    "allowed": lambda ref: {
        "prefix_allowed_tokens_fn": lambda row, ids: [(3 * row + len(ids) + k) % 63 + 1 for k in range(9)]
    },
    "watermark": lambda ref: {"watermarking_config": {"bias": 4.0, "seeding_scheme": "selfhash", "context_width": 2}},
    "all": lambda ref: {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 9,
        "eos_token_id": ref[4],
    },
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", HISTORY)
def test_c06_history_processors(name: str, kind: str, target, ref: list[int]) -> None:
    for lengths in ([12], ROWS):
        ids, mask = prompts(lengths)
        settings = {"max_new_tokens": 20, **HISTORY[name](ref)}
        expected = plain(target, ids, mask, **settings)
        assert not torch.equal(expected, plain(target, ids, mask, max_new_tokens=20)), "the processor did nothing"
        watch = drafter_of(kind, target, texts_of(expected, mask))
        assert torch.equal(ours(target, watch, ids, mask, **settings), expected), lengths
        if len(lengths) > 1 and kind != "sampled":
            assert_ran(watch, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_c06_an_identical_drafter_is_always_right(kind: str, target, ref: list[int]) -> None:
    """The processors reach the drafter too: with the target as drafter nothing is refused."""
    if kind not in ("small", "sampled"):
        pytest.skip("only models read the processors")
    ids, mask = prompts(ROWS)
    for name in ("repetition", "no repeat", "bias", "allowed"):
        settings = HISTORY[name](ref)
        result = ours(target, SmallModel(target, 4, sample=kind == "sampled"), ids, mask, **settings)
        assert result.speculation.total.draft_acceptance_rate == 1.0, name


@pytest.mark.parametrize("kind", KINDS)
def test_c05_minimum_lengths(kind: str, target, twelve: torch.Tensor, ref: list[int]) -> None:
    for eos in (ref[1], ref[4], ref[9]):
        for least in ({"min_new_tokens": n} for n in (3, 7, 11, 20)):
            settings = {"eos_token_id": eos, "max_new_tokens": 30, **least}
            expected = plain(target, twelve, **settings)
            result = ours(target, drafter_of(kind, target, expected.tolist()), twelve, **settings)
            assert torch.equal(result, expected), settings
            first = (result[0, 12:] == eos).nonzero().flatten().tolist()
            assert not first or first[0] >= least["min_new_tokens"]
        settings = {"eos_token_id": eos, "max_new_tokens": 30, "min_length": 25}
        expected = plain(target, twelve, **settings)
        watch = drafter_of(kind, target, expected.tolist())
        assert torch.equal(ours(target, watch, twelve, **settings), expected)
    assert watch.longest >= 2
    ids, mask = prompts(ROWS)
    settings = {"eos_token_id": ref[:10], "min_new_tokens": 9, "max_new_tokens": 20}
    expected = plain(target, ids, mask, **settings)
    result = ours(target, drafter_of(kind, target, texts_of(expected, mask)), ids, mask, **settings)
    assert torch.equal(result, expected)


def test_the_history_check_can_fail(target, ref: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: processors that see the committed text instead of each node's own prefix."""
    monkeypatch.setattr(
        "hf_specgen.target.Scores._prefix", lambda self, rows, nodes, at: self.sequences.prefix(int(rows[at]))
    )
    ids, mask = prompts(ROWS)
    settings = {"no_repeat_ngram_size": 2}
    expected = plain(target, ids, mask, **settings)
    tree = RandomTree(texts_of(expected, mask))
    assert not torch.equal(ours(target, tree, ids, mask, **settings), expected)
    lookup = PromptLookup(4, corpus=texts_of(expected, mask))
    assert not torch.equal(ours(target, lookup, ids, mask, **settings), expected)
