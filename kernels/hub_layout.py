"""Lay this folder out as the Hugging Face ``kernels`` library publishes and loads it: ``hub_layout.py FOLDER``.

The kernels are Python and Triton only, so one build a backend serves every version of Python, torch and CUDA. A build
is a package of its own: its public face is our ``ops.py``, and its operators live in a namespace that names the
build, so that it can be loaded beside ``hf_specgen`` and beside other builds.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

__all__ = ["lay_out", "settings"]

_HERE = Path(__file__).resolve().parent
_LEFT_OUT = ("__init__.py", Path(__file__).name, "compile_only.py")  # the stand-in, and programs
# What ties our files to the package they come from, and what stands there in a build.
_TIES = (
    (r"from hf_specgen\.kernels import ", "from . import "),
    (r"from hf_specgen\.kernels\.", "from ."),
    (r"from hf_specgen\.errors import ", "from .errors import "),
    (r'f"hf_specgen\.kernels\.', 'f"{__name__}.'),
    (r"\bhf_specgen::", "{namespace}::"),
    (r"\btorch\.ops\.hf_specgen\b", "torch.ops.{namespace}"),
)
_LEFT_OVER = re.compile(r"^\s*(?:from|import) hf_specgen\b.*|.*\bhf_specgen(?:::|\.kernels).*", re.MULTILINE)
# Before versions of `kernels` looked into the build itself, they looked for a folder of the kernel's name in it.
_ONE_DOWN = '''"""Stand in for the package one folder up, for older versions of the ``kernels`` library."""

import importlib.util
import sys
from pathlib import Path

_NAME = "{namespace}"
if _NAME not in sys.modules:
    _spec = importlib.util.spec_from_file_location(_NAME, Path(__file__).parents[1] / "__init__.py")
    sys.modules[_NAME] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_NAME])
globals().update({{name: vars(sys.modules[_NAME])[name] for name in sys.modules[_NAME].__all__}})
'''
_CARD = """---
library_name: kernels
license: apache-2.0
tags: [kernels, triton, speculative-decoding]
---
# {name}

Verification kernels for speculative decoding, in Triton, with a plain torch definition of each that runs anywhere.

```python
from kernels import get_kernel

kernel = get_kernel("<owner>/{name}", version={version}, trust_remote_code=True)
print(kernel.__all__)
```

Tensors on a GPU are served by Triton, all others by plain torch; `HF_SPECGEN_KERNELS=reference|triton` or
`kernel.use_kernels(...)` decide otherwise. Python 3.10 or newer. Made from the `kernels/` folder of `hf_specgen`.
"""


def settings() -> dict[str, Any]:
    """Read ``build.toml``, whose values are JSON as well as TOML: name, version, license, backends."""
    lines = re.findall(r"^([a-z-]+) = (.+)$", (_HERE / "build.toml").read_text(), re.MULTILINE)
    return {key: json.loads(value) for key, value in lines}


def lay_out(folder: Path) -> list[Path]:
    """Write ``build/torch-<backend>/`` for every backend, and the model card, into ``folder``.

    Returns: the builds' folders. Raises: ``ValueError`` for a source that would still reach into ``hf_specgen``.
    """
    general = settings()
    sources = _sources()
    name = general["name"]
    everything = "\0".join(f"{path}\0{text}" for path, text in sorted(sources.items()))
    unique = hashlib.sha256(everything.encode()).hexdigest()[:7]  # other sources, other operators
    builds = []
    for backend in general["backends"]:
        namespace = f"_{_module(name)}_{backend}_{unique}"
        files = {path: _untied(path, text, namespace) for path, text in sources.items()}
        files[f"{_module(name)}/__init__.py"] = _ONE_DOWN.format(namespace=namespace)
        build = folder / "build" / f"torch-{backend}"
        files["metadata.json"] = json.dumps(_metadata(general, backend, namespace, files), indent=2) + "\n"
        for path, text in files.items():
            (build / path).parent.mkdir(parents=True, exist_ok=True)
            (build / path).write_bytes(text.encode())
        builds.append(build)
    (folder / "README.md").write_text(_CARD.format(name=name, version=general["version"]))
    return builds


def _module(name: str) -> str:
    return name.replace("-", "_")


def _sources() -> dict[str, str]:
    """Read every module of this folder, and of the package the door and the error it raises."""
    package = next(home for home in (_HERE.parent / "hf_specgen", _HERE.parent) if (home / "ops.py").exists())
    found = {path.name: path.read_text() for path in _HERE.glob("*.py") if path.name not in _LEFT_OUT}
    return {**found, "__init__.py": (package / "ops.py").read_text(), "errors.py": (package / "errors.py").read_text()}


def _untied(path: str, text: str, namespace: str) -> str:
    for tie, instead in _TIES:
        text = re.sub(tie, instead.replace("{namespace}", namespace), text)
    left = _LEFT_OVER.search(text)
    if left:
        raise ValueError(
            f"{path} cannot leave the package: {left.group().strip()!r}. Add it to what hub_layout unties."
        )
    return text


def _metadata(general: dict[str, Any], backend: str, namespace: str, files: dict[str, str]) -> dict[str, Any]:
    """Write what the library reads before it loads a build; the module and its operators are named ``id``."""
    digests = {path: hashlib.sha256(text.encode()).digest() for path, text in sorted(files.items())}
    return {
        "name": general["name"],
        "id": namespace,
        "version": general["version"],
        "license": general["license"],
        "python-depends": [],
        "kernel-depends": [],
        "backend": {"type": backend},
        "digest": {
            "algorithm": "sha256",
            "files": {path: base64.b64encode(digest).decode() for path, digest in digests.items()},
        },
    }


if __name__ == "__main__":
    for _build in lay_out(Path(sys.argv[1])):
        print(_build)
