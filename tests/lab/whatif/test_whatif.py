"""What-if: published figures come out again, and scaling does what its formulas say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbo_runtime.batch import Batch
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.errors import ConfigError
from dbo_runtime.lab.whatif.estimate import Estimator, resize_batch
from dbo_runtime.lab.whatif.published_cases import find_network, get_case, list_cases, open_costs
from dbo_runtime.lab.whatif.scale import (
    DISPATCHED,
    Bandwidth,
    Network,
    count_layers,
    parse_bandwidth,
    parse_network,
    scale_bandwidth,
    scale_tensor,
    set_imbalance,
    set_layers,
    set_model,
)
from dbo_runtime.lab.whatif.sweep import GRIDS, list_grid, parse_axes, sweep
from dbo_runtime.lab.whatif.whatif import BreakEven, Split, WhatIf, compute_break_even, list_tried_sizes, predict_step
from dbo_runtime.planner.costs.batch_features import BatchFeatures, measure_features
from dbo_runtime.planner.costs.cost_file import format_costs, parse_costs, save_costs
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.planner.costs.op_cost import CommCost, ComputeCost, HostCost, OpCost
from dbo_runtime.planner.costs.program_spec import LayerRun, OpSpec, ProgramSpec, build_program
from dbo_runtime.planner.online.planner import Planner, Prediction
from tests.support.planner.cost_tables import make_provenance, make_table

PROMPTS = ("a3-layer-4894", "910b-profile-4894", "910b-share-5591", "910c-share-5591", "r1-tp16-941", "r1-ep16-1589")
OTHERS = {
    "qwen3-tp4-44677": "vllm-project/vllm#44677",
    **dict.fromkeys(("r1-decode-910b", "r1-decode-910c", "r1-decode-12708"), "arXiv:2506.12708"),
    "qwen36-tp4-56126": "vllm-project/vllm#56126",
    "llama70b-tp8-11329": "arXiv:2505.11329",
    **dict.fromkeys(("r1-prefill-910b", "r1-prefill-910c"), "arXiv:2506.12708"),
    **dict.fromkeys(("r1-prefill-h800", "r1-decode-h800"), "deepseek-ai/DeepGEMM"),
    **dict.fromkeys(("qwen3-235b-910b", "qwen3-235b-910c"), "arXiv:2506.12708"),
    **dict.fromkeys(("qwen3-235b-prefill-h800", "qwen3-235b-decode-h800"), "deepseek-ai/DeepGEMM"),
}
IN_TWO, IN_THREE = RuntimeConfig(micro_batches=2), RuntimeConfig(micro_batches=3)
MS = 1e-3


def make_pair(compute: float = 1e-6, comm: float = 1e-6, fixed: float = 0.0, **changes: Any) -> CostTable:
    """Return two layers of one op a lane, each costing so many seconds a token, and *fixed* whatever the tokens."""
    body = (OpSpec("work", "compute", ("send",)), OpSpec("send", "comm", ("work",)))
    ops: dict[str, OpCost] = {"work": ComputeCost(fixed, compute), "send": CommCost(fixed, comm, 1.0)}
    spec = ProgramSpec(("send",), (LayerRun(2, body),), ("send",))
    return make_table(**{"program": spec, "contention": {}, "host": HostCost(), "errors": {}, **changes}, ops=ops)


def make_prompts(*lengths: int) -> Batch:
    return Batch(lengths, sum(lengths))


def open_case(name: str) -> tuple[CostTable, Batch]:
    case = get_case(name)
    return case.table, case.step


def change_ops(table: CostTable, change: Callable[[OpCost], OpCost]) -> CostTable:
    return replace(table, ops={name: change(cost) for name, cost in table.ops.items()})


def drop_overheads(table: CostTable, tokens: int) -> CostTable:
    """Return costs that are the same at *tokens* and go down in proportion to them."""
    features = BatchFeatures(tokens)

    def change(cost: OpCost) -> OpCost:
        if isinstance(cost, CommCost):
            return replace(cost, alpha=0.0, beta=cost.time(features) / cost.bytes_per_token / tokens)
        return replace(cost, weights=0.0)

    return change_ops(table, change)


def predict_in_two(table: CostTable, batch: Batch, **settings: Any) -> tuple[WhatIf, Split]:
    answer = predict_step(table, batch, replace(IN_TWO, **settings))
    (split,) = answer.splits
    return answer, split


# The published cases.


def test_every_case_is_modelled_and_says_from_where() -> None:
    cases = list_cases()
    assert tuple(case.name for case in cases) == (*PROMPTS, *OTHERS)
    for case in cases:
        assert case.table.provenance.kind == "modelled"
        source = OTHERS.get(case.name, f"vllm-project/vllm-ascend#{case.name.rpartition('-')[2]}")
        assert source in case.table.provenance.source
        assert {"Given", "Assumed:"} <= {
            word.replace("Given:", "Given") for word in case.table.provenance.source.split()
        }


def sum_lanes(name: str) -> tuple[float, dict[str, float]]:
    """Return the milliseconds of the unsplit step of a case, and of each lane in it."""
    table, batch = open_case(name)
    program, features = build_program(table.program), measure_features(batch.query_lens, ())
    lanes = {"compute": 0.0, "comm": 0.0}
    for op, seconds in zip(program.ops, table.times(program, features), strict=True):
        lanes[op.lane] += seconds / MS
    return Planner(program, table).predict_unsplit(features) / MS, lanes


def test_the_unsplit_steps_take_what_was_published() -> None:
    unsplit, lanes = sum_lanes("a3-layer-4894")
    assert (unsplit, lanes) == (
        pytest.approx(61 * 6.3),
        pytest.approx({"compute": 61 * 2.8, "comm": 61 * 3.5}, rel=1e-5),
    )
    unsplit, lanes = sum_lanes("910b-profile-4894")
    assert (unsplit, lanes) == (pytest.approx(3090.03), pytest.approx({"compute": 1320.70, "comm": 1270.67}, rel=1e-5))
    unsplit, lanes = sum_lanes("qwen3-tp4-44677")
    assert (unsplit, lanes["comm"]) == (pytest.approx(1110, rel=1e-5), pytest.approx(248, rel=1e-5))
    assert sum_lanes("r1-ep16-1589")[0] == pytest.approx(4017, rel=1e-4)
    unsplit, _ = sum_lanes("r1-tp16-941")
    assert unsplit == pytest.approx(4 / 0.90 * 1e3, rel=1e-5)


@pytest.mark.parametrize(("name", "share"), [("910b-share-5591", 0.55), ("910c-share-5591", 0.35)])
def test_communication_has_the_share_that_was_published(name: str, share: float) -> None:
    unsplit, lanes = sum_lanes(name)
    assert lanes["comm"] / unsplit == pytest.approx(share, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "expected"), [(8, 1.639), (61, 1.6745)])
def test_the_a3_layer_without_overheads_gains_what_theory_says(layers: int, expected: float) -> None:
    table, batch = open_case("a3-layer-4894")
    bare = set_layers(drop_overheads(table, batch.tokens), (layers,))
    answer, split = predict_in_two(bare, batch)
    assert answer.speed_up(split.seconds) == pytest.approx(expected, abs=5e-4)
    assert split.is_optimal
    three = predict_step(set_layers(bare, (8,)), batch, IN_THREE)
    assert three.best is not None
    assert 1.75 < three.speed_up(three.best.seconds) < three.speed_up(three.best.bound) <= 1.80


def test_overheads_make_the_a3_layer_gain_less() -> None:
    table, batch = open_case("a3-layer-4894")
    answer, split = predict_in_two(set_layers(table, (8,)), batch)
    assert 1.55 < answer.speed_up(split.seconds) < 1.639


@pytest.mark.slow
def test_the_910b_profile_is_bounded_by_its_free_time() -> None:
    table, batch = open_case("910b-profile-4894")
    answer = predict_step(table, batch, IN_THREE)
    (split,) = answer.splits
    assert 1.64 < answer.speed_up(split.bound) < 3090.03 / (1320.70 + 498.66)
    assert split.bound <= split.seconds < 1.01 * split.bound
    without = predict_step(replace(table, host=replace(table.host, split=0.0)), batch, IN_THREE)
    assert without.best is not None
    assert without.speed_up(without.best.seconds) > 2.2  # if the free time went, too


def test_the_r1_run_could_gain_more_than_its_own_overlap_did() -> None:
    answer, split = predict_in_two(*open_case("r1-tp16-941"))
    assert 1.01 / 0.90 < answer.speed_up(split.seconds) < 1.25
    assert answer.measure_overlap(split) == pytest.approx(1.0, abs=0.01)  # of the little communication, nearly all


def test_a_case_is_found_by_name_and_a_file_by_path(tmp_path: Path) -> None:
    assert open_costs("a3-layer-4894")[1] == make_prompts(*[1024] * 4)
    assert open_costs("r1-decode-910c")[1] == Batch((1,) * 96, 0, context_lens=(4096,) * 96)
    save_costs(make_table(), tmp_path / "mine.json")
    assert open_costs(str(tmp_path / "mine.json")) == (make_table(), None)
    with pytest.raises(ConfigError, match="neither a file nor a published case; did you mean a3-layer-4894"):
        open_costs("a4-layer")
    with pytest.raises(ConfigError, match=r"cost file a4\.json cannot be read"):
        open_costs("a4.json")
    with pytest.raises(ConfigError, match="no published case 'a4-layer'"):
        get_case("a4-layer")


# A step.


def test_a_balanced_pair_of_lanes_hides_all_but_the_ends() -> None:
    answer, split = predict_in_two(make_pair(), make_prompts(500, 500))
    assert answer.unsplit == pytest.approx(4 * MS)
    assert answer.busy == pytest.approx({"compute": 2 * MS, "comm": 2 * MS})
    assert split.sizes == (500, 500)
    assert split.seconds == split.bound == pytest.approx(2.5 * MS)
    assert split.is_optimal
    assert split.gap == 0
    assert answer.measure_overlap(split) == pytest.approx(1 - 0.5 / 2)
    assert answer.best is split
    assert not isinstance(answer.decision, Decline)


def test_the_unsplit_timeline_is_one_op_after_the_other() -> None:
    answer, _ = predict_in_two(make_pair(), make_prompts(500, 500))
    assert [(span.op, round(span.start / MS), round(span.end / MS)) for span in answer.timeline.spans] == [
        ("L0.work", 0, 1),
        ("L0.send", 1, 2),
        ("L1.work", 2, 3),
        ("L1.send", 3, 4),
    ]


def test_a_poor_order_has_a_gap() -> None:
    answer, split = predict_in_two(make_pair(), make_prompts(500, 500), policy=("sequential", 0))
    assert split.seconds == pytest.approx(4 * MS - 0.5 * MS)  # the second one computes while the first one sends
    assert split.bound == pytest.approx(2.5 * MS)
    assert split.gap == pytest.approx(1 - 2.5 / 3.5)
    assert not split.is_optimal
    assert answer.best is split


def test_compute_that_gets_slower_counts_against_overlap() -> None:
    answer, split = predict_in_two(make_pair(fixed=1 * MS), make_prompts(500, 500))
    ect = split.seconds - answer.busy["compute"]
    assert answer.measure_overlap(split) == pytest.approx(1 - ect / answer.busy["comm"])
    assert split.timeline.overlap("compute", "comm") > 0
    small, lost = predict_in_two(make_pair(fixed=1 * MS), make_prompts(1, 1))
    assert lost.seconds > small.unsplit
    assert isinstance(small.decision, Decline)
    overlap = small.measure_overlap(lost)
    assert overlap is not None
    assert overlap < 0


def test_what_the_host_adds_is_part_of_both_steps() -> None:
    host = HostCost(unsplit=1 * MS, split=2 * MS, unsplit_per_token=2e-6, split_per_token=3e-6)
    answer, split = predict_in_two(make_pair(host=host), make_prompts(500, 500))
    assert answer.unsplit == pytest.approx(7 * MS)
    assert split.seconds == split.bound == pytest.approx(7.5 * MS)
    assert split.is_optimal


def test_all_numbers_of_micro_batches_are_tried_and_the_fastest_is_best() -> None:
    answer = predict_step(make_pair(comm=2e-6), make_prompts(300, 300, 300), RuntimeConfig())
    assert [len(split.sizes) for split in answer.splits] == [2, 3]
    assert answer.best == min(answer.splits, key=lambda split: split.seconds)


def test_a_step_that_cannot_be_cut_has_no_split() -> None:
    answer = predict_step(make_pair(), make_prompts(1), RuntimeConfig())
    assert answer.splits == ()
    assert answer.best is None
    assert isinstance(answer.decision, Decline)


def test_three_micro_batches_are_not_offered_where_there_are_two_tokens() -> None:
    answer = predict_step(make_pair(), Batch((1, 1), 2), RuntimeConfig())
    assert [len(split.sizes) for split in answer.splits] == [2]


def test_without_communication_there_is_nothing_to_hide() -> None:
    answer, split = predict_in_two(make_pair(comm=0.0), make_prompts(500, 500))
    assert answer.measure_overlap(split) is None
    assert isinstance(answer.decision, Decline)


# Break-even.


class FakeEstimator:
    """Predicts a gain of 10 % at the sizes it is given, and none elsewhere."""

    def __init__(self, pays: Callable[[int], bool]) -> None:
        self._pays = pays

    def list_options(self, batch: Batch, config: RuntimeConfig) -> list[Prediction]:
        return [Prediction(1.0, 0.9 if self._pays(batch.tokens) else 1.0, 2)]


@pytest.mark.parametrize(
    ("pays", "searched_to", "expected"),
    [
        (lambda tokens: tokens >= 77, 1000, BreakEven(77, 512)),
        (lambda tokens: tokens >= 64, 64, BreakEven(64, 64)),
        (lambda tokens: tokens >= 2, 64, BreakEven(2, 64)),
        (lambda tokens: tokens >= 77, 64, BreakEven(None, 64)),
        (lambda tokens: tokens >= 5 and tokens not in (16, 64), 128, BreakEven(5, 128, (16, 64))),
    ],
)
def test_break_even_is_the_first_size_that_pays(
    pays: Callable[[int], bool], searched_to: int, expected: BreakEven
) -> None:
    estimator: Any = FakeEstimator(pays)
    assert compute_break_even(estimator, make_prompts(100, 100), RuntimeConfig(), searched_to) == expected


def test_one_token_less_than_break_even_does_not_pay() -> None:
    table, batch = open_case("910c-share-5591")
    config = replace(IN_TWO, margin=0.05)
    estimator = Estimator(table, [resize_batch(batch, size) for size in list_tried_sizes(8192)])
    break_even = compute_break_even(estimator, batch, config, 8192)
    assert break_even.tokens is not None
    assert break_even.exceptions == ()
    gains = [estimator.estimate(resize_batch(batch, break_even.tokens - less), config) for less in (1, 0)]
    assert [found is not None and found.pays(0.05) for found in gains] == [False, True]


@pytest.mark.slow
def test_an_estimate_from_few_layers_is_that_of_all() -> None:
    table, batch = open_case("a3-layer-4894")
    answer, split = predict_in_two(table, batch)
    found = Estimator(table).estimate(batch, IN_TWO)
    assert found is not None
    assert found.unsplit == pytest.approx(answer.unsplit, rel=1e-6)
    assert found.split == pytest.approx(split.seconds, rel=0.005)


def test_nothing_is_estimated_where_nothing_can_be_cut() -> None:
    assert Estimator(make_pair()).estimate(make_prompts(1), RuntimeConfig()) is None


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=6), st.integers(1, 20_000))
def test_prompts_are_resized_in_proportion(lengths: list[int], tokens: int) -> None:
    batch = Batch(tuple(lengths), sum(lengths), context_lens=tuple(range(len(lengths))))
    found = resize_batch(batch, tokens)
    assert found.tokens == found.prefill_tokens == tokens
    assert min(found.query_lens) >= 1
    assert found.context_lens == batch.context_lens[: len(found.query_lens)]
    assert len(found.query_lens) == min(len(lengths), tokens)
    if tokens == batch.tokens:
        assert all(abs(left - right) <= 1 for left, right in zip(found.query_lens, lengths, strict=True))


def test_decodes_are_resized_by_their_number() -> None:
    batch = Batch((1, 1), 0, context_lens=(100, 200))
    assert resize_batch(batch, 5) == Batch((1,) * 5, 0, context_lens=(100, 200, 100, 200, 100))


# Scaling.


def test_tensor_parallel_scales_by_the_formulas() -> None:
    table = make_pair()
    known = replace(
        table, ops={"work": ComputeCost(1.0, 8.0, 6.0, 4.0, 8.0, 3.0, 4.0), "send": CommCost(3.0, 7.0, 2.0)}
    )
    known = replace(known, provenance=make_provenance(parallel={"tensor": 8, "data": 3}))
    found = scale_tensor(known, 32)
    assert found.ops["work"] == ComputeCost(1.0, 2.0, 1.5, 1.0, 2.0, 3.0, 1.0)  # what each rank pays stays
    assert found.ops["send"] == CommCost(3.0 * 5 / 3, 7.0 * (31 / 32) / (7 / 8), 2.0)
    assert found.provenance.parallel == {"tensor": 32, "data": 3}
    assert (found.provenance.kind, found.program) == ("modelled", known.program)
    assert "tensor parallel 32 instead of 8" in found.provenance.source
    assert scale_tensor(known, 8) is known


def test_one_rank_communicates_nothing() -> None:
    answer, _ = predict_in_two(scale_tensor(make_pair(fixed=1e-6), 1), make_prompts(500, 500))
    assert answer.busy["comm"] == 0
    assert isinstance(answer.decision, Decline)


@pytest.mark.parametrize("ranks", [0, -2, 3, 12, 1 << 20])
def test_ranks_are_a_power_of_two(ranks: int) -> None:
    with pytest.raises(ConfigError, match=f"tp is {ranks}; it must be a power of two, from 1 to 65536"):
        scale_tensor(make_pair(), ranks)


def test_costs_that_cannot_be_scaled_say_why() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.tensor of the costs is None"):
        scale_tensor(make_pair(provenance=make_provenance(parallel={})), 4)
    with pytest.raises(ConfigError, match=r"parallel\.tensor of the costs is 1"):
        scale_tensor(make_pair(provenance=make_provenance(parallel={"tensor": 1})), 4)


def test_bandwidth_scales_what_is_sent_and_not_what_it_takes_to_start() -> None:
    table = make_pair(fixed=1.0)
    assert scale_bandwidth(table, Bandwidth(4.0)).ops["send"] == CommCost(1.0, 0.25e-6, 1.0)
    assert scale_bandwidth(table, parse_bandwidth("100GB/s")).ops["send"] == CommCost(1.0, 1e-11, 1.0)
    assert scale_bandwidth(table, Bandwidth(4.0)).ops["work"] == table.ops["work"]
    assert scale_bandwidth(table, Bandwidth()) is table


HOSTS = Network(8, 121.3e9, 25e9)


@given(st.integers(0, 10), st.sampled_from([1, 2, 4, 8, 16]), st.floats(1e9, 1e12), st.floats(1e9, 1e12))
def test_a_network_of_two_levels_takes_what_its_collective_sends(
    power: int, ranks_per_host: int, within: float, between: float
) -> None:
    """An independent count: bytes that a rank sends in reduce-scatter, all-reduce between hosts, and all-gather."""
    ranks, network = 2**power, Network(ranks_per_host, within, between)
    near, hosts = min(ranks, ranks_per_host), max(ranks // ranks_per_host, 1)
    message, seconds = 1.0, 0.0
    pieces = [message / near] * (near - 1)
    seconds += 2 * sum(pieces) / within  # reduce-scatter, and all-gather at the end
    part = message / near
    seconds += 2 * sum([part / hosts] * (hosts - 1)) / between
    assert network.reduce_byte(ranks) == pytest.approx(seconds, abs=1e-30)


def test_costs_within_a_host_leave_out_what_hosts_send_to_each_other() -> None:
    """The case's rate of 16 ranks on two hosts was derived from both; 8 ranks on one host have the inner one only."""
    table, _ = open_case("r1-tp16-941")
    reduce = scale_tensor(table, 8, HOSTS).ops["attn_reduce"]
    assert isinstance(reduce, CommCost)
    assert reduce.beta == pytest.approx(2 * 7 / 8 / 121.3e9, rel=1e-4)
    flat = scale_tensor(table, 8).ops["attn_reduce"]
    assert isinstance(flat, CommCost)
    assert flat.beta > reduce.beta
    assert flat.alpha == reduce.alpha
    assert "network 8:121.3GB/s:25GB/s" in scale_tensor(table, 8, HOSTS).provenance.source
    assert scale_tensor(table, 16, HOSTS) is table
    assert find_network("r1-tp16-941") == HOSTS
    assert find_network("costs.json") is None


def test_one_level_is_two_with_equal_rates() -> None:
    table = replace(make_pair(), provenance=make_provenance(parallel={"tensor": 16}))
    one_host = Network(64, 7e9, 1.0)
    for ranks in (2, 4, 8, 32, 64):
        assert scale_tensor(table, ranks, one_host).ops == scale_tensor(table, ranks).ops


def test_a_network_is_read() -> None:
    assert parse_network(" 8:121.3GB/s:25GB/s") == HOSTS
    assert parse_network(str(HOSTS)) == HOSTS


@pytest.mark.parametrize(
    "text", ["8", "8:1GB/s", "6:1GB/s:1GB/s", "0:1GB/s:1GB/s", "8:2x:1GB/s", "8:1GB/s:1GB/s:1GB/s"]
)
def test_another_network_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"it must be ranks of a host .*, such as 8:121\.3GB/s:25GB/s"):
        parse_network(text)


@given(st.floats(1, 8), st.integers(1, 4096))
def test_the_busiest_rank_takes_what_more_tokens_take_but_starts_and_reads_weights_once(
    imbalance: float, tokens: int
) -> None:
    table, _ = open_case("a3-layer-4894")
    uneven, features = set_imbalance(table, imbalance), BatchFeatures(tokens)
    for name, cost in table.ops.items():
        more = BatchFeatures(round(tokens * imbalance * 1e6)) if name in DISPATCHED else BatchFeatures(tokens * 10**6)
        scaled = (
            replace(cost, beta=cost.beta / 1e6)
            if isinstance(cost, CommCost)
            else replace(cost, per_token=cost.per_token / 1e6)
        )
        assert uneven.ops[name].time(features) == pytest.approx(scaled.time(more), rel=1e-4)
    assert uneven.provenance.source.endswith(f" Scaled: imbalance {imbalance:g}.")
    assert load_again(uneven) == uneven


def load_again(table: CostTable) -> CostTable:
    return parse_costs(format_costs(table))


def test_an_imbalance_is_in_the_digest_only_where_there_is_one() -> None:
    table, _ = open_case("a3-layer-4894")
    even = replace(set_imbalance(table, 1.0), provenance=table.provenance)
    assert even.digest == table.digest
    assert format_costs(even) == format_costs(table)
    assert replace(set_imbalance(table, 1.5), provenance=table.provenance).digest != table.digest


def test_an_imbalance_that_cannot_be_is_refused() -> None:
    table, _ = open_case("a3-layer-4894")
    for imbalance in (0.9, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="the busiest rank has at least 1 times the tokens of the mean"):
            set_imbalance(table, imbalance)
    with pytest.raises(ConfigError, match="the costs have no op `dispatch`"):
        set_imbalance(open_case("r1-tp16-941")[0], 1.5)


@pytest.mark.parametrize("text", ["0.5x", ".5X", " 0.5x "])
def test_a_factor_is_read(text: str) -> None:
    assert parse_bandwidth(text) == Bandwidth(0.5)
    assert str(parse_bandwidth(text)) == "0.5x"
    assert str(parse_bandwidth("12.5gb/s")) == "12.5GB/s"


@pytest.mark.parametrize("text", ["", "5", "x", "0x", "-1x", "nanx", "1e3x", "5 GB", "infGB/s"])
def test_another_bandwidth_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"it must be a factor such as 0\.5x, or a rate such as 100GB/s"):
        parse_bandwidth(text)


def count_kinds(table: CostTable) -> list[tuple[int, str]]:
    return [(run.repeat, run.ops[2].name) for run in table.program.runs]


def test_a_model_sets_the_layers_of_each_kind() -> None:
    table = get_case("r1-tp16-941").table
    assert count_kinds(table) == [(1, "mlp"), (2, "mlp"), (1, "shared_experts"), (57, "shared_experts")]
    lite = set_model(table, "deepseek-v2-lite")
    assert count_kinds(lite) == [(1, "mlp"), (1, "shared_experts"), (25, "shared_experts")]
    assert lite.provenance.model["name"] == "deepseek-v2-lite"
    assert count_kinds(set_model(lite, "deepseek-v3"))[-1] == (57, "shared_experts")
    assert predict_step(lite, make_prompts(64, 64), IN_TWO).splits
    assert set_model(table, "deepseek-r1").program == table.program


def test_layers_that_are_all_alike_take_the_model_s_number_of_them() -> None:
    table = get_case("a3-layer-4894").table
    assert count_layers(set_model(table, "deepseek-v2-lite")) == 27
    assert set_model(table, "deepseek-v3").program == table.program


def test_layers_that_do_not_match_a_model_are_refused() -> None:
    with pytest.raises(ConfigError, match="model is 'deepseek-v4'; did you mean deepseek-v3"):
        set_model(make_pair(), "deepseek-v4")
    run = get_case("r1-tp16-941").table.program.runs[0]
    ops = [run.ops[:length] for length in (1, 2, 4)]
    program = ProgramSpec(("embedded",), tuple(LayerRun(1, body) for body in ops), ())
    table = replace(get_case("r1-tp16-941").table, program=program)
    with pytest.raises(ConfigError, match="the costs have 3 kinds of layers; deepseek-v3 has 2"):
        set_model(table, "deepseek-v3")
    with pytest.raises(ConfigError, match="3 kinds of layers, but counts for 1"):
        set_layers(table, (4,))
    with pytest.raises(ConfigError, match=r"0 layers of gather, .* are fewer"):
        set_layers(get_case("a3-layer-4894").table, (0,))


# Sweeps.


def test_a_sweep_is_a_prediction_at_each_point() -> None:
    table, batch = make_pair(fixed=20e-6), make_prompts(500, 500)
    cells = sweep(table, batch, IN_TWO, ("bandwidth", "tp"))
    assert [tuple(cell.values.values()) for cell in cells[:3]] == [(0.25, 4), (0.25, 8), (0.25, 16)]
    assert len(cells) == len(GRIDS["bandwidth"]) * len(GRIDS["tp"])
    (cell,) = (cell for cell in cells if dict(cell.values) == {"bandwidth": 2, "tp": 16})
    scaled = scale_bandwidth(scale_tensor(table, 16), Bandwidth(2))
    assert cell.prediction == Estimator(scaled).estimate(batch, IN_TWO)
    assert cell.prediction is not None
    paying = [option for option in cell.options if option.gain > 0.02 and option.worst_case >= 0]
    assert cell.choose(0.02) == (paying[0] if paying else None)


def test_a_sweep_of_tokens_resizes_the_step() -> None:
    cells = sweep(make_pair(), make_prompts(500, 500), IN_TWO, ("tokens",))
    unsplit = [cell.prediction.unsplit for cell in cells if cell.prediction]
    assert unsplit == pytest.approx([tokens * 4e-6 for tokens in GRIDS["tokens"]])


@pytest.mark.slow
def test_faster_networks_leave_less_to_hide() -> None:
    table, batch = open_case("910c-share-5591")
    gains = [cell.prediction.gain for cell in sweep(table, batch, IN_TWO, ("bandwidth",)) if cell.prediction]
    assert gains[2:] == sorted(gains[2:], reverse=True)


def test_three_axes_are_thinned() -> None:
    assert sum(map(len, list_grid(("tokens", "tp")).values())) == 8 + 9
    thin = list_grid(("tokens", "bandwidth", "tp"))
    assert {axis: len(values) for axis, values in thin.items()} == {"tokens": 4, "bandwidth": 3, "tp": 5}
    assert thin["tp"][-1] == 1024


@pytest.mark.parametrize("text", ["", ",", "tokens,", "tokens,tokens", "chips", "tokens tp"])
def test_other_axes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="it takes some of tokens, bandwidth, tp, each once"):
        parse_axes(text)


def test_axes_are_read_in_their_order() -> None:
    assert parse_axes("tp, tokens") == ("tp", "tokens")
