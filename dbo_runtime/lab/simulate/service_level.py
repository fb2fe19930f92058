"""The most requests a second that an instance serves within a service level."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dbo_runtime.errors import ConfigError
from dbo_runtime.lab.simulate.instance import Outcome

WARM_UP = 0.2  # share of the requests, the first ones, that are served but not judged: the instance starts empty
STEPS = 6  # bisections of the logarithm of the rate, after it is bracketed by a factor of 2: to about 1 %
MOST_DOUBLINGS = 10


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """What users are promised.

    Attributes:
        ttft, tpot: seconds to the first token, and from one to the next, at most.
        quantile: of the requests that must have them.

    Raises:
        ConfigError: if a time is not above zero, or the quantile not between 0 and 1.
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
        """Return what requests got, and whether that is within the level."""
        judged = outcome.served[int(len(outcome.served) * WARM_UP) :]
        ttft = compute_quantile([each.ttft for each in judged], self.quantile)
        tpot = compute_quantile([each.tpot for each in judged], self.quantile)
        return Verdict(ttft, tpot, ttft <= self.ttft and tpot <= self.tpot)


class Verdict(NamedTuple):
    """Seconds at the quantile of a service level, and whether they are within it."""

    ttft: float
    tpot: float
    holds: bool


class Capacity(NamedTuple):
    """The most requests a second within a service level, and what requests get then.

    Attributes:
        rate: requests a second; 0 if not even a lone request is served within the level.
        verdict: at that rate.
    """

    rate: float
    verdict: Verdict


def find_capacity(run: Callable[[float], Verdict], start: float) -> Capacity:
    """Return the largest rate at which *run* says that the level holds, by bisection between a rate that does and not.

    The level is taken to hold at all smaller rates, too, which chance can break by a request or two. If it does not
    hold at a thousandth of *start* either, the rate is 0.

    Args:
        run: serves requests at a rate, and judges what they got.
        start: a rate near the answer, in requests a second.

    Raises:
        ConfigError: if the level holds at a thousand times *start*, so that nothing limits the instance.
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
        ConfigError: if there is none.
    """
    if not values:
        raise ConfigError("there is no request to judge: serve more of them.")
    return sorted(values)[max(math.ceil(len(values) * quantile) - 1, 0)]


def _bracket(run: Callable[[float], Verdict], start: float) -> Capacity:
    """Return a rate at which the level holds, though not at twice that; rate 0 if there is none."""
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
