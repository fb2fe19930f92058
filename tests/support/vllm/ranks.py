"""Data parallel ranks: one process and one in-process engine each, driven from the test over pipes.

What every rank is told, it is told at once; an answer that does not come within the time given ends all of them with
their stacks printed, because ranks that disagree hang without a word.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

from tests.support.ports import find_free_ports
from tests.support.vllm.engine import Engine

Job = Callable[..., Any]


class Ranks:
    """Engines of data parallel ranks, with expert parallel unless the options say otherwise.

    Args:
        model: the model that they serve together.
        size: how many ranks.
        environment: settings for all of them.
        context: what makes their processes; without, they are spawned.
        options: for each `Engine`.
    """

    def __init__(
        self, model: Path, size: int, environment: Mapping[str, str], context: BaseContext | None = None, **options: Any
    ) -> None:
        port = find_free_ports()  # vLLM takes the next ones for its other groups
        self._pipes: list[Connection] = []
        self._processes = []
        self._known: dict[str, list[Any]] = {}
        context = context or multiprocessing.get_context("spawn")
        for rank in range(size):
            here, there = context.Pipe()
            variables = {
                **environment,
                "VLLM_DP_RANK": str(rank),
                "VLLM_DP_RANK_LOCAL": str(rank),
                "VLLM_DP_SIZE": str(size),
                "VLLM_DP_MASTER_IP": "127.0.0.1",
                "VLLM_DP_MASTER_PORT": str(port),
                "VLLM_HOST_IP": "127.0.0.1",
                "GLOO_SOCKET_IFNAME": "lo",
                "TORCHINDUCTOR_VEC_ISA_OK": "1",  # else torch probes it in a process, which now and then hangs
            }
            process = context.Process(target=serve_rank, args=(rank, there, str(model), variables, options))
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        self._collect(timeout=400)

    def run(self, job: Job, *arguments: Any, timeout: float = 120) -> list[Any]:
        """Run `job(engine, rank, *arguments)` on every rank and return the results in rank order.

        Raises:
            AssertionError: with what a rank raised, or because none answered in *timeout* seconds.
        """
        for pipe in self._pipes:
            pipe.send((job, arguments))
        return self._collect(timeout)

    def run_once(self, job: Job, *arguments: Any) -> list[Any]:
        """Return the results of an earlier call with the same arguments, or run the job."""
        asked = repr((job.__name__, arguments))
        if asked not in self._known:
            self._known[asked] = self.run(job, *arguments)
        return self._known[asked]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()

    def _collect(self, timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                self._give_up(f"rank {rank} has not answered in {timeout} s: a hang; stacks are on stderr")
            try:
                answers.append(pipe.recv())
            except EOFError:
                self._give_up(f"rank {rank} has died")
        failed = [f"rank {rank}: {text}" for rank, (good, text) in enumerate(answers) if not good]
        assert not failed, "\n".join(failed)
        return [result for _, result in answers]

    def _give_up(self, why: str) -> None:
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1)
        self.close()
        raise AssertionError(why)


def serve_rank(
    rank: int, pipe: Connection, model: str, environment: Mapping[str, str], options: Mapping[str, Any]
) -> None:
    """Be one rank: make the engine, then do what is asked."""
    os.setsid()  # so that its workers can be ended together with it
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__, all_threads=True)
    os.environ.update(environment)
    tensor_parallel = options.get("tensor_parallel_size", 1)
    defaults = {"enable_expert_parallel": True, "distributed_executor_backend": "uni" if tensor_parallel == 1 else "mp"}
    engine = Engine(Path(model), tensor_parallel, **{**defaults, **options})
    pipe.send((True, None))
    while True:
        try:
            job, arguments = pipe.recv()
        except EOFError:  # the test is gone
            os.killpg(0, signal.SIGKILL)
        try:
            pipe.send((True, job(engine, rank, *arguments)))
        except BaseException:  # noqa: BLE001 - the test has to see it, whatever it is
            pipe.send((False, traceback.format_exc()))
