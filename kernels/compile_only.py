"""Compile every Triton kernel of this folder without a GPU, and show what each one takes of a processor.

Run ``python kernels/compile_only.py [--targets sm_80,sm_90,gfx942] [--only TEXT] [--markdown FILE] [--json FILE]``.
It ends with exit code 1 where a kernel does not compile, spills more than a few registers to memory, or asks for more
shared memory than the processor has. Whatever was compiled before is read from a cache folder.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["Compiled", "compile_all", "list_variants", "main", "markdown"]

_HERE = Path(__file__).resolve().parent
_FORMAT = 2  # of a cache entry
# Shared memory that one program may ask for, bytes.
_SHARED = {"sm_80": 166_912, "sm_90": 232_448, "gfx942": 65_536}
# Sizes that are multiples of 16 for every model with a padded vocabulary and heads of 16 channels or more; with
# --unaligned these, too, are compiled as any number.
_ALIGNED = re.compile(r"stride|vocab|q_vocab|width|\w+_stride|[qkv]_(?:row|head|step)")
_INTEGER = re.compile(r"[iu]\d+")


@dataclass(frozen=True)
class CompileJob:
    """Name one compilation: the kernel's module, the place in its list, the target."""

    module: str
    place: int
    name: str
    target: str
    aligned: bool = True
    max_registers: int | None = None


FEW_SPILLS = 16
"""How many spills are no fault: compilers differ by a few (Triton 3.6 spills 2 to 9 in six variants, 3.9 none)."""


@dataclass(frozen=True)
class Compiled:
    """Hold what one kernel takes on one target.

    Units: ``registers`` and ``scalars`` (AMD's SGPRs) a thread; ``spills``: load and store instructions of spilled
    registers (NVIDIA), spilled vector registers (AMD); ``scalar_spills``: scalar registers kept in lanes of vector
    registers, which costs no memory access; ``stack``, ``shared``: bytes.
    """

    kernel: str
    target: str
    warps: int
    registers: int = 0
    scalars: int = 0
    spills: int = 0
    scalar_spills: int = 0
    stack: int = 0
    shared: int = 0
    seconds: float = 0.0
    error: str = ""

    @property
    def fault(self) -> str:
        """Say what is wrong with it, if anything."""
        if self.error:
            return self.error
        if self.spills > FEW_SPILLS:
            return f"spills registers ({self.spills}; {self.stack} bytes of stack)"
        limit = _SHARED.get(self.target, self.shared)
        return f"asks for {self.shared} bytes of shared memory, {limit} are there" if self.shared > limit else ""


@cache
def _package() -> str:
    """Make this folder importable as a package of its own, whoever ships it: its modules import one another.

    They register the package's operators once more, so this process must run none of them.
    """
    name = "_kernels_to_compile"
    package = ModuleType(name)
    package.__path__ = [str(_HERE)]
    sys.modules[name] = package
    return name


@cache
def _variants(module: str) -> list[tuple[str, Any, dict[str, str], dict[str, Any], int]]:
    found = importlib.import_module(f"{_package()}.{module}").variants()
    return list(found)


def list_variants(only: Sequence[str] = ()) -> list[tuple[str, int, str]]:
    """List ``(module, place, name)`` of every kernel whose name contains one of ``only``."""
    found = []
    for path in sorted(_HERE.glob("triton_*.py")):
        if "def variants(" in path.read_text():
            named = enumerate(_variants(path.stem))
            found += [(path.stem, place, one[0]) for place, one in named if not only or any(o in one[0] for o in only)]
    return found


def compile_all(
    jobs: Sequence[CompileJob], workers: int, folder: Path | None = None
) -> Iterator[tuple[CompileJob, Compiled, bool]]:
    """Compile side by side, each in the first free process; yield every result and whether the cache had it."""
    if workers <= 1:
        yield from ((job, *_compile_cached(job, folder)) for job in jobs)
        return
    # a fresh process each: LLVM and the interpreter's switch do not survive a fork
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(_compile_cached, job, folder): job for job in jobs}
        try:
            for done in as_completed(waiting):
                yield (waiting[done], *done.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _compile_cached(job: CompileJob, folder: Path | None) -> tuple[Compiled, bool]:
    """Compile one kernel, or read what the same sources, compiler and options gave before."""
    source, options = _source(job)
    if folder is None:
        return _compile(job, source, options), False
    import triton

    about = (_FORMAT, triton.__version__, source.hash(), job.target, sorted(options.items()))
    path = folder / f"{hashlib.sha256(repr(about).encode()).hexdigest()[:32]}.json"
    try:
        return replace(Compiled(**json.loads(path.read_text())), kernel=job.name), True
    except (OSError, ValueError, TypeError):
        compiled = _compile(job, source, options)
        if not compiled.error:
            _write(path, json.dumps(asdict(compiled)))
        return compiled, False


def _source(job: CompileJob) -> tuple[Any, dict[str, Any]]:
    """Describe a kernel as its launch does: pointers to 16 bytes, and sizes that are multiples of 16 where they are."""
    from triton.compiler import ASTSource

    _, kernel, types, constants, warps = _variants(job.module)[job.place]
    missing = [name for name in kernel.arg_names if name not in constants and name not in types]
    if missing:
        raise ValueError(f"{job.module}.variants(): {job.name!r} gives no type for {', '.join(missing)}.")
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    sixteen = {}
    for parameter in kernel.params:
        kind = signature[parameter.name]
        size = _INTEGER.fullmatch(kind) and _ALIGNED.fullmatch(parameter.name) and not parameter.do_not_specialize
        if kind.startswith("*") or (size and job.aligned):
            sixteen[(parameter.num,)] = [["tt.divisibility", 16]]
    used = {name: value for name, value in constants.items() if name in signature}
    options: dict[str, Any] = {"num_warps": warps, "enable_fp_fusion": False}
    if job.max_registers and job.target.startswith("sm_"):
        options["maxnreg"] = job.max_registers
    return ASTSource(kernel, signature, used, sixteen), options


def _compile(job: CompileJob, source: Any, options: dict[str, Any]) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget

    nvidia = job.target.startswith("sm_")
    target = GPUTarget("cuda", int(job.target[3:]), 32) if nvidia else GPUTarget("hip", job.target, 64)
    begin = time.perf_counter()
    empty = Compiled(job.name, job.target, options["num_warps"])
    try:
        binary = triton.compile(source, target=target, options=options)
    except Exception as error:  # a compiler's own failure is a result, too: the other kernels are still to come
        return replace(empty, error=f"does not compile: {' '.join(str(error).split())[-500:]}")
    found: dict[str, Any] = _read_cubin(binary.asm["cubin"]) if nvidia else _read_assembly(binary.asm["amdgcn"])
    seconds = round(time.perf_counter() - begin, 2)
    return replace(empty, shared=int(binary.metadata.shared), seconds=seconds, **found)


def _read_cubin(cubin: bytes) -> dict[str, int]:
    """Read registers and stack from a binary, and count the instructions that touch what was spilled."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = _run("cuobjdump", "--dump-resource-usage", str(path))
        registers, stack, local = (int(re.findall(rf"\b{key}:(\d+)", usage)[-1]) for key in ("REG", "STACK", "LOCAL"))
        spills = len(re.findall(r"\b(?:LDL|STL)\b", _run("nvdisasm", "-c", str(path)))) if stack or local else 0
    return {"registers": registers, "stack": stack + local, "spills": spills}


def _run(tool: str, *arguments: str) -> str:
    found = find_spec("triton")
    assert found is not None and found.origin is not None
    path = Path(found.origin).parent / "backends" / "nvidia" / "bin" / tool
    return subprocess.run([path, *arguments], check=True, capture_output=True, text=True).stdout


def _read_assembly(text: str) -> dict[str, int]:
    """Read what AMD's assembler notes about a kernel."""
    keys = {
        "registers": "vgpr_count",
        "scalars": "sgpr_count",
        "spills": "vgpr_spill_count",
        "scalar_spills": "sgpr_spill_count",
        "stack": "private_segment_fixed_size",
    }
    return {name: int(re.findall(rf"\.{key}:\s*(\d+)", text)[-1]) for name, key in keys.items()}


def markdown(compiled: Iterable[Compiled], brief: bool = False) -> str:
    """Write a table: a row a kernel, a column a target; ``brief`` keeps the largest number of each group of kernels."""
    head, rows = _table(list(compiled), brief)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _table(compiled: list[Compiled], brief: bool) -> tuple[list[str], list[list[str]]]:
    targets = list(dict.fromkeys(one.target for one in compiled))
    groups: dict[str, dict[str, list[Compiled]]] = {}
    for one in compiled:
        group = groups.setdefault(_group(one.kernel) if brief else one.kernel, {})
        group.setdefault(one.target, []).append(one)
    rows = []
    for name, cells in groups.items():
        each = [one for found in cells.values() for one in found]
        count = len({one.kernel for one in each})
        warps = "/".join(map(str, sorted({one.warps for one in each})))
        rows.append(
            [f"{name} ({count})" if brief else name, warps, *(_cell(cells.get(target, [])) for target in targets)]
        )
    return ["kernel", "warps", *targets], rows


def _group(name: str) -> str:
    """Name the group of a kernel: its name without the dtype, of attention also without sizes and kind of head."""
    name = re.sub(r",? (?:bf16|bfloat16|fp16|float16|fp32|float32)\b", "", name)
    return re.sub(r"^(tree_attention)(?! combine).*", r"\1", name)


def _cell(found: list[Compiled]) -> str:
    """Show the largest of each number: registers / spills / shared bytes; on AMD vector+scalar registers and spills."""
    if not found or any(one.error for one in found):
        return "error" if found else ""
    most = {name: max(vars(one)[name] for one in found) for name in ("registers", "scalars", "spills", "shared")}
    scalar_spills = max(one.scalar_spills for one in found)
    if most["scalars"]:
        return f"{most['registers']}+{most['scalars']} / {most['spills']}+{scalar_spills} / {most['shared']}"
    return f"{most['registers']} / {most['spills']} / {most['shared']}"


def _show(compiled: list[Compiled], brief: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    head, rows = _table(compiled, brief)
    table = Table(title="registers / spills / shared bytes (AMD: vector+scalar)")
    for place, title in enumerate(head):
        table.add_column(title, justify="right" if place else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _write(path: Path, text: str) -> None:
    """Write at once or not at all: two runs may share a folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, suffix=".part") as file:
        file.write(text)
    Path(file.name).replace(path)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_specgen" / "compiled"
    parser.add_argument("--targets", default="sm_80,sm_90,gfx942", help="sm_<number> or gfx<number>, with commas")
    parser.add_argument("--only", default="", help="kernels whose names contain this; several texts with commas")
    parser.add_argument("--unaligned", action="store_true", help="as for vocabularies that are no multiple of 16")
    parser.add_argument("--brief", action="store_true", help="one row a group of kernels, with its largest numbers")
    parser.add_argument("--markdown", nargs="?", const="-", help="print the table as Markdown, or write it to a file")
    parser.add_argument("--json", metavar="FILE", help="write every number")
    parser.add_argument("--workers", type=int, default=_cores(), help="processes side by side")
    parser.add_argument("--cache", metavar="FOLDER", type=Path, default=caches, help="what was compiled before")
    parser.add_argument("--no-cache", action="store_true", help="compile everything again")
    parser.add_argument("--max-registers", type=int, help="allow no more on NVIDIA targets: shows what would spill")
    return parser.parse_args(arguments)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; return its exit code."""
    options = _options(arguments)
    os.environ.pop("TRITON_INTERPRET", None)  # before any kernel is defined, and in the processes that compile
    targets = options.targets.split(",")
    wrong = [target for target in targets if not re.fullmatch(r"sm_\d+|gfx[0-9a-f]+", target)]
    found = [] if wrong else list_variants([text for text in options.only.split(",") if text])
    if not found:
        what = f"unknown target {', '.join(wrong)}" if wrong else f"no kernel's name contains {options.only!r}"
        print(f"compile_only: {what}", file=sys.stderr)
        return 2
    jobs = [
        CompileJob(*variant, target, not options.unaligned, options.max_registers)
        for variant in found
        for target in targets
    ]
    done = _gather(jobs, options.workers, None if options.no_cache else options.cache)
    ordered = [done[job] for job in jobs if job in done]
    if options.markdown:
        text = markdown(ordered, options.brief)
        print(text, end="") if options.markdown == "-" else _write(Path(options.markdown), text)
    else:
        _show(ordered, options.brief)
    if options.json:
        _write(Path(options.json), json.dumps([asdict(one) for one in ordered], indent=1) + "\n")
    faults = [one for one in ordered if one.fault]
    for one in faults:
        print(f"{one.kernel} on {one.target}: {one.fault}", file=sys.stderr)
    little = sum(0 < one.spills <= FEW_SPILLS for one in ordered)
    spilled = sum(one.scalar_spills > 0 for one in ordered)
    print(f"{len(ordered)} of {len(jobs)} compiled, {len(faults)} at fault", end="", file=sys.stderr)
    print(f"; {little} spill up to {FEW_SPILLS} registers" if little else "", end="", file=sys.stderr)
    print(f"; {spilled} keep scalar registers in vector lanes" if spilled else "", file=sys.stderr)
    return 1 if faults else 130 if len(ordered) < len(jobs) else 0


def _gather(jobs: list[CompileJob], workers: int, folder: Path | None) -> dict[CompileJob, Compiled]:
    """Collect the results, with a line of progress; what is there when the user interrupts is kept."""
    done: dict[CompileJob, Compiled] = {}
    known = 0
    try:
        for job, compiled, cached in compile_all(jobs, min(workers, len(jobs)), folder):
            done[job] = compiled
            known += cached
            if sys.stderr.isatty() or len(done) % 50 == 0:
                end = "\r" if sys.stderr.isatty() else "\n"
                print(f"{len(done)} of {len(jobs)} compiled ({known} from the cache)", end=end, file=sys.stderr)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    return done


if __name__ == "__main__":
    sys.exit(main())
