"""Do two ranks of a process group live on one GPU, and how fast do they reduce there?

NCCL refuses two ranks of one host on one GPU ("Duplicate GPU detected"). The host is what NCCL_HOSTID says, so each
rank gets one of its own, and they meet over sockets.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from .core import milliseconds
from .findings import Findings, run_part, say_absent
from .nodes import find_port, make_variables, wait_for

RANKS = 2
SIZES = {"cuda": (1 << 20, 16 << 20, 64 << 20), "cpu": (1 << 16, 1 << 20)}
BACKENDS = {"cuda": "nccl", "cpu": "gloo"}
SIDE, PRODUCTS = 8192, 20
TIMES = 5
SECONDS = 45.0  # for everything


def run(findings: Findings, device: str, words: list[str]) -> None:
    """Start both ranks; the first one reports."""
    if words:
        reduce(findings, device)
        return
    port = find_port()
    own = [sys.executable, "-m", "tools.gpu_kit.parts.pair", str(findings.path), device, "rank"]
    ranks = []
    for rank in range(RANKS):
        variables = {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks.append(subprocess.Popen(own, env={**os.environ, **make_variables(rank), **variables}))
    findings.take_over(wait_for(ranks, SECONDS))


def reduce(findings: Findings, device: str) -> None:
    """Reduce tensors of several sizes; check the sums, and measure; then concurrently with products."""
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(BACKENDS[device], timeout=timedelta(seconds=5 * SECONDS))
    if dist.get_rank():
        findings.be_silent()
    findings.note("backend", BACKENDS[device])
    for size in SIZES[device]:
        x = torch.full((size // 2,), dist.get_rank() + 1.0, dtype=torch.bfloat16, device=device)
        dist.all_reduce(x)
        if not bool((x == sum(range(1, RANKS + 1))).all()):
            findings.fail(f"the sum of {size} bytes is wrong")
        seconds = measure(device, partial(dist.all_reduce, x))
        findings.note(
            f"all-reduce of {size >> 10} KiB", {"ms": milliseconds(seconds), "GB/s": round(size / seconds / 1e9, 3)}
        )
    findings.note(
        "concurrent with products", measure_both() if device == "cuda" else say_absent("there are no streams")
    )


def measure_both() -> dict[str, float]:
    """Return how long products take, an all-reduce, and both on streams of their own."""
    a = torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16)
    cuda: Any = torch.cuda
    x, side = torch.ones(8 << 20, dtype=torch.bfloat16, device="cuda"), cuda.Stream()

    def multiply() -> None:
        for _ in range(PRODUCTS):
            a @ a

    def do_both() -> None:
        with torch.cuda.stream(side):
            dist.all_reduce(x)
        multiply()

    multiply()
    times: dict[str, Callable[[], Any]] = {"products": multiply, "16 MiB": partial(dist.all_reduce, x), "both": do_both}
    return {name: milliseconds(measure("cuda", work)) for name, work in times.items()}


def measure(device: str, work: Callable[[], Any]) -> float:
    """Return the fewest seconds of *work*, which all ranks begin together."""
    best = float("inf")
    for _ in range(TIMES):
        dist.barrier()
        getattr(torch, device).synchronize()
        start = time.perf_counter()
        work()
        getattr(torch, device).synchronize()
        best = min(best, time.perf_counter() - start)
    return best


if __name__ == "__main__":
    run_part(run)
