"""Set pytest up: one thread a worker, no network, the same random numbers on every run."""

from __future__ import annotations

import json
import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy
import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
if not torch.cuda.is_available():  # before any kernel is defined
    os.environ.setdefault("TRITON_INTERPRET", "1")
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the ``gpu`` tests where there is no accelerator, whatever was selected."""
    if torch.accelerator.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no accelerator"))


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Start every test from the same random state, so that no test depends on the ones before it."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Refuse every connection that leaves the machine; a test that needs one would pass here and fail elsewhere."""
    connect = socket.socket.connect

    def local_only(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise OSError(f"tests run without a network; asked for {address!r}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", local_only)
    yield


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a target and 30 texts that it wrote behind four random tokens each."""
    from tiny import plain, tiny

    folder = tmp_path_factory.mktemp("train")
    model = tiny(layers=3)
    model.save_pretrained(folder / "target")
    prompts = torch.randint(1, 64, (30, 4), generator=torch.Generator().manual_seed(1))
    texts = plain(model, prompts, max_new_tokens=12).tolist()
    rows = [{"prompt": text[:4], "answer": text[4:]} for text in texts]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
