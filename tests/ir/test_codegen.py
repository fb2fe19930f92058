"""The source that is written for a schedule, and what tracebacks show of it."""

from __future__ import annotations

import gc
import linecache
import traceback
import weakref
from typing import Any

import pytest

from dbo_runtime.devices import open_device
from dbo_runtime.engine.event_table import EventTable
from dbo_runtime.engine.generated_executor import MAX_SHOWN_SOURCES, GeneratedExecutor
from dbo_runtime.ir.codegen import FILE_PREFIX, Issuing, write_source
from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.policies import sequential
from dbo_runtime.ir.program import ProgramBuilder
from dbo_runtime.ir.render import digest
from dbo_runtime.ir.schedule import Schedule
from tests.support.programs import record_chain

STREAMS = {"compute": Issuing.SWITCHED, "comm": Issuing.SWITCHED}
CPU = {"compute": Issuing.CALLED, "comm": Issuing.LAUNCHED}

ON_STREAMS = '''\
def issue(values, enter):
    """Issue schedule {digest}."""
    switch_compute, record_compute, wait_compute = lane_compute.get_direct_calls()
    switch_comm, record_comm, wait_comm = lane_comm.get_direct_calls()
    v0_0 = values[0]
    enter(0)
    v1_0 = op_make(v0_0)  # 0  make/0
    record_compute(event_0)
    wait_comm(event_0)
    switch_comm()
    v2_0 = op_send(v1_0)  # 1  send/0
    record_comm(event_1)
    wait_compute(event_1)
    switch_compute()
    v1_0 = None
    v3_0 = op_receive(v2_0)  # 2  receive/0
    values[3] = v3_0
'''

ON_A_CPU = '''\
def issue(values, enter):
    """Issue schedule {digest}."""
    switch_compute, record_compute, wait_compute = lane_compute.get_direct_calls()
    v0_0 = values[0]
    enter(0)
    values[1] = op_make(v0_0)  # 0  make/0
    record_compute(event_0)
    lane_comm.wait(event_0)
    lane_comm.launch(task_1, values)  # 1  send/0
    lane_comm.record(event_1)
    wait_compute(event_1)
    values[1] = None
    v3_0 = op_receive(values[2])  # 2  receive/0
    values[3] = v3_0
'''


def lower_chain(fail: Any = None) -> Schedule:
    program = record_chain(lambda x: x, fail or (lambda x: x))
    return lower([program], sequential([program]))


@pytest.mark.parametrize(("issuing", "text"), [(STREAMS, ON_STREAMS), (CPU, ON_A_CPU)])
def test_each_line_is_one_thing_that_the_host_does(issuing: dict[str, Issuing], text: str) -> None:
    schedule = lower_chain()
    assert write_source(schedule, issuing).text == text.format(digest=digest(schedule))


def test_lines_are_mapped_to_the_instructions_whose_ops_they_call() -> None:
    schedule = lower_chain()
    for issuing, instructions in ((STREAMS, [0, 1, 2]), (CPU, [0, 2])):
        source = write_source(schedule, issuing)
        lines = source.text.splitlines()
        assert list(source.calls.values()) == instructions
        for line, number in source.calls.items():
            assert lines[line - 1].endswith(f"# {number}  {schedule.instructions[number].label}")


def test_a_wait_for_what_is_not_recorded_before_is_left_to_the_lane_that_refuses_it() -> None:
    schedule = lower_chain()
    make, *others = schedule.instructions
    unrecorded = Schedule(schedule.programs, (type(make)(make.issue, make.op), *others), joins=schedule.joins)
    assert "    lane_comm.wait(event_0)\n" in write_source(unrecorded, STREAMS).text


def test_whatever_ops_and_lanes_are_called_the_source_runs() -> None:
    p = ProgramBuilder()
    x = p.input("x")
    names = ("L0_work", "class", "values", "v0_0", "L0_work_2", "ünï", "ﬁn")
    for number, name in enumerate(names):
        x = p.op(name, lambda x, number=number: [*x, number], x, lane="ß" if number % 2 else "ü")
    with p.layer(0):
        x = p.compute("work", lambda x: [*x, len(names)], x)
    program = p.build(x)
    device = open_device("cpu")
    executor = GeneratedExecutor(lower([program], sequential([program])), device, EventTable(device))
    assert executor.run([([],)]) == [([*range(len(names) + 1)],)]
    device.close()
    issuing = dict.fromkeys(executor.schedule.lanes, Issuing.SWITCHED)
    source = write_source(executor.schedule, issuing)
    assert len(source.functions) == len(names) + 1
    assert list(source.lanes.values()) == ["compute", "ü", "ß"]
    compile(source.text, source.file, "exec")


def test_a_traceback_shows_the_line_of_the_op_that_failed() -> None:
    def fail(x: int) -> int:
        raise FloatingPointError("not a number")

    device = open_device("cpu")
    schedule = lower_chain(fail)
    executor = GeneratedExecutor(schedule, device, EventTable(device))
    with pytest.raises(FloatingPointError) as raised:
        executor.run([(0,)])
    text = "".join(traceback.format_exception(raised.value))
    assert f'File "<schedule {digest(schedule)}>", line 13, in issue' in text
    assert "v3_0 = op_receive(values[2])  # 2  receive/0" in text
    assert "".join(linecache.getlines(f"<schedule {digest(schedule)}>")) == executor.write_source().text
    device.close()


def test_few_sources_of_schedules_that_failed_are_kept() -> None:
    def fail(x: int) -> int:
        raise FloatingPointError("not a number")

    device = open_device("virtual")
    for length in range(1, MAX_SHOWN_SOURCES + 8):
        p = ProgramBuilder()
        value = p.input("x")
        for number in range(length):
            value = p.compute(f"op{number}", fail, value)
        programs = (p.build(value),)
        executor = GeneratedExecutor(lower(programs, sequential(programs)), device, EventTable(device))
        with pytest.raises(FloatingPointError):
            executor.run([(1,)])
    assert sum(name.startswith(FILE_PREFIX) for name in linecache.cache) == MAX_SHOWN_SOURCES


def test_an_executor_that_is_dropped_is_gone_at_once() -> None:
    """No cycle keeps its events, or a model that its ops belong to, until the garbage collector comes."""
    device = open_device("cpu")
    executor = GeneratedExecutor(lower_chain(), device, EventTable(device))
    executor.run([(0,)])
    dropped = weakref.ref(executor)
    gc.disable()
    try:
        del executor
        assert dropped() is None
    finally:
        gc.enable()
    device.close()
