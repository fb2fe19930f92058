"""Durations as vectors, against the costs op by op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo_runtime.ir.op import COMM, COMPUTE
from dbo_runtime.ir.program import Program
from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.costs.cost_table import CostTable, HostCost
from dbo_runtime.planner.online.durations import RESOLUTION, DurationLayout, DurationTables, stack_features
from tests.support.planner.priced_programs import MICROSECONDS, THREE_LANES, layered_programs, steps, tables
from tests.support.profiles import scale


class Priced(NamedTuple):
    """Some tables of one program, and steps [steps][micro-batches]."""

    program: Program
    tables: Sequence[CostTable]
    steps: Sequence[Sequence[BatchFeatures]]


@st.composite
def priced(draw: st.DrawFn) -> Priced:
    program = draw(layered_programs(draw(st.sampled_from([THREE_LANES, (COMPUTE,), (COMM,)]))))
    hosts = st.builds(HostCost, issue=MICROSECONDS, handover=MICROSECONDS)
    costs = [replace(draw(tables(program)), host=draw(hosts)) for _ in range(draw(st.integers(1, 3)))]
    micro_batches = draw(st.integers(1, 3))
    return Priced(program, costs, [draw(steps(micro_batches)) for _ in range(draw(st.integers(1, 3)))])


@settings(max_examples=scale(200))
@given(priced())
def test_they_are_those_of_each_table_and_step(case: Priced) -> None:
    program, layout = case.program, DurationLayout(case.program, len(case.steps[0]))
    durations = DurationTables(program, case.tables).compute_durations(stack_features(case.steps))
    assert durations.shape == (len(case.tables), len(case.steps), layout.size)
    for table, of_table in zip(case.tables, durations, strict=True):
        for features, vector in zip(case.steps, of_table, strict=True):
            assert vector[layout.issue] == pytest.approx(table.host.issue)
            assert vector[layout.handover] == pytest.approx(table.host.handover)
            for micro_batch, own in enumerate(features):
                seconds, credits = table.times(program, own), table.credits(program, own)
                assert [vector[layout.find_op(micro_batch, op.name)] for op in program.ops] == pytest.approx(seconds)
                for op, credit in zip(program.ops, credits, strict=True):
                    place = layout.find_credit(micro_batch, op.name)
                    assert (place is None) == (op.lane != COMM)
                    assert place is None or vector[place] == pytest.approx(credit)


@settings(max_examples=scale(100))
@given(priced(), st.integers(0, 2**31))
def test_their_sums_are_exact_in_any_order(case: Priced, seed: int) -> None:
    """So that a BLAS, which adds in the order that suits the processor, gives the same on all hosts."""
    vectors = DurationTables(case.program, case.tables).compute_durations(stack_features(case.steps))
    numbers = np.random.default_rng(seed)
    counts = numbers.integers(0, 200, vectors.shape[-1]).astype(np.float64)
    for vector in vectors.reshape(-1, vectors.shape[-1]):
        exact = sum(int(each / RESOLUTION) * int(count) for each, count in zip(vector, counts, strict=True))
        order = numbers.permutation(len(vector))
        assert float(vector[order] @ counts[order]) == exact * RESOLUTION


@settings(max_examples=scale(100))
@given(priced())
def test_sums_are_those_of_all_ops(case: Priced) -> None:
    tables = DurationTables(case.program, case.tables)
    batches = [features for of_step in case.steps for features in of_step]
    expected = [[sum(table.times(case.program, features)) for features in batches] for table in case.tables]
    assert tables.sum_ops(np.array(batches, dtype=np.float64)) == pytest.approx(np.array(expected))
    work = tables.compute_work(tables.compute_durations(stack_features(case.steps)))
    of_steps = np.array(expected).reshape(len(case.tables), len(case.steps), -1).sum(axis=2)
    assert work.sum(axis=2) == pytest.approx(of_steps)
    assert work.shape[2] == len(case.steps[0]) * len({op.name for op in case.program.ops})


@given(layered_programs(THREE_LANES), st.integers(1, 4))
def test_every_number_has_a_place_of_its_own(program: Program, micro_batches: int) -> None:
    layout = DurationLayout(program, micro_batches)
    assert list(layout.names) == list(dict.fromkeys(op.name for op in program.ops))
    ops = [layout.find_op(number, name) for number in range(micro_batches) for name in layout.names]
    credits = [layout.find_credit(number, name) for number in range(micro_batches) for name in layout.communication]
    assert [*ops, *credits, layout.issue, layout.handover] == list(range(layout.size))
