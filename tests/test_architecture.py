"""Enforce docs/architecture.md: files, budgets, words, and imports that run one way.

Each check is a function from sources to complaints. It runs on the tree, where it must find nothing, and on a small
bad source, where it must find something.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.xdist_group("architecture")  # one worker parses the tree
PACKAGE = ("hf_specgen/", "kernels/", "trainers/")
CODE = (*PACKAGE, "tests/", "examples/")

# Left imports nothing from the right: folders of hf_specgen, and the files beside them. Inside a folder no import may
# close a circle. `__init__` is the package's public face.
ORDER = """kernels < errors < ops < chats < round < models < calls < checkpoints < drafting < drafters
< loading < generate < entry < stock < measure < trainers < __init__ < bench < cli"""
RANK = {name: rank for rank, name in enumerate(re.findall(r"\w+", ORDER))}

FILE_LINES = 600
FUNCTION_LINES = 60
EXAMPLE_LINES = 60
CORE_LINES = 1_250  # one sitting
CORE = ("generate", "round/records", "models/target", "models/slot_cache", "round/verify")

MOVING_PARTS = {"cache_utils", "masking_utils", "modeling_utils"}
MOVING_KEYWORDS = {"past_key_values", "cache_position"}
FORWARD_KEYWORDS = {*MOVING_KEYWORDS, "cache", "attention_mask"}
MOVING_PARTS_ALLOWED = {
    "hf_specgen/generate.py",
    "hf_specgen/calls/requests.py",
    "hf_specgen/drafting/drafter.py",
    "hf_specgen/drafting/layers.py",
    "hf_specgen/models/cache_layers.py",
    "hf_specgen/models/cached_model.py",
    "hf_specgen/models/layer_kinds.py",
    "hf_specgen/models/prompt.py",
    "hf_specgen/models/slot_cache.py",
}

BANNED_WORDS = {"verifier", "assistant", "speculator", "posterior", "engine", "manager", "provider", "strategy"}
TRANSFORMERS_NAMES = {
    "assistant_confidence_threshold",
    "assistant_early_exit",
    "assistant_lookbehind",
    "assistant_model",
    "assistant_tokenizer",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "update_candidate_strategy",
} | {"hub_strategy"}
MUTATORS = {"add", "append", "clear", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update"}
CONTAINERS = {"list", "dict", "set", "bytearray", "defaultdict", "deque", "Counter", "OrderedDict", "WeakSet"} | {
    "WeakKeyDictionary",
    "WeakValueDictionary",
}
# Notes about a model that may not live on it: pickle, deepcopy and save_pretrained must see the model unchanged.
NOTES_BESIDE_MODELS = {("hf_specgen/generate.py", "_LAST"), ("hf_specgen/models/selfcheck.py", "_PASSED")}

TOP_LEVEL = {"hf_specgen", "kernels", "trainers", "tests", "model_cards", "examples", "docs"}
BUILD_LEFTOVERS = re.compile(r"build|dist|out|runs|__pycache__|.*\.egg-info")
# Written in pieces: this file is read by its own check.
OUTSIDE = re.compile(r"(?<![\w.])/(?:" + "|".join(("root", "work", "opt", "home")) + r")/|(?<![\w-])share" + "d/")

Sources = dict[str, str]
Check = Callable[[Sources], list[str]]


@functools.cache
def read_tree() -> Sources:
    paths = (path for folder in CODE for path in sorted((ROOT / folder).rglob("*.py")))
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}


parse = functools.cache(ast.parse)
walk = functools.cache(lambda tree: tuple(ast.walk(tree)))


@pytest.fixture(scope="module", autouse=True)
def forget() -> Iterator[None]:
    yield
    parse.cache_clear()
    walk.cache_clear()


def parsed(sources: Sources, folders: tuple[str, ...]) -> Iterator[tuple[str, ast.Module]]:
    return ((path, parse(text, path)) for path, text in sources.items() if path.startswith(folders))


def module_of(path: str) -> list[str]:
    parts = path.removesuffix(".py").removesuffix("/__init__").split("/")
    return parts if parts[0] == "hf_specgen" else ["hf_specgen", *parts]


def imports(path: str, tree: ast.Module) -> Iterator[tuple[int, list[str]]]:
    """Yield line and dotted parts of every imported name, also inside functions, relative ones resolved."""
    package = module_of(path) if path.endswith("/__init__.py") else module_of(path)[:-1]
    for node in walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            yield from ((node.lineno, [*base, alias.name]) for alias in node.names)


def component(module: list[str]) -> str:
    return module[1] if len(module) > 1 and module[1] in RANK else "__init__"


def wrong_imports(sources: Sources) -> list[str]:
    found = []
    for path, tree in parsed(sources, PACKAGE):
        here = module_of(path)
        if len(here) > 1 and here[1] not in RANK:
            found.append(f"{path}: no place in the import order")
            continue
        for line, module in imports(path, tree):
            if module[0] != "hf_specgen":
                continue
            if RANK[component(module)] > RANK[component(here)]:
                found.append(f"{path}:{line}: {component(here)} imports {component(module)}")
            if component(module) == "kernels" and component(here) not in ("kernels", "ops"):
                found.append(f"{path}:{line}: only ops.py imports hf_specgen.kernels")
    return found


def circles(sources: Sources) -> list[str]:
    """Find files that import each other, directly or through others."""
    files = {".".join(module_of(path)): path for path in sources if path.startswith(PACKAGE)}
    needs: dict[str, set[str]] = {name: set() for name in files}
    for path, tree in parsed(sources, PACKAGE):
        here = ".".join(module_of(path))
        for _, module in imports(path, tree):
            names = (".".join(module), ".".join(module[:-1]))
            needs[here].update(name for name in names if name in files and name not in (here, "hf_specgen"))
    while free := {name for name, needed in needs.items() if not needed}:
        needs = {name: needed - free for name, needed in needs.items() if name not in free}
    return [f"{files[name]}: imports itself by way of {', '.join(sorted(needed))}" for name, needed in needs.items()]


def wrong_neighbours(sources: Sources) -> list[str]:
    """A drafter imports no other drafter, nor what runs the target; a trainer imports no other method's trainer."""
    methods = {"medusa", "eagle", "eagle3", "distill"}
    found = []
    for path, tree in parsed(sources, PACKAGE):
        here = module_of(path)
        kind = component(here)
        for line, module in imports(path, tree):
            if module[0] != "hf_specgen" or len(here) < 3:
                continue
            others = len(module) > 2 and component(module) == kind and module[2] != here[2]
            if kind == "drafters" and (module[1:3] == ["models", "target"] or component(module) == "generate"):
                found.append(f"{path}:{line}: imports {'.'.join(module)}")
            elif kind == "drafters" and others and module[2] != "prompt_lookup":  # with_lookup stands on it
                found.append(f"{path}:{line}: imports {'.'.join(module)}")
            elif kind == "trainers" and others and here[2] in methods and module[2] in methods:
                found.append(f"{path}:{line}: imports {'.'.join(module)}")
    return found


def clocks_outside_bench(sources: Sources) -> list[str]:
    """`bench.dev` is in no wheel: only tests that `.ci/run` does not ask of the installed package may import it."""
    return [
        f"{path}:{line}: imports {'.'.join(module)}"
        for path, tree in parsed(sources, ("tests/",))
        if not path.startswith("tests/bench/") and path != "tests/test_gpu.py"
        for line, module in imports(path, tree)
        if module[:3] == ["hf_specgen", "bench", "dev"]
    ]


def stray_triton(sources: Sources) -> list[str]:
    return [
        f"{path}:{line}: Triton outside kernels/"
        for path, tree in parsed(sources, PACKAGE)
        if not path.startswith("kernels/")
        for line, module in imports(path, tree)
        if module[0] == "triton"
    ]


def stray_moving_parts(sources: Sources) -> list[str]:
    found = []
    for path, tree in parsed(sources, PACKAGE):
        if path in MOVING_PARTS_ALLOWED:
            continue
        for line, module in imports(path, tree):
            moving = MOVING_PARTS.intersection(module) or module[-1].endswith("Cache")
            if module[0] == "transformers" and moving:
                found.append(f"{path}:{line}: names {'.'.join(module)}")
        for call in (node for node in walk(tree) if isinstance(node, ast.Call)):
            is_forward = isinstance(call.func, ast.Attribute) and call.func.attr == "forward"
            keywords = {keyword.arg for keyword in call.keywords}
            if keywords & (FORWARD_KEYWORDS if is_forward else MOVING_KEYWORDS):
                found.append(f"{path}:{call.lineno}: names a keyword of the model's forward")
    return found


def too_long(sources: Sources) -> list[str]:
    found = []
    for path, tree in parsed(sources, CODE):
        length = len(sources[path].splitlines())
        if length > (EXAMPLE_LINES if path.startswith("examples/") else FILE_LINES):
            found.append(f"{path}: {length} lines")
        for node in walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            is_kernel = path.startswith("kernels/") and any("jit" in ast.unparse(d) for d in node.decorator_list)
            if (node.end_lineno or 0) - node.lineno >= FUNCTION_LINES and not is_kernel:
                found.append(f"{path}:{node.lineno}: {node.name} has more than {FUNCTION_LINES} lines")
    return found


def core_too_long(sources: Sources) -> list[str]:
    total = sum(len(sources.get(f"hf_specgen/{name}.py", "").splitlines()) for name in CORE)
    return [f"{', '.join(CORE)}: {total} lines"] if total > CORE_LINES else []


def read_names(node: ast.expr) -> set[str]:
    """Return what an expression reads, or what a target is, as text."""
    return {ast.unparse(part) for part in ast.walk(node) if isinstance(part, ast.Name | ast.Attribute | ast.Subscript)}


def belong_together(targets: list[ast.expr], values: list[ast.expr]) -> bool:
    """Tell whether values are assigned at once for a reason: one reads another target, or fields are copied."""
    fields = zip(targets, values, strict=False)
    if all(isinstance(to, ast.Attribute) and ast.unparse(to).split(".")[-1] in read_names(of) for to, of in fields):
        return True
    later = (value for place, _ in enumerate(targets) for value in values[place + 1 :])
    written = {ast.unparse(target) for target in targets} | {ast.unparse(t).split("[")[0] for t in targets}
    return any(written & read_names(value) for value in later)


def packed(sources: Sources) -> list[str]:
    """Find ``a, b = x, y`` where the two have nothing to do with each other."""
    found = []
    for path, tree in parsed(sources, PACKAGE):
        for node in walk(tree):
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
                continue
            targets = node.targets[0].elts if isinstance(node.targets[0], ast.Tuple) else []
            starred = any(isinstance(part, ast.Starred) for part in (*targets, *node.value.elts))
            if targets and not starred and not belong_together(targets, node.value.elts):
                found.append(f"{path}:{node.lineno}: unrelated values are assigned in one statement")
    return found


def probing(sources: Sources) -> list[str]:
    return [
        f"{path}:{node.lineno}: {node.func.id}()"
        for path, tree in parsed(sources, PACKAGE)
        for node in walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr")
    ]


def is_container(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).split(".")[-1] in CONTAINERS
    return isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)


def mutated_names(tree: ast.Module) -> set[str]:
    changed: list[ast.expr] = []
    for node in walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            changed.append(node.value)
        elif isinstance(node, ast.AugAssign):
            changed.append(node.target)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            changed.append(node.func.value)
    return {node.id for node in changed if isinstance(node, ast.Name)}


def module_state(sources: Sources) -> list[str]:
    """Find ``global`` and module-level containers that are not constants: ALL_CAPS and never changed."""
    found = []
    for path, tree in parsed(sources, PACKAGE):
        found += [f"{path}:{node.lineno}: global" for node in walk(tree) if isinstance(node, ast.Global)]
        mutated = mutated_names(tree)
        for node in tree.body:
            if not isinstance(node, ast.Assign | ast.AnnAssign) or not is_container(node.value):
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            found += [
                f"{path}:{node.lineno}: {name} is mutable module state"
                for name in names
                if name in mutated or not (name.isupper() or name.startswith("__"))
                if (path, name) not in NOTES_BESIDE_MODELS
            ]
    return found


def defined_names(path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    yield 0, Path(path).stem
    for node in walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.alias) and node.asname:
            yield node.lineno, node.asname


def banned_words(sources: Sources) -> list[str]:
    found = []
    for path, tree in parsed(sources, CODE):
        for line, name in defined_names(path, tree):
            words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)
            singular = {word.lower().removesuffix("s") for word in words}
            if singular & BANNED_WORDS and name not in TRANSFORMERS_NAMES:
                found.append(f"{path}:{line}: {name}")
    return found


# Check name -> the check and sources it must complain about, one complaint or more each.
CHECKS: dict[str, tuple[Check, list[Sources]]] = {
    "imports": (
        wrong_imports,
        [
            {"hf_specgen/ops.py": "from hf_specgen.models.target import Target"},
            {"hf_specgen/ops.py": "import hf_specgen"},
            {"hf_specgen/round/verify.py": "def f():\n    from ..models import slot_cache"},
            {"hf_specgen/round/warp.py": "from ..kernels.reference import warp"},
            {"hf_specgen/drafting/drafter.py": "from ..kernels import reference"},
            {"kernels/reference.py": "from hf_specgen.errors import SpecGenError"},
            {"hf_specgen/utils.py": ""},
        ],
    ),
    "circles": (
        circles,
        [
            {
                "hf_specgen/round/coins.py": "from . import costs",
                "hf_specgen/round/costs.py": "from .coins import toss",
            },
            {
                "hf_specgen/round/coins.py": "from hf_specgen.round.costs import Costs",
                "hf_specgen/round/costs.py": "def f():\n    import hf_specgen.round.stats",
                "hf_specgen/round/stats.py": "from hf_specgen.round import coins",
            },
        ],
    ),
    "neighbours": (
        wrong_neighbours,
        [
            {"hf_specgen/drafters/eagle.py": "from hf_specgen.drafters.medusa import Medusa"},
            {"hf_specgen/drafters/eagle.py": "from . import medusa"},
            {"hf_specgen/drafters/eagle.py": "from hf_specgen.models.target import Target"},
            {"trainers/eagle.py": "from hf_specgen.trainers.medusa import MedusaTrainer"},
        ],
    ),
    "clocks": (
        clocks_outside_bench,
        [
            {"tests/round/test_verify.py": "from hf_specgen.bench.dev.kernel_bytes import Shape"},
            {"tests/test_ops.py": "def f():\n    from hf_specgen.bench import dev"},
        ],
    ),
    "triton": (stray_triton, [{"hf_specgen/ops.py": "def f():\n    import triton.language as tl"}]),
    "moving parts": (
        stray_moving_parts,
        [
            {"hf_specgen/round/sequences.py": "from transformers.cache_utils import DynamicCache"},
            {"hf_specgen/round/sequences.py": "from transformers import StaticCache"},
            {"hf_specgen/round/verify.py": "import transformers.masking_utils as masks"},
            {"hf_specgen/drafters/eagle.py": "model(ids, past_key_values=cache)"},
            {"hf_specgen/drafters/eagle.py": "model.forward(ids, attention_mask=mask)"},
        ],
    ),
    "length": (
        too_long,
        [
            {"hf_specgen/ops.py": "x = 1\n" * (FILE_LINES + 1)},
            {"tests/test_ops.py": "x = 1\n" * (FILE_LINES + 1)},
            {"examples/chat.py": "x = 1\n" * (EXAMPLE_LINES + 1)},
            {"kernels/common.py": "def f():\n" + "    x = 1\n" * FUNCTION_LINES},
            {"hf_specgen/ops.py": "@jit\ndef f():\n" + "    x = 1\n" * FUNCTION_LINES},
        ],
    ),
    "core length": (core_too_long, [{f"hf_specgen/{name}.py": "x = 1\n" * (CORE_LINES // 5 + 1) for name in CORE}]),
    "packed assignments": (packed, [{"hf_specgen/ops.py": "a, b = x, y"}, {"trainers/base.py": "a, b.c = f(x), g(y)"}]),
    "probing": (probing, [{"trainers/base.py": "getattr(x, 'y', None)"}, {"kernels/common.py": "hasattr(x, 'y')"}]),
    "module state": (
        module_state,
        [
            {"hf_specgen/ops.py": "def f():\n    global x\n    x = 1"},
            {"hf_specgen/ops.py": "cache = {}"},
            {"hf_specgen/ops.py": "seen: set[int] = set()"},
            {"hf_specgen/ops.py": "SEEN = []\ndef f(x):\n    SEEN.append(x)"},
            {"hf_specgen/ops.py": "STATS = weakref.WeakKeyDictionary()\ndef f(x):\n    STATS[x] = 1"},
            {"hf_specgen/generate.py": "_OTHER: WeakSet[int] = WeakSet()\ndef f(x):\n    _OTHER.add(x)"},
        ],
    ),
    "words": (
        banned_words,
        [
            {"hf_specgen/ops.py": "class CacheManager: ..."},
            {"hf_specgen/ops.py": "def f(assistant): ..."},
            {"tests/test_ops.py": "num_verifiers = 1"},
            {"hf_specgen/drafters/engine.py": ""},
            {"hf_specgen/ops.py": "self.posterior_alpha = 1"},
        ],
    ),
}
BAD = [
    pytest.param(check, bad, id=f"{name} {number}")
    for name, (check, sources) in CHECKS.items()
    for number, bad in enumerate(sources)
]


@pytest.mark.parametrize("name", CHECKS)
def test_the_tree_passes(name: str) -> None:
    complaints = CHECKS[name][0](read_tree())
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize(("check", "bad"), BAD)
def test_a_bad_source_is_caught(check: Check, bad: Sources) -> None:
    assert check(bad)


def test_good_sources_pass() -> None:
    good = {
        "hf_specgen/ops.py": "from hf_specgen.kernels import reference\nfrom . import errors\nNAMES = {'a': 1}",
        "hf_specgen/models/slot_cache.py": "from transformers.cache_utils import Cache\nfrom .taps import Taps",
        "hf_specgen/drafters/eagle.py": "from ..drafting.drafter import Drafter\nfrom ..errors import SpecGenError",
        "hf_specgen/cli/main.py": "import hf_specgen\nfrom contextlib import AbstractContextManager",
        "kernels/tree.py": "import triton\n@triton.jit\ndef f():\n" + "    x = 1\n" * FUNCTION_LINES,
        "hf_specgen/generate.py": "def generate(assistant_model=None): ...",
        "hf_specgen/round/costs.py": "a, b = b, a + 1\nself.x, self.y = x, y or x",
    }
    assert [complaint for check, _ in CHECKS.values() for complaint in check(good)] == []


def layout(root: Path) -> list[str]:
    bare = ("kernels", "trainers", "tests")
    found = [f"{name} takes no __init__.py" for name in bare if any(root.glob(f"{name}/**/__init__.py"))]
    for name in ("kernels", "trainers"):
        inside = [path.name for path in (root / "hf_specgen" / name).iterdir() if path.name != "__pycache__"]
        if inside != ["__init__.py"]:
            found.append(f"hf_specgen/{name} is a stand-in: __init__.py alone, not {inside}")
    folders = {path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")}
    extra = {name for name in folders - TOP_LEVEL if not BUILD_LEFTOVERS.fullmatch(name)}
    return found + [f"unexpected folder {name}" for name in sorted(extra)]


def test_layout(tmp_path: Path) -> None:
    assert layout(ROOT) == []
    for name in ("kernels", "trainers", "hf_specgen/kernels", "hf_specgen/trainers", "utils"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / "hf_specgen" / "kernels" / "common.py").touch()
    assert len(layout(tmp_path)) == 4  # two __init__.py, a stand-in with more inside, a folder nobody agreed on


def outside_paths(text: str) -> list[str]:
    return [line for line in text.splitlines() if OUTSIDE.search(line)]


def test_no_file_points_outside_the_project() -> None:
    tracked = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in (*TOP_LEVEL, ".ci"):
        tracked += [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    suffixes = {".py", ".md", ".toml", ".txt", ".yml", ".jinja", ".json", ".jsonl", ""}
    texts = {path: path.read_text(errors="replace") for path in tracked if path.suffix in suffixes}
    assert {path.name: lines for path, text in texts.items() if (lines := outside_paths(text))} == {}
    for bad in ("see ../share" + "d/notes.md", "share" + "d/data", "/ro" + "ot/venv/bin", "open('/wor" + "k/x')"):
        assert outside_paths(bad), bad


# Records who asks for Triton; torch and transformers may, the package may not.
PROBE = """
import sys
asked = []
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "triton":
            frame = sys._getframe(1)
            while "importlib" in frame.f_code.co_filename:
                frame = frame.f_back
            asked.append(frame.f_code.co_filename)
sys.meta_path.insert(0, Watch())
import {package}
print([name for name in asked if name.startswith({folders})])
"""


def triton_requests(package: str, folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    folders = tuple(f"{folder / name}/" for name in (package, "kernels", "trainers"))
    command = [sys.executable, "-c", PROBE.format(package=package, folders=folders)]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.strip()


def test_import_leaves_triton_alone(tmp_path: Path) -> None:
    assert triton_requests("hf_specgen", ROOT) == "[]"
    (tmp_path / "eager").mkdir()
    (tmp_path / "eager" / "__init__.py").write_text("try:\n    import triton\nexcept ImportError: ...\n")
    assert "eager" in triton_requests("eager", tmp_path)
