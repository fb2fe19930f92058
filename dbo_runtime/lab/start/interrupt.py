"""Ctrl-C while vLLM runs in processes of its own, which ignore it, or take minutes to end."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread, main_thread
from types import FrameType

STDERR = 2
GRACE_SECONDS = 5.0
INTERRUPTED = 130  # exit status, as shells give it
KEPT = "resource_tracker"  # the process of Python's that removes what the others leave in shared memory


@contextmanager
def end_children_on_interrupt() -> Iterator[None]:
    """In this context, an interrupt kills all processes below this one, so that nothing waits for them.

    The main thread may sleep inside a library, which may also lose the KeyboardInterrupt: vLLM 0.30 goes on waiting for
    its engine. So a thread of its own is woken by the signal, ends the processes and interrupts the main thread; if
    that does not leave this context in time, the thread ends the program. Call it in the main thread.
    """
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    handler, wakeup = signal.signal(signal.SIGINT, _raise_once), signal.set_wakeup_fd(theirs.fileno())
    stderr = os.dup(STDERR)  # which may be diverted in this context
    thread = Thread(target=_wait_for_interrupt, args=(ours, stderr), daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        theirs.shutdown(socket.SHUT_WR)  # ends the thread, also where a forked process still holds it
        thread.join()
        theirs.close()
        signal.signal(signal.SIGINT, handler)
        ours.close()
        os.close(stderr)


def _raise_once(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, and ignore further interrupts, which would only disturb cleaning up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _wait_for_interrupt(source: socket.socket, stderr: int) -> None:
    """Wait until Python's own handler has written the number of an interrupt, or the other end is closed."""
    while number := source.recv(1):
        if number[0] == signal.SIGINT:
            _kill_children()
            main = main_thread().ident
            if main is not None:
                signal.pthread_kill(main, signal.SIGINT)
            source.settimeout(GRACE_SECONDS)
            try:
                while source.recv(1):
                    pass
            except TimeoutError:
                os.write(stderr, b"interrupted while vLLM was starting.\n")
                os._exit(INTERRUPTED)
            return


def _kill_children() -> None:
    import psutil  # comes with vLLM

    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if not any(KEPT in word for word in child.cmdline()):
                child.kill()
