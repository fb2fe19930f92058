"""The memory of values: tensors of any library that has torch's methods, alone or in tuples, lists and dicts.

Addresses are compared and never read, so tensors may be on any device.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

_OWN_REFERENCES = (
    3  # to a tensor that only a slot holds: its container, the local name here, and getrefcount's argument
)


class Freed:
    """Takes the place of a value that was freed: whatever an op does with it raises.

    Args:
        what: names the value, and what freed it.
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
    """Whether tensors differ bit for bit from copies made before, as scalars of their devices."""

    flags: list[Any]

    def __bool__(self) -> bool:
        """Wait for the devices, and return whether any differs."""
        return any(bool(flag) for flag in self.flags)


def find_change(value: Any, copies: list[Any]) -> Change:
    """Compare the tensors in a value with copies of them. NaN is the same as NaN. Does not wait for a device."""
    flags = []
    for tensor, copy in zip(list_tensors(value), copies, strict=True):
        differs = tensor != copy
        if tensor.is_floating_point():
            differs = differs & ~((tensor != tensor) & (copy != copy))  # only NaN is not itself
        flags.append(differs.any())
    return Change(flags)


def share_memory(one: Any, other: Any) -> bool:
    """Return whether a tensor in one value has an element at an address of an element in the other."""
    theirs = [_describe(tensor) for tensor in list_tensors(other) if tensor.numel()]
    return any(
        np.shares_memory(_describe(tensor), layout)
        for tensor in list_tensors(one)
        if tensor.numel()
        for layout in theirs
    )


def poison(holder: list[Any]) -> None:
    """Fill the tensors of a value with NaN that nothing but the only item of *holder* refers to.

    Others stay: what a module keeps, too, is not freed memory. Integers stay as well: as indices they could make a
    kernel read anywhere.
    """
    (value,) = holder
    if not hasattr(value, "untyped_storage") or not value.is_floating_point() or not value.numel():
        return
    users = _count_users(value)
    is_alone = users is not None and users == _count_users(value.new_empty(1))
    if is_alone and sys.getrefcount(value) <= _OWN_REFERENCES:
        value.fill_(float("nan"))


def _count_users(tensor: Any) -> tuple[int, int] | None:
    """Return how often a tensor's storage is referred to, in Python and in all; None where torch does not tell."""
    count = getattr(getattr(sys.modules.get("torch"), "_C", None), "_storage_Use_Count", None)
    storage = tensor.untyped_storage()  # the same object as long as one is kept
    return None if count is None else (sys.getrefcount(storage), int(count(storage._cdata)))


def _describe(tensor: Any) -> Any:
    """Return a NumPy array at the same addresses: only these are used, so the memory may be on a device."""
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
