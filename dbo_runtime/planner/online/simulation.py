"""When each op of a schedule will run, with all that the costs know: contention, and the host that issues.

The search for an order assumes that ops take what they take and that the host is never late. What it finds is judged
here, where neither is assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from dbo_runtime.devices.event_loop import HostRelease, Machine, run_ahead, run_schedule
from dbo_runtime.devices.virtual import OpDuration
from dbo_runtime.ir.op import COMPUTE
from dbo_runtime.ir.schedule import Instruction, Schedule
from dbo_runtime.observe.timeline import Timeline
from dbo_runtime.planner.costs.op_cost import HostCost

NO_CONTENTION: Mapping[str, float] = {}


def predict_timeline(
    schedule: Schedule,
    duration: OpDuration,
    contention: Mapping[str, float] = NO_CONTENTION,
    host: HostCost | None = None,
    credit: OpDuration | None = None,
) -> Timeline:
    """Return when each op of *schedule* will run if it takes *duration* seconds by itself; no op is run.

    *duration* holds for a lane that has been idle. An op takes up to *credit* seconds more on one that has not: for
    each second that the lane has been idle, one less. None means no credit.

    While another lane runs, too, a lane is slower by its factor of *contention* (1 if not given); see `CostTable`. The
    host takes `host.issue` seconds for each instruction; if it `computes`, it issues nothing while an op is on the
    compute lane, or waits to be. It does not go on either before a `host_sync` instruction has started. An op that
    waits for others starts `host.handover` seconds after the last of them at the earliest.

    Without contention, and with a host that does not compute, this is `devices.virtual.simulate`.

    Raises:
        ScheduleError: if instructions wait for each other.
    """
    host = host or HostCost()
    machine = Machine(
        duration=_add_credit(duration, credit),
        release=_compute_on_host if host.computes else run_ahead,
        issue_seconds=host.issue,
        handover_seconds=host.handover,
        slowdown=_make_slowdown(schedule.lanes, contention),
    )
    return run_schedule(schedule, machine)


def _compute_on_host(instruction: Instruction) -> HostRelease:
    return HostRelease.ENDED if instruction.op.lane == COMPUTE else run_ahead(instruction)


def _add_credit(duration: OpDuration, credit: OpDuration | None) -> Callable[[int, Instruction, float], float]:
    def compute(_: int, instruction: Instruction, idle_seconds: float) -> float:
        lacking = 0.0 if credit is None else max(credit(instruction) - idle_seconds, 0.0)
        return duration(instruction) + lacking

    return compute


def _make_slowdown(lanes: Sequence[str], contention: Mapping[str, float]) -> Callable[[str, Collection[str]], float]:
    """Make the function from a lane, and those that run, to the greatest of its factors."""
    factors = {
        lane: {other: contention.get(f"{lane}/{other}", contention.get(lane, 1.0)) for other in lanes} for lane in lanes
    }
    for lane, of_lane in factors.items():
        of_lane[lane] = 0.0  # a lane does not slow itself down

    def compute(lane: str, running: Collection[str]) -> float:
        of_lane = factors[lane]
        return max([of_lane[other] for other in running]) if len(running) > 1 else 1.0

    return compute
