"""Virtual time: what two clocks and a few waits add up to can be worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo_runtime.devices.virtual import VirtualDevice, simulate
from dbo_runtime.engine.event_table import EventTable
from dbo_runtime.engine.executor import Executor, run_sequential
from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.policies import Policy, alternate, sequential
from dbo_runtime.ir.program import Program, ProgramBuilder
from dbo_runtime.ir.schedule import Instruction, Issue, Schedule
from dbo_runtime.observe.timeline import Recorder
from tests.support.profiles import scale
from tests.support.programs import record_toy
from tests.support.strategies import Case, cases, make_inputs

COSTS = {"attention": 3.0, "reduce": 2.0}


def record_layers(layers: int) -> Program:
    p = ProgramBuilder()
    x = p.input("x")
    for index in range(layers):
        with p.layer(index):
            x = p.compute("attention", lambda x: x + 1, x)
            x = p.comm("reduce", lambda x: x * 2, x)
    return p.build(x)


def cost(instruction: Instruction) -> float:
    return COSTS[instruction.op.name]


def run(schedule: Schedule, inputs: Sequence[Sequence[object]]) -> VirtualDevice:
    device = VirtualDevice(cost=lambda task: cost(task.instruction))
    Executor(schedule, device, EventTable(device)).run(inputs)
    return device


@pytest.mark.parametrize(
    ("micro_batches", "policy", "makespan"),
    [
        (1, sequential, 10),  # attention 0-3, reduce 3-5, attention 5-8, reduce 8-10
        (2, sequential, 18),  # twice that, but the second starts while the first reduces for the last time
        (2, alternate, 14),  # attention 0-3 3-6 6-9 9-12 without a gap, and one reduce to end on
        (3, alternate, 20),  # six attentions of 3, one reduce of 2
    ],
)
def test_two_layers_take_as_long_as_worked_out_by_hand(micro_batches: int, policy: Policy, makespan: float) -> None:
    programs = [record_layers(2)] * micro_batches
    schedule = lower(programs, policy(programs))
    device = run(schedule, [(mb,) for mb in range(micro_batches)])
    assert device.makespan == simulate(schedule, cost).duration == makespan


def test_spans_are_where_worked_out_by_hand() -> None:
    programs = [record_layers(1)] * 2
    spans = simulate(lower(programs, alternate(programs)), cost).spans
    assert [(span.lane, span.op, span.micro_batch, span.start, span.end) for span in spans] == [
        ("compute", "L0.attention", 0, 0, 3),
        ("comm", "L0.reduce", 0, 3, 5),
        ("compute", "L0.attention", 1, 3, 6),
        ("comm", "L0.reduce", 1, 6, 8),
    ]


def test_the_makespan_is_that_of_the_latest_run() -> None:
    programs = [record_layers(2)]
    schedule = lower(programs, sequential(programs))
    device = VirtualDevice(cost=lambda task: cost(task.instruction))
    executor = Executor(schedule, device, EventTable(device))
    for _ in range(3):
        executor.run([(0,)])
        assert device.makespan == 10


def test_a_device_that_ran_nothing_took_no_time() -> None:
    device = VirtualDevice()
    assert device.makespan == 0
    device.open_lanes(["compute"])
    assert device.makespan == 0


def test_the_cost_sees_the_instruction_also_when_the_run_is_recorded() -> None:
    programs = [record_layers(2)] * 2
    device = VirtualDevice(cost=lambda task: cost(task.instruction))
    recorder = Recorder()
    schedule = lower(programs, alternate(programs))
    Executor(schedule, device, EventTable(device)).run([(0,), (1,)], instrument=recorder)
    assert device.makespan == 14
    assert len(recorder.timeline().spans) == 8


def simulate_spans(program: Program, issue: float) -> list[tuple[str, int, float, float]]:
    programs = [program] * 2
    spans = simulate(lower(programs, alternate(programs)), cost, issue).spans
    return [(span.op, span.micro_batch, span.start, span.end) for span in spans]


def test_a_slow_host_issues_one_instruction_after_another() -> None:
    assert simulate_spans(record_layers(1), issue=1) == [
        ("L0.attention", 0, 1, 4),
        ("L0.reduce", 0, 4, 6),  # issued at 2, while the attention runs
        ("L0.attention", 1, 4, 7),
        ("L0.reduce", 1, 7, 9),
    ]
    assert simulate_spans(record_layers(1), issue=4) == [
        ("L0.attention", 0, 4, 7),
        ("L0.reduce", 0, 8, 10),
        ("L0.attention", 1, 12, 15),
        ("L0.reduce", 1, 16, 18),
    ]


def test_a_host_sync_keeps_the_host_until_the_instruction_begins() -> None:
    """Until its lane is free, and not to its end: the attention is issued when the second reduce begins."""
    p = ProgramBuilder()
    x = p.input("x")
    reduced = p.comm("reduce", lambda x: x, x)
    p.comm("reduce2", lambda x: x, reduced, host_sync=True)
    program = p.build(p.compute("attention", lambda x: x, x))
    schedule = lower([program], sequential([program]))
    costs = {"reduce": 2.0, "reduce2": 5.0, "attention": 3.0}
    spans = simulate(schedule, lambda instruction: costs[instruction.op.name], issue_seconds=1).spans
    assert [(span.start, span.end) for span in spans] == [(1, 3), (3, 8), (4, 7)]


def test_a_host_sync_waits_for_the_inputs_of_its_instruction() -> None:
    p = ProgramBuilder()
    x = p.compute("attention", lambda x: x, p.input("x"))
    p.comm("reduce", lambda x: x, x, host_sync=True)
    program = p.build(p.op("attention2", lambda x: x, x, lane="aux"))
    schedule = lower([program], sequential([program]))
    costs = {"attention": 3.0, "reduce": 2.0, "attention2": 1.0}
    spans = simulate(schedule, lambda instruction: costs[instruction.op.name]).spans
    assert [(span.start, span.end) for span in spans] == [(0, 3), (3, 5), (3, 4)]


EXPERT_COSTS = {
    "attention": 4.0,
    "gate": 0.5,
    "sizes": 0.2,
    "dispatch": 1.0,
    "shared": 2.0,
    "experts": 4.0,
    "combine": 1.0,
    "merge": 0.1,
}


def time_experts(policy: Policy, host_sync: bool, shared_first: bool = False, issue: float = 0.01) -> float:
    """Return how long eight layers of a mixture of experts take for two micro-batches.

    With *host_sync* the host must know the sizes before it can dispatch. The shared experts, which need no other rank,
    are declared after that, or *shared_first* before it.
    """
    p = ProgramBuilder()
    x = p.input("x")
    for index in range(8):
        with p.layer(index):
            x = p.compute("attention", tuple, x)
            sizes = p.comm("sizes", tuple, p.compute("gate", tuple, x))
            shared = [p.compute("shared", tuple, x)] if shared_first else []
            sent = p.comm("dispatch", tuple, x, sizes, host_sync=host_sync)
            shared = shared or [p.compute("shared", tuple, x)]
            routed = p.comm("combine", tuple, p.compute("experts", tuple, sent))
            x = p.compute("merge", tuple, routed, *shared)
    programs = [p.build(x)] * 2
    return simulate(
        lower(programs, policy(programs)), lambda instruction: EXPERT_COSTS[instruction.op.name], issue
    ).duration


def test_a_host_sync_is_nearly_free_where_it_is_issued_after_work_that_hides_it() -> None:
    without = time_experts(alternate, host_sync=False, shared_first=True)
    assert without <= time_experts(alternate, host_sync=True, shared_first=True) < 1.01 * without


def test_a_host_sync_costs_time_where_the_work_that_could_hide_it_comes_after_it() -> None:
    """In sequence, the shared experts wait for the sizes; taking turns, those of micro-batch 0 wait for dispatch/1."""
    for policy in (sequential, alternate):
        assert time_experts(policy, host_sync=True) > 1.01 * time_experts(policy, host_sync=False)


def test_taking_turns_pays_in_spite_of_a_host_sync() -> None:
    in_sequence = time_experts(sequential, host_sync=False)
    assert time_experts(alternate, host_sync=True) < 0.98 * in_sequence
    assert time_experts(alternate, host_sync=True, shared_first=True) < 0.93 * in_sequence


@settings(max_examples=scale(150))
@given(cases(), st.lists(st.integers(1, 9), min_size=7, max_size=7))
def test_without_issue_costs_nothing_but_waits_and_lanes_counts(case: Case, costs: list[int]) -> None:
    schedule = case.lower()
    spans = simulate(schedule, lambda instruction: costs[instruction.issue.position]).spans
    lane_ends: dict[str, float] = {}
    ends: dict[Issue, float] = {}
    for instruction, span in zip(schedule.instructions, spans, strict=True):
        assert span.start == max([lane_ends.get(span.lane, 0), *(ends[issue] for issue in instruction.waits)])
        lane_ends[span.lane] = ends[instruction.issue] = span.end


@settings(max_examples=scale(150))
@given(cases(), st.lists(st.integers(1, 9), min_size=7, max_size=7))
def test_running_and_simulating_agree_on_time_and_running_computes(case: Case, costs: list[int]) -> None:
    schedule = case.lower()
    device = VirtualDevice(cost=lambda task: costs[task.instruction.issue.position])
    outputs = Executor(schedule, device, EventTable(device)).run(make_inputs(case))
    timeline = simulate(schedule, lambda instruction: costs[instruction.issue.position])
    assert device.makespan == max(span.end for span in timeline.spans)
    assert outputs == run_sequential(case.programs, make_inputs(case))


def test_the_toy_runs_in_virtual_time_as_it_does_in_sequence() -> None:
    programs, same = ([record_toy()] * 3 for _ in range(2))
    device = VirtualDevice()
    inputs = [(mb, mb + 1) for mb in range(3)]
    executor = Executor(lower(programs, alternate(programs)), device, EventTable(device))
    assert executor.run(inputs) == run_sequential(same, inputs)
