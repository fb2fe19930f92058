"""`dbo adapter DIR`: verify a model's adapter against the model's own forward, and show its declaration.

`dbo adapter new MODEL` writes a draft of an adapter.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from dbo_runtime.devices.virtual import simulate
from dbo_runtime.errors import ConfigError
from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.policies import get_policy
from dbo_runtime.ir.render import digest, render
from dbo_runtime.ir.schedule import Instruction, Schedule
from dbo_runtime.ir.validate import validate
from dbo_runtime.lab.start.engine_log import divert_output
from dbo_runtime.lab.verify.tiny_config import describe_missing
from dbo_runtime.observe.timeline import Timeline
from dbo_runtime.setting_sources import read_options

EXIT_DIFFERENT = 1
NEW = "new"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.usage = f"%(prog)s [options] MODEL_DIR\n       %(prog)s {NEW} MODEL [--output FOLDER] [--json]"
    parser.add_argument(
        "model", metavar="MODEL_DIR", help="folder with the config.json of a model; weights are drawn at random"
    )
    parser.add_argument(
        "drafted",
        nargs="?",
        metavar=f"{NEW} MODEL",
        help="write and verify the draft of an adapter for this architecture, or for the model in this folder",
    )
    parser.add_argument(
        "--output",
        metavar="FOLDER",
        help=f"for `{NEW}`: folder to write the draft to (default: named after the architecture)",
    )
    parser.add_argument(
        "--render", action="store_true", help="print the whole schedule, with every wait, record and free"
    )
    parser.add_argument(
        "--micro-batches", default="2", metavar="N", help="micro-batches of the schedule (default: %(default)s)"
    )
    parser.add_argument(
        "--policy",
        default="alternate",
        metavar="NAME",
        help="issue order of the schedule, as in DBO_POLICY (default: %(default)s)",
    )
    parser.add_argument(
        "--simulate",
        metavar="OP=MS,...",
        help="draw the schedule's timeline, from the milliseconds of ops in an unsplit step, such as "
        "attention=2,attn_reduce=1",
    )
    parser.add_argument(
        "--side", action="store_true", help="verify the program for two compute lanes, as with DBO_SIDE=on"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.epilog = (
        f"Exit status: {EXIT_DIFFERENT} if results differ from the model's, or a draft could not be verified."
    )


def run(arguments: argparse.Namespace) -> int:
    """Verify the adapter, or write a draft of one. Return 1 if it is wrong.

    Raises:
        ConfigError: there is no such model, or a setting is not allowed.
    """
    if arguments.model == NEW:
        return _write_draft(arguments)
    if arguments.drafted is not None or arguments.output is not None:
        raise ConfigError(f"only `dbo adapter {NEW} MODEL` takes a second name and --output; leave them out.")
    if not os.path.isfile(Path(arguments.model) / "config.json"):
        raise ConfigError(describe_missing(arguments.model))
    durations = None if arguments.simulate is None else _read_durations(arguments.simulate)
    config = read_options({"--micro-batches": arguments.micro_batches, "--policy": arguments.policy})
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read when vLLM is imported
    with divert_output():
        from dbo_runtime.lab.verify.verification import verify_adapter  # imported late, because it imports vLLM

        verification = verify_adapter(arguments.model, has_side=arguments.side)
    programs = (verification.program,) * config.parts
    policy = ("alternate", 0) if config.policy[0] == "optimal" else config.policy  # without costs there is no search
    schedule = lower(programs, get_policy(*policy)(programs))
    validate(schedule)
    simulation = None if durations is None else Simulation.of(schedule, durations)
    if arguments.json:
        facts = {
            "ops": len(verification.program.ops),
            "cuts": verification.cuts,
            "digest": digest(schedule),
            "mismatches": [mismatch._asdict() for mismatch in verification.mismatches],
        }
        if simulation is not None:
            facts |= {"unsplit_ms": simulation.unsplit, "split_ms": simulation.split}
        print(json.dumps(facts, indent=2))
    else:
        print(describe(schedule, str(verification), arguments.render))
        if simulation is not None:
            print(simulation)
    return EXIT_DIFFERENT if verification.mismatches else 0


def _write_draft(arguments: argparse.Namespace) -> int:
    if arguments.drafted is None:
        raise ConfigError(
            f"name the architecture: dbo adapter {NEW} GraniteForCausalLM. (A directory of that name is ./{NEW}.)"
        )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read when vLLM is imported
    with divert_output():
        from dbo_runtime.lab.verify.draft.drafting import draft_adapter  # imported late, because it imports vLLM

        draft = draft_adapter(arguments.drafted, arguments.output)
    if arguments.json:
        print(json.dumps(draft.list_facts(), indent=2))
    else:
        print(draft)
    return 0 if draft.is_verified else EXIT_DIFFERENT


def describe(schedule: Schedule, verdict: str, with_table: bool) -> str:
    """Return the verdict on an adapter, and its declaration."""
    waits = sum(len(step.waits) for step in schedule.instructions)
    counts = f"{len(schedule.programs)} micro-batches: {len(schedule.instructions)} instructions, {waits} waits"
    count = f"{counts}; digest {digest(schedule)}"
    return "\n".join([verdict, count, *([render(schedule)] if with_table else [])])


class Simulation(NamedTuple):
    """Simulated times of a step, unsplit and split, in ms, and the timeline of the split step."""

    unsplit: float
    split: float
    timeline: Timeline

    @classmethod
    def of(cls, schedule: Schedule, durations: Mapping[str, float]) -> Simulation:
        """Simulate a schedule.

        Ops take *durations* [ms] by name in an unsplit step, and their share in each micro-batch.

        Raises:
            ConfigError: no op has such a name.
        """
        (program, *_) = schedule.programs
        names = {op.name for op in program.ops}
        unknown = sorted(set(durations) - names)
        if unknown:
            raise ConfigError(f"--simulate: no op is named {unknown[0]!r}; there are {', '.join(sorted(names))}.")

        def cost(step: Instruction) -> float:
            return durations.get(step.op.name, 0.0) / 1e3 / len(schedule.programs)

        timeline = simulate(schedule, cost)
        return cls(sum(durations.get(op.name, 0.0) for op in program.ops), timeline.duration * 1e3, timeline)

    def __str__(self) -> str:
        ratio = f", {self.unsplit / self.split:.2f}x" if self.split else ""
        heading = (
            f"simulated: {self.unsplit:.1f} ms unsplit, {self.split:.1f} ms split{ratio}; digits are micro-batches"
        )
        return f"{heading}\n{self.timeline.draw()}"


def _read_durations(text: str) -> dict[str, float]:
    durations = {}
    for part in text.split(","):
        name, _, milliseconds = part.partition("=")
        try:
            durations[name.strip()] = float(milliseconds)
        except ValueError:
            raise ConfigError(f"--simulate: {part!r} is not OP=MS, such as attention=3.5.") from None
        if not 0 <= durations[name.strip()] < math.inf:
            raise ConfigError(f"--simulate: {part!r} must have a time of 0 or more ms.")
    return durations
