"""How the executor reports what it did."""

from __future__ import annotations

from typing import Protocol, SupportsFloat

from dbo_runtime.schedule import Instruction


class Instrument(Protocol):
    """Receives each op's interval. It may be called from the thread that ran the op."""

    def note(self, instruction: Instruction, issued: float, start: SupportsFloat, end: SupportsFloat) -> None:
        """Op of *instruction* was issued by the host, and ran from *start* to *end*: seconds of one clock.

        The clock is `time.perf_counter`, or a virtual device's own. Where a device runs behind the host start and end
        are moments yet to come: `float()` waits for them.
        """
