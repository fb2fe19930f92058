"""The interface for receiving the intervals of ops from the executor."""

from __future__ import annotations

from typing import Protocol, SupportsFloat

from dbo_runtime.ir.schedule import Instruction


class Instrument(Protocol):
    """Receives the interval of each op, possibly from the thread that ran it."""

    def observe(self, instruction: Instruction, issued: float, start: SupportsFloat, end: SupportsFloat) -> None:
        """Record when the host issued the op of *instruction*, when it started and ended, in seconds of one clock.

        The clock is `time.perf_counter`, or a virtual device's own. On an asynchronous device, *start* and *end* may be
        in the future: `float()` waits for them.
        """
