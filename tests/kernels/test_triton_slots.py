"""The cache kernels: Triton against the definition, and the definition against lists, dictionaries and loops."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from hf_specgen import ops
from hf_specgen.kernels import reference_slots

triton = pytest.importorskip("triton")
from hf_specgen.kernels import triton_slots  # noqa: E402 - needs Triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # elsewhere the interpreter runs on CPU tensors
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


class Moves:
    """Draw caches in the middle of a round: rows of ragged length, and the path of nodes each of them keeps."""

    def __init__(self, seed: int, depth: int | None = None, dtype: torch.dtype | None = None) -> None:
        chance = random.Random(seed)
        self.rows, self.heads = chance.randint(1, 3), chance.randint(1, 2)
        self.depth = depth or chance.randint(1, 9)
        nodes = self.depth + chance.randint(0, 4)
        self.capacity = nodes + 1 + chance.randint(0, 6)
        self.dtype = dtype or chance.choice(DTYPES)
        widths = [chance.choice([1, 8, 20, 160])] * 2 + [16]
        self.buffers = [self.fresh(width) for width in widths]
        self.counts = [self.depth, *(chance.randint(0, self.depth) for _ in range(self.rows - 1))]
        paths = [
            sorted(chance.sample(range(nodes), count)) + [chance.randrange(nodes) for _ in range(self.depth - count)]
            for count in self.counts
        ]
        front = torch.tensor([[chance.randrange(200)] for _ in range(self.rows)])
        self.source = (front + torch.tensor(paths)) % self.capacity
        self.destination = (front + torch.arange(self.depth)) % self.capacity
        self.kept = torch.arange(self.depth) < torch.tensor(self.counts)[:, None]

    def fresh(self, width: int) -> Tensor:
        return torch.randn(self.rows, self.heads, self.capacity, width).to(self.dtype)

    def run(self, move, backend: str | None = None) -> list[Tensor]:
        """Return what one row after another keeps at the end; the rest is undefined."""
        buffers = [buffer.to(DEVICE, copy=True) for buffer in self.buffers]
        if backend is None:
            move(buffers, self.source.to(DEVICE), self.destination.to(DEVICE))
        else:
            with ops.use_kernels(backend), ops.record() as calls:
                move(buffers, self.source.to(DEVICE), self.destination.to(DEVICE))
            assert calls == {("move_slots", backend): 1}
        return self.defined(buffers)

    def defined(self, buffers: list[Tensor]) -> list[Tensor]:
        found = []
        for buffer in buffers:
            whole = buffer.cpu().clone()
            for row in range(self.rows):
                spoilt = self.destination[row, ~self.kept[row]]
                whole[row, :, spoilt] = 0
            found.append(whole)
        return found

    def one_by_one(self) -> list[Tensor]:
        """Move with plain loops over rows and slots, reading from what stood there before."""
        after = [buffer.clone() for buffer in self.buffers]
        for new, old in zip(after, self.buffers, strict=True):
            for row in range(self.rows):
                for source, destination in zip(self.source[row], self.destination[row], strict=True):
                    new[row, :, destination] = old[row, :, source]
        return self.defined(after)


def backwards(buffers: list[Tensor], source: Tensor, destination: Tensor) -> None:
    """Overwrite a slot before it is read: the negative control."""
    for buffer in buffers:
        for row in range(len(buffer)):
            for k in reversed(range(source.shape[1])):
                buffer[row, :, destination[row, k]] = buffer[row, :, source[row, k]]


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def check_moves(seed: int, depth: int | None = None) -> None:
    moves = Moves(seed, depth)
    wanted = moves.one_by_one()
    assert same(moves.run(ops.move_slots, "reference"), wanted)
    assert same(moves.run(ops.move_slots, "triton"), wanted)


def test_slots_move() -> None:
    for seed in range(14):
        check_moves(seed)
    assert not all(same(Moves(seed).run(backwards), Moves(seed).one_by_one()) for seed in range(14))


@pytest.mark.parametrize("depth", [20, 300])
def test_long_paths_move(depth: int) -> None:
    """More slots than one tile holds: the next tile reads behind what the last one wrote."""
    for seed in range(3):
        check_moves(seed, depth)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64, torch.int8])
def test_every_dtype_moves_bit_by_bit(dtype: torch.dtype) -> None:
    moves = Moves(7, dtype=dtype)
    if dtype.is_floating_point:
        moves.buffers[0][0, 0, int(moves.source[0, 0])] = float("nan")
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    found, wanted = moves.run(ops.move_slots, "triton"), moves.one_by_one()
    assert same([one.view(bits) for one in found], [one.view(bits) for one in wanted])


def test_nothing_to_move_is_no_error() -> None:
    for backend in ("reference", "triton"):
        with ops.use_kernels(backend):
            buffer, none = torch.randn(2, 1, 4, 8, device=DEVICE), torch.zeros(2, 0, dtype=torch.long, device=DEVICE)
            before = buffer.clone()
            ops.move_slots([buffer], none, none)
            ops.move_slots([], none, none)
            ops.move_slots([buffer[:0]], none[:0], none[:0])
            assert torch.equal(buffer, before)


def test_offsets_pass_two_to_the_31() -> None:
    slots = 2**30 // 16 + 8  # of one byte each; pages that nobody touches cost nothing
    buffer = torch.empty(3, 1, slots, 16, dtype=torch.int8, device=DEVICE)
    buffer[:, 0, -8:] = torch.arange(8, dtype=torch.int8, device=DEVICE)[:, None]
    ends = torch.arange(slots - 8, slots, device=DEVICE).repeat(3, 1)
    with ops.use_kernels("triton"):
        ops.move_slots([buffer], ends[:, [1, 4, 7]], ends[:, :3])
    assert buffer[:, 0, -8:, 0].tolist() == [[1, 4, 7, 3, 4, 5, 6, 7]] * 3


def mask_case(seed: int) -> tuple[Tensor, Tensor, int, int, int, bool]:
    chance = random.Random(seed)
    rows, nodes = chance.randint(1, 3), chance.choice([0, 1, 4, 7])
    own = chance.random() < 0.7
    parents = [[chance.randint(-1, node - 1) for node in range(nodes)] for _ in range(rows if own else 1)]
    window = chance.choice([0, 3, 6])
    lengths = [chance.randint(1, 20) for _ in range(rows)]
    capacity = window + nodes + 1 + chance.randint(0, 5) if window else max(lengths) + nodes + 1 + chance.randint(0, 9)
    view = min(capacity, max(lengths) + nodes + 1)
    block = torch.tensor(parents, dtype=torch.long).view(len(parents), nodes)
    return torch.tensor(lengths), block, capacity, view, window, chance.random() < 0.5


def mask_by_hand(lengths: Tensor, parents: Tensor, capacity: int, view: int, window: int, chunked: bool) -> Tensor:
    """Write every row's slots down, newest index last, and look each of them up."""
    scored = parents.shape[1] + 1
    mask = torch.zeros(len(lengths), scored, view, dtype=torch.bool)
    for row, length in enumerate(lengths.tolist()):
        tree = parents[row if len(parents) > 1 else 0].tolist()
        paths = [[0]]
        for node, parent in enumerate(tree):
            paths.append([*paths[parent + 1], node + 1])
        holds = {index % capacity: index for index in range(length + scored)}
        for query, path in enumerate(paths):
            position = {length + node: length + depth for depth, node in enumerate(path)}
            position |= {index: index for index in range(length)}
            here = length + len(path) - 1
            for slot, index in holds.items():
                if index not in position or slot >= view:
                    continue
                near = not window or here - position[index] < window
                if window and chunked:
                    near = here // window == position[index] // window
                mask[row, query, slot] = near
    return mask


def run_mask(backend: str, case: tuple[Tensor, Tensor, int, int, int, bool]) -> Tensor:
    with ops.use_kernels(backend), ops.record() as calls:
        mask = ops.tree_mask(case[0].to(DEVICE), case[1].to(DEVICE), *case[2:])
    assert calls == {("tree_mask", backend): 1}
    return mask.cpu()


def check_mask(seed: int) -> None:
    case = mask_case(seed)
    wanted = mask_by_hand(*case)
    assert torch.equal(run_mask("reference", case), wanted)
    assert torch.equal(run_mask("triton", case), wanted)


def test_masks_show_a_nodes_past() -> None:
    for seed in range(30):
        check_mask(seed)


def test_a_mask_wider_than_a_block() -> None:
    case = (torch.tensor([1500, 40]), torch.tensor([[-1, 0, -1]]), 2100, 1504, 0, False)
    assert torch.equal(run_mask("triton", case), run_mask("reference", case))


@pytest.mark.parametrize("spoil", ["causal", "no window", "older slots"])
def test_the_mask_comparison_can_fail(spoil: str) -> None:
    """Negative controls."""
    differ = 0
    for seed in range(15):
        lengths, parents, capacity, view, window, chunked = mask_case(seed)
        wanted = mask_by_hand(lengths, parents, capacity, view, window, chunked)
        if spoil == "causal":
            parents = torch.arange(-1, parents.shape[1] - 1)[None]
        elif spoil == "no window":
            window = 0
        else:
            capacity += 1
        differ += not torch.equal(run_mask("triton", (lengths, parents, capacity, view, window, chunked)), wanted)
    assert differ > 3


def samples() -> list[tuple]:
    lengths, parents, *rest = mask_case(4)
    moves = Moves(3)
    return [
        (triton_slots.tree_mask, (lengths.to(DEVICE), parents.to(DEVICE), *rest)),
        (
            triton_slots.move_slots,
            ([buffer.to(DEVICE) for buffer in moves.buffers], moves.source.to(DEVICE), moves.destination.to(DEVICE)),
        ),
    ]


@pytest.mark.parametrize("number", range(2))
def test_custom_operators_keep_their_promises(number: int) -> None:
    operator, arguments = samples()[number]
    torch.library.opcheck(operator, arguments)


def test_a_compiled_graph_sees_the_move() -> None:
    moves = Moves(1)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def move(buffers: list[Tensor], source: Tensor, destination: Tensor) -> Tensor:
        triton_slots.move_slots(buffers, source, destination)
        return buffers[0] * 2

    buffers = [buffer.to(DEVICE, copy=True) for buffer in moves.buffers]
    doubled = move(buffers, moves.source.to(DEVICE), moves.destination.to(DEVICE))
    assert same(moves.defined(buffers), moves.one_by_one())
    assert torch.equal(doubled, buffers[0] * 2)


def test_variants_name_every_argument() -> None:
    for name, kernel, signature, constants, warps in triton_slots.variants():
        assert [*signature, *constants] == kernel.arg_names, name
        assert warps in (1, 2, 4, 8, 16)


@pytest.mark.slow
def test_many_random_cases() -> None:
    for seed in range(100, 320):
        check_moves(seed, seed % 40 + 1)
        check_mask(seed)


@pytest.mark.gpu
def test_on_a_card() -> None:
    for seed in range(1000, 1100):
        check_moves(seed, 300)
        check_mask(seed)


@pytest.mark.gpu
def test_overlapping_moves_of_a_whole_cache_on_a_card() -> None:
    """Every program reads and writes the same few slots: a missing barrier shows here."""
    for dtype in DTYPES:
        buffers = [torch.randn(64, 8, 512, 128, device=DEVICE, dtype=dtype) for _ in range(8)]
        wanted = [buffer.clone() for buffer in buffers]
        source = torch.arange(400, 416, device=DEVICE).expand(64, -1) + 1
        for _ in range(10):
            triton_slots.move_slots(buffers, source, source - 1)
            reference_slots.move_slots(wanted, source, source - 1)
        assert same(buffers, wanted)


STEADY = {"vocab", "heads", "width", "view", "max_ngram", "min_ngram"}
UNTRIED = """
import importlib, re
for name in ("attention", "block", "draw", "gumbel", "residual", "rows", "slots", "typical", "walks"):
    for _, kernel, types, constants, _ in importlib.import_module(f"hf_specgen.kernels.triton_{name}").variants():
        for each in kernel.params:
            whole = re.fullmatch("i32|i64", types.get(each.name, "")) and each.name not in constants
            if whole and not each.do_not_specialize:
                print(each.name)
"""


@pytest.mark.slow
def test_sizes_that_move_from_round_to_round_make_no_variants() -> None:
    """A kernel compiled anew for a multiple of sixteen, or for a one, would stop the text for a second."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run([sys.executable, "-c", UNTRIED], env=environment, capture_output=True, text=True, check=True)
    found = {
        name for name in done.stdout.split() if not re.fullmatch(r"(?:(?:q_)?(?:batch|row)_)?stride|[qkv]_\w+", name)
    }
    assert found and found <= STEADY, found - STEADY
