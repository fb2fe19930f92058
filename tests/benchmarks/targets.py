"""Ratios that are asked for, and how far what was measured is from them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Target(NamedTuple):
    """A ratio that is asked for.

    Attributes:
        at_least: whether more is better; otherwise it is the most that is allowed.
    """

    what: str
    asked: float
    measured: float | None
    at_least: bool = True

    @property
    def reached(self) -> bool:
        """Whether it is; what could not be measured is not."""
        if self.measured is None:
            return False
        return self.measured >= self.asked if self.at_least else self.measured <= self.asked

    @property
    def verdict(self) -> str:
        """`reached`, or by how much it is missed."""
        if self.measured is None:
            return "not measured"
        if self.reached:
            return "reached"
        return f"missed by {abs(self.measured / self.asked - 1):.1%}"

    def row(self) -> list[str]:
        """Return the cells of a table: what, asked, measured, verdict."""
        sign = "≥" if self.at_least else "≤"
        measured = "" if self.measured is None else f"{self.measured:.3f}"
        return [self.what, f"{sign} {self.asked:.2f}", measured, self.verdict]


def find_missed(targets: Iterable[Target]) -> list[str]:
    """Return a line for each that is not reached."""
    return [" | ".join(target.row()) for target in targets if not target.reached]
