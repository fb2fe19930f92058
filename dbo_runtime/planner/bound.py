"""How fast any schedule could be at best."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dbo_runtime.planner.jobs import Job


def find_bound(jobs: Sequence[Job]) -> float:
    """Return a time, in seconds, that no issue order of these micro-batches can beat.

    The largest of: each micro-batch's longest path; and each lane's work, with the least that must come before its
    first op and after its last one (the job shop bound, Carlier 1982; `theory.md` has it for chains).
    """
    paths = [max(job.path, default=0.0) for job in jobs]
    lanes = range(len(jobs[0].tail)) if jobs else range(0)
    return max([*paths, *(_find_lane_bound(jobs, lane) for lane in lanes)], default=0.0)


def _find_lane_bound(jobs: Sequence[Job], lane: int) -> float:
    users = [job for job in jobs if job.tail[lane] < math.inf]
    if not users:
        return 0.0
    work = sum(job.left[0][lane] for job in users)
    return min(job.head[lane] for job in users) + work + min(job.tail[lane] for job in users)
