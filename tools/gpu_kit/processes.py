"""Run a command with a limit of its own, and end all that it started: also what left its process group.

vLLM's workers, MPS and tests fork; one that hangs must not hold the GPU's memory when the next part begins.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MARK = "GPU_KIT_JOB"
"""A variable that a job's processes inherit, by which they are found."""

POLL_SECONDS = 0.1
GRACE_SECONDS = 3.0  # between asking a job to end and ending it


@dataclass(frozen=True)
class Ending:
    """How a command ended.

    Attributes:
        seconds: that it took.
        exit: its status; negative: the signal that ended it; None: it was never started.
        reason: why it ended early, if it did.
    """

    seconds: float
    exit: int | None
    reason: str | None = None


def run_process(
    words: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    limit: float,
    stop: threading.Event | None = None,
    mark: str = "",
) -> Ending:
    """Run a command in a process group of its own for at most *limit* seconds; it writes to *log*.

    Args:
        words: the command.
        environment: all of its variables.
        log: the file that takes what it prints.
        limit: seconds.
        stop: ends it early when it is set.
        mark: tells its processes from those of all other jobs.
    """
    start = time.monotonic()
    mark = mark or f"{os.getpid()}-{threading.get_ident()}-{time.monotonic_ns()}"
    try:
        with log.open("wb") as file:
            process = subprocess.Popen(
                words,
                env={**environment, MARK: mark},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    except OSError as error:
        return Ending(time.monotonic() - start, None, f"cannot be started: {error}")
    reason = None
    while process.poll() is None:
        if time.monotonic() - start > limit:
            reason = f"killed at its limit of {limit:.0f} s"
        elif stop is not None and stop.is_set():
            reason = "killed, because the run was ended"
        if reason is not None:
            break
        time.sleep(POLL_SECONDS)
    end_group(process)
    end_strays(process.pid, mark)
    status = process.wait()
    if reason is None and status < 0:
        reason = f"ended by signal {-status} ({signal.Signals(-status).name})"
        reason += ", perhaps for lack of memory" if -status == signal.SIGKILL else ""
    return Ending(time.monotonic() - start, status, reason)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ask a process, which leads its group, to end, then end the whole group."""
    if process.poll() is None:
        _send(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
    _send(process.pid, signal.SIGKILL)


def end_strays(session: int, mark: str) -> None:
    """End the processes that a job has started and that left its group."""
    for pid in find_strays(session, mark):
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def find_strays(session: int, mark: str) -> Iterator[int]:
    """Yield the processes of a session, and those that inherited a mark, where there is /proc.

    Either alone would miss some: a daemon leaves the session, and a process that names itself, as vLLM's workers do,
    writes that name over its variables.
    """
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            after_name = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(after_name[3]) == session or wanted in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)


def _send(group: int, number: signal.Signals) -> None:
    with suppress(OSError):
        os.killpg(group, number)
