"""The loop that docs/architecture.md prints is the loop that runs, but for its clock."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_of(source: str) -> ast.FunctionDef:
    """Return the loop of a source text."""
    functions = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))
    return next(function for function in functions if function.name == "_run")


def without_clock(statements: list[ast.stmt]) -> list[ast.stmt]:
    """Return statements with the bodies of ``with stats.timed(...)`` in their place."""
    plain: list[ast.stmt] = []
    for statement in statements:
        if isinstance(statement, ast.With):
            assert ast.unparse(statement.items[0]).startswith("stats.timed(")
            plain += without_clock(statement.body)
            continue
        if isinstance(statement, ast.While):
            statement.body = without_clock(statement.body)
        plain.append(statement)
    return plain


def lines(function: ast.FunctionDef) -> list[str]:
    """Return a loop as text: names of its arguments, then its statements without docstring, types and clock."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    arguments = [argument.arg for argument in function.args.args]
    return [", ".join(arguments), *(ast.unparse(statement) for statement in without_clock(body))]


def test_the_printed_loop_is_the_real_one() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    printed = next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def _run(" in block)
    real = (ROOT / "hf_specgen" / "generate.py").read_text()
    assert lines(run_of(printed)) == lines(run_of(real))


def test_a_changed_loop_is_noticed() -> None:
    real = (ROOT / "hf_specgen" / "generate.py").read_text()
    changed = real.replace("session.observe(round)", "pass")
    assert lines(run_of(changed)) != lines(run_of(real))
