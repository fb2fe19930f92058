from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, SupportsFloat

import pytest

from dbo_runtime.devices import Device, open_device
from dbo_runtime.engine.event_table import EventTable
from dbo_runtime.engine.executor import Executor, run_sequential
from dbo_runtime.errors import DeviceError, ProgramError
from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.op import COMM, COMPUTE
from dbo_runtime.ir.policies import Policy, alternate, sequential
from dbo_runtime.ir.program import ProgramBuilder
from dbo_runtime.ir.schedule import Instruction
from tests.support.executors import Prepare
from tests.support.latch import Latch
from tests.support.programs import record_chain, record_three_lanes, record_toy


class Tensor:
    """Something that can be referred to weakly."""


class FailingOp:
    """An op's function that fails when it is given a certain value."""

    def __init__(self) -> None:
        self.trigger: int | None = None

    def __call__(self, x: int) -> int:
        if x == self.trigger:
            raise FloatingPointError("not a number")
        return x + 1


def test_the_sequential_loop_runs_each_micro_batch_through_all_ops() -> None:
    program = record_chain(send=lambda x: x * 2, receive=lambda x: x + 1)
    assert run_sequential([program, program], [(10,), (20,)]) == [(21,), (41,)]


def test_the_sequential_loop_enters_each_micro_batch_once() -> None:
    entered: list[int] = []
    program = record_chain(send=lambda x: x, receive=lambda x: x)
    run_sequential([program] * 3, [(0,), (0,), (0,)], entered.append)
    assert entered == [0, 1, 2]


def test_the_executor_returns_each_micro_batchs_outputs(prepare: Prepare, device: Device) -> None:
    p = ProgramBuilder()
    x, y = p.input("x"), p.input("y")
    total = p.comm("add", lambda x, y: x + y, x, y)
    quotient, rest = p.compute("divide", divmod, total, y, outputs=2)
    executor = prepare(device, p.build(rest, x, quotient))
    assert executor.run([(7, 2), (9, 4)]) == [(1, 7, 4), (1, 9, 3)]


@pytest.mark.parametrize("policy", [sequential, alternate])
def test_the_executor_can_be_run_again_and_again(prepare: Prepare, device: Device, policy: Policy) -> None:
    program = record_three_lanes(2)
    executor = prepare(device, program, 3, policy)
    for run in range(20):
        inputs = [([run + mb],) for mb in range(3)]
        assert executor.run(inputs) == run_sequential([program] * 3, inputs)


class Scribe:
    """A device, and each of its lanes, that records its calls. An event is what was last launched."""

    name = "scribe"

    def __init__(self, lane: str = "", log: list[str] | None = None) -> None:
        self.name = lane or self.name
        self.log: list[str] = [] if log is None else log
        self._latest = "the start"

    def open_lanes(self, names: Sequence[str]) -> list[Any]:
        return [Scribe(name, self.log) for name in names]

    def make_event(self) -> list[str]:
        return []

    def launch(self, task: Any, values: list[Any]) -> None:
        self._latest = task.instruction.label
        self.log.append(f"{self.name} runs {self._latest}")

    def record(self, event: list[str]) -> None:
        event[:] = [self._latest]
        self.log.append(f"{self.name} records {self._latest}")

    def wait(self, event: list[str]) -> None:
        self.log.append(f"{self.name} waits for {event[0]}")

    def get_direct_calls(self) -> None:
        pass

    def begin(self) -> None:
        self.log.append("begin")

    def release_to_caller(self, values: Any) -> None:
        self.log.append("hand over")

    def finish(self) -> None:
        self.log.append("finish")


def test_forks_waits_ops_records_and_joins_are_issued_in_this_order(prepare: Prepare) -> None:
    p = ProgramBuilder()
    fetched = p.comm("fetch", lambda: 1)
    worked = p.compute("work", lambda x: x, fetched)
    p.comm("send", lambda x: None, worked, outputs=0)
    scribe = Scribe()
    prepare(scribe, p.build(), micro_batches=1).run([()])
    assert scribe.log == [
        "begin",
        "compute records the start",
        "comm waits for the start",
        "comm runs fetch/0",
        "comm records fetch/0",
        "compute waits for fetch/0",
        "compute runs work/0",
        "compute records work/0",
        "comm waits for work/0",
        "comm runs send/0",
        "comm records send/0",
        "compute waits for send/0",
        "hand over",
        "finish",
    ]


def test_without_forks_the_start_is_not_recorded(prepare: Prepare) -> None:
    scribe = Scribe()
    prepare(scribe, record_chain(lambda x: x, lambda x: x), micro_batches=1).run([(0,)])
    assert scribe.log[:2] == ["begin", "compute runs make/0"]


def test_two_schedules_share_events(device: Device) -> None:
    program = record_toy()
    programs = [program] * 2
    events = EventTable(device)
    schedule = lower(programs, alternate(programs))
    Executor(schedule, device, events)
    assert len(events) == sum(instruction.records for instruction in schedule.instructions)
    Executor(schedule, device, events)
    assert len(events) == sum(instruction.records for instruction in schedule.instructions)


def test_the_event_table_has_one_event_for_each_layer_micro_batch_and_op(device: Device) -> None:
    programs = [record_toy(layers=2)] * 2
    events = EventTable(device)
    instructions = lower(programs, alternate(programs)).instructions
    found = [events.get(instruction) for instruction in instructions]
    assert len({id(event) for event in found}) == len(events) == len(instructions)
    assert all(events.get(instruction) is event for instruction, event in zip(instructions, found, strict=True))


@pytest.mark.parametrize("declare", [ProgramBuilder.compute, ProgramBuilder.comm])
def test_an_ops_failure_keeps_its_type_and_says_where(
    prepare: Prepare, device: Device, declare: Callable[..., Any]
) -> None:
    failing = FailingOp()
    p = ProgramBuilder()
    x = p.input("x")
    x = p.comm("fetch", lambda x: x, x)
    with p.layer(7):
        x = declare(p, "norm", failing, x)
        line = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]  # CPython has frames
    x = p.comm("send", lambda x: x, x)
    executor = prepare(device, p.build(p.compute("last", lambda x: x, x)))

    failing.trigger = 20
    with pytest.raises(FloatingPointError, match="not a number") as raised:
        executor.run([(10,), (20,)])
    (note,) = raised.value.__notes__
    lane = COMPUTE if declare is ProgramBuilder.compute else COMM
    assert note == f"while running op 'norm', layer 7, micro-batch 1, lane '{lane}', declared at {__file__}:{line}"

    failing.trigger = None
    assert executor.run([(10,), (20,)]) == [(11,), (21,)]


def test_a_failure_outside_any_layer_says_so(prepare: Prepare, device: Device) -> None:
    failing = FailingOp()
    failing.trigger = 0
    with pytest.raises(FloatingPointError) as raised:
        prepare(device, record_chain(failing, lambda x: x), micro_batches=1).run([(0,)])
    assert "op 'send', outside any layer, micro-batch 0" in raised.value.__notes__[0]


def test_no_op_runs_any_more_when_a_failure_surfaces(prepare: Prepare, device: Device) -> None:
    """The failing compute op leaves a comm op running, which takes its time: run() must not return before it ends."""
    running: set[str] = set()
    sending, never = Latch(), Latch()

    def send(x: int) -> int:
        running.add("send")
        sending.release()
        never.pass_after_grace()
        running.discard("send")
        return x

    def fail(x: int) -> int:
        sending.pass_when_released()
        raise FloatingPointError

    p = ProgramBuilder()
    x = p.input("x")
    sent = p.comm("send", send, x)
    failed = p.compute("fail", fail, x)
    executor = prepare(device, p.build(p.compute("merge", lambda a, b: a + b, sent, failed)), micro_batches=1)
    with pytest.raises(FloatingPointError):
        executor.run([(0,)])
    assert running == set()


def test_a_failure_in_entering_a_micro_batch_surfaces_as_it_is(prepare: Prepare, device: Device) -> None:
    def enter(micro_batch: int) -> None:
        if micro_batch == 1:
            raise FloatingPointError

    executor = prepare(device, record_toy())
    with pytest.raises(FloatingPointError):
        executor.run([(0, 0), (1, 1)], enter)
    executor.run([(0, 0), (1, 1)])


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ((1, 2, 3), "it returned 3 values, but is declared to write 2"),
        ((), "it returned 0 values, but is declared to write 2"),
        (5, "it returned one int, but is declared to write 2 values"),
        (None, "it returned one NoneType, but is declared to write 2 values"),
        ("ab", "it returned one str, but is declared to write 2 values"),
    ],
)
def test_a_wrong_number_of_results_is_refused(prepare: Prepare, device: Device, result: object, message: str) -> None:
    p = ProgramBuilder()
    first, _ = p.compute("norm", lambda: result, outputs=2)
    program = p.build(first)
    with pytest.raises(ProgramError, match=message) as raised:
        prepare(device, program).run([(), ()])
    assert "op 'norm'" in raised.value.__notes__[0]
    with pytest.raises(ProgramError, match=message):
        run_sequential([program], [()])


def test_the_result_of_an_op_that_writes_nothing_is_ignored(prepare: Prepare, device: Device) -> None:
    p = ProgramBuilder()
    p.compute("log", lambda: "something", outputs=0)
    assert prepare(device, p.build(p.compute("work", lambda: 1))).run([(), ()]) == [(1,), (1,)]


def test_a_tuple_is_one_value_where_one_is_declared(prepare: Prepare, device: Device) -> None:
    p = ProgramBuilder()
    pair = p.comm("pair", lambda: (1, 2))
    assert prepare(device, p.build(pair)).run([(), ()]) == [((1, 2),), ((1, 2),)]


@pytest.mark.parametrize("inputs", [[(1,)], [(1,), (2,), (3,)], [(1,), ()], [(1,), (2, 3)]])
def test_inputs_that_do_not_fit_the_programs_are_refused(
    prepare: Prepare, device: Device, inputs: list[tuple[int, ...]]
) -> None:
    executor = prepare(device, record_chain(lambda x: x, lambda x: x))
    with pytest.raises(ValueError, match=r"zip\(\)"):
        executor.run(inputs)
    assert executor.run([(1,), (2,)]) == [(1,), (2,)]


def test_a_micro_batch_is_entered_before_its_ops_whenever_it_changes(prepare: Prepare) -> None:
    log: list[str] = []
    p = ProgramBuilder()
    x = p.input("x")
    x = p.compute("first", lambda x: log.append(f"first/{x}") or x, x)
    x = p.comm("send", lambda x: x, x)
    x = p.compute("second", lambda x: log.append(f"second/{x}") or x, x)
    device = open_device("cpu")
    prepare(device, p.build(x)).run([(0,), (1,)], lambda mb: log.append(f"enter {mb}"))
    device.close()
    assert log == ["enter 0", "first/0", "enter 1", "first/1", "enter 0", "second/0", "enter 1", "second/1"]


def test_micro_batches_are_entered_on_the_thread_that_runs_the_schedule(prepare: Prepare, device: Device) -> None:
    threads: list[threading.Thread] = []
    prepare(device, record_toy()).run([(0, 0), (1, 1)], lambda mb: threads.append(threading.current_thread()))
    assert set(threads) == {threading.current_thread()}


class Notes:
    """An instrument that keeps everything."""

    def __init__(self) -> None:
        self.spans: dict[str, tuple[SupportsFloat, SupportsFloat]] = {}

    def observe(self, instruction: Instruction, issued: float, start: SupportsFloat, end: SupportsFloat) -> None:
        assert instruction.label not in self.spans
        self.spans[instruction.label] = start, end


def test_the_instrument_is_told_of_each_instruction_once_and_intervals_follow_the_waits(
    prepare: Prepare, device: Device
) -> None:
    notes = Notes()
    executor = prepare(device, record_three_lanes(3))
    executor.run([([1],), ([2],)], instrument=notes)
    instructions = executor.schedule.instructions
    label = {instruction.issue: instruction.label for instruction in instructions}
    spans = {label: (float(start), float(end)) for label, (start, end) in notes.spans.items()}
    latest: dict[str, str] = {}
    for instruction in instructions:
        start, end = spans[instruction.label]
        assert start <= end
        before = [label[issue] for issue in instruction.waits]
        before += [latest[instruction.op.lane]] if instruction.op.lane in latest else []
        assert all(spans[other][1] <= start for other in before)
        latest[instruction.op.lane] = instruction.label
    assert len(spans) == len(instructions)


def test_a_freed_value_is_gone_by_the_instruction_that_frees_it(prepare: Prepare, device: Device) -> None:
    made: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []

    def make() -> Tensor:
        tensor = Tensor()
        made.append(weakref.ref(tensor))
        return tensor

    p = ProgramBuilder()
    x = p.comm("send", lambda x: 1, p.compute("make", make))
    program = p.build(p.compute("receive", lambda x: alive.append(made[-1]() is not None), x))
    executor = prepare(device, program, micro_batches=1)
    assert executor.schedule.instructions[2].frees
    executor.run([()])
    assert alive == [False]


def test_nothing_keeps_values_alive_after_a_run_or_a_failed_run(prepare: Prepare, device: Device) -> None:
    made: list[weakref.ref[Tensor]] = []
    failing = FailingOp()

    def make(*_: Any) -> Tensor:
        tensor = Tensor()
        made.append(weakref.ref(tensor))
        return tensor

    p = ProgramBuilder()
    x, number = p.input("x"), p.input("number")
    for index in range(3):
        with p.layer(index):
            x = p.compute("work", make, x)
            x = p.comm("send", make, x)
            p.op("log", make, x, lane="aux")
    number = p.comm("fail", failing, number)
    executor = prepare(device, p.build(x, number))

    executor.run([(make(), 10), (make(), 20)])
    assert len(made) == 2 * 9 + 2
    assert [tensor() for tensor in made if tensor() is not None] == []

    failing.trigger = 20
    made.clear()
    with pytest.raises(FloatingPointError):
        executor.run([(make(), 10), (make(), 20)])
    assert [tensor() for tensor in made if tensor() is not None] == []


def test_an_executor_of_a_closed_device_refuses_to_run(prepare: Prepare) -> None:
    device = open_device("cpu")
    executor = prepare(device, record_toy())
    device.close()
    with pytest.raises(DeviceError, match="lane 'comm' is closed"):
        executor.run([(0, 0), (1, 1)])
