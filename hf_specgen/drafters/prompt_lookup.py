"""PromptLookup: propose what followed the longest matching suffix (Saxena 2023; Yang et al. 2023)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from hf_specgen.drafting.copier import Continuations, Copier, CopyingDrafter
from hf_specgen.drafting.drafter import Call
from hf_specgen.drafting.lengths import DraftLength
from hf_specgen.errors import SpecGenError
from hf_specgen.round.costs import Costs, Rate
from hf_specgen.round.records import Draft, Round, Tree

_LONGEST = 16
_PRIORS = ((0.15, 0.6), (0.4, 0.7), (0.6, 0.85))


@dataclass
class Source:
    """Index a growing text: for each n-gram, where the token after its latest occurrences stands.

    Appending costs ``max_ngram`` dictionary writes a token, a query at most ``max_ngram`` reads.
    """

    max_ngram: int
    branches: int
    tokens: list[int] = field(default_factory=list)
    indexed: int = 0
    followers: list[dict[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.followers = [{} for _ in range(self.max_ngram)]
        self.extend([])

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens. The last n-gram is indexed only when something follows it."""
        self.tokens.extend(tokens)
        text = self.tokens
        for place in range(max(1, self.indexed), len(text)):
            for n in range(1, min(self.max_ngram, place) + 1):
                index, gram = self.followers[n - 1], tuple(text[place - n : place])
                index[gram] = self._latest(index.get(gram, ()), place)
        self.indexed = len(text)

    def _latest(self, places: tuple[int, ...], place: int) -> tuple[int, ...]:
        """Put ``place`` first and keep older places with other next tokens."""
        if self.branches == 1:
            return (place,)
        next_token = self.tokens[place]
        return (place, *(old for old in places if self.tokens[old] != next_token))[: self.branches]

    def find(self, n: int, suffix: tuple[int, ...]) -> tuple[int, ...]:
        """Return the places that follow ``suffix`` of length ``n``, latest first."""
        return self.followers[n - 1].get(suffix, ())

    def read(self, place: int, count: int) -> list[int]:
        """Return ``count`` tokens from ``place`` on; past the end the copy goes on with what it has copied."""
        text = self.tokens
        out = text[place : place + count]
        period = len(text) - place
        while len(out) < count:
            out.append(out[-period])
        return out


class PromptLookup(CopyingDrafter):
    """Draft by copying: no model, any batch size, nothing proposed where nothing matches.

    Args: ``num_tokens`` drafts that many in a row (None: as many as pay, up to 16); ``max_ngram`` and ``min_ngram``
    bound the suffix; ``branches`` above one proposes a tree of the latest continuations that differ;
    ``other_rows`` also searches the other rows of the batch; ``corpus`` also searches given token lists;
    ``costs`` replaces the assumed costs of a pass.

    Raises: ``SpecGenError`` for bounds below one.
    """

    def __init__(
        self,
        num_tokens: int | None = None,
        max_ngram: int = 3,
        min_ngram: int = 1,
        branches: int = 1,
        other_rows: bool = False,
        corpus: Iterable[Sequence[int]] = (),
        costs: Costs | None = None,
    ) -> None:
        if not 1 <= min_ngram <= max_ngram or branches < 1:
            raise SpecGenError(
                f"PromptLookup(max_ngram={max_ngram}, min_ngram={min_ngram}, branches={branches}): "
                "1 <= min_ngram <= max_ngram and branches >= 1 are required."
            )
        self.num_tokens = num_tokens
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram
        self.branches = branches
        self.other_rows = other_rows
        self.costs = costs
        self.corpus = [Source(max_ngram, branches, [int(token) for token in text]) for text in corpus]

    def begin(self, call: Call) -> LookupSession:
        """Index the prompts."""
        return LookupSession(self, call)


class LookupSession(Copier):
    """Copy in one call: every row's own text, the corpus, and the other rows where they may be searched."""

    def __init__(self, drafter: PromptLookup, call: Call) -> None:
        super().__init__(call)
        self.max_ngram = drafter.max_ngram
        self.min_ngram = drafter.min_ngram
        self.branches = drafter.branches
        self.reads_other_rows = drafter.other_rows
        self._corpus = drafter.corpus
        costs = drafter.costs or call.costs
        self._length = DraftLength.choose(call.request, drafter.num_tokens, _LONGEST, costs)
        self._length.begin(call.rows)
        self.adapts = self._length.schedule == "adaptive"
        self._rows = [Source(self.max_ngram, self.branches, list(tokens)) for tokens in call.sequences.tokens]
        self._rates = [self._priors()] * call.rows
        self._found: list[Continuations] = []

    def part_rows(self) -> None:
        """Let every row learn from itself alone; by default they share what they learn."""
        self._rates = [self._priors() for _ in self._rates]

    def search(self, room: list[int]) -> list[Continuations]:
        """Return what followed the longest suffix found in the row, then in the other sources."""
        for source, tokens in zip(self._rows, self.call.sequences.tokens, strict=True):
            source.extend(tokens[source.indexed :])
        bounds = self._length.bounds(room)
        self._found = [self._search(row, bound) for row, bound in enumerate(bounds)]
        return self._found

    def cut(self, found: list[Continuations]) -> list[int]:
        """Return how many tokens of what was found each row should copy when nothing else is drafted."""
        lengths = [continuations.length for continuations in found]
        rates = [continuations.rate for continuations in found]
        return self._length.cut(lengths, rates, self.call.sequences.remaining)

    def copies(self, counts: Sequence[int], branches: bool = True) -> Draft:
        """Return the draft of the first ``counts[r]`` tokens of what was found."""
        device = self.call.device
        drafts = [[text[:count] for text in found.texts] for found, count in zip(self._found, counts, strict=True)]
        if not branches or self.branches == 1:
            return Draft.from_lists([texts[0] for texts in drafts], device)
        return merge([texts if texts[0] else [] for texts in drafts], device)

    def observe(self, round: Round) -> None:
        """Compare what was found with what came, proposed or not: undrafted candidates teach for free."""
        self._length.observe(round)
        for (rate, texts), tokens in zip(self._found, round.emitted, strict=False):
            if texts[0]:
                known = min(len(texts[0]), len(tokens))
                matched = next((i for i in range(known) if texts[0][i] != tokens[i]), known)
                rate.observe(matched, min(known, matched + 1))

    def _priors(self) -> list[Rate]:
        return [Rate(*_PRIORS[min(n, len(_PRIORS)) - 1]) for n in range(1, self.max_ngram + 1)]

    def _search(self, row: int, bound: int) -> Continuations:
        """Look for the longest suffix of a row."""
        text = self._rows[row].tokens
        sources = [self._rows[row], *self._corpus]
        if self.reads_other_rows:
            sources[1:1] = [source for other, source in enumerate(self._rows) if other != row]
        if bound > 0:
            for n in range(min(self.max_ngram, len(text)), self.min_ngram - 1, -1):
                suffix = tuple(text[-n:])
                for source in sources:
                    places = source.find(n, suffix)
                    if places:
                        return Continuations(self._rates[row][n - 1], [source.read(place, bound) for place in places])
        return Continuations(self._rates[row][0], [[]])


def merge(rows: list[list[list[int]]], device: torch.device) -> Draft:
    """Merge each row's continuations into one tree draft: shared beginnings become shared nodes."""
    tokens: list[list[int]] = []
    parents: list[list[int]] = []
    for texts in rows:
        nodes: dict[tuple[int, int], int] = {}
        for text in texts:
            place = -1
            for token in text:
                place = nodes.setdefault((place, token), len(nodes))
        tokens.append([token for _, token in nodes])
        parents.append([parent for parent, _ in nodes])
    width = max(map(len, tokens))
    filled = [row + [-1] * (width - len(row)) for row in parents]  # unused places hang on the root
    block = Draft.from_lists(tokens, device)
    tree = Tree(
        torch.tensor(filled, device=device).view(len(rows), width),
        deepest=max((len(text) for texts in rows for text in texts), default=0),
        widest=max(1, *map(len, rows)),
    )
    return Draft(block.tokens, tree, block.n_valid)
