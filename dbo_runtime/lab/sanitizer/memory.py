"""The memory of values: tensors of any library with torch's methods, alone or in tuples, lists and dicts.

Addresses are compared but never read, so tensors may be on any device.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

_OWN_REFERENCES = (
    3  # references to a tensor that only a slot holds: its container, the local name here, getrefcount's argument
)


class Freed:
    """Replaces a freed value. Anything that an op does with it raises.

    Args:
        what: description of the value, and of the op that freed it.
    """

    def __init__(self, what: str) -> None:
        self.what = what

    def __getattr__(self, name: str) -> Any:
        """Raise: no op may use a freed value."""
        raise AttributeError(f"{self.what}; it has no {name!r} any more")


def list_tensors(value: Any) -> Iterator[Any]:
    """Yield the tensors in a value."""
    if hasattr(value, "untyped_storage"):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from list_tensors(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from list_tensors(item)


def copy_tensors(value: Any) -> list[Any]:
    """Return copies of the tensors in a value."""
    return [tensor.detach().clone() for tensor in list_tensors(value)]


class Change(NamedTuple):
    """Whether tensors differ bit for bit from earlier copies, as scalars on their devices."""

    flags: list[Any]

    def __bool__(self) -> bool:
        """Wait for the devices, and return whether any tensor differs."""
        return any(bool(flag) for flag in self.flags)


def find_change(value: Any, copies: list[Any]) -> Change:
    """Compare the tensors in a value with copies of them. NaN equals NaN. Does not wait for a device."""
    flags = []
    for tensor, copy in zip(list_tensors(value), copies, strict=True):
        differs = tensor != copy
        if tensor.is_floating_point():
            differs = differs & ~((tensor != tensor) & (copy != copy))  # only NaN differs from itself
        flags.append(differs.any())
    return Change(flags)


def share_memory(one: Any, other: Any) -> bool:
    """Return whether a tensor in one value has an element at the address of an element in the other."""
    theirs = [_describe(tensor) for tensor in list_tensors(other) if tensor.numel()]
    return any(
        np.shares_memory(_describe(tensor), layout)
        for tensor in list_tensors(one)
        if tensor.numel()
        for layout in theirs
    )


def poison(holder: list[Any]) -> None:
    """Fill the tensors of a value with NaN if only the single item of *holder* refers to them.

    Other tensors stay: memory that a module also keeps is not freed. Integers stay, too: as indices, other values could
    make a kernel read anywhere.
    """
    (value,) = holder
    if not hasattr(value, "untyped_storage") or not value.is_floating_point() or not value.numel():
        return
    users = _count_users(value)
    is_alone = users is not None and users == _count_users(value.new_empty(1))
    if is_alone and sys.getrefcount(value) <= _OWN_REFERENCES:
        value.fill_(float("nan"))


def _count_users(tensor: Any) -> tuple[int, int] | None:
    """Return the number of references to a tensor's storage, in Python and in all; None if torch does not tell."""
    count = getattr(getattr(sys.modules.get("torch"), "_C", None), "_storage_Use_Count", None)
    storage = tensor.untyped_storage()  # the same object as long as a reference is kept
    return None if count is None else (sys.getrefcount(storage), int(count(storage._cdata)))


def _describe(tensor: Any) -> Any:
    """Return a NumPy array at the same addresses. Only addresses are used, so the memory may be on a device."""
    size = tensor.element_size()

    class Layout:
        __array_interface__ = {  # noqa: RUF012 - it is read once
            "data": (tensor.data_ptr(), True),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "typestr": f"|V{size}",
            "version": 3,
        }

    return np.asarray(Layout())
