"""Search for the issue order that ends first: exact for two micro-batches, a beam for more.

Issuing op after op is a path through a lattice. A point says how many ops of each micro-batch are issued. The future
depends only on a few times: when each lane is free, and when each op ends that later ops on other lanes wait for. If
two paths lead to a point, and one of them is later in no time, it dominates the other.

Most points need no branching. If an op ends before anything of another micro-batch could start on its lane, issuing it
first loses nothing, so branches remain only where ops compete. For two micro-batches that are chains on two lanes this
is Akers' shortest path around obstacles (Akers 1956; Brucker 1988): ops that need the same lane are the obstacles.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, gt
from typing import NamedTuple

from dbo_runtime.ir.policies import Order
from dbo_runtime.ir.schedule import Issue
from dbo_runtime.planner.search.bound import compute_bound
from dbo_runtime.planner.search.jobs import Job
from dbo_runtime.planner.search.lattice import Lattice, LatticePoint, LatticeState

BEAM = 16  # states kept per depth for a first solution, which bounds the exact search
WIDE_BEAM = 256  # the same for more than two micro-batches, where there is no exact search
DEFAULT_SEARCH_STATES = 200_000  # limit of the exact search: two to three seconds
BEAM_SHARE = 0.25  # share of the states that a beam may visit: they cost more
ROUNDING = 1e-9  # relative difference between equal sums of floats


@dataclass(frozen=True, slots=True)
class FoundOrder:
    """The issue order found by a search, and a bound.

    Attributes:
        order: the issue order.
        seconds: time at which the last op ends.
        bound: seconds that no order can beat; equal to *seconds* if the order is proven optimal.
    """

    order: Order
    seconds: float
    bound: float

    @property
    def gap(self) -> float:
        """Largest share of its time by which the order may be slower than the best one."""
        return 1.0 - self.bound / self.seconds if self.seconds else 0.0

    @property
    def is_optimal(self) -> bool:
        """Whether no order can be faster."""
        return self.bound >= self.seconds * (1 - ROUNDING)


def find_order(jobs: Sequence[Job], max_states: int = DEFAULT_SEARCH_STATES) -> FoundOrder:
    """Return the issue order that ends first.

    The result is exact for two jobs, unless more than *max_states* states would have to be visited. Otherwise it is the
    best order that a beam finds, with a bound.
    """
    bound = compute_bound(jobs)
    lattice = Lattice(jobs)
    order, seconds = _run_beam(lattice, _choose_width(jobs, max_states))
    if len(jobs) == 2 and bound < seconds * (1 - ROUNDING):
        better, proven = _run_exact(lattice, seconds, max_states)
        if better is not None:
            order, seconds = better
        if proven:
            bound = seconds
    return FoundOrder(issue_early(jobs, order), seconds, min(bound, seconds))


def issue_early(jobs: Sequence[Job], order: Order) -> Order:
    """Return *order* with ops of other lanes than `compute` issued as early as possible. Each lane's order stays.

    This makes no difference to lanes, which run in order. It helps a host that computes, and issues nothing meanwhile.
    """
    queues: dict[tuple[str, int], deque[Issue]] = {}
    for issue in order:
        for key in _list_queues(jobs, issue):
            queues.setdefault(key, deque()).append(issue)
    lanes = sorted((key for key in queues if key[0] == "lane"), reverse=True)  # `compute`, lane 0, comes last
    done = [0] * len(jobs)
    early: list[Issue] = []
    while len(early) < len(order):
        heads = (queues[lane][0] for lane in lanes if queues[lane])
        issue = next(head for head in heads if _is_next(jobs, queues, head, done))  # one exists: the next op of *order*
        for key in _list_queues(jobs, issue):
            queues[key].popleft()
        done[issue.micro_batch] += 1
        early.append(issue)
    return tuple(early)


def _list_queues(jobs: Sequence[Job], issue: Issue) -> list[tuple[str, int]]:
    operation = jobs[issue.micro_batch].operations[issue.position]
    return (
        [("lane", operation.lane)]
        if operation.buffer is None
        else [("lane", operation.lane), ("buffer", operation.buffer)]
    )


def _is_next(
    jobs: Sequence[Job], queues: Mapping[tuple[str, int], deque[Issue]], issue: Issue, done: Sequence[int]
) -> bool:
    follows = jobs[issue.micro_batch].operations[issue.position].follows
    return (
        done[issue.micro_batch] == issue.position
        and (follows is None or done[follows[0]] > follows[1])
        and all(queues[key][0] == issue for key in _list_queues(jobs, issue))
    )


def _choose_width(jobs: Sequence[Job], max_states: int) -> int:
    if len(jobs) < 3:
        return BEAM
    return min(WIDE_BEAM, 1 + int(BEAM_SHARE * max_states) // sum(len(job.operations) for job in jobs))


def _run_beam(lattice: Lattice, width: int) -> tuple[Order, float]:
    """Return the best order found, and its end. The beam keeps *width* states at each depth."""
    level = [_rank(lattice, *lattice.start())]
    for _ in range(lattice.depth):
        front: dict[LatticePoint, list[LatticeState]] = {}
        for reached in level:
            _expand(lattice, reached.point, reached.state, reached.starts, front)
        found = [_rank(lattice, point, state) for point, states in front.items() for state in states]
        level = sorted(found, key=attrgetter("bound", "lanes"))[:width]
    best = min((reached.state for reached in level), key=lattice.compute_end)
    return lattice.read_order(best), lattice.compute_end(best)


class _Reached(NamedTuple):
    """A state that a beam has reached.

    Attributes:
        bound: earliest time at which everything can have ended; states are kept by it first.
        lanes: sum of the times at which lanes are free; equal bounds are kept by it.
        point: the state's point.
        state: the state.
        starts: earliest start of each job's next operation [jobs].
    """

    bound: float
    lanes: float
    point: LatticePoint
    state: LatticeState
    starts: Sequence[float]


def _rank(lattice: Lattice, point: LatticePoint, state: LatticeState) -> _Reached:
    starts = lattice.compute_starts(point, state.times)
    return _Reached(lattice.bound(point, state.times, starts), lattice.sum_lanes(state), point, state, starts)


def _run_exact(lattice: Lattice, to_beat: float, max_states: int) -> tuple[tuple[Order, float] | None, bool]:
    """Return an order that ends before *to_beat*, with its end, and whether the search was complete."""
    point, state = lattice.start()
    level = {point: [state]}
    visited = 0
    for _ in range(lattice.depth):
        front: dict[LatticePoint, list[LatticeState]] = {}
        for point, states in level.items():
            for state in states:
                starts = lattice.compute_starts(point, state.times)
                if lattice.bound(point, state.times, starts) < to_beat * (1 - ROUNDING):
                    _expand(lattice, point, state, starts, front)
        visited += sum(map(len, level.values()))
        if visited > max_states:
            return None, False
        level = front
    last = [state for states in level.values() for state in states]
    best = min(last, key=lattice.compute_end, default=None)
    if best is None or lattice.compute_end(best) >= to_beat:
        return None, True
    return (lattice.read_order(best), lattice.compute_end(best)), True


def _expand(
    lattice: Lattice,
    point: LatticePoint,
    state: LatticeState,
    starts: Sequence[float],
    front: dict[LatticePoint, list[LatticeState]],
) -> None:
    """Add the results of a state's branches to *front*."""
    for number in lattice.list_choices(point, state.times, starts):
        reached, child = lattice.issue(point, state, number, starts[number])
        if reached in front:
            _keep(front[reached], child)
        else:
            front[reached] = [child]


def _keep(states: list[LatticeState], new: LatticeState) -> None:
    """Add *new* unless another state dominates it. Drop the states that it dominates."""
    times = new.times
    dominates = False
    for state in states:
        earlier = later = False
        for ours, theirs in zip(times, state.times, strict=True):
            if ours < theirs:
                earlier = True
            elif ours > theirs:
                later = True
        if not earlier:
            return
        dominates |= not later
    if dominates:
        states[:] = [state for state in states if any(map(gt, times, state.times))]
    states.append(new)
