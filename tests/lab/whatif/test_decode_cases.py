"""Decodes of DeepSeek-R1: what their published cases say, and what a `side` lane brings there."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo_runtime.batch import Batch
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.op import SIDE
from dbo_runtime.ir.policies import sequential
from dbo_runtime.ir.program import Program, ProgramBuilder
from dbo_runtime.lab.oracle.orders import Orders
from dbo_runtime.lab.oracle.searching_planner import SearchingPlanner
from dbo_runtime.lab.whatif.estimate import Estimator
from dbo_runtime.lab.whatif.published_cases import get_case
from dbo_runtime.lab.whatif.scale import set_layers
from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.planner.costs.op_cost import CommCost, ComputeCost, OpCost
from dbo_runtime.planner.costs.program_spec import build_program
from dbo_runtime.planner.online.candidates import list_side_ops
from dbo_runtime.planner.online.planner import SEARCH_STATES
from dbo_runtime.planner.online.prediction import Prediction
from dbo_runtime.planner.online.predictor import Predictor, compute_end
from tests.support.planner.machines import make_table
from tests.support.planner.shop import Shop, do_nothing, find_least_end, simulate_order
from tests.support.profiles import scale

CASES = ("r1-decode-910b", "r1-decode-910c")
ONE_FAST = [CASES[0], pytest.param(CASES[1], marks=pytest.mark.slow)]
MARGIN = RuntimeConfig().margin


def make_decodes(count: int) -> Batch:
    return Batch((1,) * count, 0, context_lens=(4096,) * count)


def measure_decodes(count: int) -> BatchFeatures:
    return BatchFeatures(count, decodes=count, decode_pairs=count * 4097.0)


@cache
def open_estimator(name: str) -> Estimator:
    return Estimator(get_case(name).table)


def list_options(name: str, count: int, side: str) -> tuple[Prediction, ...]:
    return open_estimator(name).list_options(make_decodes(count), RuntimeConfig(side=side))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_keys_concurrent_with_queries_alone_bring_about_one_percent(name: str) -> None:
    """As vllm-ascend #1353 measured; a lane for communication runs concurrently in both."""
    table = get_case(name).table
    program = build_program(table.program)
    predictor = Predictor(program, table)
    for count in (8, 24, 64, 96):
        features = measure_decodes(count)
        without, side_ops = (
            compute_end(predictor.simulate(lower((placed,), sequential((placed,))), [features]))
            for placed in (program.fold_side(), program.fold_side("keys"))
        )
        assert 0.005 < (without - side_ops) / predictor.predict_unsplit(features) < 0.015


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_FAST)
def test_two_micro_batches_gain_the_more_the_more_decodes_there_are(name: str) -> None:
    gains = [list_options(name, count, "off")[0].gain for count in (32, 96, 192, 384)]
    assert gains == sorted(gains)
    assert gains[1] < 0 < gains[-1]  # at 96, where CloudMatrix-Infer measured 9.4 %, the model says that it loses


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_FAST)
def test_the_runtime_declines_few_decodes_and_splits_many(name: str) -> None:
    assert not any(option.pays(MARGIN) for option in list_options(name, 192, "off"))
    assert any(option.pays(MARGIN) for option in list_options(name, 384, "off"))
    chosen = next(option for option in list_options(name, 64, "auto") if option.pays(MARGIN))
    assert (chosen.micro_batches, chosen.side_ops) == (1, ("keys",))
    assert chosen.description == "1 micro-batch, keys concurrent"
    assert "ms in 1 micro-batch, keys concurrent: " in str(chosen)


@pytest.mark.slow
def test_experts_concurrent_with_the_attention_of_the_other_micro_batch_gain_what_no_single_lane_does() -> None:
    """Both lanes compute, so work is hidden behind work: CloudMatrix-Infer's two streams, with the same costs."""
    for count in (64, 96):
        one_lane = list_options("r1-decode-910c", count, "off")[0]
        two_lanes = {option.micro_batches: option for option in list_options("r1-decode-12708", count, "auto")}[2]
        assert one_lane.gain < 0 < two_lanes.gain
        assert one_lane.unsplit == two_lanes.unsplit
        assert {"gate", "experts", "merge"} <= set(two_lanes.side_ops)


SHORT = set_layers(get_case("r1-decode-910c").table, (1, 2))
FACTORS = st.floats(1.0, 2.5)


@pytest.mark.slow
@settings(max_examples=scale(25), deadline=None)
@given(st.integers(2, 400), st.tuples(FACTORS, FACTORS, FACTORS), st.integers(2, 3))
def test_concurrent_ops_are_never_predicted_to_lose(count: int, factors: tuple[float, ...], parts: int) -> None:
    keys = ("compute/side", "side/compute", "comm")
    contention = {**SHORT.contention, **dict(zip(keys, factors, strict=True))}
    changed = CostTable(SHORT.provenance, SHORT.program, SHORT.ops, contention, SHORT.host, {})
    planner = SearchingPlanner(build_program(changed.program), changed, 2000)
    slice_features = [measure_decodes(count)] * parts
    auto, off = (planner.predict_split(slice_features, RuntimeConfig(side=side)) for side in ("auto", "off"))
    assert auto <= off


def record_attention(side_first: bool) -> Program:
    """Return latent attention in small: keys concurrent with queries, and what is sent after them."""
    p = ProgramBuilder(has_side=True)
    x = p.compute("latent", do_nothing, p.input("x"))
    if side_first:
        keys, queries = p.side("keys", do_nothing, x), p.compute("queries", do_nothing, x)
    else:
        queries, keys = p.compute("queries", do_nothing, x), p.side("keys", do_nothing, x)
    return p.build(p.comm("send", do_nothing, p.compute("attention", do_nothing, queries, keys)))


@settings(max_examples=scale(15), deadline=None)
@given(st.lists(st.integers(1, 13), min_size=5, max_size=5), st.booleans())
def test_no_order_of_two_micro_batches_on_three_lanes_is_faster(times: list[int], side_first: bool) -> None:
    program = record_attention(side_first)
    seconds = dict(zip(("latent", "keys", "queries", "attention", "send"), times, strict=True))
    ops: dict[str, OpCost] = {name: ComputeCost(float(value)) for name, value in seconds.items() if name != "send"}
    ops["send"] = CommCost(float(seconds["send"]), 0.0, 1.0)
    table = make_table(program, ops, contention={SIDE: 1.0})
    orders = Orders(program, table, Predictor(program, table), SEARCH_STATES)
    schedule = orders.choose_best([BatchFeatures(1)] * 2, RuntimeConfig(side="on")).schedule
    assert list_side_ops(schedule.programs[0]) == ("keys",)
    shop = Shop((program, program), (tuple(table.times(program, BatchFeatures(1))),) * 2)
    order = [step.issue for step in schedule.instructions]
    assert simulate_order(*shop, order) == pytest.approx(find_least_end(shop))
