"""A latch: what a test holds back until it lets it go, so that no test depends on how fast anything is."""

from __future__ import annotations

import threading

TIMEOUT = 60.0  # only ever reached by a test that fails
GRACE = 0.2


class Latch:
    """Blocks whoever passes it until it is released."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def release(self) -> None:
        self._event.set()

    def pass_when_released(self) -> None:
        """Block until released."""
        assert self._event.wait(TIMEOUT), "nobody released the latch"

    def pass_after_grace(self) -> None:
        """Block until released, or for so long that whoever is able to overtake has done so."""
        self._event.wait(GRACE)
