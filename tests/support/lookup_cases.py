"""Drafters beside a lookup."""

from __future__ import annotations

from tiny import Watch

from hf_specgen import (
    Costs,
    Round,
    WithLookup,
)

CHEAP = Costs(slope=0.002, draft=0.05)


class Kept(Watch):
    """Keep, of every round after the prompt's, which rows copied and how much each drafter proposed."""

    inner: WithLookup

    def begin(self, sequences) -> None:
        super().begin(sequences)
        self.rows: list[list[tuple[bool, int]]] = []
        session = vars(self.inner.drafter).get("_session")
        self.paces = [
            vars(session)[name] for name in ("pace", "_pace") if session is not None and name in vars(session)
        ]

    def observe(self, round: Round) -> None:
        super().observe(round)
        if len(self.rounds) > 1:
            assert self.inner._copied is not None
            self.rows.append(list(zip(self.inner._copied, round.proposed, strict=True)))

    def row_rounds(self, copied: bool) -> int:
        """Count the rows and rounds in which one of the two drafted."""
        return sum(copies == copied and count > 0 for line in self.rows for copies, count in line)

    @property
    def mixed(self) -> int:
        """Count the rounds in which both drafted."""
        return sum({copies for copies, count in line if count} == {False, True} for line in self.rows)
