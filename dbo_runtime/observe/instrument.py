"""The interface through which the executor reports the intervals of ops."""

from __future__ import annotations

from typing import Protocol, SupportsFloat

from dbo_runtime.ir.schedule import Instruction


class Instrument(Protocol):
    """Receives the interval of each op, possibly from the thread that ran it."""

    def observe(self, instruction: Instruction, issued: float, start: SupportsFloat, end: SupportsFloat) -> None:
        """Record when the op of *instruction* was issued by the host, started and ended, in seconds of one clock.

        The clock is `time.perf_counter`, or a virtual device's own. On an asynchronous device *start* and *end* may lie
        in the future: `float()` waits for them.
        """
