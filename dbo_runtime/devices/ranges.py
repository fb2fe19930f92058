"""Named ranges in torch's profiler, and in what a device's own profilers read: NVTX, or MSTX."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from dbo_runtime.observe.ranges import OpenRange


class Marks(NamedTuple):
    """How a range is marked for a device's own profilers.

    Attributes:
        start: takes the name.
        end: takes what `start` returned.
    """

    start: Callable[[str], Any]
    end: Callable[[Any], object]


def find_ranges(wanted: str, marks: Marks | None = None) -> OpenRange | None:
    """Return what opens ranges on the calling thread, or None where nothing would see them.

    Args:
        wanted: `auto`: while torch's profiler is on; `on`: always, for profilers that cannot be detected.
        marks: of the device; None if it has none.
    """
    if wanted == "off" or (wanted == "auto" and not is_profiling()):
        return None
    if marks is None:
        return torch.profiler.record_function
    return lambda name: MarkedRange(name, marks)


def is_profiling() -> bool:
    """Return whether torch's profiler is on in this process, or one that sets its state for this thread.

    The first is torch's own flag, which its compiler reads, too; torch_npu's profiler sets only the second.
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
        """Open both."""
        self._torch_range.__enter__()
        self._started = self._marks.start(self._name)

    def __exit__(self, *error: Any) -> None:
        """Close both, the inner one first."""
        try:
            self._marks.end(self._started)
        finally:
            self._torch_range.__exit__(*error)
