"""Predict the time of steps, unsplit and split, from one table of costs. Similar batches share one simulation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from statistics import median

from dbo_runtime.bounded import BoundedDict
from dbo_runtime.ir.op import COMM, COMPUTE, SIDE
from dbo_runtime.ir.program import Program
from dbo_runtime.ir.schedule import Instruction, Issue, Schedule
from dbo_runtime.observe.timeline import Timeline
from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.planner.costs.op_cost import CommCost, ComputeCost, OpCost
from dbo_runtime.planner.costs.op_times import OpTimes
from dbo_runtime.planner.online.named_order import NamedOrder, compute_end
from dbo_runtime.planner.online.simulation import predict_timeline

BUCKETS_PER_OCTAVE = 8  # buckets of batch features; all batches of a bucket share one simulation
MAX_SIMULATED = 4096  # number of simulations that are kept
# Costs that every micro-batch pays in full.
PAID_PER_MICRO_BATCH = frozenset({"fixed", "weights", "per_prefill", "per_context", "alpha"})

DEFAULT_UNCERTAINTY = 0.2  # share by which costs may be wrong if their errors are not known
MAX_UNCERTAINTY = 0.3
# Factor by which `compute` or `comm` may be slower while the other one runs, if that is not known.
DOUBTED_CONTENTION = 1.15

Bucket = tuple[int, ...]
"""Rounded log2 of the tokens, and of each other feature per token, in parts of an octave [features]."""


class Predictor:
    """Predicts steps of one program.

    Args:
        program: ops of one micro-batch.
        table: costs of the ops.

    Attributes:
        simulated: end of a step divided by the sum of its ops, by order and buckets.

    Raises:
        ConfigError: if an op has no cost.
    """

    def __init__(self, program: Program, table: CostTable) -> None:
        table.times(program, BatchFeatures(1))
        self._program = program
        self._table = table
        self._times = OpTimes(program, table)
        self.simulated: BoundedDict[tuple[str, tuple[Bucket, ...]], float] = BoundedDict(MAX_SIMULATED)

    def predict_unsplit(self, features: BatchFeatures) -> float:
        """Return the seconds of an unsplit step: its ops one after another, or issuing them if that takes longer."""
        ops = self._times.sum(features)
        return self._table.host.time_unsplit(ops, len(self._program.ops), features.tokens)

    def predict_split(self, ordered: NamedOrder, slice_features: Sequence[BatchFeatures]) -> float:
        """Return the seconds of a step split into micro-batches with these features, issued in this order.

        The step is simulated with the midpoints of the features' buckets. The result is scaled to the features.
        """
        shape = tuple(get_bucket(features, BUCKETS_PER_OCTAVE) for features in slice_features)
        if (ordered.name, shape) not in self.simulated:
            middles = [compute_midpoint(bucket, BUCKETS_PER_OCTAVE) for bucket in shape]
            ops = sum(map(self._times.sum, middles))
            self.simulated[ordered.name, shape] = self.simulate_end(ordered, middles) / (ops or 1.0)
        ratio = self.simulated[ordered.name, shape]
        tokens = sum(features.tokens for features in slice_features)
        return self._table.host.time_split(ratio * sum(map(self._times.sum, slice_features)), tokens)

    def simulate(self, schedule: Schedule, slice_features: Sequence[BatchFeatures]) -> Timeline:
        """Return the simulated timeline: when each op would run.

        *slice_features* are the features of each micro-batch. If it is cut, those of its nano-batches follow.
        """
        parts = zip(schedule.instructions, schedule.list_contexts(), strict=True)
        part_of = {instruction.issue: part for instruction, part in parts}
        names = self._table.ops.items()
        times = [{name: cost.time(features) for name, cost in names} for features in slice_features]
        credits = [
            {name: cost.credit(features) for name, cost in names if isinstance(cost, CommCost)}
            for features in slice_features
        ]
        cost, credit = partial(_look_up, times, part_of), partial(_look_up, credits, part_of)
        return predict_timeline(schedule, cost, self._table.contention, self._table.host, credit)

    def simulate_end(self, ordered: NamedOrder, slice_features: Sequence[BatchFeatures]) -> float:
        """Return when the last op would end: from few layers if they reach a steady state, and otherwise from all."""
        if ordered.repeating is not None:
            end = ordered.repeating.extrapolate_end(self.simulate(ordered.repeating.schedule, slice_features))
            if end is not None:
                return end
        return compute_end(self.simulate(ordered.schedule, slice_features))


def make_worst_cases(table: CostTable, share: float) -> tuple[CostTable, ...]:
    """Return the tables that are worst for splitting if costs are wrong by *share*.

    A number x that is wrong by a share e may be anything from x / (1 + e) to x / (1 - e). The unsplit time is a sum of
    such numbers. The split time is a longest path, which is convex in them. So the gain is concave, and it is minimal
    in a corner of the possible costs. In the worst corner

    - the costs that micro-batches divide among them are small, because overlap hides these;
    - the costs that each micro-batch pays in full are large on the busiest lane, and small on the other.

    Which lane is the busiest differs between steps, and may change during a step. So there are three corners: the
    busiest lane is `compute`, or `comm`, or both.

    Two compute lanes gain less the more they slow each other down, so these factors are made worse, too. If the
    contention of `compute` or `comm` is not known, it is taken as `DOUBTED_CONTENTION`.
    """
    communicates = any(isinstance(cost, CommCost) for cost in table.ops.values())
    doubted = dict.fromkeys((COMPUTE, COMM) if communicates else (), DOUBTED_CONTENTION)
    known = {lane: _worsen_factor(lane, factor, share) for lane, factor in table.contention.items()}
    contention = doubted | known
    return tuple(
        replace(
            table,
            ops={name: _worsen(cost, share, isinstance(cost, busiest)) for name, cost in table.ops.items()},
            contention=contention,
        )
        for busiest in (ComputeCost, CommCost, (ComputeCost, CommCost))
    )


def get_bucket(features: BatchFeatures, per_octave: int) -> Bucket:
    """Return the bucket of a batch."""
    ratios = (features.tokens, *(amount / features.tokens for amount in features[1:]))
    return tuple(round(per_octave * math.log2(1 + ratio)) for ratio in ratios)


def compute_midpoint(bucket: Bucket, per_octave: int) -> BatchFeatures:
    """Return the features in the middle of a bucket."""
    tokens, *ratios = (2 ** (number / per_octave) - 1 for number in bucket)
    count = max(1, round(tokens))
    return BatchFeatures(count, *(ratio * count for ratio in ratios))


def _worsen(cost: OpCost, share: float, is_busiest: bool) -> OpCost:
    """Return a cost that is wrong by *share*. Only what each micro-batch pays in full on the busiest lane is larger."""
    per_micro_batch = 1 / (1 - share) if is_busiest else 1 / (1 + share)
    divided = 1 / (1 + share)
    factors = {
        item.name: per_micro_batch if item.name in PAID_PER_MICRO_BATCH else divided
        for item in fields(cost)
        if item.metadata.get("is_time")
    }
    return replace(cost, **{name: getattr(cost, name) * factor for name, factor in factors.items()})


def _worsen_factor(lane: str, factor: float, share: float) -> float:
    return factor / (1 - share) if SIDE in lane.split("/") else factor


def _look_up(times: Sequence[Mapping[str, float]], part_of: Mapping[Issue, int], instruction: Instruction) -> float:
    seconds: float = times[part_of[instruction.issue]].get(instruction.op.name, 0.0)
    return seconds


def get_uncertainty(table: CostTable) -> float:
    """Return the share by which all costs may be wrong at once: the median error of their fits, up to a maximum.

    A single op may be wrong by more. But predictions are sums over several kinds of op, whose errors partly cancel.
    """
    return min(median(table.errors.values()), MAX_UNCERTAINTY) if table.errors else DEFAULT_UNCERTAINTY
