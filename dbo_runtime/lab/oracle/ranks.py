"""Prove that ranks with different schedules fit together: no rank hangs or matches the wrong collective.

In serving all ranks have the same schedule, for which `validate_collectives` is enough.

`validate` proves each schedule alone. Collectives are matched by order, not by name: the n-th collective that each
member of a group runs on a communicator is taken for the same one. Rule numbers continue after the eight of
`validate`, as in docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import chain, zip_longest
from typing import NoReturn

from dbo_runtime.errors import ScheduleError
from dbo_runtime.ir.op import COMPUTE
from dbo_runtime.ir.render import render
from dbo_runtime.ir.schedule import Instruction, Schedule
from dbo_runtime.ir.validate import validate

Groups = Mapping[str, Sequence[Sequence[int]]]
"""The groups of ranks of each communicator. A communicator without an entry has one group of all ranks."""

_RankInstruction = tuple[int, int]  # the rank, and the instruction's number in its schedule
_Node = tuple[_RankInstruction, ...]  # one instruction, or all ranks' instructions of one collective

_SHOWN_INSTRUCTIONS = 12  # on either side of an error


@dataclass(frozen=True, slots=True)
class RankPlan:
    """The schedule that a rank is about to run.

    Attributes:
        schedule: the rank's schedule.
        sizes: token counts of every rank in each micro-batch, as this rank assumes them [micro-batches][ranks]. Empty
            if not known; they are then not compared.
    """

    schedule: Schedule
    sizes: tuple[tuple[int, ...], ...] = ()


def validate_ranks(plans: Sequence[RankPlan], groups: Groups | None = None) -> None:
    """Check each rank's schedule by the eight rules, and all ranks against each other by rules 9 to 12.

    Time is near linear.

    Raises:
        ScheduleError: a rule is broken. The message names rank, rule, instruction, op and line of declaration. It shows
            that rank's table around the instruction, and names the other rank's instruction if two were compared.
    """
    for rank, plan in enumerate(plans):
        try:
            validate(plan.schedule)
        except ScheduleError as error:
            raise ScheduleError(f"rank {rank}, {error}") from None
    comparison = _Comparison(plans, groups or {})
    comparison.check_lane()
    comparison.check_order()
    comparison.check_sizes()
    comparison.check_deadlock()


def get_groups(groups: Groups, communicator: str, ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return a communicator's groups, for this number of ranks.

    Raises:
        ScheduleError: a group names a rank that does not exist, or a rank twice.
    """
    if communicator not in groups:
        return (tuple(range(ranks)),)
    members = list(chain.from_iterable(groups[communicator]))
    if len(set(members)) < len(members) or not set(members) <= set(range(ranks)):
        raise ScheduleError(
            f"communicator {communicator!r} has the groups {groups[communicator]}; they must name each of "
            f"the ranks 0 to {ranks - 1} at most once."
        )
    return tuple(tuple(group) for group in groups[communicator] if group)


def find_deadlock(schedules: Sequence[Schedule], groups: Groups | None = None) -> dict[int, int]:
    """Return the instruction at which each deadlocked rank stops; empty if all ranks reach their end.

    The nodes of a graph are the instructions of all ranks; the instructions of one collective share a node. An edge
    means "must end before the other can begin". A node on a cycle, or behind one, never begins. Each schedule must be
    valid and rule 10 must hold; the collectives may be on several lanes.
    """
    node_of: dict[_RankInstruction, _Node] = {}
    for communicator, numbers in _list_collectives(schedules).items():
        for members in get_groups(groups or {}, communicator, len(schedules)):
            for meeting in zip(*(numbers[rank] for rank in members), strict=True):
                node = tuple(zip(members, meeting, strict=True))
                node_of.update(dict.fromkeys(node, node))
    graph: dict[_Node, set[_Node]] = {}
    for rank, schedule in enumerate(schedules):
        for number, earlier in enumerate(_list_earlier(schedule)):
            node = node_of.setdefault((rank, number), ((rank, number),))
            graph.setdefault(node, set()).update(node_of[rank, other] for other in earlier)
    ended = _compute_ended(graph)
    stops: dict[int, int] = {}
    for (rank, number), node in sorted(node_of.items()):
        if node not in ended:
            stops.setdefault(rank, number)
    return stops


def _list_collectives(schedules: Sequence[Schedule]) -> dict[str, list[list[int]]]:
    """Return the numbers of the instructions that use each communicator, in order: by communicator, then by rank."""
    collectives: dict[str, list[list[int]]] = {}
    for rank, schedule in enumerate(schedules):
        for number, instruction in enumerate(schedule.instructions):
            if instruction.op.communicator is not None:
                collectives.setdefault(instruction.op.communicator, [[] for _ in schedules])[rank].append(number)
    return collectives


def _list_earlier(schedule: Schedule) -> Iterator[set[int]]:
    """Yield, for each instruction, the instructions of the same rank that must end before it can begin.

    These are the previous instruction on its lane, the instructions it waits for, and the last one that blocked the
    host. On the strictest device, the CPU, every instruction on `compute` blocks the host, because it runs on the
    issuing thread.
    """
    number_of = {instruction.issue: number for number, instruction in enumerate(schedule.instructions)}
    lane_end: dict[str, int] = {}
    blocking: set[int] = set()
    for number, instruction in enumerate(schedule.instructions):
        lane = instruction.op.lane
        on_lane = {lane_end[lane]} if lane in lane_end else set()
        yield on_lane | blocking | {number_of[issue] for issue in instruction.waits}
        lane_end[lane] = number
        if lane == COMPUTE or instruction.op.host_sync:
            blocking = {number}


def _compute_ended(graph: dict[_Node, set[_Node]]) -> set[_Node]:
    """Return the nodes that are neither on a cycle nor behind one."""
    sorter = TopologicalSorter(graph)
    with suppress(CycleError):  # the nodes before the cycle are still returned
        sorter.prepare()
    ended: set[_Node] = set()
    while ready := sorter.get_ready():
        sorter.done(*ready)
        ended.update(ready)
    return ended


@dataclass(frozen=True, slots=True)
class _Comparison:
    plans: Sequence[RankPlan]
    groups: Groups

    def check_lane(self) -> None:
        collectives = [
            (rank, number)
            for rank, plan in enumerate(self.plans)
            for number, instruction in enumerate(plan.schedule.instructions)
            if instruction.op.communicator is not None
        ]
        for collective in collectives:
            lane = self._get_instruction(*collective).op.lane
            first = self._get_instruction(*collectives[0]).op.lane
            if lane != first:
                what = f"is a collective on lane {lane!r}, but {self._name(*collectives[0])} is one on lane {first!r}"
                self._fail(9, *collective, f"{what}; ranks could then disagree on the order of collectives")

    def check_order(self) -> None:
        for communicator, numbers in _list_collectives([plan.schedule for plan in self.plans]).items():
            groups = get_groups(self.groups, communicator, len(self.plans))
            members = set(chain.from_iterable(groups))
            for rank, own in enumerate(numbers):
                if own and rank not in members:
                    self._fail(10, rank, own[0], f"uses communicator {communicator!r}, which has no rank {rank}")
            for first, *others in groups:
                for rank in others:
                    self._compare_order(communicator, rank, numbers[rank], first, numbers[first])

    def check_sizes(self) -> None:
        known = [rank for rank, plan in enumerate(self.plans) if plan.sizes]
        for rank in known:
            sizes, reference = self.plans[rank].sizes, self.plans[known[0]].sizes
            micro_batches = len(self.plans[rank].schedule.programs)
            if len(sizes) != micro_batches:
                what = f"belongs to a schedule of {micro_batches} micro-batches, but sizes are given of {len(sizes)}"
                self._fail(11, rank, 0, what)
            if len(sizes) != len(reference):
                what = f"belongs to a schedule of {len(sizes)} micro-batches, but rank {known[0]} has {len(reference)}"
                self._fail(11, rank, 0, what)
            for mb, (tokens, others) in enumerate(zip(sizes, reference, strict=True)):
                what = f"belongs to micro-batch {mb}, whose sizes are {tokens} here, but "
                if len(tokens) != len(self.plans):
                    self._fail(11, rank, self._get_first(rank, mb), f"{what}there are {len(self.plans)} ranks")
                if tokens != others:
                    there = f"{others} for {self._name(known[0], self._get_first(known[0], mb))}"
                    self._fail(11, rank, self._get_first(rank, mb), what + there)

    def check_deadlock(self) -> None:
        stops = find_deadlock([plan.schedule for plan in self.plans], self.groups)
        for stop in stops.items():
            stuck = ", ".join(self._name(*other) for other in stops.items())
            self._fail(12, *stop, f"never begins: the ranks wait for each other, stopped at {stuck}")

    def _compare_order(self, communicator: str, rank: int, own: list[int], first: int, others: list[int]) -> None:
        for count, (number, other) in enumerate(zip_longest(own, others), start=1):
            if number is None:
                last = own[-1] if own else len(self.plans[rank].schedule.instructions) - 1
                what = f"is followed by no other collective of communicator {communicator!r}"
                self._fail(10, rank, last, f"{what}, but {self._name(first, other)} is number {count} there")
            what = f"is collective number {count} of communicator {communicator!r}, but "
            if other is None:
                self._fail(10, rank, number, f"{what}rank {first} has only {len(others)}")
            if self._get_instruction(rank, number).label != self._get_instruction(first, other).label:
                self._fail(10, rank, number, f"{what}{self._name(first, other)} is that there")

    def _get_first(self, rank: int, micro_batch: int) -> int:
        """Return a micro-batch's first collective, or else its first instruction."""
        instructions = self.plans[rank].schedule.instructions
        own = [
            number for number, instruction in enumerate(instructions) if instruction.issue.micro_batch == micro_batch
        ]
        return next((number for number in own if instructions[number].op.communicator is not None), own[0])

    def _get_instruction(self, rank: int, number: int) -> Instruction:
        return self.plans[rank].schedule.instructions[number]

    def _name(self, rank: int, number: int) -> str:
        return f"{self._get_instruction(rank, number).label} of rank {rank} (instruction {number})"

    def _fail(self, rule: int, rank: int, number: int, what: str) -> NoReturn:
        instruction = self._get_instruction(rank, number)
        table = render(self.plans[rank].schedule, mark=number, around=_SHOWN_INSTRUCTIONS)
        where = f"rank {rank}, rule {rule}, instruction {number}"
        raise ScheduleError(f"{where}: {instruction.label} {what}. ({instruction.op.declared_at})\n\n{table}")
