"""Every public name is documented: itself, and what it offers in public."""

from __future__ import annotations

import inspect
import pydoc
from collections.abc import Iterator

import pytest

import hf_specgen

NAMES = sorted(name for name in hf_specgen.__all__ if not name.startswith("__"))


def parts(name: str, item: object) -> Iterator[tuple[str, object]]:
    """Yield a public name and, of a class of ours, the public methods and properties that it defines itself."""
    yield name, item
    if not inspect.isclass(item):
        return
    for member, value in vars(item).items():
        is_callable = inspect.isfunction(value) or isinstance(value, property | classmethod | staticmethod)
        if not member.startswith("_") and is_callable:
            yield f"{name}.{member}", value


def undocumented(name: str, item: object) -> list[str]:
    return [part for part, value in parts(name, item) if not (inspect.getdoc(value) or "").strip()]


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_is_documented(name: str) -> None:
    item = getattr(hf_specgen, name)
    assert undocumented(name, item) == []
    sentence = (inspect.getdoc(item) or "").split("\n\n")[0]
    assert sentence.split("\n")[-1].rstrip().endswith((".", ":")), "the first paragraph is whole sentences"
    assert len(pydoc.plain(pydoc.render_doc(item)).splitlines()) > 3


def test_a_name_without_words_is_caught() -> None:
    class Mute:
        """Say nothing in its method."""

        def method(self) -> None: ...

    assert undocumented("Mute", Mute) == ["Mute.method"]
    assert undocumented("function", lambda: None) == ["function"]
