"""When each op of a schedule will run, with all that the costs know: contention, and the host that issues.

The search for an order assumes that ops take what they take and that the host is never late. What it finds is judged
here, where neither is assumed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from dbo_runtime.devices.virtual import Cost
from dbo_runtime.errors import ScheduleError
from dbo_runtime.observe.timeline import Span, Timeline
from dbo_runtime.planner.costs.cost_table import HostCost
from dbo_runtime.program import COMPUTE
from dbo_runtime.render import render
from dbo_runtime.schedule import Instruction, Issue, Schedule

NO_CONTENTION: Mapping[str, float] = {}


def predict_timeline(
    schedule: Schedule,
    cost: Cost,
    contention: Mapping[str, float] = NO_CONTENTION,
    host: HostCost | None = None,
    credit: Cost | None = None,
) -> Timeline:
    """Return when each op of *schedule* will run if ops cost *cost* seconds by themselves; no op is run.

    *cost* is what an op takes on a lane that has rested. It takes up to *credit* seconds more on one that has not: for
    each second that the lane has rested, one less. None stands for no credit.

    While another lane runs, too, a lane is slower by its factor of *contention* (1 if not given); see `CostTable`. The
    host takes
    `host.issue` seconds for each instruction; if it `computes`, it issues nothing while an op is on the compute lane,
    or waits to be. It does not go on either before a `host_sync` instruction has begun. An op that waits for others
    begins `host.handover` seconds after the last of them at the earliest.

    Without contention, and with a host that does not compute, this is `devices.virtual.simulate`.
    """
    return _Prediction(schedule, cost, contention, host or HostCost(), credit or _give_none).run()


@dataclass(slots=True)
class _Running:
    """An op on its lane: seconds of work that are left, when nothing else runs."""

    number: int
    start: float
    left: float


@dataclass(slots=True)
class _Prediction:
    schedule: Schedule
    cost: Cost
    contention: Mapping[str, float]
    host: HostCost
    credit: Cost
    now: float = 0.0
    issued: int = 0
    host_free: float = 0.0  # when the next instruction will have been issued; infinite while the host is kept
    kept_by: int | None = None  # the instruction that keeps the host
    queues: dict[str, deque[int]] = field(default_factory=dict)
    running: dict[str, _Running] = field(default_factory=dict)
    lane_ends: dict[str, float] = field(default_factory=dict)
    ended: dict[Issue, float] = field(default_factory=dict)
    spans: dict[int, Span] = field(default_factory=dict)

    def run(self) -> Timeline:
        instructions = self.schedule.instructions
        self.queues = {lane: deque() for lane in self.schedule.lanes}
        self.host_free = self.host.issue
        while len(self.spans) < len(instructions):
            self._issue()
            self._begin()
            self._go_on()
        return Timeline(tuple(self.spans[number] for number in range(len(instructions))))

    def _issue(self) -> None:
        """Put on the lanes what the host has issued by now."""
        instructions = self.schedule.instructions
        while self.issued < len(instructions) and self.host_free <= self.now:
            instruction = instructions[self.issued]
            self.queues[instruction.op.lane].append(self.issued)
            if self._keeps_host(instruction):
                self.kept_by, self.host_free = self.issued, math.inf
            else:
                self.host_free += self.host.issue
            self.issued += 1

    def _begin(self) -> None:
        """Start what can start on the lanes that are free."""
        for lane, queue in self.queues.items():
            if queue and lane not in self.running:
                instruction = self.schedule.instructions[queue[0]]
                if self._find_arrival(instruction) <= self.now:
                    number = queue.popleft()
                    rested = self.now - self.lane_ends.get(lane, -math.inf)
                    lacking = max(self.credit(instruction) - rested, 0.0)
                    self.running[lane] = _Running(number, self.now, self.cost(instruction) + lacking)
                    if number == self.kept_by and not self._computes(instruction):
                        self._release_host(self.now)

    def _go_on(self) -> None:
        """Let time pass until an op ends or an instruction is issued."""
        slowness = {lane: self._find_slowness(lane) for lane in self.running}
        ends = {lane: self.now + op.left * slowness[lane] for lane, op in self.running.items()}
        instructions = self.schedule.instructions
        idle = (instructions[queue[0]] for lane, queue in self.queues.items() if queue and lane not in self.running)
        to_issue = self.host_free if self.issued < len(instructions) else math.inf
        until = max(self.now, min([*ends.values(), *map(self._find_arrival, idle), to_issue]))
        if until == math.inf:
            stuck = self.issued - 1
            raise ScheduleError(f"instruction {stuck} waits for ever.\n{render(self.schedule, mark=stuck)}")
        for lane, op in list(self.running.items()):
            if ends[lane] <= until:
                self._end(lane, op, until)
            else:
                op.left -= (until - self.now) / slowness[lane]
        self.now = until

    def _find_slowness(self, lane: str) -> float:
        """Return the factor by which *lane* is slower for what runs beside it: the greatest counts."""
        usual = self.contention.get(lane, 1.0)
        return max(
            (self.contention.get(f"{lane}/{other}", usual) for other in self.running if other != lane), default=1.0
        )

    def _end(self, lane: str, op: _Running, time: float) -> None:
        instruction = self.schedule.instructions[op.number]
        self.spans[op.number] = Span(lane, instruction.op.label, instruction.issue.micro_batch, op.start, time)
        self.ended[instruction.issue] = self.lane_ends[lane] = time
        del self.running[lane]
        if op.number == self.kept_by:
            self._release_host(time)

    def _find_arrival(self, instruction: Instruction) -> float:
        """Return when all that an instruction waits for is there; infinite if that is not known yet."""
        if not instruction.waits:
            return 0.0
        if any(issue not in self.ended for issue in instruction.waits):
            return math.inf
        return max(self.ended[issue] for issue in instruction.waits) + self.host.handover

    def _release_host(self, time: float) -> None:
        self.kept_by, self.host_free = None, time + self.host.issue

    def _keeps_host(self, instruction: Instruction) -> bool:
        return instruction.op.host_sync or self._computes(instruction)

    def _computes(self, instruction: Instruction) -> bool:
        return self.host.computes and instruction.op.lane == COMPUTE


def _give_none(instruction: Instruction) -> float:
    return 0.0
