"""User case C03: stop strings and criteria that fire inside a block, with every drafter."""

from __future__ import annotations

import time

import pytest
import torch
from tiny import LEARNED, drafter_of, few, letters, ours, plain, prompts, texts_of, tiny, with_learned
from transformers import StoppingCriteria

from hf_specgen import SpecGenError, SpeculativeDecoding, disable, enable
from hf_specgen.round.criteria import Criteria

ROWS = [5, 17, 11, 24]
GREEDY = ("lookup", "branches", "small", "tree")


@pytest.fixture(scope="module")
def target():
    return tiny()


@pytest.fixture(scope="module")
def tokenizer():
    return letters()


@pytest.fixture(scope="module")
def twelve() -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randint(1, 64, (1, 12))


@pytest.fixture(scope="module")
def text(target, twelve: torch.Tensor) -> list[int]:
    return plain(target, twelve, max_new_tokens=40)[0].tolist()


class Recorder(StoppingCriteria):
    """Stop where ``when(ids)`` says so, and keep every prefix that was shown, row by row."""

    def __init__(self, when, rows: int = 1) -> None:
        self.when = when
        self.seen: list[tuple[int, ...]] = []

    def __call__(self, input_ids: torch.Tensor, scores, **kwargs) -> torch.Tensor:
        self.seen += dict.fromkeys(tuple(row) for row in input_ids.tolist())  # a row may fill the places of its batch
        return torch.tensor([self.when(row) for row in input_ids])


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_c03a_stop_strings(every: bool, target, tokenizer, twelve: torch.Tensor, text: list[int]) -> None:
    """75 strings; a string that occurs earlier stops earlier, as in plain decoding. Drafters take turns, or all do."""
    longest = dict.fromkeys(GREEDY, 0)
    inside = 0
    enable(target)
    for start in range(25):
        for width in (1, 2, 3):
            settings = {"stop_strings": tokenizer.decode(text[12 + start : 12 + start + width]), "tokenizer": tokenizer}
            expected = plain(target, twelve, max_new_tokens=40, **settings)
            for kind in GREEDY if every else (GREEDY[(start + width) % 4],):
                watch = drafter_of(kind, target, [text])
                result = plain(target, twelve, max_new_tokens=40, assistant_model=watch, **settings)
                assert torch.equal(result, expected), (kind, start, width)
                longest[kind] = max(longest[kind], watch.longest)
                inside += len(watch.rounds[-1].emitted[0]) > 1
    disable(target)
    assert min(longest.values()) >= 2
    assert inside > 20, "the last block was hardly ever cut"


@pytest.mark.parametrize("kind", few((*GREEDY, *LEARNED), "small", "branches", "eagle dynamic"))
def test_c03a_stop_strings_in_a_batch(kind: str, target, tokenizer) -> None:
    ids, mask = prompts(ROWS)
    free = plain(target, ids, mask)
    new = free[:, 24:].tolist()
    enable(target)
    unused = next(token for token in range(1, 64) if token not in free)
    for strings in ([new[0][4:6], new[2][9:12]], [new[1][3:5]], [row[14:16] for row in new]):
        settings = {"stop_strings": [tokenizer.decode(string) for string in strings], "tokenizer": tokenizer}
        settings["eos_token_id"] = unused  # plain decoding pads stopped rows only where an EOS is known
        expected = plain(target, ids, mask, **settings)
        watch = drafter_of(kind, target, texts_of(free, mask))
        assert torch.equal(plain(target, ids, mask, assistant_model=watch, **settings), expected)
        assert watch.longest >= 2
    disable(target)
    assert len(expected[0]) < len(free[0])


def test_c03a_stop_strings_need_their_tokenizer(target, twelve: torch.Tensor) -> None:
    enable(target)
    with pytest.raises(SpecGenError, match=r"stop_strings.*tokenizer="):
        plain(target, twelve, assistant_model=drafter_of("lookup", target, [[1]]), stop_strings="a")
    disable(target)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_c03b_a_criterion_on_the_newest_token(every: bool, target, twelve: torch.Tensor, text: list[int]) -> None:
    """29 criteria; each sees every prefix once and in order, and none beyond the stop."""
    longest = dict.fromkeys(GREEDY, 0)
    for place in range(1, 30):
        stop = text[12 + place]
        expected = plain(
            target, twelve, max_new_tokens=40, stopping_criteria=[Recorder(lambda row, t=stop: row[-1] == t)]
        )
        for kind in GREEDY if every else (GREEDY[place % 4], GREEDY[(place + place // 4 % 3 + 1) % 4]):
            watch, criterion = drafter_of(kind, target, [text]), Recorder(lambda row, t=stop: row[-1] == t)
            result = ours(target, watch, twelve, max_new_tokens=40, stopping_criteria=[criterion])
            assert torch.equal(result, expected), (kind, place)
            shown = result[0].tolist()
            assert criterion.seen == [tuple(shown[:end]) for end in range(13, len(shown) + 1)]
            longest[kind] = max(longest[kind], watch.longest)
    assert min(longest.values()) >= 2


@pytest.mark.parametrize("kind", with_learned(GREEDY))
def test_c03c_a_criterion_on_the_length(kind: str, target, twelve: torch.Tensor, text: list[int]) -> None:
    watch, criterion = drafter_of(kind, target, [text]), Recorder(lambda row: len(row) >= 25)
    result = ours(target, watch, twelve, max_new_tokens=40, stopping_criteria=[criterion])
    assert result[0].tolist() == text[:25]
    assert len(criterion.seen) == 13
    assert watch.longest >= 2


@pytest.mark.parametrize("kind", few((*GREEDY, *LEARNED), "small", "branches", "eagle dynamic"))
def test_c03_criteria_in_a_batch(kind: str, target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows stop on their own; each row's prefixes are the padded rows that plain decoding shows."""
    ids, mask = prompts(ROWS)
    free = plain(target, ids, mask)
    stops = {int(free[0, 24 + 5]), int(free[2, 24 + 12])}
    unused = next(token for token in range(1, 64) if token not in free)
    settings = {
        "eos_token_id": unused,
        "pad_token_id": 0,
    }  # plain decoding pads stopped rows only where an EOS is known
    expected = plain(target, ids, mask, stopping_criteria=[Recorder(lambda row: int(row[-1]) in stops)], **settings)
    watch, criterion = drafter_of(kind, target, texts_of(free, mask)), Recorder(lambda row: int(row[-1]) in stops)
    asked: list[list[tuple[int, ...]]] = [[], [], [], []]
    genuine = Criteria.meets

    def meets(self: Criteria, row: int, prefix: torch.Tensor, scores) -> bool:
        asked[row] += [tuple(prefix[0].tolist())]
        return genuine(self, row, prefix, scores)

    with monkeypatch.context() as patch:
        patch.setattr(Criteria, "meets", meets)
        result = ours(target, watch, ids, mask, stopping_criteria=[criterion], **settings)
    assert torch.equal(result, expected)
    assert not criterion.seen, "every row has a copy"
    without_eos = ours(target, watch, ids, mask, stopping_criteria=[Recorder(lambda row: int(row[-1]) in stops)])
    assert torch.equal(without_eos, expected)
    assert watch.longest >= 2
    for row in range(4):
        shown = asked[row]
        assert shown == [tuple(result[row, :end].tolist()) for end in range(25, 25 + len(shown))]
        assert int(result[row, 24 + len(shown) - 1]) in stops or len(shown) == 32


class Scored(StoppingCriteria):
    """Keep the scores that come with each prefix."""

    def __init__(self) -> None:
        self.steps: list[torch.Tensor | None] = []

    def __call__(self, input_ids: torch.Tensor, scores, **kwargs) -> torch.Tensor:
        self.steps.append(None if scores is None else torch.stack(scores))
        return torch.tensor([False])


@pytest.mark.parametrize("kind", with_learned(GREEDY))
def test_c03_criteria_are_given_the_scores_so_far(kind: str, target, twelve: torch.Tensor, text: list[int]) -> None:
    for asked in ({}, {"return_dict_in_generate": True, "output_scores": True}):
        theirs, mine = Scored(), Scored()
        plain(target, twelve, stopping_criteria=[theirs], **asked)
        ours(target, drafter_of(kind, target, [text]), twelve, stopping_criteria=[mine], **asked)
        assert len(mine.steps) == len(theirs.steps) == 32
        for here, there in zip(mine.steps, theirs.steps, strict=True):
            assert (here is None) == (there is None)
            assert here is None or (here.shape == there.shape and torch.allclose(here, there, atol=1e-4))


@pytest.mark.parametrize("kind", with_learned(GREEDY))
def test_c03_max_time(kind: str, target, text: list[int], twelve: torch.Tensor) -> None:
    slow = target.model.layers[0].register_forward_hook(lambda *_: time.sleep(0.02))
    watch = drafter_of(kind, target, [text])
    result = ours(target, watch, twelve, max_new_tokens=200, max_time=0.15)
    slow.remove()
    length = result.shape[1] - 12
    assert 1 <= length < 100
    assert result[0, : min(len(text), 12 + length)].tolist() == text[: 12 + length]


def test_c03_a_criterion_that_is_never_asked_would_be_seen(
    target, twelve, text, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: criteria that are asked once a round only, as stock assisted decoding does."""
    from hf_specgen.round.sequences import Sequences

    genuine = Sequences._extend

    def once(self: Sequences, row: int, tokens: list[int]) -> int:
        criteria, asked = self._criteria, len(self.tokens[row])
        self._criteria = Criteria((), 1)
        count = genuine(self, row, tokens)
        self._criteria = criteria
        self.finished[row] |= criteria.meets(row, self.prefix(row), None)
        return count if asked else 0

    expected = plain(target, twelve, max_new_tokens=40, stopping_criteria=[Recorder(lambda row: len(row) >= 25)])
    monkeypatch.setattr(Sequences, "_extend", once)
    loop = SpeculativeDecoding(drafter_of("small", target, [text]))
    settings = {"custom_generate": loop, "max_new_tokens": 40}
    result = plain(target, twelve, stopping_criteria=[Recorder(lambda row: len(row) >= 25)], **settings)
    assert not torch.equal(result, expected)
