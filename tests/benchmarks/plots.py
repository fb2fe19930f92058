"""Plots of docs/benchmarks.md, drawn from its tables:

    python -m tests.benchmarks.plots [SECTION ...]

draws them anew, all or those of some sections. A benchmark that writes a section draws its plots, too. Colours are of
middle lightness on nothing, so that a plot is readable on light pages and on dark ones; its words stay text.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from tests.support.page import PAGE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.container import BarContainer
    from matplotlib.figure import Figure

IMAGES = PAGE.parent / "images"
GREY, BLUE, ORANGE, GREEN, RED, VIOLET = "#808080", "#4a8fd0", "#d98324", "#3fa06a", "#cf5f5f", "#9a7fd0"
COLOURS = (BLUE, ORANGE, GREEN, VIOLET, RED)
STYLE = {
    "svg.fonttype": "none",  # words as text
    "svg.hashsalt": "dbo_runtime",  # the same names of parts in each run
    "font.family": "sans-serif",
    "font.sans-serif": ["system-ui", "DejaVu Sans", "sans-serif"],
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.35,
    "legend.frameon": False,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GREY),
    **dict.fromkeys(("axes.titlecolor", "grid.color"), GREY),
}
Row = Mapping[str, str]


class Plot(NamedTuple):
    """A plot of one section: its file in docs/images, and what draws it from the tables of the section."""

    file: str
    draw: Callable[[Figure, Sequence[Sequence[Row]]], None]


def main() -> int:
    """Draw the plots of the sections that are named, or of all."""
    for section in sys.argv[1:] or PLOTS:
        print(draw_section(section))
    return 0


def draw_section(section: str, page: Path = PAGE, folder: Path = IMAGES) -> Path | None:
    """Draw the plot of a section from its tables; return its file, or None if the section has no plot."""
    if section not in PLOTS:
        return None
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    plot = PLOTS[section]
    target = folder / plot.file
    with rc_context(STYLE):
        figure = Figure(figsize=(8, 3.4), layout="constrained")
        plot.draw(figure, read_tables(find_section(page.read_text(encoding="utf-8"), section)))
        figure.savefig(target, format="svg", transparent=True, metadata={"Date": None})
    target.write_text("\n".join(line.rstrip() for line in target.read_text().splitlines()) + "\n")
    return target


def find_section(text: str, name: str) -> str:
    """Return the text between a section's markers."""
    return text.partition(f"<!-- {name} -->\n")[2].partition(f"<!-- /{name} -->")[0]


def read_tables(text: str) -> list[list[Row]]:
    """Return the tables of a text: of each row the cells by column."""
    blocks = (block.splitlines() for block in re.split(r"\n(?!\|)", text))
    tables = ([line for line in block if line.startswith("|")] for block in blocks)
    return [_read_table(table) for table in tables if len(table) > 2]


def read_number(cell: str) -> float:
    """Return the number that a cell begins with; NaN if it has none."""
    found = re.match(r"-?[\d.]+(?:e[+-]?\d+)?", cell)
    return float(found[0]) if found else float("nan")


def _read_table(lines: Sequence[str]) -> list[Row]:
    head, _, *body = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in lines)
    return [dict(zip(head, cells, strict=True)) for cells in body]


def draw_links(figure: Figure, tables: Sequence[Sequence[Row]]) -> None:
    """Draw the gain over the rate of the link, a line for each workload."""
    axes = figure.subplots()
    links = list(dict.fromkeys(row["link"] for row in tables[0]))
    workloads = dict.fromkeys(row["workload"] for row in tables[0])
    for colour, workload in zip(COLOURS, workloads, strict=False):  # a run may leave out workloads
        gains = [read_number(row["over unsplit"]) for row in tables[0] if row["workload"] == workload]
        axes.plot(links, gains, marker="o", color=colour, label=workload)
    _finish(axes, "gain of overlap over unsplit steps, by link", "times faster")


def draw_lengths(figure: Figure, tables: Sequence[Sequence[Row]]) -> None:
    """Draw the gain over the length of a prompt."""
    axes = figure.subplots()
    tokens = [read_number(row["tokens"]) for row in tables[0]]
    always = [read_number(row["off"]) / read_number(row["always"]) for row in tables[0]]
    auto = [read_number(row["off/auto"]) for row in tables[0]]
    axes.plot(tokens, always, marker="o", color=ORANGE, label="always split")
    axes.plot(tokens, auto, marker="o", color=BLUE, label="auto, by measured costs")
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, [f"{count:.0f}" for count in tokens])
    axes.minorticks_off()
    axes.set_xlabel("tokens of the prompt")
    _finish(axes, "gain over unsplit steps, by length of the prompt", "times faster")


def draw_serving(figure: Figure, tables: Sequence[Sequence[Row]]) -> None:
    """Draw throughput and time to the first token by those of `off`, for each load."""
    panels = {"throughput / off": "throughput (more is better)", "TTFT / off": "mean TTFT (less is better)"}
    gains = [rows for rows in tables if panels.keys() <= rows[0].keys()]
    loads = [(name, row) for name, rows in zip(("long prompts", "long answers"), gains, strict=True) for row in rows]
    names = list(dict.fromkeys(f"{name},\n{_describe_rate(row)}" for name, row in loads))
    for axes, (column, title) in zip(figure.subplots(1, 2, sharey=True), panels.items(), strict=True):
        for shift, (mode, colour) in zip((-0.19, 0.19), {"on": BLUE, "always": ORANGE}.items(), strict=True):
            values = [read_number(row[column]) for _, row in loads if row["mode"] == mode]
            bars = axes.bar([place + shift for place in range(len(names))], values, 0.36, color=colour, label=mode)
            _label_bars(axes, bars, "{:.2f}")
        axes.set_xticks(range(len(names)), names, fontsize=8)
        _finish(axes, title, "by that of off", has_legend=column == "TTFT / off")


def draw_regret(figure: Figure, tables: Sequence[Sequence[Row]]) -> None:
    """Draw what each policy gains in the mean, next to hindsight, and loses at worst."""
    policies = {"hindsight": GREY, "`auto`": BLUE, "256/64": GREEN, "vLLM 512/32": VIOLET, "always": ORANGE}
    rows = tables[0]
    names = [row["truth"].replace("costs off by ", "").replace(", contention up to ", "\nslowed ") for row in rows]
    for place, (axes, title) in enumerate(zip(figure.subplots(1, 2), ("mean gain", "worst loss"), strict=True)):
        for number, (policy, colour) in enumerate(policies.items()):
            values = [read_number(row[policy].split(" / ")[place]) for row in rows]
            places = [row + (number - 2) * 0.17 for row in range(len(rows))]
            bars = axes.bar(places, values, 0.16, color=colour, label=policy.strip("`"))
            if policy == "`auto`":
                _label_bars(axes, bars, "{:.1f}")
        axes.set_xticks(range(len(names)), names, fontsize=8)
        if title == "worst loss":
            axes.set_yscale("log")
        _finish(axes, title, "% of unsplit time", start=0 if title == "mean gain" else 1, has_legend=place == 0)


def draw_host_cost(figure: Figure, tables: Sequence[Sequence[Row]]) -> None:
    """Draw what a mechanism costs the host at each overlap point."""
    rows = sorted(tables[0], key=lambda row: -read_number(row["us a point"]))
    axes = figure.subplots()
    names = [row["mechanism"].replace("`", "").replace("the generated function, ", "") for row in rows]
    colours = [BLUE if name.startswith("ours") else GREY for name in names]
    _label_bars(axes, axes.barh(names, [read_number(row["us a point"]) for row in rows], color=colours), "{:.2f}")
    axes.set_xscale("log")
    axes.tick_params(axis="y", labelsize=8)
    axes.set_title("us of the host at an overlap point; blue: this package", fontsize=11)
    axes.grid(axis="x")


def _describe_rate(row: Row) -> str:
    offered = row["requests/s offered"]
    return "all at once" if offered == "inf" else f"{offered} requests/s"


def _label_bars(axes: Axes, bars: BarContainer, form: str) -> None:
    axes.bar_label(bars, fmt=form, padding=2, fontsize=8)


def _finish(axes: Axes, title: str, unit: str, start: float = 1.0, has_legend: bool = True) -> None:
    axes.axhline(start, color=GREY, linewidth=1)
    axes.set_title(title, fontsize=11)
    axes.set_ylabel(unit)
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    if has_legend:
        axes.legend(fontsize=9)


PLOTS: Mapping[str, Plot] = MappingProxyType(
    {
        "two-hosts-tensor": Plot("gain-by-link.svg", draw_links),
        "prompt-lengths": Plot("gain-by-prompt.svg", draw_lengths),
        "serving": Plot("serving.svg", draw_serving),
        "never-lose": Plot("regret.svg", draw_regret),
        "host-cost": Plot("host-cost.svg", draw_host_cost),
    }
)


if __name__ == "__main__":
    sys.exit(main())
