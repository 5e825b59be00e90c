"""MedusaDrafter: never another text, the states it reads are the target's own, and its drafts are the heads' own."""

from __future__ import annotations

import copy
import io
import pickle
import random

import pytest
import torch
from support_medusa import final_states, fitted, medusa_buffers, published_loop
from tiny import Watch, build, few, garbled, ours, plain, prompts, some, texts_of, tiny, unnoticed
from torch import Tensor

from hf_specgen import Costs, IncompatibleDrafter, Round, SpecGenError
from hf_specgen.checkpoints.config import DrafterConfig
from hf_specgen.drafters.medusa import MedusaDrafter
from hf_specgen.drafting.shapes import ABSENT, StaticShape, parse_shape
from hf_specgen.models.taps import FINAL

RAGGED = [5, 17, 11, 24]
TREE = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1]]
DYNAMIC = {"top_k": 4, "depth": 3, "nodes": 12}
TREES = {"chain": "chain", "static": TREE, "medusa": "medusa", "dynamic": DYNAMIC}
TOKENS = 28


@pytest.fixture(scope="module")
def target():
    return tiny()


def written(model, lengths: list[int], tokens: int = TOKENS, **settings):
    """Return prompts, their mask, and what plain decoding makes of them."""
    ids, mask = prompts(lengths, vocab=model.config.vocab_size)
    return ids, mask, plain(model, ids, mask, max_new_tokens=tokens, **settings)


class Follow(Watch):
    """Keep every proposal beside the text it was made for, and check the states it was made from."""

    def __init__(self, inner: MedusaDrafter, model=None) -> None:
        super().__init__(inner)
        self.model = model

    def on_begin(self, sequences) -> None:
        super().on_begin(sequences)
        self.sequences, self.made, self.compared = sequences, [], 0

    def on_propose(self, sequences):
        made = [list(tokens) for tokens in sequences.tokens], list(self.room), super().on_propose(sequences)
        self.made.append(made)
        return made[-1]

    def on_observe(self, round: Round) -> None:
        super().on_observe(round)
        for row, tokens in enumerate(self.sequences.tokens):
            if self.model is not None and not self.sequences.finished[row]:
                due = final_states(self.model, tokens[:-1])[-1]
                torch.testing.assert_close(self.session.model.states[row], due, atol=1e-4, rtol=1e-4)
                self.compared += 1


@pytest.mark.parametrize(("tree", "lengths"), some(TREES, (RAGGED, [12], [1])))
def test_greedy_text_is_plain(tree: str, lengths: list[int], target) -> None:
    ids, mask, expected = written(target, lengths)
    texts = texts_of(expected, mask)  # and others, so that heads are wrong at times
    watch = Follow(fitted(target, texts + [garbled(text) for text in texts], tree=TREES[tree]), target)
    result = ours(target, watch, ids, mask, max_new_tokens=TOKENS)
    assert torch.equal(result, expected)
    assert watch.longest >= 2
    assert watch.compared >= len(watch.rounds) - 1, "the states are those of a fresh reading, row by row"
    assert result.speculation.num_accepted_tokens < result.speculation.num_draft_tokens, "wrong drafts were undone"
    assert tree == "chain" or watch.off_spine > 0


@pytest.mark.parametrize("family", few(("qwen3", "gemma3_text", "gpt_oss", "mistral", "gpt2"), "gemma3_text", "gpt2"))
def test_greedy_text_is_plain_for_other_families(family: str) -> None:
    model = build(family, "eager" if family == "gpt_oss" else "sdpa")
    ids, mask, expected = written(model, RAGGED, 24)
    for tree in ("chain", "medusa", DYNAMIC):
        watch = Watch(fitted(model, texts_of(expected, mask), tree=tree))
        assert torch.equal(ours(model, watch, ids, mask, max_new_tokens=24), expected), tree
        assert watch.longest >= 2


KINDS = {
    "no blocks": {"blocks": 0},
    "two blocks": {"blocks": 2},
    "no biases": {"head_bias": False},
    "shared head": {"own_head": False},
    "some ids": {"draft_vocab_size": 24},
}


@pytest.mark.parametrize("kind", few(KINDS, "no blocks", "shared head", "some ids"))
def test_every_kind_of_head(kind: str, target) -> None:
    ids, mask, expected = written(target, RAGGED)
    for tree in TREES.values():
        drafter = fitted(target, texts_of(expected, mask), tree=tree, **KINDS[kind])
        drafter.costs = Costs()  # a chain of any length pays
        watch = Watch(drafter)
        assert torch.equal(ours(target, watch, ids, mask, max_new_tokens=TOKENS), expected)
        assert kind == "shared head" or watch.longest >= 2
        if kind == "some ids":
            known = set(drafter.target_ids.tolist())
            assert watch.drafted and watch.drafted <= known | {ABSENT}
            assert any(token > 23 for token in watch.drafted), "ids are the target's, not the drafter's"


@pytest.mark.parametrize("tree", [TREE, [[0], [0, 0], [0, 0, 0]], [[0], [1], [0, 0]]])
def test_the_published_loop_accepts_the_same(tree: list[list[int]], target) -> None:
    """M-f: Medusa's greedy loop, and ours with the same tree, round by round."""
    ids, mask, expected = written(target, [12])
    drafter = fitted(target, texts_of(expected, mask), tree=tree, num_tokens=len(tree))
    watch = Watch(drafter)
    result = ours(target, watch, ids, mask, max_new_tokens=TOKENS)
    text, accepted = published_loop(target, drafter, ids[0].tolist(), tree, TOKENS)
    assert text[: 12 + TOKENS] == result[0].tolist() == expected[0].tolist()
    counts = [len(round.paths[0]) for round in watch.rounds[1:]]
    assert counts[:-2] == accepted[: len(counts) - 2], "but for the last rounds, which have less room"
    assert max(accepted) >= 2


def closed_paths(seed: int, nodes: int = 20, depth: int = 4) -> list[list[int]]:
    """Return random paths of ranks with every prefix present."""
    source = random.Random(seed)
    paths: list[list[int]] = []
    while len(paths) < nodes:
        above = source.choice([[], *(path for path in paths if len(path) < depth)])
        path = [*above, source.randrange(10)]
        if path not in paths:
            paths.append(path)
    return paths


@pytest.mark.parametrize("tree", ["medusa", TREE, *(closed_paths(seed) for seed in range(6))], ids=str)
def test_trees_are_medusas_buffers(tree, target) -> None:
    """M-e: mask, depths, leaves and each node's candidate, for lists of choices of every form."""
    shape = parse_shape(tree, StaticShape.chain(4))
    expected = medusa_buffers([list(path) for path in shape.paths])
    torch.manual_seed(0)
    drafter = MedusaDrafter(DrafterConfig(method="medusa", hidden_size=32, vocab_size=64, num_heads=4, tree=tree))
    follow = Follow(drafter)
    ids, mask = prompts([6])
    ours(target, follow, ids, mask, max_new_tokens=9)
    texts, _, draft = follow.made[0]
    assert draft.tree.ancestors[0].int().tolist() == expected["mask"]
    assert draft.tree.depth[0].tolist() == expected["positions"]
    root = [texts[0][-1]]
    state = final_states(target, texts[0][:-1])[-1]
    with torch.no_grad():
        flat = root + [token for head in range(4) for token in drafter.head(head, state).topk(10).indices.tolist()]
    assert root + draft.tokens[0].tolist() == [flat[place] for place in expected["indices"]]
    parents = draft.tree.parents[0].tolist()
    leaves = [node for node in range(len(parents)) if node not in parents]
    assert sorted(line[: line.index(-1)] if -1 in line else line for line in expected["retrieve"]) == sorted(
        [0, *(node + 1 for node in way(shape, leaf))] for leaf in leaves
    )


def way(shape: StaticShape, node: int) -> list[int]:
    """Return the nodes from the root's child down to a node."""
    return [] if node < 0 else [*way(shape, shape.parents[node]), node]


def test_a_pad_is_no_token(target, monkeypatch) -> None:
    """M-h: the target goes on with id 0 behind a short leaf; a pad that is token 0 would be accepted there."""
    model = copy.deepcopy(target)
    with torch.no_grad():
        model.lm_head.weight[1:] = 0
        model.lm_head.weight[0] = 0
        model.model.norm.weight.fill_(1.0)
    ids, mask, expected = written(model, RAGGED, 12)  # all logits are equal: the first id, always
    assert not expected[:, ids.shape[1] :].any()
    drafter = fitted(model, [[1, 2, 3, 4, 5, 6, 7, 8]], tree=[[0], [1], [0, 0], [0, 0, 0]])
    with torch.no_grad():
        for head in range(3):  # the best token of every head is 5; 0 is the second best: the short leaf
            last = drafter.get_submodule(str(head))[-1]
            drafter.get_submodule(str(head))[0].linear.weight.zero_()
            last.weight.zero_()
    monkeypatch.setattr(drafter, "head", lambda number, states, parts: ranked(states, [5, 0]))
    watch = Watch(drafter)
    result = ours(model, watch, ids, mask, max_new_tokens=12)
    assert torch.equal(result, expected)
    for round in watch.rounds[1:-1]:
        assert round.paths == [[1]] * 4, "the leaf, and nothing behind it"
    assert result.speculation.tokens_per_round < 3
    for round in watch.rounds[1:]:
        for tokens, count in zip(round.draft.tokens.tolist(), round.proposed, strict=True):
            assert set(tokens[count:]) <= {ABSENT}


def ranked(states: Tensor, order: list[int], vocab: int = 64) -> Tensor:
    """Return logits that rank the given ids first, for every state."""
    logits = torch.zeros(*states.shape[:-1], vocab)
    for place, token in enumerate(order):
        logits[..., token] = len(order) - place
    return logits


@pytest.mark.parametrize("tree", few(TREES, "chain", "dynamic"))
def test_pads_of_ragged_drafts_are_absent(tree: str, target) -> None:
    """Rows near their end draft less than their neighbours; what stands behind their nodes is no token."""
    ids, mask, expected = written(target, RAGGED)
    # heads know two of the rows: these are ahead of the others
    watch, pads = Watch(fitted(target, texts_of(expected, mask)[:2], tree=TREES[tree], num_tokens=3)), []
    for tokens in range(6, 16):
        result = ours(target, watch, ids, mask, max_new_tokens=tokens)
        assert torch.equal(result, expected[:, : ids.shape[1] + tokens])
        for round in watch.rounds:
            drafts = zip(round.draft.tokens.tolist(), round.proposed, strict=True)
            pads += [token for drafted, count in drafts if count for token in drafted[count:]]
    assert set(pads) == {ABSENT}


@pytest.mark.parametrize("tree", TREES)
def test_rows_finish_one_by_one(tree: str, target) -> None:
    ids, mask, expected = written(target, RAGGED)
    ends = sorted({int(row[-20]) for row in expected})
    expected = plain(target, ids, mask, max_new_tokens=TOKENS, eos_token_id=ends)
    watch = Follow(fitted(target, texts_of(expected, mask), tree=TREES[tree], num_tokens=3), target)
    result = ours(target, watch, ids, mask, max_new_tokens=TOKENS, eos_token_id=ends)
    assert torch.equal(result, expected)
    assert watch.compared and watch.longest >= 2
    live = [sum(map(bool, room)) for _, room, _ in watch.made]
    assert live[0] == 4 and 0 < live[-1] < 4


@pytest.mark.parametrize("tree", TREES)
def test_drafts_stay_within_the_budget(tree: str, target) -> None:
    ids, mask, expected = written(target, RAGGED)
    drafter = fitted(target, texts_of(expected, mask), tree=TREES[tree])
    for tokens in range(1, 8):
        follow = Follow(drafter)
        result = ours(target, follow, ids, mask, max_new_tokens=tokens)
        assert torch.equal(result, expected[:, : ids.shape[1] + tokens])
        for (_, room, _), round in zip(follow.made, follow.rounds[1:], strict=True):
            assert all(reached <= space for reached, space in zip(round.reached, room, strict=True))


def test_heads_run_once_a_depth_on_the_rows_that_draft(target, monkeypatch) -> None:
    """As many heads as the draft is deep, one state a row, and no pass of the target but the rounds' own."""
    ids, mask, expected = written(target, RAGGED)
    ends = [int(expected[1, -20])]
    drafter = fitted(target, texts_of(expected, mask), heads=5, tree=[[0], [1], [0, 0], [1, 0]])
    seen, passes, head = [], [], drafter.head
    monkeypatch.setattr(
        drafter, "head", lambda number, states, parts: seen.append((number, len(states))) or head(number, states, parts)
    )
    handle = target.register_forward_hook(unnoticed(lambda *_: passes.append(1)))
    watch = Watch(drafter)
    ours(target, watch, ids, mask, max_new_tokens=TOKENS, eos_token_id=ends)
    handle.remove()
    assert len(passes) == len(watch.rounds)
    drafting = [round for round in watch.rounds[1:] if any(round.proposed)]
    assert seen == [
        (number, sum(map(bool, round.proposed))) for round in drafting for number in range(max(round.reached))
    ]
    assert {rows for _, rows in seen} > {4}, "rows finished and left"
    assert drafter.hidden_layers == (FINAL,)


@pytest.mark.parametrize("nodes", [1, 5, 12, 40])
def test_dynamic_trees_hold_the_likeliest_paths(nodes: int, target) -> None:
    """The product of the heads' laws, by brute force over all paths, for every row and within its room."""
    ids, mask, expected = written(target, RAGGED, 10)
    drafter = fitted(target, texts_of(expected, mask), tree={"top_k": 8, "depth": 3, "nodes": nodes})
    follow = Follow(drafter)
    ours(target, follow, ids, mask, max_new_tokens=10)
    for texts, room, draft in follow.made:
        for row, text in enumerate(texts):
            depth = min(3, room[row])
            state = final_states(target, text[:-1])[-1]
            with torch.no_grad():
                laws = [drafter.head(head, state).log_softmax(-1).topk(8) for head in range(depth)]
            chances = {(): 0.0}
            lines = [()]
            for law in laws:
                pairs = list(zip(law.indices.tolist(), law.values.tolist(), strict=True))
                lines = [(*line, token) for line in lines for token, _ in pairs]
                chances |= {line: chances[line[:-1]] + dict(pairs)[line[-1]] for line in lines}
            del chances[()]
            best = sorted(chances.values(), reverse=True)[:nodes]
            drafted = paths_of(draft, row)
            assert len(set(drafted)) == len(drafted) == len(best)
            if nodes <= 12:  # a frontier of 8 nodes a level is never left by the 12 likeliest
                found = sorted((chances[line] for line in drafted), reverse=True)
                torch.testing.assert_close(torch.tensor(found), torch.tensor(best), atol=1e-4, rtol=1e-4)


def paths_of(draft, row: int) -> list[tuple[int, ...]]:
    """Return the tokens on the way to each of a row's nodes."""
    parents = draft.tree.parents[row if len(draft.tree.parents) > 1 else 0].tolist()
    lines: list[tuple[int, ...]] = []
    for node in range(int(draft.n_valid[row])):
        above = lines[parents[node]] if parents[node] >= 0 else ()
        lines.append((*above, int(draft.tokens[row, node])))
    return lines


def test_dynamic_trees_have_as_many_nodes_as_pay(target) -> None:
    ids, mask, expected = written(target, [12])
    texts = texts_of(expected, mask)
    drafter = fitted(target, texts + [garbled(text) for text in texts], tree={**DYNAMIC, "nodes": None})
    widths = {}
    for name, costs in {"free": Costs(slope=0), "cheap": Costs(slope=0.1), "dear": Costs(slope=2.0, jump=9.0)}.items():
        drafter.costs, watch = costs, Watch(drafter)
        assert torch.equal(ours(target, watch, ids, mask, max_new_tokens=TOKENS), expected)
        widths[name] = watch.width
    assert widths["free"] > widths["cheap"] > widths["dear"] == 0


def test_lengths(target) -> None:
    ids, mask, expected = written(target, RAGGED)
    texts = texts_of(expected, mask)

    def width(heads: int = 4, costs: Costs | None = None, asked: dict | None = None, **settings) -> int:
        drafter = fitted(target, texts, heads, **settings)
        drafter.costs = costs
        watch = Watch(drafter)
        assert torch.equal(ours(target, watch, ids, mask, max_new_tokens=TOKENS, **(asked or {})), expected)
        return watch.width

    cheap = Costs(slope=0.001)
    assert width(costs=cheap) == 4, "as many as there are heads"
    assert width(costs=cheap, num_tokens=2) == 2
    with pytest.warns(UserWarning, match="9 tokens a draft were asked for .* 4 heads"):
        assert width(costs=cheap, num_tokens=9) == 4
    assert width(costs=cheap, asked={"num_assistant_tokens": 3}) == 3, "the call goes first"
    assert width(tree=TREE, num_tokens=2) == 6, "a tree is cut at that depth"
    assert width(tree=TREE, asked={"num_assistant_tokens": 1}) == 3
    assert width(tree=DYNAMIC, asked={"num_assistant_tokens": 1}) == 4
    assert width(costs=Costs(slope=3.0)) == 1, "nothing pays: one token is tried from time to time"


def test_a_chain_that_does_not_pay_is_tried_again_from_time_to_time(target) -> None:
    ids, mask, expected = written(target, [12], 120)
    drafter = fitted(target, [[1, 2, 3, 4, 5, 6, 7]])
    drafter.costs = Costs(slope=0.05, draft=0.3)
    watch = Watch(drafter)
    assert torch.equal(ours(target, watch, ids, mask, max_new_tokens=120), expected)
    counts = [round.proposed[0] for round in watch.rounds[1:]]
    assert counts.count(0) > len(counts) / 2
    assert any(counts[counts.index(0) :])


def test_unsure_rows_draft_less(target) -> None:
    ids, mask, expected = written(target, RAGGED)
    drafter = fitted(target, texts_of(expected, mask), num_tokens=3)
    made = {}
    for threshold in (0.0, 0.5, 1.1):
        watch = Watch(drafter)
        result = ours(target, watch, ids, mask, max_new_tokens=TOKENS, assistant_confidence_threshold=threshold)
        assert torch.equal(result, expected)
        made[threshold] = result.speculation.num_draft_tokens
    assert made[0.0] > made[0.5] > made[1.1] == 0


def test_what_cannot_be_served_is_refused_before_the_first_token(target) -> None:
    ids, mask = prompts([5])
    texts = [[1, 2, 3, 4, 5, 6, 7]]
    settings = {"do_sample": True, "max_new_tokens": 4}
    with pytest.raises(SpecGenError, match="dynamic tree"):
        ours(target, fitted(target, texts, tree=DYNAMIC, sample=True), ids, mask, **settings)
    with pytest.raises(SpecGenError, match="chains only"):
        loop = fitted(target, texts, tree=TREE, sample=True)
        ours(target, loop, ids, mask, **settings, rule="block")
    with pytest.raises(SpecGenError, match="4 tokens deep and the drafter drafts 3"):
        ours(target, fitted(target, texts, tree=[[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]), ids, mask)
    with pytest.raises(IncompatibleDrafter, match="at least one head"):
        MedusaDrafter(DrafterConfig(method="medusa"))
    with pytest.raises(IncompatibleDrafter, match="at least one head"):
        MedusaDrafter(DrafterConfig(method="medusa", num_heads=2, num_head_layers=0, own_head=False))
    with pytest.raises(IncompatibleDrafter, match="hidden_size 32"):
        ours(tiny(hidden_size=64), fitted(target, texts), ids, mask)


def test_copies_and_pickles_hold_no_target_and_no_text(target) -> None:
    ids, mask, expected = written(target, RAGGED)
    drafter = fitted(target, texts_of(expected, mask), own_head=False)
    fresh = len(pickle.dumps(drafter))
    ours(target, drafter, ids, mask)
    buffer = io.BytesIO()
    torch.save(drafter, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(drafter), pickle.loads(pickle.dumps(drafter)), torch.load(buffer, weights_only=False)]
    assert abs(len(pickle.dumps(drafter)) - fresh) < 200
    for copied in copies:
        assert copied._parts is None and not copied._borrowed
        assert torch.equal(ours(target, copied, ids, mask, max_new_tokens=TOKENS), expected)
    assert not any(parameter is target.lm_head.weight for parameter in drafter.parameters())


@pytest.mark.parametrize(("heads", "own_head"), some((torch.bfloat16, torch.float32), (True, False)))
def test_bfloat16(heads: torch.dtype, own_head: bool) -> None:
    """Every token is the best of a fresh reading, or within rounding of it."""
    model = tiny().to(torch.bfloat16)
    ids, mask, expected = written(model, RAGGED)
    for tree in ("chain", TREE, DYNAMIC):
        drafter = fitted(model, texts_of(expected, mask), tree=tree, own_head=own_head).to(heads)
        watch = Watch(drafter)
        result = ours(model, watch, ids, mask, max_new_tokens=TOKENS)
        assert not own_head or watch.longest >= 2
        for row in texts_of(result, mask):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([row])).logits[0, -TOKENS - 1 : -1].float()
            chosen = logits.gather(1, torch.tensor(row[-TOKENS:])[:, None])[:, 0]
            assert float((logits.amax(-1) - chosen).max()) <= 0.02 * float(logits.abs().max())
