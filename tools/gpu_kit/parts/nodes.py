"""Two nodes of one rank each on this machine: their variables, their port, and their end."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Sequence

POLL_SECONDS = 0.2
PATIENCE = "KIT_PATIENCE"
SHARED = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_NTHREADS": "4",
    "NCCL_NSOCKS_PERTHREAD": "4",
    "NCCL_CUMEM_ENABLE": "0",  # memory that ranks of a host share, which these are not to the library
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}


def make_variables(rank: int) -> dict[str, str]:
    """Return the variables of a rank, which is a host of its own to NCCL."""
    return {**SHARED, "NCCL_HOSTID": f"kit{rank}", "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN")}


def find_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> str | None:
    """Wait until the first process has ended, or any has failed; end the others. Return what went wrong, if anything.

    The first reports; the others follow, and have nothing more to do when it has ended. In a rehearsal all have more
    time, as jobs do.
    """
    seconds *= float(os.environ.get(PATIENCE, 1.0))
    deadline = time.monotonic() + seconds
    problem = None
    while processes[0].poll() is None and problem is None:
        if time.monotonic() > deadline:
            problem = f"no end after {seconds:.0f} s"
        bad = [number for number, process in enumerate(processes) if process.poll()]
        if bad:
            problem = f"rank {bad[0]} ended with {processes[bad[0]].returncode}"
        time.sleep(POLL_SECONDS)
    for process in processes:
        if process.poll() is None:
            try:
                process.wait(5 if problem is None else 0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    if problem is None and processes[0].returncode:
        problem = f"rank 0 ended with {processes[0].returncode}"
    return problem
