"""``hf-specgen train``: a drafter for your own model."""

from __future__ import annotations

from typing import Annotated, Any

import typer

Method = Annotated[str, typer.Argument(help="medusa, eagle, eagle3 or distill.", show_default=False)]
_DEMO_LICENSE = "apache-2.0"


def train(context: typer.Context, method: Method = "--help") -> None:
    """Train a drafter: hf-specgen train eagle3 --target T --data FILE --output FOLDER.

    Arguments are those of transformers' TrainingArguments and of the method; hf-specgen train eagle3 --help lists them.
    Several processes: accelerate launch -m hf_specgen.trainers.train eagle3 ...
    """
    from hf_specgen.cli.session import note
    from hf_specgen.errors import SpecGenError
    from hf_specgen.measure.demo import DEMO, DEMO_HUB_ID, load_target

    try:
        from hf_specgen.trainers import train as work
    except ImportError as error:
        raise SpecGenError(
            f"training needs {error.name}, which is not installed. Run: pip install {error.name}"
        ) from None

    def load(name: str, dtype: Any) -> tuple[Any, Any]:
        if name == DEMO:
            return load_target(name, None if dtype == "auto" else dtype, say=note)
        return work.open_target(name, dtype)

    work.main([method, *context.args], load, {DEMO: (DEMO_HUB_ID, _DEMO_LICENSE)})
