"""Reported: ``torch.save(out)`` of a result could not be loaded, because statistics ride on the tensor."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import ours, prompts, tiny

from hf_specgen import PromptLookup, last_stats


@pytest.fixture(scope="module")
def target():
    return tiny()


@pytest.fixture(scope="module")
def result(target) -> torch.Tensor:
    return ours(target, PromptLookup(4), *prompts([5, 17]), max_new_tokens=12)


def test_a_saved_result_loads_with_the_default(result: torch.Tensor, tmp_path: Path) -> None:
    """Its statistics come back as plain numbers."""
    torch.save({"texts": [result]}, tmp_path / "texts.pt")
    (loaded,) = torch.load(tmp_path / "texts.pt")["texts"]
    assert torch.equal(loaded, result)
    assert dict(loaded.speculation) == result.speculation.to_dict()
    assert result.speculation.num_draft_tokens > 0


def test_it_loads_where_the_library_is_not(result: torch.Tensor, tmp_path: Path) -> None:
    torch.save(result, tmp_path / "text.pt")
    code = "import sys, torch; out = torch.load('text.pt'); assert 'hf_specgen' not in sys.modules; print(out.tolist())"
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str(result.tolist())


def test_copies_and_other_processes_keep_the_statistics(result: torch.Tensor, target) -> None:
    assert last_stats(target) is result.speculation
    for other in (copy.deepcopy(result), copy.copy(result), pickle.loads(pickle.dumps(result))):
        assert torch.equal(other, result)
        assert other.speculation == result.speculation
        assert other.speculation.acceptance_rates == result.speculation.acceptance_rates
    assert torch.equal(result.clone(), result)


def test_results_in_a_dictionary(target, tmp_path: Path) -> None:
    """Dictionaries of transformers need ``weights_only=False``, with or without statistics."""
    settings = {"return_dict_in_generate": True, "output_scores": True, "max_new_tokens": 6}
    output = ours(target, PromptLookup(4), *prompts([5, 17]), **settings)
    torch.save(output, tmp_path / "output.pt")
    loaded = torch.load(tmp_path / "output.pt", weights_only=False)
    assert torch.equal(loaded.sequences, output.sequences)
    assert copy.deepcopy(output).speculation == output.speculation
    torch.save(output.sequences, tmp_path / "sequences.pt")
    assert torch.equal(torch.load(tmp_path / "sequences.pt"), output.sequences)
