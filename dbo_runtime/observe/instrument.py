"""How the executor reports what it did."""

from __future__ import annotations

from typing import Protocol

from dbo_runtime.schedule import Step


class Instrument(Protocol):
    """Receives each op's interval. It is called from the thread that ran the op."""

    def note(self, step: Step, start: float, end: float) -> None:
        """Op of *step* ran from *start* to *end*, in seconds of `time.perf_counter`."""
