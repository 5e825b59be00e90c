"""Training runs that tests compare: tiny targets, texts and trainers, in this process or in several.

As a program it is one of several processes: ``accelerate launch ... train_runs.py FILE`` runs the jobs of a JSON file,
each a function of this module or of the module that it names, and rank 0 writes what they return.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from fitted import untrained
from tiny import tiny
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import Trainer

from hf_specgen.drafting.learned import LearnedDrafter
from hf_specgen.trainers.base import DrafterTrainer, DrafterTrainingArguments
from hf_specgen.trainers.eagle3 import Eagle3Arguments, Eagle3Trainer

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# where functions that processes run by name are found
PLACES = (ROOT, HERE, *(HERE.parent / name for name in ("trainers", "cli", "reports")))
VOCAB, STEPS, ROWS = 64, 20, 24
Job = dict[str, Any]


class Pad:
    """Put rows side by side, padded on the right."""

    def __call__(self, rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
        width = max(len(row["input_ids"]) for row in rows)
        batch = {name: torch.zeros(len(rows), width, dtype=torch.long) for name in ("input_ids", "attention_mask")}
        mask = torch.zeros(len(rows), width, dtype=torch.bool)
        for place, row in enumerate(rows):
            size = len(row["input_ids"])
            batch["input_ids"][place, :size] = torch.tensor(row["input_ids"])
            batch["attention_mask"][place, :size] = 1
            mask[place, :size] = torch.tensor(row["loss_mask"], dtype=torch.bool)
        return {**batch, "loss_mask": mask, "num_items": mask.sum()}


def texts(rows: int = ROWS, supervised: bool = True, seed: int = 5) -> list[dict[str, list[int]]]:
    """Return random texts of 5 to 20 tokens, the first three unsupervised; or every second text wholly so."""
    torch.manual_seed(seed)
    found = []
    for row in range(rows):
        size = int(torch.randint(5, 21, ()))
        counts = supervised or row % 2 == 0
        mask = [int(counts and place >= 3) for place in range(size)]
        found.append({"input_ids": torch.randint(1, VOCAB, (size,)).tolist(), "loss_mask": mask})
    return found


def eagle3(**settings: Any) -> tuple[LearnedDrafter, torch.nn.Module]:
    """Return a new EAGLE-3 drafter of half the vocabulary, and its target."""
    model = tiny(layers=3)
    return untrained("eagle3", model, list(range(0, VOCAB, 2)), reduced=True, **settings), model


def arguments(kind: type[DrafterTrainingArguments], folder: str | Path, **settings: Any) -> Any:
    """Return arguments of a short run on the CPU that logs every step."""
    usual = dict(
        max_steps=STEPS,
        logging_steps=1,
        learning_rate=3e-3,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    return kind(output_dir=str(folder), **{**usual, **settings})


def eagle3_trainer(folder: str | Path, rows: Any = None, exact: bool = False, **settings: Any) -> DrafterTrainer:
    """Return a trainer of an EAGLE-3 drafter that drafts three tokens; ``exact``: in float64."""
    drafter, model = eagle3()
    if exact:
        drafter.double()
        model.double()
    args = arguments(Eagle3Arguments, folder, **{"steps": 3, **settings})
    return Eagle3Trainer(
        drafter, model, args, data_collator=Pad(), train_dataset=rows or texts(), eval_dataset=texts(5)
    )


class Unscaled(Eagle3Trainer):
    """A twin: the sum by the global count, although processes average their gradients."""

    def compute_loss(self, model: Any, inputs: Job, *unused: Any, num_items_in_batch: Any = None, **more: Any) -> Any:
        return super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch * self.args.world_size)


class Bypassing(Eagle3Trainer):
    """A twin: the drafter itself is called, so what wraps it never joins the gradients."""

    def compute_loss(self, model: Any, inputs: Job, *unused: Any, num_items_in_batch: Any = None, **more: Any) -> Any:
        return super().compute_loss(self.drafter, inputs, num_items_in_batch=num_items_in_batch)


class Repeating(Eagle3Trainer):
    """A twin: rows that even out the last batch are counted twice."""

    def _once(self, batch: Job) -> Job:
        return batch


class Unfilled(Eagle3Trainer):
    """A twin: a stream to evaluate on is left to accelerate, which repeats rows of it."""

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return Trainer.get_eval_dataloader(self, eval_dataset)


def twin_trainer(folder: str | Path, rows: Any = None, kind: str = "", **settings: Any) -> DrafterTrainer:
    """Return a trainer that does one thing wrong."""
    drafter, model = eagle3()
    args = arguments(Eagle3Arguments, folder, **{"steps": 3, **settings})
    twins = {"unscaled": Unscaled, "bypassing": Bypassing, "repeating": Repeating, "unfilled": Unfilled}
    wrong = twins[kind]
    return wrong(drafter, model, args, data_collator=Pad(), train_dataset=rows or texts(), eval_dataset=texts(5))


def record(trainer: DrafterTrainer) -> Job:
    """Return what a run came to: traces, and the weights of this process and their spread over processes."""
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    weights = torch.cat([part.detach().double().flatten() for part in trainer.drafter.parameters()])
    every = trainer.accelerator.gather(weights[None])
    return {
        "world": trainer.args.world_size,
        "loss": [entry["loss"] for entry in history],
        "grad_norm": [entry["grad_norm"] for entry in history],
        "weights": weights.tolist(),
        "spread": float((every - every[:1]).abs().max()),
    }


def train(folder: str, maker: str = "train_runs.eagle3_trainer", supervised: bool = True, **settings: Any) -> Job:
    """Train and return the record; ``maker`` names a module and a function that takes folder, rows and arguments."""
    module, _, name = maker.partition(".")
    make = vars(importlib.import_module(module))[name]
    trainer = make(folder, texts(supervised=supervised), **settings)
    items: list[float] = []
    count = trainer.count
    trainer.count = lambda batch: (items.append(float(count(batch))), count(batch))[1]
    trainer.train()
    return {**record(trainer), "items": gathered(trainer, items)}


def evaluate(folder: str, maker: str = "train_runs.eagle3_trainer", **settings: Any) -> Job:
    """Evaluate a new drafter on five texts."""
    module, _, name = maker.partition(".")
    trainer = vars(importlib.import_module(module))[name](folder, **settings)
    return {"world": trainer.args.world_size, **trainer.evaluate()}


def evaluate_stream(folder: str, maker: str = "eagle3_trainer", **settings: Any) -> Job:
    """Evaluate a new drafter on the five texts of ``evaluate``, as a stream."""
    from datasets import Dataset

    trainer = globals()[maker](folder, per_device_eval_batch_size=2, **settings)
    return {"world": trainer.args.world_size, **trainer.evaluate(Dataset.from_list(texts(5)).to_iterable_dataset())}


def resume(folder: str, **settings: Any) -> Job:
    """Train twenty steps, then from step ten on again, and return both records."""
    settings |= {"save_strategy": "steps", "save_steps": STEPS // 2}
    whole, again = (eagle3_trainer(folder, **settings) for _ in range(2))
    whole.train()
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-{STEPS // 2}")
    return {"whole": record(whole), "again": record(again)}


def stream(folder: str, **settings: Any) -> Job:
    """Train one pass over a stream and return which rows each process saw."""
    from datasets import Dataset

    rows = Dataset.from_list(texts()).to_iterable_dataset(num_shards=4)
    trainer = eagle3_trainer(folder, rows, per_device_train_batch_size=2, max_steps=ROWS // 4, **settings)
    seen: list[float] = []
    run = trainer.run
    trainer.run = lambda model, batch, **more: (seen.extend(keys(batch)), run(model, batch, **more))[1]
    trainer.train()
    return {**record(trainer), "seen": gathered(trainer, seen), "all": keys(Pad()(texts()))}


def keys(batch: Job) -> list[float]:
    """Return a number that tells a row from others."""
    return (batch["input_ids"][:, :5] * torch.tensor([1, 64, 64**2, 64**3, 0])).sum(1).float().tolist()


def shard(folder: str) -> Job:
    """Return the largest error of the gradients of a drafter that FSDP2 shards, each process reading half the rows."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    trainer = eagle3_trainer(folder)
    rank, world = trainer.accelerator.process_index, trainer.accelerator.num_processes
    rows = texts(8)
    trainer.run(trainer.drafter, Pad()(rows)).loss_sum.backward()
    wanted = {name: part.grad.clone() for name, part in trainer.drafter.named_parameters()}
    trainer.drafter.zero_grad()
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(trainer.drafter.midlayer, mesh=mesh)
    fully_shard(trainer.drafter, mesh=mesh)
    output = trainer.run(trainer.drafter, Pad()(rows[rank::world]))
    (output.loss_sum * world).backward()
    parts = dict(trainer.drafter.named_parameters())
    errors = {name: float((part.grad.full_tensor() - wanted[name]).abs().max()) for name, part in parts.items()}
    dist.barrier()
    return {
        "errors": errors,
        "largest": {name: float(part.abs().max()) for name, part in wanted.items()},
        "sharded": all(isinstance(part, DTensor) for part in parts.values()),
        "embedding": trainer.drafter.get_input_embeddings() is None,
    }


def split_target(folder: str, **layout: int) -> Job:
    """Train next to a target that is split over the processes when it is loaded."""
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    drafter, model = eagle3()
    if os.environ["RANK"] == "0":
        model.save_pretrained(f"{folder}/target")
    args = arguments(Eagle3Arguments, folder, steps=3, per_device_train_batch_size=4)
    assert args.world_size == 2
    torch.distributed.barrier()
    split = LlamaForCausalLM.from_pretrained(f"{folder}/target", distributed_config=DistributedConfig(**layout))
    trainer = Eagle3Trainer(drafter, split, args, data_collator=Pad(), train_dataset=texts())
    trainer.train()
    held = [part.to_local().numel() if isinstance(part, DTensor) else part.numel() for part in split.parameters()]
    return {**record(trainer), "share": sum(held) / sum(part.numel() for part in model.parameters())}


def gathered(trainer: DrafterTrainer, values: list[float]) -> list[list[float]]:
    """Return every process's numbers."""
    return trainer.accelerator.gather(torch.tensor([values])).tolist()


def alone(jobs: dict[str, Job], folder: Path) -> dict[str, Job]:
    """Run jobs in this process."""
    return {name: call(job, folder / name) for name, job in jobs.items()}


def together(jobs: dict[str, Job], folder: Path, processes: int = 2, seconds: int = 240) -> dict[str, Job]:
    """Run jobs in processes that ``accelerate launch`` starts; a hang ends after ``seconds``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "jobs.json").write_text(json.dumps(jobs))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", f"--num_processes={processes}"]
    start += [f"--main_process_port={port}", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
    path = os.pathsep.join(map(str, PLACES))
    known = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = ["timeout", "--kill-after=5", str(seconds), *start, __file__, str(folder)]
    done = subprocess.run(command, env=known, capture_output=True, text=True, check=False)
    broken = [path.read_text() for path in folder.glob("broken-*.txt")]
    assert done.returncode == 0, "\n".join(broken) or done.stderr[-6000:]
    return json.loads((folder / "found.json").read_text())


def call(job: Job, folder: Path) -> Job:
    """Run one job: ``run`` names a function of this module or ``module.function``, the rest are its arguments."""
    settings = dict(job)
    module, _, name = str(settings.pop("run", "train_runs.train")).rpartition(".")
    return vars(importlib.import_module(module))[name](str(folder), **settings)


def main(folder: Path) -> None:
    """Run the jobs of a folder as one of several processes."""
    torch.set_num_threads(1)
    try:
        found = alone(json.loads((folder / "jobs.json").read_text()), folder)
    except Exception:
        (folder / f"broken-{os.environ.get('RANK', '0')}.txt").write_text(traceback.format_exc())
        raise
    if os.environ.get("RANK", "0") == "0":
        (folder / "found.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


SHORT = [
    "--use_cpu",
    "--disable_tqdm",
    "true",
    "--logging_steps",
    "1",
    "--decode_tokens",
    "16",
    "--decode_prompts",
    "2",
]


def line(place: Path, out: Path, *more: Any, method: str = "eagle3") -> list[str]:
    """Return the arguments of a short training on what the fixture ``place`` holds."""
    steps = ["--steps", "2"] if method == "eagle3" else []
    given = ["--target", place / "target", "--data", place / "texts.jsonl", "--output", out, *SHORT, *steps, *more]
    return [method, *map(str, given)]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
