"""Processors at draft nodes: what transformers' own list gives on each node's true padded prefix, or a refusal."""

from __future__ import annotations

import copy
import inspect
from functools import partial

import pytest
import torch
from tiny import prompts
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as hf

from hf_specgen import Draft, Round, SpecGenError, Tree, Verdict
from hf_specgen.models.target import Scores
from hf_specgen.round.sequences import Sequences, Stops
from hf_specgen.round.verify import verify
from hf_specgen.round.warp import Warp

ROWS, NODES, VOCAB, LENGTHS = 3, 10, 64, [9, 4, 12]
WIDTH = max(LENGTHS)
EOS = 5
ENCODED = torch.tensor([[7, 8, 9, 7], [8, 7, 8, 3], [9, 9, 7, 4]])


def setting(processors: list, seed: int = 0) -> Scores:
    """Make three ragged rows that have written 3, 1 and 2 tokens, and one scored random tree."""
    ids, mask = prompts(LENGTHS)
    generator = torch.Generator().manual_seed(seed)
    sequences = Sequences(
        prompt=ids,
        tokens=[row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True)],
        stops=Stops(WIDTH + 40, frozenset(), ()),
        seeds=torch.arange(ROWS),
        row_ids=torch.zeros(ROWS, dtype=torch.long),
        warp=Warp(processors, ROWS),
        vocab_size=VOCAB,
        greedy=False,
    )
    written = Draft.from_lists([[7, 8], [], [9]])
    path = torch.tensor([[0, 1], [0, 0], [0, 0]])
    verdict = Verdict(path, torch.tensor([2, 0, 1]), torch.tensor([7, 3, 9]), torch.zeros(ROWS, dtype=torch.bool))
    sequences.append(Round(written, verdict))
    assert sequences.new == [3, 1, 2]
    parents = [[int(torch.randint(-1, n, (1,), generator=generator)) for n in range(NODES)] for _ in range(ROWS)]
    tokens = torch.randint(1, VOCAB, (ROWS, NODES), generator=generator)
    tokens[:, ::2] = torch.tensor([7, 8, 9])[:, None]  # repeats, so that penalties and n-grams have something to do
    draft = Draft(tokens, Tree(torch.tensor(parents)), torch.full((ROWS,), NODES))
    return Scores(3 * torch.randn(ROWS, NODES + 1, VOCAB, generator=generator), draft, sequences)


def true_prefix(scores: Scores, row: int, node: int) -> torch.Tensor:
    """Follow the parents from a scored coordinate to the root, by hand."""
    above, at = [], node - 1
    while at >= 0:
        above.append(int(scores.draft.tokens[row, at]))
        at = int(scores.draft.tree.parents[row, at])
    sequences = scores.sequences
    text = sequences.prompt[row].tolist() + sequences.tokens[row][LENGTHS[row] :] + above[::-1]
    return torch.tensor(text)


def plain_rows(scores: Scores, make) -> torch.Tensor:
    """Give each (row, node) as plain generate() would: a fresh list over B rows, this row's text at its own place."""
    generator = torch.Generator().manual_seed(99)
    found = []
    for row in range(ROWS):
        for node in range(NODES + 1):
            prefix = true_prefix(scores, row, node)
            batch = torch.randint(1, VOCAB, (ROWS, len(prefix)), generator=generator)
            logits = torch.randn(ROWS, VOCAB, generator=generator)
            batch[row], logits[row] = prefix, scores.logits[row, node]
            found.append(LogitsProcessorList(make())(batch, logits)[row])
    return torch.stack(found)


def warped(scores: Scores) -> torch.Tensor:
    """Ask for every (row, node), in a shuffled order."""
    order = torch.randperm(ROWS * (NODES + 1), generator=torch.Generator().manual_seed(4))
    return scores.at(order // (NODES + 1), order % (NODES + 1))[order.argsort()]


def allowed(batch_id: int, sent: torch.Tensor) -> list[int]:
    """Allow a set that depends on the row and on the whole text."""
    return [(7 * batch_id + int(sent.sum()) + step) % VOCAB for step in range(0, 30, 3)]


def decay() -> LogitsProcessor:
    return hf.ExponentialDecayLengthPenalty((1, 1.5), EOS, WIDTH)


def ignoring(lengths: bool) -> LogitsProcessor:
    ignored = torch.tensor([WIDTH - length for length in LENGTHS]) if lengths else WIDTH
    return hf.RepetitionPenaltyLogitsProcessor(1.7, prompt_ignore_length=ignored)


def biased() -> LogitsProcessor:
    return hf.SequenceBiasLogitsProcessor({(11,): 4.0, (7, 8): 5.0, (8, 9, 7): -6.0, (9, 9): -3.0})


# what the processor reads: "scores", or also "text" (the node's own prefix must reach it)
MAKERS = {
    "temperature": ("scores", lambda: hf.TemperatureLogitsWarper(0.6)),
    "top-k": ("scores", lambda: hf.TopKLogitsWarper(7)),
    "top-p": ("scores", lambda: hf.TopPLogitsWarper(0.8)),
    "top-h": ("scores", lambda: hf.TopHLogitsWarper(0.5)),
    "min-p": ("scores", lambda: hf.MinPLogitsWarper(0.1)),
    "typical": ("scores", lambda: hf.TypicalLogitsWarper(0.7)),
    "epsilon": ("scores", lambda: hf.EpsilonLogitsWarper(0.01)),
    "eta": ("scores", lambda: hf.EtaLogitsWarper(0.02)),
    "inf-nan": ("scores", hf.InfNanRemoveLogitsProcessor),
    "normalise": ("scores", hf.LogitNormalization),
    "suppress": ("scores", lambda: hf.SuppressTokensLogitsProcessor([3, 9, 11])),
    "suppress at begin": ("text", lambda: hf.SuppressTokensAtBeginLogitsProcessor([3, 9, 11], WIDTH + 3)),
    "min length": ("text", lambda: hf.MinLengthLogitsProcessor(WIDTH + 4, EOS)),
    "min new tokens": ("text", lambda: hf.MinNewTokensLengthLogitsProcessor(WIDTH, 4, [EOS, 6])),
    "forced bos": ("none", lambda: hf.ForcedBOSTokenLogitsProcessor(4)),
    "forced eos": ("text", lambda: hf.ForcedEOSTokenLogitsProcessor(WIDTH + 4, [EOS])),
    "decay": ("text", decay),
    "n-gram": ("text", lambda: hf.NoRepeatNGramLogitsProcessor(2)),
    "sequence bias": ("text", biased),
    "bad words": ("text", lambda: hf.NoBadWordsLogitsProcessor([[12], [7, 8], [9, 9]], eos_token_id=EOS)),
    "watermark left": ("text", lambda: hf.WatermarkLogitsProcessor(VOCAB, "cpu")),
    "watermark self": (
        "text",
        lambda: hf.WatermarkLogitsProcessor(VOCAB, "cpu", seeding_scheme="selfhash", context_width=2),
    ),
    "repetition": ("text", lambda: hf.RepetitionPenaltyLogitsProcessor(1.7)),
    "repetition, prompt ignored": ("text", lambda: ignoring(False)),
    "repetition, padding ignored": ("text", lambda: ignoring(True)),
    "encoder repetition": ("none", lambda: hf.EncoderRepetitionPenaltyLogitsProcessor(1.7, prompts(LENGTHS)[0])),
    "encoder n-gram": ("text", lambda: hf.EncoderNoRepeatNGramLogitsProcessor(2, ENCODED)),
    "constrained": ("text", lambda: hf.PrefixConstrainedLogitsProcessor(allowed, 1)),
}
if "Tensor" not in str(inspect.signature(hf.RepetitionPenaltyLogitsProcessor)):  # older transformers: no padding a row
    del MAKERS["repetition, padding ignored"]
EVERY_CLASS = {
    kind.__name__: kind
    for kind in vars(hf).values()
    if isinstance(kind, type) and issubclass(kind, LogitsProcessor) and kind is not LogitsProcessor
}
ACCEPTED = {type(make()).__name__ for _, make in MAKERS.values()}


@pytest.mark.parametrize("name", MAKERS)
def test_every_node_gets_what_plain_generate_gives(name: str) -> None:
    reads, make = MAKERS[name]
    scores = setting([make()])
    scores.sequences.warp.check(scores.sequences.prompt, VOCAB)
    expected = plain_rows(scores, lambda: [make()])
    untouched = scores.logits.flatten(0, 1)
    if name not in ("forced bos", "inf-nan"):  # the first acts on prompts of one token, the second on broken logits
        assert not torch.equal(expected, untouched), "the processor did nothing: the test proves nothing"
    assert torch.equal(warped(scores), expected)
    if reads == "text":  # negative control: every node shown the root's text
        scores.__dict__["_prefix"] = lambda owner, row, node: scores.sequences.prefix(owner)
        assert not torch.equal(warped(scores), expected)


def test_broken_logits_and_one_token_prompts_reach_the_processors_made_for_them() -> None:
    process = Warp([hf.InfNanRemoveLogitsProcessor()], 2)
    logits = torch.tensor([[float("nan"), 1.0], [float("-inf"), 2.0]])
    wanted = hf.InfNanRemoveLogitsProcessor()(torch.zeros(2, 1), logits)
    assert torch.equal(process(logits, torch.arange(2), lambda place: torch.zeros(1, 1)), wanted)
    forced = Warp([hf.ForcedBOSTokenLogitsProcessor(1)], 2)
    texts = [torch.tensor([[3]]), torch.tensor([[3, 3]])]
    given = forced(torch.zeros(2, 2), torch.arange(2), lambda place: texts[place])
    assert given.tolist() == [[float("-inf"), 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("returned", [2, 3])
def test_processors_that_know_prompts_count_prompts_not_rows(returned: int) -> None:
    """With several continuations per prompt transformers hands every one its prompt's batch id and text."""
    rows = 2 * returned
    ids, logits = torch.randint(1, VOCAB, (rows, 6)), torch.randn(rows, VOCAB)
    makers = [
        partial(hf.PrefixConstrainedLogitsProcessor, allowed, returned),
        partial(hf.EncoderRepetitionPenaltyLogitsProcessor, 1.7, ids[::returned]),
        partial(hf.EncoderNoRepeatNGramLogitsProcessor, 1, ids[::returned]),
    ]
    for make in makers:
        ours = Warp([make()], rows)(logits, torch.arange(rows), lambda place: ids[place : place + 1])
        assert torch.equal(ours, make()(ids, logits)) and not torch.equal(ours, logits)


def mixed() -> list[LogitsProcessor]:
    names = ["repetition", "temperature", "constrained", "top-k", "sequence bias", "min-p", "watermark left", "top-p"]
    return [MAKERS[name][1]() for name in names]


def test_the_order_of_mixed_processors_is_kept() -> None:
    scores, turned = setting(mixed()), setting(mixed()[::-1])
    forward, backward = plain_rows(scores, mixed), plain_rows(scores, lambda: mixed()[::-1])
    assert not torch.equal(forward, backward)
    assert torch.equal(warped(scores), forward)
    assert torch.equal(warped(turned), backward)


def test_logits_of_half_precision_are_warped_in_float32_and_left_alone() -> None:
    scores = setting(mixed())
    half = Scores(scores.logits.bfloat16(), scores.draft, scores.sequences)
    before = half.logits.clone()
    exact = Scores(half.logits.float(), scores.draft, scores.sequences)
    found = warped(half)
    assert found.dtype == torch.float32 and torch.equal(found, plain_rows(exact, mixed))
    assert torch.equal(half.logits, before)


def test_score_only_processors_run_once_a_level(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    plain_call = hf.LogitNormalization.__call__

    def counted(self, input_ids, scores):
        calls.append(len(scores))
        return plain_call(self, input_ids, scores)

    scores = setting([hf.LogitNormalization(), hf.TopKLogitsWarper(1)])
    chain = Draft.from_lists([[0] * 6] * ROWS)
    best = scores.logits.argmax(-1)
    for row, right in enumerate((4, 0, 6)):  # the top-1 law accepts exactly these many
        chain.tokens[row] = best[row, :6]
        if right < 6:
            chain.tokens[row, right] = (best[row, right] + 1) % VOCAB
    asked = Scores(scores.logits, chain, scores.sequences)
    monkeypatch.setattr(hf.LogitNormalization, "__call__", counted)
    verdict = verify(asked, chain, scores.sequences.coins(), "rejection")
    assert verdict.n.tolist() == [4, 0, 6]
    assert calls == [3, 2, 2, 2, 2, 1, 1], "one call for each level, over the rows still walking"


@pytest.mark.parametrize("name", sorted(set(EVERY_CLASS) - ACCEPTED))
def test_every_other_class_of_transformers_is_refused_by_name(name: str) -> None:
    kind = EVERY_CLASS[name]
    with pytest.raises(SpecGenError, match=f"{name}.*Required: .*Use plain generate"):
        Warp([kind.__new__(kind)], 2).check(torch.ones(2, 3, dtype=torch.long), VOCAB)


def test_the_known_stateful_classes_are_among_the_refused() -> None:
    refused = set(EVERY_CLASS) - ACCEPTED
    named = "UnbatchedClassifierFreeGuidance SynthIDTextWatermark WhisperTimeStamp ClassifierFreeGuidance"
    assert {f"{name}LogitsProcessor" for name in named.split()} <= refused


class Nested(LogitsProcessor):
    """Keep state in another object, as grammar processors do."""

    def __init__(self, inner) -> None:
        self.inner = inner

    def __call__(self, input_ids, scores):
        return self.inner(input_ids, scores)


class Table(LogitsProcessor):
    """Prepare a table at the first call, then only read it."""

    def __init__(self) -> None:
        self.table = None

    def __call__(self, input_ids, scores):
        if self.table is None:
            self.table = torch.linspace(0, 3, scores.shape[-1])
        return scores + self.table.roll(int(input_ids[0, -1]))


class RowTable(LogitsProcessor):
    """Know its batch: another table for every row."""

    def __init__(self, rows: int) -> None:
        self.table = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(2))

    def __call__(self, input_ids, scores):
        return scores + self.table * input_ids.sum(1, keepdim=True)


def closure(strength: float):
    weights = {7: strength, 9: -strength}

    def process(input_ids, scores):
        scores = scores.clone()
        scores[:, 3] += sum(weights.get(token, 0.0) for token in input_ids[0].tolist())
        return scores

    return process


def in_place(input_ids, scores):
    scores[:, 4] = input_ids.sum(1).float()
    return scores


PURE = {
    "table": Table,
    "closure": lambda: closure(0.5),
    "method": lambda: Table().__call__,
    "partial": lambda: partial(lambda scale, ids, scores: scores * scale + ids.sum() * 0.01, 0.5),
    "in place": lambda: in_place,
    "rows": lambda: RowTable(ROWS),
    "nested": lambda: Nested(closure(2.0)),
    "subclass": lambda: type("Mine", (hf.TemperatureLogitsWarper,), {})(0.5),
}


@pytest.mark.parametrize("name", PURE)
def test_pure_processors_of_the_user_are_accepted_and_exact(name: str) -> None:
    processor = PURE[name]()
    scores = setting([processor])
    before = scores.logits.clone()
    scores.sequences.warp.check(scores.sequences.prompt, VOCAB)
    if isinstance(processor, Table):
        assert processor.table is None, "the probe must work on a copy"

    expected = []
    for row in range(ROWS):
        for node in range(NODES + 1):
            ids = true_prefix(scores, row, node).repeat(ROWS, 1)
            # a private copy a call: what the user's object would give if it had never been called before
            expected.append(copy.deepcopy(processor)(ids, before[row, node].repeat(ROWS, 1))[row])
    assert torch.equal(warped(scores), torch.stack(expected))
    assert torch.equal(scores.logits, before), "processors must not reach the model's own logits"
