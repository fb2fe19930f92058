"""What overlap brings to those who are served: `vllm serve` over two hosts, asked by `vllm bench serve`.

    python -m tests.benchmarks.bench_serving --write-page
    python -m tests.benchmarks.bench_serving --workloads long-prompts --request-rates inf --repeat 1 --requests 4 \
        --skip-without

It makes two network namespaces (as root) joined at --rate, and a DeepSeek-V3 with random weights. Workloads are those
of two of vllm-ascend's pull requests, scaled down. With pytest, only what there are targets for is measured, and held
against them.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations

import pytest

from examples.network_hosts import NetworkError
from tests.benchmarks.measured_hosts import (
    BenchError,
    OneLineParser,
    Setting,
    check_environment,
    check_rates,
    count,
    prepare,
    run_program,
)
from tests.benchmarks.plots import draw_section
from tests.benchmarks.served_hosts import Server, serve
from tests.benchmarks.served_workloads import METRICS, TRAFFIC, OfferedLoad, Run, send
from tests.benchmarks.serving_report import (
    ENOUGH,
    MODES,
    OFF,
    ON,
    SPLIT,
    TARGET_LOAD,
    TARGET_RATE,
    WITHOUT,
    find_targets,
    write_report,
)
from tests.benchmarks.targets import find_missed
from tests.benchmarks.two_hosts_cells import NO_LIMIT
from tests.support.page import write_section

MODULE = "python -m tests.benchmarks.bench_serving"
STRIDE = 5  # through the orders, so that each mode is soon in each place


def test_overlap_serves_long_prompts_as_much_faster_as_is_asked_of_it() -> None:
    try:
        check_environment()
    except (BenchError, NetworkError) as error:
        pytest.skip(str(error))
    with prepare() as setting:
        runs = measure_all(setting, TARGET_RATE, [TARGET_LOAD], [OFF, ON], ENOUGH)
    print("\n" + "\n".join(write_report(runs, TARGET_RATE, ENOUGH)))
    assert not find_missed(find_targets(runs))


def main() -> int:
    """Measure, print, and write the page if asked."""
    arguments = parse_arguments()
    modes = [*MODES] if arguments.skip_without else [WITHOUT, *MODES]
    with prepare() as setting:
        runs = measure_all(setting, arguments.rate, choose_loads(arguments), modes, arguments.repeat)
    lines = write_report(runs, arguments.rate, arguments.repeat)
    print("\n".join(lines))
    if arguments.write_page:
        write_section("serving", " ".join([MODULE, *sys.argv[1:]]), lines)
        draw_section("serving")
    return 0


def parse_arguments() -> argparse.Namespace:
    """Read the command line.

    Raises:
        BenchError, NetworkError: if there is something wrong with it.
    """
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default=TARGET_RATE, help=f"of the link, or `none` (default: {TARGET_RATE})")
    parser.add_argument("--workloads", nargs="+", choices=tuple(TRAFFIC), default=list(TRAFFIC), help="(default: all)")
    parser.add_argument(
        "--request-rates", nargs="+", type=check_request_rate, help="a second, or `inf` (default: the workload's own)"
    )
    parser.add_argument("--requests", type=count, help="of each run (default: the workload's own)")
    parser.add_argument("--repeat", type=count, default=ENOUGH, help=f"runs of each mode (default: {ENOUGH})")
    parser.add_argument(
        "--skip-without", action="store_true", help="measure no server that was started without the variable"
    )
    parser.add_argument("--write-page", action="store_true", help="write the figures to docs/benchmarks.md, too")
    arguments = parser.parse_args()
    check_rates([arguments.rate])
    return arguments


def check_request_rate(words: str) -> str:
    """Return a rate of requests as it is written."""
    if not re.fullmatch(r"inf|\d+(\.\d+)?", words) or not float(words):
        raise argparse.ArgumentTypeError(f"{words!r} is no rate of requests; write it like 0.5, or inf")
    return words


def choose_loads(arguments: argparse.Namespace) -> list[OfferedLoad]:
    """Return what to send."""
    loads = []
    for name in arguments.workloads:
        traffic = replace(TRAFFIC[name], requests=arguments.requests or TRAFFIC[name].requests)
        loads += [OfferedLoad(traffic, rate) for rate in arguments.request_rates or traffic.rates]
    return loads


def measure_all(
    setting: Setting, link: str, loads: Sequence[OfferedLoad], modes: Sequence[str], repeat: int
) -> list[Run]:
    """Measure every load: with a server without the plugin, if that is asked for, and in each mode of one that has it.

    Raises:
        BenchError: if a server or a client fails.
    """
    for host in setting.hosts:
        host.set_rate(None if link == NO_LIMIT else link)
    runs: list[Run] = []
    if WITHOUT in modes:
        say("starting a server without the plugin ...")
        with serve(setting) as server:
            runs += measure(setting, server, loads, [WITHOUT], repeat)
    say("starting a server with the plugin, which measures its costs ...")
    with serve(setting, VLLM_ASCEND_ENABLE_DBO="1", DBO_CALIBRATE="1") as server:
        runs += measure(setting, server, loads, [mode for mode in modes if mode in MODES], repeat)
    return runs


def measure(
    setting: Setting, server: Server, loads: Sequence[OfferedLoad], modes: Sequence[str], repeat: int
) -> Iterator[Run]:
    """Yield the runs of a server, modes in turn, after one of each mode to warm up with each traffic."""
    orders = list(permutations(modes))  # what ran before leaves its mark
    warmed: set[str] = set()
    for load in loads:
        if load.traffic.name not in warmed:
            for mode in modes:
                run_once(setting, server, replace(load, rate="inf"), mode)
            warmed.add(load.traffic.name)
        for turn in range(repeat):
            for mode in orders[turn * STRIDE % len(orders)]:
                run = run_once(setting, server, load, mode)
                figures = ", ".join(f"{title} {run.figures[name]:.4g}" for title, name in METRICS.items())
                say(f"{load.traffic.name}, {load.rate} requests/s, {mode}, {turn + 1} of {repeat}: {figures}")
                yield run


def run_once(setting: Setting, server: Server, load: OfferedLoad, mode: str) -> Run:
    """Switch the server to a mode, and send it the requests."""
    if mode == WITHOUT:
        return Run(load, mode, send(setting, server, load))
    server.call("dbo_configure", MODES[mode])
    before = server.call("dbo_statistics")
    figures = send(setting, server, load)
    after = server.call("dbo_statistics")
    unsplit = sum(after["declined"].values()) - sum(before["declined"].values())
    return Run(load, mode, figures, sum(after[name] - before[name] for name in SPLIT), unsplit)


def say(line: str) -> None:
    """Report progress."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(run_program(main))
