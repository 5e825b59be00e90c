"""Medusa heads that are right often and wrong often, and the published loop written again from its description."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from hf_specgen.checkpoints.config import DrafterConfig
from hf_specgen.drafters.medusa import MedusaDrafter

Paths = list[list[int]]


@torch.no_grad()
def final_states(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Return what the language-model head reads at every place of a text, ``(L, D)``, from a pass of its own."""
    output = model(input_ids=torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    return output.hidden_states[-1][0]


@torch.no_grad()
def fitted(model: PreTrainedModel, texts: list[list[int]], heads: int = 3, seed: int = 7, **settings) -> MedusaDrafter:
    """Fit heads to texts in closed form: random residual blocks, then least squares towards the token due.

    A shared head gets small random blocks; heads over some ids learn the tokens of the texts alone.
    """
    torch.manual_seed(seed)
    text = model.config.get_text_config()
    config = DrafterConfig(
        method="medusa",
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        num_heads=heads,
        num_head_layers=settings.pop("blocks", 1),
        **settings,
    )
    drafter = MedusaDrafter(config).to(model.dtype).eval()
    if config.reduces_vocabulary:
        known = torch.tensor(sorted({token for row in texts for token in row})[: config.draft_vocab_size])
        spare = [token for token in range(text.vocab_size) if token not in set(known.tolist())]
        ids = torch.cat([known, torch.tensor(spare, dtype=torch.long)])[: config.draft_vocab_size].sort().values
        drafter.d2t.copy_(ids - torch.arange(len(ids)))
    if not config.own_head:
        return drafter
    states = [final_states(model, row) for row in texts]
    for head in range(heads):
        inputs = torch.cat([part[: max(0, len(row) - 2 - head)] for part, row in zip(states, texts, strict=True)])
        due = F.one_hot(torch.cat([torch.tensor(row[2 + head :], dtype=torch.long) for row in texts]), text.vocab_size)
        due = due[:, drafter.target_ids] if config.reduces_vocabulary else due
        module = drafter.get_submodule(str(head))
        features = module[:-1](inputs).double()
        square = features.T @ features + 0.01 * torch.eye(text.hidden_size, dtype=torch.float64)
        module[-1].weight.copy_(20 * torch.linalg.solve(square, features.T @ due.double()).T)
    return drafter


@torch.no_grad()
def published_loop(
    model: PreTrainedModel, drafter: MedusaDrafter, prompt: list[int], paths: Paths, tokens: int, top: int = 10
) -> tuple[list[int], list[int]]:
    """Write greedily as Medusa does: candidates of each path, checked by plain passes; return text and accepted counts.

    Source: Cai et al. 2024, section 2.1: the longest accepted prefix of all candidates wins, the first of equals.
    """
    text, accepted = list(prompt), []
    leaves = [path for path in paths if not any(other[: len(path)] == path and other != path for other in paths)]
    states = final_states(model, text)
    root = int(model.lm_head(states[-1]).argmax())
    while len(text) - len(prompt) + 1 < tokens:
        lists = [drafter.head(head, states[-1]).topk(top).indices.tolist() for head in range(max(map(len, paths)))]
        best: list[int] = []
        for leaf in leaves:
            candidate = [lists[depth][rank] for depth, rank in enumerate(leaf)]
            logits = model.lm_head(final_states(model, [*text, root, *candidate]))
            right = logits[len(text) :].argmax(-1).tolist()
            length = next((at for at, token in enumerate(candidate) if token != right[at]), len(candidate))
            if length > len(best):
                best = candidate[:length]
        accepted.append(len(best))
        text += [root, *best]
        states = final_states(model, text)
        root = int(model.lm_head(states[-1]).argmax())
    return [*text, root], accepted


def medusa_buffers(paths: Paths, top: int = 10) -> dict[str, list]:
    """Build Medusa's buffers from strings of ranks: node 0 is the root; all parents of a depth share one list.

    ``mask``: ancestors and self. ``indices``: a node's place among the root and each head's ``top`` candidates.
    ``retrieve``: nodes from the root to each leaf, -1 behind its end.
    """
    lines = sorted(map(tuple, paths), key=lambda line: (len(line), line))
    number = {(): 0, **{line: place for place, line in enumerate(lines, 1)}}
    mask = [[0] * len(number) for _ in number]
    for line, place in number.items():
        for end in range(len(line) + 1):
            mask[place][number[line[:end]]] = 1
    inner = {line[:-1] for line in lines}
    leaves, depth = [line for line in lines if line not in inner], max(map(len, lines))
    retrieve = [[0, *(number[line[: end + 1]] for end in range(len(line)))] for line in leaves]
    return {
        "mask": mask,
        "indices": [0, *(line[-1] + top * (len(line) - 1) + 1 for line in lines)],
        "positions": [0, *map(len, lines)],
        "retrieve": sorted(row + [-1] * (depth + 1 - len(row)) for row in retrieve),
    }
