"""Findings as text, and as data."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from dbo_runtime.doctor.finding import Finding, is_well

WIDTH = 120
SIGNS = {"ok": "ok", "info": "-", "warn": "WARN", "fail": "FAIL"}


def describe_findings(findings: Sequence[Finding]) -> str:
    """Return a line or more for each finding, what to do about it below, and the sum at the end."""
    width = max(len(finding.name) for finding in findings)
    lines = [line for finding in findings for line in _describe(finding, width)]
    return "\n".join([*lines, "", _sum_up(findings)])


def list_findings(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the findings for a program."""
    return {
        "ok": is_well(findings),
        "findings": [{**finding._asdict(), "details": dict(finding.details)} for finding in findings],
    }


def _describe(finding: Finding, width: int) -> list[str]:
    blank = " " * (width + 8)
    head = f"{SIGNS[finding.state]:<4}  {finding.name:<{width}}  "
    lines = _wrap(finding.found, head, blank)
    if finding.remedy:
        lines += _wrap(finding.remedy, f"{blank}-> ", f"{blank}   ")
    column = max((len(name) for name, _ in finding.details), default=0)
    return [*lines, *(f"{blank}{name:<{column}}  {value}" for name, value in finding.details)]


def _wrap(text: str, first: str, later: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    )


def _sum_up(findings: Sequence[Finding]) -> str:
    failed = sum(finding.state == "fail" for finding in findings)
    warned = sum(finding.state == "warn" for finding in findings)
    what = "nothing is in the way of overlap here" if is_well(findings) else f"{failed} to mend before steps are split"
    return f"{what}{f'; {warned} to look at' if warned else ''}"
