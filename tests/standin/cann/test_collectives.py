"""What each collective of the stand-in gives, called through torch.distributed with the backend hccl."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.latch import GRACE
from tests.support.standin.npu_ranks import Job, Rank, Ranks

REDUCED = (torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.int16, torch.int32, torch.int64)
CARRIED = (*REDUCED, torch.uint8, torch.float64)  # torch_npu refuses to reduce these two
LENGTH = 5000  # more than one piece of 4 KiB in every data type, and no multiple of it
REDUCTIONS = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
}


@pytest.fixture(scope="module")
def pair(standin_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two ranks, whose shared memory is so small that LENGTH elements pass in pieces."""
    with Ranks(2, tmp_path_factory.mktemp("pair"), {"NPU_STANDIN_HCCL_KIB": "4"}) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def trio(standin_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(3, tmp_path_factory.mktemp("trio")) as ranks:
        yield ranks


def make_input(rank: int, dtype: torch.dtype, length: int = LENGTH) -> torch.Tensor:
    """What a rank contributes, [length] on the CPU: every rank can make that of the others too."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(length, generator=generator).mul(10).to(dtype)


def make_inputs(rank: Rank, dtype: torch.dtype, length: int = LENGTH) -> list[torch.Tensor]:
    return [make_input(number, dtype, length) for number in range(rank.size)]


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def all_reduce(rank: Rank) -> None:
    for dtype in REDUCED:
        inputs = make_inputs(rank, dtype)
        for operation, combine in REDUCTIONS.items():
            tensor = inputs[rank.number].npu()
            dist.all_reduce(tensor, operation)
            assert_same(tensor, reduce(combine, inputs))


def reduce_to_one(rank: Rank) -> None:
    for dtype in REDUCED:
        inputs = make_inputs(rank, dtype)
        for root in range(rank.size):
            tensor = inputs[rank.number].npu()
            dist.reduce(tensor, root)
            if rank.number == root:
                assert_same(tensor, reduce(torch.add, inputs))


def reduce_scatter(rank: Rank) -> None:
    for dtype in REDUCED:
        inputs = make_inputs(rank, dtype, LENGTH * rank.size)
        expected = reduce(torch.add, inputs).chunk(rank.size)[rank.number]
        mine = inputs[rank.number].npu()
        from_one_tensor, from_list = torch.empty_like(mine[:LENGTH]), torch.empty_like(mine[:LENGTH])
        dist.reduce_scatter_single(from_one_tensor, mine)
        dist.reduce_scatter(from_list, list(mine.chunk(rank.size)))
        assert_same(from_one_tensor, expected)
        assert_same(from_list, expected)


def broadcast(rank: Rank) -> None:
    for dtype in (*CARRIED, torch.bool):
        inputs = make_inputs(rank, dtype)
        for root in range(rank.size):
            tensor = inputs[rank.number].npu()
            dist.broadcast(tensor, root)
            assert_same(tensor, inputs[root])


def all_gather(rank: Rank) -> None:
    for dtype in CARRIED:
        inputs = make_inputs(rank, dtype)
        mine = inputs[rank.number].npu()
        into_one_tensor = torch.empty(LENGTH * rank.size, dtype=dtype, device="npu")
        into_list = [torch.empty_like(mine) for _ in inputs]
        dist.all_gather_single(into_one_tensor, mine)
        dist.all_gather(into_list, mine)
        assert_same(into_one_tensor, torch.cat(inputs))
        for found, expected in zip(into_list, inputs, strict=True):
            assert_same(found, expected)


def all_to_all(rank: Rank) -> None:
    for dtype in CARRIED:
        inputs = make_inputs(rank, dtype, LENGTH * rank.size)
        expected = torch.cat([sent.chunk(rank.size)[rank.number] for sent in inputs])
        mine = inputs[rank.number].npu()
        into_one_tensor, into_list = torch.empty_like(mine), list(torch.empty_like(mine).chunk(rank.size))
        dist.all_to_all_single(into_one_tensor, mine)
        dist.all_to_all(into_list, list(mine.chunk(rank.size)))
        assert_same(into_one_tensor, expected)
        assert_same(torch.cat(into_list), expected)


def all_to_all_uneven(rank: Rank) -> None:
    """Rank r sends lengths[r][s] elements to rank s: nothing at all, little, and more than a piece."""
    lengths = [[0, 7, 3000], [2500, 1, 0], [3, 0, 40]]
    lengths = [row[: rank.size] for row in lengths[: rank.size]]
    for dtype in CARRIED:
        inputs = [make_input(number, dtype, sum(row)) for number, row in enumerate(lengths)]
        expected = torch.cat([sent.split(row)[rank.number] for sent, row in zip(inputs, lengths, strict=True)])
        found = torch.empty(len(expected), dtype=dtype, device="npu")
        incoming = [row[rank.number] for row in lengths]
        dist.all_to_all_single(found, inputs[rank.number].npu(), incoming, lengths[rank.number])
        assert_same(found, expected)


def pass_messages(rank: Rank) -> None:
    """Rank 0 sends to rank 1, which sends something else back."""
    peer = 1 - rank.number
    for dtype in CARRIED:
        inputs = make_inputs(rank, dtype)
        tensors = {dist.send: inputs[rank.number].npu(), dist.recv: torch.empty(LENGTH, dtype=dtype, device="npu")}
        for step in (dist.send, dist.recv) if rank.number == 0 else (dist.recv, dist.send):
            step(tensors[step], peer)
        assert_same(tensors[dist.recv], inputs[peer])


def pass_many_messages(rank: Rank) -> None:
    """Each rank sends the next one two tensors of different types and the one before it one, all at once."""
    after, before = (rank.number + 1) % rank.size, (rank.number - 1) % rank.size
    inputs = [(make_input(number, torch.int8), make_input(number, torch.float32, 3)) for number in range(rank.size)]
    mine = [tensor.npu() for tensor in inputs[rank.number]]
    found = [torch.empty_like(tensor) for tensor in (*mine, mine[0])]
    sends = [(mine[0], after), (mine[1], after), (mine[0], before)]
    receipts = [(found[0], before), (found[1], before), (found[2], after)]
    pass_at_once([(dist.isend, *each) for each in sends] + [(dist.irecv, *each) for each in receipts])
    for tensor, expected in zip(found, (*inputs[before], inputs[after][0]), strict=True):
        assert_same(tensor, expected)


def pass_between_some(rank: Rank) -> None:
    """Rank 2 has no messages, and does not wait for the others."""
    if rank.number == 2:
        return
    tensor = make_input(0, torch.float32).npu() if rank.number == 0 else torch.empty(LENGTH, device="npu")
    pass_at_once([(dist.isend if rank.number == 0 else dist.irecv, tensor, 1 - rank.number)])
    assert_same(tensor, make_input(0, torch.float32))


def pass_at_once(messages: list[tuple[Any, torch.Tensor, int]]) -> None:
    """Queue all of (send or receive, tensor, other rank), and wait for them on this stream."""
    for work in dist.batch_isend_irecv([dist.P2POp(*message) for message in messages]):
        work.wait()


def pass_empty_tensors(rank: Rank) -> None:
    nothing = torch.empty(0, device="npu")
    dist.all_reduce(nothing)
    dist.all_to_all_single(nothing, nothing, [0] * rank.size, [0] * rank.size)
    torch.npu.synchronize()


def meet_at_barrier(rank: Rank) -> None:
    """Rank 0 is at the barrier, or past it if it holds no rank, before rank 1 is."""
    if rank.number == 0:
        rank.announce("rank 0 comes")
        dist.barrier()
        assert rank.is_told("rank 1 comes")
    else:
        rank.wait_for("rank 0 comes")
        time.sleep(GRACE)
        rank.announce("rank 1 comes")
        dist.barrier()


def trace(rank: Rank, job: Job) -> set[str]:
    """Which functions of HCCL a job runs."""
    with rank.standin.trace() as kernels:
        job(rank)
        torch.npu.synchronize()
    return {kernel.name for kernel in kernels if kernel.name.startswith("Hccl")}


COLLECTIVES = {
    all_reduce: {"HcclAllReduce"},
    reduce_to_one: {"HcclReduce"},
    reduce_scatter: {"HcclReduceScatter"},
    broadcast: {"HcclBroadcast"},
    all_gather: {"HcclAllGather"},
    all_to_all: {"HcclAlltoAll", "HcclAlltoAllV"},
    all_to_all_uneven: {"HcclAlltoAllV"},
    pass_many_messages: {"HcclBatchSendRecv"},
}
BETWEEN_TWO = {pass_messages: {"HcclSend", "HcclRecv"}, pass_empty_tensors: {"HcclAllReduce", "HcclAlltoAllV"}}


@pytest.mark.parametrize(("job", "functions"), {**COLLECTIVES, **BETWEEN_TWO}.items())
def test_two_ranks_get_what_each_collective_should_give(pair: Ranks, job: Job, functions: set[str]) -> None:
    assert pair.run(trace, job) == [functions, functions]


@pytest.mark.slow
@pytest.mark.parametrize("job", COLLECTIVES)
def test_three_ranks_get_the_same_bits_as_if_reduced_in_rank_order(trio: Ranks, job: Job) -> None:
    trio.run(job)


def test_ranks_without_messages_do_not_take_part(trio: Ranks) -> None:
    trio.run(meet_at_barrier)  # the first call on a communicator makes it, and needs all ranks
    trio.run(pass_between_some)


def test_a_barrier_lets_no_rank_past_before_all_have_come(pair: Ranks) -> None:
    pair.run(meet_at_barrier)
