"""Steps in nano-batches are predicted as an event by event simulation says, and chosen where they are fastest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dbo_runtime.batch import Batch
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.ir.op import Op
from dbo_runtime.ir.program import Program, ProgramBuilder
from dbo_runtime.ir.schedule import Instruction
from dbo_runtime.lab.calibrate.divided_costs import add_joint_costs
from dbo_runtime.lab.whatif.published_cases import get_case
from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.planner.costs.op_cost import ComputeCost
from dbo_runtime.planner.costs.program_spec import build_program
from dbo_runtime.planner.online import nano_orders
from dbo_runtime.planner.online.cuts import measure_batch
from dbo_runtime.planner.online.planner import Planner
from dbo_runtime.planner.online.simulation import predict_timeline
from dbo_runtime.planner.online.split_choice import SplitChoice
from tests.support.planner.shop import do_nothing

PREFILL = Batch((4096,) * 4, 4 * 4096)
DECODES = Batch((1,) * 128, 0, context_lens=(4096,) * 128)
ATTENTION = "attention"
CASES = ["r1-tp16-941", "llama70b-tp8-11329"]


def record(case: str) -> Program:
    """Return the program of a published case. It does not say what is token-wise: all but attention."""
    program = build_program(get_case(case).table.program).fold_side()
    return replace(program, ops=tuple(replace(op, token_wise=not op.ordered) for op in program.ops))


def divide_attention(case: str) -> tuple[Program, CostTable]:
    """Return a case's program with attention divided, and its costs: half of what depends on tokens is projections."""
    program, table = record(case), get_case(case).table
    ops = tuple(replace(op, divided=record_divided(op)) if op.name == ATTENTION else op for op in program.ops)
    whole = table.ops[ATTENTION]
    assert isinstance(whole, ComputeCost)
    projected = ComputeCost(whole.fixed / 4, whole.per_token / 4, whole.weights / 4)
    costs = {**table.ops, "qkv": projected, "attn_out": projected}
    program = replace(program, ops=ops)
    return program, replace(table, ops=add_joint_costs(costs, program))


def record_divided(op: Op) -> Program:
    p = ProgramBuilder()
    x = p.compute("qkv", do_nothing, *(p.input(value.name) for value in op.reads), token_wise=True)
    x = p.compute("attention_core", do_nothing, x, ordered=True)
    return p.build(p.compute("attn_out", do_nothing, x, token_wise=True))


def make_planner(case: str, batch: Batch, is_divided: bool = False) -> Planner:
    program, table = divide_attention(case) if is_divided else (record(case), get_case(case).table)
    return Planner(program, table, shapes=[batch])


def choose(planner: Planner, batch: Batch, **settings: Any) -> SplitChoice:
    choice = planner.choose(batch, RuntimeConfig(**{"mode": "always", "probation": False, **settings}))
    assert isinstance(choice, SplitChoice), choice
    return choice


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("count", "is_divided"), [(2, False), (3, False), (8, False), (3, True)])
def test_a_prediction_is_the_end_of_a_simulation_of_all_ops(case: str, count: int, is_divided: bool) -> None:
    planner = make_planner(case, PREFILL, is_divided)
    table = planner.table
    choice = choose(planner, PREFILL, split="nano", micro_batches=count)
    features = choice.cut.features
    assert [each.tokens for each in features] == [4 * 4096, *(each.tokens for each in features[1:])]
    assert sum(each.tokens for each in features[1:]) == 4 * 4096
    assert len(features) == 1 + count
    names = {op.name for op in choice.order.programs[0].ops}
    assert ({"qkv", "attention_core", "attn_out"} <= names, ATTENTION in names) == (is_divided, not is_divided)

    def measure(instruction: Instruction) -> BatchFeatures:
        number = instruction.op.nano_batch
        return features[0] if number is None else features[1 + number]

    def credit(instruction: Instruction) -> float:
        cost = table.ops[instruction.op.name]
        return getattr(cost, "credit", lambda _: 0.0)(measure(instruction))

    timeline = predict_timeline(
        choice.order.schedule,
        lambda instruction: table.ops[instruction.op.name].time(measure(instruction)),
        table.contention,
        table.host,
        credit,
    )
    end = table.host.time_split(max(span.end for span in timeline.spans), PREFILL.tokens)
    assert choice.prediction.split == pytest.approx(end, rel=5e-3)
    assert choice.prediction.nano_batches == count


@pytest.mark.parametrize("case", CASES)
def test_divided_attention_alone_promises_nothing_and_gains_where_it_overlaps(case: str) -> None:
    whole, divided = (make_planner(case, PREFILL, is_divided) for is_divided in (False, True))
    features = measure_batch(PREFILL)
    assert divided.predict_unsplit(features) == whole.predict_unsplit(features)
    apart = sum(divided.table.ops[name].time(features) for name in ("qkv", "attention_core", "attn_out"))
    assert apart == pytest.approx(whole.table.ops[ATTENTION].time(features))
    ours, theirs = (choose(planner, PREFILL, split="nano", micro_batches=4).prediction for planner in (divided, whole))
    assert ours.split < theirs.split


@pytest.mark.parametrize("case", CASES)
def test_attention_stays_one_op_where_the_ops_that_it_is_divided_into_have_no_costs(case: str) -> None:
    program, _ = divide_attention(case)
    settings = RuntimeConfig(mode="always", split="nano", micro_batches=2)
    planner, expected = Planner(program, get_case(case).table, shapes=[PREFILL]), make_planner(case, PREFILL)
    planner.prepare(settings)
    expected.prepare(settings)
    assert planner.digest == expected.digest != ""


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_micro_batches_are_chosen_for_prefills_that_have_both(case: str) -> None:
    planner = make_planner(case, PREFILL)
    both = choose(planner, PREFILL, mode="auto", split="auto").prediction
    micro = choose(planner, PREFILL, mode="auto", split="micro").prediction
    nano = choose(planner, PREFILL, mode="auto", split="nano").prediction
    assert (both.nano_batches, nano.micro_batches) == (0, 1)
    assert both.split == pytest.approx(micro.split)
    assert both.split <= nano.split < both.unsplit


@pytest.mark.slow
def test_the_order_alone_is_chosen_for_decodes_that_lose_if_they_are_cut() -> None:
    planner = make_planner("r1-tp16-941", DECODES)
    assert isinstance(planner.choose(DECODES, RuntimeConfig(split="micro", probation=False)), Decline)
    prediction = choose(planner, DECODES, mode="auto", split="auto").prediction
    assert prediction.nano_batches == 1
    assert prediction.gain > 0.05


@pytest.mark.slow
def test_a_remembered_decision_is_adapted_to_a_step_of_another_size() -> None:
    planner = make_planner("r1-tp16-941", PREFILL)
    first = choose(planner, PREFILL, mode="auto", split="nano")
    again = choose(planner, Batch((4096, 4000, 4096, 4096), 16_288), mode="auto", split="nano")
    assert again.order is first.order
    assert again.cut.features[0].tokens == 16_288
    assert sum(each.tokens for each in again.cut.features[1:]) == 16_288


def test_ranks_share_nano_batches_by_their_numbers_of_tokens() -> None:
    planner = make_planner("r1-tp16-941", PREFILL)
    config = RuntimeConfig(split="nano", mode="always", micro_batches=2, probation=False)
    choice = planner.choose_data_parallel([9000, 8001], config)
    assert isinstance(choice, SplitChoice)
    assert choice.sizes == ((4500, 4000), (4500, 4001))
    assert [each.tokens for each in choice.cut.features] == [9000, 4500, 4500]
    assert isinstance(planner.choose_data_parallel([9000, 1], config), Decline)


@pytest.mark.slow
def test_a_step_of_which_only_the_tokens_are_known_has_nano_batches() -> None:
    planner = make_planner("r1-tp16-941", PREFILL)
    choice = planner.choose_unread([16_384], RuntimeConfig(split="auto", probation=False))
    assert isinstance(choice, SplitChoice)
    assert choice.prediction.nano_batches > 1


@pytest.mark.slow
def test_ranks_that_could_not_have_micro_batches_have_nano_batches_only() -> None:
    planner = make_planner("r1-tp16-941", PREFILL)
    config = RuntimeConfig(split="auto", probation=False)
    both = planner.choose_data_parallel([16_384, 16_000], config)
    unread = planner.choose_unread([16_384, 16_000], config)
    assert isinstance(both, SplitChoice)
    assert isinstance(unread, SplitChoice)
    assert (both.prediction.nano_batches, unread.prediction.micro_batches) == (0, 1)
    assert len(unread.sizes) == unread.prediction.nano_batches > 1


@pytest.mark.slow
def test_books_are_made_once_for_each_policy() -> None:
    planner = make_planner("r1-tp16-941", PREFILL)
    known: dict[str, Any] = {}
    for settings in ({}, {"margin": 0.1}, {"micro_batches": 2}, {}):
        planner.prepare(RuntimeConfig(split="nano", **settings))
        assert planner.orders
        assert all(known.setdefault(order.name, order) is order for order in planner.orders)


def test_a_program_that_declares_nothing_token_wise_has_no_nano_batches() -> None:
    case = get_case("r1-tp16-941")
    planner = Planner(build_program(case.table.program).fold_side(), case.table, shapes=[PREFILL])
    declined = planner.choose(PREFILL, RuntimeConfig(split="nano"))
    assert isinstance(declined, Decline)
    assert declined.reason == "nowhere to cut"


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_few_numbers_of_nano_batches_are_kept_and_lose_little(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [PREFILL, Batch((4096,), 4096), Batch((500,), 500), Batch((64,), 64)]
    config, planners = RuntimeConfig(mode="always", split="nano", probation=False), []
    most = nano_orders.KEPT_COUNTS
    for kept, loss in ((most, nano_orders.KEPT_LOSS), (len(nano_orders.COUNTS), -1.0)):
        monkeypatch.setattr(nano_orders, "KEPT_COUNTS", kept)
        monkeypatch.setattr(nano_orders, "KEPT_LOSS", loss)
        planner = Planner(record(case), get_case(case).table, shapes=steps)
        planner.prepare(config)
        planners.append(planner)
    few, every = (len(planner.orders) for planner in planners)
    assert few <= most < every == len(nano_orders.COUNTS)
    for step in steps:
        best_of_few, best = (choose(planner, step, split="nano").prediction.split for planner in planners)
        assert best_of_few <= 1.01 * best


def test_a_number_that_cuts_is_kept_where_the_order_alone_is_best() -> None:
    planner = Planner(record("r1-tp16-941"), get_case("r1-tp16-941").table, shapes=[DECODES])
    choice = planner.choose(DECODES, RuntimeConfig(mode="auto", split="nano", probation=False))
    assert isinstance(choice, SplitChoice)
    assert choice.prediction.nano_batches == 1
    assert len(planner.orders) == 2
    assert choose(planner, DECODES, split="nano").prediction.nano_batches > 1
