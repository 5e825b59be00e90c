"""WithLookup: copy where copying promises more, let another drafter draft everywhere else; row by row, every round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from hf_specgen.drafters.prompt_lookup import PromptLookup
from hf_specgen.drafting.copier import Continuations, CopyingDrafter
from hf_specgen.drafting.drafter import Call, Drafter, Reads, Session
from hf_specgen.errors import SpecGenError
from hf_specgen.round.costs import Costs, Rate
from hf_specgen.round.records import DenseQ, Draft, Round, SparseQ, Tree

_PAUSE = 16  # rounds without a draft of the other drafter until its rates are forgotten; doubled each time
_DEPTH = 4  # what is assumed of its drafts before the first one


class WithLookup(Drafter):
    """Draft by copying where the text repeats itself, and with ``drafter`` where it does not.

    Every round and row is decided by what each promises per cost: a copy is free and its acceptance is learned even
    when it is not proposed; of ``drafter`` counts what was accepted so far and what drafting costs. A round in which
    every row copies does not run it. ``lookup`` is a ``PromptLookup()`` by default; a draft length asked for in
    ``generate()`` holds for both.

    Where ``drafter`` draws its tokens each row decides as if it were alone, and copies carry a law of their own.

    Raises: ``SpecGenError`` for something else than a drafter, or one that copies already.
    """

    def __init__(self, drafter: Drafter, lookup: CopyingDrafter | None = None) -> None:
        given: object = drafter  # a plain model, now and then
        if not isinstance(given, Drafter) or isinstance(given, CopyingDrafter | WithLookup):
            raise SpecGenError(
                f"WithLookup({type(drafter).__name__}): a drafter that does not copy is required, such as "
                "load_drafter(...) or SmallModel(small_causal_lm)."
            )
        self.drafter = drafter
        self.lookup = PromptLookup() if lookup is None else lookup

    @property
    def title(self) -> str:
        """Return both names."""
        return f"{self.lookup.title} + {self.drafter.title}"

    @property
    def draws(self) -> bool:
        """Tell whether the other drafter draws."""
        return self.drafter.draws

    def reads(self, model: PreTrainedModel) -> Reads:
        """Return what the other drafter reads: copying reads nothing."""
        return self.drafter.reads(model)

    def begin(self, call: Call) -> LookupMixSession:
        """Begin both.

        Raises: as they do, and ``SpecGenError`` for copies from other rows while tokens are drawn.
        """
        return LookupMixSession(self, call)


class LookupMixSession(Session):
    """Settle in every round of one call who copies, and let the other drafter draft for the rest."""

    def __init__(self, mix: WithLookup, call: Call) -> None:
        self.call = call
        self._drawn = mix.draws and not call.sequences.greedy and call.rule != "gumbel"
        self.lookup = mix.lookup.begin(call)
        if self._drawn and self.lookup.reads_other_rows:
            raise SpecGenError(
                "WithLookup got a lookup with other_rows=True and a drafter that draws its tokens: a row's text would "
                "depend on its neighbours. Use other_rows=False, sample=False, or rule='gumbel'."
            )
        self.other = mix.drafter.begin(call)
        own_costs = mix.lookup.costs
        self._costs = replace(own_costs or call.costs, draft=self.other.draft_cost)
        rows = range(call.rows)
        if self._drawn:  # what is drawn depends on who drafts, and the neighbours must not settle that
            self.lookup.part_rows()
            self._groups = [_Group([row]) for row in rows]
        else:
            self._groups = [_Group(list(rows))]
        self._copied: list[bool] | None = None

    @property
    def draft_cost(self) -> float:
        """Return the other drafter's cost."""
        return self.other.draft_cost

    def propose(self, room: list[int]) -> Draft:
        """Settle who copies, ask the other drafter about the rest, and put both into one draft."""
        found = self.lookup.search(room)
        remaining = self.call.sequences.remaining
        counts = [0] * len(found)
        asked = [False] * len(found)
        for group in self._groups:
            for row, (count, asks) in zip(group.rows, self._settle(group, found, remaining, room), strict=True):
                counts[row] = count
                asked[row] = asks
        # asked about no row at all the other one drafts nothing, but reads what waits when there is too much of it
        other = self.other.propose([space if asks else 0 for space, asks in zip(room, asked, strict=True)])
        if not self._drawn:
            counts = self._revised(counts, asked, other.offered, found)
        self._copied = [count > 0 for count in counts]
        if not any(counts):
            return other
        copies = self.lookup.copies(counts, branches=not self._drawn)
        vocab = self.call.sequences.vocab_size
        if not other.width or not any(asked):  # scouts rest with their drafter
            law = _certain(copies.tokens, vocab) if self._drawn else None
            return replace(copies, q=law, broken=other.broken)
        return with_scouts(_merged(copies, other.offered, self._copied, vocab), other)

    def observe(self, round: Round) -> None:
        """Show the round to both; a row's acceptance teaches only the one that drafted it."""
        copied = self._copied
        if copied is None:  # round zero
            self.lookup.observe(round)
            self.other.observe(round)
            return
        for group in self._groups:
            group.observe(round, copied)
        self.lookup.observe(_Part.of(round, copied))
        self.other.observe(_Part.of(round, [not copies for copies in copied]))

    def _settle(
        self, group: _Group, found: list[Continuations], remaining: list[int], room: list[int]
    ) -> list[tuple[int, bool]]:
        """Return for the rows of a group how many tokens each copies, and whether the other drafter is asked."""
        mine = [found[row] for row in group.rows]
        longest = max(one.length for one in mine)
        plan = _plan(
            self._costs,
            [(one.length, one.rate.rates) for one in mine],
            group,
            [remaining[row] for row in group.rows],
            [room[row] for row in group.rows],
            range(1, longest + 1) if self.lookup.adapts else range(longest, longest + (longest > 0)),
        )
        group.asked = any(asks for _, asks in plan)
        return plan

    def _revised(self, counts: list[int], asked: list[bool], other: Draft, found: list[Continuations]) -> list[int]:
        """Copy more where the other drafter drafts nothing now, and where its drafts widen the pass anyway."""
        if not other.width:
            return self.lookup.cut(found) if any(asked) else counts
        if not self.lookup.adapts:
            return counts
        return [
            min(one.length, max(count, other.width)) if count else 0 for one, count in zip(found, counts, strict=True)
        ]


@dataclass
class _Group:
    """Hold rows that decide together, and what they know of the other drafter: its rates, its last draft's size."""

    rows: list[int]
    rate: Rate = field(default_factory=lambda: Rate(0.6, 0.7))
    depth: int = _DEPTH
    nodes: int = _DEPTH
    asked: bool = False
    _waited: int = 0
    _pause: int = _PAUSE

    def observe(self, round: Round, copied: Sequence[bool]) -> None:
        """Learn from the rows that the other drafter drafted for; forget what is old when it is never asked."""
        drafted = [row for row in self.rows if round.proposed[row] and not copied[row]]
        for row in drafted:
            depth, accepted = round.reached[row], len(round.paths[row])
            self.rate.observe(accepted, min(depth, accepted + 1))
        if drafted:
            self.depth = max(round.reached[row] for row in drafted)
            self.nodes = max(round.proposed[row] for row in drafted)
        self._waited = self._waited + 1 if not self.asked else 0
        if self._waited >= self._pause:
            self.rate, self.depth, self.nodes = Rate(0.6, 0.7, weight=2.0), _DEPTH, _DEPTH
            self._waited, self._pause = 0, 2 * self._pause


def _plan(
    costs: Costs,
    copies: list[tuple[int, tuple[float, float]]],
    group: _Group,
    remaining: list[int],
    room: list[int],
    widths: range,
) -> list[tuple[int, bool]]:
    """Return each row's number of copied tokens, and whether the other drafter drafts for it, by expected tokens.

    ``copies[r]``: how many tokens row r could copy, and their rates. Compared are nobody copying, every row copying
    what it has at each width (the other drafter rests), and each row taking what promises more (it drafts).
    """
    worth, rows = costs.worth(remaining), sum(left > 0 for left in remaining)
    rates = group.rate.rates
    drafted = [_expected(rates, min(group.depth, space)) for space in room]

    def gain(tokens: list[float], width: int, drafts: bool) -> float:
        more = sum(value * count for value, count in zip(worth, tokens, strict=True))
        return costs.gain(more, rows, width, costs.draft * group.depth if drafts else 0.0)

    best = [(0, space > 0) for space in room]
    if not widths:
        return best
    most = max(float(rows), gain(drafted, group.nodes, True))
    for width in widths:
        counts = [min(width, length) for length, _ in copies]
        copied = [_expected(rate, count) for count, (_, rate) in zip(counts, copies, strict=True)]
        alone = gain(copied, width, False)
        if alone > most:
            most, best = alone, [(count, False) for count in counts]
        takes = [c > d for c, d in zip(copied, drafted, strict=True)]
        if all(took or not space for took, space in zip(takes, room, strict=True)) or not any(takes):
            continue
        both = gain([max(pair) for pair in zip(copied, drafted, strict=True)], max(width, group.nodes), True)
        if both > most:
            most = both
            lines = zip(counts, takes, room, strict=True)
            best = [(count, False) if took else (0, space > 0) for count, took, space in lines]
    return best


def _expected(rates: tuple[float, float], count: int) -> float:
    """Return how many of ``count`` tokens in a row will be accepted."""
    first, later = rates
    return first * (count if later >= 1 else (1 - later**count) / (1 - later))


@dataclass(frozen=True)
class _Part(Round):
    """Show a round to the drafter of some of its rows: in the others nothing was proposed."""

    whole: Round | None = None
    mine: tuple[bool, ...] = ()

    @classmethod
    def of(cls, round: Round, mine: Sequence[bool]) -> Round:
        """Return the part of the rows marked; the round itself where they are all."""
        if all(mine):
            return round
        marks = torch.tensor(mine, device=round.draft.n_valid.device)
        draft = replace(round.draft, n_valid=round.draft.n_valid * marks)
        return cls(draft, round.verdict, round.hidden, round.guesses, round, tuple(mine))

    @cached_property
    def host(self) -> list[list[int]]:
        """Return what the whole round has read from the device, without the other rows' proposals."""
        assert self.whole is not None
        lines = zip(self.whole.host, self.mine, strict=True)
        return [line if mine else [line[0], 0, 0, *line[3:]] for line, mine in lines]


def _merged(copies: Draft, other: Draft, copied: list[bool], vocab: int) -> Draft:
    """Put the copies into the other draft's place in the rows that copy; ``vocab``: how many ids a law may need."""
    width, device = max(copies.width, other.width), copies.tokens.device
    marks = torch.tensor(copied, device=device)

    def chosen(mine: Tensor, theirs: Tensor, value: int) -> Tensor:
        first, second = (F.pad(part, (0, width - part.shape[1]), value=value) for part in (mine, theirs))
        return torch.where(marks[:, None], first, second)

    tokens = chosen(copies.tokens, other.tokens, 0)
    tree = Tree.chain(width, device)
    if not (copies.tree.is_chain and other.tree.is_chain):  # unused places hang on the root
        tree = Tree(
            chosen(copies.tree.parents, other.tree.parents, -1),
            deepest=_larger(copies.tree.deepest, other.tree.deepest),
            widest=_larger(copies.tree.widest, other.tree.widest),
        )
    n_valid = torch.where(marks, copies.n_valid, other.n_valid)
    rows = torch.tensor([row for row, copies in enumerate(copied) if copies], device=device)
    law = None if other.q is None else _with_copies(other.q, _known(tokens, vocab), rows, vocab)
    return Draft(tokens, tree, n_valid, law, other.without_replacement, other.broken)


def with_scouts(offer: Draft, scouting: Draft) -> Draft:
    """Put the scouts of one draft behind the nodes of another, which offers what the first one offers at least.

    Scouts may hang on nodes of their own draft: these must stand in the same columns of ``offer``. In rows that copy
    other tokens stand there, and what the target thinks behind scouts means less; it is never wrong to look.
    """
    count = scouting.scouts
    if not count:
        return offer
    start = scouting.width - count
    moved = offer.width - start
    parents = scouting.tree.parents[:, start:]
    parents = torch.where(parents >= start, parents + moved, parents)
    rows = max(len(parents), len(offer.tree.parents))
    links = torch.cat([offer.tree.parents.expand(rows, -1), parents.expand(rows, -1)], 1)
    tokens = torch.cat([offer.tokens, scouting.tokens[:, start:]], 1)
    is_chain = scouting.tree.is_chain and not moved
    deepest = None if offer.tree.deepest is None else offer.tree.deepest + count
    tree = Tree(links, is_chain, deepest, offer.tree.widest)  # scouts are nobody's children in the verdict
    return replace(offer, tokens=tokens, tree=tree, scouts=count)


def _larger(first: int | None, second: int | None) -> int | None:
    """Return the larger of two bounds, None where one is not known."""
    if first is None or second is None:
        return None
    return max(first, second)


def _certain(tokens: Tensor, vocab: int) -> SparseQ:
    """Return the law of copied tokens: each could be no other."""
    return SparseQ(_known(tokens, vocab).unsqueeze(-1), torch.ones(*tokens.shape, 1, device=tokens.device))


def _known(tokens: Tensor, vocab: int) -> Tensor:
    """Return ids that a law can name: a corpus may hold others, whose nodes are never offered to the target."""
    return tokens.clamp(0, vocab - 1)


def _with_copies(law: SparseQ | DenseQ, tokens: Tensor, rows: Tensor, vocab: int) -> SparseQ | DenseQ:
    """Return a law over as many nodes as ``tokens (B, N)`` that is one-hot at the tokens of the ``rows`` that copy."""
    more = tokens.shape[1] - (law.ids if isinstance(law, SparseQ) else law.logits).shape[1]
    if isinstance(law, SparseQ):
        ids, probs = (F.pad(part, (0, 0, 0, more)).clone() for part in (law.ids, law.probs))
        first = torch.arange(probs.shape[-1], device=probs.device) == 0
        ids[rows] = tokens[rows].unsqueeze(-1)
        probs[rows] = first.to(probs.dtype)
        return SparseQ(ids, probs)
    logits = F.pad(law.logits, (0, vocab - law.logits.shape[-1]), value=float("-inf"))
    logits = F.pad(logits, (0, 0, 0, more)).clone()  # a pad of nothing returns what it was given
    logits[rows] = float("-inf")
    nodes = torch.arange(tokens.shape[1], device=tokens.device)
    logits[rows[:, None], nodes, tokens[rows]] = 0.0
    return DenseQ(logits)
