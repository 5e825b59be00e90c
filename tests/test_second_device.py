"""Every drafter on a second device: nothing mixes devices, the text is the CPU's, and a round waits once.

The device is emulated (``support/second_device.py``): no accelerator is needed, and nothing here is a time. What a
round may cost at most stands in ``device_counts.json``; ``python tests/support/device_runs.py`` writes it anew.
"""

from __future__ import annotations

import warnings
from dataclasses import asdict

import pytest
import torch
from device_runs import CASES, DRAFTERS, PAGE, Case, drafter_of, recorded, same_torch, table, write
from second_device import SecondDevice, payload_of
from tiny import Handmade, ours, plain, prompts, tiny
from torch import Tensor, nn

from hf_specgen import Draft, Drafter, PromptLookup, SmallModel, SpecGenError
from hf_specgen.drafters.prompt_lookup import merge
from hf_specgen.drafting.shapes import StaticShape
from hf_specgen.round.records import Tree

FAST = [
    Case("none", "greedy", 1, "triton"),
    Case("lookup", "sampled", 4, "reference"),
    Case("branches", "greedy", 4, "reference"),
    Case("small", "greedy", 4, "reference"),
    Case("medusa chain", "sampled", 1, "reference"),
    Case("medusa tree", "greedy", 4, "reference"),
    Case("medusa tree", "drawn", 1, "reference"),
    Case("eagle", "greedy", 1, "triton"),
    Case("eagle3 chain", "gumbel", 1, "reference"),
    Case("eagle3 tree", "greedy", 4, "reference"),
    Case("eagle3 dynamic", "greedy", 4, "reference"),
    Case("with lookup", "greedy", 4, "reference"),
]
"""Every drafter, mode, batch and path once; the whole product is slow."""

ALL = [case if case in FAST else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
PREFILL_WAITS = ("transformers/masking_utils.py",)
"""A small model reads its prompt in the first round, and transformers asks whether that has padding."""


def test_fast_cases_hold_every_option() -> None:
    assert set(FAST) <= set(CASES)
    assert {case.drafter for case in FAST} == set(DRAFTERS)
    for axis in ("mode", "rows", "path"):
        assert {vars(case)[axis] for case in FAST} == {vars(case)[axis] for case in CASES}


@pytest.mark.parametrize("case", ALL, ids=str)
def test_a_round_on_a_second_device(case: Case) -> None:
    """Nothing mixes devices (it would raise), the text is the CPU's, a round waits once and costs no more than ever."""
    wanted = write(case, on_device=False)
    run = write(case, on_device=True)
    assert torch.equal(run.tokens, wanted.tokens)
    assert run.stats.num_accepted_tokens == wanted.stats.num_accepted_tokens
    if case.drafter != "none":
        assert run.stats.num_draft_tokens > 0
        assert case.mode != "greedy" or run.stats.num_accepted_tokens > 0
    if case.rows > 1:
        assert len({row.num_tokens for row in run.stats.rows}) > 1, "no row ended before another"
    for name in run.rounds:
        waits = [event for event in run.device.events if event.kind == "wait" and event.section == name]
        if case.drafter == "small" and name == "round 1":
            waits = [event for event in waits if not event.line.startswith(PREFILL_WAITS)]
        assert [run.device.events[event] for event in waits] == [1], run.device.listing("wait")
    compare(case, asdict(run.costs()))


def compare(case: Case, costs: dict[str, int]) -> None:
    """Fail when a count rose above the recorded one, and say so when one can be lowered."""
    known = recorded()[str(case)]
    counts_launches = same_torch() and case in FAST  # those of the rest were never compared twice
    compared = [name for name in costs if name != "launches" or counts_launches]
    risen = {name: f"{known[name]} -> {costs[name]}" for name in compared if costs[name] > known[name]}
    assert not risen, f"{case}: {risen}. If it must be: python tests/support/device_runs.py records it anew."
    fallen = {name: f"{known[name]} -> {costs[name]}" for name in compared if costs[name] < known[name]}
    if fallen:
        warnings.warn(
            f"{case}: {fallen}: record it with python tests/support/device_runs.py --lower",
            RuntimeWarning,
            stacklevel=1,
        )


def test_the_docs_show_what_is_recorded() -> None:
    assert set(recorded()) == set(map(str, CASES))
    assert table(recorded()) in PAGE.read_text()


def test_counts_that_rise_are_refused() -> None:
    case = CASES[0]
    known = recorded()[str(case)]
    compare(case, known)
    for name in ("waits", "uploads"):
        with pytest.raises(AssertionError, match=name):
            compare(case, {**known, name: known[name] + 1})
    with pytest.warns(RuntimeWarning, match="--lower"):
        compare(case, {**known, "uploads": known["uploads"] - 1})


@pytest.mark.parametrize("name", ["eagle", "eagle3 chain", "with lookup"])
def test_counts_do_not_depend_on_what_ran_before(name: str) -> None:
    case = Case(name, "greedy", 1, "reference")
    first, second = (write(case, on_device=True).costs() for _ in range(2))
    assert first == second
    used = drafter_of(name, False, on_device=True)
    fresh, again = (write(case, on_device=True, drafter=used).costs() for _ in range(2))
    assert fresh == first
    assert again.uploads == first.uploads - 2, "a drafter that ran keeps its rotary factors: the comparison can fail"


def test_trees_tell_bounds_that_hold() -> None:
    """Nobody waits to learn how deep a tree is, or how many children a node has."""
    merged = merge([[[1, 2, 3], [1, 4], [5]], [[7]], []], torch.device("cpu"))
    shaped = StaticShape.from_paths([[0], [0, 0], [0, 1], [1], [2]]).tree()
    for tree, n_valid in ((merged.tree, merged.n_valid.tolist()), (shaped, [5])):
        parents = [row[:count] for row, count in zip(tree.parents.tolist(), n_valid, strict=True)]
        most = max(row.count(parent) for row in parents for parent in row)
        assert tree.deepest == int(Tree(tree.parents).depth.max())
        assert tree.widest is not None and tree.widest >= most
        assert tree.trim(1).max_depth == 1
    assert Tree(shaped.parents).max_depth == shaped.max_depth, "without a bound the device is read"


class OnTheHost(Handmade):
    """Make drafts on the CPU, wherever the target lives."""

    def on_propose(self, sequences) -> Draft:
        return Draft.from_lists([[1, 2]] * len(sequences), "cpu")


class Curious(Handmade):
    """Read the draft back before it is judged."""

    def on_propose(self, sequences) -> Draft:
        draft = Draft.from_lists([[1, 2][:room] for room in self.room], sequences.prompt.device)
        draft.n_valid.tolist()
        return draft


CASE = Case("lookup", "greedy", 1, "reference")


def test_a_drafter_that_mixes_devices_is_caught() -> None:
    write(CASE, on_device=False, drafter=OnTheHost())
    with pytest.raises(RuntimeError, match="same device"):
        write(CASE, on_device=True, drafter=OnTheHost())


def test_a_drafter_that_reads_twice_a_round_is_caught() -> None:
    run = write(CASE, on_device=True, drafter=Curious())
    assert run.costs().waits == 2
    assert "test_second_device" not in run.device.listing("wait"), "lines are the project's"


@pytest.fixture
def device():
    with SecondDevice() as opened:
        yield opened


def test_numbers_are_the_cpus(device: SecondDevice) -> None:
    table = torch.arange(6, device="cuda").view(2, 3).float()
    assert table.device == device.device
    assert (table * 2).sum().item() == 30.0
    assert table[:, [0, 2]].tolist() == [[0.0, 2.0], [3.0, 5.0]]
    table[0, 0] = 7
    table[table > 4] = 0
    assert table.cpu().tolist() == [[0, 1, 2], [3, 4, 0]]
    assert device.adopt(nn.Linear(3, 2)).weight.device.type == "cuda"


WAITS = {
    "item": lambda x: x.sum().item(),
    "tolist": Tensor.tolist,
    "bool": lambda x: bool(x.any()),
    "int": lambda x: int(x.sum()),
    "nonzero": torch.nonzero,
    "mask": lambda x: x[x > 2],
    "equal": lambda x: torch.equal(x, x),
    "cpu": Tensor.cpu,
    "host's buffer": lambda x: torch.zeros(6).copy_(x),
}


@pytest.mark.parametrize("name", WAITS)
def test_waits_are_counted(device: SecondDevice, name: str) -> None:
    numbers = torch.arange(6, device="cuda").float()
    assert device.total("wait") == 0
    WAITS[name](numbers)
    assert device.total("wait") == 1
    assert device.total("upload") == 0


def test_uploads_are_counted(device: SecondDevice) -> None:
    numbers = torch.tensor([1.0, 2.0], device=device.device)
    assert device.total("upload") == 1
    numbers[:] = torch.ones(2)
    assert device.total("upload") == 2
    torch.ones(2).to(device.device)
    assert device.total("upload") == 3
    numbers[[0, 1]]
    assert device.total("upload") == 4
    assert device.total("wait") == 0


def test_launches_are_counted(device: SecondDevice) -> None:
    numbers = device.put(torch.ones(4))
    numbers.view(2, 2)[0]
    assert device.total("launch") == 0
    torch.relu(numbers + numbers)
    assert device.total("launch") == 2


MIXED = {
    "sum": lambda x: x + torch.ones(6),
    "product": lambda x: x.view(2, 3) @ torch.ones(3, 2),
    "cat": lambda x: torch.cat((x, torch.ones(1))),
    "index": lambda x: torch.ones(9)[x.long()],
    "gather": lambda x: x.gather(0, torch.zeros(2, dtype=torch.long)),
    "where": lambda x: torch.where(torch.ones(6).bool(), x, x),
    "written": lambda x: x.__setitem__(torch.zeros(2, dtype=torch.long), torch.ones(2)),
}


@pytest.mark.parametrize("name", MIXED)
def test_mixed_devices_are_refused(device: SecondDevice, name: str) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        MIXED[name](torch.arange(6, device="cuda").float())


def test_a_scalar_of_the_host_may_meet_the_device(device: SecondDevice) -> None:
    numbers = torch.arange(3, device="cuda").float()
    assert (numbers * torch.tensor(2.0)).sum().item() == 6.0


def test_outside_of_the_block_there_is_no_device() -> None:
    tensor = SecondDevice().put(torch.ones(2))
    with pytest.raises(RuntimeError, match="outside"):
        tensor + tensor


LACKS_DOUBLES = ("mps:0", [torch.float64])
"""Apple's GPUs."""


@pytest.mark.parametrize("drafter", [PromptLookup(3), None], ids=["lookup", "none"])
def test_greedy_text_on_a_device_without_doubles(drafter: Drafter | None) -> None:
    model = tiny()
    ids, mask = prompts([9])
    expected = plain(model, ids, mask, max_new_tokens=6)
    with SecondDevice(*LACKS_DOUBLES) as device:
        device.adopt(model)
        text = ours(model, drafter, device.put(ids), device.put(mask), max_new_tokens=6)
    assert torch.equal(payload_of(text), expected)


def test_sampling_is_refused_on_a_device_without_doubles() -> None:
    model = tiny()
    ids, mask = prompts([9])
    with SecondDevice(*LACKS_DOUBLES) as device, pytest.raises(SpecGenError, match="float64, which this device lacks"):
        device.adopt(model)
        ours(model, PromptLookup(3), device.put(ids), device.put(mask), do_sample=True)


@pytest.mark.slow
def test_a_small_model_on_the_host_serves_a_target_on_the_device() -> None:
    """A drafter may live elsewhere: what it drafts is moved."""
    model = tiny()
    ids, mask = prompts([9])
    expected = plain(model, ids, mask, max_new_tokens=6)
    small = SmallModel(tiny(seed=1), 2)
    with SecondDevice() as device:
        device.adopt(model)
        text = ours(model, small, device.put(ids), device.put(mask), max_new_tokens=6)
    assert torch.equal(payload_of(text), expected)
