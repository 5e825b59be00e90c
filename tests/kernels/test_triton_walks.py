"""The Triton walks compute what their references define, row by row and token by token; see test_triton_laws too."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from walk_cases import Kind, Walk, agree, laws, make

from hf_specgen import ops
from hf_specgen.kernels import reference_walks
from hf_specgen.round.records import DenseQ, Draft, SparseQ, Tree

triton = pytest.importorskip("triton")
from hf_specgen.kernels import triton_typical, triton_walks  # noqa: E402 - after the guard

LAST_COIN = 1.0 - 2.0**-53
KINDS = {
    "dense tree": Kind(),
    "sparse tree": Kind(sparse=True),
    "dense, distinct siblings": Kind(without=True, truncated=True),
    "sparse, distinct siblings": Kind(sparse=True, without=True),
    "dense chain": Kind(chain=True, truncated=True, dtype=torch.bfloat16),
    "sparse chain": Kind(chain=True, sparse=True, truncated=True, nodes=3),
    "greedy rows between": Kind(greedy=True, without=True, vocab=9),
    "broken rows": Kind(broken=True, sparse=True),
    "narrow draft, shared tree": Kind(q_vocab=37, one_tree=True, vocab=300, dtype=torch.float16),
    "one node": Kind(nodes=1, vocab=129),
}


def same_as_reference(walk: Walk, rejects: bool = True) -> int:
    """Assert that the kernels agree with the references; return how many nodes were accepted."""
    matched, typical = walk.match(triton_walks), walk.typical(triton_typical)
    assert agree(matched, walk.match(reference_walks))
    assert agree(typical, walk.typical(reference_walks))
    rejected = walk.reject(triton_walks)
    assert agree(rejected, walk.reject(reference_walks))
    return int(matched[1].sum() + rejected[1].sum() + typical[1].sum())


@pytest.mark.parametrize("name", KINDS)
def test_the_kernels_agree_with_their_references(name: str) -> None:
    same_as_reference(make(replace(KINDS[name], rows=3), 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_many_rounds_agree(name: str) -> None:
    accepted = sum(same_as_reference(make(KINDS[name], seed)) for seed in range(2, 14))
    assert accepted > 12


@pytest.mark.gpu
@pytest.mark.parametrize("name", KINDS)
def test_the_kernels_agree_with_their_references_on_a_card(name: str) -> None:
    for seed in range(40):
        here = make(replace(KINDS[name], rows=16), seed)
        there = here.to("cuda")
        assert agree(there.match(triton_walks), here.match(reference_walks))
        assert agree(there.reject(triton_walks), here.reject(reference_walks))
        assert agree(there.typical(triton_typical), here.typical(reference_walks))


def test_the_door_leads_to_the_kernels() -> None:
    walk = make(Kind(rows=1, nodes=2), 0)
    with ops.use_kernels("triton"), ops.record() as calls:
        walk.match(ops)  # type: ignore[arg-type]
        walk.reject(ops)  # type: ignore[arg-type]
        walk.typical(ops)  # type: ignore[arg-type]
    assert calls == {(name, "triton"): 1 for name in ("match_tree", "reject_tree", "typical_tree")}


@pytest.mark.parametrize(
    "name",
    [
        "match_tree fake",
        "reject_tree fake",
        "typical_tree fake",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("match_tree", "reject_tree", "typical_tree")),
    ],
)
def test_the_operators_are_well_formed(name: str) -> None:
    walk = make(Kind(rows=2, nodes=2, vocab=5), 0)
    arguments = {
        "match_tree": (walk.drawn, walk.invalid, *walk.drafted),
        "reject_tree": (*walk.rows, *walk.drafted, *walk.q, walk.accept, walk.sample, True),
        "typical_tree": (*walk.rows, *walk.drafted, 0.3, 0.6),
    }
    name, _, only = name.partition(" ")
    module = triton_typical if name == "typical_tree" else triton_walks
    cheap = {"test_utils": ("test_schema", "test_faketensor")} if only else {}
    torch.library.opcheck(vars(module)[name], arguments[name], **cheap)


def chain(p: list[float], q: list[float], token: int, accept: float, sample: float, sparse: bool) -> Walk:
    """One drafted token: p and q by hand."""
    logits = torch.tensor(p).log().expand(1, 2, -1).contiguous()
    law, warped = laws(logits, torch.ones(1), torch.ones(1, 2, len(p), dtype=torch.bool))
    given = torch.tensor(q).view(1, 1, -1)
    ids = torch.arange(len(q)).view(1, 1, -1)
    draft = Draft(
        torch.tensor([[token]]),
        Tree.chain(1),
        torch.tensor([1]),
        SparseQ(ids, given) if sparse else DenseQ(given.log()),
    )
    drawn, coins = torch.tensor([[0, 1]]), torch.tensor([[sample, sample]], dtype=torch.float64)
    toss = torch.full((1, 2, 1), accept, dtype=torch.float64)
    invalid = torch.zeros(1, 2, dtype=torch.bool)
    return Walk(logits, torch.ones(1), law, drawn, invalid, draft, toss, coins, warped)


@pytest.mark.parametrize("sparse", [True, False])
def test_what_p_or_q_cannot_draw_is_never_accepted(sparse: bool) -> None:
    impossible = chain([0.0, 0.5, 0.5], [0.5, 0.25, 0.25], 0, 0.0, LAST_COIN, sparse)
    assert [value.item() for value in impossible.reject(triton_walks)[1:3]] == [0, 2]
    undrafted = chain([0.5, 0.5], [0.0, 1.0], 0, 0.0, 0.3, sparse)  # nothing was rejected: the row's own draw
    assert [value.item() for value in undrafted.reject(triton_walks)[1:3]] == [0, 0]


@pytest.mark.parametrize("sparse", [True, False])
def test_an_empty_residual_falls_back_to_p(sparse: bool) -> None:
    """p = q up to rounding can be rejected by the last coin; what is left is then rounding noise or nothing."""
    p = [0.1, 0.2, 0.0, 0.7]
    for token in (0, 1, 3):
        walk = chain(p, [chance * (1 + 1e-6) for chance in p], token, LAST_COIN, LAST_COIN, sparse)
        _, n, last, invalid = walk.reject(triton_walks)
        assert n.item() == 1 or int(last) in (0, 1, 3)
        assert not invalid.item()


def test_a_listed_law_that_holds_all_of_p_leaves_nothing_outside() -> None:
    """After the rejection of 0 only 1 is left, exactly: noise of the sums must not let another token in."""
    source = torch.Generator().manual_seed(0)
    for _ in range(2):
        p = torch.rand(5, generator=source, dtype=torch.float64)
        p, q = (p / p.sum()).tolist(), p * 1.0
        q[1] *= 0.5
        q = (q / q.sum()).tolist()
        for sample in (0.0, 0.5, LAST_COIN):
            assert chain(p, q, 0, LAST_COIN, sample, True).reject(triton_walks)[2].item() == 1


def test_a_row_without_a_law_stops_the_walk_only_where_it_is_reached() -> None:
    walk = make(Kind(chain=True, rows=6, broken=True, sparse=True), 5)
    read = walk.reject(triton_walks)[3]
    assert read.any()
    assert (walk.invalid.any(1) & ~read).any()  # rows behind the walk's end may be what they like


@pytest.mark.parametrize("sparse", [True, False])
def test_a_wide_row_is_redrawn_where_its_coin_lies(sparse: bool) -> None:
    """Three chunks, the last one short: every chunk and strip must be where it belongs."""
    vocab, rows = 20_000, 3
    source = torch.Generator().manual_seed(3)
    logits = torch.randn(rows, 2, vocab, generator=source)
    law, warped = laws(logits, torch.ones(rows), torch.ones(rows, 2, vocab, dtype=torch.bool))
    guess = torch.randn(rows, 1, vocab, generator=source)
    probs, ids = guess.softmax(-1).topk(50)
    probs = probs / probs.sum(-1, keepdim=True)
    given = SparseQ(ids, probs) if sparse else DenseQ(guess)
    p = warped[:, 0].softmax(-1)
    q = torch.zeros_like(p).scatter(-1, ids[:, 0], probs[:, 0].double()) if sparse else guess[:, 0].double().softmax(-1)
    rest, tokens = (p - q).clamp(min=0), (q - p).argmax(-1, keepdim=True)  # that token is rejected
    edges = (rest / rest.sum(-1, keepdim=True)).cumsum(-1)
    after = [8191, 12_345, 19_800]
    wanted = torch.stack([(rest[b, start:] > 0).nonzero().min() + start for b, start in enumerate(after)])
    middle = edges.gather(1, wanted.unsqueeze(1)) - rest.gather(1, wanted.unsqueeze(1)) / rest.sum(-1, True) / 2
    draft = Draft(tokens, Tree.chain(1), torch.ones(rows, dtype=torch.long), given)
    toss = torch.full((rows, 2, 1), LAST_COIN, dtype=torch.float64)
    nothing = torch.zeros(rows, 2, dtype=torch.long)
    walk = Walk(logits, torch.ones(rows), law, nothing, nothing.bool(), draft, toss, middle.expand(-1, 2), warped)
    _, n, last, _ = walk.reject(triton_walks)
    assert n.tolist() == [0] * rows
    assert last.tolist() == wanted.tolist()


def test_rows_do_not_see_their_neighbours() -> None:
    walk = make(Kind(rows=2, without=True, vocab=300), 3)
    together = walk.reject(triton_walks)
    for b in range(2):
        alone = walk.at(torch.tensor([b])).reject(triton_walks)
        assert agree(alone, tuple(part[b : b + 1] for part in together))  # type: ignore[arg-type]


def test_rows_may_lie_anywhere(tmp_path: Path) -> None:
    """A row that starts more than 2**31 logits away, in a file of zeros that no page but two is made of."""
    walk = make(Kind(chain=True, rows=2, nodes=2), 2)
    vocab, step = walk.logits.shape[-1], 2**30
    store = numpy.memmap(tmp_path / "logits", numpy.float32, "w+", shape=(5 * step + vocab,))
    far = torch.from_numpy(store).as_strided(walk.logits.shape, (2 * step + step, step, 1))
    far.copy_(walk.logits)
    assert agree(replace(walk, logits=far).reject(triton_walks), walk.reject(reference_walks))


def test_rounds_without_rows_or_nodes_pass_through() -> None:
    walk = make(Kind(rows=2, nodes=2), 0)
    assert [len(part) for part in walk.at(torch.tensor([], dtype=torch.long)).reject(triton_walks)] == [0] * 4
    bare = replace(
        walk.draft, tokens=walk.draft.tokens[:, :0], tree=walk.draft.tree.trim(0), n_valid=torch.tensor([0, 0])
    )
    bare = replace(bare, q=DenseQ(walk.q[1][:, :0]))
    names = ("logits", "law", "drawn", "invalid", "accept", "sample")
    bare_walk = replace(walk, draft=bare, **{name: vars(walk)[name][:, :1] for name in names})
    for run in (bare_walk.match, bare_walk.reject):
        _, n, last, _ = run(triton_walks)
        assert (n.tolist(), last.tolist()) == ([0, 0], walk.drawn[:, 0].tolist())
    assert bare_walk.typical(triton_typical)[2].tolist() == walk.drawn[:, 0].tolist()


def test_a_broken_draft_law_offers_nothing() -> None:
    for sparse in (True, False):
        walk = chain([0.5, 0.5], [math.nan, math.nan], 1, 0.0, 0.9, sparse)
        assert [value.item() for value in walk.reject(triton_walks)[1:3]] == [0, 0]
