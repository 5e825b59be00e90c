"""State: what the user's objects keep between calls. Copy it, mark it, and find what no copy has of its own."""

from __future__ import annotations

import copy
import dis
import logging
import sys
import threading
from collections import ChainMap, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import CellType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, cast

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

_ATOMS = (int, str, bytes, float, complex, type(None), type, ModuleType)
_CONTAINERS = (dict, list, tuple, deque, set, frozenset)
# Never what a processor or criterion keeps: what it reads, and its lines to other threads. They are shared, not copied.
_LINES = (threading.Event, type(threading.Lock()), type(threading.RLock()), logging.Logger)
_SHARED = (PreTrainedTokenizerBase, Tokenizer, PreTrainedModel, *_LINES)
_LARGE = 5_000  # parts; their copy takes some ten milliseconds
_NUMBERS_A_PART = 256  # of a tensor
_LIBRARIES = sys.stdlib_module_names | {"torch", "transformers", "tokenizers", "numpy", "hf_specgen"}
_UNSEEN = (MemberDescriptorType, ModuleType, type)  # of a class: slots are read off the object


class State:
    """Copy and mark a list of the user's objects, which may share what they keep.

    Containers and tensors of many parts (a trie, an embedding) are taken for tables: copies share them, and
    ``tables_mark`` tells whether they stayed the same. ``places`` are what copies share in any case.
    """

    def __init__(self, values: list[Any]) -> None:
        self.places = _places(values)
        self._tables = _large_parts([*values, *(place.value for place in self.places)], {id(value) for value in values})
        self._shared = _reach(self._tables)

    @property
    def has_tables(self) -> bool:
        """Tell whether copies share tables."""
        return bool(self._tables)

    def share_nothing(self) -> None:
        """Take nothing for a table."""
        self._tables = []
        self._shared = {}

    def copy(self, values: list[Any]) -> list[Any]:
        """Copy objects deeply, with the variables that functions close over, which deepcopy would share."""
        memo = cast(dict[int, Any], ChainMap({}, self._shared))  # the tables' many parts are not listed anew
        cells: dict[int, CellType] = {}
        twins: list[tuple[FunctionType, FunctionType]] = []
        for part in _reach(values, self._shared).values():
            if isinstance(part, _SHARED):
                memo[id(part)] = part
            elif isinstance(part, FunctionType) and _keeps(part):
                memo[id(part)] = twin = _twin(part, cells)
                twins.append((part, twin))
        for part, twin in twins:
            twin.__defaults__ = copy.deepcopy(part.__defaults__, memo)
            twin.__kwdefaults__ = copy.deepcopy(part.__kwdefaults__, memo)
            twin.__dict__.update(copy.deepcopy(part.__dict__, memo))
            for old, new in zip(part.__closure__ or (), twin.__closure__ or (), strict=True):
                with suppress(ValueError):  # a variable that nothing was assigned to yet
                    new.cell_contents = copy.deepcopy(old.cell_contents, memo)
        return copy.deepcopy(values, memo)

    def note_shared(self, values: list[Any], copies: list[Any]) -> None:
        """Add what a copy has in common with its original to the places: deepcopy, or the object, shares it."""
        for part in common_parts(values, copies, self._shared):
            self.places.append(Place(f"a {type(part).__name__} that its copies share", part, {"": part}, ""))

    def mark(self, values: list[Any]) -> Any:
        """Return plain data that differs once anything that the objects keep has changed; tables are left out."""
        return _Reader(self._shared).read(values)

    def place_marks(self, tables_too: bool = False) -> list[Any]:
        """Mark what no copy has of its own, in the order of ``places``."""
        shared = {} if tables_too else self._shared
        return [_Reader(shared, blind=True).read(place.value) for place in self.places]

    def moved_places(self, before: list[Any], now: list[Any]) -> list[str]:
        """Name the places whose marks differ; several may have one name."""
        marks = zip(self.places, before, now, strict=True)
        return list(dict.fromkeys(place.name for place, old, new in marks if old != new))

    def tables_mark(self) -> Any:
        """Mark the tables."""
        return [
            (table.data_ptr(), table._version) if isinstance(table, Tensor) else _Reader({}, blind=True).read(table)
            for table in self._tables
        ]


def _keeps(function: FunctionType) -> bool:
    return bool(function.__closure__ or function.__defaults__ or function.__kwdefaults__ or function.__dict__)


def _twin(function: FunctionType, cells: dict[int, CellType]) -> FunctionType:
    """Make the same function over empty variables; functions that share one share it again."""
    own = tuple(cells.setdefault(id(cell), CellType()) for cell in function.__closure__ or ())
    twin = FunctionType(function.__code__, function.__globals__, function.__name__, None, own)
    twin.__qualname__ = function.__qualname__
    twin.__module__ = function.__module__
    return twin


class _Reader:
    """Turn values into plain data that differs once anything they hold has changed.

    ``shared`` values are left out. What cannot be looked into never equals itself, and always does if ``blind``.
    """

    def __init__(self, shared: Mapping[int, Any], blind: bool = False) -> None:
        self._shared = shared
        self._blind = blind
        self._seen: dict[int, int] = {}
        self._held: list[Any] = []  # what is made on the way: no identity may return

    def read(self, value: Any) -> Any:
        """Return the plain data of one value."""
        if isinstance(value, int | str | bytes | None | type | ModuleType):
            return value
        if isinstance(value, float | complex):
            return repr(value)  # NaN equals itself
        if id(value) in self._shared or isinstance(value, _SHARED):
            return type(value), id(value)
        if id(value) in self._seen:
            return type(value), self._seen[id(value)]  # which of those met before: a pointer may have moved
        self._seen[id(value)] = len(self._seen)
        self._held.append(value)
        if isinstance(value, Tensor):
            return self._tensor(value)
        if type(value) in _CONTAINERS:
            return self._contents(value)
        parts = _parts(value)
        if parts is None:
            return type(value) if self._blind else object()
        contents = self._contents(value) if isinstance(value, _CONTAINERS) else None
        return type(value), contents, [self.read(part) for part in parts]

    def _contents(self, value: Any) -> Any:
        if isinstance(value, dict):
            return [(key, self.read(item)) for key, item in value.items()]
        return frozenset(value) if isinstance(value, set | frozenset) else [self.read(item) for item in value]

    def _tensor(self, value: Tensor) -> Any:
        try:
            flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            return tuple(value.shape), value.dtype, hash(flat.numpy().tobytes())
        except (RuntimeError, TypeError, NotImplementedError):  # a packed or meta tensor
            return type(value) if self._blind else object()


def _parts(value: Any) -> list[Any] | None:
    """Return all that an object keeps beside a container's items: attributes, slots, closed-over variables.

    Of built-in types what pickle would keep; None where nothing can be known.
    """
    if isinstance(value, FunctionType):
        return [*_closed_over(value), value.__defaults__, value.__kwdefaults__, *value.__dict__.values()]
    if isinstance(value, MethodType):
        return [value.__self__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, property):
        return [value.fget, value.fset, value.fdel]
    parts: list[Any] = []
    known = False
    try:
        attributes = vars(value)
        parts += [*attributes, *attributes.values()]
        known = True
    except TypeError:
        with suppress(Exception):
            parts += [list(part) if isinstance(part, Iterator) else part for part in value.__reduce_ex__(2)[1:]]
            known = True
    members = [vars(kind).values() for kind in type(value).__mro__ if "__slots__" in vars(kind)]
    for member in chain.from_iterable(members):
        if isinstance(member, MemberDescriptorType):
            known = True
            with suppress(AttributeError):
                parts.append(member.__get__(value, type(value)))
    return parts if known else None


def _closed_over(function: FunctionType) -> list[Any]:
    found = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # a variable that nothing was assigned to yet
            found.append(cell.cell_contents)
    return found


def _inside(value: Any) -> list[Any]:
    """Return what a value holds directly."""
    if isinstance(value, (*_ATOMS, *_SHARED, Tensor)):
        return []
    if type(value) is dict:
        return [*value.keys(), *value.values()]
    if type(value) in _CONTAINERS:
        return list(value)
    items = [*value] if isinstance(value, _CONTAINERS) else []
    items += value.values() if isinstance(value, dict) else []
    return items + (_parts(value) or [])


def _reach(values: Iterable[Any], without: Mapping[int, Any] | None = None) -> dict[int, Any]:
    """Return all that values hold, themselves included, by identity; numbers and strings are left out."""
    found: dict[int, Any] = {}
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if isinstance(value, _ATOMS) or id(value) in found or (without is not None and id(value) in without):
            continue
        found[id(value)] = value
        waiting.extend(_inside(value))
    return found


def common_parts(values: list[Any], others: list[Any], without: Mapping[int, Any] | None = None) -> list[Any]:
    """Return what both hold and may be written to."""
    held = _reach(others, without)
    parts = [part for part in _reach(values, without).values() if id(part) in held]
    return [part for part in parts if isinstance(part, dict | list | set | deque | Tensor) or _inside(part)]


def _large_parts(values: list[Any], roots: set[int]) -> list[Any]:
    """Return the innermost containers and tensors of more than ``_LARGE`` parts; none where one leads to a root."""
    order: list[Any] = [values]
    above = [-1]
    size = [1]
    largest = [0]  # part of a value
    seen = {id(values)}
    waiting = [(value, 0) for value in values]
    while waiting:
        value, parent = waiting.pop()
        if isinstance(value, _ATOMS):
            size[parent] += 1
        elif id(value) not in seen:
            seen.add(id(value))
            waiting.extend((part, len(order)) for part in _inside(value))
            order.append(value)
            above.append(parent)
            size.append(1 + (value.numel() // _NUMBERS_A_PART if isinstance(value, Tensor) else 0))
            largest.append(0)
    for place in range(len(order) - 1, 0, -1):  # parts stand behind what holds them
        size[above[place]] += size[place]
        largest[above[place]] = max(largest[above[place]], size[place])
    measured = zip(order[1:], size[1:], largest[1:], strict=True)
    large = [value for value, parts, within in measured if parts > _LARGE >= within]
    tables = [value for value in large if type(value) in _CONTAINERS or isinstance(value, Tensor)]
    return tables if roots.isdisjoint(_reach(tables)) else []


@dataclass(frozen=True)
class Place:
    """Name what the user's code may write to and no copy of an object holds: a global, a class's attribute."""

    name: str
    owner: Any
    namespace: Mapping[str, Any]
    key: str

    @property
    def value(self) -> Any:
        """Return what stands there now, None before anything does."""
        found = self.namespace.get(self.key)
        return found.__func__ if isinstance(found, classmethod | staticmethod) else found


def _places(values: list[Any]) -> list[Place]:
    """Find the attributes of the objects' classes and the globals that their code names, as far as the user's own."""
    found: dict[tuple[int, str], Place] = {}
    own = _packages_of(values)
    waiting = list(_reach(values).values())
    seen: dict[int, Any] = {}
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, _SHARED):
            continue
        seen[id(value)] = value
        if isinstance(value, MethodType):
            waiting.append(value.__func__)
        if isinstance(value, FunctionType):
            places = list(_globals_of(value, own))
        else:
            places = list(_attributes_of(value if isinstance(value, type) else type(value), own))
        waiting.extend(part for part in _inside(value) if isinstance(part, type))  # no copy has a class of its own
        for place in places:
            if found.setdefault((id(place.owner), place.key), place) is place:
                waiting.extend(_reach([place.value]).values())
                waiting.extend([place.value] if isinstance(place.value, type) else [])
    return list(found.values())


def _globals_of(function: FunctionType, own: set[str]) -> Iterator[Place]:
    """Name the globals that a function of the user's reads or writes, and what it reads of the user's own modules."""
    if not _is_users(function.__module__, own):
        return
    namespace = function.__globals__
    codes = [function.__code__]
    for code in codes:
        codes.extend(inner for inner in code.co_consts if isinstance(inner, CodeType))
    attributes = {name for code in codes for name in code.co_names}
    steps = chain.from_iterable(map(dis.get_instructions, codes))
    named = sorted({(step.opname, step.argval) for step in steps if step.opname.endswith(("_GLOBAL", "IMPORT_NAME"))})
    modules: dict[str, ModuleType] = {}
    for kind, name in named:
        value = namespace.get(name) if kind != "IMPORT_NAME" else sys.modules.get(name)
        if isinstance(value, ModuleType):
            modules[value.__name__] = value
        elif kind != "IMPORT_NAME":
            yield Place(f"the global {name}", namespace, namespace, name)
    for module in modules.values():
        yield from _names_in(module, attributes, own, set())


def _names_in(module: ModuleType, attributes: set[str], own: set[str], seen: set[str]) -> Iterator[Place]:
    """Name what code with such attributes may read of a module of the user's, and of modules that it names there."""
    if module.__name__ in seen or not _is_users(module.__name__, own):
        return
    seen.add(module.__name__)
    for key in sorted(attributes & vars(module).keys()):
        value = vars(module)[key]
        if isinstance(value, ModuleType):
            yield from _names_in(value, attributes, own, seen)
        else:
            yield Place(f"{module.__name__}.{key}", vars(module), vars(module), key)


def _attributes_of(kind: type, own: set[str]) -> Iterator[Place]:
    """Name what the user's classes keep, functions included: their defaults and attributes."""
    for owner in kind.__mro__:
        if not _is_users(owner.__module__, own):
            continue
        for key, value in vars(owner).items():
            is_code = isinstance(value, FunctionType | classmethod | staticmethod)
            if is_code or not (key.startswith(("__", "_abc_")) or isinstance(value, _UNSEEN)):
                yield Place(f"{owner.__qualname__}.{key}", owner, vars(owner), key)


def _packages_of(values: list[Any]) -> set[str]:
    """Name the packages that the objects themselves, and what they hold directly, come from."""
    parts = [*values, *chain.from_iterable(map(_inside, values))]
    homes = [part.__module__ if isinstance(part, FunctionType) else type(part).__module__ for part in parts]
    return {str(home).partition(".")[0] for home in homes}


def _is_users(module: str | None, own: set[str]) -> bool:
    """Tell whether code is the user's: not of a library, nor installed, unless the objects come from that package.

    Installed packages that the user's code merely calls keep caches and counters of their own.
    """
    package = "" if module is None else module.partition(".")[0]
    if package in _LIBRARIES or not package:
        return False
    home = sys.modules.get(cast(str, module))
    place = "" if home is None else str(vars(home).get("__file__"))
    return package in own or not ("site-packages" in place or "dist-packages" in place)
