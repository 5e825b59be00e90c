"""``hf-specgen estimate``: what training a drafter would need."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_specgen.cli import options
from hf_specgen.errors import SpecGenError, reason_of

if TYPE_CHECKING:
    from hf_specgen.trainers.estimate import Estimate, Sizes, TrainingPlan


MethodName = Annotated[str, typer.Option("--method", help="What is trained: a METHOD of hf-specgen train.")]
Data = Annotated[str | None, typer.Option("--data", help="Count this data set: a file, a folder, or an id on the Hub.")]
Split = Annotated[str, typer.Option(help="The split of --data.")]
Tokens = Annotated[float | None, typer.Option(min=1, help="Or say how many tokens there are, such as 3e6.")]
Share = Annotated[float, typer.Option(min=0.001, max=1, help="With --tokens: the supervised share of them.")]
RowLength = Annotated[int, typer.Option(min=1, help="With --tokens: tokens of a text, on average.")]
DraftModel = Annotated[str | None, typer.Option("--draft-model", help="The small model that distill trains.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Unrolled tokens (eagle3: 7) or heads (medusa: 4).")]
DraftVocab = Annotated[int | None, typer.Option("--draft-vocab-size", min=1, help="Ids that the drafter covers.")]
Epochs = Annotated[float, typer.Option(min=0.001, help="Times that the data is read.")]
MaxLength = Annotated[int, typer.Option("--max-length", min=1, help="Tokens of a row.")]
Batch = Annotated[int, typer.Option("--batch-size", min=1, help="Rows of a process at a time.")]
Accumulation = Annotated[int, typer.Option("--accumulation", min=1, help="Batches an optimizer step.")]
Processes = Annotated[int, typer.Option("--processes", min=1, help="Processes, one a GPU.")]
Bits = Annotated[float, typer.Option("--target-bits", min=1, help="Bits of a weight of the frozen target.")]
Memory = Annotated[float | None, typer.Option("--memory", min=0, help="GB of one device: does it fit?")]
Speed = Annotated[
    float | None,
    typer.Option("--tflops", min=0.001, help="10^12 operations a second that training reaches.  [default: measured]"),
]
Bf16 = Annotated[bool, typer.Option("--bf16", help="Measure the drafter's speed in bfloat16, as training with bf16.")]


def estimate(  # noqa: PLR0913 - one parameter a flag
    target: options.Target = "demo",
    method: MethodName = "eagle3",
    data: Data = None,
    split: Split = "train",
    tokens: Tokens = None,
    supervised_share: Share = 0.7,
    row_length: RowLength = 512,
    draft_model: DraftModel = None,
    steps: Steps = None,
    draft_vocab_size: DraftVocab = None,
    epochs: Epochs = 1.0,
    max_length: MaxLength = 2048,
    batch_size: Batch = 8,
    accumulation: Accumulation = 1,
    processes: Processes = 1,
    target_bits: Bits = 16,
    memory: Memory = None,
    tflops: Speed = None,
    bf16: Bf16 = False,
    chat_template_kwargs: options.TemplateSettings = None,
    device: options.Device = "cpu",
) -> None:
    """Tell what memory, disk, time and tokens a training plan needs, from configurations alone: no weights are read."""
    from hf_specgen.chats import read_settings
    from hf_specgen.checkpoints.methods import usual_steps
    from hf_specgen.trainers import estimate as work

    unrolled = steps or usual_steps(method)
    template = read_settings(chat_template_kwargs, "--chat-template-kwargs")
    config = _config(target)
    small = None if draft_model is None else _config(draft_model)
    if data is not None:
        found = _count(target, data, split, max_length, template)
    elif template:
        raise SpecGenError("--chat-template-kwargs has no effect without --data. Leave it out.")
    else:
        found = _said(tokens, supervised_share, row_length)
    plan = work.TrainingPlan(
        method,
        *found,
        epochs=epochs,
        steps=unrolled,
        draft_vocab_size=draft_vocab_size,
        max_length=max_length,
        batch=batch_size,
        accumulation=accumulation,
        processes=processes,
        bytes_a_weight=target_bits / 8,
        device=device,
    )
    sizes = work.measure(config, plan, small)
    speeds = (tflops * 1e12,) * 2 if tflops else _speeds(config, device, bf16)
    _show(plan, sizes, work.estimate(plan, sizes), speeds, measured=tflops is None)
    if memory is not None:
        _check(work.estimate(plan, sizes).memory_total, memory * 1e9, plan, sizes)


def _config(name: str) -> Any:
    from transformers import AutoConfig

    from hf_specgen.measure.demo import DEMO, DEMO_FOLDER, DEMO_HUB_ID, cache_dir

    if name == DEMO:
        folder = cache_dir() / DEMO_FOLDER
        name = str(folder) if folder.is_dir() else DEMO_HUB_ID
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise SpecGenError(f"cannot read the configuration of {name!r}: {reason_of(error)}.") from error


def _speeds(config: Any, device: str, bf16: bool) -> tuple[float, float]:
    """Measure the speeds of target and drafter, each in its own number format."""
    import torch

    from hf_specgen.trainers.estimate import matmul_speed

    own = config.get_text_config(decoder=True).dtype
    drafter = torch.bfloat16 if bf16 else torch.float32
    kinds = (own if isinstance(own, torch.dtype) else torch.float32, drafter)
    found = {kind: matmul_speed(device, kind) for kind in set(kinds)}
    return found[kinds[0]], found[kinds[1]]


def _said(tokens: float | None, share: float, length: int) -> tuple[int, int, int]:
    if tokens is None:
        raise SpecGenError("exactly one of --data and --tokens is required.")
    return int(tokens), max(1, int(tokens * share)), max(1, int(tokens / length))


def _count(target: str, data: str, split: str, max_length: int, template: dict[str, Any]) -> tuple[int, int, int]:
    """Return tokens, supervised tokens and rows of a data set."""
    from transformers import AutoTokenizer

    from hf_specgen.trainers.data import DataOptions, load_data, prepare_dataset
    from hf_specgen.trainers.masks import ChatOptions

    opened = load_data(data, split)
    given = {"input_ids"} & set(opened.column_names)
    tokenizer = None if given else AutoTokenizer.from_pretrained(target)
    chat = ChatOptions(chat_template_kwargs=template)
    rows = prepare_dataset(opened, tokenizer, DataOptions(max_length, chat=chat))
    masks = [row for batch in rows.with_format("numpy").iter(1000) for row in batch["loss_mask"]]
    return sum(map(len, masks)), int(sum(mask.sum() for mask in masks)), len(rows)


def _show(plan: TrainingPlan, sizes: Sizes, found: Estimate, speeds: tuple[float, float], measured: bool) -> None:
    from hf_specgen.cli.session import out

    times = found.seconds(plan, *speeds)
    lines = [
        f"{plan.method} for a target of {sizes.target / 1e6:,.0f} M parameters: {sizes.drafter / 1e6:,.1f} M are "
        "trained",
        f"data: {plan.tokens:,} tokens ({plan.supervised:,} supervised) in {plan.rows:,} rows, "
        f"{plan.epochs:g} times: {found.optimizer_steps:,} steps of {plan.batch * plan.accumulation * plan.processes} "
        "rows",
        "",
        f"memory a process{'':27}{found.memory_total / 1e9:10.2f} GB (weights counted, the rest estimated)",
        *(f"  {name:41}{size / 1e9:10.2f} GB" for name, size in found.memory.items()),
        "disk",
        *(f"  {name:41}{_size(size):>13}" for name, size in found.disk.items()),
        f"time, an estimate at {speeds[0] / 1e12:.3g} (target) and {speeds[1] / 1e12:.3g} * 10^12 operations a second"
        + (", half of what matrix products reach here; padding is not counted" if measured else ""),
        *(f"  {name:41}{_duration(seconds):>13}" for name, seconds in times.items()),
        f"  {'all':41}{_duration(sum(times.values())):>13}",
        f"  {'all, read from a feature cache':41}{_duration(sum(times.values()) - times['target']):>13} after the "
        "first epoch",
    ]
    out().print("\n".join(lines), soft_wrap=True)


def _size(size: float) -> str:
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size / 1e3:.2f} kB"


def _duration(seconds: float) -> str:
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 90 else f"{seconds:.1f} s"


def _check(needed: float, given: float, plan: TrainingPlan, sizes: Sizes) -> None:
    """Say whether a plan fits. Raises: typer.Exit with code 1 when it does not."""
    if needed <= given:
        typer.echo(f"It fits into {given / 1e9:g} GB.")
        return
    fewer = sizes.target * (plan.bytes_a_weight - 0.5)
    advice = ["smaller --batch-size or --max-length with more --accumulation"]
    if plan.bytes_a_weight > 0.5:
        advice.append(f"a target of 4 bits ({fewer / 1e9:.1f} GB less)")
    advice.append("a target sharded over the processes")
    typer.echo(f"It does not fit into {given / 1e9:g} GB ({needed / 1e9:.1f} are needed). Try {', or '.join(advice)}.")
    raise typer.Exit(1)
