"""The output of `dbo plan --scale`: one row per case and number of chips, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dbo_runtime.lab.whatif.fleet import FleetRow
from dbo_runtime.lab.whatif.formatting import align
from dbo_runtime.lab.whatif.ranges import Range

HEAD = (
    "phase",
    "chip",
    "chips",
    "experts over",
    "tokens a rank",
    "tokens/s a chip",
    "in",
    "speed-up",
    "auto",
    "chips for 1M tokens/s",
    "saved",
)
NOTE = (
    "published costs (compute and communication off by 20 % against each other, contention 1 to 1.15, imbalance 1 to "
    "1.3);\nsaved: chips for a million tokens/s, if `auto` splits"
)


def describe_fleet(rows: Sequence[FleetRow]) -> str:
    """Return one table of rows per model."""
    models = dict.fromkeys(row.case.experts.name for row in rows)
    blocks = [
        f"{model}\n{align([HEAD, *(_list_row(row) for row in rows if row.case.experts.name == model)])}"
        for model in models
    ]
    return "\n\n".join([NOTE, *blocks])


def list_rows(rows: Iterable[FleetRow]) -> list[dict[str, Any]]:
    """Return the rows as data. A range is low, by the published costs, and high."""
    return [
        {
            "case": row.case.case,
            "model": row.case.experts.name,
            "chip": row.case.chip,
            "phase": row.case.phase,
            "chips": row.chips,
            "ranks": row.ranks,
            "tokens": row.step.tokens if row.step else None,
            "tokens_per_second_of_a_chip": list(row.throughput) if row.step else None,
            "micro_batches": row.micro_batches if row.step else None,
            "speed_up": list(row.speed_up) if row.step else None,
            "split": row.is_split,
            "chips_for_a_million": list(row.needed) if row.step else None,
            "chips_saved": list(row.saved) if row.step else None,
        }
        for row in rows
    ]


def _list_row(row: FleetRow) -> tuple[str, ...]:
    start = row.case.phase, row.case.chip, f"{row.chips}", f"{row.ranks}"
    if row.step is None:
        return *start, "no room", *("-",) * (len(HEAD) - len(start) - 1)
    return (
        *start,
        f"{row.step.tokens}",
        f"{row.throughput.point:,.0f}",
        f"{row.micro_batches}",
        row.speed_up.format(suffix="x"),
        "split" if row.is_split else "unsplit",
        row.needed.format(0),
        _describe_saved(row.saved) if row.is_split else "0",
    )


def _describe_saved(saved: Range) -> str:
    return saved.format(0)
