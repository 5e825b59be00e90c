"""Prove on the user's own target and drafter that nothing changes: greedy texts, and the exact law of sampling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_specgen.bench.report import batch_sizes
from hf_specgen.errors import SpecGenError
from hf_specgen.measure.compare import Divergence, next_scores
from hf_specgen.measure.methods import OURS, Decoding, DecodingMethod, plain_method
from hf_specgen.measure.prompts import ChatPrompt
from hf_specgen.measure.run import Progress, Settings, run_bench
from hf_specgen.models.facts import logits_width

LAW_LENGTH = 3
# room behind the checked tokens, so that drafts of the first round are not cut short
LAW_NEW_TOKENS = LAW_LENGTH + 2
# short texts, because every sample reads them anew
LAW_PROMPT = 8
LAW_TAIL = 16
LAW_ROWS = 32
ALPHA = 1e-4
MIN_EXPECTED = 5.0


@dataclass(frozen=True)
class GreedyReport:
    """Hold how many greedy texts equal the plain ones, and where the others part."""

    compared: int
    divergences: list[tuple[str, Divergence]]
    tolerance: float
    batch_sizes: dict[str, int] = field(default_factory=dict)

    @property
    def same(self) -> int:
        """Return how many texts are the plain ones."""
        return self.compared - len(self.divergences)

    @property
    def failures(self) -> list[tuple[str, Divergence]]:
        """Return the divergences that rounding does not explain."""
        return [(name, divergence) for name, divergence in self.divergences if not divergence.is_tie(self.tolerance)]

    @property
    def passed(self) -> bool:
        """Say whether every divergence is at a tie."""
        return not self.failures


@dataclass(frozen=True)
class LawReport:
    """Hold the chi-square comparison of sampled texts with the law enumerated from plain forwards."""

    samples: int
    kept: list[int]
    chi_square: float
    degrees: int
    p_value: float
    outside: int
    drafted: int
    accepted: int
    drafts_expected: bool
    length: int = LAW_LENGTH

    @property
    def failure(self) -> str:
        """Say what is wrong; empty when nothing is."""
        if self.outside:
            return f"{self.outside} SAMPLES ARE IMPOSSIBLE under the law"
        if self.p_value < ALPHA:
            return f"DOES NOT FIT (p below {ALPHA:g})"
        if self.degrees < 1:
            return "NOTHING WAS TESTED: one text has nearly all the chance. Raise --temperature or --law-samples"
        if self.drafts_expected and not self.drafted:
            return "NOTHING WAS TESTED: the drafter proposed nothing. Give --num-tokens"
        return ""

    @property
    def passed(self) -> bool:
        """Say whether the law holds: nothing impossible was drawn, the test passes, and drafts took part."""
        return not self.failure


def check_greedy(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[ChatPrompt],
    method: DecodingMethod,
    settings: Settings,
    tolerance: float,
    progress: Progress | None = None,
) -> GreedyReport:
    """Compare our greedy texts with plain ``generate()``, prompt by prompt."""
    results = run_bench(model, tokenizer, prompts, [plain_method(), method], settings, progress)
    compared = [
        (prompt.question_id, divergence)
        for batch in results
        for prompt, divergence in zip(batch.prompts, batch.divergences[OURS], strict=True)
    ]
    parted = [(name, divergence) for name, divergence in compared if divergence is not None]
    return GreedyReport(len(compared), parted, tolerance, batch_sizes(results))


def check_law(  # noqa: PLR0913 - what there is to choose
    model: Any,
    prompt: Sequence[int],
    method: DecodingMethod,
    decoding: Decoding,
    kept: int = 4,
    samples: int = 1024,
    drafts_expected: bool = True,
    progress: Progress | None = None,
) -> LawReport:
    """Sample many texts over a vocabulary cut down to ``kept`` tokens and test them against the exact law.

    The kept tokens are the likeliest after the prompt; a random text of them is put behind the prompt's end so that
    drafters find something to propose. The law of the first three tokens comes from plain ``generate()`` on every
    prefix, with all processors of the call.

    Raises: SpecGenError when the target's vocabulary is too small or decoding is greedy.
    """
    if decoding.greedy:
        raise SpecGenError("the law of greedy decoding is one text: give a temperature above 0 to check sampling.")
    tokens = _likeliest(model, list(prompt), kept)
    generator = torch.Generator().manual_seed(decoding.seed)
    ids = list(prompt)[-LAW_PROMPT:]
    ids += [tokens[i] for i in torch.randint(len(tokens), (LAW_TAIL,), generator=generator).tolist()]
    suppressed = _others(model, tokens)
    law = enumerate_law(model, ids, tokens, decoding, suppressed)
    counts, drafted, accepted = _sample(model, ids, method, decoding, suppressed, samples, progress)
    statistic, degrees, outside = chi_square(law, counts)
    p_value = upper_tail(statistic, degrees)
    return LawReport(samples, tokens, statistic, degrees, p_value, outside, drafted, accepted, drafts_expected)


def _likeliest(model: Any, ids: list[int], count: int) -> list[int]:
    scores = _next_laws(model, torch.tensor([ids]), Decoding(temperature=1.0), None)[0]
    eos = model.generation_config.eos_token_id
    for token in eos if isinstance(eos, list) else [eos]:
        if token is not None:
            scores[token] = 0.0
    if int((scores > 0).sum()) < count:
        raise SpecGenError(f"the target has fewer than {count} possible tokens here. Keep fewer tokens.")
    return scores.topk(count).indices.tolist()


def _others(model: Any, tokens: Sequence[int]) -> list[int]:
    return sorted(set(range(logits_width(model))) - set(tokens))


def _next_laws(model: Any, prefixes: Tensor, decoding: Decoding, suppressed: list[int] | None) -> Tensor:
    """Return the law of the next token after each prefix, ``(R, V)`` float64, from plain ``generate()``."""
    settings = {**decoding.kwargs(), "suppress_tokens": suppressed, "pad_token_id": 0}
    return next_scores(model, prefixes, **settings).double().softmax(-1)


def enumerate_law(
    model: Any, ids: Sequence[int], tokens: Sequence[int], decoding: Decoding, suppressed: list[int]
) -> dict[tuple[int, ...], float]:
    """Return the probability of every text of three kept tokens after ``ids``; they sum to one."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LAW_LENGTH):
        prefixes = torch.tensor([[*ids, *text] for text in law])
        laws = _next_laws(model, prefixes, decoding, suppressed)
        law = {
            (*text, token): chance * float(row[token])
            for (text, chance), row in zip(law.items(), laws, strict=True)
            for token in tokens
        }
    return law


def _sample(
    model: Any,
    ids: Sequence[int],
    method: DecodingMethod,
    decoding: Decoding,
    suppressed: list[int],
    samples: int,
    progress: Progress | None,
) -> tuple[Counter[tuple[int, ...]], int, int]:
    counts: Counter[tuple[int, ...]] = Counter()
    drafted = accepted = 0
    for start in range(0, samples, LAW_ROWS):
        block = torch.tensor([list(ids)] * min(LAW_ROWS, samples - start), device=model.device)
        inputs = {"input_ids": block, "attention_mask": torch.ones_like(block)}
        call = Decoding(
            LAW_NEW_TOKENS, decoding.temperature, decoding.top_k, decoding.top_p, decoding.seed + start // LAW_ROWS
        )
        output = method.generate(model, inputs, call, suppress_tokens=suppressed, pad_token_id=0)
        counts.update(tuple(row[:LAW_LENGTH]) for row in output.rows)
        if output.stats is not None:
            drafted += output.stats.num_draft_tokens
            accepted += output.stats.num_accepted_tokens
        if progress is not None:
            progress(min(start + LAW_ROWS, samples), samples, "sampling")
    return counts, drafted, accepted


def chi_square(law: dict[tuple[int, ...], float], counts: Counter[tuple[int, ...]]) -> tuple[float, int, int]:
    """Return Pearson's statistic, its degrees of freedom, and how many samples have probability zero.

    Cells expected fewer than five times are put together, the rarest first.
    """
    total = counts.total()
    outside = sum(count for text, count in counts.items() if law.get(text, 0.0) <= 0.0)
    cells = sorted((chance * total, counts[text]) for text, chance in law.items() if chance > 0.0)
    merged: list[tuple[float, int]] = []
    expected = 0.0
    seen = 0
    for chance, count in cells:
        expected += chance
        seen += count
        if expected >= MIN_EXPECTED:
            merged.append((expected, seen))
            expected = 0.0
            seen = 0
    if merged:
        merged[-1] = (merged[-1][0] + expected, merged[-1][1] + seen)
    statistic = sum((seen - expected) ** 2 / expected for expected, seen in merged)
    return statistic, max(0, len(merged) - 1), outside


def upper_tail(statistic: float, degrees: int) -> float:
    """Return the chance that a chi-square variable exceeds ``statistic``."""
    if degrees == 0:
        return 1.0
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
