"""What a training came to, in files beside the drafter: ``training.json``, which the card shows, and its curve."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import TrainerState

from hf_specgen.checkpoints.card import CURVE, TRAINING, TRAINING_SCHEMA
from hf_specgen.errors import SpecGenError
from hf_specgen.trainers.base import DrafterTrainer
from hf_specgen.trainers.worth import Worth

_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
_TOLD = (
    "loss",
    "loss_reduction",
    "learning_rate",
    "num_train_epochs",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "lr_scheduler_type",
    "warmup_steps",
    "max_length",
    "packing",
    "steps",
    "decay",
    "beta",
    "share",
    "noise",
    "on_policy",
    "weight_decay",
    "max_grad_norm",
    "bf16",
    "fp16",
    "seed",
)

Figures = dict[str, Any]


def figures(trainer: DrafterTrainer, about: Mapping[str, Any], worth: Worth | None) -> Figures:
    """Return a finished training in plain values; ``about``: what it was trained on, in the caller's words."""
    args = trainer.args
    state = trainer.state
    known = args.to_dict()
    precision = "bfloat16 autocast" if args.bf16 else "float16 autocast" if args.fp16 else "float32"
    return {
        "schema": TRAINING_SCHEMA,
        **about,
        "steps": state.global_step,
        "best_step": best_step(trainer),
        "epochs": round(state.epoch or 0.0, 3),
        "processes": args.world_size,
        "precision": precision,
        "arguments": _told_arguments(known),
        "machine": machine(trainer.args.device),
        "evaluation": last_evaluation(state),
        "curve": curve(state.log_history),
        "decoding": None if worth is None else worth.to_dict(),
    }


def best_step(trainer: DrafterTrainer) -> int | None:
    """Return the step whose weights were taken at the end, None where the last ones were."""
    best: int | None = trainer.state.best_global_step
    return best if trainer.args.load_best_model_at_end and best else None


def _told_arguments(known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that shaped the training; what is off, or overruled by ``max_steps``, is left out."""
    kept = {name: known[name] for name in _TOLD if known.get(name) is not None and known[name] is not False}  # 0 counts
    return {name: value for name, value in kept.items() if name != "num_train_epochs" or known["max_steps"] < 1}


def machine(device: torch.device) -> dict[str, Any]:
    """Return where it ran, and with what."""
    name = platform.processor() or platform.machine()
    try:
        told = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        name = told[0].partition(":")[2].strip() if told else name
    except OSError:
        pass
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else name,
        "cores": os.cpu_count() if device.type == "cpu" else None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_specgen": own_version(),
    }


def own_version() -> str:
    """Return the version that is installed, nothing for a source tree alone."""
    try:
        return version("hf_specgen")
    except PackageNotFoundError:
        return ""


def curve(history: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """Return what was logged by step: the losses, the acceptance length, agreement at the first depths.

    Of two evaluations at one step the first counts: the second one is of the best weights, loaded at the end.
    """
    kept = ("loss", "top1_1", "eval_loss", "eval_acceptance_length", "eval_top1_1", "eval_decoded_acceptance_length")
    rows: list[dict[str, float]] = []
    for entry in history:
        values = {name: entry[name] for name in kept if name in entry}
        again = "eval_loss" in entry and any(row["step"] == entry["step"] and "eval_loss" in row for row in rows)
        if values and not again:
            rows.append({"step": entry["step"], **values})
    return rows


def last_evaluation(state: TrainerState) -> dict[str, float]:
    """Return the newest figures of an evaluation, without their prefix and without timings."""
    found = [entry for entry in state.log_history if "eval_loss" in entry]
    timings = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")
    named = {name.removeprefix("eval_"): value for name, value in (found[-1] if found else {}).items()}
    return {name: value for name, value in named.items() if name not in (*timings, "epoch", "step")}


def write_report(folder: str | Path, found: Figures) -> list[Path]:
    """Write ``training.json`` and, where there is a curve, its plot. Returns: their paths."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TRAINING).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    paths = [folder / TRAINING]
    if plot(folder / CURVE, found["curve"]):
        paths.append(folder / CURVE)
    return paths


def plot(path: Path, rows: Sequence[Mapping[str, float]]) -> bool:
    """Draw losses on the left and acceptance lengths on the right. Returns: whether there was anything to draw.

    Raises: ``SpecGenError`` when matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SpecGenError("plots need matplotlib, which is not installed. Run: pip install matplotlib") from None
    panels = {
        "loss per supervised token": {"loss": "training", "eval_loss": "evaluation"},
        "tokens per round": {
            "eval_acceptance_length": "evaluation, from one pass",
            "eval_decoded_acceptance_length": "decoding",
        },
    }
    drawn = {title: lines for title, lines in panels.items() if any(name in row for row in rows for name in lines)}
    if not drawn:
        return False
    figure = Figure(figsize=(5.0 * len(drawn), 3.6), layout="constrained")
    for place, (title, lines) in enumerate(drawn.items(), 1):
        axes = figure.add_subplot(1, len(drawn), place)
        for color, (name, label) in zip(_COLORS, lines.items(), strict=False):
            points = [(row["step"], row[name]) for row in rows if name in row]
            if points:
                axes.plot(
                    *zip(*points, strict=True), color=color, label=label, marker="o" if len(points) < 20 else None
                )
        axes.set_xlabel("optimizer step")
        axes.set_ylabel(title)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)
    return True


def told(found: Mapping[str, Any]) -> list[str]:
    """Return an evaluation's figures as lines."""
    values = found["evaluation"]
    if not values:
        return []
    depths = [depth for depth in range(1, 17) if f"top1_{depth}" in values]
    shares = " ".join(f"{values[f'top1_{depth}']:.2f}" for depth in depths)
    length = values.get("acceptance_length")
    tail = "" if length is None else f", {length:.2f} tokens a round if the target writes these very texts"
    return [
        f"after {found['steps']} steps, on held-out texts: loss {values['loss']:.4f} per supervised token{tail}; the "
        f"drafter's best token is the target's at place 1, 2, ... of a draft: {shares}"
    ]
