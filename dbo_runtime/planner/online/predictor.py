"""What steps take, whole and split, by one table of costs; fast, because a simulation serves all loads like it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

from dbo_runtime.observe.timeline import Timeline
from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.costs.cost_table import CommCost, ComputeCost, Cost, CostTable, HostCost
from dbo_runtime.planner.online.simulation import predict_timeline
from dbo_runtime.policies import Order
from dbo_runtime.program import SIDE, Program
from dbo_runtime.schedule import Instruction, Schedule

FINE = 8  # buckets an octave of loads that one simulation serves
PAID_PER_MICRO_BATCH = frozenset(
    {"fixed", "weights", "per_prefill", "per_context", "alpha"}
)  # what every micro-batch pays again

Bucket = tuple[int, ...]
"""Where a load is among others: tokens, and all else for each token, in parts of an octave [fields of a load]."""


@dataclass(frozen=True, slots=True)
class NamedOrder:
    """An issue order, with a short name that stands for it."""

    name: str
    order: Order
    schedule: Schedule


class Predictor:
    """Predicts steps of one program.

    Args:
        program: of one micro-batch.
        table: the costs of its ops.

    Raises:
        ConfigError: if an op has no cost.
    """

    def __init__(self, program: Program, table: CostTable) -> None:
        table.times(program, BatchFeatures(1))
        self._program = program
        self._table = table
        self._kinds = Counter(op.name for op in program.ops)
        self._simulated: dict[tuple[str, tuple[Bucket, ...]], float] = {}

    def predict_unsplit(self, load: BatchFeatures) -> float:
        """Return the seconds of a step that is not split: its ops one after the other, or the host that issues them."""
        host = self._table.host
        issued = host.issue * len(self._program.ops)
        seconds = max(self._sum_ops(load), issued) + host.whole + host.whole_per_token * load.tokens
        return max(seconds, 0.0)

    def predict_split(self, ordered: NamedOrder, loads: Sequence[BatchFeatures]) -> float:
        """Return the seconds of a step split into micro-batches of these loads, issued in this order.

        It is simulated for the middles of the loads' buckets, and scaled to the loads.
        """
        shape = tuple(get_bucket(load, FINE) for load in loads)
        if (ordered.name, shape) not in self._simulated:
            middles = [compute_midpoint(bucket, FINE) for bucket in shape]
            ops = sum(map(self._sum_ops, middles))
            self._simulated[ordered.name, shape] = compute_end(self.simulate(ordered.schedule, middles)) / (ops or 1.0)
        ratio = self._simulated[ordered.name, shape]
        host, tokens = self._table.host, sum(load.tokens for load in loads)
        seconds = ratio * sum(map(self._sum_ops, loads)) + host.split + host.split_per_token * tokens
        return max(seconds, 0.0)

    def simulate(self, schedule: Schedule, loads: Sequence[BatchFeatures]) -> Timeline:
        """Return when each op would run."""
        times = [self._table.times(self._program, load) for load in loads]
        credits = [self._table.credits(self._program, load) for load in loads]
        cost, credit = partial(_look_up, times), partial(_look_up, credits)
        return predict_timeline(schedule, cost, self._table.contention, self._table.host, credit)

    def simulate_times(self, schedule: Schedule, times: Sequence[Sequence[float]], host: HostCost) -> Timeline:
        """Return when each op would run if ops took *times* by themselves [micro-batches][ops]."""
        return predict_timeline(schedule, partial(_look_up, times), self._table.contention, host)

    def measure_shares(self, load: BatchFeatures, per_octave: int, least: float) -> tuple[int, ...]:
        """Return the share that each kind of op has of the time: rounded logarithms, in parts of an octave [kinds].

        An order that is good for some shares is good for any length of step. Shares below 2 ** *least* count as that.
        """
        seconds = [count * self._table.ops[name].time(load) for name, count in self._kinds.items()]
        total = sum(seconds)
        logs = (math.log2(part / total) if part > 0 else least for part in seconds)
        return tuple(round(per_octave * max(log, least)) for log in logs)

    def restore_times(self, shares: Sequence[int], per_octave: int) -> list[float]:
        """Return times, in no unit, that have these shares [ops]."""
        parts = zip(self._kinds.items(), shares, strict=True)
        times = {name: 2 ** (share / per_octave) / count for (name, count), share in parts}
        return [times[op.name] for op in self._program.ops]

    def _sum_ops(self, load: BatchFeatures) -> float:
        return sum(count * self._table.ops[name].time(load) for name, count in self._kinds.items())


def make_worst_cases(table: CostTable, share: float) -> tuple[CostTable, ...]:
    """Return the costs as they may be if they are off by *share*, and all of it speaks against splitting.

    A number x that is off by a share e stands for anything between x / (1 + e) and x / (1 - e). What a step takes whole
    is a sum of such numbers, and what it takes split a longest path, which is convex in them. So what splitting gains
    is concave, and least in a corner of all that is possible: where the parts that micro-batches share are small, for
    they are what overlap hides, and the parts that each pays again are large on the lane that is busy all the time,
    and small on the other. Which lane that is differs, and may change on the way: hence three corners. Lanes that both
    compute gain what they do not slow each other by, so these factors are off, too.
    """
    contention = {lane: _doubt_factor(lane, factor, share) for lane, factor in table.contention.items()}
    return tuple(
        replace(
            table,
            ops={name: _doubt(cost, share, isinstance(cost, dear)) for name, cost in table.ops.items()},
            contention=contention,
        )
        for dear in (ComputeCost, CommCost, (ComputeCost, CommCost))
    )


def get_bucket(load: BatchFeatures, per_octave: int) -> Bucket:
    """Return the bucket of a load: rounded logarithms of its tokens, and of all else for each token."""
    ratios = (load.tokens, *(amount / load.tokens for amount in load[1:]))
    return tuple(round(per_octave * math.log2(1 + ratio)) for ratio in ratios)


def compute_midpoint(bucket: Bucket, per_octave: int) -> BatchFeatures:
    """Return the load in the middle of a bucket."""
    tokens, *ratios = (2 ** (number / per_octave) - 1 for number in bucket)
    count = max(1, round(tokens))
    return BatchFeatures(count, *(ratio * count for ratio in ratios))


def compute_end(timeline: Timeline) -> float:
    """Return when the last op ends."""
    return max(span.end for span in timeline.spans)


def _doubt(cost: Cost, share: float, is_dear: bool) -> Cost:
    again = 1 / (1 - share) if is_dear else 1 / (1 + share)
    times = [item.name for item in fields(cost) if item.metadata.get("is_time")]
    return replace(
        cost,
        **{name: getattr(cost, name) * (again if name in PAID_PER_MICRO_BATCH else 1 / (1 + share)) for name in times},
    )


def _doubt_factor(lane: str, factor: float, share: float) -> float:
    return factor / (1 - share) if SIDE in lane.split("/") else factor


def _look_up(times: Sequence[Sequence[float]], step: Instruction) -> float:
    return times[step.issue.micro_batch][step.issue.position]
