"""`dbo doctor`: report what prevents overlap here."""

from __future__ import annotations

import argparse
import json
import os

from dbo_runtime.doctor.examination import examine
from dbo_runtime.doctor.finding import is_ok
from dbo_runtime.doctor.report import describe_findings, list_findings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("model", nargs="?", metavar="MODEL_DIR", help="also check the model in this folder")
    parser.add_argument("--json", action="store_true", help="print the findings for programs")


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; return 1 if one of them keeps vLLM, started from this shell, from splitting steps."""
    findings = examine(os.environ, arguments.model)
    print(json.dumps(list_findings(findings), indent=2) if arguments.json else describe_findings(findings))
    return 0 if is_ok(findings) else 1
