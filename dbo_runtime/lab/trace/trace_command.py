"""`dbo trace`: summarize a trace of one step, a profile of many, or a folder of either."""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dbo_runtime.errors import ConfigError
from dbo_runtime.lab.trace.figure import draw_figure
from dbo_runtime.lab.trace.recorded_file import read_recorded
from dbo_runtime.lab.trace.summary import Summary, summarize
from dbo_runtime.observe.timeline import Timeline
from dbo_runtime.setting_values import read_count

HEADS = ("ms", "hidden", "E_overlap", "LB/T")
Steps = dict[str, dict[str, Timeline]]
"""Timelines by step and rank."""
Figures = tuple[float | None, ...]
"""Milliseconds, share hidden, E_overlap, LB/T."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "path",
        help="a trace, a profile of torch.profiler (.json or .json.gz), or a folder of them, such as that of DBO_TRACE",
    )
    parser.add_argument("--step", metavar="NUMBER", help="show this step only")
    parser.add_argument(
        "--figure", metavar="FILE", help="draw the lanes of one step as PNG, one panel for each rank (needs matplotlib)"
    )
    parser.add_argument("--json", action="store_true", help="print all figures as JSON; times are in seconds")


def run(arguments: argparse.Namespace) -> int:
    """Print the figures of the steps."""
    path = Path(arguments.path)
    steps: Steps = {}
    notes: list[str] = []
    for file in _list_files(path):
        recorded = read_recorded(file)
        is_alone = file == path
        steps.update(
            {name if is_alone else f"{file.name} {name}".rstrip(): step for name, step in recorded.steps.items()}
        )
        notes += recorded.notes
    if not steps:
        raise ConfigError(f"{path} has no step that ran an op: profile while requests are served.")
    if arguments.step is not None:
        steps = _choose(steps, arguments.step, path)
    if arguments.figure:
        if len(steps) > 1:
            raise ConfigError(
                f"a figure shows one step, but {path} has {len(steps)}: name one of its files, or a profile's --step."
            )
        draw_figure(next(iter(steps.values())), arguments.figure, path.name)
    if arguments.json:
        print(json.dumps(_describe({name or path.name: step for name, step in steps.items()}), indent=2))
        return 0
    for note in notes:
        print(note)
    if len(steps) > 1 or os.path.isdir(path):
        print(_tabulate(steps))
    else:
        print("\n\n".join(_report(name, timeline) for name, timeline in next(iter(steps.values())).items()))
    return 0


def _list_files(path: Path) -> list[Path]:
    if not os.path.isdir(path):
        return [path]
    files = sorted((*path.glob("*.json"), *path.glob("*.json.gz")))
    if not files:
        raise ConfigError(
            f"folder {path} has no traces (*.json, *.json.gz). No step was split, or DBO_TRACE named another folder."
        )
    return files


def _choose(steps: Steps, number: str, path: Path) -> Steps:
    """Return the step with this number: of a profile by its place in it, of a trace by the name of its file."""
    numbers = {name: _read_number(name or path.name) for name in steps}
    asked = read_count(number.strip())
    chosen = {name: steps[name] for name, found in numbers.items() if found is not None and found == asked}
    if not chosen:
        known = sorted(found for found in numbers.values() if found is not None)
        there = f"there are {describe_ranges(known)}" if known else "no step here has a number"
        raise ConfigError(f"{path} has no step {number!r}; {there}. Without --step, all steps are listed.")
    return chosen


def describe_ranges(numbers: Sequence[int]) -> str:
    """Return sorted numbers as text, such as `1 to 3, 7`."""
    starts = [number for number in numbers if number - 1 not in numbers]
    ends = [number for number in numbers if number + 1 not in numbers]
    return ", ".join(
        f"{start} to {end}" if start < end else f"{start}" for start, end in zip(starts, ends, strict=True)
    )


def _read_number(name: str) -> int | None:
    """Return a step's number from a label such as `3: label` or a file such as `step-000003.json`; None without one."""
    found = re.search(r"(?:^|\s)(\d+):", name) or re.match(r"step-(\d+)\.", name)
    return read_count(found[1]) if found else None


def _report(name: str, timeline: Timeline) -> str:
    return f"{name}: {summarize(timeline)}\ndigits are micro-batches, dots idle\n{timeline.draw()}"


def _describe(traces: Steps) -> dict[str, Any]:
    return {
        file: {name: summarize(timeline).as_dict() for name, timeline in timelines.items()}
        for file, timelines in traces.items()
    }


def _tabulate(traces: Steps) -> str:
    """Return one row per rank and step, a row of medians, and planning times where known."""
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
    """Return a lane's largest loss, such as `comm: wait 3.10 ms`."""
    losses = [(seconds, lane, cause) for lane, causes in summary.lost.items() for cause, seconds in causes.items()]
    if not losses:
        return "nothing"
    seconds, lane, cause = max(losses)
    return f"{lane}: {cause} {seconds * 1e3:.2f} ms"


def _compute_median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
