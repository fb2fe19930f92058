"""`dbo adapter DIR`: try a model's adapter against the model's own forward, and show what it declares."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from dbo_runtime.config import read_environment
from dbo_runtime.errors import ConfigError
from dbo_runtime.policies import find_policy
from dbo_runtime.render import digest, render
from dbo_runtime.schedule import Schedule, lower
from dbo_runtime.validate import validate
from dbo_runtime.vllm_plugin.calibrate_command import divert_output

DIFFERENT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("model", help="directory with the model's config.json; weights are made up")
    parser.add_argument("--render", action="store_true", help="print the schedule, with every wait, record and free")
    parser.add_argument("--micro-batches", default="2", help="of that schedule, as DBO_MICRO_BATCHES takes it")
    parser.add_argument("--policy", default="alternate", help="of that schedule, as DBO_POLICY takes it")
    parser.add_argument("--json", action="store_true", help="print it for programs; vLLM's log moves to stderr")


def run(arguments: argparse.Namespace, _: Sequence[str] = ()) -> int:
    """Try the adapter; return 1 if it is wrong.

    Raises:
        ConfigError: if there is no such model, or a setting is not as it must be.
    """
    if not (Path(arguments.model) / "config.json").is_file():
        raise ConfigError(f"{arguments.model} has no config.json; name the directory of a model.")
    config = read_environment({"DBO_MICRO_BATCHES": arguments.micro_batches, "DBO_POLICY": arguments.policy})
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read when vLLM is imported
    with divert_output():
        from dbo_runtime.vllm_plugin.trial import try_adapter  # late: it imports vLLM

        trial = try_adapter(arguments.model)
    programs = (trial.program,) * config.parts
    policy = ("alternate", 0) if config.policy[0] == "optimal" else config.policy  # there are no costs to search by
    schedule = lower(programs, find_policy(*policy)(programs))
    validate(schedule)
    if arguments.json:
        faults = [fault._asdict() for fault in trial.faults]
        facts = {"ops": len(trial.program.ops), "cuts": trial.cuts, "digest": digest(schedule), "faults": faults}
        print(json.dumps(facts, indent=2))
    else:
        print(describe(schedule, str(trial), arguments.render))
    return DIFFERENT if trial.faults else 0


def describe(schedule: Schedule, verdict: str, with_table: bool) -> str:
    """Return the verdict on an adapter, and what it declares."""
    waits = sum(len(step.waits) for step in schedule.steps)
    count = (
        f"{len(schedule.programs)} micro-batches: {len(schedule.steps)} steps, {waits} waits; digest {digest(schedule)}"
    )
    return "\n".join([verdict, count, *([render(schedule)] if with_table else [])])
