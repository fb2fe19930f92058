"""Predictions by critical paths, against simulations; and which orders are kept."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo_runtime.batch import place_cuts, share_evenly, slice_batch
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.ir.op import SIDE
from dbo_runtime.ir.policies import alternate, staggered
from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.costs.cost_table import ComputeCost, CostTable
from dbo_runtime.planner.online.candidates import Candidates
from dbo_runtime.planner.online.cuts import measure_slices
from dbo_runtime.planner.online.durations import DurationTables
from dbo_runtime.planner.online.named_order import NamedOrder, compute_end
from dbo_runtime.planner.online.order_book import SIMULATED_STEPS, OrderBook, PreparedOrder, _spread
from dbo_runtime.planner.online.placements import list_placements
from dbo_runtime.planner.online.predictor import Predictor, make_worst_cases
from dbo_runtime.planner.online.preparation import (
    PREPARED_LEADS,
    SHORTEST_STEP,
    USEFUL_GAIN,
    Preparation,
    _Option,
    list_useful,
)
from dbo_runtime.planner.online.shapes import list_shapes
from tests.support.planner.machines import make_table
from tests.support.planner.prepared_machines import FEW_STATES, LIMITS, MACHINES, PreparedMachine, draw_batch
from tests.support.planner.priced_programs import steps
from tests.support.profiles import scale

UNCERTAINTY = 0.2
IN_TWO = RuntimeConfig(micro_batches=2)


class Book(NamedTuple):
    """A book with what it was made for."""

    machine: PreparedMachine
    tables: Sequence[CostTable]
    samples: Sequence[Sequence[BatchFeatures]]
    book: OrderBook

    def simulate(self, order: NamedOrder, features: Sequence[BatchFeatures], table: int = 0) -> float:
        predictor = Predictor(self.machine.program, self.tables[table])
        return compute_end(predictor.simulate(order.schedule, features))


@cache
def open_book(name: str, micro_batches: int = 2, config: RuntimeConfig = IN_TWO) -> Book:
    machine = MACHINES[name]
    placements = list_placements(machine.program)
    allowed = range(len(placements)) if config.side == "auto" else [-1] if config.side == "on" else [0]
    return make_book(machine, micro_batches, config, [number % len(placements) for number in allowed])


def make_book(machine: PreparedMachine, micro_batches: int, config: RuntimeConfig, allowed: Sequence[int]) -> Book:
    samples = []
    for batch in list_shapes(LIMITS):
        cuts = place_cuts(batch, share_evenly(batch, micro_batches))
        if len(cuts) == micro_batches - 1:
            samples.append(measure_slices(batch, slice_batch(batch, cuts)))
    tables = [machine.table, *make_worst_cases(machine.table, UNCERTAINTY)]
    priced = DurationTables(machine.program, tables)
    preparation = Preparation(list_placements(machine.program), priced, FEW_STATES)
    return Book(machine, tables, samples, preparation.make_book(samples, allowed, config))


# What is predicted


@pytest.mark.parametrize("name", MACHINES)
def test_samples_are_predicted_as_they_are_simulated(name: str) -> None:
    """Exactly, where lanes do not slow each other; where they do, steps that are hardly different share a mean."""
    opened = open_book(name)
    is_contended = any(factor > 1.0 for factor in opened.machine.table.contention.values())
    chosen = _spread(opened.samples, SIMULATED_STEPS)[::4] if is_contended else opened.samples[::4]
    predicted = opened.book.predict(chosen)[0]
    simulated = [[opened.simulate(order, features) for order in opened.book.orders] for features in chosen]
    assert predicted == pytest.approx(np.array(simulated), rel=5e-3 if is_contended else 1e-9)


@pytest.mark.parametrize("name", ["alike", "unlike", "alike, contended", "side"])
def test_other_steps_are_predicted_closely_too(name: str) -> None:
    opened, rng = open_book(name), random.Random(name)
    features = []
    while len(features) < 12:
        batch = draw_batch(rng)
        cuts = place_cuts(batch, share_evenly(batch, 2))
        if cuts:
            features.append(measure_slices(batch, slice_batch(batch, cuts)))
    predicted = opened.book.predict(features)[0]
    simulated = np.array([[opened.simulate(order, each) for order in opened.book.orders] for each in features])
    assert predicted == pytest.approx(simulated, rel=0.03)
    if name in ("alike", "unlike"):
        assert (predicted <= simulated * (1 + 1e-9)).all()


@pytest.mark.parametrize("name", ["alike, contended", "alike, doubted", "unlike, contended"])
def test_worst_cases_are_predicted_by_their_own_tables(name: str) -> None:
    opened = open_book(name)
    chosen = opened.samples[-6:]
    predicted = opened.book.predict(chosen)
    for number in range(1, len(opened.tables)):
        for row, features in zip(predicted[number], chosen, strict=True):
            simulated = [opened.simulate(order, features, number) for order in opened.book.orders]
            assert row.tolist() == pytest.approx(simulated, rel=0.03)


@settings(max_examples=scale(100))
@given(st.sampled_from(sorted(MACHINES)), steps(2))
def test_one_step_by_one_order_is_predicted_like_all_together(name: str, features: Sequence[BatchFeatures]) -> None:
    book = open_book(name).book
    (expected,) = book.predict([features])[0].tolist()
    assert [book.predict_one(features, order) for order in book.orders] == pytest.approx(expected)


@pytest.mark.parametrize("count", [1, 2])
def test_a_book_may_be_made_for_very_few_steps(count: int) -> None:
    machine = MACHINES["alike, contended"]
    tables = DurationTables(machine.program, [machine.table])
    samples = [(BatchFeatures(100 * number), BatchFeatures(90 * number)) for number in range(1, count + 1)]
    preparation = Preparation(list_placements(machine.program), tables, FEW_STATES)
    book = preparation.make_book(samples, [0], IN_TWO)
    predictor = Predictor(machine.program, machine.table)
    for features in samples:
        expected = [compute_end(predictor.simulate(order.schedule, features)) for order in book.orders]
        assert book.predict([features])[0, 0].tolist() == pytest.approx(expected, rel=0.01)


def test_lanes_that_do_not_slow_each_other_are_predicted_as_if_nothing_was_said_of_them() -> None:
    machine = MACHINES["unlike"]
    samples = [(BatchFeatures(100), BatchFeatures(90))]
    digests = set()
    for contention in ({}, {"compute": 1.0}, {"compute": 1.0, "comm": 1.0}):
        tables = DurationTables(machine.program, [replace(machine.table, contention=contention)])
        book = Preparation(list_placements(machine.program), tables, FEW_STATES).make_book(samples, [0], IN_TWO)
        digests.add(book.digest)
    assert len(digests) == 1


def test_steps_to_simulate_are_spread_over_those_with_most_tokens() -> None:
    steps_of = {count: (BatchFeatures(count), BatchFeatures(1)) for count in (5, 9, 1, 7, 3, 8, 2, 6, 4)}
    assert _spread(list(steps_of.values()), 3) == [steps_of[count] for count in (9, 7, 5)]


# Which orders there are


@pytest.mark.parametrize("name", ["alike", "unlike", "side"])
@pytest.mark.parametrize("micro_batches", [2, 3])
def test_for_each_sample_one_of_the_orders_is_as_good_as_any_common_policy(name: str, micro_batches: int) -> None:
    opened = open_book(name, micro_batches, RuntimeConfig(side="off"))
    candidates = Candidates(list_placements(opened.machine.program)[0], FEW_STATES)
    best = opened.book.predict(opened.samples)[0].min(axis=1)
    for order in candidates.list_policies(micro_batches)[:PREPARED_LEADS]:
        ends = [opened.simulate(order, features) for features in opened.samples[::6]]
        assert (best[::6] <= np.array(ends) * (1 + USEFUL_GAIN)).all()


@given(st.lists(st.lists(st.floats(1e-6, 1.0), min_size=4, max_size=4), min_size=1, max_size=6))
def test_what_is_kept_is_never_noticeably_worse_than_all(ends: list[list[float]]) -> None:
    options = [_Option(make_prepared(str(number)), np.array(row)) for number, row in enumerate(ends)]
    kept = list_useful(options)
    best, served = (np.min([option.ends for option in each], axis=0) for each in (options, kept))
    assert (served <= best * (1 + USEFUL_GAIN + 1e-12)).all()
    names = [option.prepared.order.name for option in kept]
    assert len(set(names)) == len(names)
    assert np.log(kept[0].ends).sum() == min(np.log(option.ends).sum() for option in options)


def test_an_order_that_is_hardly_better_is_not_kept() -> None:
    useful = [[1.0, 1.0], [1.0 - USEFUL_GAIN / 2, 1.1], [1.1, 1.0 - 2 * USEFUL_GAIN]]
    kept = list_useful([_Option(make_prepared(str(number)), np.array(row)) for number, row in enumerate(useful)])
    assert [option.prepared.order.name for option in kept] == ["0", "2"]


def make_prepared(name: str) -> PreparedOrder:
    return PreparedOrder(NamedOrder(name, (), ()), np.zeros((0, 0)))


@pytest.mark.parametrize("micro_batches", [2, 3, 4])
@pytest.mark.parametrize("policy", [("alternate", 0), ("staggered", 1)])
def test_the_policy_of_the_settings_is_the_only_order(
    monkeypatch: pytest.MonkeyPatch, policy: tuple[str, int], micro_batches: int
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("searched")

    monkeypatch.setattr(Candidates, "find", refuse)
    machine, config = MACHINES["unlike"], RuntimeConfig(policy=policy)
    (order,) = make_book(machine, micro_batches, config, [0]).book.orders
    programs = (machine.program,) * micro_batches
    assert order.order == (alternate(programs) if policy[0] == "alternate" else staggered(programs, 1))


@pytest.mark.parametrize("policy", [("optimal", 0), ("alternate", 0)])
@pytest.mark.parametrize("micro_batches", [1, 2, 3])
@pytest.mark.parametrize("side", ["on", "off", "auto"])
def test_ops_are_on_side_where_the_settings_say(side: str, micro_batches: int, policy: tuple[str, int]) -> None:
    config = RuntimeConfig(side=side, policy=policy)
    orders = open_book("side", micro_batches, config).book.orders
    assert {len(order.programs) for order in orders} == {micro_batches}
    assert len({order.name for order in orders}) == len(orders)
    has_side = {SIDE in order.programs[0].lanes for order in orders}
    assert has_side == {"on": {True}, "off": {False}, "auto": {True, False}}[side]


def test_all_movable_ops_are_tried_on_side() -> None:
    orders = open_book("side", 2, RuntimeConfig(side="auto")).book.orders
    assert any("experts" in order.side_ops for order in orders)


def test_ops_that_cost_nothing_are_predicted_to_take_nothing() -> None:
    program, table = MACHINES["side"]
    nothing = {
        name: type(cost)(*[0.0] * (1 if isinstance(cost, ComputeCost) else 3)) for name, cost in table.ops.items()
    }
    machine = PreparedMachine(program, make_table(program, nothing, contention=dict(table.contention)))
    book = make_book(machine, 2, RuntimeConfig(), range(len(list_placements(program)))).book
    predicted = book.predict([(BatchFeatures(10), BatchFeatures(20))])
    assert (predicted <= SHORTEST_STEP).all()
