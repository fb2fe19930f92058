"""Ranks find out whether all of them run dbo_runtime, through torch's own store, before any collective."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

from dbo_runtime.errors import ConfigError
from dbo_runtime.vllm_plugin.api.rank_store import announce_rank
from dbo_runtime.vllm_plugin.install.rank_presence import require_all_ranks
from tests.support.ports import find_free_ports

PATIENCE_SECONDS = 2.0


def be_rank(rank: int, size: int, port: int, silent: tuple[int, ...], lag: float, folder: Path) -> None:
    """Announce this rank, unless it is *silent*, and write down what it finds; the last one is *lag* seconds late."""
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=size, rank=rank)
    if rank == size - 1:
        time.sleep(lag)
    if rank not in silent:
        announce_rank()
    start, said = time.monotonic(), "all are here"
    try:
        if rank not in silent:
            require_all_ranks(PATIENCE_SECONDS)
    except ConfigError as error:
        said = str(error)
    (folder / str(rank)).write_text(f"{time.monotonic() - start} {said}")
    if rank == 0:  # it keeps the store
        while len(list(folder.iterdir())) < size:
            time.sleep(0.05)


def run_ranks(size: int, folder: Path, silent: tuple[int, ...] = (), lag: float = 0.0) -> list[tuple[float, str]]:
    mp.start_processes(be_rank, (size, find_free_ports(1), silent, lag, folder), nprocs=size, start_method="spawn")
    found = [(folder / str(rank)).read_text().partition(" ") for rank in range(size)]
    return [(float(seconds), said) for seconds, _, said in found]


@pytest.mark.slow
def test_ranks_in_which_it_is_not_switched_on_are_named_by_the_others(tmp_path: Path) -> None:
    first, _, third, _ = run_ranks(4, tmp_path, silent=(1, 3))
    for seconds, said in (first, third):
        assert PATIENCE_SECONDS <= seconds < 10 * PATIENCE_SECONDS
        assert said.startswith("rank 1, rank 3 of vLLM's world did not answer within 2 s. Set VLLM_ASCEND_ENABLE_DBO=1")


@pytest.mark.slow
def test_a_rank_that_comes_later_is_waited_for(tmp_path: Path) -> None:
    found = run_ranks(2, tmp_path, lag=0.7)
    assert [said for _, said in found] == ["all are here"] * 2


def test_one_rank_without_a_world_waits_for_nobody() -> None:
    if dist.is_initialized():
        pytest.skip("another test in this process has made a world")
    announce_rank()
    require_all_ranks(0.0)
