"""`dbo plan`: predict from a cost file what splitting gains; needs no device."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace

from dbo_runtime.batch import Batch
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.errors import ConfigError
from dbo_runtime.lab.progress import show_progress
from dbo_runtime.lab.trace.figure import draw_figure
from dbo_runtime.lab.whatif.estimate import Estimator, resize_batch
from dbo_runtime.lab.whatif.fleet import CHIPS, predict_fleet
from dbo_runtime.lab.whatif.fleet_report import describe_fleet, list_rows
from dbo_runtime.lab.whatif.measurements import MEASUREMENTS, compare, describe_comparisons
from dbo_runtime.lab.whatif.plan_report import describe_case, describe_whatif, list_figures, pick_layers, tabulate_cases
from dbo_runtime.lab.whatif.published_cases import find_network, get_case, list_cases, open_costs
from dbo_runtime.lab.whatif.scale import (
    MODELS,
    Network,
    count_layers,
    parse_bandwidth,
    parse_network,
    scale_bandwidth,
    scale_tensor,
    set_imbalance,
    set_model,
)
from dbo_runtime.lab.whatif.scale_cases import find_scale_cases
from dbo_runtime.lab.whatif.step_arguments import DEFAULT_TOKENS, make_batch, parse_count
from dbo_runtime.lab.whatif.sweep import GRIDS, has_sizes, list_steps, parse_axes, sweep
from dbo_runtime.lab.whatif.sweep_report import describe_sweep, list_cells
from dbo_runtime.lab.whatif.ways import compare_ways, describe_ways
from dbo_runtime.lab.whatif.whatif import WhatIf, compute_break_even, list_tried_sizes, predict_step
from dbo_runtime.observe.trace import save_trace
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.setting_sources import read_options

MAX_BREAK_EVEN_TOKENS = 32_768  # limit of the search for a break-even, unless the step has more
MAX_BREAK_EVEN_DECODES = 1_024  # same for steps of decodes, which have one token each


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--costs",
        metavar="FILE",
        help="cost file (`dbo calibrate` writes one), or name of a published case (see --list)",
    )
    parser.add_argument(
        "--list", nargs="?", const="", metavar="NAME", help="list the published cases, or say where NAME comes from"
    )
    parser.add_argument(
        "--measurements", action="store_true", help="print how far predictions are from published measurements"
    )
    step = parser.add_argument_group("the step")
    step.add_argument(
        "--tokens",
        metavar="N",
        help=f"tokens of the step, all requests together (default: those of the published case, or {DEFAULT_TOKENS})",
    )
    step.add_argument(
        "--requests",
        metavar="N",
        help="number of prompts that share the tokens evenly (default: that of the published case, or 1)",
    )
    step.add_argument("--query-lens", metavar="N,N,...", help="tokens of each request, in place of both; 1 is a decode")
    step.add_argument("--decodes", metavar="N", help="plan a step of N decodes, of one token each")
    step.add_argument(
        "--context",
        metavar="N",
        help="tokens that each request has in the KV cache already (default: those of the published case, or 0)",
    )
    machine = parser.add_argument_group("the machine and the model")
    machine.add_argument("--model", metavar="NAME", help=f"take as many layers as this model has: {', '.join(MODELS)}")
    machine.add_argument("--tp", metavar="N", help="scale the costs to N tensor parallel ranks, a power of two")
    machine.add_argument(
        "--bandwidth", metavar="RATE", help="scale the network: by a factor such as 0.5x, or to a rate such as 100GB/s"
    )
    machine.add_argument(
        "--network",
        metavar="RANKS:RATE:RATE",
        help="where --tp may span hosts: ranks per host, a rank's rate within its host, and its rate to other hosts, "
        "such as 8:121.3GB/s:25GB/s (default: those of the published case, or one rate for all)",
    )
    machine.add_argument(
        "--imbalance",
        metavar="X",
        help="tokens of the rank with the busiest experts, divided by the mean of all ranks, such as 1.3 "
        "(default: that of the costs)",
    )
    settings = parser.add_argument_group(
        "the settings", "As in DBO_MICRO_BATCHES, DBO_MARGIN, DBO_POLICY and DBO_SIDE."
    )
    settings.add_argument(
        "--micro-batches",
        default="auto",
        metavar="N",
        help="micro-batches to split into; auto tries several numbers (default: %(default)s)",
    )
    settings.add_argument(
        "--margin",
        default="0.02",
        metavar="SHARE",
        help="split if the predicted gain exceeds this share of the step's time (default: %(default)s)",
    )
    settings.add_argument(
        "--policy",
        default="optimal",
        metavar="NAME",
        help="order of ops: optimal searches for the best, alternate, staggered and sequential are fixed "
        "(default: %(default)s)",
    )
    settings.add_argument(
        "--side",
        default="auto",
        metavar="MODE",
        help="whether some ops run on a second compute lane: auto, on or off (default: %(default)s)",
    )
    output = parser.add_argument_group("the output")
    output.add_argument(
        "--sweep",
        metavar="AXES",
        help=f"print a table of gains over one or more of these axes, with commas between: {', '.join(GRIDS)}",
    )
    output.add_argument(
        "--scale",
        nargs="?",
        const="",
        metavar="MODEL",
        help=f"print a table of gains on {CHIPS[0]} to {CHIPS[-1]} chips: of MODEL (r1 or qwen3-235b), of the "
        "published case in --costs, or of all",
    )
    output.add_argument(
        "--ways",
        action="store_true",
        help="print a table instead: the step in micro-batches, in nano-batches, and with another order alone",
    )
    output.add_argument(
        "--trace", metavar="FILE", help="write the timeline of the split step, to open in ui.perfetto.dev"
    )
    output.add_argument(
        "--figure", metavar="FILE", help="draw the step unsplit and split, as PNG, SVG or PDF (needs matplotlib)"
    )
    output.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Answer the question, and print the answer.

    Raises:
        ConfigError: an argument is not allowed. The message names it.
    """
    if arguments.list is not None:
        return _print(describe_case(get_case(arguments.list)) if arguments.list else tabulate_cases(list_cases()))
    if arguments.measurements:
        compared = [compare(each) for each in show_progress(MEASUREMENTS, "predicting", "measurement")]
        return _print(describe_comparisons(compared))
    if arguments.scale is not None:
        return _print_fleet(arguments)
    if arguments.costs is None:
        raise ConfigError("--costs is missing: name a cost file, or a published case (--list shows them).")
    table, usual = open_costs(arguments.costs)
    table, batch, config = _scale(table, arguments), make_batch(arguments, usual), _read_settings(arguments)
    if arguments.ways:
        return _print_ways(arguments, table, batch, config)
    if arguments.sweep is not None:
        return _print_sweep(arguments, table, batch, config)
    return _print_answer(arguments, table, batch, config)


def _print_fleet(arguments: argparse.Namespace) -> int:
    """Print one row per case and number of chips. All computing ops stay on one lane."""
    cases = find_scale_cases(model=arguments.scale or None, name=arguments.costs)
    config = replace(_read_settings(arguments), side="off")
    step = None
    if arguments.costs is not None and (arguments.tokens or arguments.decodes or arguments.query_lens):
        step = make_batch(arguments, open_costs(arguments.costs)[1])
    points = [(case, chips) for case in cases for chips in CHIPS]
    rows = [predict_fleet(case, chips, config, step) for case, chips in show_progress(points, "scaling", "row")]
    return _print(json.dumps(list_rows(rows), indent=2) if arguments.json else describe_fleet(rows))


def _print_ways(arguments: argparse.Namespace, table: CostTable, batch: Batch, config: RuntimeConfig) -> int:
    ways = compare_ways(table, batch, config)
    return _print(json.dumps([way._asdict() for way in ways], indent=2) if arguments.json else describe_ways(ways))


def _print_sweep(arguments: argparse.Namespace, table: CostTable, batch: Batch, config: RuntimeConfig) -> int:
    if arguments.trace or arguments.figure:
        raise ConfigError("--trace and --figure show one step; leave out --sweep.")
    axes = parse_axes(arguments.sweep)
    steps, searched_to, estimator = list_steps(axes, batch), 0, None
    if has_sizes(axes):
        searched_to = steps[-1].tokens
        estimator = Estimator(table, [*steps, *_list_tried(batch, searched_to)])
    cells = sweep(table, batch, config, axes, estimator, _find_network(arguments))
    if arguments.json:
        return _print(json.dumps(list_cells(cells, config.margin), indent=2))
    break_evens = (
        [compute_break_even(estimator, batch, config, searched_to, parts) for parts in (1, 2)] if estimator else []
    )
    return _print(describe_sweep(cells, config.margin, break_evens))


def _list_tried(batch: Batch, searched_to: int) -> list[Batch]:
    return [resize_batch(batch, size) for size in list_tried_sizes(searched_to)]


def _print_answer(arguments: argparse.Namespace, table: CostTable, batch: Batch, config: RuntimeConfig) -> int:
    answer = predict_step(table, batch, config)
    furthest = max(batch.tokens, MAX_BREAK_EVEN_TOKENS if batch.prefill_tokens else MAX_BREAK_EVEN_DECODES)
    break_even = compute_break_even(Estimator(table, _list_tried(batch, furthest)), batch, config, furthest)
    what = arguments.costs, table, answer, break_even, config.margin
    _print(json.dumps(list_figures(*what), indent=2) if arguments.json else describe_whatif(*what))
    _write_pictures(arguments, table, answer)
    return 0


def _write_pictures(arguments: argparse.Namespace, table: CostTable, answer: WhatIf) -> None:
    title = f"{arguments.costs}, {answer.batch.tokens} tokens (predicted)"
    shown = answer.best.timeline if answer.best else answer.timeline
    if arguments.trace:
        save_trace({title: shown}, arguments.trace)
    if arguments.figure:
        layers = count_layers(table)
        panels = {"unsplit": answer.timeline}
        if answer.best:
            panels[f"split in {len(answer.best.sizes)}"] = shown
        drawn = {name: pick_layers(timeline, layers) for name, timeline in panels.items()}
        (_, which) = drawn["unsplit"]
        draw_figure({name: few for name, (few, _) in drawn.items()}, arguments.figure, f"{title}: {which}")


def _print(text: str) -> int:
    sys.stdout.write(text + "\n")
    return 0


def _scale(table: CostTable, arguments: argparse.Namespace) -> CostTable:
    if arguments.model is not None:
        table = set_model(table, arguments.model)
    if arguments.tp is not None:
        table = scale_tensor(table, parse_count("--tp", arguments.tp), _find_network(arguments))
    if arguments.bandwidth is not None:
        table = scale_bandwidth(table, parse_bandwidth(arguments.bandwidth))
    if arguments.imbalance is not None:
        table = set_imbalance(table, _parse_factor("--imbalance", arguments.imbalance))
    return table


def _find_network(arguments: argparse.Namespace) -> Network | None:
    return find_network(arguments.costs) if arguments.network is None else parse_network(arguments.network)


def _parse_factor(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{name} is {text[:100]!r}; it takes a number such as 1.3.") from None


def _read_settings(arguments: argparse.Namespace) -> RuntimeConfig:
    return read_options(
        {
            "--micro-batches": arguments.micro_batches,
            "--margin": arguments.margin,
            "--policy": arguments.policy,
            "--side": arguments.side,
        }
    )
