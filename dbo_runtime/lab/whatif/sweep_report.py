"""The output of the plan command for a sweep: tables as text, and figures as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from dbo_runtime.lab.whatif.formatting import align, name_split, to_ms
from dbo_runtime.lab.whatif.sweep import BANDWIDTH, Cell
from dbo_runtime.lab.whatif.whatif import BreakEven
from dbo_runtime.planner.online.prediction import Prediction

DECLINED = "-"


def describe_sweep(cells: Sequence[Cell], margin: float, break_evens: Sequence[BreakEven] = ()) -> str:
    """Return a grid as tables: with all figures for one axis, with speed-up and number of micro-batches for more.

    *break_evens* are the sizes from which the runtime changes steps (ops on `side`, or a split), and splits them, if
    known.
    """
    axes = list(cells[0].values)
    if len(axes) == 1:
        head = axes[0], "unsplit ms", "best ms", "gain", "in", "auto"
        table = align([head, *(_list_row(cell, margin) for cell in cells)])
        return "\n\n".join([table, *([_describe_thresholds(cells, margin, *break_evens)] if break_evens else [])])
    pays = f"by {margin:.1%}, and if costs are off"
    note = f"speed-up/micro-batches of the best split; {DECLINED} where it does not pay ({pays})"
    if len(axes) == 2:
        return f"{note}\n\n{_tabulate(cells, margin)}"
    outer = axes[0]
    blocks = groupby(cells, key=lambda cell: cell.values[outer])
    tables = [f"{outer} {_name(outer, value)}\n{_tabulate(list(block), margin)}" for value, block in blocks]
    return "\n\n".join([note, *tables])


def list_cells(cells: Sequence[Cell], margin: float) -> list[dict[str, Any]]:
    """Return a grid as data. Times are in milliseconds, and None if the step cannot be cut."""
    return [
        {
            **cell.values,
            "unsplit_ms": cell.prediction and to_ms(cell.prediction.unsplit),
            "split_ms": cell.prediction and to_ms(cell.prediction.split),
            "micro_batches": cell.prediction and cell.prediction.micro_batches,
            "side_ops": list(cell.prediction.side_ops) if cell.prediction else None,
            "split": chosen is not None,
            "auto": {"micro_batches": chosen.micro_batches, "side_ops": list(chosen.side_ops)} if chosen else None,
        }
        for cell in cells
        for chosen in [cell.choose(margin)]
    ]


def _describe_thresholds(cells: Sequence[Cell], margin: float, changes: BreakEven, splits: BreakEven) -> str:
    """Return the sizes at which the runtime changes nothing, and at which it does not split."""
    ((noun, _),) = cells[0].values.items()
    chosen = [(int(cell.values[noun]), cell.choose(margin)) for cell in cells]

    def describe(break_even: BreakEven, parts: int) -> str:
        if break_even.tokens is None:
            return f"up to {break_even.searched_to} {noun}"
        seen = {
            size for size, option in chosen if size > break_even.tokens and (not option or option.micro_batches < parts)
        }
        below = [f"below {break_even.tokens} {noun}"] if break_even.tokens > 1 else []
        at = (
            [f"at {', '.join(map(str, sorted(seen.union(break_even.exceptions))))}"]
            if seen or break_even.exceptions
            else []
        )
        return " and ".join([*below, *at]) or "nowhere"

    return f"auto leaves steps unsplit: {describe(changes, 1)}\nauto does not split them: {describe(splits, 2)}"


def _list_row(cell: Cell, margin: float) -> tuple[str, ...]:
    ((axis, value),) = cell.values.items()
    fastest, chosen = cell.prediction, cell.choose(margin)
    if fastest is None:
        return _name(axis, value), *(DECLINED,) * 5
    figures = f"{fastest.unsplit * 1e3:.2f}", f"{fastest.split * 1e3:.2f}", f"{fastest.gain:.1%}"
    modes = (name_split(option.micro_batches, option.side_ops) if option else "unsplit" for option in (fastest, chosen))
    return _name(axis, value), *figures, *modes


def _tabulate(cells: Sequence[Cell], margin: float) -> str:
    """Return a table of the last two axes."""
    row_axis, column_axis = list(cells[0].values)[-2:]
    columns = dict.fromkeys(cell.values[column_axis] for cell in cells)
    rows = [(f"{row_axis} \\ {column_axis}", *(_name(column_axis, value) for value in columns))]
    for value, row in groupby(cells, key=lambda cell: cell.values[row_axis]):
        rows.append((_name(row_axis, value), *(_describe_cell(cell, margin) for cell in row)))
    return align(rows)


def _describe_cell(cell: Cell, margin: float) -> str:
    chosen = cell.choose(margin)
    return f"{_speed_up(chosen):.2f}/{chosen.micro_batches}" if chosen else DECLINED


def _speed_up(prediction: Prediction) -> float:
    return prediction.unsplit / prediction.split if prediction.split > 0 else 1.0


def _name(axis: str, value: float) -> str:
    return f"{value:g}x" if axis == BANDWIDTH else f"{value:.0f}"
