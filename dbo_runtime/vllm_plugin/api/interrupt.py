"""Ctrl-C while vLLM runs in processes of its own, which ignore it, or take minutes to end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

KEPT = "resource_tracker"  # the process of Python's that removes what the others leave in shared memory


@contextmanager
def end_children_on_interrupt() -> Iterator[None]:
    """In this context, kill all processes below this one before an interrupt is raised, so that nothing waits for them.

    Call it in the main thread, because only that gets signals.
    """
    import psutil  # comes with vLLM

    def end(number: int, frame: FrameType | None) -> None:
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if not any(KEPT in word for word in child.cmdline()):
                    child.kill()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
