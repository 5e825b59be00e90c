"""The drafting benchmark measures every case, leaves its drafters alone, and a round runs no pass too many."""

from __future__ import annotations

import json

import pytest
import torch
from tiny import prompts
from typer.testing import CliRunner

from hf_specgen import SpeculativeDecoding
from hf_specgen.bench.dev import drafting
from hf_specgen.bench.dev.drafting import (
    CASES,
    Clocked,
    DraftingCase,
    DraftingPlan,
    Geometry,
    make_drafter,
    make_target,
    measure,
    table,
)
from hf_specgen.errors import SpecGenError

SMALL = Geometry(hidden=36, inner=48, layers=8, heads=3, kv_heads=1, vocab=13_000)
PLAN = DraftingPlan(SMALL, tokens=3, batch=2, context=9, rounds=4, repeats=1, dtype="float32")


@pytest.mark.slow
def test_every_case_is_measured() -> None:
    rows = measure(PLAN)
    assert [row.case for row in rows] == [case.name for case in CASES]
    for row in rows:
        assert row.step_ms == rows[0].step_ms
        assert 0 < row.heads_ms < row.draft_ms
        assert (row.layers_ms == 0) == row.case.startswith("medusa")
        assert row.rest_ms > 0
        assert row.share == row.draft_ms / row.step_ms
        assert row.pass_ms > 0 and 0 < row.assumed < 1
    printed = table(rows, PLAN)
    assert printed.row_count == len(CASES)


@pytest.mark.parametrize(
    ("case", "passes"),
    [
        (DraftingCase("", "eagle", own_head=False), {"step": 3, "logits": 3}),
        (DraftingCase("", "eagle3", kept=100), {"step": 3, "logits": 3}),
        (DraftingCase("", "eagle3", tree={"top_k": 2, "depth": 3, "nodes": 6}), {"step": 3, "logits": 3}),
        (DraftingCase("", "medusa"), {"head": 3}),
    ],
)
def test_a_round_runs_one_pass_a_token(case: DraftingCase, passes: dict[str, int], monkeypatch) -> None:
    """The pass over the newly accepted pairs is the first of them: a chain of three is three passes and no more."""
    target, drafter = make_target(SMALL, torch.float32), Clocked(make_drafter(case, PLAN))
    counts: list[dict[str, int]] = []
    for name in passes:
        genuine = vars(type(drafter.inner))[name]

        def counted(self, *args, name=name, genuine=genuine):
            counts[-1][name] = counts[-1].get(name, 0) + 1
            return genuine(self, *args)

        monkeypatch.setattr(type(drafter.inner), name, counted)
    propose = drafting.ClockedSession.propose
    monkeypatch.setattr(drafting.ClockedSession, "propose", lambda self, room: counts.append({}) or propose(self, room))
    ids, mask = prompts([9, 4], vocab=100)
    target.generate(ids, attention_mask=mask, max_new_tokens=12, custom_generate=SpeculativeDecoding(drafter))
    assert counts[0] == passes, "also in the round that reads the prompt"
    assert counts[1] == passes
    assert not set(passes) & set(drafter.inner.__dict__), "the clocks are gone"


def test_the_program(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(drafting, "DraftingPlan", lambda: PLAN)
    app = drafting.typer.Typer()
    app.command()(drafting.bench)
    out = tmp_path / "drafting.json"
    asked = ["--only", "medusa, own heads", "--dtype", "float32", "--rounds", "3", "--repeats", "1", "--out", str(out)]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    assert "medusa, own heads" in result.output and "eagle" not in result.output
    record = json.loads(out.read_text())
    assert record["schema"] == drafting.SCHEMA
    assert [line["case"] for line in record["lines"]] == ["medusa, own heads", "medusa, own heads, V / 4"]
    for wrong in (["--dtype", "int8"], ["--only", "nothing of that name"]):
        assert isinstance(CliRunner().invoke(app, wrong).exception, SpecGenError)
