"""The exact law of a few sampled tokens, enumerated with transformers' own processors, and a chi-square against it."""

from __future__ import annotations

from itertools import product

import torch
from scipy.stats import chi2
from transformers import PreTrainedModel

Law = dict[tuple[int, ...], float]


def processors_of(model: PreTrainedModel, prompt: torch.Tensor, **settings: object):
    """Return the logits processors that ``generate()`` itself builds for a call."""
    kept = []

    def keep(model, input_ids, logits_processor, stopping_criteria, generation_config, **inputs):
        kept.append(logits_processor)
        return input_ids

    model.generate(prompt, attention_mask=torch.ones_like(prompt), custom_generate=keep, max_new_tokens=4, **settings)
    return kept[0]


@torch.no_grad()
def enumerate_law(model: PreTrainedModel, prompt: torch.Tensor, tokens: int = 3, **settings: object) -> Law:
    """Return the probability of every continuation of ``prompt (1, L)`` under plain sampling."""
    process = processors_of(model, prompt, **settings)
    vocab = model.config.vocab_size
    law: Law = {(): 1.0}
    for depth in range(tokens):
        prefixes = torch.tensor(list(law), dtype=torch.long).view(len(law), depth)
        ids = torch.cat([prompt.expand(len(law), -1), prefixes], 1)
        logits = model(input_ids=ids, use_cache=False).logits[:, -1].float()
        rows = [process(ids[i : i + 1], logits[i : i + 1])[0] for i in range(len(ids))]
        chances = torch.stack(rows).double().softmax(-1).tolist()
        law = {
            (*prefix, token): before * chances[i][token]
            for i, (prefix, before) in enumerate(law.items())
            for token in range(vocab)
            if chances[i][token] > 0
        }
    assert abs(sum(law.values()) - 1) < 1e-9
    return law


def count(draws: torch.Tensor, vocab: int) -> Law:
    """Count every continuation among ``draws (n, tokens)``."""
    powers = vocab ** torch.arange(draws.shape[1] - 1, -1, -1)
    found = torch.bincount((draws * powers).sum(1), minlength=vocab ** draws.shape[1])
    cells = product(range(vocab), repeat=draws.shape[1])
    return {cell: number for cell, number in zip(cells, found.tolist(), strict=True) if number}


def p_value(draws: torch.Tensor, law: Law, vocab: int) -> float:
    """Return the chi-square p-value of ``draws`` (0 outside the law); cells expected under five times are pooled."""
    total, counts = len(draws), count(draws, vocab)
    if set(counts) - set(law):
        return 0.0
    cells, pool_seen, pool_due = [], 0.0, 0.0
    for cell, chance in law.items():
        seen, due = counts.get(cell, 0), total * chance
        if due >= 5:
            cells.append((seen, due))
        else:
            pool_seen, pool_due = pool_seen + seen, pool_due + due
    if pool_due > 0:
        cells.append((pool_seen, max(pool_due, 1e-9)))
    assert len(cells) > 2
    return float(chi2.sf(sum((seen - due) ** 2 / due for seen, due in cells), len(cells) - 1))
