"""Placements: what may be on `side`, and that programs compute the same wherever it is."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from dbo_runtime.devices.cpu import CpuDevice
from dbo_runtime.engine.event_table import EventTable
from dbo_runtime.engine.executor import Executor, run_sequential
from dbo_runtime.errors import ProgramError
from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.op import SIDE, Op
from dbo_runtime.ir.policies import alternate, staggered
from dbo_runtime.ir.program import Program, ProgramBuilder
from dbo_runtime.ir.validate import validate
from dbo_runtime.planner.costs.program_spec import build_program, describe_program
from dbo_runtime.planner.online.placements import list_placements
from tests.support.planner.placed_programs import record
from tests.support.programs import record_toy

LONGEST = 3e-4  # seconds
MOE = {"gate", "experts", "merge"}


def name_side_ops(program: Program) -> set[str]:
    return {op.name for op in program.ops if op.lane == SIDE}


def test_all_movable_ops_are_on_side_together_between_no_op_there_and_what_the_adapter_put_there() -> None:
    found = [name_side_ops(placed) for placed in list_placements(record())]
    aside = {"keys", "shared_experts"}
    assert found == [set(), {"keys"}, {"shared_experts"}, aside | MOE, aside]


def test_placements_differ_in_lanes_only() -> None:
    program = record()

    def ignore_lane(op: Op) -> tuple[Any, ...]:
        return op.label, op.fn, op.reads, op.writes, op.overwrites

    for placed in list_placements(program):
        assert [ignore_lane(op) for op in placed.ops] == [ignore_lane(op) for op in program.ops]
        assert (placed.inputs, placed.outputs) == (program.inputs, program.outputs)


def test_nothing_moves_where_kernels_share_memory_or_there_is_no_second_lane() -> None:
    assert [name_side_ops(placed) for placed in list_placements(record(may_move_to_side=False))][-2:] == [
        {"shared_experts"},
        {"keys", "shared_experts"},
    ]
    without = record(has_side=False)
    assert list_placements(without) == (without,)
    assert not any(op.may_move_to_side for op in without.ops)
    toy = record_toy(layers=2)
    assert list_placements(toy) == (toy,)


def test_a_cost_file_s_program_has_the_same_placements() -> None:
    spec = describe_program(record())
    placed = [[op.lane for op in each.ops] for each in list_placements(record())]
    assert [[op.lane for op in each.ops] for each in list_placements(build_program(spec))] == placed
    assert describe_program(build_program(spec)) == spec != describe_program(record(may_move_to_side=False))


def test_only_ops_of_the_compute_lane_may_move_to_side() -> None:
    p = ProgramBuilder()
    with pytest.raises(
        ProgramError, match=r"'send' may move to side, so it must compute, but is on comm\. \(.*\.py:\d+"
    ):
        p.op("send", abs, p.input("x"), lane="comm", may_move_to_side=True)


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    device = CpuDevice()
    yield device
    device.close()


@pytest.mark.parametrize("policy", [alternate, partial(staggered, lead=1)], ids=["alternate", "staggered"])
def test_results_are_the_same_in_every_placement_however_long_ops_take(device: CpuDevice, policy: Any) -> None:
    rng = random.Random(0)

    def delay(fn: Callable[..., Any]) -> Callable[..., Any]:
        def run(*reads: Any) -> Any:
            time.sleep(rng.random() * LONGEST)
            return fn(*reads)

        return run

    program, inputs = record(run=delay), [(3,), (17,)]
    expected = run_sequential([record()] * 2, inputs)
    for placed in list_placements(program):
        schedule = lower((placed,) * 2, policy((placed,) * 2))
        validate(schedule)
        for _ in range(5):
            assert Executor(schedule, device, EventTable(device)).run(inputs) == expected
