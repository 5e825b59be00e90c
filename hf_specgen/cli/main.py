"""The ``hf-specgen`` program: commands, one clean message for every error, exit codes.

Exit codes: 0 fine, 1 a check failed, 2 bad input, 130 interrupted, 141 nobody reads the output any more. torch is
imported by the commands and not here, so that ``--help`` is quick and the thread settings are made before torch reads
them.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from hf_specgen.cli.bench import bench
from hf_specgen.cli.card import card
from hf_specgen.cli.convert import convert
from hf_specgen.cli.estimate import estimate
from hf_specgen.cli.features import features
from hf_specgen.cli.generate import generate
from hf_specgen.cli.inspect import inspect
from hf_specgen.cli.regenerate import regenerate
from hf_specgen.cli.train import train
from hf_specgen.cli.verify import verify
from hf_specgen.errors import SpecGenError, piped

BAD_INPUT = 2
INTERRUPTED = 130


class CleanGroup(TyperGroup):
    """Turn errors that the user can mend into one message instead of a traceback."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Read the arguments; help is printed here."""
        with piped():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with piped():
            return self._invoke(ctx)

    def _invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except (SpecGenError, OSError) as error:
            typer.secho(f"Error: {error}", fg="red", err=True)
            raise typer.Exit(BAD_INPUT) from None
        except KeyboardInterrupt:
            typer.echo("Interrupted.", err=True)
            raise typer.Exit(INTERRUPTED) from None


class App(typer.Typer):
    """Make the thread settings before the program starts."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program."""
        wait_passively()
        return super().__call__(*args, **kwargs)


def wait_passively() -> None:
    """Set OMP_WAIT_POLICY=passive unless the user chose; threads that spin stall a shared machine.

    OpenMP reads it once, when torch is loaded: if that has happened, start the program anew.
    """
    if "OMP_WAIT_POLICY" in os.environ:
        return
    os.environ["OMP_WAIT_POLICY"] = "passive"
    if "torch" in sys.modules and sys.platform != "win32":
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


app = App(
    cls=CleanGroup,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Speculative decoding inside Hugging Face generate(): several tokens a pass, the same text.",
)
app.command()(generate)
app.command()(bench)
app.command()(verify)
app.command()(inspect)
app.command()(convert)
app.command()(card)
app.command()(regenerate)
# its arguments are those of a dataclass of transformers: they are parsed there
app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(train)
app.command()(estimate)
app.command()(features)

if __name__ == "__main__":
    app()
