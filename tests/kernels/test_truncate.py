"""Truncation without a sort keeps, bit by bit, what transformers' warpers keep."""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import prompts, tiny
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

import hf_specgen
from hf_specgen import ops
from hf_specgen.kernels import truncate as module
from hf_specgen.round.warp import Truncation, Warp

INF = math.inf
SIZES = [1, 2, 7, 127, 128, 129, 300, 640, 1000]
Truncate = Callable[..., Tensor]


def warpers(setting: Truncation, tokens: int = 1) -> LogitsProcessorList:
    temperature, top_k, top_p, min_p = setting
    made = [hf.TemperatureLogitsWarper(float(temperature))] if temperature != 1 else []
    made += [hf.TopKLogitsWarper(top_k)] if top_k else []
    made += [hf.TopPLogitsWarper(top_p, min_tokens_to_keep=tokens)] if top_p < 1 else []
    made += [hf.MinPLogitsWarper(min_p, min_tokens_to_keep=tokens)] if min_p else []
    return LogitsProcessorList(made)


def plain(logits: Tensor, setting: Truncation, stable: bool = False) -> Tensor:
    """Call transformers' warpers; with ``stable`` equal logits are sorted by their ids, which torch's sort is not."""
    ids = torch.zeros(len(logits), 1, dtype=torch.long)
    if not stable:
        return warpers(setting)(ids, logits.float())
    with patch("torch.sort", lambda scores, descending: tuple(scores.sort(dim=-1, stable=True))):
        return warpers(setting)(ids, logits.float())


def rows(seed: int, vocab: int) -> Tensor:
    """Smooth, flat, peaked, tied, full of holes, with one survivor, all equal, broken, crowded, with exact sums."""
    source = torch.Generator().manual_seed(seed)
    smooth = torch.randn(12, vocab, generator=source) * torch.tensor([3.0, 0.01, 12.0, *[2.0] * 9]).unsqueeze(1)
    smooth[3] = (smooth[3] * 2).round() / 2
    smooth[4] = smooth[4].round()
    smooth[5, torch.rand(vocab, generator=source) < 0.7] = -INF
    smooth[6] = -INF
    smooth[6, seed % vocab] = -2.5
    smooth[7] = float(seed % 5) - 2
    smooth[8, seed % vocab] = (math.nan, INF, -INF)[seed % 3]
    smooth[9] = (smooth[9].bfloat16() - 40).float()
    smooth[10, vocab // 3 :] *= 1e-3
    smooth[11] = torch.where(torch.arange(vocab) % 2 == 0, 0.0, math.log(3))  # a quarter, if the vocabulary is even
    return smooth


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(nan=-99.0), other.nan_to_num(nan=-99.0)) and one.dtype == other.dtype


SETTINGS = st.builds(
    Truncation,
    st.sampled_from([1.0, 0.8, 0.3, 1.7]),
    st.sampled_from([0, 1, 2, 5, 50, 5000]),
    st.sampled_from([1.0, 0.95, 0.75, 0.5, 0.25, 0.1, 1e-4, 0.0]),
    st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)


@settings(max_examples=150)
@given(seed=st.integers(0, 10_000), vocab=st.sampled_from(SIZES), setting=SETTINGS)
def test_the_kept_sets_are_those_of_transformers(seed: int, vocab: int, setting: Truncation) -> None:
    logits = rows(seed, vocab)
    before = logits.clone()
    assert same(ops.truncate(logits, *setting), plain(logits, setting))
    assert same(logits, before), "the model's logits are not ours to write on"


@pytest.mark.slow
@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    vocab=st.sampled_from([32_000, 50_257, 151_936]),
    setting=SETTINGS,
    spread=st.sampled_from([0.0, 0.1, 1.0, 2.5, 6.0]),
)
def test_large_vocabularies(seed: int, vocab: int, setting: Truncation, spread: float) -> None:
    """Here float32 sums stray far enough to decide about tokens; nearly flat rows are the worst."""
    source = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, vocab, generator=source) * spread
    logits[1] = logits[1].bfloat16().float()
    assert same(ops.truncate(logits, *setting), plain(logits, setting))


def at_the_edge(seed: int) -> tuple[Tensor, Truncation]:
    """Return a row and a ``top_p`` that one of its own float32 sums meets: this machine's rounding decides there."""
    row = 2 * torch.randn(1, 128, generator=torch.Generator().manual_seed(seed))
    sums = row.sort(dim=-1).values.softmax(-1).cumsum(-1)[0]
    place = int((sums < 0.3).sum())
    return row, Truncation(1.0, 0, 1 - float(sums[place]), 0.0)


def battery(truncate: Truncate) -> bool:
    """Tell whether a truncation is right on fixed rows, and where rounding decides."""
    if not all(same(truncate(row, *setting), plain(row, setting)) for row, setting in map(at_the_edge, range(40))):
        return False
    wanted = [(1.0, 0, 0.9, 0.0), (0.7, 5, 1.0, 0.0), (1.0, 20, 0.8, 0.0), (1.0, 0, 1.0, 0.2), (0.8, 40, 0.9, 0.1)]
    wanted += [(1.0, 0, 0.75, 0.0), (1.0, 0, 0.5, 0.0), (1.0, 2, 1.0, 0.0)]
    return all(
        same(truncate(rows(seed, vocab), *setting), plain(rows(seed, vocab), Truncation(*setting)))
        for setting in wanted
        for vocab in (128, 300, 640, 1024)
        for seed in range(3)
    )


MUTATIONS = {
    "ties of the k-th are cut": ("ids[row[ids] >= kth]", "ids[row[ids] > kth]"),
    "one token too many": ("ids[order[removed:]]", "ids[order[max(0, removed - 1) :]]"),
    "the edge is a token off": ("<= near else removed", "<= near else max(0, removed - 1)"),
    "ties at the edge are not asked about": ("if removed and values[removed - 1] == values[removed]", "if False"),
    "equal logits are sorted the other way round": (
        "scores.sort(dim=-1)",
        "(each.flip(-1) for each in scores.sort(dim=-1, descending=True, stable=True))",
    ),
    "the edge itself is cut": ("row[ids[values == least]] = least", "pass"),
    "the tail strip is forgotten": ("if not len(tail)", "if True"),
    "mass below the candidates is forgotten": ("below = total - float(weights.sum())", "below = 0.0"),
    "bins below the edge are forgotten": ("float(reached[chosen - 1]) if chosen else below", "below"),
    "the unrounded sum decides": ("return None if edge - last <= near or", "return None if False and"),
    "min-p of the wrong best": ("best + math.log(min_p)", "math.log(min_p)"),
}


def test_the_battery_passes_and_reaches_every_path() -> None:
    calls = []
    names = ("_cut_list", "_cut_mass", "_cut_ratio", "_formula")
    watched = {name: vars(module)[name] for name in names}

    def watch(name: str) -> Callable[..., object]:
        return lambda *args: calls.append(name) or watched[name](*args)

    with patch.multiple(module, **{name: watch(name) for name in names}):
        assert battery(module.truncate)
    assert set(calls) == set(names)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutant_fails_the_battery(name: str) -> None:
    old, new = MUTATIONS[name]
    text = inspect.getsource(module)
    assert text.count(old) == 1, f"the control no longer fits the source: {old!r}"
    bent = types.ModuleType(module.__name__)
    exec(compile(text.replace(old, new), module.__name__, "exec"), bent.__dict__)
    assert not battery(bent.truncate)


def sixteen_bit_rows(vocab: int, count: int = 6) -> Tensor:
    """Logits as a model in bfloat16 gives them: hundreds are equal at the edge of a nucleus."""
    source = torch.Generator().manual_seed(vocab)
    return (torch.randn(count, vocab, generator=source) * 2.5).bfloat16()


NUCLEI = [Truncation(top_p=0.9), Truncation(0.8, 50, 0.9), Truncation(top_p=0.5), Truncation(0.7, 20, 0.8, 0.05)]


@pytest.mark.parametrize("vocab", [1000, 32_000, 151_936])
def test_of_equal_logits_those_stay_that_transformers_keeps(vocab: int) -> None:
    """The control: a sort that keeps equal logits in order keeps others."""
    logits = sixteen_bit_rows(vocab, 4)
    by_id = 0
    for setting in NUCLEI:
        expected = plain(logits, setting)
        assert same(ops.truncate(logits, *setting), expected)
        by_id += int((plain(logits, setting, stable=True) != expected).any(1).sum())
    unstable = not torch.equal(torch.sort(logits.float()).indices, torch.sort(logits.float(), stable=True).indices)
    assert (by_id > 0) == unstable


def test_every_tie_of_a_tiny_vocabulary() -> None:
    """All rows of five logits that take three values; with forty beside them the sort is no stable one."""
    values = torch.cartesian_prod(*[torch.tensor([0.0, 1.0, 2.0])] * 5)
    for logits in (values, values.repeat(1, 9)):
        for setting in (Truncation(top_p=0.9), Truncation(top_p=0.5), Truncation(1.0, 3, 0.5), Truncation(top_p=1e-3)):
            assert same(ops.truncate(logits, *setting), plain(logits, setting))


SCORE_ONLY = [
    hf.TopKLogitsWarper(50),
    hf.TopPLogitsWarper(0.9),
    hf.TopPLogitsWarper(0.9, min_tokens_to_keep=3),
    hf.TopHLogitsWarper(0.4),
    hf.MinPLogitsWarper(0.1, min_tokens_to_keep=5),
    hf.TypicalLogitsWarper(0.9, min_tokens_to_keep=2),
    hf.EpsilonLogitsWarper(3e-4),
    hf.EtaLogitsWarper(3e-4, device="cpu"),
]


@pytest.mark.parametrize("warper", SCORE_ONLY, ids=lambda warper: type(warper).__name__)
def test_what_a_warper_keeps_of_equal_logits_does_not_depend_on_the_rows_beside(warper: hf.LogitsProcessor) -> None:
    """Plain decoding asks about a row a sequence, a draft about as many as were read: a row must not see the others."""
    logits = sixteen_bit_rows(32_000)
    ids = torch.zeros(6, 1, dtype=torch.long)
    together = warper(ids, logits.float())
    assert (together == -INF).any()
    for row in range(6):
        place = torch.tensor([row])
        made = Warp([warper], 1)(logits[row : row + 1], place, lambda place: ids[:1])
        assert torch.equal(made[0], together[row])


def test_rows_like_a_language_models_need_no_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    """Distinct logits: then transformers' formula has nothing to decide."""
    source = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 50_257, generator=source) * 2.5
    logits[:, 7000:7004] += torch.tensor([18.0, 15.0, 13.0, 12.0])
    monkeypatch.setattr(module, "_formula", None)
    for setting in (Truncation(0.8, 50), Truncation(top_p=0.95), Truncation(0.7, 20, 0.8, 0.01), Truncation(min_p=0.1)):
        expected = warpers(setting)(torch.zeros(4, 1, dtype=torch.long), logits)
        assert torch.equal(ops.truncate(logits, *setting), expected)
        assert (expected == -INF).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    logits, setting = rows(1, 300).to(dtype)[:8], Truncation(0.8, 40, 0.9, 0.02)
    found = ops.truncate(logits, *setting)
    wide = logits if dtype == torch.float64 else logits.float()
    assert same(found, warpers(setting)(torch.zeros(8, 1, dtype=torch.long), wide))


def test_a_row_does_not_see_its_neighbours() -> None:
    logits, setting = rows(2, 640), Truncation(0.9, 0, 0.9, 0.01)
    together = ops.truncate(logits, *setting)
    alone = torch.cat([ops.truncate(logits[i : i + 1], *setting) for i in range(len(logits))])
    assert same(together, alone)


class Mine(hf.TopKLogitsWarper):
    """A subclass may do anything."""


def test_only_what_the_kernel_does_is_joined() -> None:
    heat, top_k, top_p, min_p = warpers(Truncation(0.8, 5, 0.9, 0.1))
    mine, odd = Mine(5), hf.TopKLogitsWarper(5, filter_value=-99.0)
    two, all_of_it, other = (
        hf.MinPLogitsWarper(0.1, min_tokens_to_keep=2),
        hf.TopPLogitsWarper(1.0),
        hf.LogitNormalization(),
    )
    expected = {
        (heat, top_k, top_p, min_p): [Truncation(0.8, 5, 0.9, 0.1)],
        (top_k, min_p): [Truncation(top_k=5, min_p=0.1)],
        (top_p, top_k): [Truncation(top_p=0.9), Truncation(top_k=5)],
        (heat, heat): [Truncation(0.8), Truncation(0.8)],
        (heat, other, top_k): [Truncation(0.8), other, Truncation(top_k=5)],
        (heat, mine, odd, two, all_of_it): [Truncation(0.8), mine, odd, two, all_of_it],
    }
    for processors, steps in expected.items():
        assert Warp(processors, 1).steps == steps
        logits = torch.randn(3, 64)
        made = Warp(processors, 3)(logits, torch.arange(3), lambda place: torch.zeros(1, 1, dtype=torch.long))
        assert torch.equal(made, LogitsProcessorList(processors)(torch.zeros(3, 1, dtype=torch.long), logits))


def test_more_than_one_token_to_keep_is_left_to_transformers() -> None:
    joined = Warp(warpers(Truncation(0.8, 5, 0.9, 0.1), tokens=2), 1).steps
    assert [type(step).__name__ for step in joined] == ["Truncation", "TopPLogitsWarper", "MinPLogitsWarper"]


def test_scores_of_generate_stay_those_of_plain_generate() -> None:
    """Sampling that leaves one token is deterministic: tokens and scores can be compared."""
    model, (ids, mask) = tiny(), prompts([9, 4])
    asked = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": True, "temperature": 0.7, "top_k": 9}
    asked |= {"top_p": 0.05, "min_p": 0.9, "return_dict_in_generate": True, "output_scores": True}
    expected = model.generate(ids, **asked)
    loop = hf_specgen.SpeculativeDecoding(hf_specgen.PromptLookup(4))
    with ops.record() as calls:
        found = model.generate(ids, custom_generate=loop, **asked)
    assert calls["truncate", "reference"] > 0
    assert torch.equal(found.sequences, expected.sequences)
    for one, other in zip(found.scores, expected.scores, strict=True):
        assert torch.equal(one == -INF, other == -INF)
        torch.testing.assert_close(one, other)  # the pass over a draft rounds in another order than plain steps


@pytest.mark.parametrize("setting", [Truncation(1.0, 0, 0.5), Truncation(1e30, 0, 0.1), Truncation(1e38, 0, 0.7)])
def test_logits_that_are_hardly_apart(setting: Truncation) -> None:
    """Their bins would overflow float32: they are sorted instead."""
    close = torch.zeros(1, 1000)
    close[0, ::2] = 1e-38
    source = torch.Generator().manual_seed(2)
    for logits in (close, torch.randn(1, 5000, generator=source)):
        assert same(ops.truncate(logits, *setting), plain(logits, setting))
