"""What profilers show of a run: a range for each op, on the thread that issues it, and nothing where none is on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from dbo_runtime.batch import Batch
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.devices import Device, open_device
from dbo_runtime.engine.execution_plan import ExecutionPlan
from dbo_runtime.engine.executor import Executor
from dbo_runtime.engine.generated_executor import GeneratedExecutor
from dbo_runtime.engine.runtime import MicroBatchRuntime
from dbo_runtime.errors import ProgramError, get_context
from dbo_runtime.ir.program import Program, ProgramBuilder
from dbo_runtime.lab.sanitizer.executor import SanitizedExecutor
from dbo_runtime.observe.ranges import is_step, name_ops, read_op
from dbo_runtime.observe.timeline import Recorder
from tests.support.executors import EXECUTORS, Prepare, make_prepare
from tests.support.programs import lower_toy, record_toy
from tests.support.quiet_log import Log

torch = pytest.importorskip("torch")

from dbo_runtime.devices.npu import find_marks  # noqa: E402 - it needs torch
from dbo_runtime.devices.ranges import MarkedRange, Marks, find_ranges  # noqa: E402 - so does this
from dbo_runtime.devices.torch_streams import StreamDevice  # noqa: E402 - and this

ALL_THREADS = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)


@pytest.fixture
def cpu() -> Iterator[Device]:
    device = open_device("cpu")
    yield device
    device.close()


@pytest.fixture(params=[*EXECUTORS, SanitizedExecutor])
def prepare_any(request: pytest.FixtureRequest) -> Prepare:
    return make_prepare(request.param)


def record_tensors() -> Program:
    """Return a program whose ops make tensors, on two lanes, in two layers."""
    p = ProgramBuilder()
    x = p.input("x")
    for layer in range(2):
        with p.layer(layer):
            x = p.comm("reduce", torch.neg, p.compute("mlp", torch.abs, x))
    return p.build(p.compute("final_norm", torch.exp, x))


def profile(run: Any, **options: Any) -> list[Any]:
    """Return the annotations that torch's profiler shows of a call, by start."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=ALL_THREADS, **options
    ) as profiler:
        run()
    events = [event for event in profiler.events() if event.name.startswith("dbo: ")]
    return sorted(events, key=lambda event: event.time_range.start)


class Journal:
    """Opens ranges, and notes by which threads."""

    def __init__(self) -> None:
        self.opened: list[tuple[str, str]] = []
        self.open: set[str] = set()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.opened.append((name, threading.current_thread().name))
        self.open.add(name)
        try:
            yield
        finally:
            self.open.remove(name)


def test_the_name_of_an_op_says_layer_op_micro_batch_lane_number_and_what_it_waits_for() -> None:
    names = name_ops(lower_toy())
    assert names[0] == "dbo: layer 0 attn_norm mb 0 on compute #0"
    assert names[2] == "dbo: layer 0 attn_reduce mb 0 on comm #2 after #1"
    assert names[-1] == "dbo: final_norm mb 1 on compute #25 after #23"


def test_names_are_read_as_they_were_written() -> None:
    schedule = lower_toy()
    numbers = {instruction.issue: number for number, instruction in enumerate(schedule.instructions)}
    for instruction, name in zip(schedule.instructions, name_ops(schedule), strict=True):
        found = read_op(name)
        assert found is not None
        assert f"{found.label}/{found.micro_batch}" == instruction.label
        assert found.lane == instruction.op.lane
        assert found.number == numbers[instruction.issue]
        assert found.waits == tuple(numbers[issue] for issue in instruction.waits)


@pytest.mark.parametrize(
    "name", ["", "dbo: ", "aten::mm", "dbo: a mb 0 on compute", "dbo: a mb x on compute #1", "dbo: replay"]
)
def test_other_names_are_none_of_ops(name: str) -> None:
    assert read_op(name) is None
    assert not is_step(name)


def test_each_op_is_shown_once_on_the_thread_of_its_lane(prepare: Prepare, cpu: Device) -> None:
    executor = prepare(cpu, record_tensors())
    x = torch.ones(2)
    events = profile(lambda: executor.run([(x,), (x,)], open_range=cpu.find_ranges()))
    assert sorted(event.name for event in events) == sorted(name_ops(executor.schedule))
    threads = {lane: {e.thread for e in events if f" on {lane} #" in e.name} for lane in ("compute", "comm")}
    assert [len(found) for found in threads.values()] == [1, 1]
    assert threads["compute"] != threads["comm"]


def test_what_an_op_calls_is_inside_its_range(prepare: Prepare, cpu: Device) -> None:
    executor = prepare(cpu, record_tensors())
    x = torch.ones(2)
    events = profile(lambda: executor.run([(x,), (x,)], open_range=cpu.find_ranges()))
    called = {"mlp": "aten::abs", "reduce": "aten::neg", "final_norm": "aten::exp"}
    for event in events:
        found = read_op(event.name)
        assert found is not None
        assert [child.name for child in event.cpu_children] == [called[found.label.rpartition(".")[2]]]


def test_the_ranges_are_opened_on_the_lanes_threads_and_closed(prepare_any: Prepare, cpu: Device) -> None:
    executor, journal = prepare_any(cpu, record_toy()), Journal()
    executor.run([(0, 0), (0, 0)], open_range=journal)
    assert sorted(name for name, _ in journal.opened) == sorted(name_ops(executor.schedule))
    assert not journal.open
    if not isinstance(executor, SanitizedExecutor):  # which runs all on the first lane
        assert {thread for name, thread in journal.opened if " on comm #" in name} == {"dbo-comm"}


def test_a_range_ends_with_an_error_that_stays_as_it_is(prepare: Prepare, cpu: Device) -> None:
    def fail(x: int) -> int:
        raise FloatingPointError("not a number")

    p = ProgramBuilder()
    executor, journal = prepare(cpu, p.build(p.comm("send", fail, p.input("x")))), Journal()
    with pytest.raises(FloatingPointError, match="not a number") as caught:
        executor.run([(1,), (1,)], open_range=journal)
    assert "op 'send', outside any layer, micro-batch 0" in get_context(caught.value)
    assert not journal.open


def test_recorded_steps_have_ranges_too(prepare: Prepare, cpu: Device) -> None:
    executor, journal, recorder = prepare(cpu, record_toy()), Journal(), Recorder()
    executor.run([(0, 0), (0, 0)], instrument=recorder, open_range=journal)
    assert len(recorder.timeline().spans) == len(journal.opened) == len(executor.schedule.instructions)


def test_results_are_the_same_with_ranges(prepare: Prepare, cpu: Device) -> None:
    one, other = (prepare(cpu, record_toy()) for _ in range(2))  # each has a KV cache
    assert one.run([(1, 2), (3, 4)], open_range=Journal()) == other.run([(1, 2), (3, 4)])


def test_without_a_profiler_there_are_no_ranges_and_the_function_stays_the_same(
    cpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cpu.find_ranges() is None
    assert open_device("virtual").find_ranges("on") is None
    executor = make_prepare(GeneratedExecutor)(cpu, record_tensors())
    assert isinstance(executor, GeneratedExecutor)
    before, x = executor.write_source(), torch.ones(2)
    profile(lambda: executor.run([(x,), (x,)], open_range=cpu.find_ranges()))
    assert executor.write_source() == before
    assert "range" not in before.text
    monkeypatch.setattr(Executor, "_issue", None)  # the plain loop
    executor.run([(x,), (x,)], open_range=cpu.find_ranges())


@pytest.mark.parametrize(("wanted", "off", "on"), [("auto", False, True), ("on", True, True), ("off", False, False)])
def test_the_setting_says_when_there_are_ranges(wanted: Any, off: bool, on: bool, cpu: Device) -> None:
    assert (cpu.find_ranges(wanted) is not None) is off
    found: list[Any] = []
    profile(lambda: found.append(cpu.find_ranges(wanted)))
    assert (found[0] is not None) is on


def test_a_runtime_shows_its_steps_around_their_ops(cpu: Device) -> None:
    runtime = MicroBatchRuntime(record_tensors(), cpu, RuntimeConfig(mode="always"), Log())  # type: ignore[arg-type]
    plan = runtime.plan(Batch((3, 5), 8))
    assert isinstance(plan, ExecutionPlan)
    inputs = [(torch.ones(piece.size),) for piece in plan.slices]
    step, *ops = profile(lambda: runtime.run(plan, inputs))
    assert step.name == f"dbo: step of 5+3 tokens, schedule {plan.digest}"
    assert is_step(step.name)
    assert len(ops) == len(plan.executor.schedule.instructions)
    assert all(step.time_range.start <= op.time_range.start <= op.time_range.end <= step.time_range.end for op in ops)
    runtime.config = RuntimeConfig(mode="always", ranges="off")
    assert profile(lambda: runtime.run(plan, inputs)) == []


def test_a_devices_own_marks_are_inside_the_range_of_torch() -> None:
    calls: list[Any] = []

    def start(name: str) -> int:
        calls.append(name)
        return 7

    marks = Marks(start, calls.append)
    found = find_ranges("on", marks)
    assert found is not None
    with pytest.raises(ProgramError), found("dbo: replay"):
        raise ProgramError("x")
    assert calls == ["dbo: replay", 7]
    (event,) = profile(lambda: MarkedRange("dbo: replay", marks).__enter__())
    assert event.name == "dbo: replay"


def test_marks_are_made_on_the_stream_of_the_lane() -> None:
    calls: list[Any] = []
    streams = count()
    backend = SimpleNamespace(current=None)
    backend.Stream = lambda: SimpleNamespace(stream_id=next(streams), wait_event=lambda event: None)
    backend.Event = lambda: SimpleNamespace(record=lambda stream: None)
    backend.current = first = backend.Stream()
    backend.current_stream = lambda: backend.current
    backend.set_stream = lambda stream: setattr(backend, "current", stream)
    backend.is_current_stream_capturing = lambda: False
    backend.mstx = SimpleNamespace(
        range_start=lambda name, stream: calls.append((name, stream.stream_id)) or len(calls),
        range_end=lambda number: calls.append(number),
    )
    device: Any = StreamDevice("npu", backend, find_marks(backend))  # type: ignore[arg-type]
    executor = make_prepare(GeneratedExecutor)(device, record_tensors())
    ranges = device.find_ranges("on")
    assert calls == [("dbo: the first range", first.stream_id), 1]  # which tries whether marks can be made
    calls.clear()
    assert device.find_ranges("on") is not None
    assert calls == []
    executor.run([(torch.ones(1),), (torch.ones(1),)], open_range=ranges)
    started, ended = calls[::2], calls[1::2]
    assert [name for name, _ in started] == name_ops(executor.schedule)
    assert ended == [*range(1, len(calls), 2)]
    assert {stream for name, stream in started if " on compute #" in name} == {first.stream_id}
    assert len({stream for _, stream in started}) == 2
    backend.is_current_stream_capturing = lambda: True
    assert device.find_ranges("on") is None


def test_a_device_whose_marks_fail_shows_ranges_of_torch_only(capsys: pytest.CaptureFixture[str]) -> None:
    """As a torch that is built without NVTX does; a step would fail with them."""

    def fail(name: str) -> None:
        raise RuntimeError("NVTX functions not installed")

    backend = SimpleNamespace(is_current_stream_capturing=lambda: False)
    device: Any = StreamDevice("cuda", backend, Marks(fail, fail))  # type: ignore[arg-type]
    assert device.find_ranges("auto") is None
    for _ in range(2):
        assert device.find_ranges("on") is torch.profiler.record_function
    assert capsys.readouterr().err.count("NVTX functions not installed") == 1


def test_a_torch_npu_without_mstx_has_no_marks() -> None:
    assert find_marks(SimpleNamespace()) is None  # type: ignore[arg-type]
    assert find_marks(SimpleNamespace(mstx=SimpleNamespace())) is None  # type: ignore[arg-type]
