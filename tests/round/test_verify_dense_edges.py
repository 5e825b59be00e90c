"""Where the fused path and the lazy one could part: drafts nobody would write, equal tokens, odd settings."""

from __future__ import annotations

import pytest
import torch
from row_cases import kept_by
from tiny import Handmade, RandomTree, Watch, few, plain, prompts, texts_of, tiny
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hf_specgen import Draft, SmallModel, SpeculativeDecoding, ops
from hf_specgen.kernels import reference_rows
from hf_specgen.models.cache_layers import AcceptedPath
from hf_specgen.models.cached_model import CachedModel
from hf_specgen.models.slot_cache import SlotCache
from hf_specgen.models.target import Scores, Target
from hf_specgen.round.coins import CoinSource
from hf_specgen.round.sequences import Sequences, Stops
from hf_specgen.round.verify import verify
from hf_specgen.round.verify_dense import Dense, keeps_ties_by_id, verify_dense
from hf_specgen.round.warp import Warp

LENGTHS = [5, 7]
ALLOWED = {(): [3, 4], (3,): [5], (4,): [6], (3, 5): [7], (4, 6): [8], (3, 5, 7): [9], (4, 6, 8): [10]}


class Fixed(Handmade):
    """Propose the same tokens in every round."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def on_begin(self, sequences) -> None:
        """Need nothing."""

    def on_propose(self, sequences) -> Draft:
        return Draft.from_lists([self.tokens[:room] for room in self.room], sequences.prompt.device)


@pytest.fixture(scope="module")
def target():
    return tiny()


def setting(logits: torch.Tensor, processors: list, draft: Draft | None = None, greedy: bool = False) -> Scores:
    """Hold logits ``(B, S, V)`` of rows whose prompt is one token."""
    rows, _, vocab = logits.shape
    sequences = Sequences(
        prompt=torch.ones(rows, 1, dtype=torch.long),
        tokens=[[1] for _ in range(rows)],
        stops=Stops(99, frozenset(), ()),
        seeds=torch.arange(rows),
        row_ids=torch.zeros(rows, dtype=torch.long),
        warp=Warp(processors, rows),
        vocab_size=vocab,
        greedy=greedy,
    )
    return Scores(logits, draft or Draft.empty(rows), sequences)


def judged(scores: Scores, coins=None, rule: str = "rejection"):
    """Judge by the fused path, on the reference kernels."""
    dense = scores.dense(rule != "gumbel")
    assert dense is not None
    return verify_dense(dense, scores.draft, coins or scores.coins(), rule)


def law_of(dense: Dense) -> torch.Tensor:
    """Return the logits of one place a row with -inf where the definition of the kernels gives no chance."""
    flat, full = dense.logits[:, 0], torch.ones(len(dense.logits))
    stats = reference_rows.row_stats(flat, full, True)
    settings = (full * dense.top_k, full * dense.top_p, full * dense.min_p)
    _, law, _ = reference_rows.row_draw(flat, full, *settings, full.double() / 2, *stats)
    return flat.float().masked_fill(~kept_by(law, flat), -torch.inf)


def run(target, tokens: list[int], **settings):
    pytest.importorskip("triton")
    ids, mask = prompts(LENGTHS)
    loop = SpeculativeDecoding(Fixed(tokens))
    with ops.use_kernels("triton"), ops.record() as calls:
        found = plain(target, ids, mask, max_new_tokens=4, custom_generate=loop, **settings)
    return found, plain(target, ids, mask, max_new_tokens=4, **settings), calls


@pytest.mark.parametrize("tokens", few(([-1, 5], [900, 5]), [900, 5]))
def test_processors_never_see_ids_that_do_not_exist(tokens: list[int], target) -> None:
    """Nothing behind such a node can be accepted, but all rows are warped at once."""
    found, expected, calls = run(target, tokens, repetition_penalty=1.3, no_repeat_ngram_size=2)
    assert torch.equal(found, expected)
    assert calls["row_draw", "triton"] and not calls["argmax", "reference"]


def test_user_code_is_asked_only_about_texts_that_the_target_would_write(target) -> None:
    """A trie has no entry for a rejected draft."""
    width = max(LENGTHS)
    found, expected, calls = run(
        target, [5, 33], prefix_allowed_tokens_fn=lambda _, sent: ALLOWED[tuple(sent.tolist()[width:])]
    )
    assert torch.equal(found, expected) and found[:, width].tolist()[0] in (3, 4)
    assert calls["argmax", "reference"] and not calls["row_draw", "triton"]


@pytest.mark.parametrize("kind", ["fixed", "small", "sampled"])
def test_user_code_is_not_asked_about_texts_behind_their_end(kind: str, target) -> None:
    """A drafted end of text may be accepted; what would follow it is never written."""
    ids, mask = prompts([7])
    known = {**ALLOWED, (3, 5): [60], (4, 6): [60]}
    asked = {"prefix_allowed_tokens_fn": lambda _, sent: known[tuple(sent.tolist()[7:])], "eos_token_id": 60}
    if kind == "sampled":
        asked |= {"do_sample": True, "seed": 1}
    expected = plain(target, ids, mask, custom_generate=SpeculativeDecoding(None), **asked)
    drafter = SmallModel(target, 4, sample=kind == "sampled")
    watch = Watch(Fixed([*expected[0, 8:].tolist(), 9]) if kind == "fixed" else drafter)
    found = plain(target, ids, mask, custom_generate=SpeculativeDecoding(watch), **asked)
    assert torch.equal(found, expected) and found[0, 9] == 60
    assert 60 in watch.drafted and watch.longest >= 2


def test_greedy_warpers_choose_among_equals_as_they_do_alone() -> None:
    """Of equal best tokens top-p leaves the last, a mere argmax takes the first."""
    scores = setting(torch.tensor([[[0.0, 2.0, 1.0, 2.0]]]), [TopPLogitsWarper(0.1)], greedy=True)
    assert judged(scores).next.tolist() == verify(scores, scores.draft, None).next.tolist() == [3]


@pytest.mark.parametrize("top_p", [0.2, 0.5, 0.6, 0.8, 0.9])
def test_equal_tokens_that_reach_the_edge_of_top_p_exactly(top_p: float) -> None:
    """0.8 in float32 is more than 0.8: eight of ten equal tokens would fall short of it."""
    rows = 200
    scores = setting(torch.zeros(rows, 1, 10), [TopPLogitsWarper(top_p)])
    folded = verify_dense(Dense(scores.logits, top_p=top_p), scores.draft, scores.coins(), "rejection")
    wanted = round(10 * top_p)
    assert set(folded.next.tolist()) == set(range(10 - wanted, 10))
    assert len(set(verify(scores, scores.draft, scores.coins()).next.tolist())) == wanted


def test_a_nucleus_is_cut_by_the_kernels_only_where_torch_keeps_equal_logits_in_order() -> None:
    """On a CPU it does not: of sixteen-bit logits the kernel's rule would keep others than transformers keeps."""
    assert keeps_ties_by_id(torch.device("cuda"), 33)
    assert not keeps_ties_by_id(torch.device("cuda"), 32)
    assert not keeps_ties_by_id(torch.device("cpu"), 32_000)
    logits = (torch.randn(2, 1, 32_000, generator=torch.Generator().manual_seed(2)) * 2.5).bfloat16()
    nucleus = TopPLogitsWarper(0.9)
    wanted = nucleus(torch.ones(2, 1, dtype=torch.long), logits[:, 0].float())
    dense = setting(logits, [TopKLogitsWarper(10**10), nucleus]).dense(True)
    assert torch.equal(dense.logits[:, 0], wanted) and dense.top_p == 1
    folded = setting(logits, [TopKLogitsWarper(40), MinPLogitsWarper(0.1)]).dense(True)
    assert folded.logits is logits and (folded.top_k, folded.min_p) == (40, 0.1)
    law = Dense(logits, top_p=0.9)
    stays = law_of(law) > -torch.inf
    assert (stays.sum(-1) == (wanted > -torch.inf).sum(-1)).all() and (stays != (wanted > -torch.inf)).any()


def test_top_k_beyond_any_vocabulary_is_off() -> None:
    scores = setting(torch.randn(3, 1, 40, generator=torch.Generator().manual_seed(0)), [TopKLogitsWarper(10**10)])
    assert torch.equal(judged(scores).next, verify(scores, scores.draft, scores.coins()).next)


def test_gumbel_vectors_of_any_source_decide() -> None:
    """A source of coins that is not ours still couples drafter and target."""

    class Favourite(CoinSource):
        def uniform(self, rows, depth, use, sibling=0):
            return torch.zeros(len(rows), dtype=torch.float64)

        def gumbel(self, rows, depth, vocab_size):
            return 100.0 * torch.nn.functional.one_hot(rows + depth + 2, vocab_size).double()

    draft = Draft.from_lists([[2, 9], [3, 4]])
    scores = setting(torch.zeros(2, 3, 16, dtype=torch.bfloat16), [], draft)
    expected, found = verify(scores, draft, Favourite(), "gumbel"), judged(scores, Favourite(), "gumbel")
    assert expected.n.tolist() == found.n.tolist() == [1, 2]
    assert expected.next.tolist() == found.next.tolist() == [3, 5]


def test_only_accepted_nodes_move_in_the_cache(target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verdict's path may be as wide as the draft; what is not accepted is not worth copying."""
    widths: list[int] = []
    accepted: list[int] = []
    move, commit = AcceptedPath.move, SlotCache.commit

    def counted_move(path: AcceptedPath) -> None:
        if path.nodes is not None:
            widths.append(path.nodes.shape[1])
        move(path)

    monkeypatch.setattr(AcceptedPath, "move", counted_move)

    def counted(cache: SlotCache, counts: list[int], paths: torch.Tensor | None = None, kept=None) -> None:
        if paths is not None:
            accepted.append(max(counts) - 1)
        commit(cache, counts, paths, kept)

    monkeypatch.setattr(SlotCache, "commit", counted)
    ids, mask = prompts(LENGTHS)
    texts = texts_of(plain(target, ids, mask, max_new_tokens=24), mask)
    plain(target, ids, mask, max_new_tokens=24, custom_generate=SpeculativeDecoding(RandomTree(texts, nodes=9)))
    assert widths == accepted and len(widths) > 3


def test_coins_are_on_the_device_before_the_pass(target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copied later, their positions would wait for the whole forward."""
    order = []
    coins, run = Sequences.coins, CachedModel.run
    monkeypatch.setattr(Sequences, "coins", lambda self: order.append("coins") or coins(self))
    monkeypatch.setattr(CachedModel, "run", lambda self, batch: order.append("pass") or run(self, batch))
    scored, score = [], Target.score
    monkeypatch.setattr(Target, "score", lambda self, draft: scored.append(score(self, draft)) or scored[-1])
    ids, mask = prompts(LENGTHS)
    plain(target, ids, mask, max_new_tokens=4, custom_generate=SpeculativeDecoding(None))
    assert order == ["coins", *["coins", "pass"] * 3]
    assert scored[-1].coins().positions.tolist() == [length + 3 for length in LENGTHS]
