"""Features of ``generate()`` under a drafter: each gives what plain ``generate()`` gives, and leaves nothing behind."""

from __future__ import annotations

import types

import numpy
import pytest
import torch
from support_features import Forwards, unchanged
from tiny import assert_ran, build, disturbed, drafter_of, few, ours, plain, prompts, some, texts_of, tiny
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, StoppingCriteria, StoppingCriteriaList
from transformers.generation import stopping_criteria as hf_stops

from hf_specgen import PromptLookup, SmallModel, SpeculativeDecoding, disable, enable
from hf_specgen.calls.outputs import OutputLog
from hf_specgen.round.criteria import Criteria

ONE, FOUR = [12], [9, 4, 12, 7]
OUTPUTS = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "output_hidden_states": True}


def close(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Compare finite values to 1e-4 and infinite ones exactly."""
    finite = torch.isfinite(right)
    return torch.equal(torch.isfinite(left), finite) and bool((left - right)[finite].abs().max() < 1e-4)


def ends_of(output: torch.Tensor, width: int, eos: int) -> list[int]:
    """Return how many new tokens each row has, its EOS included."""
    texts = output[:, width:].tolist()
    return [text.index(eos) + 1 if eos in text else len(text) for text in texts]


@pytest.mark.parametrize(("kind", "lengths", "chunk"), some(("lookup", "tree", "small"), (ONE, FOUR), (None, 5)))
def test_scores_logits_and_hidden_states(kind: str, lengths: list[int], chunk: int | None) -> None:
    model = tiny()
    ids, mask = prompts(lengths)
    width = ids.shape[1]
    free = plain(model, ids, mask, repetition_penalty=1.3)
    eos = int(free[0, width + 13])
    asked = {"eos_token_id": eos, "repetition_penalty": 1.3, **OUTPUTS}
    wanted = plain(model, ids, mask, **asked)
    watch = drafter_of(kind, model, texts_of(free, mask))
    found = ours(model, watch, ids, mask, prefill_chunk_size=chunk, **asked)
    assert_ran(watch, kind)
    assert torch.equal(found.sequences, wanted.sequences)
    ends = ends_of(wanted.sequences, width, eos)
    assert len(lengths) == 1 or min(ends) < max(ends), "some row must finish early"
    steps = len(wanted.scores)
    assert len(found.scores) == len(found.logits) == len(found.hidden_states) == steps == max(ends)
    for row, end in enumerate(ends):
        for step in range(end):
            assert close(found.scores[step][row], wanted.scores[step][row])
            assert close(found.logits[step][row], wanted.logits[step][row])
        for step in range(end, steps):  # all mass on the pad token
            for part in (found.scores, found.logits):
                assert part[step][row].exp().tolist() == [1.0] + [0.0] * 63
    assert not close(found.scores[1][0], found.logits[1][0]), "scores are processed, logits are not"
    for step, (mine, theirs) in enumerate(zip(found.hidden_states, wanted.hidden_states, strict=True)):
        for layer, other in zip(mine, theirs, strict=True):
            assert layer.shape == other.shape
            for row, end in enumerate(ends):
                real = slice(width - lengths[row], width) if step == 0 else slice(0, 1)
                expected = other[row, real] if step < end else torch.zeros_like(other[row, real])
                assert close(layer[row, real], expected)


def test_scores_read_off_the_first_nodes_of_a_tree_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above: the log follows the accepted path, not the order of the nodes."""
    model = tiny()
    ids, mask = prompts(FOUR)
    wanted = plain(model, ids, mask, **OUTPUTS)
    keep = OutputLog._add_row
    monkeypatch.setattr(
        OutputLog, "_add_row", lambda log, row, nodes, scores: keep(log, row, torch.arange(len(nodes)), scores)
    )
    watch = drafter_of("tree", model, texts_of(wanted.sequences, mask))
    found = ours(model, watch, ids, mask, **OUTPUTS)
    assert_ran(watch, "tree")
    assert torch.equal(found.sequences, wanted.sequences)
    for mine, theirs in ((found.scores, wanted.scores), (found.logits, wanted.logits)):
        assert not all(close(a, b) for a, b in zip(mine, theirs, strict=True))
    last = [(a[-1], b[-1]) for a, b in zip(found.hidden_states[1:], wanted.hidden_states[1:], strict=True)]
    assert not all(close(a, b) for a, b in last)


def test_a_dict_holds_only_what_was_asked() -> None:
    model = tiny()
    ids, mask = prompts(ONE)
    found = ours(model, PromptLookup(4), ids, mask, return_dict_in_generate=True, output_logits=True)
    assert found.scores is None and found.hidden_states is None and len(found.logits) == 32
    assert found.logits[0].dtype == torch.float32
    assert isinstance(ours(model, PromptLookup(4), ids, mask, output_scores=True), torch.Tensor)


class Collect:
    """Stream into a list."""

    def __init__(self) -> None:
        self.puts: list[list[int]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        assert not self.ended
        self.puts.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("kind", ["lookup", "tree"])
def test_a_streamer_sees_what_plain_generate_streams(kind: str, enabled: bool) -> None:
    model = tiny()
    ids, mask = prompts(ONE)
    free = plain(model, ids, mask)
    for place in (3, 9, 20):
        eos = int(free[0, ids.shape[1] + place])
        theirs, mine = Collect(), Collect()
        wanted = plain(model, ids, mask, eos_token_id=eos, streamer=theirs)
        watch = drafter_of(kind, model, texts_of(free, mask), tokens=6)
        if enabled:
            found = plain(enable(model), ids, mask, eos_token_id=eos, assistant_model=watch, streamer=mine)
            disable(model)
        else:
            loop = SpeculativeDecoding(watch, streamer=mine)
            found = plain(model, ids, mask, eos_token_id=eos, custom_generate=loop)
        assert torch.equal(found, wanted) and mine.puts == theirs.puts
        assert mine.ended == theirs.ended == 1 and mine.puts[0] == ids[0].tolist() and mine.puts[-1] == [eos]
    assert_ran(watch, kind)


@pytest.mark.parametrize("lengths", [ONE, FOUR])
def test_on_tokens_gets_every_rows_tokens_in_order(lengths: list[int]) -> None:
    model = tiny()
    ids, mask = prompts(lengths)
    free = plain(model, ids, mask)
    eos = int(free[0, ids.shape[1] + 13])
    wanted = plain(model, ids, mask, eos_token_id=eos)
    watch = drafter_of("tree", model, texts_of(free, mask))
    got: list[list[int]] = [[] for _ in lengths]
    calls = []

    def take(row: int, tokens: list[int]) -> None:
        assert tokens
        calls.append((row, len(tokens)))
        got[row] += tokens

    found = ours(model, watch, ids, mask, eos_token_id=eos, on_tokens=take)
    assert_ran(watch, "tree")
    assert torch.equal(found, wanted)
    ends = ends_of(wanted, ids.shape[1], eos)
    assert got == [row[:end] for row, end in zip(wanted[:, ids.shape[1] :].tolist(), ends, strict=True)]
    assert max(count for _, count in calls) > 1, "a round's tokens come together"


def characters() -> PreTrainedTokenizerFast:
    """Build a tokenizer of 64 one-letter tokens."""
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("lengths", few((ONE, [12, 5]), [12, 5]))
def test_stop_strings_on_an_enabled_model(lengths: list[int]) -> None:
    model, tokenizer = tiny(), characters()
    ids, mask = prompts(lengths)
    free = plain(model, ids, mask)
    new = free[0, ids.shape[1] :]
    absent = min(set(range(64)) - set(free.flatten().tolist()))  # with an EOS finished rows are padded
    stopped = 0
    for start, length in [(0, 1), (3, 2), (7, 3), (11, 1), (14, 2), (20, 3)]:
        asked = {
            "stop_strings": [tokenizer.decode(new[start : start + length]), "??"],
            "tokenizer": tokenizer,
            "eos_token_id": absent,
        }
        wanted = plain(model, ids, mask, **asked)
        for kind in ("lookup", "tree"):
            watch = drafter_of(kind, model, texts_of(free, mask), tokens=6)
            found = plain(enable(model), ids, mask, assistant_model=watch, **asked)
            loop = SpeculativeDecoding(watch, tokenizer=tokenizer)
            again = plain(model, ids, mask, custom_generate=loop, **asked)
            disable(model)
            assert torch.equal(found, wanted) and torch.equal(again, wanted)
            stopped += watch.longest >= 2 and wanted.shape[1] < free.shape[1]
    assert stopped > 0


class Recorder(StoppingCriteria):
    """Keep every prefix and what came as scores; stop where told."""

    def __init__(self, stop: int | None = None) -> None:
        self.stop, self.seen, self.scores = stop, [], []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append(input_ids.tolist())
        self.scores.append(None if scores is None else [part.clone() for part in scores])
        return torch.tensor([row[-1] == self.stop for row in input_ids.tolist()])


@pytest.mark.parametrize("with_scores", [False, True])
@pytest.mark.parametrize("place", [None, 5, 17])
def test_a_criterion_sees_every_prefix_once_in_order(place: int | None, with_scores: bool) -> None:
    model = tiny()
    ids, mask = prompts(ONE)
    free = plain(model, ids, mask)
    stop = None if place is None else int(free[0, ids.shape[1] + place])
    theirs, mine = Recorder(stop), Recorder(stop)
    asked = {"return_dict_in_generate": True, "output_scores": True} if with_scores else {}
    wanted = plain(model, ids, mask, stopping_criteria=StoppingCriteriaList([theirs]), **asked)
    watch = drafter_of("tree", model, texts_of(free, mask))
    found = ours(model, watch, ids, mask, stopping_criteria=StoppingCriteriaList([mine]), **asked)
    assert place == 5 or watch.off_spine
    if with_scores:
        wanted, found = wanted.sequences, found.sequences
    assert torch.equal(found, wanted)
    assert mine.seen == theirs.seen
    for left, right in zip(mine.scores, theirs.scores, strict=True):
        assert (left is None) == (right is None) == (not with_scores)
        assert left is None or all(close(a, b) for a, b in zip(left, right, strict=True))


def test_criteria_in_a_batch_stop_their_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    ids, mask = prompts(FOUR)
    free = plain(model, ids, mask)
    stop = int(free[0, ids.shape[1] + 13])
    absent = min(set(range(64)) - set(free.flatten().tolist()))  # with an EOS finished rows are padded
    wanted = plain(model, ids, mask, eos_token_id=absent, stopping_criteria=StoppingCriteriaList([Recorder(stop)]))
    watch, mine = drafter_of("tree", model, texts_of(free, mask)), Recorder(stop)
    asked: list[list[list[int]]] = [[], [], [], []]
    genuine = Criteria.meets

    def meets(self: Criteria, row: int, prefix: torch.Tensor, scores) -> bool:
        asked[row].append(prefix[0].tolist())
        return genuine(self, row, prefix, scores)

    monkeypatch.setattr(Criteria, "meets", meets)
    found = ours(model, watch, ids, mask, eos_token_id=absent, stopping_criteria=StoppingCriteriaList([mine]))
    assert_ran(watch, "tree")
    assert torch.equal(found, wanted)
    ends = ends_of(wanted, ids.shape[1], stop)
    assert min(ends) < max(ends)
    assert not mine.seen, "every row has a copy"
    for row, end in enumerate(ends):
        text = wanted[row].tolist()
        assert asked[row] == [text[: ids.shape[1] + count] for count in range(1, end + 1)]


def test_max_time_is_asked_after_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    ids, mask = prompts(ONE)
    free = plain(model, ids, mask)
    clock = iter(range(1000))
    monkeypatch.setattr(hf_stops, "time", types.SimpleNamespace(time=lambda: float(next(clock))))
    wanted = plain(model, ids, mask, max_time=10.5)
    watch = drafter_of("lookup", model, texts_of(free, mask))
    found = ours(model, watch, ids, mask, max_time=10.5)
    assert watch.longest >= 2
    assert torch.equal(found, wanted) and wanted.shape[1] == ids.shape[1] + 11


@pytest.mark.parametrize("lengths", [ONE, [9, 4]])
def test_several_continuations_of_each_prompt(lengths: list[int]) -> None:
    model = tiny()
    ids, mask = prompts(lengths)
    asked = {"do_sample": True, "max_new_tokens": 12, "seed": 7}
    found = ours(model, PromptLookup(4), ids, mask, num_return_sequences=3, **asked)
    tripled = ours(model, None, ids.repeat_interleave(3, 0), mask.repeat_interleave(3, 0), **asked)
    assert found.shape == (3 * len(lengths), ids.shape[1] + 12) and torch.equal(found, tripled)
    assert len({tuple(row) for row in found.tolist()}) == len(found)
    with pytest.raises(ValueError) as theirs:
        plain(model, ids, mask, num_return_sequences=3)
    with pytest.raises(ValueError) as mine:
        ours(model, PromptLookup(4), ids, mask, num_return_sequences=3)
    assert type(mine.value) is type(theirs.value) and str(mine.value) == str(theirs.value)


def test_processors_that_know_prompts_meet_several_continuations() -> None:
    """With one allowed token a step the law is one-hot: sampling must follow the plain path through any batch."""
    model = tiny()
    ids, mask = prompts([9, 4])

    def allowed(prompt: int, text: torch.Tensor) -> list[int]:
        return [1 + (int(text[-1]) * 5 + int(text[-2]) + 17 * prompt) % 63]

    asked = {"do_sample": True, "num_return_sequences": 2, "prefix_allowed_tokens_fn": allowed}
    wanted = plain(model, ids, mask, **asked)
    watch = drafter_of("tree", model, texts_of(wanted, mask.repeat_interleave(2, 0)))
    found = ours(model, watch, ids, mask, **asked)
    assert_ran(watch, "tree")
    assert not torch.equal(wanted[0, 12:], wanted[2, 12:])
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(("family", "lengths"), some(("llama", "mistral", "gemma3_text"), ([21, 4, 13, 1], [21])))
def test_prompts_read_in_chunks(family: str, lengths: list[int]) -> None:
    model = build(family)
    ids, mask = prompts(lengths)
    wanted = plain(model, ids, mask)
    for chunk in (1, 3, 8, 20, 21, 64):
        watch = drafter_of("tree", model, texts_of(wanted, mask))
        counter = Forwards(model)
        found = ours(model, watch, ids, mask, prefill_chunk_size=chunk)
        assert counter.stop() == found.speculation.num_forwards + -(-21 // chunk)
        assert_ran(watch, "tree")
        assert torch.equal(found, wanted), chunk


@pytest.mark.parametrize(
    ("case", "lengths"), some(("minimum", "minimum length", "list", "pad is eos", "minimum and list"), (FOUR, ONE))
)
def test_ends_of_texts(case: str, lengths: list[int]) -> None:
    model = tiny()
    ids, mask = prompts(lengths)
    free = plain(model, ids, mask)
    width = ids.shape[1]
    first, second = int(free[0, width + 10]), int(free[-1, width + 13])
    asked = {
        "minimum": {"eos_token_id": first, "min_new_tokens": 9},
        "minimum length": {"eos_token_id": first, "min_length": 25},
        "list": {"eos_token_id": [second, first]},
        "pad is eos": {"eos_token_id": second, "pad_token_id": second},
        "minimum and list": {"eos_token_id": [first, second], "min_new_tokens": 7, "pad_token_id": first},
    }[case]
    wanted = plain(model, ids, mask, **asked)
    longest = 0
    for kind in ("lookup", "tree", "small"):
        watch = drafter_of(kind, model, texts_of(free, mask))
        assert torch.equal(ours(model, watch, ids, mask, **asked), wanted), kind
        longest = max(longest, watch.longest)
    assert longest >= 2
    assert wanted.shape[1] < free.shape[1] or not torch.equal(wanted, free)


@pytest.mark.parametrize(("dtype", "sampling"), some((torch.float64, torch.bfloat16, torch.float16), (False, True)))
def test_other_precisions_and_no_cache(dtype: torch.dtype, sampling: bool) -> None:
    model = tiny().to(dtype)
    ids, mask = prompts(FOUR)
    asked = {"do_sample": sampling, **({"seed": 4} if sampling else {})}
    if dtype == torch.float64:
        wanted = ours(model, None, ids, mask, **asked) if sampling else plain(model, ids, mask)
        watch = drafter_of("tree", model, texts_of(wanted, mask))
        assert torch.equal(ours(model, watch, ids, mask, **asked), wanted)
        assert_ran(watch, "tree")
        if not sampling:
            assert torch.equal(ours(model, PromptLookup(4), ids, mask, use_cache=False), wanted)
        return
    for drafter in (PromptLookup(4), SmallModel(disturbed(model), 4)):
        out = ours(model, drafter, ids, mask, return_dict_in_generate=True, output_logits=True, **asked)
        assert out.sequences.shape == (4, 44) and out.logits[0].dtype == torch.float32
        assert out.speculation.num_accepted_tokens > 0


def test_seeds_come_from_torch_or_a_generator_and_greedy_texts_need_none() -> None:
    model = tiny()
    draft = disturbed(model)
    ids, mask = prompts(FOUR)

    def sample(**settings: object) -> torch.Tensor:
        return ours(model, PromptLookup(4), ids, mask, do_sample=True, **settings)

    torch.manual_seed(5)
    first, second = sample(), sample()
    torch.manual_seed(5)
    assert torch.equal(sample(), first) and torch.equal(sample(), second) and not torch.equal(first, second)
    state = torch.get_rng_state()
    own = sample(generator=torch.Generator().manual_seed(9))
    assert torch.equal(sample(generator=torch.Generator().manual_seed(9)), own) and not torch.equal(own, first)
    assert torch.equal(sample(seed=3), sample(seed=3)) and not torch.equal(sample(seed=3), sample(seed=4))
    for same in (torch.tensor(3), numpy.int64(3), 3 + 2**64):
        assert torch.equal(sample(seed=same), sample(seed=3))
    each = sample(seed=torch.tensor([1, 2, 3, -1]))
    assert torch.equal(sample(seed=[1, 2, 3, 2**64 - 1]), each)
    assert torch.equal(sample(seed=numpy.array([1, 2, 3, -1])), each)
    greedy = ours(model, SmallModel(draft, 4), ids, mask)
    assert torch.equal(ours(model, SmallModel(draft, 4), ids, mask, generator=torch.Generator()), greedy)
    assert torch.equal(torch.get_rng_state(), state), "greedy and seeded texts take nothing from torch"


def test_one_seed_a_row_makes_every_row_write_as_if_alone() -> None:
    model = tiny().double()
    ids, mask = prompts(FOUR)
    seeds = [11, 22, 11, 44]
    together = ours(model, PromptLookup(4), ids, mask, do_sample=True, seed=seeds)
    assert torch.equal(ours(model, None, ids, mask, do_sample=True, seed=torch.tensor(seeds)), together)
    for row, length in enumerate(FOUR):
        real = ids[row : row + 1, -length:]
        alone = ours(model, SmallModel(disturbed(model), 3), real, do_sample=True, seed=seeds[row])
        assert alone[0, length:].tolist() == together[row, ids.shape[1] :].tolist()


class Trouble(Exception):
    """Raised by the user's own code."""


@pytest.mark.parametrize(
    ("where", "error"), some(("processor", "criterion", "streamer", "on_tokens"), (Trouble, KeyboardInterrupt))
)
def test_an_exception_in_the_users_code_leaves_nothing_behind(where: str, error: type[BaseException]) -> None:
    model = tiny()
    ids, mask = prompts(ONE)
    wanted = plain(model, ids, mask)
    draft = disturbed(model)

    def fail(ids_now, *rest, **more):
        if ids_now.shape[-1] >= 16:
            raise error
        return rest[0] if where == "processor" else False

    streamer, counted = Collect(), []
    streamer.put = lambda value: fail(torch.zeros(counted.append(1) or 10 + len(counted)))
    given = {
        "processor": {"logits_processor": [fail]},
        "criterion": {"stopping_criteria": [fail]},
        "streamer": {"streamer": streamer},
        "on_tokens": {"on_tokens": lambda row, tokens: fail(torch.zeros(counted.append(1) or 13 + len(counted)))},
    }[where]
    enable(model)
    with unchanged(model, draft):
        with pytest.raises(error):
            plain(model, ids, mask, assistant_model=draft, num_assistant_tokens=3, **given)
    assert torch.equal(plain(model, ids, mask), wanted)
    assert torch.equal(plain(model, ids, mask, assistant_model=draft), wanted)
