"""What ops take kind by kind and in sum, against the costs one by one."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo_runtime.ir.program import Program
from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.costs.cost_table import CommCost, ComputeCost, CostTable
from dbo_runtime.planner.costs.op_times import OpTimes
from tests.support.planner.machines import PROGRAM, make_table
from tests.support.planner.priced_programs import THREE_LANES, layered_programs, steps, tables
from tests.support.profiles import scale


class Priced(NamedTuple):
    program: Program
    table: CostTable
    features: BatchFeatures

    @property
    def kinds(self) -> dict[str, int]:
        """The number of each kind's first op."""
        return {op.name: number for number, op in reversed([*enumerate(self.program.ops)])}

    @property
    def order(self) -> list[int]:
        return sorted(self.kinds.values())


@st.composite
def priced(draw: st.DrawFn) -> Priced:
    program = draw(layered_programs(THREE_LANES))
    return Priced(program, draw(tables(program)), draw(steps(1))[0])


@settings(max_examples=scale(200))
@given(priced())
def test_they_are_those_of_the_table(case: Priced) -> None:
    program, table, features = case
    times, expected = OpTimes(program, table), table.times(program, features)
    assert times.list_seconds(features) == pytest.approx([expected[number] for number in case.order])
    assert times.sum(features) == pytest.approx(sum(expected))
    credits = table.credits(program, features)
    communicating = [number for number in case.order if program.ops[number].lane == "comm"]
    assert times.list_credits(features) == pytest.approx([credits[number] for number in communicating])


@settings(max_examples=scale(200))
@given(priced())
def test_attention_is_what_a_batch_of_as_many_tokens_takes_without_it(case: Priced) -> None:
    program, table, features = case
    times = OpTimes(program, table)
    rest = times.sum(BatchFeatures(features.tokens))
    assert times.sum_attention(features) == pytest.approx(times.sum(features) - rest, abs=1e-12)


def test_an_op_of_each_layer_counts() -> None:
    attention = ComputeCost(2.0, 1.0, weights=5.0, per_pair=0.5, imbalance=2.0)
    reduce = CommCost(1.0, 1.0, 3.0, free_bytes=6.0, imbalance=1.5)
    times = OpTimes(PROGRAM, make_table(PROGRAM, {"attention": attention, "reduce": reduce}))
    features = BatchFeatures(4, pairs=10.0)
    assert times.list_seconds(features) == [2 + 8 + 5, 1 + 18 - 6]
    assert times.list_credits(features) == [6]
    assert times.sum(features) == 16 * (15 + 13)
    assert times.sum_attention(features) == 16 * 5
