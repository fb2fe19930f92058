"""A part that does what it is told: `python fake_part.py RESULT DEVICE WHAT [WORDS ...]`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FOREVER = 600.0


def main(result: str, device: str, what: str, *words: str) -> int:
    """Do it; results are written before anything goes wrong."""
    found: dict[str, Any] = {"device": device, "what": what, "words": words, "at": time.time()}
    if what != "wordless":
        write(result, found)
    failed = {
        "well": do_well,
        "sleep": sleep,
        "meet": meet,
        "fork and hang": fork_and_hang,
        "killed": kill_itself,
        "wordless": end_without_result,
        "failed": fail,
        "keep": keep,
    }[what](*words)
    write(result, {**found, "ended": time.time()}, failed)
    return 1 if failed else 0


def write(result: str, found: dict[str, Any], failed: str | None = None) -> None:
    Path(result).write_text(json.dumps({"results": found, "failed": failed}))


def do_well(*_: str) -> None:
    """Do nothing."""


def sleep(seconds: str) -> None:
    time.sleep(float(seconds))


def meet(own: str, other: str) -> str | None:
    """Wait for another part that does the same."""
    Path(own).touch()
    deadline = time.time() + FOREVER
    while not Path(other).exists() and time.time() < deadline:
        time.sleep(0.05)
    return None if Path(other).exists() else "nobody came"


def fork_and_hang(pids: str) -> None:
    """Start a child in this group and one that leaves it, and take no notice of being asked to end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for leaves in (False, True):
        call = [sys.executable, "-c", f"import time; time.sleep({FOREVER})"]
        child = subprocess.Popen(call, start_new_session=leaves)
        with Path(pids).open("a") as file:
            file.write(f"{child.pid}\n")
    time.sleep(FOREVER)


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def end_without_result() -> None:
    sys.exit("ImportError: libcuda.so.1: the driver is too old\n")


def fail(*_: str) -> str:
    return "the sum is wrong"


def keep(count: str, size: str) -> None:
    """Leave files that are to come back."""
    for number in range(int(count)):
        (Path(os.environ["GPU_KIT_KEEP"]) / f"{number}.bin").write_bytes(bytes(int(size)))
        time.sleep(0.01)  # so that it is known which is newer


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
