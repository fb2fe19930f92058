"""What becomes of steps where graphs can be had, and where not: on the CPU, and on one that repeats what it ran."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dbo_runtime.batch import Batch
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.devices import open_device
from dbo_runtime.devices.cpu import CpuDevice
from dbo_runtime.devices.serial import SerialDevice
from dbo_runtime.errors import ConfigError, DeviceError
from dbo_runtime.events import EventTable
from dbo_runtime.execution_plan import ExecutionPlan
from dbo_runtime.executor import Executor, run_sequential
from dbo_runtime.graphs import Graphs
from dbo_runtime.lowering import lower
from dbo_runtime.observe.timeline import Recorder
from dbo_runtime.policies import alternate
from dbo_runtime.program import Program, ProgramBuilder
from dbo_runtime.runtime import MicroBatchRuntime
from tests.graph_logs import Log
from tests.programs import record_toy

torch = pytest.importorskip("torch")

BUCKETS = (4, 8)


class Repetition:
    """A run that is done again, and writes its results where the first one did."""

    def __init__(self, device: RepeatingDevice, run: Callable[[], Any], results: Any) -> None:
        self._device, self._run, self._results = device, run, results
        self.is_reset = False

    def replay(self) -> None:
        assert not self.is_reset
        assert self._device.is_running
        self._device.is_busy = True
        self._device.replays += 1
        self._device.before_replay()
        for olds, news in zip(self._results, self._run(), strict=True):
            for old, new in zip(olds, news, strict=True):
                if old is not None:
                    old.copy_(new + self._device.off)

    def reset(self) -> None:
        assert not self._device.is_busy, "it may still use the memory"
        self.is_reset = True


class RepeatingDevice(CpuDevice):
    """The CPU, as if it had graphs."""

    can_capture = True

    def __init__(self) -> None:
        super().__init__()
        self.graphs: list[Repetition] = []
        self.shared_with: list[Any] = []
        self.is_capturing = False
        self.is_running = False
        self.is_busy = False
        self.replays = 0
        self.off = 0.0
        self.before_replay: Callable[[], Any] = lambda: None

    def begin(self) -> None:
        self.is_running = True
        super().begin()

    def finish(self) -> None:
        self.is_running = False
        super().finish()

    def abort(self) -> None:
        self.is_running = False
        super().abort()

    def synchronize(self) -> None:
        self.is_busy = False
        super().synchronize()

    def capture(self, run: Any, shared_with: Any = None) -> Any:
        self.shared_with.append(shared_with)
        run()
        self.is_capturing = True
        try:
            results = run()
        finally:
            self.is_capturing = False
        self.graphs.append(Repetition(self, run, results))
        return self.graphs[-1], results


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def device() -> Iterator[RepeatingDevice]:
    device = RepeatingDevice()
    yield device
    device.close()


def record(work: Callable[..., Any] = lambda x: x * 3, **declaration: Any) -> Program:
    p = ProgramBuilder()
    x = p.compute("make", lambda x: x + 1, p.input("x"))
    return p.build(p.compute("end", lambda x: x - 2, p.comm("work", work, x, **declaration)))


def prepare(device: Any, program: Program, micro_batches: int = 2) -> Executor:
    return Executor(lower([program] * micro_batches, alternate([program] * micro_batches)), device, EventTable(device))


def make_inputs(*counts: int, start: float = 0.0) -> list[tuple[Any]]:
    return [(torch.arange(count * 2.0).reshape(count, 2) + start,) for count in counts]


def read(outputs: Any) -> list[Any]:
    return [[tensor.tolist() for tensor in tensors] for tensors in outputs]


def check_step(graphs: Graphs, executor: Executor, inputs: Sequence[Any]) -> None:
    expected = read(run_sequential(executor.schedule.programs, inputs))
    assert read(graphs.run(executor, inputs)) == expected


def check_declines(graphs: Graphs, log: Log, reason: str, steps: int) -> str:
    """Check that all of so many steps ran eagerly, which was logged once; return the line's detail."""
    assert graphs.declined == {reason: steps}, log.lines
    (line,) = log.declines
    assert line["reason"] == reason
    detail: str = line["detail"]
    return detail


def test_a_device_without_graphs_runs_eagerly_and_says_so_once(log: Log) -> None:
    device = CpuDevice()
    graphs, executor = Graphs(device, log, BUCKETS), prepare(device, record())
    for step in range(10):
        check_step(graphs, executor, make_inputs(2 + step % 3, 3, start=step))
    assert check_declines(graphs, log, "the device captures no graphs", 10) == "cpu"
    assert graphs.captured == graphs.replayed == 0
    graphs.close()
    device.close()


@pytest.mark.parametrize("make", [CpuDevice, lambda: open_device("virtual"), lambda: SerialDevice(CpuDevice())])
def test_devices_without_graphs_say_so(make: Callable[[], Any]) -> None:
    device = make()
    assert not device.can_capture
    with pytest.raises(DeviceError, match=f"device '{device.name}' cannot capture graphs: run the schedule eagerly"):
        device.capture(lambda: None)


def test_a_shape_is_captured_at_its_first_step_and_replayed_after_that(device: RepeatingDevice, log: Log) -> None:
    graphs, executor = Graphs(device, log, BUCKETS), prepare(device, record())
    for step in range(5):
        check_step(graphs, executor, make_inputs(3, 8, start=step))
    assert (graphs.captured, graphs.replayed, graphs.declined) == (1, 4, {})
    assert [(line["event"], line["buckets"]) for line in log.lines] == [("graph captured", [4, 8])]


def test_all_token_counts_of_a_bucket_share_a_graph(device: RepeatingDevice, log: Log) -> None:
    graphs, executor = Graphs(device, log, BUCKETS), prepare(device, record())
    for first in range(1, 9):
        for second in range(1, 9):
            check_step(graphs, executor, make_inputs(first, second, start=first))
    assert (graphs.captured, graphs.replayed) == (4, 60)
    assert [line["buckets"] for line in log.lines] == [[4, 4], [4, 8], [8, 4], [8, 8]]


def test_graphs_are_captured_in_the_memory_of_the_newest(device: RepeatingDevice, log: Log) -> None:
    graphs, executor = Graphs(device, log, BUCKETS), prepare(device, record(), 1)
    for count in (2, 6):
        check_step(graphs, executor, make_inputs(count))
    assert device.shared_with == [None, device.graphs[0]]


def test_shapes_outside_every_bucket_run_eagerly_and_it_is_logged_once(device: RepeatingDevice, log: Log) -> None:
    graphs, executor = Graphs(device, log, BUCKETS), prepare(device, record())
    for count in (9, 10, 1000):
        check_step(graphs, executor, make_inputs(3, count))
    assert check_declines(graphs, log, "no bucket holds so many tokens", 3) == "the largest is of 8"
    assert device.graphs == []


@pytest.mark.parametrize("buckets", [(), (0, 4), (8, 4), (4, 4)])
def test_buckets_that_are_none_are_refused(device: RepeatingDevice, log: Log, buckets: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="no ascending token counts: give some from 1 up"):
        Graphs(device, log, buckets)


def test_rows_of_padding_are_zeros_whatever_earlier_steps_have_left(device: RepeatingDevice, log: Log) -> None:
    seen: list[Any] = []

    def work(x: Any) -> Any:
        seen.append(x.clone())
        return x.mul_(7)

    p = ProgramBuilder()
    x = p.input("x")
    executor = prepare(device, p.build(p.comm("work", work, x, overwrites=(x,))), 1)
    graphs = Graphs(device, log, (8,))
    for count in (8, 3, 5, 1):
        graphs.run(executor, [(torch.ones(count, 2),)])
    assert graphs.replayed == 3
    assert [int(rows.sum()) for rows in seen[-3:]] == [2 * 3, 2 * 5, 2 * 1]


def test_a_replay_overwrites_an_input_in_the_graphs_memory_only(device: RepeatingDevice, log: Log) -> None:
    p = ProgramBuilder()
    x = p.input("x")
    executor = prepare(device, p.build(p.comm("work", lambda x: x.mul_(2), x, overwrites=(x,))), 1)
    graphs = Graphs(device, log, BUCKETS)
    for start in range(3):
        ((given,),) = inputs = make_inputs(3, start=start)
        before = given.clone()
        ((result,),) = graphs.run(executor, inputs)
        assert torch.equal(result, before * 2)
        assert torch.equal(given, before if start else before * 2)
    assert graphs.replayed == 2


def test_inputs_that_are_no_tokens_are_copied_as_they_are(device: RepeatingDevice, log: Log) -> None:
    p = ProgramBuilder()
    x, scale, none, table = (p.input(name) for name in ("x", "scale", "none", "table"))
    work = p.comm("work", lambda x, scale, none, table: x * scale + table.sum(), x, scale, none, table)
    program = p.build(work, table)
    graphs, executor = Graphs(device, log, BUCKETS), prepare(device, program, 1)
    for step in range(4):
        inputs = [(torch.ones(1 + step % 2, 2), torch.tensor(2.0 + step), None, torch.full((5, 2), float(step)))]
        check_step(graphs, executor, inputs)
    assert (graphs.captured, graphs.replayed) == (1, 3)


@pytest.mark.parametrize(
    ("value", "kind"), [(3, "a int"), ([1], "a list"), (torch.ones(2, 2, device="meta"), "on meta")]
)
def test_inputs_that_cannot_be_held_run_eagerly(device: RepeatingDevice, log: Log, value: Any, kind: str) -> None:
    p = ProgramBuilder()
    x, other = p.input("x"), p.input("other")
    executor = prepare(device, p.build(p.compute("work", lambda x, other: x + 1, x, other)), 1)
    graphs = Graphs(device, log, BUCKETS)
    for _ in range(2):
        assert read(graphs.run(executor, [(torch.zeros(2), value)])) == [[[1.0, 1.0]]]
    assert check_declines(graphs, log, "an input is no tensor of the device", 2) == f"1 of micro-batch 0, {kind}"


def test_results_that_are_no_tensors_run_eagerly(device: RepeatingDevice, log: Log) -> None:
    graphs = Graphs(device, log, BUCKETS)
    p = ProgramBuilder()
    executor = prepare(device, p.build(p.compute("count", lambda x: [len(x)], p.input("x"))), 1)
    for _ in range(2):
        assert graphs.run(executor, make_inputs(3)) == [([3],)]
    assert "a result is a list: only tensors" in check_declines(graphs, log, "the capture failed", 2)


def test_a_micro_batch_may_have_no_tensors(device: RepeatingDevice, log: Log) -> None:
    p = ProgramBuilder()
    executor = prepare(device, p.build(p.compute("nothing", lambda x: None, p.input("x"))), 1)
    graphs = Graphs(device, log, BUCKETS)
    for _ in range(2):
        assert graphs.run(executor, [(None,)]) == [(None,)]
    assert (graphs.captured, graphs.replayed) == (1, 1)


def test_an_unjoined_lane_is_refused_by_name_before_it_is_captured(device: RepeatingDevice, log: Log) -> None:
    p = ProgramBuilder()
    schedule = prepare(device, p.build(p.op("send", lambda x: x + 1, p.input("x"), lane="side"))).schedule
    assert schedule.joins
    executor = Executor(replace(schedule, joins=()), device, EventTable(device))
    graphs = Graphs(device, log, BUCKETS)
    for _ in range(3):
        graphs.run(executor, make_inputs(2, 2))
        device.synchronize()
    detail = check_declines(graphs, log, "the schedule cannot be captured", 3)
    assert "lane 'side' never returns to 'compute'" in detail
    assert device.graphs == device.shared_with == []


def test_an_op_that_blocks_the_host_is_refused_by_name_before_it_is_captured(device: RepeatingDevice, log: Log) -> None:
    graphs, executor = Graphs(device, log, BUCKETS), prepare(device, record(host_sync=True))
    for _ in range(3):
        check_step(graphs, executor, make_inputs(2, 2))
    detail = check_declines(graphs, log, "the schedule cannot be captured", 3)
    assert re.search(r"rule 8, instruction \d+: work/0 blocks the host.*test_graphs.py:\d+", detail)
    assert device.graphs == device.shared_with == []


def test_a_recorded_step_runs_eagerly(device: RepeatingDevice, log: Log) -> None:
    graphs, executor = Graphs(device, log, BUCKETS), prepare(device, record())
    for _ in range(2):
        recorder = Recorder()
        graphs.run(executor, make_inputs(2, 2), instrument=recorder)
        assert len(recorder.timeline().spans) == 6
    check_declines(graphs, log, "the step is recorded", 2)


def test_what_an_op_raises_eagerly_is_raised_and_the_next_step_is_captured(device: RepeatingDevice, log: Log) -> None:
    fails = [True]

    def work(x: Any) -> Any:
        if fails[0]:
            raise FloatingPointError("not a number")
        return x * 2

    graphs, executor = Graphs(device, log, BUCKETS), prepare(device, record(work))
    for _ in range(2):
        with pytest.raises(FloatingPointError):
            graphs.run(executor, make_inputs(2, 2))
    fails[0] = False
    for _ in range(2):
        check_step(graphs, executor, make_inputs(2, 2))
    assert (graphs.captured, graphs.replayed, graphs.declined) == (1, 1, {})


def test_a_capture_that_fails_is_told_with_the_op_and_not_tried_again(device: RepeatingDevice, log: Log) -> None:
    calls: list[bool] = []

    def work(x: Any) -> Any:
        calls.append(device.is_capturing)
        if device.is_capturing:
            raise FloatingPointError("not\na number")
        return x * 2

    graphs = Graphs(device, log, BUCKETS)
    good, bad = prepare(device, record()), prepare(device, record(work))
    check_step(graphs, good, make_inputs(2, 2))
    for _ in range(3):
        check_step(graphs, bad, make_inputs(2, 2))
    detail = check_declines(graphs, log, "the capture failed", 3)
    assert detail.startswith("FloatingPointError: not, while running op 'work'")
    assert calls.count(True) == 1
    check_step(graphs, good, make_inputs(2, 6))
    assert device.shared_with[-1] is None  # nothing is shared with what the failure may have spoiled
    assert (graphs.captured, graphs.replayed) == (2, 0)


def test_a_graph_that_gives_other_results_is_not_used(device: RepeatingDevice, log: Log) -> None:
    graphs, executor = Graphs(device, log, BUCKETS), prepare(device, record())
    device.off = 1e-6
    inputs = [(torch.rand(3, 2),)] * 2
    for _ in range(3):
        check_step(graphs, executor, inputs)
    check_declines(graphs, log, "a replay gives other results", 3)
    assert [graph.is_reset for graph in device.graphs] == [True]
    assert device.replays == 1


@pytest.mark.parametrize("far", [1.0, 1e-5])
def test_results_that_padding_changes_are_used_only_within_the_tolerance(
    device: RepeatingDevice, log: Log, far: float
) -> None:
    executor = prepare(device, record(lambda x: x * (1 + far * len(x))), 1)
    strict, tolerant = (Graphs(device, log, (8,), tolerance=tolerance) for tolerance in (0.0, 1e-3))
    inputs = [(torch.rand(3, 2),)]
    for graphs in (strict, tolerant):
        graphs.run(executor, inputs)
    assert strict.declined == {"padding changes results": 1}
    assert tolerant.captured == (far < 1)


def test_no_numbers_are_equal_to_no_numbers(device: RepeatingDevice, log: Log) -> None:
    graphs, executor = Graphs(device, log, BUCKETS), prepare(device, record(lambda x: x / 0), 1)
    for _ in range(2):
        graphs.run(executor, make_inputs(4))
    assert (graphs.captured, graphs.replayed) == (1, 1)


def test_a_replay_that_fails_becomes_an_eager_step(device: RepeatingDevice, log: Log) -> None:
    graphs, executor = Graphs(device, log, BUCKETS), prepare(device, record())
    check_step(graphs, executor, make_inputs(2, 2))

    def fail() -> None:
        raise RuntimeError("out of memory")

    device.before_replay = fail
    for start in range(3):
        check_step(graphs, executor, make_inputs(2, 2, start=start))
    assert check_declines(graphs, log, "a replay failed", 3) == "RuntimeError: out of memory"
    assert device.graphs[0].is_reset
    device.before_replay = lambda: None
    check_step(graphs, executor, make_inputs(2, 5))
    assert device.shared_with[-1] is None


def test_shapes_without_end_are_not_all_captured(device: RepeatingDevice, log: Log) -> None:
    graphs, executor = Graphs(device, log, BUCKETS, max_shapes=3), prepare(device, record(), 1)
    for _ in range(2):
        for width in range(1, 6):
            graphs.run(executor, [(torch.ones(2, width),)])
    assert (graphs.captured, graphs.replayed) == (3, 3)
    assert check_declines(graphs, log, "too many shapes", 4) == "3 were tried"


def test_the_micro_batch_is_entered_where_ops_run_and_not_for_a_replay(device: RepeatingDevice, log: Log) -> None:
    entered: list[int] = []
    graphs, executor = Graphs(device, log, BUCKETS), prepare(device, record())
    device.before_replay = lambda: entered.append(-1)
    graphs.run(executor, make_inputs(2, 2), entered.append)
    assert entered[0] == 0
    del entered[:]
    graphs.run(executor, make_inputs(2, 2), entered.append)
    assert entered[0] == -1


def test_closing_ends_the_graphs_and_steps_that_come_are_captured_anew(device: RepeatingDevice, log: Log) -> None:
    graphs, executor = Graphs(device, log, BUCKETS), prepare(device, record())
    for _ in range(2):
        check_step(graphs, executor, make_inputs(2, 2))
        check_step(graphs, executor, make_inputs(2, 2))
        graphs.close()
    assert [graph.is_reset for graph in device.graphs] == [True, True]
    assert (graphs.captured, graphs.replayed) == (2, 2)


def test_a_runtimes_plan_is_run_by_graphs_and_eagerly_where_there_are_none(log: Log) -> None:
    """The CPU captures no graphs: one line says so, and results are those of eager steps."""
    device, config = CpuDevice(), RuntimeConfig(enabled=True, mode="always")
    graphs = Graphs(device, log, BUCKETS)
    for _ in range(2):
        runtime = MicroBatchRuntime(record_toy(), device, config, log)
        plan = runtime.plan(Batch((600, 424), 1024))
        assert isinstance(plan, ExecutionPlan)
        expected = run_sequential([record_toy()] * 2, [(1, 2), (3, 4)])
        assert graphs.run(plan.executor, [(1, 2), (3, 4)]) == expected
    assert graphs.declined == {"the device captures no graphs": 2}
    assert [line["reason"] for line in log.lines if line["event"] == "step not replayed, runs eagerly"] == [
        "the device captures no graphs"
    ]


def test_the_page_on_devices_has_every_reason() -> None:
    root = Path(__file__).parents[1]
    code, page = ((root / path).read_text() for path in ("dbo_runtime/graphs.py", "docs/devices.md"))
    reasons = re.findall(r'[dD]ecline(?:\(| = )\s*"([^"]+)"', code)
    assert len(reasons) == 11
    assert [reason for reason in reasons if f"`{reason}`" not in page] == []
