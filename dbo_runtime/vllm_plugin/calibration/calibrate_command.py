"""`dbo calibrate`: measure a model's costs without serving it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from dbo_runtime.config import ENABLE
from dbo_runtime.errors import ConfigError
from dbo_runtime.vllm_plugin.calibration.report import Report

EXTENSION = "dbo_runtime.vllm_plugin.extension.WorkerExtension"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments. All others are arguments of vLLM's engine."""
    parser.add_argument("model", help="directory or name of the model, as for `vllm serve`")
    parser.add_argument("--output", required=True, metavar="FILE", help="the cost file to write, for DBO_COSTS")
    parser.add_argument("--budget", type=float, help="seconds to measure (default: the same as for DBO_CALIBRATE=1)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON; vLLM's log moves to stderr")
    parser.set_defaults(program=parser.prog)
    parser.epilog = "All other arguments are those of vLLM's engine, such as --tensor-parallel-size 2."


def run(arguments: argparse.Namespace) -> int:
    """Start vLLM, measure, and print how well the costs fit.

    Arguments that are not the command's own, such as `--tensor-parallel-size 2`, are the engine's.
    """
    output = Path(arguments.output).absolute()
    if not os.access(output.parent, os.W_OK) or os.path.isdir(output):
        raise ConfigError(f"cost file {output} cannot be written. Name a file in a writable folder.")
    with divert_output() if arguments.json else nullcontext():
        reports = _calibrate(arguments, output)
    if not reports:
        print("error: this model is not split, so there is nothing to measure; the log says why.", file=sys.stderr)
        return 1
    if arguments.json:
        content = reports[0] if len(reports) == 1 else {"stages": reports}
        print(json.dumps({"model": arguments.model, "output": str(output), **content}, indent=2))
        return 0

    for fields in reports:
        print(Report(**fields))
    print(f"serve with it: {ENABLE}=1 DBO_COSTS={arguments.output} vllm serve {arguments.model} ...")
    return 0


def _calibrate(arguments: argparse.Namespace, output: Path) -> list[dict[str, Any]]:
    """Return the first rank's report for each pipeline stage, as fields; without stages that are not split."""
    os.environ[ENABLE] = "1"
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog=arguments.program))
    engine = EngineArgs.from_cli_args(parser.parse_args(["--model", arguments.model, *arguments.passed_on]))
    options = {field.name: getattr(engine, field.name) for field in dataclasses.fields(engine)}
    llm = LLM(**{**options, "worker_extension_cls": EXTENSION, "disable_log_stats": True})
    try:
        gathered: list[dict[str, Any] | None] = llm.collective_rpc(
            "dbo_calibrate", args=(str(output), arguments.budget)
        )
    finally:
        llm.llm_engine.engine_core.shutdown()
    reports = [fields for fields in gathered if fields is not None]
    first_of_each = {fields["stage"]: fields for fields in reversed(reports)}
    return [fields for fields in reports if fields is first_of_each[fields["stage"]]]


@contextmanager
def divert_output() -> Iterator[None]:
    """Redirect standard output of this process and its children to standard error, because vLLM logs to stdout."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
