"""Report: `hf-specgen --help | head -1` ends in the traceback of a broken pipe."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_specgen.errors import READER_GONE, piped

COMMANDS = [
    ["hf_specgen.cli.main", "--help"],
    ["hf_specgen.cli.main", "bench", "--help"],
    ["hf_specgen.cli.main", "train", "eagle3", "--help"],
    ["hf_specgen.trainers.train", "eagle3", "--help"],
]


def unread(program: list[str]) -> subprocess.CompletedProcess[bytes]:
    """Run a program whose reader has left before the first line."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        return subprocess.run(program, stdout=writing, stderr=subprocess.PIPE, timeout=120, check=False)
    finally:
        os.close(writing)


@pytest.mark.parametrize(
    "command", [COMMANDS[0], *(pytest.param(part, marks=pytest.mark.slow) for part in COMMANDS[1:])]
)
def test_commands_end_without_a_word(command: list[str]) -> None:
    done = unread([sys.executable, "-m", *command])
    assert (done.returncode, done.stderr) == (READER_GONE, b"")


SCRIPT = """
from hf_specgen.errors import piped
with piped():
    print("a line", flush={flush})
"""


@pytest.mark.parametrize("flush", [True, False])
def test_also_what_is_written_at_the_end(flush: bool) -> None:
    done = unread([sys.executable, "-c", SCRIPT.format(flush=flush)])
    assert (done.returncode, done.stderr) == (READER_GONE, b"")
    plain = unread([sys.executable, "-c", "print('a line', flush=True)"])
    assert plain.returncode != READER_GONE and b"BrokenPipeError" in plain.stderr, "this is what is feared"


def test_a_reader_that_stays_gets_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with piped():
        print("a line")
    assert capsys.readouterr().out == "a line\n"
    with pytest.raises(FileNotFoundError), piped():
        (tmp_path / "nothing").read_text()


def test_inside_of_a_command_it_is_no_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken pipe is an error of the system, which commands report as bad input."""
    import typer
    from typer.testing import CliRunner

    from hf_specgen.cli.main import CleanGroup

    app = typer.Typer(cls=CleanGroup, add_completion=False)

    @app.command()
    def one() -> None:
        raise BrokenPipeError

    @app.command()
    def two() -> None:
        raise FileNotFoundError("no such file")

    assert CliRunner().invoke(app, ["one"]).exit_code == READER_GONE
    assert CliRunner().invoke(app, ["two"]).exit_code == 2
