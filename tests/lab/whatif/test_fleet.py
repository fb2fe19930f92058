"""Fleets: what experts over more ranks cost, what fits, and what ranges contain."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbo_runtime.__main__ import main
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.errors import DboError
from dbo_runtime.lab.whatif.corners import AS_PUBLISHED, list_corners, move_to
from dbo_runtime.lab.whatif.expert_models import DEEPSEEK, QWEN3_235B, ExpertModel
from dbo_runtime.lab.whatif.expert_scale import scale_experts
from dbo_runtime.lab.whatif.fabrics import FABRICS
from dbo_runtime.lab.whatif.fleet import FleetRow, predict_fleet
from dbo_runtime.lab.whatif.fleet_report import describe_fleet, list_rows
from dbo_runtime.lab.whatif.published_cases import get_case
from dbo_runtime.lab.whatif.ranges import span
from dbo_runtime.lab.whatif.scale_cases import SCALE_CASES, ScaleCase, find_scale_cases
from dbo_runtime.planner.costs.op_cost import CommCost, ComputeCost

SETTINGS = RuntimeConfig(side="off", micro_batches=2)
PUBLISHED_US = {16: (118, 195), 32: (155, 273), 64: (173, 314), 128: (192, 369), 256: (194, 360)}


def find(name: str, phase: str) -> ScaleCase:
    (case,) = find_scale_cases(name=name, phase=phase)
    return case


@pytest.mark.parametrize("ranks", PUBLISHED_US)
def test_low_latency_kernels_take_what_deepep_measured(ranks: int) -> None:
    fabric = FABRICS["decode-h800"]
    for cost, published in zip(
        (fabric.price_dispatch(DEEPSEEK, ranks), fabric.price_combine(DEEPSEEK, ranks)),
        PUBLISHED_US[ranks],
        strict=True,
    ):
        assert (cost.alpha + 128 * cost.token_seconds) * 1e6 == pytest.approx(published, rel=0.09)


@pytest.mark.parametrize(("ranks", "dispatch", "combine"), [(8, 116, 118), (256, 152, 149)])
def test_the_unified_bus_takes_what_cloudmatrix_measured(ranks: int, dispatch: int, combine: int) -> None:
    fabric = FABRICS["decode-910c"]
    for cost, published in (
        (fabric.price_dispatch(DEEPSEEK, ranks), dispatch),
        (fabric.price_combine(DEEPSEEK, ranks), combine),
    ):
        assert (cost.alpha + 128 * cost.token_seconds) * 1e6 == pytest.approx(published)


@pytest.mark.parametrize("name", ["r1-decode-910b", "r1-prefill-h800", "qwen3-235b-910c"])
def test_a_case_over_as_many_ranks_as_it_has_stays_what_it_is(name: str) -> None:
    found = next(each for each in SCALE_CASES if each.case == name)
    table = get_case(name).table
    spread = scale_experts(table, table.provenance.parallel["expert"], found.experts, found.network)
    for op, cost in table.ops.items():
        other = spread.ops[op]
        if isinstance(cost, CommCost) and isinstance(other, CommCost):
            assert (other.alpha, other.token_seconds) == pytest.approx((cost.alpha, cost.token_seconds), rel=1e-4)
        else:
            assert other == cost


def test_more_ranks_have_fewer_weights_and_as_many_tokens() -> None:
    case = find("r1-decode-h800", "decode")
    few, many = (case.spread(chips).ops["experts"] for chips in (16, 256))
    assert isinstance(few, ComputeCost)
    assert isinstance(many, ComputeCost)
    assert few.weights == pytest.approx(16 * many.weights)
    assert (few.fixed, few.per_token) == (many.fixed, many.per_token)


@given(st.sampled_from([DEEPSEEK, QWEN3_235B]), st.integers(0, 7))
def test_a_token_needs_at_least_one_host_and_no_more_than_its_experts(model: ExpertModel, power: int) -> None:
    hosts = 1 << power
    reached = model.count_hosts(hosts)
    assert reached + 1e-9 >= 1
    assert reached <= min(hosts, 8) + 1e-9


def test_weights_add_up_to_the_models_size() -> None:
    for model, parameters in ((DEEPSEEK, 671e9), (QWEN3_235B, 235e9)):
        assert model.experts * model.expert_bytes + model.replicated_bytes == pytest.approx(parameters, rel=0.02)


def test_what_has_no_room_has_no_row() -> None:
    row = predict_fleet(find("r1-prefill-910b", "prefill"), 16, SETTINGS)
    assert row.step is None
    assert "no room" in describe_fleet([row])
    assert list_rows([row])[0]["speed_up"] is None


def test_corners_start_with_the_published_costs_and_are_all_different() -> None:
    corners = list_corners()
    assert corners[0] == AS_PUBLISHED
    assert len(set(corners)) == len(corners) == 12
    table = get_case("r1-prefill-h800").table
    assert move_to(table, AS_PUBLISHED).ops == table.ops
    assert move_to(table, AS_PUBLISHED._replace(contention=1.15)).contention["compute"] == pytest.approx(132 / 108)


@pytest.fixture(scope="module")
def rows() -> list[FleetRow]:
    return [
        predict_fleet(find("qwen3-235b-decode-h800", "decode"), 64, SETTINGS),
        predict_fleet(find("r1-decode-910c", "decode"), 16, SETTINGS),
    ]


@pytest.mark.slow
def test_ranges_contain_what_the_published_costs_predict(rows: list[FleetRow]) -> None:
    for row in rows:
        for figure in (row.speed_up, row.throughput, row.saved, row.needed):
            assert figure.low <= figure.point <= figure.high


def test_chips_are_saved_where_the_runtime_splits_and_only_there(rows: list[FleetRow]) -> None:
    split, unsplit = rows
    assert (split.is_split, unsplit.is_split) == (True, False)
    assert unsplit.saved == (0, 0, 0)
    assert split.saved.point == pytest.approx(split.needed.point * (1 - 1 / split.speed_up.point))


@pytest.mark.slow
def test_a_die_is_half_a_chip(rows: list[FleetRow]) -> None:
    row = rows[1]
    assert row.ranks == 32
    assert row.step is not None
    alone = predict_fleet(replace(row.case, ranks_per_chip=1), 32, SETTINGS, row.step)
    assert row.throughput.point == pytest.approx(2 * alone.throughput.point)


@pytest.mark.slow
def test_a_fleet_is_predicted_the_same_each_time(rows: list[FleetRow]) -> None:
    assert predict_fleet(rows[1].case, 16, SETTINGS) == rows[1]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1))
def test_a_range_is_of_all_its_figures(values: list[float]) -> None:
    found = span(values[0], values[1:])
    assert found == (min(values), values[0], max(values))


def test_an_unknown_model_or_case_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DboError, match="gpt"):
        find_scale_cases(model="gpt")
    assert main(["plan", "--scale", "gpt"]) == 2
    assert "--scale knows no case of gpt" in capsys.readouterr().err
    assert main(["plan", "--scale", "--costs", "r1-tp16-941"]) == 2


def test_costs_without_experts_cannot_be_spread() -> None:
    with pytest.raises(DboError, match=r"parallel\.expert"):
        scale_experts(get_case("r1-tp16-941").table, 64, DEEPSEEK, FABRICS["decode-910b"])
