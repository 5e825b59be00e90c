"""Report: `neftune_noise_alpha` ends a training only after the target was loaded and the texts were read."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import tiny
from train_runs import eagle3_trainer

from hf_specgen.errors import SpecGenError
from hf_specgen.trainers.distill import DistillArguments
from hf_specgen.trainers.eagle import EagleArguments
from hf_specgen.trainers.eagle3 import Eagle3Arguments
from hf_specgen.trainers.medusa import MedusaArguments
from hf_specgen.trainers.settings import parse
from hf_specgen.trainers.warm_start import new_drafter


@pytest.mark.parametrize("kind", [MedusaArguments, EagleArguments, Eagle3Arguments, DistillArguments])
def test_noise_in_embeddings_is_refused_with_the_reason(kind: type, tmp_path: Path) -> None:
    with pytest.raises(SpecGenError, match=r"neftune_noise_alpha=5.0 was given: it adds noise to embeddings"):
        kind(output_dir=str(tmp_path), neftune_noise_alpha=5.0, use_cpu=True)


def test_on_the_command_line_before_anything_is_opened() -> None:
    with pytest.raises(SpecGenError, match="it adds noise to embeddings"):
        parse("eagle3", ["--target", "none", "--data", "none", "--output", "none", "--neftune_noise_alpha", "5"])


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated")
def test_activations_computed_anew_too(tmp_path: Path) -> None:
    with pytest.raises(SpecGenError, match="Eagle3Drafter does not support it"):
        eagle3_trainer(tmp_path, gradient_checkpointing=True)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_biases_that_no_layer_has_before_the_training_and_not_when_it_saves(method: str) -> None:
    with pytest.raises(SpecGenError, match="Qwen3's layers have no such biases"):
        new_drafter(method, tiny(layers=3), layer_type="qwen3", mlp_bias=True)
