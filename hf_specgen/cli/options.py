"""The flags that several commands share."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer


class Dtype(str, Enum):
    """Name a number format; ``auto`` keeps the checkpoint's own."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Rule(str, Enum):
    """Name a verification rule. All but typical keep the target's law exactly."""

    rejection = "rejection"
    block = "block"
    gumbel = "gumbel"
    typical = "typical"


class AuxLayer(str, Enum):
    """Name what a checkpoint's layer ids mean: residual streams, or decoder layers (the stream after them)."""

    boundary = "boundary"
    layer_output = "layer_output"


class OutLayout(str, Enum):
    """Name a checkpoint layout that can be written."""

    specgen = "specgen"
    sglang = "sglang-eagle3"
    vllm = "vllm-speculators"
    eagle = "eagle"
    medusa = "medusa"
    medusa_vllm = "medusa-vllm"


def convention(chosen: AuxLayer | None) -> str | None:
    """Return a convention as ``load_drafter`` calls it."""
    return None if chosen is None else chosen.name


Target = Annotated[str, typer.Option(help="The model: demo (SmolLM2-135M-Instruct), a Hub id, or a folder.")]
DrafterName = Annotated[
    str,
    typer.Option(
        "--drafter",
        help="prompt-lookup, small-model:<id or folder>, learned:<id or folder>, none; prompt-lookup+small-model:... "
        "or prompt-lookup+learned:... copies where the text repeats itself and drafts elsewhere.",
    ),
]
NumTokens = Annotated[
    int | None, typer.Option(min=1, help="Draft that many tokens a round; by default as many as pay.")
]
RuleName = Annotated[Rule, typer.Option("--rule", help="How drafts are accepted; typical changes the law (lossy).")]
SampleDrafts = Annotated[
    bool, typer.Option("--sample-drafts", help="Let a small model or a learned drafter draw (needs sampling).")
]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Stop after that many new tokens.")]
Temperature = Annotated[
    float | None, typer.Option(min=0.0, help="Sample at this temperature; 0 is greedy, the default.")
]
TopK = Annotated[int | None, typer.Option(min=1, help="Sample among the k likeliest tokens.")]
TopP = Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Sample among the likeliest tokens of this total.")]
Seed = Annotated[int | None, typer.Option(min=0, help="Make sampling repeatable.")]
NoChat = Annotated[bool, typer.Option("--no-chat", help="Feed the prompt as it is, without the chat template.")]
TemplateSettings = Annotated[
    str | None,
    typer.Option(
        "--chat-template-kwargs",
        help="What the chat template is told, as JSON, such as '{\"enable_thinking\": false}'.",
    ),
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Stop at a row that cannot be read exactly, in place of leaving it out.")
]
DtypeName = Annotated[Dtype, typer.Option("--dtype", help="Number format of the models; auto: the checkpoint's own.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")]
Prepack = Annotated[
    bool,
    typer.Option("--prepack", help="Lay the weights out for oneDNN first: faster on a CPU, a second copy in memory."),
]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads that torch may use.")]
PromptFile = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        help="A .jsonl or .json (records: prompt, turns, messages) or text file (a prompt a paragraph).",
    ),
]
Limit = Annotated[int | None, typer.Option(min=1, help="At most that many prompts, taken evenly from the categories.")]
TaskPrompts = Annotated[
    int | None, typer.Option("--task-prompts", min=1, help="Take that many made-up tasks of five kinds as prompts.")
]
TaskSeed = Annotated[int, typer.Option("--task-seed", min=0, help="Which made-up tasks.")]
TaskSkip = Annotated[
    int, typer.Option("--task-skip", min=0, help="Leave out the first so many of them, on which a drafter was trained.")
]
Categories = Annotated[str | None, typer.Option(help="Only these categories, separated by commas.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Rows that are decoded together.")]
CheckpointName = Annotated[
    str, typer.Argument(help="A drafter: a folder, or owner/name on the Hub.", show_default=False)
]
AuxLayers = Annotated[
    AuxLayer | None,
    typer.Option(
        "--aux-layer-convention", help="What the checkpoint's layer ids mean.  [default: as its producer means them]"
    ),
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub repository.")]
