"""An issue order for many equal layers: search with a few of them, and repeat one period of the order for the others.

An order of the micro-batches' next k layers maps the state of a search (see `lattice.LatticeState`) to a new state.
This map is monotone, and commutes with a shift of all times. So if no time after these layers is more than d seconds
later than before them, then after m repetitions no time is more than m * d later (max-plus algebra; Baccelli, Cohen,
Olsder and Quadrat 1992). The repeated order therefore never takes longer than the short one plus m * d.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from dbo_runtime.errors import ConfigError
from dbo_runtime.ir.policies import Order, alternate
from dbo_runtime.ir.program import Program
from dbo_runtime.ir.schedule import Issue
from dbo_runtime.planner.costs.program_spec import build_program, describe_program, repeat_runs
from dbo_runtime.planner.search.jobs import Job, make_jobs
from dbo_runtime.planner.search.lattice import Lattice, LatticePoint, Times
from dbo_runtime.planner.search.search import find_order

SEARCHED_LAYERS = 9  # room for a start, two periods of the steady state, and an end
MAX_PERIOD_LAYERS = 3  # a longer period would leave no room for that
SATURATION_TOLERANCE = 5e-3  # share of time in which the busiest lane may be idle
MORE_STATES = 4  # times as many states are searched again where a beam's order leaves every lane idle for some time
MAX_KEPT = 8  # shortened programs to keep
MIN_EQUAL_LAYERS = 24  # with fewer, a search of all layers takes about as long


@dataclass(frozen=True, slots=True)
class FewLayers:
    """A program without most of its equal layers.

    Attributes:
        program: the shortened program; it can be planned, but not run.
        first: position of the first op of the equal layers.
        ops: number of ops in each of these layers.
        kept: number of these layers that are kept.
        omitted: number of these layers that are left out.
    """

    program: Program
    first: int
    ops: int
    kept: int
    omitted: int

    @property
    def end(self) -> int:
        """The position after the last op of the kept equal layers."""
        return self.first + self.kept * self.ops

    def select(self, values: Sequence[float]) -> list[float]:
        """Return the values of the kept ops from *values* of the whole program's ops [ops]."""
        return [*values[: self.end], *values[self.end + self.omitted * self.ops :]]


MakeOrder = Callable[[FewLayers], Order]
"""Makes an issue order for the micro-batches of a program with few layers."""


@dataclass(frozen=True, slots=True)
class Period:
    """A part of an issue order that can be repeated.

    Attributes:
        begin, end: number of its first instruction, and the number after its last.
        layers: number of layers by which it advances each micro-batch.
        seconds: largest number of seconds that each repetition adds.
    """

    begin: int
    end: int
    layers: int
    seconds: float

    @property
    def rate(self) -> float:
        """Seconds per layer, rounded so that equal periods compare as equal."""
        return float(f"{self.seconds / self.layers:.9g}")


@dataclass(frozen=True, slots=True)
class PeriodicOrder:
    """An issue order for a program with few of its equal layers, extensible to any number of further layers.

    Attributes:
        few: the shortened program of each micro-batch.
        order: an issue order for it.
        period: a period of this order. The layers omitted from `few` are a whole number of periods.
    """

    few: FewLayers
    order: Order
    period: Period

    @property
    def omitted_periods(self) -> int:
        """The number of repetitions of the period that make the order of all layers."""
        return self.few.omitted // self.period.layers

    def repeat(self, times: int) -> Order:
        """Return the order with *times* further repetitions of its period, for as many more layers."""
        shift = self.period.layers * self.few.ops
        body = self.order[self.period.begin : self.period.end]
        repeated = [Issue(mb, position + number * shift) for number in range(times + 1) for mb, position in body]
        rest = [Issue(mb, position + times * shift) for mb, position in self.order[self.period.end :]]
        return (*self.order[: self.period.begin], *repeated, *rest)


class PeriodSearch:
    """Finds periodic issue orders for micro-batches that run one program.

    Args:
        program: the program of one micro-batch.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._keep = lru_cache(MAX_KEPT)(self._keep_layers)

    def lengthen(self, periodic: PeriodicOrder, times: int) -> FewLayers | None:
        """Return each micro-batch's program with *times* further periods; None if that is the whole program."""
        return self._keep(periodic.few.kept + times * periodic.period.layers)

    def find(self, times: Sequence[Sequence[float]], max_states: int) -> PeriodicOrder | None:
        """Return an order that ends soon, in a search time that does not grow with the number of equal layers.

        *times* are the seconds of the whole program's ops [micro-batches][ops], the same in all equal layers. Returns
        None if the program has only a few equal layers, or if the order of a few layers has no period. More states are
        searched where the order of a beam leaves every lane idle for some time.
        """

        def make_jobs_of(few: FewLayers) -> tuple[Job, ...]:
            return make_jobs([few.program] * len(times), [few.select(seconds) for seconds in times])

        def search(states: int, few: FewLayers) -> Order:
            return find_order(make_jobs_of(few), states).order

        found = self._make_periodic(partial(search, max_states), make_jobs_of)
        is_exact = len(times) == 2  # only more micro-batches are searched by a beam, which may be too narrow
        if found is None or is_exact or _keeps_busy(found.period, make_jobs_of(found.few), found.few):
            return found
        wider = self._make_periodic(partial(search, MORE_STATES * max_states), make_jobs_of)
        return _choose_best([found, wider])

    def is_saturated(self, times: Sequence[Sequence[float]]) -> bool:
        """Return whether alternating keeps a lane busy in the steady state, so that no order adds less time per layer.

        Also False if the program has only a few equal layers. A busy lane gives a beam no reason to prefer orders that
        repeat, and orders that do not repeat are worse for many layers.
        """
        few = self._keep(SEARCHED_LAYERS)
        if few is None:
            return False
        programs = [few.program] * len(times)
        jobs = make_jobs(programs, [few.select(seconds) for seconds in times])
        periods = find_periods(jobs, few, alternate(programs))
        return bool(periods) and _keeps_busy(periods[0], jobs, few)

    def repeat_policy(self, policy: Callable[[Sequence[Program]], Order], micro_batches: int) -> PeriodicOrder | None:
        """Return the order of a policy that treats each layer alike; None as for `find`."""

        def make_jobs_of(few: FewLayers) -> tuple[Job, ...]:
            return make_jobs([few.program] * micro_batches, [[0.0] * len(few.program.ops)] * micro_batches)

        return self._make_periodic(lambda few: policy([few.program] * micro_batches), make_jobs_of)

    def _keep_layers(self, count: int) -> FewLayers | None:
        few = keep_few_layers(self._program, count)
        return None if few is None or few.kept + few.omitted < MIN_EQUAL_LAYERS else few

    def _make_periodic(
        self, make_order: MakeOrder, make_jobs_of: Callable[[FewLayers], Sequence[Job]]
    ) -> PeriodicOrder | None:
        """Make an order of a few layers, adding layers until its best period divides the omitted ones."""
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
        return _choose_best(options)


def _choose_best(options: Sequence[PeriodicOrder | None]) -> PeriodicOrder | None:
    """Return the order that adds the least time per layer, and of equal ones the first; None without any."""
    found = [option for option in options if option is not None]
    return min(found, key=lambda option: option.period.rate, default=None)


def _keeps_busy(period: Period, jobs: Sequence[Job], few: FewLayers) -> bool:
    """Return whether a lane is nearly always busy while the period repeats, so that no order adds less time."""
    busy: dict[int, float] = defaultdict(float)
    for job in jobs:
        for operation in job.operations[few.first : few.first + few.ops]:
            busy[operation.lane] += operation.seconds
    return period.rate <= max(busy.values()) * (1 + SATURATION_TOLERANCE)


def find_periods(jobs: Sequence[Job], few: FewLayers, order: Order) -> list[Period]:
    """Return the parts of *order* that can be repeated, those first that add the least time per layer.

    A part can be repeated if it advances each micro-batch by the same whole number of equal layers.
    """
    visits: dict[LatticePoint, list[tuple[int, int, Times]]] = {}
    periods = []
    for number, (point, times) in enumerate(_walk(jobs, order)):
        if any(not few.first + few.ops <= position < few.end for position in point):
            continue  # the first layer may wait for earlier ops that are not in a layer
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


def keep_few_layers(program: Program, count: int) -> FewLayers | None:
    """Leave out all but *count* equal layers; None if the program has no more, or reads values that they hide."""
    spec = describe_program(program)
    number, run = max(enumerate(spec.runs), key=lambda item: item[1].repeat, default=(0, None))
    if run is None or run.repeat <= count:
        return None
    first = sum(earlier.repeat * len(earlier.ops) for earlier in spec.runs[:number])
    try:
        few = repeat_runs(spec, [count if each is run else each.repeat for each in spec.runs])
    except ConfigError:
        return None
    return FewLayers(build_program(few), first, len(run.ops), count, run.repeat - count)
