"""The row draw: Triton against the definition, the definition against transformers' warpers, and laws from outside."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from row_cases import DEVICE, DTYPES, INF, LAST_COIN, Batch, Drawn, decided, differences, kept_by, random_batch, warped
from tiny import few
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_specgen import ops
from hf_specgen.kernels import reference_rows

triton = pytest.importorskip("triton")
from hf_specgen.kernels import triton_draw, triton_rows  # noqa: E402 - needs Triton


def drawn(batch: Batch, strips: bool = True) -> Drawn:
    return batch.drawn_by(triton_rows.row_stats, triton_draw.row_draw, strips, DEVICE)


def simple(logits: Tensor, coins: Tensor, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> Batch:
    """Draw the same row with every coin."""
    count = len(coins)
    rows = logits.expand(count, -1) if logits.dim() == 1 else logits
    settings = (torch.full((count,), float(value)) for value in (temperature, top_p, min_p))
    warmth, nucleus, least = settings
    return Batch(rows, warmth, torch.full((count,), top_k, dtype=torch.int32), nucleus, least, coins)


def coins(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


CASES = [
    (1, 12, torch.float32, True),
    (5, 12, torch.float16, True),
    (300, 24, torch.bfloat16, True),
    (300, 10, torch.float32, True),
    (2000, 12, torch.bfloat16, True),
    (8300, 12, torch.bfloat16, True),
    (300, 16, torch.float32, False),
    (16_500, 12, torch.bfloat16, False),
]


@pytest.mark.parametrize(("vocab", "count", "dtype", "truncated"), few(CASES, CASES[1], CASES[2], CASES[5], CASES[7]))
def test_kernel_and_definition_agree(vocab: int, count: int, dtype: torch.dtype, truncated: bool) -> None:
    batch = random_batch(vocab + count, count, vocab, dtype, truncated)
    with ops.use_kernels("triton"), ops.record() as calls:
        found = batch.drawn_by(ops.row_stats, ops.row_draw, truncated, DEVICE)
    assert calls == {("row_stats", "triton"): 1, ("row_draw", "triton"): 1}
    wrong, share = differences(batch, found, truncated)
    assert wrong == []
    assert share > 0.6  # coins at the ends, ties and p = 0 count as undecided where the neighbours differ


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_rows_agree(dtype: torch.dtype) -> None:
    sizes = [(1, 10), (2, 20), (17, 40), (128, 40), (129, 40), (700, 40), (1500, 30), (8193, 16), (20_000, 10)]
    fewer = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}[dtype]  # the wider the keys, the longer each row
    for seed, (vocab, count) in enumerate(sizes):
        for truncated in (True, False):
            batch = random_batch(seed, -(-count // fewer), vocab, dtype, truncated)
            assert differences(batch, drawn(batch, truncated), truncated)[0] == [], (vocab, truncated)


def test_the_comparison_sees_small_faults() -> None:
    """The control: a law of another temperature, a lost tie, another total or an impossible token are all reported."""
    batch = random_batch(3, 40, 300, torch.bfloat16)
    right = batch.defined()
    assert differences(batch, right)[0] == []
    assert differences(batch, replace(batch, temperature=batch.temperature * 1.05).defined())[0] != []
    token, law, invalid = right
    for column, change in ((0, 1e-3), (1, 0.01), (3, 1.0)):
        other = law.clone()
        other[:, column] += change * other[:, 1]
        assert differences(batch, (token, other, invalid))[0] != []
    assert differences(batch, ((token + 1) % 300, law, invalid))[0] != []
    assert differences(batch, (token, law, ~invalid))[0] != []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab", [1, 5, 130, 1000])
def test_the_definition_keeps_what_the_warpers_keep(vocab: int, dtype: torch.dtype, monkeypatch) -> None:
    batch = random_batch(vocab, 150, vocab, dtype)
    _, law, invalid = batch.defined()
    sampled = ~invalid & (batch.temperature > 0)
    batch, law = batch.rows(sampled), law[sampled]
    scores = warped(batch, monkeypatch)
    same = decided(batch)[0]
    assert same.double().mean() > 0.7
    assert torch.equal(kept_by(law, batch.logits)[same], (scores > -INF)[same])
    p, chance = scores.softmax(-1), (batch.logits.double() - law[:, :1]) / batch.temperature.double().unsqueeze(1)
    chance = chance.exp() * kept_by(law, batch.logits) / law[:, 1:2]
    torch.testing.assert_close(chance[same], p[same], rtol=1e-9, atol=1e-12)


TRUNCATIONS = [
    {"top_k": 3},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
]


def check_brackets(logits: Tensor, spread: float = 2e-6, wrong: float = 1.0, **settings: float) -> list[int]:
    """Return the tokens that the kernel does not draw just inside both ends of their piece of [0, 1).

    ``wrong`` multiplies the temperature that the kernel is given, for the control.
    """
    asked = simple(logits, coins(0.5), **settings)
    _, law, _ = asked.defined()
    kept = kept_by(law, asked.logits)[0]
    exact = ((logits.double() - law[0, 0]) / float(asked.temperature)).exp() * kept / law[0, 1]
    possible = (exact > 3 * spread).nonzero().flatten()
    possible = possible[:: -(-len(possible) // 12)]
    ends = exact.cumsum(0)
    tries = torch.stack((ends - exact + spread, ends - spread), 1)[possible].clamp(0.0, LAST_COIN).flatten()
    warmth = float(asked.temperature) * wrong
    token, _, _ = drawn(simple(logits, tries, **{**settings, "temperature": warmth}))
    return possible[(token.view(-1, 2) != possible.unsqueeze(1)).any(1)].tolist()


def scattered(vocab: int, tokens: int) -> Tensor:
    """Possible tokens on both sides of every border of strips and chunks."""
    logits = torch.full((vocab,), -INF)
    places = torch.tensor([0, 127, 128, 300, 8191, 8192, vocab - 1])[:tokens]
    logits[places] = torch.randn(len(places)) * 1.5
    return logits


@pytest.mark.parametrize("settings", few(({}, *TRUNCATIONS), {}, TRUNCATIONS[-1]))
def test_every_piece_of_the_law_is_where_it_belongs(settings: dict[str, float]) -> None:
    logits = scattered(8400, 7).bfloat16()
    assert check_brackets(logits, **settings) == []
    assert settings not in ({}, {"top_p": 0.8}) or check_brackets(logits, wrong=1.01, **settings) != []


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, *TRUNCATIONS, {"top_k": 4000, "top_p": 0.95}, {"top_p": 0.97}])
def test_every_piece_of_a_wide_law_is_where_it_belongs(settings: dict[str, float]) -> None:
    """Thousands of possible tokens, of which the last two settings keep more than the list of candidates holds."""
    logits = (torch.randn(9000) * 0.5).bfloat16()
    assert check_brackets(logits, **settings) == []


def law_from_outside(logits: Tensor, tokens: list[int], steps: int) -> Tensor:
    """Bisect, for each of ``tokens``, the coin from which the kernel draws it or a later one."""
    low, high = torch.zeros(len(tokens), dtype=torch.float64), torch.ones(len(tokens), dtype=torch.float64)
    for _ in range(steps):
        middle = (low + high) / 2
        reached = drawn(simple(logits, middle), False)[0] >= torch.tensor(tokens)
        low, high = torch.where(reached, low, middle), torch.where(reached, middle, high)
    edges = torch.cat((high, torch.ones(1, dtype=torch.float64)))
    edges[0] = 0.0
    return edges.diff()


@pytest.mark.slow
def test_the_law_measured_from_outside() -> None:
    """No reference is involved; the control is the law of another temperature."""
    logits = scattered(8400, 6)
    tokens = (logits > -INF).nonzero().flatten().tolist()
    law = law_from_outside(logits, tokens, 24)
    p = logits[tokens].double().softmax(-1)
    assert (law - p).abs().sum() / 2 < 5e-7
    assert (law - (logits[tokens].double() / 1.01).softmax(-1)).abs().sum() / 2 > 1e-5


def test_a_large_flat_vocabulary_keeps_its_law() -> None:
    """A flat float32 running sum over so many entries is wrong by 1e-3: each token must lie in its own piece."""
    logits = torch.randn(100_003) * 0.1
    edges = logits.double().softmax(-1).cumsum(0)
    wanted = torch.tensor([5, 8191, 8192, 50_000, 99_999, 100_002])
    middle = (edges[wanted] + edges[wanted - 1]) / 2
    assert drawn(simple(logits, middle), False)[0].tolist() == wanted.tolist()


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.95}])
def test_the_ends_of_the_coin_give_possible_tokens(settings: dict[str, float]) -> None:
    """Before, between and after the possible tokens lie others whose chance is exactly zero, or underflows."""
    logits = torch.full((300,), -INF)
    logits[torch.tensor([40, 130, 131, 290])] = 1.0
    logits[torch.tensor([3, 135, 299])] = -150.0
    token, _, _ = drawn(simple(logits, coins(0.0, LAST_COIN, 2.0**-53, 0.5), **settings), bool(settings))
    assert token.tolist() == [40, 290, 40, 131]


@pytest.mark.parametrize("strips", [True, False])
def test_temperatures_of_any_size(strips: bool) -> None:
    logits = torch.tensor([1.0, -INF, 3.0, 3.0, -2.0]).expand(4, -1)
    batch = simple(logits, coins(0.4, 0.9, 0.3, 0.9))
    batch = replace(batch, temperature=torch.tensor([1e-30, 1e-30, 1e30, INF]))
    assert drawn(batch, strips)[0].tolist() == [2, 3, 2, 4]


def test_a_list_that_misses_part_of_what_stays_is_not_used() -> None:
    """The 256 best of 313 strips hold few hundred candidates, and of a flat row too little."""
    logits = torch.randn(40_000) * 0.4  # of bfloat16 logits so many tie that the list overflows
    batch = simple(logits, coins(0.3, 0.8))
    batch = replace(batch, top_p=torch.tensor([0.55, 1.0]), min_p=torch.tensor([0.0, 0.1]))
    assert (kept_by(batch.defined()[1], batch.logits).sum(1) > 10_000).all()
    assert differences(batch, drawn(batch))[0] == []
    assert decided(batch)[0].all()


def test_ties_at_the_edges_follow_the_convention() -> None:
    """All ties of the k-th stay; at the edge of the nucleus the highest ids, as a stable sort leaves them."""
    logits = torch.tensor([1.0, 1.0, 2.0, 1.0, 1.0, -1.0]).bfloat16()
    for settings, kept in (
        ({"top_k": 2}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.6}, [2, 3, 4]),
        ({"top_p": 0.0}, [2]),
        ({"min_p": 0.3}, [0, 1, 2, 3, 4]),
        ({"min_p": 1.0}, [2]),
    ):
        law = drawn(simple(logits, coins(0.1), **settings))[1]
        assert kept_by(law, logits[None])[0].nonzero().flatten().tolist() == kept, settings
    flat = drawn(simple(torch.zeros(1500), coins(0.1, 0.999), top_p=0.2501))  # no list of candidates holds these
    assert kept_by(flat[1], torch.zeros(1, 1500)).sum(1).tolist() == [376, 376]
    assert flat[0].tolist() == [1500 - 376 + 37, 1499]


def test_a_row_does_not_see_its_neighbours() -> None:
    batch = random_batch(11, 14, 500, torch.bfloat16)
    together = drawn(batch)
    for row in (0, 3, 6, 9, 12):
        alone = drawn(batch.rows(slice(row, row + 1)))
        assert all(torch.equal(one, many[row : row + 1]) for one, many in zip(alone, together, strict=True))


def test_a_row_does_not_see_its_dtype() -> None:
    batch = random_batch(12, 12, 400, torch.bfloat16).rows(slice(0, 6))
    wide = replace(batch, logits=batch.logits.float())
    narrow, other = drawn(batch), drawn(wide)
    assert torch.equal(narrow[0], other[0])
    assert torch.equal(kept_by(narrow[1], batch.logits), kept_by(other[1], wide.logits))


def test_rows_lie_further_apart_than_32_bits_reach() -> None:
    """The memory between the rows is never touched, so the machine need not have it."""
    stride, vocab = 2**31 - 64, 300
    logits = torch.empty(stride + vocab, dtype=torch.bfloat16, device=DEVICE).as_strided((2, vocab), (stride, 1))
    logits[:] = torch.randn(2, vocab).to(logits)
    far, near = simple(logits, coins(0.3, 0.9), top_k=20), simple(logits.clone(), coins(0.3, 0.9), top_k=20)
    assert all(torch.equal(one, other) for one, other in zip(drawn(far), drawn(near), strict=True))


def test_float64_goes_to_the_definition() -> None:
    batch = replace(random_batch(2, 12, 60, torch.float32), logits=torch.randn(12, 60, dtype=torch.float64))
    assert all(
        torch.equal(mine.nan_to_num(), theirs.nan_to_num())
        for mine, theirs in zip(drawn(batch), batch.defined(), strict=True)
    )


def test_the_operation_is_registered_soundly() -> None:
    batch = random_batch(5, 2, 40, torch.float32)
    fields = [each.to(DEVICE) for each in vars(batch).values()]
    every = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for strips in (True, False):
        stats = triton_rows.row_stats(fields[0], fields[1], strips)
        checks = every[:1] if strips else every  # each runs the kernel several times
        torch.library.opcheck(triton_draw._row_draw, (*fields, *stats), test_utils=checks)
    with FakeTensorMode():
        logits, ones = torch.empty(3, 20_000, dtype=torch.bfloat16), torch.empty(3)
        stats = triton_rows.row_stats(logits, ones, True)
        out = triton_draw.row_draw(logits, ones, ones.int(), ones, ones, ones.double(), *stats)
        assert [(tuple(each.shape), each.dtype) for each in out] == [
            ((3,), torch.long),
            ((3, 4), torch.float64),
            ((3,), torch.bool),
        ]


def test_variants_name_every_argument() -> None:
    for name, kernel, signature, constants, warps in triton_draw.variants():
        assert list(signature) == kernel.arg_names, name
        assert {key for key, kind in signature.items() if kind == "constexpr"} == set(constants), name
        assert warps in (8, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_card(dtype: torch.dtype) -> None:
    for seed, vocab in enumerate([1, 127, 1500, 8193, 50_257, 128_256, 151_936]):
        for truncated in (True, False):
            batch = random_batch(seed, 128 if vocab < 10_000 else 48, vocab, dtype, truncated)
            found = drawn(batch, truncated)
            assert differences(batch, found, truncated)[0] == [], (vocab, truncated)
            again = drawn(batch, truncated)  # a missing barrier would show as chance
            assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


def test_a_batch_without_rows_is_empty() -> None:
    empty = random_batch(1, 12, 50, torch.bfloat16).rows(slice(0, 0))
    for strips in (True, False):
        assert [each.shape[0] for each in drawn(empty, strips)] == [0, 0, 0]
        assert [each.shape[0] for each in empty.drawn_by(reference_rows.row_stats, reference_rows.row_draw, strips)]
