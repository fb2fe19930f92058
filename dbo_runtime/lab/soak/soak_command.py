"""`dbo soak MODEL`: random traffic on real engines, with split steps compared to unsplit ones."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from typing import Any
from unittest.mock import patch

from dbo_runtime.config import PREFIX, SWITCHES
from dbo_runtime.errors import ConfigError
from dbo_runtime.lab.soak.check import REQUESTS, ROUND_REQUESTS, check_equivalence
from dbo_runtime.lab.soak.comparison import TOLERANCE
from dbo_runtime.lab.start.arguments import parse_engine_arguments
from dbo_runtime.lab.start.engine_log import divert_output
from dbo_runtime.outside_files import check_model
from dbo_runtime.setting_sources import make_switch

EXIT_DIFFERENT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments. All others are arguments of vLLM's engine."""
    parser.add_argument("model", help="folder or name of the model, as for `vllm serve`")
    parser.add_argument(
        "--requests",
        type=int,
        default=REQUESTS,
        metavar="N",
        help="requests to answer, for each number of micro-batches (default: %(default)s)",
    )
    parser.add_argument(
        "--micro-batches",
        default="2",
        metavar="N,...",
        help="numbers of micro-batches to try, one after the other, such as 2,3,4 (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed to draw requests with (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds",
        metavar="N,...",
        help=f"run only these rounds of {ROUND_REQUESTS} requests, numbered from 0, to repeat failures of a report",
    )
    parser.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="DIR",
        help="folder of a LoRA adapter that some requests use; may be repeated",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=TOLERANCE,
        metavar="X",
        help="largest accepted difference of log-probabilities and of pooled numbers (default: %(default)s)",
    )
    parser.add_argument(
        "--calibrate-between",
        action="store_true",
        help="calibrate in pauses between requests, as dbo_calibrate does on a server",
    )
    parser.add_argument(
        "--first-steps",
        action="store_true",
        help="compare the first split steps of each kind with unsplit ones, as on an untested vLLM",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(program=parser.prog)
    parser.epilog = (
        "All other options are passed to vLLM, such as --tensor-parallel-size 2. Settings of the environment (DBO_...) "
        f"apply to the split steps. Exit status: {EXIT_DIFFERENT} if answers differ."
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the traffic and print the report. Return 1 if split steps gave other results than unsplit ones.

    This package's settings come from the environment.

    Raises:
        ConfigError: the model's path is misspelt, a list of numbers cannot be read, or hypothesis is not installed.
    """
    check_model(arguments.model)
    micro_batches = _read_numbers("--micro-batches", arguments.micro_batches, 2)
    rounds = None if arguments.rounds is None else _read_numbers("--rounds", arguments.rounds, 0)
    if arguments.requests < 1:
        raise ConfigError(f"--requests: {arguments.requests} is none; write 1 or more.")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read when vLLM is imported
    with divert_output():
        options = _read_options(arguments)
        names = [name for name in os.environ if name.startswith(PREFIX) and name not in SWITCHES]
        report = check_equivalence(
            arguments.model,
            {name: os.environ[name] for name in names},
            arguments.requests,
            micro_batches,
            arguments.seed,
            rounds,
            arguments.lora,
            arguments.tolerance,
            arguments.calibrate_between,
            arguments.first_steps,
            **options,
        )
    print(json.dumps(report.as_dict(), indent=2) if arguments.json else report)
    return 0 if report else EXIT_DIFFERENT


def _read_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the engine's arguments that differ from vLLM's defaults."""
    if not arguments.passed_on:
        return {}
    with patch.dict(os.environ, make_switch(False)):
        default = parse_engine_arguments(arguments.program, arguments.model, ())
        given = parse_engine_arguments(arguments.program, arguments.model, arguments.passed_on)
    names = [field.name for field in dataclasses.fields(given)]
    return {name: value for name in names if (value := getattr(given, name)) != getattr(default, name)}


def _read_numbers(name: str, text: str, least: int) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        raise ConfigError(f"{name}: {text!r} is no list of numbers, such as 2,3,4.") from None
    if min(numbers) < least:
        raise ConfigError(f"{name}: {min(numbers)} is too small; write {least} or more.")
    return numbers
