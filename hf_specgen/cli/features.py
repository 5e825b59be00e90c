"""``hf-specgen features``: keep what a target says of a data set, to train on files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hf_specgen.cli import options
from hf_specgen.cli.options import Dtype, Rule
from hf_specgen.errors import SpecGenError

Out = Annotated[Path, typer.Option("--out", help="The folder that is written.", show_default=False)]
Data = Annotated[str, typer.Option("--data", help="A file, a folder, or an id on the Hub.", show_default=False)]
Split = Annotated[str, typer.Option(help="The split of --data.")]
MethodName = Annotated[str, typer.Option("--method", help="What will be trained: a METHOD of hf-specgen train.")]
InitFrom = Annotated[
    str | None, typer.Option("--init-from", help="The drafter that training goes on from, in place of --method.")
]
MaxLength = Annotated[int, typer.Option("--max-length", min=1, help="Tokens of a row; the rest is cut.")]
Packing = Annotated[bool, typer.Option("--packing", help="Put several texts into a row.")]
Turns = Annotated[str, typer.Option(help="Answers of a chat that are supervised: all or last.")]
StoredAs = Annotated[Dtype, typer.Option("--store", help="Number format of the files; auto: the target's.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Rows that the target reads together.")]


def features(  # noqa: PLR0913 - one parameter a flag
    data: Data,
    out: Out,
    target: options.Target = "demo",
    method: MethodName = "eagle3",
    init_from: InitFrom = None,
    split: Split = "train",
    limit: Annotated[int | None, typer.Option(min=1, help="At most that many rows.")] = None,
    max_length: MaxLength = 2048,
    packing: Packing = False,
    turns: Turns = "all",
    chat_template_kwargs: options.TemplateSettings = None,
    strict: options.Strict = False,
    store: StoredAs = Dtype.auto,
    batch_size: BatchSize = 8,
    dtype: options.DtypeName = Dtype.auto,
    device: options.Device = "cpu",
    threads: options.Threads = None,
) -> None:
    """Run the target over texts once and keep its hidden states. `hf-specgen train --features FOLDER` reads them.

    `hf-specgen estimate` tells before how large the folder will be.
    """
    import torch

    from hf_specgen.checkpoints.methods import method_named
    from hf_specgen.cli.session import ModelFlags, open_session, progress_bar, template_settings
    from hf_specgen.trainers import feature_cache as work
    from hf_specgen.trainers.data import DataOptions, load_data, prepare_dataset
    from hf_specgen.trainers.masks import ChatOptions

    if (out / work.MANIFEST).exists():
        raise SpecGenError(f"{out} holds a cache: give another folder, or remove it first.")
    if init_from is None:
        method_named(method)
    template = template_settings(chat_template_kwargs, chat=True)
    session = open_session(ModelFlags(target, "none", Rule.rejection, False, dtype, device, threads))
    words, template = _known(session, data, template)
    wanted = DataOptions(max_length, packing, chat=ChatOptions(turns, chat_template_kwargs=template), strict=strict)
    rows = prepare_dataset(load_data(data, split), session.tokenizer, wanted)
    rows = rows if limit is None else rows.select(range(min(limit, len(rows))))
    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    settings = work.CacheOptions(
        dtype=kinds.get(store.value),
        batch_size=batch_size,
        notes={
            "data": data,
            "authors": words,
            "split": split,
            "max_length": max_length,
            "packing": packing,
            "chat_template_kwargs": template,
        },
    )
    with progress_bar("reading") as progress:
        cache = work.write_cache(out, rows, session.model, _boundaries(session, method, init_from), settings, progress)
    size = sum(path.stat().st_size for path in out.iterdir())
    typer.echo(f"Wrote {len(cache)} rows with {cache.manifest['tokens']:,} tokens to {out}: {size / 1e9:.2f} GB.")


def _known(session: Any, data: str, template: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return who wrote the texts, in words, and what their chat template was told; warn of another target's."""
    from hf_specgen.cli.session import note
    from hf_specgen.models.facts import TargetFacts
    from hf_specgen.trainers.sources import answered, check_template

    texts = answered(data, TargetFacts.of(session.model))
    if texts.warning:
        note(f"warning: {texts.warning}")
    if texts.template is None:
        return texts.words, template
    check_template(data, texts.template, template)
    return texts.words, texts.template


def _boundaries(session: Any, method: str, init_from: str | None) -> tuple[int, ...]:
    from hf_specgen.loading import drafter_class, load_drafter
    from hf_specgen.models.facts import TargetFacts
    from hf_specgen.models.taps import FINAL

    if init_from is not None:
        return tuple(load_drafter(init_from, session.model).hidden_layers)
    fields = drafter_class(method).usual_fields(TargetFacts.of(session.model))
    return tuple(fields.get("aux_layer_boundaries", ())) or (FINAL,)
