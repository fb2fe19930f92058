"""What was measured of servers, as tables."""

from __future__ import annotations

from collections.abc import Sequence

from tests.benchmarks.measured_hosts import describe_model
from tests.benchmarks.served_workloads import LONG_PROMPTS, METRICS, OfferedLoad, Run, Traffic, find_median
from tests.benchmarks.targets import Target
from tests.support.page import make_table

OFF, ON, ALWAYS, WITHOUT = "off", "on", "always", "without"
HEADER = (
    "requests/s offered",
    "mode",
    "requests/s",
    "throughput / off",
    "TTFT mean, ms",
    "TTFT / off",
    "TPOT mean, ms",
)
EVIDENCE = ("requests/s offered", "mode", "TTFT p99, ms", "steps split")
SPLIT = ("split", "nano")  # counts of steps in micro-batches, and in nano-batches
MODES = {  # of a server with the plugin: settings
    OFF: {"DBO_MODE": "off"},
    ON: {"DBO_MODE": "auto"},
    ALWAYS: {"DBO_MODE": "always", "DBO_POLICY": "alternate", "DBO_MICRO_BATCHES": "2"},
}
TARGET_RATE, ENOUGH = "200mbit", 3  # of the link; runs for a verdict
TARGET_LOAD = OfferedLoad(LONG_PROMPTS, "inf")
THROUGHPUT, FIRST_TOKEN = "request_throughput", "mean_ttft_ms"
REMARKS = """\
One server with `VLLM_ASCEND_ENABLE_DBO=1` and `DBO_CALIBRATE=1`, which is told over RPC before each run what to do,
modes in turn: *off* is `DBO_MODE=off`, *on* the default (`auto`, by the costs that it measured at its start), *always*
splits each step in two that can be, by turns. *without* is another server, started without the variable and measured
before; how far it is from *off* is what the hooks cost and how much the machine changed in between. *steps split* is of
the last run, the client's own warm-up included. The ratios compare with *off*: more is better for throughput, less for
TTFT.""".splitlines()


def write_report(runs: Sequence[Run], link: str, repeat: int) -> list[str]:
    """Return the section's lines of markdown."""
    lines = [
        f"`vllm serve` over two hosts at {link}, TP=2, {describe_model()}; `vllm bench serve` on the first host; a "
        "core for each host, the client's and the API server's work on the same ones; "
        f"medians of {repeat} runs of each mode.",
    ]
    for traffic in dict.fromkeys(run.load.traffic for run in runs):
        of_traffic = [run for run in runs if run.load.traffic == traffic]
        lines += ["", *describe_traffic(traffic), "", *make_rows(of_traffic), "", *make_evidence(of_traffic)]
    return [*lines, "", *REMARKS, "", *write_targets(runs, link, repeat)]


def describe_traffic(traffic: Traffic) -> list[str]:
    """Say what is sent."""
    return [
        f"**{traffic.name}**, scaled down from {traffic.after}: {traffic.requests} requests of {traffic.prompt} tokens "
        f"in and {traffic.answer} out.",
    ]


def make_rows(runs: Sequence[Run]) -> list[str]:
    """Return the table of a traffic: what was gained."""
    rows = []
    for load, mode in list_ways(runs):
        throughput, first_token, later = (
            describe_median(runs, load, mode, name) for name in ("requests/s", "TTFT mean, ms", "TPOT mean, ms")
        )
        ratios = [compare(runs, load, mode, metric) for metric in (THROUGHPUT, FIRST_TOKEN)]
        faster, sooner = ("" if ratio is None else f"{ratio:.2f}x" for ratio in ratios)
        rows.append([load.rate, mode, throughput, faster, first_token, sooner, later])
    return make_table(HEADER, rows)


def make_evidence(runs: Sequence[Run]) -> list[str]:
    """Return the table of what else was seen of a traffic."""
    rows = [
        [load.rate, mode, describe_median(runs, load, mode, "TTFT p99"), describe_steps(runs, load, mode)]
        for load, mode in list_ways(runs)
    ]
    return make_table(EVIDENCE, rows)


def list_ways(runs: Sequence[Run]) -> list[tuple[OfferedLoad, str]]:
    """Return the loads and the modes that met them, in the order of the rows."""
    return [
        (load, mode)
        for load in dict.fromkeys(run.load for run in runs)
        for mode in sorted({run.mode for run in runs if run.load == load}, key=[WITHOUT, *MODES].index)
    ]


def describe_median(runs: Sequence[Run], load: OfferedLoad, mode: str, name: str) -> str:
    """Return a metric's median over runs, or nothing if it was not measured."""
    figure = find_median(runs, load, mode, METRICS[name])
    return "" if figure is None else f"{figure:.4g}"


def describe_steps(runs: Sequence[Run], load: OfferedLoad, mode: str) -> str:
    """Return how many of how many steps were split in the last run of a mode."""
    run = [run for run in runs if (run.load, run.mode) == (load, mode)][-1]
    return "" if run.split is None or run.unsplit is None else f"{run.split} of {run.split + run.unsplit}"


def compare(runs: Sequence[Run], load: OfferedLoad, mode: str, metric: str) -> float | None:
    """Return the ratio of a mode's median to that of `off`; None if one of them was not measured."""
    own, off = (find_median(runs, load, each, metric) for each in (mode, OFF))
    return own / off if own is not None and off else None


def write_targets(runs: Sequence[Run], link: str, repeat: int) -> list[str]:
    """Return the table of targets, or why there is none."""
    if link != TARGET_RATE or not any(run.load == TARGET_LOAD for run in runs):
        return [f"Targets are set for {LONG_PROMPTS.name} at {TARGET_RATE}, all at once; this was not measured."]
    if repeat < ENOUGH:
        return [f"Targets are judged by medians of {ENOUGH} runs or more; these are of {repeat}."]
    rows = [target.row() for target in find_targets(runs)]
    return [
        f"Targets, for {LONG_PROMPTS.name} at {link}, all at once, *on* compared with *off*:",
        "",
        *make_table(("", "asked", "measured", ""), rows),
    ]


def find_targets(runs: Sequence[Run]) -> list[Target]:
    """Return what is asked for."""
    return [
        Target("throughput", 1.15, compare(runs, TARGET_LOAD, ON, THROUGHPUT)),
        Target("mean TTFT", 0.88, compare(runs, TARGET_LOAD, ON, FIRST_TOKEN), at_least=False),
    ]
