"""What tests can do with the stand-in: slow kernels down, see what ran when."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch

from tests.standin.cann import cann
from tests.standin.cann.cann import ORDERING, Kernel, StandIn
from tests.support.standin.streams import make_streams

if TYPE_CHECKING:
    from tests.standin.cann.gate import StreamGate


@pytest.fixture(autouse=True)
def calm(standin: StandIn) -> Iterator[None]:
    yield
    standin.calm()


def measure(kernel: Kernel) -> float:
    """Return how long a kernel ran, in seconds."""
    return kernel.end - kernel.start


def list_work(kernels: list[Kernel]) -> list[Kernel]:
    """Return the kernels alone, without waits and the like."""
    return [kernel for kernel in kernels if kernel.name not in ORDERING]


@pytest.mark.slow
def test_a_trace_shows_what_ran_where_and_when(standin: StandIn, gate: StreamGate) -> None:
    first, second = make_streams(2)
    value = torch.ones(4, device="npu")
    torch.npu.synchronize()
    gate.hold(second)
    with standin.trace() as kernels:
        with torch.npu.stream(second):
            value * 2
        with torch.npu.stream(first):
            value + 1
            value * 3
        first.synchronize()
        gate.open()
        second.synchronize()
    work = list_work(kernels)
    one, two = (standin.get_stream_id(stream.npu_stream) for stream in (first, second))
    assert [(kernel.stream, kernel.name) for kernel in work] == [(one, "Adds"), (one, "Muls"), (two, "Muls")]
    assert all(kernel.queued <= kernel.start <= kernel.end for kernel in kernels)
    assert work[0].end <= work[1].start  # one stream does one thing at a time
    assert work[1].end <= work[2].start  # the gate
    assert work[2].queued <= work[0].start


def test_a_trace_shows_copies_that_the_host_waits_for(standin: StandIn) -> None:
    value = torch.ones(4, device="npu")
    torch.npu.synchronize()
    with standin.trace() as kernels:
        assert value.cpu().sum() == 4
    (copy,) = list_work(kernels)
    assert (copy.stream, copy.name) == (-1, "MemcpyDeviceToHost")


def test_a_trace_shows_waits_and_what_they_wait_for(standin: StandIn) -> None:
    producer, consumer = make_streams(2)
    with standin.trace() as kernels:
        consumer.wait_stream(producer)
        torch.npu.synchronize()
    streams = [standin.get_stream_id(stream.npu_stream) for stream in (producer, consumer)]
    (record,), (wait,) = ([k for k in kernels if k.name == name] for name in ("EventRecord", "EventWait"))
    assert [record.stream, wait.stream] == streams
    assert record.start <= wait.end


def test_each_trace_begins_empty_and_nothing_is_noted_outside(standin: StandIn) -> None:
    value = torch.ones(4, device="npu")
    value + 1
    torch.npu.synchronize()
    with standin.trace() as kernels:
        pass
    assert kernels == []


def test_a_graphs_kernels_have_the_ids_of_its_lanes(standin: StandIn) -> None:
    value = torch.ones(4, device="npu")
    lanes = []
    for _ in range(2):
        main, side = make_streams(2)
        torch.npu.synchronize()
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph, stream=main):
            side.wait_stream(main)
            with torch.npu.stream(side):
                left = value * 2
            right = value + 1
            main.wait_stream(side)
        with standin.trace() as kernels:
            graph.replay()
            torch.npu.synchronize()
        lanes.append({kernel.name: kernel.stream for kernel in list_work(kernels)})
        del left, right
    for names in lanes:
        assert names["Adds"] % 1_000_000 == 0
        assert names["Muls"] == names["Adds"] + 1
    assert lanes[1]["Adds"] == lanes[0]["Adds"] + 1_000_000


def test_a_delay_is_for_one_kernel_until_all_is_calm(standin: StandIn) -> None:
    value = torch.ones(4, device="npu")
    torch.npu.synchronize()
    standin.delay("Adds", 0.05)
    with standin.trace() as kernels:
        value + 1
        torch.npu.synchronize()
    assert measure(kernels[0]) >= 0.05
    assert standin.find_extra_time("Adds", 0, 0) == 0.05
    assert standin.find_extra_time("Muls", 0, 0) == 0
    standin.calm()
    assert standin.find_extra_time("Adds", 0, 0) == 0


def test_a_delay_holds_in_graphs_too(standin: StandIn) -> None:
    value = torch.ones(4, device="npu")
    (stream,) = make_streams(1)
    graph = torch.npu.NPUGraph()
    torch.npu.synchronize()
    with torch.npu.graph(graph, stream=stream):
        value + 1
    standin.delay("Adds", 0.05)
    with standin.trace() as kernels:
        graph.replay()
        torch.npu.synchronize()
    assert measure(list_work(kernels)[0]) >= 0.05


def test_jitter_depends_on_seed_stream_and_number_alone(standin: StandIn) -> None:
    def draw(seed: int) -> dict[tuple[int, int], float]:
        standin.jitter(seed, 0.01)
        turns = [(stream, number) for stream in range(-2, 4) for number in range(20)]
        return {turn: standin.find_extra_time("Adds", *turn) for turn in turns}

    first, again, other = draw(1), draw(1), draw(2)
    assert first == again
    assert len(set(first.values()) | set(other.values())) == len(first) + len(other)
    assert all(0 <= extra < 0.01 for extra in first.values())


def jitter_unevenly(standin: StandIn, stream: int) -> tuple[float, float]:
    """Jitter so that a stream's second kernel takes long, and the first and the third do not; return the two times."""
    for seed in range(100_000):
        standin.jitter(seed, 0.1)
        first, second, third = (standin.find_extra_time("Adds", stream, number) for number in range(3))
        if max(first, third) < 0.01 and second > 0.09:
            return first, second
    raise AssertionError("there is no such seed")


def test_jitter_is_what_kernels_take_longer(standin: StandIn) -> None:
    (stream,) = make_streams(1)
    value = torch.ones(4, device="npu")
    torch.npu.synchronize()
    with torch.npu.stream(stream):
        value + 1  # kernels are counted from the call on: this one is not
        stream.synchronize()
        least = jitter_unevenly(standin, standin.get_stream_id(stream.npu_stream))
        with standin.trace() as kernels:
            value + 1
            value + 1
            stream.synchronize()
    assert all(measure(kernel) >= extra for kernel, extra in zip(list_work(kernels), least, strict=True))


def test_jitter_does_not_count_waits(standin: StandIn) -> None:
    producer, consumer = make_streams(2)
    value = torch.ones(4, device="npu")
    torch.npu.synchronize()
    least = jitter_unevenly(standin, standin.get_stream_id(consumer.npu_stream))
    with torch.npu.stream(consumer), standin.trace() as kernels:
        value + 1
        consumer.wait_stream(producer)
        value + 1
        torch.npu.synchronize()
    assert all(measure(kernel) >= extra for kernel, extra in zip(list_work(kernels), least, strict=True))


def test_nothing_is_loaded_where_cann_itself_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_HOME_PATH", "/usr/local/Ascend")
    assert cann.load() is None


def test_a_latch_says_why_cann_refused_it(standin: StandIn) -> None:
    with pytest.raises(cann.StandInError, match=r"\[standin\] ValueWait on a stream that does not exist"):
        cann.Latch(0).hold(1)
