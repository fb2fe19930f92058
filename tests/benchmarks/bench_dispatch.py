"""What dispatch and combine cost, all-gather against all-to-all, between two processes over gloo.

    python -m pytest tests/benchmarks/bench_dispatch.py -q -s

Over loopback, where bytes cost next to nothing, and over a link of limited rate between two network namespaces where
there are root and iproute2. The two take turns, and ratios are medians of the ratios of neighbours, so that what
else the machine does counts little. Experts are chosen at random: of two ranks, a token with many experts needs both.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dbo_runtime.engine.dispatch import AllGather, AllToAll, CombineHandle, DispatchedTokens, Dispatcher, Routing
from examples.network_hosts import NetworkError, TwoHosts, check_requirements

ROOT = Path(__file__).parents[2]
RANKS = 2
HIDDEN = 1024
EXPERTS = 64
RATE = "200mbit"
CASES = [(tokens, top_k) for tokens in (64, 1024) for top_k in (1, 2, 8)]
SLOW_CASES = [(512, 1), (512, 2), (512, 8)]
PATIENCE = 300  # seconds for all cases


def there_and_back(dispatcher: Dispatcher, x: torch.Tensor, routing: Routing) -> tuple[DispatchedTokens, CombineHandle]:
    """Dispatch and combine once; the experts do nothing."""
    routing = dispatcher.exchange_sizes(dispatcher.choose_ranks(routing))
    arrived, back = dispatcher.dispatch(x, routing)
    dispatcher.combine(arrived.x, back)
    return arrived, back


def count_bytes(arrived: DispatchedTokens, mode: CombineHandle, rank: int) -> int:
    """Return what a rank sends to others there and back; the exchanged sizes, 8 bytes a rank, are left out."""
    row = arrived.x.shape[1] * arrived.x.element_size()
    routing = arrived.ids.shape[1] * 8  # a weight and an id for each expert
    away, back = (sum(rows) - rows[rank] for rows in (mode.sent, mode.received))
    return away * (row + routing) + back * row


def measure(dispatchers: list[Dispatcher], tokens: int, top_k: int, runs: int) -> dict[str, Any]:
    """Return milliseconds of each dispatcher in each run [runs][dispatchers], and the bytes that it sends."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(tokens, HIDDEN, generator=generator)
    ids = torch.rand(tokens, EXPERTS, generator=generator).argsort(dim=1)[:, :top_k]
    routing = Routing(torch.rand(tokens, top_k, generator=generator), ids, (tokens,) * RANKS)
    traffic = [count_bytes(*there_and_back(dispatcher, x, routing), rank) for dispatcher in dispatchers]  # warms up
    times = [[time_once(dispatcher, x, routing) for dispatcher in dispatchers] for _ in range(runs)]
    return {"tokens": tokens, "top_k": top_k, "bytes": traffic, "ms": times}


def time_once(dispatcher: Dispatcher, x: torch.Tensor, routing: Routing) -> float:
    """Return the milliseconds of one mode there and back that all ranks begin together."""
    dist.barrier()
    start = time.perf_counter()
    there_and_back(dispatcher, x, routing)
    return (time.perf_counter() - start) * 1e3


def run_rank(rank: int, store: str, cases: list[tuple[int, int]], runs: int) -> None:
    """Be one rank; the first prints what it measured."""
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, store=dist.FileStore(store, RANKS))
    owners = torch.arange(EXPERTS) * RANKS // EXPERTS
    dispatchers = [AllGather(dist.group.WORLD), AllToAll(dist.group.WORLD, owners)]
    measured = [measure(dispatchers, tokens, top_k, runs) for tokens, top_k in cases]
    if rank == 0:
        print(json.dumps(measured))
    dist.destroy_process_group()


def run_ranks(ends: list[tuple[list[str], str]], cases: list[tuple[int, int]], runs: int) -> Any:
    """Run a rank at each end, given as (what its command begins with, interface); return what the first measured."""
    with tempfile.TemporaryDirectory() as folder:
        code = f"from {__name__} import run_rank; run_rank({{}}, '{folder}/store', {cases}, {runs})"
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        ranks = [
            subprocess.Popen(
                [*prefix, sys.executable, "-c", code.format(rank)],
                env={**env, "GLOO_SOCKET_IFNAME": interface},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, (prefix, interface) in enumerate(ends)
        ]
        try:
            outputs = [rank.communicate(timeout=PATIENCE)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()
    assert [rank.returncode for rank in ranks] == [0] * RANKS
    return json.loads(outputs[0])


def print_table(link: str, measured: list[dict[str, Any]]) -> None:
    """Print medians."""
    print(f"\ndispatch and combine, {RANKS} gloo ranks over {link}, [tokens a rank, {HIDDEN}] fp32, {EXPERTS} experts")
    print("(MB that a rank sends; ratios are all-to-all / all-gather)")
    print("tokens  top-k   all-gather           all-to-all           ratio: bytes    ms")
    for case in measured:
        gathered, exchanged = (median(times) for times in zip(*case["ms"], strict=True))
        ratio = median(exchanged / gathered for gathered, exchanged in case["ms"])
        sizes = [size / 1e6 for size in case["bytes"]]
        print(
            f"{case['tokens']:6}  {case['top_k']:5}   {sizes[0]:5.2f} MB {gathered:7.2f} ms  {sizes[1]:5.2f} MB "
            f"{exchanged:7.2f} ms          {sizes[1] / sizes[0]:.2f}  {ratio:.2f}"
        )


def can_make_hosts() -> bool:
    try:
        check_requirements()
    except NetworkError:
        return False
    return True


def test_over_loopback() -> None:
    print_table("loopback", run_ranks([([], "lo")] * RANKS, CASES, runs=15))


@pytest.mark.skipif(not can_make_hosts(), reason="needs root and iproute2 for network namespaces")
def test_over_a_slow_link() -> None:
    with TwoHosts(RATE) as hosts:
        measured = run_ranks([(host.command(), host.interface) for host in hosts], SLOW_CASES, runs=7)
    print_table(f"a {RATE} link", measured)
    gathered, exchanged = (median(times) for times in zip(*measured[0]["ms"], strict=True))
    assert exchanged < gathered  # half the bytes, where bytes are what takes time
