from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo_runtime.errors import ConfigError
from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.policies import (
    LAYERED,
    Order,
    Policy,
    alternate,
    get_policy,
    keep_layers,
    keeps_layers,
    latest_first,
    layered,
    sequential,
    staggered,
)
from dbo_runtime.ir.program import Program, ProgramBuilder
from dbo_runtime.ir.schedule import Issue
from dbo_runtime.ir.validate import validate
from tests.support.profiles import scale
from tests.support.programs import record_toy
from tests.support.strategies import programs


def record(shape: str) -> Program:
    """Return a program with an op for each letter: `c` on compute, `m` on comm, `s` on side, `a` on another lane.

    `o` is on compute and `ordered`.
    """
    lanes = {"c": "compute", "o": "compute", "m": "comm", "s": "side", "a": "aux"}
    p = ProgramBuilder()
    x = p.input("x")
    for number, letter in enumerate(shape):
        x = p.op(f"op{number}", lambda x: x, x, lane=lanes[letter], ordered=letter == "o")
    return p.build(x)


def show(order: Order) -> str:
    """Return an order such as `0.0 0.1 1.0`: micro-batch, position."""
    return " ".join(f"{mb}.{position}" for mb, position in order)


def test_sequential_runs_one_micro_batch_after_the_other() -> None:
    assert show(sequential([record("cm"), record("cmc")])) == "0.0 0.1 1.0 1.1 1.2"


def test_alternate_takes_turns_after_each_overlap_point() -> None:
    two = [record("ccmcmc")] * 2
    assert show(alternate(two)) == "0.0 0.1 0.2 1.0 1.1 1.2 0.3 0.4 1.3 1.4 0.5 1.5"


@pytest.mark.parametrize("shape", ["cscm", "csmc", "cmsmc", "mscsm", "sms", "cmscmsc"])
def test_the_side_lane_makes_no_overlap_point(shape: str) -> None:
    """Its ops compute, too: turns are taken as if they were on the compute lane."""
    two_lanes, folded = [record(shape)] * 2, [record(shape.replace("s", "c"))] * 2
    assert [program.fold_side().lanes for program in two_lanes] == [program.lanes for program in folded]
    for policy in (sequential, alternate, get_policy("staggered", 1)):
        assert policy(two_lanes) == policy(folded)


def test_any_lane_that_does_not_compute_makes_an_overlap_point() -> None:
    assert show(alternate([record("cac")] * 2)) == "0.0 0.1 1.0 1.1 0.2 1.2"


def test_ops_on_other_lanes_that_follow_each_other_are_one_overlap_point() -> None:
    assert show(alternate([record("cmamc")] * 2)) == "0.0 0.1 0.2 0.3 1.0 1.1 1.2 1.3 0.4 1.4"
    assert show(alternate([record("mc")] * 2)) == "0.0 1.0 0.1 1.1"


def test_staggered_lets_each_micro_batch_lead_the_next_by_so_many_overlap_points() -> None:
    two = [record("cmcmc")] * 2
    assert show(staggered(two, 1)) == "0.0 0.1 0.2 0.3 1.0 1.1 0.4 1.2 1.3 1.4"
    assert show(staggered(two, 2)) == "0.0 0.1 0.2 0.3 0.4 1.0 1.1 1.2 1.3 1.4"


def test_three_micro_batches_take_turns() -> None:
    three = [record("cmc")] * 3
    assert show(alternate(three)) == "0.0 0.1 1.0 1.1 2.0 2.1 0.2 1.2 2.2"
    assert show(staggered(three, 1)) == "0.0 0.1 0.2 1.0 1.1 1.2 2.0 2.1 2.2"


def test_a_shorter_program_drops_out_and_the_other_goes_on() -> None:
    assert show(alternate([record("c"), record("cmcmc")])) == "0.0 1.0 1.1 1.2 1.3 1.4"


@pytest.mark.parametrize(
    ("shapes", "order"),
    [
        (["cm", "cm", "c"], "2.0 1.0 1.1 0.0 0.1"),  # nothing holds the last one back
        (["coc", "coc"], "1.0 0.0 0.1 1.1 1.2 0.2"),  # but for its ordered op, which comes second
        (["oo", "oo"], "0.0 1.0 0.1 1.1"),  # after the one of the same name only
        (["oc", "oc", "oc"], "0.0 1.0 2.0 2.1 1.1 0.1"),
        (["cc", "oo"], "1.0 1.1 0.0 0.1"),  # not after one of the same name that is not ordered
    ],
)
def test_the_latest_micro_batch_comes_first_as_far_as_ordered_ops_allow(shapes: Sequence[str], order: str) -> None:
    assert show(latest_first([record(shape) for shape in shapes])) == order


def test_a_lead_beyond_the_end_is_sequential() -> None:
    two = [record_toy()] * 2
    assert staggered(two, lead=100) == sequential(two)


def test_alternate_is_staggered_without_a_lead() -> None:
    two = [record_toy()] * 2
    assert alternate(two) == staggered(two, lead=0)


@pytest.mark.parametrize(
    ("setting", "policy"), [("sequential", sequential), ("alternate", alternate), ("optimal", alternate)]
)
def test_a_setting_names_its_policy(setting: str, policy: Policy) -> None:
    assert get_policy(setting, lead=0) is policy


def test_the_setting_staggered_carries_its_lead() -> None:
    two = [record_toy()] * 2
    assert get_policy("staggered", lead=2)(two) == staggered(two, lead=2)


def test_an_unknown_policy_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="no policy 'best'; known are optimal, sequential, alternate, staggered"):
        get_policy("best", lead=0)


@settings(max_examples=scale(100))
@given(st.lists(programs(), min_size=1, max_size=4), st.integers(0, 4))
def test_every_order_issues_each_op_once_and_in_program_order(chosen: Sequence[Program], lead: int) -> None:
    for order in (sequential(chosen), alternate(chosen), staggered(chosen, lead)):
        for mb, program in enumerate(chosen):
            issued = [issue for issue in order if issue.micro_batch == mb]
            assert issued == [Issue(mb, position) for position in range(len(program.ops))]
        assert len(order) == sum(len(program.ops) for program in chosen)


@settings(max_examples=scale(100))
@given(programs(), st.integers(1, 4), st.integers(0, 4))
def test_every_policy_may_order_micro_batches_that_run_the_same_program(program: Program, n: int, lead: int) -> None:
    for name in ("sequential", "alternate", "staggered"):
        same = [program] * n
        validate(lower(same, get_policy(name, lead)(same)))


def record_layers(*shapes: str) -> Program:
    """Return a program with a layer for each shape; see `record`."""
    lanes = {"c": "compute", "o": "compute", "m": "comm", "s": "side"}
    p = ProgramBuilder(has_side=True)
    x = p.input("x")
    for layer, shape in enumerate(shapes):
        with p.layer(layer):
            for number, letter in enumerate(shape):
                x = p.op(f"op{number}", lambda x: x, x, lane=lanes[letter], ordered=letter == "o")
    return p.build(x)


def keeps(programs_of_step: Sequence[Program], order: Order) -> bool:
    return keeps_layers(programs_of_step[mb].ops[position] for mb, position in order)


def test_layers_that_do_not_communicate_take_turns_before_they_attend() -> None:
    """As dense layers of a model whose experts are spread, without tensor parallel."""
    two = [record_layers("coc", "coc", "cocmcm")] * 2
    assert not keeps(two, alternate(two))
    assert show(layered(two)) == (
        "0.0 0.1 0.2 0.3 1.0 1.1 1.2 1.3 "  # up to the attention of the second layer
        "0.4 0.5 0.6 1.4 1.5 1.6 "
        "0.7 0.8 0.9 1.7 1.8 1.9 "
        "0.10 0.11 1.10 1.11"
    )
    assert keeps(two, layered(two))


def test_where_each_layer_communicates_nothing_changes() -> None:
    two = [record_toy(3)] * 2
    assert layered(two) == alternate(two)
    assert get_policy(LAYERED, 0) is layered


def test_ordered_ops_of_one_layer_or_of_none_make_no_turn() -> None:
    assert show(layered([record_layers("oco")] * 2)) == "0.0 0.1 0.2 1.0 1.1 1.2"
    assert show(layered([record("oco")] * 2)) == "0.0 0.1 0.2 1.0 1.1 1.2"


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (("optimal", 0), (LAYERED, 0)),
        (("alternate", 0), (LAYERED, 0)),
        (("staggered", 2), ("staggered", 2)),
        (("sequential", 0), ("sequential", 0)),
    ],
)
def test_only_policies_that_leave_a_choice_are_replaced(policy: tuple[str, int], kept: tuple[str, int]) -> None:
    assert keep_layers(policy) == kept


shapes = st.lists(st.text("comso", min_size=1, max_size=5), min_size=1, max_size=5)


@settings(max_examples=scale(200))
@given(shapes, st.integers(1, 4))
def test_layered_keeps_layers_in_turn_and_is_alternate_where_that_does(given_shapes: list[str], n: int) -> None:
    same = [record_layers(*given_shapes)] * n
    order = layered(same)
    assert keeps(same, order)
    validate(lower(same, order))
    if keeps(same, alternate(same)):
        assert order == alternate(same)


@settings(max_examples=scale(100))
@given(shapes, st.integers(2, 3))
def test_the_order_that_leaves_most_to_chance_keeps_layers_that_attend_once(given_shapes: list[str], n: int) -> None:
    """So `DBO_CHECK=races` may issue it where a connector needs that."""
    same = [record_layers(*("o" + shape.replace("o", "c") for shape in given_shapes))] * n
    assert keeps(same, latest_first(same))
