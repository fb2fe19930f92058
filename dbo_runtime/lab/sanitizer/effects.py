"""The effects of one op call on memory, compared with the op's declaration."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from dbo_runtime.ir.op import Op
from dbo_runtime.ir.values import Value
from dbo_runtime.lab.sanitizer.memory import Change, copy_tensors, find_change, share_memory


class Held(NamedTuple):
    """A value in use elsewhere while an op runs, with its name in errors."""

    name: str
    value: Any


class OpCall:
    """A call of an op that is about to be made.

    Args:
        op: the op to be called.
        reads: the values it reads, in order.
    """

    def __init__(self, op: Op, reads: Sequence[Any]) -> None:
        self._op = op
        self._kept = {  # keyed by value, because an op may read one twice
            value: (item, copy_tensors(item))
            for value, item in zip(op.reads, reads, strict=True)
            if value not in op.overwrites
        }

    def find_changes(self) -> list[tuple[Value, Change]]:
        """Return, after the call, whether it changed each value that it declares only as read."""
        return [(value, find_change(item, copies)) for value, (item, copies) in self._kept.items()]

    def find_shared(self, results: Sequence[Any], others: Iterable[Held] = ()) -> str | None:
        """Return a message about a result that shares memory without permission, or None.

        Args:
            results: the values that the op wrote, in order.
            others: values in use that the op does not read.
        """
        written = list(zip(self._op.writes, results, strict=True))
        held = list(others)
        for value, result in written:
            for read, (item, _) in self._kept.items():
                if share_memory(result, item):
                    return (
                        f"its result {value} has memory of {read}, which it declares only to read: name {read} in "
                        "`overwrites`, or return a copy"
                    )
            for other in held:
                if share_memory(result, other.value):
                    return f"its result {value} has memory of {other.name}, which is still in use"
        for (first, one), (second, other) in combinations(written, 2):
            if share_memory(one, other):
                return f"its results {first} and {second} share memory: return a copy of one of them"
        return None


def describe_change(value: Value) -> str:
    """Return the error message for an op that changed a value it only reads."""
    return f"it changed {value}, which it declares only to read: name {value} in `overwrites`, or change a copy"
