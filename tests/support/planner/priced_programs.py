"""Random programs whose layers repeat, with random costs of their ops, for hypothesis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from hypothesis import strategies as st

from dbo_runtime.batch import slice_batch
from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.op import COMM, COMPUTE, SIDE
from dbo_runtime.ir.program import Program, ProgramBuilder
from dbo_runtime.ir.schedule import Schedule
from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.costs.cost_table import CommCost, ComputeCost, CostTable, OpCost
from dbo_runtime.planner.online.cuts import measure_slices
from tests.support.planner.machines import make_table
from tests.support.planner.shop import do_nothing
from tests.support.strategies import batches, orders

TWO_LANES = (COMPUTE, COMM)
THREE_LANES = (COMPUTE, COMM, SIDE)
BYTES_PER_TOKEN = 1000.0

MICROSECONDS = st.integers(0, 50).map(lambda number: number * 1e-6)
NANOSECONDS = st.integers(0, 500).map(lambda number: number * 1e-9)
IMBALANCE = st.sampled_from([1.0, 1.0, 1.3])


class Layered(NamedTuple):
    """A program and the schedule of some micro-batches that run it."""

    program: Program
    schedule: Schedule

    @property
    def micro_batches(self) -> int:
        return len(self.schedule.programs)

    def __repr__(self) -> str:
        """Show the ops in the order of issue: what hypothesis prints of a case that fails."""
        rows = []
        for issue, op, waits, *_ in ((each.issue, each.op, each.waits) for each in self.schedule.instructions):
            words = [f"{op.label}/{issue.micro_batch} on {op.lane}", *(f"after {wait}" for wait in waits)]
            rows.append(", ".join([*words, *["host_sync"] * op.host_sync]))
        return "\n".join(["", *rows])


@st.composite
def layered_programs(draw: st.DrawFn, lanes: Sequence[str], with_host_sync: bool = False) -> Program:
    """One to three equal layers of up to four ops. Each reads values that were written shortly before."""
    p = ProgramBuilder(has_side=True)
    kinds = []
    for _ in range(draw(st.integers(1, 4))):
        lane, backward = draw(st.sampled_from(lanes)), draw(st.sets(st.integers(1, 3), max_size=2))
        kinds.append((lane, sorted(backward), draw(st.booleans()), with_host_sync and draw(st.booleans())))
    values = [p.input("x")]
    for layer in range(draw(st.integers(1, 3))):
        with p.layer(layer):
            for number, (lane, backward, ordered, host_sync) in enumerate(kinds):
                nearest = min(len(values), len(kinds))  # of ops of one name, only the latest may be read in a spec
                reads = [values[-distance] for distance in backward if distance <= nearest]
                name = f"op{number}"
                values.append(p.op(name, do_nothing, *reads, lane=lane, ordered=ordered, host_sync=host_sync))
    return p.build(values[-1])


@st.composite
def layered(draw: st.DrawFn, lanes: Sequence[str] = THREE_LANES, with_host_sync: bool = False) -> Layered:
    """One to three micro-batches of such a program, in any order that is legal."""
    program = draw(layered_programs(lanes, with_host_sync))
    programs = (program,) * draw(st.integers(1, 3))
    return Layered(program, lower(programs, draw(orders(programs))))


@st.composite
def compute_costs(draw: st.DrawFn) -> ComputeCost:
    """Costs with any of the terms that there are; those of attention are mostly 0."""
    cost = ComputeCost(draw(MICROSECONDS), draw(NANOSECONDS), draw(MICROSECONDS), imbalance=draw(IMBALANCE))
    if not draw(st.booleans()):
        return cost
    return replace(
        cost,
        per_pair=draw(NANOSECONDS),
        per_context_pair=draw(NANOSECONDS),
        per_prefill=draw(MICROSECONDS),
        per_context=draw(NANOSECONDS),
        per_decode=draw(MICROSECONDS),
        per_decode_pair=draw(NANOSECONDS),
    )


@st.composite
def comm_costs(draw: st.DrawFn, has_buffers: bool = True) -> CommCost:
    """Costs of messages; buffers take up to a few hundred tokens for nothing."""
    free = draw(st.sampled_from([0.0, 50.0, 400.0])) * BYTES_PER_TOKEN if has_buffers else 0.0
    beta = draw(NANOSECONDS) / BYTES_PER_TOKEN
    return CommCost(draw(MICROSECONDS), beta, BYTES_PER_TOKEN, free, draw(IMBALANCE))


@st.composite
def tables(draw: st.DrawFn, program: Program, has_buffers: bool = True) -> CostTable:
    """Costs of the ops of a program, without any of the host."""
    costs: dict[str, OpCost] = {}
    for op in program.ops:
        if op.name not in costs:
            costs[op.name] = draw(comm_costs(has_buffers) if op.lane == COMM else compute_costs())
    return make_table(program, costs)


@st.composite
def steps(draw: st.DrawFn, micro_batches: int) -> tuple[BatchFeatures, ...]:
    """The features of each micro-batch of a step."""
    batch = draw(batches())
    missing = max(micro_batches - batch.tokens, 0)  # so that there is one token for each
    lengths = (*batch.query_lens, *[1] * missing)
    contexts = tuple(draw(st.integers(0, 500)) for _ in lengths)
    batch = replace(batch, query_lens=lengths, context_lens=contexts)
    cuts = draw(
        st.sets(st.integers(1, max(batch.tokens - 1, 1)), min_size=micro_batches - 1, max_size=micro_batches - 1)
    )
    return measure_slices(batch, slice_batch(replace(batch, cuttable=True), sorted(cuts), agreed=True))
