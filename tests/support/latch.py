"""A latch: what a test holds back until it lets it go, so that no test depends on how fast anything is."""

from __future__ import annotations

import threading

TIMEOUT = 60.0  # only ever reached by a test that fails
GRACE = 0.2


class Latch:
    """Blocks callers until it is released."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def release(self) -> None:
        self._event.set()

    def pass_when_released(self) -> None:
        """Block until released."""
        assert self._event.wait(TIMEOUT), "the latch was not released"

    def pass_after_grace(self) -> None:
        """Block until released, or long enough for anything that can overtake to do so."""
        self._event.wait(GRACE)
