"""`dbo doctor`: report what prevents overlap here."""

from __future__ import annotations

import argparse
import json
import os
import shlex

from dbo_runtime.doctor.examination import examine
from dbo_runtime.doctor.finding import is_ok
from dbo_runtime.doctor.report import describe_findings, list_findings
from dbo_runtime.doctor.serve_command import ServeCommand, read_command
from dbo_runtime.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "words",
        nargs="*",
        metavar="MODEL_DIR",
        help="also check the model in this folder, or a serve command after --",
    )
    parser.add_argument("--options", metavar="'...'", help="also check serving MODEL_DIR with these vLLM options")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the findings. Return 1 if one keeps a vLLM started from this shell from splitting steps."""
    model, command = _read_subject(arguments.words, arguments.options)
    findings = examine(os.environ, model, command)
    print(json.dumps(list_findings(findings), indent=2) if arguments.json else describe_findings(findings))
    return 0 if is_ok(findings) else 1


def _read_subject(words: list[str], options: str | None) -> tuple[str | None, ServeCommand | None]:
    """Return the model folder to check, or the serve command.

    Raises:
        ConfigError: there is no command after `--`, or options are given without a model.
    """
    words = words[1:] if words[:1] == ["--"] else words  # older versions of argparse keep the `--`
    if options is not None:
        if len(words) != 1:
            raise ConfigError("--options are of a model: dbo doctor MODEL_DIR --options '...'")
        return None, ServeCommand({}, (words[0], *shlex.split(options)))
    return (None, read_command(words)) if len(words) > 1 else (words[0] if words else None, None)
