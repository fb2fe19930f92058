"""What steps take, whole and split, by one table of costs; fast, because a simulation serves all loads like it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dbo_runtime.observe.timeline import Timeline
from dbo_runtime.planner.costs import ATTENTION, CommCost, Cost, CostTable
from dbo_runtime.planner.load import Load
from dbo_runtime.planner.predict import predict_timeline
from dbo_runtime.policies import Order
from dbo_runtime.program import Program
from dbo_runtime.schedule import Schedule, Step

FINE = 8  # buckets an octave of loads that one simulation serves

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
        table.times(program, Load(1, 1.0, 1.0))
        self._program = program
        self._table = table
        self._kinds = Counter(op.name for op in program.ops)
        self._simulated: dict[tuple[str, tuple[Bucket, ...]], float] = {}

    def predict_whole(self, load: Load) -> float:
        """Return the seconds of a step that is not split: its ops one after the other, or the host that issues them."""
        host = self._table.host
        issued = host.issue * len(self._program.ops)
        seconds = max(self._sum_ops(load), issued) + host.whole + host.whole_per_token * load.tokens
        return max(seconds, 0.0)

    def predict_split(self, ordered: NamedOrder, loads: Sequence[Load]) -> float:
        """Return the seconds of a step split into micro-batches of these loads, issued in this order.

        It is simulated for the middles of the loads' buckets, and scaled to the loads.
        """
        shape = tuple(find_bucket(load, FINE) for load in loads)
        if (ordered.name, shape) not in self._simulated:
            middles = [find_middle(bucket, FINE) for bucket in shape]
            ops = sum(map(self._sum_ops, middles))
            self._simulated[ordered.name, shape] = find_end(self.simulate(ordered.schedule, middles)) / (ops or 1.0)
        ratio = self._simulated[ordered.name, shape]
        host, tokens = self._table.host, sum(load.tokens for load in loads)
        seconds = ratio * sum(map(self._sum_ops, loads)) + host.split + host.split_per_token * tokens
        return max(seconds, 0.0)

    def simulate(self, schedule: Schedule, loads: Sequence[Load]) -> Timeline:
        """Return when each op would run."""
        times = [self._table.times(self._program, load) for load in loads]
        return predict_timeline(schedule, partial(_look_up, times), self._table.contention, self._table.host)

    def _sum_ops(self, load: Load) -> float:
        return sum(count * self._table.ops[name].time(load) for name, count in self._kinds.items())


def doubt_costs(table: CostTable, share: float) -> tuple[CostTable, CostTable]:
    """Return the costs as they may be if they are off by *share*, and all of it speaks against splitting.

    What every micro-batch pays again is dearer; and of the two lanes one has less to hide, the other more to do.
    """
    return _disturb(table, share, comm=-share), _disturb(table, share, comm=share)


def find_bucket(load: Load, per_octave: int) -> Bucket:
    """Return the bucket of a load: rounded logarithms of its tokens, and of all else for each token."""
    ratios = (load.tokens, *(amount / load.tokens for amount in load[1:]))
    return tuple(round(per_octave * math.log2(1 + ratio)) for ratio in ratios)


def find_middle(bucket: Bucket, per_octave: int) -> Load:
    """Return the load in the middle of a bucket."""
    tokens, *ratios = (2 ** (number / per_octave) - 1 for number in bucket)
    count = max(1, round(tokens))
    return Load(count, *(ratio * count for ratio in ratios))


def find_end(timeline: Timeline) -> float:
    """Return when the last op ends."""
    return max(span.end for span in timeline.spans)


def _disturb(table: CostTable, share: float, comm: float) -> CostTable:
    again, compute, comm = 1 + share, 1 - comm, 1 + comm

    def disturb(cost: Cost) -> Cost:
        if isinstance(cost, CommCost):
            return replace(cost, alpha=cost.alpha * again, beta=cost.beta * comm)
        rates: dict[str, Any] = {name: getattr(cost, name) * compute for name in ("per_token", "per_pair", *ATTENTION)}
        return replace(cost, fixed=cost.fixed * again, weights=cost.weights * again, **rates)

    return replace(table, ops={name: disturb(cost) for name, cost in table.ops.items()})


def _look_up(times: Sequence[Sequence[float]], step: Step) -> float:
    return times[step.issue.micro_batch][step.issue.position]
