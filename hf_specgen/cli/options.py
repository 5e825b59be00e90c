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
    """Name a verification rule. All keep the target's law exactly."""

    rejection = "rejection"
    block = "block"
    gumbel = "gumbel"


Target = Annotated[str, typer.Option(help="The model: demo (SmolLM2-135M-Instruct), a Hub id, or a folder.")]
DrafterName = Annotated[str, typer.Option("--drafter", help="prompt-lookup, small-model:<id or folder>, or none.")]
NumTokens = Annotated[
    int | None, typer.Option(min=1, help="Draft that many tokens a round; by default as many as pay.")
]
RuleName = Annotated[Rule, typer.Option("--rule", help="How sampled drafts are accepted.")]
SampleDrafts = Annotated[
    bool, typer.Option("--sample-drafts", help="Let a small model draw its drafts (needs sampling).")
]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Stop after that many new tokens.")]
Temperature = Annotated[
    float | None, typer.Option(min=0.0, help="Sample at this temperature; 0 is greedy, the default.")
]
TopK = Annotated[int | None, typer.Option(min=1, help="Sample among the k likeliest tokens.")]
TopP = Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Sample among the likeliest tokens of this total.")]
Seed = Annotated[int | None, typer.Option(min=0, help="Make sampling repeatable.")]
NoChat = Annotated[bool, typer.Option("--no-chat", help="Feed the prompt as it is, without the chat template.")]
DtypeName = Annotated[Dtype, typer.Option("--dtype", help="Number format of the models; auto: the checkpoint's own.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")]
Prepack = Annotated[
    bool,
    typer.Option("--prepack", help="Lay the weights out for oneDNN first: faster on a CPU, a second copy in memory."),
]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads that torch may use.")]
PromptFile = Annotated[
    Path | None,
    typer.Option("--prompts", help="A .jsonl (prompt, turns or messages a line) or text file (a prompt a paragraph)."),
]
Limit = Annotated[int | None, typer.Option(min=1, help="At most that many prompts, taken evenly from the categories.")]
Categories = Annotated[str | None, typer.Option(help="Only these categories, separated by commas.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Rows that are decoded together.")]
