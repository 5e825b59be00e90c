"""The walks over dense logits judge exactly as ``verify`` does over lazy ones: same scores, coins and drafts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from coin_boxes import TableScores, same
from walk_cases import Kind, Walk, coins_of, make

from hf_specgen import ops
from hf_specgen.round.records import DenseQ, Draft, Verdict
from hf_specgen.round.verify import verify

ROUNDS = 8
KINDS = {
    "chain": Kind(chain=True),
    "chain sparse": Kind(chain=True, sparse=True),
    "tree": Kind(),
    "tree sparse": Kind(sparse=True),
    "distinct siblings": Kind(without=True),
    "distinct siblings sparse": Kind(sparse=True, without=True),
    "truncated": Kind(truncated=True, without=True),
    "truncated chain": Kind(chain=True, truncated=True, sparse=True),
    "one tree, tiny vocabulary": Kind(one_tree=True, vocab=6, without=True),
    "narrow draft": Kind(q_vocab=25),
    "broken rows": Kind(broken=True, truncated=True),
    "broken chain": Kind(broken=True, chain=True, sparse=True),
}


def judged(walk: Walk, rule: str, greedy: bool = False) -> Verdict:
    """What ``verify`` says."""
    draft, warped = walk.draft, walk.warped.clone()
    warped[walk.invalid] = torch.nan
    if isinstance(draft.q, DenseQ):
        draft = replace(draft, q=DenseQ(draft.q.logits.double()))
    if rule == "match":
        draft = replace(draft, q=None)
    return verify(TableScores(warped, greedy), draft, coins_of(walk, rule), "block" if rule == "block" else "rejection")


def walked(walk: Walk, rule: str) -> Verdict:
    run = {"match": walk.match, "reject": walk.reject, "block": walk.block}[rule]
    return Verdict(*run(ops))  # type: ignore[arg-type]


def valid(verdict: Verdict, rows: torch.Tensor) -> Verdict:
    return Verdict(verdict.path[rows], verdict.n[rows], verdict.next[rows], verdict.invalid[rows])


PAIRS = [
    (name, rule) for name in KINDS for rule in ("match", "reject", "block") if rule != "block" or KINDS[name].chain
]


@pytest.mark.parametrize(("name", "rule"), PAIRS)
def test_the_walks_judge_as_verify_does(name: str, rule: str) -> None:
    kept = 0
    for seed in range(ROUNDS):
        walk = make(KINDS[name], seed)
        with ops.record() as calls:
            ours = walked(walk, rule)
        assert sum(calls.values()) == 1
        theirs = judged(walk, rule)
        assert torch.equal(ours.invalid, theirs.invalid)
        sound = ~ours.invalid  # a walk stops at a broken row; what verify makes of it is not looked at
        assert same(valid(ours, sound), valid(theirs, sound))
        kept += int(ours.n.sum())
    assert kept > ROUNDS / 2  # the rounds are no trivial ones


@pytest.mark.parametrize("rule", ["match", "reject", "block"])
def test_greedy_rows_follow_the_best_token_beside_sampled_ones(rule: str) -> None:
    greedy_rows = 0
    for seed in range(ROUNDS):
        walk = make(Kind(greedy=True, chain=rule == "block"), seed)
        ours, greedy = walked(walk, rule), walk.temperature == 0
        best, rest = greedy.nonzero().squeeze(1), (~greedy).nonzero().squeeze(1)
        for rows, all_greedy in ((best, True), (rest, False)):
            if len(rows):
                assert same(valid(ours, rows), judged(walk.at(rows), rule, all_greedy))
        greedy_rows += len(best)
    assert greedy_rows > ROUNDS / 2


def brute_force_typical(walk: Walk, b: int, epsilon: float, delta: float) -> tuple[list[int], int]:
    """List all paths of typical tokens; take the deepest, of equals the likeliest, then the first."""
    tokens, parents, n_valid = walk.drafted
    parents = parents.expand(len(tokens), -1)
    paths: list[list[int]] = [[]]
    likely = {-1: 1.0}
    for node in range(int(n_valid[b])):
        parent, token = int(parents[b, node]), int(tokens[b, node])
        p = walk.warped[b, parent + 1].softmax(-1)
        entropy = float(torch.distributions.Categorical(p).entropy())
        typical = 0 <= token < len(p) and p[token] > min(epsilon, delta * 2.718281828459045**-entropy)
        if typical and parent in likely:
            likely[node] = likely[parent] * float(p[token])
        paths += [[*path, node] for path in paths if (path[-1] if path else -1) == parent and typical]
    path = max(paths, key=lambda path: (len(path), likely[path[-1]] if path else 1.0, -path[-1] if path else 0))
    return path, int(walk.drawn[b, path[-1] + 1 if path else 0])


def test_typical_acceptance_keeps_the_deepest_typical_path() -> None:
    depths = set()
    for seed in range(ROUNDS):
        walk = make(Kind(truncated=seed % 2 == 0), seed)
        path, n, last, invalid = walk.typical(ops, 0.2, 0.5)  # type: ignore[arg-type]
        for b in range(len(n)):
            wanted = brute_force_typical(walk, b, 0.2, 0.5)
            assert (path[b, : n[b]].tolist(), int(last[b])) == wanted
        depths |= set(n.tolist())
        assert not invalid.any()
    assert {0, 1, 2} <= depths


def test_typical_acceptance_of_a_greedy_row_is_a_match() -> None:
    draft = Draft(torch.tensor([[4, 2, 2, 1]]), make(Kind(nodes=4), 0).draft.tree, torch.tensor([4]))
    drawn = torch.tensor([[2, 9, 1, 1, 7]])
    parents = torch.tensor([[-1, -1, -1, 2]])
    zeros, law = torch.zeros(1, 5, 10), torch.tensor([0.0, 1.0, 0.0, 0.0]).double().expand(1, 5, 4)
    arguments = (drawn, torch.zeros(1, 5, dtype=torch.bool), draft.tokens, parents, draft.n_valid)
    path, n, last, _ = ops.typical_tree(zeros, torch.zeros(1), law, *arguments, 0.3, 0.6)
    assert (path[0, :2].tolist(), n.item(), last.item()) == ([2, 3], 2, 7)  # of two twins the one that leads deeper
    matched = ops.match_tree(*arguments)
    assert (matched[0][0, :1].tolist(), matched[1].item(), matched[2].item()) == ([1], 1, 1)
