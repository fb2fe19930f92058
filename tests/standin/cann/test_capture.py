"""What the real torch_npu can rely on in the stand-in's graphs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.standin.cann.cann import StandIn
from tests.support.standin.streams import list_values, make_streams, run_script

if TYPE_CHECKING:
    from tests.standin.cann.gate import StreamGate


def test_a_capture_runs_nothing(standin: StandIn) -> None:
    (stream,) = make_streams(1)
    value = torch.zeros(4, device="npu")
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, stream=stream):
        value.add_(1)
    torch.npu.synchronize()
    assert list_values(value) == [0.0]
    graph.replay()
    graph.replay()
    torch.npu.synchronize()
    assert list_values(value) == [2.0]


def test_a_graph_with_a_fork_and_a_join_replays_right_however_long_its_kernels_take(standin: StandIn) -> None:
    main, side = make_streams(2)
    source = torch.zeros(4, device="npu")
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, stream=main):
        base = source + 1
        side.wait_stream(main)
        with torch.npu.stream(side):
            left = base * 2
        right = base * 3
        main.wait_stream(side)
        result = left + right
    for seed in range(10):
        standin.jitter(seed, 0.002)
        source.fill_(seed)
        graph.replay()
        torch.npu.synchronize()
        assert list_values(result) == [5.0 * (seed + 1)]
    standin.calm()


def test_the_lanes_of_a_graph_run_at_the_same_time(standin: StandIn) -> None:
    from tests.standin.cann.gate import StreamGate

    main, side = make_streams(2)
    there, back = StreamGate(), StreamGate()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, stream=main):
        side.wait_stream(main)
        # Each waits for the other in turn: one after the other they would never end.
        there.hold(side)
        there.open(main)
        back.hold(main)
        back.open(side)
        main.wait_stream(side)
    graph.replay()
    torch.npu.synchronize()


@pytest.mark.parametrize("waits", [True, False])
def test_a_wait_in_a_graph_really_waits(gate: StreamGate, waits: bool) -> None:
    main, side = make_streams(2)
    shared = torch.zeros(4, device="npu")
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, stream=main):
        side.wait_stream(main)
        gate.hold(side)
        with torch.npu.stream(side):
            shared.add_(1)
        if waits:
            main.wait_stream(side)
        seen = shared.clone()
        if not waits:
            gate.open(main)  # only after it has read
            main.wait_stream(side)
    graph.replay()
    if waits:
        gate.open()
    torch.npu.synchronize()
    assert list_values(seen) == [1.0 if waits else 0.0]


def test_a_capture_can_span_threads_of_the_host(standin: StandIn) -> None:
    main, side = make_streams(2)
    source = torch.ones(4, device="npu")
    torch.npu.synchronize()
    forked = torch.npu.Event()
    made: list[torch.Tensor] = []

    def multiply() -> None:
        torch.npu.set_device(0)
        side.wait_event(forked)
        with torch.npu.stream(side):
            made.append(source * 3)

    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, stream=main):
        forked.record()
        thread = threading.Thread(target=multiply)
        thread.start()
        thread.join()
        main.wait_stream(side)
        result = made[0] + source
    graph.replay()
    torch.npu.synchronize()
    assert list_values(result) == [4.0]


def test_a_capture_whose_stream_does_not_wait_for_the_others_is_refused(standin: StandIn) -> None:
    main, side = make_streams(2)
    source = torch.ones(4, device="npu")
    torch.npu.synchronize()
    captured = torch.npu.graph(torch.npu.NPUGraph(), stream=main)
    captured.__enter__()
    side.wait_stream(main)
    with torch.npu.stream(side):
        source + 1
    with pytest.raises(RuntimeError, match="107025") as refused:
        captured.__exit__(None, None, None)
    assert "[standin] the capture's first stream does not wait for all others at its end" in str(refused.value)
    assert list_values(source + 1) == [2.0]  # all is well again


def test_a_captured_stream_may_not_wait_for_an_event_of_outside(standin_folder: Path) -> None:
    # In a process of its own: torch_npu is of no use after that. And without its task queue, whose thread
    # may find the error only after the capture has ended.
    told = run_script(
        "main, other = torch.npu.Stream(), torch.npu.Stream()\n"
        "event = torch.npu.Event()\n"
        "event.record(other)\n"
        "torch.npu.synchronize()\n"
        "try:\n"
        "    with torch.npu.graph(torch.npu.NPUGraph(), stream=main):\n"
        "        main.wait_event(event)\n"
        "except RuntimeError as error:\n"
        "    print(error)\n",
        TASK_QUEUE_ENABLE="0",
    )
    assert "[standin] a captured stream waits for an event of outside" in told


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (lambda stream, value: stream.synchronize(), "synchronize a stream that is being captured"),
        (lambda stream, value: torch.npu.synchronize(), "synchronize a device during a capture"),
        (lambda stream, value: value.cpu(), "a copy that blocks, during a capture"),
    ],
)
def test_a_call_that_blocks_during_a_capture_is_refused(
    standin: StandIn, block: Callable[[Any, torch.Tensor], Any], reason: str
) -> None:
    (stream,) = make_streams(1)
    value = torch.ones(4, device="npu")
    torch.npu.synchronize()
    with (
        pytest.raises(RuntimeError, match=rf"\[standin\] {reason}"),
        torch.npu.graph(torch.npu.NPUGraph(), stream=stream),
    ):
        block(stream, value)
    assert list_values(value + 1) == [2.0]  # all is well again


def test_a_captured_event_tells_the_host_nothing(standin: StandIn) -> None:
    (stream,) = make_streams(1)
    event = torch.npu.Event()
    with torch.npu.graph(torch.npu.NPUGraph(), stream=stream):
        event.record(stream)
        with pytest.raises(RuntimeError, match=r"\[standin\] the event was recorded in a capture that goes on"):
            event.synchronize()


def test_a_kernel_that_fails_in_a_replay_shows_when_its_stream_is_synchronized(standin: StandIn) -> None:
    (stream,) = make_streams(1)
    table, row = torch.ones(4, 2, device="npu"), torch.zeros(1, dtype=torch.int64, device="npu")
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, stream=stream):
        found = torch.nn.functional.embedding(row, table)
    graph.replay()
    torch.npu.synchronize()
    assert list_values(found) == [1.0]
    row.fill_(9)
    graph.replay()
    with pytest.raises(RuntimeError, match=r"\[standin\] kernel GraphReplay failed .*: Embedding: index out of range"):
        torch.npu.synchronize()


class Updatable:
    """A graph that adds a number to a source; the number can be changed."""

    def __init__(self, number: int) -> None:
        (self.stream,) = make_streams(1)
        self.source = torch.zeros(4, device="npu")
        self.result = torch.zeros(4, device="npu")
        torch.npu.synchronize()
        self.graph = torch.npu.NPUGraph()
        with torch.npu.graph(self.graph, stream=self.stream):
            torch.npu.graph_task_group_begin(self.stream)
            torch.add(self.source, number, out=self.result)
            self.group = torch.npu.graph_task_group_end(self.stream)

    def update(self, stream: Any, number: int) -> None:
        """Change the number, in the order of a stream."""
        with torch.npu.stream(stream):
            torch.npu.graph_task_update_begin(stream, self.group)
            torch.add(self.source, number, out=self.result)
            torch.npu.graph_task_update_end(stream)

    def replay(self) -> list[float]:
        """Return what the graph computes."""
        self.graph.replay()
        torch.npu.current_stream().synchronize()
        return list_values(self.result)


def test_an_update_changes_later_replays(standin: StandIn) -> None:
    (stream,) = make_streams(1)
    graph = Updatable(1)
    assert graph.replay() == [1.0]
    graph.update(stream, 5)
    stream.synchronize()
    assert graph.replay() == [5.0]


def test_an_update_happens_in_its_streams_order(gate: StreamGate) -> None:
    (stream,) = make_streams(1)
    graph = Updatable(1)
    gate.hold(stream)
    graph.update(stream, 5)
    assert graph.replay() == [1.0]
    gate.open()
    stream.synchronize()
    assert graph.replay() == [5.0]


def test_an_update_must_launch_as_much_as_was_captured(standin: StandIn) -> None:
    (stream,) = make_streams(1)
    graph = Updatable(1)
    torch.npu.graph_task_update_begin(stream, graph.group)
    with pytest.raises(RuntimeError, match=r"\[standin\] an update must launch what its task group launched"):
        torch.npu.graph_task_update_end(stream)


def test_an_external_event_holds_each_replay_anew(standin: StandIn) -> None:
    captured, replaying, recorder = make_streams(3)
    value = torch.zeros(4, device="npu")
    torch.npu.synchronize()
    event = torch.npu.ExternalEvent()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, stream=captured):
        event.wait(captured)
        event.reset(captured)
        value.add_(1)
    for replays in range(1, 4):
        with torch.npu.stream(replaying):
            graph.replay()
        assert not replaying.query()
        event.record(recorder)
        replaying.synchronize()
        assert list_values(value) == [replays]


def test_torch_npus_own_update_gives_an_operator_other_lengths(standin: StandIn) -> None:
    (stream,) = make_streams(1)
    query, key, value = (torch.randn(12, 4, 16).npu() for _ in range(3))
    out, log_sums = torch.empty(12, 4, 16).npu(), torch.empty(1).npu()
    attend = torch.ops.npu.npu_fused_infer_attention_score
    settings = {"num_heads": 4, "num_key_value_heads": 4, "scale": 0.25, "input_layout": "TND"}
    graph = torch.npu.NPUGraph()
    torch.npu.synchronize()
    with torch.npu.graph(graph, stream=stream, auto_dispatch_capture=True):
        lengths = {"actual_seq_lengths": [5, 12], "actual_seq_lengths_kv": [5, 12]}
        attend.out(query, key, value, out=[out, log_sums], **lengths, **settings)
    for split in (5, 7, 3):
        lengths = {"actual_seq_lengths": [split, 12], "actual_seq_lengths_kv": [split, 12]}
        with torch.npu.stream(stream):
            graph.replay()
        assert not stream.query()  # a replay waits for its update
        graph.update([lengths])
        stream.synchronize()
        expected, _ = attend(query, key, value, **lengths, **settings)
        assert torch.equal(out.cpu(), expected.cpu())
