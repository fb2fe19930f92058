"""Arriving requests: a Poisson process, with lengths drawn from a log-normal distribution."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import NamedTuple

from dbo_runtime.errors import ConfigError

MAX_LENGTH = 1 << 20  # tokens of a prompt or an answer


class Request(NamedTuple):
    """A request.

    Attributes:
        arrival: time of arrival, in seconds.
        prompt: tokens to compute before the first token of the answer.
        output: tokens of the answer, including the first.
    """

    arrival: float
    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class Workload:
    """The distribution of requests.

    Attributes:
        prompt, output: mean numbers of tokens.
        context: tokens of a request already in the KV cache, such as after a prefill elsewhere.
        spread: standard deviation of the lengths, divided by their mean; 0 if all are equal.

    Raises:
        ConfigError: a mean is not from 1 to 1,048,576 tokens, or the spread is not from 0 to 10.
    """

    prompt: float
    output: float
    context: int = 0
    spread: float = 0.5

    def __post_init__(self) -> None:
        for name in ("prompt", "output"):
            if not 1 <= getattr(self, name) <= MAX_LENGTH:
                raise ConfigError(
                    f"workload: mean tokens of the {name} are {getattr(self, name):g}; they must be from 1 to "
                    f"{MAX_LENGTH}."
                )
        if not 0 <= self.context <= MAX_LENGTH:
            raise ConfigError(f"workload: context is {self.context}; it must be from 0 to {MAX_LENGTH} tokens.")
        if not 0 <= self.spread <= 10:
            raise ConfigError(f"workload: spread is {self.spread:g}; it must be from 0 to 10 times the mean.")


def draw_requests(workload: Workload, rate: float, count: int, seed: int) -> list[Request]:
    """Return *count* requests of a Poisson process with *rate* requests per second, in order of arrival.

    The same seed gives the same lengths, and the same gaps except for their scale, so that rates and policies are
    compared on the same requests (common random numbers).

    Raises:
        ConfigError: the rate is not above zero, or there is no request.
    """
    if not (rate > 0 and math.isfinite(rate)) or count < 1:
        raise ConfigError(f"{count} requests at {rate:g} a second: both must be above zero.")
    draws, now, requests = random.Random(seed), 0.0, []
    for _ in range(count):
        now += draws.expovariate(1.0) / rate
        prompt, output = (_draw_length(draws, mean, workload.spread) for mean in (workload.prompt, workload.output))
        requests.append(Request(now, prompt, output))
    return requests


def _draw_length(draws: random.Random, mean: float, spread: float) -> int:
    """Return a log-normal length of at least one token, with this mean and deviation; 1 if the mean is 1."""
    variance = math.log1p(spread**2)
    length = mean * math.exp(draws.gauss(0.0, math.sqrt(variance)) - variance / 2) if mean > 1 else 1.0
    return min(max(round(length), 1), MAX_LENGTH)
