"""Processes that have imported vLLM and fork ranks: an import takes longer than all else that an engine's start does.

There is one of them for each rank, so that ranks order sets differently, as processes on different hosts do.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

START_SECONDS = 180.0
END_SECONDS = 30.0


class ForkedProcess:
    """A process that a host has forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def is_alive(self) -> bool:
        """Return whether it has not ended yet."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def join(self) -> None:
        """Wait until it has ended."""
        deadline = time.monotonic() + END_SECONDS
        while self.is_alive():
            assert time.monotonic() < deadline, f"process {self.pid} has not ended"
            time.sleep(0.01)


class RankHost:
    """One such process."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._control, there = spawn.Pipe()
        self._process = spawn.Process(target=serve_host, args=(there, dict(environment)))
        self._process.start()
        there.close()

    def fork(self, target: Callable[..., None], *arguments: Any) -> tuple[Connection, ForkedProcess]:
        """Run `target(pipe, *arguments)` in a new process; return the other end of its pipe, and the process."""
        here, there = multiprocessing.Pipe()
        self._control.send((target, arguments))
        send_handle(self._control, there.fileno(), self._process.pid)
        there.close()
        assert self._control.poll(START_SECONDS), "vLLM is not imported yet"
        return here, ForkedProcess(self._control.recv())

    def close(self) -> None:
        """End the process. Those that it has forked have ended, or end with their pipes."""
        self._control.close()
        self._process.join(END_SECONDS)
        self._process.kill()


class RankHosts:
    """A host for each rank, started when the rank is first asked for."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._hosts: list[RankHost] = []

    def fork(self, rank: int, target: Callable[..., None], *arguments: Any) -> tuple[Connection, ForkedProcess]:
        """Run `target(pipe, *arguments)` in a new process of a rank."""
        while len(self._hosts) <= rank:
            self._hosts.append(RankHost(self._environment))
        return self._hosts[rank].fork(target, *arguments)

    def run(self, size: int, job: Callable[..., Any], *arguments: Any, timeout: float = 300) -> list[Any]:
        """Run `job(rank, *arguments)` in a new process of each of *size* ranks; return their results.

        Raises:
            AssertionError: with what a rank raised, or because one has not answered in *timeout* seconds.
        """
        ranks = [self.fork(rank, run_job, job, rank, *arguments) for rank in range(size)]
        deadline = time.monotonic() + timeout
        try:
            for rank, (pipe, _) in enumerate(ranks):
                assert pipe.poll(max(0.0, deadline - time.monotonic())), f"rank {rank} has not answered in {timeout} s"
            answers = [pipe.recv() for pipe, _ in ranks]
        finally:
            for _, process in ranks:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
                process.join()
        failed = [f"rank {rank}: {text}" for rank, (good, text) in enumerate(answers) if not good]
        assert not failed, "\n".join(failed)
        return [result for _, result in answers]

    def close(self) -> None:
        """End all hosts."""
        for host in self._hosts:
            host.close()


def serve_host(control: Connection, environment: Mapping[str, str]) -> None:
    """Import vLLM, then fork a process for each request until the pipe is closed."""
    os.environ.update(environment)
    from vllm import LLM  # noqa: F401 - for those that are forked, as are the next two
    from vllm.v1.worker import cpu_model_runner, cpu_worker  # noqa: F401

    from dbo_runtime.vllm_plugin.install import worker_hooks  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing waits for their exit status
    fork = multiprocessing.get_context("fork")
    while True:
        try:
            target, arguments = control.recv()
        except EOFError:
            return
        pipe = Connection(recv_handle(control))
        process = fork.Process(target=run_forked, args=(control, target, pipe, *arguments))
        process.start()
        pipe.close()
        control.send(process.pid)


def run_forked(control: Connection, target: Callable[..., None], pipe: Connection, *arguments: Any) -> None:
    """Be a process that a host has forked."""
    control.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # vLLM waits for its workers
    target(pipe, *arguments)


def run_job(pipe: Connection, job: Callable[..., Any], rank: int, *arguments: Any) -> None:
    """Send what the job returns, or what it raises."""
    try:
        pipe.send((True, job(rank, *arguments)))
    except BaseException:  # noqa: BLE001 - the test has to see it, whatever it is
        pipe.send((False, traceback.format_exc()))
