"""A lower bound for the duration of any schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dbo_runtime.ir.schedule import Schedule
from dbo_runtime.observe.timeline import Timeline
from dbo_runtime.planner.search.jobs import Job, make_jobs


def compute_bound(jobs: Sequence[Job]) -> float:
    """Return a time in seconds that no issue order of these micro-batches can beat.

    It is the maximum over each micro-batch's longest path, and over each lane's work plus the minimum time before the
    lane's first op and after its last op (the job shop bound, Carlier 1982; `docs/theory.md` has it for chains).
    """
    paths = [max(job.path, default=0.0) for job in jobs]
    lanes = range(len(jobs[0].tail)) if jobs else ()
    return max([*paths, *(_compute_lane_bound(jobs, lane) for lane in lanes)], default=0.0)


def compute_bound_of(timeline: Timeline, schedule: Schedule) -> float:
    """Return the bound, in seconds, for ops with the durations of *timeline*, a run of *schedule*."""
    taken = {(span.op, span.micro_batch): span.end - span.start for span in timeline.spans}
    times = [
        [max(0.0, taken[op.label, micro_batch]) for op in program.ops]
        for micro_batch, program in enumerate(schedule.programs)
    ]
    return compute_bound(make_jobs(schedule.programs, times))


def _compute_lane_bound(jobs: Sequence[Job], lane: int) -> float:
    users = [job for job in jobs if job.tail[lane] < math.inf]
    if not users:
        return 0.0
    work = sum(job.left[0][lane] for job in users)
    return min(job.head[lane] for job in users) + work + min(job.tail[lane] for job in users)
