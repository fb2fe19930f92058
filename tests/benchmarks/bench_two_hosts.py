"""What overlap brings between two hosts, with the real vLLM: link rates, workloads, and both kinds of parallelism.

    python -m tests.benchmarks.bench_two_hosts --write-page
    python -m tests.benchmarks.bench_two_hosts --rates 200mbit --repeat 2 --workloads 1x2000 --parallel tensor

It makes two network namespaces (as root), a DeepSeek-V3 with random weights, and an engine over both for each kind of
parallelism, which then sees all rates, and measures its costs at each. Every workload runs unsplit, split without
overlap, in nano-batches, and as planned from the costs, in turn. With pytest, only what there are targets for
is measured, and held against them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

import pytest

from dbo_runtime.config import read_environment
from examples.network_hosts import NetworkError
from examples.process_group import Program, start_together, wait_for_first
from examples.two_nodes import PARALLEL
from tests.benchmarks.measured_hosts import (
    DEFAULT_FAMILY,
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
from tests.benchmarks.targets import find_missed
from tests.benchmarks.two_hosts_cells import NO_LIMIT, Cell
from tests.benchmarks.two_hosts_report import (
    ENOUGH,
    TARGET_PARALLEL,
    TARGET_RATE,
    TARGETS,
    find_targets,
    write_report,
)
from tests.benchmarks.workloads import NAMES, read_workload
from tests.support.page import write_section
from tests.support.vllm.families import FAMILIES, find_backend

RATES = ("50mbit", "200mbit", "1gbit", NO_LIMIT)
BUDGET = 45  # as in a server
MODULE = "python -m tests.benchmarks.bench_two_hosts"


def test_overlap_between_two_hosts_brings_what_is_asked_of_it() -> None:
    try:
        check_environment()
    except (BenchError, NetworkError) as error:
        pytest.skip(str(error))
    cells = measure_all([TARGET_PARALLEL], [TARGET_RATE], list(TARGETS), ENOUGH)
    print("\n" + "\n".join(report(cells, ENOUGH)))
    assert all(cell.same for cell in cells)
    assert not find_missed(find_targets(cells))


def main() -> int:
    """Measure, print, and write the page if asked."""
    arguments = parse_arguments()
    words = arguments.rates, arguments.workloads, arguments.repeat, arguments.budget, arguments.family
    cells = measure_all(arguments.parallel, *words)
    for parallel in arguments.parallel:
        own = [cell for cell in cells if cell.parallel == parallel]
        lines = report(own, arguments.repeat, arguments.family)
        print("\n".join(lines))
        if arguments.write_page:
            section = f"{arguments.section}-{parallel}"
            write_section(section, " ".join([MODULE, *sys.argv[1:]]), lines)
            draw_section(section)
    if all(cell.same for cell in cells):
        return 0
    print("error: not all modes gave the same tokens; the report names the workloads.", file=sys.stderr)
    return 1


def parse_arguments() -> argparse.Namespace:
    """Read the command line.

    Raises:
        BenchError, NetworkError, WorkloadError: if there is something wrong with it.
    """
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", default=list(RATES), help="in the words of tc, or `none` (default: four)")
    parser.add_argument("--workloads", nargs="+", default=list(NAMES), help=f"(default: {' '.join(NAMES)})")
    parser.add_argument("--parallel", nargs="+", choices=tuple(PARALLEL), default=list(PARALLEL), help="(default: all)")
    parser.add_argument("--repeat", type=count, default=ENOUGH, help=f"runs of each mode (default: {ENOUGH})")
    parser.add_argument("--budget", type=count, default=BUDGET, help=f"seconds to calibrate (default: {BUDGET})")
    parser.add_argument(
        "--family", choices=tuple(FAMILIES), default=DEFAULT_FAMILY, help=f"(default: {DEFAULT_FAMILY})"
    )
    parser.add_argument("--write-page", action="store_true", help="write the figures to docs/benchmarks.md, too")
    parser.add_argument("--section", default="two-hosts", help="of the page; PARALLEL is added (default: two-hosts)")
    arguments = parser.parse_args()
    check_rates(arguments.rates)
    for name in arguments.workloads:
        read_workload(name)
    return arguments


def measure_all(
    parallel: Sequence[str],
    rates: Sequence[str],
    workloads: Sequence[str],
    repeat: int,
    budget: int = BUDGET,
    family: str = DEFAULT_FAMILY,
) -> list[Cell]:
    """Measure every workload at every rate for each kind of share the model, each of which starts engines once.

    Raises:
        BenchError: if a node fails.
        NetworkError: if hosts cannot be made.
    """
    cells: list[Cell] = []
    for mode in parallel:
        with prepare(family) as setting:
            name = PARALLEL[mode].format(dispatch=find_dispatch())
            print(f"starting engines: {name} ...", file=sys.stderr, flush=True)
            words = ["--rates", *rates, "--workloads", *workloads, "--repeat", str(repeat), "--budget", str(budget)]
            cells += run_nodes(setting, mode, [*words, "--attention-backend", find_backend(family)])
    return cells


def run_nodes(setting: Setting, parallel: str, words: list[str]) -> list[Cell]:
    """Run a node on either host, and return what the first one measured."""
    results = setting.directory / "results.json"
    this = [sys.executable, "-m", "tests.benchmarks.two_hosts_node", "--parallel", parallel, *words]
    this += ["--model", str(setting.model), "--master", setting.master, "--results", str(results), "--interfaces"]
    this += [f"{host.namespace}:{host.interface}" for host in setting.hosts]
    nodes = (
        Program(
            host.command(*this, "--node", str(node)),
            # The engine in the process that drives it: it takes its steps when told to.
            setting.environment(node, VLLM_ASCEND_ENABLE_DBO="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", DBO_GENERIC="1"),
        )
        for node, host in enumerate(setting.hosts)
    )
    with start_together(*nodes) as (leader, follower):
        ended = wait_for_first(leader, follower)
    if ended != 0:
        which = "second" if ended is None else "first"
        raise BenchError(f"{parallel}: the {which} host's node has failed; its own message is above.")
    return [Cell.from_dict(each) for each in json.loads(results.read_text())]


def report(cells: Sequence[Cell], repeat: int, family: str = DEFAULT_FAMILY) -> list[str]:
    """Return the page's lines."""
    return write_report(cells, repeat, find_dispatch(), family)


def find_dispatch() -> str:
    """Return how tokens are dispatched."""
    return read_environment(os.environ).dispatch


if __name__ == "__main__":
    sys.exit(run_program(main))
