"""Draw timelines as a picture with matplotlib, which the extra `figure` installs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dbo_runtime.errors import ConfigError
from dbo_runtime.ir.op import COMPUTE
from dbo_runtime.observe.timeline import Timeline

# Okabe and Ito's colours, which colour-blind readers can distinguish. A ninth micro-batch gets the first colour again.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999")
DPI = 150
WIDTH_INCHES = 16.0
LANE_INCHES, FRAME_INCHES, MARGIN_INCHES = 0.45, 0.55, 0.9  # heights: a lane; the rest of a panel; title and legend
MAX_INCHES = 400.0  # largest height: matplotlib draws up to 2^16 pixels
FORMATS = ("svg", "pdf")  # besides PNG
MAX_OUTLINED_SPANS = 200  # spans in a panel; with more, outlines would cover the bars


def draw_figure(timelines: Mapping[str, Timeline], path: str | Path, title: str) -> None:
    """Write a picture to *path*: one panel per timeline, lanes as rows, `compute` first, one colour per micro-batch.

    It is SVG or PDF if the path ends so, and PNG otherwise.

    The panels, such as `unsplit` and `split`, share the time axis, in milliseconds since each panel's first start.

    Raises:
        ConfigError: matplotlib is missing, *timelines* is empty or too many, or the file cannot be written.
    """
    if not timelines:
        raise ConfigError("timelines is empty, so there is nothing to draw: name at least one timeline.")
    try:
        canvas = _compose(timelines, title)
    except ImportError as error:
        raise ConfigError(f"a figure needs matplotlib ({error}): pip install 'dbo-runtime[figure]'") from error
    suffix = Path(path).suffix[1:].lower()
    try:
        canvas.print_figure(str(path), format=suffix if suffix in FORMATS else "png")
    except (OSError, ValueError) as error:  # a ValueError if the path has a NUL byte
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"the figure cannot be written to path {str(path)!r} ({why}): name a file in a folder that "
            "exists and that you may write to."
        ) from error


def _compose(timelines: Mapping[str, Timeline], title: str) -> Any:
    """Return the canvas of a finished figure. Avoids pyplot, which keeps state for the whole process."""
    from matplotlib import figure as figures
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    heights = [FRAME_INCHES + LANE_INCHES * len(timeline.lanes) for timeline in timelines.values()]
    if sum(heights) > MAX_INCHES:
        raise ConfigError(f"{len(heights)} timelines are too many for one figure: name a trace of fewer ranks.")
    figure = figures.Figure(figsize=(WIDTH_INCHES, MARGIN_INCHES + sum(heights)), dpi=DPI, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    figure.suptitle(title, parse_math=False)
    panels = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (name, timeline) in zip(panels, timelines.items(), strict=True):
        _draw_panel(axes, name, timeline)
    panels[-1].set_xlabel("ms")
    panels[-1].set_xlim(0, max(timeline.duration for timeline in timelines.values()) * 1e3 or 1)
    _draw_legend(figure, timelines)
    return canvas


def _draw_panel(axes: Any, name: str, timeline: Timeline) -> None:
    lanes = sorted(timeline.lanes, key=lambda lane: lane != COMPUTE)
    origin = min((span.start for span in timeline.spans), default=0.0)
    bars: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for span in timeline.spans:
        bar = (span.start - origin) * 1e3, (span.end - span.start) * 1e3
        bars.setdefault((span.lane, span.micro_batch), []).append(bar)
    # With many bars, neither snap them to pixels nor outline them, so that each is as wide as its op is long.
    few = len(timeline.spans) <= MAX_OUTLINED_SPANS
    outline = {"edgecolor": "black", "linewidth": 0.4} if few else {"snap": False, "linewidth": 0}
    for (lane, micro_batch), intervals in bars.items():
        axes.broken_barh(intervals, (lanes.index(lane) - 0.4, 0.8), facecolor=_pick_colour(micro_batch), **outline)
    axes.set_title(f"{name}: {timeline.duration * 1e3:.4g} ms", loc="left", fontsize="medium", parse_math=False)
    axes.set_yticks(range(len(lanes)), lanes, parse_math=False)
    axes.set_ylim(max(1, len(lanes)) - 0.5, -0.5)  # puts the first lane on top
    axes.spines[["top", "right"]].set_visible(False)


def _draw_legend(figure: Any, timelines: Mapping[str, Timeline]) -> None:
    from matplotlib.patches import Patch

    present = sorted({span.micro_batch for timeline in timelines.values() for span in timeline.spans})
    entries = [Patch(facecolor=_pick_colour(number), label=f"micro-batch {number}") for number in present]
    figure.legend(handles=entries, loc="outside lower right", ncols=len(entries), frameon=False)


def _pick_colour(micro_batch: int) -> str:
    return COLOURS[micro_batch % len(COLOURS)]
