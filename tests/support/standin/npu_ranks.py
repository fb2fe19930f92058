"""Ranks on the stand-in: one process each, in which the real torch_npu's ProcessGroupHCCL runs on CPU.

The test gives all ranks the same job and gets an answer from each. Processes are started with the first job and kept
for the next ones. Where a job fails, dies or hangs on one rank, all processes are killed, because the others may wait
for that rank for ever; the next job starts new ones.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.connection
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.standin.cann.cann import StandIn, load

START = 120.0  # seconds, for importing torch_npu on a machine that is busy
GRACE = 3.0  # seconds that other ranks get to tell their part of a failure
PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>


@dataclass
class Rank:
    """What a job gets to know of its rank, and its way to signal others without any collective."""

    number: int
    size: int
    standin: StandIn
    store: Any
    job: int = 0  # how many it has had: signals of different jobs are different signals

    def announce(self, name: str) -> None:
        """Let every rank pass `wait_for(name)` within this job."""
        self.store.set(f"{self.job}/{name}", "told")

    def wait_for(self, name: str) -> None:
        """Block until a rank has told *name*."""
        self.store.wait([f"{self.job}/{name}"])

    def is_told(self, name: str) -> bool:
        """Whether a rank has told *name*."""
        return bool(self.store.check([f"{self.job}/{name}"]))


Job = Callable[..., Any]


class Ranks:
    """Processes of a process group `hccl`, one for each rank.

    Args:
        size: how many ranks.
        folder: for the store through which they find each other, and for what they write to stderr.
        environment: settings for all of them.
    """

    def __init__(self, size: int, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self._size = size
        self._folder = folder
        self._environment = dict(environment or {})
        self._starts = 0
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """The processes that run now."""
        return [process.pid for process in self._processes]

    def run(self, job: Job, *arguments: Any, timeout: float = 60) -> list[Any]:
        """Run `job(rank, *arguments)` on every rank and return the results in rank order.

        Args:
            job: a function of a module, so that the processes find it by its name.
            arguments: what can be pickled.
            timeout: seconds until it counts as a hang.

        Raises:
            AssertionError: with what the ranks raised and wrote, or with who has not answered in time.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            with suppress(OSError):  # it has died since; that shows when its answer is read
                pipe.send((job, arguments))
        return self._collect(timeout)

    def close(self) -> None:
        """Let the processes end by themselves.

        Raises:
            AssertionError: if one does not; it is killed.
        """
        try:
            if self._processes:
                for pipe in self._pipes:
                    pipe.send(None)
                self._collect(timeout=30)
                for rank, process in enumerate(self._processes):
                    process.join(timeout=30)
                    assert process.exitcode == 0, self._tell(rank, f"ended with {process.exitcode} (None: not at all)")
        finally:
            self._kill()

    def _start(self) -> None:
        self._starts += 1
        spawn = multiprocessing.get_context("spawn")
        store = self._folder / f"store-{self._starts}"
        for number in range(self._size):
            here, there = spawn.Pipe()
            stderr = self._find_stderr(number)
            stderr.touch()
            arguments = (number, self._size, there, str(store), str(stderr), self._environment)
            process = spawn.Process(target=serve_rank, args=arguments, daemon=True)
            process.start()
            there.close()  # so that the death of the process ends the pipe
            self._pipes.append(here)
            self._processes.append(process)
        self._collect(START)

    def _find_stderr(self, rank: int) -> Path:
        return self._folder / f"stderr-{self._starts}-{rank}"

    def _collect(self, timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        while waiting := [rank for rank in range(self._size) if rank not in results and rank not in failures]:
            pipes = [self._pipes[rank] for rank in waiting]
            if not multiprocessing.connection.wait(pipes, max(0.0, deadline - time.monotonic())):
                failures |= {rank: self._tell(rank, f"has not answered (after {timeout} s)") for rank in waiting}
                break
            for rank in waiting:
                if self._pipes[rank].poll():
                    succeeded, answer = self._receive(rank)
                    (results if succeeded else failures)[rank] = answer
            if failures:
                deadline = min(deadline, time.monotonic() + GRACE)
        if failures:
            self._kill()
            raise AssertionError("\n".join(failures[rank] for rank in sorted(failures)))
        return [results[rank] for rank in range(self._size)]

    def _receive(self, rank: int) -> tuple[bool, Any]:
        try:
            succeeded, answer = self._pipes[rank].recv()
        except EOFError:
            return False, self._tell(rank, "has died")
        return succeeded, answer if succeeded else self._tell(rank, f"has failed\n{answer}")

    def _tell(self, rank: int, what: str) -> str:
        stderr = self._find_stderr(rank).read_text(errors="replace")
        return f"rank {rank} {what}\n--- its stderr ends:\n{stderr[-3000:]}"

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []


def serve_rank(
    number: int, size: int, pipe: Connection, store: str, stderr: str, environment: Mapping[str, str]
) -> None:
    """Be one rank: join the process group, then do what is asked until told to end."""
    die_with_parent()
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_APPEND), 2)
    os.environ.update({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1", **environment})
    try:
        rank = join_group(number, size, store)
        pipe.send((True, None))
        while (work := pipe.recv()) is not None:
            rank.job += 1
            job, arguments = work
            pipe.send((True, job(rank, *arguments)))
        leave_group()
        pipe.send((True, None))
    except BaseException:  # noqa: BLE001 - the test has to see it, whatever it is
        pipe.send((False, traceback.format_exc()))
        signal.pause()  # the test kills all ranks: those that wait for this one cannot end by themselves


def join_group(number: int, size: int, store: str) -> Rank:
    """Load the stand-in and torch_npu, which finds it loaded, and make the default process group."""
    standin = load()
    assert standin is not None, "CANN itself is installed here"
    import torch
    import torch.distributed as dist
    import torch_npu  # noqa: F401 - brings the device npu and the backend hccl

    torch.npu.set_device(0)  # every process has a device of its own
    file_store = dist.FileStore(store, size)
    dist.init_process_group("hccl", store=dist.PrefixStore("group", file_store), rank=number, world_size=size)
    return Rank(number, size, standin, dist.PrefixStore("jobs", file_store))


def leave_group() -> None:
    import torch.distributed as dist

    dist.destroy_process_group()


def die_with_parent() -> None:
    """Have the kernel kill this process when the test's process ends, however it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is None or not parent.is_alive():  # it ended before the line above
        os._exit(1)
