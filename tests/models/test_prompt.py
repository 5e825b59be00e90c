"""Prompts that are read otherwise, and texts that count their positions otherwise, without a branch in CachedModel."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from ragged_trees import LENGTHS
from tiny import build, prompts, texts_of
from torch import Tensor

from hf_specgen.models.cached_model import CachedModel
from hf_specgen.models.passes import ForwardOutput, Pass
from hf_specgen.models.prompt import ChunkedPrompt, Positions, Prompt, PromptReader


@dataclass(frozen=True)
class Shifted(Positions):
    """Count from a number of the lane's own, as texts behind pictures do."""

    start: Tensor

    def ids(self, index: Tensor) -> Tensor:
        return index + self.start[:, None]

    def keep(self, order: list[int]) -> Shifted:
        return Shifted(self.start[order])


@dataclass(frozen=True)
class Continued(Prompt):
    """Read what stands behind ``cached (R)`` tokens that the lanes hold already."""

    cached: list[int] = field(default_factory=list)

    def read(self, reader: PromptReader, hidden: bool = False) -> ForwardOutput:
        pads = self.pads()
        counts = [length - known for length, known in zip(self.lengths, self.cached, strict=True)]
        columns = torch.arange(max(counts)) + torch.tensor(self.cached)[:, None] + pads
        tokens = self.ids.gather(1, columns.clamp(max=self.width - 1))
        last = torch.tensor(counts) - 1
        output = reader.run_lanes(Pass.chain(tokens, last, hidden=hidden))
        reader.commit_lanes(counts)
        lanes = torch.arange(len(counts))
        return replace(output, logits=output.logits[lanes, last][:, None])


@torch.no_grad()
def plain(model, texts: list[list[int]], starts: list[int], kinds: list[int] | None = None) -> Tensor:
    """Return each text's last logits; its positions count from its start."""
    lines = []
    for row, (text, start) in enumerate(zip(texts, starts, strict=True)):
        ids = torch.tensor([text])
        more = {"token_type_ids": torch.full_like(ids, kinds[row])} if kinds else {}
        positions = torch.arange(start, start + len(text))[None]
        lines.append(model(ids, position_ids=positions, use_cache=False, **more).logits[0, -1])
    return torch.stack(lines)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=5e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("chunk", [None, 7])
def test_positions_follow_the_prompts_rule(chunk: int | None) -> None:
    """The prompt, every pass behind it, and the rows that stay when others leave. GPT-2 knows absolute positions."""
    model = build("gpt2")
    ids, mask = prompts(LENGTHS)
    texts = texts_of(ids, mask)
    starts = [3, 0, 11, 6]
    rule = Shifted(torch.tensor(starts))
    cached = CachedModel(model, len(LENGTHS))
    prompt = Prompt(ids, LENGTHS, positions=rule)
    if chunk:
        prompt = ChunkedPrompt(ids, LENGTHS, positions=rule, chunk=chunk)
    close(cached.prefill(prompt).logits[:, 0], plain(model, texts, starts))
    live = [0, 1, 2, 3]
    for finished in ([False] * 4, [True, False, False, False], [True, False, True, False]):
        live = cached.keep(live, finished)
        block = torch.randint(1, 64, (len(live), 3))
        found = cached.run(Pass.chain(block)).logits[:, -1]
        cached.commit([3] * len(live))
        for row, line in zip(live, block.tolist(), strict=True):
            texts[row] = texts[row] + line
        close(found, plain(model, [texts[row] for row in live], [starts[row] for row in live]))
    assert live == [3, 1], "a row moved, and took its rule with it"
    others = plain(model, [texts[row] for row in live], [starts[row] + 1 for row in live])
    assert (others - found).abs().max() > 1e-3, "positions matter here"


@torch.no_grad()
def test_the_first_pass_alone_takes_further_inputs() -> None:
    model = build("gpt2")
    ids, mask = prompts(LENGTHS)
    kinds = [5, 9, 5, 30]
    types = torch.tensor(kinds)[:, None].expand_as(ids)
    seen: list[bool] = []
    handle = model.transformer.register_forward_pre_hook(
        lambda _, __, kwargs: seen.append(kwargs.get("token_type_ids") is not None), with_kwargs=True
    )
    cached = CachedModel(model, len(LENGTHS))
    found = cached.prefill(Prompt(ids, LENGTHS, inputs={"token_type_ids": types})).logits[:, 0]
    cached.run(Pass.chain(torch.ones(len(LENGTHS), 2, dtype=torch.long)))
    handle.remove()
    assert seen == [True, False]
    texts = texts_of(ids, mask)
    close(found, plain(model, texts, [0] * 4, kinds))
    assert (plain(model, texts, [0] * 4) - found).abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_prompt_behind_a_cached_prefix(family: str) -> None:
    model = build(family)
    ids, mask = prompts(LENGTHS)
    known = [2, 16, 4, 10]
    cached = CachedModel(model, len(LENGTHS))
    texts = texts_of(ids, mask)
    first = torch.zeros(4, max(known), dtype=torch.long)
    for row, count in enumerate(known):
        first[row, max(known) - count :] = torch.tensor(texts[row][:count])
    cached.prefill(Prompt(first, known))
    found = cached.prefill(Continued(ids, LENGTHS, cached=known)).logits[:, 0]
    assert cached.lengths == LENGTHS
    close(found, plain(model, texts, [0] * 4))
