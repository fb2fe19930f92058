from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest

from dbo_runtime.batch import Batch, BatchSlice
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.devices.cpu import CpuDevice
from dbo_runtime.engine.execution_plan import ExecutionPlan
from dbo_runtime.engine.executor import run_sequential
from dbo_runtime.engine.runtime import MicroBatchRuntime
from dbo_runtime.errors import ConfigError, DeviceError, ScheduleError, SplitError
from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.policies import Policy, alternate, layered, sequential
from dbo_runtime.ir.program import Program, ProgramBuilder
from dbo_runtime.ir.render import digest
from dbo_runtime.observe.timeline import Recorder
from dbo_runtime.planner.costs.cost_table import CostTable, Provenance
from dbo_runtime.planner.costs.op_cost import CommCost, ComputeCost, HostCost
from dbo_runtime.planner.costs.program_spec import describe_program
from dbo_runtime.planner.online.cuts import Cut, measure_cut
from dbo_runtime.planner.online.named_order import NamedOrder
from dbo_runtime.planner.online.planner import Planner
from dbo_runtime.planner.online.prediction import Prediction
from dbo_runtime.planner.online.split_choice import SplitChoice
from tests.support.programs import record_dense_and_experts, record_three_lanes, record_toy

BATCH = Batch((512, 512), prefill_tokens=1024)


class Log:
    """Keeps the lines that are logged."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def info(self, event: str, **fields: Any) -> None:
        self.lines.append({"event": event, **fields})

    error = info


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def runtime(log: Log) -> Iterator[MicroBatchRuntime]:
    runtime = MicroBatchRuntime(record_toy(), CpuDevice(), RuntimeConfig(enabled=True), log)
    yield runtime
    runtime.close()


def plan(runtime: MicroBatchRuntime, batch: Batch = BATCH, cuts: list[int] | None = None) -> ExecutionPlan:
    plan = runtime.plan(batch, cuts)
    assert isinstance(plan, ExecutionPlan)
    return plan


def test_a_plan_has_the_slices_that_the_settings_ask_for(runtime: MicroBatchRuntime) -> None:
    assert plan(runtime).slices == (BatchSlice(0, 1, 0, 512), BatchSlice(1, 2, 512, 1024))


def test_explicit_cuts_overrule_the_settings(runtime: MicroBatchRuntime) -> None:
    small = Batch((3, 4), prefill_tokens=0)
    assert isinstance(runtime.plan(small), Decline)
    assert plan(runtime, small, cuts=[3]).slices == (BatchSlice(0, 1, 0, 3), BatchSlice(1, 2, 3, 7))
    assert len(plan(runtime, BATCH, cuts=[100, 200, 300]).slices) == 4


def test_impossible_explicit_cuts_are_refused(runtime: MicroBatchRuntime) -> None:
    with pytest.raises(SplitError, match="must increase and lie inside"):
        runtime.plan(BATCH, cuts=[2000])


def test_no_explicit_cuts_at_all_are_a_decline(runtime: MicroBatchRuntime) -> None:
    assert runtime.plan(BATCH, cuts=[]) == Decline("nowhere to cut", "no cuts were given")


def test_plans_of_one_shape_share_executor_and_digest(runtime: MicroBatchRuntime) -> None:
    first, second = plan(runtime), plan(runtime, Batch((300, 600), prefill_tokens=900))
    assert first.executor is second.executor
    assert first.digest == second.digest
    assert first.slices != second.slices
    assert plan(runtime, cuts=[100, 200]).executor is not first.executor


def test_each_new_plan_is_logged_once(runtime: MicroBatchRuntime, log: Log) -> None:
    for _ in range(3):
        two, three = plan(runtime), plan(runtime, cuts=[100, 200])
    assert [(line["event"], line["micro_batches"], line["instructions"]) for line in log.lines] == [
        ("new plan", 2, 26),
        ("new plan", 3, 39),
    ]
    assert [line["digest"] for line in log.lines] == [two.digest, three.digest]
    assert all(line["policy"] == "alternate" and line["waits"] > 0 for line in log.lines)


@pytest.mark.parametrize(
    ("policy", "micro_batches", "issued"),
    [
        (("optimal", 0), 2, layered),
        (("alternate", 0), 3, layered),
        (("sequential", 0), 2, sequential),  # as the user asks; the step then declines
    ],
)
def test_where_layers_are_kept_in_turn_the_policies_that_leave_a_choice_do_so(
    policy: tuple[str, int], micro_batches: int, issued: Policy, log: Log
) -> None:
    program = record_dense_and_experts(2, 1)
    config = RuntimeConfig(enabled=True, policy=policy, micro_batches=micro_batches)
    runtime = MicroBatchRuntime(program, CpuDevice(), config, log, keeps_layers=True)
    try:
        found = plan(runtime).executor.schedule
    finally:
        runtime.close()
    programs = (program,) * micro_batches
    assert digest(found) == digest(lower(programs, issued(programs)))
    assert digest(found) != digest(lower(programs, alternate(programs)))
    assert log.lines[0]["policy"] == issued.__name__


def test_the_first_decline_of_each_reason_is_logged_and_all_are_counted(runtime: MicroBatchRuntime, log: Log) -> None:
    for tokens in (10, 20, 30):
        decline = runtime.plan(Batch((tokens,), prefill_tokens=tokens))
        assert isinstance(decline, Decline)
        runtime.decline(decline)
    runtime.decline(Decline("nowhere to cut"))
    assert log.lines == [
        {"event": "step not split", "reason": "fewer tokens than DBO_MIN_TOKENS", "detail": "10 < 256"},
        {"event": "step not split", "reason": "nowhere to cut", "detail": None},
    ]
    declined = {"fewer tokens than DBO_MIN_TOKENS": 3, "nowhere to cut": 1}
    assert runtime.statistics.as_dict() == {
        "split": 0,
        "nano": 0,
        "concurrent": 0,
        "micro_batches": 0,
        "declined": declined,
    }


def test_planning_a_decline_counts_nothing(runtime: MicroBatchRuntime, log: Log) -> None:
    runtime.plan(Batch((1,), prefill_tokens=0))
    assert runtime.statistics.as_dict() == {"split": 0, "nano": 0, "concurrent": 0, "micro_batches": 0, "declined": {}}
    assert log.lines == []


def test_running_computes_what_the_sequential_loop_does_and_counts(runtime: MicroBatchRuntime) -> None:
    inputs = [(1, 0), (2, 1)]
    assert runtime.run(plan(runtime), inputs) == run_sequential([record_toy()] * 2, inputs)
    runtime.run(plan(runtime, cuts=[100, 200]), [(1, 0), (2, 1), (3, 2)])
    assert runtime.statistics.as_dict() == {"split": 2, "nano": 0, "concurrent": 0, "micro_batches": 5, "declined": {}}


def test_a_run_that_fails_is_not_counted_and_the_log_says_where(runtime: MicroBatchRuntime, log: Log) -> None:
    with pytest.raises(TypeError):
        runtime.run(plan(runtime), [("x", 0), ("y", 1)])
    assert runtime.statistics.split == 0
    line = log.lines[-1]
    assert line["event"] == "a split step failed"
    assert line["error"].startswith("TypeError")
    assert "micro-batch 0" in line["where"]
    assert "declared at" in line["where"]


def test_running_enters_micro_batches_and_tells_the_instrument(runtime: MicroBatchRuntime) -> None:
    entered: list[int] = []
    recorder = Recorder()
    runtime.run(plan(runtime), [(1, 0), (2, 1)], entered.append, recorder)
    assert set(entered) == {0, 1}
    assert len(recorder.timeline().spans) == 26


class FixedPlanner:
    """Splits in the middle, in one order, which is called as that of any other."""

    def __init__(self, program: Program, policy: Policy) -> None:
        self._order = NamedOrder("best", (program,) * 2, policy((program,) * 2))

    def choose(self, batch: Batch, config: RuntimeConfig) -> SplitChoice:
        return SplitChoice(self._order, Prediction(2.0, 1.0, 2), measure_cut(batch, [batch.tokens // 2]))


def test_with_a_new_planner_orders_of_old_names_are_made_anew(runtime: MicroBatchRuntime) -> None:
    planner: Any
    for policy in (sequential, alternate):
        planner = runtime.planner = FixedPlanner(runtime.program, policy)
        assert plan(runtime).digest == digest(planner.choose(BATCH, runtime.config).order.schedule)


@pytest.mark.parametrize("program", [record_toy(), record_three_lanes(2)])
def test_each_configured_policy_gives_its_own_schedule(program: Program, log: Log) -> None:
    digests = set()
    for policy in (("sequential", 0), ("alternate", 0), ("staggered", 1)):
        runtime = MicroBatchRuntime(program, CpuDevice(), RuntimeConfig(policy=policy), log)
        digests.add(plan(runtime).digest)
        runtime.close()
    assert len(digests) == 3


def test_a_changed_policy_takes_effect_on_the_next_plan(runtime: MicroBatchRuntime) -> None:
    alternate = plan(runtime)
    runtime.config = replace(runtime.config, policy=("sequential", 0))
    assert plan(runtime).digest != alternate.digest


def test_an_unknown_policy_is_refused(log: Log) -> None:
    runtime = MicroBatchRuntime(record_toy(), CpuDevice(), RuntimeConfig(policy=("best", 0)), log)
    with pytest.raises(ConfigError, match="no policy 'best'"):
        runtime.plan(BATCH)


def test_after_close_old_plans_are_refused_and_new_ones_run(log: Log) -> None:
    runtime = MicroBatchRuntime(record_toy(), CpuDevice(), RuntimeConfig(), log)
    inputs = [(1, 0), (2, 1)]
    old = plan(runtime)
    runtime.close()
    with pytest.raises(DeviceError, match="is closed"):
        runtime.run(old, inputs)
    runtime.run(plan(runtime), inputs)
    runtime.close()


def test_plans_that_several_ranks_share_must_fit_together(log: Log) -> None:
    """Collectives on two lanes may run in another order on another rank: one rank may, several may not."""
    p = ProgramBuilder()
    x = p.comm("reduce", lambda x: x, p.input("x"))
    program = p.build(p.op("gather", lambda x: x, x, lane="aux", communicator="other"))
    assert isinstance(MicroBatchRuntime(program, CpuDevice(), RuntimeConfig(), log).plan(BATCH), ExecutionPlan)
    with pytest.raises(ScheduleError, match=r"rule 9, instruction 1: gather/0 is a collective on lane 'aux'"):
        MicroBatchRuntime(program, CpuDevice(), RuntimeConfig(), log, ranks=16).plan(BATCH)


def use_costs(runtime: MicroBatchRuntime, alpha: float) -> None:
    """Let the runtime plan by costs of which communication is half, and so long however little is sent."""
    ops: dict[str, ComputeCost | CommCost] = {
        op.name: CommCost(alpha, 1e-9, 1000.0) if op.lane == "comm" else ComputeCost(1e-6, per_token=1e-6 / 2)
        for op in runtime.program.ops
    }
    origin = Provenance("modelled", "a test", "2026-01-31", {}, {}, {}, {})
    runtime.planner = Planner(
        runtime.program, CostTable(origin, describe_program(runtime.program), ops, {}, HostCost(), {})
    )


def test_costs_decide_instead_of_thresholds(runtime: MicroBatchRuntime) -> None:
    small = Batch((40, 40), prefill_tokens=80)
    assert isinstance(runtime.plan(small), Decline)
    use_costs(runtime, alpha=0.0)
    found = plan(runtime, small)
    assert found.expected is not None
    assert found.expected < 80e-6 * 6  # what it would take unsplit
    inputs = [(part, part) for part in range(len(found.slices))]
    assert runtime.run(found, inputs) == run_sequential([record_toy()] * len(inputs), inputs)


def test_what_costs_more_than_it_gains_is_declined_with_the_figures(runtime: MicroBatchRuntime) -> None:
    assert plan(runtime).expected is None
    use_costs(runtime, alpha=10.0)
    decline = runtime.plan(BATCH)
    assert isinstance(decline, Decline)
    assert decline.reason == "no gain predicted"
    assert "ms unsplit, " in decline.detail
    assert decline.expected == pytest.approx(40.0, rel=0.01)
    runtime.config = replace(runtime.config, mode="always")
    assert plan(runtime).expected == pytest.approx(60.0, rel=0.4)


def test_steps_too_small_to_hide_anything_are_declined_unseen(runtime: MicroBatchRuntime) -> None:
    use_costs(runtime, alpha=0.0)
    early = runtime.decline_early(1)
    assert early is not None
    assert early.reason == "no gain predicted"
    assert runtime.decline_early(80) is None
    runtime.config = replace(runtime.config, mode="always")
    assert runtime.decline_early(1) is None
    runtime.config = replace(runtime.config, mode="off")
    assert runtime.decline_early(80) == Decline("DBO_MODE is off")


def test_thresholds_are_those_of_the_settings_and_bind_auto_only(runtime: MicroBatchRuntime) -> None:
    few, decode = Batch((40, 40), 80), Batch((1,) * 300, 0)
    runtime.config = RuntimeConfig(min_tokens=81, min_prefill_tokens=1)
    assert runtime.plan(few) == Decline("fewer tokens than DBO_MIN_TOKENS", "80 < 81")
    assert runtime.plan(decode) == Decline("fewer prefill tokens than DBO_MIN_PREFILL_TOKENS", "0 < 1")
    assert runtime.check_balance(0.09) is not None
    largest = "80 < 81 on rank 1, which has the most"
    assert runtime.plan_data_parallel([40, 80]) == Decline("fewer tokens than DBO_MIN_TOKENS", largest)
    assert isinstance(runtime.plan_data_parallel([1024, 80]), Cut)
    runtime.config = replace(runtime.config, mode="always")
    assert len(plan(runtime, few).slices) == len(plan(runtime, decode).slices) == 2
    assert runtime.check_balance(0.09) is None
    assert isinstance(runtime.plan_data_parallel([40, 80]), Cut)


@pytest.mark.parametrize("alpha", [None, 0.0])
def test_off_declines_everything_with_costs_and_without(alpha: float | None, runtime: MicroBatchRuntime) -> None:
    if alpha is not None:
        use_costs(runtime, alpha=alpha)
    runtime.config = replace(runtime.config, mode="off")
    assert runtime.plan(BATCH) == Decline("DBO_MODE is off")
    assert runtime.plan_data_parallel([1024, 700]) == Decline("DBO_MODE is off")
    assert runtime.decline_early(4096) == Decline("DBO_MODE is off")


def test_data_parallel_ranks_plan_together_by_costs(runtime: MicroBatchRuntime) -> None:
    use_costs(runtime, alpha=0.0)
    shared = runtime.plan_data_parallel([1024, 700])
    assert isinstance(shared, SplitChoice)
    assert [sum(sizes) for sizes in zip(*shared.sizes, strict=True)] == [1024, 700]
    own = runtime.plan(BATCH, list(accumulate(part[0] for part in shared.sizes))[:-1], shared)
    assert isinstance(own, ExecutionPlan)
    assert own.expected == shared.prediction.split
    use_costs(runtime, alpha=10.0)
    assert isinstance(runtime.plan_data_parallel([1024, 700]), Decline)


def open_concurrent(log: Log, **settings: Any) -> MicroBatchRuntime:
    """Return a runtime of a program with an op on the side lane."""
    p = ProgramBuilder(has_side=True)
    x = p.input("x")
    side = p.side("aside", lambda x: x + 1, x)
    x = p.compute("compute", lambda x: x * 2, x)
    x = p.comm("reduce", lambda x: x * 3, x, overwrites=(x,))
    program = p.build(p.compute("last", lambda x, y: x + y, x, side))
    return MicroBatchRuntime(program, CpuDevice(), RuntimeConfig(enabled=True, **settings), log)


@pytest.mark.parametrize(
    ("settings", "forced"),
    [
        ({"side": "on"}, True),
        ({"side": "auto"}, False),
        ({"side": "off"}, False),
        ({"side": "on", "mode": "off"}, False),
    ],
)
def test_without_costs_ops_are_concurrent_where_the_settings_say_so(
    settings: dict[str, Any], forced: bool, log: Log
) -> None:
    runtime = open_concurrent(log, **settings)
    assert runtime.forces_side is forced
    assert ("side" in plan(runtime, cuts=[512]).executor.schedule.lanes) is forced
    assert runtime.run(plan(runtime, cuts=[512]), [(1,), (2,)]) == [(8,), (15,)]
    runtime.close()


def test_a_step_that_is_not_cut_runs_with_concurrent_ops(log: Log) -> None:
    runtime = open_concurrent(log, side="on")
    concurrent = plan(runtime, cuts=[])
    assert concurrent.slices == (BatchSlice(0, 2, 0, 1024),)
    assert runtime.run(concurrent, [(5,)]) == [(36,)]
    assert runtime.statistics.as_dict() == {"split": 0, "nano": 0, "concurrent": 1, "micro_batches": 0, "declined": {}}
    runtime.config = replace(runtime.config, side="off")
    assert runtime.plan(BATCH, cuts=[]) == Decline("nowhere to cut", "no cuts were given")
    runtime.close()


def test_a_program_without_side_ops_has_nothing_to_run_concurrently(log: Log) -> None:
    runtime = MicroBatchRuntime(record_toy(), CpuDevice(), RuntimeConfig(enabled=True, side="on"), log)
    assert not runtime.forces_side
    assert isinstance(runtime.plan(BATCH, cuts=[]), Decline)
    runtime.close()
