"""How the executor reports what it did."""

from __future__ import annotations

from typing import Protocol, SupportsFloat

from dbo_runtime.schedule import Step


class Instrument(Protocol):
    """Receives each op's interval. It may be called from the thread that ran the op."""

    def note(self, step: Step, start: SupportsFloat, end: SupportsFloat) -> None:
        """Op of *step* ran from *start* to *end*, in seconds of `time.perf_counter`, or of a virtual device's clock.

        Where a device runs behind the host these are moments yet to come: `float()` waits for them.
        """
