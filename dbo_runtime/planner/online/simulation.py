"""Predict when each op of a schedule will run, by all costs: contention and the issuing host included.

The search for an order assumes that the time of an op depends on nothing else that runs, and that the host is never
late. The simulation here assumes neither. It judges the orders that a search finds.
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

    An op takes *duration* on a lane that has been idle. On a busy lane it takes up to *credit* seconds more: *credit*
    minus the seconds that the lane has been idle. None means no credit.

    While another lane also runs, a lane is slower by its factor of *contention* (1 if not given); see `CostTable`. The
    host takes `host.issue` seconds for each instruction. If the host `computes`, it issues nothing while an op runs on
    the compute lane, or waits to run there. After a `host_sync` instruction, it goes on only when that has started. An
    op that waits for others starts at least `host.handover` seconds after the last of them.

    Without contention, and with a host that does not compute, this is the same as `devices.virtual.simulate`.

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
    """Make the function that returns a lane's slowdown: the greatest factor by any of the running lanes."""
    factors = {
        lane: {other: contention.get(f"{lane}/{other}", contention.get(lane, 1.0)) for other in lanes} for lane in lanes
    }
    for lane, of_lane in factors.items():
        of_lane[lane] = 0.0  # a lane does not slow itself down

    def compute(lane: str, running: Collection[str]) -> float:
        of_lane = factors[lane]
        return max([of_lane[other] for other in running]) if len(running) > 1 else 1.0

    return compute
