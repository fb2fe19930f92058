"""Batches as a server with continuous batching and chunked prefill schedules them, without a server."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dbo_runtime.batch import Batch
from dbo_runtime.planner.online.shapes import ServingLimits


@dataclass(slots=True)
class Request:
    """A request: tokens of its prompt and of its answer, and how many of them are in the KV cache."""

    prompt: int
    answer: int
    cached: int = 0


def schedule(
    rng: random.Random, limits: ServingLimits, load: float, measure: Callable[[Batch], float], capacity: float
) -> Iterator[Batch]:
    """Yield batches for ever.

    Every step takes a token of each running request first, as vLLM's scheduler does, and then prompts, in pieces, until
    the limit. Requests arrive at random, at *load* times the rate at which their tokens could be computed at *capacity*
    tokens a second; a step takes as long as *measure* says, in seconds.
    """
    running: list[Request] = []
    waiting: deque[Request] = deque()
    credit = float(limits.tokens)
    while True:
        while credit > 0:
            prompt = min(int(rng.lognormvariate(6.6, 1.1)) + 1, limits.context - limits.tokens // 4)
            request = Request(prompt, min(int(rng.lognormvariate(4.8, 0.8)) + 1, limits.context - prompt))
            waiting.append(request)
            credit -= request.prompt + request.answer
        batch = _take(running, waiting, limits)
        if batch is None:
            credit += limits.tokens
            continue
        yield batch
        credit += load * capacity * measure(batch)


def _take(running: list[Request], waiting: deque[Request], limits: ServingLimits) -> Batch | None:
    """Take the next step of what runs and waits; None if that is nothing."""
    decodes = [request for request in running if request.cached >= request.prompt]
    prefills = [request for request in running if request.cached < request.prompt]
    room = limits.tokens - len(decodes)
    while waiting and len(running) < limits.requests and room > sum(one.prompt - one.cached for one in prefills):
        running.append(waiting.popleft())
        prefills.append(running[-1])
    taken = [(request, 1) for request in decodes]
    for request in prefills:
        piece = min(request.prompt - request.cached, room)
        if piece > 0:
            taken.append((request, piece))
            room -= piece
    if not taken:
        return None
    contexts = tuple(request.cached for request, _ in taken)
    lengths = tuple(piece for _, piece in taken)
    for request, piece in taken:
        request.cached += piece
    running[:] = [request for request in running if request.cached < request.prompt + request.answer]
    return Batch(lengths, sum(piece for piece in lengths if piece > 1), context_lens=contexts)
