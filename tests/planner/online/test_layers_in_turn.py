"""Issue orders where a KV connector takes one layer after the other: all that may be chosen keep them in turn."""

from __future__ import annotations

import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dbo_runtime.config import RuntimeConfig
from dbo_runtime.ir.policies import keeps_layers, layered
from dbo_runtime.ir.validate import validate
from dbo_runtime.lab.oracle.orders import Orders
from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.costs.cost_table import CommCost, ComputeCost, OpCost
from dbo_runtime.planner.online.named_order import NamedOrder
from dbo_runtime.planner.online.planner import Planner
from dbo_runtime.planner.online.predictor import Predictor
from dbo_runtime.planner.online.split_choice import SplitChoice
from tests.support.planner.machines import BYTES, make_table
from tests.support.planner.prepared_machines import FEW_STATES, LIMITS, MACHINES, PreparedMachine, draw_batch
from tests.support.profiles import scale
from tests.support.programs import record_dense_and_experts

COSTS: dict[str, OpCost] = {
    "attention": ComputeCost(5e-6, 0.4e-6, per_pair=2e-11, per_context_pair=2e-11),
    "mlp": ComputeCost(5e-6, 0.3e-6),
    "dispatch": CommCost(5e-6, 0.5e-6 / BYTES, BYTES),
    "experts": ComputeCost(5e-6, 0.3e-6),
    "combine": CommCost(5e-6, 0.3e-6 / BYTES, BYTES),
}


def make_machine(dense: int, experts: int) -> PreparedMachine:
    program = record_dense_and_experts(dense, experts)
    names = {op.name for op in program.ops}
    return PreparedMachine(program, make_table(program, {name: COSTS[name] for name in COSTS if name in names}))


DENSE = {"one dense layer": make_machine(1, 3), "three dense layers": make_machine(3, 12)}
EVERY = {**DENSE, **MACHINES}


def open_planner(machine: PreparedMachine, keeps: bool = True, **settings_: object) -> Planner:
    planner = Planner(machine.program, machine.table, LIMITS, FEW_STATES, keeps_layers=keeps)
    planner.prepare(RuntimeConfig(mode="always", **settings_))  # type: ignore[arg-type]
    return planner


PLANNERS = {name: open_planner(machine) for name, machine in DENSE.items()}


def keeps(order: NamedOrder) -> bool:
    return keeps_layers(order.programs[mb].ops[position] for mb, position in order.order)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [("optimal", 0), ("alternate", 0)])
@pytest.mark.parametrize("name", EVERY)
def test_every_order_that_is_prepared_keeps_layers_in_turn(name: str, policy: tuple[str, int]) -> None:
    orders = open_planner(EVERY[name], policy=policy).orders
    assert {len(order.programs) for order in orders} >= {2, 3}
    for order in orders:
        assert keeps(order), order.name
        validate(order.schedule)


@pytest.mark.parametrize("name", DENSE)
def test_without_a_connector_no_order_that_serves_best_does(name: str) -> None:
    """So what is asked above can fail."""
    assert not any(map(keeps, open_planner(DENSE[name], keeps=False).orders))


@pytest.mark.parametrize("name", DENSE)
def test_what_a_user_asks_for_is_prepared_as_it_is(name: str) -> None:
    orders = open_planner(DENSE[name], policy=("staggered", 1)).orders
    assert orders
    assert not any(map(keeps, orders))


@settings(max_examples=scale(20), deadline=None)
@given(st.sampled_from(sorted(DENSE)), st.integers(0, 2**32))
def test_steps_are_split_by_such_orders(name: str, seed: int) -> None:
    planner = PLANNERS[name]
    config = RuntimeConfig(mode="always")
    batch = draw_batch(random.Random(seed))
    assume(batch.tokens > 3)  # fewer tokens of one request have nowhere to be cut
    for choice in (planner.choose(batch, config), planner.choose_data_parallel([batch.tokens, 7], config)):
        assert isinstance(choice, SplitChoice), choice
        assert keeps(choice.order)


@pytest.mark.parametrize("name", EVERY)
def test_a_planner_that_searches_while_a_step_waits_keeps_them_in_turn(name: str) -> None:
    program, table = EVERY[name]
    orders = Orders(program, table, Predictor(program, table), FEW_STATES, keeps_layers=True)
    for parts in (2, 3):
        found = orders.list_orders([BatchFeatures(900, 3e5, prefills=1)] * parts, RuntimeConfig(mode="always"))
        assert found
        assert all(map(keeps, found))


def test_the_layered_order_is_always_among_them() -> None:
    machine = DENSE["one dense layer"]
    planner = open_planner(machine)
    by_count = {len(order.programs): order.order for order in planner.orders}
    for count, order in by_count.items():
        assert order == layered([machine.program] * count)
