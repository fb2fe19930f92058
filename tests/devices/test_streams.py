"""What is particular to streams: which are used, how often they are switched, and whose memory is whose."""

from __future__ import annotations

import gc
import time
from itertools import pairwise
from typing import Any

import pytest

from dbo_runtime.engine.executor import Executor, run_sequential
from dbo_runtime.errors import DeviceError, get_context
from dbo_runtime.ir.program import Program, ProgramBuilder
from dbo_runtime.observe.timeline import Recorder
from tests.support.devices import rigs
from tests.support.executors import Prepare
from tests.support.latch import GRACE

if not {*rigs.STREAMS} & {*rigs.find_present()}:
    pytest.skip("no device with streams is here; `make test-npu` has one", allow_module_level=True)

import torch

from dbo_runtime.devices.stream_lane import StreamLane
from dbo_runtime.devices.torch_streams import POOL_STREAMS, StreamDevice

NUMBERS = torch.arange(64)


@pytest.fixture
def rig(stream_rig: Any) -> Any:
    return stream_rig


@pytest.fixture
def device(rig: Any) -> StreamDevice:
    return rig.device


def record_layers(layers: int) -> Program:
    """Return layers of two compute ops and a comm op."""
    p = ProgramBuilder()
    x = p.input("x")
    for index in range(layers):
        with p.layer(index):
            x = p.compute("norm", lambda x: x + 1, x)
            x = p.compute("attention", lambda x: x * 3, x)
            x = p.comm("reduce", lambda x: x - 2, x)
    return p.build(x)


def make_inputs(device: StreamDevice | None, micro_batches: int = 2) -> list[tuple[torch.Tensor]]:
    name = "cpu" if device is None else device.name
    return [((NUMBERS + mb).to(name),) for mb in range(micro_batches)]


def assert_equal(outputs: Any, expected: Any) -> None:
    assert [[t.tolist() for t in tensors] for tensors in outputs] == [[t.tolist() for t in ts] for ts in expected]


def test_each_lane_has_a_stream_of_its_own(device: StreamDevice) -> None:
    """However many other streams are drawn from the same pool."""
    for name in ("comm", "aux", "extra", "more"):
        [device.backend.Stream() for _ in range(POOL_STREAMS - 1)]
        device.open_lanes(["compute", name])
    lanes = device.open_lanes(["compute", "comm", "aux", "extra", "more"])
    assert len({lane.stream.stream_id for lane in lanes}) == len(lanes)


def test_more_lanes_than_streams_are_refused(device: StreamDevice) -> None:
    with pytest.raises(DeviceError, match=rf"no stream left for lane 'l\d+': all {POOL_STREAMS} are in use"):
        device.open_lanes(["compute", *(f"l{number}" for number in range(POOL_STREAMS + 1))])


def test_streams_are_made_once(prepare: Prepare, device: StreamDevice) -> None:
    executor = prepare(device, record_layers(1))
    before = [lane.stream for lane in device.open_lanes(["compute", "comm"])]
    for _ in range(3):
        executor.run(make_inputs(device))
    assert [lane.stream for lane in device.open_lanes(["compute", "comm"])] == before


def test_the_compute_lane_is_the_stream_that_is_current_when_a_run_begins(
    prepare: Prepare, device: StreamDevice
) -> None:
    seen: list[Any] = []
    p = ProgramBuilder()
    x = p.compute("work", lambda x: seen.append(device.backend.current_stream()) or x + 1, p.input("x"))
    executor = prepare(device, p.build(p.comm("send", lambda x: x * 2, x)), micro_batches=1)
    default, other = device.backend.current_stream(), device.backend.Stream()
    for stream in (default, other, default, other):
        with device.backend.stream(stream):
            outputs = executor.run(make_inputs(device, 1))
            assert device.backend.current_stream() == stream
            assert_equal(outputs, [((NUMBERS + 1) * 2,)])
    assert seen == [default, other, default, other]


def test_an_op_that_fails_leaves_the_current_stream_as_it_was(prepare: Prepare, device: StreamDevice) -> None:
    def fail(x: Any) -> Any:
        raise FloatingPointError("not a number")

    p = ProgramBuilder()
    executor = prepare(device, p.build(p.comm("send", fail, p.input("x"))))
    before = device.backend.current_stream()
    with pytest.raises(FloatingPointError):
        executor.run(make_inputs(device))
    assert device.backend.current_stream() == before


def test_ops_in_a_row_on_a_lane_share_one_switch(prepare: Prepare, device: StreamDevice) -> None:
    executor = prepare(device, record_layers(6))
    executor.run(make_inputs(device))
    with rigs.count_switches(device) as switches:
        executor.run(make_inputs(device))
    lanes = ["compute", *(instruction.op.lane for instruction in executor.schedule.instructions)]
    changes = sum(one != other for one, other in pairwise(lanes))
    assert len(switches) == changes + 1  # and back to the first lane at the end, which is done in any case
    assert len(switches) < len(executor.schedule.instructions)


class Caller:
    """Runs a program whose result is made on the comm lane, and reads it on a stream that is held back."""

    def __init__(self, prepare: Prepare, rig: Any) -> None:
        self._rig = rig
        self._device: StreamDevice = rig.device
        self._latch = rig.make_latch()
        p = ProgramBuilder()
        x = p.compute("work", lambda x: x + 1, p.input("x"))
        self._executor = prepare(self._device, p.build(p.comm("send", lambda x: x * 2, x)), micro_batches=1)
        self._comm = self._device.open_lanes(["compute", "comm"])[1]

    def read_late(self) -> tuple[list[int], list[int]]:
        """Return what the caller reads of a result that it drops at once, and what it should read."""
        ((result,),) = self._executor.run(make_inputs(self._device, 1))
        self._device.synchronize()
        self._latch.hold([])
        seen = result + 0
        self._rig.drain()
        del result
        with self._device.backend.stream(self._comm.stream):
            thief = torch.full((64,), -1, device=self._device.name)  # the same size, on the lane that made the result
        self._comm.stream.synchronize()
        self._latch.release()
        self._device.synchronize()
        del thief
        return seen.tolist(), ((NUMBERS + 1) * 2).tolist()


def test_a_caller_may_drop_a_result_before_it_has_been_read(prepare: Prepare, rig: Any) -> None:
    seen, expected = Caller(prepare, rig).read_late()
    assert seen == expected


def test_without_handing_over_its_memory_would_be_taken(
    prepare: Prepare, rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the test above can fail."""
    monkeypatch.setattr(StreamDevice, "release_to_caller", lambda self, values: None)
    seen, expected = Caller(prepare, rig).read_late()
    assert seen != expected


def read_after_another_stream(prepare: Prepare, rig: Any) -> tuple[list[int], list[int]]:
    """Return what an op reads of the comm lane's memory while the next run, on another stream, has begun, and should.

    The first run ends with an op that is held back before it reads; its memory is the comm lane's, and free by then.
    """
    device, latch = rig.device, rig.make_latch()
    held = [True]

    def receive(x: torch.Tensor) -> torch.Tensor:
        if held[0]:
            latch.hold([])
        return x + 0

    p = ProgramBuilder()
    x = p.compute("work", lambda x: x + 1, p.input("x"))
    executor = prepare(device, p.build(p.compute("receive", receive, p.comm("send", lambda x: x * 2, x))), 1)
    inputs = make_inputs(device, 1)
    device.synchronize()
    ((result,),) = executor.run(inputs)
    rig.drain()
    held[0] = False
    with device.backend.stream(device.backend.Stream()):
        executor.run([((NUMBERS + 1000).to(device.name, non_blocking=True),)])
        time.sleep(GRACE)  # for the comm lane to overwrite what it must not
    latch.release()
    device.synchronize()
    return result.tolist(), ((NUMBERS + 1) * 2).tolist()


def test_a_run_on_another_stream_waits_for_the_last_one(prepare: Prepare, rig: Any) -> None:
    seen, expected = read_after_another_stream(prepare, rig)
    assert seen == expected


def test_without_that_its_memory_would_be_written_over(
    prepare: Prepare, rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the test above can fail."""
    monkeypatch.setattr(StreamLane, "move", lambda self, stream: setattr(self, "stream", stream))
    seen, expected = read_after_another_stream(prepare, rig)
    assert seen != expected


def capture(
    device: StreamDevice, executor: Executor, inputs: Any, warm_up: bool = True, instrument: Any = None
) -> tuple[Any, Any]:
    """Return a graph of a run, and the outputs that each replay writes."""
    make = {"npu": "NPUGraph", "cuda": "CUDAGraph"}[device.name]
    graph = getattr(device.backend, make)()
    if warm_up:
        executor.run(inputs)
    device.synchronize()
    with device.backend.graph(graph, stream=device.backend.Stream()):
        outputs = executor.run(inputs, instrument=instrument)
    return graph, outputs


def test_a_schedule_is_captured_into_a_graph_and_replays(prepare: Prepare, device: StreamDevice) -> None:
    program = record_layers(3)
    executor = prepare(device, program)
    inputs = make_inputs(device)
    graph, outputs = capture(device, executor, inputs)
    for number in (0, 1000):
        for (tensor,), (start,) in zip(inputs, make_inputs(None), strict=True):
            tensor.copy_(start + number)
        graph.replay()
        device.synchronize()
        assert_equal(outputs, run_sequential([program] * 2, [(start + number,) for (start,) in make_inputs(None)]))


@pytest.mark.parametrize("lane", ["compute", "comm", "side"])
def test_an_op_that_fails_under_capture_is_named_and_the_device_goes_on(
    prepare: Prepare, device: StreamDevice, lane: str
) -> None:
    """A graph cannot end while a lane has left it: then the op would not be reported."""
    fails = [False]

    def work(x: torch.Tensor) -> torch.Tensor:
        if fails[0]:
            raise FloatingPointError("not a number")
        return x * 2

    p = ProgramBuilder()
    x = p.comm("send", lambda x: x + 1, p.compute("begin", lambda x: x + 1, p.input("x")))
    program = p.build(p.op("work", work, p.comm("more", lambda x: x + 1, x), lane=lane))
    executor = prepare(device, program)
    executor.run(make_inputs(device))
    fails[0] = True
    before = device.backend.current_stream()
    with pytest.raises(FloatingPointError) as raised:
        capture(device, executor, make_inputs(device), warm_up=False)
    assert "op 'work'" in get_context(raised.value)
    assert device.backend.current_stream() == before
    fails[0] = False
    expected = run_sequential([program] * 2, make_inputs(None))
    assert_equal(executor.run(make_inputs(device)), expected)
    graph, outputs = capture(device, executor, make_inputs(device))
    graph.replay()
    device.synchronize()
    assert_equal(outputs, expected)


# An op is refused before anything is captured, and torch warns of a graph of nothing.
refused_at_once = pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")


@refused_at_once
def test_no_times_are_taken_of_what_is_captured(prepare: Prepare, device: StreamDevice) -> None:
    executor = prepare(device, record_layers(1))
    executor.run(make_inputs(device))
    with pytest.raises(DeviceError, match="captured into a graph cannot be timed: leave the instrument out"):
        capture(device, executor, make_inputs(device), warm_up=False, instrument=Recorder())
    assert_equal(executor.run(make_inputs(device)), run_sequential([record_layers(1)] * 2, make_inputs(None)))


def test_a_run_after_a_capture_is_none_of_the_graph(prepare: Prepare, device: StreamDevice) -> None:
    program = record_layers(2)
    executor = prepare(device, program)
    capture(device, executor, make_inputs(device))
    assert_equal(executor.run(make_inputs(device)), run_sequential([program] * 2, make_inputs(None)))


@refused_at_once
def test_an_op_that_waits_for_the_device_is_refused_under_capture(prepare: Prepare, device: StreamDevice) -> None:
    p = ProgramBuilder()
    x = p.compute("work", lambda x: x + 1, p.input("x"))
    sizes = p.comm("read_sizes", lambda x: x + int(x[0].item()), x, host_sync=True)
    executor = prepare(device, p.build(sizes))
    with pytest.raises(DeviceError, match=r"op 'read_sizes'.*lane 'comm'.* waits for the device .*all_gather"):
        capture(device, executor, make_inputs(device))
    assert_equal(executor.run(make_inputs(device)), [(NUMBERS + 1 + 1,), (NUMBERS + 2 + 2,)])


def test_reserved_memory_is_enough_for_split_steps(
    prepare: Prepare, device: StreamDevice, record_property: Any
) -> None:
    """A cache sized by the peak of tensors leaves room for what all lanes together have cached."""
    p = ProgramBuilder()
    x = p.input("x")
    for index in range(4):
        with p.layer(index):
            x = p.compute("widen", lambda x: (x.repeat(4) + 1)[: x.shape[0]] * 2, x)
            x = p.comm("reduce", lambda x: x.repeat(3)[: x.shape[0]] + 1, x)
    program = p.build(x)
    executor = prepare(device, program)
    largest = 1 << 20

    def run(tokens: int) -> None:
        executor.run([(torch.ones(tokens, device=device.name),) for _ in range(2)])

    def run_unsplit(tokens: int) -> None:
        run_sequential([program], [(torch.ones(2 * tokens, device=device.name),)])

    gc.collect()  # errors of earlier tests hold tensors in reference cycles
    device.backend.empty_cache()
    weights = device.backend.memory_allocated()
    taken = device.reserve(lambda: (run_unsplit(largest), run(largest)))
    peak = device.backend.memory_stats()["allocated_bytes.all.peak"]
    assert peak - weights >= taken
    before = device.backend.memory_reserved()
    for tokens in (largest, largest // 2, largest, largest // 3, largest):
        run(tokens)
        run_unsplit(tokens)
        device.synchronize()
    grown = device.backend.memory_reserved() - before
    assert 0 < grown <= taken
    record_property("MiB reserved, and taken later", (taken >> 20, grown >> 20))
