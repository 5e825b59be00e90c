"""``hf-specgen verify``: is this target with this drafter exact?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_specgen.cli import options
from hf_specgen.cli.options import Dtype, Rule
from hf_specgen.errors import SpecGenError

if TYPE_CHECKING:
    from hf_specgen.bench.exactness import GreedyReport, LawReport
    from hf_specgen.cli.session import CommandSession
    from hf_specgen.measure.methods import Decoding, DecodingMethod
    from hf_specgen.measure.prompts import ChatPrompt
    from hf_specgen.measure.run import Settings

Tolerance = Annotated[
    float | None,
    typer.Option(min=0.0, help="Distance from the best logit that counts as rounding; by default 0.001 in float32."),
]
LawTokens = Annotated[int, typer.Option(min=2, max=16, help="Size of the cut-down vocabulary of the law check.")]
LawSamples = Annotated[int, typer.Option(min=0, help="Texts sampled for the law check; 0 leaves it out.")]
LawTemperature = Annotated[float | None, typer.Option(min=0.01, help="Temperature of the law check.  [default: 1]")]


def verify(  # noqa: PLR0913 - one parameter a flag
    target: options.Target = "demo",
    drafter: options.DrafterName = "prompt-lookup",
    prompts: options.PromptFile = None,
    limit: options.Limit = 8,
    categories: options.Categories = None,
    batch_size: options.BatchSize = 1,
    max_new_tokens: options.MaxNewTokens = 64,
    num_tokens: options.NumTokens = 5,
    rule: options.RuleName = Rule.rejection,
    sample_drafts: options.SampleDrafts = False,
    tolerance: Tolerance = None,
    law_tokens: LawTokens = 4,
    law_samples: LawSamples = 1024,
    temperature: LawTemperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    seed: options.Seed = None,
    no_chat: options.NoChat = False,
    chat_template_kwargs: options.TemplateSettings = None,
    dtype: options.DtypeName = Dtype.auto,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    prepack: options.Prepack = False,
) -> None:
    """Check that a target and a drafter write exactly what the target alone would.

    Greedy texts are compared with plain generate() prompt by prompt, and sampled texts over a few tokens with the law
    enumerated from plain forwards. The sampling flags concern the law check. Prepacked models are compared with the
    plain ones. Exit code 1 when a check fails.
    """
    from hf_specgen.cli import session as work
    from hf_specgen.measure.methods import Decoding
    from hf_specgen.measure.run import Settings

    template = work.template_settings(chat_template_kwargs, not no_chat)
    flags = work.ModelFlags(target, drafter, _exact(rule), sample_drafts, dtype, device, threads)
    chosen = work.choose_prompts(work.PromptFlags(prompts), categories, limit)
    if law_samples:
        decoding = work.read_decoding(max_new_tokens, temperature or 1.0, top_k, top_p, seed or 0)
    elif (temperature, top_k, top_p, seed) != (None, None, None, None):
        raise SpecGenError(
            "the sampling flags concern the law check, which --law-samples 0 leaves out. Leave them out too."
        )
    else:
        decoding = Decoding(max_new_tokens)
    work.require_sampling(decoding, flags)
    session = work.open_session(flags)
    settings = Settings(Decoding(max_new_tokens), batch_size, 1, 0, not no_chat, template)

    def ours() -> DecodingMethod:
        return session.prepacked().bound(num_tokens) if prepack else session.ours(num_tokens)

    passed = _check_greedy(session, chosen, settings, ours(), tolerance)
    if law_samples:
        session.model.float()  # rounding moves the law of a half-precision target from one way of batching to the next
        passed = _check_law(session, chosen[0], settings, decoding, ours(), law_tokens, law_samples) and passed
    typer.echo("exact" if passed else "NOT EXACT: see the lines above")
    if not passed:
        raise typer.Exit(1)


def _exact(rule: Rule) -> Rule:
    if rule is Rule.typical:
        raise SpecGenError("--rule typical does not keep the target's law: there is nothing to verify.")
    return rule


def _check_greedy(
    session: CommandSession,
    prompts: list[ChatPrompt],
    settings: Settings,
    method: DecodingMethod,
    tolerance: float | None,
) -> bool:
    from hf_specgen.bench.exactness import check_greedy
    from hf_specgen.cli.session import progress_bar
    from hf_specgen.measure.compare import tie_tolerance

    limit = tie_tolerance(session.model.dtype) if tolerance is None else tolerance
    with progress_bar("greedy texts") as progress:
        report = check_greedy(session.model, session.tokenizer, prompts, method, settings, limit, progress)
    _show_greedy(report, session.tokenizer)
    return report.passed


def _show_greedy(report: GreedyReport, tokenizer: Any) -> None:
    from hf_specgen.bench.report import batch_words

    several = list(report.batch_sizes) != ["1"]
    rows = f" (batches: {batch_words(report.batch_sizes)})" if several else ""
    typer.echo(f"identical to plain greedy: {report.same}/{report.compared}{rows}")
    for name, divergence in report.divergences:
        plain, other = divergence.words(tokenizer)
        verdict = f"a tie up to {report.tolerance:g}" if divergence.is_tie(report.tolerance) else "NOT A TIE"
        typer.echo(
            f"  {name}: first divergence at token {divergence.position}, {plain} (plain) or {other}, "
            f"logit gap {divergence.gap:.4f}: {verdict}"
        )


def _check_law(
    session: CommandSession,
    prompt: ChatPrompt,
    settings: Settings,
    decoding: Decoding,
    method: DecodingMethod,
    kept: int,
    samples: int,
) -> bool:
    from hf_specgen.bench.exactness import check_law
    from hf_specgen.cli.session import progress_bar
    from hf_specgen.measure.prompts import encode

    ids = encode(prompt, session.tokenizer, settings.chat, settings.chat_template_kwargs)
    expected = session.drafter.spec != "none"
    with progress_bar("sampled law") as progress:
        report = check_law(session.model, ids, method, decoding, kept, samples, expected, progress)
    _show_law(report, session.tokenizer)
    return report.passed


def _show_law(report: LawReport, tokenizer: Any) -> None:
    kept = ", ".join(repr(tokenizer.decode([token])) for token in report.kept)
    typer.echo(f"law of the first {report.length} tokens over {kept}, in float32, {report.samples} samples:")
    typer.echo(
        f"  chi-square {report.chi_square:.1f} at {report.degrees} degrees of freedom, p = {report.p_value:.3g}; "
        f"{report.drafted} tokens drafted, {report.accepted} accepted: {'fits' if report.passed else report.failure}"
    )
