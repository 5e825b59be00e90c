"""The records that travel through a round: Tree, Draft, Verdict, Round."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tree:
    """Describe how draft nodes hang together: parents before children, ``-1`` hangs on the root.

    The root is the newest committed token; it is not a node. In ``scored`` coordinates the root is 0 and node
    ``i`` is ``i + 1``. ``deepest`` bounds the depth of a node and ``widest`` the children of a node that count, where
    the maker knows them: then nobody waits for the device to learn them.

    Shapes: ``parents (B, N)`` or ``(1, N)``, int64.
    """

    parents: Tensor
    is_chain: bool = False
    deepest: int | None = None
    widest: int | None = None

    @classmethod
    def chain(cls, gamma: int, device: torch.device | str | None = None) -> Tree:
        """Build the tree of width one with ``gamma`` nodes."""
        parents = torch.arange(-1, gamma - 1, device=device).unsqueeze(0)
        return cls(parents, is_chain=True, deepest=gamma, widest=1)

    def __len__(self) -> int:
        return self.parents.shape[1]

    @cached_property
    def ancestors(self) -> Tensor:
        """``(B or 1, S, S)`` bool in scored coordinates: True at ``[b, s, t]`` when ``t`` is ``s`` or above it."""
        rows, width = self.parents.shape
        scored = width + 1
        if self.is_chain:
            return torch.ones(scored, scored, dtype=torch.bool, device=self.parents.device).tril().unsqueeze(0)
        reach = torch.zeros(rows, scored, scored, device=self.parents.device)
        reach[:, 1:].scatter_(2, self.parents.unsqueeze(-1) + 1, 1.0)
        reach.diagonal(dim1=1, dim2=2).fill_(1.0)
        for _ in range(max(1, (scored - 1).bit_length())):
            reach = (reach @ reach).clamp_(max=1.0)
        return reach.bool()

    @cached_property
    def depth(self) -> Tensor:
        """``(B or 1, S)`` int64 in scored coordinates: 0 for the root, 1 for its children."""
        return self.ancestors.sum(-1) - 1

    @cached_property
    def max_depth(self) -> int:
        """Return a bound of the nodes' depth; without ``deepest`` a tree's is read from the device, once."""
        if self.is_chain:
            return len(self)
        if self.deepest is not None:
            return min(self.deepest, len(self))
        return int(self.depth.max()) if len(self) else 0

    def trim(self, width: int) -> Tree:
        """Keep the first ``width`` nodes (always closed under parents)."""
        return replace(self, parents=self.parents[:, :width])


@dataclass(frozen=True)
class SparseQ:
    """Hold the drafter's law at each node as a list: probabilities outside the list are exactly zero.

    Shapes: ``ids (B, N, C)`` int64 target ids, ``probs (B, N, C)`` float, each row sums to one. An unused place
    repeats any id with probability zero.
    """

    ids: Tensor
    probs: Tensor


@dataclass(frozen=True)
class DenseQ:
    """Hold the drafter's law at each node as warped logits over the first ``V_draft`` target ids.

    Shapes: ``logits (B, N, V_draft)``; ``V_draft`` at most ``V``; ids above have probability zero.
    """

    logits: Tensor


@dataclass(frozen=True)
class Draft:
    """Hold what a drafter proposes for one round.

    ``q`` is None when every token was picked deterministically given the text (argmax, lookup, a coin of the
    seed). Otherwise ``q[b, i]`` is the law that node ``i`` was drawn from; siblings share it, and
    ``without_replacement`` says how siblings were drawn. ``broken ()`` bool: the drafter's own logits were no numbers.
    The last ``scouts`` nodes of every row are computed by the pass and never offered to verification: what the target
    thinks there comes back as ``Round.guesses``. ``q`` may leave them out.

    Shapes: ``tokens (B, N)`` int64, ``n_valid (B,)`` int64: the first ``n_valid[b]`` nodes of row ``b`` count, at most
    ``N - scouts``.
    """

    tokens: Tensor
    tree: Tree
    n_valid: Tensor
    q: SparseQ | DenseQ | None = None
    without_replacement: bool = False
    broken: Tensor | None = None
    scouts: int = 0

    @classmethod
    def empty(cls, rows: int, device: torch.device | str | None = None) -> Draft:
        """Build the draft that proposes nothing: the round is one plain step."""
        tokens = torch.zeros(rows, 0, dtype=torch.long, device=device)
        return cls(tokens, Tree.chain(0, device), torch.zeros(rows, dtype=torch.long, device=device))

    @classmethod
    def from_lists(cls, tokens: list[list[int]], device: torch.device | str | None = None) -> Draft:
        """Build a ragged chain draft from one list of tokens a row."""
        width = max(map(len, tokens))
        padded = [row + [0] * (width - len(row)) for row in tokens]
        block = torch.tensor(padded, dtype=torch.long, device=device).view(len(tokens), width)
        return cls(block, Tree.chain(width, device), torch.tensor([len(row) for row in tokens], device=device))

    @property
    def width(self) -> int:
        """Return N, the number of nodes."""
        return self.tokens.shape[1]

    @property
    def offered(self) -> Draft:
        """Return the draft without its scouts: what verification may accept."""
        if not self.scouts:
            return self
        count = self.width - self.scouts
        q = self.q
        if isinstance(q, SparseQ):
            q = SparseQ(q.ids[:, :count], q.probs[:, :count])
        elif q is not None:
            q = DenseQ(q.logits[:, :count])
        n_valid = self.n_valid.clamp(max=count)
        return replace(self, tokens=self.tokens[:, :count], tree=self.tree.trim(count), n_valid=n_valid, q=q, scouts=0)

    def take(self, rows: Tensor) -> Draft:
        """Return the draft of the rows named by ``rows (R)``, in that order."""
        parents = self.tree.parents
        tree = replace(self.tree, parents=parents[rows]) if len(parents) > 1 else self.tree
        q = self.q
        if isinstance(q, SparseQ):
            q = SparseQ(q.ids[rows], q.probs[rows])
        elif q is not None:
            q = DenseQ(q.logits[rows])
        return replace(self, tokens=self.tokens[rows], tree=tree, n_valid=self.n_valid[rows], q=q)


@dataclass(frozen=True)
class Verdict:
    """Hold what the target decided: the accepted path and the token after it.

    Shapes: ``path (B, K)`` int64 node indices (entries beyond ``n`` are junk in range), ``n (B,)`` accepted count,
    ``next (B,)`` the correction or bonus token, ``invalid (B,)`` bool: the target's logits held NaN or no finite
    value where they were read.
    """

    path: Tensor
    n: Tensor
    next: Tensor
    invalid: Tensor

    def spread(self, rows: Tensor, total: int) -> Verdict:
        """Return the verdict of ``total`` rows of which these are ``rows (R)``; the others accept nothing."""
        return Verdict(*(spread(part, rows, total) for part in (self.path, self.n, self.next, self.invalid)))


def spread(part: Tensor, rows: Tensor, total: int) -> Tensor:
    """Place ``part (R, ...)`` at ``rows (R)`` of ``total`` rows of zeros."""
    return part.new_zeros(total, *part.shape[1:]).index_copy_(0, rows, part)


@dataclass(frozen=True)
class Round:
    """Hold one finished round: the draft, the verdict, and the target's hidden states on the accepted path.

    ``guesses``: the token that the target's own logits hold for the best, behind the root and behind every node of the
    draft, scouts included; None where the drafter does not read them (``Reads.guesses``).

    Shapes: ``hidden``: one ``(B, K + 1, D)`` tensor per requested layer, root first; in round zero ``(B, L, D)``
    over the left-padded prompt (its last column is every row's newest token). ``guesses (B, S)`` int64; behind nodes
    that do not count, in rows that were finished, and behind scouts deeper than the row has room they mean nothing.
    """

    draft: Draft
    verdict: Verdict
    hidden: tuple[Tensor, ...] = ()
    guesses: Tensor | None = None

    @cached_property
    def host(self) -> list[list[int]]:
        """Return ``[invalid, proposed, reached, n, next, path..., its tokens..., broken]`` a row: one device read."""
        verdict, draft = self.verdict, self.draft
        columns = [verdict.invalid.long(), draft.n_valid, self._depths(), verdict.n, verdict.next]
        block = [torch.stack(columns, 1), verdict.path]
        if draft.width:
            block.append(draft.tokens.gather(1, verdict.path.clamp(0, draft.width - 1)))
        if draft.broken is not None:
            block.append(draft.broken.long().expand(len(verdict.path), 1))
        return torch.cat(block, 1).tolist()

    @property
    def broken(self) -> bool:
        """Tell whether the drafter's own logits were no numbers, so that it drafts for nothing."""
        return self.draft.broken is not None and bool(self.host[0][-1])

    def _depths(self) -> Tensor:
        draft = self.draft
        if draft.tree.is_chain or not draft.width:
            return draft.n_valid
        counts = torch.arange(draft.width, device=draft.tokens.device) < draft.n_valid[:, None]
        return (draft.tree.depth[:, 1:] * counts).amax(1)

    @cached_property
    def paths(self) -> list[list[int]]:
        """Return each row's accepted node indices."""
        return [row[5 : 5 + row[3]] for row in self.host]

    @cached_property
    def emitted(self) -> list[list[int]]:
        """Return each row's new tokens: the accepted ones, then the correction or bonus token."""
        depth = self.verdict.path.shape[1]
        return [[*row[5 + depth : 5 + depth + row[3]], row[4]] for row in self.host]

    @cached_property
    def proposed(self) -> list[int]:
        """Return how many nodes each row proposed."""
        return [row[1] for row in self.host]

    @cached_property
    def reached(self) -> list[int]:
        """Return how deep each row's proposed nodes reach."""
        return [row[2] for row in self.host]
