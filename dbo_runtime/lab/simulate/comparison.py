"""Compare an instance without overlap and with it, on the same requests, for several seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import NamedTuple

from dbo_runtime.lab.progress import show_progress
from dbo_runtime.lab.simulate.disturbance import Disturbances
from dbo_runtime.lab.simulate.instance import Layout, serve
from dbo_runtime.lab.simulate.service_level import Capacity, ServiceLevel, Verdict, find_capacity
from dbo_runtime.lab.simulate.step_times import StepPricer
from dbo_runtime.lab.simulate.workload import Workload, draw_requests
from dbo_runtime.lab.whatif.ranges import Range


@dataclass(frozen=True, slots=True)
class Scenario:
    """The scenario to simulate: requests, instance and service level.

    Attributes:
        workload: the requests.
        layout: the instance.
        disturbances: stragglers and uneven experts.
        level: the service level.
        requests: number of requests served in a run.
    """

    workload: Workload
    layout: Layout
    disturbances: Disturbances
    level: ServiceLevel
    requests: int


class Trial(NamedTuple):
    """The result of one seed: the capacity without and with overlap."""

    unsplit: Capacity
    overlapped: Capacity


class Comparison(NamedTuple):
    """The results of all seeds.

    Attributes:
        trials: one result per seed.
    """

    trials: tuple[Trial, ...]

    @property
    def unsplit(self) -> Range:
        """Requests per second without overlap: the median over the seeds, and the range."""
        return _span([trial.unsplit.rate for trial in self.trials])

    @property
    def overlapped(self) -> Range:
        """Requests per second with overlap: the median over the seeds, and the range."""
        return _span([trial.overlapped.rate for trial in self.trials])

    @property
    def gain(self) -> Range | None:
        """Ratio of requests per second, seed by seed; None if a seed serves no request."""
        if not all(trial.unsplit.rate for trial in self.trials):
            return None
        return _span([trial.overlapped.rate / trial.unsplit.rate for trial in self.trials])


def run_once(scenario: Scenario, pricer: StepPricer, seed: int, rate: float) -> Verdict:
    """Return the service that requests get at *rate* per second."""
    requests = draw_requests(scenario.workload, rate, scenario.requests, seed)
    outcome = serve(requests, scenario.layout, pricer, scenario.disturbances, seed + 1)
    return scenario.level.judge(outcome)


def estimate_throughput(workload: Workload, layout: Layout, pricer: StepPricer) -> float:
    """Estimate the requests per second that the instance can serve, from full steps of prefills and of decodes."""
    prefill = pricer.price(layout.budget, 0)[0] / layout.budget * workload.prompt
    decode = pricer.price(0, layout.sequences)[0] / layout.sequences * (workload.output - 1)
    return layout.ranks / (prefill + decode)


def compare_capacity(
    scenario: Scenario, unsplit: StepPricer, overlapped: StepPricer, seeds: Sequence[int]
) -> Comparison:
    """Return the most requests per second within the service level, without and with overlap, for each seed."""
    start = estimate_throughput(scenario.workload, scenario.layout, unsplit)
    searches = [partial(run_once, scenario, pricer, seed) for seed in seeds for pricer in (unsplit, overlapped)]
    found = [find_capacity(search, start) for search in show_progress(searches, "simulating", "search")]
    return Comparison(tuple(map(Trial, found[::2], found[1::2])))


def _span(values: Sequence[float]) -> Range:
    return Range(min(values), median(values), max(values))
