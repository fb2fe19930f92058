"""One thing that was looked at, and what came of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

State = Literal["ok", "info", "warn", "fail"]


class Finding(NamedTuple):
    """What was found.

    Attributes:
        name: what was looked at.
        state: `fail` if no step would be split because of it; `warn` if it may not be what the user wants; `info` if it
            does not matter here.
        found: what is there.
        remedy: what to do about it; empty if there is nothing to do.
        details: further facts, by name.
    """

    name: str
    state: State
    found: str
    remedy: str = ""
    details: tuple[tuple[str, str], ...] = ()


def is_well(findings: Iterable[Finding]) -> bool:
    """Return whether nothing has to be mended."""
    return all(finding.state != "fail" for finding in findings)
