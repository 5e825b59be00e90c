"""The records of a round: trees, drafts and what a round says on the host."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specgen.round.records import Draft, Round, Tree, Verdict

PARENTS = [-1, -1, 0, 0, 1, 2]
MASK = ["100000", "010000", "101000", "100100", "010010", "101001"]  # theory, section 4: nodes only, without the root
trees = st.integers(1, 9).flatmap(lambda width: st.tuples(*[st.integers(-1, node - 1) for node in range(width)]))


def line(parents: tuple[int, ...] | list[int], node: int) -> list[int]:
    return [] if node < 0 else [*line(parents, parents[node]), node]


def test_the_mask_and_the_depths_of_the_published_vector() -> None:
    tree = Tree(torch.tensor([PARENTS]))
    block = tree.ancestors[0, 1:, 1:].int().tolist()
    assert ["".join(map(str, row)) for row in block] == MASK
    assert tree.depth.tolist() == [[0, 1, 1, 2, 2, 2, 3]]
    assert tree.ancestors[0, :, 0].all()  # everybody sees the root
    assert tree.ancestors[0, 0, 1:].sum() == 0  # which sees nobody
    assert tree.max_depth == 3
    assert len(tree) == 6


@settings(max_examples=60)
@given(parents=trees)
def test_ancestors_are_the_line_to_the_root(parents: tuple[int, ...]) -> None:
    tree = Tree(torch.tensor([parents]))
    for node in range(len(parents)):
        seen = tree.ancestors[0, node + 1].nonzero().squeeze(1).tolist()
        assert seen == [0, *(step + 1 for step in line(parents, node))]
        assert int(tree.depth[0, node + 1]) == len(line(parents, node))
    assert tree.max_depth == max(len(line(parents, node)) for node in range(len(parents)))


def test_each_row_may_have_its_own_tree() -> None:
    rows = [[-1, 0, 1], [-1, -1, -1], [-1, 0, 0]]
    tree = Tree(torch.tensor(rows))
    assert tree.depth.tolist() == [[0, 1, 2, 3], [0, 1, 1, 1], [0, 1, 2, 2]]
    assert tree.max_depth == 3
    for row, parents in enumerate(rows):
        assert torch.equal(tree.ancestors[row], Tree(torch.tensor([parents])).ancestors[0])


@pytest.mark.parametrize("gamma", range(5))
def test_a_chain_is_a_tree_of_width_one(gamma: int) -> None:
    chain, tree = Tree.chain(gamma), Tree(torch.arange(-1, gamma - 1).unsqueeze(0))
    assert chain.is_chain
    assert len(chain) == gamma
    assert torch.equal(chain.parents, tree.parents)
    assert torch.equal(chain.ancestors, tree.ancestors)
    assert torch.equal(chain.depth, tree.depth)
    assert chain.max_depth == tree.max_depth == gamma


@settings(max_examples=30)
@given(parents=trees, data=st.data())
def test_a_trimmed_tree_is_the_corner_of_the_whole(parents: tuple[int, ...], data: st.DataObject) -> None:
    width = data.draw(st.integers(0, len(parents)))
    whole, trimmed = Tree(torch.tensor([parents])), Tree(torch.tensor([parents])).trim(width)
    assert len(trimmed) == width
    assert torch.equal(trimmed.ancestors, whole.ancestors[:, : width + 1, : width + 1])
    assert trimmed.max_depth == (max((int(whole.depth[0, node + 1]) for node in range(width)), default=0))


def test_a_trimmed_chain_is_a_chain() -> None:
    assert Tree.chain(4).trim(2).is_chain
    assert torch.equal(Tree.chain(4).trim(2).ancestors, Tree.chain(2).ancestors)


def test_an_empty_draft_has_no_nodes() -> None:
    draft = Draft.empty(3)
    assert draft.tokens.shape == (3, 0)
    assert draft.width == draft.tree.max_depth == 0
    assert draft.n_valid.tolist() == [0, 0, 0]
    assert draft.tree.ancestors.shape == (1, 1, 1)


@pytest.mark.parametrize("lists", [[[4, 5], [], [6]], [[], []], [[1, 2, 3]]])
def test_ragged_lists_make_a_chain(lists: list[list[int]]) -> None:
    draft = Draft.from_lists(lists)
    assert draft.n_valid.tolist() == [len(row) for row in lists]
    assert draft.tree.is_chain
    assert draft.tokens.dtype == torch.long
    assert [row[:n] for row, n in zip(draft.tokens.tolist(), draft.n_valid.tolist(), strict=True)] == lists


def test_a_round_tells_what_was_emitted() -> None:
    """Junk behind the accepted part is never told."""
    draft = Draft(
        torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33]]),
        Tree(torch.tensor([[-1, -1, 0, 1]])),
        torch.tensor([4, 3, 0]),
    )
    verdict = Verdict(
        path=torch.tensor([[1, 3], [0, 99], [-7, 0]]),
        n=torch.tensor([2, 1, 0]),
        next=torch.tensor([5, 6, 7]),
        invalid=torch.tensor([False, True, False]),
    )
    told = Round(draft, verdict)
    assert told.emitted == [[11, 13, 5], [20, 6], [7]]
    assert told.paths == [[1, 3], [0], []]
    assert told.proposed == [4, 3, 0]
    assert [row[:2] + row[3:5] for row in told.host] == [[0, 4, 2, 5], [1, 3, 1, 6], [0, 0, 0, 7]]


def test_round_zero_tells_one_token_a_row() -> None:
    verdict = Verdict(
        torch.zeros(2, 0, dtype=torch.long),
        torch.zeros(2, dtype=torch.long),
        torch.tensor([8, 9]),
        torch.zeros(2, dtype=torch.bool),
    )
    told = Round(Draft.empty(2), verdict)
    assert told.emitted == [[8], [9]]
    assert told.paths == [[], []]
    assert told.proposed == [0, 0]


def test_the_host_is_read_once() -> None:
    verdict = Verdict(
        torch.zeros(1, 0, dtype=torch.long),
        torch.zeros(1, dtype=torch.long),
        torch.tensor([8]),
        torch.zeros(1, dtype=torch.bool),
    )
    told = Round(Draft.empty(1), verdict)
    assert all(told.host is again for again in itertools.repeat(told.host, 2))
