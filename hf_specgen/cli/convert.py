"""``hf-specgen convert``: from one checkpoint layout to another."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_specgen.cli import options
from hf_specgen.cli.inspect import read_facts
from hf_specgen.cli.options import OutLayout
from hf_specgen.errors import IncompatibleDrafter, SpecGenError

if TYPE_CHECKING:
    from hf_specgen.checkpoints.formats.base import Checkpoint

OutFolder = Annotated[Path, typer.Argument(help="The folder that is written.", show_default=False)]
To = Annotated[OutLayout, typer.Option("--to", help="The layout that is written.")]
Size = Annotated[
    int | None,
    typer.Option("--draft-vocab-size", min=1, help="Draft only that many ids, the ones most frequent in --data."),
]
Answers = Annotated[str | None, typer.Option("--data", help="Answers of the target: a file, folder or Hub data set.")]
Split = Annotated[str, typer.Option(help="Which part of a Hub data set.")]
TargetName = Annotated[
    str | None,
    typer.Option(
        "--target", help="The model it drafts for: its depth settles open layers, its tokenizer reads --data."
    ),
]
Force = Annotated[
    bool,
    typer.Option("--force", help="Replace the checkpoint in a folder that is not empty; its other files stay."),
]


def convert(  # noqa: PLR0913 - one parameter a flag
    checkpoint: options.CheckpointName,
    folder: OutFolder,
    to: To = OutLayout.specgen,
    target: TargetName = None,
    draft_vocab_size: Size = None,
    data: Answers = None,
    split: Split = "train",
    chat_template_kwargs: options.TemplateSettings = None,
    aux_layer_convention: options.AuxLayers = None,
    revision: options.Revision = None,
    force: Force = False,
) -> None:
    """Write a drafter in another layout, or with a shorter draft vocabulary, which drafts faster.

    Every tensor is accounted for; the folder is complete or untouched.
    """
    from hf_specgen.chats import read_settings
    from hf_specgen.checkpoints.formats.base import ReadOptions, layout_named
    from hf_specgen.checkpoints.opening import open_checkpoint
    from hf_specgen.cli.shortlist import Counted, with_fewer_ids
    from hf_specgen.drafting.learned import check_fit

    check_replaceable(folder, force)
    template = read_settings(chat_template_kwargs, "--chat-template-kwargs")
    facts = read_facts(target)
    opened = open_checkpoint(
        checkpoint, ReadOptions(facts, options.convention(aux_layer_convention)), {"revision": revision}
    )
    if target is not None:
        check_fit(opened.config, facts)
    found = opened.read()
    if draft_vocab_size is not None:
        found = with_fewer_ids(found, draft_vocab_size, Counted(data, split, target, template))
    elif data is not None or chat_template_kwargs is not None:
        raise SpecGenError(
            "--data and its template are for --draft-vocab-size N: say how many ids are kept, or leave it out."
        )
    layout = layout_named(to.value)
    found = with_lent(found, layout.borrowed(found.config), target)
    with replaced(folder) as fresh:
        layout.write(found, fresh)
    _tell(found, folder, to.value)


def with_lent(found: Checkpoint, wanted: tuple[str, ...], target: str | None) -> Checkpoint:
    """Return a checkpoint beside those of the target's matrices that the layout's readers expect in the file.

    Without ``--target`` the target is the one that the drafter names, if its files can be had: the layout says what
    follows where they cannot.
    """
    from hf_specgen.checkpoints.formats.lent import is_made_for, lent_by
    from hf_specgen.checkpoints.opening import open_source
    from hf_specgen.cli.session import note

    name = target or str(found.config.target.get("name") or "")
    if not wanted or not name:
        return found
    try:
        source = open_source(name)
        lent = lent_by(source, found.config, wanted)
        same = is_made_for(source, found.config)
        if not same and target is None:  # a name tells less than a flag: another model may have it by now, or here
            raise IncompatibleDrafter("what is called so here is not the target that the drafter was made for.")
    except SpecGenError as error:
        if target is not None:
            raise
        note(f"{', '.join(wanted)} of {name} cannot be written too: {error}")
        return found
    if not same:
        note(f"warning: {name} is not the target that the drafter was made for: fewer drafts may be accepted.")
    note(f"{', '.join(wanted)}: written too, as {name} has it")
    return replace(found, lent=lent)


def check_replaceable(folder: Path, force: bool) -> None:
    """Refuse to write into a folder that holds something. Raises: ``SpecGenError``."""
    if folder.exists() and not folder.is_dir():
        raise SpecGenError(f"{folder} is a file: give the name of a folder.")
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not force:
        raise SpecGenError(f"{folder} is not empty: give another folder, or --force to replace the checkpoint in it.")
    if not (folder / "config.json").is_file():
        raise SpecGenError(f"{folder} holds no config.json, so it is no checkpoint to replace: give another folder.")


@contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """Yield a fresh folder beside ``folder`` that takes its place when the block ends well, and goes otherwise.

    Files of the old one that are neither config nor weights stay.
    """
    from hf_specgen.checkpoints.files import is_weights

    place = folder.resolve()
    place.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
    fresh = beside / "new"
    old = beside / "old"
    try:
        fresh.mkdir()
        yield fresh
        if place.exists():
            for entry in place.iterdir():
                if entry.name != "config.json" and not is_weights(entry.name) and not (fresh / entry.name).exists():
                    _copy(entry, fresh / entry.name)
            os.replace(place, old)
        os.replace(fresh, place)
    finally:
        if old.exists() and not place.exists():
            os.replace(old, place)
        shutil.rmtree(beside, ignore_errors=True)


def _copy(source: Path, place: Path) -> None:
    if source.is_dir() and not source.is_symlink():
        shutil.copytree(source, place, symlinks=True)
    else:
        shutil.copy2(source, place, follow_symlinks=False)


def _tell(found: Checkpoint, folder: Path, layout: str) -> None:
    from hf_specgen.cli.session import note

    for line in (*found.notes, *(f"warning: {text}" for text in found.warnings)):
        note(line)
    typer.echo(f"{folder}: {layout}, from {found.layout}, {len(found.tensors)} tensors")
