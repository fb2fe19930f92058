"""Issue orders, each with a name, its schedule, and a short schedule that predicts the long one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.op import SIDE
from dbo_runtime.ir.policies import Order
from dbo_runtime.ir.program import Program
from dbo_runtime.ir.schedule import Schedule
from dbo_runtime.observe.timeline import Timeline

COMPARED_PERIODS = 3  # periods in a row: if the second and the third take equally long, so do all further ones
STEADY_TOLERANCE = 1e-4  # largest relative difference between periods; a prediction is off by less


@dataclass(frozen=True, slots=True)
class RepeatingSchedule:
    """A schedule of few layers that repeats a period. It stands for a step that repeats the period more often.

    Attributes:
        schedule: schedule of few layers.
        begin: number of the first instruction of the periods to compare.
        length: length of a period, in instructions.
        omitted: number of further periods in the whole step.
    """

    schedule: Schedule
    begin: int
    length: int
    omitted: int

    def extrapolate_end(self, timeline: Timeline) -> float | None:
        """Return when the last op of the whole step ends, from the timeline of the few layers.

        None if these reach no steady state. In a steady state, all ops of a period run later than in the period before
        by the same time.
        """
        firsts = range(self.begin, self.begin + (COMPARED_PERIODS - 1) * self.length)
        delays = [timeline.spans[first + self.length].end - timeline.spans[first].end for first in firsts]
        if max(delays) - min(delays) > STEADY_TOLERANCE * min(delays):
            return None
        return compute_end(timeline) + self.omitted * sum(delays) / len(delays)


@dataclass(frozen=True)
class NamedOrder:
    """An issue order.

    Attributes:
        name: short name, unique among the orders of a planner.
        programs: program of each micro-batch.
        order: issue order of all their ops.
        repeating: predicts the whole step from few layers; None if the order has no period, or the program has only few
            layers.
    """

    name: str
    programs: tuple[Program, ...]
    order: Order
    repeating: RepeatingSchedule | None = None

    @cached_property
    def side_ops(self) -> tuple[str, ...]:
        """Names of the ops that are on `side`."""
        return tuple(sorted({op.name for op in self.programs[0].ops if op.lane == SIDE}))

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule of all layers."""
        return lower(self.programs, self.order)


def compute_end(timeline: Timeline) -> float:
    """Return when the last op ends."""
    return max(span.end for span in timeline.spans)
