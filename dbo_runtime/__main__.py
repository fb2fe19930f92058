"""`dbo COMMAND`, or `python -m dbo_runtime COMMAND`. Each command has a module, imported when the command is called."""

from __future__ import annotations

import os
import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Protocol, cast

from dbo_runtime.errors import ConfigError, DboError
from dbo_runtime.nearest import find_nearest
from dbo_runtime.outside_files import make_printable

FAILED = 2  # exit status, the same as argparse's
INTERRUPTED, BROKEN_PIPE = 130, 141  # exit statuses, as shells give them to programs that SIGINT or SIGPIPE ends
SCRIPT = "dbo"  # name of the script that pip installs


class CommandModule(Protocol):
    """The interface of a command's module."""

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the arguments of the command."""

    def run(self, arguments: Namespace) -> int:
        """Run the command; return its exit status."""


class Command(NamedTuple):
    """A command of the command line.

    Attributes:
        module: name of its module, a CommandModule.
        summary: phrase that says what it does.
        needs: package that must be installed.
        extra: extra of dbo-runtime that installs *needs*; None if it has the same name.
        passes_on: whether it accepts arguments that it does not know, as `arguments.passed_on`.
    """

    module: str
    summary: str
    needs: str | None = None
    extra: str | None = None
    passes_on: bool = False


COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        "doctor": Command(
            "dbo_runtime.lab.doctor.doctor_command",
            "check whether vLLM would split steps here, and say what prevents it",
        ),
        "plan": Command(
            "dbo_runtime.lab.whatif.plan_command",
            "predict from a cost file what splitting a step gains; needs no device",
        ),
        "simulate": Command(
            "dbo_runtime.lab.simulate.simulate_command",
            "simulate serving: requests/s within a service level, with and without overlap",
            "simpy",
            "lab",
        ),
        "calibrate": Command(
            "dbo_runtime.lab.calibrate.calibrate_command",
            "measure with vLLM how long a model's ops take, for DBO_COSTS",
            "vllm",
            passes_on=True,
        ),
        "adapter": Command(
            "dbo_runtime.lab.verify.adapter_command",
            "verify a model's adapter against the model, or draft a new one",
            "vllm",
        ),
        "soak": Command(
            "dbo_runtime.lab.soak.soak_command",
            "answer random requests split and unsplit, and compare the answers",
            "vllm",
            passes_on=True,
        ),
        "trace": Command(
            "dbo_runtime.lab.trace.trace_command",
            "summarize traces of DBO_TRACE or profiles of PyTorch, and draw a step",
        ),
        "render": Command(
            "dbo_runtime.lab.whatif.render_command",
            "print the schedule that a cost file leads to, or check a printed one",
        ),
    }
)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command that *words* name; return its exit status. None means the words of the command line."""
    words = sys.argv[1:] if words is None else words
    try:
        try:
            return _answer(words)
        finally:
            sys.stdout.flush()  # raises here, and not at the interpreter's end, if the pipe is closed
    except BrokenPipeError:
        _discard_output()
        return BROKEN_PIPE
    except KeyboardInterrupt:
        sys.stderr.write(f"dbo_runtime {' '.join(words[:1])}: interrupted.\n")
        return INTERRUPTED


def _answer(words: Sequence[str]) -> int:
    if not words or words[0] not in COMMANDS:
        parser, _ = _make_parsers()
        close = find_nearest(words[0], COMMANDS) if words else None
        if close:
            parser.error(f"there is no command {words[0]!r}; did you mean {close}?")
        parser.parse_args(words)  # prints help or the version, or an error, and exits
        parser.error("name the command first")
    try:
        return _run(words[0], words)
    except DboError as error:
        sys.stderr.write(f"dbo_runtime {words[0]}: {make_printable(str(error))}\n")
        return FAILED


def _discard_output() -> None:
    """Discard what standard output still holds: Python writes that at its end, and would report the closed pipe."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())


def _make_parsers() -> tuple[ArgumentParser, Mapping[str, ArgumentParser]]:
    """Return the main parser, and the parser of each command, still without arguments."""
    parser = ArgumentParser(
        prog=_name_program(),
        description="Dual-batch overlap (DBO) for vLLM: one micro-batch computes while another communicates.",
        epilog="`dbo COMMAND --help` shows the options of a command. Begin with `dbo doctor`.",
    )
    parser.add_argument("--version", action="version", version=_get_version())
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    return parser, {
        name: commands.add_parser(
            name, help=command.summary, description=f"{command.summary[0].upper()}{command.summary[1:]}."
        )
        for name, command in COMMANDS.items()
    }


def _run(name: str, words: Sequence[str]) -> int:
    command = COMMANDS[name]
    if command.needs is not None and find_spec(command.needs) is None:
        extra = command.extra or command.needs
        raise ConfigError(f"needs {command.needs}, which is not installed: pip install 'dbo-runtime[{extra}]'")
    module = cast("CommandModule", import_module(command.module))
    parser, parsers = _make_parsers()
    module.add_arguments(parsers[name])
    arguments, unknown = parser.parse_known_args(words)
    if unknown and not command.passes_on:
        parsers[name].error(f"unrecognized arguments: {' '.join(unknown)}{_suggest_option(parsers[name], unknown)}")
    arguments.passed_on = unknown
    return module.run(arguments)


def _suggest_option(parser: ArgumentParser, unknown: Sequence[str]) -> str:
    """Return the end of the sentence about unknown words: the option that the first of them is most like."""
    word = next((word.partition("=")[0] for word in unknown if word.startswith("--")), "")
    close = find_nearest(word, re.findall(r"--[\w-]+", parser.format_help())) if word else None
    return f"; did you mean {close}?" if close else ""


def _name_program() -> str:
    return SCRIPT if Path(sys.argv[0]).name == SCRIPT else "python -m dbo_runtime"


def _get_version() -> str:
    try:
        return version("dbo-runtime")
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    sys.exit(main())
