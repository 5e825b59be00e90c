"""Files of long runs: one process writes them at a time, and what is small is there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from hf_specgen.errors import SpecGenError, reason_of


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Keep other processes from writing ``path`` meanwhile; the system ends that when a process dies.

    Raises: ``SpecGenError`` when another process writes it, and where it cannot be written.
    """
    lock = FileLock(path.with_name(f".{path.name}.lock"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise SpecGenError(f"{path} is being written by another process: wait for it, or give another name.") from error
    except OSError as error:
        raise SpecGenError(f"{path} cannot be written: {reason_of(error)}. Give another name.") from error
    try:
        yield
    finally:
        lock.release()


def write_whole(path: Path, text: str) -> None:
    """Write a small file so that it is never seen in part, whatever happens meanwhile."""
    part = path.with_name(f"{path.name}.part")
    with writing(path):
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)


def append(path: Path, data: bytes) -> None:
    """Write behind a file's end, past Python's buffers: what failed to be written is not tried again at the end."""
    with writing(path), path.open("ab", buffering=0) as file:
        left = memoryview(data)
        while left:
            left = left[file.write(left) or 0 :]


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an error of the disk into one message. Raises: ``SpecGenError``."""
    try:
        yield
    except OSError as error:
        raise SpecGenError(
            f"{path} cannot be written: {reason_of(error)}. What was finished before is kept: make room, and start the "
            "same command again."
        ) from error
