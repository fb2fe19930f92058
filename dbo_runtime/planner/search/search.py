"""The issue order that ends soonest: exact for two micro-batches, a beam for more.

Issuing op after op walks through a lattice whose points say how many ops of each micro-batch are issued. What the past
means to the future at a point is a few times: when each lane is free, and when those ops end that later ones on other
lanes wait for. Of two walks to a point, one that is nowhere later makes the other needless.

Most points need no choice. If an op ends before anything of another micro-batch could begin on its lane, it may as
well go first; a choice is left only where ops compete. For two micro-batches that are chains on two lanes this is
Akers' shortest path around obstacles (Akers 1956; Brucker 1988), where ops that need the same lane are the obstacles.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import gt

from dbo_runtime.errors import ScheduleError
from dbo_runtime.planner.search.bound import compute_bound
from dbo_runtime.planner.search.jobs import Job
from dbo_runtime.planner.search.lattice import Lattice, Point, State
from dbo_runtime.policies import Order
from dbo_runtime.schedule import Issue

BEAM = 16  # states kept at each depth for a first solution, which then bounds the exact search
WIDE_BEAM = 256  # the same for more than two micro-batches, where the beam has the last word
MOST_STATES = 200_000  # after which the exact search gives up: two seconds or three
BEAM_SHARE = 0.25  # of the states that may be looked at: those of a beam come dearer
ROUNDING = 1e-9  # what sums of floats may differ by, relatively


@dataclass(frozen=True, slots=True)
class Found:
    """An issue order and how good it is.

    Attributes:
        order: the issue order.
        seconds: when the last op ends.
        bound: seconds that no order can beat; equal to *seconds* if the order is proven optimal.
    """

    order: Order
    seconds: float
    bound: float

    @property
    def gap(self) -> float:
        """By which part of its time the order may be slower than the best one."""
        return 1.0 - self.bound / self.seconds if self.seconds else 0.0

    @property
    def is_optimal(self) -> bool:
        """Whether no order is faster."""
        return self.bound >= self.seconds * (1 - ROUNDING)


def find_order(jobs: Sequence[Job], most_states: int = MOST_STATES) -> Found:
    """Return the issue order that ends soonest.

    Exact for two jobs, unless more than *most_states* states would have to be looked at; the best that a beam finds
    otherwise, beside the bound.
    """
    bound = compute_bound(jobs)
    lattice = Lattice(jobs)
    order, seconds = _run_beam(lattice, _find_width(jobs, most_states))
    if len(jobs) == 2 and bound < seconds * (1 - ROUNDING):
        better, proven = _run_exact(lattice, seconds, most_states)
        if better is not None:
            order, seconds = better
        if proven:
            bound = seconds
    return Found(issue_early(jobs, order), seconds, min(bound, seconds))


def issue_early(jobs: Sequence[Job], order: Order) -> Order:
    """Return *order* with what runs beside `compute` issued as early as can be, each lane's own order as it was.

    On lanes that run in order it makes no difference when an op is issued, as long as that is early enough. It does
    where the host computes, and issues nothing meanwhile.
    """
    queues: dict[tuple[str, int], deque[Issue]] = {}
    for issue in order:
        for key in _find_queues(jobs, issue):
            queues.setdefault(key, deque()).append(issue)
    lanes = sorted((key for key in queues if key[0] == "lane"), reverse=True)  # `compute`, which is 0, comes last
    done = [0] * len(jobs)
    early: list[Issue] = []
    while len(early) < len(order):
        heads = (queues[lane][0] for lane in lanes if queues[lane])
        issue = next(head for head in heads if _is_next(jobs, queues, head, done))  # at least the order's own next one
        for key in _find_queues(jobs, issue):
            queues[key].popleft()
        done[issue.micro_batch] += 1
        early.append(issue)
    return tuple(early)


def _find_queues(jobs: Sequence[Job], issue: Issue) -> list[tuple[str, int]]:
    task = jobs[issue.micro_batch].tasks[issue.position]
    return [("lane", task.lane)] if task.buffer is None else [("lane", task.lane), ("buffer", task.buffer)]


def _is_next(
    jobs: Sequence[Job], queues: Mapping[tuple[str, int], deque[Issue]], issue: Issue, done: Sequence[int]
) -> bool:
    follows = jobs[issue.micro_batch].tasks[issue.position].follows
    return (
        done[issue.micro_batch] == issue.position
        and (follows is None or done[follows[0]] > follows[1])
        and all(queues[key][0] == issue for key in _find_queues(jobs, issue))
    )


def _find_width(jobs: Sequence[Job], most_states: int) -> int:
    if len(jobs) < 3:
        return BEAM
    return min(WIDE_BEAM, 1 + int(BEAM_SHARE * most_states) // sum(len(job.tasks) for job in jobs))


def order_greedily(jobs: Sequence[Job]) -> Order:
    """Return the order that always issues the op that can start first.

    Among equals, that of the micro-batch with most work left. It looks no step ahead, and may lose 15 % by it.
    """
    lattice = Lattice(jobs)
    at, state = lattice.start()
    while issuable := lattice.list_issuable(at):
        starts = lattice.compute_starts(at, state.times)
        best = min(issuable, key=lambda number: (starts[number], -sum(jobs[number].left[at[number]]), number))
        at, state = lattice.issue(at, state, best, starts[best])
    return lattice.read_order(state)


def measure_order(jobs: Sequence[Job], order: Iterable[Issue]) -> float:
    """Return when the last op ends if ops are issued in *order*.

    Raises:
        ScheduleError: if an op is issued before its turn, or not at all.
    """
    lattice = Lattice(jobs)
    at, state = lattice.start()
    for number, position in order:
        if number not in lattice.list_issuable(at) or at[number] != position:
            raise ScheduleError(f"op {position} of micro-batch {number} is issued before its turn.")
        at, state = lattice.issue(at, state, number, lattice.compute_starts(at, state.times)[number])
    if sum(at) < lattice.depth:
        raise ScheduleError(f"the order issues {sum(at)} of {lattice.depth} ops.")
    return lattice.compute_end(state)


def _run_beam(lattice: Lattice, width: int) -> tuple[Order, float]:
    """Return the best order found, and its end, with *width* states kept at each depth."""
    point, state = lattice.start()
    level = [(point, state)]
    for _ in range(lattice.depth):
        front: dict[Point, list[State]] = {}
        for point, state in level:
            _expand(lattice, point, state, lattice.compute_starts(point, state.times), front)
        reached = [(point, state) for point, states in front.items() for state in states]
        level = sorted(reached, key=partial(_rank, lattice))[:width]
    best = min((state for _, state in level), key=lattice.compute_end)
    return lattice.read_order(best), lattice.compute_end(best)


def _rank(lattice: Lattice, reached: tuple[Point, State]) -> tuple[float, float]:
    """Return what a beam prefers by: the bound, then the sum of the lanes' times."""
    point, state = reached
    return lattice.bound(point, state.times, lattice.compute_starts(point, state.times)), lattice.sum_lanes(state)


def _run_exact(lattice: Lattice, to_beat: float, most_states: int) -> tuple[tuple[Order, float] | None, bool]:
    """Return an order that ends before *to_beat*, with its end; and whether nothing better exists."""
    point, state = lattice.start()
    level = {point: [state]}
    looked_at = 0
    for _ in range(lattice.depth):
        front: dict[Point, list[State]] = {}
        for point, states in level.items():
            for state in states:
                starts = lattice.compute_starts(point, state.times)
                if lattice.bound(point, state.times, starts) < to_beat * (1 - ROUNDING):
                    _expand(lattice, point, state, starts, front)
        looked_at += sum(map(len, level.values()))
        if looked_at > most_states:
            return None, False
        level = front
    last = [state for states in level.values() for state in states]
    best = min(last, key=lattice.compute_end, default=None)
    if best is None or lattice.compute_end(best) >= to_beat:
        return None, True
    return (lattice.read_order(best), lattice.compute_end(best)), True


def _expand(
    lattice: Lattice, point: Point, state: State, starts: Sequence[float], front: dict[Point, list[State]]
) -> None:
    """Take every step that is worth a try, and keep in *front* where it leads."""
    for number in lattice.list_choices(point, state.times, starts):
        reached, child = lattice.issue(point, state, number, starts[number])
        if reached in front:
            _keep(front[reached], child)
        else:
            front[reached] = [child]


def _keep(states: list[State], new: State) -> None:
    """Add *new* unless another state is nowhere later; drop those that it makes needless."""
    times = new.times
    needless = False
    for state in states:
        earlier = later = False
        for ours, theirs in zip(times, state.times, strict=True):
            if ours < theirs:
                earlier = True
            elif ours > theirs:
                later = True
        if not earlier:
            return
        needless |= not later
    if needless:
        states[:] = [state for state in states if any(map(gt, times, state.times))]
    states.append(new)
