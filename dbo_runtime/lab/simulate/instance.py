"""A discrete-event simulation of a serving instance: data parallel ranks that run their steps together.

Experts are spread over all ranks, so each rank's step waits for the others. A step takes as long as on the busiest
rank, and longer if a rank is late. A request goes to the rank with the fewest requests.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dbo_runtime.lab.simulate.disturbance import Disturbance, Disturbances
from dbo_runtime.lab.simulate.scheduler import Load, RankScheduler, Served
from dbo_runtime.lab.simulate.step_times import StepPricer
from dbo_runtime.lab.simulate.workload import Request

if TYPE_CHECKING:
    import simpy


@dataclass(frozen=True, slots=True)
class Layout:
    """A serving instance.

    Attributes:
        ranks: number of data parallel ranks that experts are spread over.
        budget: most tokens of a rank in a step, `max_num_batched_tokens`.
        sequences: most sequences of a rank, `max_num_seqs` or the number that fits into memory.
    """

    ranks: int
    budget: int
    sequences: int


@dataclass(slots=True)
class Outcome:
    """The result of a run.

    Attributes:
        served: all requests, in order of arrival.
        seconds: time until the last request was done.
        busy: seconds in which steps ran.
        steps: number of steps.
        population_seconds: integral over time of the number of requests in the system, for Little's law.
    """

    served: list[Served] = field(default_factory=list)
    seconds: float = 0.0
    busy: float = 0.0
    steps: int = 0
    population_seconds: float = 0.0


def serve(
    requests: Sequence[Request], layout: Layout, pricer: StepPricer, disturbances: Disturbances, seed: int
) -> Outcome:
    """Serve *requests* on an instance whose step times come from *pricer*, and return the outcome."""
    import simpy

    environment, outcome = simpy.Environment(), Outcome()
    ranks = [RankScheduler(layout.budget, layout.sequences) for _ in range(layout.ranks)]
    engine = _Engine(environment, ranks, pricer, disturbances.draw(layout.ranks, seed), outcome)
    environment.process(engine.arrive(requests))
    environment.process(engine.run(len(requests)))
    environment.run()
    return outcome


class _Engine:
    """The two processes of an instance: requests arrive, and steps run while there is work."""

    def __init__(
        self,
        environment: simpy.Environment,
        ranks: Sequence[RankScheduler],
        pricer: StepPricer,
        disturbances: Iterator[Disturbance],
        outcome: Outcome,
    ) -> None:
        self._environment = environment
        self._ranks = ranks
        self._pricer = pricer
        self._disturbances = disturbances
        self._outcome = outcome
        self._arrived = environment.event()
        self._counted_at = 0.0
        self._prices: dict[Load, tuple[float, float]] = {}

    def arrive(self, requests: Sequence[Request]) -> Generator[Any, Any, None]:
        """Queue each request, when it arrives, on the rank with the fewest requests."""
        for request in requests:
            if request.arrival > self._environment.now:
                yield self._environment.timeout(request.arrival - self._environment.now)
            self._count_population()
            served = Served(request, request.prompt)
            self._outcome.served.append(served)
            min(self._ranks, key=lambda rank: rank.population).add(served)
            self._arrived.succeed()
            self._arrived = self._environment.event()

    def run(self, count: int) -> Generator[Any, Any, None]:
        """Run steps until *count* requests are done. Without work, wait for the next arrival."""
        left = count
        while left:
            loads = {rank.fill() for rank in self._ranks}
            if not any(load.prefill_tokens or load.decodes for load in loads):
                yield self._arrived
                continue
            if (yield from self._repeat(loads)):
                continue
            yield self._time_step(loads)
            self._count_population()
            left -= sum(rank.end_step(self._outcome.steps, self._environment.now) for rank in self._ranks)
            self._outcome.seconds = self._environment.now

    def _repeat(self, loads: Collection[Load]) -> Generator[Any, Any, bool]:
        """Run the equal steps that only have decodes, up to the one before the first decode ends.

        Return whether a request arrived meanwhile, which makes later steps different.
        """
        if any(load.prefill_tokens for load in loads):
            return False
        known = len(self._outcome.served)
        while self._outcome.steps + 1 < min(rank.next_end for rank in self._ranks):
            yield self._time_step(loads)
            if len(self._outcome.served) > known:
                return True
        return False

    def _time_step(self, loads: Collection[Load]) -> simpy.Timeout:
        """Count a step, and return its duration: that of the busiest rank, or longer if a rank is late."""
        happening = next(self._disturbances)
        share = happening.imbalance
        planned = max((1 - share) * even + share * uneven for even, uneven in map(self._price, loads))
        self._outcome.steps += 1
        self._outcome.busy += planned * happening.slowdown
        return self._environment.timeout(planned * happening.slowdown)

    def _price(self, load: Load) -> tuple[float, float]:
        if load not in self._prices:
            self._prices[load] = self._pricer.price(*load)
        return self._prices[load]

    def _count_population(self) -> None:
        """Add the requests in the system since their number last changed. Called before it changes again."""
        elapsed = self._environment.now - self._counted_at
        self._outcome.population_seconds += elapsed * sum(rank.population for rank in self._ranks)
        self._counted_at = self._environment.now
