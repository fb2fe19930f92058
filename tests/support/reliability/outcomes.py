"""What became of inputs: accepted, refused as they should be, or anything else."""

from __future__ import annotations

import contextlib
import io
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from dbo_runtime.errors import DboError
from tests.support.reliability.process_sizes import KIB, PROC

MAX_SECONDS = 5.0
HANGS_SECONDS = 300.0  # of the clock on the wall
MAX_BYTES = 1 << 30
MAX_KEPT = 20  # errors that are shown


@dataclass
class Outcomes:
    """Counts of one reader's inputs.

    Attributes:
        accepted, refused: how many.
        slowest: seconds of the processor of one input.
        memory: the most that the process grew by.
        others: what else was raised, with its input.
    """

    accepted: int = 0
    refused: int = 0
    slowest: float = 0.0
    memory: int = 0
    others: list[str] = field(default_factory=list)

    @property
    def inputs(self) -> int:
        """How many there were."""
        return self.accepted + self.refused + len(self.others)

    def observe(self, read: Callable[[], object], what: object, most: float = MAX_SECONDS) -> None:
        """Read an input, and count what becomes of it; *what* describes it if that is none of what may be.

        Args:
            read: reads it.
            what: the input; called if it can be.
            most: seconds of the processor that it may take.
        """
        before, start = _reset_peak(), time.process_time()
        try:
            with _end_after(HANGS_SECONDS), _swallow():
                read()
        except DboError as error:
            self.refused += 1
            if len(str(error)) > 20_000:
                self._note(f"a message of {len(str(error))} characters", what)
        except SystemExit as error:  # argparse refuses words by itself
            self.refused += 1
            if error.code != 2:
                self._note(f"exit {error.code}", what)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is what is looked for
            self._note(f"{type(error).__name__}: {error!s:.200}", what)
        else:
            self.accepted += 1
        seconds = time.process_time() - start
        self.slowest, self.memory = max(self.slowest, seconds), max(self.memory, _read("VmHWM") - before)
        if seconds > most:
            self._note(f"{seconds:.1f} s", what)

    def _note(self, error: str, what: object) -> None:
        shown = what() if callable(what) else what
        self.others.append(f"{error}: {shown!r:.300}")


@contextlib.contextmanager
def _swallow() -> Iterator[None]:
    """Take what is printed, as a terminal would: as UTF-8."""
    printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    errors = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
    with printed, errors, contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        yield


@contextlib.contextmanager
def _end_after(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in what takes so long: it waits for something, as for the other end of a FIFO."""

    def end(*_: object) -> None:
        raise TimeoutError(f"it did not end within {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _reset_peak() -> int:
    """Forget the most that this process has held; return the bytes that it holds."""
    with contextlib.suppress(OSError):
        (PROC / "self" / "clear_refs").write_text("5")
    return _read("VmRSS")


def _read(name: str) -> int:
    status = (PROC / "self" / "status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0]) * KIB
