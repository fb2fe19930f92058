"""What ranks are told when they do not agree, or one does not come, and that none waits forever."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.standin.npu_ranks import Rank, Ranks

DEVICE = "npu:0"


@pytest.fixture(scope="module")
def pair(standin_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two ranks that wait only one second for each other."""
    with Ranks(2, tmp_path_factory.mktemp("pair"), {"NPU_STANDIN_HCCL_TIMEOUT": "1"}) as ranks:
        yield ranks


def make_tensor() -> torch.Tensor:
    return torch.ones(4, device=DEVICE)


def make_ready_group() -> Any:
    """A group whose communicator exists. Every job has its own, because one that has failed stays so."""
    group = dist.new_group()
    dist.all_reduce(make_tensor(), group=group)
    torch.npu.synchronize()
    return group


def catch_failure() -> str:
    """The error that synchronizing gives."""
    with pytest.raises(RuntimeError) as caught:
        torch.npu.synchronize()
    return str(caught.value)


def wait_in_vain(rank: Rank) -> list[str]:
    """Rank 0 calls, and calls again; rank 1 does neither."""
    group = make_ready_group()
    failures = []
    if rank.number == 0:
        for _ in range(2):
            dist.all_reduce(make_tensor(), group=group)
            failures.append(catch_failure())
        rank.announce("given up")
    rank.wait_for("given up")
    return failures


def make_a_communicator_in_vain(rank: Rank) -> None:
    group = dist.new_group()
    if rank.number == 0:
        with pytest.raises(RuntimeError, match=r"HcclCommInitRootInfo of \w+: rank 0 waited 1 s for rank 1 of 2"):
            dist.all_reduce(make_tensor(), group=group)
        rank.announce("given up")
    rank.wait_for("given up")


def call_different_collectives(rank: Rank) -> str:
    group = make_ready_group()
    if rank.number == 0:
        dist.all_reduce(make_tensor(), group=group)
    else:
        dist.broadcast(make_tensor(), 0, group=group)
    return catch_failure()


def send_what_is_not_expected(rank: Rank) -> str:
    """Rank 0 sends 3 elements to rank 1, which expects 2."""
    group = make_ready_group()
    sent, received = ([1, 3], [1, 1]) if rank.number == 0 else ([1, 1], [2, 1])
    dist.all_to_all_single(torch.empty(sum(received), device=DEVICE), make_tensor()[: sum(sent)], received, sent, group)
    return catch_failure()


def call_from_two_streams_at_once(rank: Rank) -> str:
    """The second call ends the first one too, which would wait longer than the test does."""
    os.environ["NPU_STANDIN_HCCL_TIMEOUT"] = "600"
    group = make_ready_group()
    os.environ["NPU_STANDIN_HCCL_TIMEOUT"] = "1"
    communicator = ctypes.c_void_p(group._get_backend(torch.device(DEVICE)).get_hccl_comm(rank.number))
    if rank.number == 1:
        rank.wait_for("called")
    for stream in [torch.npu.Stream(), torch.npu.Stream()][: 2 - rank.number]:
        assert ctypes.CDLL(None).HcclBarrier(communicator, ctypes.c_void_p(stream.npu_stream)) == 0
    failure = catch_failure()
    rank.announce("called")
    return failure


def broadcast_an_unknown_type(rank: Rank) -> str:
    dist.broadcast(torch.empty(4, dtype=torch.float8_e4m3fn, device=DEVICE), 0)
    return catch_failure()


def die_while_awaited(rank: Rank) -> None:
    group = make_ready_group()
    if rank.number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(make_tensor(), group=group)
    torch.npu.synchronize()


def raise_while_awaited(rank: Rank) -> None:
    if rank.number == 1:
        raise ValueError("rank 1 has had enough")
    rank.wait_for("what is never told")


def add_up(rank: Rank) -> float:
    tensor = make_tensor()
    dist.all_reduce(tensor)
    return tensor[0].item()


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.slow
def test_who_waits_in_vain_learns_for_whom_and_at_once_the_second_time(pair: Ranks) -> None:
    (first, second), _ = pair.run(wait_in_vain)
    assert "HcclAllReduce of 4 x float32" in first
    assert "rank 0 waited 1 s for rank 1 of 2" in first
    assert "the communicator has failed: HcclAllReduce" in second


def test_a_communicator_that_a_rank_does_not_join_is_refused(pair: Ranks) -> None:
    pair.run(make_a_communicator_in_vain)


def test_ranks_in_different_collectives_learn_which(pair: Ranks) -> None:
    for failure in pair.run(call_different_collectives):
        assert "HcclAllReduce of 4 x float32" in failure
        assert "HcclBroadcast of 4 x float32" in failure


def test_a_rank_that_sends_more_than_is_expected_is_named(pair: Ranks) -> None:
    for failure in pair.run(send_what_is_not_expected):
        assert "rank 1 expects 8 bytes of rank 0, which sends 12" in failure


def test_two_streams_in_one_communicator_are_refused(pair: Ranks) -> None:
    """HCCL hangs then, or worse."""
    for failure in pair.run(call_from_two_streams_at_once):
        assert "another stream of this process is in a collective of this communicator" in failure


def test_a_data_type_that_the_stand_in_lacks_is_refused(pair: Ranks) -> None:
    for failure in pair.run(broadcast_an_unknown_type):
        assert "the stand-in has no HCCL data type 15" in failure


@pytest.mark.slow
def test_a_rank_that_dies_is_missed_by_the_other_and_no_process_stays(pair: Ranks) -> None:
    """The next job gets new processes."""
    assert pair.run(add_up) == [2.0, 2.0]
    pids = pair.pids
    with pytest.raises(AssertionError) as caught:
        pair.run(die_while_awaited)
    assert "rank 1 has died" in str(caught.value)
    assert "rank 0 waited 1 s for rank 1 of 2" in str(caught.value)
    assert all(is_gone(pid) for pid in pids)
    assert pair.run(add_up) == [2.0, 2.0]


def test_a_job_that_fails_is_told_and_ends_those_who_wait(pair: Ranks) -> None:
    with pytest.raises(AssertionError) as caught:
        pair.run(raise_while_awaited)
    assert "ValueError: rank 1 has had enough" in str(caught.value)
    assert "rank 0 has not answered" in str(caught.value)
