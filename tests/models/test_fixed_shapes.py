"""Passes of fixed shapes: the texts of the growing mode, one graph a width, buffers that stay where they are."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from ragged_trees import RowBudget
from tiny import LEARNED, build, drafter_of, plain, prompts, some, texts_of
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteriaList

from hf_specgen import SpeculativeDecoding
from hf_specgen.models.cache_layers import LaneCopies, Scatter
from hf_specgen.models.cached_model import CachedModel, run_model
from hf_specgen.models.fixed_shapes import FixedShapes, StandingBuffers
from hf_specgen.models.passes import Pass
from hf_specgen.models.prompt import Prompt
from hf_specgen.models.slot_cache import SlotCache

RAGGED = [5, 17, 11, 24]
FIVE = [5, 17, 11, 8, 3]
SMALL = FixedShapes(widths=(1, 4, 6, 9), lanes=(1, 2, 4), granule=16)
KINDS = ("lookup", "branches", "small", "tree", "medusa", "eagle dynamic")
MODELS = (("llama", RAGGED), ("mistral", RAGGED), ("gemma3_text", [12]), ("gemma3_text", RAGGED), ("gpt2", RAGGED))


def decode(model, kind: str, lengths: list[int], shapes: FixedShapes | None, **settings):
    """Write texts with a drafter that is right often; return them and each round's accepted paths."""
    ids, mask = prompts(lengths)
    texts = texts_of(plain(model, ids, mask, max_new_tokens=24), mask)
    watch = drafter_of(kind, model, texts)
    loop = SpeculativeDecoding(watch, shapes=shapes)
    result = plain(model, ids, mask, max_new_tokens=24, custom_generate=loop, **settings)
    return result, [round.paths for round in watch.rounds], watch


@pytest.mark.parametrize(("kind", "model"), some(KINDS, MODELS, fast=[("tree", MODELS[1])]))
def test_texts_are_those_of_the_growing_mode(kind: str, model: tuple[str, list[int]]) -> None:
    """In float64, greedy and drawn; every round accepts the same nodes."""
    family, lengths = model
    if kind in LEARNED and family == "gpt2":
        pytest.skip("the fitted drafters read gated layers")
    model = build(family).double()
    for law in ({}, {"do_sample": True, "seed": 5, "temperature": 0.3}):
        growing, paths, watch = decode(model, kind, lengths, None, **law)
        fixed, same_paths, _ = decode(model, kind, lengths, SMALL, **law)
        assert torch.equal(fixed, growing)
        assert same_paths == paths
        assert law or watch.longest >= 2


@pytest.mark.parametrize("kind", ["lookup", "tree", "small"])
@pytest.mark.parametrize("budgets", [[3, 24, 9, 1, 15], [24, 2, 24, 2, 2]])
def test_finished_rows_leave_when_the_rest_fits_fewer_lanes(kind: str, budgets: list[int]) -> None:
    model = build("mistral").double()
    criteria = StoppingCriteriaList([RowBudget(max(FIVE), budgets)])
    settings = {"stopping_criteria": criteria, "pad_token_id": 0}
    growing, paths, _ = decode(model, kind, FIVE, None, **settings)
    lanes: list[int] = []

    def capture(step: Callable[..., object]) -> Callable[..., object]:
        def spied(model: PreTrainedModel, **arguments: object) -> object:
            lanes.append(len(arguments["input_ids"]))
            return step(model, **arguments)

        return spied

    fixed, same_paths, _ = decode(model, kind, FIVE, replace(SMALL, capture=capture), **settings)
    assert torch.equal(fixed, growing) and same_paths == paths
    assert set(lanes) <= {5, 4, 2, 1} and len(set(lanes)) > 1
    assert lanes == sorted(lanes, reverse=True)


def test_prompts_in_chunks_and_hidden_states() -> None:
    model = build("gemma3_text").double()
    asked = {"return_dict_in_generate": True, "output_hidden_states": True, "output_logits": True}
    growing, _, _ = decode(model, "tree", RAGGED, None, prefill_chunk_size=7, **asked)
    fixed, _, _ = decode(model, "tree", RAGGED, SMALL, prefill_chunk_size=7, **asked)
    assert torch.equal(fixed.sequences, growing.sequences)
    for mine, other in zip(fixed.logits, growing.logits, strict=True):
        torch.testing.assert_close(mine, other)
    for mine, other in zip(fixed.hidden_states[3], growing.hidden_states[3], strict=True):
        torch.testing.assert_close(mine, other)


def rounds(cached: CachedModel, widths: list[int], seed: int = 0) -> Iterator[Tensor]:
    """Run random chains, keep some of each, and return their logits."""
    chance = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    rows = len(cached.lengths)
    for width in widths:
        block = torch.randint(1, 64, (rows, width), generator=generator)
        with torch.no_grad():
            yield cached.run(Pass.chain(block)).logits
        cached.commit([chance.randint(1, width) for _ in range(rows)])


def ready(model, shapes: FixedShapes | None) -> CachedModel:
    ids, _ = prompts(RAGGED)
    cached = CachedModel(model, len(RAGGED), reserve=200, shapes=shapes)
    with torch.no_grad():
        cached.prefill(Prompt(ids, RAGGED))
    return cached


WIDTHS = random.Random(1).choices(range(1, 10), k=30)
PADDED = FixedShapes(widths=(1, 5, 9))


def graphs_of(run: Callable[[Callable[..., object]], None]) -> int:
    """Count the graphs that a compiler records; every break or mixed-in host value would add some or raise."""
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True):
        run(partial(torch.compile, fullgraph=True, dynamic=False, backend=count))
    torch.compiler.reset()
    return len(graphs)


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3_text", marks=pytest.mark.slow)])
def test_a_compiler_records_one_graph_a_width(family: str) -> None:
    """Over 30 rounds of ragged rows and random widths, and over a second call; the logits are the growing mode's."""
    model = build(family)
    growing = ready(model, None)
    expected = list(rounds(growing, WIDTHS))
    found: list[Tensor] = []

    def run(capture: Callable[..., object]) -> None:
        shapes = replace(PADDED, capture=capture)
        found.extend(rounds(ready(model, shapes), WIDTHS))
        found.extend(rounds(ready(model, shapes), WIDTHS[:6]))

    assert graphs_of(run) == len({PADDED.width_of(width) for width in WIDTHS}) == 3
    for mine, other in zip(found, expected + expected[:6], strict=True):
        torch.testing.assert_close(mine, other, atol=5e-5, rtol=1e-4)


@pytest.mark.slow
def test_the_growing_mode_records_a_graph_a_round() -> None:
    """Negative control: its views and starts are numbers of the host, and each is another graph."""
    model = build("llama")

    def run(capture: Callable[..., object]) -> None:
        cached = ready(model, None)
        cached._step = capture(run_model)
        assert len(list(rounds(cached, [5] * 3))) == 3

    assert graphs_of(run) == 3


def test_what_a_graph_reads_stands_still() -> None:
    """Ids, positions, masks, keys and values of a width have one address over all rounds."""
    addresses: dict[int, set[tuple[int, ...]]] = {}

    def capture(step: Callable[..., object]) -> Callable[..., object]:
        def spied(model: PreTrainedModel, **arguments: object) -> object:
            cache = next(value for value in arguments.values() if isinstance(value, SlotCache))
            (group,) = cache.groups.values()
            assert isinstance(group.placement, Scatter)
            read = [arguments[name] for name in ("input_ids", "position_ids", "attention_mask")]
            read += [group.placement.slots, cache.layers[1].keys, cache.layers[1].values]
            places = tuple(tensor.data_ptr() for tensor in read)
            addresses.setdefault(arguments["input_ids"].shape[1], set()).add(places)
            return step(model, **arguments)

        return spied

    model = build("llama")
    list(rounds(ready(model, replace(PADDED, capture=capture)), WIDTHS))
    assert sorted(addresses) == [1, 5, 9]
    assert all(len(places) == 1 for places in addresses.values())


def test_sizes_come_from_short_lists() -> None:
    shapes = FixedShapes(widths=(1, 2, 5), lanes=(1, 2, 4), granule=8)
    assert [shapes.width_of(asked) for asked in (1, 2, 3, 5, 6)] == [1, 2, 5, 5, 6]
    assert [shapes.lanes_of(unfinished, 7) for unfinished in (7, 5, 4, 3, 2, 1)] == [7, 7, 4, 4, 2, 1]
    assert shapes.lanes_of(3, 4) == 4
    assert [shapes.slots_of(needed) for needed in (1, 8, 9, 17)] == [8, 8, 16, 32]


def test_a_cpu_copies_unless_shapes_are_fixed() -> None:
    """One way to store per mode: copies a lane on a CPU, scattered writes where no host number may decide."""
    growing, fixed = (ready(build("llama"), shapes) for shapes in (None, PADDED))
    for cached, way in ((growing, LaneCopies), (fixed, Scatter)):
        list(rounds(cached, [4]))
        assert {type(group.placement) for group in cached.cache.groups.values()} == {way}


def test_standing_buffers_keep_a_place_a_shape() -> None:
    standing = StandingBuffers()
    first = standing.write("ids", torch.arange(4).expand(2, -1))
    assert first.is_contiguous()
    again = standing.write("ids", torch.ones(2, 4, dtype=torch.long))
    assert again is first and first.sum() == 8
    assert standing.write("ids", torch.ones(2, 5, dtype=torch.long)) is not first
    assert standing.write("positions", torch.ones(2, 4, dtype=torch.long)) is not first
