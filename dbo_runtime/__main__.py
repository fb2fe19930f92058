"""`dbo COMMAND`, or `python -m dbo_runtime COMMAND`: what needs no program of one's own. One module a command."""

from __future__ import annotations

import sys
from argparse import REMAINDER, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from dbo_runtime.errors import ConfigError, DboError

FAILED = 2  # what argparse exits with, too
SCRIPT = "dbo"  # what pip installs


class Command(NamedTuple):
    """Where a command is, which has `add_arguments(parser)` and `run(arguments, words) -> exit status`.

    Attributes:
        module: its name; imported when the command is called.
        summary: what it does.
        needs: a package that must be installed, and is an extra of this one.
        passes_on: whether arguments that it does not know are for somebody else, and come as *words*.
    """

    module: str
    summary: str
    needs: str | None = None
    passes_on: bool = False


COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        "doctor": Command("dbo_runtime.doctor.doctor_command", "find what keeps steps from being split here"),
        "plan": Command(
            "dbo_runtime.planner.whatif.plan_command", "predict from a cost file what splitting brings; needs no device"
        ),
        "calibrate": Command(
            "dbo_runtime.vllm_plugin.calibration.calibrate_command",
            "measure a model's costs with vLLM",
            "vllm",
            passes_on=True,
        ),
        "adapter": Command(
            "dbo_runtime.vllm_plugin.verify.adapter_command", "try a model's adapter against the model itself", "vllm"
        ),
        "trace": Command("dbo_runtime.observe.trace_command", "sum up a trace that DBO_TRACE wrote, and draw it"),
        "render": Command(
            "dbo_runtime.planner.whatif.render_command", "print the schedule of a cost file's program, or check one"
        ),
    }
)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command that *words* name, those of the command line if None; return the exit status."""
    parsed = _make_parser().parse_args(words)
    try:
        return _run(parsed.command, parsed.words)
    except DboError as error:
        sys.stderr.write(f"dbo_runtime {parsed.command}: {error}\n")
        return FAILED


def _make_parser() -> ArgumentParser:
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items())
    parser = ArgumentParser(
        prog=_name_program(),
        description="Dual-batch overlap for LLM serving.",
        epilog=f"commands:\n{listed}\n\n`COMMAND --help` shows what a command takes.",
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=_find_version())
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of those below")
    parser.add_argument("words", nargs=REMAINDER, metavar="...", help="its arguments")
    return parser


def _run(name: str, words: Sequence[str]) -> int:
    command = COMMANDS[name]
    if command.needs is not None and find_spec(command.needs) is None:
        raise ConfigError(f"needs {command.needs}, which is not installed: pip install 'dbo-runtime[{command.needs}]'")
    module = import_module(command.module)
    parser = ArgumentParser(prog=f"{_name_program()} {name}", description=f"{command.summary.capitalize()}.")
    module.add_arguments(parser)
    arguments, unknown = parser.parse_known_args(words)
    if unknown and not command.passes_on:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    status: int = module.run(arguments, unknown)
    return status


def _name_program() -> str:
    return SCRIPT if Path(sys.argv[0]).name == SCRIPT else "python -m dbo_runtime"


def _find_version() -> str:
    try:
        return version("dbo-runtime")
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    sys.exit(main())
