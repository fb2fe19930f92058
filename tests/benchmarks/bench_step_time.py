"""What planning adds to the time of steps: `vllm serve` of 61 layers over two hosts, with `auto` and with `off`.

    python -m tests.benchmarks.bench_step_time --write-page
    python -m tests.benchmarks.bench_step_time --rates none --rounds 1 --requests 8

It makes two network namespaces (as root), and a DeepSeek-V3 with random weights and tiny layers, and sends requests
whose prompts and decodes mix in batches that are never the same. With pytest, it is held against its targets.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import permutations
from typing import Any

import pytest

from examples.network_hosts import NetworkError
from tests.benchmarks import step_timer
from tests.benchmarks.measured_hosts import (
    BenchError,
    OneLineParser,
    check_environment,
    check_rates,
    count,
    prepare,
    run_program,
)
from tests.benchmarks.queued_requests import ROOT, make_requests, send
from tests.benchmarks.served_hosts import Server, serve
from tests.benchmarks.step_time_report import ENOUGH, HEADS, HIDDEN, LAYERS, MODES, UNSPLIT, find_targets, write_report
from tests.benchmarks.targets import find_missed
from tests.benchmarks.timed_steps import Step, Turn
from tests.benchmarks.two_hosts_cells import NO_LIMIT
from tests.support.page import write_section

MODULE = "python -m tests.benchmarks.bench_step_time"
RATES, REQUESTS = (NO_LIMIT, "1gbit"), 64
OPTIONS = {
    "worker_extension_cls": step_timer.NAME,
    "max_num_seqs": 8,  # bounds steps: prompts come whole, for vLLM's CPU build chunks none of latent attention
    "max_model_len": 512,
    "kv_cache_memory_bytes": 1 << 29,
}
STRIDE = 7  # through the orders, so that each mode is soon in each place


def test_planning_does_not_lengthen_steps() -> None:
    try:
        check_environment()
    except (BenchError, NetworkError) as error:
        pytest.skip(str(error))
    turns = {rate: measure_link(rate, ENOUGH, REQUESTS) for rate in RATES}
    print("\n" + "\n".join(write_report(turns, ENOUGH)))
    assert not find_missed(find_targets(turns))


def main() -> int:
    """Measure, print, and write the page if asked."""
    arguments = parse_arguments()
    turns = {rate: measure_link(rate, arguments.rounds, arguments.requests) for rate in arguments.rates}
    lines = write_report(turns, arguments.rounds)
    print("\n".join(lines))
    if arguments.write_page:
        write_section("step-time", " ".join([MODULE, *sys.argv[1:]]), lines)
    return 0


def parse_arguments() -> argparse.Namespace:
    """Read the command line.

    Raises:
        BenchError, NetworkError: if there is something wrong with it.
    """
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rates", nargs="+", default=list(RATES), help=f"of the link, `none` for no limit (default: {' '.join(RATES)})"
    )
    parser.add_argument("--rounds", type=count, default=ENOUGH, help=f"turns of each mode (default: {ENOUGH})")
    parser.add_argument("--requests", type=count, default=REQUESTS, help=f"of a turn (default: {REQUESTS})")
    parser.add_argument("--write-page", action="store_true", help="write the figures to docs/benchmarks.md, too")
    arguments = parser.parse_args()
    check_rates(arguments.rates)
    return arguments


def measure_link(rate: str, rounds: int, requests: int) -> list[Turn]:
    """Measure each mode of a server over a link of this rate.

    Raises:
        BenchError: if the server fails.
    """
    with prepare(hidden=HIDDEN, layers=LAYERS, heads=HEADS) as setting:
        for host in setting.hosts:
            host.set_rate(None if rate == NO_LIMIT else rate)
        say(f"{rate}: starting a server, which measures its costs ...")
        settings = {"VLLM_ASCEND_ENABLE_DBO": "1", "DBO_CALIBRATE": "1", "PYTHONPATH": str(ROOT)}
        with serve(setting, OPTIONS, **settings) as server:
            return list(measure(server, rounds, requests))


def measure(server: Server, rounds: int, requests: int) -> Iterator[Turn]:
    """Yield the turns, after a round to warm up."""
    orders = list(permutations(MODES))  # what ran before leaves its mark
    for number in range(rounds + 1):
        asked = make_requests(requests, seed=number)
        for mode in orders[number * STRIDE % len(orders)]:
            turn = Turn(mode, number, run_turn(server, mode, asked))
            if number:
                taken = sum(step.seconds for step in turn.steps)
                say(f"round {number} of {rounds}: {mode}, {len(turn.steps)} steps in {taken:.1f} s")
                yield turn


def run_turn(server: Server, mode: str, requests: list[dict[str, Any]]) -> list[Step]:
    """Switch the server to a mode, send it the requests, and return the steps that they took."""
    server.call("dbo_configure", MODES[mode])
    server.call("start_step_times", mode == UNSPLIT)
    send(server, requests)
    return [Step(*step) for step in server.call("take_step_times")]


def say(line: str) -> None:
    """Report progress."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(run_program(main))
