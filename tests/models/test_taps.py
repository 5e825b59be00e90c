"""Taps: the stream at a boundary is the one a plain forward passes on, and nothing of them stays on the model."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from tiny import CASES, Keep, RandomTree, Watch, build, ours, plain, prompts, texts_of, tiny
from torch import nn

from hf_specgen import IncompatibleDrafter, PromptLookup, SpeculativeDecoding, Tree, UnsupportedTarget
from hf_specgen.drafting.drafter import Reads
from hf_specgen.models.cached_model import CachedModel
from hf_specgen.models.passes import Pass
from hf_specgen.models.prompt import ChunkedPrompt, Prompt
from hf_specgen.models.taps import FINAL, Taps, decoder_layers
from hf_specgen.models.visibility import TreeVisibility

LENGTHS = [5, 17, 11, 24]
ALL = (0, 1, 2, FINAL)
CPU = torch.device("cpu")


class Truth:
    """Hold what one plain pass without a cache shows: HF's own hidden states, and what enters norm and head."""

    def __init__(self, model) -> None:
        self.model = model
        base = model.base_model
        self.norm = base.ln_f if "ln_f" in base._modules else base.norm

    @torch.no_grad()
    def states(self, text: list[int]) -> dict[int, torch.Tensor]:
        """Return each boundary's state of the newest token of ``text``."""
        seen: dict[str, torch.Tensor] = {}
        hooks = [
            self.norm.register_forward_pre_hook(lambda _, args: seen.update(norm=args[0])),
            self.model.get_output_embeddings().register_forward_pre_hook(lambda _, args: seen.update(head=args[0])),
        ]
        output = self.model(input_ids=torch.tensor([text]), use_cache=False, output_hidden_states=True)
        for hook in hooks:
            hook.remove()
        torch.testing.assert_close(self.norm(seen["norm"]), output.hidden_states[-1])  # HF's last entry is normalised
        below = {place: state[0, -1] for place, state in enumerate(output.hidden_states[:-1])}
        return {**below, len(below): seen["norm"][0, -1], FINAL: seen["head"][0, -1]}

    def check(self, text: list[int], found: list[torch.Tensor], boundaries: tuple[int, ...] = ALL) -> None:
        """Compare one place's states with a plain pass over the whole text."""
        wanted = self.states(text)
        for boundary, state in zip(boundaries, found, strict=True):
            torch.testing.assert_close(state, wanted[boundary], atol=1e-4, rtol=1e-4)


def all_hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize(("family", "impl"), CASES)
@torch.no_grad()
def test_every_boundary_of_every_family(family: str, impl: str) -> None:
    model = build(family, impl)
    truth = Truth(model)
    ids, mask = prompts(LENGTHS)
    texts = texts_of(ids, mask)
    cached = CachedModel(model, 4, taps=ALL)
    first = cached.prefill(Prompt(ids, LENGTHS))
    assert first.hidden == () and all(layer.shape == (4, 24, 32) for layer in first.taps)
    truth.check(texts[0], [layer[0, -1] for layer in first.taps])
    truth.check(texts[1][:-3], [layer[1, -4] for layer in first.taps])
    block = torch.tensor([[3, 9, 8, 7], [4, 5, 6, 1], [2, 2, 2, 2], [11, 12, 13, 14]])
    tree = Tree(torch.tensor([[-1, -1, 1]]))
    scored = cached.run(Pass(block, TreeVisibility(tree)))
    assert scored.hidden == ()
    truth.check([*texts[1], 4, 6, 1], [layer[1, 3] for layer in scored.taps])
    truth.check([*texts[3], 11, 12], [layer[3, 1] for layer in scored.taps])


@torch.no_grad()
def test_the_normalised_last_entry_would_be_seen() -> None:
    """Negative control: HF's own last hidden state is not the stream after the last layer."""
    model = tiny()
    ids, _ = prompts([9])
    output = CachedModel(model, 1, taps=(2,)).prefill(Prompt(ids, [9]), hidden=True)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(output.hidden[-1], output.taps[0])
    torch.testing.assert_close(output.hidden[-1], model.model.norm(output.taps[0]))


@torch.no_grad()
@pytest.mark.parametrize("chunk", [3, 9, 23])
def test_a_prompt_read_in_chunks_shows_the_same(chunk: int) -> None:
    model = build("mistral")
    ids, mask = prompts(LENGTHS)
    whole = CachedModel(model, 4, taps=ALL).prefill(Prompt(ids, LENGTHS))
    parts = CachedModel(model, 4, taps=ALL).prefill(ChunkedPrompt(ids, LENGTHS, chunk=chunk))
    for mine, theirs in zip(parts.taps, whole.taps, strict=True):
        assert mine.shape == theirs.shape
        assert float(((mine - theirs) * mask[..., None]).abs().max()) < 1e-4


@torch.no_grad()
def test_states_come_in_the_order_asked_also_twice() -> None:
    ids, _ = prompts([9])
    deep, low, again = CachedModel(tiny(), 1, taps=(2, 0, 2)).prefill(Prompt(ids, [9])).taps
    assert torch.equal(deep, again) and not torch.equal(deep, low)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_rounds_carry_the_states_of_the_accepted_path(family: str) -> None:
    """Trees of another shape in every row, and rows that end early: each state is that of its token."""
    model = build(family)
    truth = Truth(model)
    ids, mask = prompts(LENGTHS)
    whole = plain(model, ids, mask, max_new_tokens=20)
    texts = texts_of(whole, mask)
    watch = Watch(RandomTree(texts))
    watch.inner.reads = lambda model: Reads(hidden=(2, 0, FINAL))
    asked: list[dict] = []
    spy = model.base_model.register_forward_pre_hook(lambda _, __, kwargs: asked.append(kwargs), with_kwargs=True)
    assert torch.equal(ours(model, watch, ids, mask, max_new_tokens=20), whole)
    spy.remove()
    assert watch.off_spine and not any(kwargs.get("output_hidden_states") for kwargs in asked)
    assert watch.rounds[0].hidden[0].shape == (4, 24, 32)
    written = list(LENGTHS)
    for row, length in enumerate(LENGTHS):
        truth.check(texts[row][:length], [layer[row, -1] for layer in watch.rounds[0].hidden], (2, 0, FINAL))
    for round in watch.rounds[1:6]:
        for row, path in enumerate(round.paths):
            for place in range(len(path) + 1):
                text = texts[row][: written[row] + 1 + place]
                truth.check(text, [layer[row, place] for layer in round.hidden], (2, 0, FINAL))
            written[row] += len(path) + 1


def test_no_hook_outlives_a_pass() -> None:
    model = tiny()
    ids, _ = prompts([9])
    cached = CachedModel(model, 1, taps=ALL)
    before = all_hooks(model)
    during: list[int] = []
    count = model.model.norm.register_forward_hook(lambda *_: during.append(all_hooks(model)))
    cached.prefill(Prompt(ids, [9]))
    count.remove()
    assert during == [before + 6] and all_hooks(model) == before  # three layers' hooks, the decoder's two, the counter
    fail = model.model.norm.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cached.run(Pass.chain(ids[:, :2]))
    fail.remove()
    assert all_hooks(model) == before


@torch.no_grad()
def test_hooks_of_the_user_come_first() -> None:
    model = tiny()
    ids, _ = prompts([9])
    untouched = CachedModel(model, 1, taps=ALL).prefill(Prompt(ids, [9])).taps
    model.model.layers[0].register_forward_hook(lambda _, __, output: output + 1)
    steered = CachedModel(model, 1, taps=ALL).prefill(Prompt(ids, [9])).taps
    assert torch.equal(steered[0], untouched[0])
    torch.testing.assert_close(steered[1], untouched[1] + 1)
    assert not torch.equal(steered[2], untouched[2])


@torch.no_grad()
def test_another_threads_pass_is_not_read() -> None:
    model = tiny()
    mine, other = torch.tensor([[1, 2, 3]]), torch.tensor([[9, 8, 7, 6, 5]])
    taps = Taps(model, ALL)
    with taps.on() as seen:
        model(mine)
        kept = taps.read(seen, CPU)
        thread = threading.Thread(target=lambda: model(other))
        thread.start()
        thread.join()
        assert all(torch.equal(a, b) for a, b in zip(kept, taps.read(seen, CPU), strict=True))
        model(other)
        assert taps.read(seen, CPU)[0].shape == (1, 5, 32)


class TupleLayer(nn.Module):
    def forward(self, hidden_states):
        return hidden_states + 1, "attention weights"


class Stub(nn.Module):
    """Stand in for models as older code writes them: layers that take keywords and return tuples."""

    def __init__(self, width: int = 8, lists: int = 1) -> None:
        super().__init__()
        settings = {"num_hidden_layers": 2, "hidden_size": 8}
        text = SimpleNamespace(to_dict=lambda: settings)
        self.config = SimpleNamespace(get_text_config=lambda decoder: text)
        self.width = width
        for number in range(lists):
            self.add_module(f"blocks{number}", nn.ModuleList([TupleLayer(), TupleLayer()]))

    def get_decoder(self) -> Stub:
        return self

    def forward(self, rows: int):
        state = torch.zeros(rows, 3, self.width)
        for layer in self.blocks0:
            state = layer(hidden_states=state)[0]
        return 2 * state, None


def test_layers_that_return_tuples_are_read() -> None:
    model = Stub()
    taps = Taps(model, (2, 0, 1, FINAL))
    with taps.on() as seen:
        model(5)
        states = taps.read(seen, CPU)
    assert [float(state.unique()) for state in states] == [2.0, 0.0, 1.0, 4.0]
    assert states[0].shape == (5, 3, 8)
    assert {state.device.type for state in taps.read(seen, torch.device("meta"))} == {"meta"}


@pytest.mark.parametrize("lists", [0, 2])
def test_layers_that_cannot_be_told_are_refused(lists: int) -> None:
    with pytest.raises(UnsupportedTarget, match=rf"Stub has {lists} lists of 2 decoder layers.*PromptLookup"):
        Taps(Stub(lists=lists), (1,))
    Taps(Stub(lists=lists), (FINAL,))  # which needs no layer


def test_a_stream_of_another_width_is_refused() -> None:
    model = Stub(width=6)
    taps = Taps(model, (1,))
    with taps.on() as seen:
        with pytest.raises(UnsupportedTarget, match=r"nothing at hidden state 1"):
            taps.read(seen, CPU)
        model(1)
        with pytest.raises(UnsupportedTarget, match=r"shape \(1, 3, 6\) at hidden state 1.*\(rows, positions, 8\)"):
            taps.read(seen, CPU)


@pytest.mark.parametrize("boundary", [3, -2])
def test_boundaries_that_do_not_exist_are_refused_before_the_first_token(boundary: int) -> None:
    model, keep = tiny(), Keep()
    watch = Watch(PromptLookup(4))
    watch.inner.reads = lambda model: Reads(hidden=(1, boundary))
    with pytest.raises(IncompatibleDrafter, match=rf"\[{boundary}\] of LlamaForCausalLM.*boundaries 0 to 2"):
        plain(model, torch.tensor([[1, 2, 3]]), custom_generate=SpeculativeDecoding(watch, streamer=keep))
    assert keep.tokens == []


def test_experts_are_not_taken_for_layers() -> None:
    model = build("mixtral", num_local_experts=2)
    assert decoder_layers(model) == tuple(model.model.layers)
