"""``hf-specgen inspect``: what is this checkpoint, what does it need, what would be refused?"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_specgen.cli import options
from hf_specgen.errors import IncompatibleDrafter, SpecGenError, reason_of

if TYPE_CHECKING:
    from hf_specgen.checkpoints.formats.base import ReadOptions, Source
    from hf_specgen.checkpoints.opening import Report
    from hf_specgen.models.facts import TargetFacts

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
TargetName = Annotated[
    str | None, typer.Option("--target", help="Also check against this model (its config alone is read).")
]


def inspect(
    checkpoint: options.CheckpointName,
    target: TargetName = None,
    aux_layer_convention: options.AuxLayers = None,
    revision: options.Revision = None,
    as_json: AsJson = False,
) -> None:
    """Say what a drafter checkpoint is and what load_drafter would make of it, without reading its weights.

    Exit code 1 when it would be refused.
    """
    from hf_specgen.checkpoints.files import HubOptions
    from hf_specgen.checkpoints.formats.base import ReadOptions
    from hf_specgen.checkpoints.opening import open_source

    facts = read_facts(target)
    refused = None
    report = None
    source = None
    try:
        source = open_source(checkpoint, HubOptions(revision))
        report = _resolve(source, ReadOptions(facts, options.convention(aux_layer_convention)))
    except SpecGenError as error:
        if source is None and not isinstance(error, IncompatibleDrafter):
            raise
        refused = str(error)
    complaint = refused or _misfit(report, target, facts)
    found = {**_outline(checkpoint, source), **(report.to_dict() if report else {}), "refused": complaint}
    typer.echo(json.dumps(found, indent=1, ensure_ascii=False)) if as_json else _show(found)
    if complaint:
        raise typer.Exit(1)


def read_facts(target: str | None) -> TargetFacts:
    """Read what a target's config says. Raises: ``SpecGenError`` when it cannot be read."""
    from transformers import AutoConfig

    from hf_specgen.models.facts import TargetFacts

    if target is None:
        return TargetFacts()
    try:
        return TargetFacts.of_config(AutoConfig.from_pretrained(target, trust_remote_code=False))
    except (OSError, ValueError, KeyError) as error:
        raise SpecGenError(f"the target {target}: its config cannot be read: {reason_of(error)}.") from error


def _resolve(source: Source, read: ReadOptions) -> Report:
    from hf_specgen.checkpoints.opening import Opened, identify
    from hf_specgen.loading import checked

    layout = identify(source)
    return checked(Opened(source, layout, read, layout.plan(source, read)))


def _misfit(report: Report | None, target: str | None, facts: TargetFacts) -> str | None:
    from hf_specgen.drafting.learned import check_fit

    if report is None or target is None:
        return None
    try:
        check_fit(report.config, facts)
    except IncompatibleDrafter as error:
        return str(error)
    return None


def _outline(name: str, source: Source | None) -> dict[str, Any]:
    """Return what is seen before the layout is known."""
    if source is None:
        return {"source": name}
    said = {key: source.config.get(key) for key in ("architectures", "model_type") if source.config.get(key)}
    return {"source": name, "says": said, "tensors": len(source.shapes)}


def _show(found: dict[str, Any]) -> None:
    from rich.table import Table

    from hf_specgen.cli.session import out

    table = Table(title=found["source"], show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for key in ("layout", "method"):
        if key in found:
            table.add_row(key, found[key])
    if "says" in found:
        table.add_row("config says", ", ".join(f"{key} {value}" for key, value in found["says"].items()) or "nothing")
        table.add_row("tensors", str(found["tensors"]))
    if "parameters" in found:
        table.add_row("parameters", f"{found['parameters']:,}")
        table.add_row("sizes", found["size"])
    for label, key in (("needs", "needs"), ("decided", "notes"), ("warning", "warnings")):
        for line in found.get(key, ()):
            table.add_row(label, line)
    table.add_row("refused" if found["refused"] else "loads", found["refused"] or "yes: hf_specgen.load_drafter")
    out().print(table)
