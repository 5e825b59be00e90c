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

    def on_begin(self, sequences) -> None:
        super().on_begin(sequences)
        self.rows: list[list[tuple[bool, int]]] = []
        settings = vars(self.session.other).get("settings")
        self.paces = [] if settings is None or settings._pace is None else [settings._pace]

    def on_observe(self, round: Round) -> None:
        super().on_observe(round)
        if len(self.rounds) > 1:
            assert self.session._copied is not None
            self.rows.append(list(zip(self.session._copied, round.proposed, strict=True)))

    def row_rounds(self, copied: bool) -> int:
        """Count the rows and rounds in which one of the two drafted."""
        return sum(copies == copied and count > 0 for line in self.rows for copies, count in line)

    @property
    def mixed(self) -> int:
        """Count the rounds in which both drafted."""
        return sum({copies for copies, count in line if count} == {False, True} for line in self.rows)
