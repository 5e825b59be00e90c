"""``hf-specgen bench``: what does it gain here?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_specgen.cli import options
from hf_specgen.cli.options import Dtype, Rule
from hf_specgen.errors import SpecGenError

if TYPE_CHECKING:
    from hf_specgen.cli.session import CommandSession
    from hf_specgen.measure.methods import DecodingMethod
    from hf_specgen.measure.prompts import ChatPrompt
    from hf_specgen.measure.run import Settings

Demo = Annotated[
    bool, typer.Option("--demo", help="The demo: SmolLM2-135M, six prompts to copy from, about three minutes.")
]
OutFolder = Annotated[Path | None, typer.Option("--out", help="Write report.json and plots into this folder.")]
Repeats = Annotated[int | None, typer.Option(min=1, help="Timed runs of every method and prompt.  [default: 3]")]
Warmup = Annotated[int, typer.Option(min=0, help="Untimed runs of every method before.")]
Stock = Annotated[bool | None, typer.Option(help="Also time transformers' own assisted decoding (batch 1).")]
Constant = Annotated[
    bool, typer.Option("--constant", help="Also time our drafter at the constant length --num-tokens.")
]
Prepack = Annotated[
    bool,
    typer.Option("--prepack", help="Also time plain and ours on weights laid out for oneDNN (CPU; a second copy)."),
]
EqualLength = Annotated[int, typer.Option("--num-tokens", min=1, help="Draft length of --stock and --constant.")]
Limit = Annotated[int | None, typer.Option(min=1, help="At most that many prompts, taken evenly from the categories.")]
MaxNewTokens = Annotated[int | None, typer.Option(min=1, help="Stop after that many new tokens.  [default: 128]")]
CheckFloat32 = Annotated[
    bool | None,
    typer.Option(help="Then compare three greedy texts with plain ones in float32.  [default: only with --demo]"),
]
Target = Annotated[str | None, typer.Option(help="The model: demo, a Hub id, or a folder.  [default: demo]")]


@dataclass(frozen=True)
class Preset:
    """Hold what is used where the user says nothing."""

    categories: str | None = None
    limit: int | None = None
    repeats: int = 3
    max_new_tokens: int = 128
    check_float32: bool = False


DEMO = Preset("summarization,rag,qa", limit=6, repeats=2, max_new_tokens=128, check_float32=True)
FLOAT32_PROMPTS = 3
FLOAT32_TOKENS = 64


def bench(  # noqa: PLR0913 - one parameter a flag
    demo: Demo = False,
    target: Target = None,
    drafter: options.DrafterName = "prompt-lookup",
    prompts: options.PromptFile = None,
    task_prompts: options.TaskPrompts = None,
    task_seed: options.TaskSeed = 0,
    task_skip: options.TaskSkip = 0,
    limit: Limit = None,
    categories: options.Categories = None,
    repeats: Repeats = None,
    warmup: Warmup = 1,
    batch_size: options.BatchSize = 1,
    max_new_tokens: MaxNewTokens = None,
    stock: Stock = None,
    constant: Constant = False,
    num_tokens: EqualLength = 10,
    prepack: Prepack = False,
    check_float32: CheckFloat32 = None,
    out: OutFolder = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    seed: options.Seed = None,
    rule: options.RuleName = Rule.rejection,
    sample_drafts: options.SampleDrafts = False,
    no_chat: options.NoChat = False,
    chat_template_kwargs: options.TemplateSettings = None,
    dtype: options.DtypeName = Dtype.auto,
    device: options.Device = "cpu",
    threads: options.Threads = None,
) -> None:
    """Time plain generate(), stock assisted decoding and ours on the same prompts, taking turns.

    Ratios below 1 are called slower. Greedy texts are compared with the plain ones; where they part, the target's
    logit gap there is reported. With --prepack every ratio is given against prepacked plain generate() as well.
    """
    from hf_specgen.cli import session as work
    from hf_specgen.measure.run import Settings

    if demo and (target, prompts, task_prompts) != (None, None, None):
        raise SpecGenError("--demo brings its own target and prompts. Leave --target and theirs out, or --demo.")
    preset = DEMO if demo else Preset()
    flags = work.ModelFlags(target or "demo", drafter, rule, sample_drafts, dtype, device, threads)
    decoding = work.read_decoding(max_new_tokens or preset.max_new_tokens, temperature, top_k, top_p, seed)
    work.require_sampling(decoding, flags)
    source = work.PromptFlags(prompts, task_prompts, task_seed, task_skip)
    chosen = work.choose_prompts(source, categories or preset.categories, limit or preset.limit)
    template = work.template_settings(chat_template_kwargs, not no_chat)
    settings = Settings(decoding, batch_size, repeats or preset.repeats, warmup, not no_chat, template)
    if out is not None:
        _check_folder(out)
    session = work.open_session(flags)
    methods = _methods(session, batch_size, num_tokens, stock, constant)
    methods = _with_prepacked(session, methods) if prepack else methods
    _measure(session, chosen, methods, settings, out)
    if preset.check_float32 if check_float32 is None else check_float32:
        _check_float32(session, chosen, settings, prepack)


def _check_float32(session: CommandSession, prompts: list[ChatPrompt], settings: Settings, prepack: bool) -> None:
    """Show that what differs in bfloat16 is rounding: in float32 the greedy texts must be the plain ones.

    Raises: typer.Exit with code 1 when they are not.
    """
    from dataclasses import replace

    from hf_specgen.bench.exactness import check_greedy
    from hf_specgen.cli.session import progress_bar
    from hf_specgen.measure.compare import tie_tolerance
    from hf_specgen.measure.methods import Decoding
    from hf_specgen.measure.prompts import select

    model = session.model.float()  # the command ends here: nothing reads the old weights again
    method = session.prepacked().bound() if prepack else session.ours()
    tokens = min(FLOAT32_TOKENS, settings.decoding.max_new_tokens)
    chosen = select(prompts, limit=FLOAT32_PROMPTS)
    short = replace(settings, decoding=Decoding(tokens), batch_size=1, repeats=1, warmup=0)
    with progress_bar("comparing in float32") as progress:
        report = check_greedy(model, session.tokenizer, chosen, method, short, tie_tolerance(model.dtype), progress)
    kind = "in float32, prepacked" if prepack else "in float32"
    typer.echo(f"{kind}, {tokens} new tokens: identical to plain greedy: {report.same}/{report.compared}")
    if not report.passed:
        raise typer.Exit(1)


def _check_folder(folder: Path) -> None:
    """Fail before minutes of measuring and not after."""
    from hf_specgen.bench.plots import require_matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    require_matplotlib()


def _methods(
    session: CommandSession, batch_size: int, num_tokens: int, stock: bool | None, constant: bool
) -> list[DecodingMethod]:
    from hf_specgen.measure.methods import CONSTANT, plain_method

    methods = [plain_method()]
    theirs = session.drafter.stock(num_tokens)
    if stock and (theirs is None or batch_size > 1):
        unknown = f"it knows no drafter {session.drafter.spec}"
        reason = unknown if theirs is None else f"it decodes one row, --batch-size is {batch_size}"
        raise SpecGenError(f"--stock: transformers' assisted decoding cannot take part: {reason}. Leave --stock out.")
    if theirs is not None and batch_size == 1 and stock is not False:
        methods.append(theirs)
    if constant and session.drafter.spec == "none":
        raise SpecGenError("--constant has no effect with --drafter none. Leave one of them out.")
    if constant:
        methods.append(session.ours(num_tokens, CONSTANT, f"ours, {num_tokens} tokens"))
    return [*methods, session.ours()]


def _with_prepacked(session: CommandSession, methods: list[DecodingMethod]) -> list[DecodingMethod]:
    from hf_specgen.measure.methods import OURS_PREPACKED

    packed = session.prepacked()
    return [methods[0], packed.bound_plain(), *methods[1:], packed.bound(name=OURS_PREPACKED)]


def _measure(
    session: CommandSession,
    prompts: list[ChatPrompt],
    methods: list[DecodingMethod],
    settings: Settings,
    out: Path | None,
) -> None:
    from hf_specgen.bench.plots import write_plots
    from hf_specgen.bench.report import build_report, render, summary_line, write_json
    from hf_specgen.cli.session import note, progress_bar
    from hf_specgen.cli.session import out as results_console
    from hf_specgen.measure.machine import describe_machine
    from hf_specgen.measure.run import run_bench

    machine = describe_machine()
    note(f"{machine['cpu']}, {machine['threads']} threads; torch {machine['torch']}, {session.model.dtype}")
    with progress_bar("measuring") as progress:
        results = run_bench(session.model, session.tokenizer, prompts, methods, settings, progress)
    report = build_report(results, methods, settings, {"machine": machine, **session.describe()}, session.tokenizer)
    console = results_console()
    console.print(render(report))
    if out is not None:
        write_json(report, out / "report.json")
        paths = [out / "report.json", *write_plots(report, out)]
        console.print("Wrote " + ", ".join(map(str, paths)))
    console.print(summary_line(report), soft_wrap=True)
