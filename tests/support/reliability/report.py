"""The table of faults, as lines of markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.support.page import make_table
from tests.support.reliability.observation import Outcome

HEADER = ("fault, in a split step", "", "clients see", "processes", "left behind", "starts again", "the log says")


@dataclass
class Row:
    """What a fault did to one layout, with overlap and with vLLM alone."""

    fault: str
    layout: str
    outcomes: dict[str, Outcome] = field(default_factory=dict)


def make_lines(rows: Sequence[Row]) -> list[str]:
    """Return a table for each layout."""
    lines: list[str] = []
    for layout in dict.fromkeys(row.layout for row in rows):
        cells = [cell for row in rows if row.layout == layout for cell in _fill(row)]
        lines += [f"**{layout}**", "", *make_table(HEADER, cells), ""]
    return lines[:-1]


def _fill(row: Row) -> list[list[str]]:
    cells = []
    alone = "unsplit" if row.layout.startswith("DP") else "vLLM alone"
    for side, name in (("on", "split"), ("off", alone)):
        outcome = row.outcomes.get(side)
        if outcome is not None:
            title = row.fault if not cells else ""
            said = f"`{outcome.cause}`" if outcome.cause else "nothing"
            again = outcome.again or "-"
            cells.append(
                [title, name, outcome.clients or "nothing", outcome.end, outcome.left or "nothing", again, said]
            )
    return cells
