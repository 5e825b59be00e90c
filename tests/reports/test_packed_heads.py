"""Reported: an int8 target of torchao crashed on its fingerprint: weights that pose as floats and only multiply."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny import KINDS, drafter_of, ours, plain, prompts, some, texts_of, tiny, with_learned
from torch import Tensor, nn

from hf_specgen import IncompatibleDrafter, SpecGenError, UnsupportedTarget, prepack
from hf_specgen.drafters.medusa import MedusaDrafter
from hf_specgen.drafting.borrowed import HeadRows
from hf_specgen.drafting.learned import same_rows
from hf_specgen.models.facts import fingerprint, fingerprint_of, holds_numbers
from hf_specgen.trainers.frozen import FrozenTarget
from hf_specgen.trainers.warm_start import new_drafter, warm_start


class Packed(Tensor):
    """Hold a matrix as int8 and a scale a row, pose as float32, and know nothing but ``linear``."""

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor) -> Packed:
        return Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=torch.float32, device=numbers.device)

    def __init__(self, numbers: Tensor, scale: Tensor) -> None:
        self.numbers = numbers
        self.scale = scale

    @classmethod
    def of(cls, weight: Tensor) -> Packed:
        scale = weight.detach().abs().amax(1, keepdim=True) / 127
        return cls((weight.detach() / scale).round().to(torch.int8), scale)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.nn.functional.linear:
            weight = args[1]
            return torch.nn.functional.linear(args[0], weight.numbers.float() * weight.scale, *args[2:])
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].numbers, args[0].scale)
        raise NotImplementedError(f"{function} of a packed tensor")


def packed(model, only_head: bool = False):
    """Copy a model with packed linear layers."""
    twin = copy.deepcopy(model)
    for name, module in twin.named_modules():
        if type(module) is nn.Linear and (name == "lm_head" or not only_head):
            module.weight = nn.Parameter(Packed.of(module.weight), requires_grad=False)
    return twin


@pytest.fixture(scope="module")
def target():
    return packed(tiny())


def test_it_has_no_fingerprint(target) -> None:
    model = tiny()
    assert type(target.lm_head.weight) is Packed and target.lm_head.weight.is_floating_point()
    assert not holds_numbers(target.lm_head.weight)
    assert fingerprint(target) == "" != fingerprint(model)
    assert fingerprint_of(model.model.embed_tokens.weight, target.lm_head.weight) == ""
    assert not same_rows(model.lm_head.weight.detach(), target.lm_head.weight)


@pytest.mark.parametrize(("kind", "rows"), some(KINDS[:5], (1, 4)))
def test_every_drafter_writes_its_text(kind: str, rows: int, target) -> None:
    check_text(kind, [12] if rows == 1 else [5, 17, 11, 24], target)


@pytest.mark.parametrize("kind", with_learned(()))
def test_learned_drafters_borrow_its_head(kind: str, target) -> None:
    check_text(kind, [5, 17, 11, 24], target)


def check_text(kind: str, lengths: list[int], target) -> None:
    ids, mask = prompts(lengths)
    expected = plain(target, ids, mask)
    watch = drafter_of(kind, tiny(), texts_of(expected, mask))
    assert torch.equal(ours(target, watch, ids, mask), expected)
    assert watch.longest >= 2


def test_rows_of_it_cannot_be_borrowed(target) -> None:
    with pytest.raises(IncompatibleDrafter, match=r"20 rows of the target's head.*unquantised"):
        HeadRows.of(target.lm_head, torch.arange(20), torch.device("cpu"))


def test_heads_cannot_begin_as_copies_of_it(target) -> None:
    with pytest.raises(IncompatibleDrafter, match=r"copies of the target's.*Packed.*own_head=False"):
        MedusaDrafter.for_target(target, num_heads=2)
    MedusaDrafter.for_target(target, num_heads=2, own_head=False)


def test_training_reads_a_head_as_a_matrix(target) -> None:
    with pytest.raises(UnsupportedTarget, match=r"no plain floats \(Packed, torch.float32\).*unquantised head"):
        FrozenTarget(target, (1,), torch.device("cpu")).read({"input_ids": torch.arange(5)[None]})


@pytest.mark.parametrize("only_head", [True, False])
def test_a_warm_start_leaves_packed_weights_out(only_head: bool) -> None:
    target = packed(tiny(), only_head)
    drafter, _ = new_drafter("eagle3", target, warm=False)
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    notes = " ".join(warm_start(drafter, target))
    assert "its head" not in notes
    assert ("quantised" in notes) is not only_head
    if "lm_head.weight" in before:
        assert torch.equal(drafter.state_dict()["lm_head.weight"], before["lm_head.weight"])


def test_prepacking_names_it(target) -> None:
    with pytest.raises(SpecGenError, match="is a Packed of float32"):
        prepack(target)
