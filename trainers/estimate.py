"""What a training plan needs, before it starts: memory, disk and time, from configurations alone.

Sizes of weights, states and files are counted. Activations and time are estimates: the parts that grow with a batch
are summed, and time is the number of operations over the speed of matrix products. Both were compared with training
steps on a CPU, see docs/benchmarks.md; nothing was compared on GPUs.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from hf_specgen.checkpoints.config import DrafterConfig
from hf_specgen.checkpoints.methods import HEADS, UNROLLED, Method, config_class, trained_method
from hf_specgen.errors import SpecGenError
from hf_specgen.loading import drafter_class
from hf_specgen.models.facts import TargetFacts
from hf_specgen.models.taps import FINAL

TARGET = "target"
_STATE = 16  # bytes a trained parameter: weight, gradient and Adam's two moments in float32
# bytes per id that a row of a chunk holds: of the target's law, the drafter's, a copy
_TAUGHT = 10
_OWN = 16
_MORE = 8
_CPU_ELEMENTS = 1 << 24  # of the target's logits that a chunk has at most on a CPU
_LIBRARIES = 0.7e9  # bytes of a process that has loaded torch and transformers, or of a GPU's context
_ASSUMED = 0.5  # of the speed of large matrix products that training reached, see docs/benchmarks.md
_SHORTEST = 0.3  # seconds of one thread that a speed is measured for


@dataclass(frozen=True)
class TrainingPlan:
    """Hold what is to be trained, and how.

    ``tokens``: of the data, prompts included; ``supervised``: those that answers are made of; ``rows``: texts.
    ``steps``: tokens that an EAGLE drafter unrolls, heads of Medusa. ``batch`` rows of at most ``max_length`` tokens on
    each of ``processes``, ``accumulation`` of them a step. ``bytes_a_weight``: of the frozen target (0.5: 4 bits).
    ``device``: chunks of the loss are smaller on a CPU.
    """

    method: str
    tokens: int
    supervised: int
    rows: int
    epochs: float = 1.0
    steps: int = 7
    draft_vocab_size: int | None = None
    max_length: int = 2048
    batch: int = 8
    accumulation: int = 1
    processes: int = 1
    chunk: int = 1024
    bytes_a_weight: float = 2.0
    device: str = "cpu"

    @property
    def record(self) -> Method:
        """Return the method's record."""
        return trained_method(self.method)

    def __post_init__(self) -> None:
        trained_method(self.method)
        if self.tokens < 1 or self.rows < 1 or not 0 < self.supervised <= self.tokens:
            raise SpecGenError(
                f"{self.tokens} tokens in {self.rows} rows, {self.supervised} supervised: at least one of each, and "
                "not more supervised than there are, is required."
            )


@dataclass(frozen=True)
class Sizes:
    """Hold parameter counts: of the target, without embedding and head; of the drafter, and of its parts."""

    facts: TargetFacts
    intermediate: int
    heads: int
    target: int
    target_body: int
    drafter: int
    once: int
    repeated: int
    head: int
    boundaries: int


@dataclass(frozen=True)
class Estimate:
    """Hold bytes a process, bytes on disk, operations a token, optimizer steps, and names for all of it."""

    memory: dict[str, float]
    disk: dict[str, float]
    operations: dict[str, float]
    optimizer_steps: int

    @property
    def memory_total(self) -> float:
        """Return the bytes that one process needs."""
        return sum(self.memory.values())

    def seconds(self, plan: TrainingPlan, target_speed: float, drafter_speed: float) -> dict[str, float]:
        """Return the seconds of each part of all epochs, for processes that each do so many operations a second."""
        tokens = plan.tokens * plan.epochs / plan.processes
        return {
            name: tokens * each / (target_speed if name == TARGET else drafter_speed)
            for name, each in self.operations.items()
        }


def measure(target: PretrainedConfig, plan: TrainingPlan, draft_model: PretrainedConfig | None = None) -> Sizes:
    """Count parameters of target and drafter without memory; ``draft_model``: what distillation trains.

    Raises: ``SpecGenError`` for distillation without a draft model.
    """
    facts = TargetFacts.of_config(target)
    settings = target.get_text_config(decoder=True).to_dict()
    whole, body = _count_model(target)
    heads = int(settings.get("num_attention_heads") or settings.get("n_head") or 1)
    width = int(settings.get("intermediate_size") or settings.get("n_inner") or 4 * facts.hidden_size)
    shared = facts, width, heads, whole, body
    if plan.record.config is None:
        if draft_model is None:
            raise SpecGenError("distillation trains a small model of its own: name it (--draft-model).")
        small, layers = _count_model(draft_model)
        hidden = TargetFacts.of_config(draft_model).hidden_size
        return Sizes(*shared, small, 0, layers, facts.vocab_size * hidden, 0)
    config = new_config(plan, facts, settings)
    drafter = drafter_class(plan.method).skeleton(config)
    counts = {name: parameter.numel() for name, parameter in drafter.named_parameters()}
    head = sum(counts[name] for name in config.head_names)
    once = sum(count for name, count in counts.items() if name.startswith("fc.") and plan.record.depths == UNROLLED)
    total = sum(counts.values())
    layers = sum(1 for boundary in drafter.hidden_layers if boundary != FINAL)
    return Sizes(*shared, total, once, total - once - head, head, layers)


def new_config(plan: TrainingPlan, facts: TargetFacts, settings: dict[str, object]) -> DrafterConfig:
    """Return the configuration of a new drafter with one layer of the target's own sizes."""
    kind = config_class(plan.method)
    taken = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    given = {name: settings[name] for name in taken if settings.get(name) and name in kind.field_names()}
    config: DrafterConfig = kind(
        hidden_size=facts.hidden_size,
        vocab_size=facts.vocab_size,
        draft_vocab_size=plan.draft_vocab_size,
        **given,
        **drafter_class(plan.method).usual_fields(facts, plan.steps),
    )
    return config


def _count_model(config: PretrainedConfig) -> tuple[int, int]:
    """Return a model's parameters, and those that are neither embedding nor head."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    ends = {
        parameter
        for module in (model.get_input_embeddings(), model.get_output_embeddings())
        if module is not None
        for parameter in module.parameters()
    }
    whole = sum(parameter.numel() for parameter in model.parameters())
    return whole, whole - sum(parameter.numel() for parameter in ends)


def estimate(plan: TrainingPlan, sizes: Sizes) -> Estimate:
    """Return what a plan needs."""
    hidden = sizes.facts.hidden_size
    vocab = sizes.facts.vocab_size
    tokens = plan.batch * plan.max_length
    depths = plan.record.depths
    steps = plan.steps if depths == UNROLLED else 1
    kept = (sizes.boundaries + 1) * hidden
    layer = 16 * hidden + 3 * sizes.intermediate + 2 * sizes.heads * min(plan.max_length, 512)
    memory = {
        "target, frozen": sizes.target * plan.bytes_a_weight,
        "drafter, gradients, Adam (float32)": float(sizes.drafter * _STATE),
        "hidden states of a batch": tokens * kept * 2.0,
        "target's forward": tokens * (4 * hidden + 2 * sizes.intermediate) * 2.0,
        "drafter's activations": 0.0 if depths == HEADS else tokens * steps * layer * 4.0,
        "laws of a chunk of the loss": _laws(plan, vocab) + sizes.head * 4.0,
        "libraries": _LIBRARIES,
    }
    disk = {
        "a checkpoint (weights)": sizes.drafter * 4.0,
        "a checkpoint (optimizer, to go on)": sizes.drafter * 8.0,
        "the data as token ids": plan.tokens * 5.0,
        "a feature cache, if one is written (16 bits)": plan.tokens * (kept * 2.0 + 5),
    }
    batches = -(-plan.rows // (plan.batch * plan.processes))
    optimizer = max(1, round(plan.epochs * -(-batches // plan.accumulation)))
    return Estimate(memory, disk, _operations(plan, sizes), optimizer)


def _laws(plan: TrainingPlan, vocab: int) -> float:
    """Return the bytes of a chunk's laws; unrolled tokens share the target's."""
    own = plan.draft_vocab_size or vocab
    rows = plan.chunk
    if plan.device.startswith("cpu"):
        rows = min(rows, max(1, _CPU_ELEMENTS // vocab))
    shared = plan.steps if plan.record.depths == UNROLLED else 1
    more = _MORE * ((own < vocab) + (shared > 1))
    return float(rows) * (vocab * _TAUGHT / shared + own * (_OWN + more))


def _operations(plan: TrainingPlan, sizes: Sizes) -> dict[str, float]:
    """Return operations per token of the data; heads run on supervised tokens only."""
    hidden = sizes.facts.hidden_size
    vocab = sizes.facts.vocab_size
    share = plan.supervised / plan.tokens
    record = plan.record
    depths = plan.steps if record.depths in (UNROLLED, HEADS) else 1
    unrolled = depths if record.depths == UNROLLED else 1
    judged = depths if record.depths == HEADS else 1  # unrolled tokens are judged by the same laws of the target
    # a head of its own: forward, and the gradients of states and weights; the target's: without those of weights
    own = 6.0 * sizes.head * unrolled
    head = own if sizes.head else 4.0 * hidden * vocab * depths
    return {
        TARGET: 2.0 * sizes.target_body,
        "drafter": 6.0 * (sizes.once + sizes.repeated * unrolled),
        "drafter's head": head * share,
        "target's head": 2.0 * hidden * vocab * judged * share,
    }


def matmul_speed(device: str = "cpu", dtype: torch.dtype = torch.float32, size: int = 1024) -> float:
    """Measure operations a second of matrix products here, and return the part of it that training reaches.

    On a CPU a thread's own time is measured and multiplied by the threads: other programs do not change it.
    """
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    cpu = torch.device(device).type == "cpu"
    clock, threads = (time.process_time, torch.get_num_threads()) if cpu else (time.perf_counter, 1)
    best = float("inf")
    spent = 0.0
    while spent < _SHORTEST:
        start = clock()
        total = (left @ right).sum()
        float(total)  # waits for the device
        took = max(clock() - start, 1e-7)
        best = min(best, took)
        spent = spent + took
    return _ASSUMED * threads * 2 * size**3 / best
