"""Processes forked from servers that have imported vLLM: the import takes longer than the rest of an engine's start.

The servers differ in their hash seeds, as processes that start by themselves do: ranks must agree although they order
sets differently.
"""

from __future__ import annotations

import os
from glob import escape
from itertools import cycle
from multiprocessing import popen_forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.forkserver import ForkServer
from pathlib import Path
from typing import Any
from unittest.mock import patch
from weakref import WeakSet

SERVERS = 2
PRELOADED = [
    "vllm",
    "vllm.entrypoints.llm",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.executor.multiproc_executor",
    "dbo_runtime.vllm_plugin.install.worker_hooks",
]


class ForkContext(ForkServerContext):
    """Makes processes in turn from each server. A server starts with the first process that it forks."""

    def __init__(self) -> None:
        super().__init__()
        self._servers = [ForkServer() for _ in range(SERVERS)]
        self._turns = cycle(self._servers)
        self._processes: WeakSet[ForkedProcess] = WeakSet()
        for server in self._servers:
            server.set_forkserver_preload(PRELOADED)

    def Process(self, *args: Any, **kwargs: Any) -> ForkedProcess:
        """Return a process that is forked when it starts."""
        process = ForkedProcess(next(self._turns), *args, **kwargs)
        self._processes.add(process)
        return process

    def close(self) -> None:
        """End the servers; before that, workers of an engine whose start failed, which would keep them alive."""
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for server in self._servers:
            server._stop()


class ForkedProcess(ForkServerProcess):
    """A process with the variables of the one that makes it, as if it were spawned."""

    def __init__(self, server: ForkServer, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._server = server
        self._environment = dict(os.environ)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the server behind when the process is sent there."""
        return {name: value for name, value in vars(self).items() if name != "_server"}

    def _Popen(self, process: ForkServerProcess) -> popen_forkserver.Popen:
        connect = self._server.connect_to_new_process
        with patch.object(popen_forkserver.forkserver, "connect_to_new_process", connect):
            return popen_forkserver.Popen(process)

    def run(self) -> None:
        """Take the variables over, then do what the process is for."""
        os.environ.clear()
        os.environ.update(self._environment)
        try:
            super().run()
        finally:
            remove_shared_memory()


def remove_shared_memory() -> None:
    """Remove what vLLM's ranks share: a forked process ends without the destructors that would."""
    identity = os.environ.get("VLLM_DIST_IDENT")
    if identity is not None:
        for segment in Path("/dev/shm").glob(f"{escape(identity)}-*"):
            segment.unlink(missing_ok=True)
