"""Runs of every drafter on the second device, and what a round of each costs the device.

``python tests/support/device_runs.py`` runs all of them, rewrites ``device_counts.json`` beside the tests and the table
in ``docs/benchmarks.md``; names of drafters run these alone, ``--lower`` keeps numbers that would rise.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from pathlib import Path

if __name__ == "__main__":
    os.environ.setdefault("TRITON_INTERPRET", "1")
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import torch
import transformers
from fitted import fitted
from second_device import SecondDevice, payload_of
from tiny import disturbed, garbled, plain, prompts, texts_of, tiny
from torch import Tensor, nn

from hf_specgen import Drafter, PromptLookup, SmallModel, SpeculativeDecoding, WithLookup, ops
from hf_specgen.drafting.learned import LearnedDrafter
from hf_specgen.round import verify_dense
from hf_specgen.round.costs import Costs
from hf_specgen.round.stats import AcceptanceStats

COUNTS = Path(__file__).parents[1] / "device_counts.json"
PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
HEADING = "## Waits, uploads and launches of a round"

TREE = [[0], [0, 0], [0, 0, 0], [1], [0, 1]]
GROWN = {"top_k": 2, "depth": 3, "nodes": 6}
CHAIN = {"tree": "chain", "num_tokens": 3}
LEARNED: dict[str, tuple[str, dict[str, object]]] = {
    "medusa chain": ("medusa", {"num_heads": 3, "num_head_layers": 1, **CHAIN}),
    "medusa tree": ("medusa", {"num_heads": 3, "num_head_layers": 1, "tree": TREE}),
    "eagle": ("eagle", CHAIN),
    "eagle3 chain": ("eagle3", CHAIN),
    "eagle3 tree": ("eagle3", {"tree": TREE, "reduced": True}),
    "eagle3 dynamic": ("eagle3", {"tree": GROWN}),
}
DRAFTERS = ("none", "lookup", "branches", "small", *LEARNED, "with lookup")
MODES: dict[str, tuple[str, dict[str, object]]] = {
    "greedy": ("rejection", {}),
    "sampled": ("rejection", {"do_sample": True, "temperature": 0.2, "top_k": 0, "seed": 3}),
    "drawn": ("rejection", {"do_sample": True, "temperature": 0.2, "top_k": 0, "seed": 3}),
    "gumbel": ("gumbel", {"do_sample": True, "temperature": 0.2, "top_k": 0, "seed": 3}),
}
BATCHES = (1, 4)
PATHS = ("reference", "triton")
CANNOT_DRAW = ("none", "lookup", "branches", "eagle3 dynamic")
LENGTHS = (9, 14, 5, 11)
TOKENS = 8


@dataclass(frozen=True)
class Case:
    """Name one run: a drafter, a way to decode, a number of rows and the kernels that run."""

    drafter: str
    mode: str
    rows: int
    path: str

    def __str__(self) -> str:
        return f"{self.drafter}, {self.mode}, {self.rows}, {self.path}"


CASES = tuple(
    Case(*axes)
    for axes in product(DRAFTERS, MODES, BATCHES, PATHS)
    if not (axes[1] == "drawn" and axes[0] in CANNOT_DRAW)
)


@dataclass(frozen=True)
class RoundCosts:
    """Hold the most that a round of a run costs; launches are those outside of transformers' own code."""

    waits: int
    uploads: int
    launches: int


@dataclass(frozen=True)
class DeviceRun:
    """Hold a run's tokens (on the CPU), its statistics, and the device that counted it."""

    tokens: Tensor
    stats: AcceptanceStats
    device: SecondDevice

    @property
    def rounds(self) -> list[str]:
        """Return the sections of the loop's rounds: from the tokens of one round to those of the next."""
        return [f"round {number}" for number in range(1, max(row.num_rounds for row in self.stats.rows) + 1)]

    def costs(self) -> RoundCosts:
        """Return the most that any round cost."""
        per_round = [
            (self.device.total("wait", name), self.device.total("upload", name), self._launches(name))
            for name in self.rounds
        ]
        return RoundCosts(*map(max, zip(*per_round, strict=True)))

    def _launches(self, section: str) -> int:
        return sum(
            count
            for event, count in self.device.events.items()
            if event.kind == "launch" and event.section == section and not event.line.startswith("transformers/")
        )


class RoundMarks:
    """Start a section of the device's books when the first tokens of a round arrive."""

    def __init__(self, device: SecondDevice) -> None:
        self.device = device
        self.finished_rounds = 0
        self.latest_row = -1

    def __call__(self, row: int, tokens: list[int]) -> None:
        """Receive a row's tokens: within a round the rows come in order, so a row that does not ascend is new."""
        if not self.finished_rounds or row <= self.latest_row:
            self.finished_rounds += 1
            self.device.section = f"round {self.finished_rounds}"
        self.latest_row = row


@cache
def target() -> tuple[transformers.PreTrainedModel, transformers.PreTrainedModel]:
    """Return the target on the CPU and on the second device."""
    model = tiny()
    return model, SecondDevice().adopt(copy.deepcopy(model))


@cache
def known_texts() -> list[list[int]]:
    """Return what the target writes greedily: the drafters know it."""
    ids, mask = prompts(list(LENGTHS))
    return texts_of(plain(target()[0], ids, mask, max_new_tokens=TOKENS), mask)


@cache
def stop_tokens() -> list[int]:
    """Return tokens that end two rows early."""
    first, second = known_texts()[1][14 + 3], known_texts()[2][5 + 5]
    return [first, second]


def drafter_of(name: str, draws: bool, on_device: bool) -> Drafter | None:
    """Build a drafter that is often right, with its weights on either device; none that has run before."""
    move: Callable[[nn.Module], nn.Module] = SecondDevice().adopt if on_device else nn.Module.eval
    model, texts = target()[0], known_texts()
    if name == "none":
        return None
    if name == "lookup":
        return PromptLookup(3, corpus=[garbled(text) for text in texts])
    if name == "branches":
        return PromptLookup(3, branches=2, corpus=[text + garbled(text) for text in texts])
    if name == "small":
        return SmallModel(move(disturbed(model)), 3, sample=draws)
    if name == "with lookup":
        # which rows copy follows what a pass costs, and a CPU's figures are others: both runs get the accelerator's
        lookup = PromptLookup(costs=Costs())
        return WithLookup(drafter_of("eagle3 chain", draws, on_device), lookup)
    return move(copy.deepcopy(learned(name, draws)))  # its first run uploads rotary factors, and keeps them


@cache
def learned(name: str, draws: bool) -> LearnedDrafter:
    """Fit a drafter on the CPU, once for all runs."""
    method, settings = LEARNED[name]
    return fitted(method, target()[0], known_texts(), 3, sample=draws, **settings)


def write(case: Case, on_device: bool, drafter: Drafter | None = None) -> DeviceRun:
    """Write the case's text on the second device, or on the CPU with the reference."""
    ids, mask = prompts(list(LENGTHS[: case.rows]))
    rule, settings = MODES[case.mode]
    drafter = drafter or drafter_of(case.drafter, case.mode in ("drawn", "gumbel"), on_device)
    loop = SpeculativeDecoding(drafter, rule)
    device = SecondDevice()
    forget_constants()
    wanted = {"max_new_tokens": TOKENS, "eos_token_id": stop_tokens(), "pad_token_id": 0, **settings}
    with ops.use_kernels(case.path if on_device else "reference"):
        if not on_device:
            output = plain(target()[0], ids, mask, custom_generate=loop, **wanted)
            return DeviceRun(output, output.speculation, device)
        wanted["on_tokens"] = RoundMarks(device)
        with device:
            output = plain(target()[1], device.put(ids), device.put(mask), custom_generate=loop, **wanted)
    return DeviceRun(payload_of(output), output.speculation, device)


def forget_constants() -> None:
    """Drop the tensors that verdicts keep for all rounds: every run then pays for its own, whatever ran before."""
    verify_dense._constant.cache_clear()
    verify_dense._numbers.cache_clear()


def recorded() -> dict[str, dict[str, int]]:
    """Return the recorded costs of every case."""
    return json.loads(COUNTS.read_text())["rounds"]


def recorded_torch() -> str:
    """Return the version of torch that they were recorded with: how many launches an operator is depends on it."""
    return json.loads(COUNTS.read_text())["torch"]


def same_torch() -> bool:
    """Tell whether launches can be compared."""
    return torch.__version__.partition("+")[0] == recorded_torch()


def table(rounds: dict[str, dict[str, int]]) -> str:
    """Return the table of the docs: waits, uploads, launches with the reference and with Triton."""
    lines = ["| drafter | batch | " + " | ".join(MODES) + " |", "| --- " * (len(MODES) + 2) + "|"]
    for drafter, rows in product(DRAFTERS, BATCHES):
        cells = [_cell(rounds, drafter, mode, rows) for mode in MODES]
        lines.append(f"| {drafter} | {rows} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(rounds: dict[str, dict[str, int]], drafter: str, mode: str, rows: int) -> str:
    reference = rounds.get(str(Case(drafter, mode, rows, "reference")))
    triton = rounds.get(str(Case(drafter, mode, rows, "triton")))
    if reference is None or triton is None:
        return "-"
    return f"{triton['waits']} / {triton['uploads']} / {triton['launches']} ({reference['launches']})"


def write_page(rounds: dict[str, dict[str, int]]) -> None:
    """Replace the table in the docs."""
    text = (
        f"{HEADING}\n"
        "`python tests/support/device_runs.py` (tiny target, drafts of three tokens, torch "
        f"{torch.__version__.partition('+')[0]}; counted on the CPU by an emulated device, nothing here is a time).\n\n"
        "Each cell: waits / uploads / launches of the dearest round with the Triton kernels, in brackets launches with "
        "the reference. Waits: the host waits\nfor the device. Uploads: copies from the host's memory. Launches: "
        "operators outside of transformers' own code. One wait a round is the rule; a small model\nreads the prompt in "
        "its first round, where transformers asks twice whether it is padded.\n\n"
        f"{table(rounds)}\n"
    )
    before, _, after = PAGE.read_text().partition(HEADING)
    rest = after.partition("\n## ")[2]
    PAGE.write_text(before.rstrip("\n") + "\n\n" + text + (f"\n## {rest}" if rest else ""))


def write_counts(rounds: dict[str, dict[str, int]]) -> None:
    """Write the recorded costs, a line a case in the order of the cases."""
    names = [str(case) for case in CASES if str(case) in rounds]
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(rounds[name])}" for name in names)
    version = torch.__version__.partition("+")[0]
    COUNTS.write_text(f'{{"torch": "{version}",\n "rounds": {{\n{lines}\n}}}}\n')


def main() -> None:
    """Record what a round of every case costs."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("drafters", nargs="*", metavar="DRAFTER", help=f"record only these of {', '.join(DRAFTERS)}")
    parser.add_argument("--lower", action="store_true", help="keep recorded numbers that would rise")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rounds = recorded() if COUNTS.exists() else {}
    for case in CASES:
        if options.drafters and case.drafter not in options.drafters:
            continue
        costs = asdict(write(case, on_device=True).costs())
        if options.lower and str(case) in rounds:
            known = rounds[str(case)]
            costs = {name: min(count, known[name]) for name, count in costs.items()}
        rounds[str(case)] = costs
        write_counts(rounds)  # case by case: all of them take minutes
        print(case, costs, flush=True)
    write_page(rounds)


if __name__ == "__main__":
    main()
