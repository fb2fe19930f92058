"""The most requests per second that an instance serves within a service level."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dbo_runtime.errors import ConfigError
from dbo_runtime.lab.simulate.instance import Outcome

WARM_UP = 0.2  # share of first requests that are served but not judged, because the instance starts empty
STEPS = 6  # bisections of the rate's logarithm, after bracketing it by a factor of 2: to about 1 %
MOST_DOUBLINGS = 10


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """The service promised to users.

    Attributes:
        ttft, tpot: largest seconds to the first token, and from one token to the next.
        quantile: share of the requests that must get both.

    Raises:
        ConfigError: a time is not above zero, or the quantile is not between 0 and 1.
    """

    ttft: float
    tpot: float
    quantile: float = 0.99

    def __post_init__(self) -> None:
        if not (self.ttft > 0 and self.tpot > 0):
            raise ConfigError(f"service level: ttft is {self.ttft:g} s and tpot {self.tpot:g} s; both are above zero.")
        if not 0 < self.quantile < 1:
            raise ConfigError(f"service level: quantile is {self.quantile:g}; it is between 0 and 1.")

    def judge(self, outcome: Outcome) -> Verdict:
        """Return the service that requests got, and whether it is within the level."""
        judged = outcome.served[int(len(outcome.served) * WARM_UP) :]
        ttft = compute_quantile([each.ttft for each in judged], self.quantile)
        tpot = compute_quantile([each.tpot for each in judged], self.quantile)
        return Verdict(ttft, tpot, ttft <= self.ttft and tpot <= self.tpot)


class Verdict(NamedTuple):
    """Seconds at a service level's quantile, and whether they are within the level."""

    ttft: float
    tpot: float
    holds: bool


class Capacity(NamedTuple):
    """The most requests per second within a service level, and the service at this rate.

    Attributes:
        rate: requests per second; 0 if not even a lone request is served within the level.
        verdict: the service at that rate.
    """

    rate: float
    verdict: Verdict


def find_capacity(run: Callable[[float], Verdict], start: float) -> Capacity:
    """Return the largest rate that *run* judges within the level, by bisection between one that is and one that is not.

    All smaller rates are taken to be within the level, too; chance can break this by a request or two. If a thousandth
    of *start* is not within the level either, the rate is 0.

    Args:
        run: function that serves requests at a rate and judges the service.
        start: a rate near the answer, in requests per second.

    Raises:
        ConfigError: the level holds at a thousand times *start*, so that nothing limits the instance.
    """
    capacity = _bracket(run, start)
    if not capacity.verdict.holds:
        return capacity
    low, verdict = capacity
    high = 2 * low
    for _ in range(STEPS):
        middle = math.sqrt(low * high)
        found = run(middle)
        low, high, verdict = (middle, high, found) if found.holds else (low, middle, verdict)
    return Capacity(low, verdict)


def compute_quantile(values: Sequence[float], quantile: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed.

    Raises:
        ConfigError: there are no values.
    """
    if not values:
        raise ConfigError("there is no request to judge: serve more of them.")
    return sorted(values)[max(math.ceil(len(values) * quantile) - 1, 0)]


def _bracket(run: Callable[[float], Verdict], start: float) -> Capacity:
    """Return a rate that is within the level while twice that rate is not; rate 0 if there is none."""
    rate, verdict = start, run(start)
    factor = 2.0 if verdict.holds else 0.5
    for _ in range(MOST_DOUBLINGS):
        further = run(factor * rate)
        if verdict.holds and not further.holds:
            return Capacity(rate, verdict)
        rate, verdict = factor * rate, further
        if verdict.holds and factor < 1:
            return Capacity(rate, verdict)
    if verdict.holds:
        raise ConfigError(f"the service level holds even at {rate:g} requests/s: serve more requests, or longer ones.")
    return Capacity(0.0, verdict)
