"""How adapters are found, as entry points of installed packages, and checked against their contract."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

from dbo_runtime.adapter import EncoderAdapter, InputAdapter, ModelAdapter, locate_source
from dbo_runtime.errors import ProgramError

GROUP = "dbo_runtime.adapters"
ENCODERS = "dbo_runtime.encoders"


def get_adapter(architecture: str) -> ModelAdapter | None:
    """Return the adapter registered for an architecture name, or None if there is none.

    Adapters are entry points of the group `dbo_runtime.adapters`, named like the architecture, that load to a class.

    Raises:
        ProgramError: if the one registered cannot be loaded or is no adapter.
    """
    entry = _get_entry(GROUP, architecture)
    return None if entry is None else cast(ModelAdapter, _load(entry, ModelAdapter))


def get_encoder_adapter(name: str) -> EncoderAdapter | None:
    """Return the adapter registered for encoders of a class of this name, or None if there is none.

    As `get_adapter`, in the group `dbo_runtime.encoders`.
    """
    entry = _get_entry(ENCODERS, name)
    return None if entry is None else cast(EncoderAdapter, _load(entry, EncoderAdapter))


def list_encoders() -> set[str]:
    """Return the class names of the encoders that have an adapter."""
    return {entry.name for entry in entry_points(group=ENCODERS)}


def check_adapter(cls: Any, origin: str, contract: type = ModelAdapter) -> Any:
    """Return an instance of an adapter class after checking it against the contract.

    Raises:
        ProgramError: naming the method that is missing or takes other arguments, and where it is declared.
    """
    if not inspect.isclass(cls):
        raise ProgramError(f"adapter {origin} must be a class, not {cls!r}.")
    needed = _list_methods(contract)
    offered = {name: method for name, method in _list_methods(InputAdapter).items() if _find(cls, name) is not None}
    for name, method in {**needed, **offered}.items():
        declared = _find(cls, name)
        if not callable(declared):
            raise ProgramError(f"adapter {origin} has no method {name}(). ({locate_source(cls)})")
        expected = list(inspect.signature(method).parameters)
        actual = _list_parameters(declared)
        if actual != expected:
            raise ProgramError(
                f"adapter {origin}: {name}({', '.join(actual)}) must take ({', '.join(expected)}). "
                f"({locate_source(declared)})"
            )
    try:
        adapter = cls()
    except Exception as error:
        raise ProgramError(
            f"adapter {origin} cannot be made by {cls.__name__}(): {error!r}. ({locate_source(cls)})"
        ) from error
    return adapter


def _find(cls: type, name: str) -> Any:
    """Return an attribute of an adapter's class, without running what the class has to say about it; None without."""
    return inspect.getattr_static(cls, name, None)


def _list_parameters(method: Any) -> list[str]:
    """Return the names of what a method takes; none if it does not say, as those that are written in C."""
    try:
        return list(inspect.signature(method).parameters)
    except (TypeError, ValueError):
        return []


def _get_entry(group: str, name: str) -> EntryPoint | None:
    entries = [entry for entry in entry_points(group=group) if entry.name == name]
    if len({entry.value for entry in entries}) > 1:
        names = ", ".join(sorted(entry.value for entry in entries))
        raise ProgramError(f"{name} has several adapters ({names}); uninstall all but one.")
    return entries[0] if entries else None


def _list_methods(contract: type) -> dict[str, Callable[..., Any]]:
    return {name: method for name, method in vars(contract).items() if inspect.isfunction(method) and name[0] != "_"}


def _load(entry: EntryPoint, contract: type) -> Any:
    try:
        cls = entry.load()
    except Exception as error:
        raise ProgramError(f"adapter {entry.value} of {entry.name} cannot be imported: {error!r}") from error
    return check_adapter(cls, entry.value, contract)
