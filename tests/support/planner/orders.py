"""Issue orders to compare a search with, and their ends by the lattice that it walks through."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dbo_runtime.errors import ScheduleError
from dbo_runtime.ir.policies import Order
from dbo_runtime.ir.schedule import Issue
from dbo_runtime.planner.search.jobs import Job
from dbo_runtime.planner.search.lattice import Lattice


def order_greedily(jobs: Sequence[Job]) -> Order:
    """Return the order that always issues the op that can start first, without looking ahead: it may lose 15 %.

    Among equals, that of the micro-batch with most work left.
    """
    lattice = Lattice(jobs)
    point, state = lattice.start()
    while issuable := lattice.list_issuable(point):
        starts = lattice.compute_starts(point, state.times)
        best = min(issuable, key=lambda number: (starts[number], -sum(jobs[number].left[point[number]]), number))
        point, state = lattice.issue(point, state, best, starts[best])
    return lattice.read_order(state)


def measure_order(jobs: Sequence[Job], order: Iterable[Issue]) -> float:
    """Return when the last op ends if ops are issued in *order*.

    Raises:
        ScheduleError: if an op is issued before its turn, or not at all.
    """
    lattice = Lattice(jobs)
    point, state = lattice.start()
    for number, position in order:
        if number not in lattice.list_issuable(point) or point[number] != position:
            raise ScheduleError(f"op {position} of micro-batch {number} is issued before its turn.")
        point, state = lattice.issue(point, state, number, lattice.compute_starts(point, state.times)[number])
    if sum(point) < lattice.depth:
        raise ScheduleError(f"the order issues {sum(point)} of {lattice.depth} ops.")
    return lattice.compute_end(state)
