"""The attention kernel against its definition: heads of any width, ragged and empty masks, caps, sinks, long caches."""

from __future__ import annotations

import random

import pytest
import torch
from ragged_trees import LENGTHS, random_tree
from tiny import build, prompts
from torch import Tensor

from hf_specgen import ops
from hf_specgen.kernels import reference_attention
from hf_specgen.models.attention import use_attention
from hf_specgen.models.cached_model import CachedModel
from hf_specgen.models.passes import Pass
from hf_specgen.models.prompt import Prompt
from hf_specgen.models.visibility import TreeVisibility
from hf_specgen.round.records import Tree

triton = pytest.importorskip("triton")
from hf_specgen.kernels import triton_attention  # noqa: E402 - needs Triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # elsewhere the interpreter runs on CPU tensors
# Relative to one and the result together.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
SPLIT = triton_attention._SPLIT

Call = tuple[Tensor, Tensor, Tensor, Tensor, float, float, "Tensor | None"]


def call(
    rows: int = 2,
    heads: tuple[int, int] = (4, 2),
    width: int = 5,
    slots: int = 40,
    dims: tuple[int, int] = (16, 16),
    dtype: torch.dtype = torch.float32,
    softcap: float = 0.0,
    sinks: bool = False,
    seen: float = 0.5,
    shared_mask: bool = False,
) -> Call:
    """Draw a call as a pass makes it: views of buffers with room behind; one query sees nothing, one row little."""
    query = torch.randn(rows, width, heads[0], dims[0]).to(dtype).transpose(1, 2)
    key = torch.randn(rows, heads[1], slots + 9, dims[0]).to(dtype)[:, :, :slots]
    value = torch.randn(rows, heads[1], slots + 9, dims[1]).to(dtype)[:, :, :slots]
    mask = torch.rand(1 if shared_mask else rows, 1, width, slots) < seen
    mask[0, 0, width - 1] = False
    mask[-1, 0, :, slots // 3 :] = False
    sink = torch.randn(heads[0]).to(dtype) if sinks else None
    tensors = [tensor.to(DEVICE) for tensor in (query, key, value, mask)]
    return (*tensors, 0.4, softcap, None if sink is None else sink.to(DEVICE))


def wanted(given: Call) -> Tensor:
    """Attend in float64, straight from the formula."""
    query, key, value, mask, scale, softcap, sinks = given
    group = query.shape[1] // key.shape[1]
    logits = query.double() @ key.double().repeat_interleave(group, 1).mT * scale
    logits = torch.tanh(logits / softcap) * softcap if softcap else logits
    mass = logits.exp() * mask
    total = mass.sum(-1, keepdim=True) + (0 if sinks is None else sinks.double().exp()[:, None, None])
    return mass @ value.double().repeat_interleave(group, 1) / total.where(total > 0, 1.0)


def rounding_of_scores(given: Call) -> float:
    """Bound what float32 sums over a head's channels round off a score, in an order that is each processor's own.

    One rounding of the sum of absolute products; it passes the tolerance at heads of 192 channels alone.
    """
    query, key, scale = given[0].double().abs(), given[1].double().abs(), given[4]
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    return float((query @ key.transpose(2, 3)).max()) * scale * 2.0**-24


def check(given: Call) -> None:
    with ops.use_kernels("triton"), ops.record() as calls:
        found = ops.tree_attention(*given)
    assert calls == {("tree_attention", "triton"): 1}
    assert found.dtype == given[0].dtype and found.transpose(1, 2).is_contiguous()
    right = wanted(given)
    assert found.shape == right.shape
    allowed = max(TOLERANCE[found.dtype], rounding_of_scores(given))
    assert float(((found - right).abs() / (1 + right.abs())).max()) < allowed
    assert (found.abs().sum(-1).transpose(1, 2)[~given[3][:, 0].any(-1).expand(len(found), -1)] == 0).all()
    told = reference_attention.tree_attention(*given)
    assert float(((told - right).abs() / (1 + right.abs())).max()) < 2 * allowed


CASES = {
    "plain": {},
    "no shared heads": {"heads": (2, 2)},
    "one shared head": {"heads": (5, 1)},
    "values narrower": {"dims": (24, 8)},
    "values wider": {"dims": (8, 40)},
    "80 channels": {"dims": (80, 80), "rows": 1},
    "capped": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "capped and sinks": {"softcap": 1.5, "sinks": True, "dtype": torch.float16},
    "bfloat16": {"dtype": torch.bfloat16, "heads": (6, 2)},
    "one query": {"width": 1},
    "one slot": {"slots": 3, "width": 2},
    "one mask for all rows": {"shared_mask": True},
    "two tiles of queries": {"heads": (6, 1), "width": 7, "rows": 1},
    "nothing is seen": {"seen": 0.0},
    "two splits": {"slots": SPLIT + 70, "rows": 1, "heads": (2, 1)},
    "two splits, sinks": {"slots": SPLIT + 70, "rows": 1, "heads": (2, 1), "sinks": True, "seen": 0.01},
    "a split out of sight": {"slots": 2 * SPLIT - 1, "rows": 2, "heads": (2, 1), "seen": 0.004},
}


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_is_attention(name: str) -> None:
    check(call(**CASES[name]))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_any_call_is_attention(seed: int) -> None:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    shared = chance.choice([1, 2, 3])
    check(
        call(
            rows=chance.randint(1, 3),
            heads=(shared * chance.choice([1, 2, 3, 5]), shared),
            width=chance.choice([1, 2, 7, 16, 33]),
            slots=chance.choice([2, 31, 32, 33, 200, SPLIT, SPLIT + 1]),
            dims=(chance.choice([8, 16, 64, 80, 192]), chance.choice([8, 16, 64, 128])),
            dtype=chance.choice(list(TOLERANCE)),
            softcap=chance.choice([0.0, 0.0, 1.0, 30.0]),
            sinks=chance.random() < 0.4,
            seen=chance.choice([0.01, 0.5, 1.0]),
        )
    )


@pytest.mark.slow
def test_a_prompt_wider_than_any_draft_is_read_in_one_split() -> None:
    check(call(rows=1, heads=(2, 1), width=triton_attention._FEW + 3, slots=SPLIT + 90))


def test_the_comparison_sees_a_query_that_reads_one_slot_too_many() -> None:
    given = call()
    right = wanted(given)
    given[3][0, 0, 0, -1] ^= True
    assert float((triton_attention.tree_attention(*given) - right).abs().max()) > 1e-2


@pytest.mark.parametrize("x", [0.0, 1e-7, 0.01, 0.29, 0.31, 1.0, 5.0, 40.0])
def test_the_cap_is_a_tanh(x: float) -> None:
    """One channel, two slots: the weights show the capped logit."""
    query = torch.tensor([x, -x], device=DEVICE).view(1, 1, 2, 1)
    key = torch.tensor([1.0, 0.0], device=DEVICE).view(1, 1, 2, 1)
    mask = torch.ones(1, 1, 2, 2, dtype=torch.bool, device=DEVICE)
    found = triton_attention.tree_attention(query, key, key, mask, 1.0, 1.0, None).flatten()
    right = torch.tensor([x, -x], dtype=torch.float64).tanh().sigmoid()
    assert float((found.cpu() - right).abs().max()) < 1e-7


@pytest.mark.parametrize("sinks", [False, True])
def test_a_row_does_not_see_its_neighbours(sinks: bool) -> None:
    """Alone its slots fit one split; beside a longer row there are two, and another launch adds them up."""
    given = call(rows=2, heads=(2, 1), width=3, slots=SPLIT + 20, sinks=sinks)
    given[3][1, 0, :, 30:] = False
    together = triton_attention.tree_attention(*given)
    query, key, value, mask, *rest = given
    alone = triton_attention.tree_attention(query[1:], key[1:, :, :33], value[1:, :, :33], mask[1:, ..., :33], *rest)
    assert torch.equal(together[1:], alone)


@pytest.mark.parametrize("name", ["masks", "keys"])
def test_strides_may_be_anything(name: str) -> None:
    query, key, value, mask, *rest = call()
    right = triton_attention.tree_attention(query, key, value, mask, *rest)
    if name == "masks":
        mask = mask.mT.contiguous().mT
    else:
        key, value = key.mT.contiguous().mT, value.transpose(1, 2).contiguous().transpose(1, 2)
        query = query.contiguous()
    assert torch.equal(triton_attention.tree_attention(query, key, value, mask, *rest), right)


@pytest.mark.slow
def test_rows_lie_further_apart_than_32_bits_reach() -> None:
    """Untouched pages of the buffer cost nothing."""
    query, _, value, mask, *rest = call(heads=(2, 1), dtype=torch.float16, slots=4, width=2)
    step = 2**31 + 64
    buffer = torch.empty(step + 4 * 16, dtype=torch.float16, device=DEVICE)
    key = buffer.as_strided((2, 1, 4, 16), (step, 64, 16, 1))
    key.copy_(torch.randn(2, 1, 4, 16))
    mask[:] = True
    check((query, key, value, mask, *rest))


def test_wide_heads_and_float64_take_the_definition() -> None:
    for given in (call(dtype=torch.float64), call(dims=(264, 16), rows=1)):
        found = triton_attention.tree_attention(*given)
        assert torch.equal(found, reference_attention.tree_attention(*given))


@pytest.mark.parametrize("sinks", [False, True])
def test_the_operator_is_well_formed(sinks: bool) -> None:
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(triton_attention._tree_attention, call(rows=1, sinks=sinks, width=2), test_utils=checks)


@pytest.mark.slow
def test_the_operator_compiles() -> None:
    given = call(rows=1)
    torch.library.opcheck(triton_attention._tree_attention, given)
    compiled = torch.compile(triton_attention.tree_attention, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*given), triton_attention.tree_attention(*given))


def test_no_rows_are_no_error() -> None:
    query, key, value, mask, *rest = call()
    found = triton_attention.tree_attention(query[:0], key[:0], value[:0], mask[:0], *rest)
    assert found.shape == (0, 4, 5, 16)


def test_variants_name_every_argument() -> None:
    names = []
    for name, kernel, signature, constants, warps in triton_attention.variants():
        names.append(name)
        assert set(signature) == set(kernel.arg_names), name
        assert {key for key, kind in signature.items() if kind == "constexpr"} == set(constants), name
        assert warps in (4, 8)
    assert len(set(names)) == len(names)


def logits_of(model, backend: str) -> Tensor:
    """Score one tree round over ragged rows, its mask and attention in the backend."""
    ids, _ = prompts(LENGTHS)
    cached = CachedModel(model, len(LENGTHS))
    cached.prefill(Prompt(ids.to(model.device), LENGTHS))
    block = torch.randint(1, 64, (len(LENGTHS), 5), generator=torch.Generator().manual_seed(1)).to(model.device)
    tree = Tree(random_tree(random.Random(2), len(LENGTHS), 4).parents.to(model.device))
    with ops.use_kernels(backend), ops.record() as calls, torch.no_grad():
        found = cached.run(Pass(block, TreeVisibility(tree))).logits
    assert calls["tree_attention", backend] == model.config.num_hidden_layers
    return found


FAMILIES = {"mistral": "sdpa", "gemma2": "eager", "gpt_oss": "eager", "deepseek_v3": "sdpa"}


@pytest.mark.parametrize(
    "family",
    ["gpt_oss", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma2", "mistral", "deepseek_v3"))],
)
def test_models_run_on_it(family: str) -> None:
    model = build(family, FAMILIES[family], num_hidden_layers=2).to(DEVICE)
    with use_attention("tree"):
        assert float((logits_of(model, "triton") - logits_of(model, "reference")).abs().max()) < 5e-5


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_on_a_card(dims: tuple[int, int], dtype: torch.dtype) -> None:
    """Sizes of real models; tiny cases of the other tests run there as they are."""
    for width in (1, 4, 16, triton_attention._FEW + 1):
        for slots in (100, SPLIT, 4096 + 7):
            check(call(rows=3, heads=(8, 2), width=width, slots=slots, dims=dims, dtype=dtype, seen=0.9))
    check(call(rows=3, heads=(16, 2), width=9, slots=3000, dims=dims, dtype=dtype, softcap=30.0, sinks=True))
