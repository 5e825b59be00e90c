"""Reported: tensor parallel, sampling without ``seed=``: ranks with different torch seeds wrote different texts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import train_runs as runs
from tiny import ours, prompts, tiny
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedModel

from hf_specgen import PromptLookup
from hf_specgen.calls.requests import seed_rows

OTHERS = 0x1234_5678_9ABC_DEF0


@pytest.fixture
def ranks() -> Iterator[None]:
    """Be the second of four processes that never answer."""
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Stand in for the first rank, which sends another seed; return who was asked."""
    asked: list[list[int]] = []

    def broadcast(tensor: Tensor, group: dist.ProcessGroup, group_src: int) -> None:
        assert group_src == 0
        asked.append(dist.get_process_group_ranks(group))
        tensor.copy_(torch.tensor([OTHERS >> 32, OTHERS & 0xFFFFFFFF]))

    monkeypatch.setattr(dist, "broadcast", broadcast)
    return asked


def split(model: PreTrainedModel, names: tuple[str, ...] | None, sizes: tuple[int, ...]) -> PreTrainedModel:
    """Mark a matrix as split over the last dimension of a mesh."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    mesh = mesh if names is None else mesh[names[-1]]
    head = model.model.layers[0].mlp.gate_proj
    head.weight = torch.nn.Parameter(DTensor.from_local(head.weight.detach(), mesh, [Shard(0)], run_check=False))
    return model


@pytest.mark.parametrize(
    ("names", "sizes", "told"),
    [(("fsdp", "tp"), (2, 2), [0, 1]), (("tp",), (4,), [0, 1, 2, 3]), (None, (4,), [0, 1, 2, 3])],
    ids=["transformers", "tp alone", "torch's own"],
)
def test_a_drawn_seed_is_the_first_ranks(
    ranks: None, groups: list[list[int]], names: tuple[str, ...] | None, sizes: tuple[int, ...], told: list[int]
) -> None:
    model = split(tiny(), names, sizes)
    seeds, _ = seed_rows(model, 3, None, None)
    assert seeds.tolist() == [OTHERS] * 3 and groups == [told]
    assert seed_rows(model, 1, None, torch.Generator().manual_seed(7))[0].tolist() == [OTHERS], "generators differ too"
    assert seed_rows(model, 2, [3, 4], None)[0].tolist() == [3, 4] and len(groups) == 2, "a given seed is everybody's"


def test_whole_models_keep_their_own_seeds(ranks: None, groups: list[list[int]]) -> None:
    seeds, _ = seed_rows(tiny(), 2, None, None)
    sharded = fully_shard(tiny(), mesh=init_device_mesh("cpu", (4,)))
    assert any(isinstance(part, DTensor) for part in sharded.parameters())
    seed_rows(sharded, 2, None, None)
    assert groups == [] and OTHERS not in seeds.tolist()


def test_nothing_is_sent_without_processes(groups: list[list[int]]) -> None:
    model = tiny()
    torch.manual_seed(3)
    expected = int(torch.randint(0, 2**62, (1,)))
    torch.manual_seed(3)
    assert seed_rows(model, 2, None, None)[0].tolist() == [expected] * 2 and groups == []


def sample(folder: str) -> dict[str, object]:
    """Sample as one of two processes, each with torch seeds of its own, from a model that is split over them."""
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    dist.init_process_group("gloo")
    whole = tiny()
    if dist.get_rank() == 0:
        whole.save_pretrained(f"{folder}/target")
    dist.barrier()
    model = LlamaForCausalLM.from_pretrained(f"{folder}/target", distributed_config=DistributedConfig(tp_size=2))
    ids, mask = prompts([9, 14])
    texts = []
    for settings in ({}, {"generator": torch.Generator().manual_seed(40 + dist.get_rank())}):
        torch.manual_seed(30 + dist.get_rank())
        out = ours(model, PromptLookup(3), ids, mask, do_sample=True, max_new_tokens=16, pad_token_id=0, **settings)
        texts.append(out)
    held: list[Tensor] = [torch.empty_like(torch.stack(texts)) for _ in range(2)]
    dist.all_gather(held, torch.stack(texts))
    return {"texts": [part.tolist() for part in held], "tp_size": model.tp_size}


@pytest.mark.slow
def test_two_ranks_write_one_text(tmp_path: Path) -> None:
    pytest.importorskip("transformers.distributed", reason="5.17 does not shard at load")
    found = runs.together({"sample": {"run": "test_tensor_parallel_seeds.sample"}}, tmp_path)["sample"]
    first, second = found["texts"]
    assert found["tp_size"] == 2 and first == second
    assert first[0] != first[1], "two calls draw two seeds"
