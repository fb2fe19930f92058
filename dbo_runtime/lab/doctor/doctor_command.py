"""`dbo doctor`: report what prevents overlap here."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import textwrap
from collections.abc import Sequence
from typing import Any

from dbo_runtime.errors import ConfigError
from dbo_runtime.lab.doctor.examination import examine
from dbo_runtime.lab.doctor.finding import Finding, is_ok
from dbo_runtime.lab.doctor.serve_command import ServeCommand, read_command

MAX_COLUMNS = 120
LABELS = {"ok": "ok", "info": "-", "warn": "WARN", "fail": "FAIL"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "words",
        nargs="*",
        metavar="MODEL_DIR",
        help="folder of a model to check, too; or, after --, the command that serves it: dbo doctor -- vllm serve ...",
    )
    parser.add_argument(
        "--options",
        metavar="'...'",
        help="vLLM's options to serve MODEL_DIR with, in one string, such as '--tensor-parallel-size 8'",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.epilog = (
        "It reads the settings from this shell's environment. Exit status: 1 if something prevents splitting."
    )


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


def describe_findings(findings: Sequence[Finding]) -> str:
    """Return one or more lines per finding, each with its remedy below, and a summary at the end."""
    width = max(len(finding.name) for finding in findings)
    lines = [line for finding in findings for line in _describe(finding, width)]
    return "\n".join([*lines, "", _sum_up(findings)])


def list_findings(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the findings as data, for programs."""
    return {
        "ok": is_ok(findings),
        "findings": [{**finding._asdict(), "details": dict(finding.details)} for finding in findings],
    }


def _describe(finding: Finding, width: int) -> list[str]:
    blank = " " * (width + 8)
    head = f"{LABELS[finding.state]:<4}  {finding.name:<{width}}  "
    lines = _wrap(finding.found, head, blank)
    if finding.remedy:
        lines += _wrap(finding.remedy, f"{blank}-> ", f"{blank}   ")
    column = max((len(name) for name, _ in finding.details), default=0)
    return [*lines, *(f"{blank}{name:<{column}}  {value}" for name, value in finding.details)]


def _wrap(text: str, first: str, later: str) -> list[str]:
    return textwrap.wrap(
        text, MAX_COLUMNS, initial_indent=first, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    )


def _sum_up(findings: Sequence[Finding]) -> str:
    failed = sum(finding.state == "fail" for finding in findings)
    warned = sum(finding.state == "warn" for finding in findings)
    what = "nothing prevents overlap here" if is_ok(findings) else f"{failed} to fix before steps are split"
    return f"{what}{f'; {warned} to look at' if warned else ''}"
