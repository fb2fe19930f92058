"""Format figures as text: tables, milliseconds, and names of splits."""

from __future__ import annotations

from collections.abc import Sequence

MOST_NAMED = 2  # ops on `side` listed by name
DECIMALS = 6  # decimals of milliseconds in JSON


def align(rows: Sequence[Sequence[str]]) -> str:
    """Return rows with columns of equal width, aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def to_ms(seconds: float) -> float:
    """Return milliseconds, rounded for a program that reads them."""
    return round(seconds * 1e3, DECIMALS)


def name_split(micro_batches: int, side_ops: Sequence[str]) -> str:
    """Return the number of micro-batches with the ops on `side`, such as `1, keys concurrent`; many ops are counted."""
    if not side_ops:
        return f"{micro_batches}"
    named = " and ".join(side_ops) if len(side_ops) <= MOST_NAMED else f"{len(side_ops)} ops"
    return f"{micro_batches}, {named} concurrent"
