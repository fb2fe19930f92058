"""What the processes of a server hold: memory, threads, descriptors. Linux only."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
KIB = 1024


class Sizes(NamedTuple):
    """Sums over processes.

    Attributes:
        processes: how many there are.
        memory: bytes that are resident, each shared page counted in each process.
        shared: those of them in shared memory.
        threads: of all processes.
        descriptors: open ones of all processes.
    """

    processes: int
    memory: int
    shared: int
    threads: int
    descriptors: int


def list_descendants(root: int) -> list[int]:
    """Return *root* and all processes that it started, and those that these started."""
    children: dict[int, list[int]] = {}
    for folder in PROC.glob("[0-9]*"):
        with suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    found = [root]
    for process in found:
        found += children.get(process, [])
    return found


def measure(root: int) -> Sizes:
    """Return what *root* and its descendants hold."""
    processes = list_descendants(root)
    sizes = [found for found in map(_measure_one, processes) if found is not None]
    return Sizes(len(sizes), *(sum(values) for values in zip(*sizes, strict=True)))


def _measure_one(process: int) -> tuple[int, int, int, int] | None:
    """Return bytes, shared bytes, threads and descriptors; None if the process has ended."""
    try:
        status = (PROC / str(process) / "status").read_text()
        descriptors = len(list((PROC / str(process) / "fd").iterdir()))
    except OSError:
        return None
    if "VmRSS" not in status:
        return None  # it has ended, and was not waited for yet
    memory, shared, threads = (
        int(re.search(rf"^{name}:\s*(\d+)", status, re.MULTILINE)[1])  # type: ignore[index]
        for name in ("VmRSS", "RssShmem", "Threads")
    )
    return memory * KIB, shared * KIB, threads, descriptors
