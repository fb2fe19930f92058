"""A graph holds the order alone where that gains by the costs of the device, and the model's own forward elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.ir.program import Program, ProgramBuilder
from dbo_runtime.lab.whatif.published_cases import get_case
from dbo_runtime.lab.whatif.scale import set_layers
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.planner.costs.op_cost import CommCost, ComputeCost, HostCost, OpCost
from dbo_runtime.planner.costs.program_spec import build_program
from dbo_runtime.planner.online.graph_planner import choose_graphs
from dbo_runtime.planner.online.selection import NO_GAIN
from dbo_runtime.planner.online.shapes import ServingLimits
from dbo_runtime.planner.online.split_choice import SplitChoice
from tests.support.planner.machines import make_table
from tests.support.planner.shop import do_nothing

LIMITS = ServingLimits(tokens=8192, requests=256, context=16_384)
SIZES = (1, 8, 128)
MARGIN = 0.06  # which some of these sizes gain


LAYERS = {"r1-tp16-941": (3, 8), "llama70b-tp8-11329": (8,)}  # fewer than published, because planning them is quick


def load(case: str) -> CostTable:
    return set_layers(get_case(case).table, LAYERS[case])


def record(case: str) -> Program:
    """Return the program of a published case, in which all but attention is token-wise."""
    program = build_program(load(case).program).fold_side()
    return replace(program, ops=tuple(replace(op, token_wise=not op.ordered) for op in program.ops))


def record_balanced() -> tuple[Program, CostTable]:
    """Return a chain of ops, and costs by which nano-batches gain more than anything else."""
    p = ProgramBuilder()
    x = p.input("x")
    for index in range(8):
        with p.layer(index):
            x = p.compute("attention", do_nothing, x, ordered=True)
            x = p.compute("mlp", do_nothing, x, token_wise=True)
            x = p.op("reduce", do_nothing, x, lane="comm", token_wise=True)
    program = p.build(x)
    ops: dict[str, OpCost] = {
        "attention": ComputeCost(1e-5),
        "mlp": ComputeCost(0.0, 1e-5),
        "reduce": CommCost(0.0, 1e-5, 1.0),
    }
    return program, make_table(program, ops)


def choose(program: Program, table: CostTable, tokens: int, **settings: Any) -> SplitChoice | Decline:
    return choose_graphs(program, table, [tokens], LIMITS, RuntimeConfig(**{"mode": "auto", **settings}))[tokens]


def choose_published(case: str, tokens: int, host: HostCost | None = None, **settings: Any) -> SplitChoice | Decline:
    table = load(case)
    return choose(record(case), table if host is None else replace(table, host=host), tokens, **settings)


@pytest.mark.parametrize("tokens", SIZES)
def test_where_the_order_alone_gains_the_graph_holds_it(tokens: int) -> None:
    """Dispatch during shared experts, by the published costs of DeepSeek-R1 on 16 NPUs."""
    choice = choose_published("r1-tp16-941", tokens)
    assert isinstance(choice, SplitChoice), choice
    assert (choice.cut.nano_batches, choice.prediction.micro_batches) == (1, 1)
    assert choice.prediction.gain > 0.02


def test_where_all_ops_wait_for_each_other_the_graph_is_that_of_vllm() -> None:
    choice = choose_published("llama70b-tp8-11329", 128)
    assert isinstance(choice, Decline)
    assert choice.reason == NO_GAIN


def test_what_issuing_ops_costs_the_host_does_not_count() -> None:
    slow = HostCost(issue=1e-3, unsplit_issue=1e-6, split=1.0)  # whose eager steps gain nothing
    choice, expected = choose_published("r1-tp16-941", 128, slow), choose_published("r1-tp16-941", 128, HostCost())
    assert isinstance(choice, SplitChoice)
    assert isinstance(expected, SplitChoice)
    assert choice.prediction == expected.prediction


def test_what_compiling_the_models_own_forward_saves_counts() -> None:
    choice = choose_published("r1-tp16-941", 128, HostCost(unsplit=-1e-3))
    assert isinstance(choice, Decline)
    assert choice.reason == NO_GAIN


def test_a_loss_if_costs_are_off_is_not_tried() -> None:
    """Replays are not timed, so a trial would never end."""
    choice = choose_published("r1-tp16-941", 128, margin=0.5)
    assert isinstance(choice, Decline)
    assert choice.trial_class is None


@pytest.mark.parametrize("split", ["auto", "nano", "micro"])
def test_ops_that_may_overlap_on_a_second_compute_lane_do_so_in_graphs(split: str) -> None:
    p = ProgramBuilder(has_side=True)
    x = p.input("x")
    keys = p.side("keys", do_nothing, x)
    queries = p.compute("queries", do_nothing, x, token_wise=True)
    program = p.build(p.compute("attention", do_nothing, keys, queries, ordered=True))
    ops: dict[str, OpCost] = {name: ComputeCost(1e-3) for name in ("keys", "queries", "attention")}
    table = make_table(program, ops)
    assert isinstance(choose(program, table, 8, split=split), Decline)  # by how much lanes slow each other is unknown
    choice = choose(program, replace(table, contention={**table.contention, "side": 1.1}), 8, split=split)
    assert isinstance(choice, SplitChoice)
    assert (choice.cut.nano_batches, choice.prediction.side_ops) == (0, ("keys",))


def test_no_graph_holds_a_step_that_is_cut() -> None:
    program, table = record_balanced()
    assert isinstance(choose(program, table, 128), Decline)


def test_each_size_is_chosen_by_itself_with_all_of_the_margin() -> None:
    """A served step may stay split for half of the margin, because steps of its class were before."""
    program, table = record("r1-tp16-941"), load("r1-tp16-941")
    alone = [choose(program, table, size, margin=MARGIN) for size in SIZES]
    together = choose_graphs(program, table, SIZES, LIMITS, RuntimeConfig(mode="auto", margin=MARGIN))
    assert [*map(type, together.values())] == [*map(type, alone)]
    assert {type(choice) for choice in alone} == {SplitChoice, Decline}
    for choice in together.values():
        assert isinstance(choice, Decline) or choice.prediction.gain > MARGIN
