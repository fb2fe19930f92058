"""`dbo simulate`: requests per second that an instance serves at a service level, with and without overlap."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace

from dbo_runtime.config import RuntimeConfig
from dbo_runtime.errors import ConfigError
from dbo_runtime.lab.simulate.cluster_report import describe_comparison, list_comparison
from dbo_runtime.lab.simulate.comparison import Scenario, compare_capacity, estimate_throughput
from dbo_runtime.lab.simulate.disturbance import Disturbances
from dbo_runtime.lab.simulate.instance import Layout
from dbo_runtime.lab.simulate.service_level import WARM_UP, ServiceLevel
from dbo_runtime.lab.simulate.step_times import StepPricer, predict_step_times
from dbo_runtime.lab.simulate.workload import Workload
from dbo_runtime.lab.whatif.corners import Corner
from dbo_runtime.lab.whatif.published_cases import open_costs
from dbo_runtime.lab.whatif.scale_cases import SCALE_CASES, USABLE, ScaleCase
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.setting_sources import read_options
from dbo_runtime.setting_values import read_count

MOST_SEQUENCES = 256  # sequences of a rank, unless memory allows fewer
LEAST_REQUESTS = 20  # requests per rank
RUN_BY_TTFT = 12  # duration of a run at full load, in times to the first token
CHIPS, IMBALANCE = 32, 1.3  # defaults, for cases that are spread over chips and for experts
DISPATCH = "dispatch"  # the op that sends tokens to the ranks of their experts
LARGEST = 1 << 20  # largest count on the command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--costs",
        metavar="FILE",
        required=True,
        help="cost file (`dbo calibrate` writes one), or name of a published case (`dbo plan --list`)",
    )
    parser.add_argument(
        "--chips",
        metavar="N",
        help=f"chips to spread the experts of a published case over (default: {CHIPS}); a cost file has its own number",
    )
    requests = parser.add_argument_group(
        "the requests", "The defaults are the means that DeepSeek served on 2025-02-28."
    )
    requests.add_argument(
        "--prompt",
        default="1915",
        metavar="TOKENS",
        help="mean tokens of a prompt that must be computed (default: %(default)s)",
    )
    requests.add_argument(
        "--output",
        default="1211",
        metavar="TOKENS",
        help="mean tokens of an answer; 1 simulates a prefill instance (default: %(default)s)",
    )
    requests.add_argument(
        "--context",
        default="2468",
        metavar="TOKENS",
        help="tokens that each request has in the KV cache already (default: %(default)s)",
    )
    requests.add_argument(
        "--spread",
        default="0.5",
        metavar="X",
        help="standard deviation of the lengths, divided by their mean (default: %(default)s)",
    )
    server = parser.add_argument_group("the server")
    server.add_argument(
        "--budget",
        default="1024",
        metavar="TOKENS",
        help="tokens of each rank in a step, as in --max-num-batched-tokens (default: %(default)s)",
    )
    server.add_argument(
        "--sequences",
        metavar="N",
        help="sequences of each rank, as in --max-num-seqs "
        f"(default: as many as memory holds, at most {MOST_SEQUENCES})",
    )
    server.add_argument(
        "--micro-batches",
        default="2",
        metavar="N",
        help="micro-batches, as in DBO_MICRO_BATCHES (default: %(default)s)",
    )
    server.add_argument(
        "--margin",
        default="0.02",
        metavar="SHARE",
        help="split if the predicted gain exceeds this share of a step's time, as in DBO_MARGIN (default: %(default)s)",
    )
    truth = parser.add_argument_group("effects that the costs do not include")
    truth.add_argument(
        "--contention",
        default="1",
        metavar="X",
        help="factor by which compute and communication slow each other down at least (default: %(default)s)",
    )
    truth.add_argument(
        "--imbalance",
        metavar="X",
        help="tokens of the rank with the busiest experts, divided by the mean of all ranks: drawn for each step "
        f"between 1 and X (default: {IMBALANCE}, or 1 if experts stay on their rank)",
    )
    truth.add_argument(
        "--stragglers",
        default="0.001",
        metavar="P",
        help="probability that a rank is slow in a step (default: %(default)s)",
    )
    truth.add_argument(
        "--slowdown", default="1.5", metavar="X", help="factor by which such a rank is slower (default: %(default)s)"
    )
    level = parser.add_argument_group("the service level")
    level.add_argument(
        "--ttft", default="2", metavar="SECONDS", help="longest time to the first token (default: %(default)s)"
    )
    level.add_argument(
        "--tpot",
        default="0.1",
        metavar="SECONDS",
        help="longest mean time from one token to the next (default: %(default)s)",
    )
    level.add_argument(
        "--quantile",
        default="0.99",
        metavar="SHARE",
        help="share of the requests that must get both (default: %(default)s)",
    )
    runs = parser.add_argument_group("the runs")
    runs.add_argument(
        "--requests", metavar="N", help="requests of each rank in a run (default: enough for a steady state)"
    )
    runs.add_argument(
        "--seeds", default="3", metavar="N", help="number of runs, each with its own seed (default: %(default)s)"
    )
    runs.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Simulate, and print the result.

    Raises:
        ConfigError: an argument is not allowed. The message names it.
    """
    table, _ = open_costs(arguments.costs)
    case = _find_case(arguments.costs)
    chips = _count_chips(table, case) if arguments.chips is None else _read("--chips", arguments.chips)
    table, ranks = _spread(table, case, chips)
    workload = Workload(
        _number("--prompt", arguments.prompt),
        _number("--output", arguments.output),
        _read("--context", arguments.context, least=0),
        _number("--spread", arguments.spread),
    )
    length = round(workload.context + workload.prompt + workload.output / 2)
    layout = Layout(ranks, _read("--budget", arguments.budget), _count_sequences(arguments, case, ranks, length))
    level = ServiceLevel(
        _number("--ttft", arguments.ttft),
        _number("--tpot", arguments.tpot),
        _number("--quantile", arguments.quantile),
    )
    disturbances = Disturbances(
        _number("--stragglers", arguments.stragglers), _number("--slowdown", arguments.slowdown)
    )
    seeds = range(_read("--seeds", arguments.seeds))
    truth = Corner(
        contention=_number("--contention", arguments.contention), imbalance=_read_imbalance(arguments.imbalance, table)
    )
    times = predict_step_times(table, _read_settings(arguments), layout.budget, layout.sequences, length, truth)
    requests = _count_requests(arguments, workload, layout, level, times[1])
    scenario = Scenario(workload, layout, disturbances, level, requests)
    comparison = compare_capacity(scenario, *times, seeds)
    where = f"{chips} {case.chip}" if case else f"{chips} chips"
    if arguments.json:
        return _print(json.dumps(list_comparison(arguments.costs, scenario, comparison), indent=2))
    return _print(describe_comparison(arguments.costs, where, scenario, comparison))


def _find_case(name: str) -> ScaleCase | None:
    return next((each for each in SCALE_CASES if each.case == name), None)


def _count_chips(table: CostTable, case: ScaleCase | None) -> int:
    parallel = table.provenance.parallel
    return CHIPS if case is not None else parallel.get("tensor", 1) * parallel.get("data", 1)


def _read_imbalance(text: str | None, table: CostTable) -> float:
    """Return the imbalance of experts; without a number, that of a usual server, if tokens are dispatched to ranks."""
    if text is not None:
        return _number("--imbalance", text)
    return IMBALANCE if DISPATCH in table.ops else 1.0


def _spread(table: CostTable, case: ScaleCase | None, chips: int) -> tuple[CostTable, int]:
    """Return the costs on this number of chips, and the number of data parallel ranks. Plain files stay unchanged."""
    if case is not None:
        return case.spread(chips), case.count_ranks(chips)
    known = table.provenance.parallel.get("data", 1)
    if known > chips:
        raise ConfigError(f"--chips is {chips}, but the costs are of {known} data parallel ranks and cannot be scaled.")
    return table, known


def _count_sequences(arguments: argparse.Namespace, case: ScaleCase | None, ranks: int, length: int) -> int:
    if arguments.sequences is not None:
        return _read("--sequences", arguments.sequences)
    if case is None:
        return MOST_SEQUENCES
    room = case.experts.count_sequences(case.memory * USABLE, ranks, length)
    if room < 1:
        raise ConfigError(
            f"--chips is {arguments.chips or CHIPS}: the weights leave no room for a sequence of {length} tokens. "
            "Take more chips, or shorter requests."
        )
    return min(room, MOST_SEQUENCES)


def _count_requests(
    arguments: argparse.Namespace, workload: Workload, layout: Layout, level: ServiceLevel, pricer: StepPricer
) -> int:
    """Return how many requests a run serves by default: enough that waiting times do not depend on the run's length.

    A growing queue must have time to exceed what users accept, and running sequences must have time to end.
    """
    least = math.ceil(1 / ((1 - level.quantile) * (1 - WARM_UP)))
    if arguments.requests is not None:
        count = _read("--requests", arguments.requests) * layout.ranks
        if count < least:
            raise ConfigError(
                f"--requests makes {count} in all: too few for a service level of {level.quantile:.0%}, which one of "
                f"them would decide. Take {math.ceil(least / layout.ranks)} or more per rank, or a lower --quantile."
            )
        return count
    waited = RUN_BY_TTFT * level.ttft * estimate_throughput(workload, layout, pricer)
    running = 2 * layout.sequences * layout.ranks if workload.output > 1 else 0
    return min(max(round(waited), running, least, LEAST_REQUESTS * layout.ranks), LARGEST)


def _read_settings(arguments: argparse.Namespace) -> RuntimeConfig:
    return replace(read_options({"--micro-batches": arguments.micro_batches, "--margin": arguments.margin}), side="off")


def _read(name: str, text: str, least: int = 1) -> int:
    count = read_count(text.strip())
    if count is None or not least <= count <= LARGEST:
        raise ConfigError(f"{name} is {text[:100]!r}; it takes a whole number from {least} to {LARGEST}.")
    return count


def _number(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"{name} is {text[:100]!r}; it takes a number such as 1.5.")
    return number


def _print(text: str) -> int:
    sys.stdout.write(text + "\n")
    return 0
