"""Programs that end together with all that they started."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple


class Program(NamedTuple):
    """What to start: its words, its variables, and the file for all that it says; None for where we say ours."""

    words: Sequence[str]
    variables: Mapping[str, str]
    log: Path | None = None


@contextmanager
def start_together(*programs: Program) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start programs, and at the end of the block end them whatever happens in it."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for program in programs:
            started.append(_start(program))  # noqa: PERF401 - what was started before an error is in the list
        yield started
    finally:
        for process in started:
            end_group(process)


def wait_for_first(first: subprocess.Popen[bytes], second: subprocess.Popen[bytes]) -> int | None:
    """Return how the first of two programs ends, or None if the second has failed by then; it may be done earlier."""
    while first.poll() is None and not second.poll():
        time.sleep(0.2)
    return first.poll()


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process that was started with `start_new_session=True`, and all of its group, first asking, then not.

    vLLM's engine and workers outlive a parent that is killed alone, and keep its port. What Python starts to remove
    shared memory does so only when all others have ended.
    """
    for kind, patience in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 10.0)):
        with suppress(ProcessLookupError):  # when there are none left
            os.killpg(process.pid, kind)
            deadline = time.monotonic() + patience
            while time.monotonic() < deadline:
                process.poll()  # or it would count as one of them
                os.killpg(process.pid, 0)
                time.sleep(0.02)
    with suppress(subprocess.TimeoutExpired):
        process.wait(10.0)


def _start(program: Program) -> subprocess.Popen[bytes]:
    words, variables, log = program
    if log is None:
        return subprocess.Popen(words, env=variables, start_new_session=True)
    with log.open("wb") as file:
        return subprocess.Popen(words, env=variables, stdout=file, stderr=file, start_new_session=True)
