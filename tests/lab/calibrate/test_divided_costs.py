"""What the ops take that a divided op is divided into: what is measured of them, and what follows from the whole."""

from __future__ import annotations

import pytest

from dbo_runtime.ir.program import Program, ProgramBuilder
from dbo_runtime.lab.calibrate.divided_costs import add_joint_costs, list_token_wise
from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.costs.op_cost import CommCost, ComputeCost, OpCost
from tests.support.planner.shop import do_nothing

WHOLE = ComputeCost(fixed=20e-6, per_token=1e-6, weights=100e-6, per_pair=3e-9, per_decode=2e-6)
QKV, OUT = ComputeCost(fixed=5e-6, per_token=0.5e-6, weights=60e-6), ComputeCost(per_token=0.25e-6, weights=20e-6)
FEATURES = BatchFeatures(tokens=1000, pairs=500_000.0, prefills=2)


def make_program(joint: int = 1) -> Program:
    """Return a layer whose attention is divided, with *joint* joint ops between its projections."""
    parts = ProgramBuilder()
    y = parts.compute("qkv", do_nothing, parts.input("x"), token_wise=True)
    for number in range(joint):
        y = parts.compute(f"core{number}", do_nothing, y, ordered=True)
    divided = parts.build(parts.compute("out", do_nothing, y, token_wise=True))
    p = ProgramBuilder()
    with p.layer(0):
        x = p.compute("attention", do_nothing, p.input("x"), ordered=True, divided=divided)
        x = p.comm("reduce", do_nothing, x)
    return p.build(x)


def make_costs(**changes: OpCost) -> dict[str, OpCost]:
    return {"attention": WHOLE, "qkv": QKV, "out": OUT, "reduce": CommCost(1e-6, 1e-9, 4.0), **changes}


def test_token_wise_ops_are_measured() -> None:
    assert list_token_wise(make_program()) == {"qkv", "out"}


def test_the_joint_op_takes_what_the_others_leave_of_the_whole() -> None:
    costs = add_joint_costs(make_costs(), make_program())
    apart = sum(costs[name].time(FEATURES) for name in ("qkv", "core0", "out"))
    assert apart == pytest.approx(WHOLE.time(FEATURES))
    assert costs["core0"] == ComputeCost(15e-6, 0.25e-6, 20e-6, per_pair=3e-9, per_decode=2e-6)
    assert {name: costs[name] for name in make_costs()} == make_costs()


def test_no_cost_is_below_nothing_although_measurements_scatter() -> None:
    core = add_joint_costs(make_costs(qkv=WHOLE), make_program())["core0"]
    assert core == ComputeCost(per_pair=3e-9, per_decode=2e-6)


@pytest.mark.parametrize("joint", [0, 2])
def test_other_numbers_of_joint_ops_get_no_cost(joint: int) -> None:
    assert add_joint_costs(make_costs(), make_program(joint)) == make_costs()


def test_a_joint_op_that_was_measured_itself_keeps_its_cost() -> None:
    known = ComputeCost(fixed=1.0)
    assert add_joint_costs(make_costs(core0=known), make_program())["core0"] == known
