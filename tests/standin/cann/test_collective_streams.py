"""Which streams collectives run on, and what they wait for.

A rank that has not come yet is the latch: until it comes, the collective of the other rank cannot end.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.standin.cann.cann import ORDERING
from tests.support.standin.npu_ranks import Rank, Ranks

DEVICE = "npu:0"
POOL = 32  # streams that torch_npu makes for a device before it hands them out again
SLOW = 0.05  # seconds
LARGE = 1 << 20  # elements: a block of its own for the allocator


@pytest.fixture(scope="module")
def pair(standin_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(2, tmp_path_factory.mktemp("pair")) as ranks:
        yield ranks


def get_backend(group: Any) -> Any:
    return group._get_backend(torch.device(DEVICE))


def make_ready_group() -> Any:
    """A group whose communicator exists, so that no call has to wait for the other rank to make it."""
    group = dist.new_group()
    dist.all_reduce(torch.zeros(1, device=DEVICE), group=group)
    torch.npu.synchronize()
    return group


def get_stream_id(group: Any) -> int:
    """The stream that the group's collectives run on."""
    return int(get_backend(group).get_coll_stream_id(torch.device(DEVICE)))


def make_streams(count: int, *groups: Any) -> list[Any]:
    """Streams of our own: torch_npu's pool may hand out those of a group as well."""
    taken = {get_stream_id(group) for group in groups}
    streams = {stream.stream_id: stream for stream in (torch.npu.Stream() for _ in range(POOL))}
    return [stream for number, stream in streams.items() if number not in taken][:count]


def make_tensor(value: float, length: int = 4) -> torch.Tensor:
    tensor = torch.full((length,), value, device=DEVICE)
    torch.npu.synchronize()
    return tensor


def wait_on_another_stream(rank: Rank) -> None:
    group, tensor = make_ready_group(), make_tensor(1.0)
    waiter, bystander = make_streams(2, group)
    if rank.number == 1:
        rank.wait_for("checked")
    work = dist.all_reduce(tensor, group=group, async_op=True)
    with torch.npu.stream(waiter):
        work.wait()
        doubled = tensor * 2
    if rank.number == 0:
        with torch.npu.stream(bystander):
            torch.zeros(4, device=DEVICE).add_(1)
        bystander.synchronize()  # returns: only who waits is held
        torch.npu.current_stream().synchronize()
        assert not work.is_completed()
        assert not waiter.query()
        rank.announce("checked")
    waiter.synchronize()
    assert work.is_completed()
    assert doubled.tolist() == [4.0] * 4


def call_and_go_on(rank: Rank) -> None:
    """Without async_op the call returns at once too, but the current stream waits, and only that."""
    group, tensor = make_ready_group(), make_tensor(1.0)
    (stream,) = make_streams(1, group)
    if rank.number == 1:
        rank.wait_for("checked")
    with torch.npu.stream(stream):
        dist.all_reduce(tensor, group=group)
        doubled = tensor * 2
    if rank.number == 0:
        torch.npu.current_stream().synchronize()
        assert not stream.query()
        rank.announce("checked")
    stream.synchronize()
    assert doubled.tolist() == [4.0] * 4


def come_after_the_current_stream(rank: Rank) -> None:
    """Rank 0 calls on a stream that is held; rank 1 is there already, so the collective could run at once."""
    held, group = make_ready_group(), make_ready_group()
    gate, tensor = make_tensor(0.0), make_tensor(1.0)
    (stream,) = make_streams(1, held, group)
    if rank.number == 0:
        with torch.npu.stream(stream):
            dist.all_reduce(gate, group=held)
            tensor.add_(10)
            work = dist.all_reduce(tensor, group=group, async_op=True)
        rank.wait_for("rank 1 has called")
        assert not work.is_completed()
        rank.announce("checked")
        work.wait()
    else:
        work = dist.all_reduce(tensor, group=group, async_op=True)
        rank.announce("rank 1 has called")
        rank.wait_for("checked")
        assert not work.is_completed()
        dist.all_reduce(gate, group=held)
        work.wait()
    torch.npu.synchronize()
    assert tensor.tolist() == [12.0] * 4


def use_two_communicators_in_turn(rank: Rank) -> None:
    """The ranks call them in opposite order: what depends on the other communicator never ends."""
    groups = [make_ready_group(), make_ready_group()]
    streams = make_streams(2, *groups)
    tensors = [make_tensor(1.0), make_tensor(10.0)]
    order = (0, 1) if rank.number == 0 else (1, 0)
    for _ in range(5):
        for index in order:
            with torch.npu.stream(streams[index]):
                dist.all_reduce(tensors[index], group=groups[index])
    torch.npu.synchronize()
    assert [tensor[0].item() for tensor in tensors] == [32.0, 320.0]


def compare_stream_ids(rank: Rank) -> None:
    groups = [make_ready_group(), make_ready_group()]
    own = {get_stream_id(group) for group in groups}
    assert len(own) == 2
    assert torch.npu.current_stream().stream_id not in own
    assert own < {torch.npu.Stream().stream_id for _ in range(POOL)}, "torch_npu has a pool of its own for HCCL now"


def replay_a_graph(rank: Rank) -> None:
    group, tensor = make_ready_group(), make_tensor(0.0)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        summed = tensor + rank.number
        dist.all_reduce(summed, group=group)
        result = summed * 2
    for value in (1.0, 5.0, 7.0):
        tensor.fill_(value)
        graph.replay()
        torch.npu.synchronize()
        assert result.tolist() == [2 * (2 * value + 1)] * 4


def call_hccl_directly(rank: Rank) -> None:
    """A barrier of HCCL's own on a chosen stream, which torch_npu never calls."""
    group = make_ready_group()
    (stream,) = make_streams(1, group)
    hccl = ctypes.CDLL(None)  # the process has loaded libhccl for all to see
    communicator = ctypes.c_void_p(get_backend(group).get_hccl_comm(rank.number))
    if rank.number == 1:
        rank.wait_for("checked")
    assert hccl.HcclBarrier(communicator, ctypes.c_void_p(stream.npu_stream)) == 0
    if rank.number == 0:
        assert not stream.query()
        rank.announce("checked")
    stream.synchronize()


def trace_a_call(rank: Rank) -> None:
    """What surrounds a slow collective on the current stream keeps its distance; the collective is elsewhere."""
    group, tensor = make_ready_group(), make_tensor(1.0)
    (stream,) = make_streams(1, group)
    rank.standin.delay("HcclAllReduce", SLOW)
    with rank.standin.trace() as kernels:
        with torch.npu.stream(stream):
            tensor.add_(1)
            dist.all_reduce(tensor, group=group)
            tensor.mul_(2)
        torch.npu.synchronize()
    rank.standin.calm()
    before, collective, after = (kernel for kernel in kernels if kernel.name not in ORDERING)
    assert collective.name == "HcclAllReduce"
    assert collective.end - collective.start >= SLOW
    assert before.end <= collective.start
    assert collective.end <= after.start
    assert before.stream == after.stream == rank.standin.get_stream_id(stream.npu_stream)
    assert collective.stream != before.stream


def free_what_another_stream_waits_for(rank: Rank, record: bool) -> bool:
    """Whether memory is used again while the collective writes to it; on rank 1 it may have ended by then."""
    group = make_ready_group()
    owner, waiter = make_streams(2, group)
    with torch.npu.stream(owner):
        tensor = make_tensor(1.0, LARGE)
        address = tensor.data_ptr()
        if rank.number == 1:
            rank.wait_for("checked")
        work = dist.all_reduce(tensor, group=group, async_op=True)
    with torch.npu.stream(waiter):
        work.wait()
        if record:
            tensor.record_stream(waiter)
    del tensor, work
    with torch.npu.stream(owner):
        used_again = torch.empty(LARGE, device=DEVICE).data_ptr() == address
    if rank.number == 0:
        rank.announce("checked")
    torch.npu.synchronize()
    return used_again


@pytest.mark.slow
def test_a_work_holds_the_stream_that_waits_for_it_and_no_other(pair: Ranks) -> None:
    pair.run(wait_on_another_stream)


def test_a_call_without_async_op_holds_the_current_stream_but_not_the_host(pair: Ranks) -> None:
    pair.run(call_and_go_on)


def test_a_collective_waits_for_the_stream_that_it_was_called_on(pair: Ranks) -> None:
    pair.run(come_after_the_current_stream)


def test_two_communicators_do_not_depend_on_each_other(pair: Ranks) -> None:
    pair.run(use_two_communicators_in_turn)


def test_a_communicator_has_a_stream_of_its_own_but_from_the_pool_that_users_get_theirs_from(pair: Ranks) -> None:
    pair.run(compare_stream_ids)


def test_the_trace_shows_a_collective_on_its_own_stream_between_its_neighbours(pair: Ranks) -> None:
    pair.run(trace_a_call)


def test_a_captured_collective_works_at_each_replay(pair: Ranks) -> None:
    pair.run(replay_a_graph)


def test_hccl_called_directly_runs_on_the_stream_that_it_is_given(pair: Ranks) -> None:
    pair.run(call_hccl_directly)


def test_a_wait_on_another_stream_keeps_no_memory_unless_that_stream_is_recorded(pair: Ranks) -> None:
    """By default torch_npu keeps the tensors of a work only until something waits for it."""
    used_again, _ = pair.run(free_what_another_stream_waits_for, False)
    assert used_again
    used_again, _ = pair.run(free_what_another_stream_waits_for, True)
    assert not used_again
