"""What steps take with planning and without, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter

import numpy as np

from tests.benchmarks.targets import Target
from tests.benchmarks.timed_steps import Turn, compare_quantiles, find_longer, gather_times
from tests.benchmarks.two_hosts_cells import NO_LIMIT
from tests.support.page import make_table

OFF, AGAIN, UNSPLIT, AUTO = "off", "off, again", "planned, not split", "auto"
MODES = {  # settings
    OFF: {"DBO_MODE": "off"},
    AGAIN: {"DBO_MODE": "off"},
    UNSPLIT: {"DBO_MODE": "auto", "DBO_MARGIN": "2", "DBO_PROBATION": "0"},
    AUTO: {"DBO_MODE": "auto"},
}
HIDDEN, LAYERS, HEADS = 64, 61, 2
MOST, ENOUGH = 1.02, 12  # times as long as `off`; rounds for a verdict
ELAPSED, CPU = "elapsed", "CPU"
KINDS = {ELAPSED: attrgetter("seconds"), CPU: attrgetter("cpu_seconds")}
PLANNING = attrgetter("planning"), attrgetter("cpu_planning")
QUANTILES = (0.5, 0.99)
COUNTS = ("mode", "steps", "planned", "split", "planning p50 / p99, us", "its CPU p50 / p99, us")
TIMES = ("time", "mode", "p50, ms", "p99, ms", "p50 / off", "p99 / off", "longer, ms")
REMARKS = """\
One server with `VLLM_ASCEND_ENABLE_DBO=1` and `DBO_CALIBRATE=1`, which is told over RPC before each turn what to do.
A round has a turn of each mode, in an order that changes; all of them answer the same requests, which are queued before
the first is scheduled, and those of another round are others, so that no mode is asked for a plan that it made in an
earlier round for the very batch. Each turn begins with no decision remembered, as settings have changed. *off, again*
is the mode *off* a second time: how far its ratios are from 1 is what noise does. *planned, not split* is `auto` with
`DBO_MARGIN=2`, by which no split pays, without probation, and without declining steps by their size before their
requests are considered: what planning costs at most, and what it brings left out. *planned* are the steps whose
requests were considered.

Times are of the first rank, from begin to end of `execute_model`; CPU times are those of its process, all threads
together, which other programs on the machine lengthen less. Ratios are those of quantiles over all rounds, with the
95 % interval of a bootstrap over rounds. *longer* is the median of the differences between steps of the same batch.
*planning* is what a step waited for its decision, as in `vllm:dbo_planning_seconds`; of a step that is split, that
includes cutting its attention metadata.""".splitlines()


def write_report(turns: Mapping[str, Sequence[Turn]], rounds: int) -> list[str]:
    """Return the section's lines of markdown, of the turns over each link."""
    lines = [
        f"`vllm serve` over two hosts, TP=2, DeepSeek-V3 with random weights (hidden {HIDDEN}, {LAYERS} layers), fp32; "
        f"a core for each host, the client's and the API server's work on the same ones; {rounds} rounds.",
    ]
    for link, of_link in turns.items():
        times = [make_times(of_link, mode, kind) for kind in KINDS for mode in MODES]
        lines += ["", f"**{'No limit' if link == NO_LIMIT else link}**", ""]
        lines += [*make_table(COUNTS, [make_counts(of_link, mode) for mode in MODES]), "", *make_table(TIMES, times)]
    return [*lines, "", *REMARKS, "", *write_targets(turns, rounds)]


def make_counts(turns: Sequence[Turn], mode: str) -> list[str]:
    """Return the cells of a mode's steps, and of what they waited for."""
    steps = [step for turn in turns if turn.mode == mode for step in turn.steps]
    counts = len(steps), sum(step.is_planned for step in steps), sum(step.is_split for step in steps)
    planning = [np.quantile([get(step) for step in steps], QUANTILES) * 1e6 for get in PLANNING]
    return [mode, *map(str, counts), *(" / ".join(f"{figure:.0f}" for figure in each) for each in planning)]


def make_times(turns: Sequence[Turn], mode: str, kind: str) -> list[str]:
    """Return the cells of a mode's times, of one kind, compared with those of `off`."""
    own, off = (gather_times(turns, each, KINDS[kind]) for each in (mode, OFF))
    figures = [f"{figure * 1e3:.1f}" for figure in np.quantile(np.concatenate(own), QUANTILES)]
    if mode == OFF:
        return [kind, mode, *figures, "", "", ""]
    ratios = [str(compare_quantiles(own, off, quantile)) for quantile in QUANTILES]
    longer = find_longer(turns, mode, OFF, KINDS[kind])
    return [kind, mode, *figures, *ratios, "" if longer is None else f"{longer * 1e3:+.2f}"]


def write_targets(turns: Mapping[str, Sequence[Turn]], rounds: int) -> list[str]:
    """Return the table of targets, or why there is none."""
    if rounds < ENOUGH:
        return [f"Targets are judged by {ENOUGH} rounds or more; these are {rounds}."]
    rows = [target.row() for target in find_targets(turns)]
    return ["Targets, of p99:", "", *make_table(("", "asked", "measured", ""), rows)]


def find_targets(turns: Mapping[str, Sequence[Turn]]) -> list[Target]:
    """Return what is asked for."""
    return [
        Target(f"{link}: {kind}, {mode} / off", MOST, find_ratio(of_link, mode, kind), at_least=False)
        for link, of_link in turns.items()
        for kind in KINDS
        for mode in (UNSPLIT, AUTO)
    ]


def find_ratio(turns: Sequence[Turn], mode: str, kind: str) -> float:
    """Return the ratio of a mode's p99 to that of `off`."""
    own, off = (gather_times(turns, each, KINDS[kind]) for each in (mode, OFF))
    return compare_quantiles(own, off, 0.99).value
