"""The machine a measurement was made on, and how busy it was meanwhile."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


def describe_machine() -> dict[str, Any]:
    """Return processor, cores, accelerator, threads and versions, ready for JSON."""
    return {
        "cpu": _cpu_name(),
        "cores": _cores(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        "platform": platform.platform(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "transformers", "hf_specgen")},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _cores() -> int:
    # the cores this process may use, where the system says so; a container often has fewer than the machine
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


@dataclass(frozen=True)
class Timing:
    """Hold one timed call. Units: seconds; ``waited`` is the time a thread of ours stood in the queue for a core."""

    wall: float
    waited: float

    @property
    def busy(self) -> float:
        """Return the share of wall time spent waiting for a core, a sign that other programs ran."""
        return self.waited / self.wall if self.wall else 0.0


class Stopwatch:
    """Measure the wall time of a ``with`` block, with the device idle at both ends."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.timing = Timing(0.0, 0.0)

    def __enter__(self) -> Stopwatch:
        self._synchronize()
        self._waited = _queue_seconds()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._synchronize()
        wall = time.perf_counter() - self._start
        self.timing = Timing(wall, max(0.0, _queue_seconds() - self._waited) / torch.get_num_threads())

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def _queue_seconds() -> float:
    """Return how long the threads of this process have waited for a core so far; 0 where the system does not say."""
    total = 0
    for task in Path("/proc/self/task").glob("*/schedstat"):
        try:
            total += int(task.read_text(encoding="ascii").split()[1])
        except (OSError, IndexError, ValueError):
            continue
    return total / 1e9
