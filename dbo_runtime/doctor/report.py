"""Findings as text and as data."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from dbo_runtime.doctor.finding import Finding, is_ok

MAX_COLUMNS = 120
LABELS = {"ok": "ok", "info": "-", "warn": "WARN", "fail": "FAIL"}


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
