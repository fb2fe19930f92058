"""`dbo calibrate`: measure a model's costs without serving it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from dbo_runtime.config import ENABLE
from dbo_runtime.errors import ConfigError, DeviceError
from dbo_runtime.lab.calibrate.outlook import find_outlook
from dbo_runtime.lab.calibrate.report import BUDGET_SECONDS, Report
from dbo_runtime.lab.progress import find_terminal
from dbo_runtime.lab.start.arguments import parse_engine_arguments
from dbo_runtime.lab.start.engine_log import keep_log
from dbo_runtime.lab.start.interrupt import end_children_on_interrupt
from dbo_runtime.outside_files import check_model
from dbo_runtime.planner.costs.cost_file import load_costs, name_stage_file
from dbo_runtime.setting_sources import make_switch

EXTENSION = "dbo_runtime.vllm_plugin.extension.WorkerExtension"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments. All others are arguments of vLLM's engine."""
    parser.add_argument("model", help="folder or name of the model, as for `vllm serve`")
    parser.add_argument("--output", required=True, metavar="FILE", help="cost file to write; serve with DBO_COSTS=FILE")
    parser.add_argument(
        "--budget",
        type=float,
        metavar="SECONDS",
        help=f"about how long to measure, after vLLM's start (default: {BUDGET_SECONDS:g})",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="show vLLM's log on standard error (default: in a file, which stays if vLLM fails)",
    )
    parser.set_defaults(program=parser.prog)
    parser.epilog = (
        "All other options are passed to vLLM. Name those that you serve with, such as --tensor-parallel-size 8."
    )


def run(arguments: argparse.Namespace) -> int:
    """Start vLLM, measure, and print how well the costs fit, and whether steps will be split by them.

    Arguments that are not the command's own, such as `--tensor-parallel-size 2`, are the engine's.

    Raises:
        ConfigError: the model's path is misspelt, the file cannot be written, or vLLM does not accept an argument.
        DeviceError: vLLM does not start or fails, or does not split this model.
    """
    check_model(arguments.model)
    output = Path(arguments.output).absolute()
    if not os.access(output.parent, os.W_OK) or os.path.isdir(output):
        raise ConfigError(f"cost file {output} cannot be written. Name a file in a writable folder.")
    terminal = find_terminal()  # before output is moved
    with end_children_on_interrupt(), keep_log(arguments.model, arguments.verbose) as where:
        reports = _calibrate(arguments, output, terminal)
        if not reports:
            raise DeviceError(f"this model is not split, so there is nothing to measure. {where}")
    if arguments.json:
        content = reports[0] if len(reports) == 1 else {"stages": reports}
        print(json.dumps({"model": arguments.model, "output": str(output), **content}, indent=2))
        return 0

    for fields in reports:
        report = Report(**fields)
        path = name_stage_file(arguments.output, report.stage)
        print(report)
        print(find_outlook(load_costs(path), report.largest, path).text)
    print(f"serve with it: {ENABLE}=1 DBO_COSTS={arguments.output} vllm serve {arguments.model} ...")
    return 0


def _calibrate(arguments: argparse.Namespace, output: Path, terminal: str) -> list[dict[str, Any]]:
    """Return the first rank's report for each pipeline stage, as fields; without stages that are not split."""
    os.environ.update(make_switch(True))
    from vllm import LLM

    engine = parse_engine_arguments(arguments.program, arguments.model, arguments.passed_on)
    options = {field.name: getattr(engine, field.name) for field in dataclasses.fields(engine)}
    llm = LLM(**{**options, "worker_extension_cls": EXTENSION, "disable_log_stats": True})
    try:
        gathered: list[dict[str, Any] | None] = llm.collective_rpc(
            "dbo_calibrate", args=(str(output), arguments.budget, terminal)
        )
    finally:
        llm.llm_engine.engine_core.shutdown()
    reports = [fields for fields in gathered if fields is not None]
    first_of_each = {fields["stage"]: fields for fields in reversed(reports)}
    return [fields for fields in reports if fields is first_of_each[fields["stage"]]]
