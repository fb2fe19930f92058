"""Issue orders with what is derived from them: a name, a schedule, and a short one that predicts the long one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.op import SIDE
from dbo_runtime.ir.policies import Order
from dbo_runtime.ir.program import Program
from dbo_runtime.ir.schedule import Schedule
from dbo_runtime.observe.timeline import Timeline

COMPARED_PERIODS = 3  # in a row: if the third follows the second as the second the first, so do all others
STEADY_TOLERANCE = 1e-4  # relative difference of what periods take; a prediction is off by less


@dataclass(frozen=True, slots=True)
class RepeatingSchedule:
    """A schedule of few layers in which a period is repeated, for a step in which it is repeated more often.

    Attributes:
        schedule: of few layers.
        begin: number of the first instruction of the periods to compare.
        length: of a period, in instructions.
        omitted: how often the period is repeated in addition.
    """

    schedule: Schedule
    begin: int
    length: int
    omitted: int

    def extrapolate_end(self, timeline: Timeline) -> float | None:
        """Return when the last op of the whole step ends, from when those of few layers run.

        None if they reach no steady state, in which each op of a period runs as much later than in the one before.
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
        name: short and unique among the orders of a planner.
        programs: of each micro-batch.
        order: of all their ops.
        repeating: predicts the whole step; None if the order has no period, or there are few layers anyway.
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
