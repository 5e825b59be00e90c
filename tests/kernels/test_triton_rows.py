"""Coins, row statistics and the Gumbel pick: Triton against the definition, and Philox against known answers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from row_cases import DEVICE, DTYPES, INF, edge_rows, pick
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_specgen import ops
from hf_specgen.kernels import common, reference_rows

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402 - needs Triton

from hf_specgen.kernels import triton_gumbel, triton_rows  # noqa: E402 - needs Triton
from hf_specgen.kernels.triton_common import philox  # noqa: E402 - needs Triton


@triton.jit
def philox_kernel(COUNTER, KEY, OUT, N: tl.constexpr):
    i = tl.arange(0, N)
    c0, c1 = tl.load(COUNTER + i).to(tl.uint32), tl.load(COUNTER + N + i).to(tl.uint32)
    c2, c3 = tl.load(COUNTER + 2 * N + i).to(tl.uint32), tl.load(COUNTER + 3 * N + i).to(tl.uint32)
    c0, c1, c2, c3 = philox(c0, c1, c2, c3, tl.load(KEY + i).to(tl.uint32), tl.load(KEY + N + i).to(tl.uint32))
    tl.store(OUT + i, c0.to(tl.int64))
    tl.store(OUT + N + i, c1.to(tl.int64))
    tl.store(OUT + 2 * N + i, c2.to(tl.int64))
    tl.store(OUT + 3 * N + i, c3.to(tl.int64))


def encrypted(counter: Tensor, key: Tensor) -> Tensor:
    out = torch.zeros_like(counter, device=DEVICE)
    philox_kernel[(1,)](counter.to(DEVICE), key.to(DEVICE), out, counter.shape[1])
    return out.cpu()


def words(text: str) -> Tensor:
    return torch.tensor([[int(word, 16)] for word in text.split()])


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff " * 4, "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_on_the_device_gives_the_known_answers(counter: str, key: str, expected: str) -> None:
    assert torch.equal(encrypted(words(counter), words(key)), words(expected))


def test_philox_on_the_device_is_the_one_on_the_host() -> None:
    counter, key = torch.randint(0, 2**32, (4, 1024)), torch.randint(0, 2**32, (2, 1024))
    assert torch.equal(encrypted(counter, key), common.philox(counter, key))


def places(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Seeds of both signs, rows and positions past 2**32: only their low words count."""
    return torch.randint(-(2**63), 2**63 - 1, (count,)), torch.randint(0, 2**33, (count,)), torch.arange(count) * 2**25


@pytest.mark.parametrize("count", [0, 1, 127, 300])
def test_coins_are_bit_equal(count: int) -> None:
    owner = places(count)
    siblings = torch.randint(0, 2**24, (count,))
    for use in (ops.ACCEPT, ops.GUMBEL):
        for sibling in (0, (1 << 24) - 1, siblings):
            with ops.use_kernels("triton"), ops.record() as calls:
                on_device = sibling.to(DEVICE) if isinstance(sibling, Tensor) else sibling
                coins = ops.uniform(*(each.to(DEVICE) for each in owner), use, on_device)
            assert calls == {("uniform", "triton"): 1}
            assert torch.equal(coins.cpu(), common.uniform(*owner, use, sibling))


def test_a_sibling_per_row_is_that_sibling_alone() -> None:
    owner, siblings = places(50), torch.arange(50) % 5
    together = common.uniform(*owner, ops.ACCEPT, siblings)
    for sibling in range(5):
        assert torch.equal(together[sibling::5], common.uniform(*owner, ops.ACCEPT, sibling)[sibling::5])
    assert len(set(common.uniform(*(each[:1].expand(5) for each in owner), 1, torch.arange(5)).tolist())) == 5


def check_stats(seed: int, vocab: int, dtype: torch.dtype, strips: bool, count: int = 12) -> None:
    source = torch.Generator().manual_seed(seed)
    logits = edge_rows(source, count, vocab).to(dtype)
    temperature = pick(source, [0.0, 0.3, 1.0, 2.0], count)
    with ops.use_kernels("triton"), ops.record() as calls:
        found = [each.cpu() for each in ops.row_stats(logits.to(DEVICE), temperature.to(DEVICE), strips)]
    assert calls == {("row_stats", "triton"): 1}
    wanted = reference_rows.row_stats(logits, temperature, strips)
    assert [(each.shape, each.dtype) for each in found] == [(each.shape, each.dtype) for each in wanted]
    broken = wanted[1].isnan()
    assert torch.equal(found[1].isnan(), broken)
    torch.testing.assert_close(found[1], wanted[1], rtol=2e-6, atol=0, equal_nan=True)
    for mine, theirs in zip(found[:3:2], wanted[:3:2], strict=True):
        assert torch.equal(mine[~broken], theirs[~broken])
    fine = ~broken.any(1)
    assert torch.equal(found[3][fine], wanted[3][fine])


@pytest.mark.parametrize(
    ("vocab", "dtype", "strips"),
    [
        (1, torch.bfloat16, True),
        (127, torch.float16, True),
        (300, torch.float32, False),
        (8193, torch.bfloat16, True),
        (16384, torch.float32, True),
    ],
)
def test_row_statistics(vocab: int, dtype: torch.dtype, strips: bool) -> None:
    check_stats(vocab, vocab, dtype, strips)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_row_statistics_of_many_rows(dtype: torch.dtype) -> None:
    for seed, vocab in enumerate([2, 128, 129, 1000, 8191, 8192, 24_577, 151_936]):
        check_stats(seed, vocab, dtype, bool(seed % 2), 24 if vocab < 20_000 else 12)


def test_the_sums_of_a_row_are_its_softmax_total() -> None:
    logits, temperature = torch.randn(2, 9000) * 4, torch.tensor([0.5, 2.0])
    maxima, sums, _, _ = triton_rows.row_stats(logits.to(DEVICE), temperature.to(DEVICE), False)
    scaled = logits.double() / temperature.double().unsqueeze(1)
    total = (maxima.cpu().double() / temperature.unsqueeze(1)).add(sums.cpu().double().log()).logsumexp(-1)
    torch.testing.assert_close(total, scaled.logsumexp(-1), rtol=0, atol=1e-6)


def check_pick(seed: int, vocab: int, dtype: torch.dtype, count: int = 12) -> None:
    source = torch.Generator().manual_seed(seed)
    logits = edge_rows(source, count, vocab).to(dtype)
    temperature = pick(source, [0.0, 1e-9, 0.7, 1.0, 100.0], count)
    owner = [torch.randint(0, 2**31, (count,), generator=source) for _ in range(3)]
    with ops.use_kernels("triton"), ops.record() as calls:
        found = ops.gumbel_pick(*(each.to(DEVICE) for each in (logits, temperature, *owner)))
    assert calls == {("gumbel_pick", "triton"): 1}
    wanted = reference_rows.gumbel_pick(logits, temperature, *owner)
    assert found[0].tolist() == wanted[0].tolist()
    assert found[1].tolist() == wanted[1].tolist()
    # the control: another position is other noise
    if vocab > 100:
        moved = reference_rows.gumbel_pick(logits, temperature, owner[0], owner[1], owner[2] + 1)
        assert moved[0].tolist() != wanted[0].tolist()


@pytest.mark.parametrize(("vocab", "dtype"), [(1, torch.float32), (301, torch.bfloat16), (9000, torch.float32)])
def test_the_gumbel_pick(vocab: int, dtype: torch.dtype) -> None:
    check_pick(vocab, vocab, dtype, 12 if vocab < 1000 else 7)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gumbel_pick_of_many_rows(dtype: torch.dtype) -> None:
    for seed, vocab in enumerate([2, 5, 127, 1000, 1001, 8192, 20_000]):
        check_pick(seed, vocab, dtype, 40)


def test_near_ties_of_the_gumbel_pick_are_decided_exactly() -> None:
    """Logits that cancel the noise but for float32 roundings: float32 scores could not tell these tokens apart."""
    vocab, rows = 500, 4
    seed, row, position = torch.arange(rows), torch.arange(rows) + 7, torch.arange(rows) * 3
    noise = common.gumbel_noise(seed, row, position, vocab)
    logits = (3.0 - noise).float()
    logits[:, torch.arange(vocab) % 50 != 3] = -INF
    scores = logits.double() + noise
    best = scores.topk(2, -1).values
    assert (best[:, 0] - best[:, 1]).max() < 2e-7  # the premise
    args = (logits, torch.ones(rows), seed, row, position)
    token, _ = triton_gumbel.gumbel_pick(*(each.to(DEVICE) for each in args))
    assert token.tolist() == scores.argmax(-1).tolist()


@triton.jit
def noise_kernel(BITS, OUT, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(OUT + i, triton_gumbel._quick_noise(tl.load(BITS + i).to(tl.uint32)))


def test_extreme_bits_give_noise_like_any_other() -> None:
    """The quick noise near 0 and 1, where a float32 of the bits is 1.0, against the exact noise."""
    bits = torch.tensor([0, 1, 2**31, 2**32 - 2**26, 2**32 - 2**20, 2**32 - 300, 2**32 - 2, 2**32 - 1])
    out = torch.zeros(8, device=DEVICE)
    noise_kernel[(1,)](bits.to(DEVICE), out, 8)
    exact = -torch.log(-torch.log((bits.double() + 0.5) * 2.0**-32))
    assert (out.cpu().double() - exact).abs().max() < 5e-5  # a twentieth of the margin


def test_rows_are_read_where_they_lie() -> None:
    """Neither a stride of zero, nor of more than the row, nor columns apart change what is read."""
    base = torch.randn(3, 2, 400)
    temperature = torch.ones(3)
    views = [base[:, 1], base[0, :1].expand(3, -1), base.transpose(1, 2)[..., 0].contiguous().t().contiguous().t()]
    for logits in views:
        logits = logits.to(DEVICE)
        found = triton_rows.row_stats(logits, temperature.to(DEVICE), True)
        wanted = triton_rows.row_stats(logits.contiguous(), temperature.to(DEVICE), True)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, wanted, strict=True))


def test_float64_and_too_large_vocabularies() -> None:
    logits, temperature = torch.randn(2, 300, dtype=torch.float64), torch.ones(2)
    found = triton_rows.row_stats(logits, temperature, True)
    wanted = reference_rows.row_stats(logits, temperature, True)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, wanted, strict=True))
    owner = (torch.arange(2),) * 3
    found = triton_gumbel.gumbel_pick(logits, temperature, *owner)
    assert torch.equal(found[0], reference_rows.gumbel_pick(logits, temperature, *owner)[0])
    with pytest.raises(ValueError, match="1048577 tokens"):
        triton_rows.row_stats(torch.zeros(1, 1).expand(1, 2**20 + 1), temperature[:1], False)


def test_the_operations_are_registered_soundly() -> None:
    logits, temperature = torch.randn(2, 300, device=DEVICE), torch.tensor([0.0, 1.0], device=DEVICE)
    owner = (torch.arange(2, device=DEVICE),) * 3
    calls = [
        (triton_rows._uniform, (*owner, 1 << 24, None)),
        (triton_rows._uniform, (*owner, 1 << 24, owner[0])),
        (triton_rows._row_stats, (logits, temperature, True)),
        (triton_gumbel._gumbel_pick, (logits, temperature, *owner)),
    ]
    for operation, args in calls:
        torch.library.opcheck(operation, args)


def test_shapes_are_known_without_running() -> None:
    with FakeTensorMode():
        logits, temperature = torch.empty(3, 20_000, dtype=torch.bfloat16), torch.empty(3)
        owner = (torch.empty(3, dtype=torch.long),) * 3
        stats = triton_rows.row_stats(logits, temperature, True)
        assert [tuple(each.shape) for each in stats] == [(3, 3), (3, 3), (3, 3), (3, 157)]
        assert triton_rows.row_stats(logits, temperature, False)[3].shape == (3, 0)
        assert [each.dtype for each in triton_gumbel.gumbel_pick(logits, temperature, *owner)] == [
            torch.long,
            torch.bool,
        ]
        assert triton_rows.uniform(*owner, 1, owner[0]).dtype == torch.float64


@pytest.mark.parametrize("module", [triton_rows, triton_gumbel])
def test_variants_name_every_argument(module) -> None:
    for name, kernel, signature, constants, warps in module.variants():
        assert list(signature) == kernel.arg_names, name
        assert {key for key, kind in signature.items() if kind == "constexpr"} == set(constants), name
        assert warps in (4, 8, 16)


@pytest.mark.gpu
def test_on_a_card() -> None:
    for seed, vocab in enumerate([1, 127, 8193, 50_257, 128_256, 151_936]):
        for dtype in DTYPES:
            check_stats(seed, vocab, dtype, bool(seed % 2), 64)
            check_pick(seed, vocab, dtype, 24)
    assert math.isfinite(float(triton_rows.uniform(*(each.to(DEVICE) for each in places(100_000)), 1).sum()))


@pytest.mark.parametrize("path", ["reference", "triton"])
def test_the_door_is_no_break_in_a_graph(path: str) -> None:
    """``torch.compile`` records what the block chooses; a compiler cannot read the variable itself."""
    logits, temperature = torch.randn(2, 300, device=DEVICE), torch.ones(2, device=DEVICE)
    given = torch.tensor([3, 4], device=DEVICE), torch.tensor([[-1, 0]], device=DEVICE), 16, 16, 0, False

    def run() -> tuple[Tensor, Tensor]:
        return ops.row_stats(logits * 2, temperature, True)[1] + 1, ops.tree_mask(*given)

    names: list[str] = []

    def seen(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        names.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch.compiler.reset()
    with ops.use_kernels(path), ops.record() as calls:
        sums, mask = torch.compile(run, fullgraph=True, backend=seen)()
        assert not calls, "a graph is not counted"
        wanted, seen_slots = run()
    assert torch.equal(sums, wanted) and torch.equal(mask, seen_slots)
    assert any("hf_specgen" in name for name in names) == (path == "triton"), names
