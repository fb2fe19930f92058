"""What host sequence lengths bring to a vision encoder on the CPU: the same forward with them and without, in one run.

    python -m pytest tests/benchmarks/bench_encoder.py -q -s

vLLM's own encoder of either family, with random weights, on one rank. Each round runs both modes once, in random order,
on the same pictures; figures are medians over rounds, and the ratio is the median of the ratios within a round. On an
NPU the plan saves what a CPU has not: a copy from the device, and a wait for it, in each block.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import median

import pytest

from tests.benchmarks.rounds import time_in_turns
from tests.support.page import Publish, find_command, make_table

pytest.importorskip("vllm", reason="needs vLLM's encoders")

import torch

from dbo_runtime.vllm_plugin.encoder.host_lengths import install_host_lengths
from tests.support.vllm.encoder_ranks import FAMILIES, Grids, join, make_encoder, make_pixels, unplanned

ROUNDS = 40
LEAST_RATIO = 0.98
SIZES = {"depth": 8, "hidden_size": 256, "intermediate_size": 512, "num_heads": 4, "out_hidden_size": 256}
WINDOW = {"qwen2.5": {"window_size": 112}, "qwen3": {}}  # the real one
PICTURES: dict[str, Grids] = {
    "64 of 64x64": [[1, 4, 4]] * 64,
    "64 of mixed sizes": [[1, 4 + 2 * (n % 3), 4 + 2 * (n % 2)] for n in range(64)],
    "3 of 448x448": [[1, 32, 32]] * 3,
}


def test_the_plan_never_costs_more_than_it_saves(publish: Publish, tmp_path: Path) -> None:
    rows, ratios = [], []
    with torch.inference_mode(), join(0, 1, f"file://{tmp_path}/rendezvous"):
        for family in FAMILIES:
            with unplanned():
                plain = make_encoder(family, **SIZES, **WINDOW[family])
            install_host_lengths()
            planned = make_encoder(family, **SIZES, **WINDOW[family])
            for name, grids in PICTURES.items():
                pixels = make_pixels(plain, grids, 0)
                modes = {"off": partial(plain, pixels, grids), "on": partial(planned, pixels, grids)}
                seconds = time_in_turns(modes, ROUNDS)
                each = [off / on for off, on in zip(seconds["off"], seconds["on"], strict=True)]
                ratios.append(median(each))
                times = [f"{median(seconds[mode]) * 1e3:.2f}" for mode in ("off", "on")]
                rows.append([family, name, *times, f"{ratios[-1]:.2f}x"])
    header = ["encoder", "pictures", "without the plan, ms", "with it, ms", "without / with"]
    reached = "Reached" if min(ratios) >= LEAST_RATIO else "**Missed**"
    target = f"- Target: never below {LEAST_RATIO}x. {reached}: {min(ratios):.2f}x."
    publish("encoder", find_command(__file__), [*make_table(header, rows), "", target])
    assert min(ratios) >= LEAST_RATIO
