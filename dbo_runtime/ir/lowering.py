"""Derive a schedule from an issue order: its waits, records and frees.

Orders are tracked with vector clocks (Mattern 1989): a lane's clock holds, for every lane, how many of its ops are
certain to finish before the next op of this lane. Clocks, dependencies and frees are in one module, because one pass
derives all three.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from dbo_runtime.errors import ScheduleError
from dbo_runtime.ir.op import COMPUTE, Op
from dbo_runtime.ir.program import Program
from dbo_runtime.ir.schedule import Instruction, Issue, Schedule, Slot, list_lanes
from dbo_runtime.ir.values import Value


def lower(programs: Sequence[Program], order: Iterable[Issue]) -> Schedule:
    """Derive the schedule of an issue order, with as few waits and as early frees as is safe.

    An op waits for an earlier op on another lane in four cases: it reads a value that the earlier op writes; it
    overwrites a value that the earlier op reads; both hold the same `exclusive` buffer; or it is the same `ordered` op
    in the next micro-batch. A wait that other waits imply is left out. Time is linear in the number of ops (times
    lanes, and a log factor for the frees).

    Raises:
        ScheduleError: *order* is not an order of these programs' ops.
    """
    programs = tuple(programs)
    order = tuple(order)
    _check_order(programs, order)
    waits, forks, clocks, frees = _derive(programs, order)
    joins = tuple(clocks.list_joins())
    recorded = {issue for instruction_waits in waits for issue in instruction_waits}.union(joins)
    instructions = tuple(
        Instruction(
            issue, programs[issue.micro_batch].ops[issue.position], waits[n], issue in recorded, tuple(frees[n])
        )
        for n, issue in enumerate(order)
    )
    return Schedule(programs, instructions, forks, joins)


def _derive(
    programs: tuple[Program, ...], order: tuple[Issue, ...]
) -> tuple[list[tuple[Issue, ...]], tuple[str, ...], _Clocks, list[list[Slot]]]:
    clocks = _Clocks(list_lanes(programs))
    needs = Dependencies(programs)
    frees = _Frees(programs, clocks)
    waits: list[tuple[Issue, ...]] = []
    forks: list[str] = []
    for number, issue in enumerate(order):
        op = programs[issue.micro_batch].ops[issue.position]
        waits.append(clocks.wait_for(op.lane, needs.get(issue, op)))
        if clocks.fork(op.lane):
            forks.append(op.lane)
        frees.collect(number, op.lane)
        clocks.issue(op.lane, issue)
        needs.add(issue, op)
        frees.add(issue, op)
    return waits, tuple(forks), clocks, frees.list_by_instruction(len(order))


def _check_order(programs: tuple[Program, ...], order: tuple[Issue, ...]) -> None:
    done = [0] * len(programs)
    for number, issue in enumerate(order):
        if not 0 <= issue.micro_batch < len(programs):
            raise ScheduleError(f"issue {number} names micro-batch {issue.micro_batch}; there are {len(programs)}.")
        if issue.position != done[issue.micro_batch]:
            raise ScheduleError(
                f"issue {number} is op {issue.position} of micro-batch {issue.micro_batch}, whose next op is "
                f"{done[issue.micro_batch]}; a policy must keep program order and issue each op once."
            )
        done[issue.micro_batch] += 1
    for micro_batch, program in enumerate(programs):
        if done[micro_batch] != len(program.ops):
            raise ScheduleError(
                f"the order issues {done[micro_batch]} ops of micro-batch {micro_batch}; there are {len(program.ops)}."
            )


class _Clocks:
    """The ops that each lane is ordered after. The schedule's start counts as the first op of `compute`."""

    def __init__(self, lanes: tuple[str, ...]) -> None:
        self.index = {lane: n for n, lane in enumerate(lanes)}
        self.clock = [[0] * len(lanes) for _ in lanes]
        self.clock[0][0] = 1
        self.last: dict[int, Issue] = {}
        self._stamps: dict[Issue, tuple[int, tuple[int, ...]]] = {}
        self._numbers: dict[Issue, int] = {}

    def wait_for(self, lane: str, needed: set[Issue]) -> tuple[Issue, ...]:
        """Order *lane* after the ops *needed*; return the ones it has to wait for.

        Latest issued first: an op can be ordered after one issued before it, never the reverse.
        """
        clock = self.clock[self.index[lane]]
        waits = []
        for issue in sorted(needed, key=self._numbers.__getitem__, reverse=True):
            other, stamp = self._stamps[issue]
            if clock[other] < stamp[other]:
                waits.append(issue)
                clock[:] = map(max, clock, stamp)
        return tuple(waits)

    def fork(self, lane: str) -> bool:
        """Order *lane* after the start; return whether that takes a fork, because no wait implies the order."""
        clock = self.clock[self.index[lane]]
        if clock[0]:
            return False
        clock[0] = 1
        return True

    def issue(self, lane: str, issue: Issue) -> None:
        index = self.index[lane]
        self.clock[index][index] += 1
        self._stamps[issue] = index, tuple(self.clock[index])
        self._numbers[issue] = len(self._numbers)
        self.last[index] = issue

    def stamp(self, issue: Issue) -> tuple[int, int]:
        """Return an issued op's lane index and its count on that lane."""
        index, stamp = self._stamps[issue]
        return index, stamp[index]

    def list_joins(self) -> Iterator[Issue]:
        """Yield the ops that `compute` still has to wait for after all ops are issued."""
        yield from self.wait_for(COMPUTE, {issue for index, issue in self.last.items() if index})


class Dependencies:
    """The earlier ops, on any lane, that each op must come after."""

    def __init__(self, programs: tuple[Program, ...]) -> None:
        self._producer: dict[Slot, Issue] = {}
        self._readers: dict[Slot, list[Issue]] = defaultdict(list)
        self._holder: dict[str, Issue] = {}
        self._ordered: dict[tuple[int, str], Issue] = {}
        self._ordered_before = get_ordered_before(programs)

    def get(self, issue: Issue, op: Op) -> set[Issue]:
        """Return the ops added so far that must finish before *op*.

        Raises:
            ScheduleError: *op* is ordered, and is issued before the same op of an earlier micro-batch.
        """
        mb = issue.micro_batch
        needed = {self._producer[slot] for value in op.reads if (slot := Slot(mb, value)) in self._producer}
        for value in op.overwrites:
            needed.update(self._readers[Slot(mb, value)])
        if op.exclusive in self._holder:
            needed.add(self._holder[op.exclusive])
        if op.ordered and op.label in self._ordered_before[mb]:
            earlier = self._ordered_before[mb][op.label]
            before = self._ordered.get((earlier, op.label))
            if before is None:
                raise ScheduleError(
                    f"{op.label}/{mb} is issued before {op.label}/{earlier}, but the op is declared ordered "
                    f"({op.declared_at}); the policy must issue micro-batches in order here."
                )
            needed.add(before)
        return needed

    def add(self, issue: Issue, op: Op) -> None:
        """Add an issued op."""
        mb = issue.micro_batch
        for value in op.reads:
            self._readers[Slot(mb, value)].append(issue)
        for value in op.writes:
            self._producer[Slot(mb, value)] = issue
        if op.exclusive is not None:
            self._holder[op.exclusive] = issue
        if op.ordered:
            self._ordered[mb, op.label] = issue


class _Frees:
    """Finds the first instruction at which each value can be freed.

    The owning lanes reuse freed memory for their next allocation, so each owning lane must be ordered after every use.
    After a value's last use, it waits for one unmet condition (owning lane, lane used, count) at a time. It is checked
    again only when that condition is met, which keeps the time near linear.
    """

    def __init__(self, programs: tuple[Program, ...], clocks: _Clocks) -> None:
        self._clocks = clocks
        self._owning_lanes = [program.get_owning_lanes() for program in programs]
        self._kept = [{*program.inputs, *program.outputs} for program in programs]
        self._uses_left = [_count_uses(program) for program in programs]
        self._uses: dict[Slot, dict[int, int]] = defaultdict(dict)
        lanes = range(len(clocks.index))
        self._waiting: list[list[list[tuple[int, int, Slot]]]] = [[[] for _ in lanes] for _ in lanes]
        self._frees: dict[int, list[Slot]] = defaultdict(list)
        self._tickets = itertools.count()  # keeps slots out of the heap's comparisons

    def add(self, issue: Issue, op: Op) -> None:
        """Add the uses of an issued op."""
        lane, count = self._clocks.stamp(issue)
        mb = issue.micro_batch
        for value in dict.fromkeys((*op.writes, *op.reads)):
            if value in self._kept[mb]:
                continue
            slot = Slot(mb, value)
            self._uses[slot][lane] = count
            self._uses_left[mb][value] -= 1
            if not self._uses_left[mb][value]:
                self._defer(slot, self._find_unmet(slot) or self._next_instruction(slot))

    def collect(self, number: int, lane: str) -> None:
        """Free, at instruction *number* on *lane*, the values that the lane's clock now allows to free."""
        own = self._clocks.index[lane]
        for reached, waiting in zip(self._clocks.clock[own], self._waiting[own], strict=True):
            while waiting and waiting[0][0] <= reached:
                slot = heapq.heappop(waiting)[2]
                if unmet := self._find_unmet(slot):
                    self._defer(slot, unmet)
                else:
                    self._frees[number].append(slot)

    def list_by_instruction(self, instructions: int) -> list[list[Slot]]:
        return [self._frees[number] for number in range(instructions)]

    def _defer(self, slot: Slot, condition: tuple[int, int, int]) -> None:
        owner, other, count = condition
        heapq.heappush(self._waiting[owner][other], (count, next(self._tickets), slot))

    def _find_unmet(self, slot: Slot) -> tuple[int, int, int] | None:
        """Return the first (owning lane, lane used, count) that the owning lane's clock has not reached."""
        for owner in self._list_owners(slot):
            clock = self._clocks.clock[owner]
            for other, count in self._uses[slot].items():
                if clock[other] < count:
                    return owner, other, count
        return None

    def _next_instruction(self, slot: Slot) -> tuple[int, int, int]:
        """Return a condition met at an owning lane's next instruction: no op frees a value that it still reads."""
        owner = self._list_owners(slot)[0]
        return owner, owner, 0

    def _list_owners(self, slot: Slot) -> list[int]:
        return sorted(self._clocks.index[lane] for lane in self._owning_lanes[slot.micro_batch][slot.value])


def get_ordered_before(programs: Sequence[Program]) -> list[dict[str, int]]:
    """Return, for each micro-batch and `ordered` op, the nearest earlier micro-batch that also has the op."""
    latest: dict[str, int] = {}
    before = []
    for mb, program in enumerate(programs):
        labels = [op.label for op in program.ops if op.ordered]
        before.append({label: latest[label] for label in labels if label in latest})
        latest.update(dict.fromkeys(labels, mb))
    return before


def _count_uses(program: Program) -> dict[Value, int]:
    """Count, for each value, the ops that write or read it."""
    uses: dict[Value, int] = defaultdict(int)
    for op in program.ops:
        for value in dict.fromkeys((*op.writes, *op.reads)):
            uses[value] += 1
    return uses
