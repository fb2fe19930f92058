"""Machines that are known by what their ops cost: layers of one compute op and one that communicates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from dbo_runtime.batch import Batch, slice_batch
from dbo_runtime.decline import Decline
from dbo_runtime.ir.op import COMM, COMPUTE
from dbo_runtime.ir.program import Program, ProgramBuilder
from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.planner.costs.op_cost import CommCost, ComputeCost, HostCost, OpCost
from dbo_runtime.planner.costs.program_spec import describe_program
from dbo_runtime.planner.online.cuts import measure_slices
from dbo_runtime.planner.online.simulation import predict_timeline
from dbo_runtime.planner.online.split_choice import SplitChoice
from tests.support.planner.cost_tables import make_provenance
from tests.support.planner.shop import do_nothing

BYTES = 14336.0  # a token
RATIOS = (0.1, 0.2, 0.35, 0.55, 1.0, 1.5)  # M / C of docs/theory.md
WEIGHTS = (0.0, 0.1, 0.3, 0.5, 0.75, 1.0)  # w: the share of compute that does not shrink with the micro-batch
ALPHAS = (0.0, 0.02, 0.1)  # the same of communication


def record_layers(layers: int = 16, ops: Sequence[str] = ("attention", "reduce")) -> Program:
    """Return layers of ops, one after the other; those whose name has `reduce` in it communicate."""
    p = ProgramBuilder()
    x = p.input("x")
    for index in range(layers):
        with p.layer(index):
            for op in ops:
                lane = "comm" if "reduce" in op else "compute"
                x = p.op(op, do_nothing, x, lane=lane, ordered=op == "attention")
    return p.build(x)


PROGRAM = record_layers()


def make_table(program: Program, ops: dict[str, OpCost], error: float | None = 0.0, **changes: object) -> CostTable:
    """Return costs that are off by *error*; None if that is not known. Lanes are known not to slow each other."""
    errors = {} if error is None else dict.fromkeys(ops, error)
    alone = {lane: 1.0 for lane in (COMPUTE, COMM) if lane in program.lanes}
    return replace(CostTable(make_provenance(), describe_program(program), ops, alone, HostCost(), errors), **changes)


class Machine(NamedTuple):
    """A point of the grid: what the ops of a step of *tokens* tokens cost, as in docs/theory.md."""

    ratio: float
    weights: float
    alpha: float
    tokens: int

    def make_costs(self, roofline: bool) -> dict[str, OpCost]:
        """Return the costs of ops of which the compute one takes 1 ms at this size."""
        compute, comm = 1e-3, self.ratio * 1e-3
        if roofline:  # half a batch is bound by reading the weights, and a full one may not be
            attention = ComputeCost(per_token=compute / self.tokens, weights=compute * (1 + self.weights) / 2)
        else:
            attention = ComputeCost(compute * self.weights, compute * (1 - self.weights) / self.tokens)
        beta = comm * (1 - self.alpha) / self.tokens / BYTES
        return {"attention": attention, "reduce": CommCost(comm * self.alpha, beta, BYTES)}


def list_machines(tokens: Sequence[int]) -> Iterator[Machine]:
    """Yield the grid."""
    return (Machine(*point) for point in product(RATIOS, WEIGHTS, ALPHAS, tokens))


def simulate_split(
    program: Program, table: CostTable, choice: SplitChoice, slice_features: Sequence[BatchFeatures]
) -> float:
    """Return what a step takes with the very loads of its micro-batches."""
    times = [table.times(program, features) for features in slice_features]
    timeline = predict_timeline(
        choice.order.schedule,
        lambda instruction: times[instruction.issue.micro_batch][instruction.issue.position],
        table.contention,
        table.host,
    )
    return max(span.end for span in timeline.spans) + table.host.split


def measure_unsplit(batch: Batch) -> BatchFeatures:
    """Return the load of a step that is not split."""
    (features,) = measure_slices(batch, slice_batch(batch, ()))
    return features


def compute_gain(costs: dict[str, OpCost], batch: Batch, choice: SplitChoice | Decline) -> float:
    """Return the share of the unsplit time that a choice saves if ops cost *costs*."""
    if isinstance(choice, Decline):
        return 0.0
    table = make_table(PROGRAM, costs)
    unsplit = sum(table.times(PROGRAM, measure_unsplit(batch)))
    return 1 - simulate_split(PROGRAM, table, choice, measure_slices(batch, choice.slices)) / unsplit
