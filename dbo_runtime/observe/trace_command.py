"""`dbo trace`: summarize the trace of one step, or a folder of traces."""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dbo_runtime.errors import ConfigError
from dbo_runtime.observe.figure import draw_figure
from dbo_runtime.observe.summary import Summary, summarize
from dbo_runtime.observe.timeline import Timeline
from dbo_runtime.observe.trace_file import read_trace

HEADS = ("ms", "hidden", "E_overlap", "LB/T")
Figures = tuple[float | None, ...]
"""Milliseconds, share hidden, E_overlap, LB/T."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("path", help="a trace, or a folder of traces as DBO_TRACE writes it")
    parser.add_argument("--figure", metavar="FILE", help="draw the lanes of one trace as PNG, a panel for each rank")
    parser.add_argument("--json", action="store_true", help="print all figures for programs, in seconds")


def run(arguments: argparse.Namespace) -> int:
    """Print the figures of the traces."""
    path = Path(arguments.path)
    traces = {file.name: read_trace(file) for file in _list_files(path)}
    if arguments.figure:
        if len(traces) > 1:
            raise ConfigError(f"a figure shows one trace, but {path} has {len(traces)}: name one of its files.")
        draw_figure(next(iter(traces.values())), arguments.figure, path.name)
    if arguments.json:
        print(json.dumps(_describe(traces), indent=2))
    elif os.path.isdir(path):
        print(_tabulate(traces))
    else:
        print("\n\n".join(_report(name, timeline) for name, timeline in traces[path.name].items()))
    return 0


def _list_files(path: Path) -> list[Path]:
    if not os.path.isdir(path):
        return [path]
    files = sorted(path.glob("*.json"))
    if not files:
        raise ConfigError(
            f"folder {path} has no traces (*.json). No step was split, or DBO_TRACE named another folder."
        )
    return files


def _report(name: str, timeline: Timeline) -> str:
    return f"{name}: {summarize(timeline)}\ndigits are micro-batches, dots idle\n{timeline.draw()}"


def _describe(traces: dict[str, dict[str, Timeline]]) -> dict[str, Any]:
    return {
        file: {name: summarize(timeline).as_dict() for name, timeline in timelines.items()}
        for file, timelines in traces.items()
    }


def _tabulate(traces: dict[str, dict[str, Timeline]]) -> str:
    """Return a row for each rank of each step, one of medians, and what planning took, where that is known."""
    steps = [(file, name, summarize(line)) for file, lines in traces.items() for name, line in lines.items()]
    widths = max(len(file) for file, _, _ in steps), max(len("median"), *(len(name) for _, name, _ in steps))
    rows = [_align(widths, "step", "rank", HEADS, "most time lost to")]
    rows += [
        _align(widths, file, name, _cells(_figures(summary)), _get_largest_loss(summary))
        for file, name, summary in steps
    ]
    medians = map(_compute_median, zip(*(_figures(summary) for _, _, summary in steps), strict=True))
    rows.append(_align(widths, "", "median", _cells(tuple(medians))))
    planning = [summary.planning * 1e3 for _, _, summary in steps if summary.planning is not None]
    if planning:
        rows.append(f"planning before a step: median {statistics.median(planning):.3f}, maximum {max(planning):.3f} ms")
    return "\n".join(rows)


def _figures(summary: Summary) -> Figures:
    return summary.duration * 1e3, summary.hidden, summary.overlap, summary.efficiency


def _cells(figures: Figures) -> tuple[str, ...]:
    forms = ("{:.2f}", "{:.1%}", "{:.1%}", "{:.3f}")
    return tuple("-" if value is None else form.format(value) for form, value in zip(forms, figures, strict=True))


def _align(widths: tuple[int, int], file: str, rank: str, cells: Sequence[str], rest: str = "") -> str:
    figures = "".join(f"{cell:>11}" for cell in cells)
    return f"{file:<{widths[0]}}  {rank:<{widths[1]}}{figures}  {rest}".rstrip()


def _get_largest_loss(summary: Summary) -> str:
    """Return the largest loss of a lane, such as `comm: wait 3.10 ms`."""
    losses = [(seconds, lane, cause) for lane, causes in summary.lost.items() for cause, seconds in causes.items()]
    if not losses:
        return "nothing"
    seconds, lane, cause = max(losses)
    return f"{lane}: {cause} {seconds * 1e3:.2f} ms"


def _compute_median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
