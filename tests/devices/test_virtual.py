"""Virtual time: what two clocks and a few waits add up to can be worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo_runtime.devices.virtual import VirtualDevice, simulate
from dbo_runtime.events import EventTable
from dbo_runtime.executor import Executor, run_sequential
from dbo_runtime.observe.timeline import Recorder
from dbo_runtime.policies import Policy, alternate, sequential
from dbo_runtime.program import Program, ProgramBuilder
from dbo_runtime.schedule import Schedule, Step, lower
from tests.programs import record_toy
from tests.strategies import Case, cases, make_inputs

COSTS = {"attention": 3.0, "reduce": 2.0}


def record_layers(layers: int) -> Program:
    p = ProgramBuilder()
    x = p.input("x")
    for index in range(layers):
        with p.layer(index):
            x = p.compute("attention", lambda x: x + 1, x)
            x = p.comm("reduce", lambda x: x * 2, x)
    return p.build(x)


def cost(step: Step) -> float:
    return COSTS[step.op.name]


def run(schedule: Schedule, inputs: Sequence[Sequence[object]]) -> VirtualDevice:
    device = VirtualDevice(cost=lambda task: cost(task.step))
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
    device = VirtualDevice(cost=lambda task: cost(task.step))
    executor = Executor(schedule, device, EventTable(device))
    for _ in range(3):
        executor.run([(0,)])
        assert device.makespan == 10


def test_a_device_that_ran_nothing_took_no_time() -> None:
    assert VirtualDevice().makespan == 0


def test_the_cost_sees_the_step_also_when_the_run_is_recorded() -> None:
    programs = [record_layers(2)] * 2
    device = VirtualDevice(cost=lambda task: cost(task.step))
    recorder = Recorder()
    schedule = lower(programs, alternate(programs))
    Executor(schedule, device, EventTable(device)).run([(0,), (1,)], instrument=recorder)
    assert device.makespan == 14
    assert len(recorder.timeline().spans) == 8


@settings(max_examples=150)
@given(cases(), st.lists(st.integers(1, 9), min_size=7, max_size=7))
def test_running_and_simulating_agree_on_time_and_running_computes(case: Case, costs: list[int]) -> None:
    schedule = case.lower()
    device = VirtualDevice(cost=lambda task: costs[task.step.issue.position])
    outputs = Executor(schedule, device, EventTable(device)).run(make_inputs(case))
    timeline = simulate(schedule, lambda step: costs[step.issue.position])
    assert device.makespan == max(span.end for span in timeline.spans)
    assert outputs == run_sequential(case.programs, make_inputs(case))


def test_the_toy_runs_in_virtual_time_as_it_does_in_sequence() -> None:
    programs, same = ([record_toy()] * 3 for _ in range(2))
    device = VirtualDevice()
    inputs = [(mb, mb + 1) for mb in range(3)]
    executor = Executor(lower(programs, alternate(programs)), device, EventTable(device))
    assert executor.run(inputs) == run_sequential(same, inputs)
