"""``hf-specgen card``: the model card of a drafter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_specgen.errors import SpecGenError, reason_of

Folder = Annotated[Path, typer.Argument(help="The drafter's folder.", show_default=False)]
Bench = Annotated[
    list[Path] | None, typer.Option("--bench", help="report.json of `hf-specgen bench --out`; may be given repeatedly.")
]
Name = Annotated[str, typer.Option("--name", help="The repository it will live in, owner/name.  [default: the folder]")]
BaseModel = Annotated[str, typer.Option("--base-model", help="The target on the Hub.  [default: as config.json says]")]
License = Annotated[str, typer.Option("--license", help="The license of the weights, such as apache-2.0.")]
Datasets = Annotated[list[str] | None, typer.Option("--dataset", help="A data set on the Hub; may be repeated.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite a README.md.")]


def card(
    folder: Folder,
    bench: Bench = None,
    name: Name = "",
    base_model: BaseModel = "",
    license_name: License = "",
    datasets: Datasets = None,
    force: Force = False,
) -> None:
    """Write README.md from a drafter's config.json and measurements. What was not measured is left out."""
    from hf_specgen.checkpoints.card import CardOptions, write_card

    if not folder.is_dir():
        raise SpecGenError(f"{folder} is no folder: give the one that save_pretrained or convert wrote.")
    reports = tuple(_read(path) for path in bench or ())
    chosen = CardOptions(name, base_model, license_name, tuple(datasets or ()), reports)
    typer.echo(f"Wrote {write_card(folder, chosen, overwrite=force)}")


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SpecGenError(
            f"{path} is no JSON: {reason_of(error)}. The report.json of `hf-specgen bench` is required."
        ) from error
    if not isinstance(found, dict):
        raise SpecGenError(f"{path} holds no report: the report.json of `hf-specgen bench` is required.")
    return found
