"""Named ranges in torch's profiler and in a device's own profilers (NVTX or MSTX)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from dbo_runtime.observe.ranges import OpenRange


class Marks(NamedTuple):
    """The functions that mark a range for a device's own profilers.

    Attributes:
        start: function that takes the name and begins the range.
        end: function that takes the result of `start` and ends the range.
    """

    start: Callable[[str], Any]
    end: Callable[[Any], object]


def find_ranges(wanted: str, marks: Marks | None = None) -> OpenRange | None:
    """Return a function that opens ranges on the calling thread; None if no profiler would see them.

    Args:
        wanted: `auto`: only while torch's profiler is on. `on`: always, for profilers that cannot be detected.
        marks: the device's marks; None if it has none.
    """
    if wanted == "off" or (wanted == "auto" and not is_profiling()):
        return None
    if marks is None:
        return torch.profiler.record_function
    return lambda name: MarkedRange(name, marks)


def is_profiling() -> bool:
    """Return whether torch's profiler is on in this process, or another profiler that sets its state for this thread.

    The process-wide state is torch's own flag, which its compiler reads, too. torch_npu's profiler sets only the state
    of the thread.
    """
    return torch.autograd.profiler._is_profiler_enabled or torch._C._autograd._profiler_enabled()


class MarkedRange:
    """A range of torch's profiler with one of the device's marks inside."""

    __slots__ = ("_marks", "_name", "_started", "_torch_range")

    def __init__(self, name: str, marks: Marks) -> None:
        self._name = name
        self._marks = marks
        self._torch_range: AbstractContextManager[object] = torch.profiler.record_function(name)

    def __enter__(self) -> None:
        """Open both ranges."""
        self._torch_range.__enter__()
        self._started = self._marks.start(self._name)

    def __exit__(self, *error: Any) -> None:
        """Close both ranges, the inner one first."""
        try:
            self._marks.end(self._started)
        finally:
            self._torch_range.__exit__(*error)
