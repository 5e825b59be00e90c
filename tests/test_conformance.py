"""Every drafting method that is found keeps what all must keep; a new one is one file, shown by a toy."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conformance import CHECKS, check_files_come_back, check_the_layout_round_trips, drafter_of, target
from tiny import Watch, few, ours, prompts, some
from train_runs import arguments, texts

import hf_specgen.drafters
from hf_specgen.checkpoints.methods import methods, trained_method
from hf_specgen.errors import SpecGenError
from hf_specgen.trainers import train
from hf_specgen.trainers.estimate import TrainingPlan, estimate, measure
from hf_specgen.trainers.settings import parts_of
from hf_specgen.trainers.warm_start import new_drafter

TOY = Path(__file__).parent / "support" / "toy" / "state_step.py"
FOUND = sorted(methods())


def test_every_method_is_found() -> None:
    assert {"medusa", "eagle", "eagle3", "distill"} <= set(FOUND)
    assert "state_step" not in FOUND
    for name, method in methods().items():
        trainer, args = parts_of(name)
        assert method.name == name and trainer.__name__.endswith("Trainer") and args.__name__.endswith("Arguments")
        assert method.config is None or method.config.method == name == method.drafter.method


@pytest.mark.parametrize(("name", "check"), some(FOUND, CHECKS, fast=[("eagle3", check) for check in CHECKS]))
def test_a_method_conforms(name: str, check: str) -> None:
    CHECKS[check](name)


@pytest.mark.parametrize("name", few(FOUND, "eagle3"))
def test_a_methods_files_come_back(name: str, tmp_path: Path) -> None:
    check_files_come_back(name, tmp_path)


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Add one file to the folders in which drafters are looked for, and take it out again."""
    folder = tmp_path / "more"
    folder.mkdir()
    shutil.copy(TOY, folder)
    monkeypatch.setattr(hf_specgen.drafters, "__path__", [*hf_specgen.drafters.__path__, str(folder)])
    yield "state_step"
    sys.modules.pop("hf_specgen.drafters.state_step", None)


def test_a_method_in_one_file_conforms(toy: str, tmp_path: Path) -> None:
    for check in CHECKS.values():
        check(toy)
    check_files_come_back(toy, tmp_path / "ours")
    check_the_layout_round_trips(toy, "state-step", tmp_path / "theirs")


def test_a_method_in_one_file_is_trained(toy: str, tmp_path: Path) -> None:
    """Five steps with the usual trainer move the weights, and the drafter decodes."""
    model = target().float()
    drafter, notes = new_drafter(toy, model)
    assert notes == ["random weights"]
    before = drafter.joint.weight.detach().clone()
    kind, args = parts_of(toy)
    trainer = kind(drafter, model, arguments(args, tmp_path, max_steps=5), train_dataset=texts())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 5 and losses[-1] < losses[0]
    assert not torch.equal(drafter.joint.weight, before)
    ids, mask = prompts([7])
    watch = Watch(drafter.eval())
    ours(model, watch, ids, mask)
    assert watch.width >= 1


def test_a_method_in_one_file_is_known_to_the_programs(toy: str, capsys: pytest.CaptureFixture[str]) -> None:
    train.main(["--help"])
    assert toy in capsys.readouterr().out
    plan = TrainingPlan(toy, tokens=1000, supervised=500, rows=10, steps=3)
    needs = estimate(plan, measure(target().config, plan))
    assert needs.memory_total > 0 and trained_method(toy).usual_steps == 3


def test_without_its_file_a_method_is_unknown() -> None:
    """Negative control: the toy's tests find it in its file alone."""
    with pytest.raises(SpecGenError, match="'state_step' is not known"):
        new_drafter("state_step", target())
    with pytest.raises(SpecGenError, match="layout 'state-step' is unknown"):
        check_the_layout_round_trips("eagle", "state-step", Path("nowhere"))
    with pytest.raises(KeyError):
        drafter_of("state_step", target())
