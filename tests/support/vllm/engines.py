"""Engines for tests: one for each set of options, kept until the session ends, or one for a single test."""

from __future__ import annotations

import gc
import platform
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tests.support.vllm.engine import Engine
from tests.support.vllm.forking import ForkContext
from tests.support.vllm.process_groups import destroy_groups, make_groups
from tests.support.vllm.ranks import Ranks

TINY = Path(__file__).parents[3] / "examples" / "tiny-deepseek"
ENVIRONMENT = {
    "VLLM_ASCEND_ENABLE_DBO": "1",
    "DBO_MODE": "always",
    "DBO_SPLIT": "micro",  # what most tests are of; others ask for nano-batches
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine and, with one rank, worker in this very process
    "VLLM_LOGGING_LEVEL": "ERROR",
}
END_SECONDS = 10.0
NO_SETTINGS: Mapping[str, str] = MappingProxyType({})


class Engines:
    """Starts engines in our environment, with workers that are forked where vLLM is imported already."""

    def __init__(self) -> None:
        self._context = ForkContext()
        self._kept: dict[str, Engine] = {}
        self._environment = pytest.MonkeyPatch()
        for variable, value in ENVIRONMENT.items():
            self._environment.setenv(variable, value)

    def get(
        self, ranks: int, cores: str, model: Path = TINY, settings: Mapping[str, str] = NO_SETTINGS, **options: Any
    ) -> Engine:
        """Return the engine with these settings and options, which is started only once."""
        key = repr((ranks, cores, model, sorted(settings.items()), sorted(options.items())))
        if key not in self._kept:
            self._kept[key] = self._start(ranks, cores, model, settings, options)
        return self._kept[key]

    @contextmanager
    def start(
        self, ranks: int, cores: str, model: Path, settings: Mapping[str, str] = NO_SETTINGS, **options: Any
    ) -> Iterator[Engine]:
        """Start an engine whose workers have processes of their own, and end it."""
        engine = self._start(ranks, cores, model, settings, {"distributed_executor_backend": "mp", **options})
        try:
            yield engine
        finally:
            engine.close()

    @contextmanager
    def start_ranks(
        self, size: int, model: Path = TINY, settings: Mapping[str, str] = NO_SETTINGS, **options: Any
    ) -> Iterator[Ranks]:
        """Start data parallel ranks that share two cores, and end them."""
        environment = {**ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": "nobind", **settings}
        ranks = Ranks(model, size, environment, context=self._context, **options)
        try:
            yield ranks
        finally:
            ranks.close()

    def run(self, size: int, job: Callable[..., Any], *arguments: Any, timeout: float = 300) -> list[Any]:
        """Run `job(rank, *arguments)` in a new process of each of *size* ranks; return the results in rank order.

        Raises:
            AssertionError: with what a rank raised, or because one has not answered in *timeout* seconds.
        """
        pipes, processes = [], []
        for rank in range(size):
            here, there = self._context.Pipe()
            processes.append(self._context.Process(target=_run_job, args=(there, job, rank, *arguments)))
            processes[-1].start()
            there.close()
            pipes.append(here)
        deadline = time.monotonic() + timeout
        try:
            for rank, pipe in enumerate(pipes):
                assert pipe.poll(max(0.0, deadline - time.monotonic())), f"rank {rank} has not answered in {timeout} s"
            answers = [pipe.recv() for pipe in pipes]
        finally:
            for process in processes:
                process.join(END_SECONDS)
                process.kill()
        failed = [f"rank {rank}: {text}" for rank, (succeeded, text) in enumerate(answers) if not succeeded]
        assert not failed, "\n".join(failed)
        return [result for _, result in answers]

    def close(self) -> None:
        """End all that is kept."""
        for engine in self._kept.values():
            engine.close()
        if self._kept:
            destroy_groups()
        self._context.close()
        self._environment.undo()

    def _start(
        self, ranks: int, cores: str, model: Path, settings: Mapping[str, str], options: Mapping[str, Any]
    ) -> Engine:
        """Start an engine. The settings are there while it starts: engines share this process's environment.

        What earlier engines left is collected before: the finalizers of vLLM's oneDNN handlers fail while
        torch.compile traces, because they read a tensor, and a garbage collection may fall into that.
        """
        gc.collect()
        with pytest.MonkeyPatch.context() as patch:
            for variable, value in {"VLLM_CPU_OMP_THREADS_BIND": cores, **settings}.items():
                patch.setenv(variable, value)
            make_groups()
            return Engine(model, ranks, context=self._context, **options)


def _run_job(pipe: Connection, job: Callable[..., Any], rank: int, *arguments: Any) -> None:
    """Send what the job returns, or what it raises."""
    try:
        pipe.send((True, job(rank, *arguments)))
    except BaseException:  # noqa: BLE001 - the test has to see it, whatever it is
        pipe.send((False, traceback.format_exc()))


def find_transport() -> str:
    """Return how tensor parallel ranks on this host communicate: vLLM's kernels for AVX2 share no memory."""
    if platform.machine() != "x86_64":
        return "shared memory"
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    return "shared memory" if " avx512f" in flags else "one host"


def share_cores() -> str:
    """Return one core for each of two ranks, as the demo does."""
    from examples.cores import share_cores

    return share_cores(2)
