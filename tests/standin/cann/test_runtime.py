"""What the real torch_npu can rely on in the stand-in's streams, events and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.standin.cann.cann import StandIn
from tests.support.standin.streams import list_values, make_streams

if TYPE_CHECKING:
    from tests.standin.cann.gate import StreamGate

SIZE = 1 << 18


def test_a_stream_runs_in_order_however_long_its_kernels_take(standin: StandIn) -> None:
    (stream,) = make_streams(1)
    values = torch.ones(4, dtype=torch.int64, device="npu")
    expected = torch.ones(4, dtype=torch.int64)
    torch.npu.synchronize()
    standin.jitter(seed=1, seconds=0.002)
    with torch.npu.stream(stream):
        for _ in range(10):
            values.mul_(3).add_(1)
            expected.mul_(3).add_(1)
    stream.synchronize()
    standin.calm()
    assert torch.equal(values.cpu(), expected)


def test_a_held_stream_holds_no_other(gate: StreamGate) -> None:
    held, free = make_streams(2)
    gate.hold(held)
    with torch.npu.stream(free):
        value = torch.full((4,), 2.0, device="npu") + 1
    free.synchronize()
    assert not held.query()
    assert free.query()
    assert value.sum().item() == 12
    gate.open()
    held.synchronize()
    assert held.query()


def test_two_streams_run_at_the_same_time(standin: StandIn) -> None:
    from tests.standin.cann.gate import StreamGate

    first, second = make_streams(2)
    there, back = StreamGate(), StreamGate()
    # Each waits for the other in turn: one after the other they would never end.
    there.hold(second)
    there.open(first)
    back.hold(first)
    back.open(second)
    torch.npu.synchronize()


@pytest.mark.parametrize("waits", [True, False])
def test_a_wait_really_waits(gate: StreamGate, waits: bool) -> None:
    producer, consumer = make_streams(2)
    shared = torch.zeros(SIZE, device="npu")
    event = torch.npu.Event()
    torch.npu.synchronize()
    gate.hold(producer)
    with torch.npu.stream(producer):
        shared.add_(1)
        event.record()
    with torch.npu.stream(consumer):
        if waits:
            consumer.wait_event(event)
        seen = shared.clone()
    if waits:
        assert not consumer.query()
    else:
        consumer.synchronize()  # nothing keeps it from reading too early
    assert not event.query()
    gate.open()
    torch.npu.synchronize()
    assert event.query()
    assert list_values(seen) == [1.0 if waits else 0.0]


def test_a_wait_is_for_the_record_before_it_and_not_for_later_ones(gate: StreamGate) -> None:
    producer, consumer = make_streams(2)
    event = torch.npu.Event()
    event.record(producer)
    consumer.wait_event(event)
    gate.hold(producer)
    event.record(producer)
    consumer.synchronize()
    assert not event.query()


def test_waiting_on_one_stream_orders_a_chain_of_streams(gate: StreamGate) -> None:
    streams = make_streams(4)
    value = torch.zeros(4, device="npu")
    torch.npu.synchronize()
    gate.hold(streams[0])
    for number, stream in enumerate(streams):
        if number:
            stream.wait_stream(streams[number - 1])
        with torch.npu.stream(stream):
            value.mul_(10).add_(number)
    assert not streams[-1].query()
    gate.open()
    streams[-1].synchronize()
    assert value.tolist() == [123.0] * 4


def test_an_event_that_was_never_recorded_is_complete_and_holds_nothing(standin: StandIn) -> None:
    (stream,) = make_streams(1)
    event = torch.npu.Event()
    assert event.query()
    event.synchronize()
    stream.wait_event(event)
    stream.synchronize()


def test_synchronizing_an_event_waits_for_no_more_than_it(gate: StreamGate) -> None:
    (stream,) = make_streams(1)
    event = torch.npu.Event()
    event.record(stream)
    gate.hold(stream)
    event.synchronize()
    assert not stream.query()


def test_elapsed_time_is_that_of_the_kernels_between(standin: StandIn) -> None:
    start, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    value = torch.ones(4, device="npu")
    standin.delay("Adds", 0.02)
    start.record()
    value + 1
    end.record()
    torch.npu.synchronize()
    standin.calm()
    assert start.elapsed_time(end) >= 20.0
    assert end.elapsed_time(start) == -start.elapsed_time(end)


def test_events_without_timing_tell_no_time(standin: StandIn) -> None:
    start, end = torch.npu.Event(), torch.npu.Event(enable_timing=True)
    start.record()
    end.record()
    with pytest.raises(RuntimeError, match=r"\[standin\] an event that was made without a time"):
        start.elapsed_time(end)


def test_generic_streams_and_events_of_torch_work(standin: StandIn) -> None:
    first, second = torch.Stream(device="npu"), torch.Stream(device="npu")
    event = torch.Event(device="npu")
    first.record_event(event)
    second.wait_event(event)
    second.synchronize()
    assert event.query()


def test_a_pinned_copy_to_the_device_happens_in_its_streams_order(gate: StreamGate) -> None:
    (stream,) = make_streams(1)
    source = torch.ones(SIZE).pin_memory()
    gate.hold(stream)
    with torch.npu.stream(stream):
        copy = source.to("npu", non_blocking=True)
    source.fill_(7)  # the copy has not read it yet
    gate.open()
    stream.synchronize()
    assert list_values(copy) == [7.0]


def test_a_copy_to_pinned_memory_happens_in_its_streams_order(gate: StreamGate) -> None:
    (stream,) = make_streams(1)
    source = torch.ones(SIZE, device="npu")
    target = torch.zeros(SIZE).pin_memory()
    torch.npu.synchronize()
    gate.hold(stream)
    with torch.npu.stream(stream):
        target.copy_(source, non_blocking=True)
    assert list_values(target) == [0.0]
    gate.open()
    stream.synchronize()
    assert list_values(target) == [1.0]


@pytest.mark.parametrize("is_recorded", [True, False])
def test_memory_is_used_again_at_once_unless_a_stream_is_recorded(gate: StreamGate, is_recorded: bool) -> None:
    owner, reader = make_streams(2)
    torch.npu.empty_cache()
    with torch.npu.stream(owner):
        tensor = torch.full((SIZE,), 1.0, device="npu")
    owner.synchronize()
    address = tensor.data_ptr()
    gate.hold(reader)
    with torch.npu.stream(reader):
        seen = tensor.clone()
    if is_recorded:
        tensor.record_stream(reader)
    del tensor
    with torch.npu.stream(owner):
        other = torch.full((SIZE,), 2.0, device="npu")
    owner.synchronize()
    assert (other.data_ptr() == address) is not is_recorded
    gate.open()
    reader.synchronize()
    assert list_values(seen) == [1.0 if is_recorded else 2.0]


def test_memory_statistics_and_the_device_agree(standin: StandIn) -> None:
    torch.npu.synchronize()
    torch.npu.empty_cache()
    before, reserved = torch.npu.memory_allocated(), torch.npu.memory_reserved()
    others = standin.count_allocated() - reserved  # what torch_npu has taken besides its caching allocator
    torch.npu.reset_peak_memory_stats()
    tensor = torch.empty(64 << 20, dtype=torch.uint8, device="npu")
    assert torch.npu.memory_allocated() - before >= 64 << 20
    assert torch.npu.memory_reserved() == standin.count_allocated() - others
    free, total = torch.npu.mem_get_info()
    assert total - free == standin.count_allocated()
    del tensor
    assert torch.npu.memory_allocated() == before
    assert torch.npu.max_memory_allocated() - before >= 64 << 20
    torch.npu.empty_cache()
    assert torch.npu.memory_reserved() == reserved


def test_memory_runs_out_with_torchs_own_error(standin: StandIn) -> None:
    _, total = torch.npu.mem_get_info()
    with pytest.raises(torch.OutOfMemoryError, match="NPU out of memory"):
        torch.empty(total + 1, dtype=torch.uint8, device="npu")
    assert torch.ones(4, device="npu").sum().item() == 4


def test_core_limits_come_back_as_set(standin: StandIn) -> None:
    first, second = make_streams(2)
    whole = torch.npu.get_device_limit(0)
    torch.npu.set_stream_limit(first, 4, 8)
    assert torch.npu.get_stream_limit(first) == {"cube_core_num": 4, "vector_core_num": 8}
    assert torch.npu.get_stream_limit(second) == torch.npu.get_device_limit(0) == whole
    torch.npu.reset_stream_limit(first)
    assert torch.npu.get_stream_limit(first) == whole
    with pytest.raises(RuntimeError, match=r"\[standin\] a limit of 1000 cores"):
        torch.npu.set_stream_limit(first, 1000, 8)


def test_a_function_of_the_host_is_called_in_its_streams_order(gate: StreamGate) -> None:
    (stream,) = make_streams(1)
    calls: list[Any] = []
    gate.hold(stream)
    torch.npu._launch_host_func(stream, calls.append, "data")
    assert calls == []
    gate.open()
    stream.synchronize()
    assert calls == ["data"]


def test_a_kernel_that_fails_shows_when_its_stream_is_synchronized(standin: StandIn) -> None:
    (stream,) = make_streams(1)
    table, beyond = torch.ones(4, 2, device="npu"), torch.tensor([9]).npu()
    torch.npu.synchronize()
    with torch.npu.stream(stream):
        torch.nn.functional.embedding(beyond, table)
    with pytest.raises(RuntimeError, match=r"\[standin\] kernel Embedding failed on stream \d+: index out of range"):
        stream.synchronize()
    stream.synchronize()  # it is said once
