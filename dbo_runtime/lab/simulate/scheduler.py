"""Continuous batching with chunked prefill on one rank: decodes first, then prompts in order, up to a token budget."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from dbo_runtime.lab.simulate.workload import Request


@dataclass(slots=True)
class Served:
    """A request and its progress; times in seconds.

    Attributes:
        request: the request.
        left: number of prompt tokens still to be computed.
        first: time of its first token; negative before.
        last: time of its last token; negative before.
    """

    request: Request
    left: int
    first: float = -1.0
    last: float = -1.0

    @property
    def ttft(self) -> float:
        """Seconds from arrival to the first token."""
        return self.first - self.request.arrival

    @property
    def tpot(self) -> float:
        """Mean seconds from one token to the next; 0 if there is only one token."""
        return (self.last - self.first) / (self.request.output - 1) if self.request.output > 1 else 0.0


class Load(NamedTuple):
    """The work of a rank in a step: tokens of prefills, and decodes."""

    prefill_tokens: int
    decodes: int


@dataclass(slots=True)
class RankScheduler:
    """The queue and the running requests of one data parallel rank, as in vLLM's scheduler.

    A decode takes part in every step until its last token, so only the number of that step is kept.

    Attributes:
        budget: most tokens of a step.
        sequences: most running requests.
        waiting: requests with prompt tokens left, oldest first; those that have started are running.
        decodes: number of the step in which each decode ends, with a second number that orders equal ones.
    """

    budget: int
    sequences: int
    waiting: deque[Served] = field(default_factory=deque)
    decodes: list[tuple[int, int, Served]] = field(default_factory=list)
    _chunks: list[tuple[Served, int]] = field(default_factory=list)
    _count: int = 0

    @property
    def population(self) -> int:
        """Number of requests that have arrived and are not done."""
        return len(self.waiting) + len(self.decodes)

    @property
    def next_end(self) -> float:
        """Number of the step in which the next decode ends; infinite if there is none."""
        return self.decodes[0][0] if self.decodes else math.inf

    def add(self, served: Served) -> None:
        """Queue a request."""
        self.waiting.append(served)

    def fill(self) -> Load:
        """Choose the work of the next step, and return its amount."""
        if not self.waiting:
            return Load(0, len(self.decodes))
        left, self._chunks = self.budget - len(self.decodes), []
        room = self.sequences - len(self.decodes)
        for served in self.waiting:
            if left <= 0 or len(self._chunks) >= room:
                break
            tokens = min(served.left, left)
            self._chunks.append((served, tokens))
            left -= tokens
        return Load(sum(tokens for _, tokens in self._chunks), len(self.decodes))

    def end_step(self, number: int, now: float) -> int:
        """Account for a step that ended at *now*: first tokens of computed prompts, and last tokens.

        Return how many requests it completed.
        """
        done = 0
        while self.decodes and self.decodes[0][0] <= number:
            served = heappop(self.decodes)[2]
            served.last = now
            done += 1
        if not self._chunks:
            return done
        for served, tokens in self._chunks:
            served.left -= tokens
        while self.waiting and not self.waiting[0].left:
            served = self.waiting.popleft()
            served.first = now
            if served.request.output == 1:
                served.last = now
                done += 1
            else:
                self._count += 1
                heappush(self.decodes, (number + served.request.output - 1, self._count, served))
        self._chunks = []
        return done
