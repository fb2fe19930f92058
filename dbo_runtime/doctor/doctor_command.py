"""`dbo doctor`: what is wrong here."""

from __future__ import annotations

import argparse
import json
import os

from dbo_runtime.doctor.examination import examine
from dbo_runtime.doctor.finding import is_well
from dbo_runtime.doctor.report import describe_findings, list_findings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("model", nargs="?", metavar="MODEL_DIR", help="look at the model in this folder, too")
    parser.add_argument("--json", action="store_true", help="print the findings for programs")


def run(arguments: argparse.Namespace) -> int:
    """Print what was found; return 1 if something keeps vLLM, started from here, from splitting steps."""
    findings = examine(os.environ, arguments.model)
    print(json.dumps(list_findings(findings), indent=2) if arguments.json else describe_findings(findings))
    return 0 if is_well(findings) else 1
