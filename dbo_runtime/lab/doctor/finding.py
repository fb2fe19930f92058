"""The result of one check."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

FindingState = Literal["ok", "info", "warn", "fail"]


class Finding(NamedTuple):
    """The result of one check.

    Attributes:
        name: name of the check.
        state: `fail` if it prevents splitting every step; `warn` if it may not be intended; `info` if it has no effect
            on splitting.
        found: the facts.
        remedy: action to take; empty if there is none.
        details: further facts, by name.
    """

    name: str
    state: FindingState
    found: str
    remedy: str = ""
    details: tuple[tuple[str, str], ...] = ()


def is_ok(findings: Iterable[Finding]) -> bool:
    """Return whether no check failed."""
    return all(finding.state != "fail" for finding in findings)
