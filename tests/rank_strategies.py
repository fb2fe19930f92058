"""Random sets of ranks, for hypothesis: random programs with collectives, each rank with an issue order of its own.

Programs come from `tests.strategies`; here their ops get communicators and host syncs. All ranks run the same programs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from hypothesis import strategies as st

from dbo_runtime.program import COMM, Op, Program
from dbo_runtime.ranks import Groups
from dbo_runtime.schedule import Issue, Schedule, Step, lower
from tests.strategies import Case, orders, programs

Layout = Mapping[str, tuple[str, ...]]  # for each lane with collectives, the communicators that they may use

ONE_LANE: Layout = {COMM: ("tp", "ep", "pp")}
TWO_LANES: Layout = {COMM: ("tp",), "aux": ("ep", "pp")}


class RankCase(NamedTuple):
    """One schedule for each rank, and the groups in which ranks meet."""

    schedules: tuple[Schedule, ...]
    groups: Groups
    costs: tuple[int, ...]

    def cost(self, rank: int, step: Step) -> float:
        """Return a time that differs between ranks and steps."""
        mb, position = step.issue
        return self.costs[(rank + 2 * mb + 3 * position) % len(self.costs)]

    def __repr__(self) -> str:
        """Show what hypothesis prints of a case that fails."""
        cases = [Case(s.programs, tuple(step.issue for step in s.steps)) for s in self.schedules]
        syncs = sorted({step.label for s in self.schedules for step in s.steps if step.op.host_sync})
        rows = [f"rank {rank}:{case!r}" for rank, case in enumerate(cases)]
        return "\n".join(["", *rows, f"host syncs {syncs}", f"groups {self.groups}"])


@st.composite
def rank_cases(draw: st.DrawFn, layout: Layout = ONE_LANE) -> RankCase:
    """Two to four ranks with two or three micro-batches each, and orders that are the same, alike, or independent."""
    ranks = draw(st.integers(2, 4))
    kinds = [draw_collectives(draw, draw(programs()), layout) for _ in range(draw(st.integers(1, 2)))]
    chosen = tuple(draw(st.sampled_from(kinds)) for _ in range(draw(st.integers(2, 3))))
    order = draw(orders(chosen))
    alike = draw(st.sampled_from(["same", "alike", "alike", "alike", "independent"]))
    drawn = [order]
    for _ in range(ranks - 1):
        drawn.append(draw(orders(chosen)) if alike == "independent" else order)
    if alike == "alike":
        drawn = [draw_swaps(draw, chosen, own) for own in drawn]
    groups = {name: draw_groups(draw, ranks) for names in layout.values() for name in names if draw(st.booleans())}
    costs = tuple(draw(st.lists(st.integers(1, 9), min_size=3, max_size=7)))
    return RankCase(tuple(lower(chosen, own) for own in drawn), groups, costs)


def draw_collectives(draw: st.DrawFn, program: Program, layout: Layout) -> Program:
    """Make some ops collectives, on a lane that has such, and let some ops sync the host."""
    collectives = [(lane, name) for lane, names in layout.items() for name in names]

    def change(op: Op) -> Op:
        lane, communicator = draw(st.sampled_from([(op.lane, None), (op.lane, None), *collectives]))
        return replace(op, lane=lane, communicator=communicator, host_sync=draw(st.sampled_from([False, False, True])))

    return replace(program, ops=tuple(change(op) for op in program.ops))


def draw_swaps(draw: st.DrawFn, chosen: Sequence[Program], order: tuple[Issue, ...]) -> tuple[Issue, ...]:
    """Let neighbours in an order change places a few times, where that is legal."""
    issues = list(order)
    for number in draw(st.lists(st.integers(0, len(issues) - 2), max_size=6)):
        first, second = issues[number : number + 2]
        ops = [chosen[issue.micro_batch].ops[issue.position] for issue in (first, second)]
        are_ordered = all(op.ordered for op in ops) and ops[0].label == ops[1].label
        if first.micro_batch != second.micro_batch and not are_ordered:
            issues[number : number + 2] = [second, first]
    return tuple(issues)


def draw_groups(draw: st.DrawFn, ranks: int) -> list[list[int]]:
    """Return any partition of the ranks: pairs, singles, all, in any order."""
    of_rank = [draw(st.integers(0, 2)) for _ in range(ranks)]
    return [[rank for rank in range(ranks) if of_rank[rank] == group] for group in sorted(set(of_rank))]
