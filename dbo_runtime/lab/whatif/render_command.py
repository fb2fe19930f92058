"""`dbo render`: the schedule of a cost file's program, with every wait, record and free."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from dbo_runtime.batch import Batch, place_cuts, share_evenly, slice_batch
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.errors import ConfigError, ScheduleError
from dbo_runtime.ir.codegen import Issuing, write_source
from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.nano_batches import NO_ROWS, cut_program
from dbo_runtime.ir.policies import get_policy, sequential
from dbo_runtime.ir.render import digest, name_issue, parse, render
from dbo_runtime.ir.schedule import Schedule
from dbo_runtime.ir.validate import validate
from dbo_runtime.lab.oracle.orders import Orders
from dbo_runtime.lab.whatif.published_cases import open_costs
from dbo_runtime.lab.whatif.scale import count_layers
from dbo_runtime.lab.whatif.ways import mark_token_wise
from dbo_runtime.outside_files import MAX_FILE_BYTES, read_text
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.planner.costs.program_spec import build_program, repeat_runs
from dbo_runtime.planner.online.cuts import measure_slices
from dbo_runtime.planner.online.planner import SEARCH_STATES
from dbo_runtime.planner.online.predictor import Predictor
from dbo_runtime.setting_sources import read_options
from dbo_runtime.setting_values import MAX_MICRO_BATCHES, name_policy

ALTERNATE = ("alternate", 0)  # order of nano-batches if no other is asked for; no search finds one
DEFAULT_TOKENS = 8192  # tokens of the step to search an order for, if the costs have no step
NOTE = "#"  # start of lines outside the table, which are skipped when it is read
INVALID = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--costs", metavar="FILE", required=True, help="cost file, or name of a published case (`dbo plan --list`)"
    )
    parser.add_argument(
        "--layers",
        type=int,
        metavar="N",
        help="number of layers to show (default: one of each kind that the costs have)",
    )
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument(
        "--micro-batches",
        default="auto",
        metavar="N",
        help="number of micro-batches (default: %(default)s, which is 2)",
    )
    parts.add_argument(
        "--nano-batches",
        type=int,
        metavar="N",
        help="cut single ops into N nano-batches instead; `optimal` lets them alternate",
    )
    parser.add_argument(
        "--policy", default="optimal", metavar="NAME", help="issue order, as in DBO_POLICY (default: %(default)s)"
    )
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument(
        "--check",
        metavar="FILE",
        help="check whether the schedule in FILE, as printed by this command, cannot race or hang",
    )
    shown.add_argument(
        "--source", action="store_true", help="also print the Python function that issues the schedule onto streams"
    )
    parser.add_argument("--json", action="store_true", help="print the schedule as JSON")
    parser.epilog = f"Exit status: {INVALID} if the schedule of --check is not safe."


def run(arguments: argparse.Namespace) -> int:
    """Print the schedule, or the verdict on one. Return 1 if it is not safe.

    Raises:
        ConfigError: an argument is not allowed. The message names it.
    """
    table, usual = open_costs(arguments.costs)
    table = _set_layers(table, arguments.layers)
    config = read_options({"--micro-batches": arguments.micro_batches, "--policy": arguments.policy})
    count = arguments.nano_batches
    if count is None:
        schedule = _make_schedule(table, usual or Batch((DEFAULT_TOKENS,), DEFAULT_TOKENS), config)
    else:
        config = replace(config, policy=ALTERNATE) if config.policy[0] == "optimal" else config
        schedule = _make_nano_schedule(table, count, config)
    validate(schedule)
    if arguments.check is not None:
        return _check(Path(arguments.check), schedule, arguments.json)
    facts = {"costs": arguments.costs, "layers": count_layers(table), "policy": name_policy(*config.policy)}
    source = _write_source(schedule) if arguments.source else None
    if arguments.json:
        print(json.dumps({**facts, **_list(schedule), **({} if source is None else {"source": source})}, indent=2))
    else:
        print(_describe(schedule, facts))
        if source is not None:
            print(f"\n{source}", end="")
    return 0


def _set_layers(table: CostTable, layers: int | None) -> CostTable:
    """Return the costs with this number of layers, all kinds kept: the longest run of equal layers gets the rest."""
    counts = [run.repeat for run in table.program.runs if run.layered]
    fewest, most = len(counts), sum(counts)
    if layers is None:
        layers = fewest
    if not fewest <= layers <= most:
        raise ConfigError(f"--layers is {layers}; the program of these costs can be shown with {fewest} to {most}.")
    longest = max(table.program.runs, key=lambda run: run.repeat * run.layered)
    repeats = [1 + (layers - fewest) * (run is longest) for run in table.program.runs]
    return replace(table, program=repeat_runs(table.program, repeats))


def _make_schedule(table: CostTable, batch: Batch, config: RuntimeConfig) -> Schedule:
    program = build_program(table.program)
    if config.policy[0] != "optimal":
        programs = (program,) * config.parts
        return lower(programs, get_policy(*config.policy)(programs))
    slices = slice_batch(batch, place_cuts(batch, share_evenly(batch, config.parts)))
    assert len(slices) == config.parts  # these steps have enough tokens
    oracle = Orders(program, table, Predictor(program, table), SEARCH_STATES)
    return oracle.choose_best(measure_slices(batch, slices), config).schedule


def _make_nano_schedule(table: CostTable, count: int, config: RuntimeConfig) -> Schedule:
    """Return the schedule of a step in nano-batches, in the order of a common policy."""
    if not 1 <= count <= MAX_MICRO_BATCHES:
        raise ConfigError(f"--nano-batches is {count}; it must be 1 to {MAX_MICRO_BATCHES}.")
    program = mark_token_wise(build_program(table.program)).fold_side()
    cut = cut_program(program, count, NO_ROWS, get_policy(*config.policy)).program if count > 1 else program
    return lower([cut], sequential([cut]))


def _describe(schedule: Schedule, facts: dict[str, Any]) -> str:
    waits = sum(len(instruction.waits) for instruction in schedule.instructions)
    counts = f"{len(schedule.instructions)} instructions, {waits} waits"
    nano_batches = schedule.programs[0].nano_batches
    parts = f"nano-batches {nano_batches}" if nano_batches else f"micro-batches {len(schedule.programs)}"
    about = f"{facts['costs']}; layers {facts['layers']}; {parts}; {facts['policy']}"
    return (
        f"{NOTE} {about}\n{NOTE} {counts}, digest {digest(schedule)}; all rules of validation hold\n{render(schedule)}"
    )


def _write_source(schedule: Schedule) -> str:
    """Return the source of the function for a device whose lanes are streams."""
    return write_source(schedule, dict.fromkeys(schedule.lanes, Issuing.SWITCHED)).text


def _list(schedule: Schedule) -> dict[str, Any]:
    programs = schedule.programs
    return {
        "micro_batches": len(programs),
        "nano_batches": programs[0].nano_batches,
        "digest": digest(schedule),
        "lanes": list(schedule.lanes),
        "forks": list(schedule.forks),
        "instructions": [
            {
                "op": instruction.label,
                "lane": instruction.op.lane,
                "waits": [name_issue(programs, issue) for issue in instruction.waits],
                "records": instruction.records,
                "frees": [f"%{slot.value.index}/{slot.micro_batch}" for slot in instruction.frees],
            }
            for instruction in schedule.instructions
        ],
        "joins": [name_issue(programs, issue) for issue in schedule.joins],
    }


def _check(path: Path, expected: Schedule, as_json: bool) -> int:
    """Print whether the schedule in a file is safe, and whether it equals *expected*, which has the same programs."""
    problem, same = "", False
    try:
        actual = parse(_read_table(path), expected.programs)
        validate(actual)
        same = actual == expected
    except ScheduleError as error:
        problem = str(error)
    if as_json:
        print(
            json.dumps({"valid": not problem, "same": same, "digest": digest(expected), "problem": problem}, indent=2)
        )
    elif problem:
        print(f"{path}: not valid: {problem}")
    else:
        which = "the same as" if same else "another than"
        print(f"{path}: valid; {which} what these arguments give (digest {digest(expected)})")
    return INVALID if problem else 0


def _read_table(path: Path) -> str:
    text = sys.stdin.read(MAX_FILE_BYTES) if str(path) == "-" else read_text(path, "schedule")
    return "\n".join(line for line in text.splitlines() if line.strip() and not line.startswith(NOTE))
