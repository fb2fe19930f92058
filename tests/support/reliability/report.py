"""The table of faults, as lines of markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.support.page import make_table
from tests.support.reliability.observation import Outcome

HEADER = ("fault, in a split step", "", "clients see", "processes", "left behind", "starts again")
LOG_HEADER = ("fault, in a split step", "", "the log says")


@dataclass
class Row:
    """What a fault did to one layout, with overlap and with vLLM alone."""

    fault: str
    layout: str
    outcomes: dict[str, Outcome] = field(default_factory=dict)


def make_lines(rows: Sequence[Row]) -> list[str]:
    """Return two tables for each layout: what became of the servers, and what their logs say, if anything."""
    lines: list[str] = []
    for layout in dict.fromkeys(row.layout for row in rows):
        of_layout = [row for row in rows if row.layout == layout]
        cells = [cell for row in of_layout for cell in _name(row, _describe_end)]
        said = [cell for row in of_layout for cell in _name(row, _quote)]
        lines += [f"**{layout}**", "", *make_table(HEADER, cells), ""]
        lines += [*make_table(LOG_HEADER, said), ""] if said else []
    return lines[:-1]


def _name(row: Row, describe: Callable[[Outcome], list[str]]) -> list[list[str]]:
    """Return what is to be said of both sides, without those of which it is nothing; the first names the fault."""
    alone = "unsplit" if row.layout.startswith("DP") else "vLLM alone"
    sides = [(name, describe(row.outcomes[side])) for side, name in (("on", "split"), ("off", alone))
             if side in row.outcomes]  # fmt: skip
    told = [(name, cells) for name, cells in sides if cells]
    return [["" if number else row.fault, name, *cells] for number, (name, cells) in enumerate(told)]


def _describe_end(outcome: Outcome) -> list[str]:
    return [outcome.clients or "nothing", outcome.end, outcome.left or "nothing", outcome.again or "-"]


def _quote(outcome: Outcome) -> list[str]:
    return [f"`{outcome.cause}`"] if outcome.cause else []
