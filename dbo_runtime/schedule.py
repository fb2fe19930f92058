"""From an issue order to a schedule: waits, records and frees are derived, never declared.

Orders are tracked with vector clocks (Mattern 1989): a lane's clock says, for every lane, how many of its ops are
certain to have finished before whatever the lane runs next. Clocks, dependencies and frees stand in one module, because
lowering is all three in one pass.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dbo_runtime.errors import ScheduleError
from dbo_runtime.program import COMPUTE, Op, Program, Value


class Issue(NamedTuple):
    """One op of one micro-batch: the index of the micro-batch and of the op in its program."""

    micro_batch: int
    position: int


class Slot(NamedTuple):
    """One value of one micro-batch."""

    micro_batch: int
    value: Value


@dataclass(frozen=True, slots=True)
class Instruction:
    """What the host does for one op: wait, drop values, launch, record."""

    issue: Issue
    op: Op
    waits: tuple[Issue, ...] = ()
    records: bool = False
    frees: tuple[Slot, ...] = ()

    @property
    def label(self) -> str:
        """Such as `L3.attention/1` for micro-batch 1."""
        return f"{self.op.label}/{self.issue.micro_batch}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """Instructions in issue order.

    Attributes:
        programs: one per micro-batch.
        instructions: in issue order.
        forks: lanes that must wait, before their first op, for what `compute` had to do before the schedule.
        joins: ops that `compute` waits for at the end, so that every lane has returned to it.
    """

    programs: tuple[Program, ...]
    instructions: tuple[Instruction, ...]
    forks: tuple[str, ...] = ()
    joins: tuple[Issue, ...] = ()

    @property
    def lanes(self) -> tuple[str, ...]:
        """Lanes of all programs, `compute` first."""
        return list_lanes(self.programs)


def list_lanes(programs: Sequence[Program]) -> tuple[str, ...]:
    """Return the lanes of all programs, `compute` first, each once."""
    return tuple(dict.fromkeys(lane for program in programs for lane in (COMPUTE, *program.lanes)))


def lower(programs: Sequence[Program], order: Iterable[Issue]) -> Schedule:
    """Derive the schedule of an issue order, with as few waits and as early frees as are safe.

    An op waits for an earlier one on another lane if it reads what that op writes; overwrites what that op reads;
    holds the same `exclusive` buffer; or is the `ordered` op of the next micro-batch. A wait that follows from others
    is left out. Time is linear in the number of ops (times lanes, and log for the frees).

    Raises:
        ScheduleError: if *order* is not an order of these programs' ops.
    """
    programs = tuple(programs)
    order = tuple(order)
    _check_order(programs, order)
    waits, forks, clocks, frees = _derive(programs, order)
    joins = tuple(clocks.find_joins())
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
        waits.append(clocks.wait_for(op.lane, needs.find(issue, op)))
        if clocks.fork(op.lane):
            forks.append(op.lane)
        frees.collect(number, op.lane)
        clocks.issue(op.lane, issue)
        needs.note(issue, op)
        frees.note(issue, op)
    return waits, tuple(forks), clocks, frees.at(len(order))


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
    """What each lane is ordered after. The start of the schedule counts as the first op of `compute`."""

    def __init__(self, lanes: tuple[str, ...]) -> None:
        self.index = {lane: n for n, lane in enumerate(lanes)}
        self.clock = [[0] * len(lanes) for _ in lanes]
        self.clock[0][0] = 1
        self.last: dict[int, Issue] = {}
        self._stamps: dict[Issue, tuple[int, tuple[int, ...]]] = {}
        self._numbers: dict[Issue, int] = {}

    def wait_for(self, lane: str, needed: set[Issue]) -> tuple[Issue, ...]:
        """Order *lane* after *needed*; return the few that it has to wait for.

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
        """Order *lane* after the start; say whether its waits had not done so already."""
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

    def find_joins(self) -> Iterator[Issue]:
        """Yield the ops that `compute` still has to wait for when all is issued."""
        yield from self.wait_for(COMPUTE, {issue for index, issue in self.last.items() if index})


class Dependencies:
    """Finds the earlier ops, on any lane, that an op must come after."""

    def __init__(self, programs: tuple[Program, ...]) -> None:
        self._producer: dict[Slot, Issue] = {}
        self._readers: dict[Slot, list[Issue]] = defaultdict(list)
        self._holder: dict[str, Issue] = {}
        self._ordered: dict[tuple[int, str], Issue] = {}
        self._ordered_before = get_ordered_before(programs)

    def find(self, issue: Issue, op: Op) -> set[Issue]:
        """Return the ops noted so far that *op* must come after."""
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

    def note(self, issue: Issue, op: Op) -> None:
        """Take in that *op* is issued."""
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
    """Finds the first instruction at which each value can be dropped.

    Dropping hands the memory to whatever its home lanes allocate next, so each home lane must be ordered after every
    use. A value whose last use is issued watches one unmet condition (home lane, lane used, count) at a time and is
    looked at again only when that one is met, which keeps the whole near linear.
    """

    def __init__(self, programs: tuple[Program, ...], clocks: _Clocks) -> None:
        self._clocks = clocks
        self._homes = [program.get_owning_lanes() for program in programs]
        self._kept = [{*program.inputs, *program.outputs} for program in programs]
        self._uses_left = [_count_uses(program) for program in programs]
        self._uses: dict[Slot, dict[int, int]] = defaultdict(dict)
        lanes = range(len(clocks.index))
        self._watched: list[list[list[tuple[int, int, Slot]]]] = [[[] for _ in lanes] for _ in lanes]
        self._found: dict[int, list[Slot]] = defaultdict(list)
        self._tickets = itertools.count()  # keeps slots out of the heap's comparisons

    def note(self, issue: Issue, op: Op) -> None:
        lane, count = self._clocks.stamp(issue)
        mb = issue.micro_batch
        for value in dict.fromkeys((*op.writes, *op.reads)):
            if value in self._kept[mb]:
                continue
            slot = Slot(mb, value)
            self._uses[slot][lane] = count
            self._uses_left[mb][value] -= 1
            if not self._uses_left[mb][value]:
                self._watch(slot, self._find_unmet(slot) or self._next_instruction(slot))

    def collect(self, number: int, lane: str) -> None:
        """Free at instruction *number*, on *lane*, what the lane's clock now allows."""
        home = self._clocks.index[lane]
        for reached, watchers in zip(self._clocks.clock[home], self._watched[home], strict=True):
            while watchers and watchers[0][0] <= reached:
                slot = heapq.heappop(watchers)[2]
                if unmet := self._find_unmet(slot):
                    self._watch(slot, unmet)
                else:
                    self._found[number].append(slot)

    def at(self, instructions: int) -> list[list[Slot]]:
        return [self._found[number] for number in range(instructions)]

    def _watch(self, slot: Slot, condition: tuple[int, int, int]) -> None:
        home, other, count = condition
        heapq.heappush(self._watched[home][other], (count, next(self._tickets), slot))

    def _find_unmet(self, slot: Slot) -> tuple[int, int, int] | None:
        """Return a (home lane, lane used, count) that the home lane's clock has not reached."""
        for home in self._home_indices(slot):
            clock = self._clocks.clock[home]
            for other, count in self._uses[slot].items():
                if clock[other] < count:
                    return home, other, count
        return None

    def _next_instruction(self, slot: Slot) -> tuple[int, int, int]:
        """Return a condition that holds at the next instruction on a home lane: no op can drop what it still reads."""
        home = self._home_indices(slot)[0]
        return home, home, 0

    def _home_indices(self, slot: Slot) -> list[int]:
        return sorted(self._clocks.index[lane] for lane in self._homes[slot.micro_batch][slot.value])


def get_ordered_before(programs: Sequence[Program]) -> list[dict[str, int]]:
    """Return, for each micro-batch and ordered op, the nearest earlier micro-batch that has the op, too."""
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
