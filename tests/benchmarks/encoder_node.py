"""One of two hosts that share a vision encoder: `bench_encoder_hosts.py` starts it on either.

python -m tests.benchmarks.encoder_node FAMILY RANK MEETING RESULTS
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from dbo_runtime.config import RuntimeConfig
from dbo_runtime.devices.cpu import CpuDevice
from dbo_runtime.vllm_plugin.encoder.host_lengths import install_host_lengths
from dbo_runtime.vllm_plugin.platforms.cpu import capture_thread_state
from tests.support.vllm.encoder_ranks import join, make_encoder, make_pixels, split

ROUNDS = 7
SIZES = {"depth": 4, "hidden_size": 512, "intermediate_size": 1024, "num_heads": 8, "out_hidden_size": 512}
PICTURES = [[1, 24, 24]] * 4
OFF, SEQUENTIAL, OVERLAP = "unsplit", "split, no overlap", "overlap"
MODES = {
    OFF: RuntimeConfig(enabled=True, mode="off"),
    SEQUENTIAL: RuntimeConfig(enabled=True, mode="always", policy=("sequential", 0)),
    OVERLAP: RuntimeConfig(enabled=True, mode="auto"),
}


def main() -> None:
    """Time all modes in turns, and write down the first host's seconds."""
    family, rank, meeting, results = sys.argv[1:]
    os.sched_setaffinity(0, {int(os.environ["VLLM_CPU_OMP_THREADS_BIND"])})
    os.environ["VLLM_DIST_IDENT"] = f"host {rank}"  # apart, so that no shared memory is looked for
    device = CpuDevice(capture_state=capture_thread_state)
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    with torch.inference_mode(), join(int(rank), 2, meeting) as group:
        install_host_lengths()
        encoder = make_encoder(family, **SIZES)
        pixels = make_pixels(encoder, PICTURES, 0)
        found = []
        with split(encoder, group, MODES[OVERLAP], device) as forward:
            chance = random.Random(0)  # the same on both
            for _ in range(ROUNDS + 1):
                for mode in chance.sample(list(MODES), len(MODES)):
                    forward.runtime.config = MODES[mode]
                    dist.barrier()
                    start = time.perf_counter()
                    found.append(encoder(pixels, PICTURES))
                    dist.barrier()
                    seconds[mode].append(time.perf_counter() - start)
            assert forward.runtime.statistics.split == 2 * (ROUNDS + 1)
    assert all(torch.equal(one, found[0]) for one in found)
    device.close()
    if rank == "0":
        Path(results).write_text(json.dumps({mode: each[1:] for mode, each in seconds.items()}))


if __name__ == "__main__":
    main()
