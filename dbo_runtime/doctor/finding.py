"""The result of one check."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

FindingState = Literal["ok", "info", "warn", "fail"]


class Finding(NamedTuple):
    """The result of one check.

    Attributes:
        name: what was checked.
        state: `fail` if no step would be split because of it; `warn` if it may not be intended; `info` if it neither
            helps nor prevents splitting.
        found: the facts.
        remedy: what to do; empty if there is nothing to do.
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
