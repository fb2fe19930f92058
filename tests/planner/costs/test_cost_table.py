"""What ops cost, and what a cost table refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbo_runtime.errors import ConfigError
from dbo_runtime.planner.costs.batch_features import BatchFeatures, measure_features
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.planner.costs.op_cost import CommCost, ComputeCost, HostCost, OpCost
from dbo_runtime.planner.costs.program_spec import describe_program, forget_token_wise
from tests.support.planner.cost_tables import make_provenance, make_table
from tests.support.programs import record_chain, record_toy

NAN, INF = float("nan"), float("inf")
FEATURES = BatchFeatures(10, 55.0, 40.0)
FULL = ComputeCost(fixed=1.0, per_token=2.0, weights=5.0, per_pair=0.5)


@pytest.mark.parametrize(
    ("query_lens", "context_lens", "features"),
    [
        ([], (), BatchFeatures(0)),
        ([4], (), BatchFeatures(4, 10.0, prefills=1)),
        ([1, 1], [7, 9], BatchFeatures(2, decodes=2, decode_pairs=18)),
        ([4, 1, 2], [10, 7, 0], BatchFeatures(7, 10 + 3, 40, prefills=2, context=10, decodes=1, decode_pairs=8)),
    ],
)
def test_the_features_of_a_batch_are_counted(
    query_lens: list[int], context_lens: list[int], features: BatchFeatures
) -> None:
    assert measure_features(query_lens, context_lens) == features


@given(st.lists(st.tuples(st.integers(2, 40), st.integers(0, 40)), min_size=1, max_size=4))
def test_pairs_are_those_a_causal_mask_leaves(requests: list[tuple[int, int]]) -> None:
    visible = [
        column < context
        for query, context in requests
        for row in range(query)
        for column in range(context + query)
        if column <= context + row
    ]
    features = measure_features([query for query, _ in requests], [context for _, context in requests])
    assert features.context_pairs == sum(visible)
    assert features.pairs == len(visible) - sum(visible)


def test_what_a_backend_takes_for_a_decode_is_none_of_the_prefills() -> None:
    features = measure_features([3, 4], [5, 0], decode_len=3)
    assert features == BatchFeatures(7, 10.0, prefills=1, decodes=3, decode_pairs=3 * 8)


def test_attention_pays_for_all_it_does() -> None:
    features = BatchFeatures(10, 13, 11, prefills=2, context=3, decodes=5, decode_pairs=7)
    assert ComputeCost(per_pair=100).time(features) == 1300
    assert ComputeCost(per_context_pair=100).time(features) == 1100
    assert ComputeCost(per_prefill=100).time(features) == 200
    assert ComputeCost(per_context=100).time(features) == 300
    assert ComputeCost(per_decode=100).time(features) == 500
    assert ComputeCost(per_decode_pair=100).time(features) == 700


def test_contexts_of_other_requests_are_refused() -> None:
    with pytest.raises(ConfigError, match="context_lens has 1 requests and query_lens 2"):
        measure_features([1, 2], [3])


def test_a_compute_op_pays_for_weights_or_tokens_whichever_is_more() -> None:
    assert FULL.time(FEATURES) == 1 + 20 + 0.5 * 55
    assert FULL.time(FEATURES._replace(tokens=2)) == 1 + 5 + 0.5 * 55
    assert replace(FULL, per_context_pair=0.25).time(FEATURES) == 1 + 20 + 0.5 * 55 + 0.25 * 40


def test_a_communication_op_pays_alpha_and_beta_for_each_byte() -> None:
    assert CommCost(alpha=3.0, beta=0.25, bytes_per_token=8).time(FEATURES) == 3 + 0.25 * 8 * 10


def test_a_buffer_saves_no_more_than_a_message_is_long() -> None:
    cost = CommCost(alpha=3.0, beta=0.25, bytes_per_token=8, free_bytes=60)
    assert (cost.time(FEATURES), cost.credit(FEATURES)) == (3 + 0.25 * 20, 0.25 * 60)
    assert (cost.time(BatchFeatures(5)), cost.credit(BatchFeatures(5))) == (3, 0.25 * 40)


def test_credits_are_in_program_order_and_communications_only() -> None:
    table = make_table({"mlp_reduce": CommCost(1e-6, 1e-9, 1000, free_bytes=2000)})
    program = record_toy(layers=3)
    credits = dict(zip((op.label for op in program.ops), table.credits(program, BatchFeatures(10)), strict=True))
    assert {label for label, seconds in credits.items() if seconds} == {f"L{layer}.mlp_reduce" for layer in range(3)}
    assert credits["L1.mlp_reduce"] == pytest.approx(2e-6)


def compute_weight_share(cost: ComputeCost, features: BatchFeatures) -> float:
    """Return the w of docs/theory.md: the share of time that does not shrink when the batch is halved."""
    unsplit = cost.time(features)
    half = cost.time(BatchFeatures(*(amount / 2 for amount in features)))
    return 2 * half / unsplit - 1 if unsplit else 0.0


@pytest.mark.parametrize(
    ("cost", "share"),
    [
        (ComputeCost(per_token=1.0), 0.0),
        (ComputeCost(per_pair=1.0), 0.0),
        (ComputeCost(fixed=3.0), 1.0),
        (ComputeCost(weights=3.0), 1.0),
        (ComputeCost(), 0.0),
        (ComputeCost(fixed=10.0, per_token=1.0), 0.5),
        (ComputeCost(weights=8.0, per_token=1.0), 0.6),  # a half costs 8, both together 10
    ],
)
def test_the_weight_share_is_what_does_not_shrink_with_the_tokens(cost: ComputeCost, share: float) -> None:
    assert compute_weight_share(cost, FEATURES) == pytest.approx(share)


@given(st.builds(ComputeCost, *[st.floats(0, 1)] * 4, st.booleans()), st.integers(0, 5000))
def test_two_halves_cost_1_plus_the_weight_share(cost: ComputeCost, half: int) -> None:
    features = BatchFeatures(2 * half, 2.0 * half, 4.0 * half)
    share = compute_weight_share(cost, features)
    assert -1e-9 <= share <= 1 + 1e-9
    assert 2 * cost.time(BatchFeatures(half, 1.0 * half, 2.0 * half)) == pytest.approx(
        (1 + share) * cost.time(features)
    )


def test_times_are_those_of_the_programs_ops_in_their_order() -> None:
    table, program = make_table(), record_toy(layers=2)
    times = table.times(program, FEATURES)
    assert times == [table.ops[op.name].time(FEATURES) for op in program.ops]
    assert times[1] == pytest.approx(2e-6 + 10e-6 + 55e-9)


def test_times_name_an_op_without_a_cost() -> None:
    with pytest.raises(ConfigError, match=r"op 'make' has no cost: .* another program; calibrate anew: `dbo cal"):
        make_table().times(record_chain(len, len), FEATURES)


def test_costs_of_this_machine_model_and_layout_fit() -> None:
    make_table().check_fits({"chip": "A", "platform": "cpu"}, {"name": "toy"}, {"tensor": 2})


def test_all_that_differs_is_listed_with_the_remedy() -> None:
    with pytest.raises(ConfigError) as raised:
        make_table().check_fits({"chip": "B", "platform": "cpu", "cores": "2"}, {"name": "toy"}, {})
    assert str(raised.value) == (
        "the costs do not fit this server: parallel.tensor is 2, here it is None; machine.chip is 'A', here it is 'B'; "
        "machine.cores is None, here it is '2'; calibrate anew: `dbo calibrate`."
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ops": {"attention": ComputeCost(per_token=-1e-6)}}, r"ops\.attention\.per_token_us is -1; .* at least 0\."),
        ({"ops": {"attention": ComputeCost(fixed=NAN)}}, r"ops\.attention\.fixed_us is nan; it must be a finite"),
        ({"ops": {"attention": ComputeCost(weights=INF)}}, r"ops\.attention\.weights_us is inf"),
        ({"ops": {"attention": ComputeCost(per_pair=-1.0)}}, r"ops\.attention\.per_pair_us is -1e\+06"),
        ({"ops": {"mlp_reduce": CommCost(-1e-6, 0, 1)}}, r"ops\.mlp_reduce\.alpha_us is -1;"),
        ({"ops": {"mlp_reduce": CommCost(0, NAN, 1)}}, r"ops\.mlp_reduce\.beta_us_per_byte is nan"),
        ({"ops": {"mlp_reduce": CommCost(0, 0, -1)}}, r"ops\.mlp_reduce\.bytes_per_token is -1;"),
        ({"ops": {"mlp_reduce": ComputeCost()}}, r"ops\.mlp_reduce must have alpha_us, beta_us_per_byte, bytes_per_"),
        ({"ops": {"mlp": CommCost(0, 0, 1)}}, r"ops\.mlp must have fixed_us, .*, because the op is on lane compute"),
        ({"host": HostCost(issue=-1e-6)}, r"host\.issue_us is -1;"),
        ({"host": HostCost(unsplit=INF)}, r"host\.whole_us is inf; it must be a finite number\."),
        ({"host": HostCost(split=NAN)}, r"host\.split_us is nan; it must be a finite number\."),
        ({"contention": {"comm": 0.9}}, r"contention\.comm is 0.9; it must be a finite number of at least 1\."),
        (
            {"contention": {"com": 1.0}},
            r"contention\.com is unknown; known are comm, comm/compute, compute, compute/comm\.",
        ),
        ({"errors": {"mlp": -0.1}}, r"errors\.mlp is -0.1;"),
        ({"errors": {"mpl": 0.1}}, r"errors\.mpl is unknown; known are attention,"),
        ({"split_error": -0.1}, r"split_error is -0.1; it must be a finite number of at least 0\."),
    ],
)
def test_what_cannot_be_is_refused_by_the_name_of_its_field(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_table(**changes)


def test_a_program_whose_op_has_no_cost_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ops\.make is missing, but the program has this op"):
        make_table(program=describe_program(record_chain(len, len)))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kind": "guessed"}, "kind is 'guessed'; it must be 'measured' or 'modelled'"),
        ({"date": "31.1.2026"}, "date is '31.1.2026'; it must be a day, such as 2026-01-31"),
        ({"date": "2026-02-30"}, "date is '2026-02-30'"),
        ({"date": "20260131"}, "date is '20260131'"),
        ({"machine": {"cores": 2}}, r"machine\.cores is 2; it must be text"),
        ({"parallel": {"tensor": "2"}}, r"parallel\.tensor is '2'; it must be a whole number"),
        ({"parallel": {"tensor": True}}, r"parallel\.tensor is True; it must be a whole number"),
    ],
)
def test_an_origin_of_another_form_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_provenance(**changes)


def test_a_table_cannot_be_changed() -> None:
    ops: dict[str, OpCost] = {"mlp": ComputeCost(1e-6)}
    table = make_table(ops)
    with pytest.raises(TypeError):
        table.ops["mlp"] = ComputeCost(2e-6)  # type: ignore[index]
    with pytest.raises(TypeError):
        table.provenance.machine["chip"] = "B"  # type: ignore[index]
    with pytest.raises(FrozenInstanceError):
        table.host = HostCost()  # type: ignore[misc]


def test_a_table_does_not_change_with_what_it_was_made_of() -> None:
    contention, machine = {"comm": 1.5}, {"chip": "A"}
    table = make_table(contention=contention, provenance=make_provenance(machine=machine))
    digest = table.digest
    contention["comm"], machine["chip"] = 2.0, "B"
    assert (table.contention, table.provenance.machine, table.digest) == ({"comm": 1.5}, {"chip": "A"}, digest)


def test_equal_tables_have_equal_digests_whatever_the_order_and_the_kind_of_their_numbers() -> None:
    table = make_table()
    again = make_table(
        ops=dict(reversed(table.ops.items())),
        contention={"comm": 1.0, "compute": 1.1},
        host=HostCost(5e-6, True, -1e-3, 2e-3),
    )
    assert again == table
    assert again.digest == table.digest
    assert len(table.digest) == 16
    assert int(table.digest, 16) >= 0
    zeros = [make_table(host=HostCost(unsplit=zero)) for zero in (0, 0.0, -0.0)]
    assert len({zero.digest for zero in zeros}) == 1
    assert make_table(errors={"mlp": 1}).digest == make_table(errors={"mlp": 1.0}).digest
    modelled = make_table()
    plain = CostTable(modelled.provenance, modelled.program, modelled.ops, {}, modelled.host, {})
    assert plain.digest == make_table(contention={}, errors={}, split_error=0.0).digest


@pytest.mark.parametrize(
    "changes",
    [
        {"ops": {"mlp": ComputeCost(1e-6)}},
        {"ops": {"final_norm": ComputeCost(per_context_pair=1e-9)}},
        {"host": HostCost()},
        {"contention": {}},
        {"errors": {}},
        {"split_error": 0.0},
        {"program": describe_program(record_toy(layers=4))},
        {"provenance": make_provenance(date="2026-02-01")},
        {"provenance": make_provenance(parallel={"tensor": 4})},
    ],
)
def test_digests_differ_where_tables_do(changes: dict[str, Any]) -> None:
    assert make_table(**changes).digest != make_table().digest


def test_the_digest_of_a_file_stays_when_costs_get_new_fields() -> None:
    """Files name the digest of the costs that they were made with."""
    table = make_table()
    assert replace(table, program=forget_token_wise(table.program)).digest == "e35a05db2b2146ec"
    assert table.digest != "e35a05db2b2146ec"


def test_digests_do_not_depend_on_the_process() -> None:
    code = "from tests.support.planner.cost_tables import make_table; print(make_table().digest)"
    root = str(Path(__file__).parents[3])
    env = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join([root, *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == make_table().digest
