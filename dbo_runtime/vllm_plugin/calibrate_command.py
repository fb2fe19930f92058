"""`python -m dbo_runtime calibrate`: measures a model's costs without serving it."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path

from dbo_runtime.config import ENABLE
from dbo_runtime.errors import ConfigError
from dbo_runtime.vllm_plugin.cost_source import BUDGET

EXTENSION = "dbo_runtime.vllm_plugin.extension.WorkerExtension"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command; all others are those of vLLM's engine."""
    parser.add_argument("model", help="directory or name of the model, as for `vllm serve`")
    parser.add_argument("--output", required=True, metavar="FILE", help="the cost file to write, for DBO_COSTS")
    parser.add_argument("--budget", type=float, default=BUDGET, help=f"seconds to measure (default: {BUDGET:.0f})")


def run(arguments: argparse.Namespace, engine_words: list[str]) -> int:
    """Start vLLM with *engine_words*, such as `--tensor-parallel-size 2`, measure, and print how well the costs fit."""
    output = Path(arguments.output).absolute()
    if not os.access(output.parent, os.W_OK) or output.is_dir():
        raise ConfigError(f"cost file {output} cannot be written. Name a file in a writable folder.")
    os.environ[ENABLE] = "1"
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="python -m dbo_runtime calibrate"))
    engine = EngineArgs.from_cli_args(parser.parse_args(["--model", arguments.model, *engine_words]))
    options = {field.name: getattr(engine, field.name) for field in dataclasses.fields(engine)}
    llm = LLM(**{**options, "worker_extension_cls": EXTENSION, "disable_log_stats": True})
    try:
        report = llm.collective_rpc("dbo_calibrate", args=(str(output), arguments.budget))[0]
    finally:
        llm.llm_engine.engine_core.shutdown()
    if report is None:
        print("error: this model is not split, so there is nothing to measure; the log says why.", file=sys.stderr)
        return 1
    print(report)
    print(f"serve with it: {ENABLE}=1 DBO_COSTS={arguments.output} vllm serve {arguments.model} ...")
    return 0
