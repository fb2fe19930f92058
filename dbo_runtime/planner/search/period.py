"""An issue order for many equal layers: searched for with few of them, and one period of it repeated for the others.

An order of the micro-batches' next k layers advances the state of a search (see `lattice.State`) by a map that is
monotone, and commutes with a shift of all times. So if the state after these layers is nowhere more than d seconds
later than before them, it is nowhere more than m * d later after m repetitions (max-plus algebra; Baccelli, Cohen,
Olsder and Quadrat 1992): the repeated order never takes longer than the short one plus m * d.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from dbo_runtime.ir.policies import Order, alternate
from dbo_runtime.ir.program import Program
from dbo_runtime.ir.schedule import Issue
from dbo_runtime.planner.search.few_layers import FewLayers, keep_few_layers
from dbo_runtime.planner.search.jobs import Job, make_jobs
from dbo_runtime.planner.search.lattice import Lattice, LatticePoint, Times
from dbo_runtime.planner.search.search import find_order

SEARCHED_LAYERS = 9  # room for what comes before the steady state, for two periods of it, and for what comes after
MAX_PERIOD_LAYERS = 3  # a longer one would leave no room for that
SATURATION_TOLERANCE = 5e-3  # relative time in which the busiest lane may be idle
MAX_KEPT = 8  # programs with few layers
MIN_EQUAL_LAYERS = 24  # with fewer, a search of all layers takes about as long

MakeOrder = Callable[[FewLayers], Order]
"""Make an issue order for the micro-batches of a program with few layers."""


@dataclass(frozen=True, slots=True)
class Period:
    """The part of an issue order that can be repeated.

    Attributes:
        begin, end: its first instruction, and the one after its last.
        layers: by how many layers it advances each micro-batch.
        seconds: that each repetition adds at most.
    """

    begin: int
    end: int
    layers: int
    seconds: float

    @property
    def rate(self) -> float:
        """Seconds a layer, rounded so that equal periods compare as equal."""
        return float(f"{self.seconds / self.layers:.9g}")


@dataclass(frozen=True, slots=True)
class PeriodicOrder:
    """An issue order for a program with few of its equal layers, which goes on with as many more as needed.

    Attributes:
        few: the program of each micro-batch.
        order: for it.
        period: of the order. What `few` omits is a whole number of periods.
    """

    few: FewLayers
    order: Order
    period: Period

    @property
    def omitted_periods(self) -> int:
        """How often the period is repeated to make the order of all layers."""
        return self.few.omitted // self.period.layers

    def repeat(self, times: int) -> Order:
        """Return the order with its period *times* more often: for as many more layers."""
        shift = self.period.layers * self.few.ops
        body = self.order[self.period.begin : self.period.end]
        repeated = [Issue(mb, position + number * shift) for number in range(times + 1) for mb, position in body]
        rest = [Issue(mb, position + times * shift) for mb, position in self.order[self.period.end :]]
        return (*self.order[: self.period.begin], *repeated, *rest)


class PeriodSearch:
    """Finds periodic issue orders for micro-batches of one program.

    Args:
        program: of one micro-batch.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._keep = lru_cache(MAX_KEPT)(self._keep_layers)

    def lengthen(self, periodic: PeriodicOrder, times: int) -> FewLayers | None:
        """Return the program of each micro-batch if the period comes *times* more often; None if that is all of it."""
        return self._keep(periodic.few.kept + times * periodic.period.layers)

    def find(self, times: Sequence[Sequence[float]], max_states: int) -> PeriodicOrder | None:
        """Return an order that ends soon, found in a time that does not grow with the number of equal layers.

        *times* are the seconds of the whole program's ops [micro-batches][ops], alike in all equal layers. None if the
        program has but few equal layers, or no period is found in the order of few.
        """

        def make_jobs_of(few: FewLayers) -> tuple[Job, ...]:
            return make_jobs([few.program] * len(times), [few.select(seconds) for seconds in times])

        def search(few: FewLayers) -> Order:
            return find_order(make_jobs_of(few), max_states).order

        return self._make_periodic(search, make_jobs_of)

    def is_saturated(self, times: Sequence[Sequence[float]]) -> bool:
        """Whether alternating keeps a lane busy in the steady state, so that no order adds less for each layer.

        False as well if the program has but few equal layers. Such a lane leaves a beam no reason to prefer orders
        that repeat, and those that do not are worse for many layers.
        """
        few = self._keep(SEARCHED_LAYERS)
        if few is None:
            return False
        programs = [few.program] * len(times)
        jobs = make_jobs(programs, [few.select(seconds) for seconds in times])
        layer = slice(few.first, few.first + few.ops)
        busy: dict[int, float] = defaultdict(float)
        for job in jobs:
            for operation in job.operations[layer]:
                busy[operation.lane] += operation.seconds
        periods = find_periods(jobs, few, alternate(programs))
        return bool(periods) and periods[0].rate <= max(busy.values()) * (1 + SATURATION_TOLERANCE)

    def repeat_policy(self, policy: Callable[[Sequence[Program]], Order], micro_batches: int) -> PeriodicOrder | None:
        """Return the order of a policy that does with each layer alike; None as for `find`."""

        def make_jobs_of(few: FewLayers) -> tuple[Job, ...]:
            return make_jobs([few.program] * micro_batches, [[0.0] * len(few.program.ops)] * micro_batches)

        return self._make_periodic(lambda few: policy([few.program] * micro_batches), make_jobs_of)

    def _keep_layers(self, count: int) -> FewLayers | None:
        few = keep_few_layers(self._program, count)
        return None if few is None or few.kept + few.omitted < MIN_EQUAL_LAYERS else few

    def _make_periodic(
        self, make_order: MakeOrder, make_jobs_of: Callable[[FewLayers], Sequence[Job]]
    ) -> PeriodicOrder | None:
        """Make an order of few layers, or of so many more that its best period goes into what is omitted."""
        options = []
        count = SEARCHED_LAYERS
        while count < SEARCHED_LAYERS + MAX_PERIOD_LAYERS and (few := self._keep(count)) is not None:
            order = make_order(few)
            periods = find_periods(make_jobs_of(few), few, order)
            fitting = next((period for period in periods if not few.omitted % period.layers), None)
            if fitting is not None:
                options.append(PeriodicOrder(few, order, fitting))
            if not periods or periods[0] is fitting:
                break
            count += few.omitted % periods[0].layers
        return min(options, key=lambda option: option.period.rate, default=None)


def find_periods(jobs: Sequence[Job], few: FewLayers, order: Order) -> list[Period]:
    """Return the parts of *order* that can be repeated, those first that add least for each layer.

    A part can be repeated if it advances each micro-batch by the same whole number of equal layers.
    """
    visits: dict[LatticePoint, list[tuple[int, int, Times]]] = {}
    periods = []
    for number, (point, times) in enumerate(_walk(jobs, order)):
        if any(not few.first + few.ops <= position < few.end for position in point):
            continue  # the first layer may wait for what comes before, and not for a layer
        layer, phase = divmod(point[0] - few.first, few.ops)
        earlier = visits.setdefault((phase, *(position - point[0] for position in point[1:])), [])
        for begin, first_layer, before in earlier[-MAX_PERIOD_LAYERS:]:
            if layer - first_layer <= MAX_PERIOD_LAYERS and len(before) == len(times):
                seconds = max(after - time for time, after in zip(before, times, strict=True))
                periods.append(Period(begin, number, layer - first_layer, seconds))
        earlier.append((number, layer, times))
    return sorted(periods, key=lambda period: (period.rate, period.layers, period.begin))


def _walk(jobs: Sequence[Job], order: Order) -> Iterator[tuple[LatticePoint, Times]]:
    """Yield the point and the times before each instruction of *order*, and after the last one."""
    lattice = Lattice(jobs)
    point, state = lattice.start()
    yield point, state.times
    for number, _ in order:
        point, state = lattice.issue(point, state, number, lattice.compute_starts(point, state.times)[number])
        yield point, state.times
