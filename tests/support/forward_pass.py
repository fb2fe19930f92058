"""The oracle of the event loop: one pass over a schedule in issue order, which shares nothing with it.

It knows no contention and only one rank, and needs each instruction to wait for earlier ones only.
"""

from __future__ import annotations

from collections.abc import Callable

from dbo_runtime.ir.op import COMPUTE
from dbo_runtime.ir.schedule import Instruction, Issue, Schedule
from dbo_runtime.observe.timeline import Span, Timeline


def pass_forward(
    schedule: Schedule,
    duration: Callable[[Instruction], float],
    issue_seconds: float = 0.0,
    host_computes: bool = False,
) -> Timeline:
    """Return when each op would run; with *host_computes* the host issues nothing before an op on compute has ended."""
    host = 0.0
    lane_ends = dict.fromkeys(schedule.lanes, 0.0)
    ends: dict[Issue, float] = {}
    spans = []
    for instruction in schedule.instructions:
        lane = instruction.op.lane
        host += issue_seconds
        start = max([host, lane_ends[lane], *(ends[awaited] for awaited in instruction.waits)])
        end = lane_ends[lane] = ends[instruction.issue] = start + duration(instruction)
        spans.append(Span(lane, instruction.op.label, instruction.issue.micro_batch, start, end))
        if host_computes and lane == COMPUTE:
            host = end
        elif instruction.op.host_sync:
            host = start
    return Timeline(tuple(spans))
