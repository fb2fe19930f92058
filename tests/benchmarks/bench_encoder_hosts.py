"""What overlap brings to a vision encoder that two hosts share: unsplit, split without overlap, and overlapped.

    python -m pytest tests/benchmarks/bench_encoder_hosts.py -q -s

vLLM's own encoder of either family, with random weights, over two network namespaces (root) and a link of limited rate.
Each round runs all modes once, in random order, on the same pictures, and all give the same bits. Figures are medians
over rounds, and ratios medians of the ratios within a round.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median

import pytest

from examples.network_hosts import NetworkError, TwoHosts, check_requirements
from examples.process_group import Program, start_together, wait_for_first
from tests.support.page import Publish, find_command, make_table

pytest.importorskip("vllm", reason="needs vLLM's encoders")

from tests.benchmarks.encoder_node import OFF, OVERLAP, SEQUENTIAL
from tests.benchmarks.measured_hosts import MASTER_PORT, Setting
from tests.support.vllm.encoder_ranks import FAMILIES

RATES = ("200mbit", "500mbit")


def test_an_encoder_over_two_hosts_overlaps(publish: Publish, tmp_path: Path) -> None:
    try:
        check_requirements()
    except NetworkError as error:
        pytest.skip(str(error))
    rows = []
    for family in FAMILIES:
        for rate in RATES:
            seconds = measure(family, rate, tmp_path)
            times = [f"{median(seconds[mode]):.3f}" for mode in (OFF, SEQUENTIAL, OVERLAP)]
            gains = [find_ratio(seconds[mode], seconds[OVERLAP]) for mode in (OFF, SEQUENTIAL)]
            rows.append([family, rate, *times, *(f"{gain:.2f}x" for gain in gains)])
    header = ["encoder", "link", "unsplit, s", "split, no overlap, s", "overlap, s", "over unsplit", "over no overlap"]
    publish("encoder-hosts", find_command(__file__), make_table(header, rows))


def measure(family: str, rate: str, folder: Path) -> dict[str, list[float]]:
    """Return the first host's seconds of each mode."""
    with TwoHosts(rate) as hosts:
        setting = Setting(folder, folder, hosts)
        meeting, results = f"tcp://{hosts[0].address}:{MASTER_PORT}", folder / f"{family}-{rate}.json"
        node = [sys.executable, "-m", "tests.benchmarks.encoder_node", family]
        programs = [
            Program(
                host.command(*node, str(rank), meeting, str(results)), setting.environment(rank, OMP_NUM_THREADS="1")
            )
            for rank, host in enumerate(hosts)
        ]
        with start_together(*programs) as (first, second):
            ended = wait_for_first(first, second)
    assert ended == 0, "a host's program has failed; its own message is above"
    found: dict[str, list[float]] = json.loads(results.read_text())
    return found


def find_ratio(ones: list[float], others: list[float]) -> float:
    return median(one / other for one, other in zip(ones, others, strict=True))
