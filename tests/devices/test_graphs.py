"""Schedules as graphs on streams: random programs replayed, memory shared, captures that break."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dbo_runtime.errors import DeviceError
from dbo_runtime.events import EventTable
from dbo_runtime.executor import Executor, Inputs, Outputs, run_sequential
from dbo_runtime.graphs import Graphs
from dbo_runtime.lowering import lower
from dbo_runtime.program import Op, Program, ProgramBuilder
from dbo_runtime.schedule import Schedule
from tests.devices import rigs
from tests.executors import Prepare
from tests.graph_logs import Log
from tests.profiles import scale
from tests.strategies import Mix, orders, programs

if not {*rigs.STREAMS} & {*rigs.find_present()}:
    pytest.skip("no device with streams is here; `make test-npu` has one", allow_module_level=True)

import torch

from dbo_runtime.devices.torch_streams import StreamDevice
from tests.devices.test_races import LONGEST, find_jitter

EXAMPLES = 100
REPLAYS = 20
BUCKETS = (8, 64)
WIDTH = 2


@pytest.fixture
def device(stream_rig: Any) -> StreamDevice:
    return stream_rig.device


@pytest.fixture
def log() -> Log:
    return Log()


@dataclass(frozen=True)
class RowMix:
    """What `Mix` is to lists, row by row, to tensors [tokens, width] of int64, where sums and products wrap."""

    mix: Mix

    def __call__(self, *tensors: torch.Tensor) -> Any:
        mixed = torch.full_like(tensors[0], self.mix.salt)
        for number, tensor in enumerate(tensors):
            mixed = mixed * 31 + tensor * (2 * number + 3)
        for number in self.mix.overwritten:
            tensors[number].copy_(mixed + number)
        results = [tensors[number] for number in self.mix.overwritten]
        results += [mixed - number for number in range(self.mix.outputs)]
        return results[0] if self.mix.outputs == 1 else tuple(results[: self.mix.outputs])


def work_on_rows(program: Program) -> Program:
    """Return the program with ops on tensors, its third lane called `side`; each op reads something."""
    gone: set[Any] = set()
    there = list(program.inputs)
    ops: list[Op] = []
    for op in program.ops:
        left = [value for value in there if value not in gone]
        assume(op.reads or left)
        lane = "side" if op.lane == "aux" else op.lane
        ops.append(replace(op, fn=RowMix(op.fn), lane=lane, reads=op.reads or (left[0],)))
        gone |= {*op.overwrites}
        there += op.writes
    return replace(program, ops=tuple(ops))


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """One to three micro-batches of up to two programs, in any order that is legal."""
    kinds = [work_on_rows(program) for program in draw(st.lists(programs(), min_size=1, max_size=2))]
    chosen = tuple(draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=3)))
    return lower(chosen, draw(orders(chosen)))


def make_inputs(schedule: Schedule, counts: Sequence[int], seed: int) -> list[tuple[torch.Tensor, ...]]:
    """Return the inputs of micro-batches with so many tokens, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return [
        tuple(torch.randint(-(2**40), 2**40, (count, WIDTH), generator=generator) for _ in program.inputs)
        for program, count in zip(schedule.programs, counts, strict=True)
    ]


def move(inputs: Inputs, name: str) -> list[tuple[torch.Tensor, ...]]:
    return [tuple(tensor.clone().to(name) for tensor in tensors) for tensors in inputs]


def read(outputs: Outputs) -> list[list[Any]]:
    return [[tensor.tolist() for tensor in tensors] for tensors in outputs]


def record_layers(layers: int = 2) -> Program:
    p = ProgramBuilder()
    x = p.input("x")
    for index in range(layers):
        with p.layer(index):
            x = p.compute("attention", lambda x: x * 3 + 1, x)
            shared = p.op("shared", lambda x: x - 5, x, lane="side")
            x = p.comm("reduce", lambda x: x.mul_(-3), x, overwrites=(x,))
            x = p.compute("merge", torch.add, x, shared)
    return p.build(x)


def record_send() -> Program:
    p = ProgramBuilder()
    return p.build(p.op("send", lambda x: x + 1, p.input("x"), lane="side"))


def check_step(graphs: Graphs, executor: Executor, counts: Sequence[int], seed: int) -> None:
    inputs = make_inputs(executor.schedule, counts, seed)
    outputs = graphs.run(executor, move(inputs, executor._device.name))
    assert read(outputs) == read(run_sequential(executor.schedule.programs, move(inputs, "cpu")))


def test_random_programs_replayed_compute_what_the_sequential_loop_computes(
    device: StreamDevice, record_property: Any
) -> None:
    slow_down = find_jitter(device.name)
    lanes: set[str] = set()
    done = [0, 0]

    @settings(max_examples=scale(EXAMPLES))
    @given(schedules(), st.data())
    def check(schedule: Schedule, data: st.DataObject) -> None:
        count = st.integers(1, BUCKETS[-1])
        counts = data.draw(st.lists(count, min_size=len(schedule.programs), max_size=len(schedule.programs)))
        log = Log()
        graphs = Graphs(device, log, BUCKETS)
        executor = Executor(schedule, device, EventTable(device))
        slow_down(data.draw(st.integers(0, 2**31)), LONGEST)
        for seed in range(1 + REPLAYS):
            check_step(graphs, executor, counts, seed)
        assert (graphs.captured, graphs.replayed, dict(graphs.declined)) == (1, REPLAYS, {}), log.lines
        graphs.close()
        lanes.update(schedule.lanes)
        done[0] += 1
        done[1] += graphs.replayed

    check()
    slow_down(0, 0.0)
    assert lanes == {"compute", "comm", "side"}
    record_property("programs captured, and steps replayed", tuple(done))


def test_what_a_caller_was_given_no_later_replay_changes(prepare: Prepare, device: StreamDevice, log: Log) -> None:
    graphs, executor = Graphs(device, log, BUCKETS), prepare(device, record_layers())
    given = [make_inputs(executor.schedule, (5, 8), seed) for seed in range(6)]
    kept = [graphs.run(executor, move(inputs, device.name)) for inputs in given]
    assert graphs.replayed == 5
    assert [read(outputs) for outputs in kept] == [read(run_sequential(executor.schedule.programs, i)) for i in given]
    graphs.close()


def test_graphs_share_their_memory_and_are_replayed_in_any_order(
    prepare: Prepare, device: StreamDevice, log: Log
) -> None:
    graphs = Graphs(device, log, BUCKETS)
    executors = [prepare(device, record_layers(layers), 3) for layers in (3, 1, 2)]
    for seed, number in enumerate((0, 1, 2, 1, 0, 2, 0, 0, 1, 2)):
        check_step(graphs, executors[number], (60, 3, 9), seed)
        check_step(graphs, executors[number], (3, 60, 8), seed)
    assert (graphs.captured, graphs.replayed) == (6, 14)
    assert len({known.graph.pool() for known in graphs._known.values()}) == 1
    graphs.close()


def test_closing_gives_the_memory_back(prepare: Prepare, device: StreamDevice, log: Log) -> None:
    executor = prepare(device, record_layers())
    graphs = Graphs(device, log, (1 << 18,))
    check = [(torch.ones(1 << 18, WIDTH, dtype=torch.int64, device=device.name),)] * 2
    for _ in range(2):
        executor.run(check)
        device.synchronize()
        gc.collect()
        device.backend.empty_cache()
        before = device.backend.memory_reserved()
        for _ in range(3):
            graphs.run(executor, check)
        device.synchronize()
        device.backend.empty_cache()
        assert device.backend.memory_reserved() > before
        graphs.close()
        gc.collect()
        device.backend.empty_cache()
        assert device.backend.memory_reserved() <= before
    assert graphs.captured == 2
    assert graphs.replayed == 4


def test_a_replay_on_another_stream_waits_for_the_last_run(prepare: Prepare, device: StreamDevice, log: Log) -> None:
    graphs, executor = Graphs(device, log, BUCKETS), prepare(device, record_layers())
    slow_down = find_jitter(device.name)
    slow_down(7, 10 * LONGEST)
    given = [make_inputs(executor.schedule, (40, 50), seed) for seed in range(8)]
    moved = [move(inputs, device.name) for inputs in given]
    device.synchronize()
    kept = []
    for inputs in moved:
        with device.backend.stream(device.backend.Stream()):
            kept.append(graphs.run(executor, inputs))
    device.synchronize()
    slow_down(0, 0.0)
    assert [read(outputs) for outputs in kept] == [read(run_sequential(executor.schedule.programs, i)) for i in given]
    assert graphs.replayed == 7
    graphs.close()


def record_peek(blocks: list[bool], lane: str) -> Program:
    """Return a program with an op that waits for the device, and does not say so."""

    def peek(x: torch.Tensor) -> torch.Tensor:
        return x + int(x.cpu()[0, 0]) * 0 if blocks[0] else x + 0

    p = ProgramBuilder()
    x = p.comm("send", lambda x: x * 2, p.input("x"))
    return p.build(p.compute("receive", lambda x: x + 1, p.op("peek", peek, x, lane=lane)))


@pytest.mark.parametrize("lane", ["compute", "comm", "side"])
def test_a_capture_that_an_op_breaks_leaves_eager_steps_and_later_captures(
    prepare: Prepare, device: StreamDevice, log: Log, lane: str
) -> None:
    graphs, good = Graphs(device, log, BUCKETS), prepare(device, record_layers())
    check_step(graphs, good, (4, 4), 0)
    bad = prepare(device, record_peek([True], lane))
    before = device.backend.current_stream()
    for seed in range(3):
        check_step(graphs, bad, (4, 5), seed)
        assert device.backend.current_stream() == before
        assert not device.is_capturing
    assert graphs.declined == {"the capture failed": 3}
    (line,) = log.declines
    assert f"op 'peek', outside any layer, micro-batch 0, lane '{lane}'" in line["detail"]
    for seed in range(3):
        check_step(graphs, good, (4, 4), seed)
        check_step(graphs, good, (60, 4), seed)
        check_step(graphs, prepare(device, record_peek([False], lane)), (4, 4), seed)
    assert (graphs.captured, graphs.replayed) == (5, 5)
    assert gc.isenabled()
    graphs.close()


def test_an_unjoined_lane_is_refused_before_anything_is_captured(
    prepare: Prepare, device: StreamDevice, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = prepare(device, record_send()).schedule
    captures: list[Any] = []
    monkeypatch.setattr(type(device), "capture", lambda *arguments: captures.append(arguments))
    executor = Executor(replace(schedule, joins=()), device, EventTable(device))
    graphs = Graphs(device, log, BUCKETS)
    for _ in range(2):
        graphs.run(executor, move(make_inputs(schedule, (2, 2), 0), device.name))
    device.synchronize()
    assert captures == []
    (line,) = log.declines
    assert line["reason"] == "the schedule cannot be captured"
    assert "rule 7" in line["detail"]
    assert "lane 'side' never returns to 'compute'" in line["detail"]


def test_where_the_device_refuses_the_end_of_a_capture_the_current_stream_is_as_it_was(
    prepare: Prepare, device: StreamDevice
) -> None:
    """As it does with an unjoined lane that was not validated."""
    schedule = prepare(device, record_send()).schedule
    unjoined = Executor(replace(schedule, joins=()), device, EventTable(device))
    inputs = move(make_inputs(schedule, (2, 2), 0), device.name)
    before = device.backend.current_stream()
    with pytest.raises(RuntimeError):
        device.capture(lambda: unjoined.run(inputs))
    assert device.backend.current_stream() == before
    assert not device.is_capturing
    assert gc.isenabled()
    graphs, executor = Graphs(device, Log(), BUCKETS), prepare(device, record_layers())
    for seed in range(3):
        check_step(graphs, executor, (3, 4), seed)
    assert (graphs.captured, graphs.replayed) == (1, 2)
    graphs.close()


def test_a_capture_within_a_capture_is_refused_and_a_step_there_becomes_part_of_it(
    prepare: Prepare, device: StreamDevice, log: Log
) -> None:
    graphs, executor = Graphs(device, log, BUCKETS), prepare(device, record_layers())
    inputs = make_inputs(executor.schedule, (8, 8), 1)
    moved = move(inputs, device.name)
    refused: list[str] = []

    def run() -> Outputs:
        if device.is_capturing:
            with pytest.raises(DeviceError, match="a capture is in progress already") as caught:
                device.capture(lambda: None)
            refused.append(str(caught.value))
            return graphs.run(executor, moved)
        return executor.run(moved)

    graph, outputs = device.capture(run)
    graph.replay()
    assert read(outputs) == read(run_sequential(executor.schedule.programs, inputs))
    assert len(refused) == 1
    assert graphs.declined == {"a capture goes on": 1}


def test_nothing_is_collected_during_a_capture(device: StreamDevice) -> None:
    seen: list[bool] = []
    tensor = torch.ones(4, device=device.name)
    graph, _ = device.capture(lambda: (seen.append(gc.isenabled()), tensor + 1)[1])
    assert seen == [False, False]
    assert gc.isenabled()
    graph.reset()


def test_a_lane_does_not_take_the_stream_that_captures_are_made_on(device: StreamDevice) -> None:
    tensor = torch.ones(4, device=device.name)
    graph, streams = device.capture(lambda: (tensor + 1, device.backend.current_stream()))
    lanes = device.open_lanes(["compute", *(f"l{number}" for number in range(30))])
    assert streams[1].stream_id not in {lane.stream.stream_id for lane in lanes}
    graph.reset()
