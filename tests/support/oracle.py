"""What a schedule guarantees, from first principles: reachability in a graph of its instructions.

An oracle for lowering and validation, with which it shares nothing but the data types: no clocks, no replay, no owning
lanes computed by the program. A node is the start, an instruction, or the end; an edge says "is over before". The edges
are the order of each lane, the waits, the forks and the joins. Everything else is reachability.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import combinations, pairwise

from dbo_runtime.ir.op import COMPUTE, Op
from dbo_runtime.ir.program import Program
from dbo_runtime.ir.schedule import Issue, Schedule, Slot
from dbo_runtime.ir.values import Value

START = -1


def find_violations(schedule: Schedule) -> list[str]:
    """Return everything that is wrong with a schedule; nothing if it is safe."""
    mismatches = find_disorder(schedule)
    if mismatches:
        return mismatches  # without an instruction for each op, and a record before each wait, there is no graph to ask
    graph = Graph(schedule)
    mismatches = [*find_races(graph), *find_unsafe_frees(graph), *find_loose_lanes(graph)]
    return mismatches + find_split_communicators(schedule)


def find_disorder(schedule: Schedule) -> list[str]:
    """Return what breaks program order, and waits for what has recorded nothing by then."""
    mismatches = []
    for mb, program in enumerate(schedule.programs):
        issued = [instruction.op for instruction in schedule.instructions if instruction.issue.micro_batch == mb]
        if [id(op) for op in issued] != [id(op) for op in program.ops]:
            mismatches.append(f"micro-batch {mb} runs {[op.label for op in issued]}")
    recorded: set[Issue] = set()
    for number, instruction in enumerate(schedule.instructions):
        if schedule.programs[instruction.issue.micro_batch].ops[instruction.issue.position] is not instruction.op:
            mismatches.append(f"instruction {number} runs another op than {instruction.issue}")
        mismatches += [
            f"instruction {number} waits for {issue} in vain" for issue in instruction.waits if issue not in recorded
        ]
        if instruction.records:
            recorded.add(instruction.issue)
    lanes = {"compute", *(op.lane for program in schedule.programs for op in program.ops)}
    mismatches += [f"{lane} is forked, but nothing runs there" for lane in schedule.forks if lane not in lanes]
    return mismatches + [f"the join waits for {issue} in vain" for issue in schedule.joins if issue not in recorded]


class Graph:
    """The instructions of a schedule; for each, as bits, the set of those that end before it starts."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.number = {instruction.issue: number for number, instruction in enumerate(schedule.instructions)}
        self.lanes: dict[str, list[int]] = defaultdict(list)
        self._forked = {COMPUTE, *schedule.forks}
        self._before: list[int] = []
        for number, instruction in enumerate(schedule.instructions):
            before = self.over_before_next(instruction.op.lane)
            for issue in instruction.waits:
                before |= self._through(self.number[issue])
            self._before.append(before)
            self.lanes[instruction.op.lane].append(number)
        self.before_end = self.over_before_next(COMPUTE)
        for issue in schedule.joins:
            self.before_end |= self._through(self.number[issue])

    def over_before_next(self, lane: str, number: int | None = None) -> int:
        """Return what is over before whatever *lane* runs next at the time when instruction *number* is issued.

        It is not known what that will be, so nothing is assumed of it but its lane; unless it is that instruction
        itself.
        """
        if number is not None and self.schedule.instructions[number].op.lane == lane:
            return self._before[number]
        past = [n for n in self.lanes[lane] if number is None or n < number]
        return self._through(past[-1]) if past else _bit(START) if lane in self._forked else 0

    def is_before(self, earlier: int, later: int) -> bool:
        """Whether instruction *earlier* is over before instruction *later* starts."""
        return bool(self._before[later] & _bit(earlier))

    def leaves_start(self, number: int) -> bool:
        """Whether an instruction runs after the start."""
        return self.is_before(START, number)

    def _through(self, number: int) -> int:
        return self._before[number] | _bit(number)


def find_races(graph: Graph) -> list[str]:
    """Return pairs of instructions that depend on each other and may run in either order."""
    instructions = graph.schedule.instructions
    return [
        f"{why}: {instructions[first].label}, {instructions[second].label}"
        for first, second, why in find_dependencies(graph)
        if not graph.is_before(first, second)
    ]


def find_dependencies(graph: Graph) -> Iterator[tuple[int, int, str]]:
    """Yield (instruction, later instruction, why): the first must be over before the second starts."""
    for mb, program in enumerate(graph.schedule.programs):
        number = {id(op): graph.number[Issue(mb, position)] for position, op in enumerate(program.ops)}
        for value, writer, readers in _find_users(program):
            if writer is not None:
                yield from ((number[id(writer)], number[id(op)], f"reads {value}") for op in readers)
            for op in readers:
                if value in op.overwrites:
                    others = (other for other in readers if other is not op)
                    yield from ((number[id(other)], number[id(op)], f"overwrites {value}") for other in others)
    numbered = list(enumerate(graph.schedule.instructions))
    for (first, earlier), (second, later) in combinations(numbered, 2):
        if earlier.op.exclusive is not None and earlier.op.exclusive == later.op.exclusive:
            yield first, second, f"hold {earlier.op.exclusive}"
    by_micro_batch = sorted(numbered, key=lambda entry: entry[1].issue)
    for (first, earlier), (second, later) in combinations(by_micro_batch, 2):
        if earlier.op.ordered and later.op.ordered and earlier.op.label == later.op.label:
            yield first, second, "ordered"


def find_unsafe_frees(graph: Graph) -> list[str]:
    """Return the frees that drop what is still used, or hand memory to a lane on which a use may still run."""
    schedule = graph.schedule
    frees = [(number, slot) for number, instruction in enumerate(schedule.instructions) for slot in instruction.frees]
    mismatches = [f"{slot} is freed twice" for slot, times in Counter(slot for _, slot in frees).items() if times > 1]
    for number, slot in frees:
        mismatches += [f"instruction {number} frees {slot}: {why}" for why in explain_free(graph, number, slot)]
    return mismatches


def explain_free(graph: Graph, number: int, slot: Slot) -> list[str]:
    """Return why *slot* must not be freed at instruction *number*; nothing if it may be."""
    program = graph.schedule.programs[slot.micro_batch]
    if slot.value in program.inputs or slot.value in program.outputs:
        return ["it belongs to the caller"]
    uses = find_uses(graph, slot)
    if max(uses) >= number:
        return ["it is used later"]
    lanes = {graph.schedule.instructions[number].op.lane, *find_owners(program, slot.value)}
    return [
        f"lane {lane} may run before instruction {use} is over"
        for lane in sorted(lanes)
        for use in uses
        if not graph.over_before_next(lane, number) & _bit(use)
    ]


def find_uses(graph: Graph, slot: Slot) -> list[int]:
    """Return the instructions that write or read a slot."""
    ops = graph.schedule.programs[slot.micro_batch].ops
    users = (n for n, op in enumerate(ops) if slot.value in op.writes or slot.value in op.reads)
    return [graph.number[Issue(slot.micro_batch, position)] for position in users]


def find_owners(program: Program, value: Value) -> set[str]:
    """Return the lanes that may have allocated a value's memory, traced back through what its writers overwrote."""
    writer = next((op for op in program.ops if value in op.writes), None)
    if writer is None:
        return {COMPUTE}
    return {writer.lane}.union(*(find_owners(program, origin) for origin in writer.overwrites))


def find_loose_lanes(graph: Graph) -> list[str]:
    """Return the instructions that may run before the start or after the end."""
    instructions = list(enumerate(graph.schedule.instructions))
    return [
        f"{instruction.label} may run before the start"
        for number, instruction in instructions
        if not graph.leaves_start(number)
    ] + [
        f"{instruction.label} may run after the end"
        for number, instruction in instructions
        if not graph.before_end & _bit(number)
    ]


def find_split_communicators(schedule: Schedule) -> list[str]:
    """Return the communicators that are used on two lanes."""
    users = [instruction.op for instruction in schedule.instructions if instruction.op.communicator is not None]
    lanes = {(op.communicator, op.lane) for op in users}
    return [f"{first[0]} is used on two lanes" for first, second in pairwise(sorted(lanes)) if first[0] == second[0]]


def _find_users(program: Program) -> Iterator[tuple[Value, Op | None, list[Op]]]:
    """Yield (value, the op that writes it, the ops that read it)."""
    for value in dict.fromkeys([*program.inputs, *(value for op in program.ops for value in op.writes)]):
        writer = next((op for op in program.ops if value in op.writes), None)
        yield value, writer, [op for op in program.ops if value in op.reads]


def _bit(number: int) -> int:
    return 1 << (number + 1)
