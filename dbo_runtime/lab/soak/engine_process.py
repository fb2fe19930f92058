"""Engines in separate processes with separate environments: one process per data parallel rank."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection, wait
from typing import IO, Any

from dbo_runtime.errors import DeviceError
from dbo_runtime.lab.soak.answer import Answer, Counts
from dbo_runtime.lab.soak.request import Abilities, Round
from dbo_runtime.lab.start.engine_log import save_log
from dbo_runtime.lab.start.start_failure import describe_failure

MODULE = "dbo_runtime.lab.soak.engine_main"
START_SECONDS, ROUND_SECONDS, END_SECONDS = 900.0, 600.0, 30.0
QUOTED = 3000  # characters of a log
LOOPBACK = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}


class EngineProcess:
    """One engine, with one or several data parallel ranks.

    Use it as a context manager, which ends all processes.

    Args:
        model: directory or name of the model.
        ranks: number of data parallel ranks.
        loras: directories of LoRA adapters.
        options: options for vLLM's `LLM`.
        environment: variables on top of this process's; a value of None removes a variable.

    Raises:
        DeviceError: vLLM does not start, or later fails or does not answer. The message of a start is one line with the
            name of a file that has the log; a later message has the end of the log.
    """

    def __init__(
        self,
        model: str,
        ranks: int,
        loras: Sequence[str],
        options: Mapping[str, Any],
        environment: Mapping[str, str | None],
    ) -> None:
        self.abilities: Abilities
        self._pipes: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - it must exist as long as the processes
        port = _find_port() if ranks > 1 else 0
        with ExitStack() as stack:
            stack.callback(self._end)
            for rank in range(ranks):
                own = {**_describe_rank(rank, ranks, port), **environment} if ranks > 1 else environment
                self._start(own)
                with suppress(BrokenPipeError):  # `_collect` reports this
                    self._pipes[-1].send((model, tuple(loras), dict(options)))
            self.abilities, *_ = self._await_start(model)
            stack.pop_all()

    def __enter__(self) -> EngineProcess:
        """Return the engine."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End all processes: by request, or at once after an error or an interrupt, when they may not listen."""
        if kind is None:
            with suppress(DeviceError, OSError):
                self._ask("close", [()] * len(self._pipes), END_SECONDS)
        self._end()

    def configure(self, settings: Mapping[str, str]) -> None:
        """Change settings of this package, on every rank."""
        self._ask("configure", [(dict(settings),)] * len(self._pipes), ROUND_SECONDS)

    def watch(self, calibrates: bool, first_steps: bool) -> None:
        """Switch on measuring costs in the pauses of rounds, and comparing each kind's first steps in each round."""
        self._ask("watch", [(calibrates, first_steps)] * len(self._pipes), ROUND_SECONDS)

    def run(self, traffic: Round) -> tuple[dict[int, Answer], Counts]:
        """Answer a round, whose requests are dealt to the ranks in turn; return the answers by number, and the counts.

        Counts of steps are the first rank's. All other counts are of all ranks.
        """
        ranks = len(self._pipes)
        shares = [
            Round(
                traffic.number,
                traffic.seed,
                {number: request for number, request in traffic.requests.items() if number % ranks == rank},
                traffic.pause,
            )
            for rank in range(ranks)
        ]
        found = self._ask("run", [(share, traffic.turns) for share in shares], ROUND_SECONDS)
        answers: dict[int, Answer] = {}
        total: Counts = found[0][1]
        for number, (some, counts) in enumerate(found):
            answers |= some
            if number:
                total.preempted += counts.preempted
                total.cached += counts.cached
                total.alarms += counts.alarms
        return answers, total

    def _ask(self, name: str, arguments: Sequence[tuple[Any, ...]], seconds: float) -> list[Any]:
        for pipe, own in zip(self._pipes, arguments, strict=True):
            with suppress(BrokenPipeError):  # `_collect` reports this
                pipe.send((name, own))
        return self._collect(seconds)

    def _start(self, environment: Mapping[str, str | None]) -> None:
        variables = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **environment}
        variables.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        variables.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        here, there = socket.socketpair()
        with there:
            process = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(there.fileno())],
                env={name: value for name, value in variables.items() if value is not None},
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(there.fileno(),),
                start_new_session=True,
            )
        self._processes.append(process)
        self._pipes.append(Connection(here.detach()))

    def _collect(self, seconds: float) -> list[Any]:
        """Return each rank's answer. Raise the error of the first rank that fails, because others may wait for it."""
        deadline = time.monotonic() + seconds
        results: dict[int, Any] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                silent = ", ".join(map(str, waiting.values()))
                raise DeviceError(f"vLLM (rank {silent}) has not answered within {seconds:.0f} s.{self._quote()}")
            for pipe in self._pipes:
                if pipe in ready:
                    rank = waiting.pop(pipe)
                    results[rank] = self._receive(rank)
        return [results[rank] for rank in sorted(results)]

    def _receive(self, rank: int) -> Any:
        try:
            good, result = self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            raise DeviceError(f"vLLM's process (rank {rank}) has died.{self._quote()}") from None
        if not good:
            raise DeviceError(f"vLLM fails (rank {rank}): {str(result).strip()}{self._quote()}")
        return result

    def _await_start(self, model: str) -> list[Any]:
        try:
            return self._collect(START_SECONDS)
        except DeviceError as error:
            log = f"{self._read_log()}\n{error}\n"
            raise DeviceError(f"{describe_failure(model, log, error)} vLLM's log: {save_log(log)}") from error

    def _read_log(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace").strip()

    def _quote(self) -> str:
        text = self._read_log()
        return f"\nIts log ends with:\n{text[-QUOTED:]}" if text else ""

    def _end(self) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for pipe in self._pipes:
            pipe.close()
        self._log.close()


def _describe_rank(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        "VLLM_DP_RANK": str(rank),
        "VLLM_DP_RANK_LOCAL": str(rank),
        "VLLM_DP_SIZE": str(ranks),
        "VLLM_DP_MASTER_IP": "127.0.0.1",
        "VLLM_DP_MASTER_PORT": str(port),
        **LOOPBACK,
    }


def _find_port() -> int:
    """Return a free port. vLLM takes the next ports for its other groups, so those should be free, too."""
    while True:
        with ExitStack() as stack:
            first = stack.enter_context(socket.socket())
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            with suppress(OSError, OverflowError):
                for number in range(port + 1, port + 10):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", number))
                return port
