"""The Triton twin of block verification computes what its reference defines; its law is in test_triton_laws."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny import few
from walk_cases import Kind, agree, make

from hf_specgen import ops
from hf_specgen.kernels import reference_walks
from hf_specgen.round.records import DenseQ

triton = pytest.importorskip("triton")
from hf_specgen.kernels import triton_block  # noqa: E402 - after the guard

KINDS = {
    "dense": Kind(chain=True, truncated=True),
    "sparse": Kind(chain=True, sparse=True, dtype=torch.bfloat16),
    "greedy rows between": Kind(chain=True, greedy=True, truncated=True, sparse=True, vocab=9),
    "broken rows": Kind(chain=True, broken=True),
    "narrow draft": Kind(chain=True, q_vocab=250, vocab=300, dtype=torch.float16, nodes=3),
    "one node": Kind(chain=True, nodes=1, vocab=129, sparse=True),
}


def accepted(name: str, seed: int) -> int:
    """Assert that kernel and reference agree; return how many tokens were kept."""
    walk = make(KINDS[name], seed)
    found = walk.block(triton_block)
    assert agree(found, walk.block(reference_walks))
    return int(found[1].sum())


@pytest.mark.parametrize("name", few(KINDS, "dense", "sparse", "broken rows", "narrow draft"))
def test_the_kernel_agrees_with_its_reference(name: str) -> None:
    accepted(name, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_many_chains_agree(name: str) -> None:
    assert sum(accepted(name, seed) for seed in range(2, 20)) > 15


@pytest.mark.gpu
@pytest.mark.parametrize("name", KINDS)
def test_the_kernel_agrees_with_its_reference_on_a_card(name: str) -> None:
    for seed in range(40):
        here = make(replace(KINDS[name], rows=16), seed)
        assert agree(here.to("cuda").block(triton_block), here.block(reference_walks))


def test_the_door_leads_to_the_kernel() -> None:
    walk = make(Kind(chain=True, rows=1, nodes=1), 0)
    with ops.use_kernels("triton"), ops.record() as calls:
        walk.block(ops)  # type: ignore[arg-type]
    assert calls == {("block_chain", "triton"): 1}


@pytest.mark.parametrize("tests", [("test_schema", "test_faketensor"), pytest.param(None, marks=pytest.mark.slow)])
def test_the_operator_is_well_formed(tests: tuple[str, ...] | None) -> None:
    walk = make(Kind(chain=True, rows=2, nodes=2, vocab=5), 0)
    tokens, _, n_valid = walk.drafted
    arguments = (*walk.rows, tokens, n_valid, *walk.q, walk.accept[:, 0, :2].contiguous(), walk.sample)
    torch.library.opcheck(triton_block.block_chain, arguments, **({"test_utils": tests} if tests else {}))


@pytest.mark.slow
def test_rows_do_not_see_their_neighbours() -> None:
    walk = make(Kind(chain=True, rows=3, vocab=300), 3)
    together = walk.block(triton_block)
    for b in range(3):
        alone = walk.at(torch.tensor([b])).block(triton_block)
        assert agree(alone, tuple(part[b : b + 1] for part in together))  # type: ignore[arg-type]


def test_a_draft_of_the_target_itself_is_kept_whole() -> None:
    """p = q leaves nothing: h stays 1 and every coin passes, the last one too."""
    walk = make(Kind(chain=True, rows=3, nodes=3), 4)
    tokens = walk.warped[:, :-1].argmax(-1)
    draft = replace(walk.draft, q=DenseQ(walk.warped[:, :-1].float()), tokens=tokens, n_valid=torch.tensor([0, 2, 3]))
    coins = torch.full_like(walk.accept, 1.0 - 1e-5)
    _, n, last, _ = replace(walk, draft=draft, accept=coins).block(triton_block)
    assert n.tolist() == [0, 2, 3]
    assert last.tolist() == walk.drawn.gather(1, n.unsqueeze(1)).squeeze(1).tolist()


def test_rounds_without_rows_or_nodes_pass_through() -> None:
    walk = make(Kind(chain=True, rows=2, nodes=2), 0)
    assert [len(part) for part in walk.at(torch.tensor([], dtype=torch.long)).block(triton_block)] == [0] * 4
    bare = replace(
        walk.draft, tokens=walk.draft.tokens[:, :0], tree=walk.draft.tree.trim(0), n_valid=torch.zeros(2).long()
    )
    bare = replace(bare, q=DenseQ(walk.q[1][:, :0]))
    names = ("logits", "law", "drawn", "invalid", "accept", "sample")
    _, n, last, _ = replace(walk, draft=bare, **{name: vars(walk)[name][:, :1] for name in names}).block(triton_block)
    assert (n.tolist(), last.tolist()) == ([0, 0], walk.drawn[:, 0].tolist())
