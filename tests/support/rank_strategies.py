"""Random sets of ranks: random programs with collectives, each rank with an issue order of its own.

Programs come from `tests.support.strategies`; what makes them a case for several ranks is drawn from one seed, which is
several times faster than to let hypothesis draw each choice. All ranks run the same programs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import NamedTuple

from hypothesis import strategies as st

from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.op import COMM, Op
from dbo_runtime.ir.policies import Order, sequential
from dbo_runtime.ir.program import Program
from dbo_runtime.ir.schedule import Instruction, Schedule
from dbo_runtime.lab.oracle.ranks import Groups
from tests.support.strategies import Case, programs

Layout = Mapping[str, Sequence[str]]  # for each lane with collectives, the communicators that they may use

ONE_LANE: Layout = {COMM: ["tp", "ep", "pp"]}
TWO_LANES: Layout = {COMM: ["tp"], "aux": ["ep", "pp"]}

MANY = 400  # swaps that leave nothing of an order of some twenty ops
FEW = 25


class RankCase(NamedTuple):
    """One schedule for each rank, and the groups in which ranks meet."""

    schedules: tuple[Schedule, ...]
    groups: Groups
    costs: tuple[int, ...]

    def cost(self, rank: int, instruction: Instruction) -> float:
        """Return a time that differs between ranks and instructions."""
        mb, position = instruction.issue
        return self.costs[(rank + 2 * mb + 3 * position) % len(self.costs)]

    def __repr__(self) -> str:
        """Show what hypothesis prints of a case that fails."""
        cases = [Case(s.programs, tuple(instruction.issue for instruction in s.instructions)) for s in self.schedules]
        syncs = sorted(
            {instruction.label for s in self.schedules for instruction in s.instructions if instruction.op.host_sync}
        )
        rows = [f"rank {rank}:{case!r}" for rank, case in enumerate(cases)]
        return "\n".join(["", *rows, f"host syncs {syncs}", f"groups {self.groups}"])


@st.composite
def rank_cases(draw: st.DrawFn, layout: Layout = ONE_LANE) -> RankCase:
    """Two to four ranks with two or three micro-batches each, and orders that are the same, alike, or independent."""
    program = draw(programs())
    random = Random(draw(st.integers(0, 2**32)))
    kinds = [pick_collectives(random, program, layout) for _ in range(2)]
    chosen = tuple(random.choices(kinds, k=random.randint(2, 3)))
    ranks = random.randint(2, 4)
    swaps = random.choice([0, FEW, FEW, MANY])
    order = swap_neighbours(random, chosen, sequential(chosen), MANY)
    own = [swap_neighbours(random, chosen, order, swaps) for _ in range(ranks)]
    names = [name for lane in layout for name in layout[lane] if random.random() < 0.5]
    groups = {name: pick_groups(random, ranks) for name in names}
    costs = tuple(random.choices(range(1, 10), k=7))
    return RankCase(tuple(lower(chosen, order) for order in own), groups, costs)


def pick_collectives(random: Random, program: Program, layout: Layout) -> Program:
    """Make some ops collectives, on a lane that has such, and let some ops sync the host."""
    collectives = [(lane, name) for lane, names in layout.items() for name in names]

    def change(op: Op) -> Op:
        lane, communicator = random.choice([(op.lane, None), (op.lane, None), *collectives])
        return replace(op, lane=lane, communicator=communicator, host_sync=random.random() < 0.3)

    return replace(program, ops=tuple(change(op) for op in program.ops))


def swap_neighbours(random: Random, chosen: Sequence[Program], order: Order, times: int) -> Order:
    """Let neighbours in an order change places, each time at random and where that is legal."""
    issues = list(order)
    for number in random.choices(range(len(issues) - 1), k=times):
        first, second = issues[number : number + 2]
        ops = [chosen[issue.micro_batch].ops[issue.position] for issue in (first, second)]
        must_stay = all(op.ordered for op in ops) and ops[0].label == ops[1].label
        if first.micro_batch != second.micro_batch and not must_stay:
            issues[number : number + 2] = [second, first]
    return tuple(issues)


def pick_groups(random: Random, ranks: int) -> list[list[int]]:
    """Return any partition of the ranks: pairs, singles, all."""
    group_of = [random.randint(0, 2) for _ in range(ranks)]
    return [[rank for rank in range(ranks) if group_of[rank] == group] for group in sorted(set(group_of))]
