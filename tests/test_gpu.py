"""On a card: the whole loop writes what a CPU writes, and every operation agrees with its definition at full size.

The other ``gpu`` tests (``test_triton_*``) hold the edges, each kernel's own; run all of them with ``pytest -m gpu``.
The same checks run small in the interpreter, so that a card is never asked to debug the tests.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from row_cases import kept_by
from tiny import RandomTree, disturbed, plain, prompts, texts_of, tiny
from torch import Tensor
from transformers import TopPLogitsWarper

from hf_specgen import PromptLookup, SmallModel, SpeculativeDecoding, ops
from hf_specgen.bench.dev.kernel_bytes import Shape
from hf_specgen.bench.dev.kernel_cases import Inputs
from hf_specgen.round.records import Tree

pytest.importorskip("triton")

Result = tuple[Tensor, ...]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FULL, SMALL = Shape(8, 7, 128_256), Shape(2, 3, 700, listed=8)
SIZES = [pytest.param(FULL, marks=pytest.mark.gpu, id="full"), pytest.param(SMALL, marks=pytest.mark.slow, id="small")]
PLACES = [
    pytest.param("cuda", marks=pytest.mark.gpu, id="card"),
    pytest.param("cpu", marks=pytest.mark.slow, id="interpreter"),
]


def both(run: Callable[[], Result]) -> tuple[Result, Result]:
    """Run the Triton kernels and the definitions on the same tensors, and see to it that both were what ran."""
    results = []
    for path in ("triton", "reference"):
        with ops.use_kernels(path), ops.record() as calls:
            found = run()
            results.append((found,) if isinstance(found, Tensor) else tuple(found))
        assert calls and {ran for _, ran in calls} == {path}
    return results[0], results[1]


def same(found: Result, wanted: Result) -> None:
    """Compare integers and flags exactly, numbers within float32 rounding of sums."""
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        if one.is_floating_point():
            torch.testing.assert_close(one, other, rtol=2e-5, atol=1e-6)
        else:
            assert torch.equal(one, other)


def decided(run: Callable[[float], Result], step: float = 1e-5) -> Result:
    """Compare as ``same`` does, but integers only in rows that fall the same way when all coins are moved a little.

    Of 128,256 tokens most are as narrow as what float32 sums leave open.
    """
    found, wanted = both(lambda: run(0.0))
    near = []
    for shift in (-step, step):
        with ops.use_kernels("reference"):
            near.append(run(shift))
    clear = torch.ones(len(wanted[0]), dtype=torch.bool, device=DEVICE)
    for first, *others in zip(wanted, *near, strict=True):
        for other in () if first.is_floating_point() else others:
            clear &= (other == first).view(len(clear), -1).all(1)
    assert clear.any()
    same(*(tuple(part if part.is_floating_point() else part[clear] for part in each) for each in (found, wanted)))
    return found


def moved(coins: Tensor, shift: float) -> Tensor:
    """Move coins a little, within [0, 1)."""
    return (coins + shift).clamp(0.0, 1.0 - 2.0**-53)


def inputs(shape: Shape) -> Inputs:
    """Make a round with greedy, cold and hot rows beside each other."""
    given = Inputs(shape, torch.device(DEVICE), torch.bfloat16)
    warm = torch.tensor([1.0, 0.0, 0.6, 1.4], device=DEVICE).repeat(shape.batch)[: shape.batch]
    given.temperature = warm.repeat_interleave(shape.gamma + 1)
    return given


@pytest.fixture(params=SIZES)
def given(request: pytest.FixtureRequest) -> Inputs:
    return inputs(request.param)


@pytest.mark.parametrize("strips", [False, True])
def test_row_stats(given: Inputs, strips: bool) -> None:
    same(*both(lambda: ops.row_stats(given.flat, given.temperature, strips)))


@pytest.mark.parametrize("top_k", [None, 0, 50])
def test_row_draw(given: Inputs, top_k: int | None) -> None:
    """Truncation off, by top-p and min-p alone, and all three."""
    off = given.settings
    settings = off if top_k is None else (off[0] + top_k, off[1] * 0.95, off[2] + 0.01)
    stats = ops.row_stats(given.flat, given.temperature, top_k is not None)
    warm = (given.flat, given.temperature, *settings)

    def run(shift: float) -> Result:
        token, law, invalid = ops.row_draw(*warm, moved(given.coin, shift), *stats)
        # one set of tokens has several thresholds and ties that name it
        return token, law[:, :2], invalid, kept_by(law.cpu(), given.flat.cpu()).to(DEVICE)

    found = decided(run, 3e-6)
    assert len(set(found[0].tolist())) > 1
    assert (found[3].sum(1)[given.temperature > 0] < given.shape.vocab).all() == (top_k is not None)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [33, 128, 129, 4096, 4097, 128_256])
def test_a_nucleus_keeps_of_equal_logits_those_that_the_cards_sort_puts_last(vocab: int) -> None:
    """The kernel's rule is that of transformers' warper on a card, wherever float32 sums leave the edge alone."""
    logits = (torch.randn(16, vocab, device=DEVICE) * 2.5).bfloat16()
    wanted = TopPLogitsWarper(0.9)(torch.zeros(16, 1, dtype=torch.long, device=DEVICE), logits.float()) > -torch.inf
    full = torch.ones(16, device=DEVICE)
    near = []
    for top_p in (0.9 - 2e-6, 0.9, 0.9 + 2e-6):
        settings = (full.int() * 0, full * top_p, full * 0, full.double() / 2)
        with ops.use_kernels("triton"):
            law = ops.row_draw(logits, full, *settings, *ops.row_stats(logits, full, True))[1]
        near.append(kept_by(law.cpu(), logits.cpu()))
    clear = (near[0] == near[2]).all(1)
    assert clear.any() or vocab > 4096
    assert torch.equal(near[1][clear], wanted.cpu()[clear])


def test_gumbel_pick_and_uniform(given: Inputs) -> None:
    seed, row, position = (given.integers(1 << 40, given.shape.rows) for _ in range(3))
    same(*both(lambda: ops.gumbel_pick(given.flat, given.temperature, seed, row, position)))
    found, wanted = both(lambda: ops.uniform(seed, row, position, 2, row % 7))
    assert torch.equal(found[0], wanted[0]), "coins agree bit for bit"


def test_match_tree(given: Inputs) -> None:
    _, token, invalid = given.drawn
    found, wanted = both(lambda: ops.match_tree(token, invalid, given.guesses, given.chain.parents, given.n_valid))
    same(found, wanted)
    assert int(found[1].sum()) > 0


@pytest.mark.parametrize("without", [False, True])
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("dense", [False, True])
def test_reject_tree(given: Inputs, dense: bool, tree: bool, without: bool) -> None:
    shape = given.shape
    parents = Tree.chain(shape.gamma, given.device).parents if not tree else given.chain.parents.clamp(max=0)
    places = (shape.batch, shape.gamma + 1)
    coins = (given.uniform(*places, shape.gamma if tree else 1), given.uniform(*places))
    law = (None, given.q) if dense else given.listed
    drafted = (given.sampled, parents, given.n_valid - 1)
    target = (*given.target, *drafted, *law)
    found = decided(lambda shift: ops.reject_tree(*target, *(moved(coin, shift) for coin in coins), without))
    assert int(found[1].sum()) > 0


@pytest.mark.parametrize("dense", [False, True])
def test_block_chain(given: Inputs, dense: bool) -> None:
    shape, law = given.shape, (None, given.q) if dense else given.listed
    coins = (given.uniform(shape.batch, shape.gamma), given.uniform(shape.batch, shape.gamma + 1))
    target = (*given.target, given.sampled, given.n_valid, *law)
    found = decided(lambda shift: ops.block_chain(*target, *(moved(coin, shift) for coin in coins)))
    assert int(found[1].sum()) > 0


def test_typical_tree(given: Inputs) -> None:
    drafted = (given.guesses, given.chain.parents.clamp(max=1), given.n_valid)
    found, wanted = both(lambda: ops.typical_tree(*given.target, *drafted, 0.3, 0.09))
    same(found, wanted)
    assert int(found[1].sum()) > 0


def test_slots(given: Inputs) -> None:
    batch, gamma = given.shape.batch, given.shape.gamma
    lengths = given.integers(60, batch) + 40
    parents = torch.tensor([[(node - 1) // 2 for node in range(gamma)]], device=given.device)
    for window, chunked in ((0, False), (32, False), (32, True)):
        same(*both(lambda w=window, c=chunked: ops.tree_mask(lengths, parents, 128, 128, w, c)))
    before = torch.randn(2, batch, 4, 128, 64, device=given.device).bfloat16()
    source = lengths.unsqueeze(1) + torch.arange(1, gamma + 1, device=given.device)

    def shifted() -> Result:
        buffers = list(before.clone())
        ops.move_slots(buffers, source, source - 1)
        return tuple(buffer.view(torch.int16) for buffer in buffers)

    found, wanted = both(shifted)
    same(found, wanted)
    assert not torch.equal(found[0], before[0].view(torch.int16))


@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_tree_attention(given: Inputs, softcap: float) -> None:
    batch, width, slots = given.shape.batch, given.shape.gamma + 1, 1100 if DEVICE == "cuda" else 40
    query, key, value = (
        torch.randn(batch, heads, size, 128, device=given.device).bfloat16()
        for heads, size in ((16, width), (4, slots), (4, slots))
    )
    mask = torch.ones(batch, 1, width, slots, dtype=torch.bool, device=given.device).tril(slots - width)
    found, wanted = both(lambda: ops.tree_attention(query, key, value, mask, 128**-0.5, softcap, None))
    torch.testing.assert_close(found[0].float(), wanted[0].float(), rtol=2e-2, atol=2e-2)


def test_a_wrong_round_is_seen(given: Inputs) -> None:
    """Negative control: the comparison fails when one side draws with other coins."""
    other = given.uniform(given.shape.rows)
    stats = ops.row_stats(given.flat, given.temperature, False)
    one = ops.row_draw(given.flat, given.temperature, *given.settings, given.coin, *stats)
    two = ops.row_draw(given.flat, given.temperature, *given.settings, other, *stats)
    with pytest.raises(AssertionError):
        same(one, two)


LAWS = {
    "greedy": {},
    "sampled": {"do_sample": True, "seed": 3, "temperature": 0.8, "top_k": 0},
    "truncated": {"do_sample": True, "seed": 4, "temperature": 1.2, "top_k": 20, "top_p": 0.9},
}
DRAFTERS = ("lookup", "tree", "small", "drawn")


def texts(kind: str, place: str, law: str, path: str, rule: str = "rejection") -> list[list[int]]:
    """Write with one drafter on one device."""
    with ops.use_kernels(path), ops.record() as calls:
        model = tiny().to(place)
        ids, mask = (each.to(place) for each in prompts([5, 11, 3]))
        drafter = {
            "lookup": PromptLookup(4),
            "tree": RandomTree([list(range(1, 60))] * 3, hit=0.5, nodes=5),
            "small": SmallModel(disturbed(model), 3),
            "drawn": SmallModel(disturbed(model, 0.3), 3, sample=True),
        }[kind]
        tokens = 24 if place == "cuda" else 5
        loop = {"custom_generate": SpeculativeDecoding(drafter, rule), "max_new_tokens": tokens}
        found = plain(model, ids, mask, **loop, **LAWS[law])
    walks = {"match_tree", "reject_tree", "block_chain"}
    judged = sum(count for (name, ran), count in calls.items() if name in walks and ran == "triton")
    assert (judged > 0) == (path == "triton")
    return texts_of(found.cpu(), mask.cpu())


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["lookup", "tree", "small"])
def test_greedy_text_is_the_cpus(kind: str, place: str) -> None:
    model, (ids, mask) = tiny(), prompts([5, 11, 3])
    wanted = texts_of(plain(model, ids, mask, max_new_tokens=24 if place == "cuda" else 5), mask)
    assert texts(kind, place, "greedy", "triton") == wanted


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("kind", "law", "rule"),
    [
        ("lookup", "sampled", "rejection"),
        ("tree", "truncated", "rejection"),
        ("drawn", "sampled", "rejection"),
        ("drawn", "truncated", "block"),
        ("drawn", "sampled", "gumbel"),
    ],
)
def test_sampled_text_is_that_of_the_definitions(kind: str, law: str, rule: str, place: str) -> None:
    assert texts(kind, place, law, "triton", rule) == texts(kind, place, law, "reference", rule)
