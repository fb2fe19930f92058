"""Ranks as threads of this process: what they gather meets in memory, and a rank that never comes is an error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dbo_runtime.vllm_plugin.parallel import agreement

SECONDS = 20.0  # that a rank waits for the others


class ThreadRanks:
    """Groups of as many ranks as there are threads. What they exchange goes through `agreement.gather`'s own code."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int = 2) -> None:
        self._size = size
        self._barrier = threading.Barrier(size, timeout=SECONDS)
        self._sent: list[bytes] = [b""] * size
        self.meetings = [0] * size
        monkeypatch.setattr(agreement, "exchange_bytes", self._exchange)

    def run(self, job: Callable[[Any], Any]) -> list[Any]:
        """Run `job(group)` on each rank; return the results, or what was raised, in rank order."""

        def run_one(rank: int) -> Any:
            try:
                return job(ThreadGroup(rank, self._size))
            except Exception as error:  # noqa: BLE001 - the test looks at it
                return error

        with ThreadPoolExecutor(self._size) as pool:
            return list(pool.map(run_one, range(self._size)))

    def _exchange(self, group: ThreadGroup, own: bytes) -> list[bytes]:
        self.meetings[group.rank_in_group] += 1
        self._sent[group.rank_in_group] = own
        self._barrier.wait()
        received = list(self._sent)
        self._barrier.wait()
        return received


class ThreadGroup:
    """What of vLLM's coordinator of a group is asked for."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank_in_group = rank
        self.world_size = size
