"""The containers that an object keeps alive: those that say how large they may get, and all others."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from functools import _lru_cache_wrapper
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from dbo_runtime.bounded import BoundedDict

_SHARED = (type, ModuleType, FunctionType, BuiltinFunctionType, str, bytes, int, float, type(None))


def list_overfull(root: object) -> list[str]:
    """Return what is larger than it may be, and caches of functions without a bound."""
    found = []
    for path, node in _walk(root):
        most = _get_bound(node)
        if most is not None and len(node) > most:
            found.append(f"{path} has {len(node)} entries, and may have {most}")
        if isinstance(node, _lru_cache_wrapper) and node.cache_info().maxsize is None:
            found.append(f"{path} is a cache without a bound")
    return found


def count_unbounded(root: object) -> dict[str, int]:
    """Return the entries of all containers without a bound, by path; what is in a bounded one is left out."""
    return {
        path: len(node)
        for path, node in _walk(root)
        if isinstance(node, (dict, list, set, deque)) and _get_bound(node) is None
    }


def list_growing(before: Mapping[str, int], after: Mapping[str, int]) -> list[str]:
    """Return the containers without a bound that have more entries than before, or are new."""
    return [f"{path}: {before.get(path, 0)} -> {size}" for path, size in after.items() if size > before.get(path, 0)]


def _get_bound(node: Any) -> int | None:
    if isinstance(node, BoundedDict):
        return node.max_size
    return node.maxlen if isinstance(node, deque) else None


def _walk(root: object) -> Iterator[tuple[str, Any]]:
    """Yield all that *root* keeps alive, each once, with the path to it; nothing that is in a bounded container."""
    seen: set[int] = set()
    todo: list[tuple[str, object]] = [(type(root).__name__, root)]
    while todo:
        path, node = todo.pop()
        if id(node) in seen or isinstance(node, _SHARED):
            continue
        seen.add(id(node))
        yield path, node
        if _get_bound(node) is None:
            todo += _list_parts(path, node)


def _list_parts(path: str, node: Any) -> list[tuple[str, object]]:
    if isinstance(node, Mapping):
        return [(f"{path}[{key!r:.60}]", value) for key, value in node.items()]
    if isinstance(node, (list, tuple, set, frozenset, deque)):
        return [(f"{path}[{number}]", value) for number, value in enumerate(node)]
    if isinstance(node, MethodType):
        return [(path, node.__self__)]
    slots = [name for kind in type(node).__mro__ for name in getattr(kind, "__slots__", ())]
    names = [*getattr(node, "__dict__", ()), *slots]
    return [(f"{path}.{name}", getattr(node, name, None)) for name in names if name != "__weakref__"]
