"""What EAGLE drafts is what its layers say, it never changes the text, and a call leaves nothing behind."""

from __future__ import annotations

import copy
import gc
import pickle
from itertools import product

import pytest
import torch
from feature_cases import RAGGED, SHAPES, Steered, config_of, drafter_of, rollout, run_pairs, true_features
from oracle import drafter_from, eagle3_oracle, eagle_oracle, oracle_target
from tiny import Watch, build, few, ours, plain, prompts, some, texts_of, tiny
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from hf_specgen import Costs, IncompatibleDrafter, SpecGenError, SpeculativeDecoding
from hf_specgen.drafters.eagle import EagleDrafter
from hf_specgen.drafting.drafter import Call, TargetView

METHODS = ["eagle", "eagle3"]


class Record(Steered):
    """Keep every round's own draft beside the texts it was made for."""

    def on_begin(self, sequences) -> None:
        super().on_begin(sequences)
        self.made: list[tuple[list[list[int]], list[int], object]] = []

    def on_propose(self, sequences):
        room = self.room
        draft = super().on_propose(sequences)
        self.made.append((self.before, room, self.own))
        return draft


def paths_of(draft, row: int) -> list[tuple[int, ...]]:
    """Return the tokens on the way to each valid node."""
    parents = draft.tree.parents[row if len(draft.tree.parents) > 1 else 0].tolist()
    paths: list[tuple[int, ...]] = []
    for node, token in enumerate(draft.tokens[row, : int(draft.n_valid[row])].tolist()):
        paths.append((*(paths[parents[node]] if parents[node] >= 0 else ()), token))
    return paths


class Book:
    """Ask a drafter for the law behind a path, without its cache."""

    def __init__(self, drafter, model, text: list[int]) -> None:
        self.drafter, self.text = drafter, text
        self.features = true_features(drafter, model, text)

    def ranked(self, path: tuple[int, ...], count: int) -> list[tuple[int, float]]:
        """Return the best target ids behind a path, with their log-probabilities."""
        logits = rollout(self.drafter, self.text, self.features, list(path))
        best = logits.log_softmax(-1).topk(count)
        return list(zip(self.drafter.to_target(best.indices).tolist(), best.values.tolist(), strict=True))

    def chain(self, ranks: list[int]) -> list[tuple[int, ...]]:
        tokens, features, paths = self.text[1:], self.features, [()]
        for rank in ranks:
            states = run_pairs(self.drafter, tokens, features)
            best = self.drafter.logits(states[:, -1])[0].topk(rank + 1).indices[-1]
            tokens, features = [*tokens, int(self.drafter.to_target(best))], torch.cat((features, states[:, -1:]), 1)
            paths.append((*paths[-1], tokens[-1]))
        return paths[1:]

    def static(self, shape: list[list[int]], depth: int) -> list[tuple[int, ...]]:
        known: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
        for ranks in sorted(shape, key=lambda ranks: (len(ranks), ranks)):
            if len(ranks) <= depth:
                above = known[tuple(ranks[:-1])]
                known[tuple(ranks)] = (*above, self.ranked(above, ranks[-1] + 1)[-1][0])
        return list(known.values())[1:]

    def dynamic(self, top_k: int, depth: int, nodes: int) -> set[tuple[int, ...]]:
        frontier: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
        seen: list[tuple[tuple[int, ...], float]] = []
        for _ in range(depth):
            children = [
                ((*path, token), score + gain) for path, score in frontier for token, gain in self.ranked(path, top_k)
            ]
            seen += children
            frontier = sorted(children, key=lambda child: -child[1])[:top_k]
        return {path for path, _ in sorted(seen, key=lambda child: -child[1])[:nodes]}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", METHODS)
def test_drafts_are_what_the_layers_say(method: str, shape: str) -> None:
    model = tiny()
    ids, mask = prompts([3, 17, 8])
    expected = plain(model, ids, mask, max_new_tokens=12)
    settings = {**SHAPES[shape], "sliding_window": 7 if method == "eagle" else None}
    watch = Record(drafter_of(method, **settings), texts_of(expected, mask))
    assert torch.equal(ours(model, watch, ids, mask, max_new_tokens=12), expected)
    checked = 0
    for texts, room, draft in [*watch.made[:2], watch.made[-1]]:
        for row, text in enumerate(texts):
            if not room[row]:
                assert not draft.n_valid[row]
                continue
            book, made = Book(watch.inner, model, text), paths_of(draft, row)
            if shape == "dynamic":
                due = book.dynamic(3, min(4, room[row]), 9)
                assert set(made) == due and len(made) == len(due)
            else:
                tree = [[0] * depth for depth in range(1, 5)] if shape == "chain" else SHAPES[shape]["tree"]
                assert made == book.static(tree, room[row])
            checked += len(made)
    assert checked >= 20 and watch.longest >= 2


def test_a_draft_longer_than_the_window_stays_whole() -> None:
    model = tiny()
    ids, mask = prompts([24, 9])
    expected = plain(model, ids, mask, max_new_tokens=40)
    drafter = drafter_of("eagle3", tree="chain", num_tokens=30, sliding_window=5, num_hidden_layers=2)
    watch = Record(drafter, texts_of(expected, mask), hit=0.9)
    assert torch.equal(ours(model, watch, ids, mask, max_new_tokens=40), expected)
    for texts, _, draft in watch.made[:2]:
        for row, text in enumerate(texts):
            made = draft.tokens[row, : int(draft.n_valid[row])].tolist()
            assert len(made) > 20 and made == list(Book(drafter, model, text).chain([0] * len(made))[-1])


@pytest.mark.parametrize("method", METHODS)
def test_greedy_text_is_plain_at_any_length_and_end(method: str) -> None:
    model = tiny()
    ids, mask = prompts(RAGGED)
    known = plain(model, ids, mask, max_new_tokens=24)
    texts = texts_of(known, mask)
    end = int(known[1, 24 + 9])
    for shape in SHAPES:
        watch = Steered(drafter_of(method, **SHAPES[shape]), texts)
        for budget in (1, 2, 3, 6):
            assert torch.equal(ours(model, watch, ids, mask, max_new_tokens=budget), known[:, : 24 + budget]), budget
        settings = {"max_new_tokens": 24, "eos_token_id": end}
        expected = plain(model, ids, mask, **settings)
        assert not torch.equal(expected, known) and torch.equal(ours(model, watch, ids, mask, **settings), expected)
        assert watch.longest >= 2


@pytest.mark.parametrize(("method", "lengths"), some(METHODS, ([12], RAGGED)))
def test_the_default_is_an_adaptive_chain(method: str, lengths: list[int]) -> None:
    model = tiny()
    ids, mask = prompts(lengths)
    expected = plain(model, ids, mask, max_new_tokens=60)
    drafter = drafter_of(method)
    drafter.costs = Costs(draft=0.02, slope=0.01)
    widths = []
    for hit in (0.0, 0.97):
        watch = Steered(drafter, texts_of(expected, mask), hit)
        assert torch.equal(ours(model, watch, ids, mask, max_new_tokens=60), expected)
        assert all(round.draft.tree.is_chain for round in watch.rounds)
        proposed = [max(round.proposed) for round in watch.rounds[1:]]
        widths.append(sum(proposed) / len(proposed))
    assert widths[0] < 2 < 4 < widths[1]


def test_a_call_may_ask_for_lengths() -> None:
    model = tiny()
    ids, mask = prompts([12])
    for settings, shape, width in (
        ({"num_assistant_tokens": 3}, "chain", 3),
        ({"num_assistant_tokens": 1}, "static", 3),
        ({"num_assistant_tokens": 1}, "dynamic", 3),
        ({"assistant_confidence_threshold": 2.0}, "chain", 0),
    ):
        watch = Watch(drafter_of("eagle", **SHAPES[shape]))
        settings["max_new_tokens"] = 12
        assert torch.equal(ours(model, watch, ids, mask, **settings), plain(model, ids, mask, max_new_tokens=12))
        assert max(max(round.proposed) for round in watch.rounds) == width, settings
    for threshold, widths in ((0.9, {0, 1, 2, 3, 4}), (0.0, {4})):
        drafter = drafter_of("eagle", tree="chain", num_tokens=4)
        drafter.confidence = threshold
        watch = Watch(drafter)
        ours(model, watch, ids, mask, max_new_tokens=16)
        assert {round.proposed[0] for round in watch.rounds[1:-4]} <= widths
    for tree in ([[0], [0, 0], [0, 0, 0]], [[1], [1, 0], [1, 0, 2]]):
        watch = Record(drafter_of("eagle", tree=tree), texts_of(plain(model, ids, mask, max_new_tokens=12), mask))
        ours(model, watch, ids, mask, max_new_tokens=12)
        assert watch.width == 3 and all(round.draft.tree.is_chain for round in watch.rounds)
        texts, _, draft = watch.made[0]
        assert paths_of(draft, 0) == Book(watch.inner, model, texts[0]).chain([path[-1] for path in tree])


def test_processors_that_reorder_tokens_are_asked_when_drafting() -> None:
    model = tiny()
    ids, mask = prompts([5, 17])
    for settings in ({"repetition_penalty": 8.0}, {"bad_words_ids": [[token] for token in range(1, 50)]}):
        settings["max_new_tokens"] = 12
        expected = plain(model, ids, mask, **settings)
        for shape in SHAPES:
            watch = Record(drafter_of("eagle3", draft_vocab_size=16, **SHAPES[shape]), texts_of(expected, mask))
            assert torch.equal(ours(model, watch, ids, mask, **settings), expected)
            assert watch.longest >= 1
            found = {
                token
                for _, _, draft in watch.made
                for row in range(2)
                for path in paths_of(draft, row)
                for token in path
            }
            assert found and ("bad_words_ids" not in settings or not found & set(range(1, 50)))


@pytest.mark.parametrize(
    ("method", "shape", "rule"),
    few(
        product(METHODS, SHAPES, ("rejection", "gumbel")),
        *(("eagle", "static", "gumbel"), ("eagle3", "chain", "rejection"), ("eagle3", "dynamic", "gumbel")),
    ),
)
def test_the_text_of_the_seed(method: str, shape: str, rule: str) -> None:
    """Deterministic drafts never change it; a row alone, permuted or in company writes the same."""
    model = build("llama").double()  # in float32 a coin on a boundary of two laws would follow the batch's shape
    ids, mask = prompts(RAGGED)
    seeds, settings = [3, 5, 8, 13], {"do_sample": True, "temperature": 0.6, "top_k": 0, "max_new_tokens": 16}

    def write(drafter, rows: list[int]) -> list[list[int]]:
        decode = SpeculativeDecoding(drafter, rule)
        chosen = [seeds[row] for row in rows]
        result = plain(model, ids[rows], mask[rows], custom_generate=decode, seed=chosen, **settings)
        return texts_of(result, mask[rows])

    expected = write(None, [0, 1, 2, 3])
    sample = rule == "gumbel" and shape != "dynamic"
    watch = Steered(drafter_of(method, sample=sample, **SHAPES[shape]).double(), expected)
    for order in ([0, 1, 2, 3], [2, 0, 3, 1], [1], [3, 2]):
        watch.texts = [expected[row] for row in order]
        assert write(watch, order) == watch.texts, order
        assert watch.longest >= 1
    assert all(round.draft.q is None for round in watch.rounds)


@pytest.mark.parametrize("shape", few(("chain", "static"), "static"))
def test_drawn_drafts_do_not_look_at_their_neighbours(shape: str) -> None:
    model = build("llama").double()
    ids, mask = prompts(RAGGED)
    seeds, settings = [3, 5, 8, 13], {"do_sample": True, "temperature": 1.5, "top_k": 0, "max_new_tokens": 16}
    shapes = {"chain": {"tree": "chain"}, "static": SHAPES["static"]}
    drafter = drafter_of("eagle3", draft_vocab_size=16, sample=True, **shapes[shape]).double()

    def write(rows: list[int]) -> list[list[int]]:
        self = Watch(drafter)
        chosen = [seeds[row] for row in rows]
        result = ours(model, self, ids[rows], mask[rows], seed=chosen, **settings)
        assert any(round.draft.q is not None and round.draft.width > 1 for round in self.rounds)
        return texts_of(result, mask[rows])

    together = write([0, 1, 2, 3])
    assert write([2, 0, 3, 1]) == [together[row] for row in (2, 0, 3, 1)]
    assert [write([row])[0] for row in range(4)] == together


@pytest.mark.parametrize("shape", few(SHAPES, "dynamic"))
def test_a_call_leaves_nothing_behind(shape: str) -> None:
    model = tiny()
    ids, mask = prompts([9, 14])
    drafter = drafter_of("eagle", **SHAPES[shape])
    state, names = {name: value.clone() for name, value in drafter.state_dict().items()}, set(vars(drafter))

    calls = iter(range(6))

    def stop(row: int, tokens: list[int]) -> None:
        if next(calls) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ours(model, drafter, ids, mask, on_tokens=stop)
    gc.collect()
    assert torch.equal(ours(model, drafter, ids, mask), plain(model, ids, mask)), "and the next call is not disturbed"
    gc.collect()
    assert set(vars(drafter)) == names
    assert all(torch.equal(value, state[name]) for name, value in drafter.state_dict().items())
    assert not any(module._forward_hooks for module in (*model.modules(), *drafter.modules()))


def test_copies_and_pickles_hold_neither_target_nor_call() -> None:
    model = tiny()
    ids, mask = prompts([9, 14])
    drafter = drafter_of("eagle3", tree="chain", num_tokens=4, draft_vocab_size=16)
    watch = Watch(drafter)
    expected = ours(model, watch, ids, mask)
    drafter.begin(Call(_sequences(model, ids), TargetView(model)))
    weights = sum(value.numel() * value.element_size() for value in drafter.state_dict().values())
    data = pickle.dumps(drafter)
    assert len(data) < weights + 60_000
    for twin in (copy.deepcopy(drafter), pickle.loads(data)):
        assert twin._parts is None and not twin._borrowed
        with pytest.raises(IncompatibleDrafter, match="no target yet"):
            twin.embed(torch.zeros(1).long())
        assert torch.equal(ours(model, twin, ids, mask), expected)
    assert drafter._borrowed


def _sequences(model, ids):
    kept = []

    class Keep(Watch):
        def on_begin(self, sequences) -> None:
            kept.append(sequences)
            super().on_begin(sequences)

    ours(model, Keep(drafter_of("eagle")), ids, max_new_tokens=1)
    return kept[0]


@pytest.mark.parametrize("method", few(METHODS, "eagle3"))
def test_dtypes_may_differ(method: str) -> None:
    target = oracle_target("delay")
    write = eagle_oracle if method == "eagle" else eagle3_oracle
    ids, mask = prompts([4, 9, 6], vocab=20)
    for ours_dtype, theirs in (
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float32),
    ):
        model = copy.deepcopy(target.model).to(theirs)
        expected = plain(model, ids, mask, max_new_tokens=12)
        for shape in SHAPES:
            watch = Watch(drafter_from(write(target, "delay", **SHAPES[shape]), ours_dtype))
            assert torch.equal(ours(model, watch, ids, mask, max_new_tokens=12), expected)
            assert watch.longest == (3 if shape == "static" else 4), (ours_dtype, theirs, shape)


def test_refusals_come_before_the_first_token() -> None:
    model = tiny()
    ids, _ = prompts([6])
    seen: list[int] = []

    def refused(drafter, error, match: str, **settings) -> None:
        with pytest.raises(error, match=match):
            ours(model, drafter, ids, on_tokens=lambda row, tokens: seen.extend(tokens), **settings)

    refused(drafter_of("eagle", sample=True, **SHAPES["dynamic"]), SpecGenError, "dynamic tree", do_sample=True)
    refused(drafter_of("eagle", **SHAPES["static"]), SpecGenError, "chains only", assistant_confidence_threshold=0.5)
    with pytest.raises(SpecGenError, match="bush"):
        drafter_of("eagle", tree="bush")
    with pytest.raises(SpecGenError, match="at least 1"):
        drafter_of("eagle", num_tokens=0, tree="chain")
    refused(drafter_of("eagle").to("meta"), IncompatibleDrafter, r"on meta .* drafter.to\('cpu'\)")
    refused(drafter_of("eagle", vocab_size=65), IncompatibleDrafter, "vocab_size 65")
    refused(drafter_of("eagle", hidden_size=64), IncompatibleDrafter, "hidden_size 64")
    refused(drafter_of("eagle3", aux_layer_boundaries=[0, 1, 3]), IncompatibleDrafter, "layer 3")
    assert seen == []
    sampled = drafter_of("eagle", sample=True, **SHAPES["dynamic"])
    assert torch.equal(ours(model, sampled, ids), plain(model, ids)), "a greedy target draws nothing"
    with pytest.raises(SpecGenError, match="layer_type"):
        EagleDrafter(config_of("eagle", layer_type="mamba"))
    for settings in ({"own_head": True}, {"target_hidden_size": 64}):
        with pytest.raises(SpecGenError, match="eagle3"):
            EagleDrafter(config_of("eagle", **settings))


def test_the_models_own_penalty_object_is_left_alone() -> None:
    model = tiny()
    ids, mask = prompts([5, 17])
    penalty = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(2.0)])
    watch = Watch(drafter_of("eagle", **SHAPES["static"]))
    expected = plain(model, ids, mask, logits_processor=penalty)
    assert torch.equal(ours(model, watch, ids, mask, logits_processor=penalty), expected)
