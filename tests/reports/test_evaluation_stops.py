"""Reported: the stopping criterion of an evaluation harness ended other rows early, also without a drafter."""

from __future__ import annotations

import threading

import pytest
import torch
from tiny import drafter_of, letters, ours, plain, prompts, some, texts_of, tiny
from transformers import LogitsProcessor, StoppingCriteria

from hf_specgen import SpecGenError
from hf_specgen.round.criteria import Criteria
from hf_specgen.round.state import _Reader

ROWS = [5, 17, 11, 24]
WIDTH = max(ROWS)


@pytest.fixture(scope="module")
def target():
    return tiny()


@pytest.fixture(scope="module")
def tokenizer():
    return letters()


class DoneRows(StoppingCriteria):
    """Remember which rows have written a string, as evaluation harnesses do; one answer for the whole batch."""

    def __init__(self, stop: str, tokenizer, start: int, rows: int) -> None:
        self.stop = stop
        self.tokenizer = tokenizer
        self.start = start
        self.done = [False] * rows

    def __call__(self, input_ids, scores, **kwargs) -> bool:
        texts = self.tokenizer.batch_decode(input_ids[:, self.start :][:, -len(self.stop) - 2 :])
        for row, done in enumerate(self.done):
            if not done:
                self.done[row] = self.stop in texts[row].replace(" ", "")
        return False not in self.done


class DoneMask(StoppingCriteria):
    """Keep a mask that is written in place and answer row by row."""

    def __init__(self, stop: int, rows: int) -> None:
        self.stop = stop
        self.done = torch.zeros(rows, dtype=torch.bool)

    def __call__(self, input_ids, scores, **kwargs) -> torch.Tensor:
        self.done |= input_ids[:, -1] == self.stop
        return self.done


class Patience(StoppingCriteria):
    """Stop after so many tokens of a kind, counted call by call."""

    def __init__(self, rows: int) -> None:
        self.left = [4] * rows

    def __call__(self, input_ids, scores, **kwargs) -> torch.Tensor:
        for row, token in enumerate(input_ids[:, -1].tolist()):
            self.left[row] -= token % 3 == 0
        return torch.tensor([left <= 0 for left in self.left])


def makers(target, tokenizer, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, object]:
    free = plain(target, ids, mask)[:, WIDTH:]
    letter = int(free[len(ids) - 1, 9])
    return {
        "done rows": lambda rows: DoneRows(tokenizer.decode([letter]), tokenizer, WIDTH, rows),
        "done mask": lambda rows: DoneMask(letter, rows),
        "patience": Patience,
    }


def alone(target, ids: torch.Tensor, mask: torch.Tensor, make) -> torch.Tensor:
    """Write every row by itself, pad what is shorter."""
    rows = [(ids[row : row + 1], mask[row : row + 1]) for row in range(len(ids))]
    texts = [plain(target, *row, stopping_criteria=[make(1)], pad_token_id=0)[0] for row in rows]
    return torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)


@pytest.mark.parametrize(
    ("name", "kind", "rows"),
    some(("done rows", "done mask", "patience"), ("none", "lookup", "branches", "small", "tree"), (1, 4)),
)
def test_every_row_ends_where_it_would_end_alone(name: str, kind: str, rows: int, target, tokenizer) -> None:
    ids, mask = prompts(ROWS)
    ids, mask = ids[-rows:], mask[-rows:]
    make = makers(target, tokenizer, ids, mask)[name]
    expected = alone(target, ids, mask, make)
    ends = {int((row != 0).sum()) for row in expected[:, WIDTH:]}
    assert rows == 1 or len(ends) > 2, "rows must end at different times"
    assert min(ends) < 32
    watch = None if kind == "none" else drafter_of(kind, target, texts_of(plain(target, ids, mask), mask))
    result = ours(target, watch, ids, mask, stopping_criteria=[make(rows)], pad_token_id=0)
    assert torch.equal(result, expected)
    assert watch is None or watch.longest >= 2


def test_one_criterion_for_all_rows_would_end_them_early(target, tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: rows without copies of their own."""
    ids, mask = prompts(ROWS)
    make = makers(target, tokenizer, ids, mask)["done rows"]
    expected = alone(target, ids, mask, make)
    monkeypatch.setattr(Criteria, "_copied", lambda self, criteria: criteria)
    assert not torch.equal(ours(target, None, ids, mask, stopping_criteria=[make(4)], pad_token_id=0), expected)


class Confident(StoppingCriteria):
    """Read every row's newest scores."""

    def __call__(self, input_ids, scores, **kwargs) -> torch.Tensor:
        return torch.tensor([float(scores[-1][row].softmax(-1).max()) > 0.55 for row in range(len(input_ids))])


@pytest.mark.parametrize("kind", ["none", "lookup", "tree"])
def test_criteria_may_read_the_scores_of_every_row(kind: str, target) -> None:
    ids, mask = prompts(ROWS)
    free = plain(target, ids, mask)
    settings = {"return_dict_in_generate": True, "output_scores": True, "pad_token_id": 0}
    settings["eos_token_id"] = next(token for token in range(1, 64) if token not in free)
    expected = plain(target, ids, mask, stopping_criteria=[Confident()], **settings).sequences
    assert len({int((row != 0).sum()) for row in expected[:, WIDTH:]}) > 1, "no row ended early"
    watch = None if kind == "none" else drafter_of(kind, target, texts_of(free, mask))
    result = ours(target, watch, ids, mask, stopping_criteria=[Confident()], **settings).sequences
    assert torch.equal(result, expected)


DONE = [False] * 8


class GlobalDone(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs) -> torch.Tensor:
        for row, token in enumerate(input_ids[:, -1].tolist()):
            DONE[row] |= token % 2 == 0
        return torch.tensor(DONE[: len(input_ids)])


class ClassDone(StoppingCriteria):
    count = 0

    def __call__(self, input_ids, scores, **kwargs) -> torch.Tensor:
        ClassDone.count += 1
        return torch.tensor([ClassDone.count > 9] * len(input_ids))


class Uncopyable(StoppingCriteria):
    def __init__(self) -> None:
        self.lines = (line for line in "abc")

    def __call__(self, input_ids, scores, **kwargs) -> torch.Tensor:
        return torch.tensor([False] * len(input_ids))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (GlobalDone, "state in the global DONE, which all rows share"),
        (ClassDone, r"state in ClassDone\.count, which all rows share"),
        (Uncopyable, "cannot be copied"),
    ],
)
def test_criteria_that_rows_cannot_have_for_their_own_are_refused_in_batches(kind: type, words: str, target) -> None:
    ids, mask = prompts(ROWS)
    with pytest.raises(SpecGenError, match=rf"{kind.__name__} was given for 4 rows.*{words}.*row by row"):
        ours(target, None, ids, mask, stopping_criteria=[kind()], pad_token_id=0)
    DONE[:] = [False] * 8
    ClassDone.count = 0
    expected = plain(target, ids[3:], mask[3:], stopping_criteria=[kind()])
    DONE[:] = [False] * 8
    ClassDone.count = 0
    assert torch.equal(ours(target, None, ids[3:], mask[3:], stopping_criteria=[kind()]), expected)


def test_a_line_to_another_thread_is_shared_by_all_rows(target) -> None:
    class Halted(StoppingCriteria):
        def __init__(self) -> None:
            self.event = threading.Event()

        def __call__(self, input_ids, scores, **kwargs) -> torch.Tensor:
            return torch.full((len(input_ids),), self.event.is_set())

    ids, mask = prompts(ROWS)
    criterion = Halted()
    told = iter(range(1, 100))

    def count(row: int, tokens: list[int]) -> None:
        if next(told) == 3 * len(ids):
            criterion.event.set()

    result = ours(target, None, ids, mask, stopping_criteria=[criterion], pad_token_id=0, on_tokens=count)
    assert result.shape[1] == WIDTH + 4


def test_a_criterion_may_read_what_a_processor_keeps(target) -> None:
    """With one row both are the user's own objects, called in plain decoding's order."""

    class Flag:
        def __init__(self) -> None:
            self.calls = 0

        def process(self, input_ids, scores):
            self.calls += 1
            return scores

    class Reads(StoppingCriteria):
        def __init__(self, flag: Flag) -> None:
            self.flag = flag

        def __call__(self, input_ids, scores, **kwargs) -> torch.Tensor:
            return torch.tensor([self.flag.calls >= 11])

    ids, mask = prompts(ROWS[1:2])
    text = plain(target, ids)[0].tolist()
    found = []
    for watch in (None, drafter_of("lookup", target, [text])):
        flag = Flag()
        settings = {"logits_processor": [flag.process], "stopping_criteria": [Reads(flag)]}
        found.append(ours(target, watch, ids, mask, **settings)[0].tolist())
    assert found[0] == found[1] == text[: 17 + 11]
    assert watch.longest >= 2


def test_rows_cannot_share_it_in_a_batch(target) -> None:
    """Processors and criteria have copies of their own there: what one writes the other would never read."""

    class Writes(LogitsProcessor):
        def __init__(self, kept: list[int]) -> None:
            self.kept = kept

        def __call__(self, input_ids, scores):
            self.kept.append(1)
            return scores

    class Reads(StoppingCriteria):
        def __init__(self, kept: list[int]) -> None:
            self.kept = kept

        def __call__(self, input_ids, scores, **kwargs) -> torch.Tensor:
            return torch.tensor([len(self.kept) > 5] * len(input_ids))

    ids, mask = prompts(ROWS)
    kept: list[int] = []
    settings = {"logits_processor": [Writes(kept)], "stopping_criteria": [Reads(kept)], "pad_token_id": 0}
    with pytest.raises(SpecGenError, match=r"Reads was given for 4 rows.*a list.*Writes"):
        ours(target, None, ids, mask, **settings)
    assert ours(target, None, ids[1:2], mask[1:2], **settings).shape[1] == WIDTH + 6


NAMES = {f"name {number}": number for number in range(20_000)}


class Named(StoppingCriteria):
    """Read a large table that stands outside, or write to it."""

    def __init__(self, writes: bool = False) -> None:
        self.writes = writes

    def __call__(self, input_ids, scores, **kwargs) -> torch.Tensor:
        if self.writes:
            NAMES["name 7"] += 1
        return torch.tensor([NAMES["name 7"] < 7] * len(input_ids))


def test_a_large_table_is_not_read_anew_at_every_token(target, monkeypatch: pytest.MonkeyPatch) -> None:
    """It took 32 seconds for 3 rows of 32 tokens where a criterion named a dictionary of 150,000 entries."""
    parts = 0
    read = _Reader.read

    def counted(self: _Reader, value: object) -> object:
        nonlocal parts
        parts += 1
        return read(self, value)

    monkeypatch.setattr(_Reader, "read", counted)
    ids, mask = prompts(ROWS)
    expected = plain(target, ids, mask, stopping_criteria=[Named()])
    assert torch.equal(ours(target, None, ids, mask, stopping_criteria=[Named()]), expected)
    assert len(NAMES) < parts < 4 * len(NAMES), "looked at before the text and behind it"


def test_a_large_table_that_a_criterion_writes_to_is_refused(target) -> None:
    ids, mask = prompts(ROWS)
    with pytest.raises(SpecGenError, match=r"Named was given for 4 rows.*a large table"):
        ours(target, None, ids, mask, stopping_criteria=[Named(writes=True)])
